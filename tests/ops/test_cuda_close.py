"""GPU close stores bit for bit what the reference stores. Needs an NVIDIA GPU (refusals do not).

The judge runs on the CPU; that the reference stores the same bytes on either device has a test of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from messages import raises
from ops.cpu_cases import static_of

from kvbits.errors import DataError
from kvbits.ops.cuda import close as cuda
from kvbits.ops.cuda.families import family_of
from kvbits.ops.reference import close as reference
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
HEADS = 3
RAW = QuantSpec.raw()


def spec(fmt, granularity=PerGroup(64), **options):  # noqa: B008
    return QuantSpec(format=fmt, granularity=granularity, **options)


def pairs():
    for f in ("int8", "int4", "int3", "int2"):
        yield spec(f), spec(f), 128, 64
        yield spec(f, PerChannel(), symmetric=False), spec(f, PerToken(), symmetric=False), 128, 64
        yield spec(f, center="channel"), spec(f, PerGroup(32), center="channel"), 128, 64
        yield spec(f, PerToken()), spec(f, PerChannel()), 80, 32
        yield spec(f, scale_dtype="bfloat16"), spec(f, symmetric=False, scale_dtype="float32"), 128, 64
        yield spec(f, PerToken()), spec(f), 256, 64
        yield spec(f, PerToken()), spec(f, PerToken()), 96, 128
    yield spec("fp8_e4m3"), spec("fp8_e5m2", PerToken()), 128, 64
    yield spec("fp8_e5m2", PerChannel()), spec("fp8_e4m3", PerChannel()), 64, 64
    yield RAW, RAW, 128, 64
    yield RAW, spec("int4"), 128, 64
    yield spec("int4", PerChannel(), static=True), spec("int8", static=True, symmetric=False), 128, 64


def ugly(n, page, d, dtype):
    """Random values of many sizes with a zero page, a constant one, a zero channel, tiny values and an outlier."""
    k, v = (torch.randn(n, HEADS, page, d) * 10 ** float(np.random.uniform(-3, 2)) + torch.randn(d) for _ in "kv")
    k[0, 0], v[1, 1], k[2, 0, :, 5], k[3, 1, 3, 7] = 0, 3.5, 0, 300
    v[2, 2] *= 1e-4
    return k.to(dtype), v.to(dtype)


def clamped(k, v, store, ids) -> dict[str, int]:
    """Closes pages of good numbers. How many elements of quantized keys and values were clamped."""
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=k.device)
    cuda.close(k, v, store, ids, status=status)
    found, sides = status.tolist(), (("k", store.layout.key), ("v", store.layout.value))
    assert not any(found[2:])
    return {kind: n for n, (kind, spec) in zip(found, sides, strict=False) if not spec.is_raw}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("key, value, head_dim, page_size", list(pairs()), ids=str)
def test_stores_what_the_reference_stores(key, value, head_dim, page_size, dtype):
    layout = PageLayout(
        key=key, value=value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim, raw_dtype="bfloat16"
    )
    k, v = ugly(5, page_size, head_dim, dtype)
    static = static_of(layout)
    want, saturated = reference.close_pages(k, v, layout, static)
    slab = torch.full((7, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    store = PageStore(layout, (slab,), {name: x.cuda() for name, x in static.items()})
    ids = np.array([4, 0, 6, 2, 3])
    assert clamped(k.cuda(), v.cuda(), store, ids) == saturated
    for name, s in layout.sections.items():
        assert torch.equal(
            slab[ids][..., s.offset : s.offset + s.nbytes].cpu(), want[..., s.offset : s.offset + s.nbytes]
        ), name
    assert torch.equal(slab[ids].cpu(), want), "padding is zero"
    assert (slab[[1, 5]] == 0xFF).all(), "other pages stay as they were"


@needs_gpu
@pytest.mark.parametrize("key, value, head_dim, page_size", list(pairs()), ids=str)
def test_the_reference_stores_the_same_on_either_device(key, value, head_dim, page_size):
    layout = PageLayout(
        key=key, value=value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim, raw_dtype="bfloat16"
    )
    k, v = ugly(5, page_size, head_dim, torch.bfloat16)
    static = static_of(layout)
    want, _ = reference.close_pages(k, v, layout, static)
    got, _ = reference.close_pages(k.cuda(), v.cuda(), layout, {name: x.cuda() for name, x in static.items()})
    assert torch.equal(got.cpu(), want)


@needs_gpu
def test_bad_input_is_named():
    layout = PageLayout(key=spec("int8"), value=spec("int8"), page_size=64, num_kv_heads=HEADS, head_dim=128)
    store = PageStore(layout, (torch.zeros(2, HEADS, layout.head_bytes, dtype=torch.uint8, device="cuda"),))
    good = torch.randn(1, HEADS, 64, 128, device="cuda")
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = good.clone()
        bad[0, 2, 5, 7] = value
        with raises(DataError, "values", value, "(0, 2, 5, 7)"):
            cuda.close(good, bad, store, np.array([0]))
    with raises(DataError, "keys", "float16"):
        cuda.close(good * 1e7, good, store, np.array([1]))
    with raises(DataError, "v", "[1, 3, 64, 128]", "[1, 2, 64, 128]"):
        cuda.close(good, good[:, :2], store, np.array([1]))
    assert clamped(good[:0], good[:0], store, np.zeros(0, np.int64)) == {"k": 0, "v": 0}


@needs_gpu
def test_strided_input_needs_no_copy():
    layout = PageLayout(key=spec("int4"), value=spec("int4"), page_size=64, num_kv_heads=HEADS, head_dim=128)
    # tokens before heads, keys and values side by side
    fused = torch.randn(2, 64, 2 * HEADS, 128, dtype=torch.bfloat16, device="cuda")
    k, v = fused[:, :, :HEADS].transpose(1, 2), fused[:, :, HEADS:].transpose(1, 2)
    slab = torch.zeros(2, HEADS, layout.head_bytes, dtype=torch.uint8, device="cuda")
    cuda.close(k, v, PageStore(layout, (slab,)), np.array([0, 1]))
    assert torch.equal(slab.cpu(), reference.close_pages(k.cpu(), v.cpu(), layout)[0])


def test_refusals_need_no_gpu():
    layout = PageLayout(
        key=spec("int4", PerGroup(20)), value=spec("int4", PerToken()), page_size=64, num_kv_heads=1, head_dim=80
    )
    assert "20 channels" in family_of(layout).refuses("close", layout, dtype=torch.bfloat16)
    assert "float64" in family_of(layout).refuses("close", layout, dtype=torch.float64)
    store = PageStore(layout, (torch.zeros(1, 1, layout.head_bytes, dtype=torch.uint8),))
    assert "GPU" in cuda.refuses(torch.zeros(1, 1, 64, 80), store)
