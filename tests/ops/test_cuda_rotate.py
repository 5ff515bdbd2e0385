"""Queries and keys times a Hadamard matrix on a GPU, and the kernel run on a CPU, against the matrix product in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ops.emulated_op import DEVICES, emulate

from kvbits.errors import DataError
from kvbits.ops.cuda import rotate
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile


@pytest.fixture(params=DEVICES)
def device(request, tmp_path, monkeypatch):
    if request.param == "cpu":
        emulate(rotate, "rotate", tmp_path, monkeypatch)
    return request.param


def hadamard(n: int) -> torch.Tensor:
    """Sylvester's matrix of signs, element by element: -1 where the numbers of row and column have an odd number of bits in common."""
    return torch.tensor([[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(n)] for i in range(n)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", rotate.MATRIX_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, heads, kv_heads, tokens", [(128, 7, 2, 3), (64, 4, 4, 5), (256, 2, 1, 1)])
def test_it_is_the_matrix_product(device, dtype, head_dim, heads, kv_heads, tokens):
    gen = torch.Generator().manual_seed(head_dim)
    rows = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=gen).to(dtype)  # as a projection leaves them
    q, k = rows[:, :heads].to(device), rows[:, heads : heads + kv_heads].to(device)
    found = rotate.rotate(q, k)
    signs, bits = hadamard(head_dim), head_dim.bit_length() - 1
    for x, y, exponent in zip((q, k), found, (bits - bits // 2, bits // 2), strict=True):
        want = x.cpu().double() @ signs * 2.0**-exponent
        assert y.dtype == dtype and y.is_contiguous() and y.shape == x.shape
        torch.testing.assert_close(y.cpu().double(), want, rtol=2**-8 if dtype == torch.bfloat16 else 2**-11, atol=1e-5)
    scores = torch.einsum("nhd,nd->nh", found[0].cpu().double(), found[1][:, 0].cpu().double())
    plain = torch.einsum("nhd,nd->nh", q.cpu().double(), k[:, 0].cpu().double())
    torch.testing.assert_close(scores, plain, rtol=0, atol=0.3 if dtype == torch.bfloat16 else 0.05)


def test_rows_at_any_address(device):
    rows = torch.randn(3, 3, 65, generator=torch.Generator().manual_seed(0)).half().to(device)[..., 1:]
    dense = rows.contiguous()
    for x, y in zip(rotate.rotate(rows[:, :2], rows[:, 2:]), rotate.rotate(dense[:, :2], dense[:, 2:]), strict=True):
        assert torch.equal(x, y)


def test_fewer_queries_than_keys(device):
    """A prompt's queries are not needed where it has no history."""
    rows = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).half().to(device)
    q, k = rotate.rotate(rows[:, :2], rows[:, 2:])
    for n in (0, 2):
        fewer, same = rotate.rotate(rows[:n, :2], rows[:, 2:])
        assert torch.equal(fewer, q[:n]) and torch.equal(same, k)


def test_nothing_to_rotate(device):
    q, k = rotate.rotate(torch.empty(0, 4, 64, dtype=torch.float16, device=device), torch.empty(0, 2, 64, dtype=torch.float16, device=device))
    assert q.shape == (0, 4, 64) and k.shape == (0, 2, 64)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(DataError, match=r"q is \[2, 4, 64\] torch.float16 and k \[2, 2, 128\]"):
        rotate.rotate(torch.zeros(2, 4, 64).half(), torch.zeros(2, 2, 128).half())
    assert "not on a GPU" in rotate.refuses(128, torch.float16, torch.device("cpu"))
    assert "float32 of head_dim 128" in rotate.refuses(128, torch.float32, torch.device("cuda"))
    assert "head_dim 80" in rotate.refuses(80, torch.float16, torch.device("cuda"))


def test_it_compiles_without_spills():
    if why := cuda_compile.missing():
        pytest.skip(why)
    binary = cuda_compile.compile_source(Path(rotate.__file__).parent, "rotate.cu", rotate.defines(256, torch.bfloat16), "sm_90")
    if "Compiling entry function" not in binary.log:
        pytest.skip("this NVRTC does not say what kernels use")
    resources = binary.resources("rotate")
    assert resources.spill_bytes == 0 and resources.registers <= 40
