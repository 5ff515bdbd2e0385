"""attend_fresh in blocks of queries against the keys they see, on any device, in float32: what has a softcap, and
float32 on a GPU.

With `dtype=torch.float64` it is the judge of the other backends.
"""

from __future__ import annotations

import torch

from ..chunk_attention import without_padding

ROWS = 256
"""Query tokens of a block: enough for a matrix product, few enough that half a chunk's masked scores are never
computed.
"""
SCORES = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Scores that are held at a time: 16 MB stay in a CPU's caches, 64 MB fill a GPU."""


def attend_fresh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention of a chunk to itself (see `chunk_attention`), computed and returned in `dtype`.

    Raises:
        DataError: tensors that do not fit together.
    """
    return without_padding(
        lambda q, k, v: _causal(q, k, v, scaling, sliding_window, softcap, dtype), q, k, v, positions, dtype
    )


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, num_q_heads, _ = q.shape
    heads = k.shape[2]
    out = torch.empty(batch, tokens, num_q_heads, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.empty(batch, tokens, num_q_heads, dtype=dtype, device=q.device)
    group = num_q_heads // heads
    per_head = group * min(tokens, ROWS) * min(tokens, (sliding_window or tokens) + ROWS)
    budget = SCORES["cpu" if q.device.type == "cpu" else "cuda"]
    take_heads = min(max(budget // per_head, 1), heads)
    take = min(max(budget // (per_head * heads), 1), batch)
    rows = max(min(ROWS, ROWS * budget // per_head), 16)
    for b in range(0, batch, take):
        for h in range(0, heads, take_heads):
            # [b, heads, tokens, D]; queries [b, heads, group, tokens, D]
            keys, values = (x[b : b + take, :, h : h + take_heads].transpose(1, 2).to(dtype) for x in (k, v))
            mine = slice(h * group, (h + take_heads) * group)
            queries = q[b : b + take, :, mine].unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
            for a in range(0, tokens, rows):
                end = min(a + rows, tokens)
                o, m = _block(queries[..., a:end, :].to(dtype), keys, values, a, scaling, sliding_window, softcap)
                out[b : b + take, a:end, mine] = o.permute(0, 3, 1, 2, 4).flatten(2, 3)
                lse[b : b + take, a:end, mine] = m.permute(0, 3, 1, 2).flatten(2, 3)
    return out, lse


def _block(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [b, heads, group, n, D], lse [b, heads, group, n]) of queries [b, heads, group, n, D], tokens `first`
    .. of the chunk.
    """
    group, n = q.shape[2:4]
    end = first + n
    oldest = max(0, first - sliding_window + 1) if sliding_window is not None else 0
    scores = (q * scaling).flatten(2, 3) @ keys[:, :, oldest:end].transpose(-1, -2)
    if softcap is not None:
        scores.mul_(1 / softcap).tanh_().mul_(softcap)
    by_row = scores.unflatten(2, (group, n))
    row = torch.arange(n, device=q.device)[:, None]
    by_row[..., first - oldest :].masked_fill_(row < row.T, -torch.inf)
    if sliding_window is not None and end - sliding_window > oldest:
        # keys that the block's last query no longer sees
        gone = torch.arange(oldest, end - sliding_window, device=q.device)
        by_row[..., : len(gone)].masked_fill_(gone <= first + row - sliding_window, -torch.inf)
    most = scores.amax(-1, keepdim=True)
    total = scores.sub_(most).exp_().sum(-1, keepdim=True)
    out = (scores @ values[:, :, oldest:end]).div_(total)
    return out.unflatten(2, (group, n)), (most + total.log()).squeeze(-1).unflatten(2, (group, n))


def masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    within: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of a chunk to itself in another order than the causal one, in float32: out [B, T, Hq, D] and lse
    [B, T, Hq], 0 and -inf where nothing is seen.

    Args:
        q, k, v, positions, scaling, softcap: see `chunk_attention`.
        within: bool [B, T, T], which tokens each one sees; padding neither sees nor is seen, whatever stands here.
    """
    real = (positions >= 0).to(q.device)
    group = q.shape[2] // k.shape[2]
    keys, values = (x.transpose(1, 2).float()[:, :, None] for x in (k, v))  # [B, H, 1, T, D]
    outs, lses = [], []
    for a in range(0, q.shape[1], ROWS):
        rows = slice(a, a + ROWS)
        scores = q[:, rows].float().unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4) @ keys.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = within[:, rows] & real[:, None] & real[:, rows, None]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])
        outs.append((p @ values).permute(0, 3, 1, 2, 4).flatten(2, 3))
        lses.append(lse.permute(0, 3, 1, 2).flatten(2, 3))
    return torch.cat(outs, 1), torch.cat(lses, 1)
