"""Dense model of what a paged cache must hold: the judge of the cache tests.

A sequence of a layer is sink tokens (raw), closed pages (quantized from the raw tokens they closed over, in the format
of the tier they closed into, and again from there when they leave it; beside them copies in finer formats, read while a
page is among the newest) and tail tokens (raw, or quantized as they came
where the scheme is token-local). Nothing here knows page ids or windows; every token stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvbits.cache import parameters
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.spec import CacheSpec, LayerGroup


@dataclass(frozen=True)
class ClosedPage:
    k: torch.Tensor  # [page_size, H, D] float64
    v: torch.Tensor
    page: torch.Tensor  # uint8 [H, head_bytes]
    tier: int  # 0 for the youngest
    start: int  # position of the first token
    length: int  # visible tokens
    # by kind, finest first, made from the same raw tokens; None where it is too old
    copies: tuple[ClosedPage | None, ...] = ()

    @property
    def read(self) -> ClosedPage:
        """Page or copy that attention reads."""
        return next((copy for copy in self.copies if copy is not None), self)


@dataclass
class DenseSequence:
    """One sequence in one layer."""

    owner: DenseCache
    group: LayerGroup
    static: dict[str, dict[str, torch.Tensor]]  # of each pool that shares something
    boundaries: list[int]  # newest closed pages that each tier and younger ones may have
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
        if not tokens:  # what a speculation left for later closes with the next token
            return
        sinks = max(0, g.num_sink_tokens - self.length)
        self.sink += tokens[:sinks]
        self.tail += tokens[sinks:] if not g.token_local else self.stored(tokens[sinks:])
        self.speculated += len(tokens) if owner.speculating else 0
        waits = (
            self.residual_length
            + g.page_size
            + (min(self.speculated, g.page_size) if owner.speculating and not owner.fixed else 0)
        )
        pages = []
        while not g.fills_pages and len(self.tail) > waits:
            page, self.tail = self.tail[: g.page_size], self.tail[g.page_size :]
            pages.append(page)
        if pages:
            self.closed_since += len(pages) if owner.speculating else 0
            more = min(self.closed_since, 1 if owner.fixed else 16)
            self.demote(more, len(pages))
            for rank, page in zip(reversed(range(len(pages))), pages, strict=True):
                start = len(self.sink) + sum(c.length for c in self.closed)
                k, v = (torch.stack(x).transpose(0, 1)[None] for x in zip(*page, strict=True))
                copies = tuple(self.encoded(k, v, start, name) for name in g.copy_pools)
                self.closed.append(replace(self.close(k, v, start, self.tier_of(rank, more)), copies=copies))
            for rank, page in enumerate(reversed(self.closed), 1):
                kept = tuple(
                    copy if sum(c.num_tokens for c in g.copies[: i + 1]) >= rank * g.page_size else None
                    for i, copy in enumerate(page.copies)
                )
                self.closed[-rank] = replace(page, copies=kept)

    def stored(self, tokens: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens as pages hold them that are filled token by token: each as the first of a page (no centred keys, whose
        mean pages share).
        """
        found = []
        for token in tokens:
            k, v = (x.expand(self.group.page_size, -1, -1).transpose(0, 1)[None] for x in token)
            page = self.close(k, v, len(self.sink) + len(self.tail), 0)
            found.append((page.k[0], page.v[0]))
        return found

    def close(self, k: torch.Tensor, v: torch.Tensor, start: int, tier: int) -> ClosedPage:
        """k, v: [1, H, page_size, D] of the model's dtype."""
        oldest = tier == len(self.boundaries)
        pool = self.group.packed_pool if oldest else f"tier{tier}"
        return replace(self.encoded(k, v, start, pool), tier=tier)

    def encoded(self, k: torch.Tensor, v: torch.Tensor, start: int, pool: str) -> ClosedPage:
        layout, static, starts = self.group.layouts[pool], self.static.get(pool, {}), np.array([start])
        page, _ = close_pages(k, v, layout, static, starts)
        k, v = (x[0].transpose(0, 1) for x in dequantize_pages(page, layout, static, torch.float64, starts=starts))
        return ClosedPage(k, v, page[0], 0, start, len(k))

    def tier_of(self, rank: int, more: int) -> int:
        """Tier of page number `rank` from the newest."""
        return sum(rank >= n + (more if n else 0) for n in self.boundaries)

    def demote(self, more: int, fresh: int = 0) -> None:
        """Pages that are too old for their tier are quantized again, from what they hold, in the dtype of the model."""
        for i, page in enumerate(self.closed):
            if (tier := self.tier_of(len(self.closed) - 1 - i + fresh, more)) > page.tier:
                layout = self.group.layouts[f"tier{page.tier}"]
                held = dequantize_pages(page.page[None], layout, {}, starts=np.array([page.start]))
                dtype = getattr(torch, self.group.raw_dtype)
                again = self.close(*(x.to(dtype) for x in held), page.start, tier)
                self.closed[i] = replace(again, length=page.length)

    def crop(self, length: int) -> None:
        """Also ends a speculation."""
        while self.length > length:
            surplus = self.length - length
            if self.tail:
                del self.tail[-min(surplus, len(self.tail)) :]
            elif self.closed:
                last = self.closed.pop()
                if surplus < last.length:
                    self.closed.append(replace(last, length=last.length - surplus))
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
            parts += [(c.read.k, c.read.v)[i][: c.length] for c in self.closed]
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
        self.static = parameters.by_pool(spec, static or [{} for _ in spec.layers], torch.device("cpu"))
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
