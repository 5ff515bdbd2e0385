"""Queries and keys of a step times a Hadamard matrix on a GPU, in one launch: what two matrix products (`quant.basis`) do, rounded once as they are."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from ....errors import DataError
from ...descriptor import MATRIX_DTYPES, TORCH_NUMBERS
from ..engine.runtime import driver
from ..engine.side import with_aligned_rows

THREADS = 128
HEAD_DIMS = (64, 128, 256)


class _Rows(ctypes.Structure):
    """struct Rows of rotate.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("stride", ctypes.c_int64 * 2), ("tokens", ctypes.c_int64), ("heads", ctypes.c_int),
        ("factor", ctypes.c_float),
    ]  # fmt: skip


class _Args(ctypes.Structure):
    """struct Args of rotate.cu."""

    _fields_ = [("rows", _Rows * 2)]


def defines(head_dim: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Macros of one instantiation."""
    return {"HEAD_DIM": head_dim, "TYPE": TORCH_NUMBERS[dtype], "THREADS": THREADS}


@functools.lru_cache(maxsize=32)
def _load(head_dim: int, dtype: torch.dtype, device_index: int) -> driver.Kernel:
    return driver.load(Path(__file__).parent, "rotate.cu", "rotate", defines(head_dim, dtype), device_index)


def refuses(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why queries and keys of this kind are not rotated here, or None."""
    if dtype not in MATRIX_DTYPES or head_dim not in HEAD_DIMS:
        return f"rows are {dtype} of head_dim {head_dim}; the kernel takes float16 and bfloat16 of {', '.join(map(str, HEAD_DIMS))}"
    return driver.refuses(device)


def prepare(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load what `rotate` launches, which cannot be done while a CUDA graph is captured."""
    _load(head_dim, dtype, -1 if device.index is None else device.index)


def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quant.basis.rotated_queries(q)` and `rotated_keys(k)`.

    Args:
        q, k: [M, Hq, D] and [N, H, D] of one 16-bit dtype that `refuses` lets pass; copied first if rows do not lie at multiples of 16 bytes.

    Returns:
        Of the same shapes and dtype, dense. Sums are in float32, in another order than a matrix product's.

    Raises:
        DataError: q and k differ in head_dim or dtype.
    """
    if q.dim() != 3 or k.dim() != 3 or (q.shape[2], q.dtype) != (k.shape[2], k.dtype):
        raise DataError(f"q is {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype}; rotate takes [M, Hq, D] and [N, H, D] of one dtype")
    head_dim = q.shape[2]
    bits = head_dim.bit_length() - 1
    outs = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q, k = with_aligned_rows(q), with_aligned_rows(k)
    args = _Args()
    for rows, x, out, exponent in zip(args.rows, (q, k), outs, (bits - bits // 2, bits // 2), strict=True):
        rows.x, rows.out, rows.tokens, rows.heads, rows.factor = x.data_ptr(), out.data_ptr(), len(x), x.shape[1], 2.0**-exponent
        rows.stride[:] = x.stride()[:2]
    grid = -(-(len(q) * q.shape[1] + len(k) * k.shape[1]) // (THREADS // 32))
    if grid:
        index = -1 if q.device.index is None else q.device.index
        _load(head_dim, q.dtype, index).launch(grid, THREADS, args, torch.cuda.current_stream(q.device).cuda_stream)
    return outs
