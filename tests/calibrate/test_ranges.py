"""Streamed percentiles equal those of all the data at once, whatever the chunks; scales are those the quantizer would
choose.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises

from kvbits.calibrate import Ranges
from kvbits.errors import DataError, SpecError
from kvbits.quant.qparams import QParams, dequantize, quantize
from kvbits.spec import PerChannel, PerGroup, PerTensor, PerToken, QuantSpec

GRANULARITIES = [PerTensor(), PerGroup(8), PerGroup(16), PerChannel()]
FORMATS = [
    ("nuq4", False),
    ("int8", True),
    ("int8", False),
    ("int4", True),
    ("int4", False),
    ("fp8_e4m3", True),
    ("fp8_e5m2", True),
]
H, D = 3, 16


def static(granularity, fmt="int8", symmetric=True, scale_dtype="float32"):
    return QuantSpec(format=fmt, granularity=granularity, symmetric=symmetric, scale_dtype=scale_dtype, static=True)


def by_group(x, granularity):
    """[H, groups, elements] of everything at once, written apart from the code under test."""
    if isinstance(granularity, PerTensor):
        return x.reshape(1, 1, -1).expand(H, 1, -1)
    size = granularity.size if isinstance(granularity, PerGroup) else 1
    return torch.stack([torch.stack([x[:, h, g : g + size].reshape(-1) for g in range(0, D, size)]) for h in range(H)])


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("percentile", [90, 99, 99.9, 99.99, 100])
@pytest.mark.parametrize("symmetric", [True, False])
def test_streamed_ranges_are_torch_quantiles_of_all_tokens(granularity, percentile, symmetric):
    x = torch.randn(157, H, D).exp() * torch.randn(157, H, D)
    r = Ranges(static(granularity, symmetric=symmetric), H, D, 157, percentile)
    for chunk in x.split(13):
        r.add(chunk)
    groups = by_group(x, granularity).double()
    if symmetric:
        expected = [torch.quantile(groups.abs(), percentile / 100, dim=-1)]
    else:
        expected = [torch.quantile(groups, q, dim=-1) for q in ((100 - percentile) / 200, (100 + percentile) / 200)]
    for found, e in zip(r.ranges(), expected, strict=True):
        # The two interpolate between neighbours in another order: float32 rounding of the result, and of the position.
        torch.testing.assert_close(found.double(), e, rtol=1e-6, atol=1e-6)


@given(st.data())
def test_chunks_do_not_matter(data):
    n = data.draw(st.integers(1, 60))
    spare = data.draw(st.integers(0, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    spec = static(data.draw(st.sampled_from(GRANULARITIES)), symmetric=data.draw(st.booleans()))
    percentile = data.draw(st.sampled_from([90, 97.5, 99.9, 100]))
    x = torch.randn(n, H, D, generator=torch.Generator().manual_seed(n))
    whole, parts = (Ranges(spec, H, D, n + spare, percentile) for _ in range(2))
    whole.add(x)
    for a, b in zip([0, *cuts], [*cuts, n], strict=True):
        parts.add(x[a:b])
    exact = Ranges(spec, H, D, n, percentile)
    exact.add(x)
    for a, b, c in zip(whole.ranges(), parts.ranges(), exact.ranges(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_a_hundred_percent_is_the_maximum():
    x = torch.randn(50, H, D)
    r = Ranges(static(PerChannel()), H, D, 50, 100)
    r.add(x)
    assert torch.equal(r.ranges()[0], x.abs().amax(0))
    assert r.tail_length == 1 or r.tails[0].shape[-1] <= 2


def test_memory_is_a_thousandth_of_the_tokens():
    r = Ranges(static(PerGroup(8)), H, D, 10_000, 99.9)
    for _ in range(10):
        r.add(torch.randn(1000, H, D))
    assert r.tails[0].numel() <= 10_000 * H * D / 1000 + 2 * H * D // 8


@pytest.mark.parametrize(("fmt", "symmetric"), FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_scales_have_the_stores_shape_and_cover_the_range(fmt, symmetric, granularity):
    x = torch.randn(64, H, D) + 3 * (not symmetric)
    spec = static(granularity, fmt, symmetric, "float16")
    r = Ranges(spec, H, D, 64, 100)
    r.add(x)
    found = r.qparams()
    assert set(found) == ({"scale"} if symmetric else {"scale", "bias"})
    for t in found.values():
        assert t.shape == (H, spec.num_groups(D)) and t.dtype == torch.float32
        assert torch.equal(t, t.half().float())  # rounded to the storage dtype
    pages = x.transpose(0, 1)  # [H, tokens, D]
    params = QParams(found["scale"], found.get("bias"))
    if spec.has_codebook:
        params = dataclasses.replace(params, codebook=torch.linspace(-1, 1, 2**spec.bits).expand(H, -1))
    codes, outside = quantize(pages, spec, params)
    assert not outside.any()
    step = (
        found["scale"].max()
        * {"int": 1, "float": spec.number_format.max_value / 4, "codebook": 1 / 7}[spec.number_format.kind]
    )
    assert (dequantize(codes, spec, params) - pages).abs().max() <= step


def test_clipping_the_outliers_shrinks_the_scale():
    x = torch.randn(2000, H, D)
    x[7] *= 1000
    scales = []
    for percentile in (99, 100):
        r = Ranges(static(PerGroup(16)), H, D, 2000, percentile)
        r.add(x)
        scales.append(r.qparams()["scale"].max())
    assert scales[0] < scales[1] / 100


@pytest.mark.parametrize("value", [0.0, 2.5, -1.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_constant_data_has_usable_scales(value, symmetric):
    spec = static(PerGroup(8), symmetric=symmetric)
    r = Ranges(spec, H, D, 5, 99.9)
    x = torch.full((5, H, D), value)
    r.add(x)
    found = r.qparams()
    assert bool((found["scale"] > 0).all())
    params = QParams(found["scale"], found.get("bias"))
    assert torch.allclose(
        dequantize(quantize(x.transpose(0, 1), spec, params)[0], spec, params), x.transpose(0, 1), rtol=1e-6
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_range_without_spread_takes_the_largest_scale(symmetric):
    """Text to come may leave it, and a smallest scale would clamp that."""
    x = torch.randn(20, H, D)
    x[:, 1, 3] = 0.5 * (not symmetric)
    r = Ranges(static(PerChannel(), symmetric=symmetric), H, D, 20, 100)
    r.add(x)
    scale = r.qparams()["scale"]
    assert scale[1, 3] == scale.max() and scale.min() < scale.max()


def test_bfloat16_tokens_are_measured_as_they_are():
    x = torch.randn(20, H, D).bfloat16()
    r = Ranges(static(PerChannel()), H, D, 20, 100)
    r.add(x)
    assert torch.equal(r.ranges()[0], x.float().abs().amax(0))


@pytest.mark.parametrize("percentile", [89.9, 100.1, -1, 0, float("nan")])
def test_percentiles_out_of_range_are_refused(percentile):
    with raises(SpecError, 90, 100):
        Ranges(static(PerChannel()), H, D, 5, percentile)


def test_bad_input_is_refused():
    with raises(SpecError, "static=True"):
        Ranges(QuantSpec(format="int8", granularity=PerToken()), H, D, 5)
    r = Ranges(static(PerChannel()), H, D, 5, what="keys of layer 3")
    with raises(DataError, "keys", "layer 3"):
        r.ranges()
    with raises(DataError, "keys", "layer 3", "(2, 16)", "[tokens, 3, 16]"):
        r.add(torch.zeros(2, D))
    with raises(DataError, "6 tokens", "max_tokens=5"):
        r.add(torch.zeros(6, H, D))
    with raises(DataError, "keys", "layer 3", "nan", "(1, 0, 2)"):
        bad = torch.zeros(3, H, D)
        bad[1, 0, 2] = torch.nan
        r.add(bad)
    r.add(torch.zeros(0, H, D))
    assert r.num_tokens == 0
