"""The attention kernels' C++ run on a CPU, thread by thread (tests/ops/emulated), against the float64 reference: what
CI can check without a GPU.

KVBITS_TEST_ALL_KERNELS=1 runs all cases of the GPU tests of KVQuant's formats (some minutes).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.cuda_cases import Case, build, relative_error
from ops.emulated_build import build as build_emulated
from ops.emulated_build import put_sources
from ops.test_cuda_attend import LIMIT, TIERED, both, spec, unlike_widths, wide
from ops.test_cuda_kvquant import direct, of, static

from kvbits import schemes
from kvbits.errors import DataError
from kvbits.ops.cuda.engine import device_plan
from kvbits.ops.cuda.engine import host_plan as cuda
from kvbits.ops.reference import attend_pages as reference
from kvbits.ops.reference import close as close_reference
from kvbits.quant.basis import completed
from kvbits.spec import PerChannel, PerGroup, PerToken

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
BLOCKS = 3


def compiled(kernel, folder: Path, capability: tuple[int, int]) -> ctypes.CDLL:
    put_sources(
        folder,
        kernel.source,
        {"extern __shared__ __align__(128) unsigned char shared[];": "", 'extern "C" __global__': ""},
    )
    (folder / "defines.h").write_text(
        "".join(
            f"#define {k} {v}\n" for k, v in (*kernel.defines, ("KERNEL", "attend"), ("NUM_THREADS", kernel.threads))
        )
    )
    return build_emulated(folder, ["-mf16c", "-mfma", f"-D__CUDA_ARCH__={10 * (10 * capability[0] + capability[1])}"])


@pytest.fixture
def emulated(request, monkeypatch, tmp_path):
    """A GPU of three multiprocessors and the compute capability that the test names, Hopper's if none."""
    capability = getattr(request, "param", (9, 0))

    def load(kernel, device_index):
        folder = tmp_path / f"kernel{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        library = compiled(kernel, folder, capability)
        return SimpleNamespace(launch=lambda grid, threads, args, stream, **_: library.launch(ctypes.byref(args), grid))

    monkeypatch.setattr(cuda, "load_kernel", load)
    monkeypatch.setattr(device_plan, "load_kernel", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=BLOCKS))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))


def cases():
    yield Case(**both("int4"), lengths=(333, 0, 70), tail=20, sinks=1)
    yield Case(**of("nuq4-1%"), lengths=(333, 0, 70), tail=20, sinks=1)
    yield Case(**static("nuq3-1%"), lengths=(333, 70), head_dim=64, group=8)
    yield Case(**of("nuq2-1%"), lengths=(333, 70), group=3)
    whole = {
        "lengths": (320, 64, 640, 0, 192, 448),
        "group": 6,
    }  # units that are one segment each, several in a block: no warp waits for the others between them
    yield Case(**both("int4"), **whole)
    yield Case(key=spec("int2", PerChannel(), symmetric=False), value=spec("int2", symmetric=False), **whole)
    yield Case(**both("int8", PerToken()), **whole, head_dim=80, num_queries=2)
    yield Case(**both("int3"), **whole)
    ragged = {"lengths": (700, 0, 333, 70), "tail": 20, "sinks": 3}
    yield Case(**TIERED, **ragged, young=True)
    yield Case(**TIERED, **ragged, young=True, head_dim=64, group=3, num_queries=5, page_size=32)
    yield Case(**both("int4"), **ragged, young=True, softcap=20.0, page_size=128, crop=13)
    yield Case(
        key=spec("int4", PerChannel(), static=True, symmetric=False),
        value=spec("int4", PerChannel()),
        **ragged,
        young=True,
        window=300,
    )
    # three column tiles
    yield Case(**both("int8"), lengths=(333, 70), tail=20, group=5, num_queries=11, head_dim=64, softcap=20.0)
    yield Case(key=spec("int3"), value=spec("int4", symmetric=False), **ragged, young=True)
    yield from joined()
    yield Case(key=spec("int4"), value=spec("int3"), **ragged, young=True)
    # planes of 3-bit codes: joined with halves of a row that are whole 16-byte steps, that are not, not joined
    few = {"lengths": (333, 70), "tail": 20}
    yield Case(**both("int3", PerGroup(32), symmetric=False), **few, group=5, num_queries=11)
    yield Case(
        key=spec("int3", PerChannel(), symmetric=False), value=spec("int3", PerChannel(), symmetric=False), **few
    )
    yield Case(**both("int3", center="channel"), **few, head_dim=256)
    yield Case(**both("int3", PerGroup(32), symmetric=False), **few, head_dim=64, group=8)
    yield Case(key=spec("int3", PerChannel()), value=spec("int3", PerToken()), **few, head_dim=96)
    yield Case(
        key=spec("int3", PerChannel(), symmetric=False),
        value=spec("int3", PerToken(), symmetric=False),
        **few,
        head_dim=80,
    )
    yield from banded()
    yield from unlike_widths(lengths=(333, 0, 70), tail=20, sinks=3)
    yield from wide(lengths=(200, 70), tail=20, sinks=3, heads=1)
    if os.environ.get("KVBITS_TEST_ALL_KERNELS"):
        yield from (dataclasses.replace(c, lengths=(500 if c.window else 333, 70)) for c in direct())


