"""attend_fresh on the CPU: torch's FlashAttention, whose own scores are blocks.

A sliding window is blocks of queries with the keys that these see.
"""

from __future__ import annotations

import functools

import torch

from ..chunk_attention import check_chunk, refuses_flash, without_padding
from .dense import flash

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WINDOW_ROWS = 512
"""Query tokens of a block with a window: more would read more keys that most of them do not see, fewer would be many
calls.
"""

MASKED = 512
"""Tokens of a padded chunk up to which its sequences are one call with a mask of at most 1 MB each; a call each takes
longer, and is not square.
"""


def refuses(q: torch.Tensor, v: torch.Tensor, softcap: float | None) -> str | None:
    """Return why a chunk cannot be attended here, or None.

    Args:
        q: [B, T, Hq, D]; v: [B, T, H, D].
    """
    if q.device.type != "cpu":
        return f"queries are on {q.device}, not on the CPU"
    if q.dtype not in DTYPES:
        return f"queries are {q.dtype}; torch's FlashAttention takes float32, float16, bfloat16 and float64"
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
    if q.shape[1] <= MASKED and bool((positions < 0).any()):
        check_chunk(q, k, v, positions)
        return _masked(q, k, v, positions, scaling, sliding_window)
    causal = functools.partial(_causal, scaling=scaling, sliding_window=sliding_window)
    return without_padding(causal, q, k, v, positions, _dtype_of_results(q))


def _dtype_of_results(q: torch.Tensor) -> torch.dtype:
    """Return the dtype in which results of queries are given: that of the kernel, at most float32."""
    return torch.float32 if q.dtype == torch.float64 else q.dtype


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all sequences of a short chunk at once, by a mask of each."""
    keys, queries = positions.cpu()[:, None, :], positions.cpu()[:, :, None]
    seen = (keys >= 0) & (keys <= queries)
    if sliding_window is not None:
        seen &= keys > queries - sliding_window
    real = (positions >= 0)[..., None, None]  # padding may hold anything, also what 0 times is no number
    q, k, v = (torch.where(real, x, 0) for x in (q, k, v))
    bias = torch.zeros(seen.shape, dtype=q.dtype, device="cpu").masked_fill_(~seen, -torch.inf)[:, None]
    out, lse = flash(_by_head(q), _by_head(k), _by_head(v), scaling, bias)
    out = out.transpose(1, 2).to(_dtype_of_results(q))
    return out, lse.transpose(1, 2).float().masked_fill(~seen.any(-1)[..., None], -torch.inf)


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = q.shape[1]
    q, k, v = (_by_head(x) for x in (q, k, v))
    if sliding_window is None or tokens <= sliding_window:
        out, lse = flash(q, k, v, scaling, causal=True)
        return out.transpose(1, 2).to(_dtype_of_results(q)), lse.transpose(1, 2).float()
    out = torch.empty(*q.shape[:2], tokens, v.shape[3], dtype=_dtype_of_results(q), device="cpu")
    lse = torch.empty(q.shape[:3], device="cpu")
    # The first window sees all that is older.
    old = slice(0, sliding_window)
    out[:, :, old], lse[:, :, old] = flash(q[:, :, old], k[:, :, old], v[:, :, old], scaling, causal=True)
    band = _band(min(WINDOW_ROWS, tokens - sliding_window), sliding_window, q.dtype)
    for first in range(sliding_window, tokens, WINDOW_ROWS):
        end = min(first + WINDOW_ROWS, tokens)
        keys = slice(first - sliding_window + 1, end)
        mask = band[: end - first, : end - first + sliding_window - 1]
        out[:, :, first:end], lse[:, :, first:end] = flash(
            q[:, :, first:end], k[:, :, keys], v[:, :, keys], scaling, mask
        )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, heads, D] as [B, heads, T, D], rows dense: the operator reads them so, and does not check."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _band(rows: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return bias [rows, rows + window - 1] of queries whose first one sees the first `window` keys: 0 where a query
    sees a key, else -inf.
    """
    distance = torch.arange(rows + window - 1, device="cpu") - torch.arange(rows, device="cpu")[:, None]
    return torch.zeros(rows, rows + window - 1, dtype=dtype, device="cpu").masked_fill_(
        (distance < 0) | (distance >= window), -torch.inf
    )
