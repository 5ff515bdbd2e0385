"""append by the CUDA kernel leaves what the reference leaves: thread by thread on a CPU (tests/ops/emulated)
everywhere, and on an NVIDIA GPU where there is one.
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
from kvbits.ops.cuda.append import tokens as cuda
from ops import test_token_local as token_local
from ops.cpu_cases import static_of
from ops.emulated_build import build, put_sources
from ops.test_append import RUNS, store_of, tokens_of
from ops.test_cuda_close import spec

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError
from kvbits.ops.cuda.engine import close as close_cuda
from kvbits.ops.reference import append as reference
from kvbits.ops.reference.dequantize import section
from kvbits.ops.types import PageStore, SlotMapping
from kvbits.quant.rotary import turn_by
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, PerChannel, PerGroup, PerToken, QuantSpec, Rotary

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
needs_compiler = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64"
)
FOLDER = Path(cuda.__file__).parent
RAW = QuantSpec.raw()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels for a CPU (for keys and values of one width, and of two), at 16-byte loads and stores that fault
    where an address is no multiple.
    """

    def made(unlike_widths: bool):
        folder = tmp_path_factory.mktemp("append")
        put_sources(folder, FOLDER / "append.cu", {'extern "C" __global__': ""})
        macros = dict(cuda.raw_source(unlike_widths).macros) | {
            "KERNEL": "append_tokens",
            "NUM_THREADS": "THREADS",
            "SHARED_BYTES": 1024,
        }
        (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros.items()))
        return build(folder, ["-mf16c", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"])

    return functools.cache(made)


def emulated_store(folder: Path, layout: PageLayout, dtype: torch.dtype, tokens: int) -> tuple[SimpleNamespace, int]:
    """What `cuda._load_store` gives, for a CPU."""
    macros = cuda.defines(layout, dtype, tokens)
    instead = {
        'extern "C" __global__': "",
        "extern __shared__ __align__(16) unsigned char memory[];": "unsigned char* memory = ::shared;",
    }
    put_sources(folder, FOLDER / "store_tokens.cu", instead)
    (folder / "defines.h").write_text(
        "".join(
            f"#define {k} {v}\n" for k, v in (macros | {"KERNEL": "store_tokens", "NUM_THREADS": "THREADS"}).items()
        )
    )
    made = build(folder, ["-mf16c", "-ffp-contract=off", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"])
    return SimpleNamespace(launch=lambda grid, threads, args, stream: made.launch(ctypes.byref(args), grid)), int(
        macros["THREADS"]
    )


@pytest.fixture(
    params=[pytest.param("cpu", id="emulated", marks=needs_compiler), pytest.param("cuda", id="gpu", marks=needs_gpu)]
)
def device(request, monkeypatch):
    """Where tensors lie that `cuda.append` is given."""
    if request.param == "cpu":
        made = request.getfixturevalue("library")
        monkeypatch.setattr(
            cuda,
            "_load",
            lambda index, unlike: SimpleNamespace(
                launch=lambda grid, threads, args, stream: made(unlike).launch(ctypes.byref(args), grid)
            ),
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
        folder, loaded = request.getfixturevalue("tmp_path"), {}

        def load_store(layout, dtype, tokens, index):
            if (layout, dtype, tokens) not in loaded:
                loaded[layout, dtype, tokens] = emulated_store(folder, layout, dtype, tokens)
            return loaded[layout, dtype, tokens]

        monkeypatch.setattr(cuda, "_load_store", load_store)
        monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 132)
    return request.param


def on(device: str, store: PageStore, buffer: torch.Tensor) -> tuple[PageStore, torch.Tensor]:
    """The store of `test_append.store_of` with its buffer on a device."""
    buffer = buffer.to(device)
    return (
        PageStore(store.layout, (buffer[:2, : store.layout.num_kv_heads], buffer[2:, : store.layout.num_kv_heads])),
        buffer,
    )


def expected(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, buffer: torch.Tensor, runs: list[list[int]]
) -> torch.Tensor:
    """The buffer after the reference, on the CPU."""
    here, want = on("cpu", store, buffer.cpu().clone())
    reference.append(k.cpu(), v.cpu(), here, SlotMapping(np.array(runs)))
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "head_dim, values", [(8, 8), (20, 20), (33, 33), (40, 40), (80, 80), (128, 128), (192, 128), (128, 64)]
)
def test_tokens_land_in_their_slots_and_nowhere_else(dtype, head_dim, values, device):
    store, buffer = on(device, *store_of(head_dim=head_dim, dtype=dtype, values=values))
    k, v = (x.to(device) for x in tokens_of(store, dtype))
    want = expected(k, v, store, buffer, RUNS)
    cuda.append(k, v, store, SlotMapping(np.array(RUNS)))
    assert torch.equal(buffer.cpu(), want)


def test_a_projections_output_is_read_where_it_lies(device):
    """Heads before tokens as after a rotary embedding, keys and values inside one projection, starts and strides that
    16 bytes do not divide, a last dim that is not dense.
    """
    store, buffer = on(device, *store_of())
    k, v = (x.to(device) for x in tokens_of(store, torch.bfloat16))
    want = expected(k, v, store, buffer, RUNS)
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
    ):
        buffer.fill_(0xFF)
        cuda.append(*other, store, SlotMapping(np.array(RUNS)))
        assert torch.equal(buffer.cpu(), want)


def test_one_upload_serves_all_layers_of_a_pool_and_another_pool_gets_its_own(device):
    layout = PageLayout(key=RAW, value=RAW, page_size=32, num_kv_heads=2, head_dim=64)
    slabs = [torch.zeros(n, 3, 2, layout.head_bytes, dtype=torch.uint8, device=device) for n in (2, 5)]
    single = torch.zeros(7, 2, layout.head_bytes, dtype=torch.uint8, device=device)
    mapping = SlotMapping(np.array([[0, 0, 6, 3, 1], [1, 0, 1, 31, 1]]))
    tables = []
    for layer in range(3):
        k, v = (torch.randn(2, 1, 2, 64, device=device).bfloat16() for _ in "kv")
        store = PageStore(layout, tuple(s[:, layer] for s in slabs))
        cuda.append(k, v, store, mapping)
        tables.append(cuda.table(mapping, store))
        for name, x in (("k_raw", k), ("v_raw", v)):
            for row, page, slot in ((0, 6, 3), (1, 1, 31)):
                assert torch.equal(section(store.page(page), layout, name)[:, slot], x[row, 0])
    assert tables[0] is tables[1] is tables[2] and len(mapping.tables) == 1
    cuda.append(k, v, PageStore(layout, (single,)), mapping)
    assert torch.equal(section(single[6], layout, "k_raw")[:, 3], k[0, 0]) and len(mapping.tables) == 2
    assert sum(int((s != 0).any(-1).sum()) for s in (*slabs, single)) == 4 * 2 * 2, "nothing but those rows"


def test_nothing_to_write(device):
    store, buffer = on(device, *store_of())
    k, v = (x.to(device) for x in tokens_of(store, torch.bfloat16))
    cuda.append(k, v, store, SlotMapping(np.zeros((0, 5), np.int64)))
    cuda.append(k[:, :0], v[:, :0], store, SlotMapping(np.zeros((0, 5), np.int64)))
    assert bool((buffer == 0xFF).all())


def test_what_leads_out_of_tensors_or_pages_is_refused(device):
    store, buffer = on(device, *store_of())
    k, v = (x.to(device) for x in tokens_of(store, torch.bfloat16))
    for run in ([3, 0, 0, 0, 1], [0, 39, 0, 0, 2], [0, 0, 5, 0, 1], [0, 0, 0, 30, 3]):
        with pytest.raises(DataError, match="runs reach"):
            cuda.append(k, v, store, SlotMapping(np.array([run])))
    with pytest.raises(DataError, match=r"k is torch.float32; append writes raw pages of the same dtype"):
        cuda.append(k.float(), v.float(), store, SlotMapping(np.array(RUNS)))
    assert bool((buffer == 0xFF).all())


def test_refusals_name_the_reason():
    store, _ = store_of()
    k, _ = tokens_of(store, torch.bfloat16)
    assert cuda.refuses(k, store) == "keys are on cpu, pages on cpu, not on a GPU"
    if torch.cuda.is_available():
        store, _ = on("cuda", *store_of())
        assert cuda.refuses(k.cuda(), store) is None
        assert "float64" in cuda.refuses(k.cuda().double(), store)
        assert "pages on cuda" in cuda.refuses(k, store)


@needs_gpu
def test_many_tokens_of_a_long_prompt():
    layout = PageLayout(key=RAW, value=RAW, page_size=64, num_kv_heads=8, head_dim=128)
    k, v = (torch.randn(2, 300 * 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    slab = torch.zeros(600, 8, layout.head_bytes, dtype=torch.uint8, device="cuda")
    pages = np.random.default_rng(0).permutation(600)
    cuda.append(
        k,
        v,
        PageStore(layout, (slab,)),
        SlotMapping(np.array([[i // 300, i % 300 * 64, p, 0, 64] for i, p in enumerate(pages)])),
    )
    for name, x in (("k_raw", k), ("v_raw", v)):
        got = section(slab[torch.from_numpy(pages).cuda()], layout, name)  # [600, H, 64, D]
        assert torch.equal(got, x.reshape(600, 64, 8, 128).transpose(1, 2))


@needs_gpu
def test_it_does_not_wait_and_a_graph_writes_where_its_table_says():
    store, buffer = on("cuda", *store_of(head_dim=128))
    k, v = (x.cuda() for x in tokens_of(store, torch.bfloat16))
    cuda.append(k, v, store, SlotMapping(np.array(RUNS)))  # compiles and loads
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # "a prototype feature": raised here it would leave the mode on for all tests after
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda.append(k, v, store, SlotMapping(np.array(RUNS)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    first, second = RUNS[:2], [[1, 4, 0, 9, 1], [2, 39, 3, 0, 1]]
    runs = cuda.table(SlotMapping(np.array(first)), store).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.launch(k, v, store, runs)
    for wanted in (first, second):
        buffer.fill_(0xFF)
        k.copy_(torch.randn_like(k))
        runs.copy_(cuda.table(SlotMapping(np.array(wanted)), store))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffer.cpu(), expected(k, v, store, torch.full_like(buffer, 0xFF), wanted))


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
    assert "append by cuda" in served and "append by reference" in slow, (served, slow)
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
        return [*token_local.cases(), *token_local.centered_cases(), *token_local.wide_cases()]
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
        *token_local.centered_cases(),
        *token_local.wide_cases(),
    ]


def packed(key, value, head_dim, page_size, device, num_pages=12) -> tuple[PageLayout, torch.Tensor, dict]:
    """A layout, pages of it with room between them, all 0xFF, and calibrated parameters."""
    layout = token_local.layout_of(key, value, head_dim, page_size)
    buffer = torch.full((num_pages, token_local.HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device)
    return layout, buffer, {name: x.to(device) for name, x in static_of(layout).items()}


def both_ways(k, v, buffer, layout, slots, previous=None, turn=None, static=None) -> list[int]:
    """store_tokens, and the same by the reference on the CPU: equal bytes wherever anything was defined.

    Returns the status.
    """
    want, status = buffer.cpu().clone(), torch.zeros(cuda.STATUS_FIELDS, dtype=torch.int32, device=buffer.device)
    here = {name: x.cpu() for name, x in (static or {}).items()}
    there = None if previous is None else previous.to(buffer.device)
    turned = None if turn is None else turn.to(buffer.device)
    heads, wanted = slice(None, token_local.HEADS), torch.zeros(cuda.STATUS_FIELDS, dtype=torch.int32)
    reference.store_tokens(
        k.cpu(), v.cpu(), want[:, heads], layout, slots, static=here, previous_page=previous, turn=turn, status=wanted
    )
    cuda.store_tokens(
        k,
        v,
        buffer[:, heads],
        layout,
        slots.to(buffer.device),
        static=static,
        previous_page=there,
        turn=turned,
        status=status,
    )
    got = buffer.cpu()
    for name, s in layout.sections.items():
        part = slice(s.offset, s.offset + s.nbytes)
        assert torch.equal(got[..., part], want[..., part]), name
    assert torch.equal(got, want), "padding"
    assert status.tolist() == wanted.tolist()
    return status.tolist()


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", packed_cases(), ids=str)
def test_packed_tokens_are_what_the_reference_stores(key, value, head_dim, page_size, dtype, many, device, monkeypatch):
    """Whole pages and parts of pages of several sequences, then single tokens, then chunks over borders; with skipped
    entries and such that lead out.
    """
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9) and (key.format + value.format).count("fp8"):
        pytest.skip("cannot round to fp8")
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 0 if many else 1 << 20)
    layout, buffer, static = packed(key, value, head_dim, page_size, device)
    turn = turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), head_dim, page_size)
    held = [[3, 7, 1, 9], [0, 5, 11], [8, 2, 4, 10]]
    lengths, gen = [0, 0, 0], np.random.default_rng(head_dim)
    turns = [turn, None]
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
        k, v = (x[0].to(device) for x in token_local.tokens_of(len(slots), head_dim, dtype))
        both_ways(k, v, buffer, layout, torch.tensor(slots), torch.tensor(previous), turns[step % 2], static)


@pytest.mark.parametrize("partner", [24.0, -1.0, 3e9, -3e9, float("nan")])
def test_a_partner_that_is_no_channel_reads_no_memory_of_others(partner, device, monkeypatch):
    """The kernel takes a channel of the same head: the page's mean stays one of numbers that were given."""
    monkeypatch.setattr(reference, "_check_turn", lambda *_: None)  # on a GPU nobody looks at the numbers
    layout = token_local.layout_of(spec("int8", PerToken(), center="channel"), spec("int8", PerToken()), 24, 32)
    turn = torch.zeros(3, 24)
    turn[1], turn[2] = 1.0, partner
    pages = torch.zeros(2, token_local.HEADS, layout.head_bytes, dtype=torch.uint8, device=device)
    k = torch.full((33, token_local.HEADS, 24), 3.0, dtype=torch.bfloat16, device=device)
    slots, previous = torch.arange(33, device=device), torch.full((33,), -1, device=device)
    previous[32] = 0
    cuda.store_tokens(k, k, pages, layout, slots, previous_page=previous, turn=turn.to(device))
    assert bool((section(pages[1], layout, "k_mean") == 3.0).all())


@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (128, 64), (64, 80), (512, 128), (64, 320)])
def test_packed_tokens_of_unlike_widths(head_dim, value_head_dim, device):
    """Pages that open with the mean of the one before, decoded, and turned on; keys in groups, values with a bias."""
    key, value = spec("int8", PerGroup(32), center="channel"), spec("int4", PerGroup(16), symmetric=False)
    layout = dataclasses.replace(token_local.layout_of(key, value, head_dim, 64), value_head_dim=value_head_dim)
    buffer = torch.full((12, token_local.HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device)
    turn = turn_by(Rotary(inv_freq=tuple(100.0 ** -(i / 12) for i in range(12))), head_dim, 64)
    for first, count in ((0, 70), (70, 1), (71, 60)):
        slots = torch.tensor([(3, 7, 1)[p // 64] * 64 + p % 64 for p in range(first, first + count)])
        previous = torch.tensor([{7 * 64: 3, 64: 7}.get(s, -1) for s in slots.tolist()])
        k = token_local.tokens_of(count, head_dim, torch.bfloat16)[0][0].to(device)
        v = token_local.tokens_of(count, value_head_dim, torch.bfloat16)[1][0].to(device)
        both_ways(k, v, buffer, layout, slots, previous, turn)


def test_packed_tokens_in_any_order_and_written_over(device):
    layout, buffer, static = packed(spec("int4", PerGroup(32), symmetric=False), spec("int8"), 64, 32, device)
    for seed in range(3):
        slots = torch.from_numpy(np.random.default_rng(seed).permutation(12 * 32)[:150])
        k, v = (
            x.to(device).transpose(0, 1).contiguous().transpose(0, 1)
            for x in (torch.randn(150, token_local.HEADS, 64).bfloat16() for _ in "kv")
        )
        assert both_ways(k, v, buffer, layout, slots, static=static) == [0] * 7
    # rows and tokens inside one projection
    k, v = (torch.randn(2, 5, token_local.HEADS, 3 * 64, device=device).bfloat16()[..., 64:128] for _ in "kv")
    both_ways(k, v, buffer, layout, torch.tensor([0, 1, 2, -1, 4, 32, 33, 34, 35, 11 * 32]), static=static)


def test_packed_append_writes_the_runs_of_a_mapping(device):
    """Two slabs whose pages lie apart, rows with holes, sequences that share nothing; and one upload serves all layers."""
    layout = token_local.layout_of(spec("int8", center="channel"), spec("int4"), 64, 32)
    runs = np.array(
        [[0, 3, 4, 0, 30], [0, 33, 4, 30, 2], [0, 35, 1, 0, 4], [2, 0, 0, 31, 1], [1, 5, 3, 0, 9], [1, 20, 3, 9, 2]]
    )
    mapping = SlotMapping(runs, np.array([-1, -1, 4, 2, 2, 2]))
    stores = [token_local.store_of(layout) for _ in range(2)]
    for store in stores:
        for slab in store.slabs:
            slab.fill_(0x11)
    k, v = (torch.randn(3, 40, token_local.HEADS, 64).bfloat16() for _ in "kv")
    there = PageStore(layout, tuple(_moved(s, device) for s in stores[1].slabs))
    assert (
        cuda.append(k.to(device), v.to(device), there, mapping)
        == reference.append(k, v, stores[0], mapping)
        == {
            "k": 0,
            "v": 0,
        }
    )
    for a, b in zip(stores[0].slabs, there.slabs, strict=True):
        assert torch.equal(a, b.cpu())
    # rows at no multiple of 16 bytes are copied
    odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:].to(device) for x in (k, v)]
    cuda.append(*odd, there, mapping)
    assert len(mapping.tables) == 1


def _moved(slab: torch.Tensor, device: str) -> torch.Tensor:
    """A slab on a device, its pages as far apart as they were."""
    if device == "cpu":
        return slab
    made = torch.empty_strided(slab.shape, slab.stride(), dtype=slab.dtype, device=device)
    return made.copy_(slab)


def test_packed_bad_numbers_are_noted(device):
    layout, buffer, _ = packed(spec("int8"), spec("int8", scale_dtype="bfloat16"), 64, 32, device)
    k, v = (torch.randn(4, token_local.HEADS, 64, device=device) for _ in "kv")
    status = torch.zeros(cuda.STATUS_FIELDS, dtype=torch.int32, device=device)
    slots = torch.tensor([3, -1, 40, 9], device=device)
    k[1, 0, 0] = float("nan")  # not stored
    cuda.store_tokens(k, v, buffer[:, : token_local.HEADS], layout, slots, status=status)
    assert status.tolist()[2:] == [0, 0, 0, 0, 0]
    v[2, 1, 5], k[3] = float("inf"), 1e8
    cuda.store_tokens(k, v, buffer[:, : token_local.HEADS], layout, slots, status=status)
    assert status.tolist()[2:] == [1, 1, 0, 1, 0]
    store = PageStore(layout, (buffer[:, : token_local.HEADS],))
    mapping = SlotMapping(np.array([[0, 2, 0, 2, 2]]))
    with pytest.raises(DataError, match="values holds inf"):
        cuda.append(v[None].nan_to_num(posinf=0), v[None], store, mapping)
    with pytest.raises(DataError, match="of the keys overflows float16"):
        cuda.append(k[None].nan_to_num(0), k[None].nan_to_num(0), store, mapping)


def test_packed_arguments_that_do_not_fit_are_refused(device):
    layout, buffer, _ = packed(spec("int8", center="channel"), spec("int8", static=True), 64, 32, device)
    pages, slots, static = (
        buffer[:, : token_local.HEADS],
        torch.zeros(4, dtype=torch.int64, device=device),
        {"v_scale": torch.ones(3, 1, device=device)},
    )
    k = torch.randn(4, token_local.HEADS, 64, device=device)
    good = {"static": static, "previous_page": slots}
    for change, message in (
        ({"static": {}}, "no calibrated v_scale"),
        ({"previous_page": None}, "give previous_page"),
        ({"previous_page": slots[:3]}, "one entry for each token"),
        ({"turn": torch.zeros(3, 32, device=device)}, r"turn must be dense float32 \[3, 64\]"),
        ({"status": torch.zeros(6, device=device)}, r"status must be int32 \[7\]"),
    ):
        with pytest.raises(DataError, match=message):
            cuda.store_tokens(k, k, pages, layout, slots, **(good | change))
    with pytest.raises(DataError, match="multiples of 16 bytes"):
        cuda.store_tokens(torch.nn.functional.pad(k, (1, 0))[..., 1:], k, pages, layout, slots, **good)
    with pytest.raises(DataError, match=r"pages must be uint8"):
        cuda.store_tokens(k, k, pages[..., 64:], layout, slots, **good)
    with pytest.raises(DataError, match="cannot be stored one by one"):
        cuda.store_tokens(k, k, pages, token_local.layout_of(spec("int8", PerChannel()), RAW, 64, 32), slots)
    assert bool((buffer == 0xFF).all())


def test_packed_refusals_name_the_reason():
    def why(key, value=RAW, head_dim=64, capability=(9, 0)):
        return cuda.refuses_layout(token_local.layout_of(key, value, head_dim, 32), capability)

    assert why(spec("int8"), spec("int4")) is None
    assert "head_dim=520" in why(spec("int8", PerToken()), head_dim=520)
    assert "key groups of 384 channels are no power of two, as heads of 384 (above 256)" in why(
        spec("int8", PerToken()), head_dim=384
    )
    assert (
        why(spec("int8", PerToken()), head_dim=512)
        is why(spec("int8", PerGroup(64)), head_dim=384)
        is why(RAW, head_dim=264)
        is None
    )
    assert "key groups of 4 channels" in why(spec("int8", PerGroup(4)))
    assert why(spec("int8", PerGroup(4), static=True)) is None
    assert "cannot round to fp8" in why(spec("fp8_e4m3"), capability=(8, 0))
    assert "one by one" in why(spec("int8", PerChannel()))


@needs_gpu
@pytest.mark.parametrize("centered", [False, True])
def test_packed_tokens_go_where_a_replayed_graph_is_told(centered):
    layout, buffer, _ = packed(spec("int8", center="channel" if centered else None), spec("int4"), 128, 64, "cuda")
    pages, heads = buffer[:, : token_local.HEADS], token_local.HEADS
    k, v = (torch.randn(8, heads, 128, device="cuda").bfloat16() for _ in "kv")
    slots, previous = (torch.full((8,), -1, device="cuda") for _ in range(2))
    cuda.prepare(layout, k.dtype, k.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.store_tokens(k, v, pages, layout, slots, previous_page=previous if centered else None)
    assert bool((buffer == 0xFF).all())
    for first in (0, 60, 62):
        want = buffer.cpu().clone()
        k.copy_(torch.randn_like(k)), v.copy_(torch.randn_like(v))
        slots.copy_(torch.tensor([*range(3 * 64 + first, 3 * 64 + first + 3), -1, 5 * 64, 13 * 64, 7 * 64 + first, -1]))
        previous.copy_(torch.tensor([-1] * 8))
        before = previous.cpu() if centered else None
        reference.store_tokens(k.cpu(), v.cpu(), want[:, :heads], layout, slots.cpu(), previous_page=before)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffer.cpu(), want)


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
    cuda.store_tokens(k, v, stored, layout, slots, previous_page=previous)
    sides = (x.unflatten(0, (256, 64)).transpose(1, 2).contiguous() for x in (k, v))
    close_cuda.close(*sides, PageStore(layout, (closed,)), order.cpu().numpy())
    assert torch.equal(stored, closed)
