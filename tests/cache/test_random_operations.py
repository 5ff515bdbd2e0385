"""Random sequences of cache operations, each compared with a dense cache of dequantized values."""

import copy
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from cache_checks import Pair, check_books, check_values, picture, poison_free_pages
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from messages import mentions
from ops.cpu_cases import statics_of
from random_cases import examples

from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, PoolFullError
from kvbits.spec import (
    SCALE_8BIT,
    CacheSpec,
    Copies,
    LayerGeometry,
    Override,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
    Rotary,
    Scheme,
    Tier,
)

RAW = QuantSpec.raw()
KEYS_AND_VALUES = [
    (QuantSpec(granularity=PerGroup(8)), QuantSpec(granularity=PerGroup(16))),
    (
        QuantSpec(format="int4", granularity=PerGroup(8), symmetric=False),
        QuantSpec(format="int3", granularity=PerToken(), symmetric=False),
    ),
    (
        QuantSpec(format="int2", granularity=PerChannel(), symmetric=False),
        QuantSpec(format="int2", granularity=PerGroup(8), symmetric=False),
    ),
    (
        QuantSpec(format="int4", granularity=PerGroup(8), center="channel"),
        QuantSpec(format="int4", granularity=PerToken()),
    ),
    (
        QuantSpec(format="fp8_e5m2", granularity=PerToken()),
        QuantSpec(format="fp8_e4m3", granularity=PerChannel(), scale_dtype="float32"),
    ),
    (
        QuantSpec(format="int8", granularity=PerTensor(), static=True),
        QuantSpec(format="int4", granularity=PerGroup(8), static=True, symmetric=False),
    ),
    (
        QuantSpec(
            format="trellis",
            granularity=PerToken(),
            scale_dtype=SCALE_8BIT,
            center="calibrated",
            basis="calibrated",
            bands=(3,),
        ),
        QuantSpec(format="trellis", granularity=PerToken(), scale_dtype=SCALE_8BIT, basis="hadamard", bands=(2,)),
    ),
    (RAW, QuantSpec(format="int4", granularity=PerGroup(8))),
    (RAW, RAW),
]
EIGHT = QuantSpec(format="int8", granularity=PerGroup(16), scale_dtype="float32")
TIERS = [
    (Tier(num_tokens=64, key=EIGHT, value=EIGHT),),
    (Tier(num_tokens=32, key=RAW, value=EIGHT), Tier(num_tokens=64, key=EIGHT, value=EIGHT)),
    (Tier(num_tokens=96, key=QuantSpec(format="fp8_e4m3", granularity=PerToken()), value=EIGHT),),
]
COPIES = [
    (Copies(num_tokens=64, key=EIGHT, value=EIGHT),),
    (
        Copies(num_tokens=32, key=RAW, value=EIGHT),
        Copies(num_tokens=64, key=QuantSpec(format="fp8_e4m3", granularity=PerToken()), value=EIGHT),
    ),
    (Copies(num_tokens=96, key=EIGHT, value=EIGHT),),
]
MAX_TOKENS = 320
MAX_ROWS = 4


