"""close_pages on NVIDIA GPUs: scales, codes and packing in one launch, bit for bit what the reference stores.

`launch_close` only launches and leaves its findings in a status tensor, and so does `close_later`; `close` is the op's contract and reads them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .....errors import DataError, UnsupportedError
from .....later import upload
from .....quant.qparams import require_finite
from .....spec import LowLayout, PageLayout, PerChannel
from ....descriptor import DTYPES, TORCH_DTYPES
from ....types import LowStore, PageStore, banded_sides, check_closing, check_low, kvquant_extras, wider_scales
from ...engine.close_step import STEP_FIELDS
from ...engine.runtime import compile as cuda_compile
from ...engine.runtime import driver
from ...engine.side import low_arguments, refuses_low, side_arguments, with_aligned_rows
from ..codebook import close as codebook
from ..klt import close as banded

ROWS_PER_THREAD = 8
STATUS_FIELDS = 6


def refuses(k: torch.Tensor, store: PageStore, low: Sequence[LowStore] = ()) -> str | None:
    """Why pages of this store, with low planes in the stores `low`, cannot be closed here, or None."""
    if why := _refuses_planes(store.layout, len(low)):
        return why
    if k.device.type != "cuda" or store.device.type != "cuda":
        return f"keys are on {k.device}, pages on {store.device}, not on a GPU"
    return refuses_on(store.layout, k.dtype, k.device)


def refuses_on(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """The part of `refuses` that needs no pages."""
    if torch.version.hip:
        return "the GPU is not an NVIDIA GPU"
    if why := cuda_compile.missing():
        return why
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9) and any(spec.format.startswith("fp8") for spec in (layout.key, layout.value)):
        return f"compute capability {capability[0]}.{capability[1]} cannot round to fp8 (8.9 can)"
    return refuses_layout(layout, dtype)


def refuses_layout(layout: PageLayout, dtype: torch.dtype) -> str | None:
    """The part of `refuses` that needs no GPU."""
    if banded_sides(layout):
        return banded.refuses_layout(layout, dtype)
    if kvquant_extras(layout):
        return codebook.refuses_layout(layout, dtype)
    if dtype not in TORCH_DTYPES:
        return f"keys are {dtype}; the kernel takes float32, float16 and bfloat16"
    if layout.page_size * layout.head_dim > 512 * 8 * ROWS_PER_THREAD:
        return f"a page of {layout.page_size} x {layout.head_dim} numbers does not fit one block"
    for kind, spec in (("key", layout.key), ("value", layout.value)):
        groups = 1 if isinstance(spec.granularity, PerChannel) else spec.num_groups(layout.head_dim)
        if layout.head_dim // groups % 8:
            return f"{kind} groups of {layout.head_dim // groups} channels are no multiple of 8"
    return None


def _refuses_planes(layout: PageLayout, count: int) -> str | None:
    """Why `count` low planes of pages of this layout cannot be written, or None."""
    extras = banded_sides(layout) or kvquant_extras(layout)
    return refuses_low(count) or (f"{extras} with low planes have no GPU kernel" if count and extras else None)


class _Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p * 2), ("stride", ctypes.c_int64 * 3 * 2), ("page_address", ctypes.c_void_p), ("scale", ctypes.c_void_p * 2),
        ("bias", ctypes.c_void_p * 2), ("status", ctypes.c_void_p), ("low_address", ctypes.c_void_p),
        ("num_heads", ctypes.c_int), ("head_bytes", ctypes.c_int), ("low_head_bytes", ctypes.c_int),
    ]  # fmt: skip


class StepArgs(_Args):
    """struct Args of close.cu with APPENDS."""

    _fields_ = STEP_FIELDS


def defines(layout: PageLayout, dtype: torch.dtype, low: LowLayout | None = None, appends: bool = False) -> dict[str, int | str]:
    """Macros of one instantiation of close.cu; `appends`: of `DecodeStep`."""
    d, page = layout.head_dim, layout.page_size
    octets = d // 8
    threads = max(128, min(512, -(-page * octets // 4 // 32) * 32), -(-page * octets // ROWS_PER_THREAD // 32) * 32)
    teams = threads // octets
    scales = max(d, *(page * s.num_groups(d) for s in (layout.key, layout.value) if not isinstance(s.granularity, PerChannel)), 0)
    last = list(layout.sections.values())[-1]
    union = max(8 * max(page * octets, teams * d), 8 * teams * d, page * (d + 4))
    return {
        "HEAD_DIM": d, "PAGE": page, "THREADS": threads, "X_TYPE": TORCH_DTYPES[dtype], "RAW_TYPE": DTYPES[layout.raw_dtype],
        "GROUP_SCALES": scales,
        "USED_BYTES": -(-(last.offset + last.nbytes) // 4) * 4, "K_SIDE": side_arguments(layout, "k"),
        "V_SIDE": side_arguments(layout, "v"), "K_LOW": low_arguments(low, "k"), "V_LOW": low_arguments(low, "v"),
        "SHARED_BYTES": -(-union // 16) * 16 + 8 * scales + 4 * d + 16, "APPENDS": int(appends),
    }  # fmt: skip


@functools.lru_cache(maxsize=256)
def _load(layout: PageLayout, dtype: torch.dtype, device_index: int, low: LowLayout | None = None, appends: bool = False) -> tuple[driver.Kernel, int]:
    macros = defines(layout, dtype, low, appends)
    kernel = driver.load(Path(__file__).parent, "close.cu", "close_pages", macros, device_index, int(macros["SHARED_BYTES"]), early=appends)
    return kernel, int(macros["THREADS"])


def launch_close(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_address: torch.Tensor, status: torch.Tensor, low: tuple[LowLayout, torch.Tensor] | None = None
) -> None:
    """Close pages without waiting.

    Args:
        k, v: [n, H, page_size, head_dim], 16-byte aligned rows.
        page_address: int64 [n] on the device: byte addresses of the pages' first structs.
        status: int32 [6] on the device, added to: clamped elements of keys and values, overflowed scales, non-finite inputs.
        low: layout of the pages' low planes, and int64 [n] on the device: byte addresses of their first structs.
    """
    layout = store.layout
    if low:
        if len(low) != 2 or not isinstance(low[0], LowLayout) or len(low[1]) != len(page_address):
            raise DataError(f"low must be (layout, addresses of {len(page_address)} pages) of the one plane that the CUDA kernels write, got {low}")
        check_low(layout, low[:1])
    kernel, threads = _load(layout, k.dtype, k.device.index, low[0] if low else None)
    args = _Args(page_address=page_address.data_ptr(), status=status.data_ptr(), num_heads=layout.num_kv_heads, head_bytes=layout.head_bytes)
    if low:
        args.low_address, args.low_head_bytes = low[1].data_ptr(), low[0].head_bytes
    for i, (kind, x) in enumerate((("k", k), ("v", v))):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*x.stride()[:3])
        for name, field in (("scale", args.scale), ("bias", args.bias)):
            static = store.static.get(f"{kind}_{name}")
            if static is not None:
                field[i] = static.data_ptr()
    kernel.launch(2 * layout.num_kv_heads * len(page_address), threads, args, torch.cuda.current_stream(k.device).cuda_stream)


class DecodeStep:
    """What the pages of one layer need in every decode step: pages that close are quantized, the fresh tokens stored raw. One launch, which asks the device
    what closes and where tokens go, so that it can be captured in a CUDA graph.

    Args:
        store: pages that close, or `tail` again where nothing does.
        tail: raw pages.
        closings: int64 [B, 2] on the device, struct Closing of runs.cuh; runs: int64 [B, 5], struct Run. Bytes count from the first slab of each store.
        status: int32 [6] on the device, added to (see `launch_close`).
        undo: [2, B, H, D] of `dtype`, dense: takes the rows that tokens replace, for `put_back`.
        tail_starts: int32 [B] on the device, position of the first token of the raw pages that stay, for keys in the frame of their page.
    """

    def __init__(
        self, store: PageStore, tail: PageStore, dtype: torch.dtype, closings: torch.Tensor, runs: torch.Tensor, status: torch.Tensor, undo: torch.Tensor,
        tail_starts: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        layout, raw = store.layout, tail.layout
        is_banded, device_index = banded_sides(layout) is not None, -1 if store.device.index is None else store.device.index
        self._kernel, self._threads = banded.load(layout, dtype, device_index, True) if is_banded else _load(layout, dtype, device_index, None, True)
        self._grid = 2 * layout.num_kv_heads * len(runs)
        self._keep = (store, tail, closings, runs, status, undo, tail_starts)
        self._undo = undo
        self._given: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # strides that need no copy
        self._args = (banded.StepArgs if is_banded else StepArgs)(
            status=status.data_ptr(), num_heads=layout.num_kv_heads, head_bytes=layout.head_bytes, closings=closings.data_ptr(), runs=runs.data_ptr(),
            closed=store.slabs[0].data_ptr(), tail=tail.slabs[0].data_ptr(), tail_head_bytes=raw.head_bytes,
        )  # fmt: skip
        for i, kind in enumerate("kv"):
            self._args.tail_offset[i] = raw.sections[f"{kind}_raw"].offset
            if is_banded:
                continue
            for name, field in (("scale", self._args.scale), ("bias", self._args.bias)):
                static = store.static.get(f"{kind}_{name}")
                if static is not None:
                    field[i] = static.data_ptr()
        if isinstance(self._args, banded.StepArgs):
            self._args.num_pages, self._args.pages_each = len(runs), 1
            banded.set_static(self._args, store, tail_starts)
        self._fresh = self._args.fresh  # the same memory
        self._args.before[0], self._args.before[1] = (x.data_ptr() for x in undo)

    def run(self, k: torch.Tensor, v: torch.Tensor, stream: int) -> None:
        """Store keys and values [B, 1, H, D] of the pages' dtype; the rows they replace go to `undo`."""
        given = (k.stride(), v.stride())
        k_at, v_at = k.data_ptr(), v.data_ptr()
        if given != self._given or (k_at | v_at) % 16:
            k, v = with_aligned_rows(k), with_aligned_rows(v)
            k_at, v_at, size = k.data_ptr(), v.data_ptr(), k.element_size()
            for i, x in enumerate((k, v)):
                self._args.fresh_stride[i][0], self._args.fresh_stride[i][1] = x.stride(0) * size, x.stride(2) * size
            self._given = given if given == (k.stride(), v.stride()) else None
        self._fresh[0], self._fresh[1] = k_at, v_at
        self._kernel.launch(self._grid, self._threads, self._args, stream)

    def put_back(self, nothing_closes: torch.Tensor, stream: int) -> None:
        """Write what `run` replaced; `nothing_closes`: as `closings`, NOWHERE alone."""
        args, (k, v) = self._args, self._undo.unsqueeze(2)
        args.closings, args.before[0], args.before[1] = nothing_closes.data_ptr(), None, None
        self.run(k, v, stream)
        args.closings, args.before[0], args.before[1] = self._keep[2].data_ptr(), k.data_ptr(), v.data_ptr()


