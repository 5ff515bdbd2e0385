"""Attention over dense rows on the CPU, with its log-sum-exp: torch's FlashAttention, whose own scores are blocks."""

from __future__ import annotations

import torch

from ..torch_operators import CPU, operator


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of q [B, Hq, n, D] to k, v [B, H, m, D] with Hq a multiple of H; rows dense.

    Returns:
        out [B, Hq, n, D] in q's dtype, and lse [B, Hq, n].
    """
    out, lse = operator(CPU)(q, k, v, 0.0, causal, attn_mask=mask, scale=scaling)
    return out, lse


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of queries that see all rows. Query heads of a kv head are rows of one product.

    Args:
        q: [B, T, Hq, D]; k, v: [B, S, H, D], of one dtype; rows dense. Those of a head side by side are read faster.
        causal: False; the chunk's own tokens are for `attend_fresh`.

    Returns:
        out [B, T, Hq, D] in q's dtype and lse float32 [B, T, Hq], natural log. NaN for a query that is not finite.
    """
    assert not causal
    tokens, heads = q.shape[1], k.shape[2]
    rows = q.unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
    out, lse = flash(rows, k.transpose(1, 2), v.transpose(1, 2), scaling)
    lse = lse.float()
    if not rows.sum(dtype=torch.float32).isfinite():  # one pass; a sum may also overflow
        bad = ~torch.isfinite(rows).all(-1)
        out, lse = out.masked_fill(bad[..., None], torch.nan), lse.masked_fill(bad, torch.nan)
    return tuple(x.unflatten(2, (tokens, -1)).transpose(1, 2).flatten(2, 3) for x in (out, lse))
