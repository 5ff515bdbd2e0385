"""store by the CUDA kernel of plain and raw pages leaves what the reference leaves: thread by thread on a CPU
(tests/ops/emulated) everywhere, and on an NVIDIA GPU where there is one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import platform
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from messages import mentions, raises
from nightly import at_night
from ops import test_store as cases
from ops.cpu_cases import static_of
from ops.emulated_build import build, put_sources
from ops.test_cuda_close import spec
from ops.test_store import RUNS, raw_pages, raw_tokens, slots_of

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError
from kvbits.ops import store as op
from kvbits.ops.cuda import close as close_cuda
from kvbits.ops.cuda import store as cuda
from kvbits.ops.cuda.engine.runtime.compile import Source
from kvbits.ops.cuda.families.plain import store as plain
from kvbits.ops.cuda.families.raw import store as raw
from kvbits.ops.reference import store as reference
from kvbits.ops.reference.dequantize import section
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.quant.rotary import turn_by
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, PerChannel, PerGroup, PerToken, QuantSpec, Rotary

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
needs_compiler = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64"
)
RAW = QuantSpec.raw()


def emulated_store(folder: Path, source: Source, kernel: str) -> SimpleNamespace:
    """Return what `driver.load` returns, for a CPU."""
    memory = "extern __shared__ __align__(16) unsigned char memory[];"
    text = (source.folder / source.name).read_text()
    instead = {'extern "C" __global__': ""} | ({memory: "unsigned char* memory = ::shared;"} if memory in text else {})
    put_sources(folder, source.folder / source.name, instead)
    macros = {"SHARED_BYTES": 1024} | dict(source.macros) | {"KERNEL": kernel, "NUM_THREADS": "THREADS"}
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros.items()))
    made = build(folder, ["-mf16c", "-ffp-contract=off", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"])
    return SimpleNamespace(launch=lambda grid, threads, args, stream: made.launch(ctypes.byref(args), grid))


@pytest.fixture(
    params=[pytest.param("cpu", id="emulated", marks=needs_compiler), pytest.param("cuda", id="gpu", marks=needs_gpu)]
)
def device(request, monkeypatch):
    """Return the device of the tensors that `cuda.store` takes."""
    if request.param == "cpu":
        folder = request.getfixturevalue("tmp_path")

        @functools.cache
        def load(layout, dtype, tokens, index):
            source = plain.source(layout, dtype, tokens)
            return emulated_store(folder, source, "store_tokens"), int(source.macros["THREADS"])

        monkeypatch.setattr(plain, "load", load)
        monkeypatch.setattr(
            raw, "load", functools.cache(lambda index: emulated_store(folder, raw.source(), "store_raw"))
        )
        monkeypatch.setattr(plain, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    return request.param


def on(device: str, pages: PageStore) -> PageStore:
    """The same pages on a device, as far apart as they were."""

    def moved(slab: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(slab.shape, slab.stride(), dtype=slab.dtype, device=device).copy_(slab)

    static = {name: x.to(device) for name, x in pages.static.items()}
    turn = None if pages.turn is None else pages.turn.to(device)
    return PageStore(pages.layout, tuple(moved(s) for s in pages.slabs), static, turn)


def same_bytes(ours: PageStore, theirs: PageStore) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours.slabs, theirs.slabs, strict=True))


def both_ways(k, v, pages: PageStore, wanted: PageStore, slots, previous=None) -> list[int]:
    """Store by the kernel, and by the reference on the CPU: equal bytes wherever anything was defined.

    Returns the status.
    """
    device, layout = pages.device, pages.layout
    status, want = (torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=x.device) for x in (pages, wanted))
    there = None if previous is None else previous.to(device)
    reference.store(k.cpu(), v.cpu(), wanted, slots, previous=previous, status=want)
    cuda.store(k, v, pages, slots.to(device), previous=there, status=status)
    for got, expected in zip((s.cpu() for s in pages.slabs), wanted.slabs, strict=True):
        for name, s in layout.sections.items():
            part = slice(s.offset, s.offset + s.nbytes)
            assert torch.equal(got[..., part], expected[..., part]), name
        assert torch.equal(got, expected), "padding"
    assert status.tolist() == want.tolist()
    return status.tolist()


# -- raw pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "head_dim, values", [(8, 8), (20, 20), (33, 33), (64, 64), (128, 128), (192, 128), (20, 64), (64, 33)]
)
def test_raw_tokens_land_in_their_slots_and_nowhere_else(dtype, head_dim, values, page_size, device):
    pages, _ = raw_pages(head_dim=head_dim, page_size=page_size, dtype=dtype, values=values)
    k, v = raw_tokens(pages, dtype)
    k[1, 5, 0, 0], v[2, 0, 1, 3] = torch.nan, torch.inf  # which raw pages take as they are
    gen, slots, there = np.random.default_rng(page_size), torch.full((120,), -1), on(device, pages)
    chosen = gen.permutation(5 * page_size)[:100]
    slots[gen.permutation(120)[: len(chosen)]] = torch.from_numpy(chosen)
    slots[7], slots[119] = 5 * page_size, 2**62
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=device)
    reference.store(k, v, pages, slots)
    cuda.store(k.to(device), v.to(device), there, slots.to(device), status=status)
    assert same_bytes(there, pages) and status.tolist() == [0, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize(
    "head_dim, dtype, start, unit",
    [
        (64, torch.bfloat16, 0, 16),
        (64, torch.bfloat16, 2, 4),
        (64, torch.bfloat16, 1, 2),
        (20, torch.bfloat16, 0, 4),
        (20, torch.float32, 0, 16),
        (33, torch.float32, 0, 4),
        (33, torch.float16, 0, 2),
    ],
)
def test_raw_rows_move_in_the_widest_accesses_that_they_are_aligned_to(head_dim, dtype, start, unit):
    x = torch.zeros(6 * head_dim + start, dtype=dtype)[start:].view(3, 2, head_dim)
    rows = raw.rows(x, 0, 4096)
    assert rows.unit == unit
    assert (
        not any(n % unit for n in (rows.x, rows.row_bytes, *rows.stride)) and rows.stride[1] == x.stride(0) * x.itemsize
    )


def test_pages_that_are_not_aligned_are_refused(device):
    pages, _ = raw_pages()
    k, v = (x.to(device) for x in raw_tokens(pages, torch.bfloat16))
    slab = torch.zeros(5 * 3 * pages.layout.head_bytes + 8, dtype=torch.uint8, device=device)
    for moved in (
        slab[8:].view(5, 3, -1),
        slab[: 4 * 3 * pages.layout.head_bytes + 8].as_strided(
            (4, 3, pages.layout.head_bytes), (3 * pages.layout.head_bytes + 2, pages.layout.head_bytes, 1)
        ),
    ):
        with raises(DataError, "multiples of 16"):
            cuda.store(k, v, PageStore(pages.layout, (moved,)), torch.full((120,), 3, device=device))
    assert not slab.any()


def test_a_projections_output_is_read_where_it_lies(device):
    """Heads before tokens as after a rotary embedding, keys and values inside one projection, starts and strides that
    16 bytes do not divide, a last dim that is not dense.
    """
    pages, _ = raw_pages()
    k, v = raw_tokens(pages, torch.bfloat16)
    slots = slots_of(RUNS, 3, 40, 32)
    empty = on(device, pages)
    reference.store(k, v, pages, slots)
    k, v, slots = (x.to(device) for x in (k, v, slots))
    fused = torch.cat([k, v], dim=-1)
    odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (k, v)]
    even = [torch.nn.functional.pad(x, (2, 0))[..., 2:] for x in (k, v)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for other in (
        fused.split(40, dim=-1),
        transposed,
        odd,
        even,
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)],
        [x.flatten(0, 1) for x in (k, v)],
    ):
        there = on(device, empty)
        cuda.store(*other, there, slots)
        assert same_bytes(there, pages)


def test_one_upload_serves_all_layers_of_a_pool_and_another_pool_gets_its_own(device):
    layout = PageLayout(key=RAW, value=RAW, page_size=32, num_kv_heads=2, head_dim=64)
    slabs = [torch.zeros(n, 3, 2, layout.head_bytes, dtype=torch.uint8, device=device) for n in (2, 5)]
    single = torch.zeros(7, 2, layout.head_bytes, dtype=torch.uint8, device=device)
    slots, offsets = torch.tensor([6 * 32 + 3, 32 + 31], device=device), []
    for layer in range(3):
        k, v = (torch.randn(2, 1, 2, 64, device=device).bfloat16() for _ in "kv")
        pages = PageStore(layout, tuple(s[:, layer] for s in slabs))
        cuda.store(k, v, pages, slots)
        offsets.append(pages.offsets)
        for name, x in (("k_raw", k), ("v_raw", v)):
            for row, page, place in ((0, 6, 3), (1, 1, 31)):
                assert torch.equal(section(pages.page(page), layout, name)[:, place], x[row, 0])
    assert offsets[0] is offsets[1] is offsets[2]
    cuda.store(k, v, one := PageStore(layout, (single,)), slots)
    assert torch.equal(section(single[6], layout, "k_raw")[:, 3], k[0, 0]) and one.offsets is None
    assert sum(int((s != 0).any(-1).sum()) for s in (*slabs, single)) == 4 * 2 * 2, "nothing but those rows"


def test_nothing_to_write(device):
    pages, _ = raw_pages()
    k, v = (x.to(device) for x in raw_tokens(pages, torch.bfloat16))
    there = on(device, pages)
    cuda.store(k, v, there, torch.full((120,), -1, device=device))
    cuda.store(k[:, :0], v[:, :0], there, torch.zeros(0, dtype=torch.int64, device=device))
    assert all(bool((s == 0xFF).all()) for s in there.slabs)


@needs_gpu
def test_many_tokens_of_a_long_prompt():
    layout = PageLayout(key=RAW, value=RAW, page_size=64, num_kv_heads=8, head_dim=128)
    k, v = (torch.randn(2, 300 * 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    slab = torch.zeros(600, 8, layout.head_bytes, dtype=torch.uint8, device="cuda")
    order = torch.from_numpy(np.random.default_rng(0).permutation(600)).cuda()
    cuda.store(k, v, PageStore(layout, (slab,)), (order[:, None] * 64 + torch.arange(64, device="cuda")).flatten())
    for name, x in (("k_raw", k), ("v_raw", v)):
        got = section(slab[order], layout, name)  # [600, H, 64, D]
        assert torch.equal(got, x.reshape(600, 64, 8, 128).transpose(1, 2))


@needs_gpu
def test_it_does_not_wait():
    pages, _ = raw_pages(head_dim=128)
    k, v = (x.cuda() for x in raw_tokens(pages, torch.bfloat16))
    there, slots = on("cuda", pages), slots_of(RUNS, 3, 40, 32).cuda()
    cuda.store(k, v, there, slots)  # compiles and loads
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # "a prototype feature": raised here it would leave the mode on for all tests after
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda.store(k, v, there, slots)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("scheme", ["raw", "int8", "kivi4", "tiered_8k"])
def test_a_cache_holds_the_bytes_that_a_cache_of_the_reference_holds(scheme):
    """Ragged prompts, a chunk, single tokens past several closings, a fork and its copy on write, a slab added on the
    way.
    """
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 2 + (
        LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=100),
    )
    made = schemes.get(scheme, num_sink_tokens=4)
    caches = [
        PagedCache(CacheSpec(scheme=made, layers=layers), device="cuda", backend=backend)
        for backend in ("auto", "reference")
    ]
    gen = torch.Generator("cuda").manual_seed(0)
    valid = torch.arange(150)[None] >= torch.tensor([0, 70, 149])[:, None]
    for step, tokens in enumerate((150, 40, *[1] * 150)):
        for layer in range(3):
            k, v = (torch.randn(3, tokens, 2, 64, device="cuda", dtype=torch.bfloat16, generator=gen) for _ in "kv")
            for cache in caches:
                cache.append(layer, k, v, valid=valid if not step else None)
        if step == 60:
            for cache in caches:
                cache.select([0, 0, 2])
    served, slow = ({c.split(" (")[0] for c in cache.explain()["ops"]} for cache in caches)
    assert "store by cuda" in served and "store by reference" in slow, (served, slow)
    for a, b in zip(*(c.groups for c in caches), strict=True):
        for name in a.pools:
            for ids in (s.pages().get(name, []) for s in a.sequences):
                for i in ids:
                    # what no token has been written to is not defined
                    if name != "closed":
                        continue
                    assert torch.equal(a.pools[name].block(i), b.pools[name].block(i)), (name, i)
    for layer in range(3):
        for row in range(3):
            for x, y in zip(*(c.dequantize(layer, row) for c in caches), strict=True):
                torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0.05 if made.tiers else 0)


# -- packed pages -----------------------------------------------------------------------------------------------------


def packed_cases():
    if os.environ.get("KVBITS_TEST_ALL_KERNELS") or torch.cuda.is_available():
        return [*cases.cases(), *cases.centered_cases(), *cases.wide_cases()]
    return [
        (spec("int8"), spec("int8", PerToken(), symmetric=False), 64, 64, torch.bfloat16),
        (
            spec("int4", PerGroup(32), symmetric=False, scale_dtype="bfloat16"),
            spec("int4", PerGroup(32), scale_dtype="float32"),
            128,
            32,
            torch.float32,
        ),
        (spec("int3", PerToken()), spec("int2", PerToken(), symmetric=False), 72, 96, torch.float16),
        (spec("fp8_e4m3", PerToken()), spec("fp8_e5m2", PerGroup(40)), 80, 32, torch.bfloat16),
        (spec("int8", static=True, symmetric=False), spec("int4", PerChannel(), static=True), 64, 64, torch.bfloat16),
        (RAW, spec("int4"), 64, 64, torch.float32),
        (RAW, RAW, 40, 32, torch.bfloat16),
        *cases.centered_cases(),
        *cases.wide_cases(),
    ]


def packed(key, value, head_dim, page_size, device, turn=None, values=None) -> tuple[PageStore, PageStore]:
    """Twelve pages in three slabs with room between them, all 0xFF, with calibrated parameters: on a device, and on the
    CPU.
    """
    layout = dataclasses.replace(cases.layout_of(key, value, head_dim, page_size), value_head_dim=values or head_dim)
    buffer = torch.full((12, cases.HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8)
    pages = PageStore(layout, tuple(x[:, : cases.HEADS] for x in buffer.split([5, 3, 4])), static_of(layout), turn)
    return on(device, pages), pages


@pytest.mark.parametrize("many", [True, *at_night(False)], ids=["many", "few"])
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", packed_cases(), ids=str)
def test_packed_tokens_are_what_the_reference_stores(key, value, head_dim, page_size, dtype, many, device, monkeypatch):
    """Whole pages and parts of pages of several sequences, then single tokens, then chunks over borders; with skipped
    entries and such that lead out.
    """
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9) and (key.format + value.format).count("fp8"):
        pytest.skip("cannot round to fp8")
    monkeypatch.setattr(plain, "multiprocessors", lambda device: 0 if many else 1 << 20)
    turn = turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), head_dim, page_size)
    stores = packed(key, value, head_dim, page_size, device)
    turned = [dataclasses.replace(x, turn=turn.to(x.device)) for x in stores]  # of the same memory
    held = [[3, 7, 1, 9], [0, 5, 11], [8, 2, 4, 10]]
    lengths, gen = [0, 0, 0], np.random.default_rng(head_dim)
    for step, counts in enumerate(
        (
            (page_size + 9, 2 * page_size, 5),
            (1, 1, 1),
            (page_size - 10, 1, page_size),
            (1, 3, page_size - 5),
            (1, 0, 1),
            (20, 0, 3),
        )
    ):
        slots, previous = [], []
        for row, n in enumerate(counts):
            slots += [-1] * int(gen.integers(0, 3))  # padding in front of a row
            for position in range(lengths[row], lengths[row] + n):
                if gen.random() < 0.05:
                    # entries that are not stored may lie between
                    slots.append([-1, 12 * page_size + 3, 2**50][gen.integers(0, 3)])
                slots.append(held[row][position // page_size] * page_size + position % page_size)
            lengths[row] += n
        places = {
            page * page_size: held[row][i - 1] if i else -1 for row in range(3) for i, page in enumerate(held[row])
        }
        previous = [places.get(slot, 99) for slot in slots]
        k, v = (x[0].to(device) for x in cases.tokens_of(len(slots), head_dim, dtype))
        both_ways(k, v, *((turned, stores)[step % 2]), torch.tensor(slots), torch.tensor(previous))


@pytest.mark.parametrize("partner", [24.0, -1.0, 3e9, -3e9, float("nan")])
def test_a_partner_that_is_no_channel_reads_no_memory_of_others(partner, device, monkeypatch):
    """The kernel takes a channel of the same head: the page's mean stays one of numbers that were given."""
    monkeypatch.setattr(op, "_check_turn", lambda *_: None)  # on a GPU nobody looks at the numbers
    layout = cases.layout_of(spec("int8", PerToken(), center="channel"), spec("int8", PerToken()), 24, 32)
    turn = torch.zeros(3, 24, device=device)
    turn[1], turn[2] = 1.0, partner
    pages = PageStore(
        layout, (torch.zeros(2, cases.HEADS, layout.head_bytes, dtype=torch.uint8, device=device),), turn=turn
    )
    k = torch.full((33, cases.HEADS, 24), 3.0, dtype=torch.bfloat16, device=device)
    slots, previous = torch.arange(33, device=device), torch.full((33,), -1, device=device)
    previous[32] = 0
    cuda.store(k, k, pages, slots, previous=previous)
    assert bool((section(pages.page(1), layout, "k_mean") == 3.0).all())


