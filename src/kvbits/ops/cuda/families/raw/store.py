"""Fresh tokens to their slots in raw pages of any width and page size (store_raw.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from .....spec import PageLayout
from ....types import PageStore
from ...engine.runtime import driver
from ...engine.runtime.compile import Source

THREADS, TOKENS = 256, 16
"""Threads and tokens of a block."""


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Return None: every raw layout is served."""
    return None


class Rows(ctypes.Structure):
    """struct Rows of store_raw.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int) for name in ("offset", "end", "row_bytes", "unit")),
    ]


class Args(ctypes.Structure):
    """struct Args of store_raw.cu."""

    _fields_ = [
        ("sides", Rows * 2),
        ("slots", ctypes.c_void_p),
        ("page_offset", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("skipped", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_tokens", "row_tokens", "num_heads", "head_bytes", "page_size")),
    ]


def source() -> Source:
    """Return the one source for all layouts."""
    return Source(Path(__file__).parent, "store_raw.cu", {"THREADS": THREADS, "TOKENS": TOKENS})


def sources(layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Source]:
    """See `engine.family.Stores`."""
    yield source()


@functools.lru_cache(maxsize=16)
def load(device_index: int) -> driver.Kernel:
    return driver.load(source(), "store_raw", device_index)


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """See `engine.family.Stores`."""
    load(-1 if device.index is None else device.index)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    previous: torch.Tensor | None,
    starts: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    """See `engine.family.Stores`. Rows are read where they lie if their channels are dense."""
    layout, device, count = pages.layout, k.device, len(slots)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    keys, values = layout.sections["k_raw"].offset, layout.sections["v_raw"].offset
    args = Args(
        sides=(rows(k, keys, values), rows(v, values, layout.head_bytes)),
        slots=slots.data_ptr(),
        page_offset=None if pages.offsets is None else pages.offsets.data_ptr(),
        pages=pages.slabs[0].data_ptr(),
        page_stride=pages.slabs[0].stride(0),
        num_pages=pages.num_pages,
        skipped=None if status is None else status[6:].data_ptr(),
        num_tokens=count,
        row_tokens=k.shape[-3],
        num_heads=layout.num_kv_heads,
        head_bytes=layout.head_bytes,
        page_size=layout.page_size,
    )
    kernel = load(-1 if device.index is None else device.index)
    kernel.launch(-(-count // TOKENS) * 2 * layout.num_kv_heads, THREADS, args, driver.current_stream(device))


def rows(x: torch.Tensor, offset: int, end: int) -> Rows:
    """Return keys or values [.., H, D], last dim dense, and bytes `offset` to `end` of a struct, which are theirs."""
    size = x.element_size()
    row_bytes = x.shape[-1] * size
    stride = [0, *(s * size if n > 1 else 0 for s, n in zip(x.stride(), x.shape, strict=True))][-4:-1]
    multiples = (x.data_ptr(), row_bytes, *stride)
    unit = next(u for u in (16, 4, 2) if not any(n % u for n in multiples))
    return Rows(x.data_ptr(), (ctypes.c_int64 * 3)(*stride), offset, end, row_bytes, unit)
