"""Attention kernels by layout, and what every plan asks before it launches one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from ....errors import DataError, UnsupportedError
from ....spec import PageLayout
from ..families import family_of
from .runtime import driver
from .shape import FOLD_COLUMNS, MAX_PIECES, Ask, Kernel

LEAST_CAPABILITY = (8, 0)
"""Least compute capability that attention kernels need."""
MAX_PARTS = 4
"""Parts that one launch reads (struct Args)."""
NO_WINDOW = 2**30
"""Window of a launch without one."""


class PagesArgs(ctypes.Structure):
    """struct Pages of args.cuh."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("base", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int64),
    ]


class PartArgs(ctypes.Structure):
    """struct Part of args.cuh."""

    _fields_ = [
        ("head_bytes", ctypes.c_int),
        ("chunks_per_page", ctypes.c_int),
        ("raw", ctypes.c_int),
        ("k_raw", ctypes.c_int),
        ("v_raw", ctypes.c_int),
        ("k_scale", ctypes.c_void_p),
        ("k_bias", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("v_bias", ctypes.c_void_p),
        ("k_level", ctypes.c_void_p),
        ("v_level", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("k_inverse", ctypes.c_void_p),
        ("pages", PagesArgs),
        *(
            (name, ctypes.c_int)
            for name in ("page_size", "format", "chunk", "chunk_bytes", "first_piece", "num_pieces")
        ),
    ]


class Args(ctypes.Structure):
    """struct Args of args.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "out",
                "lse",
                "q_positions",
                "segments",
                "partial",
                "partial_ml",
                "arrived",
            )
        ),
        *((name, ctypes.c_int64) for name in ("q_stride_b", "q_stride_t", "q_stride_h")),
        *((name, ctypes.c_int) for name in ("num_queries", "group", "num_kv_heads", "column_blocks", "window")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_pieces", "query_columns")),
        ("pieces", ctypes.c_int * 4 * MAX_PIECES),
        ("parts", PartArgs * MAX_PARTS),
    ]


def folds(layout: PageLayout, num_columns: int) -> bool:
    """Return whether the kernel lets the columns that are not needed do as much again (`Ask.fold`)."""
    return num_columns <= FOLD_COLUMNS and family_of(layout).folds


def is_wide(layouts: Sequence[PageLayout]) -> bool:
    """Return whether kernels of all these layouts, at least one, take `shape.WIDE` columns a warp."""
    return bool(layouts) and all(family_of(x).is_wide(x) for x in layouts)


@functools.lru_cache(maxsize=256)
def _made(layout: PageLayout, ask: Ask) -> Kernel | None:
    return family_of(layout).attention(layout, ask)


def refuses_memory(layout: PageLayout, ask: Ask) -> str | None:
    """Return why no shape of the kernel for pages of a layout fits the shared memory of a block, or None."""
    made = _made(layout, ask)
    if made is None:
        return family_of(layout).refuses("attend", layout, shared_limit=ask.shared_limit)
    if made.shared_bytes <= ask.shared_limit:
        return None
    return too_large([x for x in (layout, ask.beside) if x is not None], made.shared_bytes, ask.shared_limit)


def too_large(layouts: Sequence[PageLayout], nbytes: int, limit: int) -> str:
    """Return a message that a kernel for pages of these layouts takes more shared memory than a block has."""
    formats = " and ".join(f"{x.key.format}/{x.value.format}" for x in layouts)
    return (
        f"{formats} pages of {layouts[0].page_size} tokens at head_dim={layouts[0].head_dim} take {nbytes} bytes of"
        f" shared memory, and a block of this GPU has {limit}; use smaller pages"
    )


def kernel_for(layout: PageLayout, ask: Ask) -> Kernel:
    """Return the instantiation for pages of a layout.

    Raises:
        UnsupportedError: no shape of it fits the shared memory.
    """
    made = _made(layout, ask)
    if made is None or made.shared_bytes > ask.shared_limit:
        raise UnsupportedError(f"attend on cuda: {refuses_memory(layout, ask)}")
    return made


@functools.lru_cache(maxsize=256)
def load_kernel(kernel: Kernel, device_index: int) -> driver.Kernel:
    """Return a kernel on a device."""
    return driver.load(kernel.instance, "attend", device_index, kernel.shared_bytes, early=True)


def query_columns(num_columns: int) -> int:
    """Return the number of columns that queries are made in the keys' basis for: 1, 2, 4 or 8."""
    return min(8, 1 << (num_columns - 1).bit_length())


def window_of(sliding_window: int | None) -> int:
    """Return `Args.window`."""
    return min(sliding_window or NO_WINDOW, NO_WINDOW)


def indexed(device: torch.device) -> torch.device:
    """Return `device` with its number."""
    return torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)


def check_query(
    q: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, rows: bool = True
) -> None:
    """Refuse queries that a plan was not made for.

    Args:
        rows: and such whose rows an attention kernel cannot read where they lie.

    Raises:
        DataError: what differs.
    """
    if tuple(q.shape) != tuple(shape) or q.dtype != dtype or q.device != device:
        raise DataError(
            f"q is {list(q.shape)} {q.dtype} on {q.device}; the plan is for {list(shape)} {dtype} on {device}"
        )
    if rows and (q.stride(-1) != 1 or any(s % 4 for s in q.stride()[:-1]) or q.data_ptr() % 8):
        raise DataError(
            f"q has strides {q.stride()}: the last must be 1, the others multiples of 4, and it must start at 8 bytes;"
            " use q.contiguous()"
        )
