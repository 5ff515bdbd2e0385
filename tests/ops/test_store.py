"""store: every backend leaves the same bytes and touches nothing that no slot names. In packed pages, what single
stores leave, in any order, is what closing the page with the same tokens leaves at their slots.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from messages import raises
from ops.cpu_cases import VECTOR_TIERS, needs_library, static_of, static_params, trellis
from ops.test_cuda_close import HEADS, RAW, spec

from kvbits import schemes
from kvbits.errors import DataError, UnsupportedError
from kvbits.ops.cpu import library
from kvbits.ops.cpu import store as cpu
from kvbits.ops.cpu.structs import store_struct
from kvbits.ops.descriptor import TORCH_NUMBERS
from kvbits.ops.reference import store as reference
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages, section
from kvbits.ops.static import calibrated
from kvbits.ops.store import STATUS_FIELDS, choose
from kvbits.ops.types import PageStore
from kvbits.ops.types import store_of as store_of_pages
from kvbits.quant.packing import row_positions
from kvbits.quant.rotary import turn_by, turned_by
from kvbits.spec import FRAME, PageLayout, PerChannel, PerGroup, PerTensor, PerToken, QuantSpec, Rotary, plane_row_bytes

STORES = [pytest.param(reference.store, id="reference"), pytest.param(cpu.store, id="cpu", marks=needs_library)]
RUNS = [[0, 3, 4, 0, 30], [0, 33, 1, 2, 1], [2, 0, 0, 31, 1], [1, 5, 3, 7, 9], [1, 20, 3, 16, 2]]
"""Row, first token, page, first place, tokens."""


def cases():
    """(key, value, head_dim, page_size, dtype) of token-local layouts: each format, granularity and dtype, and head
    sizes whose rows end inside a word or a block.
    """
    for f in ("int8", "int4", "int3", "int2"):
        yield spec(f), spec(f, PerToken(), symmetric=False), 64, 64, torch.bfloat16
        yield (
            spec(f, PerGroup(32), symmetric=False, scale_dtype="bfloat16"),
            spec(f, PerGroup(32), scale_dtype="float32"),
            128,
            32,
            torch.float32,
        )
        yield spec(f, PerToken()), spec(f, PerToken()), 80, 32, torch.float16
        yield spec(f, static=True, symmetric=False), spec(f, PerChannel(), static=True), 64, 64, torch.bfloat16
        yield spec(f, PerToken()), spec(f, PerToken(), symmetric=False), 72, 96, torch.bfloat16
    yield spec("fp8_e4m3", PerToken()), spec("fp8_e5m2", PerGroup(32)), 96, 32, torch.bfloat16
    yield spec("fp8_e5m2", PerToken()), spec("fp8_e4m3", PerTensor(), static=True), 64, 64, torch.float16
    yield RAW, spec("int4"), 64, 64, torch.bfloat16
    yield spec("int8"), RAW, 256, 32, torch.bfloat16


def centered_cases():
    yield spec("int8", center="channel"), spec("int8"), 64, 64, torch.bfloat16
    yield (
        spec("int4", PerGroup(32), center="channel", symmetric=False),
        spec("int4", symmetric=False),
        128,
        32,
        torch.float16,
    )
    yield (
        spec("int3", PerToken(), center="channel", scale_dtype="float32"),
        spec("int2", center="channel"),
        64,
        32,
        torch.float32,
    )
    yield (
        spec("fp8_e4m3", PerToken(), center="channel"),
        spec("fp8_e5m2", PerToken(), center="channel"),
        80,
        32,
        torch.bfloat16,
    )


def wide_cases():
    """Heads of more than 256 channels, which two warps of a GPU hold: groups of one warp and of both, with and without
    a mean, ends that are lost where none is 0.
    """
    yield spec("int8", center="channel"), spec("int8"), 512, 64, torch.bfloat16
    yield spec("int4", PerToken(), symmetric=False), spec("int4", PerGroup(32)), 512, 64, torch.bfloat16
    yield spec("int8", PerToken(), center="channel", symmetric=False), spec("int3", PerToken()), 512, 32, torch.float32
    yield RAW, RAW, 512, 64, torch.bfloat16
    yield spec("int4", PerGroup(64)), spec("int8", PerGroup(128), symmetric=False), 384, 32, torch.float16


def layout_of(key: QuantSpec, value: QuantSpec, head_dim: int, page_size: int) -> PageLayout:
    return PageLayout(
        key=key, value=value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim, raw_dtype="bfloat16"
    )


def tokens_of(n: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [1, n, H, D] of many sizes, with an offset per channel, a token of zeros and one of one number."""
    k, v = (
        torch.randn(1, n, HEADS, head_dim) * 10 ** torch.empty(1, n, 1, 1).uniform_(-3, 1.5) + torch.randn(head_dim)
        for _ in "kv"
    )
    k[0, 0, 0], v[0, n - 1] = 0, 3.5
    return k.to(dtype), v.to(dtype)


