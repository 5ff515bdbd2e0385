"""Scales and codes: errors stay inside derived bounds, for hypothesis's inputs and for a fixed list of ugly ones."""

import itertools

import bounds
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from messages import raises

from kvbits.errors import DataError, SpecError
from kvbits.quant.qparams import QParams, choose_qparams, dequantize, expand, quantize, require_finite
from kvbits.spec import PerChannel, PerGroup, PerTensor, PerToken, QuantSpec

U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
DIMENSIONS = (32, 16)  # tokens of a page, head_dim


def all_dynamic_specs():
    for fmt, granularity, symmetric, dtype, center in itertools.product(
        ("int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2"),
        (PerToken(), PerGroup(8), PerChannel()),
        (True, False),
        U,
        (None, "channel"),
    ):
        try:
            yield QuantSpec(format=fmt, granularity=granularity, symmetric=symmetric, scale_dtype=dtype, center=center)
        except SpecError:
            continue


SPECS = list(all_dynamic_specs())


def spec_id(s):
    return f"{s.format}-{type(s.granularity).__name__}-{'sym' if s.symmetric else 'asym'}-{s.scale_dtype}-{s.center}"


def derived_bound(x, spec, qparams):
    """Largest allowed |x - x'|, from the storage formats alone (not from `bounds.plain`).

    Half a step; at the far end, where the rounded scale may be too small by one unit roundoff u, q_max * u steps more;
    float32 arithmetic of x - bias, of the product with the reciprocal and of the decoded sum: a few 2**-24 of the
    numbers met on the way.
    """
    scale = expand(qparams.scale, spec, x.shape[-1]).double()
    bias = 0.0 if qparams.bias is None else expand(qparams.bias, spec, x.shape[-1]).double().abs()
    mean = 0.0 if qparams.mean is None else qparams.mean.double().abs().unsqueeze(-2)
    arithmetic = 2.0**-22 * (x.double().abs() + bias + mean) + 2.0**-148
    if spec.number_format.kind == "int":
        return scale * (0.5 + spec.q_max * (U[spec.scale_dtype] + 2.0**-22)) + arithmetic
    mantissa, smallest = {"fp8_e4m3": (3, 2.0**-9), "fp8_e5m2": (2, 2.0**-16)}[spec.format]
    centred = x.double() - (0.0 if qparams.mean is None else qparams.mean.double().unsqueeze(-2))
    half_step = torch.maximum(centred.abs() * 2.0 ** -(mantissa + 1), scale * smallest / 2)
    return half_step + scale * spec.q_max * U[spec.scale_dtype] + arithmetic * 2


def roundtrip(x, spec):
    qparams = choose_qparams(x, spec)
    codes, outside = quantize(x, spec, qparams)
    saturated = int(outside.sum())
    return qparams, codes, saturated, dequantize(codes, spec, qparams, torch.float64)


def check(x, spec):
    try:
        qparams, codes, saturated, decoded = roundtrip(x, spec)
    except DataError as error:
        assert "overflows" in str(error)
        return
    assert torch.isfinite(qparams.scale).all()
    assert (qparams.scale > 0).all()
    assert torch.isfinite(decoded).all()
    for p in (qparams.scale, qparams.bias, qparams.mean):
        assert p is None or torch.equal(p.to(getattr(torch, spec.scale_dtype)).float(), p), (
            "parameters are rounded to storage before codes are taken"
        )
    if spec.number_format.kind == "int":
        low, high = spec.code_range
        assert codes.min() >= low
        assert codes.max() <= high
    error = (x.double() - decoded).abs()
    bound = derived_bound(x, spec, qparams)
    assert (error <= bound).all(), f"error {error.max()} where {bound.flatten()[(error - bound).argmax()]} is allowed"
    normal = x.double().abs() > 2.0**-120
    assert (
        error[normal]
        <= bounds.plain(spec, qparams, x.shape[-1]).double().expand(x.shape)[normal]
        + 2.0**-21 * x.double().abs()[normal]
    ).all()
    if spec.scale_dtype == "float16" and spec.number_format.kind == "int":
        assert saturated == 0, "scales taken from the data itself clamp nothing"


