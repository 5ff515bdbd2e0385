"""A chunk attending to itself: every backend against a float64 dense softmax, in bounded memory, and who serves it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from dense_model import dense_attention
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions, raises
from nightly import at_night
from ops.cuda_cases import relative_error

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError, SpecError
from kvbits.ops import chunk_attention
from kvbits.ops.cpu import attend_fresh as cpu
from kvbits.ops.cuda import attend_fresh as cuda
from kvbits.ops.reference import attend_fresh as reference
from kvbits.spec import CacheSpec, LayerGeometry

DIM = 16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def chunk(batch=1, tokens=40, heads=2, group=2, dtype=torch.float32, dim=DIM):
    return tuple(torch.randn(batch, tokens, h, dim).to(dtype) for h in (heads * group, heads, heads))


def serving(softcap):
    """Backends that take a chunk on the CPU."""
    return [cpu.attend_fresh, reference.attend_fresh] if softcap is None else [reference.attend_fresh]


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 12),
    st.none() | st.integers(1, 14),
    st.sampled_from([None, 3.0]),
    st.data(),
)
def test_a_chunk_matches_dense_softmax_with_padding_window_and_softcap(heads, group, tokens, window, softcap, data):
    batch = data.draw(st.integers(1, 3))
    before = [data.draw(st.sampled_from([0, 0, 7])) for _ in range(batch)]
    valid = torch.tensor([[data.draw(st.integers(0, 3)) > 0 for _ in range(tokens)] for _ in range(batch)])
    positions = (torch.tensor(before)[:, None] + valid.long().cumsum(1) - 1).masked_fill(~valid, -1)
    q, k, v = chunk(batch, tokens, heads, group)
    for attend_fresh in serving(softcap):
        out, lse = attend_fresh(q, k, v, positions, 0.3, window, softcap)
        for b in range(batch):
            ranks = [p - before[b] if p >= 0 else -1 for p in positions[b].tolist()]
            want = dense_attention(q[b], k[b, valid[b]], v[b, valid[b]], ranks, 0.3, window, softcap)
            torch.testing.assert_close(out[b].double(), want[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(lse[b].double(), want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", ["none", "left", "scattered", "a whole sequence"])
@pytest.mark.parametrize("window", [None, 1, 50, 109, 110])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_blocks_and_cuts_of_any_size_are_one_attention(window, softcap, padding, monkeypatch):
    """Blocks far smaller than by default, and chunks past the size up to which sequences are one call."""
    tokens = 110
    monkeypatch.setattr(cpu, "WINDOW_ROWS", 21)
    monkeypatch.setattr(cpu, "MASKED", 64)
    monkeypatch.setattr(reference, "ROWS", 24)
    q, k, v = chunk(3, tokens, 3, 2)
    valid = torch.ones(3, tokens, dtype=torch.bool)
    if padding == "left":
        valid[1, :37] = False
    elif padding == "scattered":
        valid[1:] = torch.rand(2, tokens) > 0.2
    elif padding == "a whole sequence":
        valid[1], valid[2, 100:] = False, False
    positions = (valid.long().cumsum(1) - 1).masked_fill(~valid, -1)
    bad = ~valid[..., None, None]
    q, k, v = (x.masked_fill(bad, torch.nan) for x in (q, k, v))  # what padding holds is not read
    want = [
        dense_attention(q[b], k[b, valid[b]], v[b, valid[b]], positions[b].tolist(), 0.3, window, softcap)
        for b in range(3)
    ]
    for together, scores in ((64, 1 << 11), (64, 1 << 30), (512, 1 << 13), (512, 1 << 30)):
        monkeypatch.setattr(chunk_attention, "TOGETHER", together)
        monkeypatch.setitem(reference.SCORES, "cpu", scores)
        judged = [(1e-12, reference.attend_fresh(q, k, v, positions, 0.3, window, softcap, torch.float64))]
        judged += [(1e-5, attend_fresh(q, k, v, positions, 0.3, window, softcap)) for attend_fresh in serving(softcap)]
        for atol, found in judged:
            for x, of_sequence in zip(found, zip(*want, strict=True), strict=True):
                torch.testing.assert_close(x.double(), torch.stack(of_sequence), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("attend_fresh", [cpu.attend_fresh, reference.attend_fresh])
def test_a_half_precision_chunk_has_results_as_precise_as_its_kernel(attend_fresh, padding, window, dtype):
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in chunk(dtype=dtype))
    positions = torch.cat([torch.arange(40), torch.full((padding,), -1)])[None]
    out, lse = (x[:, :40] for x in attend_fresh(q, k, v, positions, 0.3, window, None))
    assert (out.dtype, lse.dtype) == (dtype if attend_fresh is cpu.attend_fresh else torch.float32, torch.float32)
    want = dense_attention(*(x[0, :40] for x in (q, k, v)), list(range(40)), 0.3, window)
    torch.testing.assert_close(out[0].double(), want[0], rtol=0, atol=3 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse[0].double(), want[1], rtol=0, atol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("attend_fresh", [cpu.attend_fresh, reference.attend_fresh])
def test_tensors_of_any_strides_are_read_as_they_are(attend_fresh, window, group):
    q, k, v = (torch.randn(DIM, 1, 40, h).permute(1, 2, 3, 0) for h in (2 * group, 2, 2))
    positions = torch.arange(40)[None]
    want = attend_fresh(q.contiguous(), k.contiguous(), v.contiguous(), positions, 0.3, window, None)
    torch.testing.assert_close(attend_fresh(q, k, v, positions, 0.3, window, None), want)


@pytest.mark.parametrize("attend_fresh", [cpu.attend_fresh, reference.attend_fresh])
def test_tensors_that_do_not_fit_together_are_refused(attend_fresh):
    q, k, v = chunk(2)
    positions = torch.arange(40).repeat(2, 1)
    for bad, parts in (
        ((q, k[:, :39], v, positions), ("k", "[2, 40, H, 16]", "[2, 39, 2, 16]")),
        ((q, k, v[:1], positions), ("v", "[2, 40, 2]", "[1, 40, 2, 16]")),
        ((q, k, v, positions[0]), ("positions", "[2, 40]", "[40]")),
        ((q[:, :, :3], k, v, positions), (3, 2)),
        ((q, k[..., :8], v, positions), ("k", "[2, 40, H, 16]", "[2, 40, 2, 8]")),
    ):
        with raises(DataError, *parts):
            attend_fresh(*bad, 0.3, None, None)


# -- memory
# --------------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from kvbits.ops import chunk_attention
torch.set_num_threads(1)
softcap, window, padded, dtype = eval(sys.argv[1])
def run(tokens):
    q, k, v = (torch.randn(1, tokens, h, 32).to(getattr(torch, dtype)) for h in (16, 8, 8))
    positions = torch.arange(tokens)[None] - (100 if padded else 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunk_attention.choose(q, v, softcap).run(q, k, v, positions.clamp(min=-1), 0.125, window, softcap)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
run(600)
print(run(8192))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in other units")
@pytest.mark.parametrize(
    "softcap, window, padded, dtype",
    [(30.0, 1024, True, "bfloat16"), *at_night((30.0, None, False, "float32"), (None, 1024, True, "float32"))],
)
def test_memory_grows_with_the_chunk_not_with_its_square(softcap, window, padded, dtype):
    """8,192 tokens and 16 heads: scores, or a mask in float32, of the whole chunk would be 4.3 GB, or 0.27 GB and as
    much again.
    """
    found = subprocess.run(
        [sys.executable, "-c", PEAK, repr((softcap, window, padded, dtype))], capture_output=True, text=True, check=True
    )
    print(f"{int(found.stdout) / 1e9:.3f} GB")
    assert int(found.stdout) <= 0.3e9


# -- who serves
# ------------------------------------------------------------------------------------------------------------


def test_every_refusal_is_a_sentence():
    q, _, v = chunk()
    assert cpu.refuses(q, v, None) is None
    assert "softcap" in cpu.refuses(q, v, 3.0)
    assert mentions(cpu.refuses(q, v[..., :8], None), "head_dim", 8)
    assert "meta" in cpu.refuses(q.to("meta"), v, None)
    assert "int32" in cpu.refuses(q.int(), v, None)
    assert "GPU" in cuda.refuses(q, v, None)
    served = chunk_attention.choose(q, v, 3.0)
    assert served.backend == "reference" and mentions(str(served), "softcap", "GPU")
    assert (
        chunk_attention.choose(q, v, None).backend == "cpu"
        and chunk_attention.choose(q, v, None, "reference").backend == "reference"
    )
    with raises(SpecError, "softcap", "backend='auto'"):
        chunk_attention.choose(q, v, 3.0, "cpu")


@pytest.mark.parametrize(
    "softcap, backend, served",
    [
        (None, "auto", "attend_fresh by cpu"),
        (30.0, "auto", "attend_fresh by reference (cpu: "),
        (None, "reference", "attend_fresh by reference"),
    ],
)
def test_explain_names_who_attends_to_fresh_tokens(softcap, backend, served):
    layers = tuple(LayerGeometry(num_kv_heads=2, head_dim=64) for _ in range(2))
    spec = CacheSpec(scheme=schemes.get("raw", head_dim=64), layers=layers, raw_dtype="float32")
    cache = PagedCache(spec, backend=backend)
    q, k, v = chunk(1, 20, dim=64)
    for layer in range(2):
        cache.step(layer, q, k, v, scaling=0.125, softcap=softcap)
    (op,) = (op for op in cache.explain()["ops"] if op.startswith("attend_fresh"))
    assert op.startswith(served) and ("softcap" in op) == (softcap is not None)


# -- on a GPU
# --------------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("heads, head_dim, tokens", [(2, 64, 200), (8, 80, 200), (2, 64, 700)])
def test_a_gpu_agrees_with_float64(heads, head_dim, tokens, softcap, padded, window):
    q, k, v = chunk(3, tokens, heads, 8 // heads, torch.bfloat16, head_dim)
    positions = torch.arange(500, 500 + tokens).repeat(3, 1)
    if padded:
        positions[1], positions[2, :50] = -1, -1
        positions[2, 50:] = torch.arange(tokens - 50)
    on_gpu = [x.cuda() for x in (q, k, v)]
    choice = chunk_attention.choose(on_gpu[0], on_gpu[2], softcap)
    assert choice.backend == ("cuda" if softcap is None else "reference"), str(choice)
    out, lse = choice.run(*on_gpu, positions, 0.1, window, softcap)
    want, want_lse = reference.attend_fresh(q, k, v, positions, 0.1, window, softcap, torch.float64)
    assert relative_error(out.cpu(), want) < 5e-3
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-3, atol=1e-2)
