"""Page ids with reference counts. Integers only: nothing here knows about tensors.

An id is free (count 0) or held by `count` sequences. Ids are handed out lowest first, so runs are repeatable.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Allocator:
    """Reference-counted page ids 0 .. capacity - 1."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def grow(self, capacity: int) -> None:
        """Raise the capacity; new ids are free."""
        for page_id in range(self.capacity, capacity):
            self._counts.append(0)
            heapq.heappush(self._free, page_id)

    def allocate(self) -> int:
        """Return a free id, now held once. The caller has checked `num_free`."""
        page_id = heapq.heappop(self._free)
        self._counts[page_id] = 1
        return page_id

    def share(self, page_ids: Iterable[int]) -> None:
        """Hold each id once more."""
        for page_id in page_ids:
            if not self._counts[page_id]:
                raise ValueError(f"page {page_id} is free and cannot be shared")
            self._counts[page_id] += 1

    def release(self, page_id: int) -> None:
        """Hold an id once less; at zero it is free again."""
        if not self._counts[page_id]:
            raise ValueError(f"page {page_id} is free already")
        self._counts[page_id] -= 1
        if not self._counts[page_id]:
            heapq.heappush(self._free, page_id)

    def clone(self) -> Allocator:
        new = Allocator()
        new._counts, new._free = self._counts[:], self._free[:]
        return new

    def shared(self) -> set[int]:
        """Return ids that are held more than once."""
        return {i for i, n in enumerate(self._counts) if n > 1} if max(self._counts, default=0) > 1 else set()

    def count(self, page_id: int) -> int:
        return self._counts[page_id]
