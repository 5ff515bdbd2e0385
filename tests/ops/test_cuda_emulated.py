"""The attention kernel's C++ run on a CPU, thread by thread (tests/ops/emulated), against the float64 reference: what CI can check without a GPU.

KVBITS_TEST_ALL_KERNELS=1 runs all cases of the GPU tests of KVQuant's formats (some minutes).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.cuda_cases import Case, build, relative_error
from ops.test_cuda_attend import LIMIT, both
from ops.test_cuda_kvquant import direct, of, static

from kvbits import ops
from kvbits.ops.attend_pages import cuda, reference

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
FOLDER = Path(ops.__file__).parent
BLOCKS = 3


def compiled(kernel, folder: Path) -> ctypes.CDLL:
    here = Path(__file__).parent / "emulated"
    sources = [*(FOLDER / "attend_pages").glob("*.cuh"), FOLDER / "cuda" / "turn.cuh", here / "ptx.cuh", here / "attend.cpp"]
    for path in sources:
        (folder / path.name).write_text(path.read_text())
    text = (FOLDER / "attend_pages" / "attend.cu").read_text()
    for gpu_only in ("extern __shared__ __align__(128) unsigned char shared[];", 'extern "C" __global__', 'asm volatile("fence.proxy.async;" ::: "memory");'):
        assert gpu_only in text
        text = text.replace(gpu_only, "")
    (folder / "attend.h").write_text(text)
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in kernel.defines))
    command = ["g++", "-std=c++17", "-O1", "-w", "-mf16c", "-mfma", "-shared", "-fPIC", f"-I{folder}", str(folder / "attend.cpp"), "-o", str(folder / "attend.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "attend.so"))


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    def load(kernel, device_index):
        library = compiled(kernel, tmp_path)
        return SimpleNamespace(launch=lambda grid, threads, args, stream: library.launch(ctypes.byref(args), grid))

    monkeypatch.setattr(cuda, "_load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=BLOCKS))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))


def cases():
    yield Case(**both("int4"), lengths=(333, 0, 70), tail=20, sinks=1)
    yield Case(**of("nuq4-1%"), lengths=(333, 0, 70), tail=20, sinks=1)
    yield Case(**static("nuq3-1%"), lengths=(333, 70), head_dim=64, group=8)
    if os.environ.get("KVBITS_TEST_ALL_KERNELS"):
        yield from (dataclasses.replace(c, lengths=(500 if c.window else 333, 70)) for c in direct())


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_kernel_computes_what_the_reference_does(case, emulated):
    call, q, _ = build(case, "cpu")
    plan = cuda.Plan(call, q.shape[2], q.dtype, torch.device("cpu", 0), num_queries=case.num_queries)
    plan.device = q.device
    plan.out.fill_(float("nan"))
    out, lse = plan.run(q)
    want, want_lse = reference.attend(q, call, plan.q_positions.long(), torch.float64)
    assert relative_error(out, want) < LIMIT
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-3, atol=1e-2)
