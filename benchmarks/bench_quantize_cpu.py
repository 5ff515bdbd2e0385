"""Quantizing on the CPU: the paper's matrices and page closing, one interleaved run.

    python benchmarks/bench_quantize_cpu.py                  131072 x 1024 fp32, one thread: CPU time, medians
    python benchmarks/bench_quantize_cpu.py --threads 2      wall time

Candidates: scales and int8 codes per column by the production kernel ("per_channel"), by the paper's scalar listings in
memory order ("row_order") and as printed ("column_outer", timed once: it walks column by column), by torch; one scale
per row and 64 columns in 8 and 4 bits ("group64_int8", "group64_int4"); and closing pages of bf16 keys and values
("close_int8" and so on, one of them against the reference). "append": one token's keys and values of 3 heads of 64 into
a raw page, after 7 MB of weights have gone through the caches, as between two layers of SmolLM2-135M in a decoding
step. Codes are checked against the references first. Rates count input bytes once; `limit` is what a plain read of the
same matrix takes, and per_channel must read it twice. The last line is one JSON object.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_files import append, arguments

from kvbits.cache.pool import allocate_slab
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.cpu import library
from kvbits.ops.cpu import store as store_cpu
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference import store as store_reference
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, PerChannel, PerToken, QuantSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from studies.int8_paper import cpu, reference

parser = arguments(__doc__)
parser.add_argument("--rows", type=int, default=131072)
parser.add_argument("--columns", type=int, default=1024)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--skip-column-outer", action="store_true")
args = parser.parse_args()
torch.set_num_threads(args.threads)
torch.manual_seed(0)
clock = time.process_time if args.threads == 1 else time.perf_counter
rows, columns = args.rows, args.columns


def huge(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return allocate_slab(nbytes, torch.device("cpu"))[:nbytes].view(dtype).view(shape)


x = huge(rows, columns, dtype=torch.float32)
for block in x.split(8192):
    block.normal_()
codes = huge(rows, columns, dtype=torch.int8)
packed = huge(rows, columns // 2, dtype=torch.uint8)


def per_channel(kernel: str) -> None:
    cpu.quantize(x, cpu.compute_scales(x, kernel=kernel), kernel=kernel, out=codes)


def torch_per_channel() -> None:
    codes.copy_(reference.quantize(x, reference.compute_scales(x)))


matrix_candidates: dict[str, Callable[[], object]] = {
    "per_channel": lambda: per_channel("fast"),
    "row_order": lambda: per_channel("row_order"),
    "torch": torch_per_channel,
    "group64_int8": lambda: cpu.quantize_groups(x, 64, 8, out=codes),
    "group64_int4": lambda: cpu.quantize_groups(x, 64, 4, out=packed),
    "dequantize": lambda: cpu.dequantize(codes[: rows // 4], torch.ones(columns), out=restored),
}
restored = huge(rows // 4, columns, dtype=torch.float32)

# ---- correctness ----
sample = x[:2048]
assert torch.equal(
    cpu.quantize(sample, cpu.compute_scales(sample)), reference.quantize(sample, reference.compute_scales(sample))
)
for bits in (8, 4):
    for got, want in zip(
        cpu.quantize_groups(sample, 64, bits), reference.quantize_groups(sample, 64, bits), strict=True
    ):
        assert torch.equal(got, want)

CLOSE = {
    "close_int8": (QuantSpec(format="int8"),) * 2,
    "close_int4": (QuantSpec(format="int4"),) * 2,
    "close_int2_kivi": (
        QuantSpec(format="int2", granularity=PerChannel(), symmetric=False),
        QuantSpec(format="int2", granularity=PerToken(), symmetric=False),
    ),
    "close_fp8": (QuantSpec(format="fp8_e4m3"),) * 2,
}
PAGES, HEADS, DIM = 512, 8, 128
k, v = (
    huge(PAGES, HEADS, 64, DIM, dtype=torch.bfloat16).copy_(torch.randn(1, HEADS, 64, DIM).repeat(PAGES, 1, 1, 1))
    for _ in range(2)
)
stores = {}
for name, (key, value) in CLOSE.items():
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=HEADS, head_dim=DIM)
    stores[name] = PageStore(layout, (huge(PAGES, HEADS, layout.head_bytes, dtype=torch.uint8),))
    close_cpu.close(k[:8], v[:8], stores[name], np.arange(8))
    want, _ = close_reference.close_pages(k[:8], v[:8], layout)
    assert torch.equal(stores[name].slabs[0][:8], want), name
ids = np.arange(PAGES)


def timed(run: Callable[[], object]) -> float:
    start = clock()
    run()
    return clock() - start


candidates: dict[str, tuple[Callable[[], object], int]] = {
    n: (run, x.nbytes // (4 if n == "dequantize" else 1)) for n, run in matrix_candidates.items()
}
for name, store in stores.items():
    candidates[name] = (lambda store=store: close_cpu.close(k, v, store, ids), k.nbytes + v.nbytes)
small = slice(0, 16)
candidates["close_int8_reference"] = (
    lambda: close_reference.close(k[small], v[small], stores["close_int8"], ids[small]),
    (k.nbytes + v.nbytes) * 16 // PAGES,
)
candidates["limit"] = (lambda: x.view(torch.int64).sum(), x.nbytes)
times: dict[str, list[float]] = {name: [] for name in candidates}
for i in range(args.rounds):
    for name, (run, _) in candidates.items():
        if (name in ("row_order", "torch") or name.endswith("_reference")) and i >= 3:
            continue
        times[name].append(timed(run))
seconds = {name: statistics.median(t) for name, t in times.items()}
if not args.skip_column_outer:
    seconds["column_outer"] = timed(lambda: per_channel("column_outer"))
    candidates["column_outer"] = (None, x.nbytes)

# ---- a token's write, with cold caches ----
raw = PageLayout(key=QuantSpec.raw(), value=QuantSpec.raw(), page_size=64, num_kv_heads=3, head_dim=64)
tails = [PageStore(raw, (torch.zeros(4, 3, raw.head_bytes, dtype=torch.uint8),)) for _ in "ab"]
token_k, token_v = (torch.randn(1, 3, 1, 64).bfloat16().transpose(1, 2) for _ in "kv")
slots = torch.tensor([2 * 64 + 5])
appends = {
    "cpu": lambda: store_cpu.store(token_k, token_v, tails[0], slots),
    "reference": lambda: store_reference.store(token_k, token_v, tails[1], slots),
}
waits: dict[str, list[float]] = {name: [] for name in appends}
weights = x.view(torch.int64).flatten()[: 7_000_000 // 8]
for i in range(200):
    for name, run in appends.items():
        weights.sum()
        began = time.perf_counter()
        run()
        if i >= 20:
            waits[name].append(time.perf_counter() - began)
assert torch.equal(tails[0].slabs[0], tails[1].slabs[0])
append_us = {name: round(statistics.median(t) * 1e6, 1) for name, t in waits.items()}

print(f"{rows} x {columns} fp32, {library.tier()}, {args.threads} thread(s)")
rates = {name: candidates[name][1] / s for name, s in seconds.items()}
for name, s in seconds.items():
    beside = (
        f"   {rates[name] / rates['row_order']:6.1f}x row order"
        if not name.startswith(("close", "dequantize", "limit"))
        else ""
    )
    print(f"  {name:23s} {s * 1e3:9.2f} ms  {rates[name] / 1e9:6.2f} GB/s of input{beside}")
print("  append of one token: " + ", ".join(f"{name} {t} us" for name, t in append_us.items()))
found: list[dict[str, Any]] = [{"name": n, "input_bytes_per_s": round(r)} for n, r in rates.items()]
for row in found:
    if row["name"] in ("per_channel", "group64_int8", "group64_int4", "torch"):
        row["ratio_vs_row_order"] = round(rates[row["name"]] / rates["row_order"], 1)
    if row["name"] == "per_channel" and not args.skip_column_outer:
        row["ratio_vs_column_outer"] = round(rates["per_channel"] / rates["column_outer"], 1)
append(
    found,
    args.out,
    sections={"append": [{"backend": n, "us": t} for n, t in append_us.items()]},
    matrix=[rows, columns],
    threads=args.threads,
    tier=library.tier(),
    load=os.getloadavg()[0],
)
