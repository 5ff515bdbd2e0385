"""Encoders of `descriptor.Side` for CUDA: template arguments of the structs of side.cuh and macros of attend.cu. And parameters as kernels read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ....spec import BAND, BAND_PLANES, LowLayout, PageLayout
from ...descriptor import GROUP, LEVELS, STATIC, describe, low_plane

INTEGER = LEVELS["int"]
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


def side_arguments(layout: PageLayout, kind: str) -> str:
    """Template arguments of struct Side: keys (kind "k") or values ("v") of a layout."""
    side = describe(layout, kind)
    values = [
        side.levels, side.plane(0)[0] or 8, side.plane(1)[0], side.scale, side.group, side.zero, int(side.has_bias), int(side.has_mean), side.scale_dtype,
        side.plane_offset[0], side.plane(1)[2], *(x or 0 for x in (side.scale_offset, side.bias_offset, side.mean_offset, side.page_scale_offset)),
    ]  # fmt: skip
    return ", ".join(map(str, values))


def extra_arguments(layout: PageLayout, kind: str) -> str:
    """Template arguments of struct Extras: codebook, stretch, outliers and rotary embedding of keys ("k") or values ("v")."""
    side = describe(layout, kind)
    values = [
        int(side.has_codebook), int(side.stretch_offset is not None), side.stretch_offset or 0, side.outliers, side.index_bytes,
        side.outlier_index_offset or 0, side.outlier_value_offset or 0, int(side.turned),
    ]  # fmt: skip
    return ", ".join(map(str, values))


def banded_arguments(layout: PageLayout, kind: str) -> str:
    """Template arguments of struct Banded of bands.cuh but the last: keys (kind "k") or values ("v") of a layout."""
    side = describe(layout, kind)
    basis = {None: "NO_BASIS", "hadamard": "HADAMARD", "klt": "CALIBRATED"}[side.basis]
    values = [side.scale_offset, side.mean_offset or 0, *(side.offset_of_plane(bits) for bits in BAND_PLANES)]
    return f"{side.packed_widths:#x}ull, {basis}, {int(side.has_mean)}, " + ", ".join(map(str, values))


def refuses_bands(layout: PageLayout) -> str | None:
    """Why the kernels that close and unpack banded pages do not take a layout, or None."""
    d, step = layout.head_dim, 32 if layout.key.basis == "klt" else BAND
    for kind, spec in (("keys", layout.key), ("values", layout.value)):
        if not spec.is_banded:
            return f"{spec.format} {kind} beside banded codes have no CUDA kernel"
    if d % step or d > 256:
        return f"head_dim={d} of banded codes is no multiple of {step} or above 256"
    if layout.page_size > 256 or layout.page_size % 16:
        return f"page_size={layout.page_size} of banded codes is above 256 or no multiple of 16"
    return None


def low_arguments(low: LowLayout | None, kind: str) -> str:
    """Bits and offset of the low plane of keys ("k") or values ("v"); "0, 0" if there is none."""
    return ", ".join(map(str, low_plane(low, kind)))


def attend_defines(chunk: PageLayout, kind: str, num_planes: int) -> dict[str, int]:
    """Macros of attend.cu for keys ("k") or values ("v"). `chunk` is laid out like a page; its first `num_planes` planes are walked one by one, and one
    behind them is joined to the first (kernel_choice.py)."""
    side, name = describe(chunk, kind), kind.upper()
    groups = side.groups if side.scale == GROUP else 1
    return {
        f"{name}_BITS0": side.planes[0],
        f"{name}_BITS1": side.plane(1)[0] if num_planes > 1 else 0,
        f"{name}_OFFSET0": side.plane_offset[0],
        f"{name}_OFFSET1": side.plane(1)[2],
        f"{name}_JOINED_OFFSET": side.plane(1)[2] if num_planes < len(side.planes) else 0,
        f"{name}_FLOAT": INTEGER if side.widths else side.levels,  # banded codes are integers around the middle of their range
        f"{name}_ZERO": side.zero,
        f"{name}_MIDDLE": 2 ** side.widths[0] - 1 if side.widths else 2 * side.zero,
        f"{name}_TURNED": int(side.basis == "hadamard"),
        f"{name}_SCALE": side.scale,
        f"{name}_SCALE_TYPE": side.scale_dtype,
        f"{name}_GROUPS": groups,
        f"{name}_GROUP": chunk.head_dim // groups,
        f"{name}_HAS_BIAS": int(side.has_bias and side.scale != STATIC),
        f"{name}_HAS_MEAN": int(side.has_mean),
        f"{name}_SCALE_OFFSET": side.scale_offset or 0,
        f"{name}_BIAS_OFFSET": side.bias_offset or 0,
        f"{name}_MEAN_OFFSET": side.mean_offset or 0,
        f"{name}_PAGE_SCALE_OFFSET": side.page_scale_offset or 0,
    }


def band_defines(chunk: PageLayout) -> dict[str, int]:
    """Macros of banded.cu for banded keys: the width of each band, four bits each, and where their planes lie."""
    side = describe(chunk, "k")
    widths = {"K_WIDTHS_LOW": side.packed_widths & 0xFFFFFFFF, "K_WIDTHS_HIGH": side.packed_widths >> 32}
    return widths | {f"K_PLANE{bits}_OFFSET": side.offset_of_plane(bits) for bits in BAND_PLANES}


def basis_on(inverse: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`basis_operands(inverse)` on `device`; made once."""
    return prepared(inverse, ("operands", device), lambda x: basis_operands(x).to(device))


