"""Rows of packed pages to 16 bits, by page numbers on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...spec import PageLayout
from ..types import PageStore
from .engine.runtime import driver
from .families import family_of
from .families.klt.family import Klt
from .families.plain.family import Plain

__all__ = ["Rows", "prepare", "refuses", "refuses_layout"]


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why pages of this layout are not unpacked to `dtype` here, or None."""
    return refuses_layout(layout, dtype) or driver.refuses(device)


def refuses_layout(layout: PageLayout, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """The part of `refuses` that needs no device."""
    if not isinstance(family_of(layout), (Plain, Klt)):
        return (
            f"{layout.key.format}/{layout.value.format} pages are closed as a whole; no engine that stores token by"
            " token has them"
        )
    return family_of(layout).refuses("unpack", layout, dtype=dtype)


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load what `Rows` launches, so that the first one does not wait for it."""
    family_of(layout).unpacker.prepare(layout, dtype, device)


class Rows:
    """`reference.dequantize.Rows` by launches only."""

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_ids: torch.Tensor,
        rows: torch.Tensor,
        page_stride: int,
        starts: torch.Tensor | None = None,
    ) -> None:
        # Addresses count from 0: a layer is where its pages begin.
        self._unpacker = family_of(layout).unpacker(
            PageStore(layout, ()), dtype, page_ids * page_stride, rows, 1, starts
        )

    def run(
        self,
        pages: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        static: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the rows of a layer's pages."""
        self._unpacker.run(keys, values, pages.data_ptr(), static or {})
