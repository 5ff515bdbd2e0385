"""Static scales, codebooks and bases: measured once over a few short prompts, saved, and refused for any other model or
scheme.

calibration.py   Calibration: scales per layer, fingerprint, safetensors file
ranges.py        Ranges: exact percentiles of a stream in bounded memory
collect.py       calibrate(), calibrate_all(): run a model over prompts, keep what the schemes need
sampling.py      Sample: how many windows of a text, how long, and how they are drawn
observe.py       ObservingCache: every key and value where the cache is written
kept.py          the calibration of a model in the user's cache folder, made there once
target.py        what is calibrated, and keys and values as its pages hold them
moments.py       second moments of queries and keys, and the basis that follows from them

settings.py      what may be chosen

Names load when first used, so that settings can be read without torch, and a saved calibration without transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibration import Calibration, fingerprint
    from .collect import calibrate, calibrate_all, prompts_from_text
    from .observe import ObservingCache
    from .ranges import Ranges

__all__ = ["Calibration", "ObservingCache", "Ranges", "calibrate", "calibrate_all", "fingerprint", "prompts_from_text"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    home = {"ObservingCache": "observe", "Ranges": "ranges", "Calibration": "calibration", "fingerprint": "calibration"}
    return getattr(importlib.import_module(f".{home.get(name, 'collect')}", __name__), name)