def bytes_of_slots(layout: PageLayout, slots: list[int]) -> torch.Tensor:
    """bool [head_bytes]: what of a head's struct belongs to these slots."""
    mine = torch.zeros(layout.head_bytes, dtype=torch.bool)
    for name, s in layout.sections.items():
        part = mine[s.offset : s.offset + s.nbytes]
        if "_plane" in name:
            part[row_positions(layout.page_size, s.shape[1], name[0])[slots].flatten()] = True
        elif name.endswith("_raw"):
            part.view(layout.page_size, -1)[slots] = True
        elif not name.endswith("_mean"):
            part.view(s.shape[0], layout.page_size, -1)[:, slots] = True
    return mine


def padding_of(layout: PageLayout) -> torch.Tensor:
    rest = ~bytes_of_slots(layout, list(range(layout.page_size)))
    for name, s in layout.sections.items():
        if name.endswith("_mean"):
            rest[s.offset : s.offset + s.nbytes] = False
    return rest


def store_of(
    layout: PageLayout, num_pages: int = 5, static: dict | None = None, turn: torch.Tensor | None = None
) -> PageStore:
    """Two slabs, all 0xFF, with room between the pages."""
    buffer = torch.full((num_pages, HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8)
    return PageStore(layout, (buffer[:2, :HEADS], buffer[2:, :HEADS]), static or {}, turn)


def slots_of(runs: list[list[int]], batch: int, count: int, page_size: int) -> torch.Tensor:
    """int64 [batch * count]: the slots of runs like RUNS, -1 elsewhere."""
    slots = torch.full((batch, count), -1)
    for row, token, page, place, n in runs:
        slots[row, token : token + n] = page * page_size + place + torch.arange(n)
    return slots.flatten()


def raw_pages(
    heads: int = 3,
    head_dim: int = 40,
    page_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    values: int | None = None,
) -> tuple[PageStore, torch.Tensor]:
    """Two slabs of 2 and 3 raw pages in a larger buffer, all of it 0xFF."""
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


def raw_tokens(pages: PageStore, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [3, 40, H, D] for RUNS."""
    return tuple(torch.randn(3, 40, pages.layout.num_kv_heads, pages.layout.dim(kind)).to(dtype) for kind in "kv")


def closed(k: torch.Tensor, v: torch.Tensor, layout: PageLayout, static: dict) -> torch.Tensor:
    """The page [H, head_bytes] that k, v [1, page_size, H, D] close to."""
    return close_pages(k.transpose(1, 2), v.transpose(1, 2), layout, static)[0][0]


# -- raw pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim, values", [(8, 8), (40, 40), (128, 128), (192, 128)])
def test_raw_tokens_land_in_their_slots_and_nowhere_else(store, dtype, head_dim, values):
    pages, buffer = raw_pages(head_dim=head_dim, dtype=dtype, values=values)
    k, v = raw_tokens(pages, dtype)
    k[1, 5, 0, 0], v[2, 0, 1, 3] = torch.nan, torch.inf  # which raw pages take as they are
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
    store(k, v, pages, slots_of(RUNS, 3, 40, 32), status=status)
    want = torch.full_like(buffer, 0xFF)
    for row, token, page, place, count in RUNS:
        if not place:
            want[page, :3, pages.layout.used_bytes :] = 0
        for name, x in (("k_raw", k), ("v_raw", v)):
            for i in range(count):
                section(want[page, :3], pages.layout, name)[:, place + i] = x[row, token + i]
    assert torch.equal(buffer, want) and not status.any()


@pytest.mark.parametrize("store", STORES)
def test_a_projections_output_is_read_where_it_lies(store):
    """Heads before tokens as after a rotary embedding, keys and values inside one projection, a last dim that is not
    dense, and tokens of all sequences in one dimension.
    """
    pages, buffer = raw_pages()
    k, v = raw_tokens(pages, torch.bfloat16)
    slots = slots_of(RUNS, 3, 40, 32)
    store(k, v, pages, slots)
    want = buffer.clone()
    fused = torch.cat([k, v], dim=-1)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for other in (
        fused.split(40, dim=-1),
        transposed,
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)],
        [x.flatten(0, 1) for x in (k, v)],
    ):
        buffer.fill_(0xFF)
        store(*other, pages, slots)
        assert torch.equal(buffer, want)


@needs_library
def test_many_tokens_on_several_threads():
    layout = PageLayout(key=RAW, value=RAW, page_size=64, num_kv_heads=4, head_dim=64)
    slabs = [torch.zeros(40, 4, layout.head_bytes, dtype=torch.uint8) for _ in range(2)]
    k, v = (torch.randn(40 * 64, 4, 64, dtype=torch.bfloat16) for _ in "kv")
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    slots = (order[:, None] * 64 + torch.arange(64)).flatten()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        cpu.store(k, v, PageStore(layout, (slabs[0],)), slots)
    finally:
        torch.set_num_threads(before)
    reference.store(k, v, PageStore(layout, (slabs[1],)), slots)
    assert torch.equal(*slabs)


@pytest.mark.parametrize("store", STORES)
def test_nothing_to_write(store):
    pages, buffer = raw_pages()
    k, v = raw_tokens(pages, torch.bfloat16)
    store(k, v, pages, torch.full((120,), -1))
    store(k[:, :0], v[:, :0], pages, torch.zeros(0, dtype=torch.int64))
    assert bool((buffer == 0xFF).all())


# -- packed pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", list(cases()), ids=str)
def test_single_stores_in_any_order_leave_what_closing_leaves(key, value, head_dim, page_size, dtype, store):
    layout = layout_of(key, value, head_dim, page_size)
    assert layout.token_local
    static = static_of(layout)
    pages = store_of(layout, static=static)
    gen = np.random.default_rng(page_size + head_dim)
    places = gen.permutation(page_size)[: page_size * 2 // 3].tolist()
    order = [*places, *places[:9]]  # the last ones overwrite
    k, v = tokens_of(len(order), head_dim, dtype)
    final = {place: i for i, place in enumerate(order)}
    for i, place in enumerate(order):
        store(k[0, i : i + 1], v[0, i : i + 1], pages, torch.tensor([3 * page_size + place]))
    whole_k, whole_v = (torch.zeros(1, page_size, HEADS, head_dim, dtype=dtype) for _ in "kv")
    for place, i in final.items():
        whole_k[:, place], whole_v[:, place] = k[:, i], v[:, i]
    want, got, mine = closed(whole_k, whole_v, layout, static), pages.page(3), bytes_of_slots(layout, places)
    assert torch.equal(got[:, mine], want[:, mine])
    padding = padding_of(layout)
    assert bool((got[:, ~mine & ~padding] == 0xFF).all()), "nothing of other slots"
    assert bool((got[:, padding] == (0 if 0 in places else 0xFF)).all()), "padding is zero once slot 0 is stored"
    assert all(bool((pages.page(i) == 0xFF).all()) for i in (0, 1, 2, 4))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "key, value, head_dim, page_size, dtype", [*cases(), *centered_cases(), *wide_cases()], ids=str
)
def test_whole_pages_in_one_call_are_what_closing_leaves(key, value, head_dim, page_size, dtype, store):
    layout = layout_of(key, value, head_dim, page_size)
    static = static_of(layout)
    pages = store_of(layout, static=static)
    k, v = tokens_of(3 * page_size, head_dim, dtype)
    order = torch.tensor([4, 0, 3])
    slots = (order[:, None] * page_size + torch.arange(page_size)).flatten()
    previous = torch.tensor([-1, 4, 0]).repeat_interleave(page_size)
    status = torch.ones(STATUS_FIELDS, dtype=torch.int32)  # added to
    store(k, v, pages, slots, previous=previous, status=status)
    saturated = {"k": 1, "v": 1}
    for i, page in enumerate(order.tolist()):
        part = slice(i * page_size, (i + 1) * page_size)
        assert torch.equal(pages.page(page), closed(k[:, part], v[:, part], layout, static))
        sides = (x[:, part].transpose(1, 2) for x in (k, v))
        for side, n in close_pages(*sides, layout, static)[1].items():
            saturated[side] += n
    assert status.tolist() == [*saturated.values(), 1, 1, 1, 1, 1]


def check_codes(page: torch.Tensor, layout: PageLayout, k: torch.Tensor, v: torch.Tensor) -> None:
    """The first tokens k, v [n, H, D] of a page have the bytes that closing them less the page's means gives."""
    plain = dataclasses.replace(
        layout, **{side: dataclasses.replace(getattr(layout, side), center=None) for side in ("key", "value")}
    )
    less = []
    for kind, x in (("k", k), ("v", v)):
        mean = section(page, layout, f"{kind}_mean").float() if f"{kind}_mean" in layout.sections else 0
        less.append(torch.nn.functional.pad(x - mean, (0, 0, 0, 0, 0, layout.page_size - len(x)))[None])
    want, mine = closed(*less, plain, {}), bytes_of_slots(plain, list(range(len(k))))
    for name, there in plain.sections.items():
        here, part = layout.sections[name], mine[there.offset : there.offset + there.nbytes]
        assert torch.equal(
            page[:, here.offset : here.offset + here.nbytes][:, part],
            want[:, there.offset : there.offset + there.nbytes][:, part],
        ), name


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "turned on"])
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", list(centered_cases()), ids=str)
def test_a_page_opens_with_the_mean_of_the_page_before(key, value, head_dim, page_size, dtype, turned, store):
    """A prompt that ends inside a page, single tokens over the next page's border, a chunk over the one after: each
    page's mean is fixed by its slot 0.
    """
    layout = layout_of(key, value, head_dim, page_size)
    rotary = Rotary(inv_freq=tuple(1e4 ** -(i / 12) for i in range(12)), pairs="interleaved")
    turn = turn_by(rotary, head_dim, page_size) if turned else None
    held = store_of(layout, turn=turn)
    pages, total = [4, 0, 3, 1], 3 * page_size + 5
    k, v = tokens_of(total, head_dim, dtype)
    means: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    at = 0
    for count in (page_size + 20, *[1] * (page_size - 18), page_size - 5, 3, 5):
        fresh = slice(at, at + count)
        slots, before = [], []
        while at < fresh.stop:
            page, place = divmod(at, page_size)
            n = min(page_size - place, fresh.stop - at)
            slots += range(pages[page] * page_size + place, pages[page] * page_size + place + n)
            before += [pages[page - 1] if page else -1] * n
            if not place:  # what its mean must be
                for i, (kind, x) in enumerate((("k", k), ("v", v))):
                    if not getattr(layout, "key" if kind == "k" else "value").center:
                        continue
                    follows = page and n < page_size
                    if follows:
                        basis = dequantize_pages(held.page(pages[page - 1])[None], layout)[i][0].transpose(0, 1).clone()
                        first = max(fresh.start, at - page_size)
                        basis[page_size - (at - first) :] = x[0, first:at].float()
                    else:
                        basis = x[0, at : at + n].float()
                    mean = basis.double().mean(0).float()
                    if follows and turned and kind == "k":
                        mean = turned_by(mean, turn)
                    means[kind].append(mean.to(section(held.page(0), layout, f"{kind}_mean").dtype))
            at += n
        store(k[:, fresh], v[:, fresh], held, torch.tensor(slots), previous=torch.tensor(before))
    for i, page in enumerate(pages):
        n = min(page_size, total - i * page_size)
        for kind in means:
            if means[kind]:
                assert torch.equal(section(held.page(page), layout, f"{kind}_mean"), means[kind][i]), (i, kind)
        check_codes(held.page(page), layout, *(x[0, i * page_size :][:n].float() for x in (k, v)))


