"""Matrix quantization on NVIDIA GPUs: the paper's four variants, and the production kernels to beat them with.

`kernel` is "naive", "tiled", "coarsened" or "vectorized" (the paper's listings, dividing by the scale), "fast" (16-byte
loads, several rows of a thread in flight, multiplying by 1 / scale like the reference) or "persistent" (the same code,
one wave of blocks that stay). Scales: "fast" takes all columns' maxima in one streaming pass, "warp" gives a warp to
each column.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from kvbits.errors import DataError, SpecError
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.engine.runtime import driver
from kvbits.ops.cuda.engine.runtime.compile import Source
from kvbits.ops.descriptor import TORCH_NUMBERS

PRINTED = ("naive", "tiled", "coarsened", "vectorized")
KERNELS = (*PRINTED, "persistent", "fast")
SCALE_KERNELS = ("fast", "warp")
TILE_X, TILE_Y = 32, 8
BLOCKS_PER_PROCESSOR = 16
RESIDENT_BLOCKS = 8  # blocks of 256 threads that a multiprocessor of 2048 holds at once
COARSE_ROWS = 1024
GROUP_LANES = 16
ROWS_PER_THREAD = 8
MOST_GRID_Y = 65_535


def refuses(x: torch.Tensor) -> str | None:
    """Return why x is not processed here, or None."""
    if x.device.type != "cuda" or torch.version.hip:
        return f"the matrix is on {x.device}, not on an NVIDIA GPU"
    return cuda_compile.missing()


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "q", "y", "scales", "largest")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        ("size", ctypes.c_int),
        ("bits", ctypes.c_int),
    ]


def defines(dtype: torch.dtype, columns: int) -> dict[str, int]:
    """Return the macros of one instantiation: 16-byte vectors where rows are whole vectors, else single elements."""
    vector = 16 // dtype.itemsize
    return {"X_TYPE": TORCH_NUMBERS[dtype], "VECTOR": vector if columns % vector == 0 else 1}


@functools.lru_cache(maxsize=64)
def _load(name: str, dtype: torch.dtype, vectors: bool, device_index: int) -> tuple[driver.Kernel, int]:
    macros = defines(dtype, 0 if vectors else 1)
    return driver.load(Source(Path(__file__).parent, "matrix.cu", macros), name, device_index), macros["VECTOR"]


def _launch(name: str, dtype: torch.dtype, args: _Args, device: torch.device, *, persistent: bool = False) -> None:
    rows, columns = args.rows, args.columns
    vectors = columns % (16 // dtype.itemsize) == 0
    kernel, vector = _load(name, dtype, vectors, device.index)
    lanes = -(-columns // vector)
    block: tuple[int, int] | int = 256
    if name == "quantize_groups":
        grid = (-(-rows * (columns // args.size // (2 if args.bits == 4 else 1)) * GROUP_LANES // 256), 1)
    elif name.endswith(("naive", "tiled", "vectorized")):
        across = lanes if name.endswith("vectorized") else columns
        grid, block = (-(-across // TILE_X), -(-rows // TILE_Y)), (TILE_X, TILE_Y)
        if grid[1] > MOST_GRID_Y:
            raise SpecError(
                f"{name} takes at most {MOST_GRID_Y * TILE_Y} rows, as printed in the paper; use kernel='fast' for"
                f" {rows}"
            )
    elif name.endswith("coarsened"):
        grid = (-(-columns // 256), min(rows, COARSE_ROWS))
    elif name.startswith("scales"):
        grid = (-(-columns // (8 if name == "scales_warp" else 256)), 1)
    else:
        across = min(lanes, 256)
        wide = -(-lanes // across)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        whole = -(-rows // (ROWS_PER_THREAD * max(1, 256 // across)))  # every thread one round of rows
        # writing gains nothing from staying
        most = whole if name == "dequantize" else -(-processors * BLOCKS_PER_PROCESSOR // wide)
        if persistent:
            most = max(1, processors * RESIDENT_BLOCKS // wide)
        grid = (wide, max(1, min(MOST_GRID_Y, most, whole)))
    kernel.launch(grid, block, args, torch.cuda.current_stream(device).cuda_stream)


def _check(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None) -> None:
    if (
        x.dtype not in dtypes
        or not x.is_cuda
        or not x.is_contiguous()
        or (x.dim() != 2 if shape is None else tuple(x.shape) != shape)
    ):
        expected = "[rows, columns]" if shape is None else list(shape)
        raise DataError(
            f"{name} must be contiguous {expected} on a GPU in {', '.join(map(str, dtypes))}, got {x.dtype}"
            f" {list(x.shape)} on {x.device}"
        )
    if shape is None and not x.shape[1]:
        raise DataError(f"{name} is {list(x.shape)}: a matrix without columns has no scales; give it at least 1 column")


def compute_scales(x: torch.Tensor, *, kernel: str = "fast") -> torch.Tensor:
    """Compute the scale of each column of x [rows, columns], float32 [columns]; 1 for a column of zeros."""
    _check("x", x, tuple(TORCH_NUMBERS))
    if kernel not in SCALE_KERNELS:
        raise SpecError(f"unknown kernel {kernel!r}; known: {', '.join(SCALE_KERNELS)}")
    scales, largest = torch.empty(x.shape[1], device=x.device), torch.zeros(x.shape[1], device=x.device)
    args = _Args(
        x=x.data_ptr(), scales=scales.data_ptr(), largest=largest.data_ptr(), rows=x.shape[0], columns=x.shape[1]
    )
    for name in ("scales_warp",) if kernel == "warp" else ("column_maxima", "scales_of_maxima"):
        _launch(name, x.dtype, args, x.device)
    return scales


def quantize(
    x: torch.Tensor, scales: torch.Tensor, *, kernel: str = "fast", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize x with scales float32 [columns]: int8 [rows, columns]."""
    _check("x", x, tuple(TORCH_NUMBERS))
    _check("scales", scales, (torch.float32,), (x.shape[1],))
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device) if out is None else out
    _check("out", out, (torch.int8,), tuple(x.shape))
    args = _Args(x=x.data_ptr(), q=out.data_ptr(), scales=scales.data_ptr(), rows=x.shape[0], columns=x.shape[1])
    _launch(_name("quantize", kernel), x.dtype, args, x.device, persistent=kernel == "persistent")
    return out


