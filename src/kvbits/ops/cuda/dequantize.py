"""Rows of packed pages to 16 bits, by page numbers on the device."""

from __future__ import annotations

import torch

from ...spec import PageLayout
from ..types import PageStore
from .engine.runtime import driver
from .families import family_of
from .families.plain.family import Plain
from .families.plain.unpack import Unpacker, prepare

__all__ = ["Rows", "prepare", "refuses", "refuses_layout"]


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why pages of this layout are not unpacked to `dtype` here, or None."""
    return refuses_layout(layout, dtype) or driver.refuses(device)


def refuses_layout(layout: PageLayout, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """The part of `refuses` that needs no device."""
    if not isinstance(family_of(layout), Plain):
        return f"{layout.key.format}/{layout.value.format} pages are unpacked with positions, which this operation is not given"
    return family_of(layout).refuses("unpack", layout, dtype=dtype)


class Rows:
    """`reference.dequantize.Rows` by launches only."""

    def __init__(self, layout: PageLayout, dtype: torch.dtype, page_ids: torch.Tensor, rows: torch.Tensor, page_stride: int) -> None:
        # Addresses count from 0: a layer is where its pages begin.
        self._unpacker = Unpacker(PageStore(layout, ()), dtype, page_ids * page_stride, rows, 1)

    def run(self, pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a layer's pages."""
        self._unpacker.run(keys, values, pages.data_ptr(), {})
