"""Encoders of `descriptor.Side` for CUDA: template arguments of the structs of side.cuh, macros of attention kernels.

And parameters as kernels read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ....spec import PageLayout
from ...descriptor import GROUP, STATIC, describe

_prepared = WeakIdKeyDictionary()


def prepared(x: torch.Tensor, how: Hashable, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `make(x)`, made once for a tensor and `how` and kept as long as `x` lives: what kernels read of a layer's
    calibrated parameters.
    """
    found = _prepared.setdefault(x, {})
    if how not in found:
        found[how] = make(x).detach()  # another object than x, which would keep itself alive
    return found[how]


def as_float32(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `x` as dense float32 on `device`; made once."""
    return prepared(x, device, lambda x: x.to(device, torch.float32).contiguous())


def widened(x: torch.Tensor, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return calibrated [H, groups or channels] as float32 [H, head_dim] on `device`; made once."""
    return prepared(
        x,
        ("widened", head_dim, device),
        lambda x: x.to(device, torch.float32).repeat_interleave(head_dim // x.shape[-1], -1).contiguous(),
    )


def side_arguments(layout: PageLayout, kind: str) -> str:
    """Return template arguments of struct Side: keys (kind "k") or values ("v") of a layout."""
    side = describe(layout, kind)
    values = [
        side.levels,
        side.plane(0)[0] or 8,
        side.plane(1)[0],
        side.scale,
        side.group,
        side.zero,
        int(side.has_bias),
        int(side.has_mean),
        side.scale_dtype,
        side.plane_offset[0],
        side.plane(1)[2],
        *(x or 0 for x in (side.scale_offset, side.bias_offset, side.mean_offset)),
        layout.dim(kind),
    ]
    return ", ".join(map(str, values))


def attend_defines(chunk: PageLayout, kind: str, num_planes: int) -> dict[str, int]:
    """Return macros of attention kernels for keys ("k") or values ("v").

    `chunk` is laid out like a page; its first `num_planes` planes are walked one by one, and one behind them is joined
    to the first (packed_codes.cuh). Families change what is other with them.
    """
    side, name = describe(chunk, kind), kind.upper()
    groups = side.groups if side.scale == GROUP else 1
    return {
        f"{name}_BITS0": side.planes[0],
        f"{name}_BITS1": side.plane(1)[0] if num_planes > 1 else 0,
        f"{name}_OFFSET0": side.plane_offset[0],
        f"{name}_OFFSET1": side.plane(1)[2],
        f"{name}_JOINED_OFFSET": side.plane(1)[2] if num_planes < len(side.planes) else 0,
        f"{name}_FLOAT": side.levels,
        f"{name}_ZERO": side.zero,
        f"{name}_MIDDLE": 2 * side.zero,
        f"{name}_TURNED": 0,
        f"{name}_RINGS": 0,
        f"{name}_SCALE": side.scale,
        f"{name}_SCALE_TYPE": side.scale_dtype,
        f"{name}_GROUPS": groups,
        f"{name}_GROUP": chunk.dim(kind) // groups,
        f"{name}_HAS_BIAS": int(side.has_bias and side.scale != STATIC),
        f"{name}_HAS_MEAN": int(side.has_mean),
        f"{name}_SCALE_OFFSET": side.scale_offset or 0,
        f"{name}_BIAS_OFFSET": side.bias_offset or 0,
        f"{name}_MEAN_OFFSET": side.mean_offset or 0,
    }


def turns_on(inv_freq: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `turns_of(inv_freq)` on `device`; made once."""
    return prepared(inv_freq, ("turns", device), lambda x: turns_of(x).to(device))


def turns_of(inv_freq: torch.Tensor) -> torch.Tensor:
    """Return float32 [head_dim / 2, 2] of `inv_freq` [head_dim / 2] radians per token: turns per token, and what
    float32 misses of them.

    position * turns is exact to 2**-24 of a turn with two products (turn.cuh), where position * inv_freq in float32 is
    off by 0.008 radians at 131,072.
    """
    turns = inv_freq.double() / (2 * math.pi)
    high = turns.float()
    return torch.stack([high, (turns - high.double()).float()], -1).contiguous()


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether 16-byte loads along the last dim are possible."""
    size = x.element_size()
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s * size % 16 == 0 for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)
    )


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x itself if 16-byte loads along its last dim are possible, else a copy."""
    return x if has_aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)
