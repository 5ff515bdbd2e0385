"""A CUDA kernel of one file, compiled for the CPU in place of the GPU."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.emulated_build import build, put_sources

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
needs_compiler = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64"
)
DEVICES = [pytest.param("cpu", id="emulated", marks=needs_compiler), pytest.param("cuda", id="gpu", marks=needs_gpu)]


def emulate(module, kernel: str, tmp_path: Path, monkeypatch) -> None:
    """Have an op's module (`source`, `_load`, a source beside it that is called like its folder) launch `kernel` on the
    CPU.
    """
    folder = Path(module.__file__).parent
    put_sources(tmp_path, folder / f"{folder.name}.cu", {'extern "C" __global__': ""})

    def load(*key):  # what the kernel is made for, and its device
        macros = dict(module.source(*key[:-1]).macros) | {
            "KERNEL": kernel,
            "NUM_THREADS": "THREADS",
            "SHARED_BYTES": 1024,
        }
        (tmp_path / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in macros.items()))
        library = build(tmp_path, ["-mf16c", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"])
        return SimpleNamespace(launch=lambda grid, threads, args, stream: library.launch(ctypes.byref(args), grid))

    monkeypatch.setattr(module, "_load", load)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
