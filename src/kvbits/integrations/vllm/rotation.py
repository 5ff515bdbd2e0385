"""Keys and queries multiplied by a Hadamard matrix: scores stay what they were, and a channel that sticks out is spread over all of them.

    (q R) . (k R) = q . k        where R is orthonormal

Four bits need it (SpinQuant, arXiv:2405.16406, does the same after the rotary embedding). The factor 1 / head_dim of the two products is split into powers of
two, so that both matrices are exact in 16 bits and a product rounds once, like any matrix product of the model.
"""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=16)
def rotations(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(for keys, for queries), each [head_dim, head_dim] of `dtype`: their product is the identity. head_dim is a power of two."""
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < head_dim:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    bits = head_dim.bit_length() - 1
    return tuple((signs * 2.0**-n).to(device, dtype) for n in (bits // 2, bits - bits // 2))  # type: ignore[return-value]
