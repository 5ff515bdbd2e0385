"""The op `unpack`: packed pages to rows of keys and values, in plain PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from ...spec import PageLayout
from ..types import PageStore
from .dequantize import dequantize_pages


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why rows are not unpacked here, or None."""
    return None if device.type == "cpu" else f"the pages are on {device}; the reference reads page numbers on the host"


def within(page_ids: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Return int64 [n]: page numbers. One outside of the pool (a negative one, too) becomes the last page's."""
    return page_ids.to(torch.int64, copy=True).bitwise_and_(0xFFFFFFFF).clamp_(max=num_pages - 1)


class Rows:
    """Pages that become rows, for any number of layers whose pages lie alike.

    Args:
        dtype: of the rows.
        page_ids: int32 [n]; a number that the pool has not reads its last page.
        rows: int32 [n, 2]: first row and visible tokens of each page; no tokens: nothing is written.
        starts: int32 [n]: position of each page's first token. All three are where the pages are.
    """

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_ids: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        self._page_ids, self._rows = page_ids, rows.tolist()
        self._starts = starts.numpy().astype(np.int64)

    def run(self, store: PageStore, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a layer's pages to keys and values [rows, H, D], dense."""
        ids = within(self._page_ids, store.num_pages).numpy()
        found = dequantize_pages(store.gather(ids), store.layout, store.static, starts=self._starts)
        for into, pages in zip((keys, values), found, strict=True):
            for (first, count), page in zip(self._rows, pages, strict=True):
                into[first : first + count] = page[:, :count].transpose(0, 1).to(into.dtype)