def basis_operands(inverse: torch.Tensor) -> torch.Tensor:
    """struct InverseBasis of banded_queries.cuh for every head of `inverse` [H, D, D]: int32 [H, D * D / 2 + 4].

    Queries come with channels (8 i .. 8 i + 7) and those D / 2 further on as the 16 numbers of step i.
    """
    heads, d, _ = inverse.shape
    x = inverse.detach().to(torch.float32)
    exponent = torch.floor(torch.log2(x.abs().amax((1, 2)).clamp(min=1e-30)))
    x = x * torch.exp2(-exponent)[:, None, None]
    parts = x.half().view(heads, d // 16, 2, 8, 2, d // 16, 4, 2)  # [H, m, row half, row g, channel half, i, c, pair]
    tiles = parts.permute(0, 1, 5, 3, 6, 2, 4, 7).contiguous()  # [H, m, i, g, c, row half, channel half, pair]
    rest = torch.stack([torch.exp2(exponent), x.square().sum(-1).amax(-1), torch.zeros_like(exponent), torch.zeros_like(exponent)], -1)
    return torch.cat([tiles.view(heads, -1).view(torch.int32), rest.view(torch.int32)], -1)


def column_powers(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """float32 [H, D] on `device`: for each column of `matrix` [H, D, D] a power of two above its numbers, over which `columns_as_operands` are; made once."""

    def make(x: torch.Tensor) -> torch.Tensor:
        exponents = x.detach().float().cpu().abs().amax(1).frexp().exponent.clamp(-100, 100)
        return torch.ldexp(torch.ones(exponents.shape), exponents).to(device)

    return prepared(matrix, ("columns", device), make)


def columns_as_operands(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`matrix` [H, D, D] as the matrix units take it, on `device`, made once: float16 [H, D / 16 of columns, D / 16 of rows, 2 tiles, 32 lanes, high and low,
    8 bytes] of its columns over `column_powers`. High and low add up to 22 bits of a column's largest number. Lane 4 g + c has rows 4 c .. 4 c + 3 of 16,
    and of tile t column 4 (g / 2) + 2 t + g % 2 of 16, so that what comes back lies as what goes in."""

    def make(x: torch.Tensor) -> torch.Tensor:
        heads, _, d, _ = (both := _high_and_low(x, column_powers(matrix, device))).shape
        by_lane = both.view(heads, 2, d // 16, 4, 4, d // 16, 4, 2, 2)  # [.., half, step, c, row, band, g / 2, tile, g % 2]
        return by_lane.permute(0, 5, 2, 7, 6, 8, 3, 1, 4).contiguous()

    return prepared(matrix, ("column operands", device), make)


def rows_as_columns(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The transposed matrices of `matrix` [H, D, D] on `device`, for `column_powers` and `columns_as_operands`; made once."""
    return prepared(matrix, ("rows", device), lambda x: x.detach().to(device, torch.float32).mT.contiguous())


def most_powers(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """float32 [H] on `device`: the largest of `column_powers` of each head; made once."""
    return prepared(matrix, ("most", device), lambda x: column_powers(x, device).amax(-1))


def high_operands(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`columns_as_operands` without the low halves: float16 [H, D / 16, D / 16, 2 tiles, 32 lanes, 8 bytes]; made once."""
    return prepared(matrix, ("high operands", device), lambda x: columns_as_operands(x, device)[..., 0, :].contiguous())


def columns_as_tiles(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same numbers as matrix units of four warps read them from shared memory: float16 [H, high and low, D / 16 of rows, 2 halves of 16, D columns,
    8 numbers], rows and columns within 16 in the order of `columns_as_operands`."""

    def make(x: torch.Tensor) -> torch.Tensor:
        heads, _, d, _ = (both := _high_and_low(x, column_powers(matrix, device))).shape
        tiles = both.view(heads, 2, d // 16, 4, 2, 2, d // 16, 4, 2, 2)  # [.., half, step, c, k / 8, k % 2, band, g / 2, tile, g % 2]
        return tiles.permute(0, 1, 2, 4, 6, 8, 7, 9, 3, 5).contiguous()

    return prepared(matrix, ("column tiles", device), make)


def _high_and_low(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """float16 [H, 2, D, D]: x [H, D, D] over its columns' powers, and what that misses."""
    scaled = x.detach().float().to(columns.device) / columns.unsqueeze(1)
    high = scaled.half()
    return torch.stack([high, (scaled - high.float()).half()], 1)


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
