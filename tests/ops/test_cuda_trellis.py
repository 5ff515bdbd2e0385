"""The path search of the CUDA writers (trellis.cuh), run on a CPU: code for code what quant/trellis.py stores."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from nightly import at_night
from ops.emulated_build import build, put_sources
from ops.emulated_op import needs_compiler

from kvbits.ops.cuda.families.klt import store as store_klt
from kvbits.quant.trellis import FARTHEST, FITTED, RING, UNIFORM, UNIT, quantize

pytestmark = needs_compiler
THREADS = 64
KERNEL = """
#include "trellis.cuh"
struct Args { const u32* numbers; u32* codes; int width, count; };
void search(const Args& a) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i >= a.count) return;
    u32 numbers[RING / 2], codes[RUNS];
    for (int k = 0; k < RING / 2; ++k) numbers[k] = a.numbers[i * RING / 2 + k];
    ring_codes<KEYS>(numbers, LEVELS(a.width), codes);
    for (int k = 0; k < RUNS; ++k) a.codes[i * RUNS + k] = codes[k];
}
"""


class Args(ctypes.Structure):
    _fields_ = [
        ("numbers", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("count", ctypes.c_int),
    ]


def found(u, kind, bits, levels, folder):
    """Codes uint8 [n, 16] by the kernel of u int32 [n, 16]: a head of 16 channels, which is one ring."""
    put_sources(folder, Path(store_klt.__file__).parent / "store_banded.cu", {})
    (folder / "kernel.h").write_text(KERNEL)
    lines = {
        "KEYS": int(kind == "k"),
        "LEVELS": levels,
        "KERNEL": "search",
        "NUM_THREADS": THREADS,
        "SHARED_BYTES": 64,
    }
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in lines.items()))
    library = build(folder, ["-mf16c", "-mfma"])
    numbers = (u + FARTHEST).to(torch.int16).contiguous()
    codes = torch.zeros(len(u), RING, dtype=torch.uint8)
    args = Args(numbers.data_ptr(), codes.data_ptr(), bits, len(u))
    library.launch(ctypes.byref(args), -(-len(u) // THREADS))
    return codes


def rows():
    """int32 [n, 16]: numbers around levels, numbers that cost the same in many ways, and numbers past all levels."""
    made = torch.Generator().manual_seed(5)

    def some(low, high):
        return torch.randint(low, high + 1, (400, RING), generator=made)

    sizes = 2.0 ** torch.randint(3, 12, (400, 1), generator=made)
    near = (torch.randn(400, RING, generator=made) * sizes).round().int()
    ties = torch.cat([16 * some(-9, 9), 64 * some(-2, 2), 32 * some(-70, 70), some(0, 0), some(-1, 1)])
    far = torch.cat([8192 * some(-1, 1), some(-8192, 8192), 8192 * some(0, 1), torch.full((1, RING), 8192)])
    mixed = torch.where(some(0, 7) == 0, 8192 * some(-1, 1), near)
    return torch.cat([near, ties, far, mixed]).clamp(-FARTHEST, FARTHEST).int()


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize(
    ("levels", "bits"),
    [
        ("FittedLevels", 2),
        ("UniformLevels<0>", 4),
        ("UniformLevels<3>", 3),
        *at_night(*(("UniformLevels<0>", bits) for bits in (1, 2, 3, 5, 6))),
        *at_night(*((f"UniformLevels<{bits}>", bits) for bits in (1, 2, 4, 5, 6))),
    ],
)
def test_codes_are_those_of_the_reference(levels, bits, kind, tmp_path):
    u = rows()
    table = FITTED if levels == "FittedLevels" else UNIFORM
    ours = found(u, kind, bits, levels, tmp_path)
    want = quantize(u.float(), (bits,), kind, torch.full((len(u),), float(UNIT)), table)
    assert torch.equal(ours, want)
