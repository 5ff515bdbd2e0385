"""Merging on the CPU against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from ops.cpu_cases import needs_library

from kvbits.ops import merge as op
from kvbits.ops.cpu import merge
from kvbits.ops.reference.merge import merge_partials, sink_part

pytestmark = needs_library
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def parts(count, dtypes, shape=(2, 5, 3), head_dim=24, seed=0):
    draw = torch.Generator().manual_seed(seed)
    outs = [torch.randn(*shape, head_dim, generator=draw).to(dtypes[i % len(dtypes)]) for i in range(count)]
    return outs, [5 * torch.randn(shape, generator=draw) for _ in range(count)]


def in_float64(outs, lses):
    return merge_partials([x.double() for x in outs], [x.double() for x in lses])


@pytest.mark.parametrize("into", list(TOLERANCE))
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32], [torch.float16]])
@pytest.mark.parametrize("head_dim", [8, 24, 128])
def test_results_are_those_of_the_reference(tier, head_dim, dtypes, into):
    outs, lses = parts(3, dtypes, head_dim=head_dim)
    want, want_lse = in_float64(outs, lses)
    out, lse = merge.merge_partials(outs, lses, into=torch.empty(2, 5, 3, head_dim, dtype=into))
    assert out.dtype == into
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[into], atol=TOLERANCE[into])
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_many_rows_are_merged_by_several_threads():
    outs, lses = parts(2, [torch.bfloat16, torch.float32], (1, 700, 3), 128)
    out, _ = merge.merge_partials(outs, lses)
    torch.testing.assert_close(out.double(), in_float64(outs, lses)[0], rtol=1e-6, atol=1e-6)


def test_an_empty_part_is_not_read_and_no_keys_are_zeros(tier):
    outs, lses = parts(2, [torch.float32])
    outs[1][0] = torch.nan
    lses[1][0] = -torch.inf
    lses[0][0, 0] = -torch.inf
    out, lse = merge.merge_partials(outs, lses)
    assert not out[0, 0].any() and (lse[0, 0] == -torch.inf).all()
    assert torch.equal(out[0, 1:], outs[0][0, 1:]) and torch.equal(lse[0, 1:], lses[0][0, 1:])


def test_a_sum_that_is_not_a_number_stays_one(tier):
    outs, lses = parts(2, [torch.float32])
    lses[1][0, 0, 0] = torch.nan
    out, lse = merge.merge_partials(outs, lses)
    assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan() and out.isnan().sum() == out.shape[3]


def test_strides_sinks_and_results_that_are_written_over():
    outs, lses = parts(2, [torch.bfloat16])
    whole = torch.zeros(2, 5, 9, 24, dtype=torch.bfloat16)
    whole[:, :, 3:6] = outs[0]
    outs[0] = whole[:, :, 3:6]
    outs[1] = outs[1].transpose(2, 3).contiguous().transpose(2, 3)
    sink = sink_part(torch.tensor([0.5, -2.0, 3.0]), 24, torch.bfloat16)
    given = [*zip(outs, lses, strict=True), sink]
    want, want_lse = in_float64([x.clone() for x, _ in given], [x for _, x in given])
    choice = op.choose(given)
    assert choice.backend == "cpu"
    out, lse = op.merge(given, into=outs[0], choice=choice)
    torch.testing.assert_close(whole[:, :, 3:6].double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse)
    assert out is outs[0] and not whole[:, :, :3].any() and not whole[:, :, 6:].any()


@pytest.mark.parametrize(
    ("outs", "why"),
    [
        ([torch.zeros(1, 1, 1, 8, dtype=torch.float64)], "float64"),
        ([torch.zeros(1, 1, 1, 8)] * 65, "65"),
        ([torch.zeros(1, 1, 1, 520)], "520"),
    ],
)
def test_what_kernels_do_not_take_goes_to_the_reference(outs, why):
    assert why in merge.refuses(outs)
    assert op.choose([(x, x[..., 0]) for x in outs]).backend == "reference"
