"""Attention over packed pages, a few pages at a time, with online softmax: never a dense copy of the history.

    m' = max(m, max(s)),  l' = l exp(m - m') + sum(exp(s - m')),  o' = o exp(m - m') + exp(s - m') V
                                                                  (arXiv:1805.02867)

Keys and values in a basis stay in it: queries go there once per frame, and outputs come back (quant/basis.py).
Runs anywhere torch runs. With `dtype=torch.float64` it is the judge of every kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ...quant.basis import frames, hadamard
from ...quant.rotary import turn
from ..types import AttendCall, Part, check_call
from .dequantize import dequantize_pages

PAGES_PER_STEP = 16


def attend(
    q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the pages of its sequence.

    Args:
        q: [B, T, Hq, D].
        call: pages of all formats, scaling, window, softcap.
        q_positions: int64 [B, T]; a key at position p is visible to a query at position t if t - sliding_window < p <=
            t. Negative marks a padding query, which sees nothing.

    Returns:
        out [B, T, Hq, value_head_dim] and lse [B, T, Hq] (natural log) in `dtype`; 0 and -inf where nothing was
            visible, NaN where something was and the query
        holds NaN or infinity (CUDA kernels answer such a query with 0 and -inf or NaN, without looking).

    Raises:
        DataError: shapes or tables that do not fit together.
    """
    check_call(call, q.shape)
    outs, lses = zip(*(_attend_sequence(q[b], call, q_positions[b], b, dtype) for b in range(q.shape[0])), strict=True)
    return torch.stack(outs), torch.stack(lses)


def _attend_sequence(
    q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor, b: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    t, hq = q.shape[:2]
    h = call.parts[0].store.layout.num_kv_heads
    rows = q.to(dtype).unflatten(1, (h, hq // h)).permute(1, 0, 2, 3).reshape(h, -1, q.shape[2])  # [H, T * G, D]
    finite = torch.isfinite(rows).all(-1, keepdim=True)
    rows = torch.where(finite, rows, 0)
    row_positions = q_positions.to(q.device).repeat_interleave(hq // h)
    best = rows.new_full((h, rows.shape[1], 1), -torch.inf)
    total = torch.zeros_like(best)
    out = rows.new_zeros(*rows.shape[:2], call.value_head_dim)
    for part in call.parts:
        queries = _Queries(rows, part)
        for k, v, key_positions, page_of in _steps(part, b, dtype):
            scores = queries.dot(k, page_of) * call.scaling
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            hidden = (key_positions < 0) | (key_positions > row_positions[:, None])
            if call.sliding_window is not None:
                hidden |= key_positions <= row_positions[:, None] - call.sliding_window
            scores = scores.masked_fill(hidden, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            safe = torch.where(torch.isinf(new_best), 0.0, new_best)
            p = torch.exp(scores - safe)
            alpha = torch.exp(best - safe)
            total = total * alpha + p.sum(-1, keepdim=True)
            seen_here = p @ v
            out = out * alpha + (hadamard(seen_here) if part.store.layout.value.basis == "hadamard" else seen_here)
            best = new_best
    seen = total > 0
    total = torch.where(finite, total, torch.nan)
    out = torch.where(seen, out / torch.where(seen, total, 1.0), 0.0)
    lse = torch.where(seen, best + torch.log(total), -torch.inf)
    return (
        out.view(h, t, hq // h, -1).permute(1, 0, 2, 3).reshape(t, hq, -1),
        lse.view(h, t, hq // h).permute(1, 0, 2).reshape(t, hq),
    )


class _Queries:
    """Queries [H, n, D] of one sequence for the keys of a part, each in the basis that its page stores them in."""

    def __init__(self, rows: torch.Tensor, part: Part) -> None:
        self.rows, self.part = rows, part
        self._in_frame: dict[int, torch.Tensor] = {}

    def dot(self, k: torch.Tensor, page_of: np.ndarray) -> torch.Tensor:
        """[H, n, tokens] with keys [H, tokens, D] of the pages `page_of` [tokens], entries of the page table."""
        basis = self.part.store.layout.key.basis
        if basis != "calibrated":
            return (hadamard(self.rows) if basis == "hadamard" else self.rows) @ k.transpose(-1, -2)
        frame_of = frames(self.part.table.starts[page_of])
        found = [
            self._of(int(f)) @ k[:, torch.from_numpy(np.flatnonzero(frame_of == f)).to(k.device)].mT
            for f in np.unique(frame_of)
        ]
        order = np.argsort(np.argsort(frame_of, kind="stable"))
        return torch.cat(found, -1)[..., torch.from_numpy(order).to(k.device)]

    def _of(self, frame: int) -> torch.Tensor:
        if frame not in self._in_frame:
            static = self.part.store.static
            self._in_frame[frame] = (
                turn(self.rows, torch.tensor([frame], device="cpu"), static["k_inv_freq"], back=True)
                @ static["k_inverse"].to(self.rows).mT
            )
        return self._in_frame[frame]


def _steps(
    part: Part, b: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]]:
    """[H, n, D] keys and values of a few pages at a time, dequantized in the basis that they are stored in, their
    positions [n] and their entries in the page table [n].
    """
    layout, table = part.store.layout, part.table
    for first in range(table.indptr[b], table.indptr[b + 1], PAGES_PER_STEP):
        entries = slice(first, min(first + PAGES_PER_STEP, table.indptr[b + 1]))
        k, v = dequantize_pages(
            part.store.gather(table.page_ids[entries]),
            layout,
            part.store.static,
            dtype,
            table.starts[entries],
            True,
        )
        inside = np.arange(layout.page_size)
        positions = np.where(inside < table.lengths[entries, None], table.starts[entries, None] + inside, -1).reshape(
            -1
        )
        keep = torch.from_numpy(positions >= 0).to(k.device)
        # Rows past the visible length may hold anything, NaN included, and 0 * NaN would spread it.
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, keep] for x in (k, v))
        page_of = np.repeat(np.arange(entries.start, entries.stop), layout.page_size)[positions >= 0]
        yield k, v, torch.from_numpy(positions).to(k.device)[keep], page_of
