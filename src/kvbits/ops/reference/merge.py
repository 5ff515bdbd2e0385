"""Merging of attention over disjoint sets of keys into attention over their union.

    lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) * out_i

Sinks, residual windows, formats, chunked prefill and split-KV are all this one operation.
"""

from __future__ import annotations

import torch


def merge_partials(
    outs: list[torch.Tensor], lses: list[torch.Tensor], *, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the union of key sets.

    Args:
        outs: each [..., head_dim]; others than the first may be 1 where it is more.
        lses: each [...], natural log of the sum of exponentiated scores; -inf where a set was empty (its `out` is then
            ignored).
        into: takes the merged `out`, in its dtype, if given; it may be one of `outs`.

    Returns:
        float32 (or float64) out (or `into`) and lse; rows that saw no key at all are 0 and -inf.
    """
    dtype = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack([x.to(dtype).expand_as(lses[0]) for x in lses])
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse))
    out = sum(
        torch.where(w[..., None] != 0, w[..., None] * o.to(dtype), 0.0) for w, o in zip(weights, outs, strict=True)
    )
    assert isinstance(out, torch.Tensor)
    return out if into is None else into.copy_(out), lse


def sink_part(logit: torch.Tensor, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `merge_partials` takes for one more key of score `logit` [Hq] and value 0, as `add_sink_logit` has
    it. The result is out [1, 1, Hq, head_dim] and lse [1, 1, Hq].
    """
    out = torch.zeros(head_dim, dtype=dtype, device=logit.device).expand(1, 1, len(logit), head_dim)
    return out, logit.float().view(1, 1, -1)


def add_sink_logit(out: torch.Tensor, lse: torch.Tensor, logit: torch.Tensor) -> torch.Tensor:
    """Return attention with one more key of score `logit` and value 0 (the learned sinks of gpt-oss).

    Args:
        out: [B, T, Hq, head_dim]; lse: [B, T, Hq]; logit: [Hq].
    """
    return out * torch.sigmoid(lse - logit.to(lse))[..., None]
