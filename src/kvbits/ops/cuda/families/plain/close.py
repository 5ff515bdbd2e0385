"""close of plain formats (close.cu), bit for bit what the reference stores."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from .....spec import PageLayout, PerChannel
from ....descriptor import DTYPES, TORCH_NUMBERS
from ....types import PageStore
from ...engine.family import STEP_FIELDS
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.side import side_arguments

ROWS_PER_THREAD = 8


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Return why pages of this layout cannot be closed from `dtype`, or None."""
    if dtype not in TORCH_NUMBERS:
        return f"keys are {dtype}; the kernel takes float32, float16 and bfloat16"
    for kind, spec, d in (("key", layout.key, layout.head_dim), ("value", layout.value, layout.value_head_dim)):
        if layout.page_size * d > 512 * 8 * ROWS_PER_THREAD:
            return f"a page of {layout.page_size} x {d} numbers does not fit one block"
        groups = 1 if isinstance(spec.granularity, PerChannel) else spec.num_groups(d)
        if d // groups % 8:
            return f"{kind} groups of {d // groups} channels are not a multiple of 8"
    return None


class _Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p * 2),
        ("stride", ctypes.c_int64 * 3 * 2),
        ("page_address", ctypes.c_void_p),
        ("scale", ctypes.c_void_p * 2),
        ("bias", ctypes.c_void_p * 2),
        ("status", ctypes.c_void_p),
        ("num_heads", ctypes.c_int),
        ("head_bytes", ctypes.c_int),
    ]


class StepArgs(_Args):
    """struct Args of close.cu with APPENDS."""

    _fields_ = STEP_FIELDS


def defines(layout: PageLayout, dtype: torch.dtype, appends: bool = False) -> dict[str, int | str]:
    """Return macros of one instantiation of close.cu; `appends`: of `DecodeStep`."""
    d, page = max(layout.head_dim, layout.value_head_dim), layout.page_size
    octets = d // 8
    threads = max(128, min(512, -(-page * octets // 4 // 32) * 32), -(-page * octets // ROWS_PER_THREAD // 32) * 32)
    teams = threads // octets
    sides = (layout.key, layout.head_dim), (layout.value, layout.value_head_dim)
    scales = max(d, *(page * s.num_groups(n) for s, n in sides if not isinstance(s.granularity, PerChannel)), 0)
    union = max(8 * max(page * octets, teams * d), 8 * teams * d, page * (d + 4))
    return {
        "HEAD_DIM": d,
        "PAGE": page,
        "THREADS": threads,
        "X_TYPE": TORCH_NUMBERS[dtype],
        "RAW_TYPE": DTYPES[layout.raw_dtype],
        "GROUP_SCALES": scales,
        "USED_BYTES": -(-layout.used_bytes // 4) * 4,
        "K_SIDE": side_arguments(layout, "k"),
        "V_SIDE": side_arguments(layout, "v"),
        "SHARED_BYTES": -(-union // 16) * 16 + 8 * scales + 4 * d + 16,
        "APPENDS": int(appends),
    }


def source(layout: PageLayout, dtype: torch.dtype, appends: bool = False) -> Source:
    return Source(Path(__file__).parent, "close.cu", defines(layout, dtype, appends))


@functools.lru_cache(maxsize=256)
def load(layout: PageLayout, dtype: torch.dtype, device_index: int, appends: bool = False) -> tuple[driver.Kernel, int]:
    made = source(layout, dtype, appends)
    return driver.load(made, "close_pages", device_index, early=appends), int(made.macros["THREADS"])


def set_static(args: _Args, store: PageStore) -> None:
    """Point `args` to a layer's calibrated parameters."""
    for i, kind in enumerate("kv"):
        for name, field in (("scale", args.scale), ("bias", args.bias)):
            if (static := store.static.get(f"{kind}_{name}")) is not None:
                field[i] = static.data_ptr()


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    store: PageStore,
    page_address: torch.Tensor,
    status: torch.Tensor,
    first: torch.Tensor | None = None,
) -> None:
    """See `engine.family.Close`."""
    layout = store.layout
    kernel, threads = load(layout, k.dtype, k.device.index)
    args = _Args(
        page_address=page_address.data_ptr(),
        status=status.data_ptr(),
        num_heads=layout.num_kv_heads,
        head_bytes=layout.head_bytes,
    )
    for i, x in enumerate((k, v)):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
    set_static(args, store)
    kernel.launch(
        2 * layout.num_kv_heads * len(page_address), threads, args, torch.cuda.current_stream(k.device).cuda_stream
    )
