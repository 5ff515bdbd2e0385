"""The op `unpack`: packed pages to 16-bit rows, by page numbers on the device."""

from __future__ import annotations

import torch

from ...spec import PageLayout
from ..reference.unpack import within
from ..types import PageStore
from .engine.family import Unpacks
from .engine.launch import page_offsets
from .engine.runtime import driver
from .families import family_of

__all__ = ["Rows", "prepare", "refuses", "refuses_layout"]


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why pages of this layout are not unpacked to `dtype` here, or None."""
    return refuses_layout(layout, dtype) or driver.refuses(device)


def refuses_layout(layout: PageLayout, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return the part of `refuses` that needs no device."""
    return family_of(layout).refuses("unpack", layout, dtype=dtype)


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load what `Rows` launches, so that the first one does not wait for it."""
    family_of(layout).unpacker.prepare(layout, dtype, device)


class Rows:
    """`reference.unpack.Rows` by launches only."""

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_ids: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        self._layout, self._dtype, self._page_ids, self._rows, self._starts = layout, dtype, page_ids, rows, starts
        self._unpackers: dict[tuple[tuple[int, int, int], ...], Unpacks] = {}  # by how pages lie

    def run(self, store: PageStore, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a layer's pages."""
        first = store.slabs[0].data_ptr()
        key = tuple((x.data_ptr() - first, x.stride(0), len(x)) for x in store.slabs)
        if key not in self._unpackers:
            ids, offsets = within(self._page_ids, store.num_pages), page_offsets(store.slabs, self._page_ids.device)
            places = ids.mul_(store.slabs[0].stride(0)) if offsets is None else offsets[ids]
            self._unpackers[key] = family_of(self._layout).unpacker(
                self._layout, self._dtype, places, self._rows, self._starts
            )
        self._unpackers[key].run(first, keys, values, store.static)
