"""Calls that fit nothing are refused with text, before any memory is touched: never a crash, never another page than
the one that was named.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from messages import raises
from ops.cpu_cases import needs_library

from kvbits.errors import DataError, SpecError
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.cpu import store as store_cpu
from kvbits.ops.cuda import close as close_cuda
from kvbits.ops.cuda import store as store_cuda
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference import store as store_reference
from kvbits.ops.types import PageStore
from kvbits.spec import LayerGeometry, PageLayout, QuantSpec

INT4 = QuantSpec(format="int4")
BIG = 2**63 - 1
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


@pytest.mark.parametrize("field", ["page_size", "num_kv_heads", "head_dim"])
def test_layouts_of_nothing(field):
    for n in (0, -1):
        sizes = {"page_size": 64, "num_kv_heads": 2, "head_dim": 64} | {field: n}
        with raises(SpecError, f"{field}={n}", 1):
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
        with raises(DataError, "page_ids", 4):
            close(k, k, store, bad)
    with raises(DataError, "page_ids", "float64", "[2]"):
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
        with raises(DataError, "slots", "torch.int64", "[16]", "cpu"):
            store(k, k, pages, bad)
    assert bool((buffer == 0xFF).all())


@pytest.mark.parametrize("store", STORES)
def test_arguments_that_are_no_tensors_of_tokens(store):
    k, pages = pages_of()
    k, slots = k.transpose(1, 2), torch.arange(64)
    good = {"k": k, "v": k, "pages": pages, "slots": slots}
    for name, bad, parts in (
        ("k", None, ("tensor", "NoneType")),
        ("v", [1.0], ("tensor", "list")),
        ("pages", None, ("PageStore", "None")),
        ("slots", list(range(64)), ("tensor", "list")),
    ):
        with raises(DataError, name, *parts):
            store(**good | {name: bad})
    for name in ("previous", "starts", "status"):
        with raises(DataError, name, "tensor", "list"):
            store(**good, **{name: [0] * 7})
    with raises(DataError, "PageStore"):
        store(**good | {"pages": PageStore(pages.layout, ())})
    for bad in (k.double(), k.int()):
        with raises(DataError, bad.dtype, "torch.float16", "torch.bfloat16", "torch.float32"):
            store(**good | {"k": bad, "v": bad})
    assert bool((pages.slabs[0] == 0xFF).all())


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
    with raises(SpecError, "num_kv_heads=1000000000000", 1, 65535):
        LayerGeometry(num_kv_heads=10**12, head_dim=64)
    assert LayerGeometry(num_kv_heads=65_535, head_dim=64).num_kv_heads == 65_535


def test_a_page_below_zero_is_no_page():
    _, store = pages_of()
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            store.page(bad)
