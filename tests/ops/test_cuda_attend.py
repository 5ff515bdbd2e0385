"""GPU attention against the float64 reference over the same bytes. Needs an NVIDIA GPU.

The bound: queries come in and results leave in 16 bits (2**-8 or 2**-11), weights and their products with value scales
are float16; 5e-3 covers it for results of attention over random keys, whose weights do not cancel.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from messages import mentions, raises
from ops.cuda_cases import Call, Case, make, relative_error

from kvbits import schemes
from kvbits.errors import DataError, UnsupportedError
from kvbits.ops.cuda import attend as attend_cuda
from kvbits.ops.cuda.engine.shape import FOLD_COLUMNS
from kvbits.ops.cuda.families.plain.family import Plain
from kvbits.ops.types import PageStore, Table
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


def tables():
    """Yield what tables may hold: pages that were dropped or cut, slabs of a pool; and what queries may be: many,
    given.
    """
    ragged = {"lengths": LENGTHS, "tail": 20, "sinks": 3}
    klt4, nuq4 = ({"key": s.key, "value": s.value} for s in map(schemes.get, ("klt4", "nuq4-1%")))
    for formats in (both("int8", center="channel"), klt4, nuq4, TIERED):
        young = {"young": formats is TIERED}
        yield Case(**formats, **ragged, **young, spans=True, slabs=3)
        yield Case(**formats, **ragged, **young, spans=True, crop=13, window=300, num_queries=9, group=1)
        yield Case(**formats, **ragged, **young, slabs=2, num_queries=9, group=2)
    yield Case(**both("int4"), **ragged, slabs=2, num_queries=512, window=100)
    yield Case(**TIERED, **ragged, young=True, num_queries=512, softcap=20.0)
    yield Case(key=RAW, value=RAW, lengths=LENGTHS, num_queries=64, slabs=3, spans=True, sinks=4)


def limits(case: Case) -> dict[str, float]:
    """Return the largest errors of a case's results and log-sum-exps, as `check` takes them.

    Trellis keys of up to four query columns are multiplied with whole numbers of 16 bits. Some fields of key bytes keep
    ten of these (banded_queries.cuh). A score is then off by about 2**-9 of the spread of all scores. Keys of magnitude
    1 spread them by 1.5. Keys of magnitude 50 spread them by 70, so exponents of 2 and results are off by tens of
    times as much.
    """
    if case.key.is_trellis and case.magnitude > 1 and case.group * case.num_queries <= FOLD_COLUMNS:
        return {"limit": 10 * LIMIT, "lse_limit": 1e-2 * case.magnitude}
    return {}


def check(call: Call, plan=None, limit=LIMIT, lse_limit=1e-2):
    """Compare what a plan returns for a call with float64, and return it. Without a plan, make and update one."""
    plan = plan or call.plan()
    want, want_lse = call.want()
    out = torch.full_like(want, torch.nan, dtype=call.q.dtype)
    lse = torch.full_like(want_lse, torch.nan, dtype=torch.float32)
    assert plan.run(call.q, 0, out=out, lse=lse) is out
    assert relative_error(out, want) < limit
    finite = torch.isfinite(want_lse)
    torch.testing.assert_close(torch.isfinite(lse), finite)
    # A score's error is that of q in float16 next to its size: scores of 1000 are off by tenths.
    np.testing.assert_allclose(lse[finite].double().cpu(), want_lse[finite].cpu(), rtol=2e-3, atol=lse_limit)
    return out


@needs_gpu
@pytest.mark.parametrize("case", [*cases(), *tables()], ids=str)
def test_agrees_with_float64(case):
    call = make(case, "cuda")
    plan = call.plan()
    first = check(call, plan, **limits(case))
    assert torch.equal(first, plan.run(call.q, 0)), "two runs give the same bits"


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
    monkeypatch.setattr(Plain, "columns", lambda *_: columns)
    check(make(case, "cuda"))


@needs_gpu
def test_tiers_take_a_launch_for_each_format():
    call = make(Case(**TIERED, lengths=LENGTHS, tail=20, sinks=4, young=True, layers=3), "cuda")
    assert len(call.stores) == 4
    plan = call.plan()
    lines = plan.explain().splitlines()
    assert len(lines) == 2 and mentions(lines[0], "int4/int4", "raw") and "raw" not in lines[1]
    want = check(call, plan)
    assert torch.equal(plan.run(call.q, 2), want), "all layers of these pools hold the same bytes"


@needs_gpu
def test_formats_mix_in_one_call_and_padding_sees_nothing():
    call = make(Case(**both("int8"), lengths=(640, 256), sinks=4), "cuda", seed=1)
    two = make(Case(**both("int4"), lengths=(640, 256)), "cuda", seed=2)
    call.stores += two.stores
    call.pools += two.pools
    call.tables += [dataclasses.replace(t, starts=t.starts + 1000) for t in two.tables]
    call.positions = two.positions + 1000
    plan = call.plan()
    check(call, plan)
    plan.update(call.tables, positions=torch.tensor([[-1], [1500]], dtype=torch.int32, device="cuda"))
    lse = torch.zeros(call.q.shape[:3], device="cuda")
    out = plan.run(call.q, 0, lse=lse)
    assert (out[0] == 0).all() and torch.isinf(lse[0]).all() and torch.isfinite(lse[1]).all()


@needs_gpu
@pytest.mark.parametrize("young", [False, True], ids=["one launch", "two launches"])
def test_graphs_of_updates_and_runs_read_what_stands_there_at_replay(young):
    """An update and the runs of three layers are captured at some lengths, and replayed at others."""
    call = make(Case(**TIERED, lengths=(500, 900), tail=30, layers=3, young=young), "cuda")
    plan = call.plan()
    want = check(call, plan)
    outs = [torch.zeros_like(want) for _ in range(3)]
    tokens = [t.tokens.clone() for t in call.tables]
    graph = torch.cuda.CUDAGraph()
    for t in call.tables:
        t.tokens.fill_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.update(call.tables)
        for layer, out in enumerate(outs):
            plan.run(call.q, layer, out=out)
    for t, n in zip(call.tables, tokens, strict=True):
        t.tokens.copy_(n)
    free = torch.cuda.memory_allocated()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs), "all layers of this pool hold the same bytes"
    plan.update(call.tables)
    plan.run(call.q, 1, out=outs[0])
    assert torch.cuda.memory_allocated() == free


@needs_gpu
@pytest.mark.parametrize("launches", [1, 3])
def test_pages_written_by_the_kernel_just_ahead_are_read_as_they_are(launches):
    """The ring is filled before the kernel waits for the one ahead of it, which must have ended by then: every launch
    sees what was copied before it.
    """
    call = make(Case(**both("int8"), lengths=(320, 4096), heads=8), "cuda")
    target = call.stores[0].slabs[0]
    ids = torch.cat(
        [row[: -(-int(n) // 64)] for row, n in zip(call.tables[0].pages, call.tables[0].tokens, strict=True)]
    ).long()
    contents = [target.clone(), target.clone()]
    contents[1][ids] = target[ids.roll(1)]
    plan = call.plan()
    want = []
    for bytes_ in contents:
        target.copy_(bytes_)
        torch.cuda.synchronize()
        want.append(plan.run(call.q, 0).clone())
    got = []
    for i in range(200):
        target.copy_(contents[i % 2])
        for _ in range(launches):
            out = plan.run(call.q, 0)
        got.append(out.clone())
    torch.cuda.synchronize()
    assert not torch.equal(*want)
    assert all(torch.equal(x, want[i % 2]) for i, x in enumerate(got))


@needs_gpu
def test_a_single_unit_spread_over_the_whole_chip():
    check(make(Case(**both("int2"), lengths=(64 * 3000,), heads=1, group=1), "cuda"))


@needs_gpu
def test_pools_past_two_to_the_31_and_contexts_past_65535_pages():
    layout = PageLayout(**both("int2", PerToken()), page_size=32, num_kv_heads=1, head_dim=64)
    pages = 70_000
    slab = torch.randint(0, 256, (pages, 30, 1, layout.head_bytes), dtype=torch.uint8, device="cuda")
    assert slab.numel() > 2**31
    for name in ("k_scale", "v_scale"):
        s = layout.sections[name]
        slab[..., s.offset : s.offset + s.nbytes] = torch.full((32,), 0.1, dtype=torch.float16).view(torch.uint8).cuda()
    table = Table(
        torch.randperm(pages).int().cuda()[None], torch.full((1,), 32 * pages, dtype=torch.int32, device="cuda")
    )
    q = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16, device="cuda")
    options = {"scaling": 0.125, "sliding_window": None, "softcap": None}
    last = torch.tensor([[32 * pages - 1]], dtype=torch.int32, device="cuda")
    call = Call([PageStore(layout, (slab[:, 29],))], [table], q, last, options, [slab[:, 29:]])
    # random codes average out, so the result is small next to its terms
    check(call, limit=2e-2)


@needs_gpu
def test_wrong_queries_are_refused():
    call = make(Case(**both("int8"), lengths=(100,)), "cuda")
    plan, q = call.plan(), call.q
    for bad in (q.half(), q[..., :64], q[:, :, :4], q.cpu()):
        with raises(DataError, [*q.shape]):
            plan.run(bad)
    wide = torch.empty(*q.shape[:-1], q.shape[-1] + 1, dtype=q.dtype, device="cuda")[..., :-1]
    with raises(DataError, "contiguous"):
        plan.run(wide)
    with raises(UnsupportedError, "float32"):
        call.plan(dtype=torch.float32)


@pytest.mark.parametrize("heads, dtype", list(itertools.product((3, 8), (torch.bfloat16, torch.float32))))
def test_refusals_need_no_gpu(heads, dtype):
    layout = PageLayout(**both("int8"), page_size=64, num_kv_heads=1, head_dim=128)
    assert (attend_cuda.refuses_kernel([layout], heads, dtype, 1) is None) == (dtype == torch.bfloat16)
    options = {"num_q_heads": heads, "dtype": dtype, "num_queries": 1, "device": torch.device("cpu")}
    assert "cpu" in attend_cuda.refuses([layout], options | {"past_only": False})


def test_more_parts_than_a_launch_takes_are_refused():
    layout = PageLayout(**both("int8"), page_size=64, num_kv_heads=1, head_dim=128)
    assert "5 parts" in attend_cuda.refuses_kernel([layout] * 5, 4, torch.bfloat16, 1)
    raw = [PageLayout(key=RAW, value=RAW, page_size=64, num_kv_heads=1, head_dim=128, raw_dtype=x) for x in DTYPES]
    assert "dtype" in attend_cuda.refuses_kernel(raw, 4, torch.bfloat16, 1)


DTYPES = ("bfloat16", "float16")