def dequantize(
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    kernel: str = "fast",
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize q, int8 [rows, columns]: [rows, columns] in `dtype`."""
    _check("q", q, (torch.int8,))
    _check("scales", scales, (torch.float32,), (q.shape[1],))
    out = torch.empty(q.shape, dtype=dtype, device=q.device) if out is None else out
    _check("out", out, tuple(TORCH_NUMBERS), tuple(q.shape))
    args = _Args(q=q.data_ptr(), y=out.data_ptr(), scales=scales.data_ptr(), rows=q.shape[0], columns=q.shape[1])
    _launch(_name("dequantize", kernel), out.dtype, args, q.device, persistent=kernel == "persistent")
    return out


def quantize_with_scales(
    x: torch.Tensor, *, out: torch.Tensor | None = None, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x: (codes int8 [rows, columns], scales float32 [columns]). Maxima come in one pass over x, codes in a
    second that starts where the first ended.
    """
    _check("x", x, tuple(TORCH_NUMBERS))
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device) if out is None else out
    scales = torch.empty(x.shape[1], device=x.device) if scales is None else scales
    _check("out", out, (torch.int8,), tuple(x.shape))
    _check("scales", scales, (torch.float32,), (x.shape[1],))
    largest = torch.zeros(x.shape[1], device=x.device)
    args = _Args(
        x=x.data_ptr(),
        q=out.data_ptr(),
        scales=scales.data_ptr(),
        largest=largest.data_ptr(),
        rows=x.shape[0],
        columns=x.shape[1],
    )
    _launch("column_maxima", x.dtype, args, x.device)
    _launch("quantize", x.dtype, args, x.device)
    return out, scales


def quantize_groups(
    x: torch.Tensor, size: int, bits: int = 8, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups: (codes, scales float32 [rows, columns / size]); layouts as in `reference.quantize_groups`.

    `size` is a multiple of 16.
    """
    _check("x", x, tuple(TORCH_NUMBERS))
    rows, columns = x.shape
    if bits not in (4, 8) or size < 16 or size % 16 or columns % size or (bits == 4 and columns // size % 2):
        raise SpecError(
            f"groups of {size} columns in {bits} bits: bits is 4 or 8, the size a multiple of 16 that divides"
            f" columns={columns}, evenly for 4"
        )
    dtype, shape = (torch.int8, (rows, columns)) if bits == 8 else (torch.uint8, (rows, columns // 2))
    out = torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
    _check("out", out, (dtype,), shape)
    scales = torch.empty(rows, columns // size, device=x.device)
    if rows:
        args = _Args(
            x=x.data_ptr(), q=out.data_ptr(), scales=scales.data_ptr(), rows=rows, columns=columns, size=size, bits=bits
        )
        _launch("quantize_groups", x.dtype, args, x.device)
    return out, scales


def _name(what: str, kernel: str) -> str:
    if kernel not in KERNELS:
        raise SpecError(f"unknown kernel {kernel!r}; known: {', '.join(KERNELS)}")
    return what if kernel in ("fast", "persistent") else f"{what}_{kernel}"
