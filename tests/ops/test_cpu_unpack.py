"""Pages that the CPU kernels unpack to rows, against float64 over the dequantized pages, for every tier that this machine
can run.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from messages import raises
from ops.cpu_cases import CODEBOOKS, FORMATS, RAW, needs_library, random_call, specs_of, trellis

from kvbits import schemes
from kvbits.errors import DataError, UnsupportedError
from kvbits.ops import dispatch
from kvbits.ops.cpu import unpack
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.spec import PerGroup, QuantSpec

pytestmark = needs_library

NOISE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error allowed: of the L2 norm of rows in float32, and of each number beside that where rows have fewer bits."""


def assert_unpacks(case, dtype=torch.float32, gap=3):
    """All parts of a call into one tensor, `gap` rows apart, which keep what they held."""
    lists = case.lists
    pages = [(i, e) for i, pages in enumerate(lists) for e in range(len(pages.page_ids))]
    first = np.cumsum([0, *(lists[i].lengths[e] + gap for i, e in pages)])
    layout = case.stores[0].layout
    shape = int(first[-1]), layout.num_kv_heads
    found = [torch.full((*shape, d), 7.0, dtype=dtype) for d in (layout.head_dim, layout.value_head_dim)]
    want = [x.double().clone() for x in found]
    for i, (store, listed) in enumerate(zip(case.stores, lists, strict=True)):
        mine = [int(at) for at, (part, _) in zip(first, pages, strict=False) if part == i]
        rows = torch.tensor([mine, listed.lengths.tolist()], dtype=torch.int32).T
        ids, starts = (torch.from_numpy(x).int() for x in (listed.page_ids, listed.starts))
        unpack.Rows(store.layout, dtype, ids, rows, starts).run(store, *found)
        read = dequantize_pages(store.gather(listed.page_ids), store.layout, store.static, torch.float64, listed.starts)
        for into, of_pages in zip(want, read, strict=True):
            for (at, n), page in zip(rows.tolist(), of_pages, strict=True):
                into[at : at + n] = page[:, :n].transpose(0, 1)
    for x, y in zip(found, want, strict=True):
        error = (x.double() - y).abs()
        allowed = NOISE[torch.float32] * y.norm(dim=-1, keepdim=True)
        if dtype != torch.float32:
            allowed = allowed + NOISE[dtype] * y.abs() + 2.0**-24  # half of float16's smallest
        assert bool((error <= allowed).all()), float((error / allowed).max())


