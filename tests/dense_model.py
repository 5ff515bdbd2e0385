"""What a paged cache must hold, kept densely: the judge of the cache tests.

A sequence of a layer is sink tokens (raw), closed pages (quantized once, from the raw tokens they closed over) and tail tokens (raw). Nothing here
knows pages, ids or windows; every token stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvbits.ops.close_pages.reference import close_pages
from kvbits.ops.dequantize_pages.reference import dequantize_pages
from kvbits.spec import CacheSpec, LayerGroup


@dataclass(frozen=True)
class ClosedPage:
    k: torch.Tensor  # [visible, H, D] float64
    v: torch.Tensor
    head_bytes: torch.Tensor  # uint8 [H, head_bytes]: must never change


@dataclass
class DenseSequence:
    """One sequence in one layer."""

    group: LayerGroup
    static: dict[str, torch.Tensor]
    sink: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    closed: list[ClosedPage] = field(default_factory=list)
    tail: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.sink) + sum(len(c.k) for c in self.closed) + len(self.tail)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [n, H, D] of the model's dtype."""
        g = self.group
        tokens = list(zip(k, v, strict=True))
        sinks = max(0, g.num_sink_tokens - self.length)
        self.sink += tokens[:sinks]
        self.tail += tokens[sinks:]
        while not g.is_raw and len(self.tail) > g.residual_length + g.page_size:
            page, self.tail = self.tail[: g.page_size], self.tail[g.page_size :]
            raw_k, raw_v = (torch.stack(x).transpose(0, 1)[None] for x in zip(*page, strict=True))
            layout = g.layouts["closed"]
            stored, _ = close_pages(raw_k, raw_v, layout, self.static)
            k64, v64 = dequantize_pages(stored, layout, self.static, torch.float64)
            self.closed.append(ClosedPage(k64[0].transpose(0, 1), v64[0].transpose(0, 1), stored[0]))

    def crop(self, length: int) -> None:
        while self.length > length:
            surplus = self.length - length
            if self.tail:
                del self.tail[-min(surplus, len(self.tail)) :]
            elif self.closed:
                last = self.closed.pop()
                if surplus < len(last.k):
                    self.closed.append(ClosedPage(last.k[: len(last.k) - surplus], last.v[: len(last.v) - surplus], last.head_bytes))
            else:
                del self.sink[-surplus:]

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, H, D] float64, as attention must see them."""
        geometry = self.group.geometry
        sides = []
        for i in (0, 1):
            parts = [torch.zeros(0, geometry.num_kv_heads, geometry.head_dim, dtype=torch.float64)]
            parts += [t[i].double()[None] for t in self.sink]
            parts += [(c.k, c.v)[i] for c in self.closed]
            parts += [t[i].double()[None] for t in self.tail]
            sides.append(torch.cat(parts))
        return sides[0], sides[1]

    def clone(self) -> DenseSequence:
        return DenseSequence(self.group, self.static, self.sink[:], self.closed[:], self.tail[:])


class DenseCache:
    """All sequences of all layers."""

    def __init__(self, spec: CacheSpec, static: list[dict[str, torch.Tensor]] | None = None) -> None:
        self.spec = spec
        self.static = static or [{} for _ in spec.layers]
        self.group_of = {layer: g for g in spec.groups for layer in g.layers}
        self.rows: list[list[DenseSequence]] = []  # [row][layer]

    def new_row(self) -> list[DenseSequence]:
        return [DenseSequence(self.group_of[i], self.static[i]) for i in range(len(self.spec.layers))]

    @property
    def seq_lens(self) -> list[int]:
        return [row[0].length for row in self.rows]

    def clone_row(self, row: int) -> list[DenseSequence]:
        return [s.clone() for s in self.rows[row]]

    def select(self, rows: list[int]) -> None:
        self.rows = [self.clone_row(r) for r in rows]

    def crop(self, lengths: list[int]) -> None:
        for row, n in zip(self.rows, lengths, strict=True):
            for sequence in row:
                sequence.crop(n)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: list[int], scaling: float, window: int | None = None, softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention in float64 over keys at positions 0, 1, ..: one query at a time, plain softmax.

    Args:
        q: [T, Hq, D]; k, v: [n, H, D]; q_positions: position of each query, negative for padding.

    Returns:
        out [T, Hq, D] and lse [T, Hq]; 0 and -inf where nothing is visible.
    """
    t, hq, d = q.shape
    out = torch.zeros(t, hq, d, dtype=torch.float64)
    lse = torch.full((t, hq), -torch.inf, dtype=torch.float64)
    k = k.double().repeat_interleave(hq // k.shape[1], 1)
    v = v.double().repeat_interleave(hq // v.shape[1], 1)
    for i, position in enumerate(q_positions):
        first = 0 if window is None else max(0, position - window + 1)
        if position < first:
            continue
        seen = slice(first, position + 1)
        scores = torch.einsum("hd,nhd->hn", q[i].double(), k[seen]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if not scores.shape[1]:
            continue
        extra = None if sink_logits is None else sink_logits.double()[:, None]
        every = scores if extra is None else torch.cat([scores, extra], 1)
        out[i] = torch.einsum("hn,nhd->hd", torch.softmax(every, 1)[:, : scores.shape[1]], v[seen])
        lse[i] = torch.logsumexp(scores, 1)
    return out, lse
