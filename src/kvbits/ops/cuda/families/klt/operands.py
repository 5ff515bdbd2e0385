"""Trellis codes as kernels are told of them, and bases as matrix units take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .....spec import BAND, BAND_PLANES, OFFSETS, PageLayout
from ....descriptor import describe
from ...engine.side import prepared

RESIDENT_THREADS = {64: 640, 128: 384, 256: 256}
"""Threads per multiprocessor that `__launch_bounds__` reserves registers for, by the largest head_dim.

With fewer registers each load of a warp's product waits for the one before: closing with 640 threads at head_dim 128
takes half as long again on an H200.
"""


def resident(layout: PageLayout, threads: int) -> int:
    """Return the number of blocks of so many threads that a multiprocessor stores or unpacks with at a time."""
    return max(1, next(n for most, n in RESIDENT_THREADS.items() if layout.head_dim <= most) // threads)


def banded_arguments(layout: PageLayout, kind: str) -> str:
    """Return template arguments of struct Banded of bands.cuh but the last: keys (kind "k") or values ("v") of a
    layout.
    """
    side = describe(layout, kind)
    basis = {None: "NO_BASIS", "hadamard": "HADAMARD", "calibrated": "CALIBRATED"}[side.basis]
    values = [side.scale_offset, *(side.offset_of_plane(bits) for bits in BAND_PLANES)]
    given = f"{side.packed_widths:#x}ull, {basis}, {int(side.offsets)}, {int(side.fitted)}"
    return ", ".join([given, *map(str, values)])


def refuses_bands(layout: PageLayout) -> str | None:
    """Return why the kernels that store and unpack trellis codes do not take a layout, or None."""
    if layout.head_dim != layout.value_head_dim:
        return (
            f"keys of {layout.head_dim} and values of {layout.value_head_dim} channels in trellis codes; the CUDA"
            " kernels take one width for both"
        )
    d, step = layout.head_dim, 32 if layout.key.basis == "calibrated" else BAND
    for kind, spec in (("keys", layout.key), ("values", layout.value)):
        if not spec.is_trellis:
            return f"{spec.format} {kind} beside trellis codes have no CUDA kernel"
    if d % step or d > 256:
        return f"head_dim={d} of trellis codes is not a multiple of {step} or above 256"
    if layout.page_size > 256 or layout.page_size % 16:
        return f"page_size={layout.page_size} of trellis codes is above 256 or not a multiple of 16"
    return None


def band_defines(chunk: PageLayout) -> dict[str, int]:
    """Return macros of banded.cu for trellis keys: the width of each band, four bits each, and where their
    planes lie.
    """
    side = describe(chunk, "k")
    widths = {"K_WIDTHS_LOW": side.packed_widths & 0xFFFFFFFF, "K_WIDTHS_HIGH": side.packed_widths >> 32}
    return widths | {f"K_PLANE{bits}_OFFSET": side.offset_of_plane(bits) for bits in BAND_PLANES}


def basis_on(static: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return `basis_operands` of a layer on `device`; made once."""
    inverse, offsets = static["k_inverse"], static.get("k_offsets")
    made_for = inverse if offsets is None else offsets
    return prepared(made_for, ("operands", device), lambda _: basis_operands(inverse, offsets).to(device))


def basis_operands(inverse: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return struct InverseBasis of banded_frames.cuh for every head of `inverse` [H, D, D] and `offsets` [H, 33, D]
    (None: zeros): int32 [H, D * D / 2 + 4 + 5 D / 2].

    Queries come with channels (8 i .. 8 i + 7) and those D / 2 further on as the 16 numbers of step i.
    """
    heads, d, _ = inverse.shape
    x = inverse.detach().to(torch.float32)
    exponent = torch.floor(torch.log2(x.abs().amax((1, 2)).clamp(min=1e-30)))
    x = x * torch.exp2(-exponent)[:, None, None]
    parts = x.half().view(heads, d // 16, 2, 8, 2, d // 16, 4, 2)  # [H, m, row half, row g, channel half, i, c, pair]
    tiles = parts.permute(0, 1, 5, 3, 6, 2, 4, 7).contiguous()  # [H, m, i, g, c, row half, channel half, pair]
    rest = torch.stack(
        [torch.exp2(exponent), x.square().sum(-1).amax(-1), torch.zeros_like(exponent), torch.zeros_like(exponent)], -1
    )
    taken_off = (
        (torch.zeros(heads, OFFSETS, d, device=x.device) if offsets is None else offsets.to(x.device))
        .half()
        .view(heads, -1)
    )
    return torch.cat([tiles.view(heads, -1).view(torch.int32), rest.view(torch.int32), taken_off.view(torch.int32)], -1)


def offsets_in_frame(static: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return float32 [H, 33, D] on `device`: `k_offsets` out of the basis; made once."""
    inverse = static["k_inverse"]
    return prepared(
        static["k_offsets"],
        ("in the frame", device),
        lambda x: (x.double() @ inverse.double().to(x.device)).float().contiguous().to(device),
    )


def column_powers(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return float32 [H, D] on `device`: for each column of `matrix` [H, D, D] a power of two above its numbers, over
    which `columns_as_operands` are; made once.
    """

    def make(x: torch.Tensor) -> torch.Tensor:
        exponents = x.detach().float().cpu().abs().amax(1).frexp().exponent.clamp(-100, 100)
        return torch.ldexp(torch.ones(exponents.shape), exponents).to(device)

    return prepared(matrix, ("columns", device), make)


def columns_as_operands(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `matrix` [H, D, D] as the matrix units take it, on `device`, made once: float16 [H, D / 16 of columns, D /
    16 of rows, 2 tiles, 32 lanes, high and low, 8 bytes] of its columns over `column_powers`. High and low add up to 22
    bits of a column's largest number. Lane 4 g + c has rows 4 c .. 4 c + 3 of 16, and of tile t column 4 (g / 2) + 2 t
    + g % 2 of 16, so that what comes back lies as what goes in.
    """

    def make(x: torch.Tensor) -> torch.Tensor:
        heads, _, d, _ = (both := _high_and_low(x, column_powers(matrix, device))).shape
        # [.., half, step, c, row, band, g / 2, tile, g % 2]
        by_lane = both.view(heads, 2, d // 16, 4, 4, d // 16, 4, 2, 2)
        return by_lane.permute(0, 5, 2, 7, 6, 8, 3, 1, 4).contiguous()

    return prepared(matrix, ("column operands", device), make)


def columns_as_tiles(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same numbers as matrix units of four warps read them from shared memory: float16 [H, high and low, D /
    16 of rows, 2 halves of 16, D columns, 8 numbers], rows and columns within 16 in the order of `columns_as_operands`.
    """

    def make(x: torch.Tensor) -> torch.Tensor:
        heads, _, d, _ = (both := _high_and_low(x, column_powers(matrix, device))).shape
        # [.., half, step, c, k / 8, k % 2, band, g / 2, tile, g % 2]
        tiles = both.view(heads, 2, d // 16, 4, 2, 2, d // 16, 4, 2, 2)
        return tiles.permute(0, 1, 2, 4, 6, 8, 7, 9, 3, 5).contiguous()

    return prepared(matrix, ("column tiles", device), make)


def _high_and_low(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return float16 [H, 2, D, D]: x [H, D, D] over its columns' powers, and what that misses."""
    scaled = x.detach().float().to(columns.device) / columns.unsqueeze(1)
    high = scaled.half()
    return torch.stack([high, (scaled - high.float()).half()], 1)