@needs_library
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", [*cases(), *centered_cases()], ids=str)
def test_the_cpu_stores_what_the_reference_stores(key, value, head_dim, page_size, dtype):
    """Steps of several sequences, their tokens in any order of slots: whole pages, single tokens, chunks over borders;
    with skipped entries and such that lead out. Pages of several slabs.
    """
    layout, gen = layout_of(key, value, head_dim, page_size), np.random.default_rng(head_dim)
    turn = (
        turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), head_dim, page_size)
        if layout.is_centered
        else None
    )
    buffers = [torch.full((12, HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8) for _ in range(2)]
    static = static_of(layout)
    pages = [PageStore(layout, tuple(y[:, :HEADS] for y in x.split([5, 3, 4])), static, turn) for x in buffers]
    held, lengths = [[3, 7, 1, 9], [0, 5, 11], [8, 2, 4, 10]], [0, 0, 0]
    for counts in (
        (page_size + 9, 2 * page_size, 5),
        (1, 1, 1),
        (page_size - 10, 1, page_size),
        (1, 3, page_size - 5),
        (1, 0, 1),
        (20, 0, 3),
    ):
        slots, previous = [-1], [-1]
        for row, n in enumerate(counts):
            for position in range(lengths[row], lengths[row] + n):
                page = position // page_size
                slots.append(held[row][page] * page_size + position % page_size)
                previous.append(held[row][page - 1] if page and position % page_size == 0 else -1)
            lengths[row] += n
        slots.append(12 * page_size + int(gen.integers(99)))
        k, v = (x[0] for x in tokens_of(len(slots), head_dim, dtype))
        v[0] = torch.nan  # of a token that is not stored
        status = [torch.zeros(STATUS_FIELDS, dtype=torch.int32) for _ in range(2)]
        for store, into, found in zip((reference.store, cpu.store), pages, status, strict=True):
            store(k, v, into, torch.tensor(slots), previous=torch.tensor([*previous, -1]), status=found)
        assert torch.equal(*buffers)
        assert torch.equal(*status)


@needs_library
def test_every_tier_stores_the_same_bytes():
    k, v = tokens_of(11, 72, torch.bfloat16)
    slots = torch.tensor([*range(3 * 32 + 29, 4 * 32), *range(32, 40)])
    previous = torch.tensor([-1] * 3 + [3] * 8)
    now = library.tier()
    for key, value in (
        (spec("int3", PerToken(), center="channel", symmetric=False), spec("int2", PerToken(), scale_dtype="float32")),
        (spec("fp8_e4m3", PerToken()), spec("int4", PerGroup(8), symmetric=False, scale_dtype="bfloat16")),
    ):
        layout = layout_of(key, value, 72, 32)
        stores = [store_of(layout) for _ in "ab"]
        wanted, found = (torch.zeros(STATUS_FIELDS, dtype=torch.int32) for _ in "ab")
        for pages in stores:
            for slab in pages.slabs:
                slab.fill_(0x11)
        reference.store(k, v, stores[0], slots, previous=previous, status=wanted)
        try:
            for tier in VECTOR_TIERS:
                library.set_tier(tier)
                for slab in stores[1].slabs:
                    slab.fill_(0x11)
                cpu.store(k, v, stores[1], slots, previous=previous, status=found.zero_())
                assert torch.equal(found, wanted)
                assert all(torch.equal(a, b) for a, b in zip(stores[0].slabs, stores[1].slabs, strict=True)), tier
        finally:
            library.set_tier(now)


# -- what leads out, and what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("raw", [False, True], ids=["packed", "raw"])
def test_slots_that_lead_out_are_skipped_and_counted(store, raw):
    layout = layout_of(*((RAW, RAW) if raw else (spec("int4"), spec("int8", PerToken(), symmetric=False))), 64, 32)
    k, v = (x[0] for x in tokens_of(6, 64, torch.bfloat16))
    pages, want = (store_of(layout, 4) for _ in "ab")
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
    store(k, v, pages, torch.tensor([3 * 32 + 5, -1, 0, 4 * 32, 2**62, -(2**63)]), status=status)
    assert status.tolist() == [0, 0, 0, 0, 0, 0, 2]
    reference.store(k[[0, 2]], v[[0, 2]], want, torch.tensor([3 * 32 + 5, 0]))
    assert all(torch.equal(a, b) for a, b in zip(pages.slabs, want.slabs, strict=True))
    assert bool((pages.page(1) == 0xFF).all())


@pytest.mark.parametrize("store", STORES)
def test_arguments_that_do_not_fit_are_refused(store):
    pages, buffer = raw_pages()
    k, v = raw_tokens(pages, torch.bfloat16)
    slots = slots_of(RUNS, 3, 40, 32)
    for bad_k, bad_v in (
        (k, v[:, :39]),
        (k[..., :32], v[..., :32]),
        (k[:, :, :2], v[:, :, :2]),
        (k[0, 0], v[0, 0]),
        (k, v.float()),
        (k[None], v[None]),
    ):
        with raises(DataError, "[.., 3, 40]"):
            store(bad_k, bad_v, pages, slots)
    for bad in (slots[:119], slots.int(), slots[None], torch.stack([slots, slots], 1)[:, 0], slots.to("meta")):
        with raises(DataError, "slots", "torch.int64", "[120]", "cpu"):
            store(k, v, pages, bad)
    with raises(DataError, "torch.float32", "bfloat16"):
        store(k.float(), v.float(), pages, slots)
    with raises(DataError, "cpu", "meta"):
        store(k, v.to("meta"), pages, slots)
    for bad in (torch.zeros(6, dtype=torch.int32), torch.zeros(7)):
        with raises(DataError, "status", "torch.int32", "[7]"):
            store(k, v, pages, slots, status=bad)
    assert bool((buffer == 0xFF).all())
    whole = store_of(layout_of(spec("int8", PerChannel()), RAW, 64, 32))
    x, centred = (
        torch.zeros(2, HEADS, 64, dtype=torch.bfloat16),
        store_of(layout_of(spec("int8", center="channel"), RAW, 64, 32)),
    )
    with raises(DataError, "PerChannel()"):
        store(x, x, whole, torch.arange(2))
    with raises(DataError, "previous"):
        store(x, x, centred, torch.arange(2))
    with raises(DataError, "previous", "torch.int64", "[2]", "[3]"):
        store(x, x, centred, torch.arange(2), previous=torch.zeros(3, dtype=torch.int64))
    assert all(bool((s == 0xFF).all()) for s in (*whole.slabs, *centred.slabs))
    banded_pages = store_of(
        layout_of(trellis(4, 4, 4, 4, basis="calibrated"), trellis(3, 3, 3, 3), 64, 32),
        static=static_params(trellis(4, 4, 4, 4, basis="calibrated"), trellis(3, 3, 3, 3), HEADS, 64),
    )
    for bad, parts in ((None, ("starts",)), (torch.zeros(2), ("starts", "torch.int32", "[2]", "torch.float32"))):
        with raises(DataError, *parts):
            store(x, x, banded_pages, torch.arange(2), starts=bad)
    with raises(DataError, 0, -64):
        store(x, x, banded_pages, torch.arange(2), starts=torch.tensor([0, -64], dtype=torch.int32))
    store(x, x, banded_pages, torch.tensor([0, -1]), starts=torch.tensor([0, -64], dtype=torch.int32))


@pytest.mark.parametrize(
    "bad", [lambda x: x[..., :-1], lambda x: x[:, :1], lambda x: x.view(torch.int8), lambda x: x[0]]
)
def test_slabs_that_are_no_pages_of_a_layout_are_refused(bad):
    layout = layout_of(spec("int8"), spec("int8"), 64, 32)
    slab = torch.zeros(3, HEADS, layout.head_bytes, dtype=torch.uint8)
    with raises(DataError, "uint8", "[pages, 3, 4224]"):
        PageStore(layout, (slab, bad(slab)))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(), PerGroup(32)], ids=str)
