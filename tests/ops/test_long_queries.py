"""Many queries past packed history: how it is cut into passes, rows that pages are unpacked to, and attention over them,
on a GPU and, with the reference's unpacking and attention in float64, without one.
"""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions
from ops.cuda_cases import Case, make, on, relative_error
from ops.emulated_build import build, put_sources
from ops.emulated_op import needs_compiler, needs_gpu
from ops.test_cuda_attend import FORMATS, INTEGERS, both, spec
from ops.test_dense_attention import kernel

from kvbits import schemes
from kvbits.ops import attend, long_queries
from kvbits.ops.cuda import unpack
from kvbits.ops.cuda.families.plain import unpack as plain
from kvbits.ops.long_queries import ENTRY, PART, ROW, SEQUENCE, VISIBLE, LongQueries
from kvbits.ops.reference.attend import PageList
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.ops.types import PageStore, Table
from kvbits.spec import PageLayout, PerChannel, PerToken, QuantSpec

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
RAW = QuantSpec.raw()


def cases():
    small = {"lengths": (300, 0, 129), "num_queries": 140, "tail": 20, "sinks": 4}
    yield Case(key=RAW, value=RAW, **small | {"tail": 0})
    for f in FORMATS:
        yield Case(**both(f), **small)
        yield Case(**both(f, PerToken()), **small, head_dim=80, dtype=torch.float16)
        yield Case(**both(f, PerChannel()), **small)
    for f in INTEGERS:
        yield Case(key=spec(f, PerChannel(), symmetric=False), value=spec(f, PerToken(), symmetric=False), **small)
        yield Case(**both(f, center="channel", scale_dtype="float32"), **small)
        yield Case(key=spec(f, PerChannel(), static=True, symmetric=False), value=spec(f, static=True), **small)
        yield Case(**both(f, PerToken()), **small, head_dim=256)
    tiered = {"key": spec("int4", PerChannel(), symmetric=False), "value": spec("int4", PerToken(), symmetric=False)}
    yield Case(**tiered, **small | {"lengths": (400, 0, 230)}, young=True, layers=2)
    yield Case(
        key=spec("int4", PerToken()),
        value=spec("int3", PerToken()),
        **small | {"lengths": (400, 0, 230)},
        young=True,
        head_dim=80,
    )
    yield Case(key=spec("int8"), value=spec("int3", scale_dtype="bfloat16"), **small | {"crop": 13}, page_size=32)


KLT = [
    Case(
        key=schemes.get(n).key,
        value=schemes.get(n).value,
        lengths=(300, 0, 129),
        num_queries=140,
        tail=20,
        sinks=4,
        layers=2,
    )
    for n in ("klt4", "klt2")
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(long_queries.dense, "attention", kernel)
    return request.param


def bound(call, layers, tables, positions):
    """A plan for queries past the pages; on a CPU, where others read packed pages, of the class itself."""
    options = {"num_q_heads": call.q.shape[2], "dtype": call.q.dtype, "num_queries": call.q.shape[1], "spans": True}
    options |= {"batch_size": len(call.q), "device": call.q.device, "past_only": True} | call.options
    make_plan = LongQueries if call.q.device.type == "cpu" else attend.plan
    plan = make_plan([store.layout for store in call.stores], **options)
    for i, stores in enumerate(layers):
        plan.bind(i, stores)
    plan.update(tables, query_lens=None, positions=positions)
    return plan


def run(plan, q, layer=0):
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    return plan.run(q, layer, out=out, lse=lse), lse


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """The kernel that unpacks plain and raw pages, on a CPU."""

    @functools.cache
    def load(layout, dtype, device_index):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        source = plain.source(layout, dtype)
        shared = {"extern __shared__ __align__(16) float tile[];": "float* const tile = (float*)shared;"}
        put_sources(folder, source.folder / source.name, {'extern "C" __global__': ""} | shared)
        macros = source.macros | {
            "KERNEL": "dequantize_pages",
            "NUM_THREADS": "THREADS",
            "SHARED_BYTES": max(plain.tile_bytes(layout), 16),
        }
        (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros.items()))
        library = build(folder, ["-mf16c", "-mfma", "-ffp-contract=off"])

        def launch(grid, threads, args, stream):
            ctypes.c_int.in_dll(library, "blocks_y").value = grid[1]
            library.launch(ctypes.byref(args), grid[0])

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(plain, "_load", load)
    monkeypatch.setattr(unpack.driver, "refuses", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))


