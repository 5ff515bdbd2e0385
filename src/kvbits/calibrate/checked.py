"""Results that `kvbits check` found for a model. They are kept by the model's files (`kept.key_of`), the preset and
what it stores, so that a preset that changed counts as not measured. An engine reports the result when it starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass

from .. import schemes
from ..errors import KvbitsError, SpecError
from ..files import cache_folder, cache_folders, to_json, warn_not_kept, whole
from ..model_ref import ModelRef
from ..spec import FORMATS_VERSION, to_dict
from .kept import key_of

FOLDER = "checks"
UNKNOWN = "its accuracy on this model was not measured"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """
    Attributes:
        passed: whether every layer and the whole cache did, by the limits that are usual.
        kl: mean KL divergence from 16 bits, nats.
        tokens: that it is a mean of.
        day: of the measurement, as 2026-11-27.
        command: repeats it.
    """

    passed: bool
    kl: float
    tokens: int
    day: str
    command: str


def keep(model: ModelRef, preset: str, found: Checked) -> None:
    """Keep it in the place of what was found before; nothing where the model is in no files.

    Warns:
        KvbitsWarning: no disk takes it.
    """
    if (key := key_of(model)) is None:
        return
    try:
        with whole(cache_folder(FOLDER) / _name(key, preset)) as path:
            path.write_text(to_json(dataclasses.asdict(found)))
    except (OSError, SpecError) as error:
        warn_not_kept("results of `kvbits check`", error)


def find(model: ModelRef, preset: str) -> Checked | None:
    """Return the result that is kept, or None if there is none or files cannot be read."""
    if preset not in schemes.PRESETS:
        return None
    try:
        key = key_of(model)
    except (OSError, KvbitsError):
        return None
    if key is None:
        return None
    for folder in cache_folders(FOLDER):
        try:
            return _parsed((folder / _name(key, preset)).read_text())
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def _parsed(text: str) -> Checked:
    """Return what a file says; its KL is null where predictions were not numbers (`to_json`)."""
    data = json.loads(text)
    kl = math.nan if data["kl"] is None else float(data["kl"])
    return Checked(
        passed=bool(data["passed"]),
        kl=kl,
        tokens=int(data["tokens"]),
        day=str(data["day"]),
        command=str(data["command"]),
    )


def _name(key: str, preset: str) -> str:
    """Name the file of a result: the model, the preset, and 8 hex digits of what pages of the preset hold."""
    stored = dataclasses.replace(schemes.PRESETS[preset], source="", description="")
    text = json.dumps([FORMATS_VERSION, to_dict(stored)], sort_keys=True)
    return f"{key}-{preset}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def said(model: ModelRef, preset: str) -> str:
    """Return one clause on a preset's accuracy on this model: what was measured and when, or that nothing was, and the
    command.
    """
    found = find(model, preset)
    if found is None:
        return f"{UNKNOWN}: kvbits check {model} --scheme {preset}"
    verdict = "" if found.passed else ", which fails"
    return f"KL {found.kl:.5f} nats{verdict} ({found.tokens:,} tokens, {found.day}): {found.command}"
