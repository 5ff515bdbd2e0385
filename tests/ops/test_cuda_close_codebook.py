"""KVQuant's pages closed by CUDA C++: the bytes that the reference stores, on a GPU and on a CPU that runs the kernel thread by thread (tests/ops/emulated)."""

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
from ops.emulated_build import build, put_sources

from kvbits import schemes
from kvbits.errors import DataError
from kvbits.ops.cuda.engine import close as cuda
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.families import family_of
from kvbits.ops.cuda.families.codebook import close as cuda_codebook
from kvbits.ops.reference import close as reference
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

HEADS = 2
FOLDER = Path(cuda_codebook.__file__).parent
emulates = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def of(name, **changes):
    s = schemes.get(name)
    return {"key": dataclasses.replace(s.key, **changes), "value": dataclasses.replace(s.value, **{n: x for n, x in changes.items() if n != "pre_rope"})}


def cases():
    """(specs, head_dim, page_size, dtype)."""
    yield of("nuq4-1%"), 128, 64, torch.bfloat16
    yield of("nuq3-1%"), 64, 64, torch.float16
    yield of("nuq2"), 128, 32, torch.float32
    yield of("nuq2-1%", symmetric=True), 80, 64, torch.bfloat16
    yield of("nuq4-1%", outliers=0.08), 64, 32, torch.bfloat16
    static = {"key": dataclasses.replace(of("nuq3-1%")["key"], static=True), "value": of("nuq3-1%")["value"]}
    yield static, 128, 64, torch.bfloat16
    integers = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False, pre_rope=True, outliers=0.01)
    yield {"key": integers, "value": QuantSpec(format="int3", granularity=PerGroup(32), outliers=0.02)}, 64, 64, torch.float32
    yield (
        {"key": dataclasses.replace(integers, static=True, outliers=0.0), "value": QuantSpec(format="int2", granularity=PerToken(), scale_dtype="bfloat16")},
        64,
        64,
        torch.float32,
    )


def prepared_case(specs, head_dim, page_size, dtype, n=3):
    layout = PageLayout(**specs, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim)
    gen = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(n, HEADS, page_size, head_dim, generator=gen) * torch.rand(head_dim, generator=gen) * 5 + torch.randn(head_dim, generator=gen) for _ in "kv"
    )
    k[0, 0], v[-1, 1], k[-1, 0, 3, 7] = 0.0, 3.5, 300.0  # no spread, one far element
    v[0, 1, :, ::2] = v[0, 1, :, 1::2]  # ties
    static = {}
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if spec.has_codebook:
            static[f"{kind}_codebook"] = (torch.rand(HEADS, 2**spec.bits, generator=gen) * 2 - 1).sort(-1).values
        if spec.static:
            static[f"{kind}_scale"] = torch.rand(HEADS, head_dim, generator=gen) * (3 if spec.has_codebook else 0.3) + 0.1
            if spec.has_bias:
                static[f"{kind}_bias"] = torch.randn(HEADS, head_dim, generator=gen)
        if spec.pre_rope:
            static["k_inv_freq"] = 10_000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return layout, k.to(dtype), v.to(dtype), static, np.array([1, 131_001, 65])[:n]


def check(layout, k, v, static, starts, device):
    want, saturated = reference.close_pages(k, v, layout, static, starts)
    slab = torch.full((6, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device)
    ids = np.array([4, 0, 2])[: len(k)]
    store = PageStore(layout, (slab,), {name: x.to(device) for name, x in static.items()})
    assert cuda.close(k.to(device), v.to(device), store, ids, starts=starts) == saturated
    for name, s in layout.sections.items():
        assert torch.equal(slab[ids][..., s.offset : s.offset + s.nbytes].cpu(), want[..., s.offset : s.offset + s.nbytes]), name
    assert torch.equal(slab[ids].cpu(), want), "padding is zero"
    assert (slab[[1, 3, 5]] == 0xFF).all(), "other pages stay as they were"


@needs_gpu
@pytest.mark.parametrize("specs, head_dim, page_size, dtype", list(cases()), ids=str)
def test_a_gpu_stores_what_the_reference_stores(specs, head_dim, page_size, dtype):
    check(*prepared_case(specs, head_dim, page_size, dtype), "cuda")


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    def load(layout, dtype, device_index):
        macros = cuda_codebook.defines(layout, dtype)
        put_sources(
            tmp_path, FOLDER / "close_codebook.cu",
            {"extern __shared__ __align__(16) unsigned char memory[];": "", "(memory)": "(::shared)", 'extern "C" __global__': ""},
        )  # fmt: skip
        (tmp_path / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in (macros | {"KERNEL": "close_codebook", "NUM_THREADS": "THREADS"}).items()))
        library = build(tmp_path, ["-mf16c", "-mfma", "-D__CUDA_ARCH__=900"])
        return SimpleNamespace(launch=lambda grid, threads, args, stream: library.launch(ctypes.byref(args), grid)), int(macros["THREADS"])

    monkeypatch.setattr(cuda_codebook, "_load", load)


