"""Checks of a paged cache against its dense model, and of its books, used by all cache tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from dense_model import DenseCache, dense_attention

from kvbits.cache import tables
from kvbits.cache.paged_cache import PagedCache
from kvbits.ops.types import Table

SCALING = 0.3


class Pair:
    """A paged cache and its dense model, driven together."""

    def __init__(
        self,
        cache: PagedCache,
        *,
        group: int = 2,
        softcap: float | None = None,
        attend: bool = True,
        unit: float | None = None,
    ) -> None:
        self.cache = cache
        self.model = DenseCache(cache.spec, cache.static, fixed=cache.max_tokens is not None)
        self.group, self.softcap, self.attend = group, softcap, attend
        self.dtype = getattr(torch, cache.spec.raw_dtype)
        usual = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
        self.unit = usual[self.dtype] if unit is None else unit  # of the largest number, what attention may be off by

    def random(self, batch: int, tokens: int, heads: int, head_dim: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(batch, tokens, heads, head_dim) * spread).to(self.dtype)

    def append(self, batch: int, tokens: int, valid: torch.Tensor | None = None) -> None:
        """One forward pass of random tokens; the cache's attention is compared with float64 attention over the model's
        values.
        """
        spec = self.cache.spec
        passes = []
        for geometry in spec.layers:
            h, d = geometry.num_kv_heads, geometry.head_dim
            passes.append(
                (
                    self.random(batch, tokens, h * self.group, d),
                    self.random(batch, tokens, h, d, 3.0) + 1.0,
                    self.random(batch, tokens, h, d),
                )
            )
        self.cache.begin(batch, tokens, valid)
        if not self.model.rows:
            self.model.rows = [self.model.new_row() for _ in range(batch)]
        before = self.model.seq_lens
        keep = torch.ones(batch, tokens, dtype=torch.bool) if valid is None else valid
        for layer, (q, k, v) in enumerate(passes):
            out = self.cache.step(layer, q, k, v, scaling=SCALING, softcap=self.softcap)
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            for b in range(batch):
                sequence = self.model.rows[b][layer]
                history = sequence.values()
                sequence.append(k[b, keep[b]], v[b, keep[b]])
                if self.attend:
                    held = (
                        sequence.values()
                        if tokens == 1
                        else [torch.cat([a, x[b, keep[b]].double()]) for a, x in zip(history, (k, v), strict=True)]
                    )
                    ranks = (before[b] + keep[b].long().cumsum(0) - 1).masked_fill(~keep[b], -1).tolist()
                    window = spec.layers[layer].sliding_window
                    expected, _ = dense_attention(q[b], held[0], held[1], ranks, SCALING, window, self.softcap)
                    torch.testing.assert_close(
                        out[b].double(), expected, rtol=0, atol=self.unit * max(1.0, expected.abs().max().item())
                    )

    def check(self) -> None:
        check_values(self.cache, self.model)
        check_books(self.cache)


def check_values(cache: PagedCache, model: DenseCache) -> None:
    """`dequantize` gives the model's values: raw tokens exactly, closed pages as quantized once, whatever a window
    released missing in front.
    """
    assert cache.seq_lens == model.seq_lens
    for layer, geometry in enumerate(cache.spec.layers):
        g = cache._stores.places[layer].group
        for row in range(cache.batch_size):
            want_k, want_v = model.rows[row][layer].values()
            k, v = cache.dequantize(layer, row, torch.float64)
            length, held = len(want_k), len(k)
            if geometry.sliding_window is None:
                assert held == length
            else:
                needed = min(length, geometry.sliding_window - 1)
                scheme = cache.spec.scheme
                assert held >= needed
                if not cache.groups[g].keep_past:
                    assert held <= needed + scheme.num_sink_tokens + scheme.residual_length + 2 * scheme.page_size
            assert torch.equal(k, want_k[length - held :])
            assert torch.equal(v, want_v[length - held :])
            state = cache.groups[g].sequences[row]
            place = cache._stores.places[layer]
            pages = model.rows[row][layer].closed
            for i, page in enumerate(pages[len(pages) - len(state.closed) :]):
                assert state.tier_of(i) == page.tier, "a page is not in its tier"
                stored = cache._stores.store(place, state.pool_of(i)).page(state.closed[i])
                assert torch.equal(stored, page.page), "the bytes of a closed page differ"
                for pool, copies, copy in zip(cache.groups[g].group.copy_pools, state.copies, page.copies, strict=True):
                    at = i - len(state.closed) + len(copies)
                    assert (copy is not None) == (at >= 0 and copies[at] is not None), "a copy is missing, or too old"
                    if copy is not None:
                        stored = cache._stores.store(place, pool).page(copies[at])
                        assert torch.equal(stored, copy.page), "the bytes of a copy differ"


def _as_lists(tables: dict[Any, Table]) -> dict[Any, list[Any]]:
    return {
        tier: [None if x is None else x.tolist() for x in (t.pages, t.tokens, t.starts, t.spans)]
        for tier, t in tables.items()
    }


def check_books(cache: PagedCache) -> None:
    """Every page is counted by exactly the sequences that hold it, kept tables say what is there, and every byte is in
    one kind.
    """
    for g in cache.groups:
        if g._closed_tables is not None:
            anew = tables.of_closed(g.sequences, g.group)
            assert _as_lists(g._closed_tables) == _as_lists(anew)
        for name, pool in g.pools.items():
            held = Counter(page for s in g.sequences for page in s.pages()[name])
            allocator = pool.allocator
            assert {i: n for i in range(allocator.capacity) if (n := allocator.count(i))} == dict(held)
            assert allocator.num_used == len(held)
            assert sorted(allocator._free) == [i for i in range(allocator.capacity) if i not in held]
            assert pool.nbytes == allocator.capacity * pool.block_bytes
            if pool.fixed_capacity is not None:
                assert allocator.capacity == pool.fixed_capacity
        for s in g.sequences:
            size = g.group.page_size
            assert len(s.closed) == len(s.closed_lengths)
            assert s.young == sorted(s.young) and all(n <= len(s.closed) for n in s.young)
            assert g.keep_past or all(n <= most for n, most in zip(s.young, s.boundaries, strict=True))
            assert [len(c) for c in s.copies] == sorted(len(c) for c in s.copies)
            for copies, most in zip(s.copies, g.group.copied_pages, strict=True):
                assert len(copies) <= min(most, len(s.closed))
                of = s.closed[len(s.closed) - len(copies) :]
                assert all((page is None) == (own is None) for page, own in zip(copies, of, strict=True))
            assert len(s.tail) == len(s.tail_lengths)
            assert all(0 < n <= size for n in s.closed_lengths + s.tail_lengths)
            assert all(n == size for n in s.tail_lengths[:-1])
            assert (
                not g.group.fills_pages
                or not s.tail
                or (s.length - s.tail_tokens - g.group.num_sink_tokens) % size == 0
            ), "a page begins in the middle of one"
            stored = (min(s.length, g.group.num_sink_tokens) if s.sink else 0) + sum(s.closed_lengths) + s.tail_tokens
            assert s.released + stored == s.length
    kinds = cache.bytes_by_kind()
    assert sum(kinds.values()) == cache.nbytes
    assert all(n >= 0 for n in kinds.values())


def poison_free_pages(cache: PagedCache) -> None:
    """Fill the pages that nobody holds: they may hold anything."""
    for g in cache.groups:
        for pool in g.pools.values():
            for page_id in pool.allocator._free:
                pool.block(page_id).fill_(0xFF)


def drop_pass(cache: PagedCache) -> None:
    """End a pass that no layer went through and leave its tokens there: page ids without bytes."""
    cache._passes._now = cache._passes._now._replace(forward=None)


def picture(cache: PagedCache) -> object:
    """Everything a failed operation must leave as it was: lengths, page lists, counts, and the bytes of pages in use."""
    return [
        (
            [s.clone() for s in g.sequences],
            g.keep_past,
            {
                name: (
                    [p.allocator.count(i) for i in range(p.allocator.capacity)],
                    sorted(p.allocator._free),
                    {i: p.block(i).numpy().tobytes() for i in range(p.allocator.capacity) if p.allocator.count(i)},
                )
                for name, p in g.pools.items()
            },
        )
        for g in cache.groups
    ]
