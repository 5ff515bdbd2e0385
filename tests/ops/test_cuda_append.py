"""append by the CUDA kernel leaves what the reference leaves: thread by thread on a CPU (tests/ops/emulated) everywhere, and on an NVIDIA GPU where there is one."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ops.test_append import RUNS, store_of, tokens_of

from kvbits import ops, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError
from kvbits.ops.append import cuda, reference
from kvbits.ops.dequantize_pages.reference import section
from kvbits.ops.types import PageStore, SlotMapping
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, QuantSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
needs_compiler = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
FOLDER = Path(ops.__file__).parent
RAW = QuantSpec.raw()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel for a CPU, at 16-byte loads and stores that fault where an address is no multiple."""
    folder, here = tmp_path_factory.mktemp("append"), Path(__file__).parent / "emulated"
    for path in (here / "ptx.cuh", here / "block.cpp"):
        (folder / path.name).write_text(path.read_text())
    text = (FOLDER / "append" / "append.cu").read_text()
    assert 'extern "C" __global__' in text
    (folder / "kernel.h").write_text(text.replace('extern "C" __global__', ""))
    macros = cuda.DEFINES | {"KERNEL": "append_tokens", "NUM_THREADS": "THREADS", "SHARED_BYTES": 1024}
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros.items()))
    options = ["-std=c++17", "-O1", "-w", "-mf16c", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run(["g++", *options, str(folder / "block.cpp"), "-o", str(folder / "append.so")], check=True)
    return ctypes.CDLL(str(folder / "append.so"))


@pytest.fixture(params=[pytest.param("cpu", id="emulated", marks=needs_compiler), pytest.param("cuda", id="gpu", marks=needs_gpu)])
def device(request, monkeypatch):
    """Where tensors lie that `cuda.append` is given."""
    if request.param == "cpu":
        made = request.getfixturevalue("library")
        monkeypatch.setattr(cuda, "_load", lambda index: SimpleNamespace(launch=lambda grid, threads, args, stream: made.launch(ctypes.byref(args), grid)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    return request.param


def on(device: str, store: PageStore, buffer: torch.Tensor) -> tuple[PageStore, torch.Tensor]:
    """The store of `test_append.store_of` with its buffer on a device."""
    buffer = buffer.to(device)
    return PageStore(store.layout, (buffer[:2, : store.layout.num_kv_heads], buffer[2:, : store.layout.num_kv_heads])), buffer


def expected(k: torch.Tensor, v: torch.Tensor, store: PageStore, buffer: torch.Tensor, runs: list[list[int]]) -> torch.Tensor:
    """The buffer after the reference, on the CPU."""
    here, want = on("cpu", store, buffer.cpu().clone())
    reference.append(k.cpu(), v.cpu(), here, SlotMapping(np.array(runs)))
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 20, 33, 40, 80, 128])
def test_tokens_land_in_their_slots_and_nowhere_else(dtype, head_dim, device):
    store, buffer = on(device, *store_of(head_dim=head_dim, dtype=dtype))
    k, v = (x.to(device) for x in tokens_of(store, dtype))
    want = expected(k, v, store, buffer, RUNS)
    cuda.append(k, v, store, SlotMapping(np.array(RUNS)))
    assert torch.equal(buffer.cpu(), want)


def test_a_projections_output_is_read_where_it_lies(device):
    """Heads before tokens as after a rotary embedding, keys and values inside one projection, starts and strides that 16 bytes do not divide, a last dim that is not dense."""
    store, buffer = on(device, *store_of())
    k, v = (x.to(device) for x in tokens_of(store, torch.bfloat16))
    want = expected(k, v, store, buffer, RUNS)
    fused = torch.cat([k, v], dim=-1)
    odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (k, v)]
    even = [torch.nn.functional.pad(x, (2, 0))[..., 2:] for x in (k, v)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for other in (fused.split(40, dim=-1), transposed, odd, even, [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)]):
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
    cuda.append(k, v, PageStore(layout, (slab,)), SlotMapping(np.array([[i // 300, i % 300 * 64, p, 0, 64] for i, p in enumerate(pages)])))
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
        warnings.simplefilter("ignore")  # "a prototype feature": raised here it would leave the mode on for all tests after
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
    """Ragged prompts, a chunk, single tokens past several closings, a fork and its copy on write, a slab added on the way."""
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 2 + (LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=100),)
    made = schemes.get(scheme, num_sink_tokens=4)
    caches = [PagedCache(CacheSpec(scheme=made, layers=layers), device="cuda", backend=backend) for backend in ("auto", "reference")]
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
                    if name != "closed":  # what no token has been written to is not defined, and low planes are no subject here
                        continue
                    assert torch.equal(a.pools[name].block(i), b.pools[name].block(i)), (name, i)
    for layer in range(3):
        for row in range(3):
            for x, y in zip(*(c.dequantize(layer, row) for c in caches), strict=True):
                torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0.05 if made.tiers else 0)
