"""Bytes of pages: slabs of uint8 memory, and one function that allocates them.

A page id names one page in each layer of a group; those lie side by side: [page id][layer][kv head][struct]. A pool of
fixed capacity is one slab of exactly that many ids. A growing pool adds slabs, so nothing is ever copied or moved and
addresses stay valid. On CPUs a slab lies on 2 MiB pages where the system gives them: measured elsewhere, reading it is
1.3 to 1.5 times faster. What is left of it past the last whole one lies on small pages, so no more memory is taken than
was asked for.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import CacheError, PoolFullError, counted
from ..ops.types import LowStore, PageStore
from ..spec import LayerGroup, LowLayout, PageLayout
from .allocator import Allocator

HUGE_PAGE = 2 << 20
GROWTH = 64
"""A growing pool is extended by at least a GROWTH-th of itself, so at most that share lies idle: what `torch.cat` of
one layer of 32 holds besides.
"""


@torch.inference_mode(False)  # what is made inside of it cannot be written outside, where a pass may be taken back
def allocate_slab(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 [nbytes]. The only place where page memory comes from (tests poison it here)."""
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # Private, because shared anonymous memory gets no 2 MiB pages and a forked child would write into its parent's
    # cache.
    # memory is taken when written
    region = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip, huge = -whole.data_ptr() % HUGE_PAGE, nbytes - nbytes % HUGE_PAGE
    region.madvise(mmap.MADV_HUGEPAGE, skip, huge)
    region.madvise(mmap.MADV_NOHUGEPAGE, skip + huge, len(region) - skip - huge)
    return whole[skip : skip + nbytes]


class PoolBefore(NamedTuple):
    """A pool as it was.

    Attributes:
        slabs: those that were let go of since lie on the host.
        saved: bytes of ids that were given back since, whose places may be written over: number of the slab, place in
            it, bytes on the host.
    """

    allocator: Allocator
    slabs: list[torch.Tensor]
    saved: list[tuple[int, int, torch.Tensor]]


class Shared(Protocol):
    """Bytes that several pools take from (`budget.Budget`)."""

    pools: Any
    """Those that share it, weakly."""

    def granted(self, pool: Any, missing: int, wanted: int) -> int:
        """How many ids a pool may add."""

    def most_ids(self, pool: Any) -> int:
        """Ids of the largest slab that it takes at once."""


