"""What a paged cache must hold, kept densely: the judge of the cache tests.

A sequence of a layer is sink tokens (raw), closed pages (quantized once, from the raw tokens they closed over, with low
planes while they are young) and tail tokens (raw, or quantized as they came where the scheme is token-local). Nothing
here knows page ids or windows; every token stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvbits.cache import parameters
from kvbits.ops.reference.close import close_nested
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.spec import CacheSpec, LayerGroup


@dataclass(frozen=True)
class ClosedPage:
    k: tuple[torch.Tensor, ...]  # [visible, H, D] float64, as 0, 1, .. low planes give it
    v: tuple[torch.Tensor, ...]
    pages: tuple[torch.Tensor, ...]  # uint8 [H, head_bytes] of the page and of its low planes: must never change
    planes: int  # low planes it has left

    def shown(self, n: int) -> ClosedPage:
        return replace(self, k=tuple(x[:n] for x in self.k), v=tuple(x[:n] for x in self.v))

    @property
    def length(self) -> int:
        return len(self.k[0])


@dataclass
class DenseSequence:
    """One sequence in one layer."""

    owner: DenseCache
    group: LayerGroup
    static: dict[str, torch.Tensor]
    boundaries: list[int]  # newest closed pages that keep the plane of each tier
    residual_length: int
    sink: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    closed: list[ClosedPage] = field(default_factory=list)
    tail: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    speculated: int = 0
    closed_since: int = 0

    @property
    def length(self) -> int:
        return len(self.sink) + sum(c.length for c in self.closed) + len(self.tail)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [n, H, D] of the model's dtype."""
        g, owner = self.group, self.owner
        tokens = list(zip(k, v, strict=True))
        sinks = max(0, g.num_sink_tokens - self.length)
        self.sink += tokens[:sinks]
        self.tail += tokens[sinks:] if not g.token_local else self.stored(tokens[sinks:])
        self.speculated += len(tokens) if owner.speculating else 0
        waits = (
            self.residual_length
            + g.page_size
            + (min(self.speculated, g.page_size) if owner.speculating and not owner.fixed else 0)
        )
        fresh = 0
        while not g.fills_pages and len(self.tail) > waits:
            page, self.tail = self.tail[: g.page_size], self.tail[g.page_size :]
            self.closed.append(self.close(page))
            fresh += 1
        if fresh:
            self.closed_since += fresh if owner.speculating else 0
            self.demote(min(self.closed_since, 1 if owner.fixed else 16))

    def stored(self, tokens: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens as pages hold them that are filled token by token: each as the first of a page (no centred keys, whose
        mean pages share).
        """
        found = []
        for token in tokens:
            page = self.close([token] * self.group.page_size)
            found.append((page.k[0][0], page.v[0][0]))
        return found

    def close(self, page: list[tuple[torch.Tensor, torch.Tensor]]) -> ClosedPage:
        g = self.group
        raw_k, raw_v = (torch.stack(x).transpose(0, 1)[None] for x in zip(*page, strict=True))
        layouts = list(g.low_layouts.values())[::-1]
        start = np.array([len(self.sink) + sum(c.length for c in self.closed)])
        stored, _ = close_nested(raw_k, raw_v, g.layouts["closed"], self.static, layouts, start)
        sides = []
        for planes in range(len(layouts) + 1):
            low = list(zip(stored[1:], layouts, strict=True))[:planes]
            sides.append(
                [
                    x[0].transpose(0, 1)
                    for x in dequantize_pages(stored[0], g.layouts["closed"], self.static, torch.float64, low, start)
                ]
            )
        return ClosedPage(
            tuple(s[0] for s in sides), tuple(s[1] for s in sides), tuple(x[0] for x in stored), len(layouts)
        )

    def demote(self, more: int) -> None:
        """Page number n from the newest keeps the planes of the tiers that reach so far."""
        for i, page in enumerate(self.closed):
            rank = len(self.closed) - 1 - i
            reached = sum(rank < n + (more if n else 0) for n in self.boundaries)
            if reached < page.planes:
                self.closed[i] = replace(page, planes=reached)

    def crop(self, length: int) -> None:
        """Also ends a speculation."""
        while self.length > length:
            surplus = self.length - length
            if self.tail:
                del self.tail[-min(surplus, len(self.tail)) :]
            elif self.closed:
                last = self.closed.pop()
                if surplus < last.length:
                    self.closed.append(last.shown(last.length - surplus))
            else:
                del self.sink[-surplus:]
        if not length:
            self.boundaries, self.residual_length = list(self.group.boundaries), self.group.residual_length
        self.settle()

    def settle(self) -> None:
        self.speculated = self.closed_since = 0
        self.demote(0)

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, H, D] float64, as attention must see them."""
        geometry = self.group.geometry
        sides = []
        for i in (0, 1):
            parts = [torch.zeros(0, geometry.num_kv_heads, geometry.head_dim, dtype=torch.float64)]
            parts += [t[i].double()[None] for t in self.sink]
            parts += [(c.k, c.v)[i][c.planes] for c in self.closed]
            parts += [t[i].double()[None] for t in self.tail]
            sides.append(torch.cat(parts))
        return sides[0], sides[1]

    def clone(self) -> DenseSequence:
        return replace(self, boundaries=self.boundaries[:], sink=self.sink[:], closed=self.closed[:], tail=self.tail[:])


class DenseCache:
    """All sequences of all layers."""

    def __init__(
        self, spec: CacheSpec, static: list[dict[str, torch.Tensor]] | None = None, *, fixed: bool = False
    ) -> None:
        self.spec = spec
        self.static = parameters.shared(spec, static or [{} for _ in spec.layers], torch.device("cpu"))
        self.fixed = fixed
        self.speculating = False
        self.group_of = {layer: g for g in spec.groups for layer in g.layers}
        self.rows: list[list[DenseSequence]] = []  # [row][layer]

    def new_row(self) -> list[DenseSequence]:
        groups = [self.group_of[i] for i in range(len(self.spec.layers))]
        return [
            DenseSequence(self, g, static, list(g.boundaries), g.residual_length)
            for g, static in zip(groups, self.static, strict=True)
        ]

    @property
    def seq_lens(self) -> list[int]:
        return [row[0].length for row in self.rows]

    def clone_row(self, row: int) -> list[DenseSequence]:
        return [s.clone() for s in self.rows[row]]

    def select(self, rows: list[int]) -> None:
        self.rows = [self.clone_row(r) for r in rows]

    def keep_past(self) -> None:
        self.speculating = True

    def crop(self, lengths: list[int]) -> None:
        self.speculating = False
        for row, n in zip(self.rows, lengths, strict=True):
            for sequence in row:
                sequence.crop(n)

    def set_tiers(self, row: int, tiers: list[int], residual_length: int) -> None:
        for sequence in self.rows[row]:
            sequence.residual_length = residual_length
            if sequence.group.tiers:
                sequence.boundaries = [sum(tiers[: i + 1]) // sequence.group.page_size for i in range(len(tiers))]
            sequence.demote(0)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: list[int],
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
