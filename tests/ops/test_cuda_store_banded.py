"""Trellis pages closed by CUDA C++ (store_banded.cu): the bytes that the reference stores but for ties of keys; and
unpacked by it (dequantize_banded.cu). On a GPU and on a CPU that runs the kernels thread by thread
(tests/ops/emulated).
"""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from messages import mentions, raises
from nightly import at_night
from ops.cpu_cases import RAW, static_params, trellis
from ops.emulated_build import build, put_sources

from kvbits import schemes
from kvbits.errors import DataError
from kvbits.ops.cuda import close as cuda
from kvbits.ops.cuda import store as store_cuda
from kvbits.ops.cuda import unpack
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.families import family_of
from kvbits.ops.cuda.families.klt import store as cuda_banded
from kvbits.ops.cuda.families.klt import unpack as unpack_banded
from kvbits.ops.reference import close as reference
from kvbits.ops.reference import store as store_reference
from kvbits.ops.reference.dequantize import dequantize_pages, section
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.quant.basis import offsets_of
from kvbits.quant.scales import FITTED_OFFSET, scale_values
from kvbits.spec import BAND, PageLayout

HEADS = 2
FOLDER = Path(cuda_banded.__file__).parent
emulates = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
DEVICES = [pytest.param("cpu", id="emulated", marks=emulates), pytest.param("cuda", id="gpu", marks=needs_gpu)]
PRESETS = ("klt4", "klt3", "klt2")
libraries: dict = {}


def sides(name):
    return schemes.get(name).key, schemes.get(name).value


def compiled(macros, folder, entry="store_banded"):
    """The kernel `entry` of `macros`, compiled for the CPU in a subfolder."""
    if (key := (entry, *sorted(macros.items()))) in libraries:
        return libraries[key]
    folder = folder / f"banded{len(libraries)}"
    folder.mkdir()
    instead = {
        'extern "C" __global__': "",
        "extern __shared__ __align__(16) unsigned char memory[];": "unsigned char* memory = ::shared;",
    }
    put_sources(folder, FOLDER / f"{entry}.cu", instead)
    lines = macros | {"KERNEL": entry, "NUM_THREADS": "THREADS"}
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in lines.items()))
    libraries[key] = build(folder, ["-mf16c", "-mfma", "-ffp-contract=off"])
    return libraries[key]


