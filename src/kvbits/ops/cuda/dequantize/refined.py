"""Banded pages with low planes to 16-bit rows, for attention of any number of queries: the reference's operations on the pages' device, some pages at a time,
written where `Unpacker` writes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ....later import upload
from ...reference.dequantize import dequantize_pages
from ...types import LowStore, PageStore

PAGES_AT_ONCE = 256
"""268 MB of float32 keys and values at 8 kv heads of 128 and 64 tokens a page."""


class RefinedUnpacker:
    """Pages of one store, ready to be unpacked for every layer of the group; same use as `Unpacker`.

    Args:
        page_ids: int64 [n]; rows: int32 [n, 2], first output row and visible tokens of each page; starts: [n], position of each page's first token.
        layer_stride: bytes from a page of one layer to the same page of the next.
        low: stores of the low planes that refine the pages, the coarsest first, and their pages [n]; layers lie side by side where the pages' do.
    """

    def __init__(
        self, store: PageStore, dtype: torch.dtype, page_ids: np.ndarray, rows: np.ndarray, layer_stride: int, starts: np.ndarray,
        low: Sequence[tuple[LowStore, np.ndarray]] = (),
    ) -> None:  # fmt: skip
        self._store, self._dtype = store, dtype
        tokens = np.arange(store.layout.page_size)
        self._steps: list[tuple[_Pages, list[_Pages], torch.Tensor, torch.Tensor, np.ndarray]] = []
        for at in range(0, len(page_ids), PAGES_AT_ONCE):
            some = slice(at, at + PAGES_AT_ONCE)
            visible = tokens < rows[some, 1:]
            found = (rows[some, :1] + tokens)[visible].astype(np.int64)
            fine = [_Pages(s, ids[some], s.layout.page_size_bytes if layer_stride else 0) for s, ids in low]
            places, to = (upload(x, store.device) for x in (np.flatnonzero(visible), found))
            self._steps.append((_Pages(store, page_ids[some], layer_stride), fine, places, to, starts[some]))

    def run(self, keys: torch.Tensor, values: torch.Tensor, layer: int, static: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the rows of keys and values, [rows, H, D] dense; static: what the pages share in `layer`, by default what the store says."""
        shared = dict(self._store.static if static is None else static)
        for pages, fine, visible, to, starts in self._steps:
            low = [(x.of(layer), x.store.layout) for x in fine if isinstance(x.store, LowStore)]
            unpacked = dequantize_pages(pages.of(layer), self._store.layout, shared, low=low, starts=starts)
            for out, x in zip((keys, values), unpacked, strict=True):
                out[to] = x.transpose(1, 2).flatten(0, 1)[visible].to(self._dtype)


class _Pages:
    """Some pages `page_ids` [n] of a store of layer 0, to be copied out for any layer."""

    def __init__(self, store: PageStore | LowStore, page_ids: np.ndarray, layer_stride: int) -> None:
        self.store, self._layer_stride, self._count = store, layer_stride, len(page_ids)
        self._of_slabs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        ends = np.cumsum([0, *(len(s) for s in store.slabs)])
        for slab, (low, high) in zip(store.slabs, itertools.pairwise(ends), strict=True):
            mine = np.flatnonzero((page_ids >= low) & (page_ids < high))
            if len(mine):
                self._of_slabs.append((slab, upload(page_ids[mine] - low, slab.device), upload(mine, slab.device)))

    def of(self, layer: int) -> torch.Tensor:
        """uint8 [n, H, head_bytes]."""
        found = [
            slab.as_strided(slab.shape, slab.stride(), slab.storage_offset() + layer * self._layer_stride)[ids] for slab, ids, _ in self._of_slabs
        ]  # fmt: skip
        if len(found) == 1:
            return found[0]
        pages = found[0].new_empty(self._count, *found[0].shape[1:])
        for some, (_, _, places) in zip(found, self._of_slabs, strict=True):
            pages[places] = some
        return pages
