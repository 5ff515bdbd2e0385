"""attend_pages on the CPU: one call of libkvbits_cpu over closed, sink and tail pages.

Integer codes meet integer q and p in exact dot products (csrc/engine/attend/dots_*.h); q and p are 16 bits against
8-bit codes and 8 bits against fewer, so that rounding them stays far below the format's own error: relative L2 noise
1e-4 and 2e-2. Raw and FP8 pages are computed in fp32.
"""

from __future__ import annotations

import ctypes

import torch

from ...errors import DataError
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..types import AttendCall, check_call
from . import structs
from .library import AttendStruct, PartStruct, check, library, unavailable
from .structs import MAX_QUERY_GROUP, store_struct, table_struct


def refuses(q: torch.Tensor, call: AttendCall) -> str | None:
    """Why this call cannot run here, or None.

    Args:
        q: [B, T, Hq, D] queries.
    """
    if q.device.type != "cpu":
        return f"queries are on {q.device}, not on the CPU"
    if reason := unavailable():
        return reason
    if q.dtype not in TORCH_NUMBERS:
        return f"queries are {q.dtype}; the CPU kernels take float32, float16 and bfloat16"
    for part in call.parts:
        layout = part.store.layout
        if part.store.slabs and part.store.device.type != "cpu":
            return f"pages are on {part.store.device}, not on the CPU"
        if reason := structs.refuses_layout(layout):
            return reason
        if q.shape[2] // layout.num_kv_heads > MAX_QUERY_GROUP:
            return (
                f"{q.shape[2] // layout.num_kv_heads} query heads per kv head; the CPU kernels take up to"
                f" {MAX_QUERY_GROUP}"
            )
    return None


def refuses_layout(layout: PageLayout, num_queries: int = 1) -> str | None:
    """The part of `refuses` that a layout decides."""
    return structs.refuses_layout(layout)


def _parts(call: AttendCall) -> ctypes.Array[PartStruct]:
    kept = call.__dict__.get("_cpu_parts")
    if kept is None:
        kept = (PartStruct * len(call.parts))()
        for struct, part in zip(kept, call.parts, strict=True):
            struct.store = ctypes.addressof(store_struct(part.store))
            struct.table = ctypes.addressof(table_struct(part.table))
        call.__dict__["_cpu_parts"] = kept
    return kept


def attend(q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the pages it can see.

    Args:
        q: [B, T, Hq, D] fp32, fp16 or bf16; the last dim dense.
        call: pages and options.
        q_positions: [B, T] int64; negative marks a padding row.

    Returns:
        (out [B, T, Hq, value_head_dim] fp32, lse [B, T, Hq] fp32, natural logarithm); 0 and -inf where nothing is
            visible.

    Raises:
        DataError: shapes, dtypes or tables that do not fit together.
    """
    if q.dim() != 4 or q.dtype not in TORCH_NUMBERS or q.device.type != "cpu":
        raise DataError(
            f"q must be [B, T, Hq, D] fp32, fp16 or bf16 on the CPU, got {q.dtype} {list(q.shape)} on {q.device}"
        )
    batch, tokens, heads, head_dim = q.shape
    if q_positions.shape != (batch, tokens) or q_positions.dtype != torch.int64 or q_positions.device.type != "cpu":
        raise DataError(
            f"q_positions must be int64 [{batch}, {tokens}] on the CPU, got {q_positions.dtype}"
            f" {list(q_positions.shape)}"
        )
    check_call(call, (batch, tokens, heads, head_dim))
    kv_heads = call.parts[0].store.layout.num_kv_heads if call.parts else 1
    if q.stride(3) != 1:
        q = q.contiguous()
    positions = q_positions.contiguous()
    value_head_dim = call.value_head_dim if call.parts else head_dim
    # plain integers: a torch.Size costs 2 us more
    out = torch.empty(batch, tokens, heads, value_head_dim, dtype=torch.float32, device="cpu")
    lse = torch.empty(batch, tokens, heads, dtype=torch.float32, device="cpu")
    parts = _parts(call)
    struct = AttendStruct(
        ctypes.addressof(parts),
        len(parts),
        batch,
        tokens,
        heads,
        kv_heads,
        head_dim,
        value_head_dim,
        TORCH_NUMBERS[q.dtype],
        torch.get_num_threads(),
        q.data_ptr(),
        q.stride()[:3],
        positions.data_ptr(),
        call.scaling,
        call.softcap or 0.0,
        call.sliding_window or 0,
        out.data_ptr(),
        lse.data_ptr(),
    )
    check(library().kvbits_attend(struct))
    return out, lse
