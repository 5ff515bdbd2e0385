"""A GPU of three multiprocessors whose memory is the CPU's: kernels of attention, work lists and merging run by
tests/ops/emulated.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.emulated_build import build, put_sources
from ops.emulated_op import emulate

from kvbits.ops import dispatch
from kvbits.ops.cuda import attend as attend_cuda
from kvbits.ops.cuda import merge
from kvbits.ops.cuda.engine import launch, work_list

needs_emulation = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64"
)
BLOCKS = 3
LIST_THREADS = 64


def attention_library(kernel, folder: Path, capability: tuple[int, int] = (9, 0)) -> ctypes.CDLL:
    """An attention kernel for a CPU; `folder` takes its sources."""
    put_sources(
        folder,
        kernel.source,
        {"extern __shared__ __align__(128) unsigned char shared[];": "", 'extern "C" __global__': ""},
    )
    macros = (*kernel.defines, ("KERNEL", "attend"), ("NUM_THREADS", kernel.threads))
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros))
    return build(folder, ["-mf16c", "-mfma", f"-D__CUDA_ARCH__={10 * (10 * capability[0] + capability[1])}"])


@functools.cache
def list_library(num_parts: int) -> ctypes.CDLL:
    """work_list.cu for a CPU, launches over so many parts."""
    source = work_list.source(num_parts)
    macros = dict(source.macros) | {
        "THREADS": LIST_THREADS,
        "SHARED_BYTES": 200_000,
        "KERNEL": "work_list",
        "NUM_THREADS": "THREADS",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpu_only = {"extern __shared__ __align__(16) unsigned char shared[];": "", 'extern "C" __global__': ""}
        put_sources(folder, source.folder / source.name, gpu_only)
        (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros.items()))
        return build(folder, ["-mf16c", "-mfma"])


@pytest.fixture
def emulated(request, monkeypatch, tmp_path):
    """Serve plans for "cpu" by the CUDA kernels; of the compute capability that the test names, Hopper's if none."""
    capability = getattr(request, "param", (9, 0))

    def launches(library):
        return SimpleNamespace(launch=lambda grid, threads, args, stream, **_: library.launch(ctypes.byref(args), grid))

    def load(kernel, device_index):
        folder = tmp_path / f"kernel{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return launches(attention_library(kernel, folder, capability))

    monkeypatch.setitem(dispatch.BACKENDS, "attend", ("cuda", "cpu", "reference"))
    monkeypatch.setattr(launch, "load_kernel", load)
    monkeypatch.setattr(work_list, "load", lambda parts, *_: launches(list_library(parts)))
    monkeypatch.setattr(work_list, "THREADS", LIST_THREADS)
    monkeypatch.setattr(attend_cuda, "indexed", lambda device: device)
    monkeypatch.setattr(attend_cuda.driver, "refuses", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=BLOCKS))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    (tmp_path / "merge").mkdir()
    emulate(merge, "merge_partials", tmp_path / "merge", monkeypatch)
    return monkeypatch
