"""demote="attention": pages that attention uses keep their planes, wherever they are; the bytes are those of fixed zones."""

import dataclasses

import numpy as np
import pytest
import torch
from cache_checks import check_books

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.spec import CacheSpec, LayerGeometry, PerChannel, PerToken, QuantSpec, Scheme, Tier

KEY = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False)
VALUE = QuantSpec(format="int4", granularity=PerToken(), symmetric=False)
LAYERS = (LayerGeometry(num_kv_heads=2, head_dim=16),) * 2


def cache_of(demote, tokens=96, **capacity):
    scheme = Scheme(name="a", key=KEY, value=VALUE, num_sink_tokens=2, residual_length=32, page_size=32, tiers=(Tier(num_tokens=tokens),), demote=demote)
    return PagedCache(CacheSpec(scheme=scheme, layers=LAYERS, raw_dtype="float32"), **capacity)


def feed(cache, n, heavy, chunk=1):
    """`n` tokens; keys of the positions in `heavy` point where all queries look."""
    look = torch.nn.functional.one_hot(torch.tensor(3), 16).float()
    done = 0
    while done < n:
        t = min(chunk, n - done)
        at = torch.arange(t) + (cache.seq_lens[0] if cache.batch_size else 0)
        for layer in range(2):
            k = torch.randn(1, t, 2, 16) * 0.1
            k[:, [int(p) in heavy for p in at]] += 6 * look
            cache.step(layer, torch.randn(1, t, 4, 16) * 0.1 + 2 * look, k, torch.randn(1, t, 2, 16), scaling=0.5)
        done += t


def warm_positions(cache, row=0):
    s = cache.groups[0].sequences[row]
    starts = 2 + 32 * np.arange(len(s.closed))
    return [int(at) for at, plane in zip(starts, s.low[0], strict=True) if plane is not None]


@pytest.mark.parametrize("chunk", [1, 40])
def test_a_used_page_keeps_its_plane_and_an_unused_one_goes(chunk):
    heavy = {70, 75, 80}  # all in the page of tokens 66 .. 97
    fixed, adaptive = cache_of("age"), cache_of("attention")
    for cache in (fixed, adaptive):
        feed(cache, 560, heavy, chunk)
        check_books(cache)
    assert 66 not in warm_positions(fixed)
    assert 66 in warm_positions(adaptive)
    assert len(warm_positions(adaptive)) == len(warm_positions(fixed)) == 3, "equal bytes"
    (mass,) = adaptive.mass(0)
    assert max(mass, key=mass.get) == 66
    assert sum(mass.values()) == pytest.approx(1, abs=0.2), "shares of one attention"
    assert fixed.mass(0) == [{}]
    assert adaptive.nbytes <= fixed.nbytes


def test_attention_that_moves_on_lets_go():
    cache = cache_of("attention")
    feed(cache, 400, {70, 75, 80})
    assert 66 in warm_positions(cache)
    feed(cache, 500, {*range(450, 478), *range(482, 510)})
    assert warm_positions(cache)[:2] == [450, 482]


def test_what_was_learnt_survives_forks_crops_and_files(tmp_path):
    cache = cache_of("attention")
    feed(cache, 300, {70, 75})
    cache.fork(0)
    assert cache.mass(0) == cache.mass(1)
    cache.crop([300, 150])
    assert all(at < 150 for at in cache.mass(1)[0])
    assert cache.mass(0)[0].keys() - cache.mass(1)[0].keys()
    cache.save(tmp_path / "c")
    loaded = PagedCache.load(tmp_path / "c")
    assert loaded.mass(0) == cache.mass(0)
    out = cache.swap_out(0)
    cache.swap_in(0, out)
    assert loaded.mass(0) == cache.mass(0)


def test_a_cache_of_fixed_capacity_stays_in_it():
    cache = cache_of("attention", batch_size=1, max_tokens=900)
    before = cache.nbytes
    feed(cache, 900, {70, 300, 500}, chunk=33)
    assert cache.nbytes == before == cache.spec.nbytes(900)
    check_books(cache)


def test_adaptive_by_name():
    adaptive = schemes.get("tiered_8k", tiers="adaptive")
    assert adaptive.demote == "attention"
    assert adaptive.tiers == schemes.get("tiered_8k").tiers
    with pytest.raises(SpecError, match="unknown demote 'mass'; known: age, attention"):
        dataclasses.replace(adaptive, demote="mass")


@pytest.mark.parametrize("budget", [0.35, 0.45, 0.5])
def test_zones_fill_a_byte_budget(budget):
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 3
    scheme = schemes.get("tiered_8k")
    full = CacheSpec(scheme=scheme, layers=layers).raw_nbytes(8192)
    sized = schemes.within(scheme, layers, int(budget * full), context=8192)
    taken = CacheSpec(scheme=sized, layers=layers).nbytes(8192)
    (tier,) = sized.tiers
    page_more = dataclasses.replace(sized, tiers=(Tier(num_tokens=tier.num_tokens + 64),))
    assert taken <= int(budget * full)
    assert CacheSpec(scheme=page_more, layers=layers).nbytes(8192) > int(budget * full) or tier.num_tokens >= 7600
    with pytest.raises(SpecError, match="bytes are too few"):
        schemes.within(scheme, layers, full // 10, context=8192)
    with pytest.raises(SpecError, match="has no tiers to size"):
        schemes.within(schemes.get("int4"), layers, full, context=8192)
