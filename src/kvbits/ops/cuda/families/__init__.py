"""Families of formats, a room each: their kernels, and what chooses and launches them.

`engine` knows none by name: it asks `family_of`.
"""

from __future__ import annotations

import functools

from ....spec import PageLayout
from ..engine.family import Family
from .codebook.family import Codebook
from .klt.family import Klt
from .plain.family import Plain
from .raw.family import Raw

FAMILIES: tuple[Family, ...] = (Klt(), Codebook(), Raw(), Plain())


@functools.lru_cache(maxsize=512)
def family_of(layout: PageLayout) -> Family:
    """The family that has a layout."""
    return next(f for f in FAMILIES if f.serves(layout))