def test_static_scales_of_values_are_as_many_as_the_values_want(store, granularity):
    """Keys of 64 and values of 96 channels: stored by slots as a page of them is closed."""
    side = spec("int8", granularity, static=True)
    layout = dataclasses.replace(layout_of(side, side, 64, 32), value_head_dim=96)
    gen = torch.Generator().manual_seed(3)
    static = {
        name: torch.rand(shape, generator=gen) / 20 + 0.02
        for kind, d in (("k", 64), ("v", 96))
        for name, shape in calibrated(side, kind, HEADS, d).items()
    }
    k, v = (torch.randn(32, HEADS, d, generator=gen) for d in (64, 96))
    pages = store_of(layout, static=static)
    store(k, v, pages, torch.arange(32))
    assert torch.equal(pages.page(0), closed(k[None], v[None], layout, static))
    wanted, few = static["v_scale"], static["v_scale"][:, :-1]
    with raises(DataError, "v_scale", "float32", [*wanted.shape], [*few.shape]):
        store(k, v, store_of(layout, static=static | {"v_scale": few}), torch.arange(32))
    with raises(DataError, "k_scale", "static=False"):
        store(k, v, store_of(layout), torch.arange(32))


@needs_library
def test_the_store_of_pages_is_made_once_and_goes_with_them():
    layout = layout_of(spec("int8"), spec("int8"), 64, 32)
    pages = torch.zeros(4, HEADS, layout.head_bytes, dtype=torch.uint8)
    made = store_of_pages(pages, layout)
    assert (
        store_of_pages(pages, layout) is made
        and store_of_pages(pages, layout_of(spec("int8"), spec("int8", scale_dtype="bfloat16"), 64, 32)) is not made
    )
    gone = weakref.ref(pages)
    del made, pages
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "move", [torch.Tensor.set_, lambda pages, to: setattr(pages, "data", to)], ids=["set_", "data"]
)
@needs_library
def test_pages_that_moved_are_written_where_they_lie(move):
    """Their tensor's old memory was written."""
    layout = layout_of(spec("int8"), spec("int8"), 64, 32)
    old, new, want = (torch.zeros(4, HEADS, layout.head_bytes, dtype=torch.uint8) for _ in range(3))
    k, v = (x[0] for x in tokens_of(6, 64, torch.bfloat16))
    pages, slots = old[:], torch.arange(6)
    cpu.store(k, v, store_of_pages(pages, layout), slots)
    move(pages, new)
    before = old.clone()
    cpu.store(v, k, store_of_pages(pages, layout), slots)
    reference.store(v, k, store_of_pages(want, layout), slots)
    assert torch.equal(new, want) and torch.equal(old, before)