UGLY = {
    "zeros": lambda: torch.zeros(DIMENSIONS),
    "negative zeros": lambda: -torch.zeros(DIMENSIONS),
    "ones": lambda: torch.ones(DIMENSIONS),
    "constant that float16 cannot hold": lambda: torch.full(DIMENSIONS, 1000.3),
    "negative constant": lambda: torch.full(DIMENSIONS, -0.1),
    "one outlier": lambda: torch.randn(DIMENSIONS).index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(900.0)),
    "one element": lambda: torch.zeros(DIMENSIONS).index_put_((torch.tensor(31), torch.tensor(15)), torch.tensor(-7.0)),
    "zero row and column": (
        lambda: torch.randn(DIMENSIONS).index_fill_(0, torch.tensor(2), 0.0).index_fill_(1, torch.tensor(9), 0.0)
    ),
    "float32 denormals": lambda: torch.randn(DIMENSIONS) * 1e-40,
    "float32 denormals beside zeros": lambda: torch.zeros(DIMENSIONS).index_fill_(1, torch.tensor(4), 1e-40),
    "float16 denormals": lambda: torch.randn(DIMENSIONS) * 1e-7,
    "below every float16": lambda: torch.randn(DIMENSIONS) * 1e-12,
    "float16's largest": lambda: torch.full(DIMENSIONS, 65504.0) * torch.randn(DIMENSIONS).sign(),
    "past float16": lambda: torch.randn(DIMENSIONS) * 1e6,
    "float32's largest": lambda: torch.full(DIMENSIONS, 3.4e38) * torch.randn(DIMENSIONS).sign(),
    "large offset, small spread": lambda: 500 + 0.01 * torch.randn(DIMENSIONS),
    "large offset per channel": lambda: torch.linspace(-300, 300, 16) + torch.randn(DIMENSIONS),
    "halves": lambda: torch.arange(-256, 256).view(DIMENSIONS) / 2,
    "bfloat16 values": lambda: torch.randn(DIMENSIONS).bfloat16().float(),
    "mixed magnitudes": lambda: torch.randn(DIMENSIONS) * torch.logspace(-8, 4, 512).view(DIMENSIONS),
}


@pytest.mark.parametrize("name", UGLY)
def test_ugly_inputs_stay_inside_the_derived_bound_in_every_format(name):
    x = UGLY[name]()
    for spec in SPECS:
        check(x, spec)


_floats = (
    st.floats(-70000, 70000, width=32)
    | st.floats(-1, 1, width=32)
    | st.sampled_from([0.0, 1e-40, -1e-40, 6e-8, 2.0**-14, 448.0, 464.0, 65504.0])
)


@given(st.sampled_from(SPECS), hnp.arrays(np.float32, DIMENSIONS, elements=_floats, fill=_floats))
def test_any_input_stays_inside_the_derived_bound(spec, x):
    check(torch.from_numpy(x), spec)


@given(st.integers(0, 2**32 - 1), st.floats(-12, 6), st.floats(-3, 3))
@example(0, 0.0, 0.0)
def test_random_groups_stay_inside_the_bound_of_rule_10(seed, scale_power, offset_power):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(DIMENSIONS, generator=generator) + 10.0**offset_power) * 10.0**scale_power
    for fmt, dtype in itertools.product(("int8", "int4", "int2"), U):
        spec = QuantSpec(format=fmt, granularity=PerGroup(8), symmetric=False, scale_dtype=dtype)
        check(x, spec)


# -- rounding, zeros, constants ---------------------------------------------------------------------------------------


def test_halves_round_to_even():
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 127.0] * 2).repeat(32, 1)
    _, codes, _, _ = roundtrip(x, QuantSpec(granularity=PerGroup(8)))  # scale is exactly 1
    assert (codes[0, :8].int() - 128).tolist() == [-2, -2, 0, 0, 2, 2, 4, 127]
    x = torch.tensor([0.5, 1.5, 2.5, 13.5, 14.5, 0.0, 15.0, 7.5] * 2).repeat(32, 1)
    _, codes, _, _ = roundtrip(x, QuantSpec(format="int4", granularity=PerGroup(8), symmetric=False))
    assert codes[0, :8].tolist() == [0, 2, 2, 14, 14, 0, 15, 8]


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_zero_groups_store_the_smallest_scale_and_decode_to_zero(spec):
    qparams, codes, saturated, decoded = roundtrip(torch.zeros(DIMENSIONS), spec)
    assert (qparams.scale == {"float16": 2.0**-24}.get(spec.scale_dtype, 2.0**-126)).all()
    assert not decoded.any()
    assert saturated == 0
    assert (codes == spec.zero).all()


