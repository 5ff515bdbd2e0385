"""Banded pages to 16-bit rows for attention of many queries: the reference's operations on the pages' device, some pages at a time, written where `Unpacker`
writes. No kernel of our own: products with the inverse of the basis are what it costs, and a chunk pays for them once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from ....later import upload
from ...reference.dequantize import dequantize_pages
from ...types import PageStore

PAGES_AT_ONCE = 256
"""268 MB of float32 keys and values at 8 kv heads of 128 and 64 tokens a page."""


class BandedUnpacker:
    """Pages of one store, ready to be unpacked for every layer of the group; same use as `Unpacker`.

    Args:
        page_ids: int64 [n]; rows: int32 [n, 2], first output row and visible tokens of each page; starts: [n], position of each page's first token.
        layer_stride: bytes from a page of one layer to the same page of the next.
    """

    def __init__(self, store: PageStore, dtype: torch.dtype, page_ids: np.ndarray, rows: np.ndarray, layer_stride: int, starts: np.ndarray) -> None:
        self._store, self._dtype, self._layer_stride = store, dtype, layer_stride
        ends = np.cumsum([0, *(len(s) for s in store.slabs)])
        tokens = np.arange(store.layout.page_size)
        self._steps: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]] = []
        for slab, (low, high) in enumerate(itertools.pairwise(ends)):
            mine = np.flatnonzero((page_ids >= low) & (page_ids < high))
            for at in range(0, len(mine), PAGES_AT_ONCE):
                some = mine[at : at + PAGES_AT_ONCE]
                visible = tokens < rows[some, 1:]
                found = (rows[some, :1] + tokens)[visible].astype(np.int64)
                ids, places, to = (upload(x, store.device) for x in (page_ids[some] - low, np.flatnonzero(visible), found))
                self._steps.append((slab, ids, places, to, starts[some]))

    def run(self, keys: torch.Tensor, values: torch.Tensor, layer: int, static: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the rows of keys and values, [rows, H, D] dense; static: what the pages share in `layer`, by default what the store says."""
        shared = dict(self._store.static if static is None else static)
        for slab, ids, visible, to, starts in self._steps:
            pages = self._store.slabs[slab]
            pages = pages.as_strided(pages.shape, pages.stride(), pages.storage_offset() + layer * self._layer_stride)[ids]
            for out, x in zip((keys, values), dequantize_pages(pages, self._store.layout, shared, starts=starts), strict=True):
                out[to] = x.transpose(1, 2).flatten(0, 1)[visible].to(self._dtype)
