"""close_pages of KVQuant's formats on NVIDIA GPUs (close_codebook.cu): codebooks, outliers, keys turned back; bit for bit what the reference stores."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch

from .....later import upload
from .....quant.rotary import page_turns, step_turns
from .....spec import LowLayout, PageLayout, PerChannel
from ....descriptor import TORCH_NUMBERS
from ....reference.dequantize import require_starts
from ....types import PageStore
from ...engine.runtime import driver
from ...engine.side import as_float32, prepared, side_arguments
from ..plain.unpack import extra_arguments

ELEMENTS_PER_THREAD = 32
RESIDENT_THREADS = 1024
"""Threads per multiprocessor that `__launch_bounds__` reserves registers for. 768 and 512 spill less and are slower (docs/results/log/gpu-kernels.md)."""
SPARE_CANDIDATES = 512
"""How many more errors than are listed the choice is made among at most."""


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Why pages of this layout cannot be closed from `dtype`, or None."""
    if dtype is None or dtype not in TORCH_NUMBERS:
        return f"keys are {dtype}; the kernel takes float32, float16 and bfloat16"
    count = layout.page_size * layout.head_dim
    if layout.head_dim % 16 or layout.page_size % 16 or count % 1024 or count > 512 * ELEMENTS_PER_THREAD:
        return f"a page of {layout.page_size} x {layout.head_dim} numbers is no multiple of 1024 or more than {512 * ELEMENTS_PER_THREAD}"
    for kind, spec in (("key", layout.key), ("value", layout.value)):
        if spec.is_raw or spec.number_format.kind == "float" or spec.center:
            return f"{spec.format} {kind}s are no integers or codebook entries without a mean"
        if not spec.static and _ranges(layout, kind) > count // ELEMENTS_PER_THREAD:
            return f"{_ranges(layout, kind)} ranges of {kind}s are more than {count // ELEMENTS_PER_THREAD}"
        if not spec.static and count // _ranges(layout, kind) < 8:
            return f"{kind} ranges of {count // _ranges(layout, kind)} numbers are shorter than 8"
        if not spec.static and count // _ranges(layout, kind) % 4:
            return f"{kind} ranges of {count // _ranges(layout, kind)} numbers are no multiple of 4"
    if int(defines(layout, dtype)["SHARED_BYTES"]) > driver.MOST_SHARED:
        return f"a page of {layout.page_size} x {layout.head_dim} in float32 takes more than a block's {driver.MOST_SHARED} bytes"
    return None


def _ranges(layout: PageLayout, kind: str) -> int:
    """Scales of keys or values of a page."""
    spec = layout.key if kind == "key" else layout.value
    if isinstance(spec.granularity, PerChannel):
        return layout.head_dim
    return spec.num_groups(layout.head_dim) * (1 if spec.static else layout.page_size)


def defines(layout: PageLayout, dtype: torch.dtype) -> dict[str, int | str]:
    """Macros of one instantiation of close_codebook.cu."""
    d, page = layout.head_dim, layout.page_size
    threads = page * d // ELEMENTS_PER_THREAD
    ranges = max(_ranges(layout, kind) for kind in ("key", "value"))
    most = max(spec.num_outliers(page, d) for spec in (layout.key, layout.value))
    candidates = most + SPARE_CANDIDATES if most else 1
    shared = page * (d + 4) * 4 + 4096 + 12 * ranges + 4 * page + 8 * threads + 4 * candidates + 1024 + threads // 4 + 256
    return {
        "HEAD_DIM": d, "PAGE": page, "THREADS": threads, "RESIDENT": max(1, RESIDENT_THREADS // threads),
        "X_TYPE": TORCH_NUMBERS[dtype], "RANGES": ranges, "LIST": candidates,
        "USED_BYTES": -(-layout.used_bytes // 16) * 16, "SHARED_BYTES": shared,
        "K_SIDE": side_arguments(layout, "k"), "V_SIDE": side_arguments(layout, "v"),
        "K_EXTRAS": extra_arguments(layout, "k"), "V_EXTRAS": extra_arguments(layout, "v"),
    }  # fmt: skip


class Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p * 2), ("stride", ctypes.c_int64 * 3 * 2), ("page_address", ctypes.c_void_p), ("scale", ctypes.c_void_p * 2),
        ("bias", ctypes.c_void_p * 2), ("codebook", ctypes.c_void_p * 2), ("first", ctypes.c_void_p), ("step", ctypes.c_void_p), ("status", ctypes.c_void_p),
        ("num_pages", ctypes.c_int), ("num_heads", ctypes.c_int), ("head_bytes", ctypes.c_int),
    ]  # fmt: skip


@functools.lru_cache(maxsize=64)
def _load(layout: PageLayout, dtype: torch.dtype, device_index: int) -> tuple[driver.Kernel, int]:
    macros = defines(layout, dtype)
    kernel = driver.load(Path(__file__).parent, "close_codebook.cu", "close_codebook", macros, device_index, int(macros["SHARED_BYTES"]))
    return kernel, int(macros["THREADS"])


def first_angles(store: PageStore, starts: np.ndarray | None, num_pages: int, device: torch.device) -> torch.Tensor | None:
    """float64 [num_pages, 2, padded] cosines and sines of the pages' first positions on `device`; None where keys are stored as the model made them."""
    if not store.layout.key.pre_rope:
        return None
    inv_freq = prepared(store.static["k_inv_freq"], "on the host", lambda x: x.cpu())
    return upload(page_turns(require_starts(starts, num_pages), inv_freq), device)


def _by_twos(turns: np.ndarray, head_dim: int) -> torch.Tensor:
    """float64 [tokens, 2, 2, head_dim / 8, 2] of `turns` [tokens, 2, at least head_dim / 2]: neighbouring threads, four pairs each, load neighbouring twos."""
    x = torch.from_numpy(turns)[..., : head_dim // 2]
    return x.unflatten(-1, (head_dim // 8, 2, 2)).transpose(-3, -2).contiguous()


def launch(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_address: torch.Tensor, status: torch.Tensor, first: torch.Tensor | None = None,
    low: tuple[LowLayout, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """See `engine.family.Close`; there are no low planes."""
    layout, static, device = store.layout, store.static, k.device
    args = Args(page_address=page_address.data_ptr(), status=status.data_ptr(), num_heads=layout.num_kv_heads, head_bytes=layout.head_bytes)
    args.num_pages = len(page_address)
    for i, (kind, x) in enumerate((("k", k), ("v", v))):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
        for name, field in (("scale", args.scale), ("bias", args.bias), ("codebook", args.codebook)):
            if (own := static.get(f"{kind}_{name}")) is not None:
                field[i] = as_float32(own, device).data_ptr()
    if first is not None:
        args.first = first.data_ptr()
        tokens, d = layout.page_size, layout.head_dim
        step = prepared(static["k_inv_freq"], ("steps by twos", tokens, device), lambda x: _by_twos(step_turns(tokens, x), d).to(device))
        args.step = step.data_ptr()
    kernel, threads = _load(layout, k.dtype, -1 if device.index is None else device.index)
    kernel.launch(2 * layout.num_kv_heads * len(page_address), threads, args, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
