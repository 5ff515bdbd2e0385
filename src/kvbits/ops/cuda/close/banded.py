"""close_pages of banded codes on NVIDIA GPUs (close_banded.cu): rows in their basis, fitted scales, planes of bands.

Values are stored bit for bit as by the reference. Keys in a calibrated basis are products that are summed in another order, off by less than 2**-18 of
sum |k_f| |A|: a code is another one only where it is a tie to that, and a scale only where two cost the same squared error.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import numpy as np
import torch

from ....errors import DataError
from ....later import upload
from ....spec import BAND, BAND_PLANES, PageLayout
from ...descriptor import TORCH_DTYPES, describe
from ...reference.dequantize import require_starts
from ...types import PageStore
from ..runtime import compile as cuda_compile
from ..runtime import driver
from ..side import prepared, turns_on
from .step import STEP_FIELDS

RESIDENT_THREADS = {64: 896, 128: 384, 256: 256}
"""Of a multiprocessor, by the largest head_dim: registers are shared out for that many. With fewer registers the product waits for each of its loads: 640 at
head_dim 128 take half as long again on an H200."""
MOST_SHARED = 96 << 10
"""Bytes of a block, which every GPU since compute capability 8.0 gives."""


def refuses_layout(layout: PageLayout, dtype: torch.dtype) -> str | None:
    """Why pages of this layout cannot be closed from `dtype`, or None."""
    d = layout.head_dim
    if dtype not in TORCH_DTYPES:
        return f"keys are {dtype}; the kernel takes float32, float16 and bfloat16"
    for kind, spec in (("keys", layout.key), ("values", layout.value)):
        if not spec.is_banded:
            return f"{spec.format} {kind} beside banded codes have no CUDA closing kernel"
    if d % (32 if layout.key.basis == "klt" else BAND) or d > max(RESIDENT_THREADS):
        return f"head_dim={d} of banded codes is no multiple of {32 if layout.key.basis == 'klt' else BAND} or above {max(RESIDENT_THREADS)}"
    if layout.page_size > 256 or layout.page_size % 16:
        return f"page_size={layout.page_size} of banded codes is above 256 or no multiple of 16"
    if (nbytes := shared_bytes(layout)) > MOST_SHARED:
        return f"a page of {layout.page_size} x {d} in float32 takes {nbytes} bytes, more than a block's {MOST_SHARED}"
    return None


def shared_bytes(layout: PageLayout) -> int:
    """sizeof(Shared): rows, then sums of each warp, means, cosines and sines."""
    return 4 * (layout.page_size * (layout.head_dim + 16) + (layout.page_size // 16 + 2) * layout.head_dim)


def side_arguments(layout: PageLayout, kind: str) -> str:
    """Template arguments of struct Banded but the last: keys (kind "k") or values ("v") of a layout."""
    side = describe(layout, kind)
    basis = {None: "NO_BASIS", "hadamard": "HADAMARD", "klt": "CALIBRATED"}[side.basis]
    values = [side.scale_offset, side.mean_offset or 0, *(side.offset_of_plane(bits) for bits in BAND_PLANES)]
    return f"{side.packed_widths:#x}ull, {basis}, {int(side.has_mean)}, " + ", ".join(map(str, values))


def defines(layout: PageLayout, dtype: torch.dtype, appends: bool = False) -> dict[str, int | str]:
    """Macros of one instantiation of close_banded.cu; `appends`: of a decode step."""
    d, threads = layout.head_dim, layout.page_size * 2
    last = list(layout.sections.values())[-1]
    resident = next(n for most, n in RESIDENT_THREADS.items() if d <= most)
    return {
        "HEAD_DIM": d, "PAGE": layout.page_size, "THREADS": threads, "RESIDENT": max(1, resident // threads), "X_TYPE": TORCH_DTYPES[dtype],
        "USED_BYTES": -(-(last.offset + last.nbytes) // 4) * 4, "SHARED_BYTES": shared_bytes(layout), "APPENDS": int(appends), "AHEAD": 0, "STEP_PARTS": 2,
        "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)), "K_BANDED": side_arguments(layout, "k"), "V_BANDED": side_arguments(layout, "v"),
    }  # fmt: skip


class Args(ctypes.Structure):
    """struct Args of close_banded.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * 2), ("stride", ctypes.c_int64 * 3 * 2), ("page_address", ctypes.c_void_p), ("basis", ctypes.c_void_p),
        ("column", ctypes.c_void_p), ("turns", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("status", ctypes.c_void_p),
        ("num_pages", ctypes.c_int), ("num_heads", ctypes.c_int), ("head_bytes", ctypes.c_int),
    ]  # fmt: skip


