"""Matrix quantization on the CPU: the production kernel, and the paper's scalar baseline to measure it against.

`kernel` is "fast" (vectorised, threads), "column_outer" (the paper's listings as printed: scales walk column by column)
or "row_order" (the same scalar arithmetic in memory order). The baselines round half away from zero and divide; "fast"
rounds half to even and multiplies by 1 / scale, which differs by one code in about 3 of a million elements.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from kvbits.errors import DataError, SpecError, UnsupportedError
from kvbits.ops.cpu import library as cpu_library
from kvbits.ops.cpu.library import check

KERNELS = {"fast": 0, "column_outer": 1, "row_order": 2}


PATH = Path(__file__).parent.parent / "libkvbits_studies.so"


@functools.cache
def _open() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(PATH))
    lib.kvbits_matrix_use.argtypes = [c_char_p, c_void_p]
    lib.kvbits_matrix_scales.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int32]
    lib.kvbits_matrix_quantize.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32, c_int32]
    lib.kvbits_matrix_dequantize.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32, c_int32]
    lib.kvbits_matrix_quantize_groups.argtypes = [
        c_void_p,
        c_int64,
        c_int64,
        c_int32,
        c_int32,
        c_void_p,
        c_void_p,
        c_int32,
    ]
    return lib


def unavailable() -> str | None:
    """Return why there are no CPU kernels here, or None."""
    if not PATH.is_file():
        return f"{PATH} was not built; run cmake -S studies -B build/studies && cmake --build build/studies"
    return cpu_library.unavailable()


def library() -> ctypes.CDLL:
    """Load the studies' library (csrc/matrix.h), in the instruction set and on the threads that the CPU library uses
    now.

    Raises:
        UnsupportedError: there is none here.
    """
    if why := unavailable():
        raise UnsupportedError(why)
    lib, tier = _open(), cpu_library.tier()
    if lib.kvbits_matrix_use(tier.encode(), cpu_library.openmp_parallel()):
        raise UnsupportedError(f"{PATH} has no kernels of tier {tier!r}; build it again")
    return lib


def refuses(x: torch.Tensor) -> str | None:
    """Return why x is not processed here, or None."""
    return unavailable() if x.device.type == "cpu" else f"the matrix is on {x.device}, not on the CPU"


def _checked(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    if x.dtype != dtype or x.device.type != "cpu" or (x.dim() != 2 if shape is None else tuple(x.shape) != shape):
        raise DataError(
            f"{name} must be {dtype} {'[rows, columns]' if shape is None else list(shape)} on the CPU, got {x.dtype}"
            f" {list(x.shape)} on {x.device}"
        )
    if shape is None and not x.shape[1]:
        raise DataError(f"{name} is {list(x.shape)}: a matrix without columns has no scales; give it at least 1 column")
    return x.contiguous()


def _kernel(name: str) -> int:
    if name not in KERNELS:
        raise SpecError(f"unknown kernel {name!r}; known: {', '.join(KERNELS)}")
    return KERNELS[name]


def compute_scales(x: torch.Tensor, *, kernel: str = "fast") -> torch.Tensor:
    """Compute the scale of each column of x, float32 [rows, columns]: float32 [columns]."""
    x = _checked("x", x, torch.float32)
    scales = torch.empty(x.shape[1])
    check(
        library().kvbits_matrix_scales(
            x.data_ptr(), *x.shape, scales.data_ptr(), _kernel(kernel), torch.get_num_threads()
        )
    )
    return scales


def quantize(
    x: torch.Tensor, scales: torch.Tensor, *, kernel: str = "fast", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize x, float32 [rows, columns], with scales float32 [columns]: int8 [rows, columns]."""
    x = _checked("x", x, torch.float32)
    scales = _checked("scales", scales, torch.float32, (x.shape[1],))
    out = _output("out", out, torch.int8, tuple(x.shape))
    check(
        library().kvbits_matrix_quantize(
            x.data_ptr(), *x.shape, scales.data_ptr(), out.data_ptr(), _kernel(kernel), torch.get_num_threads()
        )
    )
    return out


def dequantize(
    q: torch.Tensor, scales: torch.Tensor, *, kernel: str = "fast", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequantize q, int8 [rows, columns]: float32 [rows, columns]."""
    q = _checked("q", q, torch.int8)
    scales = _checked("scales", scales, torch.float32, (q.shape[1],))
    out = _output("out", out, torch.float32, tuple(q.shape))
    check(
        library().kvbits_matrix_dequantize(
            q.data_ptr(), *q.shape, scales.data_ptr(), out.data_ptr(), _kernel(kernel), torch.get_num_threads()
        )
    )
    return out


def quantize_groups(
    x: torch.Tensor, size: int, bits: int = 8, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups: (codes, scales [rows, columns / size]); layouts as in `reference.quantize_groups`. `size` is a
    multiple of 16.
    """
    x = _checked("x", x, torch.float32)
    rows, columns = x.shape
    if bits not in (4, 8) or size < 16 or size % 16 or columns % size or (bits == 4 and columns // size % 2):
        raise SpecError(
            f"groups of {size} columns in {bits} bits: bits is 4 or 8, the size a multiple of 16 that divides"
            f" columns={columns}, evenly for 4"
        )
    out = _output("out", out, torch.int8 if bits == 8 else torch.uint8, (rows, columns * bits // 8))
    scales = torch.empty(rows, columns // size)
    check(
        library().kvbits_matrix_quantize_groups(
            x.data_ptr(), rows, columns, size, bits, scales.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
    )
    return out, scales


def _output(name: str, out: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype)
    if not out.is_contiguous():
        raise DataError(f"{name} must be contiguous, got strides {out.stride()}")
    return _checked(name, out, dtype, shape)