class Pool:
    """Pages of one layout for all layers of a group.

    Args:
        capacity: ids for ever (PoolFullError past them), or None to grow.
        budget: bytes that a growing pool shares with others, or None.
    """

    def __init__(
        self, group: LayerGroup, name: str, capacity: int | None, device: torch.device, budget: Shared | None = None
    ) -> None:
        self.name = name
        self.layout: PageLayout | LowLayout = (
            group.low_layouts[name] if name in group.low_layouts else group.layouts[name]
        )
        self.num_layers = len(group.layers)
        self.block_bytes = group.block_bytes(name)
        self.fixed_capacity = capacity
        self.device = device
        self.allocator = Allocator()
        self.slabs: list[torch.Tensor] = []
        self._stores: dict[int, PageStore | LowStore] = {}
        self.budget = budget
        if budget is not None:
            budget.pools.add(self)
        if capacity:
            self._add(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated."""
        return sum(s.numel() for s in self.slabs)

    def _add(self, num_ids: int) -> None:
        nbytes = num_ids * self.block_bytes
        try:
            slab = allocate_slab(nbytes, self.device)
        except (MemoryError, OSError) as error:
            raise CacheError(
                f"the {self.name} pool needs {nbytes:,} more bytes, which {self.device} does not give: {error}"
            ) from error
        self._stores.clear()
        self.slabs.append(slab.view(num_ids, self.num_layers, self.layout.num_kv_heads, self.layout.head_bytes))
        self.allocator.grow(self.allocator.capacity + num_ids)

    def reserve(self, num_ids: int) -> None:
        """Make sure `num_ids` ids are free.

        Raises:
            PoolFullError: the capacity is fixed and too small. Nothing changed.
        """
        missing = num_ids - self.allocator.num_free
        if missing <= 0:
            return
        if self.fixed_capacity is not None:
            raise PoolFullError(
                f"the {self.name} pool needs {counted(num_ids, 'more page')} but has {self.allocator.num_free} free of"
                f" {self.fixed_capacity}; crop or reset it, free sequences, or build it with a larger max_tokens or"
                " batch_size (or without them, to let it grow; a saved one, with load(.., grow=True))"
            )
        wanted = max(missing, self.allocator.capacity // GROWTH)
        if self.budget is None:
            self._add(wanted)
            return
        wanted, most = self.budget.granted(self, missing, wanted), self.budget.most_ids(self)
        for first in range(0, wanted, most):
            self._add(min(most, wanted - first))

    def spare_slab(self) -> int | None:
        """The slab with the fewest ids in use, if these find room in the others; None if not."""
        used = self._used()
        free = self.allocator.num_free
        at = min(range(len(used)), key=used.__getitem__, default=None)
        return at if at is not None and self.slabs[at].shape[0] <= free else None

    def _used(self) -> list[int]:
        """Ids in use of each slab."""
        found, first = [], 0
        for slab in self.slabs:
            found.append(sum(self.allocator.count(i) > 0 for i in range(first, first + slab.shape[0])))
            first += slab.shape[0]
        return found

    @torch.inference_mode(False)  # as above: slabs come and go
    def drop_slab(self, at: int, before: PoolBefore) -> list[int]:
        """Let go of a slab: what it holds moves to free places of the others, whose ids close the gap.

        Args:
            before: keeps what `restore` needs of it.

        Returns:
            The new id of every old one.
        """
        first = sum(s.shape[0] for s in self.slabs[:at])
        gone = range(first, first + self.slabs[at].shape[0])
        free = [i for i in range(self.allocator.capacity) if i not in gone and not self.allocator.count(i)]
        to = list(range(self.allocator.capacity))
        for old in gone:
            if self.allocator.count(old):
                to[old] = free.pop(0)
                self.block(to[old]).copy_(self.block(old))
        to = [i - len(gone) if i >= gone.stop else i for i in to]
        for i, slab in enumerate(before.slabs):
            if slab is self.slabs[at]:
                before.slabs[i] = slab.cpu()
        self.allocator = self.allocator.renumbered(to, self.allocator.capacity - len(gone))
        del self.slabs[at]
        self._stores.clear()
        return to

    def snapshot(self) -> PoolBefore:
        return PoolBefore(self.allocator.clone(), self.slabs[:], [])

    def save(self, page_id: int, before: PoolBefore) -> None:
        """Keep the bytes of an id that was given back, as long as they are what they were."""
        for slab in self.slabs:
            if page_id < slab.shape[0]:
                found = [
                    (i, page_id, slab[page_id].to("cpu", copy=True))
                    for i, was in enumerate(before.slabs)
                    if was is slab
                ]
                before.saved.extend(found)
                return
            page_id -= slab.shape[0]

    @torch.inference_mode(False)
    def restore(self, before: PoolBefore) -> None:
        """Put back what `snapshot` took: slabs that came since go, those that went come back."""
        for i, place, was in reversed(before.saved):
            before.slabs[i][place].copy_(was)
        self._stores, self.slabs = {}, []
        self.slabs = [slab.to(self.device) for slab in before.slabs]
        self.allocator = before.allocator

    def store(self, layer: int, static: dict[str, torch.Tensor], turn: torch.Tensor | None = None) -> Any:
        """The pages of one layer (its index inside the group): a PageStore, or a LowStore in a pool of low planes."""
        if layer not in self._stores:
            slabs = tuple(s[:, layer] for s in self.slabs)
            self._stores[layer] = (
                LowStore(self.layout, slabs)
                if isinstance(self.layout, LowLayout)
                else PageStore(self.layout, slabs, static, turn)
            )
        return self._stores[layer]

    def block(self, page_id: int) -> torch.Tensor:
        """uint8 [layers, H, head_bytes]: all bytes of an id, writable."""
        for slab in self.slabs:
            if page_id < slab.shape[0]:
                return slab[page_id]
            page_id -= slab.shape[0]
        raise IndexError(f"page {page_id} lies past the {self.name} pool's end")

    def remade(self, group: LayerGroup, device: torch.device, of_slab: Callable[[torch.Tensor], torch.Tensor]) -> Pool:
        """A pool of another group of as many layers, with the same page ids and what `of_slab` makes of each slab [ids,
        layers, H, head_bytes].
        """
        new = Pool(group, self.name, None, device)
        new.fixed_capacity, new.allocator = self.fixed_capacity, copy.deepcopy(self.allocator)
        for slab in self.slabs:
            x = of_slab(slab)
            new.slabs.append(allocate_slab(x.numel(), device).view(x.shape).copy_(x))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: stores are views with raw addresses cached on them and are made anew."""
        return self.__dict__ | {"_stores": {}}

    def __deepcopy__(self, memo: dict) -> Pool:
        new = copy.copy(self)
        memo[id(self)] = new
        new.allocator = copy.deepcopy(self.allocator, memo)
        new.budget = copy.deepcopy(self.budget, memo)
        new.slabs = [allocate_slab(s.numel(), self.device).copy_(s.flatten()).view(s.shape) for s in self.slabs]
        new._stores = {}
        return new
