"""The INT8 paper's matrix study on a GPU: four printed kernels, scales on the GPU, the production kernels, and the scalar CPU baseline.

    python benchmarks/bench_paper.py [--cpu-rows 4096] [--out benchmarks/results/<gpu>/paper.json]

Eight cases from 2,048 x 128 to 131,072 x 8,192 (2**30 elements), inputs uniform in [-1, 1] as in the paper. Every output is checked first: the printed
variants must agree with each other exactly and with the reference within one code, the largest error must stay under 1 / 254. Times are medians of CUDA
events; cases smaller than L2 rotate among copies. A quantized element costs 5 bytes (fp32 in, int8 out) and with its scale computed 9.
The CPU baseline is the paper's scalar code on one thread, timed on `--cpu-rows` rows and scaled to the case (it is linear in rows).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_attend_gpu import copy_bandwidth

from kvbits.ops.matrix import cpu, cuda, reference

CASES = ((2048, 128), (16384, 256), (65536, 256), (131072, 256), (131072, 1024), (131072, 2048), (131072, 4096), (131072, 8192))
ERROR_BOUND = 1 / 254
ROTATE_BYTES = 256 << 20


def time_us(calls: list[Any], repeats: int = 15) -> float:
    """Median time of one call, events around a round of all `calls`."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(np.median(times))


def check(x: torch.Tensor) -> dict[str, float]:
    """Errors of the round trip; stops the run if a kernel is wrong."""
    scales = cuda.compute_scales(x)
    q = cuda.quantize(x, scales)
    rows = slice(0, 4096)
    if not torch.equal(scales.cpu(), _reference_scales(x)):  # torch divides by a constant inexactly on GPUs: the judge of a scale is the CPU
        raise SystemExit("the scales differ from the reference")
    want = reference.quantize(x[rows].float(), scales)
    printed = cuda.quantize(x, scales, kernel="naive")
    both = cuda.quantize_with_scales(x)
    if not torch.equal(q[rows], want) or not torch.equal(both[0], q) or not torch.equal(both[1], scales):
        raise SystemExit("the production kernel differs from the reference")
    if any(not torch.equal(cuda.quantize(x, scales, kernel=k), printed) for k in ("tiled", "coarsened", "vectorized")):
        raise SystemExit("the paper's variants differ from each other")
    if int((printed[rows].int() - want.int()).abs().max()) > 1:
        raise SystemExit("the paper's variants differ from the reference by more than one code")
    worst, squares = 0.0, 0.0
    for first in range(0, len(x), 16384):
        part = slice(first, first + 16384)
        error = (cuda.dequantize(q[part], scales) - x[part].float()).abs()
        worst, squares = max(worst, float(error.max())), squares + float(error.double().square().sum())
    if worst > ERROR_BOUND * 1.0001:
        raise SystemExit(f"largest error {worst} is above 1 / 254")
    queries = torch.rand(64, x.shape[1], device=x.device) * 2 - 1
    attention = float((queries @ (cuda.dequantize(q[rows], scales) - x[rows].float()).T).abs().mean())
    return {"max_error": worst, "l2_error": math.sqrt(squares), "attention_error": attention}


def _reference_scales(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().amax(0).float().cpu()
    return torch.where(largest > 0, largest / 127, torch.ones_like(largest))


def bench_case(rows: int, columns: int, copy: float, cpu_rows: int) -> list[dict[str, Any]]:
    """Rows of the table of one case."""
    generator = torch.Generator(device="cuda").manual_seed(rows + columns)
    x = torch.empty(rows, columns, device="cuda").uniform_(-1, 1, generator=generator)
    errors = check(x)
    copies = min(8, max(1, ROTATE_BYTES // (x.numel() * 5)))
    xs = [x, *(x.clone() for _ in range(copies - 1))]
    outs = [torch.empty(x.shape, dtype=torch.int8, device="cuda") for _ in xs]
    backs = [torch.empty_like(x) for _ in xs]
    scales = cuda.compute_scales(x)
    baseline = _cpu_seconds(x, cpu_rows)
    found = []

    def add(name: str, calls: list[Any], nbytes: int) -> None:
        us = time_us(calls)
        row = {"kernel": name, "rows": rows, "columns": columns, "time_us": us, "bytes": nbytes, "share_of_copy": nbytes / (us * 1e-6) / copy, **errors}
        stage = "dequantize" if name.startswith("dequantize") else "with_scales" if "scales" in name else "quantize"
        found.append(row | {f"speedup_vs_{k}": s[stage] / (us * 1e-6) for k, s in baseline.items()})

    for kernel in cuda.KERNELS:
        add(f"quantize_{kernel}", [lambda a=a, o=o, k=kernel: cuda.quantize(a, scales, kernel=k, out=o) for a, o in zip(xs, outs, strict=True)], 5 * x.numel())
    for kernel in cuda.KERNELS:
        calls = [lambda b=b, o=o, k=kernel: cuda.dequantize(o, scales, kernel=k, out=b) for b, o in zip(backs, outs, strict=True)]
        add(f"dequantize_{kernel}", calls, 5 * x.numel())
    add("quantize_with_scales", [lambda a=a, o=o: cuda.quantize_with_scales(a, out=o, scales=scales) for a, o in zip(xs, outs, strict=True)], 9 * x.numel())
    add("scales_warp", [lambda a=a: cuda.compute_scales(a, kernel="warp") for a in xs], 4 * x.numel())
    del backs
    for dtype in (torch.bfloat16, torch.float16):
        halves = [a.to(dtype) for a in xs]
        add(f"quantize_fast_{str(dtype)[6:]}", [lambda a=a, o=o: cuda.quantize(a, scales, out=o) for a, o in zip(halves, outs, strict=True)], 3 * x.numel())
    return found


def _cpu_seconds(x: torch.Tensor, cpu_rows: int) -> dict[str, dict[str, float]]:
    """Seconds of one-thread scalar code (both loop orders) and of the production CPU kernel for all rows of x, by stage."""
    if not cpu_rows or cpu.refuses(torch.empty(1, 1)):
        return {}
    part = x[:cpu_rows].cpu()
    factor = len(x) / len(part)
    found = {}
    for kernel in ("column_outer", "row_order", "fast"):
        times = [time.perf_counter()]
        scales = cpu.compute_scales(part, kernel=kernel)
        times.append(time.perf_counter())
        q = cpu.quantize(part, scales, kernel=kernel)
        times.append(time.perf_counter())
        cpu.dequantize(q, scales, kernel=kernel)
        times.append(time.perf_counter())
        a, b, c = np.diff(times) * factor
        found[f"cpu_{kernel}"] = {"quantize": b, "dequantize": c, "with_scales": a + b}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-rows", type=int, default=4096, help="rows the CPU baseline is timed on; 0: no baseline")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s", flush=True)
    table = []
    for rows, columns in CASES:
        found = bench_case(rows, columns, copy, args.cpu_rows)
        table += found
        print(f"{rows} x {columns}: " + ", ".join(f"{r['kernel']} {r['time_us']:.0f} us ({r['share_of_copy']:.2f})" for r in found), flush=True)
        torch.cuda.empty_cache()
    command = "python " + " ".join([Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    result = {"command": command, "device": torch.cuda.get_device_name(), "copy_bytes_per_s": copy, "rows": table}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result)[:200])


if __name__ == "__main__":
    main()