@pytest.fixture
def emulated(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("close")

    def load(layout, dtype, device_index, appends=False, tokens=None):
        warpgroups = cuda_banded.takes_warpgroups(layout, torch.device("cpu")) and tokens in (None, layout.page_size)
        macros = cuda_banded.defines(layout, dtype, appends, warpgroups, tokens)
        library = compiled(macros, folder)
        return SimpleNamespace(
            launch=lambda grid, threads, args, stream: library.launch(ctypes.byref(args), grid)
        ), int(macros["THREADS"])

    def load_unpacker(layout, dtype, device_index):
        macros = unpack_banded.defines(layout, dtype)
        library = compiled(macros, folder, "dequantize_banded")
        return SimpleNamespace(
            launch=lambda grid, threads, args, stream: library.launch(ctypes.byref(args), grid)
        ), int(macros["THREADS"])

    monkeypatch.setattr(cuda_banded, "load", load)
    monkeypatch.setattr(unpack_banded, "load", load_unpacker)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cpu":
        request.getfixturevalue("emulated")
    return request.param


def rows(page_size, head_dim, dtype):
    """Tokens of very different size with a common bias, a constant one, one of zeros, one with a single large number."""
    x = torch.randn(3, HEADS, page_size, head_dim) * torch.randn(3, HEADS, page_size, 1).exp() + 3 * torch.randn(
        1, HEADS, 1, head_dim
    )
    x[0, 0, 0], x[1, 0, 4], x[2, 0, 2, 0] = 0, 7, 1000
    return x.to(dtype)


def closed(key, value, k, v, device):
    """(pages by the kernel, pages by the reference [n, HEADS, head_bytes], their layout, what the layer's pages share,
    starts) of pages at far positions.
    """
    page_size, head_dim = k.shape[2:]
    layout = PageLayout(
        key=key,
        value=value,
        page_size=page_size,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        raw_dtype=str(k.dtype).removeprefix("torch."),
    )
    static, starts, ids = (
        static_params(key, value, HEADS, head_dim),
        np.array([5, 131_008, 70_001]),
        np.array([4, 0, 3]),
    )
    slab = torch.full((6, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device)
    store = PageStore(layout, (slab,), {name: x.to(device) for name, x in static.items()})
    cuda.close(k.to(device), v.to(device), store, ids, starts)
    assert bool((slab[[1, 2, 5]] == 0xFF).all()), "other pages stay as they are"
    want, _ = reference.close_pages(k, v, layout, static, starts)
    return slab[ids].cpu(), want, layout, static, starts


def assert_references(key, value, k, v, device, ties=8):
    """The reference's bytes but for ties: scales of the same squared error; where keys are products with a basis, other
    paths of the same cost, `ties` of 10,000 codes.
    """
    ours, theirs, layout, static, starts = closed(key, value, k, v, device)
    assert_same(ours, theirs, layout, static, starts, (k, v), device, ties)


def integers_miss(x, spec, codes):
    """Squared error [n, HEADS, tokens] of x as integers of its channels' widths, with the scales that `codes` are of."""
    if spec.levels == "fitted":
        codes = codes.int() - FITTED_OFFSET
    scale = scale_values(codes).double().unsqueeze(-1)
    width = torch.tensor(spec.widths(x.shape[-1])).repeat_interleave(BAND)[: x.shape[-1]]
    middle = (2.0**width - 1) / 2
    integers = ((x / scale + middle).round().clamp(min=0).minimum(2 * middle) - middle) * scale
    return ((x - integers) * (width > 0)).square().sum(-1)


def assert_same(ours, theirs, layout, static, starts, given, device, ties=8, others=0.01):
    """The same of pages that hold `given`, keys and values [n, HEADS, page_size, head_dim]; `others`: share of tokens
    whose scale may be another one of the same squared error.
    """
    end = max(s.offset + s.nbytes for s in layout.sections.values())
    assert not bool(ours[..., end:].any()), "padding is zero"
    read = [dequantize_pages(p, layout, static, torch.float64, starts=starts, in_basis=True) for p in (ours, theirs)]
    on_hopper = cuda_banded.takes_warpgroups(layout, torch.device(device)) and given[0].dtype != torch.float32
    for kind, rows, spec, x, y in zip("kv", given, (layout.key, layout.value), *read, strict=True):
        product = spec.basis == "calibrated" or (on_hopper and spec.basis == "hadamard")
        stored = reference.rows_as_stored(rows, spec, static, starts)
        scales = [section(p, layout, f"{kind}_scale").flatten(-2) for p in (ours, theirs)]
        same, close = scales[0] == scales[1], 1 + (1e-2 if product else 1e-5)
        missed, least = (integers_miss(stored.double(), spec, code) for code in scales)
        assert float((~same).double().mean()) <= others and bool((missed <= least * close + 1e-9).all())
        if spec.has_offsets:  # which reading adds
            stored = stored + offsets_of(static, starts, layout.page_size)
        error, best = ((z - stored.double()).square().sum(-1)[same] for z in (x, y))
        assert bool((error <= best * close + 1e-9).all())
        assert float((x != y)[same].double().mean()) <= (ties * 1e-4 if product else 0)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("head_dim", [128, *at_night(64)])
def test_presets_store_what_the_reference_stores(name, head_dim, device):
    dtype = {"klt4": torch.bfloat16, "klt3": torch.float16, "klt2": torch.float32}[name]
    assert_references(*sides(name), rows(64, head_dim, dtype), rows(64, head_dim, dtype).flip(2), device)


@pytest.mark.parametrize(
    ("name", "head_dim", "page_size"),
    [("klt4", 256, 32), ("klt3", 96, 32), *at_night(("klt3", 256, 32), ("klt2", 256, 32), ("klt2", 96, 32))],
)
def test_other_shapes(name, head_dim, page_size, device):
    fitted = schemes.get(name, head_dim=head_dim)
    assert_references(
        fitted.key,
        fitted.value,
        rows(page_size, head_dim, torch.bfloat16),
        rows(page_size, head_dim, torch.bfloat16).flip(2),
        device,
    )


@pytest.mark.parametrize(("bands", "bits"), [((2, 8, 0, 3), 8), *at_night(((8, 6, 5, 4), 1), ((3, 0, 1, 2), 6))])
def test_every_width_without_a_calibrated_basis(bands, bits, device):
    for basis in (None, "hadamard"):
        x = rows(32, 64, torch.float32)
        key, value = trellis(*bands, basis=basis), trellis(*(bits,) * 4, basis=basis)
        assert_references(key, value, x, x.flip(2), device)


@pytest.mark.parametrize(
    ("bands", "bits", "levels"),
    [((1, 2, 3, 4), 2, "fitted"), *at_night(((1, 2, 3, 4), 2, "uniform"), ((6, 8, 5, 0), 4, "uniform"))],
)
def test_rows_of_few_values_take_the_first_of_equal_paths(bands, bits, levels, device, monkeypatch):
    """Pages that close and tokens by their slots, few and many: byte for byte."""
    value = dataclasses.replace(trellis(*(bits,) * 4), levels=levels)
    key = trellis(*bands)
    k, v = (torch.randint(-2, 3, (3, HEADS, 32, 64)) * 2.0 ** torch.randint(-2, 3, (3, HEADS, 32, 1)) for _ in "kv")
    k[0, :, ::2, 5:] *= 2.0**-9
    v[0, :, ::3, :60] *= 2.0**-12
    pages, want, layout, static, starts = closed(key, value, k, v, device)
    assert_same(pages, want, layout, static, starts, (k, v), device, others=0.05)  # scales of the same error abound
    entries = [x.transpose(1, 2).flatten(0, 1).contiguous().to(device) for x in (k, v)]
    for most in (1, 1000):
        monkeypatch.setattr(cuda_banded, "places", lambda *_, most=most: most)
        found = torch.zeros_like(pages, device=device)
        store_cuda.store(*entries, PageStore(layout, (found,), static), torch.arange(96, device=device))
        assert torch.equal(found.cpu(), pages)


def test_a_head_dim_of_five_bands(device):
    x = rows(32, 80, torch.bfloat16)
    assert_references(trellis(4, 3, 2, 2, 1, basis="hadamard"), trellis(3, 3, 3, 3, 3), x, x.flip(2), device)


@emulates
def test_the_last_thread_may_go_first(emulated, monkeypatch):
    monkeypatch.setenv("KVBITS_EMULATE_REVERSED", "1")
    assert_references(*sides("klt3"), rows(64, 64, torch.bfloat16), rows(64, 64, torch.bfloat16).flip(2), "cpu")


@emulates
@pytest.mark.parametrize("name", ["klt3", *at_night("klt4", "klt2")])
def test_four_warps_multiply_at_once_and_a_block_closes_several_pages(name, emulated, monkeypatch):
    """As on Hopper, where a block keeps the basis; two pages and one, and all three."""
    monkeypatch.setattr(cuda_banded, "takes_warpgroups", lambda layout, device: True)
    dtype, most = {"klt4": (torch.bfloat16, 4), "klt3": (torch.float16, 2), "klt2": (torch.float32, 2)}[name]
    monkeypatch.setattr(cuda_banded, "places", lambda *_: most)
    assert cuda_banded.pages_each(3, HEADS, most) == {2: 3, 4: 2}[most]
    assert_references(*sides(name), rows(64, 128, dtype), rows(64, 128, dtype).flip(2), "cpu")


@pytest.mark.parametrize("most", [4, *at_night(2)])
def test_a_block_closes_several_pages(most, device, monkeypatch):
    monkeypatch.setattr(cuda_banded, "places", lambda *_: most)
    assert_references(*sides("klt2"), rows(64, 64, torch.bfloat16), rows(64, 64, torch.bfloat16).flip(2), device)
    x = rows(32, 64, torch.float32)
    assert_references(trellis(3, 0, 1, 2, basis="hadamard"), trellis(*(5,) * 4, basis="hadamard"), x, x.flip(2), device)


@pytest.mark.parametrize(
    ("name", "head_dim", "page_size"),
    [("klt3", 128, 64), ("klt2", 64, 32), *at_night(("klt4", 64, 64), ("klt3", 96, 32))],
)
@pytest.mark.parametrize("few", [True, False], ids=["few", "prompts"])
def test_tokens_by_slots_are_those_of_pages_that_close(name, head_dim, page_size, few, device, monkeypatch):
    """Tokens of pages in any frames, position 0 too, in any order, some nowhere, some past the pages; a whole page
    among them; whatever else is there stays.
    """
    scheme = schemes.get(name, head_dim=head_dim)
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim)
    monkeypatch.setattr(cuda_banded, "places", lambda *_: 10**6 if few else 1)
    static = {n: x.to(device) for n, x in static_params(scheme.key, scheme.value, HEADS, head_dim).items()}
    starts = np.array([0, 260, 131_008, 64])
    k, v = (
        torch.randn(4, HEADS, page_size, head_dim, generator=torch.Generator().manual_seed(i)).bfloat16().to(device)
        for i in (1, 2)
    )
    whole = torch.full((5, HEADS, layout.head_bytes), 0x11, dtype=torch.uint8, device=device)
    cuda.close(k, v, PageStore(layout, (whole,), static), np.array([3, 0, 4, 1]), starts=starts)
    order = torch.cat(
        [torch.arange(page_size), page_size + torch.randperm(3 * page_size, generator=torch.Generator().manual_seed(3))]
    ).to(device)
    rows = [x.transpose(1, 2).flatten(0, 1)[order].contiguous() for x in (k, v)]
    page = torch.tensor([3, 0, 4, 1], device=device).repeat_interleave(page_size)
    slots = (page * page_size + torch.arange(page_size, device=device).repeat(4))[order]
    first = torch.from_numpy(starts).to(device, torch.int32).repeat_interleave(page_size)[order].contiguous()
    skipped = torch.tensor([page_size + 5, 2 * page_size + 1], device=device)
    left_out = slots[skipped].clone()
    slots[skipped[0]], slots[skipped[1]] = -1, 5 * page_size
    found, status = torch.full_like(whole, 0x11), torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=device)
    store_cuda.store(*rows, PageStore(layout, (found,), static), slots, starts=first, status=status)
    assert status.tolist() == [0, 0, 0, 0, 0, 0, 1]
    slots[skipped] = left_out
    again = torch.full_like(whole, 0x11)
    store_cuda.store(rows[0][None], rows[1][None], PageStore(layout, (again,), static), slots, starts=first)
    assert float((again != whole).double().mean()) < (1e-3 if head_dim == 128 else 1e-5), (
        "a block's largest number is another one"
    )
    read = [
        dequantize_pages(x[[3, 0, 4, 1]].cpu(), layout, {n: x.cpu() for n, x in static.items()}, starts=starts)
        for x in (again, whole)
    ]
    for x, y in zip(*read, strict=True):
        assert float((x - y).norm()) < 2e-2 * float(y.norm())
    named = torch.zeros(5, page_size, dtype=torch.bool)
    named[[3, 0, 4, 1]] = True
    for slot in left_out.tolist():
        named[slot // page_size, slot % page_size] = False
    assert bool((found[2] == 0x11).all()) and int((found != again).sum()) <= 2 * HEADS * layout.head_bytes // page_size
    one = torch.full_like(whole, 0x11)
    store_cuda.store(rows[0][:1], rows[1][:1], PageStore(layout, (one,), static), slots[:1], starts=first[:1])
    assert bool((one[[0, 1, 2, 4]] == 0x11).all()) and bool((one[3] != 0x11).any())
    with raises(DataError, "starts"):
        store_cuda.store(*rows, PageStore(layout, (found,), static), slots)
    with raises(DataError, "starts", "torch.int32", [len(slots)]):
        store_cuda.store(*rows, PageStore(layout, (found,), static), slots, starts=first[:3])


@pytest.mark.parametrize(
    ("name", "head_dim", "warps"),
    [("klt4", 128, 8), ("klt2", 128, 2), *at_night(("klt3", 64, 8), ("klt2", 96, 4), ("klt3", 256, 8))],
)
def test_warps_that_share_tokens_store_what_one_warp_closes(name, head_dim, warps, device, monkeypatch):
    """Pages of 16 tokens, byte for byte."""
    monkeypatch.setattr(cuda_banded, "FEW_WARPS", warps)
    if device == "cuda":
        cuda_banded.load.cache_clear()
    fitted = schemes.get(name, head_dim=head_dim)
    k, v = rows(cuda_banded.FEW, head_dim, torch.bfloat16), rows(cuda_banded.FEW, head_dim, torch.bfloat16).flip(2)
    pages, _, layout, static, starts = closed(fitted.key, fitted.value, k, v, device)
    entries = [x.transpose(1, 2).flatten(0, 1).contiguous().to(device) for x in (k, v)]
    found, first = (
        torch.zeros_like(pages, device=device),
        torch.from_numpy(starts).int().repeat_interleave(cuda_banded.FEW).to(device),
    )
    slots = torch.arange(len(first), device=device)
    there = PageStore(layout, (found,), {n: x.to(device) for n, x in static.items()})
    store_cuda.store(*entries, there, slots, starts=first)
    assert torch.equal(found.cpu(), pages)


def test_keys_with_a_bias_a_hundred_times_their_spread(device):
    """The rounding of a common bias by the product is the same for all tokens, or small beside their steps."""
    k = rows(64, 128, torch.float32) + 300 * (torch.arange(128) % 40 == 7)
    assert_references(*sides("klt3"), k, rows(64, 128, torch.float32), device, ties=60)


def test_a_decode_step_closes_what_the_device_says(device, monkeypatch):
    """Two of three sequences close a raw page in the frame of its position, and each stores its token; what the host
    closes from the same rows is the same.
    """
    key, value = sides("klt3")
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=HEADS, head_dim=64)
    raw = PageLayout(key=RAW, value=RAW, page_size=64, num_kv_heads=HEADS, head_dim=64)
    static = {name: x.to(device) for name, x in static_params(key, value, HEADS, 64).items()}
    tail, slab = (torch.full((4, HEADS, x.head_bytes), 0x11, dtype=torch.uint8, device=device) for x in (raw, layout))
    store, raw_store = PageStore(layout, (slab,), static), PageStore(raw, (tail,))
    k, v = rows(64, 64, torch.bfloat16), rows(64, 64, torch.bfloat16)
    for page, i in ((2, 0), (0, 2)):
        section(tail, raw, "k_raw")[page], section(tail, raw, "v_raw")[page] = k[i].to(device), v[i].to(device)
    nowhere, page_bytes, tail_bytes = 1, slab.stride(0), tail.stride(0)
    closings = torch.tensor([[2 * tail_bytes, 3 * page_bytes], [nowhere, nowhere], [0, page_bytes]], device=device)
    # the third's token goes where its closing page was
    runs = torch.tensor([[tail_bytes, 0, 0, 5, 1], [0, 0, 0, 0, 0], [0, 2, 0, 0, 1]], device=device)
    status, undo = (
        torch.zeros(6, dtype=torch.int32, device=device),
        torch.zeros(2, 3, HEADS, 64, dtype=torch.bfloat16, device=device),
    )
    tail_starts = torch.tensor([131_008 + 64, 7, 70_001 + 64], dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    fresh = torch.randn(2, 3, 1, HEADS, 64, device=device).bfloat16()
    cuda.DecodeStep(store, raw_store, torch.bfloat16, closings, runs, status, undo, tail_starts).run(*fresh, stream)
    want = torch.full_like(slab, 0x11)
    cuda.close(
        k[[0, 2]].to(device),
        v[[0, 2]].to(device),
        PageStore(layout, (want,), static),
        np.array([3, 1]),
        starts=np.array([131_008, 70_001]),
    )
    assert torch.equal(slab, want) and not bool(status.any())
    for name, x, old in (("k_raw", fresh[0], k), ("v_raw", fresh[1], v)):
        assert torch.equal(section(tail, raw, name)[1, :, 5], x[0, 0]) and torch.equal(
            section(tail, raw, name)[0, :, 0], x[2, 0]
        )
        assert torch.equal(undo["kv".index(name[0])][2].cpu(), old[2, :, 0])


STARTS = np.array([0, 131_008, 64, 70_001, 448, 4])
"""First positions of six pages: of other frames and rows of offsets, the first one with position 0."""


def stored_by_slots(key, value, head_dim, page_size, dtype, device, order, monkeypatch, few):
    """Six pages of tokens stored in `order` ([n] of their 6 * page_size, -1: an entry that is not stored), beside what
    the reference makes of them.
    """
    # few tokens a block, or as many as a page
    monkeypatch.setattr(cuda_banded, "places", lambda *_: 1000 if few else 1)
    layout = PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim)
    static = static_params(key, value, HEADS, head_dim)
    # [6, HEADS, page_size, head_dim]
    k, v = (torch.cat([rows(page_size, head_dim, dtype) for _ in "ab"]) for _ in "kv")
    entries = [x.transpose(1, 2).flatten(0, 1)[order.clamp(min=0)] for x in (k, v)]  # [n, HEADS, head_dim]
    # pages in another order than their tokens
    slots = torch.where(order < 0, order, (5 - order // page_size) * page_size + order % page_size)
    starts = torch.from_numpy(STARTS)[order.clamp(min=0) // page_size].int()
    made = {}
    for where, store in ((device, store_cuda.store), ("cpu", store_reference.store)):
        pages, status = (
            torch.full((6, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8, device=where),
            torch.zeros(7, dtype=torch.int32, device=where),
        )
        there = PageStore(layout, (pages,), {name: x.to(where) for name, x in static.items()})
        k_there, v_there, *given = (x.to(where) for x in (*entries, slots, starts))
        store(k_there, v_there, there, given[0], starts=given[1], status=status)
        made[store] = pages.cpu().flip(0), status.tolist()
    (ours, status), (theirs, wanted) = made.values()
    assert status == wanted
    return ours, theirs, layout, static, (k, v)


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize(
    ("name", "head_dim", "page_size"),
    [("klt3", 64, 64), ("klt2", 64, 32), *at_night(("klt4", 128, 64), ("klt3", 256, 32))],
)
def test_tokens_go_where_their_slots_say(name, head_dim, page_size, few, device, monkeypatch):
    """All tokens of six pages in any order, or page by page: the pages are those that close."""
    fitted = schemes.get(name, head_dim=head_dim)
    for order in (torch.randperm(6 * page_size), torch.arange(6 * page_size)):
        ours, theirs, *rest = stored_by_slots(
            fitted.key, fitted.value, head_dim, page_size, torch.bfloat16, device, order, monkeypatch, few
        )
        assert_same(ours, theirs, *rest[:2], STARTS, rest[2], device)


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_what_is_not_stored_leaves_its_place_and_is_counted(few, device, monkeypatch):
    """Entries below 0, past the pages, and places that no entry has."""
    order = torch.randperm(384)[:150]
    order[::7] = -1
    order[5], order[80] = -400, -1
    ours, theirs, layout, *_ = stored_by_slots(*sides("klt3"), 64, 64, torch.float32, device, order, monkeypatch, few)
    differ = ours != theirs
    assert float(differ.double().mean()) <= 1e-3
    assert bool((theirs[differ] != 0xFF).all()), "bytes that the reference leaves are left"
    past = torch.full((3,), 7 * 64)
    x, pages, status = (
        torch.randn(3, HEADS, 64, device=device),
        torch.full_like(ours, 0xFF, device=device),
        torch.zeros(7, dtype=torch.int32, device=device),
    )
    static = {name: x.to(device) for name, x in static_params(*sides("klt3"), HEADS, 64).items()}
    there, starts = PageStore(layout, (pages,), static), torch.zeros(3, dtype=torch.int32, device=device)
    store_cuda.store(x, x, there, past.to(device), starts=starts, status=status)
    assert status.tolist() == [0, 0, 0, 0, 0, 0, 3] and bool((pages == 0xFF).all())
    x[1, 0, 3] = torch.nan
    store_cuda.store(x, x.nan_to_num(), there, torch.arange(3, device=device), starts=starts, status=status)
    assert status.tolist()[4:] == [1, 0, 3]


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_keys_that_are_no_numbers_spoil_no_token_beside_them(bad, few, device, monkeypatch):
    """Tokens of other sequences are in the same block."""
    monkeypatch.setattr(cuda_banded, "places", lambda *_: 1000 if few else 1)
    key, value = sides("klt3")
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=HEADS, head_dim=64)
    static = {name: x.to(device) for name, x in static_params(key, value, HEADS, 64).items()}
    k, v = torch.randn(2, 64, HEADS, 64, device=device)
    slots, starts = torch.arange(64, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    made = []
    for spoilt in (0.0, bad):
        k[5], k[5, :, 3] = 0, spoilt
        pages, status = (
            torch.zeros(1, HEADS, layout.head_bytes, dtype=torch.uint8, device=device),
            torch.zeros(7, dtype=torch.int32, device=device),
        )
        store_cuda.store(k, v, PageStore(layout, (pages,), static), slots, starts=starts, status=status)
        assert int(status[4]) == (spoilt != 0)
        made.append(
            [
                x.cpu()
                for x in dequantize_pages(
                    pages.cpu(), layout, {n: x.cpu() for n, x in static.items()}, starts=np.array([0])
                )
            ]
        )
    beside = slots.cpu() != 5
    for clean, other in zip(*made, strict=True):
        assert torch.equal(clean[:, :, beside], other[:, :, beside])


@emulates
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_tokens_by_slots_on_hopper(few, emulated, monkeypatch):
    """Blocks of a page multiply with four warps at once."""
    monkeypatch.setattr(cuda_banded, "takes_warpgroups", lambda layout, device: True)
    for order in (torch.randperm(384), torch.arange(384)):
        ours, theirs, *rest = stored_by_slots(*sides("klt4"), 128, 64, torch.bfloat16, "cpu", order, monkeypatch, few)
        assert_same(ours, theirs, *rest[:2], STARTS, rest[2], "cpu")


def test_tokens_go_to_pages_of_several_slabs(device):
    """Two sequences have padding between, and each page states where it starts."""
    key, value = sides("klt3")
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=HEADS, head_dim=64)
    static = static_params(key, value, HEADS, 64)
    k, v = (torch.randn(2, 70, HEADS, 64).bfloat16() for _ in "kv")
    slots, starts = torch.full((2, 70), -1), torch.full((2, 70), -1, dtype=torch.int32)
    for row, token, page, place, count, start in (
        (0, 0, 3, 60, 4, 4),
        (0, 4, 0, 0, 64, 68),
        (0, 68, 1, 0, 2, 132),
        (1, 0, 4, 10, 1, 0),
    ):
        slots[row, token : token + count] = page * 64 + place + torch.arange(count)
        starts[row, token : token + count] = start
    made = []
    for where, store in ((device, store_cuda.store), ("cpu", store_reference.store)):
        slabs = torch.full((6, HEADS + 1, layout.head_bytes), 0xFF, dtype=torch.uint8, device=where)
        pages = PageStore(
            layout, (slabs[:2, :HEADS], slabs[2:, :HEADS]), {name: x.to(where) for name, x in static.items()}
        )
        status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=where)
        given = [x.flatten().to(where) for x in (slots, starts)]
        store(k.to(where), v.to(where), pages, given[0], starts=given[1], status=status)
        assert not status.any()
        made.append(slabs.cpu())
    differ = made[0] != made[1]
    assert float(differ.double().mean()) <= 1e-3 and bool((made[1][differ] != 0xFF).all())


HALF, BRAIN = torch.float16, torch.bfloat16
UNPACKED = [
    (*sides("klt4"), 64, 64, BRAIN),
    (*sides("klt3"), 128, 64, HALF),
    (*sides("klt2"), 128, 32, BRAIN),
    (*sides("klt2"), 96, 32, HALF),
]
UNPACKED += [
    (trellis(8, 6, 5, 4), trellis(*(3,) * 4, basis="hadamard"), 64, 32, BRAIN),
    (trellis(8, 6, 5, 4), trellis(*(3,) * 4, basis="hadamard"), 64, 32, HALF),
    (trellis(4, 3, 2, 2, 1, basis="hadamard"), trellis(3, 3, 3, 3, 3), 80, 32, BRAIN),
]


@pytest.mark.parametrize(
    ("key", "value", "head_dim", "page_size", "dtype"),
    UNPACKED,
    ids=lambda x: str(x) if isinstance(x, (int, tuple)) else None,
)
def test_rows_for_many_queries_are_what_pages_read_as(key, value, head_dim, page_size, dtype, device):
    """The case has two layers in two slabs: some pages are cut short, and one has a number that the pool lacks. Other
    rows stay.

    Judged in float64, to the rounding of a row's numbers and of its sums.
    """
    layout = PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim)
    assert unpack_banded.refuses_layout(layout, dtype) is None
    static, starts = static_params(key, value, HEADS, head_dim), np.array([131_000, 64, 70_001, 5, 517, 131_064])
    k, v = torch.randn(2, 6, HEADS, page_size, head_dim)
    made = reference.close_pages(k + 1, v, layout, static, starts)[0]
    both = torch.stack([torch.full_like(made, 0xFF), made], 1).to(device)  # [page, layer, H, head_bytes]
    here = {name: x.to(device) for name, x in static.items()}
    layers = [PageStore(layout, (both[:4, i], both[4:, i]), here) for i in range(2)]
    ids, counts = np.array([5, 0, 3, 4, 1, 2]), (page_size, 0, 9, page_size, 1, 17)
    rows = np.array([[page_size * i, counts[i]] for i in range(6)], np.int32)
    named, places, first = (
        torch.from_numpy(x).to(device)
        for x in (np.where(ids == 5, -7, ids).astype(np.int32), rows, starts[ids].astype(np.int32))
    )
    want = dequantize_pages(made[ids], layout, static, torch.float64, starts=starts[ids])
    out = torch.full((2, 6 * page_size, HEADS, head_dim), 7.0, dtype=dtype, device=device)
    unpacked = unpack.Rows(layout, dtype, named, places, first)
    for layer in layers:
        unpacked.run(layer, *out)
    for found, there in zip(out.cpu(), want, strict=True):
        for i, (row, count) in enumerate(rows):
            got, expected = found[row : row + count].double(), there[i, :, :count].transpose(0, 1)
            bound = torch.finfo(dtype).eps / 2 * expected.abs() + 1e-5 * expected.abs().amax(-1, keepdim=True) + 1e-6
            assert bool(((got - expected).abs() <= bound).all())
            assert bool((found[row + count : row + page_size] == 7).all())
    if key.basis == "calibrated":
        with raises(DataError, "k_inverse", "[num_kv_heads, head_dim, head_dim]"):
            unpacked.run(PageStore(layout, layers[0].slabs), *out)


def test_bad_input_is_named(device):
    key, value = sides("klt2")
    x = torch.randn(3, HEADS, 64, 64).bfloat16()
    with raises(DataError, "values", "float8_e5m3", "raw", "Override"):
        closed(key, value, x, x * 1e7, device)
    for bad in (torch.nan, torch.inf, -torch.inf):
        with raises(DataError, "keys", bad):
            closed(key, value, torch.where(x > 3, bad, x), x, device)
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=HEADS, head_dim=64)
    store = PageStore(layout, (torch.zeros(3, HEADS, layout.head_bytes, dtype=torch.uint8, device=device),), {})
    with raises(DataError, "k_basis", "[num_kv_heads, head_dim, head_dim]"):
        cuda.close(x.to(device), x.to(device), store, np.arange(3), starts=np.arange(3) * 64)
    with raises(DataError, "3 pages", "starts"):
        cuda.close(x.to(device), x.to(device), store, np.arange(3))


