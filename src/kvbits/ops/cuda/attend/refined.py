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
RESIDENT_THREADS = {64: 768, 128: 768, 256: 256}
"""Of a multiprocessor, by the largest head_dim: registers are shared out for that many. 8 sequences with 16, 64 and 160 young pages of `klt2` each, head_dim
128, took 48.4, 81.6 and 143.6 us a layer with 768, with 512 51.1, 87.9 and 157.2; with blocks of 128 threads instead of 256 53.6, 82.9 and 139.5."""
MOST_KEY_BITS, MOST_VALUE_BITS = 10, 8
"""Of a code and its low planes: what float16 holds exactly, and a byte."""
MOST_SHARED = 96 << 10
"""Bytes of a block, which every GPU since compute capability 8.0 gives."""


def refuses(layout: PageLayout, low: Sequence[LowLayout]) -> str | None:
    """Why pages of a layout with these low planes are not read packed, or None."""
    if why := refuses_layout(layout) or refuses_bands(layout) or refuses_banded_low(len(low)):
        return why
    keys, values = (layout.key, sum(x.key_bits for x in low), MOST_KEY_BITS), (layout.value, sum(x.value_bits for x in low), MOST_VALUE_BITS)
    for spec, bits, limit in (keys, values):
        if bits and (most := max(spec.widths(layout.head_dim))) + bits > limit:
            return f"low planes of {bits} bits under codes of {most}; the CUDA kernel takes {limit} bits of both"
    if FRAME % layout.page_size:
        return f"page_size={layout.page_size} of banded codes with low planes does not divide a frame of {FRAME}"
    if (nbytes := shared_bytes(layout, low)) > MOST_SHARED:
        return f"pages of {layout.page_size} x {layout.head_dim} with low planes take {nbytes} bytes, more than a block's {MOST_SHARED}"
    return None


def used_bytes(layout: PageLayout | LowLayout) -> int:
    """Bytes of a head's struct, its padding not counted, to a multiple of 16."""
    return -(-max(s.offset + s.nbytes for s in layout.sections.values()) // 16) * 16


def threads(layout: PageLayout) -> int:
    """Of a block: a warp for every eight tokens of a page, at most 16 warps."""
    return min(layout.page_size * 4, 512)


def pages_each(layout: PageLayout, low: Sequence[LowLayout]) -> int:
    """Pages of a block: a power of two, as many as it has warps for, a frame pages and shared memory room."""
    page = used_bytes(layout) + sum(used_bytes(x) for x in low)
    most = min(4, threads(layout) // 32, FRAME // layout.page_size, (MOST_SHARED - (16 << 10)) // page)
    return 1 << max(most, 1).bit_length() - 1


def shared_bytes(layout: PageLayout, low: Sequence[LowLayout]) -> int:
    """sizeof(Shared)."""
    pages, d = pages_each(layout, low), layout.head_dim
    shares = pages * min(threads(layout) // 32 // pages, layout.page_size // 16)
    outputs, queries = shares * COLUMNS * (d + 4) * 4, d * 32 + COLUMNS * (2 * d + 16) + COLUMNS * 4
    return max(pages * (used_bytes(layout) + sum(used_bytes(x) for x in low)), outputs) + queries + shares * COLUMNS * 8 + 4 * d


def defines(layout: PageLayout, low: Sequence[LowLayout], q_dtype: str) -> dict[str, int | str]:
    """Macros of one instantiation of refined.cu."""
    d, count = layout.head_dim, threads(layout)
    resident = next(n for most, n in RESIDENT_THREADS.items() if d <= most)
    bytes_of_low = [used_bytes(x) for x in low] + [0] * (MAX_LOW - len(low))
    return {
        "HEAD_DIM": d, "PAGE": layout.page_size, "THREADS": count, "RESIDENT": max(1, resident // count), "Q_TYPE": DTYPES[q_dtype],
        "PAGES_EACH": pages_each(layout, low), "PAGE_BYTES": used_bytes(layout), "LOW_BYTES0": bytes_of_low[0], "LOW_BYTES1": bytes_of_low[1],
        "SHARED_BYTES": shared_bytes(layout, low), "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)),
        "K_BANDED": banded_arguments(layout, "k"), "V_BANDED": banded_arguments(layout, "v"),
        "K_LOW": banded_low_arguments(low, "k"), "V_LOW": banded_low_arguments(low, "v"),
    }  # fmt: skip


class Args(ctypes.Structure):
    """struct Args of refined.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "q_positions", "runs", "page_address")), ("low_address", ctypes.c_void_p * MAX_LOW),
        *((name, ctypes.c_void_p) for name in ("page_tokens", "basis", "power", "most_power", "turns", "partial", "partial_ml", "page_lse")),
        *((name, ctypes.c_int64) for name in ("q_stride_b", "q_stride_t", "q_stride_h", "layer_offset")), ("low_layer_offset", ctypes.c_int64 * MAX_LOW),
        *((name, ctypes.c_int) for name in ("first_slot", "num_queries", "group", "num_kv_heads", "column_blocks", "head_bytes")),
        ("low_head_bytes", ctypes.c_int * MAX_LOW), ("window", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("scaling", "softcap", "over_group")),
        *((name, ctypes.c_void_p) for name in ("listed", "first", "rest_out", "rest_lse", "out", "lse")), ("num_rows", ctypes.c_int),
    ]  # fmt: skip


@functools.lru_cache(maxsize=64)
def load(layout: PageLayout, low: tuple[LowLayout, ...], q_dtype: str, device_index: int) -> tuple[driver.Kernel, driver.Kernel, int]:
    """The kernel that attends, the one that merges, and threads of their blocks."""
    macros = defines(layout, low, q_dtype)
    with torch.cuda.device(device_index):
        arch = driver.arch_of(torch.cuda.get_device_capability())
        binary = cuda_compile.compile_source(Path(__file__).parent, "refined.cu", macros, arch)
        attends = driver.Kernel(binary, "attend_refined", int(macros["SHARED_BYTES"]), early=True)
        return attends, driver.Kernel(binary, "merge_refined", early=True), int(macros["THREADS"])