@pytest.mark.parametrize("value", [1.0, -2.0, 0.5, -1024.0, 2.0**-14])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.has_bias or s.center], ids=spec_id)
def test_constant_groups_decode_exactly(spec, value):
    qparams, _, saturated, decoded = roundtrip(torch.full(DIMENSIONS, value), spec)
    assert (qparams.scale == (2.0**-24 if spec.scale_dtype == "float16" else 2.0**-126)).all()
    assert (decoded == value).all()
    assert saturated == 0


def test_the_extremes_of_a_group_get_the_extreme_codes():
    x = torch.linspace(-1, 1, 16).repeat(32, 1)
    for fmt, low, high in (("int8", 1, 255), ("int4", 1, 15), ("int3", 1, 7), ("int2", 1, 3)):
        _, codes, _, _ = roundtrip(x, QuantSpec(format=fmt, granularity=PerToken()))
        assert (int(codes.min()), int(codes.max())) == (low, high)
        _, codes, _, _ = roundtrip(x, QuantSpec(format=fmt, granularity=PerToken(), symmetric=False))
        assert (int(codes.min()), int(codes.max())) == (0, high)


def test_quantizing_decoded_values_again_changes_no_code():
    x = torch.randn(DIMENSIONS)
    for spec in SPECS:
        if spec.center or spec.has_bias or spec.number_format.kind == "float":
            continue
        qparams, codes, _, decoded = roundtrip(x, spec)
        again, _ = quantize(decoded.float(), spec, qparams)
        assert torch.equal(again, codes)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_pages_are_quantized_independently_of_their_neighbours(spec):
    x = torch.randn(3, 2, *DIMENSIONS)
    together = roundtrip(x, spec)
    for i, j in itertools.product(range(3), range(2)):
        assert torch.equal(roundtrip(x[i, j], spec)[1], together[1][i, j])


@pytest.mark.parametrize("granularity", [PerToken(), PerGroup(8), PerChannel()])
def test_scale_shapes_are_those_of_the_spec(granularity):
    spec = QuantSpec(granularity=granularity, symmetric=False)
    qparams = choose_qparams(torch.randn(5, 2, *DIMENSIONS), spec)
    assert qparams.scale.shape == (5, 2, *spec.scale_shape(*DIMENSIONS))
    assert qparams.bias.shape == qparams.scale.shape


def test_only_the_group_of_an_outlier_loses_precision():
    x = torch.randn(DIMENSIONS)
    x[3, 5] = 1000.0
    hit = {
        PerToken(): x.new_zeros(DIMENSIONS).index_fill_(0, torch.tensor(3), 1),
        PerChannel(): x.new_zeros(DIMENSIONS).index_fill_(1, torch.tensor(5), 1),
    }
    hit[PerGroup(8)] = x.new_zeros(DIMENSIONS)
    hit[PerGroup(8)][3, :8] = 1
    for granularity, where in hit.items():
        decoded = roundtrip(x, QuantSpec(granularity=granularity))[3]
        error = (decoded - x).abs()
        assert error[where == 0].max() < 0.02
        assert error[where == 1].max() > 0.5


# -- static scales, saturation, fp8 ------------------------------------------------------------------------------------


def test_saturation_is_counted_with_static_scales():
    spec = QuantSpec(format="int8", granularity=PerTensor(), static=True)
    x = torch.zeros(1, *DIMENSIONS)
    x[0, 0, :6] = torch.tensor([127.0, 127.49, 127.51, -127.0, -127.51, 1e6])
    known = QParams(torch.ones(1, 1))
    assert choose_qparams(x, spec, known) == known
    codes, outside = quantize(x, spec, known)
    saturated = int(outside.sum())
    assert saturated == 3
    assert (codes[0, 0, :6].int() - 128).tolist() == [127, 127, 127, -127, -127, 127]


