"""By which name a model takes its cache: `cache` in models of Transformers 5.24 or newer, `past_key_values` in older ones and in those of others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("cache", "past_key_values")


def name_for(model: Any) -> str:
    """What the forward pass of a model calls it."""
    return NAMES[0] if NAMES[0] in inspect.signature(model.forward).parameters else NAMES[1]


def passed(model: Any, cache: Any) -> dict[str, Any]:
    """The argument of a forward pass or of `generate`."""
    return {name_for(model): cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments by name, which may be those of a caller; None without one."""
    return next((x for name in NAMES if (x := arguments.get(name)) is not None), None)
