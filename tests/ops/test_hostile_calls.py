"""Calls that fit nothing are refused with text, before any memory is touched: never a crash, never another page than
the one that was named.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.cpu_cases import needs_library

from kvbits.errors import DataError, SpecError
from kvbits.ops.cpu import append as append_cpu
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.cuda import close as close_cuda
from kvbits.ops.reference import append as append_reference
from kvbits.ops.reference import close as close_reference
from kvbits.ops.types import PageStore, SlotMapping
from kvbits.spec import LayerGeometry, PageLayout, QuantSpec

INT4 = QuantSpec(format="int4")
BIG = 2**63 - 1
CLOSES = [
    pytest.param(close_cpu.close, marks=needs_library, id="cpu"),
    pytest.param(close_cuda.close, id="cuda"),
    pytest.param(close_reference.close, id="reference"),
]
APPENDS = [
    pytest.param(append_cpu.append, marks=needs_library, id="cpu"),
    pytest.param(append_cuda.append, id="cuda"),
    pytest.param(append_reference.append, id="reference"),
]


@pytest.mark.parametrize("field", ["page_size", "num_kv_heads", "head_dim"])
def test_layouts_of_nothing(field):
    for n in (0, -1):
        sizes = {"page_size": 64, "num_kv_heads": 2, "head_dim": 64} | {field: n}
        with pytest.raises(SpecError, match=f"{field}={n} of a page must be at least 1"):
            PageLayout(key=INT4, value=INT4, **sizes)


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


# -- append -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("append", APPENDS)
def test_append_past_the_end(append):
    raw = QuantSpec.raw()
    layout = PageLayout(key=raw, value=raw, page_size=32, num_kv_heads=2, head_dim=64)
    buffer = torch.full((4, 2, layout.head_bytes), 0xFF, dtype=torch.uint8)
    k = torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16)
    for run in (
        [2, 0, 0, 0, 1],
        [0, 8, 0, 0, 1],
        [0, 0, 4, 0, 1],
        [0, 0, 0, 32, 1],
        [0, 0, 0, 25, 8],
        [0, 7, 0, 0, 2],
        [0, 0, 0, 2**61, 1],
    ):
        with pytest.raises(
            DataError, match=r"runs reach \(sequences, tokens, pages, slots\) = .*, but there are only \(2, 8, 4, 32\)"
        ):
            append(k, k, PageStore(layout, (buffer,)), SlotMapping(np.array([run])))
    assert bool((buffer == 0xFF).all())


def test_runs_below_zero_or_past_counting():
    for column in range(5):
        run = np.array([[0, 0, 0, 0, 1]])
        run[0, column] = -1
        with pytest.raises(DataError, match="name nothing below 0"):
            SlotMapping(run)
        run[0, column] = BIG  # first slot and count must not wrap to a slot that exists
        with pytest.raises(DataError, match="name nothing above"):
            SlotMapping(run)


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