EMULATED = [
    Case(key=RAW, value=RAW, lengths=(100, 70), dtype=torch.float16),
    Case(key=spec("int3", PerChannel(), symmetric=False), value=spec("fp8_e4m3"), lengths=(150, 70), tail=20),
    Case(
        key=spec("int8", PerChannel(), static=True, symmetric=False),
        value=spec("int4", PerToken(), center="channel"),
        lengths=(130, 200),
        head_dim=80,
    ),
    Case(key=schemes.get("nuq3-1%").key, value=schemes.get("nuq3-1%").value, lengths=(130, 200), first=5000),
]


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *(pytest.param(c, "cpu", marks=needs_compiler, id=f"{c} emulated") for c in EMULATED),
        *(pytest.param(c, "cuda", marks=needs_gpu, id=f"{c} gpu") for c in [*cases(), *EMULATED]),
    ],
)
def test_unpacked_rows_are_the_reference_rounded_once(case, device, request):
    """Pages lie in two slabs. A number that the pool lacks reads as its last page."""
    if device == "cpu":
        request.getfixturevalue("emulated")
    call = make(case, device)
    for held, table in zip(call.stores, call.tables, strict=True):
        layout, slab = held.layout, held.slabs[0]
        pages = PageList.of(table, layout.page_size)
        used, ends = torch.from_numpy(pages.page_ids).to(device), np.cumsum(pages.lengths)
        store = PageStore(layout, (slab[used[:-2]].clone(), slab[used[-2:]].clone()), held.static)
        ids, rows = np.arange(len(ends)), np.stack([ends - pages.lengths, pages.lengths], 1)
        ids[-1] = -3
        integers = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (ids, rows, pages.starts))
        keys, values = (
            torch.full((ends[-1], layout.num_kv_heads, layout.head_dim), float("nan"), dtype=case.dtype, device=device)
            for _ in "kv"
        )
        unpack.Rows(layout, case.dtype, *integers).run(store, keys, values)
        static = {name: x.to(device) for name, x in store.static.items()}
        for got, want in zip(
            (keys, values), dequantize_pages(slab[used], layout, static, starts=pages.starts), strict=True
        ):
            want = torch.cat([w[:, :n] for w, n in zip(want, pages.lengths, strict=True)], 1).transpose(0, 1)
            torch.testing.assert_close(
                got.float(),
                want.to(case.dtype).float(),
                rtol=2.0**-7 if case.dtype == torch.bfloat16 else 2.0**-10,
                atol=1e-4 if layout.key.pre_rope else 1e-6,
            )
            assert (got == want.to(case.dtype)).float().mean() > 0.999, "a fused multiply-add may round a few elsewhere"


@pytest.mark.parametrize("max_rows", [1 << 16, 128])
@pytest.mark.parametrize("case", [*list(cases())[:6], *(c for c in cases() if c.young), *KLT], ids=str)
def test_a_chunk_agrees_with_float64(case, max_rows, device, monkeypatch):
    monkeypatch.setattr(long_queries, "MAX_ROWS", max_rows)
    call = make(case, device)
    positions = torch.arange(1000, 1000 + case.num_queries, dtype=torch.int32).repeat(len(case.lengths), 1)
    positions[2, :7] = -1
    plan = bound(call, [call.stores], [on("cpu", table) for table in call.tables], positions)
    assert plan.reads_host and "dense attention" in plan.explain()
    out, lse = run(plan, call.q)
    call.positions = positions.to(device)
    want, want_lse = call.want()
    assert relative_error(out, want) < 5e-3
    assert (out[1] == 0).all() and (out[2, :7] == 0).all() and torch.isinf(lse[2, :7]).all()
    finite = torch.isfinite(want_lse)
    torch.testing.assert_close(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-3, atol=2e-2)
    assert torch.equal(plan.run(call.q, 0, out=None, lse=None), out), "without log-sum-exps"


def test_layers_share_what_is_laid_out_once(device):
    """Pages of two slabs, whose numbers are on the device; the second layer's are others."""
    call = make(Case(**both("int4"), lengths=(256, 192), num_queries=140, spans=True), device)
    slab, table = call.stores[0].slabs[0], call.tables[0]
    used, other = torch.from_numpy(PageList.of(table, 64).page_ids).to(device), slab.clone()
    other[used] = slab[used.flip(0)]
    pools = torch.stack([slab, other], 1)
    layers = [[PageStore(call.stores[0].layout, (pools[:3, i], pools[3:, i]))] for i in range(2)]
    positions = torch.full((2, 140), 500, dtype=torch.int32)
    plan = bound(call, layers, [Table(table.pages, table.tokens.cpu(), spans=table.spans.cpu())], positions)
    call.positions = positions.to(device)
    for i, stores in enumerate(layers):
        assert relative_error(run(plan, call.q, i)[0], call.want(stores)[0]) < 5e-3


