"""Low planes of banded pages that a kernel has closed (low_planes.cu): in a launch of their own, which multiplies keys with the basis once more. The pages' own
bytes stay those of `close_banded`, with planes or without."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ....spec import LowLayout, PageLayout
from ...descriptor import TORCH_DTYPES
from ...types import PageStore
from ..runtime import driver
from ..side import MAX_LOW, banded_arguments, banded_low_arguments, column_powers, columns_as_operands, turns_on

RESIDENT_THREADS = {64: 640, 128: 384, 256: 256}
"""Of a multiprocessor, by the largest head_dim: registers are shared out for that many."""


def shared_bytes(layout: PageLayout) -> int:
    """sizeof(Shared): operands of the product or codes, cosines and sines."""
    page, d = layout.page_size, layout.head_dim
    return max(4 * page * d, page * (d + 4)) + 4 * d


def defines(layout: PageLayout, dtype: torch.dtype, low: Sequence[LowLayout]) -> dict[str, int | str]:
    """Macros of one instantiation of low_planes.cu."""
    d, threads = layout.head_dim, layout.page_size * 2
    resident = next(n for most, n in RESIDENT_THREADS.items() if d <= most)
    used = [-(-max(s.offset + s.nbytes for s in x.sections.values()) // 4) * 4 for x in low]
    return {
        "HEAD_DIM": d, "PAGE": layout.page_size, "THREADS": threads, "RESIDENT": max(1, resident // threads), "X_TYPE": TORCH_DTYPES[dtype],
        "SHARED_BYTES": shared_bytes(layout), "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)), "LOW_COUNT": len(low), "LOW_USED": ", ".join(map(str, used)),
        "K_BANDED": banded_arguments(layout, "k"), "V_BANDED": banded_arguments(layout, "v"),
        "K_LOW": banded_low_arguments(low, "k"), "V_LOW": banded_low_arguments(low, "v"),
    }  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p * 2), ("stride", ctypes.c_int64 * 3 * 2), ("page_address", ctypes.c_void_p), ("low_address", ctypes.c_void_p * MAX_LOW),
        ("basis", ctypes.c_void_p), ("column", ctypes.c_void_p), ("turns", ctypes.c_void_p), ("starts", ctypes.c_void_p),
        ("num_pages", ctypes.c_int), ("num_heads", ctypes.c_int), ("head_bytes", ctypes.c_int), ("low_head_bytes", ctypes.c_int * MAX_LOW),
    ]  # fmt: skip


@functools.lru_cache(maxsize=64)
def load(layout: PageLayout, dtype: torch.dtype, device_index: int, low: tuple[LowLayout, ...]) -> tuple[driver.Kernel, int]:
    """The kernel, and threads of its blocks."""
    macros = defines(layout, dtype, low)
    kernel = driver.load(Path(__file__).parent, "low_planes.cu", "close_low", macros, device_index, int(macros["SHARED_BYTES"]))
    return kernel, int(macros["THREADS"])


def launch(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_address: torch.Tensor, low: Sequence[tuple[LowLayout, torch.Tensor]], starts: torch.Tensor | None
) -> None:
    """Write the low planes of pages that a launch ahead on the same stream has closed, without waiting for the GPU.

    Args:
        k, v: [n, H, page_size, head_dim], as they were closed, rows at multiples of 16 bytes.
        page_address: int64 [n] on the device: bytes of the pages' first structs.
        low: layout and int64 [n] addresses of each low plane's first structs, the coarsest first.
        starts: what `banded.first_positions` gave.
    """
    layout, device = store.layout, k.device
    args = _Args(page_address=page_address.data_ptr(), num_pages=len(page_address), num_heads=layout.num_kv_heads, head_bytes=layout.head_bytes)
    for i, x in enumerate((k, v)):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
    for i, (fine, at) in enumerate(low):
        args.low_address[i], args.low_head_bytes[i] = at.data_ptr(), fine.head_bytes
    if layout.key.basis == "klt" and starts is not None:
        own = store.static["k_basis"]
        args.basis, args.column = columns_as_operands(own, device).data_ptr(), column_powers(own, device).data_ptr()
        args.starts, args.turns = starts.data_ptr(), turns_on(store.static["k_inv_freq"], device).data_ptr()
    kernel, threads = load(layout, k.dtype, -1 if device.index is None else device.index, tuple(x for x, _ in low))
    kernel.launch(2 * layout.num_kv_heads * len(page_address), threads, args, driver.current_stream(device) if device.type == "cuda" else 0)
