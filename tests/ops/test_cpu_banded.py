"""CPU kernels of trellis codes and their bases against float64 over the dequantized pages, for every tier that this
machine can run.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dense_model import dense_attention
from messages import raises
from ops.cpu_cases import (
    NOISE,
    RAW,
    assert_close,
    inverse_frequencies,
    needs_library,
    random_call,
    static_params,
    trellis,
)

from kvbits import schemes
from kvbits.errors import DataError
from kvbits.ops import attend as attention
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.cpu import store as store_cpu
from kvbits.ops.cpu import structs
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference import store as store_reference
from kvbits.ops.reference.dequantize import dequantize_pages, page_codes, section
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore, Table
from kvbits.quant.basis import completed
from kvbits.quant.scales import scale_values
from kvbits.spec import PageLayout, PerGroup, QuantSpec

pytestmark = needs_library

PRESETS = ("klt4", "klt3", "klt2")


def sides(name):
    scheme = schemes.get(name)
    return scheme.key, scheme.value


def assert_agrees(case):
    assert_close(case.attend("cpu"), case.exact(), NOISE["trellis"])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 256])
def test_presets(tier, name, head_dim):
    """Pages of two frames, the last one cut short; positions at which angles in float32 would be off."""
    for group, tokens, first in ((1, 1, 0), (4, 2, 131_000), (7, 1, 200)):
        assert_agrees(random_call(*sides(name), head_dim=head_dim, group=group, tokens=tokens, pages=5, first=first))


@pytest.mark.parametrize("head_dim", [8, 16, 40, 512])
def test_other_head_dims(tier, head_dim):
    assert_agrees(random_call(*sides("klt3"), head_dim=head_dim, group=5, pages=2))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 70},
        {"softcap": 20.0},
        {"window": 130, "softcap": 30.0, "tokens": 9},
        {"tokens": 83, "pages": 6},
        {"page_size": 32},
        {"page_size": 160},
        {"heads": 1, "group": 16, "pages": 70, "batch": 1},
        {"sinks": 0, "dtype": torch.float32},
        {"batch": 5, "pages": 6, "group": 64},
    ],
)
def test_options(tier_of_chunks, options):
    for name in PRESETS:
        assert_agrees(random_call(*sides(name), **options))


def test_a_query_that_sees_one_token(tier):
    """No mean over tokens makes the rounding error of its score smaller."""
    for seed in range(20):
        case = random_call(
            *sides("klt4"), head_dim=72, batch=3, tokens=5, sinks=0, window=1, dtype=torch.float16, seed=seed
        )
        assert_agrees(dataclasses.replace(case, positions=(case.positions - 30).clamp(min=-1)))


def test_every_width_of_keys(tier):
    """All planes, in every order; 8 bits are two fields of 4."""
    for bands in ((8, 6, 5, 4), (0, 1, 8, 3), (3, 0, 0, 6), (1, 1, 1, 1), (2, 5, 0, 8), (0, 0, 0, 4)):
        for basis, center in ((None, None), ("hadamard", None), ("calibrated", None), ("calibrated", "calibrated")):
            assert_agrees(random_call(trellis(*bands, basis=basis, center=center), RAW, group=5, dtype=torch.float32))
    assert_agrees(random_call(trellis(8, 3, 1, 2, 4), RAW, head_dim=72))


def test_values_of_every_width_that_kernels_take(tier):
    for bits in (2, 3, 4):
        for basis in (None, "hadamard"):
            assert_agrees(random_call(RAW, trellis(*[bits] * 4, basis=basis), group=5, dtype=torch.float32))
            for head_dim in (80, 96):
                assert_agrees(random_call(RAW, trellis(*[bits] * 4, basis=basis), head_dim=head_dim, tokens=3))
        for head_dim in (24, 56, 112, 192):  # rings lack runs, or their words lie in two blocks
            assert_agrees(random_call(RAW, trellis(*[bits] * 4), head_dim=head_dim))
    fitted = dataclasses.replace(trellis(2, 2, 2, 2), levels="fitted")
    for head_dim in (40, 64, 128):
        assert_agrees(random_call(RAW, fitted, head_dim=head_dim, group=8))


def test_beside_other_formats(tier):
    key, value = sides("klt3")
    for other in ("int8", "int4", "fp8_e4m3"):
        spec = QuantSpec(format=other, granularity=PerGroup(32))
        assert_agrees(random_call(key, spec, group=4))
        assert_agrees(random_call(spec, value, group=4))


@pytest.mark.parametrize("basis", [None, "hadamard", "calibrated"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_levels_are_those_of_the_documents(backend, basis):
    """Keys and values as dequantizing reads them, against plain softmax: the reference's own way in the basis is not
    asked.
    """
    key, value = sides("klt2")
    key = dataclasses.replace(key, basis=basis, center="calibrated" if basis == "calibrated" else None)
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=2, head_dim=64)
    basis = torch.eye(64) * 2 + torch.randn(2, 64, 64) / 8
    static = completed({"k_basis": basis, "k_mean": torch.randn(2, 2, 64)}, inverse_frequencies(64))
    starts, q = 64 * np.arange(5), torch.randn(1, 1, 6, 64)
    pages, _ = close_reference.close_pages(*torch.randn(2, 5, 2, 64, 64), layout, static, starts)
    k, v = (
        x.transpose(0, 1).flatten(1, 2).transpose(0, 1)
        for x in dequantize_pages(pages, layout, static, torch.float64, starts=starts)
    )
    table = Table(torch.arange(5, dtype=torch.int32)[None], torch.tensor([320], dtype=torch.int32))
    positions = torch.tensor([[400]], dtype=torch.int32)
    store = PageStore(layout, (pages,), static)
    out, lse = attention.attend(q, [store], [table], positions=positions, backend=backend)
    want = dense_attention(q[0], k, v, [319], 64**-0.5, None, None)
    assert_close((out[0], lse[0]), want, NOISE["trellis"])


def test_queries_large_in_one_direction(tier):
    """A query bias a hundred times the rest, which a calibrated basis takes out: numbers lost before it would not come
    back.
    """
    case = random_call(*sides("klt3"), head_dim=128, group=4, dtype=torch.float32)
    case.q[..., 7] += 100
    store, pages = case.stores[0], case.lists[0]
    basis = store.static["k_basis"] * torch.where(torch.arange(128) == 7, 100, 1)[:, None]
    store.static["k_mean"][..., [7, 71]] *= 1e-2  # a pair of the rotary embedding
    store.static.update(completed(store.static | {"k_basis": basis}, store.static["k_inv_freq"]))
    k, v = torch.randn(2, len(pages.page_ids), 2, 64, 128)
    k[..., 7] *= 1e-2
    close_reference.close(k, v, store, pages.page_ids, starts=pages.starts)
    assert_agrees(case.part(0))


def test_what_kernels_refuse():
    def refused(key, value, head_dim=64):
        return structs.refuses_layout(PageLayout(key=key, value=value, page_size=64, num_kv_heads=1, head_dim=head_dim))

    assert refused(*sides("klt2")) is None
    assert "8 bits" in refused(RAW, trellis(8, 8, 8, 8))
    assert refused(RAW, trellis(3, 3, 3, 3)) is None
    case = random_call(*sides("klt2"))
    store = case.stores[0]
    for name in ("k_inverse", "k_inv_freq", "k_offsets"):
        static = {n: t for n, t in store.static.items() if n != name}
        with raises(DataError, name):
            structs.store_struct(dataclasses.replace(store, static=static))


# -- closing
# ------------------------------------------------------------------------------------------------------------


def closed(key, value, k, v, page_size, head_dim):
    """(pages by the kernel, pages by the reference [n, 2, head_bytes], their layout and what the layer's pages share)
    of pages at far positions.
    """
    layout = PageLayout(
        key=key,
        value=value,
        page_size=page_size,
        num_kv_heads=2,
        head_dim=head_dim,
        raw_dtype=str(k.dtype).removeprefix("torch."),
    )
    static, starts, ids = static_params(key, value, 2, head_dim), np.array([5, 131_008, 70_001]), np.array([4, 0, 3])
    found = []
    for close in (close_cpu.close, close_reference.close):
        buffer = torch.full((5, 3, layout.head_bytes), 0xFF, dtype=torch.uint8)
        close(k, v, PageStore(layout, (buffer[:2, :2], buffer[2:, :2]), static), ids, starts=starts)
        assert bool((buffer[:, 2] == 0xFF).all()) and bool((buffer[1:3] == 0xFF).all()), "other bytes stay as they are"
        found.append(buffer[torch.from_numpy(ids), :2])
    return *found, layout, static, starts


def rows(page_size, head_dim, dtype):
    """Tokens of very different size, a constant one, one of zeros, one with a single large number, whole numbers, very
    small and very large ones.
    """
    x = torch.randn(3, 2, page_size, head_dim) * torch.randn(3, 2, page_size, 1).exp() + torch.randn(1, 2, 1, head_dim)
    x[0, 0, 0], x[1, 0, 4], x[2, 0, 2, 0] = 0, 7, 1000
    x[0, 1, 5] = x[0, 1, 5].round()
    x[1, 1, 6:9] *= torch.tensor([1e-5, 1e-9, 0.0])[:, None]
    x[2, 1, 7:9] *= torch.tensor([100.0, 1000.0])[:, None]
    return x.to(dtype)


def squared_errors(x, scales, spec):
    """Return the squared errors of integers of the widths of `spec`, which scales are fitted to: float64 [..., tokens]
    of x [..., tokens, head_dim] and codes of scales.
    """
    top = 2.0 ** torch.tensor(spec.widths(x.shape[-1])).repeat_interleave(16)[: x.shape[-1]].double() - 1
    scale = scale_values(scales.int() + (2 if spec.levels == "fitted" else 0)).double().unsqueeze(-1)
    integers = (x.double() / scale + top / 2).round().clamp(min=0).minimum(top) - top / 2
    return ((x - integers * scale).square() * (top > 0)).sum(-1)


def assert_pages_are_the_references(ours, theirs, layout, k, v, static, starts):
    """Scales are another one only where both cost the same squared error. Under equal scales codes are equal, and under
    equal codes bytes.
    """
    equal = torch.ones(ours.shape[:2], dtype=torch.bool)
    for kind, x, spec in (("k", k, layout.key), ("v", v, layout.value)):
        if spec.is_raw:
            continue
        stored = close_reference.rows_as_stored(x, spec, static, starts)
        scales = [section(p, layout, f"{kind}_scale").flatten(-2) for p in (ours, theirs)]
        same = scales[0] == scales[1]
        error, best = (squared_errors(stored, s, spec) for s in scales)
        assert float((~same).float().mean()) <= 0.01
        assert bool((error <= best * (1 + 1e-5) + 1e-12).all())
        codes = [page_codes(p, layout, kind) for p in (ours, theirs)]
        differ = (codes[0] != codes[1]).any(-1) & same
        # a number of a calibrated basis may lie between two units, and another path then has the least cost
        assert int(differ.sum()) <= (2 if spec.basis == "calibrated" else 0)
        equal &= (same & ~differ).all(-1)
    assert float(equal.float().mean()) >= 0.5
    assert torch.equal(ours[equal], theirs[equal])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("head_dim", "page_size"), [(64, 64), (72, 32), (80, 64), (96, 32), (128, 64), (256, 96), (8, 32)]
)
def test_closing_is_the_references_but_for_ties(tier, name, head_dim, page_size):
    for dtype in (torch.float32, torch.bfloat16):
        k, v = rows(page_size, head_dim, dtype), rows(page_size, head_dim, dtype).flip(2)
        ours, theirs, layout, static, starts = closed(*sides(name), k, v, page_size, head_dim)
        assert_pages_are_the_references(ours, theirs, layout, k, v, static, starts)


def test_every_width_closes(tier):
    values = [trellis(*[bits] * 4, basis="hadamard") for bits in (2, 3, 4)]
    values += [RAW, dataclasses.replace(values[0], levels="fitted", basis=None)]
    for bands, value in zip(
        ((8, 6, 5, 4), (0, 1, 8, 3), (3, 0, 0, 6), (1, 1, 1, 1), (0, 0, 0, 4)), values, strict=True
    ):
        for basis in (None, "hadamard"):
            x = rows(64, 64, torch.float32)
            ours, theirs, layout, static, starts = closed(trellis(*bands, basis=basis), value, x, x.flip(2), 64, 64)
            assert_pages_are_the_references(ours, theirs, layout, x, x.flip(2), static, starts)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 64), (80, 32), (96, 32), (128, 64), (256, 32)])
@pytest.mark.parametrize("start", [0, 4, 64, 500, 1000])
def test_tokens_stored_one_by_one_are_those_of_a_page_that_closes(tier, name, head_dim, page_size, start):
    """In any runs, byte for byte, position 0 included."""
    layout = PageLayout(
        key=sides(name)[0], value=sides(name)[1], page_size=page_size, num_kv_heads=2, head_dim=head_dim
    )
    static = static_params(*sides(name), 2, head_dim)
    k, v = torch.randn(2, 1, page_size, 2, head_dim).to(torch.bfloat16)
    want = torch.full((1, 2, layout.head_bytes), 0xFF, dtype=torch.uint8)
    close_cpu.close(
        k.transpose(1, 2),
        v.transpose(1, 2),
        PageStore(layout, (want,), static),
        np.array([0]),
        starts=np.array([start]),
    )
    found = torch.full((4, 2, layout.head_bytes), 0xFF, dtype=torch.uint8)
    store = PageStore(layout, (found[:2], found[2:]), static)
    assert store_cpu.refuses(layout, k.dtype, k.device) is None
    slots, starts = 2 * page_size + torch.arange(page_size), torch.full((page_size,), start, dtype=torch.int32)
    for part in (slice(9, page_size), slice(1, 9), slice(0, 1)):
        status = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
        store_cpu.store(k[:, part], v[:, part], store, slots[part], starts=starts[part], status=status)
        assert not status.any()
    assert torch.equal(found[2:3], want) and bool((found[[0, 1, 3]] == 0xFF).all())
    again = torch.zeros_like(found)
    store_reference.store(k, v, PageStore(layout, (again,), static), slots, starts=starts)
    assert float((again[2] != found[2]).float().mean()) <= 2e-3


def test_tokens_of_several_pages_have_each_its_start(tier):
    """Two of the pages lie in one frame; a token between is not stored and has no position."""
    key, value = sides("klt3")
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=2, head_dim=64)
    static, (k, v) = static_params(key, value, 2, 64), torch.randn(2, 201, 2, 64)
    order = torch.tensor([3, 1, 0, 2]).repeat_interleave(64)[:200] * 64
    slots, starts = order + torch.arange(200) % 64, torch.tensor([259, 323, 387, 515]).repeat_interleave(64)[:200]
    slots, starts = (torch.cat([x[:70], torch.tensor([-1]), x[70:]]) for x in (slots, starts))
    found = []
    for store in (store_cpu.store, store_reference.store):
        found.append(torch.zeros(4, 2, layout.head_bytes, dtype=torch.uint8))
        store(k, v, PageStore(layout, (found[-1],), static), slots, starts=starts.int())
    assert float((found[0] != found[1]).float().mean()) <= 2e-3


def test_what_cannot_be_stored_is_named(tier):
    key, value = sides("klt2")
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=2, head_dim=64)
    store = PageStore(
        layout, (torch.zeros(2, 2, layout.head_bytes, dtype=torch.uint8),), static_params(key, value, 2, 64)
    )
    x, slots, starts = torch.randn(1, 3, 2, 64), torch.arange(64, 67), torch.full((3,), 64, dtype=torch.int32)
    with raises(DataError, "values", "float8_e5m3", "raw", "Override"):
        store_cpu.store(x, x * 1e7, store, slots, starts=starts)
    with raises(DataError, "keys", "nan"):
        store_cpu.store(torch.where(x > 1, torch.nan, x), x, store, slots, starts=starts)
    with raises(DataError, "k_basis", "[num_kv_heads, head_dim, head_dim]"):
        without = {name: y for name, y in store.static.items() if name != "k_basis"}
        store_cpu.store(x, x, PageStore(layout, store.slabs, without), slots, starts=starts)


def test_what_cannot_be_closed_is_named(tier):
    key, value = sides("klt2")
    x = torch.randn(3, 2, 64, 64)
    with raises(DataError, "values", "float8_e5m3", "raw", "Override"):
        closed(key, value, x, x * 1e7, 64, 64)
    with raises(DataError, "keys", "nan"):
        closed(key, value, torch.where(x > 3, torch.nan, x), x, 64, 64)