@pytest.mark.parametrize("store", STORES)
def test_turns_that_cannot_be_are_refused(store):
    """Errors of indexing came out of them, or means of NaN."""
    layout = layout_of(spec("int8", center="channel"), spec("int8"), 64, 32)
    k, v = (x[0] for x in tokens_of(2, 64, torch.bfloat16))
    good = turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), 64, 32)

    def stored(turn):
        pages = PageStore(layout, (torch.zeros(4, HEADS, layout.head_bytes, dtype=torch.uint8),), turn=turn)
        store(k, v, pages, torch.tensor([64, 65]), previous=torch.tensor([1, -1]))
        return pages

    for bad in (good[:, :5], good[:2], good.double(), good.T.contiguous().T, good.to("meta")):
        with raises(DataError, "turn", "float32", "[3, 64]", "cpu"):
            stored(bad)
    for row, number in ((0, torch.nan), (1, torch.inf), (2, 64.0), (2, -1.0), (2, torch.nan)):
        bad = good.clone()
        pages = stored(bad)
        bad[row, 3] = number
        before = pages.page(2).clone()
        with raises(DataError, "turn", 0, 63, "quant.rotary.turn_by"):
            store(k, v, pages, torch.tensor([64, 65]), previous=torch.tensor([1, -1]))
        assert torch.equal(pages.page(2), before)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("centered", [False, True])
