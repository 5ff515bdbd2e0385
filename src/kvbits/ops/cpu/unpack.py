"""The op `unpack` on the CPU: pages become rows by the decoding of the attention kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...errors import DataError
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..reference.unpack import within
from ..types import PageStore
from . import structs
from .library import UnpackStruct, check, library, unavailable
from .structs import store_struct


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why pages of this layout are not unpacked to `dtype` here, or None."""
    if device.type != "cpu":
        return f"the pages are on {device}, not on the CPU"
    if dtype not in TORCH_NUMBERS:
        return f"rows of {dtype}; the CPU kernels write float32, float16 and bfloat16"
    return refuses_layout(layout) or unavailable()


def refuses_layout(layout: PageLayout) -> str | None:
    """Return the part of `refuses` that a layout decides."""
    return structs.refuses_layout(layout)


class Rows:
    """`reference.unpack.Rows`, in one call of the library for a layer.

    Numbers differ from the reference's in the last digits of float32. Those of keys in a calibrated basis differ by the
    rounding of a sum of head_dim products.
    """

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_ids: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        self._dtype, self._page_ids, self._rows = dtype, page_ids, rows.contiguous().numpy()
        self._starts = starts.numpy().astype(np.int64)

    def run(self, store: PageStore, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a layer's pages.

        Raises:
            DataError: keys or values of another shape or dtype.
        """
        layout, h = store.layout, store.layout.num_kv_heads
        for name, x, d in (("keys", keys, layout.head_dim), ("values", values, layout.value_head_dim)):
            if x.dtype != self._dtype or x.shape != (len(keys), h, d) or x.stride(2) != 1 or x.device.type != "cpu":
                raise DataError(
                    f"{name} must be {self._dtype} {[len(keys), h, d]} on the CPU, their rows dense, got {x.dtype}"
                    f" {list(x.shape)} with strides {list(x.stride())} on {x.device}"
                )
        ids = within(self._page_ids, store.num_pages).numpy()
        call = UnpackStruct(
            ctypes.addressof(store_struct(store)),
            len(ids),
            ids.ctypes.data,
            self._starts.ctypes.data,
            self._rows.ctypes.data,
            len(keys),
            h,
            layout.head_dim,
            layout.value_head_dim,
            TORCH_NUMBERS[self._dtype],
            torch.get_num_threads(),
            (keys.data_ptr(), values.data_ptr()),
            (keys.stride()[:2], values.stride()[:2]),
        )
        check(library().kvbits_unpack(call))
