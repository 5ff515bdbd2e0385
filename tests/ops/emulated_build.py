"""Kernels compiled for a CPU (tests/ops/emulated): equal ones once, also for other workers and for later runs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbits import ops
from kvbits.ops.cuda.engine.runtime.compile import headers_of

FOLDER = Path(ops.__file__).parent
MADE = Path(__file__).parents[2] / "build" / "emulated"
"""Libraries by what they are made of."""
KEPT = 3 * 86_400
"""Seconds that a library stays without being asked for."""


@functools.cache
def _compiler() -> str:
    """The compiler's version, and what its options find outside the kernel's own folder. Old libraries go."""
    MADE.mkdir(parents=True, exist_ok=True)
    for path in MADE.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another worker finished or removed it
            if path.stat().st_mtime < time.time() - KEPT:
                path.unlink()
    headers = [p.read_text() for p in sorted(FOLDER.glob("*.h"))]
    return "\n".join(
        [subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout, *headers]
    )


def put_sources(folder: Path, source: Path, instead: Mapping[str, str]) -> None:
    """Put what `build` takes into `folder`: a kernel's source as kernel.h, the headers that it includes, and the
    emulation of a GPU.

    Args:
        instead: texts that only a GPU's compiler knows, and what stands in their place.
    """
    text = source.read_text()
    for gpu_only, here in instead.items():
        assert gpu_only in text
        text = text.replace(gpu_only, here)
    emulation = {
        p.name: p.read_text() for p in (Path(__file__).parent / "emulated").iterdir() if p.suffix in (".cuh", ".cpp")
    }
    for name, content in (headers_of(source.parent, source.name) | emulation | {"kernel.h": text}).items():
        (folder / name).write_text(content)


def build(folder: Path, options: Sequence[str]) -> ctypes.CDLL:
    """block.cpp of `folder`, which holds what it includes but for numbers.h, as a library.

    Raises:
        subprocess.CalledProcessError: it does not compile; the compiler has said why.
    """
    sources = sorted(p for p in folder.iterdir() if p.suffix in (".h", ".cuh", ".cpp"))
    key = hashlib.sha256(
        "\0".join([_compiler(), *options, *(x for p in sources for x in (p.name, p.read_text()))]).encode()
    ).hexdigest()
    made = MADE / f"{key[:40]}.so"
    if made.exists():
        os.utime(made)
    else:
        part = MADE / f"{key[:40]}.{os.getpid()}"
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            *options,
            f"-I{FOLDER}",
            f"-I{folder}",
            str(folder / "block.cpp"),
            "-o",
            str(part),
        ]
        subprocess.run(command, check=True)
        part.rename(made)
    return ctypes.CDLL(str(made))
