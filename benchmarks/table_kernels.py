"""Table of the registers, words kept in local memory and shared memory of decode attention in each core preset, by
compute capability. Needs NVRTC, no GPU.

python benchmarks/table_kernels.py [--archs 80,86,89,90,120] [PRESET ..]
"""

from __future__ import annotations

import argparse

import torch

from kvbits import schemes
from kvbits.ops.cuda import ahead
from kvbits.report.markdown import table
from kvbits.spec import CacheSpec, LayerGeometry

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("presets", nargs="*", default=[name for name, s in schemes.CORE.items() if not s.tiers])
parser.add_argument("--archs", default="80,86,89,90,120")
args = parser.parse_args()
archs = [(int(a[:-1]), int(a[-1])) for a in args.archs.split(",")]
layers = (LayerGeometry(num_kv_heads=8, head_dim=128),)

rows = []
for name in args.presets:
    (group,) = CacheSpec(scheme=schemes.get(name), layers=layers).groups
    cells = []
    for capability in archs:
        every = ahead.of_group(group, 32, torch.bfloat16, False, capability)
        *_, kernel = (s for s in every if "SPANS" in s.macros)  # of one token behind packed pages and raw ones
        (binary,) = ahead.compiled([kernel], capability)
        found = binary.resources("attend")
        cells.append(
            f"{found.registers}, {found.spill_bytes}, {int(kernel.macros['SHARED_BYTES']) / 1024:.0f},"
            f" {kernel.macros['WARPS']}"
        )
    rows.append([f"`{name}`", *cells])
print(table(["preset", *(f"{a}.{b}" for a, b in archs)], rows))
