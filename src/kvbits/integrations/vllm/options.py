"""Options of `--additional-config '{"kvbits": {..}}'`: `Options`.

They travel in vLLM's own configuration, so every process has them.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from ... import schemes
from ...errors import UnsupportedError
from ..engine import options as engine
from ..engine.served import COPIED
from .formats import AUTO, FORMATS, NAMES, SCHEME


@dataclass(frozen=True, kw_only=True)
class Options(engine.Options):
    """Options that vLLM takes besides.

    Attributes:
        scheme: file that `--kv-cache-dtype kvbits_scheme` takes each layer's format from.
        observe: sum up queries and keys for a calibration (`observe`).
        dtype: the format where `--kv-cache-dtype` has a closed list (`dtypes`).
    """

    scheme: str = engine.option("", "the name of a scheme file")
    observe: bool = engine.option(False, "true or false")
    dtype: str = engine.option("", "the name of a kvbits dtype")


KEY = "kvbits"
"""Key of `--additional-config` under which these options stand."""


def misspelt(given: Any, asked: bool) -> str | None:
    """Return which key of `--additional-config` is likely meant for kvbits and is not read, or None.

    Other keys are vLLM's own and those of other plugins.

    Args:
        asked: whether the engine has one of our dtypes, or can only be given one here; then our options are nobody
            else's.
    """
    few = {"raw_newest", "raw_first", "packed_copies", "copies_share"}
    own = {f.name for f in dataclasses.fields(Options)} if asked else few
    for key in given if isinstance(given, dict) else ():
        letters = "".join(c for c in str(key).lower() if c.isalpha())
        if key != KEY and (letters.startswith(KEY) or difflib.get_close_matches(letters, [KEY], cutoff=0.8)):
            return f"additional_config has {key!r}, which nobody reads; did you mean {KEY!r}?"
        if key in own:
            return f'additional_config has {key!r}, an option of kvbits; pass {{"{KEY}": {{"{key}": ..}}}}'
    return None


def options_of(vllm_config: Any) -> Options:
    """Return the options of an engine.

    Raises:
        UnsupportedError: unknown or invalid options.
    """
    given = vllm_config.additional_config
    given = given.get(KEY, {}) if isinstance(given, dict) else {}
    dtype = vllm_config.cache_config.cache_dtype
    drafts = getattr(vllm_config.speculative_config, "kv_cache_dtype", None)
    copied = _copied(dtype, given.get("scheme") if isinstance(given, dict) else None)
    # Drafts have the target's options, and for a moment its configuration under their own dtype.
    target = getattr(vllm_config.model_config, "runner_type", None) != "draft"
    plain = target and dtype in NAMES and dtype != drafts and not copied and not _copied(drafts, None)
    found = Options.checked(given, 'additional_config["kvbits"]', copied, dtype if plain else "")
    if target and not drafts and found.scheme and dtype in FORMATS:
        raise UnsupportedError(
            f'additional_config["kvbits"] has scheme, which {dtype} never reads; leave it away, or pass'
            f" --kv-cache-dtype {SCHEME}"
        )
    return found


def _copied(dtype: Any, path: Any) -> int:
    """Return the newest tokens that are raw in some layers of a dtype unless users say otherwise."""
    if dtype == SCHEME:
        scheme = schemes.read(path) if isinstance(path, str) and path else None
        return COPIED if scheme is not None and (scheme.needs_calibration or scheme.copies) else 0
    return COPIED if dtype == AUTO else FORMATS[dtype].raw_newest if dtype in FORMATS else 0
