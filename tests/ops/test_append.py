"""append: every backend leaves the same bytes, and nothing is touched that no run names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops.cpu_cases import RAW, needs_library

from kvbits.errors import DataError, UnsupportedError
from kvbits.ops.cpu import append as cpu
from kvbits.ops.cpu import library
from kvbits.ops.cpu.structs import store_struct
from kvbits.ops.descriptor import TORCH_NUMBERS
from kvbits.ops.reference import append as reference
from kvbits.ops.reference.dequantize import section
from kvbits.ops.types import PageStore, SlotMapping
from kvbits.spec import PageLayout, PerChannel, QuantSpec

BACKENDS = [pytest.param(cpu.append, id="cpu", marks=needs_library), pytest.param(reference.append, id="reference")]
RUNS = [[0, 3, 4, 0, 30], [0, 33, 1, 2, 1], [2, 0, 0, 31, 1], [1, 5, 3, 7, 9], [1, 20, 3, 16, 2]]


def store_of(
    heads: int = 3,
    head_dim: int = 40,
    page_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    values: int | None = None,
) -> tuple[PageStore, torch.Tensor]:
    """Two slabs of 2 and 3 pages in a larger buffer, all of it 0xFF."""
    layout = PageLayout(
        key=RAW,
        value=RAW,
        page_size=page_size,
        num_kv_heads=heads,
        head_dim=head_dim,
        value_head_dim=values,
        raw_dtype=str(dtype).removeprefix("torch."),
    )
    buffer = torch.full((5, heads + 1, layout.head_bytes), 0xFF, dtype=torch.uint8)
    return PageStore(layout, (buffer[:2, :heads], buffer[2:, :heads])), buffer


def tokens_of(store: PageStore, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(3, 40, store.layout.num_kv_heads, store.layout.dim(kind)).to(dtype) for kind in "kv")


@pytest.mark.parametrize("append", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim, values", [(8, 8), (40, 40), (128, 128), (192, 128)])
def test_tokens_land_in_their_slots_and_nowhere_else(append, dtype, head_dim, values):
    store, buffer = store_of(head_dim=head_dim, dtype=dtype, values=values)
    k, v = tokens_of(store, dtype)
    append(k, v, store, SlotMapping(np.array(RUNS)))
    want = torch.full_like(buffer, 0xFF)
    for row, token, page, slot, count in RUNS:
        for name, x in (("k_raw", k), ("v_raw", v)):
            for i in range(count):
                section(want[page, :3], store.layout, name)[:, slot + i] = x[row, token + i]
    assert torch.equal(buffer, want)


@pytest.mark.parametrize("append", BACKENDS)
def test_a_projections_output_is_read_where_it_lies(append):
    """Heads before tokens as after a rotary embedding, keys and values inside one projection, and a last dim that is
    not dense.
    """
    store, buffer = store_of()
    k, v = tokens_of(store, torch.bfloat16)
    append(k, v, store, SlotMapping(np.array(RUNS)))
    want = buffer.clone()
    fused = torch.cat([k, v], dim=-1)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for other in (
        fused.split(40, dim=-1),
        transposed,
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)],
    ):
        buffer.fill_(0xFF)
        append(*other, store, SlotMapping(np.array(RUNS)))
        assert torch.equal(buffer, want)


@needs_library
def test_many_tokens_on_several_threads():
    layout = PageLayout(key=RAW, value=RAW, page_size=64, num_kv_heads=4, head_dim=64)
    slabs = [torch.zeros(40, 4, layout.head_bytes, dtype=torch.uint8) for _ in range(2)]
    k, v = (torch.randn(1, 40 * 64, 4, 64, dtype=torch.bfloat16) for _ in "kv")
    runs = SlotMapping(
        np.array([[0, 64 * i, p, 0, 64] for i, p in enumerate(np.random.default_rng(0).permutation(40).tolist())])
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        cpu.append(k, v, PageStore(layout, (slabs[0],)), runs)
    finally:
        torch.set_num_threads(before)
    reference.append(k, v, PageStore(layout, (slabs[1],)), runs)
    assert torch.equal(*slabs)


@pytest.mark.parametrize("append", BACKENDS)
def test_nothing_to_write(append):
    store, buffer = store_of()
    k, v = tokens_of(store, torch.bfloat16)
    append(k, v, store, SlotMapping(np.zeros((0, 5), np.int64)))
    append(k[:, :0], v[:, :0], store, SlotMapping(np.zeros((0, 5), np.int64)))
    assert bool((buffer == 0xFF).all())


@pytest.mark.parametrize("append", BACKENDS)
def test_what_leads_out_of_tensors_or_pages_is_refused(append):
    store, buffer = store_of()
    k, v = tokens_of(store, torch.bfloat16)
    for run in (
        [3, 0, 0, 0, 1],
        [0, 40, 0, 0, 1],
        [0, 39, 0, 0, 2],
        [0, 0, 5, 0, 1],
        [0, 0, 0, 32, 1],
        [0, 0, 0, 30, 3],
    ):
        mapping = SlotMapping(np.array([[0, 0, 0, 0, 1], run]))
        with pytest.raises(
            DataError, match=r"runs reach \(sequences, tokens, pages, slots\) = .* only \(3, 40, 5, 32\)"
        ):
            append(k, v, store, mapping)
    good = SlotMapping(np.array(RUNS))
    append(k, v, store, good)
    buffer.fill_(0xFF)
    with pytest.raises(DataError, match="runs reach"):  # after a call that was right
        append(k[:2], v[:2], store, good)
    for bad_k, bad_v in ((k, v[:, :39]), (k[..., :32], v[..., :32]), (k[:, :, :2], v[:, :, :2]), (k[0], v[0])):
        with pytest.raises(DataError, match=r"must be \[B, T, 3, 40\]"):
            append(bad_k, bad_v, store, good)
    with pytest.raises(DataError, match=r"k is torch.float32; append writes raw pages of the same dtype"):
        append(k.float(), v.float(), store, good)
    assert bool((buffer == 0xFF).all())
    packed = PageLayout(
        key=QuantSpec(format="int8", granularity=PerChannel()), value=RAW, page_size=32, num_kv_heads=3, head_dim=64
    )
    with pytest.raises(DataError, match="append writes raw pages"):
        wide = torch.zeros(3, 40, 3, 64, dtype=torch.bfloat16)
        append(wide, wide, PageStore(packed, (torch.zeros(5, 3, packed.head_bytes, dtype=torch.uint8),)), good)


def test_runs_of_the_wrong_kind_are_refused():
    for bad in (
        [[0, 0, 0, 0, 1]],
        np.zeros((1, 4), np.int64),
        np.zeros(5, np.int64),
        np.zeros((1, 5), np.int32),
        np.zeros((5, 2), np.int64).T,
    ):
        with pytest.raises(DataError, match=r"runs must be a dense int64 array \[N, 5\]"):
            SlotMapping(bad)
    for bad in ([0, 0, 0, 0, 0], [-1, 0, 0, 0, 1], [0, 0, -1, 0, 1]):
        with pytest.raises(DataError, match="name nothing below 0"):
            SlotMapping(np.array([bad]))


@needs_library
def test_the_library_checks_runs_itself():
    """A caller that is not ours has no Python in front of it."""
    store, buffer = store_of()
    k, _ = tokens_of(store, torch.bfloat16)
    strides = (*k.stride()[:3], *k.stride()[:3])

    def call(run: list[int], dtype: int = TORCH_NUMBERS[torch.bfloat16]) -> None:
        import ctypes

        runs = np.array([run])
        at = ctypes.addressof(store_struct(store))
        struct = library.AppendStruct(
            at, runs.ctypes.data, 1, 3, 40, 3, 40, 40, dtype, 1, k.data_ptr(), k.data_ptr(), *strides
        )
        library.check(library.library().kvbits_append(struct))

    big = 2**62
    for run in (
        [3, 0, 0, 0, 1],
        [-1, 0, 0, 0, 1],
        [0, 40, 0, 0, 1],
        [0, -1, 0, 0, 1],
        [0, 0, 0, 32, 1],
        [0, 0, 0, -1, 1],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 33],
        [0, 0, 0, big, big],
        [0, big, 0, 0, big],
    ):
        with pytest.raises(UnsupportedError, match="a run of fresh tokens leads out"):
            call(run)
    for page in (5, -1, big):
        with pytest.raises(UnsupportedError, match="page that its store does not have"):
            call([0, 0, page, 0, 1])
    with pytest.raises(UnsupportedError, match="neither raw ones of the same type nor token-local"):
        call([0, 0, 0, 0, 1], dtype=0)
    assert bool((buffer == 0xFF).all())


@needs_library
def test_refusals_name_the_reason():
    store, _ = store_of()
    k, _ = tokens_of(store, torch.bfloat16)
    assert cpu.refuses(k, store) is None
    assert "meta" in cpu.refuses(k.to("meta"), store)
    assert "float64" in cpu.refuses(k.double(), store)
