"""Attention over packed pages, a few pages at a time, with online softmax: never a dense copy of the history.

    m' = max(m, max(s)),  l' = l exp(m - m') + sum(exp(s - m')),  o' = o exp(m - m') + exp(s - m') V     (arXiv:1805.02867)

Runs anywhere torch runs. With `dtype=torch.float64` it is the judge of every kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..types import AttendCall, Part, check_call
from .dequantize import dequantize_pages

PAGES_PER_STEP = 16


def refuses(q: torch.Tensor, call: AttendCall) -> None:
    """The reference takes everything."""


def attend(q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the pages of its sequence.

    Args:
        q: [B, T, Hq, D].
        call: pages of all formats, scaling, window, softcap.
        q_positions: int64 [B, T]; a key at position p is visible to a query at position t if t - sliding_window < p <= t.
            Negative marks a padding query, which sees nothing.

    Returns:
        out [B, T, Hq, D] and lse [B, T, Hq] (natural log) in `dtype`; 0 and -inf where nothing was visible.

    Raises:
        DataError: shapes or tables that do not fit together.
    """
    check_call(call, q.shape)
    outs, lses = zip(*(_attend_sequence(q[b], call, q_positions[b], b, dtype) for b in range(q.shape[0])), strict=True)
    return torch.stack(outs), torch.stack(lses)


def _attend_sequence(q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor, b: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    t, hq, d = q.shape
    h = call.parts[0].store.layout.num_kv_heads
    rows = q.to(dtype).unflatten(1, (h, hq // h)).permute(1, 0, 2, 3).reshape(h, -1, d)  # [H, T * G, D]
    row_positions = q_positions.to(q.device).repeat_interleave(hq // h)
    best = rows.new_full((h, rows.shape[1], 1), -torch.inf)
    total = torch.zeros_like(best)
    out = torch.zeros_like(rows)
    first_page = 0
    for part in call.parts:
        for k, v, key_positions, page_of in _steps(part, b, dtype):
            scores = rows @ k.transpose(-1, -2) * call.scaling
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            hidden = (key_positions < 0) | (key_positions > row_positions[:, None])
            if call.sliding_window is not None:
                hidden |= key_positions <= row_positions[:, None] - call.sliding_window
            scores = scores.masked_fill(hidden, -torch.inf)
            if call.page_lse is not None:
                for page in np.unique(page_of):
                    own = torch.logsumexp(scores[..., torch.from_numpy(page_of == page).to(scores.device)], -1)
                    call.page_lse[first_page + page] = own.view(h, t, hq // h).transpose(0, 1).reshape(t, hq).float().cpu()
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            safe = torch.where(torch.isinf(new_best), 0.0, new_best)
            p = torch.exp(scores - safe)
            alpha = torch.exp(best - safe)
            total = total * alpha + p.sum(-1, keepdim=True)
            out = out * alpha + p @ v
            best = new_best
        first_page += part.table.num_pages
    seen = total > 0
    out = torch.where(seen, out / torch.where(seen, total, 1.0), 0.0)
    lse = torch.where(seen, best + torch.log(total), -torch.inf)
    return (
        out.view(h, t, hq // h, d).permute(1, 0, 2, 3).reshape(t, hq, d),
        lse.view(h, t, hq // h).permute(1, 0, 2).reshape(t, hq),
    )


def _steps(part: Part, b: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]]:
    """Dequantized [H, n, D] keys and values of a few pages at a time, with their positions and their entries in the page table, [n] each."""
    layout, table = part.store.layout, part.table
    for first in range(table.indptr[b], table.indptr[b + 1], PAGES_PER_STEP):
        entries = slice(first, min(first + PAGES_PER_STEP, table.indptr[b + 1]))
        low = [(store.gather(ids[entries]), store.layout) for store, ids in zip(part.low, table.low, strict=True)]
        k, v = dequantize_pages(part.store.gather(table.page_ids[entries]), layout, part.store.static, dtype, low, table.starts[entries])
        inside = np.arange(layout.page_size)
        positions = np.where(inside < table.lengths[entries, None], table.starts[entries, None] + inside, -1).reshape(-1)
        keep = torch.from_numpy(positions >= 0).to(k.device)
        # Rows past the visible length may hold anything, NaN included, and 0 * NaN would spread it.
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, keep] for x in (k, v))
        page_of = np.repeat(np.arange(entries.start, entries.stop), layout.page_size)[positions >= 0]
        yield k, v, torch.from_numpy(positions).to(k.device)[keep], page_of


def attend_fresh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scaling: float, sliding_window: int | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a fresh chunk to itself, in its own precision.

    Args:
        q: [B, T, Hq, D]; k, v: [B, T, H, D].
        positions: int64 [B, T] of the tokens, negative for padding.

    Returns:
        out [B, T, Hq, D] and lse [B, T, Hq], float32.
    """
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and v.shape == k.shape
    if half and softcap is None and q.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return _fresh_flash(q, k, v, positions, scaling, sliding_window)
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, 1), v.transpose(1, 2).repeat_interleave(group, 1)
    t = q.shape[2]
    plain = bool((positions >= 0).all()) and (sliding_window is None or t <= sliding_window)
    mask = None if plain else _visible(positions, sliding_window).to(q.device)[:, None]
    if softcap is None and q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        q = q if q.stride(-1) == 1 else q.contiguous()  # this operator reads rows as if they were dense, and does not check
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, plain, attn_mask=bias, scale=scaling)
        if mask is not None:
            lse = lse.masked_fill(~mask.any(-1), -torch.inf)
        return out.transpose(1, 2).float(), lse.transpose(1, 2)
    if mask is None:
        mask = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()[None, None]
    scores = q.float() @ k.float().transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
    return (p @ v.float()).transpose(1, 2), lse.transpose(1, 2)


def _fresh_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scaling: float, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_fresh` by FlashAttention: no mask of T x T is made. Padding is cut out of its sequence."""
    from ..cuda.attend.dense import attention

    real = (positions >= 0).cpu()
    if bool(real.all()):
        out, lse = attention(q, k, v, scaling, causal=True, window=sliding_window)
        return out.float(), lse
    out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for b in range(len(q)):
        rows = real[b].nonzero().squeeze(1).to(q.device)
        if len(rows):
            o, m = attention(q[b : b + 1, rows], k[b : b + 1, rows], v[b : b + 1, rows], scaling, causal=True, window=sliding_window)
            out[b, rows], lse[b, rows] = o[0].float(), m[0]
    return out, lse


def _visible(positions: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Bool [B, T, T]: which key each query sees."""
    keys, queries = positions[:, None, :], positions[:, :, None]
    seen = (keys >= 0) & (keys <= queries)
    return seen if sliding_window is None else seen & (keys > queries - sliding_window)