def banded():
    """Keys in a calibrated basis: frames that pages cut in any place, far ones, columns of one, two and several frames
    to an instruction, every width.
    """
    whole = {"lengths": (320, 64, 640, 0, 192, 448)}
    yield Case(**of("klt4"), lengths=(600, 0, 70), tail=20, sinks=4, first=131_000, group=8)
    yield Case(**of("klt3"), **whole, group=6, num_queries=2, window=200)
    yield Case(**of("klt2"), **whole, tail=20, sinks=1, group=1)
    yield Case(**of("klt4"), lengths=(333, 70), head_dim=64, group=3, softcap=20.0, page_size=32, crop=13)
    yield Case(**of("klt2"), **whole, head_dim=64, tail=64, sinks=4, group=5, magnitude=30.0)
    yield Case(**of("klt3"), lengths=(700, 70), tail=20, head_dim=256, group=2, page_size=128)
    # few tokens, some hidden from one query
    yield Case(**of("klt2"), lengths=(64, 70), group=2, num_queries=2, page_size=32)
    wide = schemes.get("klt4", head_dim=256)  # has a plane of 8 bits
    yield Case(key=wide.key, value=wide.value, lengths=(333, 0, 70), tail=20, sinks=4, head_dim=256, group=4)
    key, value = of("klt3").values()
    for bands in ((8, 0, 1, 2), (3, 6, 1, 5)):
        yield Case(
            key=dataclasses.replace(key, bands=bands, center=None),
            value=dataclasses.replace(value, basis=None),
            lengths=(333, 70),
            head_dim=64,
        )


def joined():
    """Raw tokens in the walk over packed pages: sequences of both, of one of them and of neither, several units to a
    block, and one over several blocks.
    """
    mixed = {"lengths": (20, 333, 0, 64, 150, 1), "group": 3}
    yield Case(**both("int8", center="channel"), **mixed, tail=20, sinks=4)
    yield Case(**both("int4", PerGroup(32)), **mixed, tail=64)
    asymmetric = spec("int4", PerGroup(32), symmetric=False)
    yield Case(key=dataclasses.replace(asymmetric, center="channel"), value=asymmetric, **mixed, tail=150, sinks=64)
    yield Case(
        key=spec("int2", PerChannel(), symmetric=False),
        value=spec("int2", symmetric=False),
        lengths=(700, 333, 70),
        tail=1,
        sinks=3,
    )
    long = {"lengths": (900,), "heads": 1, "tail": 150, "num_queries": 8, "window": 700}
    yield Case(key=spec("int4", PerChannel(), symmetric=False), value=spec("int4", symmetric=False), **long)
    yield Case(
        key=spec("int2", PerChannel(), symmetric=False),
        value=spec("int2", PerGroup(32), symmetric=False),
        **mixed,
        tail=40,
        page_size=32,
        sinks=2,
    )
    yield Case(
        key=spec("int8", PerGroup(32)),
        value=spec("int4", PerGroup(32)),
        **mixed,
        tail=64,
        softcap=20.0,
        num_queries=2,
        dtype=torch.float16,
    )
    yield Case(
        key=spec("int3", PerToken()),
        value=spec("fp8_e5m2", PerToken(), center="channel"),
        **mixed,
        tail=20,
        head_dim=80,
        sinks=1,
        crop=13,
    )
    yield Case(**both("int2"), lengths=(333, 70), tail=40, group=5, num_queries=11, head_dim=64)  # three column tiles


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_kernel_computes_what_the_reference_does(case, emulated, backwards=False):
    call, q, _ = build(case, "cpu")
    call = dataclasses.replace(call, parts=call.parts[::-1]) if backwards else call
    plan = cuda.Plan(call, q.shape[2], q.dtype, torch.device("cpu", 0), num_queries=case.num_queries)
    plan.device = q.device
    plan.out.fill_(float("nan"))
    out, lse = plan.run(q)
    want, want_lse = reference.attend(q, call, plan.q_positions.long(), torch.float64)
    assert relative_error(out, want) < LIMIT
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq3-1%", "klt2"])
def test_the_order_of_threads_does_not_matter(name, emulated, monkeypatch):
    monkeypatch.setenv("KVBITS_EMULATE_REVERSED", "1")
    test_the_kernel_computes_what_the_reference_does(Case(**of(name), lengths=(333, 0, 70), tail=20, sinks=1), None)