@pytest.mark.parametrize("name", ["klt4", "klt3", "klt2"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 128, 256, 512])
def test_klt(tier, name, head_dim):
    """Pages of several frames, the last one cut short; positions at which angles in float32 would be off."""
    scheme = schemes.get(name)
    for first, pages in ((0, 11), (131_000, 3)):
        assert_unpacks(random_call(scheme.key, scheme.value, head_dim=head_dim, pages=pages, first=first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [32, 160])
def test_dtypes_of_rows(tier, dtype, page_size):
    for name in ("klt4", "kivi4", "int8_centered", "raw"):
        scheme = schemes.get(name)
        for raw in (torch.float32, torch.bfloat16, torch.float16):
            assert_unpacks(random_call(scheme.key, scheme.value, page_size=page_size, dtype=raw), dtype)


def test_copies_in_another_format(tier):
    scheme, finer = schemes.get("klt2"), schemes.get("klt4")
    assert_unpacks(random_call(scheme.key, scheme.value, young=(finer.key, finer.value), pages=5, batch=3))


def test_every_width_of_keys(tier):
    for bands in ((8, 6, 5, 4), (0, 1, 8, 3), (3, 0, 0, 6), (1, 1, 1, 1), (2, 5, 0, 8), (0, 0, 0, 4)):
        for basis, center in ((None, None), ("hadamard", None), ("calibrated", None), ("calibrated", "calibrated")):
            assert_unpacks(random_call(trellis(*bands, basis=basis, center=center), RAW))
    assert_unpacks(random_call(trellis(8, 3, 1, 2, 4), RAW, head_dim=72))


def test_every_width_of_values(tier):
    for bits in (2, 3, 4):
        for basis in (None, "hadamard"):
            for head_dim in (24, 56, 64, 80, 96, 112, 128, 192):
                assert_unpacks(random_call(RAW, trellis(*[bits] * 4, basis=basis), head_dim=head_dim))
    fitted = dataclasses.replace(trellis(2, 2, 2, 2), levels="fitted")
    for head_dim in (40, 128):
        assert_unpacks(random_call(RAW, fitted, head_dim=head_dim))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("group, head_dim", [(32, 128), (8, 72), (4, 8), (12, 120)])
def test_formats(tier, fmt, group, head_dim):
    """Groups and rows of codes that are no whole vectors."""
    for spec in specs_of(fmt, group):
        assert_unpacks(random_call(spec, spec, head_dim=head_dim))
    spec = QuantSpec(format=fmt, granularity=PerGroup(4))
    assert_unpacks(random_call(spec, spec, head_dim=72, value_head_dim=40))


def test_pages_outside_of_the_pool_are_its_last():
    """As the reference reads them."""
    scheme = schemes.get("klt4")
    case = random_call(scheme.key, scheme.value)
    store, listed = case.stores[0], case.lists[0]
    last = store.num_pages - 1
    store.slabs[-1][-1] = store.gather(listed.page_ids[:1])[0]
    found = []
    for number in (-1, last, last + 5):
        rows = [torch.zeros(64, 2, 64) for _ in range(2)]
        given = torch.tensor([number], dtype=torch.int32), torch.tensor([[0, 64]]).int(), torch.tensor([0]).int()
        unpack.Rows(store.layout, torch.float32, *given).run(store, *rows)
        found.append(torch.cat(rows, -1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].any()


@pytest.mark.parametrize(
    "rows, parts", [([[60, 5]], ("rows",)), ([[-1, 3]], ("rows",)), ([[0, 65]], ("lengths", 1, "page_size"))]
)
def test_rows_outside_are_refused(rows, parts):
    scheme = schemes.get("int4")
    case = random_call(scheme.key, scheme.value)
    given = torch.tensor([0]).int(), torch.tensor(rows).int(), torch.tensor([0]).int()
    keys, values = torch.zeros(2, 64, 2, 64)
    with raises(UnsupportedError, *parts):
        unpack.Rows(case.stores[0].layout, torch.float32, *given).run(case.stores[0], keys, values)
    assert not keys.any() and not values.any()


@pytest.mark.parametrize("changed", [torch.zeros(64, 2, 32), torch.zeros(64, 2, 64).half(), torch.zeros(63, 2, 64)])
def test_tensors_of_another_shape_or_dtype_are_refused(changed):
    scheme = schemes.get("int4")
    case = random_call(scheme.key, scheme.value)
    given = torch.tensor([0]).int(), torch.tensor([[0, 4]]).int(), torch.tensor([0]).int()
    with raises(DataError, "values", "torch.float32", "[64, 2, 64]"):
        unpack.Rows(case.stores[0].layout, torch.float32, *given).run(case.stores[0], torch.zeros(64, 2, 64), changed)


def test_what_is_left_to_the_reference():
    layout = random_call(RAW, RAW).stores[0].layout
    cpu = torch.device("cpu")
    assert dispatch.choose("unpack", layout, torch.float32, cpu).backend == "cpu"
    assert "float64" in unpack.refuses(layout, torch.float64, cpu)
    assert "meta" in unpack.refuses(layout, torch.float32, torch.device("meta"))
    for fmt in CODEBOOKS:
        spec = QuantSpec(format=fmt, granularity=PerGroup(32))
        given = dataclasses.replace(layout, key=spec, value=spec), torch.float32, cpu
        assert dispatch.choose("unpack", *given).backend == "reference"
