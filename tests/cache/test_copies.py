"""Newest pages that are read from finer copies (`Scheme.copies`), through the reference and the CPU kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cache_checks import Pair, check_books
from nightly import at_night
from ops.cpu_cases import needs_library, statics_of

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.quant.basis import for_widths
from kvbits.spec import CacheSpec, Copies, LayerGeometry, Override, QuantSpec, Rotary

SIZE, D = 32, 64
KLT4, KLT3 = schemes.get("klt4"), schemes.get("klt3")
ONE = (Copies(num_tokens=3 * SIZE, key=KLT4.key, value=KLT4.value),)
TWO = (*(dataclasses.replace(c, num_tokens=SIZE) for c in ONE), Copies(num_tokens=64, key=KLT3.key, value=KLT3.value))
GEOMETRY = LayerGeometry(
    num_kv_heads=2, head_dim=D, rotary=Rotary(inv_freq=tuple(1e4 ** (-i / (D // 2)) for i in range(D // 2)))
)


def spec_of(copies, window=None, **changes):
    scheme = schemes.get("klt2", page_size=SIZE, residual_length=20, copies=copies, **changes)
    layers = (GEOMETRY, dataclasses.replace(GEOMETRY, sliding_window=window)) if window else (GEOMETRY,)
    return CacheSpec(scheme=scheme, layers=layers)


def cache_of(spec, **options):
    return PagedCache(spec, static=statics_of(spec), **options)


def read_from(cache, row, group=0):
    """Tokens that attention reads of a sequence from each pool."""
    found = {}
    for pool, table in cache.groups[group].tables().items():
        if n := int(table.tokens[row]):
            found[pool] = n
    return found


@needs_library
@pytest.mark.parametrize(
    "copies, backend",
    [*at_night((ONE, "reference")), (TWO, "reference"), (ONE, "auto"), (TWO, "auto")],
    ids=["one kind, reference", "two kinds, reference", "one kind", "two kinds"],
)
def test_attention_reads_each_token_from_the_copy_that_the_scheme_says(copies, backend):
    """Against float64 attention over what the scheme says: appends of one and of many, ragged rows, forks, crops."""
    torch.manual_seed(0)
    # the CPU's kernels multiply keys of few bits by queries of 8; reading a page for its copy is off by more
    pair = Pair(cache_of(spec_of(copies, window=100), backend=backend), unit=0.12 if backend == "auto" else None)
    valid = torch.ones(2, 170, dtype=torch.bool)
    valid[1, :77] = False
    pair.append(2, 170, valid)
    for _ in range(40):
        pair.append(2, 1)
    pair.append(2, 45)
    pair.cache.fork(1)
    pair.model.rows.append(pair.model.clone_row(1))
    valid = torch.ones(3, 40, dtype=torch.bool)
    valid[0, 7:], valid[2, 20:] = False, False
    pair.append(3, 40, valid)
    check_books(pair.cache)
    lengths = [n - back for n, back in zip(pair.cache.seq_lens, (3, 15, 5), strict=True)]
    pair.cache.crop(lengths)
    pair.model.crop(lengths)
    for _ in range(35):
        pair.append(3, 1)
    pair.append(3, 33)
    pair.append(3, 1)
    check_books(pair.cache)
    assert {"closed", *pair.cache.groups[0].group.copy_pools} <= read_from(pair.cache, 0).keys()


def test_the_newest_closed_pages_are_read_from_copies_and_older_ones_are_not():
    cache = cache_of(spec_of(TWO), backend="reference")
    pair, sinks, before = Pair(cache, attend=False), 4, 0
    for tokens in (4 + 20 + SIZE, 1, SIZE, SIZE, SIZE, 5 * SIZE):
        pair.append(1, tokens)
        n = (sum(cache.seq_lens) - sinks - 20 - 1) // SIZE
        want = {"closed": max(0, n - 3), "copy1": min(2, max(0, n - 1)), "copy0": min(1, n)}
        found = read_from(cache, 0)
        assert {pool: found.get(pool, 0) for pool in want} == {pool: SIZE * pages for pool, pages in want.items()}
        assert n >= before and sum(found.values()) == sum(cache.seq_lens)
        before = n
    held = {name: pool.allocator.num_used for name, pool in cache.groups[0].pools.items()}
    assert (held["closed"], held["copy0"], held["copy1"]) == (n, 1, 3), "a page is complete in its own format"


def test_what_a_crop_brings_back_is_read_packed():
    """The copy of a page that was too old is gone; newer pages get copies again."""
    cache = cache_of(spec_of(ONE), backend="reference")
    pair = Pair(cache)
    pair.append(1, 4 + 20 + 6 * SIZE + 1)
    assert read_from(cache, 0)["copy0"] == 3 * SIZE and read_from(cache, 0)["closed"] == 3 * SIZE
    lengths = [4 + 4 * SIZE]
    cache.crop(lengths), pair.model.crop(lengths)
    assert read_from(cache, 0) == {"sink": 4, "closed": 3 * SIZE, "copy0": SIZE}
    for tokens in (1, 20 + 2 * SIZE, 1):
        pair.append(1, tokens)
    assert read_from(cache, 0)["copy0"] == 3 * SIZE and read_from(cache, 0)["closed"] == 3 * SIZE
    pair.check()


def test_forks_share_copies_until_they_close_pages_of_their_own():
    cache = cache_of(spec_of(ONE), backend="reference", batch_size=2, max_tokens=400)
    pair = Pair(cache)
    pair.append(1, 4 + 20 + 4 * SIZE + 1)
    copies = cache.groups[0].pools["copy0"].allocator
    assert copies.num_used == 3
    cache.fork(0)
    pair.model.rows.append(pair.model.clone_row(0))
    assert copies.num_used == 3
    pair.append(2, SIZE)
    assert copies.num_used == 2 + 2, "two pages are still of both, and each has one of its own"
    pair.append(2, 2 * SIZE)
    assert copies.num_used == 6
    cache.free(0)
    assert copies.num_used == 3


def test_copies_are_the_pages_of_the_finer_scheme():
    """Read back, they are what a cache of that scheme holds, whose basis has the steps of its own widths."""
    spec, static = spec_of(ONE), statics_of(spec_of(ONE))
    group = spec.groups[0]
    finer = schemes.get("klt4", page_size=SIZE, residual_length=20)
    static4 = [x | {"k_basis": for_widths(x["k_basis"], group.key, finer.key)} for x in static]
    ours = PagedCache(spec, static=static, backend="reference")
    theirs = PagedCache(CacheSpec(scheme=finer, layers=spec.layers), static=static4, backend="reference")
    q, k, v = (torch.randn(1, 4 + 20 + 6 * SIZE + 1, heads, D).bfloat16() for heads in (2, 2, 2))
    for cache in (ours, theirs):
        cache.step(0, q, k, v, scaling=0.1)
    copied = slice(4 + 3 * SIZE, 4 + 6 * SIZE)
    for own, other in zip(ours.dequantize(0, 0), theirs.dequantize(0, 0), strict=True):
        assert torch.equal(own[copied], other[copied])
        assert not torch.equal(own[4 : 4 + 3 * SIZE], other[4 : 4 + 3 * SIZE])


def test_layers_of_coarser_pages_have_copies_and_raw_ones_have_none():
    raw, coarse = QuantSpec.raw(), schemes.get("klt3")
    overrides = (
        Override(layers=(0,), key=raw, value=raw),
        Override(layers=(1,), key=coarse.key, value=coarse.value),
    )
    scheme = dataclasses.replace(schemes.get("klt2"), overrides=overrides)
    groups = CacheSpec(scheme=scheme, layers=(GEOMETRY,) * 3).groups
    assert [len(g.copies) for g in groups] == [0, 1, 1]


def test_pages_of_a_capacity_count_copies():
    spec = spec_of(TWO)
    (group,) = spec.groups
    for tokens in (1, 4 + 20 + SIZE + 1, 4 + 20 + 2 * SIZE + 1, 1000):
        closed, pages = group.closed_after(tokens), group.pages_for(tokens)
        assert (pages["closed"], pages["copy0"], pages["copy1"]) == (closed, min(1, closed), min(3, closed))
        cache = cache_of(spec, batch_size=2, max_tokens=tokens)
        assert cache.nbytes == spec.nbytes(tokens, 2) == 2 * sum(group.block_bytes(p) * n for p, n in pages.items())