def test_asymmetric_static_scales_saturate_at_both_ends():
    spec = QuantSpec(format="int4", granularity=PerGroup(8), static=True, symmetric=False)
    known = QParams(torch.ones(1, 2), torch.full((1, 2), -2.0))
    x = torch.full((1, *DIMENSIONS), 0.0)
    x[0, 0, :4] = torch.tensor([-2.0, -3.0, 13.0, 14.0])
    codes, outside = quantize(x, spec, known)
    saturated = int(outside.sum())
    assert codes[0, 0, :4].tolist() == [0, 0, 15, 15]
    assert saturated == 2


def test_static_scales_differ_by_head_and_group_or_channel():
    x = torch.randn(3, 2, *DIMENSIONS)
    for granularity, shape in ((PerTensor(), (2, 1)), (PerGroup(8), (2, 2)), (PerChannel(), (2, 16))):
        spec = QuantSpec(granularity=granularity, static=True)
        assert (2, *spec.scale_shape(*DIMENSIONS)) == shape
        scale = torch.rand(shape) + 0.1
        codes, _ = quantize(x, spec, QParams(scale))
        per_channel = scale.repeat_interleave(16 // shape[1], 1)[None, :, None, :]
        assert torch.equal(codes.int() - 128, (x * per_channel.reciprocal()).round().clamp(-127, 127).int())


def test_missing_calibration_is_refused_with_the_way_out():
    with raises(DataError, "int8", "static=False"):
        choose_qparams(torch.zeros(DIMENSIONS), QuantSpec(static=True))


def test_fp8_codes_are_torchs_own_bytes_and_saturation_is_counted():
    for fmt, dtype, top, past in (
        ("fp8_e4m3", torch.float8_e4m3fn, 448.0, 464.0),
        ("fp8_e5m2", torch.float8_e5m2, 57344.0, 61440.0),
    ):
        spec = QuantSpec(format=fmt, granularity=PerTensor(), static=True)
        x = torch.randn(1, *DIMENSIONS) * top / 4
        x[0, 0, :4] = torch.tensor([top, past * 0.999, past, -past * 2])
        codes, outside = quantize(x, spec, QParams(torch.ones(1, 1)))
        saturated = int(outside.sum())
        assert torch.equal(codes, x.clamp(-top, top).to(dtype).view(torch.uint8))
        assert saturated == int((x.abs() >= past).sum())
        decoded = dequantize(codes, spec, QParams(torch.ones(1, 1)))
        assert torch.isfinite(decoded).all()
        assert decoded[0, 0, :4].tolist() == [top, top, top, -top]


def test_every_finite_fp8_code_decodes_to_torchs_value():
    codes = torch.arange(256, dtype=torch.uint8)
    for fmt, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        spec = QuantSpec(format=fmt, granularity=PerTensor(), static=True)
        decoded = dequantize(codes.view(1, 16, 16), spec, QParams(torch.full((1, 1), 0.5)), torch.float64).flatten()
        assert torch.equal(decoded.nan_to_num(), (codes.view(dtype).double() * 0.5).nan_to_num())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [s for s in SPECS if s.scale_dtype == "float16"], ids=spec_id)
def test_a_parameter_past_float16_is_refused_with_its_magnitude(spec):
    with raises(DataError, "float16", "scale_dtype='float32'", "bfloat16"):
        choose_qparams(torch.randn(DIMENSIONS) * 3e10, spec)


def test_the_largest_scale_float16_holds_is_taken():
    x = torch.full(DIMENSIONS, 65504.0 * 127)
    qparams, _, saturated, decoded = roundtrip(x, QuantSpec(granularity=PerToken()))
    assert (qparams.scale == 65504).all()
    assert torch.equal(decoded, x.double())
    assert saturated == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_elements_are_named_with_position_and_count(bad):
    x = torch.zeros(2, 3, 4)
    require_finite(x, "x")
    x[1, 2, 3] = bad
    x[1, 2, 2] = bad
    with raises(DataError, "keys", "layer 3", bad, "(1, 2, 2)", "2 of 24", "bfloat16"):
        require_finite(x, "keys of layer 3")
