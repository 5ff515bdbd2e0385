"""Calls that fit nothing are refused with text, before any memory is touched: never a crash, never another page than
the one that was named.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ops.cpu_cases import needs_library, random_call

from kvbits.errors import DataError, SpecError, UnsupportedError
from kvbits.ops.cpu import attend as cpu
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.cpu import store as store_cpu
from kvbits.ops.cuda import store as store_cuda
from kvbits.ops.cuda.engine import close as close_cuda
from kvbits.ops.cuda.engine import host_plan as cuda
from kvbits.ops.cuda.engine.unpack_then_flash import ChunkPlan
from kvbits.ops.reference import attend as reference
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference import store as store_reference
from kvbits.ops.types import AttendCall, PageStore
from kvbits.spec import LayerGeometry, PageLayout, QuantSpec

INT4 = QuantSpec(format="int4")
GPU = torch.device("cuda", 0)  # never reached: refusals come first
BIG = 2**63 - 1


def plan(kind):
    """A plan's own check, as `attend`; needs no GPU."""
    return lambda q, call, positions: kind(call, q.shape[2], q.dtype, GPU, num_queries=q.shape[1])


ATTENDS = [
    pytest.param(cpu.attend, marks=needs_library, id="cpu"),
    pytest.param(cuda.attend, id="cuda"),
    pytest.param(plan(cuda.Plan), id="Plan"),
    pytest.param(plan(ChunkPlan), id="ChunkPlan"),
    pytest.param(reference.attend, id="reference"),
]
CLOSES = [
    pytest.param(close_cpu.close, marks=needs_library, id="cpu"),
    pytest.param(close_cuda.close, id="cuda"),
    pytest.param(close_reference.close, id="reference"),
]
STORES = [
    pytest.param(store_cpu.store, marks=needs_library, id="cpu"),
    pytest.param(store_cuda.store, id="cuda"),
    pytest.param(store_reference.store, id="reference"),
]


# -- attend -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [ATTENDS[0], ATTENDS[1], ATTENDS[4]])
@pytest.mark.parametrize("shape", [(2, 1, 0, 64), (0, 1, 6, 64), (2, 0, 6, 64), (2, 1, 6, 0), (2, 6, 64)])
def test_queries_of_nothing(attend, shape):
    _, call, _ = random_call(INT4, INT4)
    with pytest.raises(DataError, match=r"q must be \[B, T, Hq, D\]"):
        attend(torch.zeros(shape, dtype=torch.bfloat16), call, torch.zeros(shape[:2], dtype=torch.int64))


@pytest.mark.parametrize("attend", [ATTENDS[0], ATTENDS[1], ATTENDS[4]])
def test_queries_of_other_heads(attend):
    q, call, positions = random_call(INT4, INT4)
    for bad in (q[..., :32], q[:, :, :5], q[:, :, :1], torch.cat([q, q], -1)):
        with pytest.raises(DataError, match=rf"q has {bad.shape[2]} heads of {bad.shape[3]}, the pages 2 heads of 64"):
            attend(bad, call, positions)
    with pytest.raises(DataError, match="page table is for 2 sequences, q for 1"):
        attend(q[:1], call, positions[:1])


@pytest.mark.parametrize("attend", ATTENDS[2:4])
def test_plans_of_nothing(attend):
    q, call, positions = random_call(INT4, INT4)
    for bad in (q[:, :, :0], q[:, :0]):
        with pytest.raises(DataError, match=r"q must be \[B, T, Hq, D\]"):
            attend(bad, call, positions)
    with pytest.raises((DataError, UnsupportedError), match="5 (query )?heads"):
        attend(q[:, :, :5], call, positions)


def test_a_plan_without_pages():
    q, call, positions = random_call(INT4, INT4)
    with pytest.raises(UnsupportedError, match="no pages to attend to"):
        plan(cuda.Plan)(q, dataclasses.replace(call, parts=()), positions)


@pytest.mark.parametrize("field", ["page_size", "num_kv_heads", "head_dim"])
def test_layouts_of_nothing(field):
    for n in (0, -1):
        sizes = {"page_size": 64, "num_kv_heads": 2, "head_dim": 64} | {field: n}
        with pytest.raises(SpecError, match=f"{field}={n} of a page must be at least 1"):
            PageLayout(key=INT4, value=INT4, **sizes)


def with_table(call: AttendCall, **changed) -> AttendCall:
    """`call`'s last part alone, its table changed."""
    part = call.parts[-1]
    return dataclasses.replace(
        call, parts=(dataclasses.replace(part, table=dataclasses.replace(part.table, **changed)),)
    )