def close(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_ids: np.ndarray, low: Sequence[tuple[LowStore, np.ndarray]] = (), starts: np.ndarray | None = None
) -> dict[str, int]:
    """Close pages in place.

    Args:
        k, v: [n, H, page_size, head_dim] float32, float16 or bfloat16.
        page_ids: [n] pages of the store to write.
        low: stores of low planes and their pages [n], one at most.
        starts: [n] position of each page's first token, for keys stored before the rotary embedding or in a basis.

    Returns:
        How many elements of keys and of values were clamped to their code range (quantized tensors only).

    Raises:
        DataError: shapes that do not fit, NaN or infinity, or a scale that overflows its storage dtype. The pages are then written with unusable numbers.
        UnsupportedError: several low planes of a page, or one of KVQuant's formats.
    """
    layout, status = store.layout, close_later(k, v, store, page_ids, low, starts)
    found = [0] * STATUS_FIELDS if status is None else status.tolist()
    for i, (name, x) in enumerate((("keys", k), ("values", v))):
        if found[4 + i]:
            require_finite(x, name)
        if found[2 + i]:
            spec = (layout.key, layout.value)[i]
            way_out = wider_scales(spec) or "keep the layer raw (an Override)"
            raise DataError(f"a scale, bias or mean of the {name} overflows {spec.scale_dtype}; {way_out}")
    return {kind: found[i] for i, (kind, spec) in enumerate((("k", layout.key), ("v", layout.value))) if not spec.is_raw}


