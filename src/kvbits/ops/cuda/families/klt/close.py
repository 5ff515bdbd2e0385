"""close_pages of banded codes on NVIDIA GPUs (close_banded.cu): rows in their basis, fitted scales, planes of bands.

Values are stored bit for bit as by the reference, but on Hopper at head_dim 128: there 16-bit rows times a Hadamard matrix are summed in another order,
off by less than 2**-19 of sum |v|. Keys in a calibrated basis are products that are summed in another order, off by less than 2**-18 of sum |k_f| |A|
(of a token that is not 2**14 times smaller than its page's largest number). So a code is another one only where it is a tie to that, and a scale only
where two cost the same squared error.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import numpy as np
import torch

from .....errors import DataError
from .....later import upload
from .....spec import LowLayout, PageLayout
from ....descriptor import TORCH_NUMBERS
from ....reference.dequantize import require_starts
from ....types import PageStore
from ...engine.close_step import STEP_FIELDS
from ...engine.runtime import driver
from ...engine.side import turns_on
from .operands import banded_arguments, column_powers, columns_as_operands, columns_as_tiles, refuses_bands, resident


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Why pages of this layout cannot be closed from `dtype`, or None."""
    if dtype not in TORCH_NUMBERS:
        return f"keys are {dtype}; the kernel takes float32, float16 and bfloat16"
    if why := refuses_bands(layout):
        return why
    if (nbytes := shared_bytes(layout)) > driver.MOST_SHARED:
        return f"a page of {layout.page_size} x {layout.head_dim} in float32 takes {nbytes} bytes, more than a block's {driver.MOST_SHARED}"
    return None


def shared_bytes(layout: PageLayout, warpgroups: bool = False) -> int:
    """sizeof(Shared): rows or the basis, sums of each warp or codes, means, powers of columns, cosines and sines, largest keys of each warp."""
    page, d = layout.page_size, layout.head_dim
    rows, sums = 4 * page * (d + 16), page // 16 * d * 4
    return (max(rows, 4 * d * d) + max(sums, page * (d + 4)) if warpgroups else rows + sums) + 12 * d + -(-page // 64) * 16


def takes_warpgroups(layout: PageLayout, device: torch.device) -> bool:
    """Whether the product of a page's keys runs on Hopper's matrix units, which take four warps at once and read the basis from shared memory."""
    fits = layout.key.basis == "calibrated" and layout.head_dim == 128 and layout.page_size == 64
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def places(layout: PageLayout, device: torch.device) -> int:
    """Blocks that run on a GPU at a time."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return multiprocessors * resident(layout)


def pages_each(num_pages: int, num_kv_heads: int, places: int) -> int:
    """Pages of a block: as few as leave no block of keys waiting for another one."""
    return -(-num_pages // max(1, places // num_kv_heads))


def defines(layout: PageLayout, dtype: torch.dtype, appends: bool = False, warpgroups: bool = False) -> dict[str, int | str]:
    """Macros of one instantiation of close_banded.cu; `appends`: of a decode step; `warpgroups`: see `takes_warpgroups`."""
    d, threads = layout.head_dim, layout.page_size * 2
    return {
        "HEAD_DIM": d, "PAGE": layout.page_size, "THREADS": threads, "RESIDENT": resident(layout), "X_TYPE": TORCH_NUMBERS[dtype],
        "USED_BYTES": -(-layout.used_bytes // 4) * 4, "SHARED_BYTES": shared_bytes(layout, warpgroups), "APPENDS": int(appends),
        "WARPGROUPS": int(warpgroups), "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)),
        "K_BANDED": banded_arguments(layout, "k"), "V_BANDED": banded_arguments(layout, "v"),
    }  # fmt: skip


class Args(ctypes.Structure):
    """struct Args of close_banded.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * 2), ("stride", ctypes.c_int64 * 3 * 2), ("page_address", ctypes.c_void_p), ("basis", ctypes.c_void_p),
        ("column", ctypes.c_void_p), ("turns", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("status", ctypes.c_void_p),
        ("num_pages", ctypes.c_int), ("num_heads", ctypes.c_int), ("head_bytes", ctypes.c_int), ("pages_each", ctypes.c_int),
    ]  # fmt: skip


class StepArgs(Args):
    """The same with APPENDS."""

    _fields_ = STEP_FIELDS


@functools.lru_cache(maxsize=64)
def load(layout: PageLayout, dtype: torch.dtype, device_index: int, appends: bool = False) -> tuple[driver.Kernel, int]:
    """The kernel, and threads of its blocks."""
    warpgroups = takes_warpgroups(layout, torch.device("cuda", device_index) if device_index >= 0 else torch.device("cuda"))
    macros = defines(layout, dtype, appends, warpgroups)
    shared, folder = int(macros["SHARED_BYTES"]), Path(__file__).parent
    kernel = driver.load(folder, "close_banded.cu", "close_banded", macros, device_index, shared, early=appends, own=warpgroups)
    return kernel, int(macros["THREADS"])


def first_positions(store: PageStore, starts: np.ndarray | None, num_pages: int, device: torch.device) -> torch.Tensor | None:
    """int32 [num_pages] positions of the pages' first tokens on `device`; None where no side asks for them."""
    return upload(require_starts(starts, num_pages).astype(np.int32), device) if store.layout.key.basis == "calibrated" else None


def set_static(args: Args, store: PageStore, starts: torch.Tensor | None) -> None:
    """Points `args` to the basis and the rotary embedding of a layer and to positions (see struct Args)."""
    if store.layout.key.basis != "calibrated":
        return
    if "k_basis" not in store.static or starts is None:
        raise DataError("keys in a calibrated basis need k_basis of [num_kv_heads, head_dim, head_dim], and the pages' positions, to close; calibrate first")
    own, device = store.static["k_basis"], store.device
    operands = columns_as_tiles if takes_warpgroups(store.layout, device) else columns_as_operands
    args.basis, args.column = operands(own, device).data_ptr(), column_powers(own, device).data_ptr()
    args.starts = starts.data_ptr()
    args.turns = turns_on(store.static["k_inv_freq"], device).data_ptr()


def launch(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_address: torch.Tensor, status: torch.Tensor, first: torch.Tensor | None = None,
    low: tuple[LowLayout, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """See `engine.family.Close`; there are no low planes."""
    layout, device = store.layout, k.device
    args = Args(page_address=page_address.data_ptr(), status=status.data_ptr(), num_heads=layout.num_kv_heads, head_bytes=layout.head_bytes)
    args.num_pages, args.pages_each = len(page_address), pages_each(len(page_address), layout.num_kv_heads, places(layout, device))
    for i, x in enumerate((k, v)):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
    set_static(args, store, first)
    kernel, threads = load(layout, k.dtype, -1 if device.index is None else device.index)
    kernel.launch(2 * layout.num_kv_heads * -(-args.num_pages // args.pages_each), threads, args, driver.current_stream(device) if device.type == "cuda" else 0)
