"""Queries and keys of a step times a Hadamard matrix: one launch on a GPU where the kernel takes them, two matrix products elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..quant.rotation import rotated_keys, rotated_queries, rotations
from .cuda import rotate

Rotation = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rotation_for(head_dim: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    """A function of queries [M, Hq, head_dim] and keys [N, H, head_dim] that gives both rotated. What it needs is made here: nothing can be made in a capture.

    Args:
        head_dim: a power of two.
        device: with its index, where it is a GPU.
    """
    if rotate.refuses(head_dim, dtype, device) is None:
        rotate.prepare(head_dim, dtype, device)
        return rotate.rotate
    rotations(head_dim, dtype, device)
    return products


def products(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrix products, of tensors [.., head_dim] of any shape."""
    return rotated_queries(q), rotated_keys(k)
