"""Tier transitions against a model of the tiers: integers only, a million steps of it when asked
(KVBITS_HYPOTHESIS=thorough).
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter

import pytest
import torch
from cache_checks import picture
from messages import mentions, raises
from nightly import at_night

from kvbits.cache.allocator import Allocator
from kvbits.cache.group import GroupState
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, PoolFullError
from kvbits.spec import CacheSpec, LayerGeometry, PerChannel, PerToken, QuantSpec, Scheme, Tier

SIZE = 32
STEPS = 1_000_000 if os.environ.get("KVBITS_HYPOTHESIS") == "thorough" else 30_000


class Ids:
    """A pool without memory."""

    def __init__(self, capacity: int | None) -> None:
        self.fixed_capacity = capacity
        self.allocator = Allocator()
        self.allocator.grow(capacity or 0)

    def shortfall(self, n: int) -> int:
        return 0 if self.fixed_capacity is None else max(0, n - self.allocator.num_free)

    def snapshot(self):
        return self.allocator.clone()

    def restore(self, was):
        self.allocator = was

    def reserve(self, n: int) -> None:
        if self.allocator.num_free < n:
            if self.fixed_capacity is not None:
                raise PoolFullError("full")
            self.allocator.grow(self.allocator.capacity + n - self.allocator.num_free)


class Model:
    """One sequence as runs of tokens: how many sinks, closed pages (visible tokens, tiers that may have it) and raw
    tokens.

    No ids, no shared pages.
    """

    def __init__(self, boundaries, residual, sinks):
        self.boundaries, self.residual, self.sinks = list(boundaries), residual, sinks
        self.sink, self.raw, self.pages = 0, 0, []  # pages: [visible, tiers]
        self.speculated = self.closed_since = 0

    def copy(self):
        new = Model(self.boundaries, self.residual, self.sinks)
        new.sink, new.raw, new.pages = self.sink, self.raw, [p[:] for p in self.pages]
        new.speculated, new.closed_since = self.speculated, self.closed_since
        return new

    @property
    def length(self):
        return self.sink + self.raw + sum(n for n, _ in self.pages)

    def append(self, n, speculating, fixed):
        to_sink = min(n, self.sinks - self.length) if self.length < self.sinks else 0
        self.sink += to_sink
        self.raw += n - to_sink
        self.speculated += n if speculating else 0
        waits = self.residual + SIZE + (min(self.speculated, SIZE) if speculating and not fixed else 0)
        new = 0
        while self.raw > waits:
            self.raw -= SIZE
            self.pages.append([SIZE, len(self.boundaries)])
            new += 1
        if new:
            self.closed_since += new if speculating else 0
            self.age(min(self.closed_since, 1 if fixed else 16))

    def age(self, more=0):
        for i, page in enumerate(self.pages):
            rank = len(self.pages) - 1 - i
            page[1] = min(page[1], sum(rank < b + (more if b else 0) for b in self.boundaries))

    def crop(self, n):
        surplus = self.length - n
        cut = min(surplus, self.raw)
        self.raw -= cut
        surplus -= cut
        while surplus and self.pages:
            cut = min(surplus, self.pages[-1][0])
            self.pages[-1][0] -= cut
            surplus -= cut
            if not self.pages[-1][0]:
                self.pages.pop()
        self.sink -= surplus
        self.settle()

    def settle(self):
        self.speculated = self.closed_since = 0
        self.age()


def group_of(tiers, sinks, residual):
    spec = QuantSpec(format="int4")
    scheme = Scheme(
        name="z", key=spec, value=spec, num_sink_tokens=sinks, residual_length=residual, page_size=SIZE, tiers=tiers
    )
    return CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=1, head_dim=64),)).groups[0]


def compare(state, models):
    g = state.group
    held = {name: Counter() for name in state.pools}
    for s, m in zip(state.sequences, models, strict=True):
        assert s.length == m.length
        assert s.tail_tokens == m.raw
        assert s.closed_lengths == [n for n, _ in m.pages]
        assert [len(s.young) - s.tier_of(j) for j in range(len(s.closed))] == [tiers for _, tiers in m.pages]
        for name, ids in s.pages().items():
            held[name].update(ids)
    for name, pool in state.pools.items():
        a = pool.allocator
        assert a.num_used == len(held[name])
        assert all(a.count(i) == n for i, n in held[name].items())
    if not state.keep_past:
        for i, name in enumerate(g.tier_pools):
            assert all(s.young[i] <= s.boundaries[i] for s in state.sequences)
            assert len(held[name]) <= sum(s.boundaries[i] for s in state.sequences), "no more pages than the tier holds"


@pytest.mark.parametrize("fixed", [True, *at_night(False)])
@pytest.mark.parametrize(
    "tiers",
    [
        (Tier(num_tokens=3 * SIZE),),
        (Tier(num_tokens=0),),
        (Tier(num_tokens=SIZE, key=QuantSpec(format="fp8_e4m3")), Tier(num_tokens=2 * SIZE)),
    ],
)
def test_transitions_follow_the_model(tiers, fixed):
    """Appends of any size, rollbacks across boundaries and demotions, forks, changed tiers, freed rows: every page is
    in the tier that the model says.
    """
    rng = random.Random(len(tiers) + 10 * fixed)
    for _ in range(8):
        sinks, residual = rng.choice([0, 4, 40]), rng.choice([0, 5, SIZE, 70])
        group = group_of(tiers, sinks, residual)
        most = 40 * SIZE
        state = GroupState(
            group, {name: Ids(3 * group.pages_for(most)[name] if fixed else None) for name in group.pools}
        )
        state.resize(1)
        models = [Model(group.boundaries, residual, sinks)]
        seen = Counter()
        for step in range(STEPS // 32):
            seen[walk(rng, state, models, fixed, most)] += 1
            if step % 4 == 0:
                compare(state, models)
        compare(state, models)
        assert seen["append"] > STEPS // 100
        assert all(seen[x] for x in ("append", "crop", "speculate", "fork", "tiers", "free"))


def walk(rng, state, models, fixed, most):
    what = rng.choices(["append", "crop", "speculate", "fork", "tiers", "free"], [60, 5, 20, 3, 4, 1])[0]
    row = rng.randrange(len(models))
    if what == "append":
        advance(rng, state, models, fixed, most, rng.choice([1, 1, 1, 7, SIZE, 3 * SIZE]), speculating=False)
    elif what == "crop":
        lengths = [m.length for m in models]
        lengths[row] = rng.randint(0, lengths[row])
        crop(state, models, lengths)
    elif what == "speculate":
        speculate(rng, state, models, fixed, most)
    elif what == "fork" and len(models) < 3:
        state.select([*range(len(models)), row])
        models.append(models[row].copy())
    elif what == "tiers":
        boundaries = sorted(rng.randint(0, 4) for _ in state.group.tiers)
        if not fixed:
            state.set_tiers(row, boundaries, rng.choice([0, SIZE]))
            models[row].boundaries, models[row].residual = list(boundaries), state.sequences[row].residual_length
            models[row].age()
    elif what == "free":
        state.free(row)
        models[row] = Model(state.group.boundaries, state.group.residual_length, state.group.num_sink_tokens)
        if len(models) > 1:
            keep = [r for r in range(len(models)) if r != row]
            state.select(keep)
            del models[row]
    return what


def advance(rng, state, models, fixed, most, n, *, speculating):
    counts = [rng.randint(0, n) for _ in models]
    if any(m.length + c > most for m, c in zip(models, counts, strict=True)):
        for row in range(len(models)):
            state.free(row)
            models[row] = Model(state.group.boundaries, state.group.residual_length, state.group.num_sink_tokens)
        return False
    undo = state.snapshot() if fixed else None
    try:
        state.advance(counts, n > 1)
    except PoolFullError:
        assert fixed
        state.restore(undo)
        return False
    for m, c in zip(models, counts, strict=True):
        m.append(c, speculating, fixed) if c else None
    return True


def speculate(rng, state, models, fixed, most):
    """Tokens that are taken back: up to a page of them leaves a growing cache as if they had never come."""
    before = [m.copy() for m in models]
    state.speculate()
    n = rng.choice([1, 5, SIZE, 4 * SIZE])
    if not advance(rng, state, models, fixed, most, n, speculating=True):
        crop(state, models, [m.length for m in models])
        return
    if rng.random() < 0.5:
        lengths = [rng.randint(b.length, m.length) for b, m in zip(before, models, strict=True)]
    else:
        lengths = [b.length for b in before]
    for _ in range(2):
        try:
            crop(state, models, lengths)
            break
        except CacheStateError as error:
            assert mentions(str(error), "tier", "speculative")
            assert fixed or n > SIZE
            lengths = [m.length for m in models]
    if not fixed and n <= SIZE and lengths == [b.length for b in before]:
        for b, m in zip(before, models, strict=True):
            if b.length and b.raw <= b.residual + SIZE:  # no page was due before
                assert (m.sink, m.raw, m.pages) == (b.sink, b.raw, b.pages)


def crop(state, models, lengths):
    for row, n in enumerate(lengths):
        state.check_crop(row, n)
    state.keep_past = False
    for row, n in enumerate(lengths):
        if n == 0:
            state.free(row)
            models[row] = Model(state.group.boundaries, state.group.residual_length, state.group.num_sink_tokens)
        else:
            state.crop(row, n)
            models[row].crop(n)
    state.settle()
    for m in models:
        m.settle()


def test_rolling_back_up_to_a_page_changes_nothing():
    """From a settled state, any number of tokens up to a page comes and goes: pages, tiers, raw tokens and ids are
    what they were.
    """
    group = group_of((Tier(num_tokens=2 * SIZE),), 4, 5)
    state = GroupState(group, {name: Ids(None) for name in group.pools})
    state.resize(1)
    for length in range(1, 12 * SIZE, 7):
        state.advance([7], True)
        (s,) = state.sequences
        before = (
            s.length,
            s.sink[:],
            s.closed[:],
            s.closed_lengths[:],
            s.tail[:],
            s.tail_lengths[:],
            s.young[:],
        )
        for n in (1, 3, SIZE):
            state.speculate()
            state.advance([n], True)
            state.check_crop(0, s.length - n)
            state.keep_past = False
            state.crop(0, s.length - n)
            state.settle()
            assert (s.length, s.sink, s.closed, s.closed_lengths, s.tail, s.tail_lengths, s.young) == before, (
                length,
                n,
            )


def test_sequences_that_share_a_page_share_what_becomes_of_it():
    group = group_of((Tier(num_tokens=2 * SIZE),), 0, 0)
    state = GroupState(group, {name: Ids(None) for name in group.pools})
    state.resize(1)
    state.advance([3 * SIZE], True)
    state.select([0, 0])
    step = state.advance([SIZE, SIZE], True)
    assert len(step.recodes) == 1
    first, second = state.sequences
    assert first.closed[0] == second.closed[0] and state.pools["closed"].allocator.count(first.closed[0]) == 2


@pytest.mark.parametrize("fixed", [False, True])
def test_a_page_that_leaves_its_tier_is_unpacked_and_closed_in_the_next_one_s_format(fixed):
    """In a pass and by `set_tiers`; its memory is allocatable at once."""
    key, value = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False), QuantSpec(format="int4")
    eight = QuantSpec(format="int8", granularity=PerToken())
    scheme = Scheme(
        name="z", key=key, value=value, page_size=SIZE, tiers=(Tier(num_tokens=4 * SIZE, key=eight, value=eight),)
    )
    spec = CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=2, head_dim=64),), raw_dtype="float32")
    capacity = {"batch_size": 1, "max_tokens": 20 * SIZE} if fixed else {}
    cache, x = PagedCache(spec, **capacity), torch.randn(1, 8 * SIZE, 2, 64)
    cache.append(0, x[:, : 5 * SIZE], x[:, : 5 * SIZE])
    warm = cache.dequantize(0, 0)
    cache.append(0, x[:, 5 * SIZE :], x[:, 5 * SIZE :])
    again = PagedCache(dataclasses.replace(spec, scheme=dataclasses.replace(scheme, tiers=())))
    again.append(0, *(x[None] for x in warm))
    for now, cold in zip(cache.dequantize(0, 0), again.dequantize(0, 0), strict=True):
        assert torch.equal(now[: 3 * SIZE], cold[: 3 * SIZE])
    pools = cache.groups[0].pools
    free = pools["tier0"].allocator.num_free
    cache.set_tiers(0, [SIZE])
    assert pools["tier0"].allocator.num_free == free + 3 and pools["closed"].allocator.num_used == 6


def test_a_scale_that_overflows_when_a_page_is_closed_again_names_it_and_leaves_all_as_it_was():
    """float16 holds the step of 8 bits, but not that of 4."""
    eight = QuantSpec(format="int8", granularity=PerToken())
    scheme = Scheme(
        name="z",
        key=dataclasses.replace(eight, format="int4"),
        value=eight,
        page_size=SIZE,
        tiers=(Tier(num_tokens=SIZE, key=eight, value=dataclasses.replace(eight, scale_dtype="float32")),),
    )
    cache = PagedCache(
        CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=1, head_dim=64),) * 2, raw_dtype="float32")
    )
    small, large = torch.randn(2, 1, SIZE + 1, 1, 64)
    large = large * 1e6
    cache.append(0, small, small)
    cache.append(1, large, small)
    before = picture(cache)
    with raises(DataError, "keys", "layer 1", f"tokens 0 to {SIZE - 1}", "sequence 0"):
        for layer in (0, 1):
            cache.append(layer, small, small)
    assert picture(cache) == before
    with raises(DataError, "keys", "layer 1"):
        cache.set_tiers(0, [0])
    assert picture(cache) == before
