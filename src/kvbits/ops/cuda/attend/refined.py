"""Kernels of attention over banded pages with low planes (refined.cu): what they are made for, what they are launched with."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ....spec import FRAME, LowLayout, PageLayout
from ...descriptor import DTYPES
from ..runtime import compile as cuda_compile
from ..runtime import driver
from ..side import MAX_LOW, banded_arguments, banded_low_arguments, refuses_banded_low, refuses_bands
from .kernel_choice import refuses_layout

COLUMNS = 8
"""Query columns of a block."""
RESIDENT_THREADS = {64: 640, 128: 512, 256: 256}
"""Of a multiprocessor, by the largest head_dim: registers are shared out for that many."""
MOST_EXACT_BITS = 10
"""Of a code and its low planes, whose levels float16 then holds exactly."""
MOST_SHARED = 96 << 10
"""Bytes of a block, which every GPU since compute capability 8.0 gives."""


def refuses(layout: PageLayout, low: Sequence[LowLayout]) -> str | None:
    """Why pages of a layout with these low planes are not read packed, or None."""
    if why := refuses_layout(layout) or refuses_bands(layout) or refuses_banded_low(len(low)):
        return why
    for spec, bits in ((layout.key, sum(x.key_bits for x in low)), (layout.value, sum(x.value_bits for x in low))):
        if bits and (most := max(spec.widths(layout.head_dim))) + bits > MOST_EXACT_BITS:
            return f"low planes of {bits} bits under codes of {most}; the CUDA kernel takes {MOST_EXACT_BITS} bits of both"
    if FRAME % layout.page_size:
        return f"page_size={layout.page_size} of banded codes with low planes does not divide a frame of {FRAME}"
    if (nbytes := shared_bytes(layout, low)) > MOST_SHARED:
        return f"pages of {layout.page_size} x {layout.head_dim} with low planes take {nbytes} bytes, more than a block's {MOST_SHARED}"
    return None


def used_bytes(layout: PageLayout | LowLayout) -> int:
    """Bytes of a head's struct, its padding not counted, to a multiple of 16."""
    return -(-max(s.offset + s.nbytes for s in layout.sections.values()) // 16) * 16


def pages_each(layout: PageLayout, low: Sequence[LowLayout]) -> int:
    """Pages of a block: as many as it has warps, a frame pages and shared memory room."""
    page = used_bytes(layout) + sum(used_bytes(x) for x in low)
    return max(1, min(layout.page_size // 16, FRAME // layout.page_size, (MOST_SHARED // 2) // page))


def shared_bytes(layout: PageLayout, low: Sequence[LowLayout]) -> int:
    """sizeof(Shared)."""
    pages, d = pages_each(layout, low), layout.head_dim
    row = COLUMNS * (d + 4) * 4
    return max(pages * (used_bytes(layout) + sum(used_bytes(x) for x in low)), pages * row) + row + pages * COLUMNS * 8 + 4 * d


def defines(layout: PageLayout, low: Sequence[LowLayout], q_dtype: str) -> dict[str, int | str]:
    """Macros of one instantiation of refined.cu."""
    d, threads = layout.head_dim, layout.page_size * 2
    resident = next(n for most, n in RESIDENT_THREADS.items() if d <= most)
    bytes_of_low = [used_bytes(x) for x in low] + [0] * (MAX_LOW - len(low))
    return {
        "HEAD_DIM": d, "PAGE": layout.page_size, "THREADS": threads, "RESIDENT": max(1, resident // threads), "Q_TYPE": DTYPES[q_dtype],
        "PAGES_EACH": pages_each(layout, low), "PAGE_BYTES": used_bytes(layout), "LOW_BYTES0": bytes_of_low[0], "LOW_BYTES1": bytes_of_low[1],
        "SHARED_BYTES": shared_bytes(layout, low), "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)),
        "K_BANDED": banded_arguments(layout, "k"), "V_BANDED": banded_arguments(layout, "v"),
        "K_LOW": banded_low_arguments(low, "k"), "V_LOW": banded_low_arguments(low, "v"),
    }  # fmt: skip


class Args(ctypes.Structure):
    """struct Args of refined.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "q_positions", "runs", "page_address")), ("low_address", ctypes.c_void_p * MAX_LOW),
        *((name, ctypes.c_void_p) for name in ("page_tokens", "basis", "power", "turns", "partial", "partial_ml", "page_lse")),
        *((name, ctypes.c_int64) for name in ("q_stride_b", "q_stride_t", "q_stride_h", "layer_offset")), ("low_layer_offset", ctypes.c_int64 * MAX_LOW),
        *((name, ctypes.c_int) for name in ("first_slot", "num_queries", "group", "num_kv_heads", "column_blocks", "head_bytes")),
        ("low_head_bytes", ctypes.c_int * MAX_LOW), ("window", ctypes.c_int), ("scaling", ctypes.c_float), ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("listed", "first", "rest_out", "rest_lse", "out", "lse")), ("num_rows", ctypes.c_int),
    ]  # fmt: skip


@functools.lru_cache(maxsize=64)
def load(layout: PageLayout, low: tuple[LowLayout, ...], q_dtype: str, device_index: int) -> tuple[driver.Kernel, driver.Kernel, int]:
    """The kernel that attends, the one that merges, and threads of their blocks."""
    macros = defines(layout, low, q_dtype)
    with torch.cuda.device(device_index):
        arch = driver.arch_of(torch.cuda.get_device_capability())
        binary = cuda_compile.compile_source(Path(__file__).parent, "refined.cu", macros, arch)
        return driver.Kernel(binary, "attend_refined", int(macros["SHARED_BYTES"])), driver.Kernel(binary, "merge_refined"), int(macros["THREADS"])