def close_later(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_ids: np.ndarray, low: Sequence[tuple[LowStore, np.ndarray]] = (), starts: np.ndarray | None = None
) -> torch.Tensor | None:
    """`close` without waiting: int32 [6] on the device, see `launch_close`; None for no pages.

    Raises:
        DataError, UnsupportedError: as `close`, for all that needs no look at numbers.
    """
    layout = store.layout
    if why := _refuses_planes(layout, len(low)):
        raise UnsupportedError(f"{why}; use the reference")
    page_ids, *low_ids = check_closing(store, page_ids, low)
    shape = (len(page_ids), layout.num_kv_heads, layout.page_size, layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != shape or x.dtype != k.dtype or x.device != store.device:
            raise DataError(f"{name} must be {k.dtype} {list(shape)} on {store.device}, got {x.dtype} {list(x.shape)} on {x.device}")
    if not len(page_ids):
        return None
    for spec, kind in ((layout.key, "k"), (layout.value, "v")):
        if spec.static and f"{kind}_scale" not in store.static:
            raise DataError(f"{spec.format} with static scales was given no calibrated scales; calibrate first or use static=False")
    k, v = with_aligned_rows(k), with_aligned_rows(v)
    addresses = upload(store.addresses()[page_ids], k.device)
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=k.device)
    fine = [(s.layout, upload(s.addresses()[ids], k.device)) for (s, _), ids in zip(low, low_ids, strict=True)]
    if banded_sides(layout):
        banded.launch(k, v, store, addresses, status, banded.first_positions(store, starts, len(page_ids), k.device))
    elif kvquant_extras(layout):
        first = codebook.first_angles(store, starts, len(page_ids), k.device)
        codebook.launch(k, v, store, addresses, status, first)
    else:
        launch_close(k, v, store, addresses, status, fine[0] if fine else None)
    return status
