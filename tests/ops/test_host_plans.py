"""Plans on a CPU under calls that are refused, pools that grow, and threads."""

from __future__ import annotations

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ops.cpu_cases import needs_library

from kvbits.errors import DataError
from kvbits.ops import dispatch, paged_attention
from kvbits.spec import PageLayout, QuantSpec

pytestmark = needs_library
HEADS, D = 2, 64
LAYOUT = PageLayout(key=QuantSpec.raw(), value=QuantSpec.raw(), page_size=64, num_kv_heads=HEADS, head_dim=D)


def raw_plan(max_pages=4):
    return paged_attention.plan(
        [LAYOUT], max_pages=[max_pages], batch_size=2, num_q_heads=4, dtype=torch.float32, device="cpu"
    )


def raw_pages(num_pages, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(num_pages, HEADS, LAYOUT.head_bytes // 2, generator=gen).bfloat16().view(torch.uint8)


def raw_step(max_pages=4, lengths=(200, 130)):
    """Block tables of two sequences and their tokens, for `update`; queries."""
    table, tokens = torch.arange(2 * max_pages, dtype=torch.int32).view(2, -1), torch.tensor(lengths, dtype=torch.int32)
    return ([table], [tokens]), torch.randn(2, 1, 4, D, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_starts_that_cannot_be_are_refused_before_a_layer_is_bound(backend, monkeypatch):
    """The first bind refused them, the second did not, and the run read address 0."""
    monkeypatch.setitem(dispatch.BACKENDS, "paged_attention", (backend,))
    plan, (step, q) = raw_plan(), raw_step()
    with pytest.raises(DataError, match="starts must not be negative .* got -64"):
        plan.update(*step, starts=[torch.tensor([0, -64], dtype=torch.int32)])
    for _ in range(2):
        plan.bind(0, [raw_pages(8)])
        with pytest.raises(DataError, match="there are no lengths"):
            plan.run(q, 0)


def test_a_bind_that_is_refused_changes_nothing():
    """Its layer went on with structs of stores that were gone, whose memory other layers' took."""
    plan, (step, q) = raw_plan(), raw_step()
    plan.update(*step)
    unlike = [raw_pages(8), torch.zeros(8, 2, HEADS, LAYOUT.head_bytes, dtype=torch.uint8)[:, 1]]
    with pytest.raises(DataError, match="one page stride"):
        plan.bind(1, [unlike])
    with pytest.raises(DataError, match="never bound"):
        plan.run(q, 1)
    plan.bind(0, [raw_pages(8)])
    pages = raw_pages(8)
    held = weakref.ref(pages.untyped_storage())
    plan.bind(1, [pages])
    del pages
    want = plan.run(q, 1)
    with pytest.raises(DataError, match="one page stride"):
        plan.bind(1, [unlike])
    gc.collect()
    assert held() is not None
    others = raw_plan()
    for i in range(40):
        others.bind(i, [raw_pages(8, 50 + i)])
    assert torch.equal(plan.run(q, 1), want)


def test_pools_that_grew_are_let_go():
    """Every size that a pool ever had kept its pages, and was filled at each update."""
    plan, (step, q) = raw_plan(), raw_step()
    plan.update(*step)
    gone = []
    for num_pages in range(8, 16):
        pages = raw_pages(num_pages)
        gone.append(weakref.ref(pages.untyped_storage()))
        plan.bind(0, [pages])
        del pages
    gc.collect()
    assert [x() is None for x in gone] == [True] * 7 + [False]
    assert len(plan._backend._tables_of) == 1
    plan.update(*step)
    assert plan.run(q, 0).isfinite().all()


def test_threads_share_a_plan():
    """Layers of one plan run by two threads while a third updates it: each result is one of the two that single calls
    give.
    """
    plan, steps = raw_plan(max_pages=64), [raw_step(64, lengths)[0] for lengths in ((4000, 3000), (100, 50))]
    q = raw_step()[1]
    for layer in (0, 1):
        plan.bind(layer, [raw_pages(128, layer)])
    want = []
    for step in steps:
        plan.update(*step)
        want.append([plan.run(q, layer) for layer in (0, 1)])

    def wrong(layer):
        return sum(
            not any(torch.equal(found, x[layer]) for x in want) for found in (plan.run(q, layer) for _ in range(300))
        )

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(wrong, layer) for layer in (0, 1)]
        for i in itertools.count():
            plan.update(*steps[i % 2])
            if all(x.done() for x in runs):
                break
        assert [x.result() for x in runs] == [0, 0]
