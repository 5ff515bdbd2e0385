"""Schemes that quantize tokens as they come: nothing waits raw, nothing closes, and everything else holds as for other
caches.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cache_checks import Pair, check_books, picture, poison_free_pages
from messages import raises
from nightly import at_night
from ops.cpu_cases import needs_library

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError, PoolFullError, SpecError
from kvbits.ops.reference import store as reference
from kvbits.ops.types import PageStore
from kvbits.quant.rotary import turn_by
from kvbits.spec import CacheSpec, LayerGeometry, Override, PerChannel, QuantSpec, Rotary, Scheme

FULL = LayerGeometry(num_kv_heads=2, head_dim=64)
LOCAL = [
    "int8",
    "int8_per_token",
    "int8_asym",
    "int8_centered",
    "fp8",
    "fp8_e5m2_keys",
    "int4",
    "int4_centered",
    "int8k_int4v",
    "raw",
]


def spec_of(name: str, *layers: LayerGeometry, **changes) -> CacheSpec:
    scheme = schemes.get(name, token_local=True, residual_length=0, **changes)
    return CacheSpec(
        scheme=scheme, layers=layers or (FULL, dataclasses.replace(FULL, sliding_window=70)), raw_dtype="float32"
    )


@pytest.mark.parametrize(
    "name, sinks",
    [
        (LOCAL[0], 0),
        (LOCAL[1], 4),
        *at_night(*((name, 0) for name in LOCAL[2::2]), *((name, 4) for name in LOCAL[3::2])),
    ],
)
def test_a_capacity_is_what_the_spec_says_and_suffices(name, sinks):
    spec = spec_of(name, num_sink_tokens=sinks)
    cache = PagedCache(spec, batch_size=2, max_tokens=200, backend="reference")
    assert cache.nbytes == spec.nbytes(200, 2)
    pair = Pair(cache, attend=False)
    for n in (70, *[1] * 66, 64):
        pair.append(2, n)
        check_books(cache)
    assert all(not s.closed for g in cache.groups for s in g.sequences)
    with raises(PoolFullError, "2 sequences", "200 tokens", "2 x 70"):
        pair.append(2, 70)
    kinds = cache.bytes_by_kind()
    assert bool(kinds["codes"]) == (name != "raw") and bool(kinds["raw"]) == (name == "raw" or bool(sinks))
    if name != "raw":  # whose elements are as wide as the model's
        assert spec.bits_per_element == pytest.approx(spec.scheme.bits_per_element(64))
    assert cache.explain()["scheme"] == name


def test_values_are_the_dense_model_s():
    """Attention and contents of an uncentred scheme over prompts, tokens, crops, forks and windows."""
    spec = spec_of("int8_asym", num_sink_tokens=3)
    pair = Pair(PagedCache(spec, backend="reference"))
    poison_free_pages(pair.cache)
    for n in (37, 1, 1, 60, 1):
        pair.append(2, n)
        pair.check()
    pair.cache.fork(1)
    pair.model.rows.append(pair.model.clone_row(1))
    pair.append(3, 1)
    pair.check()
    pair.cache.crop([99, 98, 99])
    pair.model.crop([99, 98, 99])
    for n in (1, 5):
        pair.append(3, n)
        pair.check()


@pytest.mark.parametrize(
    "rotary",
    [None, Rotary(inv_freq=tuple(1e4 ** -(i / 16) for i in range(16)), pairs="interleaved")],
    ids=["plain", "rotary"],
)
@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=needs_library)])
def test_centred_pages_open_with_the_mean_of_the_page_before(backend, rotary):
    spec = spec_of("int4_centered", dataclasses.replace(FULL, rotary=rotary), page_size=32)
    cache = PagedCache(spec, backend=backend)
    layout = spec.groups[0].layouts["tail"]
    turn = None if rotary is None else turn_by(rotary, 64, 32)
    want = PageStore(layout, (torch.zeros(6, 2, layout.head_bytes, dtype=torch.uint8),), turn=turn)
    at = 0
    for count in (40, *[1] * 30, 50, 1, 1):
        k, v = torch.randn(1, count, 2, 64) + torch.arange(64) / 8, torch.randn(1, count, 2, 64)
        cache.append(0, k, v)
        slots = torch.arange(at, at + count)
        reference.store(k, v, want, slots, previous=slots // 32 - 1)
        at += count
    found = cache.groups[0].sequences[0]
    for i, page in enumerate(found.tail):
        for name, s in layout.sections.items():
            if found.tail_lengths[i] == 32 or name.endswith("_mean"):
                part = slice(s.offset, s.offset + s.nbytes)
                assert torch.equal(cache.groups[0].pools["tail"].block(page)[0][:, part], want.page(i)[:, part]), (
                    i,
                    name,
                )
    k, _ = cache.dequantize(0, 0)
    assert len(k) == at
    served = " ".join(cache.explain()["ops"])
    assert f"store by {'reference' if backend == 'reference' else 'cpu'}" in served


def test_saved_swapped_and_copied_pages_go_on_as_they_were(tmp_path):
    spec = spec_of("int8_centered", num_sink_tokens=2)
    pair = Pair(PagedCache(spec, batch_size=2, max_tokens=300, backend="reference"), attend=False)
    for n in (90, 1, 1):
        pair.append(2, n)
    cache = pair.cache
    values = [cache.dequantize(layer, row) for layer in (0, 1) for row in (0, 1)]
    cache.save(tmp_path / "a")
    cache.save(tmp_path / "b")
    loaded = PagedCache.load(tmp_path / "a", backend="reference", spec=spec)
    loaded.save(tmp_path / "c")
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1, "slots that nobody shows are written as zeros"
    check_books(loaded)
    swapped = loaded.swap_out(1)
    poison_free_pages(loaded)
    loaded.swap_in(1, swapped)
    again = [loaded.dequantize(layer, row) for layer in (0, 1) for row in (0, 1)]
    assert all(torch.equal(a, b) for old, new in zip(values, again, strict=True) for a, b in zip(old, new, strict=True))
    k = torch.randn(2, 1, 2, 64)
    for one in (cache, loaded):
        for layer in (0, 1):
            one.append(layer, k, k)
    for layer in (0, 1):
        for row in (0, 1):
            assert all(
                torch.equal(a, b)
                for a, b in zip(cache.dequantize(layer, row), loaded.dequantize(layer, row), strict=True)
            )


def test_a_fork_writes_to_its_own_copy_of_a_page_begun():
    spec = spec_of("int8_centered", FULL)
    cache = PagedCache(spec, backend="reference")
    k = torch.randn(1, 70, 2, 64)
    cache.append(0, k, k)
    cache.fork(0)
    before = cache.dequantize(0, 0)[0]
    fresh = torch.randn(2, 1, 2, 64)
    cache.append(0, fresh, fresh)
    a, b = (cache.groups[0].sequences[row].tail for row in (0, 1))
    assert a[0] == b[0] and a[1] != b[1]
    assert torch.equal(cache.dequantize(0, 0)[0][:70], before) and torch.equal(cache.dequantize(0, 1)[0][:70], before)
    assert not torch.equal(cache.dequantize(0, 0)[0][70], cache.dequantize(0, 1)[0][70])


@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=needs_library)])
def test_clamped_numbers_are_counted_and_bad_ones_take_the_pass_back(backend):
    static = [{"k_scale": torch.full((2, 1), 0.01), "v_scale": torch.full((2, 1), 0.1)}]
    cache = PagedCache(spec_of("int8_static", FULL), static=static, backend=backend)
    x = torch.zeros(1, 40, 2, 64)
    x[0, 3, 1, :5] = 2.0
    cache.append(0, x, x)
    cache.append(0, x[:, 3:4], x[:, 3:4])
    assert cache.saturated[0] == {"k": 10, "v": 0}
    loud = PagedCache(spec_of("int8", FULL, FULL), backend=backend)
    for layer in (0, 1):
        loud.append(layer, x, x)
    before = picture(loud)
    loud.append(0, x[:, :1], x[:, :1])
    with raises(DataError, "float16"):
        loud.append(1, x[:, :1] + 1e9, x[:, :1])
    assert loud.seq_lens == [40] and not loud.in_pass
    assert [s for s, *_ in picture(loud)] == [s for s, *_ in before]


def test_overrides_may_be_raw_and_others_are_refused_with_the_way_out():
    int8, raw = QuantSpec(), QuantSpec.raw()
    mixed = Scheme(
        name="mixed", key=int8, value=int8, token_local=True, overrides=(Override(layers=(0,), key=raw, value=raw),)
    )
    spec = CacheSpec(scheme=mixed, layers=(FULL, FULL), raw_dtype="float32")
    assert CacheSpec.from_json(spec.to_json()) == spec and all(g.fills_pages for g in spec.groups)
    pair = Pair(PagedCache(spec, backend="reference"))
    pair.append(1, 50)
    pair.append(1, 1)
    pair.check()
    per_channel = QuantSpec(granularity=PerChannel())
    for changes, parts in (
        ({"residual_length": 64}, "residual_length=0"),
        ({"key": per_channel}, "PerToken"),
        ({"overrides": (Override(layers=(0,), key=raw, value=per_channel),)}, "PerToken"),
    ):
        with raises(SpecError, *parts.split()):
            dataclasses.replace(mixed, **changes)
    with raises(SpecError, "residual_length=64"):
        schemes.get("int4", token_local=True)
    with raises(SpecError, "tiers=()"):
        schemes.get("tiered", token_local=True, residual_length=0)
