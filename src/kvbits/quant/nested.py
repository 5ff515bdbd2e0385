"""Low planes: what a code misses, in a few more bits that can be dropped again (`Scheme.tiers`).

    d = (x - mean - bias) / scale - (code - zero)          in [-1/2, 1/2] unless the code was clamped
    r = clamp(round(d B), -(B - 1) / 2, (B - 1) / 2),      B = 2**bits - 1,      d <- d B - r for the next plane
    x ~ (code - zero + r1 / B1 + r2 / (B1 B2) + ..) scale + bias + mean

A plane stores r + 2**(bits - 1), as symmetric codes of its width are stored. With a 4-bit code and a 4-bit plane x is
off by scale / 30 at most, 1.21 times the half step of symmetric INT8 on the same group (127 / 105) and 1.13 times that
of asymmetric INT8 (255 / 225).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..spec import NumberFormat

PLANES = {bits: NumberFormat(name=f"low{bits}", planes=(bits,), kind="int") for bits in (2, 4)}
"""How a plane is packed: as a format of its own."""


def levels(bits: int) -> int:
    """Steps of a plane of `bits` bits that make one step of what it refines."""
    return 2**bits - 1


def low_codes(missed: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """Planes uint8 [..., tokens, head_dim], the first refines the codes, each further one the one before it.

    Args:
        missed: float32 [..., tokens, head_dim], `normalize(x, spec, qparams)` less code - zero.
        widths: bits of each plane.
    """
    planes = []
    for bits in widths:
        limit = levels(bits) // 2
        missed = missed * levels(bits)
        r = missed.round().clamp(-limit, limit)
        planes.append((r + 2 ** (bits - 1)).to(torch.uint8))
        missed = missed - r
    return planes


def refine(steps: torch.Tensor, planes: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """code - zero, refined by (plane, bits) pairs, in units of the scale; `steps` [..., tokens, head_dim] in any float
    dtype.
    """
    parts = 1
    for plane, bits in planes:
        steps = steps * levels(bits) + (plane.to(steps.dtype) - 2 ** (bits - 1))
        parts *= levels(bits)
    return steps / parts
