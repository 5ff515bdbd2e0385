"""The paper's unit-test subjects on the GPU kernels: hand-computed scales, rounding, variants identical, within a code
of the CPU, edge shapes, stress.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from messages import raises

from kvbits.errors import DataError, SpecError
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from studies.int8_paper import cuda, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
PRINTED = ("naive", "tiled", "coarsened", "vectorized")
SHAPES = [(1, 1), (1, 4), (2, 4), (63, 127), (1000, 96), (257, 1030), (5, 8192)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATTERNS = {
    "random": lambda shape: torch.rand(shape) * 2 - 1,
    "zeros": torch.zeros,
    "ones": torch.ones,
    "alternating": (
        lambda shape: (torch.arange(shape[0])[:, None] + torch.arange(shape[1])).remainder(2).float() * 2 - 1
    ),
}


def scales_of(x):
    largest = x.float().abs().amax(0)
    return torch.where(largest > 0, largest / 127, torch.ones_like(largest))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_kernel_agrees_with_the_reference(pattern, shape, dtype):
    x = PATTERNS[pattern](shape).to(dtype)
    if shape[1] > 2:
        x[:, 2] = 0
    scales = scales_of(x)
    for kernel in cuda.SCALE_KERNELS:
        assert torch.equal(cuda.compute_scales(x.cuda(), kernel=kernel).cpu(), scales)
    want = reference.quantize(x.float(), scales)
    q = cuda.quantize(x.cuda(), scales.cuda())
    assert torch.equal(q.cpu(), want)
    both = cuda.quantize_with_scales(x.cuda())
    assert torch.equal(both[0], q) and torch.equal(both[1].cpu(), scales)
    printed = [cuda.quantize(x.cuda(), scales.cuda(), kernel=k) for k in PRINTED]
    assert all(torch.equal(p, printed[0]) for p in printed)
    assert int((printed[0].cpu().int() - want.int()).abs().max()) <= 1
    back = reference.dequantize(want, scales).to(dtype)
    for kernel in cuda.KERNELS:
        assert torch.equal(cuda.dequantize(q, scales.cuda(), kernel=kernel, dtype=dtype).cpu(), back)


@needs_gpu
def test_hand_computed_codes_and_error_bound():
    x = torch.tensor([[1.27, -2.54, 0.0], [0.635, 1.28, 0.0]], device="cuda")
    scales = cuda.compute_scales(x)
    torch.testing.assert_close(scales.cpu(), torch.tensor([0.01, 0.02, 1.0]))
    # 63.5 is on the edge in decimal only
    assert cuda.quantize(x, scales).tolist() in ([[127, -127, 0], [64, 64, 0]], [[127, -127, 0], [63, 64, 0]])
    wide = torch.rand(4096, 512, device="cuda") * 2 - 1
    q, s = cuda.quantize_with_scales(wide)
    assert float((cuda.dequantize(q, s) - wide).abs().max()) <= 1 / 254 * 1.0001


@needs_gpu
def test_stress_and_round_trip_metrics():
    x = torch.randn(131072, 256, device="cuda")
    q, scales = cuda.quantize_with_scales(x)
    error = cuda.dequantize(q, scales) - x
    assert float(error.abs().max()) <= float(scales.max()) * 0.5001
    same = x - x
    assert float(same.norm()) == 0 and float(same.abs().max()) == 0


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns, size", [(1, 32, 16), (100, 256, 64), (7, 192, 48), (1000, 2048, 128), (0, 64, 32)]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_same_as_reference(bits, rows, columns, size, dtype):
    x = (torch.randn(rows, columns) * torch.randn(rows, 1).exp()).to(dtype)
    x[3:4, :size] = 0
    codes, scales = cuda.quantize_groups(x.cuda(), size, bits)
    want_codes, want_scales = reference.quantize_groups(x.float(), size, bits)
    assert torch.equal(scales.cpu(), want_scales) and torch.equal(codes.cpu(), want_codes)
    with raises(SpecError, "groups of 24", "multiple of 16"):
        cuda.quantize_groups(x.cuda(), 24, bits)


@needs_gpu
def test_wrong_calls_are_refused():
    x = torch.zeros(4, 4, device="cuda")
    with raises(DataError, "torch.float32", "contiguous"):
        cuda.quantize(x.t()[:, :2], torch.ones(2, device="cuda"))
    with raises(SpecError, "'magic'", "fast"):
        cuda.quantize(x, torch.ones(4, device="cuda"), kernel="magic")
    with raises(SpecError, "quantize_naive", "kernel='fast'", 524288):
        cuda.quantize(torch.zeros(65_536 * 8, 1, device="cuda"), torch.ones(1, device="cuda"), kernel="naive")


def test_refusals_need_no_gpu():
    assert "NVIDIA GPU" in cuda.refuses(torch.zeros(1, 1))


@pytest.mark.skipif(cuda_compile.missing() is not None, reason=f"{cuda_compile.missing()}")
@pytest.mark.parametrize("columns", [128, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_without_spills(dtype, columns, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    binary = cuda_compile.compile_source(
        cuda_compile.Source(Path(cuda.__file__).parent, "matrix.cu", cuda.defines(dtype, columns)), "sm_90"
    )
    if "Compiling entry function" not in binary.log:
        pytest.skip("this NVRTC does not say what kernels use")
    names = [f"{what}_{k}" for what in ("quantize", "dequantize") for k in cuda.PRINTED]
    for name in (
        *names,
        "quantize",
        "dequantize",
        "column_maxima",
        "scales_of_maxima",
        "scales_warp",
        "quantize_groups",
    ):
        assert binary.resources(name).spill_bytes == 0
