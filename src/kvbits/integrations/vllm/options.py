"""What `--additional-config '{"kvbits": {..}}'` says: `Options`. It travels in vLLM's own configuration, so every process has it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ... import schemes
from ...errors import UnsupportedError
from ..engine.served import COPIED
from .formats import FORMATS, PAGE_SIZE, SCHEME

MOST_RAW = 1024


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        raw_newest: tokens at the end of each request that are read raw when it decodes, at least: up to a page more, whole pages. 0: none.
        raw_first: whether each request's first page (64 tokens) is read raw too: 0 or 64.
        scheme: file that `--kv-cache-dtype kvbits_scheme` takes each layer's format from.
        calibration: file of `kvbits calibrate` for layers whose keys are stored in a calibrated basis; the model's own is found, or made once, without it.
        calibrate: whether one may be made where none is kept.
        dtype: the format where `--kv-cache-dtype` has a closed list (`dtypes`).
        observe: sum up queries and keys for a calibration (`observe`).
    """

    raw_newest: int = 0
    raw_first: int = 0
    scheme: str = ""
    calibration: str = ""
    calibrate: bool = True
    observe: bool = False
    dtype: str = ""

    @property
    def newest_pages(self) -> int:
        return self.raw_newest // PAGE_SIZE + 1 if self.raw_newest else 0

    @property
    def copies(self) -> bool:
        """Whether pages are also kept raw."""
        return bool(self.raw_newest)


def options_of(vllm_config: Any) -> Options:
    """The options of an engine. Where layers are calibrated and nothing is said of raw copies, they have `COPIED` newest and first tokens.

    Raises:
        UnsupportedError: options that there are not or that cannot be.
    """
    given = vllm_config.additional_config
    given = given.get("kvbits", {}) if isinstance(given, dict) else {}
    names = [f.name for f in dataclasses.fields(Options)]
    if not isinstance(given, dict) or set(given) - set(names):
        raise UnsupportedError(f'additional_config["kvbits"] is {given!r}; it takes a dict of {", ".join(names)}')
    found = Options(**_with_defaults(given, vllm_config))
    if not _is_whole(found.raw_newest) or found.raw_newest % PAGE_SIZE or not 0 <= found.raw_newest <= MOST_RAW:
        raise UnsupportedError(f"raw_newest={found.raw_newest!r} must be a multiple of {PAGE_SIZE} tokens, 0 to {MOST_RAW}")
    if not _is_whole(found.raw_first) or found.raw_first not in (0, PAGE_SIZE):
        raise UnsupportedError(f"raw_first={found.raw_first!r} must be 0 or {PAGE_SIZE} tokens, a page")
    for name, what in (("scheme", "a scheme file"), ("calibration", "a file of `kvbits calibrate`"), ("dtype", "a kvbits dtype")):
        if not isinstance(getattr(found, name), str):
            raise UnsupportedError(f"{name}={getattr(found, name)!r} must be the name of {what}")
    for name in ("calibrate", "observe"):
        if not isinstance(getattr(found, name), bool):
            raise UnsupportedError(f"{name}={getattr(found, name)!r} must be true or false")
    if found.raw_first and not found.raw_newest:
        raise UnsupportedError(f"raw_first without raw_newest; pass raw_newest={PAGE_SIZE} too")
    return found


def _with_defaults(given: dict[str, Any], vllm_config: Any) -> dict[str, Any]:
    if not _calibrated(vllm_config.cache_config.cache_dtype, given.get("scheme")) or given.get("raw_newest") == 0:
        return given
    return {"raw_newest": COPIED, "raw_first": COPIED} | given


def _calibrated(dtype: str, path: Any) -> bool:
    """Whether a dtype has calibrated layers."""
    if dtype == SCHEME:
        return isinstance(path, str) and bool(path) and schemes.read(path).needs_calibration
    return dtype in FORMATS and FORMATS[dtype].calibrated


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
