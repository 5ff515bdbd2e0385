"""Keys and queries multiplied by a Hadamard matrix: scores stay what they were, and a channel that sticks out is spread over all of them.

    (q R) . (k R) = q . k        where R is orthonormal

Four bits with one scale per group of channels need it (QuaRot, arXiv:2404.00456, and SpinQuant, arXiv:2405.16406, do the same after the rotary embedding).
The factor 1 / head_dim of the two products is split into powers of two, so that both matrices are exact in 16 bits and a product rounds once, like any matrix
product of the model.
"""

from __future__ import annotations

import functools

import torch

from .rotary import turned_by


@functools.lru_cache(maxsize=16)
def rotations(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(for keys, for queries), each [head_dim, head_dim] of `dtype`: keys @ queries.T is the identity. head_dim is a power of two."""
    signs = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(signs) < head_dim:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    bits = head_dim.bit_length() - 1
    return tuple((signs * 2.0**-n).to(device, dtype) for n in (bits // 2, bits - bits // 2))  # type: ignore[return-value]


def rotated_keys(k: torch.Tensor) -> torch.Tensor:
    """Keys [..., head_dim] as pages of rotated keys hold them, in their own dtype."""
    return k @ rotations(k.shape[-1], k.dtype, k.device)[0]


def rotated_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries [..., head_dim] whose products with rotated keys are those of `q` with the keys."""
    return q @ rotations(q.shape[-1], q.dtype, q.device)[1]


def rotated_back(k: torch.Tensor) -> torch.Tensor:
    """What `rotated_keys` was given, up to rounding."""
    return k @ rotations(k.shape[-1], k.dtype, k.device)[1].T


def rotated_turn(turn: torch.Tensor) -> torch.Tensor:
    """float32 [head_dim, head_dim], on the CPU: what turning by `turn` (`quant.rotary.turn_by`) is for rotated keys."""
    eye = torch.eye(turn.shape[1], device="cpu")
    return rotated_keys(rotated_back(eye.double()) @ turned_by(eye, turn.cpu()).double()).float()
