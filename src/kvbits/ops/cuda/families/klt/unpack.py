"""Pages of trellis codes to 16-bit rows on NVIDIA GPUs (dequantize_banded.cu), for attention of many queries."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from .....errors import DataError
from .....spec import PageLayout
from ....descriptor import MATRIX_DTYPES, TORCH_NUMBERS
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.side import turns_on
from .operands import banded_arguments, column_powers, columns_as_operands, offsets_in_frame, refuses_bands, resident


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Return why pages of trellis codes cannot be unpacked to `dtype`, or None."""
    if dtype not in MATRIX_DTYPES:
        return f"rows of {dtype} are not float16 or bfloat16"
    return refuses_bands(layout)


def defines(layout: PageLayout, dtype: torch.dtype) -> dict[str, int | str]:
    """Return macros of one instantiation of dequantize_banded.cu."""
    d, threads = layout.head_dim, layout.page_size * 2
    return {
        "HEAD_DIM": d,
        "PAGE": layout.page_size,
        "THREADS": threads,
        "RESIDENT": resident(layout, threads),
        "OUT_TYPE": TORCH_NUMBERS[dtype],
        "SHARED_BYTES": 4 * d,
        "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)),
        "K_BANDED": banded_arguments(layout, "k"),
        "V_BANDED": banded_arguments(layout, "v"),
    }


class _Args(ctypes.Structure):
    _fields_ = [
        ("page_address", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p * 2),
        ("operands", ctypes.c_void_p),
        ("column", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("layer_offset", ctypes.c_int64),
        ("num_pages", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("head_bytes", ctypes.c_int),
    ]


def source(layout: PageLayout, dtype: torch.dtype) -> Source:
    return Source(Path(__file__).parent, "dequantize_banded.cu", defines(layout, dtype))


@functools.lru_cache(maxsize=64)
def load(layout: PageLayout, dtype: torch.dtype, device_index: int) -> tuple[driver.Kernel, int]:
    """Return the kernel, and threads of its blocks."""
    made = source(layout, dtype)
    return driver.load(made, "dequantize_banded", device_index), int(made.macros["THREADS"])


class BandedUnpacker:
    """Unpacking of trellis codes (`engine.family.Unpacks`)."""

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_offset: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> None:
        if starts is None:
            raise DataError("pages of trellis codes were given no starts; pass each page's first position")
        self._layout, self._device, self._keep = layout, page_offset.device, (page_offset, rows, starts)
        self._kernel, self._threads = load(layout, dtype, -1 if self._device.index is None else self._device.index)
        self._args = _Args(
            page_address=page_offset.data_ptr(),
            rows=rows.data_ptr(),
            starts=starts.data_ptr(),
            num_pages=len(page_offset),
            num_heads=layout.num_kv_heads,
            head_bytes=layout.head_bytes,
        )

    @staticmethod
    def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
        load(layout, dtype, -1 if device.index is None else device.index)

    def run(self, pages: int, keys: torch.Tensor, values: torch.Tensor, static: Mapping[str, torch.Tensor]) -> None:
        """See `engine.family.Unpacks`.

        Raises:
            DataError: keys in a calibrated basis, and no inverse of it.
        """
        args, device = self._args, self._device
        if self._layout.key.basis == "calibrated":
            if "k_inverse" not in static:
                raise DataError(
                    "keys in a calibrated basis need k_inverse of [num_kv_heads, head_dim, head_dim] to be read;"
                    " calibrate first"
                )
            inverse = static["k_inverse"]
            args.operands, args.column = (
                columns_as_operands(inverse, device).data_ptr(),
                column_powers(inverse, device).data_ptr(),
            )
            args.turns = turns_on(static["k_inv_freq"], device).data_ptr()
        if self._layout.key.has_offsets:
            args.offsets = offsets_in_frame(static, device).data_ptr()
        args.out[0], args.out[1], args.layer_offset = keys.data_ptr(), values.data_ptr(), pages
        stream = driver.current_stream(device) if device.type == "cuda" else 0
        self._kernel.launch(2 * args.num_heads * args.num_pages, self._threads, args, stream)
