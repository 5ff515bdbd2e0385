"""A cache of fixed capacity holds exactly what the arithmetic says, and that suffices."""

import contextlib
import dataclasses
import json
import re

import pytest
import torch
from cache_checks import Pair, check_books, drop_pass, picture
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from nightly import at_night
from ops.cpu_cases import statics_of

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.cache.pool import GROWTH, HUGE_PAGE
from kvbits.cache.step import Run
from kvbits.errors import CacheError, PoolFullError
from kvbits.schemes import PRESETS
from kvbits.spec import CacheSpec, LayerGeometry, PerGroup, PerTensor, QuantSpec, Rotary, Scheme
from kvbits.units import human_bytes

FULL = LayerGeometry(num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sinks", [0, 4])
def test_every_preset_allocates_the_bytes_the_spec_predicts(name, sinks):
    scheme = schemes.get(name, num_sink_tokens=sinks)
    layers = (FULL, dataclasses.replace(FULL, sliding_window=100), LayerGeometry(num_kv_heads=3, head_dim=128), FULL)
    if scheme.needs_rotary:
        layers = tuple(dataclasses.replace(g, rotary=Rotary(inv_freq=(1.0, 0.1))) for g in layers)
    spec = CacheSpec(scheme=scheme, layers=layers)
    static = statics_of(spec)
    for max_tokens, batch in ((1, 1), (64, 2), (700, 3)):
        cache = PagedCache(spec, batch_size=batch, max_tokens=max_tokens, static=static)
        assert cache.nbytes == spec.nbytes(max_tokens, batch)
        slabs = [s for g in cache.groups for p in g.pools.values() for s in p.slabs]
        assert sum(s.nbytes for s in slabs) == cache.nbytes
        assert sum(s.untyped_storage().nbytes() for s in slabs) <= cache.nbytes + HUGE_PAGE * len(slabs), (
            "a slab is laid on a boundary of 2 MiB, no more"
        )
        assert cache.bytes_by_kind()["free"] == cache.nbytes


def test_a_capacity_is_of_one_sequence_unless_more_are_asked_for():
    spec = CacheSpec(scheme=schemes.get("int8"), layers=(FULL,) * 2)
    assert PagedCache(spec, max_tokens=100).nbytes == spec.nbytes(100, 1)
    pair = Pair(PagedCache(spec, max_tokens=100))
    with raises(PoolFullError, "1 sequence", "100 tokens", "2 x 100", "max_tokens", "batch_size", "grow=True"):
        pair.append(2, 100)


def chunks(draw, total):
    """Ways to cut `total` tokens into forward passes."""
    way = draw(st.sampled_from(["one by one", "one prefill", "prefill then decode", "mixed"]))
    if way == "one by one":
        return [1] * total
    if way == "one prefill":
        return [total]
    if way == "prefill then decode":
        first = draw(st.integers(1, total))
        return [first] + [1] * (total - first)
    cut = []
    while sum(cut) < total:
        cut.append(min(draw(st.sampled_from([1, 1, 2, 5, 31, 32, 33, 64, 90, 130])), total - sum(cut)))
    return cut


@st.composite
def fillings(draw):
    """A scheme, a geometry with windows, a capacity, and a way to fill it."""
    raw = draw(st.integers(0, 3)) == 0
    q = QuantSpec.raw() if raw else QuantSpec(format="int4", granularity=PerGroup(8))
    scheme = Scheme(
        name="x",
        key=q,
        value=q,
        page_size=32,
        num_sink_tokens=draw(st.sampled_from([0, 1, 4, 40])),
        residual_length=draw(st.sampled_from([0, 1, 16, 31, 32, 33, 48, 64, 100])),
    )
    window = draw(st.none() | st.sampled_from([1, 2, 16, 31, 32, 33, 63, 64, 65, 100, 129]) | st.integers(1, 140))
    spec = CacheSpec(
        scheme=scheme, layers=(LayerGeometry(num_kv_heads=1, head_dim=8, sliding_window=window),), raw_dtype="float32"
    )
    total = draw(st.integers(1, 260))
    batch = draw(st.integers(1, 3))
    return spec, total, batch, chunks(draw, total)


@given(fillings())
def test_the_predicted_capacity_suffices_for_any_way_of_filling_it(filling):
    spec, total, batch, cut = filling
    cache = PagedCache(spec, batch_size=batch, max_tokens=total, backend="reference")
    assert cache.nbytes == spec.nbytes(total, batch)
    for n in cut:  # page ids are all that capacity is about
        cache.begin(batch, n)
        drop_pass(cache)
        check_books(cache)
    assert cache.seq_lens == [total] * batch
    assert cache.nbytes == spec.nbytes(total, batch)


@given(fillings(), st.data())
def test_ragged_rows_below_the_capacity_never_run_out(filling, data):
    spec, total, batch, cut = filling
    cache = PagedCache(spec, batch_size=batch, max_tokens=total, backend="reference")
    for n in cut:
        valid = torch.zeros(batch, n, dtype=torch.bool)
        for row in range(batch):
            valid[row, n - data.draw(st.integers(0, n)) :] = True
        cache.begin(batch, n, valid)
        drop_pass(cache)
    check_books(cache)


@given(fillings())
def test_a_growing_cache_allocates_little_more_than_it_uses(filling):
    spec, total, batch, cut = filling
    cache = PagedCache(spec, backend="reference")
    for n in cut:
        cache.begin(batch, n)
        drop_pass(cache)
    for name, pool in cache.groups[0].pools.items():
        most = spec.groups[0].pages_for(total)[name] * batch
        assert pool.allocator.capacity <= most + most // 8


def test_more_than_the_capacity_is_refused_whole_and_says_what_to_do():
    spec = CacheSpec(
        scheme=schemes.get("int8", residual_length=16, page_size=32),
        layers=(FULL, dataclasses.replace(FULL, sliding_window=50)),
        raw_dtype="float32",
    )
    pair = Pair(PagedCache(spec, batch_size=2, max_tokens=100, backend="reference"))
    pair.append(2, 90)
    before = picture(pair.cache)
    with raises(PoolFullError, "2 sequences", "100 tokens", "2 x 300", "crop", "reset", "max_tokens", "batch_size"):
        pair.cache.begin(2, 300)
    assert picture(pair.cache) == before
    pair.check()
    pair.append(2, 10)  # what fits still works
    pair.check()


def speculating(cache, total, num_drafted=5, num_kept=2):
    """Fill a cache as speculative decoding does: so many tokens, of which some are taken back."""
    x = torch.randn(1, num_drafted, 2, 64)
    while cache.seq_lens != [total]:
        length = cache.seq_lens[0] if cache.seq_lens else 0
        n = min(num_drafted, total - length)
        cache.append(0, x[:, :n], x[:, :n])
        if length + n < total:
            cache.crop(length + num_kept)


def test_crops_into_closed_pages_take_room_and_the_refusal_says_so():
    """Quantized slots are not written twice, so a crop into a closed page loses them: with nothing but the newest token
    raw, the pages of 1,024 tokens do not hold them.
    """
    spec = CacheSpec(scheme=schemes.get("int8_centered"), layers=(FULL,), raw_dtype="float32")
    assert (spec.scheme.residual_length, spec.scheme.page_size) == (0, 64)
    with raises(PoolFullError, "15 closed pages", "layers 0..", "64 tokens", "crop()", "30 tokens", "residual_length"):
        speculating(PagedCache(spec, max_tokens=1024), 1024)
    cache = PagedCache(
        dataclasses.replace(spec, scheme=schemes.get("int8_centered", residual_length=3)), max_tokens=1024
    )
    speculating(cache, 1024)
    assert all(n == 64 for n in cache.groups[0].sequences[0].closed_lengths)
    check_books(cache)


def test_a_first_pass_that_does_not_fit_leaves_an_empty_cache():
    spec = CacheSpec(scheme=schemes.get("int8"), layers=(FULL,), raw_dtype="float32")
    pair = Pair(PagedCache(spec, batch_size=1, max_tokens=64, backend="reference"))
    with pytest.raises(PoolFullError):
        pair.cache.begin(3, 500)
    assert pair.cache.batch_size == 0
    pair.append(1, 64)
    pair.check()


def test_a_run_of_tokens_is_cut_from_the_front_waiting_ones_first():
    run = Run(start=10, waiting=5, fresh=0, num_tokens=12)
    assert run.cut(3) == (Run(10, 3, 0, 3), Run(13, 2, 0, 9))
    assert run.cut(8) == (Run(10, 5, 0, 8), Run(18, 0, 3, 4))
    assert run.cut(12) == (run, Run(22, 0, 7, 0))


@given(fillings(), st.data())
def test_a_step_extends_a_growing_pool_at_most_once_and_by_what_it_takes(filling, data):
    spec, _, batch, cut = filling
    cache = PagedCache(spec, backend="reference")
    group = cache.groups[0]
    group.resize(batch)
    shared = 0  # rows that share a page are each counted for the copy that the last of them does not make
    for n in cut:
        before = {name: (len(p.slabs), p.allocator.capacity) for name, p in group.pools.items()}
        step = group.advance(
            [data.draw(st.sampled_from([0, n, n])) for _ in range(batch)], n > 1 or data.draw(st.booleans())
        )
        for name, pool in group.pools.items():
            slabs, capacity = before[name]
            grown = pool.allocator.capacity - capacity
            assert len(pool.slabs) <= slabs + 1
            assert grown <= max(capacity // GROWTH, shared + sum(taken == name for taken, _ in step.taken))
            assert grown <= capacity // GROWTH or pool.allocator.num_free <= shared
        if data.draw(st.integers(0, 3)) == 0:
            group.select([data.draw(st.integers(0, batch - 1)) for _ in range(batch)])
            shared = batch
        check_books(cache)


def test_a_long_prompt_takes_no_pages_for_tokens_outside_the_window():
    spec = CacheSpec(
        scheme=schemes.get("int4"), layers=(dataclasses.replace(FULL, sliding_window=256),), raw_dtype="float32"
    )
    cache = PagedCache(spec, backend="reference")
    cache.begin(1, 20_000)
    assert cache.nbytes == spec.nbytes(20_000)


def test_static_per_tensor_scales_allocate_no_scale_bytes():
    q = QuantSpec(format="fp8_e4m3", granularity=PerTensor(), static=True)
    spec = CacheSpec(scheme=Scheme(name="x", key=q, value=q), layers=(FULL,))
    assert spec.groups[0].layouts["closed"].bytes_by_kind() == {
        "codes": 2 * 64 * 64 * 2,
        "scales": 0,
        "outliers": 0,
        "raw": 0,
        "padding": 0,
    }


def test_the_tiered_article_s_example_to_the_byte():
    """32 layers x 32 heads x 128 channels, 32,768 tokens: 17.2 GB at 16 bits, 7.47 GB by the article's tiers, less
    here. Allocated for real with 1 layer of 1 head, a 1,024th of everything, and filled.
    """
    scheme = schemes.get("tiered")
    full = CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=32, head_dim=128),) * 32)
    small = CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=1, head_dim=128),))
    assert full.raw_nbytes(32768) == 17_179_869_184
    elements = 2 * 32 * 32 * 128
    # two fp32 per token and head
    article = elements * 2048 * 2 + elements * 14336 * 17 // 16 + elements * 16384 * 9 // 16
    assert round(article / 1e9, 1) == 7.5
    # By hand: 4 sinks, 33 raw pages (2,048 tokens and the page that fills), 255 packed pages with 4.375 bits, 225 with
    # 8.375 (one is for speculation).
    scales = 4 * 128 + 4 * 64
    by_hand = elements * (4 * 2 + 33 * 64 * 2) + 32 * 32 * (255 * (64 * 128 + scales) + 225 * (2 * 64 * 128 + scales))
    assert full.nbytes(32768) == 1024 * small.nbytes(32768) == by_hand < article
    assert 1 - full.nbytes(32768) / full.raw_nbytes(32768) > 0.565
    cache = PagedCache(small, batch_size=1, max_tokens=32768)
    assert cache.nbytes == small.nbytes(32768)
    x = torch.randn(1, 4096, 1, 128, dtype=torch.bfloat16)
    for _ in range(8):
        cache.append(0, x, x)
    used = {name: (p.allocator.num_used, p.allocator.capacity) for name, p in cache.groups[0].pools.items()}
    assert used == {"sink": (1, 1), "closed": (255, 255), "tail": (33, 33), "tier0": (224, 225)}
    assert cache.nbytes == small.nbytes(32768)


