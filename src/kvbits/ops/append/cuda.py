"""append on NVIDIA GPUs: keys and values of all sequences in one launch, read where the projections left them.

`append` is the op's contract. Its runs go to the GPU once per `SlotMapping` and pool, through pinned memory, so all layers of a group share one upload and
nothing waits for the GPU. For CUDA graphs, take the two steps apart: `table` before the capture, `launch` inside; later replays write
where `table.copy_` says.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch

from ..cuda import compile as cuda_compile
from ..cuda import driver
from ..types import PageStore, SlotMapping

THREADS = 128
DEFINES = {"THREADS": THREADS}
"""Macros of append.cu."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def refuses(k: torch.Tensor, store: PageStore) -> str | None:
    """Why tokens like k [B, T, H, D] cannot be written to pages of this store here, or None."""
    if k.device.type != "cuda" or store.device.type != "cuda":
        return f"keys are on {k.device}, pages on {store.device}, not on a GPU"
    if torch.version.hip:
        return "the GPU is not an NVIDIA GPU"
    if not store.layout.is_raw:
        return "packed pages are filled token by token by the reference"
    if k.dtype not in DTYPES:
        return f"keys are {k.dtype}; the kernel takes float32, float16 and bfloat16"
    return cuda_compile.missing()


class _Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p * 2), ("stride", ctypes.c_int64 * 3 * 2), ("runs", ctypes.c_void_p), ("pages", ctypes.c_void_p),
        ("head_bytes", ctypes.c_int64), ("offset", ctypes.c_int * 2), ("num_heads", ctypes.c_int), ("row_bytes", ctypes.c_int), ("unit", ctypes.c_int),
    ]  # fmt: skip


@functools.lru_cache(maxsize=16)
def _load(device_index: int) -> driver.Kernel:
    with torch.cuda.device(device_index):
        binary = cuda_compile.compile_source(Path(__file__).parent, "append.cu", DEFINES, driver.arch_of(torch.cuda.get_device_capability()))
        return driver.Kernel(binary, "append_tokens")


def table(slot_mapping: SlotMapping, store: PageStore) -> torch.Tensor:
    """int64 [N, 5] on the store's device: the runs, pages by their bytes from the first slab's start. Good for every layer of the pool, whose slabs lie alike.

    Made once per mapping and pool; does not wait for the GPU.
    """
    base = store.slabs[0].data_ptr()
    key = (store.device, *((s.data_ptr() - base, s.stride(0), s.shape[0]) for s in store.slabs))
    found = slot_mapping.tables.get(key)
    if found is None:
        rows = np.ascontiguousarray(slot_mapping.runs[:, [2, 0, 1, 3, 4]])
        rows[:, 0] = store.addresses()[rows[:, 0]] - base
        made = torch.from_numpy(rows)
        found = made.pin_memory().to(store.device, non_blocking=True) if store.device.type == "cuda" else made
        slot_mapping.tables[key] = found
    return found


def launch(k: torch.Tensor, v: torch.Tensor, store: PageStore, runs: torch.Tensor) -> None:
    """Write tokens in place, launching only (no allocation, no waiting).

    Args:
        k, v: [B, T, H, D] of the pages' dtype, last dim dense.
        runs: what `table` gave, for a mapping that `SlotMapping.check` lets pass with these tensors.
    """
    layout = store.layout
    size = k.element_size()
    args = _Args(
        runs=runs.data_ptr(), pages=store.slabs[0].data_ptr(), head_bytes=layout.head_bytes, num_heads=layout.num_kv_heads, row_bytes=layout.head_dim * size
    )
    multiples = [args.row_bytes, *(n for slab in store.slabs for n in (slab.data_ptr(), slab.stride(0)))]
    for i, (name, x) in enumerate((("k_raw", k), ("v_raw", v))):
        strides = [s * size for s in x.stride()[:3]]
        args.x[i], args.offset[i], args.stride[i] = x.data_ptr(), layout.sections[name].offset, (ctypes.c_int64 * 3)(*strides)
        multiples += [x.data_ptr(), layout.sections[name].offset, *(s for s, n in zip(strides, x.shape, strict=False) if n > 1)]
    args.unit = size if any(n % 16 for n in multiples) else 16
    _load(-1 if k.device.index is None else k.device.index).launch(
        2 * layout.num_kv_heads * len(runs), THREADS, args, torch.cuda.current_stream(k.device).cuda_stream
    )


def append(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> None:
    """Write tokens in place; arguments and errors of the reference. Copies nothing where the tensors' last dims are dense."""
    slot_mapping.check(k, v, store)
    if len(slot_mapping.runs):
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        launch(k, v, store, table(slot_mapping, store))