@emulates
@pytest.mark.parametrize("reversed_order", [False, True], ids=["first thread first", "last thread first"])
@pytest.mark.parametrize("specs, head_dim, page_size, dtype", list(cases()), ids=str)
def test_the_kernel_stores_what_the_reference_stores(specs, head_dim, page_size, dtype, reversed_order, emulated, monkeypatch):
    if reversed_order:
        monkeypatch.setenv("KVBITS_EMULATE_REVERSED", "1")
    check(*prepared_case(specs, head_dim, page_size, dtype), "cpu")


@emulates
def test_bad_input_is_named(emulated):
    layout, k, v, static, starts = prepared_case(of("nuq3-1%"), 64, 64, torch.float32, 1)
    slab = torch.zeros(6, HEADS, layout.head_bytes, dtype=torch.uint8)
    store = PageStore(layout, (slab,), static)
    v[0, 1, 5, 3] = torch.nan
    with pytest.raises(DataError, match=r"values holds nan at position \(0, 1, 5, 3\)"):
        cuda.close(k, v, store, np.array([1]), starts=starts)
    with pytest.raises(DataError, match="overflows float16"):
        cuda.close(k * 1e6, torch.ones_like(v), store, np.array([1]), starts=starts)
    with pytest.raises(DataError, match="pass `starts`"):
        cuda.close(k, torch.ones_like(v), store, np.array([1]))


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq2"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=emulates), pytest.param("cuda", marks=needs_gpu)])
def test_pages_of_nothing_but_bad_numbers_are_refused_and_touch_nothing_else(name, device, request):
    """A cache asks no question of its own before it closes, so the kernel meets them."""
    if device == "cpu":
        request.getfixturevalue("emulated")
    layout, k, _, static, starts = prepared_case(of(name), 64, 64, torch.bfloat16, 1)
    slab = torch.full((4, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device)
    store = PageStore(layout, (slab,), {n: x.to(device) for n, x in static.items()})
    signs = torch.where(torch.rand(k.shape) < 0.5, torch.inf, -torch.inf).bfloat16()
    some = torch.where(torch.rand(k.shape) < 0.02, signs, k)
    for kind, bad in (("nan", torch.full_like(k, torch.nan)), ("inf", torch.full_like(k, torch.inf)), ("inf", signs), ("inf", some)):
        with pytest.raises(DataError, match=rf"keys holds -?{kind} at position"):
            cuda.close(bad.to(device), bad.to(device), store, np.array([1]), starts=starts)
    assert (slab[[0, 2, 3]] == 0xFF).all()


@pytest.mark.skipif(cuda_compile.missing() is not None, reason=f"{cuda_compile.missing()}")
@pytest.mark.parametrize("name, limit", [("nuq4-1%", 384), ("nuq2", 32)])
def test_compiles_with_few_spills(name, limit):
    """Some 40 words a thread once between phases: with the registers that take none fewer blocks fit, and pages took a tenth longer."""
    layout = PageLayout(**of(name), page_size=64, num_kv_heads=8, head_dim=128)
    binary = cuda_compile.compile_source(FOLDER, "close_codebook.cu", cuda_codebook.defines(layout, torch.bfloat16), "sm_80")
    assert binary.resources("close_codebook").spill_bytes <= limit


@pytest.mark.parametrize(
    "changes, why",
    [
        (dict(head_dim=40), "no multiple of 1024"),
        (dict(head_dim=256, page_size=128), "more than 16384"),
        (dict(value=QuantSpec(format="int4", granularity=PerGroup(64), center="channel")), "without a mean"),
        (dict(value=QuantSpec(format="int4", granularity=PerGroup(16))), "ranges of values are more than"),
    ],
)
def test_refusals_say_what_is_in_the_way(changes, why):
    layout = PageLayout(**{**of("nuq4-1%"), "page_size": 64, "num_kv_heads": 2, "head_dim": 128} | changes)
    assert why in family_of(layout).refuses("close", layout, dtype=torch.bfloat16)
    layout = PageLayout(**of("nuq4-1%"), page_size=64, num_kv_heads=2, head_dim=128)
    assert "float64" in family_of(layout).refuses("close", layout, dtype=torch.float64)
