"""The log-sum-exp of each page alone: what shares of the attention are made of."""

import dataclasses

import numpy as np
import pytest
import torch
from ops.cpu_cases import RAW, needs_library, random_call

from kvbits.errors import DataError
from kvbits.ops.cpu import attend as cpu
from kvbits.ops.reference import attend as reference
from kvbits.spec import PerChannel, PerGroup, PerToken, QuantSpec

PAIRS = [
    (QuantSpec(format="int4", granularity=PerChannel(), symmetric=False), QuantSpec(format="int4", granularity=PerToken(), symmetric=False), (4, 4)),
    (QuantSpec(format="int8", granularity=PerGroup(32)), QuantSpec(format="int8", granularity=PerToken()), None),
    (QuantSpec(format="fp8_e4m3", granularity=PerToken()), RAW, None),
]


def asked(case):
    q, call, positions = case
    pages = sum(p.table.num_pages for p in call.parts)
    return q, dataclasses.replace(call, page_lse=np.full((pages, *q.shape[1:3]), -np.inf, np.float32)), positions


def owners(call, batch):
    return np.concatenate([np.repeat(np.arange(batch), np.diff(p.table.indptr)) for p in call.parts])


@pytest.mark.parametrize("key, value, low", PAIRS)
@pytest.mark.parametrize("window, softcap, tokens, page_size", [(None, None, 1, 64), (70, 15.0, 1, 64), (None, None, 5, 160)])
def test_pages_sum_to_the_whole(key, value, low, window, softcap, tokens, page_size):
    q, call, positions = asked(random_call(key, value, low=low, batch=3, pages=4, window=window, softcap=softcap, tokens=tokens, page_size=page_size))
    plain = reference.attend(q, dataclasses.replace(call, page_lse=None), positions, torch.float64)
    out, lse = reference.attend(q, call, positions, torch.float64)
    assert torch.equal(out, plain[0])
    for b in range(3):
        mine = torch.from_numpy(call.page_lse[owners(call, 3) == b]).double()
        assert torch.allclose(torch.logsumexp(mine, 0), lse[b], atol=1e-5), "the pages of a sequence make up its attention"


@needs_library
@pytest.mark.parametrize("key, value, low", PAIRS)
@pytest.mark.parametrize("window, softcap, tokens, page_size", [(None, None, 1, 64), (70, 15.0, 1, 64), (None, None, 5, 160)])
def test_cpu_agrees_with_the_reference(tier, key, value, low, window, softcap, tokens, page_size):
    case = random_call(key, value, low=low, batch=3, pages=6, group=5, window=window, softcap=softcap, tokens=tokens, page_size=page_size)
    (q, ours, positions), (_, theirs, _) = asked(case), asked(case)
    torch.set_num_threads(2)
    try:
        cpu.attend(q, ours, positions)
    finally:
        torch.set_num_threads(1)
    reference.attend(q, theirs, positions)
    seen = np.isfinite(theirs.page_lse)
    assert np.array_equal(seen, np.isfinite(ours.page_lse))
    assert np.abs(ours.page_lse[seen] - theirs.page_lse[seen]).max() < 0.05 if low else 0.01


@needs_library
def test_wrong_arrays_are_refused():
    q, call, positions = asked(random_call(*PAIRS[0][:2]))
    for bad in (call.page_lse[1:], call.page_lse.astype(np.float64), np.asfortranarray(call.page_lse)):
        with pytest.raises(DataError, match="page_lse must be a dense float32 array"):
            cpu.attend(q, dataclasses.replace(call, page_lse=bad), positions)