def test_numbers_that_cannot_be_stored_are_noted_or_raised(store, centered):
    """With a status they are noted, without one raised. The reference leaves the pages as they were."""
    layout = layout_of(spec("int8", center="channel" if centered else None), spec("int8"), 64, 32)
    pages, slots, previous = store_of(layout), torch.tensor([32, 33, -1]), torch.tensor([-1, -1, -1])
    k, v = (x[0] for x in tokens_of(3, 64, torch.float32))
    k[2], nan = torch.nan, torch.where(v > 1, torch.nan, v)  # the third is not stored
    large_k, large_v = k.clone(), torch.full_like(v, 1e9)
    large_k[1] = 1e9
    for case, status, parts in (
        ((k, nan), [0, 0, 0, 0, 0, 1, 0], ("values", "nan")),
        ((nan, v), [0, 0, 0, 0, 1, 0, 0], ("keys", "nan")),
        ((k, large_v), [0, 0, 0, 1, 0, 0, 0], ("values", "float16", "scale_dtype='float32'")),
        ((large_k, v), [0, 0, 1, 0, 0, 0, 0], ("keys", "float16", "scale_dtype='float32'")),
    ):
        found = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
        store(*case, pages, slots, previous=previous, status=found)
        assert found[2:].tolist() == status[2:]
        with raises(DataError, *parts):
            store(*case, pages, slots, previous=previous)
        if store is reference.store:
            assert bool((pages.page(1) == 0xFF).all())
    store(k, v, pages, slots, previous=previous)


