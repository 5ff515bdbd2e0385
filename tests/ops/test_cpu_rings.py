"""The CPU kernels' search for the path of least cost, compiled by itself: any units in each lane, against the definition
in `quant.trellis`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ops.cpu_cases import VECTOR_TIERS

from kvbits.ops.cpu import library
from kvbits.quant import trellis

CSRC = Path(library.__file__).parent / "csrc"
SOURCE = """
#include "families/klt/trellis.h"
extern "C" int lanes() { return VL; }
extern "C" void code(int32_t* u, const int32_t* first, const int32_t* most, int length, int fitted) {
  vi x[RING];
  for (int t = 0; t < length; t++) x[t] = load_int(u + t * VL);
  if (fitted) code_rings<FittedLevels>(x, load_int(first), load_int(most), length);
  else code_rings<UniformLevels>(x, load_int(first), load_int(most), length);
  for (int t = 0; t < length; t++) *(vi_mem*)(u + t * VL) = x[t];
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not VECTOR_TIERS, reason="no g++, or no CPU kernels")


@pytest.fixture(scope="module", params=VECTOR_TIERS)
def coder(request, tmp_path_factory):
    """codes uint8 [n, length] of units int32 [n, length] of the same width, by one instruction set's kernels."""
    here = tmp_path_factory.mktemp("rings")
    (here / "rings.cpp").write_text(SOURCE)
    options = ["-std=c++17", "-O2", "-Wno-psabi", "-fno-strict-aliasing", "-fPIC", "-shared", f"-I{CSRC}"]
    if request.param != "generic":
        options += ["-march=native", f"-DKVBITS_{request.param.upper()}"]
    subprocess.run(["g++", *options, "-o", str(here / "rings.so"), str(here / "rings.cpp")], check=True)
    code = ctypes.CDLL(str(here / "rings.so"))

    def codes(u, bits, levels):
        length, lanes, found = u.shape[1], code.lanes(), []
        first = torch.full((lanes,), 16 * (1 - 2 ** (bits + 1)), dtype=torch.int32)
        most = torch.full((lanes,), 2 ** (bits - 1) - 1, dtype=torch.int32)
        for some in u.split(lanes):
            x = torch.zeros(length, lanes, dtype=torch.int32)
            x[:, : len(some)] = some.T
            code.code(*(ctypes.c_void_p(t.data_ptr()) for t in (x, first, most)), length, int(levels == "fitted"))
            found.append(x[:, : len(some)].T)
        return torch.cat(found).to(torch.uint8)

    return codes


def expected(u, bits, levels):
    """The same by the definition: a head that is one ring of values, in the order of its channels."""
    return trellis.quantize(u.float(), (bits,), "v", torch.full((len(u),), 64.0), trellis.LEVELS[levels])


def drawn(low, high, n, length, seed):
    return torch.randint(low, high + 1, (n, length), generator=torch.Generator().manual_seed(seed)).int()


CODES = [*((bits, "uniform") for bits in range(1, 7)), (2, "fitted")]


@pytest.mark.parametrize("length", [8, 12, 16])
@pytest.mark.parametrize(("bits", "levels"), CODES)
def test_any_units_and_ties(coder, bits, levels, length):
    """Multiples of 16 lie on levels or between two, so most rings have several best paths."""
    reach = 2 ** (bits + 1)
    for u in (
        drawn(-16 * reach - 99, 16 * reach + 99, 600, length, bits),
        16 * drawn(-reach - 6, reach + 6, 900, length, bits + 10),
        32 * drawn(-3, 3, 600, length, bits + 20),
        torch.zeros(1, length, dtype=torch.int32),
        torch.arange(-2200, 2200, 7).int()[:, None].expand(-1, length),
    ):
        assert torch.equal(coder(u, bits, levels), expected(u, bits, levels))


@pytest.mark.parametrize("length", [12, 16])
@pytest.mark.parametrize(("bits", "levels"), CODES)
def test_units_so_far_outside_that_costs_need_more_than_32_bits(coder, bits, levels, length):
    end = trellis.FARTHEST
    signs = 2 * drawn(0, 1, 300, length, bits) - 1
    for u in (
        end * signs,
        drawn(-end, end, 300, length, bits + 1),
        # sums on both sides of what 32 bits hold
        signs * drawn(2000, 4000, 300, length, bits + 2),
        torch.full((1, length), end, dtype=torch.int32),
        torch.full((1, length), -end, dtype=torch.int32),
    ):
        assert torch.equal(coder(u, bits, levels), expected(u, bits, levels))
