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
from typing import Any, NamedTuple

import torch

from ..errors import CacheError, PoolFullError, counted
from ..ops.types import PageStore
from ..spec import LayerGroup
from .allocator import Allocator

HUGE_PAGE = 2 << 20
GROWTH = 64
"""A growing pool is extended by at least a GROWTH-th of itself, so at most that share lies idle: what `torch.cat` of
one layer of 32 holds besides.
"""


@torch.inference_mode(False)  # what is made inside of it cannot be written outside, where a pass may be undone
def allocate_slab(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised uint8 [nbytes]. The only place where page memory comes from (tests poison it here)."""
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
    """A pool as it was."""

    allocator: Allocator
    slabs: list[torch.Tensor]


class Pool:
    """Pages of one layout for all layers of a group.

    Args:
        capacity: ids for ever (PoolFullError past them), or None to grow.
    """

    def __init__(self, group: LayerGroup, name: str, capacity: int | None, device: torch.device) -> None:
        self.name = name
        self.layout = group.layouts[name]
        self.num_layers = len(group.layers)
        self.block_bytes = group.block_bytes(name)
        self.fixed_capacity = capacity
        self.device = device
        self.allocator = Allocator()
        self.slabs: list[torch.Tensor] = []
        self._stores: dict[int, PageStore] = {}
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
        self._add(max(missing, self.allocator.capacity // GROWTH))

    def snapshot(self) -> PoolBefore:
        return PoolBefore(self.allocator.clone(), self.slabs[:])

    def restore(self, before: PoolBefore) -> None:
        """Put back what `snapshot` took: slabs that came since go."""
        self._stores, self.slabs, self.allocator = {}, before.slabs[:], before.allocator

    def store(self, layer: int, static: dict[str, torch.Tensor], turn: torch.Tensor | None = None) -> PageStore:
        """Return the pages of one layer (its index inside the group)."""
        if layer not in self._stores:
            self._stores[layer] = PageStore(self.layout, tuple(s[:, layer] for s in self.slabs), static, turn)
        return self._stores[layer]

    def place(self, page_id: int) -> tuple[torch.Tensor, int]:
        """Return the slab [ids, layers, H, head_bytes] that an id is in, and its index there."""
        for slab in self.slabs:
            if page_id < slab.shape[0]:
                return slab, page_id
            page_id -= slab.shape[0]
        raise IndexError(f"page {page_id} lies past the {self.name} pool's end")

    def block(self, page_id: int) -> torch.Tensor:
        """Return uint8 [layers, H, head_bytes]: all bytes of an id, writable."""
        slab, index = self.place(page_id)
        return slab[index]

    def remade(self, group: LayerGroup, device: torch.device, of_slab: Callable[[torch.Tensor], torch.Tensor]) -> Pool:
        """Return a pool of another group of as many layers, with the same page ids and what `of_slab` makes of each
        slab [ids, layers, H, head_bytes].
        """
        new = Pool(group, self.name, None, device)
        new.fixed_capacity, new.allocator = self.fixed_capacity, copy.deepcopy(self.allocator)
        for slab in self.slabs:
            x = of_slab(slab)
            new.slabs.append(allocate_slab(x.numel(), device).view(x.shape).copy_(x))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling: stores are views with raw addresses cached on them and are made anew."""
        return self.__dict__ | {"_stores": {}}

    def __deepcopy__(self, memo: dict) -> Pool:
        new = copy.copy(self)
        memo[id(self)] = new
        new.allocator = copy.deepcopy(self.allocator, memo)
        new.slabs = [allocate_slab(s.numel(), self.device).copy_(s.flatten()).view(s.shape) for s in self.slabs]
        new._stores = {}
        return new