@needs_library
def test_the_library_checks_its_arguments_itself():
    """A caller that is not ours has no Python in front of it."""
    pages, buffer = raw_pages()
    k, _ = raw_tokens(pages, torch.bfloat16)
    strides = (*k.stride()[:3], *k.stride()[:3])

    def call(to: PageStore, slots: list[int], head_dim: int = 40, dtype=torch.bfloat16, used_bytes: int = 0, **more):
        given, status = np.array(slots), np.zeros(STATUS_FIELDS, np.int32)
        struct = library.StoreCall(
            ctypes.addressof(store_struct(to)),
            given.ctypes.data,
            1,
            len(slots),
            3,
            head_dim,
            head_dim,
            TORCH_NUMBERS[dtype],
            1,
            k.data_ptr(),
            k.data_ptr(),
            *strides,
            used_bytes,
            status=status.ctypes.data,
            **more,
        )
        library.check(library.library().kvbits_store_tokens(struct))
        return status.tolist()

    assert call(pages, [5 * 32, 2**63 - 1, -1, -(2**63)]) == [0, 0, 0, 0, 0, 0, 2]
    with raises(UnsupportedError, "raw", "token-local"):
        call(pages, [0], dtype=torch.float32)
    with pytest.raises(UnsupportedError):
        call(pages, [0], used_bytes=-1)
    key, value = trellis(4, 4, 4, 4, basis="calibrated"), trellis(3, 3, 3, 3)
    turned = store_of(layout_of(key, value, 64, 32), static=static_params(key, value, HEADS, 64))
    starts, frames, turns = np.array([FRAME], np.int32), np.array([0, 2 * FRAME]), np.zeros((2, 2, 32))
    with pytest.raises(UnsupportedError):
        call(turned, [0], head_dim=64)
    for start in (FRAME, -1, 1 << 30):
        starts[0] = start
        with raises(UnsupportedError, "CPU kernels", "position"):
            call(
                turned,
                [0],
                head_dim=64,
                starts=starts.ctypes.data,
                frames=frames.ctypes.data,
                turn_starts=turns.ctypes.data,
                num_frames=2,
            )
    assert all(bool((s == 0xFF).all()) for s in (buffer, *turned.slabs))


