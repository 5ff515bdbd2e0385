"""Families of formats: their kernels, and what chooses and launches them.

A core family has a room here; `schemes.FAMILIES` names the modules of all others. `engine` asks `family_of` and knows
no family by name.
"""

from __future__ import annotations

import functools
import importlib

from .... import schemes
from ....spec import PageLayout
from ..engine.family import Family
from .klt.family import Klt
from .plain.family import Plain
from .raw.family import Raw


@functools.cache
def families() -> tuple[Family, ...]:
    """Return all families. `Plain` is the last: it has every layout that no other has."""
    return (Klt(), *(importlib.import_module(name).FAMILY for name in schemes.FAMILIES), Raw(), Plain())


@functools.lru_cache(maxsize=512)
def family_of(layout: PageLayout) -> Family:
    """Return the family that has a layout."""
    return next(f for f in families() if f.serves(layout))
