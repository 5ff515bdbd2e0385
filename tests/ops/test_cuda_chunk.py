"""Chunks of many queries on a GPU: unpacked pages, FlashAttention over them, and how history is cut into passes (which
needs no GPU).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.cuda_cases import Case, build, relative_error
from ops.test_cuda_attend import FORMATS, INTEGERS, both, spec

from kvbits import schemes
from kvbits.ops.cuda.engine import host_plan as cuda
from kvbits.ops.cuda.engine import unpack_then_flash as chunk
from kvbits.ops.cuda.families.plain.unpack import Unpacker, refuses_layout
from kvbits.ops.reference import attend_pages as reference
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.ops.types import AttendCall, PageStore, PageTable, Part
from kvbits.spec import PageLayout, PerChannel, PerToken, QuantSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
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


@needs_gpu
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_unpacked_rows_are_the_reference_rounded_once(case):
    call, _, _ = build(case, "cuda")
    for part in call.parts:
        store, table, layout = part.store, part.table, part.store.layout
        assert refuses_layout(layout, case.dtype) is None
        addresses = torch.from_numpy(store.addresses[table.page_ids]).cuda()
        ends = np.cumsum(table.lengths)
        rows = torch.from_numpy(np.stack([ends - table.lengths, table.lengths], 1).astype(np.int32)).cuda()
        keys, values = (
            torch.full((ends[-1], layout.num_kv_heads, layout.head_dim), float("nan"), dtype=case.dtype, device="cuda")
            for _ in "kv"
        )
        layer = case.layers - 1
        Unpacker(store, case.dtype, addresses, rows, layer * layout.page_size_bytes).run(keys, values, layer)
        static = {name: x.cuda() for name, x in store.static.items()}
        for got, want in zip(
            (keys, values), dequantize_pages(store.gather(table.page_ids), layout, static), strict=True
        ):
            want = torch.cat([w[:, :n] for w, n in zip(want, table.lengths, strict=True)], 1).transpose(0, 1)
            torch.testing.assert_close(
                got.float(),
                want.to(case.dtype).float(),
                rtol=2.0**-7 if case.dtype == torch.bfloat16 else 2.0**-10,
                atol=1e-6,
            )
            assert (got == want.to(case.dtype)).float().mean() > 0.999, "a fused multiply-add may round a few elsewhere"


@needs_gpu
@pytest.mark.parametrize("max_rows", [1 << 16, 128])
@pytest.mark.parametrize("case", [*list(cases())[:6], *(c for c in cases() if c.young), *KLT], ids=str)
def test_a_chunk_agrees_with_float64(case, max_rows, monkeypatch):
    monkeypatch.setattr(chunk, "MAX_ROWS", max_rows)
    call, q, _ = build(case, "cuda")
    plan = cuda.plan(call, q.shape[2], q.dtype, q.device, num_queries=case.num_queries, history_only=True)
    assert isinstance(plan, chunk.ChunkPlan) and "dense attention" in plan.explain()
    positions = torch.arange(1000, 1000 + case.num_queries).repeat(len(case.lengths), 1)
    positions[2, :7] = -1
    out, lse = plan.run(q, positions.cuda())
    want, want_lse = reference.attend(q, call, positions, torch.float64)
    assert relative_error(out, want) < 5e-3
    assert (out[1] == 0).all() and (out[2, :7] == 0).all() and torch.isinf(lse[2, :7]).all()
    finite = torch.isfinite(want_lse)
    torch.testing.assert_close(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double().cpu(), want_lse[finite].cpu(), rtol=1e-3, atol=2e-2)


@needs_gpu
def test_layers_and_other_kernels_for_other_calls():
    call, q, strides = build(Case(**both("int4"), lengths=(300,), num_queries=140, layers=3), "cuda")
    plan = cuda.plan(
        call, q.shape[2], q.dtype, q.device, num_queries=140, history_only=True, layer_strides=tuple(strides)
    )
    first = plan.run(q)[0].clone()
    assert torch.equal(plan.run(q, layer=2)[0], first), "all layers of this pool hold the same bytes"
    assert isinstance(cuda.plan(call, q.shape[2], q.dtype, q.device, num_queries=140), cuda.Plan)


def table_of(lengths: list[list[int]]) -> PageTable:
    counts, flat = [len(x) for x in lengths], np.array([n for x in lengths for n in x], np.int32)
    return PageTable(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.arange(len(flat)),
        np.zeros(len(flat), np.int64),
        flat,
    )


@given(
    st.integers(1, 5).flatmap(
        lambda b: st.lists(
            st.lists(st.lists(st.integers(1, 32), max_size=9), min_size=b, max_size=b), min_size=1, max_size=3
        )
    ),
    st.integers(32, 400),
)
def test_every_visible_token_is_in_one_pass(parts, max_rows):
    layout = PageLayout(key=spec("int8"), value=spec("int8"), page_size=32, num_kv_heads=1, head_dim=64)
    store = PageStore(layout, (torch.zeros(0, 1, layout.head_bytes, dtype=torch.uint8),))
    call = AttendCall(tuple(Part(store, table_of(x)) for x in parts), 1.0)
    seen: dict[tuple[int, int], int] = {}
    for first, last, starts, entries in chunk.passes(call, max_rows):
        assert len(starts) == last - first + 1 and starts[-1] <= max_rows and (np.diff(starts) > 0).all()
        taken = np.zeros(starts[-1], int)
        for part, ids, rows in entries:
            table = call.parts[part].table
            np.testing.assert_array_equal(rows[:, 1], table.lengths[ids])
            for i, (row, n) in zip(ids, rows, strict=True):
                owner = int(np.searchsorted(table.indptr, i, "right")) - 1
                assert starts[owner - first] <= row and row + n <= starts[owner - first + 1]
                taken[row : row + n] += 1
                seen[part, int(i)] = seen.get((part, int(i)), 0) + 1
        assert (taken == 1).all()
    assert seen == {(i, j): 1 for i, p in enumerate(call.parts) for j in range(p.table.num_pages)}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"history_only": False}, "not all past"),
        ({"num_queries": 8}, "few"),
        ({"num_queries": 128}, "few"),
        ({"q_dtype": torch.float32}, "float32"),
    ],
)
def test_refusals_say_what_is_in_the_way(changes, why):
    call, _, _ = build(Case(**both("int8"), lengths=(100,)), "cpu")  # 4 query heads a kv head
    options = {"num_q_heads": 8, "q_dtype": torch.bfloat16, "num_queries": 512, "history_only": True}
    assert chunk.refuses(call, **options) is None
    assert why in chunk.refuses(call, **options | changes)


def test_formats_whose_pages_are_read_for_few_columns_are_unpacked_sooner():
    for key, young, unpacks in (
        (spec("int4"), False, False),
        (spec("int4"), True, False),
        (spec("int4", PerChannel()), False, True),
        (spec("int3"), False, False),
    ):
        call, _, _ = build(Case(key=key, value=spec("int4"), lengths=(400,), young=young), "cpu")
        assert (chunk.refuses(call, 8, torch.bfloat16, 64, True) is None) == unpacks


@pytest.mark.parametrize("options, why", [({"window": 50}, "sliding window"), ({"softcap": 5.0}, "softcap")])
def test_masks_and_caps_are_left_to_the_other_kernel(options, why):
    call, _, _ = build(Case(**both("int8"), lengths=(100,), **options), "cpu")
    assert why in chunk.refuses(call, 8, torch.bfloat16, 512, True)