def books(cache):
    """All but the bytes, which `check_values` looks at: slots that nobody shows may hold anything."""
    pools = [
        {
            name: {i: n for i in range(p.allocator.capacity) if (n := p.allocator.count(i))}
            for name, p in g.pools.items()
        }
        for g in cache.groups
    ]
    return (
        [[s.clone() for s in g.sequences] for g in cache.groups],
        [g.keep_past for g in cache.groups],
        pools,
        copy.deepcopy(cache.saturated),
    )


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        pair=st.sampled_from(KEYS_AND_VALUES),
        sinks=st.sampled_from([0, 0, 4, 40]),
        residual=st.sampled_from([0, 0, 1, 31, 40, 64]),
        window=st.sampled_from([1, 7, 32, 33, 50, 100]),
        tiers=st.sampled_from([(), *TIERS]),
        copies=st.sampled_from([(), *COPIES]),
        keep_raw=st.booleans(),
        token_local=st.booleans(),
        fixed=st.booleans(),
        dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]),
        softcap=st.sampled_from([None, 5.0]),
        seed=st.integers(0, 2**16),
    )
    def build(self, pair, sinks, residual, window, tiers, copies, keep_raw, token_local, fixed, dtype, softcap, seed):
        torch.manual_seed(seed)
        overrides = (Override(layers=(-1,), key=RAW, value=RAW),) if keep_raw else ()
        token_local = token_local and all(
            s.token_local and not s.center for s in pair
        )  # means, and frames of pages that fill, are not the dense model's to know
        if token_local:
            residual, tiers, copies = 0, (), ()
        if tiers or pair == (RAW, RAW):
            copies = ()
        if copies and pair[0].is_trellis:  # of the same basis
            copies = (Copies(num_tokens=64, key=replace(pair[0], bands=(6,)), value=replace(pair[1], bands=(4,))),)
        scheme = Scheme(
            name="random",
            key=pair[0],
            value=pair[1],
            num_sink_tokens=sinks,
            residual_length=residual,
            page_size=32,
            tiers=tiers,
            copies=copies,
            overrides=overrides,
            token_local=token_local,
        )
        rotary = Rotary(inv_freq=(1.0, 0.3, 0.1, 0.01, 0.7, 0.2, 0.05, 0.003)) if scheme.needs_rotary else None
        full = LayerGeometry(num_kv_heads=2, head_dim=16, rotary=rotary)
        sliding = LayerGeometry(num_kv_heads=1, head_dim=16, sliding_window=window, rotary=rotary)
        spec = CacheSpec(scheme=scheme, layers=(full, sliding, full, sliding), raw_dtype=dtype)
        capacity = {"batch_size": 2, "max_tokens": MAX_TOKENS} if fixed else {}
        static = statics_of(spec)
        self.pair = Pair(PagedCache(spec, static=static, backend="reference", **capacity), softcap=softcap)
        self.fixed = fixed

    @property
    def cache(self):
        return self.pair.cache

    @property
    def model(self):
        return self.pair.model

    def rows(self, data):
        return data.draw(st.integers(0, self.cache.batch_size - 1), label="row")

    def forward(self, tokens, valid=None):
        batch = self.cache.batch_size
        if max(self.cache.seq_lens, default=0) + tokens > 2 * MAX_TOKENS:
            return
        before = picture(self.cache)
        lens = self.cache.seq_lens
        try:
            self.pair.append(batch, tokens, valid)
        except PoolFullError as error:
            assert self.fixed
            assert mentions(str(error), "crop", "reset", "free", "max_tokens", "batch_size")
            assert picture(self.cache) == before
            self.after_full(tokens, valid, lens)

    def after_full(self, tokens, valid, lens):
        """Running out is only right past the capacity, or where crops and speculation left pages partly used."""
        if self.cache.batch_size <= 2 and not self.fragmented:
            counts = [tokens] * len(lens) if valid is None else valid.sum(1).tolist()
            assert max(n + c for n, c in zip(lens, counts, strict=True)) > MAX_TOKENS

    fragmented = False

    @precondition(lambda self: not self.cache.batch_size)
    @rule(
        batch=st.integers(1, 2),
        tokens=st.sampled_from([1, 2, 31, 64, 97, 150, 200]) | st.integers(1, 200),
        data=st.data(),
    )
    def first_prompt(self, batch, tokens, data):
        valid = torch.ones(batch, tokens, dtype=torch.bool)
        for row in range(1, batch):
            valid[row, : data.draw(st.integers(0, tokens))] = False
        self.pair.append(batch, tokens, valid)

    @precondition(lambda self: self.cache.batch_size)
    @rule(tokens=st.sampled_from([2, 31, 32, 33, 64, 65]) | st.integers(2, 200))
    def chunk(self, tokens):
        self.forward(tokens)

    @precondition(lambda self: self.cache.batch_size)
    @rule(tokens=st.integers(1, 100), data=st.data())
    def ragged_chunk(self, tokens, data):
        valid = torch.zeros(self.cache.batch_size, tokens, dtype=torch.bool)
        for row in range(self.cache.batch_size):
            if data.draw(st.booleans(), label="left padding"):
                valid[row, data.draw(st.integers(0, tokens)) :] = True
            else:  # holes anywhere
                valid[row] = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
        self.forward(tokens, valid)

    @precondition(lambda self: self.cache.batch_size)
    @rule(steps=st.integers(1, 40))
    def decode(self, steps):
        for _ in range(steps):
            self.forward(1)

    @precondition(lambda self: self.cache.batch_size)
    @rule(data=st.data(), deep=st.booleans())
    def crop(self, data, deep):
        lengths = [data.draw(st.integers(0 if deep else max(0, n - 20), n)) for n in self.cache.seq_lens]
        before = picture(self.cache)
        try:
            self.cache.crop(lengths)
        except CacheStateError as error:
            assert "sliding window" in str(error)
            assert "keep_past()" in str(error)
            assert not self.model.speculating
            assert picture(self.cache) == before
            # refused only when the window really lost something that the shorter sequence sees
            assert any(
                n > 0 and s.released > g.group.first_visible(n)
                for g in self.cache.groups
                for s, n in zip(g.sequences, lengths, strict=True)
            )
            return
        self.fragmented = True
        self.model.crop(lengths)

    @precondition(lambda self: self.cache.batch_size)
    @rule(kept=st.integers(1, 12), dropped=st.integers(0, 40))
    def speculate(self, kept, dropped):
        """Assisted decoding: keep the past, append, take some of it back."""
        self.cache.keep_past()
        self.model.keep_past()
        self.fragmented = True
        lens = self.cache.seq_lens
        self.forward(kept + dropped)
        wanted = [n + kept for n in lens] if self.cache.seq_lens != lens else lens
        try:
            self.cache.crop(wanted)
        except CacheStateError as error:
            assert mentions(str(error), "tier", "speculative")
            assert self.fixed
            wanted = self.cache.seq_lens
            self.cache.crop(wanted)
        self.model.crop(wanted)

    @precondition(lambda self: self.cache.batch_size and self.cache.spec.scheme.tiers)
    @rule(
        data=st.data(), pages=st.lists(st.integers(0, 4), min_size=2, max_size=2), residual=st.sampled_from([0, 5, 64])
    )
    def other_tiers(self, data, pages, residual):
        row = self.rows(data)
        tiers = [32 * n for n in pages[: len(self.cache.spec.scheme.tiers)]]
        before = picture(self.cache)
        try:
            self.cache.set_tiers(row, tiers, residual_length=residual)
        except PoolFullError:  # pages that leave a tier need room in the next one
            assert self.cache.max_tokens is not None and picture(self.cache) == before
            return
        self.model.set_tiers(row, tiers, residual)
        self.fragmented = True

    @precondition(lambda self: 0 < self.cache.batch_size < MAX_ROWS)
    @rule(data=st.data())
    def fork(self, data):
        row = self.rows(data)
        assert self.cache.fork(row) == len(self.model.rows)
        self.model.rows.append(self.model.clone_row(row))

    @precondition(lambda self: self.cache.batch_size)
    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, self.cache.batch_size - 1), min_size=1, max_size=MAX_ROWS))
        self.cache.select(rows)
        self.model.select(rows)

    @precondition(lambda self: 0 < self.cache.batch_size <= MAX_ROWS // 2)
    @rule()
    def repeat(self):
        self.cache.repeat(2)
        self.model.select([row for row in range(len(self.model.rows)) for _ in range(2)])

    @precondition(lambda self: self.cache.batch_size)
    @rule(data=st.data())
    def free(self, data):
        row = self.rows(data)
        self.cache.free(row)
        self.model.rows[row] = self.model.new_row()

    @rule()
    def reset(self):
        self.cache.reset()
        self.model.rows = []
        assert self.cache.bytes_by_kind()["free"] == self.cache.nbytes
        self.fragmented = False

    @precondition(lambda self: self.cache.batch_size)
    @rule()
    def deepcopy(self):
        """The copy goes on; writing to it must not reach the original."""
        original, seen = self.cache, picture(self.cache)
        self.pair.cache = copy.deepcopy(original)
        assert picture(self.cache) == seen
        self.forward(5)
        assert picture(original) == seen
        check_books(original)

    @precondition(lambda self: self.cache.batch_size)
    @rule(data=st.data())
    def swap(self, data):
        """One or two sequences go to the host, the others decode on, and the first come back, perhaps into each other's
        rows.
        """
        rows = data.draw(st.lists(st.integers(0, self.cache.batch_size - 1), min_size=1, max_size=2, unique=True))
        out = [(self.cache.swap_out(row), self.model.rows[row]) for row in rows]
        for row in rows:
            self.model.rows[row] = self.model.new_row()
        poison_free_pages(self.cache)
        for row, (swapped, dense) in zip(reversed(rows), out, strict=True):
            before = picture(self.cache)
            try:
                self.cache.swap_in(row, swapped)
            except PoolFullError:  # shared pages come back as copies
                assert self.fixed
                assert picture(self.cache) == before
                continue
            self.model.rows[row] = dense

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "cache"
            self.cache.save(path)
            loaded = PagedCache.load(path, backend="reference", spec=self.cache.spec)
        self.pair.cache = loaded

    @precondition(lambda self: self.fixed and self.cache.batch_size)
    @rule()
    def exhaust(self):
        """Far too much for one row in the middle of the batch."""
        valid = torch.ones(self.cache.batch_size, 4 * MAX_TOKENS, dtype=torch.bool)
        valid[0, 3:] = False
        if self.cache.batch_size > 1:
            before = picture(self.cache)
            with pytest.raises(PoolFullError):
                self.cache.begin(self.cache.batch_size, 4 * MAX_TOKENS, valid)
            assert picture(self.cache) == before

    @precondition(lambda self: self.cache.batch_size)
    @rule(
        tokens=st.sampled_from([1, 1, 2, 33, 64]) | st.integers(1, 200),
        layer=st.integers(0, 3),
        calls=st.integers(1, 60),
        how=st.sampled_from(["nan", "interrupted", "broken"]),
        keep_past=st.booleans(),
    )
    def a_pass_that_fails(self, tokens, layer, calls, how, keep_past):
        """In the middle: everything is as it was before it, and what follows goes on as if it had never been tried."""
        cache = self.cache
        if keep_past:
            cache.keep_past()
            self.model.keep_past()
        before = books(cache)
        real, count = cache._stores.store, itertools.count(1)

        def breaking(place, pool):
            if how == "broken" and next(count) == calls:
                raise KeyboardInterrupt
            return real(place, pool)

        cache._stores.store = breaking
        try:
            for i in range(layer + 1):
                g = cache.spec.layers[i]
                q, k, v = (
                    self.pair.random(cache.batch_size, tokens, n, g.head_dim)
                    for n in (2 * g.num_kv_heads, g.num_kv_heads, g.num_kv_heads)
                )
                if i == layer and how == "nan":
                    v[-1, -1, 0, 3] = float("nan")
                elif i == layer:
                    break
                cache.step(i, q, k, v, scaling=0.1)
            assert how != "nan"
            cache.abandon()
        except (PoolFullError, DataError, KeyboardInterrupt) as error:
            assert how == {DataError: "nan", KeyboardInterrupt: "broken"}.get(type(error), how)
        finally:
            del cache._stores.store
        assert not cache.in_pass
        assert books(cache) == before
        if keep_past:
            cache.crop(cache.seq_lens)
            self.model.crop(self.model.seq_lens)

    @invariant()
    def values_and_books_agree(self):
        if not hasattr(self, "pair"):
            return
        check_books(self.cache)
        poison_free_pages(self.cache)
        check_values(self.cache, self.model)


CacheMachine.TestCase.settings = settings(examples(8, thorough=300), stateful_step_count=25)


class TestRandomOperations(CacheMachine.TestCase):
    """Property: whatever the operations, the cache holds and attends to what the dense model does, and its books
    balance.
    """
