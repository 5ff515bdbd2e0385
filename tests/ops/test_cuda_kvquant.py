"""KVQuant's formats on a GPU: the kernel that reads them packed and the unpacked rows, against the float64 reference
over the same bytes.

Bounds: keys become float16 operands after scale, bias and turn, each rounded once (2**-11 of the largest part), where
other formats multiply exact codes; 5e-3 of attention's output covers it as long as scores are of ordinary size.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from messages import mentions
from ops.cuda_cases import Case, make, relative_error
from ops.test_cuda_attend import check

from kvbits import schemes
from kvbits.literature.kvquant import format as codebook_format
from kvbits.ops.cuda import attend as attend_cuda
from kvbits.ops.cuda import unpack
from kvbits.ops.reference.attend import PageList
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
NAMES = [f"nuq{bits}{listed}" for bits in (4, 3, 2) for listed in ("-1%", "")]
LENGTHS = (1000, 64, 0, 333, 2500)


def of(name, **changes):
    s = schemes.get(name)
    return {"key": s.key, "value": s.value} | changes


def static(name):
    """With calibrated ranges, which stretch tokens that have more outliers than are listed."""
    s = schemes.get(name)
    return {"key": dataclasses.replace(s.key, static=True), "value": s.value}


def direct():
    for name in NAMES:
        yield Case(**of(name), lengths=LENGTHS, tail=64, sinks=1)
        yield Case(**of(name), lengths=LENGTHS, head_dim=64, tail=20, dtype=torch.float16)
        yield Case(**static(name), lengths=(1000, 70), tail=20)
        yield Case(**static(name), lengths=(1000, 70), head_dim=64, tail=20)
    for magnitude in (1e-3, 50.0):
        yield Case(**of("nuq3-1%"), lengths=(1000, 70), magnitude=magnitude)
    for group in (1, 2, 3, 5, 8, 12, 16):
        yield Case(**of("nuq4-1%"), lengths=(1000, 70), group=group, tail=20)
        yield Case(**of("nuq2-1%"), lengths=(1000, 70), group=group, head_dim=64)
    for options in (
        {"window": 300, "tail": 20},
        {"crop": 13},
        {"softcap": 20.0, "tail": 20},
        {"num_queries": 5, "tail": 20, "group": 3},
    ):
        yield Case(**of("nuq3-1%"), lengths=(1000, 70), **options)
    key, value = of("nuq4-1%").values()
    for changed in ({"pre_rope": False}, {"symmetric": True}, {"outliers": 0.05}, {"outliers": 0.002}):
        yield Case(key=dataclasses.replace(key, **changed), value=value, lengths=(1000, 70))
    for changed in ({"symmetric": True}, {"outliers": 0.05}, {"outliers": 0.0}, {"format": "nuq2"}):
        yield Case(key=key, value=dataclasses.replace(value, **changed), lengths=(1000, 70))
    integers = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False, static=True, pre_rope=True)
    yield Case(key=integers, value=QuantSpec(format="int3", granularity=PerToken()), lengths=(1000, 70), tail=20)
    yield Case(
        key=dataclasses.replace(integers, format="int2", symmetric=True), value=value, lengths=(1000, 70), tail=20
    )


def unpacked():
    """Layouts that no kernel reads packed."""
    key, value = of("nuq4-1%").values()
    yield Case(key=key, value=dataclasses.replace(value, granularity=PerGroup(64)), lengths=(1000, 70), tail=20)
    yield Case(
        key=dataclasses.replace(key, format="int8", outliers=0.01),
        value=dataclasses.replace(value, granularity=PerGroup(32)),
        lengths=(1000, 70),
        sinks=1,
    )
    yield Case(key=key, value=value, lengths=(1000, 70), head_dim=80)
    yield Case(key=key, value=value, lengths=(1000, 70), head_dim=256)
    yield Case(key=key, value=value, lengths=(1000, 70), page_size=32, tail=10)
    yield Case(
        key=dataclasses.replace(key, scale_dtype="float32"),
        value=dataclasses.replace(value, scale_dtype="bfloat16"),
        lengths=(1000, 70),
    )


def readable(call):
    """Return whether a kernel reads the pages of a call packed."""
    layouts = [store.layout for store in call.stores]
    return attend_cuda.refuses_kernel(layouts, call.q.shape[2], call.q.dtype, call.q.shape[1]) is None


@needs_gpu
@pytest.mark.parametrize("case", list(direct()), ids=str)
def test_packed_pages_agree_with_float64(case):
    call = make(case, "cuda")
    assert readable(call)
    plan = call.plan()
    first = check(call, plan)
    assert torch.equal(first, plan.run(call.q, 0)), "two runs give the same bits"


@needs_gpu
@pytest.mark.parametrize("offset", [100_003, 1_000_000])
def test_far_positions(offset):
    """The same pages later in longer sequences: starts are part of what pages of turned keys mean."""
    call = make(Case(**of("nuq4-1%"), lengths=(640, 130), tail=2), "cuda")
    call.tables = [dataclasses.replace(t, starts=t.starts + offset) for t in call.tables]
    call.positions += offset
    check(call)


@needs_gpu
@pytest.mark.parametrize("case", list(unpacked()), ids=str)
def test_layouts_without_a_kernel_of_their_own_are_unpacked(case):
    call = make(case, "cuda")
    assert not readable(call)
    plan = call.plan(past_only=True)
    assert "unpacked" in plan.explain()
    lse = torch.zeros(call.q.shape[:3], device="cuda")
    out = plan.run(call.q, 0, lse=lse)
    want, want_lse = call.want()
    assert relative_error(out, want) < 1e-2  # keys and values rounded to bfloat16, as 16-bit attention has them
    torch.testing.assert_close(lse.double(), want_lse, rtol=5e-3, atol=5e-2)


@needs_gpu
@pytest.mark.parametrize("case", [*list(direct())[:12], *unpacked()], ids=str)
def test_unpacked_rows_are_the_reference_rounded_once(case):
    call = make(case, "cuda")
    store, layout = call.stores[0], call.stores[0].layout
    pages = PageList.of(call.tables[0], layout.page_size)
    starts, lengths = pages.starts + 100_003, pages.lengths
    ends = np.cumsum(lengths)
    rows = torch.from_numpy(np.stack([ends - lengths, lengths], 1).astype(np.int32)).cuda()
    keys, values = (
        torch.full((ends[-1], layout.num_kv_heads, layout.head_dim), float("nan"), dtype=torch.float16, device="cuda")
        for _ in "kv"
    )
    ids, at = (torch.from_numpy(x.astype(np.int32)).cuda() for x in (pages.page_ids, starts))
    unpack.Rows(layout, torch.float16, ids, rows, at).run(store, keys, values)
    for got, want in zip(
        (keys, values),
        dequantize_pages(store.gather(pages.page_ids), layout, store.static, torch.float64, starts=starts),
        strict=True,
    ):
        want = torch.cat([w[:, :n] for w, n in zip(want, lengths, strict=True)], 1).transpose(0, 1)
        torch.testing.assert_close(got.double(), want, rtol=2.0**-10, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize("name", ["nuq4-1%", "nuq2-1%"])
def test_the_reference_closes_the_same_pages_on_either_device(name):
    layout = PageLayout(**of(name), page_size=64, num_kv_heads=2, head_dim=64)
    static = make(Case(**of(name), lengths=(64,), head_dim=64), "cpu").stores[0].static
    k, v = torch.randn(2, 5, 2, 64, 64)
    starts = np.arange(5) * 64 + 1
    want = close_pages(k, v, layout, static, starts)[0]
    got = close_pages(k.cuda(), v.cuda(), layout, {n: x.cuda() for n, x in static.items()}, starts)[0]
    a, b = (
        dequantize_pages(want, layout, static, starts=starts),
        dequantize_pages(got.cpu(), layout, static, starts=starts),
    )
    for x, y, original in zip(a, b, (k, v), strict=True):
        assert relative_error(x, y) < 1e-2 and relative_error(y, original) < 1.1 * relative_error(x, original), (
            "sines differ in the last bit, ties go either way"
        )


def test_refusals_say_what_is_missing():
    key, value = of("nuq4-1%").values()

    def why(**changes):
        return codebook_format.refuses(
            PageLayout(**{"key": key, "value": value, "page_size": 64, "num_kv_heads": 2, "head_dim": 128} | changes)
        )

    assert why() is None
    assert "head_dim=80" in why(head_dim=80)
    assert "page_size=32" in why(page_size=32)
    assert "scale per channel" in why(key=dataclasses.replace(key, granularity=PerGroup(32)))
    assert "scale per token" in why(value=dataclasses.replace(value, granularity=PerGroup(32)))
    assert mentions(why(value_head_dim=64), "128 channels", 64)
    assert "16 levels" in why(key=QuantSpec(format="int8", granularity=PerChannel(), static=True, pre_rope=True))
    assert "float32" in why(value=dataclasses.replace(value, scale_dtype="float32"))
