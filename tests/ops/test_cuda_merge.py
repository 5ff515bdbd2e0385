"""Merging partial results on a GPU, and its kernel run on a CPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from ops.emulated_op import DEVICES, emulate, needs_gpu

from kvbits.ops.cuda import merge
from kvbits.ops.cuda.engine import dense
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.reference.merge import add_sink_logit, merge_partials, sink_part


@pytest.fixture(params=DEVICES)
def device(request, tmp_path, monkeypatch):
    if request.param == "cpu":
        emulate(merge, "merge_partials", tmp_path, monkeypatch)
    return request.param


@pytest.mark.parametrize("dtype", merge.MATRIX_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, parts", [(128, 2), (64, 3), (80, 8), (256, 11)])
def test_it_is_the_reference(device, dtype, head_dim, parts):
    gen = torch.Generator().manual_seed(parts)
    outs = [torch.randn(2, 5, 3, head_dim, generator=gen).to(dtype) for _ in range(parts)]
    lses = [10 * torch.randn(2, 5, 3, generator=gen) for _ in range(parts)]
    lses[0][0, 1], lses[1][1, 2, 0] = -torch.inf, -torch.inf
    for m in lses:
        m[1, 4] = -torch.inf  # a row that saw nothing
    outs[0][0, 1] = torch.nan  # not read
    outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
    lses[1] = lses[1].transpose(1, 2).contiguous().transpose(1, 2)
    want, want_lse = merge_partials([o.double() for o in outs], [m.double() for m in lses])
    out, lse = merge.merge_partials([o.to(device) for o in outs], [m.to(device) for m in lses])
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(
        out.cpu().double(),
        want,
        rtol=2**-7 if dtype == torch.bfloat16 else 2**-10,
        atol=4e-3 if parts > merge.MOST_PARTS else 1e-4,
    )
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("merged", ["reference", "kernel"])
def test_nan_stays_nan(device, merged):
    """A query that is not finite has NaN from those parts where it sees a token."""
    outs, lses = [torch.randn(1, 2, 3, 64).half() for _ in "ab"], [torch.randn(1, 2, 3) for _ in "ab"]
    outs[0][0, 0, 1], lses[0][0, 0, 1] = torch.nan, torch.nan
    lses[1][0, 0, 1] = -torch.inf
    outs[1][0, 1, 2], lses[1][0, 1, 2] = torch.nan, torch.nan
    on = [[x.to(device) for x in xs] for xs in (outs, lses)]
    out, lse = merge.merge_partials(*on) if merged == "kernel" else merge_partials(*on)
    bad = torch.zeros(1, 2, 3, dtype=torch.bool)
    bad[0, 0, 1] = bad[0, 1, 2] = True
    assert (
        torch.equal(lse.isnan().cpu(), bad)
        and torch.equal(out.isnan().all(-1).cpu(), bad)
        and torch.equal(out.isnan().any(-1).cpu(), bad)
    )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("merged", ["reference", "kernel"])
def test_a_learned_sink_is_one_more_part(device, merged, parts):
    """Merged into the first part's own memory; logits far above and below every score, and rows that saw nothing."""
    gen = torch.Generator().manual_seed(parts)
    outs = [torch.randn(3, 4, 6, 64, generator=gen).bfloat16() for _ in range(parts)]
    lses = [3 * torch.randn(3, 4, 6, generator=gen) for _ in range(parts)]
    logits = torch.tensor([-1e4, -3.0, 0.0, 2.5, 8.0, 1e4])
    for m in lses:
        m[1, 2] = -torch.inf
    whole = merge_partials([o.double() for o in outs], [m.double() for m in lses])
    want = add_sink_logit(*whole, logits.double())
    on = [[x.to(device) for x in xs] for xs in (outs, lses)]
    sink = sink_part(logits.to(device), 64, torch.bfloat16)
    function = merge.merge_partials if merged == "kernel" else merge_partials
    out, lse = function([*on[0], sink[0]], [*on[1], sink[1]], into=on[0][0])
    assert out.data_ptr() == on[0][0].data_ptr()
    torch.testing.assert_close(out.cpu().double(), want, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse.cpu().double(), torch.logaddexp(whole[1], logits.double()), rtol=1e-5, atol=1e-5)


def test_it_compiles_without_spills():
    if why := cuda_compile.missing():
        pytest.skip(why)
    resources = cuda_compile.compile_source(merge.source(128, torch.bfloat16), "sm_90").resources("merge_partials")
    assert resources.spill_bytes == 0


@pytest.mark.parametrize("rows", [1, 2047, 2048, 5000, 32768, 70_000])
def test_slices_are_powers_of_two_and_a_rest(rows):
    slices = list(dense._slices(rows))
    assert [a for a, _ in slices] == [0, *(b for _, b in slices[:-1])] and slices[-1][1] == rows
    sizes = [b - a for a, b in slices]
    assert (
        all(n & (n - 1) == 0 for n in sizes if n >= dense.CUDNN_ROWS) and sum(n < dense.CUDNN_ROWS for n in sizes) <= 1
    )


@needs_gpu
@pytest.mark.parametrize(
    "causal, tokens, rows",
    [
        (True, 2048, 2048),
        (True, 4099, 4099),
        (False, 512, 7000),
        (False, 2048, 4096),
        (False, 300, 5000),
        (True, 100, 700),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_dense_attention_is_float64s(causal, tokens, rows, head_dim):
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, n, h, head_dim, generator=gen, device="cuda").bfloat16()
        for n, h in ((tokens, 8), (rows, 2), (rows, 2))
    )
    out, lse = dense.attention(q, k, v, head_dim**-0.5, causal)
    scores = torch.einsum("bthd,bshd->bths", q[:, -64:].double(), k.double().repeat_interleave(4, 2)) * head_dim**-0.5
    if causal:
        scores = scores.masked_fill(
            (torch.arange(rows, device="cuda") > torch.arange(rows - 64, rows, device="cuda")[:, None])[None, :, None],
            -torch.inf,
        )
    want = torch.einsum("bths,bshd->bthd", scores.softmax(-1), v.double().repeat_interleave(4, 2))
    assert (out[:, -64:].double() - want).norm() / want.norm() < 8e-3
    torch.testing.assert_close(lse[:, -64:].double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
