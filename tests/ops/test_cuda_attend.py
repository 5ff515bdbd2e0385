"""GPU attention against the float64 reference over the same bytes. Needs an NVIDIA GPU.

The bound: queries come in and results leave in 16 bits (2**-8 or 2**-11), weights and their products with value scales
are float16; 5e-3 covers it for results of attention over random keys, whose weights do not cancel.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ops.cuda_cases import Case, build, relative_error

from kvbits import schemes
from kvbits.errors import DataError, UnsupportedError
from kvbits.ops.cuda.engine import host_plan as cuda
from kvbits.ops.reference import attend_pages as reference
from kvbits.ops.types import AttendCall, PageStore, PageTable, Part
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
LIMIT = 5e-3
LENGTHS = (1000, 64, 0, 333, 2500)
INTEGERS = ("int8", "int4", "int3", "int2")
FORMATS = (*INTEGERS, "fp8_e4m3", "fp8_e5m2")
RAW = QuantSpec.raw()


def spec(fmt, granularity=PerGroup(64), **options):  # noqa: B008
    return QuantSpec(format=fmt, granularity=granularity, **options)


def both(fmt, granularity=PerGroup(64), **options):  # noqa: B008
    return {"key": spec(fmt, granularity, **options), "value": spec(fmt, granularity, **options)}


TIERED = {"key": spec("int4", PerChannel(), symmetric=False), "value": spec("int4", PerToken(), symmetric=False)}


def unlike_widths(**few):
    """Keys and values of unlike widths: packed, with raw tokens in the same walk and in one of their own, beside
    8-bit pages, and raw alone.
    """
    for head_dim, value_head_dim in ((192, 128), (128, 64)):
        widths = {"head_dim": head_dim, "value_head_dim": value_head_dim}
        yield Case(**both("int8", center="channel"), **few, **widths)
        yield Case(
            key=spec("int4", PerChannel(), symmetric=False),
            value=spec("int4", symmetric=False),
            **few,
            **widths,
            group=16,
        )
        yield Case(key=RAW, value=RAW, lengths=few["lengths"], **widths, group=3)
    yield Case(**TIERED, **few, young=True, head_dim=128, value_head_dim=64)
    yield Case(
        key=spec("int8", static=True),
        value=spec("int2", PerChannel(), static=True),
        **few,
        head_dim=64,
        value_head_dim=128,
        softcap=20.0,
        num_queries=3,
    )
    yield Case(**both("int3"), **few, head_dim=192, value_head_dim=128)


def wide(**few):
    """Gemma 4's heads of 512 channels."""
    yield Case(**both("int8", center="channel"), **few, head_dim=512, group=2)
    yield Case(**both("int4"), **few, head_dim=512, group=8, num_queries=2)
    yield Case(
        key=spec("int4", PerChannel(), symmetric=False), value=spec("int4", symmetric=False), **few, head_dim=512
    )
    yield Case(key=RAW, value=RAW, lengths=few["lengths"], heads=few.get("heads", 2), head_dim=512)


