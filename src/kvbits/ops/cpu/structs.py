"""Builders of the C structs of page stores (encoders of `descriptor.Side`), which check every buffer, and keep
them.

A struct is built once per `PageStore` and kept on the object itself, for all that read and write its pages.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ...errors import DataError, UnsupportedError
from ...spec import OFFSETS, PageLayout
from ..descriptor import STATIC, TORCH_NUMBERS, Side, describe
from ..types import PageStore
from .library import StoreStruct, TensorStruct, unavailable

MAX_HEAD_DIM = 512
MAX_GROUPS = 32
MAX_QUERY_GROUP = 64


def refuses_writing(k: torch.Tensor, store: PageStore) -> str | None:
    """Return why keys and values like k cannot be written by the kernels where this store's pages are, or None."""
    if k.device.type != "cpu" or store.device.type != "cpu":
        return f"keys are on {k.device}, pages on {store.device}, not on the CPU"
    if reason := unavailable():
        return reason
    if k.dtype not in TORCH_NUMBERS:
        return f"keys are {k.dtype}; the CPU kernels take float32, float16 and bfloat16"
    return None


def refuses_layout(layout: PageLayout) -> str | None:
    """Return why the kernels cannot read or write pages of this layout, or None."""
    for name in ("head_dim", "value_head_dim"):
        if (d := getattr(layout, name)) % 8 or d > MAX_HEAD_DIM:
            return f"{name}={d} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if any(s.has_codebook or s.outliers or s.pre_rope for s in (layout.key, layout.value)):
        return "codebooks, outliers or keys before the rotary embedding: the reference closes and unpacks their pages"
    if layout.value.is_trellis and (
        (widths := set(layout.value.widths(layout.value_head_dim))) - {2, 3, 4} or len(widths) > 1
    ):
        return (
            f"trellis values of {', '.join(map(str, sorted(widths)))} bits: the CPU kernels take 2, 3 or 4, the same in"
            " every band"
        )
    for spec, d in ((layout.key, layout.head_dim), (layout.value, layout.value_head_dim)):
        if spec.is_raw:
            continue
        if layout.page_size % 32:
            return f"page_size={layout.page_size} is not a multiple of 32"
        groups = spec.num_groups(d)
        if not spec.static and groups < d and (d // groups % 4 or groups > MAX_GROUPS):
            return (
                f"groups of {d // groups} channels: the CPU kernels need a multiple of 4 and at most {MAX_GROUPS}"
                " groups per head"
            )
    return None


def _given(
    static: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], meaning: str, keep: list[torch.Tensor]
) -> torch.Tensor:
    """Return a calibrated tensor, fp32 on the host, kept alive."""
    given = static.get(name)
    if given is None or tuple(given.shape) != shape:
        got = "nothing" if given is None else f"shape {tuple(given.shape)}"
        raise DataError(f"{name} must be [{meaning}] = {list(shape)}, got {got}")
    keep.append(given.detach().to("cpu", torch.float32).contiguous())
    return keep[-1]


def _encoded(side: Side) -> TensorStruct:
    """Return the C struct of a side without what lies outside of its pages."""
    t = TensorStruct(
        format=side.format,
        raw_dtype=side.dtype,
        scale_dtype=side.scale_dtype,
        symmetric=not side.has_bias,
        per_channel=int(side.group == 1),
        group_size=side.group,
        hadamard=int(side.basis == "hadamard"),
        fitted=int(side.fitted),
    )
    for i, offset in enumerate(side.plane_offset):
        t.plane_offset[i] = offset
    for name in ("scale", "bias", "mean"):
        offset = getattr(side, f"{name}_offset")
        setattr(t, f"{name}_offset", -1 if offset is None else offset)
    return t


def _tensor(layout: PageLayout, kind: str, static: dict[str, torch.Tensor], keep: list[torch.Tensor]) -> TensorStruct:
    """Return keys ("k") or values ("v"), with what the layer's pages share kept alive."""
    side, d, heads = describe(layout, kind), layout.dim(kind), layout.num_kv_heads
    t = _encoded(side)
    if side.scale == STATIC:
        for name in ("scale", "bias") if side.has_bias else ("scale",):
            given = _given(static, f"{kind}_{name}", (heads, side.groups), "num_kv_heads, groups", keep)
            keep.append(given.repeat_interleave(side.group, dim=1).contiguous())
            setattr(t, f"static_{name}", keep[-1].data_ptr())
    if side.widths:
        keep.append(torch.tensor(side.widths, dtype=torch.uint8, device="cpu"))
        t.bands = keep[-1].data_ptr()
    if side.basis == "calibrated":
        t.inv_freq = _given(static, f"{kind}_inv_freq", (d // 2,), "head_dim / 2", keep).data_ptr()
        inverse = _given(static, f"{kind}_inverse", (heads, d, d), "num_kv_heads, head_dim, head_dim", keep)
        keep.append(F.pad(inverse.mT, (0, -d % 16)).unflatten(-1, (-1, 16)).transpose(1, 2).contiguous())
        t.from_basis = keep[-1].data_ptr()
        if side.offsets:
            given = _given(static, f"{kind}_offsets", (heads, OFFSETS, d), "num_kv_heads, offsets, head_dim", keep)
            keep.append(F.pad(given, (0, -d % 16)).contiguous())
            t.offsets = keep[-1].data_ptr()
        if f"{kind}_basis" in static:  # of writing alone
            t.to_basis = _given(
                static, f"{kind}_basis", (heads, d, d), "num_kv_heads, head_dim, head_dim", keep
            ).data_ptr()
    return t


def store_struct(store: PageStore) -> StoreStruct:
    """Return the C view of a page store, checked and kept on the store.

    Raises:
        DataError: a slab that is not what its layout says.
        UnsupportedError: a layout that `refuses_layout` names.
    """
    kept = store.__dict__.get("_cpu_struct")
    if kept is not None:
        return kept[0]
    layout = store.layout
    if why := refuses_layout(layout):
        raise UnsupportedError(f"CPU kernels: {why}; use the reference")
    keep: list[torch.Tensor] = []
    address, pages, stride = _slabs(store)
    struct = StoreStruct(
        key=_tensor(layout, "k", store.static, keep),
        value=_tensor(layout, "v", store.static, keep),
        page_size=layout.page_size,
        num_slabs=len(pages),
        head_bytes=layout.head_bytes,
        page_stride=stride,
        slab_address=address.ctypes.data,
        slab_pages=pages.ctypes.data,
    )
    store.__dict__["_cpu_struct"] = (struct, address, pages, keep)
    return struct


def _slabs(store: PageStore) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (address of each slab, pages of each, page stride in bytes), checked."""
    layout = store.layout
    strides = {s.stride(0) for s in store.slabs if s.shape[0] > 1}
    for slab in store.slabs:
        if slab.device.type != "cpu" or (slab.shape[0] > 1 and slab.stride(0) < layout.page_size_bytes):
            raise DataError(
                f"a slab must be on the CPU, its pages at least {layout.page_size_bytes} bytes apart, got"
                f" {slab.device} and {slab.stride(0)}"
            )
    if len(strides) > 1:
        raise DataError(f"slabs of one store must have one page stride, got {sorted(strides)}")
    address = np.array([s.data_ptr() for s in store.slabs], np.int64)
    pages = np.array([s.shape[0] for s in store.slabs], np.int64)
    return address, pages, strides.pop() if strides else layout.page_size_bytes