def test_refusals_need_no_gpu():
    def refused(key, value, head_dim=64, page_size=64, dtype=torch.bfloat16):
        layout = PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=1, head_dim=head_dim)
        return family_of(layout).refuses("close", layout, dtype=dtype)

    key, value = sides("klt2")
    assert refused(key, value) is None and refused(key, value, 256) is None
    assert mentions(refused(key, RAW), "raw values", "trellis")
    assert mentions(refused(key, value, 80), "head_dim=80", "multiple of 32", 256)
    assert mentions(refused(key, value, page_size=512), "page_size=512", "multiple of 16", 256)
    assert mentions(refused(key, value, 256, 128), "128 tokens", 256, "133152 bytes", 98304)
    assert mentions(refused(key, value, dtype=torch.float64), "torch.float64", "float32", "float16", "bfloat16")


@pytest.mark.skipif(cuda_compile.missing() is not None, reason=f"{cuda_compile.missing()}")
@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_compiles_with_few_spills(name, warpgroups):
    """At most some addresses, which are kept through loops over pages and scales."""
    key, value = sides(name)
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=8, head_dim=128)
    defines, arch = (
        cuda_banded.defines(layout, torch.bfloat16, warpgroups=warpgroups),
        ("sm_90a" if warpgroups else "sm_90"),
    )
    binary = cuda_compile.compile_source(cuda_compile.Source(FOLDER, "store_banded.cu", defines), arch)
    assert binary.resources("store_banded").spill_bytes <= 160
