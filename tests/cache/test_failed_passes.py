"""A forward pass that fails in the middle of the layers is taken back: nothing is lost, and other sequences go on."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from cache_checks import check_books, poison_free_pages
from messages import raises

from kvbits import later, schemes
from kvbits.cache import inputs, layer_runner
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError
from kvbits.spec import CacheSpec, LayerGeometry, Override, PerGroup, QuantSpec

LAYERS = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 3


def make(backend="auto", overrides=(), **changes):
    scheme = schemes.get("int8", page_size=32, overrides=overrides, **changes)
    return PagedCache(CacheSpec(scheme=scheme, layers=LAYERS, raw_dtype="float32"), backend=backend)


def tokens_of(batch, count, seed):
    """Queries, keys and values of each layer."""
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(batch, count, heads, 64, generator=g) for heads in (4, 2, 2)) for _ in LAYERS]


def forward(cache, passes):
    return [cache.step(layer, *qkv, scaling=0.125) for layer, qkv in enumerate(passes)]


def assert_same(a, b, rows):
    assert [a.seq_lens[r] for r in rows] == [b.seq_lens[r] for r in rows]
    for layer in range(len(LAYERS)):
        for row in rows:
            for x, y in zip(a.dequantize(layer, row), b.dequantize(layer, row), strict=True):
                assert torch.equal(x, y)


def overflowing(backend, side, at=40, row=1, layer=1):
    """Two caches of two sequences of 64 tokens, and one more token each, with which pages close; in one of the caches,
    a waiting number of a row is too large.
    """
    cache, clean = make(backend), make(backend)
    for start, count in ((0, 30), *((n, 1) for n in range(30, 64))):
        passes = tokens_of(2, count, start)
        forward(clean, passes)
        if start <= at < start + count:
            passes[layer][1 + "kv".index(side)][row, at - start, 1, 7] = 1e9
        forward(cache, passes)
    return cache, clean


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_scale_that_overflows_names_the_place_and_loses_nothing(backend, side):
    cache, clean = overflowing(backend, side)
    waiting = cache.dequantize(1, 1)
    more = tokens_of(2, 1, 64)
    place = "keys" if side == "k" else "values", "layer 1", "tokens 32 to 63", "sequence 1"
    way_out = "scale_dtype='float32'", "'bfloat16'", "'int8'", "raw", "Override", "crop", "free", "select"
    for _ in range(2):  # every time
        with raises(DataError, *place, "7.87e+06", "float16", 65504, *way_out):
            forward(cache, more)
        assert not cache.in_pass and cache.seq_lens == [64, 64]
        check_books(cache)
        poison_free_pages(cache)
        assert all(torch.equal(a, b) for a, b in zip(waiting, cache.dequantize(1, 1), strict=True))
        assert_same(cache, clean, [0])
    assert cache.explain()["saturated"] == clean.explain()["saturated"]
    cache.free(1)
    clean.free(1)
    for seed, count in ((64, 1), (65, 90), (66, 1)):
        passes = tokens_of(2, count, seed)
        assert all(torch.equal(a, b) for a, b in zip(forward(cache, passes), forward(clean, passes), strict=True))
    assert_same(cache, clean, [0, 1])


def test_the_ways_out_that_the_message_names_work():
    cache, _ = overflowing("auto", "k")
    cache.crop([64, 40])  # before the bad token
    forward(cache, tokens_of(2, 80, 1))
    assert cache.seq_lens == [144, 120]
    wide = QuantSpec(scale_dtype="float32")
    for changes in (
        {"key": wide, "value": wide},
        {"key": QuantSpec(scale_dtype="bfloat16")},
        {"overrides": (Override(layers=(1,), key=QuantSpec.raw(), value=QuantSpec.raw()),)},
    ):
        cache = make(**changes)
        passes = tokens_of(1, 70, 0)
        passes[1][1][0, 3, 1, 7] = 1e9
        forward(cache, passes)
        assert cache.dequantize(1, 0)[0][3, 1, 7] == pytest.approx(1e9, rel=0.01)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_bad_number_in_a_later_layer_takes_the_pass_back(count):
    cache, clean = make(), make()
    for c in (cache, clean):
        forward(c, tokens_of(2, 64, 0))
    bad = tokens_of(2, count, 1)
    bad[2][2][0, -1, 0, 0] = float("nan")
    with raises(DataError, "values", "layer 2", "nan"):
        forward(cache, bad)
    poison_free_pages(cache)
    assert_same(cache, clean, [0, 1])
    more = tokens_of(2, count, 2)
    assert all(torch.equal(a, b) for a, b in zip(forward(cache, more), forward(clean, more), strict=True))


@pytest.mark.parametrize(
    "changes, lengths",
    [({}, [50, 45]), ({}, [45, 50]), ({"num_sink_tokens": 8}, [7, 5]), ({"residual_length": 0}, [64, 45])],
    ids=["copied", "last", "sinks", "closed"],
)
def test_what_the_last_sharer_of_a_page_writes_is_taken_back_for_the_others(changes, lengths):
    cache, clean = make(**changes), make(**changes)
    for c in (cache, clean):
        forward(c, tokens_of(1, max(lengths), 0))
        c.fork(0)
        c.crop(lengths)
    bad = tokens_of(2, 2, 1)
    bad[2][1][0, -1, 0, 0] = float("nan")
    with raises(DataError, "keys", "layer 2", "nan"):
        forward(cache, bad)
    assert_same(cache, clean, [0, 1])
    check_books(cache)
    more = tokens_of(2, 40, 2)
    assert all(torch.equal(a, b) for a, b in zip(forward(cache, more), forward(clean, more), strict=True))


def test_an_interrupted_pass_can_be_abandoned():
    cache, clean = make(), make()
    for c in (cache, clean):
        forward(c, tokens_of(1, 64, 0))
    cache.abandon()  # nothing to take back
    cache.step(0, *tokens_of(1, 1, 1)[0], scaling=0.125)  # closes pages of layer 0 and uses one of its tail pages again
    assert cache.in_pass
    with raises(CacheStateError, "abandon()"):
        cache.begin(1, 1)
    cache.abandon()
    poison_free_pages(cache)
    assert_same(cache, clean, [0])
    more = tokens_of(1, 200, 2)
    assert all(torch.equal(a, b) for a, b in zip(forward(cache, more), forward(clean, more), strict=True))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_began_inside_inference_mode_goes_on_outside(backend):
    """Pages are no tensors of inference mode, which nothing outside of it may write."""
    cache, clean = make(backend), make(backend)
    with torch.inference_mode():
        for c in (cache, clean):
            forward(c, tokens_of(2, 64, 0))
        # closes pages of layer 0 and uses one of its tail pages again
        cache.step(0, *tokens_of(2, 1, 1)[0], scaling=0.125)
    cache.abandon()
    poison_free_pages(cache)
    assert_same(cache, clean, [0, 1])
    for c in (cache, clean):
        c.crop([50, 64])
        c.select([1, 0])
        c.swap_in(1, c.swap_out(1))
    more = tokens_of(2, 200, 2)
    assert all(torch.equal(a, b) for a, b in zip(forward(cache, more), forward(clean, more), strict=True))
    assert_same(cache, clean, [0, 1])


def test_a_pass_cannot_be_taken_back_past_a_freed_sequence():
    cache = make()
    forward(cache, tokens_of(2, 64, 0))
    cache.step(0, *tokens_of(2, 1, 1)[0], scaling=0.125)
    cache.free(0)
    with raises(CacheStateError, "freed"):
        cache.abandon()
    cache.free(1)
    forward(cache, tokens_of(2, 5, 2))
    assert cache.seq_lens == [5, 5]


def test_layers_of_a_pass_that_lost_all_its_sequences_begin_no_other():
    cache = make()
    forward(cache, tokens_of(1, 64, 0))
    more = tokens_of(1, 5, 1)
    cache.step(0, *more[0], scaling=0.125)
    cache.free(0)
    for layer in (1, 2, 1):
        with raises(CacheStateError, f"layer {layer}", "freed"):
            cache.step(layer, *more[layer], scaling=0.125)
    forward(cache, more)
    assert cache.seq_lens == [5]
    cache.step(0, *more[0], scaling=0.125)
    cache.free(0)
    cache.reset()
    cache.step(1, *more[1], scaling=0.125)  # a pass may begin with any layer


@pytest.fixture
def waits_once(monkeypatch):
    """Numbers are looked at as on a GPU: at the end of a pass. Counts the looks."""
    settle, looks = later.Findings.settle, []
    monkeypatch.setattr(inputs, "AT_ONCE", ())
    monkeypatch.setattr(later.Findings, "settle", lambda self: (looks.append(len(self._asked)), settle(self))[1])
    return looks


@pytest.mark.parametrize("scheme", [{}, {"token_local": True, "residual_length": 0}], ids=["pages", "token_local"])
@pytest.mark.parametrize(
    "bad, parts",
    [
        (torch.nan, ("keys", "layer 1", "NaN", "70 tokens", "sequence 1", "1 of 2 sequences")),
        (-torch.inf, ("keys", "layer 1", "infinity")),
        (1e9, ("keys", "layer 1", "float16", "scale_dtype", "'int8'", "raw")),
    ],
)
def test_what_a_gpu_finds_at_the_end_of_a_pass_takes_the_whole_pass_back(waits_once, scheme, bad, parts):
    cache, clean = make(**scheme), make(**scheme)
    for c in (cache, clean):
        forward(c, tokens_of(2, 75, 0))
    more = tokens_of(2, 70, 1)
    more[1][1][1, 3, 1, 7] = bad
    for _ in range(2):
        looks = len(waits_once)
        for layer in (0, 1):
            cache.step(layer, *more[layer], scaling=0.125)
        assert cache.in_pass and len(waits_once) == looks
        with raises(DataError, *parts):
            cache.step(2, *more[2], scaling=0.125)
        assert not cache.in_pass and len(waits_once) == looks + 1 and waits_once[-1] >= 3 * len(LAYERS)
        poison_free_pages(cache)
        assert_same(cache, clean, [0, 1])
        check_books(cache)
    more = tokens_of(2, 70, 1)
    assert all(torch.equal(a, b) for a, b in zip(forward(cache, more), forward(clean, more), strict=True))
    assert_same(cache, clean, [0, 1])
    assert cache.saturated == clean.saturated


def test_clamped_elements_are_counted_at_the_end_of_a_pass(waits_once):
    spec = QuantSpec(granularity=PerGroup(64), static=True)
    scheme = schemes.get("int8", page_size=32, key=spec, value=spec)
    static = [{"k_scale": torch.full((2, 1), 0.01), "v_scale": torch.full((2, 1), 1.0)}] * len(LAYERS)
    cache = PagedCache(CacheSpec(scheme=scheme, layers=LAYERS, raw_dtype="float32"), static=static)
    tokens = tokens_of(1, 70, 0)
    cache.step(0, *tokens[0], scaling=0.125)
    cache.step(1, *tokens[1], scaling=0.125)
    assert not any(n for layer in cache.saturated for n in layer.values())
    cache.step(2, *tokens[2], scaling=0.125)
    assert [x["k"] for x in cache.saturated] == [
        int((k[:, :64].abs() > 1.275).sum()) for _, k, _ in tokens
    ] and not any(x["v"] for x in cache.saturated)


def test_a_bad_end_of_a_pass_after_a_freed_sequence_is_said_until_the_others_go(waits_once):
    cache = make()
    more = tokens_of(2, 70, 1)
    more[1][2][1, 3, 1, 7] = torch.nan
    cache.step(0, *more[0], scaling=0.125)
    cache.step(1, *more[1], scaling=0.125)
    cache.free(0)
    with raises(DataError, "values", "layer 1", "NaN"):
        cache.step(2, *more[2], scaling=0.125)
    with raises(CacheStateError, "abandon", "reset"):
        forward(cache, more)
    cache.free(1)
    forward(cache, tokens_of(2, 5, 2))
    assert cache.seq_lens == [5, 5]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_memory_that_a_pass_took_is_let_go_with_it(backend):
    """Attention had been told of it."""
    cache = make(backend)
    forward(cache, tokens_of(1, 300, 0))
    cache.begin(1, 4000)
    cache.step(0, *tokens_of(1, 4000, 1)[0], scaling=0.125)
    taken = [weakref.ref(p.slabs[-1].untyped_storage()) for g in cache.groups for p in g.pools.values() if p.slabs]
    before = cache.nbytes
    cache.abandon()
    gc.collect()
    assert cache.nbytes < before and any(x() is None for x in taken)
    forward(cache, tokens_of(1, 1, 2))


def test_a_cache_that_has_attended_can_be_copied():
    """Its plans hold addresses of its own pages."""
    cache, more = make(), tokens_of(1, 1, 1)
    forward(cache, tokens_of(1, 300, 0))
    forward(cache, more)
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    forward(cache, tokens_of(1, 1, 3))
    cache.crop(cache.seq_lens[0] - 1)
    want = forward(cache, more)
    for found in copies:
        assert all(torch.equal(a, b) for a, b in zip(forward(found, more), want, strict=True))


def test_tokens_plan_nothing_anew_however_many_groups_there_are(monkeypatch):
    """Layers of fitted schemes may each be a group of their own."""
    layers = tuple(LayerGeometry(num_kv_heads=1, head_dim=64, sliding_window=64 + i) for i in range(40))
    cache = PagedCache(CacheSpec(scheme=schemes.get("int8", page_size=32), layers=layers, raw_dtype="float32"))
    made = []
    plan = layer_runner.plan
    monkeypatch.setattr(layer_runner, "plan", lambda *args, **options: made.append(options) or plan(*args, **options))
    counts = []
    for tokens in (8, 1, 1, 1):
        x = torch.randn(1, tokens, 1, 64)
        for layer in range(40):
            cache.step(layer, x, x, x, scaling=0.125)
        counts.append(len(made))
    assert counts == [0, 40, 40, 40]
