"""Turning keys by their positions, and back (arXiv:2104.09864): channel pair (d, d + head_dim / 2) by position * inv_freq[d] radians."""

from __future__ import annotations

import torch


def turn(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """`x` [..., tokens, head_dim] turned to `positions` [..., tokens] (broadcast over the other dimensions), or back from them.

    Angles are taken in float64, because position * inv_freq in float32 is off by up to 0.008 radians at 131,072.

    Args:
        inv_freq: [head_dim / 2] radians per token.
    """
    angles = positions.to(x.device).double().unsqueeze(-1) * inv_freq.to(x.device).double()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if back:
        sin = -sin
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