def cases():
    yield from unlike_widths(lengths=LENGTHS, tail=20, sinks=4)
    yield from wide(lengths=LENGTHS, tail=20, sinks=4)
    yield Case(key=RAW, value=RAW, lengths=LENGTHS)
    yield Case(key=RAW, value=RAW, lengths=LENGTHS, head_dim=80, window=100, sinks=4)
    yield Case(key=RAW, value=RAW, lengths=LENGTHS, head_dim=256, group=16, dtype=torch.float16)
    for f in FORMATS:
        yield Case(**both(f), lengths=LENGTHS, tail=64, sinks=4)
        yield Case(**both(f, PerToken()), lengths=LENGTHS)
        yield Case(key=spec(f, PerChannel()), value=spec(f, PerChannel()), lengths=LENGTHS)
    for f in INTEGERS:
        yield Case(**both(f, PerGroup(32), symmetric=False), lengths=LENGTHS, group=8)
        yield Case(
            key=spec(f, PerChannel(), symmetric=False),
            value=spec(f, PerToken(), symmetric=False),
            lengths=LENGTHS,
            tail=20,
            magnitude=50.0,
        )
        yield Case(**both(f, center="channel"), lengths=LENGTHS, tail=20, magnitude=1e-3)
        yield Case(**both(f, PerChannel(), symmetric=False), lengths=LENGTHS)
        yield Case(**both(f, PerChannel(), static=True), lengths=LENGTHS)
        yield Case(
            key=spec(f, PerChannel(), static=True, symmetric=False),
            value=spec(f, static=True, symmetric=False),
            lengths=LENGTHS,
            tail=20,
        )
        yield Case(key=spec(f, scale_dtype="float32"), value=spec(f, scale_dtype="bfloat16"), lengths=LENGTHS)
    for f in INTEGERS:
        for d in (64, 80, 96, 256):
            yield Case(
                **both(f, PerGroup(d // 2) if d in (64, 256) else PerToken()), lengths=(1000, 70), head_dim=d, tail=20
            )
        for group in (1, 2, 8, 12, 16):
            yield Case(**both(f), lengths=(1000, 70), group=group, tail=20, dtype=torch.float16)
        for options in (
            {"window": 300, "tail": 20},
            {"crop": 13},
            {"softcap": 20.0, "tail": 20},
            {"page_size": 256, "tail": 20},
            {"page_size": 32, "tail": 20},
        ):
            yield Case(**both(f), lengths=(1000, 70), **options)
        yield Case(**both(f), lengths=(1000, 70), num_queries=5, tail=20, group=3, window=500)
        yield Case(**both(f), lengths=(700, 130), num_queries=64, tail=20, group=4)
    tiers = {"lengths": LENGTHS, "tail": 20, "sinks": 4, "young": True}
    for d in (64, 80, 128, 256):
        yield Case(**TIERED, **tiers, head_dim=d)
    for options in (
        {"window": 300},
        {"crop": 13},
        {"softcap": 20.0},
        {"page_size": 128},
        {"page_size": 32},
        {"group": 16},
        {"num_queries": 5, "group": 3},
        {"dtype": torch.float16, "group": 1},
    ):
        yield Case(**TIERED, **tiers, **options)
    yield Case(**both("int4"), **tiers)
    yield Case(**both("int4", PerGroup(32), symmetric=False), **tiers, group=8)
    yield Case(**both("int4", center="channel"), **tiers)
    yield Case(key=spec("int4", PerChannel(), static=True, symmetric=False), value=spec("int4", PerChannel()), **tiers)
    yield Case(key=spec("int3"), value=spec("int4", symmetric=False), **tiers)
    for name in ("klt4", "klt3", "klt2"):
        klt = {"key": schemes.get(name).key, "value": schemes.get(name).value}
        for d in (64, 128, 256):
            fitted = schemes.get(name, head_dim=d)
            yield Case(key=fitted.key, value=fitted.value, lengths=LENGTHS, head_dim=d, tail=64, sinks=4)
        for group in (1, 2, 3, 8, 12, 16):
            yield Case(**klt, lengths=(1000, 70), group=group, tail=20, dtype=torch.float16)
        for options in (
            {"window": 300, "tail": 20},
            {"crop": 13},
            {"softcap": 20.0, "tail": 20},
            {"page_size": 128},
            {"page_size": 32},
            {"num_queries": 5, "group": 3},
            {"magnitude": 50.0},
            {"first": 131_000},
        ):
            yield Case(**klt, lengths=(1000, 70), **options)
    yield Case(key=spec("int8"), value=spec("int4"), lengths=LENGTHS)
    yield Case(
        key=spec("int4", PerChannel(), symmetric=False),
        value=spec("int2", PerGroup(32), symmetric=False),
        lengths=LENGTHS,
    )


def check(call, q, plan, limit=LIMIT):
    positions = plan.q_positions.long().cpu()
    plan.out.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    out, lse = plan.run(q)
    want, want_lse = reference.attend(q, call, positions, torch.float64)
    assert relative_error(out, want) < limit
    finite = torch.isfinite(want_lse)
    torch.testing.assert_close(torch.isfinite(lse), finite)
    # A score's error is that of q in float16 next to its size: scores of 1000 are off by tenths, of banded keys of 8
    # bits by more.
    np.testing.assert_allclose(lse[finite].double().cpu(), want_lse[finite].cpu(), rtol=2e-3, atol=1e-2)
    return out.clone()


@needs_gpu
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_agrees_with_float64(case):
    call, q, _ = build(case, "cuda")
    plan = cuda.Plan(call, q.shape[2], q.dtype, q.device, num_queries=case.num_queries)
    first = check(call, q, plan)
    assert torch.equal(first, plan.run(q)[0]), "two runs give the same bits"


@needs_gpu
@pytest.mark.parametrize("columns", [24, 32])
@pytest.mark.parametrize(
    "case",
    [
        Case(**TIERED, lengths=(700, 0, 333), tail=20, sinks=4, young=True, num_queries=40),
        Case(**both("int8"), lengths=(700, 333), tail=20, num_queries=11, group=5, window=300),
        Case(
            **both("int4", PerGroup(32), symmetric=False), lengths=(700, 333), num_queries=11, head_dim=64, softcap=20.0
        ),
    ],
    ids=str,
)
def test_more_than_two_column_tiles_share_their_queries(case, columns, monkeypatch):
    monkeypatch.setattr(cuda, "columns", lambda *_: columns)
    call, q, _ = build(case, "cuda")
    check(call, q, cuda.Plan(call, q.shape[2], q.dtype, q.device, num_queries=case.num_queries))


@needs_gpu
def test_tiers_take_a_launch_for_each_format():
    call, q, strides = build(Case(**TIERED, lengths=LENGTHS, tail=20, sinks=4, young=True, layers=3), "cuda")
    assert len(call.parts) == 4
    plan = cuda.Plan(call, q.shape[2], q.dtype, q.device, layer_strides=tuple(strides))
    assert plan.explain().count("blocks of") == 2 and "int4/int4 pages (and raw ones)" in plan.explain()
    want = check(call, q, plan)
    assert torch.equal(plan.run(q, layer=2)[0], want), "all layers of these pools hold the same bytes"


@needs_gpu
def test_formats_mix_in_one_call_and_padding_sees_nothing():
    one, q, _ = build(Case(**both("int8"), lengths=(640, 256), sinks=4), "cuda", seed=1)
    two, _, _ = build(Case(**both("int4"), lengths=(640, 256)), "cuda", seed=2)
    later = [
        Part(p.store, PageTable(p.table.indptr, p.table.page_ids, p.table.starts + 1000, p.table.lengths))
        for p in two.parts
    ]
    call = AttendCall((*one.parts, *later), one.scaling)
    plan = cuda.Plan(call, q.shape[2], q.dtype, q.device)
    check(call, q, plan)
    plan.run(q, torch.tensor([[-1], [1500]], device="cuda"))
    assert (plan.out[0] == 0).all() and torch.isinf(plan.lse[0]).all() and torch.isfinite(plan.lse[1]).all()


@needs_gpu
def test_layers_lie_side_by_side_and_graphs_replay():
    case = Case(**both("int4"), lengths=(500, 900), tail=30, layers=3)
    call, q, strides = build(case, "cuda")
    plan = cuda.Plan(call, q.shape[2], q.dtype, q.device, layer_strides=tuple(strides))
    want = check(call, q, plan)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        plan.run(q, layer=2)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, layer=2)
    plan.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(plan.out, want), "all layers of this pool hold the same bytes"


@needs_gpu
@pytest.mark.parametrize("launches", [1, 3])
def test_pages_written_by_the_kernel_just_ahead_are_read_as_they_are(launches):
    """The ring is filled before the kernel waits for the one ahead of it, which must have ended by then: every launch
    sees what was copied before it.
    """
    call, q, _ = build(Case(**both("int8"), lengths=(320, 4096), heads=8), "cuda")
    target, ids = call.parts[0].store.slabs[0], torch.from_numpy(call.parts[0].table.page_ids).cuda()
    contents = [target.clone(), target.clone()]
    contents[1][ids] = target[ids.roll(1)]
    plan = cuda.Plan(call, q.shape[2], q.dtype, q.device)
    want = []
    for bytes_ in contents:
        target.copy_(bytes_)
        torch.cuda.synchronize()
        want.append(plan.run(q)[0].clone())
    got = []
    for i in range(200):
        target.copy_(contents[i % 2])
        for _ in range(launches):
            out, _ = plan.run(q)
        got.append(out.clone())
    torch.cuda.synchronize()
    assert not torch.equal(*want)
    assert all(torch.equal(x, want[i % 2]) for i, x in enumerate(got))


@needs_gpu
def test_a_single_unit_spread_over_the_whole_chip():
    case = Case(**both("int2"), lengths=(64 * 3000,), heads=1, group=1)
    call, q, _ = build(case, "cuda")
    check(call, q, cuda.Plan(call, 1, q.dtype, q.device))


@needs_gpu
def test_pools_past_two_to_the_31_and_contexts_past_65535_pages():
    layout = PageLayout(**both("int2", PerToken()), page_size=32, num_kv_heads=1, head_dim=64)
    pages = 70_000
    slab = torch.randint(0, 256, (pages, 30, 1, layout.head_bytes), dtype=torch.uint8, device="cuda")
    assert slab.numel() > 2**31
    for name in ("k_scale", "v_scale"):
        s = layout.sections[name]
        slab[..., s.offset : s.offset + s.nbytes] = torch.full((32,), 0.1, dtype=torch.float16).view(torch.uint8).cuda()
    last = slab[:, 29]
    table = PageTable(
        np.array([0, pages]),
        np.random.permutation(pages).astype(np.int64),
        np.arange(pages, dtype=np.int64) * 32,
        np.full(pages, 32, np.int32),
    )
    call = AttendCall((Part(PageStore(layout, (last,)), table),), 0.125)
    q = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16, device="cuda")
    # random codes average out, so the result is small next to its terms
    check(call, q, cuda.Plan(call, 2, q.dtype, q.device), limit=2e-2)


@needs_gpu
def test_wrong_queries_are_refused():
    call, q, _ = build(Case(**both("int8"), lengths=(100,)), "cuda")
    plan = cuda.Plan(call, q.shape[2], q.dtype, q.device)
    for bad in (q.half(), q[..., :64], q[:, :, :4], q.cpu()):
        with pytest.raises(DataError, match="the plan is for"):
            plan.run(bad)
    wide = torch.empty(*q.shape[:-1], q.shape[-1] + 1, dtype=q.dtype, device="cuda")[..., :-1]
    with pytest.raises(DataError, match="contiguous"):
        plan.run(wide)
    with pytest.raises(UnsupportedError, match="float32"):
        cuda.Plan(call, q.shape[2], torch.float32, q.device)


@pytest.mark.parametrize("heads, dtype", list(itertools.product((3, 8), ("bfloat16", "float32"))))
def test_refusals_need_no_gpu(heads, dtype):
    call, q, _ = build(Case(**both("int8"), lengths=(100,)), "cpu")
    why = cuda.refuses_call(call, heads, dtype)
    assert (why is None) == (heads == 8 and dtype == "bfloat16")
    assert "cpu" in cuda.refuses(q, call)