@needs_library
def test_the_cpu_backend_names_why_it_refuses():
    raw, float64 = raw_pages()[0].layout, torch.float64
    assert cpu.refuses(raw, torch.bfloat16, torch.device("cpu")) is None
    assert "meta" in cpu.refuses(raw, torch.bfloat16, torch.device("meta"))
    assert "float64" in cpu.refuses(raw, float64, torch.device("cpu"))
    whole = layout_of(spec("int8", PerChannel()), RAW, 64, 32)
    assert "PerChannel()" in cpu.refuses(whole, torch.bfloat16, torch.device("cpu"))


def test_pages_that_close_whole_have_no_backend():
    """The reference was chosen for them and refused every call."""
    raw, whole = raw_pages()[0].layout, layout_of(spec("int8", PerChannel()), RAW, 64, 32)
    with raises(UnsupportedError, "close_pages"):
        choose(whole, torch.bfloat16, "cpu")
    assert choose(raw, torch.bfloat16, "cpu").backend == choose(raw, torch.bfloat16, torch.device("cpu")).backend


def test_which_presets_are_token_local():
    local = {name for name, s in schemes.PRESETS.items() if s.key.token_local and s.value.token_local}
    assert local == {
        "raw",
        "int8",
        "int8_per_token",
        "int8_asym",
        "int8_centered",
        "int8_static",
        "fp8",
        "fp8_e5m2_keys",
        "int4",
        "int4_centered",
        "int8k_int4v",
        "klt4",
        "klt3",
        "klt2",
    }
    assert spec("int8", PerChannel(), static=True).token_local and not spec("int8", PerChannel()).token_local
    assert not spec("int8", outliers=0.01).token_local and not spec("int8", pre_rope=True).token_local


def test_no_two_tokens_share_a_byte():
    for kind in "kv":
        for bits in (8, 4, 2, 1):
            for head_dim in (8, 40, 72, 80, 128):
                row = plane_row_bytes(head_dim, bits)
                assert row_positions(64, row, kind).flatten().sort().values.tolist() == list(range(64 * row))
