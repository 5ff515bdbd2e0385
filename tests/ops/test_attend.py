"""The contract of attention over tables, on host backends: results against float64, calls that are refused, pools that
grow, and threads. The CUDA kernels' side is test_cuda_tables.py.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from ops.cpu_cases import FORMATS, NOISE, RAW, needs_library, random_call, specs_of
from ops.table_cases import CASES, HEADS, INT8, Cache, D, check, layout_of, spec
from random_cases import examples

from kvbits import schemes
from kvbits.errors import DataError, SpecError, UnsupportedError
from kvbits.ops import attend
from kvbits.ops.types import PageStore, Table
from kvbits.spec import PageLayout, PerGroup

pytestmark = needs_library
KLT2 = layout_of(schemes.get("klt2").key, schemes.get("klt2").value)
TWO_IN_A_BASIS = CASES["two packed parts"] | {"layouts": [layout_of(RAW, RAW, 4), KLT2, KLT2, layout_of(RAW, RAW)]}
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# -- results ----------------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("name", [*CASES, "two parts in a basis"])
def test_caches_of_several_parts(name, backend, monkeypatch):
    """Also through a plan that takes the backend itself: `check` makes its own."""
    plan = attend.plan
    monkeypatch.setattr(attend, "plan", lambda *args, **options: plan(*args, **options, backend=backend))
    case = CASES.get(name, TWO_IN_A_BASIS)
    made = check(Cache(**case), limit=2e-2, num_queries=2, window=100)
    assert made.choice.backend == backend and backend in made.explain()


@examples(40)
@given(data=st.data())
def test_programs_of_one_plan(data):
    """Layers bound, bound anew and run between updates of any tables and positions, against float64."""
    draw = data.draw
    fmt = draw(st.sampled_from(FORMATS))
    shape = {"head_dim": 64, "heads": 2, "group": draw(st.integers(1, 4)), "sinks": draw(st.sampled_from([0, 4]))}
    shape |= {"tokens": draw(st.sampled_from([1, 3, 20])), "window": draw(st.sampled_from([None, 90]))}
    key, value = (draw(st.sampled_from(specs_of(fmt, group=16))) for _ in "kv")
    cases = [
        random_call(
            key,
            value,
            **shape,
            batch=draw(st.integers(1, 3)),
            pages=draw(st.integers(1, 4)),
            first=draw(st.sampled_from([0, 64])),
            seed=draw(st.integers(0, 99)),
            spans=draw(st.booleans()),
            offset=draw(st.integers(0, 2)),
        )
        for _ in range(3)
    ]
    plan = cases[0].plan(batch_size=3, spans=True, backend="cpu")
    for layer, case in enumerate(cases):
        plan.bind(layer, case.stores)
    for _ in range(draw(st.integers(1, 5))):
        layer, table = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        if draw(st.booleans()):
            plan.bind(layer, cases[layer].stores)
        case = cases[table]
        plan.update(case.tables, positions=case.positions)
        if table == layer:
            lse = torch.empty(case.q.shape[:3])
            out, (want, want_lse) = plan.run(case.q, layer, lse=lse), case.exact()
            assert float((out.double() - want).norm()) <= (NOISE[fmt] + 4e-3) * float(want.norm())  # bfloat16
            seen = torch.isfinite(want_lse)
            assert torch.equal(torch.isfinite(lse), seen)
            assert float((lse - want_lse)[seen].abs().max()) <= max(2 * NOISE[fmt], 1e-5)


def test_a_plan_follows_lengths_pages_and_layers():
    """Layers of pools of other sizes, bound before and after lengths are known, anew, and read at other lengths: as
    plans made for that alone.
    """
    one, two = Cache([INT8], [(200,), (70,)]), Cache([INT8], [(333,), (0,)])
    q = torch.randn(2, 1, 2 * HEADS, D, generator=torch.Generator().manual_seed(5))

    def made():
        return attend.plan([INT8], batch_size=2, num_q_heads=2 * HEADS, dtype=q.dtype, device="cpu")

    def at(tokens, **changed):
        return [dataclasses.replace(one.tables[0], tokens=tokens, starts=None, offsets=None, **changed)]

    def alone(cache, tokens):
        plan = made()
        plan.bind(3, cache.stores)
        plan.update(at(tokens))
        return plan.run(q, 3)

    plan, longer, shorter = made(), ints(200, 70), ints(65, 0)
    plan.bind(0, one.stores)
    plan.update(at(longer))
    plan.bind(1, two.stores)
    for tokens in (longer, shorter, longer):
        plan.update(at(tokens))
        for layer, cache in enumerate((one, two)):
            assert torch.equal(plan.run(q, layer), alone(cache, tokens))
    plan.bind(0, two.stores)
    assert torch.equal(plan.run(q, 0), alone(two, longer))
    with raises(DataError, -200, 2147483583):
        plan.update([dataclasses.replace(at(shorter)[0], starts=-longer)])
    assert torch.equal(plan.run(q, 0), alone(two, longer)), "refused, the update changes nothing"
    half, spread = q.bfloat16(), q.repeat(1, 1, 1, 2)[..., ::2]
    assert torch.equal(plan.run(spread, 0), plan.run(spread.contiguous(), 0))
    with raises(DataError, "[2, 1, 4, 64]", "torch.bfloat16", "torch.float32"):
        plan.run(half, 0)
    with raises(DataError, "[2, 1, 4, 64]", "meta", "cpu"):
        plan.run(q.to("meta"), 0)


@pytest.mark.parametrize(
    "options", [{"num_queries": 3, "window": 100}, {"num_queries": 8, "softcap": 20.0, "batch_size": 9}], ids=str
)
@pytest.mark.parametrize("name", ["tail", "basis with copies"])
def test_ragged_queries_windows_and_caps(name, options):
    cache = Cache(**CASES[name])
    lens = torch.tensor([min(3, int(n)) - (i % 2) * (n > 2) for i, n in enumerate(cache.newest)], dtype=torch.int32)
    check(cache, query_lens=lens, limit=2e-2, **options)


@BACKENDS
def test_results_are_rounded_to_the_queries_dtype_or_not_at_all(backend):
    case = random_call(spec("int8"), spec("int8"), tokens=3)
    plan = case.plan(backend=backend)
    plan.bind(0, case.stores)
    plan.update(case.tables, positions=case.positions)
    assert plan.result_dtype == torch.float32
    exact = plan.run(case.q, 0, out=torch.empty(case.q.shape))
    assert torch.equal(plan.run(case.q, 0), exact.bfloat16())


def test_what_leads_out_of_a_table_ends_with_its_row():
    """Tokens and offsets: as if the table had said what its row holds."""
    cache = Cache(**CASES["one part"])
    pages = torch.nn.functional.pad(cache.tables[0].pages.clamp(min=0), (0, 3))
    width = pages.shape[1]
    plan = attend.plan(cache.layouts, batch_size=5, num_q_heads=4, dtype=torch.float32, device="cpu")
    plan.bind(0, cache.stores)
    q = torch.randn(5, 1, 4, D, generator=torch.Generator().manual_seed(3))
    for offsets, tokens in (
        ([0, 3, 20, -5, 2], [2**31 - 1, 400, 64, 70, -1]),
        ([-(2**31), 2**31 - 1, 5, 0, 10], [300, 64, 10**6, 1, 500]),
    ):
        plan.update([Table(pages, ints(*tokens), offsets=ints(*offsets))])
        found = plan.run(q, 0)
        inside = [min(max(n, 0), width - 1) for n in offsets]
        held = [min(max(n, 0), (width - at) * 64) for n, at in zip(tokens, inside, strict=True)]
        plan.update([Table(pages, ints(*held), offsets=ints(*inside))])
        assert torch.equal(plan.run(q, 0), found)


@BACKENDS
def test_numbers_that_the_pool_has_not_read_its_last_page(backend):
    case = random_call(spec("int8"), spec("int8"), sinks=0, batch=1, pages=2).part(0)
    store, last = case.stores[0], case.stores[0].num_pages - 1
    store.page(last).copy_(store.page(int(case.lists[0].page_ids[0])))
    want = dataclasses.replace(case, tables=[dataclasses.replace(case.tables[0], pages=ints(last, last)[None])])
    for bad in (last + 1, 2**31 - 1, -1, -(2**31)):
        table = dataclasses.replace(case.tables[0], pages=ints(bad, last)[None])
        found = dataclasses.replace(case, tables=[table]).attend(backend)
        assert torch.equal(found[0], want.attend(backend)[0])


def test_parts_that_come_later_find_their_backend():
    """A format that the CPU kernels refuse, in a part that is empty at first."""
    odd = layout_of(spec("int4", PerGroup(2)), spec("int4"))
    plan = attend.plan([INT8, odd], batch_size=1, num_q_heads=2, dtype=torch.float32, device="cpu")
    plan.bind(0, [store_of(torch.zeros(1, HEADS, x.head_bytes, dtype=torch.uint8), x) for x in (INT8, odd)])
    table = torch.zeros(1, 1, dtype=torch.int32)
    for tokens in ([1, 0], [1, 1]):
        plan.update([Table(table, ints(n)) for n in tokens])
        plan.run(torch.ones(1, 1, 2, D), 0)


def test_every_subset_of_parts_may_be_empty():
    rows = [
        tuple(n if keep else 0 for n, keep in zip((4, 192, 70), which, strict=True))
        for which in itertools.product((0, 1), repeat=3)
    ]
    check(Cache(CASES["sinks"]["layouts"], rows), limit=2e-2)


# -- refusals ---------------------------------------------------------------------------------------------------------

GOOD = dict(batch_size=2, num_q_heads=4, dtype=torch.bfloat16, device="cpu")


def store_of(pages, layout=INT8, static=None):
    return PageStore(layout, (pages,), static or {})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"batch_size": 0}, ("batch_size=0", 1)),
        ({"batch_size": True}, ("batch_size=True", 1)),
        ({"num_q_heads": 3}, ("3 query heads", "multiple of 2")),
        ({"num_q_heads": 0}, ("num_q_heads=0", 1)),
        ({"num_queries": 0}, ("num_queries=0", 1)),
        *(({"device": x}, (f"device={x!r}", "'cpu'", "'cuda'")) for x in ("meta", "gpu", None)),
        ({"dtype": torch.int32}, ("torch.int32", "floating-point")),
        ({"backend": "tpu"}, ("'tpu'", "auto", "cpu", "cuda", "reference")),
        ({"backend": "cpu", "dtype": torch.float64}, ("'cpu'", "torch.float64", "backend='auto'")),
        *(
            ({"softcap": x}, (f"softcap={x!r}", 0.001, 10000))
            for x in (-1.0, 0.0, float("nan"), float("inf"), "1", True)
        ),
        *(({"scaling": x}, (f"scaling={x!r}", "1e30")) for x in (1e300, float("inf"), "1", 0.0)),
        *(
            ({"sliding_window": w}, (f"sliding_window={w!r}", 1, 2147483647))
            for w in (0, 1.5, 2.0, True, float("nan"), 2**64, "9")
        ),
    ],
)
def test_plans_that_cannot_be(changes, parts):
    with raises(SpecError, *parts):
        attend.plan([INT8], **GOOD | changes)


def test_layouts_that_cannot_be():
    for layouts, got in ((INT8, "PageLayout"), ([INT8.key], "QuantSpec"), ([], "an empty list")):
        with raises(SpecError, "layouts", "PageLayout", got):
            attend.plan(layouts, **GOOD)
    other = PageLayout(key=INT8.key, value=INT8.value, page_size=64, num_kv_heads=HEADS, head_dim=128)
    with raises(SpecError, "(2, 64, 64)", "(2, 128, 128)"):
        attend.plan([INT8, other], **GOOD)


def test_a_gpu_is_not_waited_for_unless_it_may_be():
    with raises(UnsupportedError, "reference", "cuda"):
        attend.plan([INT8], **GOOD | {"device": "cuda", "dtype": torch.float64})
    options = GOOD | {"device": "cuda", "dtype": torch.float64}
    assert attend.plan([INT8], **options, may_wait=True).choice.backend == "reference"
    assert attend.plan([INT8], **options, backend="reference").reads_host


def test_pages_that_cannot_be():
    made = attend.plan([INT8], **GOOD)
    pages = torch.zeros(5, HEADS, INT8.head_bytes, dtype=torch.uint8)
    for bad in (pages[:, :1], pages.to(torch.int8), pages[..., :-16], pages.mT.contiguous().mT):
        with raises(DataError, "uint8", "[pages, 2, 8448]"):
            store_of(bad)
    with raises(DataError, "pages", "tensors", "str"):
        PageStore(INT8, ("pages",))
    for stores, parts in (
        ([store_of(pages.to("meta"))], ("meta", "cpu")),
        ([PageStore(INT8, ())], ("slabs", "pages")),
        ([store_of(pages[:0])], ("slabs", "pages")),
        ([PageStore(INT8, (pages, pages[:0]))], ("slab", "[0, 2, 8448]")),
        ([store_of(torch.zeros(5, HEADS, KLT2.head_bytes, dtype=torch.uint8), KLT2)], ("layer 0", "layout", "trellis")),
        ([], ("0 parts", 1)),
        (pages, ("stores", "list of PageStore", "Tensor")),
        ([pages], ("stores", "list of PageStore", "list")),
    ):
        with raises(DataError, *parts):
            made.bind(0, stores)
    with raises(DataError, "layer='0'", "number", "run()"):
        made.bind("0", [store_of(pages)])
    odd = torch.zeros(5 * HEADS * INT8.head_bytes + 1, dtype=torch.uint8)[1:].view(pages.shape)
    with raises(DataError, "multiples of 16"):
        made.bind(0, [store_of(odd)])


@pytest.mark.parametrize("bad", [0.0, -2.0, float("nan"), float("inf")])
def test_calibrated_scales_that_cannot_be_are_refused_when_they_are_bound(bad):
    """Attention over pages with a scale of NaN answered 0."""
    scheme = schemes.get("int8_static")
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=64, num_kv_heads=2, head_dim=64)
    pages = torch.zeros(5, 2, layout.head_bytes, dtype=torch.uint8)
    good = {"k_scale": torch.ones(2, 1), "v_scale": torch.ones(2, 1)}
    made = attend.plan([layout], **GOOD)
    made.bind(3, [store_of(pages, layout, good)])
    with raises(SpecError, "v_scale", "layer 3", f"{bad:g}", "[0, 0]", "static={..}"):
        made.bind(3, [store_of(pages, layout, good | {"v_scale": torch.tensor([[bad], [1.0]])})])
    for static, parts in (
        (None, ("k_scale", "float32", "[2, 1]", "static={..}")),
        (good | {"k_scale": torch.ones(2, 2)}, ("k_scale", (2, 2), (2, 1), "static={..}")),
        (good | {"k_scale": 1.0}, ("k_scale", "tensor", "float")),
        (good | {"k_scale": torch.ones(2, 1, dtype=torch.int32)}, ("k_scale", "float32", "torch.int32")),
    ):
        with raises(SpecError, *parts, "layer 3"):
            made.bind(3, [store_of(pages, layout, static)])


def test_banded_pages_say_what_they_are_read_with():
    """Pages in a calibrated basis ended in a KeyError of the first run."""
    scheme = schemes.get("klt4")
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=64, num_kv_heads=2, head_dim=64)
    pages = torch.zeros(5, 2, layout.head_bytes, dtype=torch.uint8)
    made = attend.plan([layout], **GOOD)
    with raises(SpecError, "k_inverse", "[2, 64, 64]", "static={..}", "k_offsets", "k_inv_freq"):
        made.bind(0, [store_of(pages, layout, {"k_basis": torch.eye(64).expand(2, -1, -1)})])
    given = {"k_inverse": torch.eye(64).repeat(2, 1, 1), "k_offsets": torch.zeros(2, 33, 64)}
    made.bind(0, [store_of(pages, layout, given | {"k_inv_freq": torch.ones(32)})])
    made.update([Table(torch.zeros(2, 4, dtype=torch.int32), ints(1, 1))])
    assert not made.run(torch.ones(2, 1, 4, 64, dtype=torch.bfloat16), 0).any()  # codes and scales of 0


def test_steps_that_cannot_be():
    made, with_spans = attend.plan([INT8], **GOOD), attend.plan([INT8], **GOOD, spans=True)
    pages, lens = torch.zeros(2, 4, dtype=torch.int32), ints(0, 0)
    at, spans = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 4, 2, dtype=torch.int32)
    good = Table(pages, lens)
    for tables, options, parts in (
        ([Table(pages.long(), lens)], {}, ("pages of table 0", "int32", "torch.int64")),
        ([Table(pages[:1], lens)], {}, ("pages of table 0", "at least 2", "[1, 4]")),
        ([Table(pages[:, :0], lens)], {}, ("pages of table 0", "at least 1", "[2, 0]")),
        ([Table(pages.T.contiguous().T, lens)], {}, ("pages of table 0", "dense")),
        ([Table(pages, lens.long())], {}, ("tokens of table 0", "int32", "torch.int64")),
        ([Table(pages, ints(0, 0, 0))], {}, ("3 sequences", 2, "batch_size")),
        ([Table(pages, lens, starts=ints(0))], {}, ("starts of table 0", "int32", "[2]", "[1]")),
        ([Table(pages, lens, offsets=lens.float())], {}, ("offsets of table 0", "int32", "torch.float32")),
        ([Table(pages, lens.to("meta"))], {}, ("tokens of table 0", "meta", "CPU")),
        ([Table(pages.to("meta"), lens)], {}, ("meta", "cpu")),
        ([good, good], {}, ("update()", "1 tables")),
        ([], {}, ("update()", "1 tables")),
        ([Table(pages.tolist(), lens)], {}, ("tensors", "list")),
        ([Table(pages, None)], {}, ("table", "pages", "tokens")),
        (good, {}, ("update()", "list of Table", "got Table")),
        ([pages], {}, ("update()", "list of Table", "got list")),
        ([good], {"query_lens": 3}, ("tensors", "int")),
        ([good], {"query_lens": ints(1)}, ("query_lens", "int32", "[2]", "[1]")),
        ([good], {"positions": at.long()}, ("positions", "int32", "[2, 1]", "torch.int64")),
        ([good], {"positions": at[:1]}, ("positions", "int32", "[2, 1]", "[1, 1]")),
        ([good], {"positions": at, "query_lens": lens}, ("positions", "query_lens")),
        ([Table(pages, lens, spans=spans)], {"positions": at}, ("spans=True",)),
    ):
        with raises(DataError, *parts):
            made.update(tables, **options)
    for table, options, parts in (
        (
            Table(pages, lens, spans=spans[:, :3]),
            {"positions": at},
            ("spans of table 0", "int32", "[2, 4, 2]", "[2, 3, 2]"),
        ),
        (Table(pages, lens, starts=lens, spans=spans), {"positions": at}, ("table 0", "spans", "starts", "offsets")),
        (Table(pages, lens, spans=spans), {}, ("spans", "positions")),
    ):
        with raises(DataError, *parts):
            with_spans.update([table], **options)


@pytest.mark.parametrize("lengths", [None, ints(2, 1)])
def test_queries_past_the_pages_need_positions(lengths):
    """They were taken for the newest tokens of the pages, each of which some backends showed all keys."""
    made = attend.plan([INT8], **GOOD | {"num_queries": 2, "past_only": True})
    table = Table(torch.zeros(2, 4, dtype=torch.int32), ints(8, 8))
    with raises(DataError, "past_only=True", "positions"):
        made.update([table], query_lens=lengths)
    made.update([table], positions=torch.tensor([[8, 9], [8, -1]], dtype=torch.int32))
    attend.plan([INT8], **GOOD | {"past_only": True}).update([table])


@BACKENDS
def test_a_ring_lists_its_pages_twice(backend):
    """A row does not wrap: tokens past its end are not read, and a second copy of the pages has them."""
    ring, size = torch.arange(4, dtype=torch.int32)[None], RAW_LAYOUT.page_size
    stores = raw_pages(4)
    q = torch.randn(1, 1, 2 * HEADS, D)
    turned, cut = ring.roll(-3, 1), ring[:, 3:]

    def read(pages, tokens, **where):
        return attend.attend(q, stores, [Table(pages.contiguous(), ints(tokens), **where)], backend=backend)[0]

    twice = read(ring.repeat(1, 2), 3 * size, offsets=ints(3))
    torch.testing.assert_close(twice, read(turned, 3 * size))
    torch.testing.assert_close(read(ring, 3 * size, offsets=ints(3)), read(cut, size))


@BACKENDS
def test_spans_that_cannot_be(backend):
    plan = attend.plan([INT8], **GOOD | {"batch_size": 1}, spans=True, backend=backend)
    pages, at = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)

    def update(*spans):
        plan.update([Table(pages, ints(64 + 3), spans=torch.tensor([spans], dtype=torch.int32))], positions=at)

    update((0, 64), (300, 3))
    for bad in (0, -1, 65):
        with raises(DataError, bad, 1, "page_size=64"):
            update((0, bad), (300, 3))
    for bad in (-1, 2**31 - 64):
        with raises(DataError, "starts", bad, 2**31 - 65):
            update((0, 64), (bad, 3))


def test_runs_that_cannot_be():
    made = attend.plan([INT8], **GOOD)
    q = torch.zeros(2, 1, 4, D, dtype=torch.bfloat16)
    with raises(DataError, "layer 0", "bind(0, stores)"):
        made.run(q, 0)
    made.bind(0, [store_of(torch.zeros(5, HEADS, INT8.head_bytes, dtype=torch.uint8))])
    with raises(DataError, "run()", "update()"):
        made.run(q, 0)
    made.update([Table(torch.zeros(2, 4, dtype=torch.int32), ints(0, 0))])
    for bad in (q[:, :, :2], q[:1], q[..., :32], q.float(), torch.cat([q, q], 1), q[0]):
        with raises(DataError, "[2, 1, 4, 64]", "torch.bfloat16"):
            made.run(bad, 0)
    with raises(DataError, "[B, T, Hq, D]", "list"):
        made.run([1.0])
    for out in (q.half(), q[:1], q.transpose(1, 2), "out"):
        with raises(DataError, "out", "torch.bfloat16", "[2, 1, 4, 64]"):
            made.run(q, 0, out=out)
    for lse in (q[..., 0], torch.zeros(2, 4)):
        with raises(DataError, "lse", "torch.float32", "[2, 1, 4]"):
            made.run(q, 0, lse=lse)
    assert not made.run(q, 0).any()


@pytest.mark.parametrize(
    "shape, parts",
    [
        ((2, 1, 0, 64), ("num_q_heads=0", 1)),
        ((0, 1, 6, 64), ("batch_size=0", 1)),
        ((2, 0, 6, 64), ("num_queries=0", 1)),
        ((2, 1, 6, 0), ("[2, 1, 6, 0]", "[2, 1, 6, 64]")),
        ((2, 6, 64), ("[B, T, Hq, D]", "[2, 6, 64]")),
    ],
)
def test_queries_of_nothing(shape, parts):
    case = random_call(spec("int4"), spec("int4"))
    with raises((DataError, SpecError), *parts):
        dataclasses.replace(case, q=torch.zeros(shape, dtype=torch.bfloat16)).attend()


# -- plans that live ---------------------------------------------------------------------------------------------------

RAW_LAYOUT = layout_of(RAW, RAW)


def raw_plan(**changes):
    given = dict(batch_size=2, num_q_heads=4, dtype=torch.float32, device="cpu") | changes
    return attend.plan([RAW_LAYOUT], **given)


def raw_pages(num_pages, seed=0):
    gen = torch.Generator().manual_seed(seed)
    pages = torch.randn(num_pages, HEADS, RAW_LAYOUT.head_bytes // 2, generator=gen).bfloat16().view(torch.uint8)
    return [PageStore(RAW_LAYOUT, (pages,))]


def raw_step(max_pages=4, lengths=(200, 130), starts=None):
    """A table of two sequences, for `update`; queries."""
    pages = torch.arange(2 * max_pages, dtype=torch.int32).view(2, -1)
    q = torch.randn(2, 1, 4, D, generator=torch.Generator().manual_seed(5))
    return [Table(pages, ints(*lengths), starts)], q


@BACKENDS
def test_starts_that_cannot_be_are_refused_before_a_layer_is_bound(backend):
    """The first bind refused them, the second did not, and the run read address 0."""
    plan, (step, q) = raw_plan(backend=backend), raw_step(starts=ints(0, -64))
    with raises(DataError, "starts", -64, 2147483583):
        plan.update(step)
    for _ in range(2):
        plan.bind(0, raw_pages(8))
        with raises(DataError, "run()", "update()"):
            plan.run(q, 0)


def test_a_bind_that_is_refused_changes_nothing():
    """Its layer went on with structs of stores that were gone, whose memory other layers' took."""
    plan, (step, q) = raw_plan(), raw_step()
    plan.update(step)
    near, far = torch.zeros(8, 2, HEADS, RAW_LAYOUT.head_bytes, dtype=torch.uint8)[:, 1], raw_pages(8)[0].slabs[0]
    unlike = [PageStore(RAW_LAYOUT, (near, far))]
    with raises(DataError, "[32768, 65536]"):
        plan.bind(1, unlike)
    with raises(DataError, "layer 1", "bind(1, stores)"):
        plan.run(q, 1)
    plan.bind(0, raw_pages(8))
    stores = raw_pages(8)
    held = weakref.ref(stores[0].slabs[0].untyped_storage())
    plan.bind(1, stores)
    del stores
    want = plan.run(q, 1)
    with raises(DataError, "[32768, 65536]"):
        plan.bind(1, unlike)
    gc.collect()
    assert held() is not None
    others = raw_plan()
    for i in range(40):
        others.bind(i, raw_pages(8, 50 + i))
    assert torch.equal(plan.run(q, 1), want)


