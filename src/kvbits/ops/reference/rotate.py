"""Queries and keys of a step times a Hadamard matrix: two matrix products."""

from __future__ import annotations

import torch

from ...quant.basis import rotated_keys, rotated_queries, rotations


def prepare(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Make the matrices of a head_dim that is a power of two: nothing can be made while a CUDA graph is captured."""
    rotations(head_dim, dtype, device)


def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotated_queries(q)` and `rotated_keys(k)`, of tensors [.., head_dim] of any shape."""
    return rotated_queries(q), rotated_keys(k)
