"""Token-local pages: what single stores leave, in any order, is what closing the page with the same tokens leaves at
their slots.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from ops.cpu_cases import TIERS, needs_library, static_of
from ops.test_cuda_close import HEADS, RAW, spec

from kvbits import schemes
from kvbits.errors import DataError
from kvbits.ops.cpu import append as cpu
from kvbits.ops.cpu import library
from kvbits.ops.cpu import store_tokens as cpu_slots
from kvbits.ops.reference import append as reference
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages, section
from kvbits.ops.static import calibrated
from kvbits.ops.types import PageStore, SlotMapping
from kvbits.ops.types import store_of as store_of_pages
from kvbits.quant.packing import row_positions
from kvbits.quant.rotary import turn_by, turned_by
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerTensor, PerToken, QuantSpec, Rotary, plane_row_bytes

STORES = [
    pytest.param(reference.store_tokens, id="reference"),
    pytest.param(cpu_slots.store_tokens, id="cpu", marks=needs_library),
]
APPENDS = [pytest.param(reference.append, id="reference"), pytest.param(cpu.append, id="cpu", marks=needs_library)]


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


def closed(k: torch.Tensor, v: torch.Tensor, layout: PageLayout, static: dict) -> torch.Tensor:
    """The page [H, head_bytes] that k, v [1, page_size, H, D] close to."""
    return close_pages(k.transpose(1, 2), v.transpose(1, 2), layout, static)[0][0]


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", list(cases()), ids=str)
def test_single_stores_in_any_order_leave_what_closing_leaves(key, value, head_dim, page_size, dtype, append):
    layout = layout_of(key, value, head_dim, page_size)
    assert layout.token_local
    static = static_of(layout)
    store = store_of(layout, static=static)
    gen = np.random.default_rng(page_size + head_dim)
    slots = gen.permutation(page_size)[: page_size * 2 // 3].tolist()
    order = [*slots, *slots[:9]]  # the last ones overwrite
    k, v = tokens_of(len(order), head_dim, dtype)
    final = {slot: i for i, slot in enumerate(order)}
    for i, slot in enumerate(order):
        append(k, v, store, SlotMapping(np.array([[0, i, 3, slot, 1]])))
    whole_k, whole_v = (torch.zeros(1, page_size, HEADS, head_dim, dtype=dtype) for _ in "kv")
    for slot, i in final.items():
        whole_k[:, slot], whole_v[:, slot] = k[:, i], v[:, i]
    want, got, mine = closed(whole_k, whole_v, layout, static), store.page(3), bytes_of_slots(layout, slots)
    assert torch.equal(got[:, mine], want[:, mine])
    padding = padding_of(layout)
    assert bool((got[:, ~mine & ~padding] == 0xFF).all()), "nothing of other slots"
    assert bool((got[:, padding] == (0 if 0 in slots else 0xFF)).all()), "padding is zero once slot 0 is stored"
    assert all(bool((store.page(i) == 0xFF).all()) for i in (0, 1, 2, 4))


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize(
    "key, value, head_dim, page_size, dtype", [*cases(), *centered_cases(), *wide_cases()], ids=str
)
def test_whole_pages_in_one_call_are_what_closing_leaves(key, value, head_dim, page_size, dtype, append):
    layout = layout_of(key, value, head_dim, page_size)
    static = static_of(layout)
    store = store_of(layout, static=static)
    k, v = tokens_of(3 * page_size, head_dim, dtype)
    runs = np.array([[0, i * page_size, page, 0, page_size] for i, page in enumerate((4, 0, 3))])
    found = append(k, v, store, SlotMapping(runs, np.array([-1, 4, 0])))
    saturated = dict.fromkeys(found, 0)
    for i, page in enumerate((4, 0, 3)):
        part = slice(i * page_size, (i + 1) * page_size)
        assert torch.equal(store.page(page), closed(k[:, part], v[:, part], layout, static))
        sides = (x[:, part].transpose(1, 2) for x in (k, v))
        for side, n in close_pages(*sides, layout, static)[1].items():
            saturated[side] += n
    assert found == saturated


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


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "turned on"])
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", list(centered_cases()), ids=str)
def test_a_page_opens_with_the_mean_of_the_page_before(key, value, head_dim, page_size, dtype, turned, append):
    """A prompt that ends inside a page, single tokens over the next page's border, a chunk over the one after: each
    page's mean is fixed by its slot 0.
    """
    layout = layout_of(key, value, head_dim, page_size)
    rotary = Rotary(inv_freq=tuple(1e4 ** -(i / 12) for i in range(12)), pairs="interleaved")
    turn = turn_by(rotary, head_dim, page_size) if turned else None
    store = store_of(layout, turn=turn)
    pages, total = [4, 0, 3, 1], 3 * page_size + 5
    k, v = tokens_of(total, head_dim, dtype)
    means: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    at = 0
    for count in (page_size + 20, *[1] * (page_size - 18), page_size - 5, 3, 5):
        fresh = slice(at, at + count)
        runs, before = [], []
        while at < fresh.stop:
            page, slot = divmod(at, page_size)
            n = min(page_size - slot, fresh.stop - at)
            runs.append([0, at - fresh.start, pages[page], slot, n])
            before.append(pages[page - 1] if page else -1)
            if not slot:  # what its mean must be
                for i, (kind, x) in enumerate((("k", k), ("v", v))):
                    if not getattr(layout, "key" if kind == "k" else "value").center:
                        continue
                    follows = page and n < page_size
                    if follows:
                        basis = (
                            dequantize_pages(store.page(pages[page - 1])[None], layout)[i][0].transpose(0, 1).clone()
                        )
                        first = max(fresh.start, at - page_size)
                        basis[page_size - (at - first) :] = x[0, first:at].float()
                    else:
                        basis = x[0, at : at + n].float()
                    mean = basis.double().mean(0).float()
                    if follows and turned and kind == "k":
                        mean = turned_by(mean, turn)
                    means[kind].append(mean.to(section(store.page(0), layout, f"{kind}_mean").dtype))
            at += n
        append(k[:, fresh], v[:, fresh], store, SlotMapping(np.array(runs), np.array(before)))
    for i, page in enumerate(pages):
        n = min(page_size, total - i * page_size)
        for kind in means:
            if means[kind]:
                assert torch.equal(section(store.page(page), layout, f"{kind}_mean"), means[kind][i]), (i, kind)
        check_codes(store.page(page), layout, *(x[0, i * page_size :][:n].float() for x in (k, v)))


@pytest.mark.parametrize("store_tokens", STORES)
def test_store_tokens_takes_slots_and_skips_what_leads_out(store_tokens):
    layout = layout_of(spec("int4"), spec("int8", PerToken(), symmetric=False), 64, 32)
    k, v = (x[0] for x in tokens_of(6, 64, torch.bfloat16))
    pages = torch.full((4, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8)
    status = torch.zeros(reference.STATUS_FIELDS, dtype=torch.int32)
    slots = torch.tensor([3 * 32 + 5, -1, 0, 4 * 32, 2**40, -7])
    store_tokens(k, v, pages, layout, slots, status=status)
    assert status.tolist() == [0, 0, 0, 0, 0, 0, 2]
    want = torch.full_like(pages, 0xFF)
    reference.append(
        k[None], v[None], PageStore(layout, (want,)), SlotMapping(np.array([[0, 0, 3, 5, 1], [0, 2, 0, 0, 1]]))
    )
    assert torch.equal(pages, want)


@needs_library
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", [*cases(), *centered_cases()], ids=str)
def test_slots_on_the_cpu_are_what_the_reference_stores(key, value, head_dim, page_size, dtype):
    """Steps of several sequences, their tokens in any order of slots: whole pages, single tokens, chunks over borders;
    with skipped entries and such that lead out.
    """
    layout, gen = layout_of(key, value, head_dim, page_size), np.random.default_rng(head_dim)
    static = static_of(layout)
    buffers = [torch.full((12, HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8) for _ in range(2)]
    pages = [x[:, :HEADS] for x in buffers]
    turn = (
        turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), head_dim, page_size)
        if layout.is_centered
        else None
    )
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
        given = {"static": static, "previous_page": torch.tensor([*previous, -1]), "turn": turn}
        status = [torch.zeros(reference.STATUS_FIELDS, dtype=torch.int32) for _ in range(2)]
        for store, into, found in zip((reference.store_tokens, cpu_slots.store_tokens), pages, status, strict=True):
            store(k, v, into, layout, torch.tensor(slots), **given, status=found)
        assert torch.equal(*buffers)
        assert torch.equal(*status)


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
    pages = torch.zeros(1, HEADS, layout.head_bytes, dtype=torch.uint8)
    store(k, v, pages, layout, torch.arange(32), static=static)
    assert torch.equal(pages[0], closed(k[None], v[None], layout, static))
    with pytest.raises(DataError, match="v_scale must be dense float32"):
        store(k, v, pages, layout, torch.arange(32), static=static | {"v_scale": static["v_scale"][:, :-1]})


@needs_library
def test_the_store_of_pages_is_made_once_and_goes_with_them():
    layout = layout_of(spec("int8"), spec("int8"), 64, 32)
    pages = torch.zeros(4, HEADS, layout.head_bytes, dtype=torch.uint8)
    made = store_of_pages(pages, layout)
    assert (
        store_of_pages(pages, layout) is made
        and store_of_pages(pages, layout_of(spec("int4"), spec("int4"), 64, 32)) is not made
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
    cpu_slots.store_tokens(k, v, pages, layout, slots)
    move(pages, new)
    before = old.clone()
    cpu_slots.store_tokens(v, k, pages, layout, slots)
    reference.store_tokens(v, k, want, layout, slots)
    assert torch.equal(new, want) and torch.equal(old, before)


@pytest.mark.parametrize("store_tokens", STORES)
def test_turns_that_cannot_be_are_refused(store_tokens):
    """Errors of indexing came out of them, or means of NaN."""
    layout = layout_of(spec("int8", center="channel"), spec("int8"), 64, 32)
    k, v = (x[0] for x in tokens_of(2, 64, torch.bfloat16))
    pages = torch.zeros(4, HEADS, layout.head_bytes, dtype=torch.uint8)
    good = turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), 64, 32)

    def store(turn):
        store_tokens(k, v, pages, layout, torch.tensor([64, 65]), previous_page=torch.tensor([1, -1]), turn=turn)

    for bad in (good[:, :5], good[:2], good.double(), good.T.contiguous().T):
        with pytest.raises(DataError, match=r"turn must be dense float32 \[3, 64\], got"):
            store(bad)
    with pytest.raises(DataError, match="turn is on meta"):
        store(good.to("meta"))
    store(good)
    for row, number in ((0, torch.nan), (1, torch.inf), (2, 64.0), (2, -1.0), (2, torch.nan)):
        bad = good.clone()
        store(bad)
        bad[row, 3] = number
        before = pages.clone()
        with pytest.raises(DataError, match="turn must hold finite numbers, in its last row channels from 0 to 63"):
            store(bad)
        assert torch.equal(pages, before)


def test_bad_numbers_leave_everything_as_it_was():
    layout = layout_of(spec("int8", center="channel"), spec("int8"), 64, 32)
    store = store_of(layout)
    k, v = tokens_of(2, 64, torch.float32)
    mapping = SlotMapping(np.array([[0, 0, 1, 0, 2]]), np.array([-1]))
    v[0, 1, 2, 3] = float("nan")
    with pytest.raises(DataError, match="values holds nan"):
        reference.append(k, v, store, mapping)
    with pytest.raises(DataError, match="overflows float16"):
        reference.append(k, torch.full_like(v, 1e9), store, mapping)
    assert bool((store.page(1) == 0xFF).all())
    with pytest.raises(DataError, match=r"give SlotMapping\(runs, previous=..\)"):
        reference.append(k, k, store, SlotMapping(mapping.runs))
    with pytest.raises(DataError, match=r"previous must be int64 \[1\]"):
        SlotMapping(mapping.runs, np.array([1, 2]))
    with pytest.raises(DataError, match="runs reach"):
        reference.append(k, k, store, SlotMapping(mapping.runs, np.array([5])))


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


@needs_library
def test_every_tier_stores_the_same_bytes():
    k, v = tokens_of(11, 72, torch.bfloat16)
    mapping = SlotMapping(np.array([[0, 0, 3, 29, 3], [0, 3, 1, 0, 8]]), np.array([-1, 3]))
    now = library.tier()
    for key, value in (
        (spec("int3", PerToken(), center="channel", symmetric=False), spec("int2", PerToken(), scale_dtype="float32")),
        (spec("fp8_e4m3", PerToken()), spec("int4", PerGroup(8), symmetric=False, scale_dtype="bfloat16")),
    ):
        layout = layout_of(key, value, 72, 32)
        stores = [store_of(layout) for _ in "ab"]
        for store in stores:
            for slab in store.slabs:
                slab.fill_(0x11)
        wanted = reference.append(k, v, stores[0], mapping)
        try:
            for tier in TIERS:
                library.set_tier(tier)
                for slab in stores[1].slabs:
                    slab.fill_(0x11)
                assert cpu.append(k, v, stores[1], mapping) == wanted
                assert all(torch.equal(a, b) for a, b in zip(stores[0].slabs, stores[1].slabs, strict=True)), tier
        finally:
            library.set_tier(now)


@needs_library
def test_the_cpu_backend_names_bad_numbers_and_layouts():
    layout = layout_of(spec("int8"), spec("int8"), 64, 32)
    store = store_of(layout)
    k, v = tokens_of(2, 64, torch.float32)
    mapping = SlotMapping(np.array([[0, 0, 1, 0, 2]]))
    with pytest.raises(DataError, match="keys overflows float16"):
        cpu.append(torch.full_like(k, 1e9), v, store, mapping)
    v[0, 1, 2, 3] = float("nan")
    with pytest.raises(DataError, match="values holds nan"):
        cpu.append(k, v, store, mapping)
    assert cpu.refuses(k, store) is None
    assert "cannot be stored one by one" in cpu.refuses(k, store_of(layout_of(spec("int8", PerChannel()), RAW, 64, 32)))
