"""Static scales: measured once over a few short prompts, saved, and refused for any other model or scheme.

calibration.py   Calibration: scales per layer, fingerprint, safetensors file
ranges.py        Ranges: exact percentiles of a stream in bounded memory
collect.py       calibrate(), calibrate_all(): run a model and see every key and value where the cache is written

Only collect.py needs transformers; its names load when first used, so that a saved calibration can be read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .calibration import Calibration, fingerprint
from .ranges import Ranges

if TYPE_CHECKING:
    from .collect import ObservingCache, calibrate, calibrate_all, prompts_from_text

__all__ = ["Calibration", "ObservingCache", "Ranges", "calibrate", "calibrate_all", "fingerprint", "prompts_from_text"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from . import collect

    return getattr(collect, name)
