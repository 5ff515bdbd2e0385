"""attend_fresh on a GPU: torch's FlashAttention, which knows causal masks and windows itself, or cuDNN
(`attend.dense`).
"""

from __future__ import annotations

import torch

from ..chunk_attention import refuses_flash, without_padding
from ..descriptor import MATRIX_DTYPES
from .engine.dense import attention

MOST_HEAD_DIM = 256


def refuses(q: torch.Tensor, v: torch.Tensor, softcap: float | None) -> str | None:
    """Return why a chunk cannot be attended here, or None.

    Args:
        q: [B, T, Hq, D]; v: [B, T, H, D].
    """
    if not q.is_cuda:
        return f"queries are on {q.device}, not on a GPU"
    if torch.version.hip is not None or torch.cuda.get_device_capability(q.device) < (8, 0):
        return "FlashAttention needs an NVIDIA GPU of compute capability 8.0"
    if q.dtype not in MATRIX_DTYPES:
        return f"queries are {q.dtype}; FlashAttention takes float16 and bfloat16"
    if q.shape[3] % 8 or q.shape[3] > MOST_HEAD_DIM:
        return f"head_dim={q.shape[3]} is not a multiple of 8 up to {MOST_HEAD_DIM}"
    return refuses_flash(q, v, softcap)


def attend_fresh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention of a chunk to itself (see `chunk_attention`).

    Raises:
        DataError: tensors that do not fit together.
    """
    return without_padding(
        lambda q, k, v: attention(q, k, v, scaling, True, sliding_window), q, k, v, positions, q.dtype
    )