@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (128, 64), (64, 80), (512, 128), (64, 320)])
def test_packed_tokens_of_unlike_widths(head_dim, value_head_dim, device):
    """Pages that open with the mean of the one before, decoded, and turned on; keys in groups, values with a bias."""
    key, value = spec("int8", PerGroup(32), center="channel"), spec("int4", PerGroup(16), symmetric=False)
    turn = turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), head_dim, 64)
    stores = packed(key, value, head_dim, 64, device, turn, value_head_dim)
    for first, count in ((0, 70), (70, 1), (71, 60)):
        slots = torch.tensor([(3, 7, 1)[p // 64] * 64 + p % 64 for p in range(first, first + count)])
        previous = torch.tensor([{7 * 64: 3, 64: 7}.get(s, -1) for s in slots.tolist()])
        k = cases.tokens_of(count, head_dim, torch.bfloat16)[0][0].to(device)
        v = cases.tokens_of(count, value_head_dim, torch.bfloat16)[1][0].to(device)
        both_ways(k, v, *stores, slots, previous)


def test_packed_tokens_in_any_order_and_written_over(device):
    stores = packed(spec("int4", PerGroup(32), symmetric=False), spec("int8"), 64, 32, device)
    for seed in range(3):
        slots = torch.from_numpy(np.random.default_rng(seed).permutation(12 * 32)[:150])
        k, v = (
            x.to(device).transpose(0, 1).contiguous().transpose(0, 1)
            for x in (torch.randn(150, cases.HEADS, 64).bfloat16() for _ in "kv")
        )
        assert both_ways(k, v, *stores, slots) == [0] * 7
    # rows and tokens inside one projection, rows at no multiple of 16 bytes, dense tokens that begin at none
    k, v = (torch.randn(2, 5, cases.HEADS, 3 * 64, device=device).bfloat16() for _ in "kv")
    dense = (x.flatten()[1 : 1 + 10 * cases.HEADS * 64].view(2, 5, cases.HEADS, 64) for x in (k, v))
    slots = torch.tensor([0, 1, 2, -1, 4, 32, 33, 34, 35, 11 * 32])
    for given in (*((k[..., part], v[..., part]) for part in (slice(64, 128), slice(65, 129))), tuple(dense)):
        both_ways(*given, *stores, slots)


def test_packed_bad_numbers_are_noted(device):
    pages, _ = packed(spec("int8"), spec("int8", scale_dtype="bfloat16"), 64, 32, device)
    k, v = (torch.randn(4, cases.HEADS, 64, device=device) for _ in "kv")
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=device)
    slots = torch.tensor([3, -1, 40, 9], device=device)
    k[1, 0, 0] = float("nan")  # not stored
    cuda.store(k, v, pages, slots, status=status)
    assert status.tolist()[2:] == [0, 0, 0, 0, 0]
    v[2, 1, 5], k[3] = float("inf"), 1e8
    cuda.store(k, v, pages, slots, status=status)
    assert status.tolist()[2:] == [1, 1, 0, 1, 0]
    cuda.store(k, v, pages, slots)  # nobody asks


def test_packed_arguments_that_do_not_fit_are_refused(device):
    layout = cases.layout_of(spec("int8", center="channel"), spec("int8", static=True), 64, 32)
    slab = torch.full((4, cases.HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device)
    k, slots = torch.randn(4, cases.HEADS, 64, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    static = {"v_scale": torch.ones(cases.HEADS, 1, device=device)}
    for of_pages, given, parts in (
        ({"static": {}}, {"previous": slots}, ("v_scale", "static=False")),
        ({}, {}, ("previous",)),
        ({}, {"previous": slots[:3]}, ("previous", "torch.int64", "[4]", "[3]")),
        ({"turn": torch.zeros(3, 32, device=device)}, {"previous": slots}, ("turn", "float32", "[3, 64]", "[3, 32]")),
        ({}, {"previous": slots, "status": torch.zeros(6, device=device)}, ("status", "torch.int32", "[7]", "[6]")),
    ):
        pages = PageStore(layout, (slab,), **({"static": static} | of_pages))
        with raises(DataError, *parts):
            cuda.store(k, k, pages, slots, **given)
    pages = PageStore(
        cases.layout_of(RAW, RAW, 64, 32), (torch.zeros(2, cases.HEADS, 8192, dtype=torch.uint8, device=device),)
    )
    with raises(DataError, "torch.float32", "bfloat16"):
        cuda.store(k, k, pages, slots)
    whole = cases.layout_of(spec("int8", PerChannel()), RAW, 64, 32)
    pages = PageStore(whole, (torch.zeros(2, cases.HEADS, whole.head_bytes, dtype=torch.uint8, device=device),))
    with raises(DataError, "PerChannel()"):
        cuda.store(k, k, pages, slots)
    assert bool((slab == 0xFF).all())


def test_refusals_name_the_reason():
    def why(key, value=RAW, head_dim=64, capability=(9, 0)):
        return cuda.refuses_layout(cases.layout_of(key, value, head_dim, 32), capability)

    assert why(spec("int8"), spec("int4")) is None
    assert "head_dim=520" in why(spec("int8", PerToken()), head_dim=520)
    assert mentions(why(spec("int8", PerToken()), head_dim=384), "384 channels", "power of two", 256)
    assert why(spec("int8", PerToken()), head_dim=512) is why(spec("int8", PerGroup(64)), head_dim=384) is None
    assert mentions(why(spec("int8", PerGroup(4))), "key", "4 channels")
    assert why(spec("int8", PerGroup(4), static=True)) is None
    assert "fp8" in why(spec("fp8_e4m3"), capability=(8, 0))
    assert "PerChannel()" in why(spec("int8", PerChannel()))
    assert "head_dim=20" in why(RAW, spec("int8", PerToken()), head_dim=20)
    assert "page_size=4" in cuda.refuses_layout(cases.layout_of(spec("int8"), RAW, 64, 4))
    pages = cases.layout_of(RAW, RAW, 33, 1)
    assert cuda.refuses_layout(pages) is None
    assert cuda.refuses(pages, torch.bfloat16, torch.device("cpu"))
    if torch.cuda.is_available():
        assert cuda.refuses(pages, torch.bfloat16, torch.device("cuda")) is None
        assert "float64" in cuda.refuses(pages, torch.float64, torch.device("cuda"))


@needs_gpu
@pytest.mark.parametrize("scheme", ["raw", "int8", "int8_centered"])
def test_tokens_go_where_a_replayed_graph_is_told(scheme):
    key = {"raw": RAW, "int8": spec("int8"), "int8_centered": spec("int8", center="channel")}[scheme]
    pages, want = packed(key, RAW if key.is_raw else spec("int4"), 128, 64, "cuda")
    k, v = (torch.randn(8, cases.HEADS, 128, device="cuda").bfloat16() for _ in "kv")
    slots, previous = (torch.full((8,), -1, device="cuda") for _ in range(2))
    cuda.prepare(pages.layout, k.dtype, k.device)
    assert pages.offsets is not None  # uploaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.store(k, v, pages, slots, previous=previous)
    assert all(bool((s == 0xFF).all()) for s in pages.slabs)
    for first in (0, 60, 62):
        k.copy_(torch.randn_like(k)), v.copy_(torch.randn_like(v))
        slots.copy_(torch.tensor([*range(3 * 64 + first, 3 * 64 + first + 3), -1, 5 * 64, 13 * 64, 7 * 64 + first, -1]))
        reference.store(k.cpu(), v.cpu(), want, slots.cpu(), previous=previous.cpu())
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(pages, want)


@needs_gpu
def test_packed_tokens_of_a_long_prompt_are_what_closing_leaves():
    layout = PageLayout(
        key=spec("int8", center="channel"), value=spec("int8"), page_size=64, num_kv_heads=8, head_dim=128
    )
    k, v = (torch.randn(16384, 8, 128, device="cuda").bfloat16() for _ in "kv")
    order = torch.from_numpy(np.random.default_rng(0).permutation(256)).cuda()
    slots = (order[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
    previous = torch.cat([order.new_tensor([-1]), order[:-1]]).repeat_interleave(64)
    stored, closed = (torch.zeros(256, 8, layout.head_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    cuda.store(k, v, PageStore(layout, (stored,)), slots, previous=previous)
    sides = (x.unflatten(0, (256, 64)).transpose(1, 2).contiguous() for x in (k, v))
    close_cuda.close(*sides, PageStore(layout, (closed,)), order.cpu().numpy())
    assert torch.equal(stored, closed)
