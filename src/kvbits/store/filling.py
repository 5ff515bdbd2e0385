"""A sequence gets pages for its stored prefix, and a loader reads them, from the moment the first blob is found: the
rest is looked for meanwhile.
"""

from __future__ import annotations

from collections import Counter

import torch

from ..cache.group import GroupState
from .finding import Plan
from .loading import Loader
from .shelf import Blob, Shard


class Filling:
    """
    Args:
        groups: of the cache; whoever calls this puts them back where it fails.
        row: an empty sequence.
    """

    def __init__(self, groups: list[GroupState], row: int, shard: Shard, loader: Loader) -> None:
        self._groups, self._row, self._shard, self._loader = groups, row, shard, loader
        # page ids by the name of the blob and the number of the page in it
        self._begun: dict[tuple[str, int], int] = {}

    def begin(self, one: Blob) -> None:
        """A blob was found: if there is room now, take pages for what every prefix that has it needs, and begin to read
        them.

        Raises:
            DamagedError: of this or a blob before.
        """
        held = [(n, p) for n, p in enumerate(one.pages) if self._groups[p.group].group.geometry.sliding_window is None]
        needed = Counter((p.group, p.pool) for _, p in held)
        if any(self._groups[g].pools[pool].allocator.num_free < n for (g, pool), n in needed.items()):
            return
        wanted = []
        for n, p in held:
            pool = self._groups[p.group].pools[p.pool]
            self._begun[one.name, n] = page_id = pool.allocator.allocate()
            wanted.append((n, pool.block(page_id)))
        self._read(one, wanted)

    def complete(self, plan: Plan) -> bool:
        """Give the sequence its pages and begin to read those that are left.

        Returns:
            False where pages were begun that the prefix does not have: nothing can be done with them as long as they
                are written.

        Raises:
            PoolFullError: pages are missing.
            DamagedError: of some blob.
        """
        at = {page: (plan.blobs[i].name, number) for page, (i, number) in plan.at.items()}
        if not self._begun.keys() <= set(at.values()):
            return False
        sequences = [planned.clone() for planned, _ in plan.made]
        left: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for state, s, (_, listed) in zip(self._groups, sequences, plan.made, strict=True):
            for name, numbers in s.pages().items():
                pool, pages = state.pools[name], [page for page in listed if page.pool == name]
                wanted, ids = [pages[i] for i in numbers], []
                pool.reserve(sum(at[page] not in self._begun for page in wanted))
                for page in wanted:
                    if (page_id := self._begun.get(at[page])) is None:
                        page_id, (i, number) = pool.allocator.allocate(), plan.at[page]
                        left.setdefault(i, []).append((number, pool.block(page_id)))
                    ids.append(page_id)
                s.renumber(name, ids)
            state.replace(self._row, s)
        for i, of_blob in sorted(left.items()):
            self._read(plan.blobs[i], sorted(of_blob, key=lambda p: p[0]))
        return True

    def _read(self, one: Blob, wanted: list[tuple[int, torch.Tensor]]) -> None:
        for work in one.work([g.group for g in self._groups], self._shard, wanted):
            self._loader.add(work)