@needs_gpu
def test_queries_among_the_pages_are_read_packed():
    call = make(Case(**both("int4"), lengths=(300,), num_queries=140), "cuda")
    assert "dense" in call.plan(past_only=True).explain() and "dense" not in call.plan().explain()


LAYOUTS = [
    PageLayout(key=spec("int8"), value=spec("int8"), page_size=size, num_kv_heads=1, head_dim=64)
    for size in (32, 32, 16)
]


@given(
    st.integers(1, 5).flatmap(
        lambda b: st.tuples(
            st.lists(
                st.lists(st.lists(st.integers(1, 16), max_size=9), min_size=b, max_size=b), min_size=1, max_size=3
            ),
            st.just([0] * b) | st.lists(st.integers(1, 50), min_size=b, max_size=b),
        )
    ),
    st.integers(0, 400),
)
def test_every_key_is_in_one_pass_and_passes_fit(given_, spare):
    parts, own = given_
    width, tables = max(1, *(len(x) for part in parts for x in part)), []
    for layout, part in zip(LAYOUTS, parts, strict=False):
        counts = [len(x) for x in part]
        spans = torch.zeros(len(own), width, 2, dtype=torch.int32)
        for b, lengths in enumerate(part):
            spans[b, : len(lengths), 1] = torch.tensor(lengths, dtype=torch.int32)
        tokens = torch.tensor([max(n * layout.page_size, 0) for n in counts], dtype=torch.int32)
        tables.append(Table(torch.zeros(len(own), width, dtype=torch.int32), tokens, spans=spans))
    pages = long_queries.pages_of(LAYOUTS[: len(parts)], tables)
    own, most = np.array(own), 32 + max(own) + spare
    seen, behind = [], np.zeros(len(own), int)
    for p in long_queries.passes(pages, own, most):
        mine = own[p.first : p.last] * p.ends
        assert len(p.starts) == p.last - p.first + 1 and (np.diff(p.starts) > 0).all()
        assert p.starts[-1] <= most
        taken = np.zeros(p.starts[-1], int)
        for b, end in enumerate(p.starts[1:]):
            taken[end - mine[b] : end] += 1
        for page in p.pages:
            b = page[SEQUENCE] - p.first
            assert p.starts[b] <= page[ROW] and page[ROW] + page[VISIBLE] <= p.starts[b + 1] - mine[b]
            taken[page[ROW] : page[ROW] + page[VISIBLE]] += 1
            seen.append((page[PART], page[SEQUENCE], page[ENTRY], page[VISIBLE]))
        assert (taken == 1).all()
        behind[p.first : p.last] += mine
    assert sorted(seen) == [
        (i, b, j, n) for i, part in enumerate(parts) for b, x in enumerate(part) for j, n in enumerate(x)
    ]
    assert (behind == own).all()


def asked(call, readable=True, **changes):
    options = {"num_q_heads": 8, "dtype": torch.bfloat16, "num_queries": 512, "past_only": True}
    return long_queries.refuses([store.layout for store in call.stores], options | call.options | changes, readable)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"past_only": False}, ("past",)),
        ({"num_queries": 8}, ("few",)),
        ({"num_queries": 128}, ("few",)),
        ({"dtype": torch.float32}, ("float32",)),
        ({"readable": False}, ("many queries",)),
    ],
)
def test_refusals_say_what_is_in_the_way(changes, parts):
    call = make(Case(**both("int8"), lengths=(100,)), "cpu")  # 4 query heads a kv head
    assert asked(call) is None
    assert mentions(asked(call, **changes), *parts)


def test_pages_that_no_kernel_reads_are_unpacked_for_few_queries_too():
    call = make(KLT[0], "cpu")
    assert "few" in asked(call, num_queries=1)
    assert asked(call, False, num_queries=1) is asked(call, False, num_queries=2) is None
    assert "past" in asked(call, False, num_queries=1, past_only=False)


def test_formats_whose_pages_are_read_for_few_columns_are_unpacked_sooner():
    for key, young, unpacks in (
        (spec("int4"), False, False),
        (spec("int4"), True, False),
        (spec("int4", PerChannel()), False, True),
        (spec("int3"), False, False),
    ):
        call = make(Case(key=key, value=spec("int4"), lengths=(400,), young=young), "cpu")
        assert (asked(call, num_queries=64) is None) == unpacks


@pytest.mark.parametrize("options, why", [({"window": 50}, "sliding window"), ({"softcap": 5.0}, "softcap")])
def test_masks_and_caps_are_left_to_the_other_kernel(options, why):
    call = make(Case(**both("int8"), lengths=(100,), **options), "cpu")
    assert why in asked(call)
