"""The paper's matrix operations on the CPU against the reference and against the paper's scalar listings."""

from __future__ import annotations

import pytest
import torch
from messages import raises

from kvbits.errors import DataError, SpecError
from studies.int8_paper import cpu, reference

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"{cpu.unavailable()}")
SHAPES = [(1, 1), (3, 5), (64, 64), (257, 100), (1000, 96), (5000, 257), (0, 8)]


def matrix(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns) * torch.rand(columns).mul(4).exp()
    if columns > 4 and rows:
        x[:, 2] = 0
        x[0, 3] = 1e30
        x[:, 4] *= 1e-38
    return x


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_same_as_reference(tier, shape):
    x = matrix(*shape)
    scales = cpu.compute_scales(x)
    assert torch.equal(scales, reference.compute_scales(x))
    q = cpu.quantize(x, scales)
    assert torch.equal(q, reference.quantize(x, scales))
    assert torch.equal(cpu.dequantize(q, scales), reference.dequantize(q, scales))


@pytest.mark.parametrize("kernel", ["column_outer", "row_order"])
def test_baselines_agree_within_one_code(kernel):
    x = matrix(3000, 65)
    x[:, 4] = 1
    scales = cpu.compute_scales(x)
    assert torch.equal(cpu.compute_scales(x, kernel=kernel), scales)
    difference = (cpu.quantize(x, scales, kernel=kernel).int() - cpu.quantize(x, scales).int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() < 1e-4
    q = cpu.quantize(x, scales)
    assert torch.equal(cpu.dequantize(q, scales, kernel=kernel), cpu.dequantize(q, scales))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_groups_same_as_reference(tier, bits, size):
    x = torch.randn(100, 256) * torch.randn(100, 1).exp()
    x[3, :128] = 0
    codes, scales = cpu.quantize_groups(x, size, bits)
    want_codes, want_scales = reference.quantize_groups(x, size, bits)
    assert torch.equal(scales, want_scales) and torch.equal(codes, want_codes)


def test_outputs_can_be_given():
    x = matrix(64, 64)
    scales, out = cpu.compute_scales(x), torch.empty(64, 64, dtype=torch.int8)
    assert cpu.quantize(x, scales, out=out) is out


def test_no_rows():
    x = torch.zeros(0, 8)
    assert torch.equal(cpu.compute_scales(x), torch.ones(8))
    assert cpu.quantize(x, torch.ones(8)).shape == (0, 8)


def test_bad_input_is_refused():
    x = matrix(8, 64)
    with raises(DataError, "torch.float32", "[rows, columns]", "torch.float64"):
        cpu.compute_scales(x.double())
    with raises(DataError, "scales", "torch.float32", "[64]", "[63]"):
        cpu.quantize(x, torch.ones(63))
    with raises(DataError, "out", "torch.int8", "[8, 64]", "[8, 63]"):
        cpu.quantize(x, torch.ones(64), out=torch.empty(8, 63, dtype=torch.int8))
    with raises(DataError, "out", "contiguous", "(1, 8)"):
        cpu.quantize(x, torch.ones(64), out=torch.empty(64, 8, dtype=torch.int8).T)
    with raises(SpecError, "'slow'", "fast", "column_outer", "row_order"):
        cpu.compute_scales(x, kernel="slow")
    with raises(SpecError, "groups of 24", "multiple of 16"):
        cpu.quantize_groups(x, 24)


@pytest.mark.parametrize("rows", [0, 8])
def test_matrices_without_columns(rows):
    x, none = torch.zeros(rows, 0), torch.zeros(0)
    calls = [lambda: cpu.quantize_groups(x, 64), lambda: cpu.quantize_groups(x, 16, 4)]
    for kernel in cpu.KERNELS:
        calls.append(lambda kernel=kernel: cpu.compute_scales(x, kernel=kernel))
        calls.append(lambda kernel=kernel: cpu.quantize(x, none, kernel=kernel))
        calls.append(lambda kernel=kernel: cpu.dequantize(x.to(torch.int8), none, kernel=kernel))
    for call in calls:
        with raises(DataError, f"[{rows}, 0]", "1 column"):
            call()


def test_matrices_without_rows_are_empty():
    x = torch.zeros(0, 64)
    for kernel in cpu.KERNELS:
        scales = cpu.compute_scales(x, kernel=kernel)
        assert torch.equal(scales, torch.ones(64))
        assert cpu.dequantize(cpu.quantize(x, scales, kernel=kernel), scales, kernel=kernel).shape == (0, 64)
    for bits, width in ((8, 64), (4, 32)):
        codes, scales = cpu.quantize_groups(x, 16, bits)
        assert codes.shape == (0, width) and scales.shape == (0, 4)
