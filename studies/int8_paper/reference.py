"""Matrix quantization in plain PyTorch. Codes are round-half-even of x * (1 / scale), as everywhere in kvbits."""

from __future__ import annotations

import torch

from kvbits.quant.qparams import divided


def compute_scales(x: torch.Tensor) -> torch.Tensor:
    """Compute the scale of each column of x [rows, columns], float32 [columns]."""
    scales = divided(x.abs().amax(0).float(), 127)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def quantize(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantize x: int8 [rows, columns]."""
    return (x * scales.reciprocal()).round().clamp(-127, 127).to(torch.int8)


def dequantize(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize q: float32 [rows, columns]."""
    return q.float() * scales


def quantize_groups(x: torch.Tensor, size: int, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x with one scale per row and group of columns: (codes, scales [rows, columns / size]).

    bits 8: int8 [rows, columns]. bits 4: uint8 [rows, columns / 2], byte r = column r | column (r + columns / 2) << 4,
    codes offset by 8.
    """
    top = 2 ** (bits - 1) - 1
    groups = x.unflatten(1, (-1, size))
    scales = divided(groups.abs().amax(-1), top)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (groups * scales.reciprocal().unsqueeze(-1)).round().clamp(-top, top).flatten(1)
    if bits == 8:
        return codes.to(torch.int8), scales
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=1)
    return low | high << 4, scales
