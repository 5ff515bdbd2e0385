"""Every header of the CPU kernels includes what it uses: alone, it compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvbits.ops.cpu import library

CSRC = Path(library.__file__).parent / "csrc"
OF_ANOTHER_TIER = {"dots_avx2.h", "dots_avx512.h", "dots_neon.h", "avx2.h", "avx512.h", "neon.h"}
ASKS_FOR_A_WIDTH = {"portable.h"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_header_compiles_alone(tmp_path):
    headers = [h for h in sorted(CSRC.rglob("*.h")) if h.name not in OF_ANOTHER_TIER | ASKS_FOR_A_WIDTH]
    assert len(headers) > 20
    sources = [tmp_path / f"{i}.cpp" for i in range(len(headers))]
    for source, header in zip(sources, headers, strict=True):
        source.write_text(f'#include "{header}"\n')
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-Wno-psabi", f"-I{CSRC}", *map(str, sources)], check=True)
