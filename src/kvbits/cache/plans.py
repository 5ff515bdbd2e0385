"""Plans of attention that a cache keeps, and the pages that their layers are bound to."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..ops.attend import Attention
from ..ops.types import PageStore

MOST_PLANS = 32
"""Plans that a cache keeps: a chunk of another number of tokens needs one of its own."""
LEAST_OF_A_GROUP = 4
"""Plans that are kept for each layer group at least, since every group needs its own in every pass."""


class KeptPlan:
    """A plan of attention and the pages that its layers were bound to."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self._bound: dict[int, list[PageStore]] = {}

    def bind(self, layer: int, stores: list[PageStore]) -> None:
        """Bind a layer, unless its pages are where they were."""
        if self._bound.get(layer) != stores:
            self.attention.bind(layer, stores)
            self._bound[layer] = stores


class Plans:
    """The plans that were used last. Copies and pickles of it are empty, since plans hold addresses.

    Args:
        groups: layer groups of the cache.
    """

    def __init__(self, groups: int) -> None:
        self._most = max(MOST_PLANS, LEAST_OF_A_GROUP * groups)
        self._kept: dict[Hashable, KeptPlan] = {}  # the one used last comes last

    def get(self, key: Hashable, make: Callable[[], Attention]) -> KeptPlan:
        """Return the plan of a key, made if there is none."""
        found = self._kept.pop(key, None) or KeptPlan(make())
        self._kept[key] = found
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return found

    def clear(self) -> None:
        """Let all plans go, and the pages that they hold on to."""
        self._kept.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}