def test_a_capacity_that_no_memory_has_says_how_many_bytes_it_wanted():
    spec = CacheSpec(scheme=schemes.get("kivi4"), layers=(LayerGeometry(num_kv_heads=2, head_dim=64),) * 3)
    for tokens in (10**12, 10**18, 10**30):
        with raises(CacheError, f"{spec.nbytes(tokens, 2):,} bytes", "max_tokens", "batch_size"):
            PagedCache(spec, max_tokens=tokens, batch_size=2)


def test_an_explanation_is_a_dict_that_prints_as_a_few_lines():
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 3 + (
        LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=300),
    )
    cache = PagedCache(CacheSpec(scheme=schemes.get("kivi4"), layers=layers))
    assert str(cache.explain()).splitlines() == [
        "kivi4: 5.00 bits a number once quantized",
        "memory: 0 B (nothing allocated yet)",
        "layers 0 to 2: keys int4 per channel, values int4 in groups of 32; no pages in use",
        "layer 3: keys int4 per channel, values int4 in groups of 32, window 300; no pages in use",
        "the first forward pass chooses the kernels",
    ]
    x = torch.randn(1, 400, 2, 64, dtype=torch.bfloat16)
    for layer in range(4):
        cache.step(layer, x, x, x, scaling=0.1)
    found = cache.explain()
    assert isinstance(found, dict) and json.loads(json.dumps(found)) == json.loads(json.dumps(dict(found)))
    text = str(found)
    assert (
        f"memory: {human_bytes(cache.nbytes)} (quantized " in text
        and "pages quantized, " in text
        and len(text.splitlines()) in (5, 6)
    )  # a line for each backend that serves
    assert re.search(r"^(CPU kernels|plain PyTorch, slower.*): .*quantizing pages", text, re.MULTILINE)


@pytest.mark.parametrize("window", [50, *at_night(None)])
@pytest.mark.parametrize("name", ["raw", "int4", "kivi4", "tiered_8k"])
def test_the_room_of_a_capacity_is_what_really_fits(name, window):
    layers = (LayerGeometry(num_kv_heads=1, head_dim=64, sliding_window=window),)
    spec = CacheSpec(scheme=schemes.get(name), layers=layers, raw_dtype="float32")
    for asked in (1, 64, 100, 129):
        cache, fed = PagedCache(spec, max_tokens=asked), 0
        token = torch.ones(1, 1, 1, 64)
        with contextlib.suppress(PoolFullError):
            for fed in range(asked + 200):  # noqa: B007
                cache.step(0, token, token, token, scaling=0.1)
        room = spec.room(asked)
        assert (room is None and fed == asked + 199) or room == fed >= asked
    assert spec.room(100) != 100
    line = "windows hold any number" if room is None else f"whole pages have room for {room:,}"
    assert f"capacity: 1 sequence of 129 tokens; {line}" in str(cache.explain()).splitlines()
