"""Packed pages to 16-bit rows on NVIDIA GPUs: what attention of many queries reads instead of unpacking the same page
for each block of them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from .....errors import DataError
from .....spec import PageLayout
from ....descriptor import LEVELS, MATRIX_DTYPES, TORCH_NUMBERS, describe
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.side import as_float32, side_arguments, turns_on, widened

THREADS = 256


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Return why pages cannot be unpacked to `dtype`, or None."""
    if dtype not in MATRIX_DTYPES:
        return f"rows of {dtype} are not float16 or bfloat16"
    if layout.head_dim % 4 or layout.value_head_dim % 4:
        return f"head_dim={layout.head_dim} or value_head_dim={layout.value_head_dim} is not a multiple of 4"
    if layout.page_size % 16 and not (layout.key.is_raw and layout.value.is_raw):
        return f"page_size={layout.page_size} is not a multiple of 16"
    if (layout.key.is_raw or layout.value.is_raw) and layout.raw_dtype != str(dtype)[6:]:
        return f"raw pages are {layout.raw_dtype}, rows {str(dtype)[6:]}"
    if layout.key.pre_rope and layout.head_dim % 8:
        return f"head_dim={layout.head_dim} is not a multiple of 8, which keys from before the rotary embedding need"
    if (nbytes := tile_bytes(layout)) > driver.MOST_SHARED:
        return (
            f"a page of {layout.page_size} x {layout.head_dim} in float32 takes {nbytes} bytes, more than a block's"
            f" {driver.MOST_SHARED}; use smaller pages"
        )
    return None


def tile_bytes(layout: PageLayout) -> int:
    """Return the bytes of a block's shared memory: a page's keys or values in float32, if its elements are combined."""
    staged = any(s.outliers or s.pre_rope for s in (layout.key, layout.value))
    return layout.page_size * max(layout.head_dim, layout.value_head_dim) * 4 if staged else 0


def extra_arguments(layout: PageLayout, kind: str) -> str:
    """Return template arguments of struct Extras: codebook, stretch, outliers and rotary embedding of keys ("k") or
    values ("v").
    """
    side = describe(layout, kind)
    values = [
        int(side.levels == LEVELS["codebook"]),
        int(side.stretch_offset is not None),
        side.stretch_offset or 0,
        side.outliers,
        side.index_bytes,
        side.outlier_index_offset or 0,
        side.outlier_value_offset or 0,
        int(side.turned),
    ]
    return ", ".join(map(str, values))


class _Args(ctypes.Structure):
    _fields_ = [
        ("page_address", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p * 2),
        ("scale", ctypes.c_void_p * 2),
        ("bias", ctypes.c_void_p * 2),
        ("codebook", ctypes.c_void_p * 2),
        ("starts", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("layer_offset", ctypes.c_int64),
        ("num_heads", ctypes.c_int),
        ("head_bytes", ctypes.c_int),
    ]


def defines(layout: PageLayout, dtype: torch.dtype) -> dict[str, int | str]:
    """Return macros of one instantiation of dequantize.cu."""
    return {
        "HEAD_DIM": max(layout.head_dim, layout.value_head_dim),
        "PAGE": layout.page_size,
        "THREADS": THREADS,
        "OUT_TYPE": TORCH_NUMBERS[dtype],
        "K_SIDE": side_arguments(layout, "k"),
        "V_SIDE": side_arguments(layout, "v"),
        "K_EXTRAS": extra_arguments(layout, "k"),
        "V_EXTRAS": extra_arguments(layout, "v"),
    }


def source(layout: PageLayout, dtype: torch.dtype) -> Source:
    return Source(Path(__file__).parent, "dequantize.cu", defines(layout, dtype))


@functools.lru_cache(maxsize=256)
def _load(layout: PageLayout, dtype: torch.dtype, device_index: int) -> driver.Kernel:
    return driver.load(source(layout, dtype), "dequantize_pages", device_index, tile_bytes(layout))


class Unpacker:
    """Unpacking of plain formats (`engine.family.Unpacks`)."""

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_offset: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> None:
        self._layout, self._device, self._grid = layout, page_offset.device, (len(page_offset), layout.num_kv_heads)
        self._kernel = _load(layout, dtype, self._device.index)
        self._keep = [page_offset, rows]
        self._args = _Args(
            page_address=page_offset.data_ptr(),
            rows=rows.data_ptr(),
            num_heads=layout.num_kv_heads,
            head_bytes=layout.head_bytes,
        )
        if layout.key.pre_rope:
            if starts is None:
                raise DataError(
                    "pages of keys stored before the rotary embedding were given no starts; pass each page's first"
                    " position"
                )
            self._keep.append(starts)
            self._args.starts = starts.data_ptr()

    @staticmethod
    def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
        _load(layout, dtype, device.index)

    def _set_static(self, static: Mapping[str, torch.Tensor]) -> None:
        """Point the kernel's arguments to a layer's calibrated parameters."""
        args, layout, device = self._args, self._layout, self._device
        for i, kind in enumerate("kv"):
            for name, field in (("scale", args.scale), ("bias", args.bias)):
                if (x := static.get(f"{kind}_{name}")) is not None:
                    field[i] = widened(x, layout.dim(kind), device).data_ptr()
            if (codebook := static.get(f"{kind}_codebook")) is not None:
                args.codebook[i] = as_float32(codebook, device).data_ptr()
        if layout.key.pre_rope:
            args.turns = turns_on(static["k_inv_freq"], device).data_ptr()

    def run(self, pages: int, keys: torch.Tensor, values: torch.Tensor, static: Mapping[str, torch.Tensor]) -> None:
        self._set_static(static)
        args = self._args
        args.out[0], args.out[1], args.layer_offset = keys.data_ptr(), values.data_ptr(), pages
        self._kernel.launch(self._grid, THREADS, args, torch.cuda.current_stream(keys.device).cuda_stream)
