"""A cache with a budget: never a byte more, low planes given back oldest first, what is left exactly as it was stored."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from cache_checks import check_books, picture

from kvbits import KVCache, planner, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError, FileFormatError, PoolFullError, SpecError
from kvbits.spec import CacheSpec, LayerGeometry, PerGroup, QuantSpec, Scheme, Tier

LAYERS = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 2
ELASTIC = CacheSpec(scheme=schemes.elastic(LAYERS), layers=LAYERS, raw_dtype="float16")


def tokens(n: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """[2, rows, n, 2, 64]: keys and values, the same for every layer and a function of the position alone."""
    return torch.randn(2, rows, n, 2, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).half()


def append(cache: PagedCache, x: torch.Tensor, valid: torch.Tensor | None = None) -> None:
    for layer in range(len(cache.spec.layers)):
        cache.append(layer, x[0], x[1], valid=valid)


def fill(cache: PagedCache, x: torch.Tensor, chunk: int) -> int:
    """Append until nothing fits; returns the tokens that did."""
    for start in range(0, x.shape[2], chunk):
        try:
            append(cache, x[:, :, start : start + chunk])
        except PoolFullError:
            return start
        assert cache.nbytes <= cache.budget.nbytes
    return x.shape[2]


def planes(cache: PagedCache, row: int = 0) -> list[int]:
    """Low planes of each closed page, oldest first."""
    s = cache.groups[0].sequences[row]
    return [sum(low[i] is not None for low in s.low) for i in range(len(s.closed))]


def reference(x: torch.Tensor, held: list[list[int]], dropped: int = 0) -> PagedCache:
    """A cache without a budget that holds the same tokens, with as many planes."""
    cache = PagedCache(ELASTIC)
    append(cache, x)
    for row, kept in enumerate(held):
        cache.groups[0].set_tiers(row, [sum(n > 0 for n in kept)], ELASTIC.scheme.residual_length)
    return cache


@pytest.mark.parametrize("chunk", [64, 200, 1000])
def test_it_starts_wide_gives_back_the_oldest_first_and_ends_narrow(chunk):
    x = tokens(12_000)
    cache = PagedCache(ELASTIC, budget=900_000)
    append(cache, x[:, :, :1000])
    assert set(planes(cache)) == {1} and cache.budget.given_back == [0]
    assert "every page has all its bits" in cache.explain()["notes"][-1]
    seen, end = {1}, 1000
    while end + chunk <= x.shape[2]:
        try:
            append(cache, x[:, :, end : end + chunk])
        except PoolFullError as error:
            assert (
                f"a cache with a budget of 900.00 kB, now of {end} tokens, was given 1 x {chunk} tokens more: even with"
                " every page in its fewest" in str(error)
            )
            break
        end += chunk
        now = planes(cache)
        assert now == sorted(now) and cache.nbytes <= 900_000 and cache.seq_lens == [end]
        seen |= set(now)
    assert seen == {0, 1} and "pages gave up bits " in cache.explain()["notes"][-1]
    if chunk == 64:
        assert sum(planes(cache)) <= 3  # what is refused takes none
    for layer in range(2):
        for mine, theirs in zip(
            cache.dequantize(layer, 0), reference(x[:, :, :end], [planes(cache)]).dequantize(layer, 0), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_it_holds_nearly_twice_what_eight_bits_hold():
    layers = (LayerGeometry(num_kv_heads=2, head_dim=128),)
    spec = CacheSpec(scheme=schemes.elastic(layers), layers=layers, raw_dtype="float16")
    budget = 8_000_000
    eight = planner.max_context(
        CacheSpec(scheme=schemes.get("int8", head_dim=128), layers=layers, raw_dtype="float16"), budget, 1
    )
    cache, x = PagedCache(spec, budget=budget), torch.randn(2, 1, 1024, 2, 128).half()
    held = 0
    while held < 3 * eight:
        try:
            append(cache, x)
        except PoolFullError:
            break
        held += 1024
    assert held >= 1.75 * eight


def test_short_sequences_keep_their_planes():
    x = tokens(6000, rows=2)
    valid = torch.ones(2, 500, dtype=torch.bool)
    cache = PagedCache(ELASTIC, budget=2_600_000)
    append(cache, x[:, :, :500], valid)
    for start in range(500, 6000, 500):
        append(cache, x[:, :, start : start + 500], valid & torch.tensor([[True], [False]]))
    long, short = planes(cache, 0), planes(cache, 1)
    assert min(long) < 1 and set(short) == {1}
    want = reference(torch.stack([x[0], x[1]])[:, :1], [long]).dequantize(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(cache.dequantize(0, 0), want, strict=True))


def test_forks_copies_and_freed_sequences():
    x = tokens(9000)
    cache = PagedCache(ELASTIC, budget=1_300_000)
    append(cache, x[:, :, :1500])
    other, before = copy.deepcopy(cache), planes(cache)
    assert (
        other.budget is not cache.budget
        and len(other.budget.pools) == 4
        and {id(p) for p in other.budget.pools} == {id(p) for g in other.held_groups for p in g.pools.values()}
    )
    cache.fork(0)
    more = tokens(2000, rows=2, seed=1)
    assert fill(cache, more, 100) >= 300
    assert min(planes(cache)) < 1
    shared = reference(x[:, :, :1500], [planes(cache)[: len(planes(other))]])
    length = 64 * len(planes(other)) + 4
    for row in (0, 1):
        kept = planes(cache, row)[: len(planes(other))]
        assert kept == sorted(kept)
        if kept == planes(cache)[: len(kept)]:
            assert torch.equal(cache.dequantize(0, row)[0][:length], shared.dequantize(0, 0)[0][:length])
    assert planes(other) == before
    cache.reset()
    append(cache, x[:, :, :800])
    assert set(planes(cache)) == {1} and cache.nbytes <= 1_300_000


def test_a_pass_that_fails_leaves_the_tokens_as_they_were():
    x = tokens(2300)
    cache = PagedCache(ELASTIC, budget=900_000)
    append(cache, x[:, :, :2200])
    cache.append(0, x[0, :, 2200:], x[1, :, 2200:])
    cache.abandon()
    assert cache.seq_lens == [2200]
    want = reference(x[:, :, :2200], [planes(cache)])
    assert all(torch.equal(a, b) for a, b in zip(cache.dequantize(1, 0), want.dequantize(1, 0), strict=True))
    with pytest.raises(PoolFullError, match=r"now of 2200 tokens, was given 1 x 50000 tokens more"):
        cache.begin(1, 50_000)
    assert cache.seq_lens == [2200]


def everything(cache: PagedCache) -> object:
    """Lists, counts, bytes in use, boundaries, what was given back, and the bytes that are taken."""
    return (
        picture(cache),
        cache.budget.given_back[:],
        cache.nbytes,
        [[s.boundaries[:] for s in g.sequences] for g in cache.groups],
    )


@pytest.mark.parametrize("rows, valid", [(1, None), (3, [5, 5, 1_000_000])], ids=["one", "one row of three"])
def test_a_pass_that_cannot_fit_is_refused_before_any_plane_goes_back(rows, valid):
    x = tokens(2000, rows)
    cache = PagedCache(ELASTIC, budget=2_000_000 * rows)
    append(cache, x)
    before = everything(cache)
    mask = None if valid is None else torch.arange(1_000_000) < torch.tensor(valid)[:, None]
    with pytest.raises(PoolFullError, match="even with every page in its fewest bits this does not fit"):
        cache.begin(rows, 1_000_000, mask)
    assert everything(cache) == before
    for layer in range(2):
        same = reference(x, [planes(cache, r) for r in range(rows)])
        assert all(
            torch.equal(a, b) for a, b in zip(cache.dequantize(layer, 0), same.dequantize(layer, 0), strict=True)
        )


def test_every_plane_that_a_failed_pass_gave_back_comes_back():
    x = tokens(2300)
    cache = PagedCache(ELASTIC, budget=900_000)
    append(cache, x[:, :, :1500])
    before = everything(cache)
    bad = x[:, :, 1500:].clone()
    bad[1, 0, -1, 1, 7] = torch.nan
    for _ in range(2):
        cache.append(0, *x[:, :, 1500:])
        assert any(cache.budget.given_back) and cache.nbytes <= 900_000
        cache.abandon()
        assert everything(cache) == before
        cache.append(0, *x[:, :, 1500:])
        with pytest.raises(DataError, match="nan"):
            cache.append(1, *bad)
        assert everything(cache) == before
    append(cache, x[:, :, 1500:])
    assert torch.equal(cache.dequantize(1, 0)[0], reference(x, [planes(cache)]).dequantize(1, 0)[0])


def test_what_only_slabs_keep_from_fitting_is_taken_back(monkeypatch):
    """The sum of bytes says yes, pages in slabs say no: found out when planes are gone already."""
    cache = PagedCache(ELASTIC, budget=700_000)
    append(cache, tokens(1900))
    monkeypatch.setattr(cache.budget, "require_room", lambda least: None)
    before = everything(cache)
    with pytest.raises(PoolFullError, match="even with every page in its fewest bits"):
        cache.begin(1, 5000)
    assert everything(cache) == before


def test_an_empty_cache_keeps_no_rows_of_a_pass_that_was_refused():
    cache = PagedCache(ELASTIC, budget=200_000)
    with pytest.raises(PoolFullError):
        cache.begin(3, 3000)
    assert (cache.batch_size, cache.nbytes) == (0, 0)
    append(cache, tokens(100))
    assert cache.seq_lens == [100]


def test_a_sequence_that_comes_back_gives_planes_back_as_computing_it_does():
    x = tokens(1500, rows=2)
    cache = PagedCache(ELASTIC, budget=1_300_000)
    append(cache, x, torch.tensor([[True], [False]]).expand(2, 1500))
    first = cache.swap_out(0)
    append(cache, x, torch.tensor([[False], [True]]).expand(2, 1500))
    want = [planes(cache, 1), cache.budget.given_back[:]]
    cache.swap_in(0, first)
    assert cache.seq_lens == [1500, 1500] and cache.nbytes <= 1_300_000 and cache.budget.given_back > want[1]
    held = [planes(cache, row) for row in (0, 1)]
    assert all(run == sorted(run) and min(run) < 2 for run in held)
    for row in (0, 1):
        same = reference(x[:, row : row + 1], [held[row]])
        assert all(
            torch.equal(a, b)
            for layer in (0, 1)
            for a, b in zip(cache.dequantize(layer, row), same.dequantize(layer, 0), strict=True)
        )
    check_books(cache)
    large = PagedCache(ELASTIC)
    append(large, tokens(6000))
    cache.free(1)
    before = everything(cache)
    with pytest.raises(PoolFullError, match="even with every page in its fewest bits"):
        cache.swap_in(1, large.swap_out(0))
    assert everything(cache) == before


def test_a_model_decodes_within_it(tmp_path):
    model = tiny.model(dtype=torch.float16).float()
    cache, plain = KVCache.for_model(model, budget="1.6MB"), KVCache.for_model(model, schemes.elastic(LAYERS))
    ids = torch.randint(3, 60, (1, 2000))
    with torch.no_grad():
        for start in range(0, 1000, 250):
            a, b = (model(ids[:, start : start + 250], past_key_values=c).logits for c in (cache, plain))
            assert torch.equal(a, b)  # nothing was given back yet
        for start in range(1000, 2000, 250):
            assert model(ids[:, start : start + 250], past_key_values=cache).logits.isfinite().all()
        cache.save(tmp_path / "cache.safetensors")
        same = KVCache.load(tmp_path / "cache.safetensors", model)  # in slabs of its own, under other ids
        assert torch.equal(*(model(ids[:, :1], past_key_values=c).logits for c in (copy.deepcopy(cache), same)))
        longer = torch.cat([ids, ids], 1)
        assert model.generate(longer, past_key_values=cache, max_new_tokens=4, do_sample=False).shape == (1, 4004)
    assert cache.nbytes <= 1_600_000 and "budget: " in str(cache.explain()) and cache.pages.budget.given_back[0] > 0


def test_what_cannot_be_is_refused():
    model = tiny.model()
    for options, why in (
        ({"budget": "2"}, "budget '2' is not understood; write it with its unit"),
        ({"budget": 0}, "budget=0 must be a whole number from 1"),
        (
            {"budget": "1MB", "max_tokens": 100},
            "a budget is for a cache that grows, max_tokens and batch_size fix a capacity; give one",
        ),
        ({"budget": "1MB", "scheme": "int8"}, "scheme 'int8' has no low planes that it could give back"),
    ):
        with pytest.raises(SpecError, match=why):
            KVCache.for_model(model, **options)
    int4 = QuantSpec(format="int4", granularity=PerGroup(32))
    assert (
        KVCache.for_model(
            model, Scheme(name="x", key=int4, value=int4, tiers=(Tier(num_tokens=2**20),)), budget="1MB"
        ).nbytes
        == 0
    )


def test_it_comes_back_with_a_saved_cache(tmp_path):
    x, file = tokens(12_000), tmp_path / "cache.kvbits"
    cache = PagedCache(ELASTIC, budget=900_000)
    held = fill(cache, x[:, :, :4000], 200)
    assert any(cache.budget.given_back)
    cache.save(file)
    loaded, grown = PagedCache.load(file), PagedCache.load(file, grow=True)
    assert (
        loaded.budget.nbytes == 900_000 and loaded.budget.given_back == cache.budget.given_back and grown.budget is None
    )
    assert loaded.nbytes <= 900_000 and planes(loaded) == planes(cache)
    assert {id(p) for p in loaded.budget.pools} == {id(p) for g in loaded.held_groups for p in g.pools.values()}
    ends = [fill(c, x[:, :, held:], 100) for c in (cache, loaded)]
    assert abs(ends[0] - ends[1]) <= 200 and held + ends[1] < 12_000  # slabs were cut otherwise
    append(grown, x[:, :, held:])


def test_a_file_with_a_capacity_beside_its_budget_is_refused(tmp_path):
    cache = PagedCache(ELASTIC, budget=700_000)
    append(cache, tokens(1900))
    cache.groups[0].pools["tail"].fixed_capacity = 3100
    cache.save(tmp_path / "cache.kvbits")
    with pytest.raises(FileFormatError, match="a fixed capacity beside a budget"):
        PagedCache.load(tmp_path / "cache.kvbits")


def test_a_file_that_passes_its_budget_is_refused(tmp_path, monkeypatch):
    cache = PagedCache(ELASTIC, budget=2_000_000)
    append(cache, tokens(1000))
    monkeypatch.setattr(cache.budget, "nbytes", 1000)
    cache.save(tmp_path / "cache.kvbits")
    with pytest.raises(FileFormatError, match="past its budget of 1000"):
        PagedCache.load(tmp_path / "cache.kvbits")