@pytest.mark.parametrize("attend", ATTENDS)
def test_page_tables_that_lead_out(attend):
    q, call, positions = random_call(INT4, INT4)
    t = call.parts[-1].table  # a tail page of each of two sequences
    pages = call.parts[-1].store.num_pages
    for bad in (
        np.array([0, 2, 1]),
        np.array([0, 1, 1]),
        np.array([1, 1, 2]),
        np.array([0, 1, 3]),
        np.array([0, -1, 2]),
    ):
        with pytest.raises(DataError, match="indptr must rise from 0 to its number of entries, 2"):
            attend(q, with_table(call, indptr=bad), positions)
    for bad in (-1, pages, BIG):
        with pytest.raises(DataError, match=f"page_ids names a page that its store does not have: {bad} of {pages}"):
            attend(q, with_table(call, page_ids=np.array([t.page_ids[0], bad])), positions)
    for bad in (0, -1, 65):
        with pytest.raises(DataError, match=f"lengths must lie between 1 and page_size=64, got {bad}; leave out"):
            attend(q, with_table(call, lengths=np.array([1, bad], np.int32)), positions)
    for bad in (-1, 2**31, BIG):
        with pytest.raises(DataError, match=f"starts must not be negative and at most {2**31 - 65}, got {bad}"):
            attend(q, with_table(call, starts=np.array([0, bad])), positions)
    with pytest.raises(DataError, match="differ in length: page_ids 2, lengths 1"):
        attend(q, with_table(call, lengths=t.lengths[:1]), positions)
    with pytest.raises(DataError, match="starts must be a one-dimensional integer numpy array, got ndarray float64"):
        attend(q, with_table(call, starts=t.starts.astype(float)), positions)


def test_a_table_that_passed_is_not_looked_at_again(monkeypatch):
    _, call, _ = random_call(INT4, INT4)
    part = call.parts[0]
    part.table.check(2, part.store)
    accepted = part.table.__dict__["_accepted"]
    part.table.check(2, part.store)
    assert part.table.__dict__["_accepted"] is accepted
    smaller = dataclasses.replace(part.store, slabs=(part.store.slabs[0][:1],))  # another store is another question
    with pytest.raises(DataError, match="does not have"):
        part.table.check(2, smaller)


# -- close ------------------------------------------------------------------------------------------------------------


def pages_of() -> tuple[torch.Tensor, PageStore]:
    layout = PageLayout(key=INT4, value=INT4, page_size=32, num_kv_heads=2, head_dim=64)
    store = PageStore(layout, (torch.full((4, 2, layout.head_bytes), 0xFF, dtype=torch.uint8),))
    return torch.randn(2, 2, 32, 64), store


@pytest.mark.parametrize("close", CLOSES)
def test_close_to_other_pages(close):
    k, store = pages_of()
    for bad in (np.array([0, 4]), np.array([-1, 0]), np.array([0, BIG])):
        with pytest.raises(DataError, match="page_ids names a page that its store does not have"):
            close(k, k, store, bad)
    with pytest.raises(DataError, match="must be one-dimensional integers"):
        close(k, k, store, np.array([0.0, 1.0]))
    assert bool((store.slabs[0] == 0xFF).all())


# -- store ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_tokens_and_slots_that_do_not_fit(store):
    raw = QuantSpec.raw()
    layout = PageLayout(key=raw, value=raw, page_size=32, num_kv_heads=2, head_dim=64)
    buffer = torch.full((4, 2, layout.head_bytes), 0xFF, dtype=torch.uint8)
    pages, k, slots = PageStore(layout, (buffer,)), torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16), torch.arange(16)
    for bad in (k[:1], k[:, :7], k[:, :, :1], k[..., :32], k[0, 0], k[None], k.float()):
        with pytest.raises(DataError):
            store(bad, bad, pages, slots)
        with pytest.raises(DataError):
            store(k, bad, pages, slots)
    for bad in (slots[:15], slots.int(), slots.double(), slots.view(2, 8), torch.arange(32)[::2]):
        with pytest.raises(DataError, match=r"slots must be dense torch.int64 \[16\] on cpu, got"):
            store(k, k, pages, bad)
    assert bool((buffer == 0xFF).all())


@pytest.mark.parametrize("store", [STORES[0], STORES[2]])
def test_slots_past_counting(store):
    """They must not wrap to a slot that exists."""
    k, pages = pages_of()
    slots = torch.tensor([4 * 32, BIG, BIG - 31, -1, -BIG - 1, 2**32, 2**31])
    status = torch.zeros(7, dtype=torch.int32)
    store(k[0, :, :7].transpose(0, 1), k[1, :, :7].transpose(0, 1), pages, slots, status=status)
    assert status.tolist() == [0, 0, 0, 0, 0, 0, 5] and bool((pages.slabs[0] == 0xFF).all())


# -- geometry --------------------------------------------------------------------------------------------------------


def test_more_heads_than_any_model_has():
    with pytest.raises(
        SpecError, match=r"num_kv_heads=1000000000000 must be a whole number from 1 to 65535; it counts"
    ):
        LayerGeometry(num_kv_heads=10**12, head_dim=64)
    assert LayerGeometry(num_kv_heads=65_535, head_dim=64).num_kv_heads == 65_535


def test_a_page_below_zero_is_no_page():
    _, store = pages_of()
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            store.page(bad)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scaling": float("inf")}, "scaling=inf"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"softcap": float("inf")}, "softcap=inf"),
        ({"scaling": "1"}, "scaling='1'"),
        ({"scaling": None}, "scaling=None"),
        ({"softcap": "1"}, "softcap='1'"),
        ({"softcap": True}, "softcap=True"),
        *(
            ({"sliding_window": w}, f"sliding_window={w!r} must be a whole number from 1 to 2147483647")
            for w in (0, 1.5, 2.0, True, float("nan"), 2**64, "9")
        ),
    ],
)
def test_options_that_mean_different_things_to_different_kernels(options, message):
    with pytest.raises(DataError, match=message):
        AttendCall((), **{"scaling": 1.0} | options)
