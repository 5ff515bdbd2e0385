"""Trellis codes to their pages on NVIDIA GPUs (store_banded.cu): pages that close, decode steps, and tokens wherever
their slots are.

Values are stored bit for bit as by the reference, but on Hopper at head_dim 128: there 16-bit rows times a Hadamard
matrix are summed in another order, off by less than 2**-19 of sum |v|. Keys in a calibrated basis are products that are
summed in another order, off by less than 2**-18 of sum |k_f| |A| (of a token that is not 2**14 times smaller than the
largest number that a block has beside it). So a number's units (trellis.cuh) are others only where they are a tie to
that, and then the codes of its ring may be another path of nearly the same cost. A scale differs only where two
cost the same squared error.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from .....errors import DataError
from .....later import upload
from .....spec import BAND, PageLayout
from ....descriptor import TORCH_NUMBERS
from ....reference.dequantize import require_starts
from ....types import PageStore
from ...engine.family import STEP_FIELDS
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.side import as_float32, turns_on, with_aligned_rows
from .operands import banded_arguments, column_powers, columns_as_operands, columns_as_tiles, refuses_bands, resident

FEW = 16
"""Tokens of a block where there are few, which all its warps share (together.cuh)."""
FEW_WARPS = 8
"""Most warps of such a block; with fewer than bands each waits for the basis more than once."""


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Return why pages of this layout cannot be closed from `dtype`, or None."""
    if dtype not in TORCH_NUMBERS:
        return f"keys are {dtype}; the kernel takes float32, float16 and bfloat16"
    if why := refuses_bands(layout):
        return why
    if (nbytes := shared_bytes(layout, layout.page_size)) > driver.MOST_SHARED:
        return (
            f"{layout.page_size} tokens of {layout.head_dim} take {nbytes} bytes as operands, more than a block's"
            f" {driver.MOST_SHARED}"
        )
    return None