def test_one_plan_serves_layers_with_parameters_of_their_own(emulated):
    call, q, strides = build(Case(**static("nuq4-1%"), lengths=(333, 70), tail=20, layers=2), "cpu")
    plan = cuda.Plan(call, q.shape[2], q.dtype, torch.device("cpu", 0), layer_strides=tuple(strides))
    plan.device = q.device
    first = plan.run(q)[0].clone()
    parts = tuple(
        dataclasses.replace(
            p, store=dataclasses.replace(p.store, static={n: x * 1.25 for n, x in p.store.static.items()})
        )
        for p in call.parts
    )
    want, _ = reference.attend(q, dataclasses.replace(call, parts=parts), plan.q_positions.long(), torch.float64)
    with pytest.raises(DataError, match="layer 1 of a scheme with calibrated parameters was given none"):
        plan.run(q, layer=1)
    out, _ = plan.run(q, layer=1, static=[p.store.static for p in parts])
    assert relative_error(out, want) < LIMIT
    assert torch.equal(plan.run(q)[0], first) and relative_error(first, want) > 10 * LIMIT


@pytest.mark.parametrize("emulated", [(8, 0), (8, 9)], indirect=True, ids=["sm_80", "sm_89"])
def test_rings_without_the_copy_engine(emulated):
    """Lanes copy and arrive one by one, in rings of two slots a warp."""
    test_the_kernel_computes_what_the_reference_does(
        Case(**TIERED, lengths=(700, 0, 333), tail=20, sinks=3, young=True, group=2), None
    )


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
def test_raw_tokens_join_in_any_order_of_parts(backwards, emulated):
    test_the_kernel_computes_what_the_reference_does(
        Case(**both("int2"), lengths=(20, 333), tail=70, sinks=3), None, backwards=backwards
    )


def test_queries_that_a_basis_takes_out_lose_nothing(emulated):
    """A query bias a hundred times the rest; and one column that is no number, beside others that are."""
    case = Case(**of("klt3"), lengths=(320,), head_dim=64, group=3, dtype=torch.float16)
    call, q, _ = build(case, "cpu")
    (part,) = call.parts
    basis = part.store.static["k_basis"] * torch.where(torch.arange(64) == 7, 100, 1)[:, None]
    part.store.static["k_mean"][..., [7, 39]] *= 1e-2  # a pair of the rotary embedding
    part.store.static.update(completed(part.store.static | {"k_basis": basis}, part.store.static["k_inv_freq"]))
    k, v = torch.randn(2, part.table.num_pages, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    k[..., 7] *= 1e-2
    close_reference.close(k, v, part.store, part.table.page_ids, starts=part.table.starts)
    q[..., 7] += 100
    plan = cuda.Plan(call, q.shape[2], q.dtype, torch.device("cpu", 0))
    plan.device = q.device
    out = plan.run(q)[0].clone()
    assert relative_error(out, reference.attend(q, call, plan.q_positions.long(), torch.float64)[0]) < LIMIT
    q[:, :, 1] = torch.nan
    assert torch.equal(plan.run(q)[0][:, :, [0, 2, 3, 4, 5]], out[:, :, [0, 2, 3, 4, 5]])


@pytest.mark.parametrize("emulated", [(8, 0)], indirect=True, ids=["sm_80"])
@pytest.mark.parametrize("fmt", ["int8", "int2"])
def test_raw_tokens_in_rings_without_the_copy_engine(fmt, emulated):
    """Keys and values of a chunk lie in one slot."""
    test_the_kernel_computes_what_the_reference_does(
        Case(**both(fmt), lengths=(20, 333, 0, 150), tail=64, sinks=3, group=2), None
    )


@pytest.mark.parametrize("emulated", [(8, 0)], indirect=True, ids=["sm_80"])
def test_rings_of_banded_pages_without_the_copy_engine(emulated):
    test_the_kernel_computes_what_the_reference_does(
        Case(**of("klt3"), lengths=(333, 0, 70), head_dim=64, tail=20, sinks=4, group=2), None
    )


@pytest.mark.parametrize("emulated", [(8, 0), (8, 9)], indirect=True, ids=["sm_80", "sm_89"])
@pytest.mark.parametrize("name", ["nuq3-1%", "nuq2-1%"])
def test_rings_of_codebook_pages_without_the_copy_engine(name, emulated):
    """Tables of 8.9 have rows for a code's bytes only."""
    test_the_kernel_computes_what_the_reference_does(
        Case(**of(name), lengths=(333, 0, 70), tail=20, sinks=1, group=2), None
    )
