"""Template arguments of the structs of side.cuh: what keys or values of a page are stored as."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...spec import LowLayout, PageLayout, PerChannel, QuantSpec

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
TYPE_NAMES = {"float16": 0, "bfloat16": 1, "float32": 2}
STATIC, GROUP, CHANNEL = 0, 1, 2
FLOATS = {"fp8_e4m3": 1, "fp8_e5m2": 2, "raw": 3}


_prepared = WeakIdKeyDictionary()


def prepared(x: torch.Tensor, how: Hashable, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make(x)`, made once for a tensor and `how` and kept as long as `x` lives: what kernels read of a layer's calibrated parameters."""
    found = _prepared.setdefault(x, {})
    if how not in found:
        found[how] = make(x).detach()  # another object than x, which would keep itself alive
    return found[how]


def as_float32(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`x` as dense float32 on `device`; made once."""
    return prepared(x, device, lambda x: x.to(device, torch.float32).contiguous())


def widened(x: torch.Tensor, head_dim: int, device: torch.device) -> torch.Tensor:
    """Calibrated [H, groups or channels] as float32 [H, head_dim] on `device`; made once."""
    return prepared(x, ("widened", head_dim, device), lambda x: x.to(device, torch.float32).repeat_interleave(head_dim // x.shape[-1], -1).contiguous())


def _offsets(layout: PageLayout, prefix: str, *names: str) -> list[int]:
    """Of sections of keys (prefix "k") or values ("v"); 0 for those that the layout has not."""
    found = (layout.sections.get(f"{prefix}_{name}") for name in names)
    return [section.offset if section else 0 for section in found]


def scale_kind(spec: QuantSpec) -> int:
    """STATIC, GROUP or CHANNEL."""
    return STATIC if spec.static else CHANNEL if isinstance(spec.granularity, PerChannel) else GROUP


def side_arguments(layout: PageLayout, prefix: str, spec: QuantSpec) -> str:
    """For keys (prefix "k") or values ("v") of a layout."""
    planes = (*spec.number_format.planes, 0, 0)
    groups = spec.num_groups(layout.head_dim)
    values = [
        FLOATS.get(spec.format, 0), planes[0] or 8, planes[1], scale_kind(spec), layout.head_dim // groups, spec.zero, int(spec.has_bias),
        int(spec.center is not None), TYPE_NAMES[spec.scale_dtype],
        *_offsets(layout, prefix, "raw" if spec.is_raw else "plane0", "plane1", "scale", "bias", "mean"),
    ]  # fmt: skip
    return ", ".join(map(str, values))


def extra_arguments(layout: PageLayout, prefix: str, spec: QuantSpec) -> str:
    """Template arguments of struct Extras: codebook, stretch, outliers and rotary embedding of keys ("k") or values ("v")."""
    stretch, index, value = _offsets(layout, prefix, "stretch", "outlier_index", "outlier_value")
    index_bytes = 2 if layout.outlier_index_dtype == "uint16" else 4
    count = spec.num_outliers(layout.page_size, layout.head_dim)
    values = [int(spec.has_codebook), int(spec.has_stretch), stretch, count, index_bytes, index, value, int(spec.pre_rope)]
    return ", ".join(map(str, values))


def low_arguments(low: LowLayout | None, prefix: str) -> str:
    """Bits and offset of the low plane of keys ("k") or values ("v"); "0, 0" if there is none."""
    plane = low and low.sections.get(f"{prefix}_plane0")
    return f"{low.key_bits if prefix == 'k' else low.value_bits}, {plane.offset}" if low and plane else "0, 0"


def refuses_low(count: int) -> str | None:
    """Why the CUDA kernels do not take pages with `count` low planes each, or None."""
    return f"pages with {count} low planes each; the CUDA kernels take one" if count > 1 else None


def turns_on(inv_freq: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`turns_of(inv_freq)` on `device`; made once."""
    return prepared(inv_freq, ("turns", device), lambda x: turns_of(x).to(device))


def turns_of(inv_freq: torch.Tensor) -> torch.Tensor:
    """float32 [head_dim / 2, 2] of `inv_freq` [head_dim / 2] radians per token: turns per token, and what float32 misses of them.

    position * turns is exact to 2**-24 of a turn with two products (turn.cuh), where position * inv_freq in float32 is off by 0.008 radians at 131,072.
    """
    turns = inv_freq.double() / (2 * math.pi)
    high = turns.float()
    return torch.stack([high, (turns - high.double()).float()], -1).contiguous()


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Whether 16-byte loads along the last dim are possible."""
    size = x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x itself if 16-byte loads along its last dim are possible, else a copy."""
    return x if has_aligned_rows(x) else x.contiguous()
