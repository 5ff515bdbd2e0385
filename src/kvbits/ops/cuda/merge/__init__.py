"""Merging of attention over disjoint sets of keys on a GPU: `ops.reference.merge` for 16-bit results, read once and
written in their dtype.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from ...descriptor import MATRIX_DTYPES, TORCH_NUMBERS
from ..engine.runtime import driver
from ..engine.runtime.compile import Source

MOST_PARTS = 8
THREADS = 256


class _Partial(ctypes.Structure):
    """struct Partial of merge.cu."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 3),
        ("lse_stride", ctypes.c_int64 * 3),
    ]


class _Args(ctypes.Structure):
    """struct Args of merge.cu."""

    _fields_ = [
        ("parts", _Partial * MOST_PARTS),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_parts", "num_tokens", "num_heads")),
    ]


def source(head_dim: int, dtype: torch.dtype) -> Source:
    """Return the source that merges results of so many channels."""
    macros = {"HEAD_DIM": head_dim, "TYPE": TORCH_NUMBERS[dtype], "MOST_PARTS": MOST_PARTS, "THREADS": THREADS}
    return Source(Path(__file__).parent, "merge.cu", macros)


@functools.lru_cache(maxsize=32)
def _load(head_dim: int, dtype: torch.dtype, device_index: int) -> driver.Kernel:
    return driver.load(source(head_dim, dtype), "merge_partials", device_index)


def refuses(outs: Sequence[torch.Tensor]) -> str | None:
    """Return why results like these are not merged here, or None."""
    out = outs[0]
    if (why := driver.refuses(out.device)) is not None:
        return why
    if out.dtype not in MATRIX_DTYPES or out.shape[-1] % 8:
        return (
            f"results are {out.dtype} of head_dim {out.shape[-1]}; the kernel takes float16 and bfloat16, and multiples"
            " of 8"
        )
    if len(dtypes := {x.dtype for x in outs}) > 1:
        return f"results are of {len(dtypes)} dtypes; the kernel merges those of one"
    return None


def prepare(outs: Sequence[torch.Tensor]) -> None:
    """Compile and load the kernel that merges results like these."""
    _kernel_for(outs[0])


def _kernel_for(out: torch.Tensor) -> driver.Kernel:
    return _load(out.shape[-1], out.dtype, -1 if out.device.index is None else out.device.index)


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    into: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the union of key sets.

    Args:
        outs: each [B, T, Hq, D] of one 16-bit dtype; others than the first may be 1 where it is more.
        lses: each float32 [B, T, Hq], natural log; -inf where a set was empty (its `out` is then not read).
        into: takes the merged `out` if given, dense, of that shape and dtype; it may be one of `outs`.
        lse: takes the merged one if given, float32 [B, T, Hq], dense and none of `lses`.

    Returns:
        out [B, T, Hq, D] of that dtype and lse float32 [B, T, Hq], both dense; rows that saw no key at all are 0 and
            -inf.
    """
    first = outs[0]
    while len(outs) > MOST_PARTS:
        merged = merge_partials(outs[:MOST_PARTS], lses[:MOST_PARTS])
        outs, lses = [merged[0], *outs[MOST_PARTS:]], [merged[1], *lses[MOST_PARTS:]]
    outs = [(x if _readable(x) else x.contiguous()).expand_as(first) for x in outs]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device) if into is None else into
    lse = torch.empty(first.shape[:3], dtype=torch.float32, device=first.device) if lse is None else lse
    args = _Args(
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        rows=lse.numel(),
        num_parts=len(outs),
        num_tokens=first.shape[1],
        num_heads=first.shape[2],
    )
    for part, x, m in zip(args.parts, outs, lses, strict=False):
        part.out, part.lse = x.data_ptr(), m.data_ptr()
        part.stride[:], part.lse_stride[:] = x.stride()[:3], m.expand_as(lse).stride()
    grid = -(-lse.numel() * (first.shape[3] // 8) // THREADS)
    if grid:
        _kernel_for(first).launch(grid, THREADS, args, torch.cuda.current_stream(first.device).cuda_stream)
    return out, lse


def _readable(x: torch.Tensor) -> bool:
    """Return whether rows can be read 16 bytes at a time."""
    return x.stride(3) == 1 and not any(s % 8 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
