"""merge on the CPU: results over disjoint sets of keys, read once and rounded once, in one call for all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..descriptor import TORCH_NUMBERS
from .library import MergeStruct, PartialStruct, check, library, unavailable
from .structs import MAX_HEAD_DIM

MAX_PARTS = 64


def refuses(outs: Sequence[torch.Tensor]) -> str | None:
    """Return why results like these are not merged here, or None."""
    if (device := outs[0].device).type != "cpu":
        return f"results are on {device}, not on the CPU"
    if unlike := {x.dtype for x in outs} - TORCH_NUMBERS.keys():
        return f"results are {unlike.pop()}; the CPU kernels take float32, float16 and bfloat16"
    if len(outs) > MAX_PARTS:
        return f"{len(outs)} results are more than {MAX_PARTS}"
    if (d := outs[0].shape[-1]) > MAX_HEAD_DIM:
        return f"results have head_dim={d}, more than {MAX_HEAD_DIM}"
    return unavailable()


def merge_partials(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the union of key sets.

    Args:
        outs: each [B, T, Hq, D] of any dtype that `refuses` allows; others than the first may be 1 where it is more.
        lses: each float32 [B, T, Hq], natural log of the sum of exponentiated scores; -inf where a set was empty (its
            `out` is then not read).
        into: takes the merged `out`, in its dtype, if given; it may be one of `outs`.

    Returns:
        float32 out (or `into`) and lse; rows that saw no key at all are 0 and -inf.
    """
    shape = lses[0].shape
    if into is None:
        into = outs[0].new_empty(*shape, outs[0].shape[-1], dtype=torch.float32)
    lse = torch.empty(shape, dtype=torch.float32, device="cpu")
    direct = into.dtype in TORCH_NUMBERS and into.stride(-1) == 1
    merged = into if direct else torch.empty(into.shape, dtype=torch.float32, device="cpu")
    parts, kept = (PartialStruct * len(outs))(), []
    for part, out, log in zip(parts, outs, lses, strict=True):
        out = (out if out.stride(-1) == 1 else out.contiguous()).expand(*shape, -1)
        log = log.float().expand(shape)
        kept += [out, log]
        part.out, part.lse, part.dtype = out.data_ptr(), log.data_ptr(), TORCH_NUMBERS[out.dtype]
        part.out_stride[:], part.lse_stride[:] = out.stride()[:3], log.stride()
    call = MergeStruct(
        parts=ctypes.addressof(parts),
        num_parts=len(outs),
        batch=shape[0],
        num_tokens=shape[1],
        num_heads=shape[2],
        head_dim=merged.shape[3],
        dtype=TORCH_NUMBERS[merged.dtype],
        num_threads=torch.get_num_threads(),
        out=merged.data_ptr(),
        lse=lse.data_ptr(),
    )
    call.out_stride[:] = merged.stride()[:3]
    check(library().kvbits_merge(call))
    return into if direct else into.copy_(merged), lse