class StepArgs(Args):
    """The same with APPENDS."""

    _fields_ = STEP_FIELDS


@functools.lru_cache(maxsize=64)
def load(layout: PageLayout, dtype: torch.dtype, device_index: int, appends: bool = False) -> tuple[driver.Kernel, int]:
    """The kernel, and threads of its blocks."""
    macros = defines(layout, dtype, appends)
    with torch.cuda.device(device_index):
        arch = driver.arch_of(torch.cuda.get_device_capability())
        binary = cuda_compile.compile_source(Path(__file__).parent, "close_banded.cu", macros, arch)
        return driver.Kernel(binary, "close_banded", int(macros["SHARED_BYTES"])), int(macros["THREADS"])


def columns_of(basis: torch.Tensor) -> torch.Tensor:
    """float32 [H, D]: for each column of a basis [H, D, D] a power of two above its numbers, by which `operands` are divided."""
    exponents = basis.detach().float().cpu().abs().amax(1).frexp().exponent.clamp(-100, 100)
    return torch.ldexp(torch.ones(exponents.shape), exponents).to(basis.device)


def operands(basis: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A basis [H, D, D] as the matrix units take it: float16 [H, D / 16 of y, D / 16 of k, 2 tiles, 32 lanes, high and low, 8 bytes] of its columns over
    `columns_of` it. High and low add up to 22 bits of a column's largest number. Lane 4 g + c has rows 4 c .. 4 c + 3 of 16, and
    of tile t column 4 (g / 2) + 2 t + g % 2 of 16, so that what comes back lies as what goes in."""
    heads, d, _ = basis.shape
    scaled = basis.detach().float() / columns.unsqueeze(1)
    high = scaled.half()
    both = torch.stack([high, (scaled - high.float()).half()], 1)
    by_lane = both.view(heads, 2, d // 16, 4, 4, d // 16, 4, 2, 2)  # [.., half, step, c, row, band, g / 2, tile, g % 2]
    return by_lane.permute(0, 5, 2, 7, 6, 8, 3, 1, 4).contiguous()


def first_positions(store: PageStore, starts: np.ndarray | None, num_pages: int, device: torch.device) -> torch.Tensor | None:
    """int32 [num_pages] positions of the pages' first tokens on `device`; None where no side asks for them."""
    return upload(require_starts(starts, num_pages).astype(np.int32), device) if store.layout.key.basis == "klt" else None


def set_static(args: Args, store: PageStore, starts: torch.Tensor | None) -> None:
    """Points `args` to the basis and the rotary embedding of a layer and to positions (see struct Args)."""
    if store.layout.key.basis != "klt":
        return
    if "k_basis" not in store.static or starts is None:
        raise DataError("keys in a calibrated basis need k_basis of [num_kv_heads, head_dim, head_dim], and the pages' positions, to close; calibrate first")
    own, device = store.static["k_basis"], store.device
    columns = prepared(own, ("columns", device), lambda x: columns_of(x.to(device)))
    args.column = columns.data_ptr()
    args.basis = prepared(own, ("operands", device), lambda x: operands(x.to(device), columns)).data_ptr()
    args.starts = starts.data_ptr()
    args.turns = turns_on(store.static["k_inv_freq"], device).data_ptr()


def launch(k: torch.Tensor, v: torch.Tensor, store: PageStore, page_address: torch.Tensor, status: torch.Tensor, starts: torch.Tensor | None) -> None:
    """Close pages without waiting for the GPU; arguments as of `packed.launch_close`, and what `first_positions` gave."""
    layout, device = store.layout, k.device
    args = Args(page_address=page_address.data_ptr(), status=status.data_ptr(), num_heads=layout.num_kv_heads, head_bytes=layout.head_bytes)
    args.num_pages = len(page_address)
    for i, x in enumerate((k, v)):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
    set_static(args, store, starts)
    kernel, threads = load(layout, k.dtype, -1 if device.index is None else device.index)
    kernel.launch(2 * layout.num_kv_heads * len(page_address), threads, args, driver.current_stream(device) if device.type == "cuda" else 0)