def shared_bytes(layout: PageLayout, tokens: int, warpgroups: bool = False, stores: bool = False) -> int:
    """Return sizeof(Shared) of a block that has so many tokens: the basis and codes, or operands; powers of columns,
    cosines and sines, largest keys of each warp, and where tokens go. Of few tokens: operands, keys in the basis,
    codes, where tokens go, largest keys.
    """
    d = layout.head_dim
    if stores and tokens == FEW:
        return tokens * (4 * d + 4 * (d + BAND) + 28 + d + 4 + 16) + -(-few_warps(layout) // 2) * 8
    return (
        (4 * d * d + tokens * (d + 4) if warpgroups else 4 * tokens * d)
        + 8 * d
        + -(-tokens // 64) * 16
        + (16 * tokens if stores else 0)
    )


def few_warps(layout: PageLayout) -> int:
    """Return the number of warps of a block of few tokens: one for each band that keys are multiplied with, at least
    one for each eight tokens.
    """
    return max(FEW // 8, min(FEW_WARPS, layout.head_dim // BAND) if layout.key.basis == "calibrated" else 0)


def takes_warpgroups(layout: PageLayout, device: torch.device) -> bool:
    """Return whether the product of a page's keys runs on Hopper's matrix units. They take four warps at once and read
    the basis from shared memory.
    """
    return device.type == "cuda" and _takes_warpgroups(layout, torch.cuda.get_device_capability(device))


def _takes_warpgroups(layout: PageLayout, capability: tuple[int, int]) -> bool:
    return (
        capability == (9, 0) and layout.key.basis == "calibrated" and layout.head_dim == 128 and layout.page_size == 64
    )


def places(layout: PageLayout, device: torch.device) -> int:
    """Return the number of blocks that run on a GPU at a time."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return multiprocessors * resident(layout, layout.page_size * 2)


def pages_each(num_pages: int, num_kv_heads: int, places: int) -> int:
    """Return the number of pages of a block: as few as leave no block of keys waiting for another one."""
    return -(-num_pages // max(1, places // num_kv_heads))


def defines(
    layout: PageLayout, dtype: torch.dtype, appends: bool = False, warpgroups: bool = False, tokens: int | None = None
) -> dict[str, int | str]:
    """Return macros of one instantiation of store_banded.cu; `appends`: of a decode step; `warpgroups`: see
    `takes_warpgroups`; `tokens`: of a block that stores by slots, None where whole pages close.
    """
    d, stores, tokens = layout.head_dim, tokens is not None, tokens or layout.page_size
    together = stores and tokens == FEW
    threads = few_warps(layout) * 32 if together else tokens * 2
    return {
        "HEAD_DIM": d,
        "PAGE": layout.page_size,
        "THREADS": threads,
        "RESIDENT": resident(layout, threads),
        "X_TYPE": TORCH_NUMBERS[dtype],
        "USED_BYTES": -(-layout.used_bytes // 4) * 4,
        "SHARED_BYTES": shared_bytes(layout, tokens, warpgroups, stores),
        "APPENDS": int(appends),
        "STORES": int(stores),
        "WARPGROUPS": int(warpgroups),
        "TOGETHER": int(together),
        "HADAMARD_FACTOR": repr(1 / math.sqrt(d & -d)),
        "K_BANDED": banded_arguments(layout, "k"),
        "V_BANDED": banded_arguments(layout, "v"),
    }


class Args(ctypes.Structure):
    """struct Args of store_banded.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * 2),
        ("stride", ctypes.c_int64 * 3 * 2),
        ("page_address", ctypes.c_void_p),
        ("basis", ctypes.c_void_p),
        ("column", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("num_pages", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("head_bytes", ctypes.c_int),
        ("pages_each", ctypes.c_int),
    ]


class StepArgs(Args):
    """The same with APPENDS."""

    _fields_ = STEP_FIELDS


class StoreArgs(Args):
    """The same with STORES."""

    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("page_offset", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("pages_there", ctypes.c_int64),
        ("num_tokens", ctypes.c_int),
        ("row_tokens", ctypes.c_int),
    ]


def source(
    layout: PageLayout, dtype: torch.dtype, appends: bool, warpgroups: bool, tokens: int | None = None
) -> Source:
    """Return the instantiation; arguments as of `defines`, `warpgroups` where they are taken for whole pages."""
    warpgroups &= tokens in (None, layout.page_size)
    return Source(
        Path(__file__).parent, "store_banded.cu", defines(layout, dtype, appends, warpgroups, tokens), own=warpgroups
    )


def closing(layout: PageLayout, dtype: torch.dtype, appends: bool, capability: tuple[int, int]) -> Source:
    """Return the source that closes pages on a device of a compute capability."""
    return source(layout, dtype, appends, _takes_warpgroups(layout, capability))


def sources(layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Source]:
    """See `engine.family.Stores`."""
    yield from (
        source(layout, dtype, False, _takes_warpgroups(layout, capability), tokens)
        for tokens in (FEW, layout.page_size)
    )


@functools.lru_cache(maxsize=64)
def load(
    layout: PageLayout, dtype: torch.dtype, device_index: int, appends: bool = False, tokens: int | None = None
) -> tuple[driver.Kernel, int]:
    """Return the kernel, and threads of its blocks; arguments as of `defines`."""
    device = torch.device("cuda", device_index) if device_index >= 0 else torch.device("cuda")
    made = source(layout, dtype, appends, takes_warpgroups(layout, device), tokens)
    return driver.load(made, "store_banded", device_index, early=appends), int(made.macros["THREADS"])


def first_positions(
    store: PageStore, starts: np.ndarray | None, num_pages: int, device: torch.device
) -> torch.Tensor | None:
    """Return int32 [num_pages] positions of the pages' first tokens on `device`; None where no side asks for them."""
    return (
        upload(require_starts(starts, num_pages).astype(np.int32), device)
        if store.layout.key.basis == "calibrated"
        else None
    )


def set_static(
    args: Args,
    layout: PageLayout,
    static: dict[str, torch.Tensor],
    device: torch.device,
    starts: torch.Tensor | None,
    warpgroups: bool | None = None,
) -> None:
    """Point `args` to the basis, offsets and the rotary embedding of a layer and to positions (see struct Args).

    Raises:
        DataError: no basis, or no positions.
    """
    if layout.key.basis != "calibrated":
        return
    if "k_basis" not in static or starts is None:
        raise DataError(
            "keys in a calibrated basis need k_basis [num_kv_heads, head_dim, head_dim] and their pages' positions to"
            " be stored; calibrate first"
        )
    own = static["k_basis"]
    operands = (
        columns_as_tiles
        if (takes_warpgroups(layout, device) if warpgroups is None else warpgroups)
        else columns_as_operands
    )
    args.basis, args.column = operands(own, device).data_ptr(), column_powers(own, device).data_ptr()
    args.starts = starts.data_ptr()
    args.turns = turns_on(static["k_inv_freq"], device).data_ptr()
    if layout.key.has_offsets:
        args.offsets = as_float32(static["k_offsets"], device).data_ptr()


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    store: PageStore,
    page_address: torch.Tensor,
    status: torch.Tensor,
    first: torch.Tensor | None = None,
) -> None:
    """See `engine.family.Close`."""
    layout, device = store.layout, k.device
    args = Args(
        page_address=page_address.data_ptr(),
        status=status.data_ptr(),
        num_heads=layout.num_kv_heads,
        head_bytes=layout.head_bytes,
    )
    args.num_pages, args.pages_each = (
        len(page_address),
        pages_each(len(page_address), layout.num_kv_heads, places(layout, device)),
    )
    for i, x in enumerate((k, v)):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
    set_static(args, layout, store.static, device, first)
    kernel, threads = load(layout, k.dtype, _index(device))
    kernel.launch(
        2 * layout.num_kv_heads * -(-args.num_pages // args.pages_each),
        threads,
        args,
        driver.current_stream(device) if device.type == "cuda" else 0,
    )


def _index(device: torch.device) -> int:
    return -1 if device.index is None else device.index


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """See `engine.family.Stores`."""
    for tokens in (FEW, layout.page_size):
        load(layout, dtype, _index(device), tokens=tokens)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    previous: torch.Tensor | None,
    starts: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    """See `engine.family.Stores`. Rows that do not lie at multiples of 16 bytes are copied."""
    layout, device, count = pages.layout, k.device, len(slots)
    k, v = with_aligned_rows(k), with_aligned_rows(v)
    blocks = -(-count // layout.page_size) * 2 * layout.num_kv_heads
    tokens = layout.page_size if blocks >= 2 * places(layout, device) else FEW
    args = StoreArgs(
        slots=slots.data_ptr(),
        page_offset=None if pages.offsets is None else pages.offsets.data_ptr(),
        pages=pages.slabs[0].data_ptr(),
        page_stride=pages.slabs[0].stride(0),
        pages_there=pages.num_pages,
        num_tokens=count,
        row_tokens=k.shape[-3],
        num_heads=layout.num_kv_heads,
        head_bytes=layout.head_bytes,
        status=None if status is None else status.data_ptr(),
        num_pages=-(-count // tokens),
    )
    args.pages_each = pages_each(args.num_pages, layout.num_kv_heads, places(layout, device)) if tokens != FEW else 1
    for i, x in enumerate((k, v)):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*(0, *x.stride())[-4:-1])
    warpgroups = takes_warpgroups(layout, device) and tokens == layout.page_size
    set_static(args, layout, pages.static, device, starts, warpgroups)
    kernel, threads = load(layout, k.dtype, _index(device), tokens=tokens)
    stream = driver.current_stream(device) if device.type == "cuda" else 0
    kernel.launch(2 * layout.num_kv_heads * -(-args.num_pages // args.pages_each), threads, args, stream)