def test_pools_that_grew_are_let_go():
    """Every size that a pool ever had kept its pages, and was filled at each update."""
    plan, (step, q) = raw_plan(), raw_step()
    plan.update(step)
    gone = []
    for num_pages in range(8, 16):
        stores = raw_pages(num_pages)
        gone.append(weakref.ref(stores[0].slabs[0].untyped_storage()))
        plan.bind(0, stores)
        del stores
    gc.collect()
    assert [x() is None for x in gone] == [True] * 7 + [False]
    assert len(plan._backend._tables) == 1
    plan.update(step)
    assert plan.run(q, 0).isfinite().all()


def test_threads_share_a_plan():
    """Layers of one plan run by two threads while a third updates it: each result is one of the two that single calls
    give.
    """
    plan, steps = raw_plan(), [raw_step(64, lengths)[0] for lengths in ((4000, 3000), (100, 50))]
    q = raw_step()[1]
    for layer in (0, 1):
        plan.bind(layer, raw_pages(128, layer))
    want = []
    for step in steps:
        plan.update(step)
        want.append([plan.run(q, layer) for layer in (0, 1)])

    def wrong(layer):
        return sum(
            not any(torch.equal(found, x[layer]) for x in want) for found in (plan.run(q, layer) for _ in range(300))
        )

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(wrong, layer) for layer in (0, 1)]
        for i in itertools.count():
            plan.update(steps[i % 2])
            if all(x.done() for x in runs):
                break
        assert [x.result() for x in runs] == [0, 0]


def test_memory_that_changed_is_read_anew():
    """An engine may write what a table points to between updates."""
    plan, (step, q) = raw_plan(), raw_step()
    plan.bind(0, raw_pages(8))
    plan.update(step)
    before = plan.run(q, 0)
    step[0].tokens[0] = 70
    plan.update(step)
    after = plan.run(q, 0)
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
