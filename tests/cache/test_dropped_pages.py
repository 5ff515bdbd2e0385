"""drop_pages: what was dropped is never seen again, everything else is as it was, at its position, through every
operation on the sequence.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from cache_checks import SCALING, Pair, check_books, picture, poison_free_pages
from dense_model import dense_attention
from messages import raises

from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError
from kvbits.spec import CacheSpec, LayerGeometry, Override, PerChannel, PerToken, QuantSpec, Rotary, Scheme, Tier

KEY = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False)
VALUE = QuantSpec(format="int4", granularity=PerToken(), symmetric=False)
RAW = QuantSpec.raw()


def spec_of(tiers=(), sinks=2, overrides=(), key=KEY, dtype="float32", window=None):
    scheme = Scheme(
        name="a",
        key=key,
        value=VALUE,
        num_sink_tokens=sinks,
        residual_length=32,
        page_size=32,
        tiers=tiers,
        overrides=overrides,
    )
    rotary = Rotary(inv_freq=(1.0, 0.3, 0.1, 0.01, 0.7, 0.2, 0.05, 0.003)) if key.pre_rope else None
    layers = tuple(
        LayerGeometry(num_kv_heads=2, head_dim=16, sliding_window=w, rotary=rotary) for w in (None, window, None)
    )
    return CacheSpec(scheme=scheme, layers=layers, raw_dtype=dtype)


def fill(spec, tokens=420, batch=2, chunk=100, backend="auto", **capacity):
    """A cache and its dense model, which keeps every token."""
    pair = Pair(PagedCache(spec, backend=backend, **capacity), attend=False)
    for start in range(0, tokens, chunk):
        pair.append(batch, min(chunk, tokens - start))
    return pair


def gone(starts):
    return {at + i for at in starts for i in range(32)}


def attend(pair, row, layer, dropped, tokens):
    """Attention of `tokens` new tokens of every row against float64 attention over what is left."""
    cache, batch = pair.cache, pair.cache.batch_size
    geometry = cache.spec.layers[layer]
    q = torch.randn(batch, tokens, 4, 16).to(pair.dtype)
    k, v = (torch.randn(batch, tokens, 2, 16).to(pair.dtype) for _ in range(2))
    before = cache.seq_lens[row]
    history = pair.model.rows[row][layer].values()
    cache.begin(batch, tokens)
    for i in range(len(cache.spec.layers)):
        out = cache.step(i, q, k, v, scaling=SCALING)
        for b in range(batch):
            pair.model.rows[b][i].append(k[b], v[b])
        if i == layer:
            got = out[row]
    held = (
        [torch.cat([x, y[row].double()]) for x, y in zip(history, (k, v), strict=True)]
        if tokens > 1
        else pair.model.rows[row][layer].values()
    )
    left = [i for i in range(len(held[0])) if i not in dropped]
    for t in range(tokens):  # keys that are left, at their own positions: hidden ones are simply not there
        first = 0 if geometry.sliding_window is None else before + t - geometry.sliding_window + 1
        seen = [i for i in left if first <= i <= before + t]
        want, _ = dense_attention(q[row, t : t + 1], held[0][seen], held[1][seen], [len(seen) - 1], SCALING)
        if "attend by reference" in cache.explain()["ops"]:
            torch.testing.assert_close(got[t].double(), want[0], rtol=0, atol=3e-5)
        else:  # kernels round int4's queries and weights; one page of the twelve weighs ten times as much
            assert (got[t].double() - want[0]).norm() < 3e-2 * want[0].norm()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("tiers", [(), (Tier(num_tokens=128),)])
def test_attention_sees_all_but_the_dropped_pages(backend, tokens, tiers):
    pair = fill(spec_of(tiers), backend=backend)
    (held,) = pair.cache.closed_pages(0)
    assert held == [2 + 32 * i for i in range(12)]
    # a dropped page of a tier leaves its place to an older one
    drop = [held[0], held[4], held[5], *([] if tiers else [held[11]])]
    used = pair.cache.groups[0].pools["closed"].allocator.num_used
    pair.cache.drop_pages(0, [drop])
    assert pair.cache.groups[0].pools["closed"].allocator.num_used == used - len(drop)
    assert pair.cache.closed_pages(0) == [[at for at in held if at not in drop]] and pair.cache.closed_pages(1) == [
        held
    ]
    assert pair.cache.seq_lens == [420, 420]
    poison_free_pages(pair.cache)
    check_books(pair.cache)
    for layer in range(3):
        attend(pair, 0, layer, gone(drop), tokens)
        attend(pair, 1, layer, set(), tokens)
    k, v = pair.cache.dequantize(0, 0, torch.float64)
    want = pair.model.rows[0][0].values()
    left = [i for i in range(len(want[0])) if i not in gone(drop)]
    assert torch.equal(k, want[0][left]) and torch.equal(v, want[1][left])


def test_keys_stored_before_the_rotary_embedding_keep_their_positions():
    key = dataclasses.replace(KEY, pre_rope=True)
    cache = PagedCache(spec_of(key=key))
    for layer in range(3):
        cache.append(layer, torch.randn(1, 420, 2, 16), torch.randn(1, 420, 2, 16))
    whole = cache.dequantize(0, 0)
    cache.drop_pages(0, [[34, 98]])
    left = [i for i in range(420) if i not in gone([34, 98])]
    for a, b in zip(cache.dequantize(0, 0), whole, strict=True):
        assert torch.equal(a, b[left])


def test_groups_drop_pages_of_their_own():
    pair = fill(spec_of(window=200, overrides=(Override(layers=(2,), key=RAW, value=RAW),)))
    held = pair.cache.closed_pages(0)
    assert len(held) == 3 and len(held[0]) == 12 and held[2] == [], "full, sliding, and raw layers, which close nothing"
    assert 0 < len(held[1]) < 9
    drop = [[held[0][3]], [held[1][-1]], []]
    pair.cache.drop_pages(0, drop)
    attend(pair, 0, 0, gone(drop[0]), 1)
    attend(pair, 0, 1, gone(drop[1]), 40)
    attend(pair, 0, 2, set(), 1)
    for _ in range(4):  # the sliding layers' pages leave, the dropped one among them
        pair.append(2, 90)
    check_books(pair.cache)
    attend(pair, 0, 1, gone(drop[1]), 1)
    assert all(at > 500 for at in pair.cache.closed_pages(0)[1])


@pytest.mark.parametrize("tiers", [(), (Tier(num_tokens=128),)])
def test_forks_crops_swaps_and_files_of_a_sequence_with_gaps(tiers, tmp_path):
    pair = fill(spec_of(tiers), batch=1)
    cache, drop = pair.cache, [66, 98, 258]
    cache.fork(0)
    cache.drop_pages(0, [drop])
    assert cache.closed_pages(1) == [[2 + 32 * i for i in range(12)]], "the fork keeps its own"
    check_books(cache)
    want = cache.dequantize(1, 0)
    left = [i for i in range(420) if i not in gone(drop)]
    for a, b in zip(want, cache.dequantize(1, 1), strict=True):
        assert torch.equal(a, b[left])
    for other in (copy.deepcopy(cache), reloaded(cache, tmp_path)):
        check_books(other)
        assert other.closed_pages(0) == cache.closed_pages(0)
        assert all(torch.equal(a, b) for a, b in zip(other.dequantize(1, 0), want, strict=True))
    swapped = cache.swap_out(0)
    poison_free_pages(cache)
    cache.swap_in(0, swapped)
    assert all(torch.equal(a, b) for a, b in zip(cache.dequantize(1, 0), want, strict=True))
    for n in (300, 270, 120, 90):  # into pages, into a gap, to its end
        cache.crop([n, 420])
        check_books(cache)
        left = [i for i in range(n) if i not in gone(drop)]
        for a, b in zip(cache.dequantize(1, 0), cache.dequantize(1, 1), strict=True):
            assert torch.equal(a, b[left])
    cache.free(0)
    cache.free(1)
    check_books(cache)
    assert cache.groups[0].pools["closed"].allocator.num_used == 0


def reloaded(cache, tmp_path):
    cache.save(tmp_path / "c")
    return PagedCache.load(tmp_path / "c")


def test_freed_pages_are_used_again_at_a_fixed_capacity():
    spec = spec_of()
    pair = fill(spec, batch=1, batch_size=1, max_tokens=420)
    pair.cache.drop_pages(0, [[2, 34, 66]])
    before = pair.cache.nbytes
    pair.append(1, 90)  # past what the capacity was planned for
    assert pair.cache.nbytes == before and pair.cache.seq_lens == [510]
    check_books(pair.cache)


def test_bad_drops_are_refused_and_change_nothing():
    pair = fill(spec_of(window=200))
    cache, before = pair.cache, picture(pair.cache)
    for starts, parts in (
        ([[2]], (1, "2 layer groups", "closed_pages()")),
        ([[2], [3]], ("sequence 0", "token 3", "layer group 1", "closed_pages(0)")),
        ([[386], []], ("sequence 0", "token 386", "layer group 0", "closed_pages(0)")),
    ):
        with raises(DataError, *parts):
            cache.drop_pages(0, starts)
    with raises(DataError, "sequence 7"):
        cache.drop_pages(7, [[], []])
    assert picture(cache) == before
    cache.drop_pages(0, [[2], []])
    with raises(DataError, "token 2"):
        cache.drop_pages(0, [[2], []])
    cache.keep_past()
    with raises(CacheStateError, "speculative"):
        cache.drop_pages(0, [[34], []])
