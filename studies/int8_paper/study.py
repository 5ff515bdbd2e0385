"""`python -m studies paper`: the INT8 paper's matrix study (arXiv, December 2025), repeated on this machine's CPU and
GPU.

A float32 matrix [tokens T, channels D], uniform in [-1, 1], goes to int8 with one scale per column and back:

    scale[d] = max_t |x[t, d]| / 127        q = clamp(round(x / scale), -127, 127)        x' = q * scale        |x - x'|
                                            <= 1 / 254

Measured for the paper's eight cases, one with D not divisible by 4 and the 16-bit inputs it leaves out: its four CUDA
kernels as printed, a persistent one and ours, scales taken on the GPU; on the CPU its scalar C code on one thread (both
loop orders) and our kernel. Nothing is timed before it is checked: kernels printed in the paper must agree with each
other exactly and with the reference within one code, ours with the reference exactly.

GPU times are medians of CUDA events over matrices that together exceed L2. CPU times are taken on `cpu_rows` rows and
scaled to the case, since the work is linear in rows. A quantized float32 element moves 5 bytes, with its scale computed
9.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from kvbits.errors import DataError, KernelError

from . import cpu, cuda, reference

CASES: dict[str, tuple[int, int]] = {
    "small": (2048, 128),
    "medium": (16384, 256),
    "large": (65536, 256),
    "very_large": (131072, 256),
    "realistic_small": (131072, 1024),
    "realistic_medium": (131072, 2048),
    "realistic_large": (131072, 4096),
    "realistic_very_large": (131072, 8192),
    "uneven": (131072, 1023),
}
"""The paper's table 3, and a D that its float4 kernel cannot take whole."""
ERROR_BOUND = 1 / 254
ROTATE_BYTES = 256 << 20
REPEATS = 15
ERROR_ROWS = 4096
QUERIES = 64
CPU_KERNELS = ("column_outer", "row_order", "fast")
"""The paper's scalar code with scales walked column by column as printed, the same in memory order, and ours."""


def random_matrix(rows: int, columns: int, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """Make float32 [rows, columns], uniform in [-1, 1); column 1 is all zeros where there is one, so that every case
    has a scale of 1.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.empty(rows, columns, device=device).uniform_(-1, 1, generator=generator)
    if columns > 1:
        x[:, 1] = 0
    return x


def l2_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute the Euclidean norm of x - y, summed in float64."""
    return math.sqrt(
        sum(
            float((a.float() - b.float()).double().square().sum())
            for a, b in zip(x.split(16384), y.split(16384), strict=True)
        )
    )


def max_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute the largest |x - y|."""
    return max(
        (float((a.float() - b.float()).abs().max()) for a, b in zip(x.split(16384), y.split(16384), strict=True)),
        default=0.0,
    )


def attention_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute the mean |q . x - q . y| over random queries in [-1, 1] and the first rows: the paper's attention score
    error.
    """
    queries = (
        torch.rand(QUERIES, x.shape[1], device=x.device, generator=torch.Generator(device=x.device).manual_seed(1)) * 2
        - 1
    )
    return float((queries @ (y[:ERROR_ROWS].float() - x[:ERROR_ROWS].float()).T).abs().mean())


def run(
    cases: Iterable[str] = tuple(CASES), *, cpu_rows: int = 4096, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure the cases.

    Args:
        cpu_rows: rows the CPU is timed on.
        progress: told what was just measured.

    Returns:
        {"device" (None without a GPU), "gpu_missing", "cpu", "threads", "cpu_rows", "copy_bytes_per_s", "errors": [a
            row per case], "rows": [a row per case
        and kernel: "case", "rows", "columns", "kernel", "stage", "dtype", "device", "time_us", "bytes", "gbytes_per_s",
            "share_of_copy", "speedup_vs_.."]}

    Raises:
        DataError: an unknown case, or no rows.
        KernelError: a kernel gave a wrong result.
    """
    chosen = list(cases)
    if unknown := [c for c in chosen if c not in CASES]:
        raise DataError(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    if cpu_rows < 1:
        raise DataError(f"cpu_rows={cpu_rows}: the CPU baselines need at least one row")
    if why := cpu.refuses(torch.empty(1, 1)):
        raise DataError(f"the CPU baselines cannot run: {why}")
    missing = (
        cuda.refuses(torch.empty(1, 1, device="cuda")) if torch.cuda.is_available() else "torch sees no NVIDIA GPU"
    )
    found: dict[str, Any] = {
        "device": None if missing else torch.cuda.get_device_name(),
        "gpu_missing": missing,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_rows": cpu_rows,
        "copy_bytes_per_s": None if missing else copy_bandwidth(),
        "errors": [],
        "rows": [],
    }
    for name in chosen:
        rows, columns = CASES[name]
        errors, timed, baselines = _cpu_case(rows, columns, min(cpu_rows, rows))
        if not missing:
            errors, on_gpu = _gpu_case(rows, columns, found["copy_bytes_per_s"])
            timed += on_gpu
        for row in timed:
            row |= {f"speedup_vs_cpu_{k}": s[row["stage"]] / (row["time_us"] * 1e-6) for k, s in baselines.items()}
        found["errors"].append({"case": name, "rows": rows, "columns": columns} | errors)
        found["rows"] += [{"case": name, "rows": rows, "columns": columns} | row for row in timed]
        progress(
            f"{name}: {rows} x {columns}, largest error {errors['max_error']:.6f}, attention error"
            f" {errors['attention_error']:.4f}"
        )
    return found


# -- CPU ------------------------------------------------------------------------------------------------------------


def _cpu_case(
    rows: int, columns: int, timed_rows: int
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Measure (errors, rows of the table, seconds by kernel and stage for the whole case)."""
    x = random_matrix(timed_rows, columns)
    scales = cpu.compute_scales(x)
    q = cpu.quantize(x, scales)
    if not torch.equal(scales, reference.compute_scales(x)) or not torch.equal(q, reference.quantize(x, scales)):
        raise KernelError(f"{timed_rows} x {columns}: the CPU kernel differs from the reference")
    factor = rows / timed_rows
    seconds: dict[str, dict[str, float]] = {}
    timed = []
    for kernel in CPU_KERNELS:
        if int((cpu.quantize(x, scales, kernel=kernel).int() - q.int()).abs().max()) > 1:
            raise KernelError(f"{timed_rows} x {columns}: {kernel} differs from the reference by more than one code")
        stages: dict[str, Callable[[], object]] = {
            "scales": functools.partial(cpu.compute_scales, x, kernel=kernel),
            "quantize": functools.partial(cpu.quantize, x, scales, kernel=kernel),
            "dequantize": functools.partial(cpu.dequantize, q, scales, kernel=kernel),
        }
        mine = {stage: _best_of(call) * factor for stage, call in stages.items()}
        mine["with_scales"] = mine["scales"] + mine["quantize"]
        seconds[kernel] = mine
        timed += [
            _row(f"cpu_{kernel}", stage, "float32", "cpu", s * 1e6, rows * columns, None) for stage, s in mine.items()
        ]
    return _errors(x, cpu.dequantize(q, scales)), timed, seconds


def _best_of(call: Callable[[], object], repeats: int = 3) -> float:
    """Measure the seconds of the fastest call: others share the machine."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


# -- GPU ------------------------------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Measure the bytes per second of a device-to-device copy, read and written bytes both counted."""
    x = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (_gpu_us([lambda: y.copy_(x)]) * 1e-6)


def _gpu_us(calls: list[Callable[[], object]]) -> float:
    """Measure the median microseconds of one call, events around a round of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(np.median(times))


def _checked(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """Return the errors of the round trip of x through y; a wrong kernel has no speed."""
    scales = cuda.compute_scales(x)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    cuda.quantize(x, scales, out=q)
    some = slice(0, ERROR_ROWS)
    want = reference.quantize(x[some].float(), scales)
    what = f"{len(x)} x {x.shape[1]} {x.dtype}"
    if not torch.equal(scales, reference.compute_scales(x)) or not torch.equal(
        cuda.compute_scales(x, kernel="warp"), scales
    ):
        raise KernelError(f"{what}: scales differ from the reference")
    if not torch.equal(q[some], want):
        raise KernelError(f"{what}: the production kernel differs from the reference")
    other = torch.empty_like(q)
    for kernel in cuda.KERNELS:
        cuda.quantize(x, scales, kernel=kernel, out=other)
        if kernel == cuda.PRINTED[0]:
            printed = other.clone()
            if int((other[some].int() - want.int()).abs().max()) > 1:
                raise KernelError(f"{what}: {kernel} differs from the reference by more than one code")
        if not torch.equal(other, printed if kernel in cuda.PRINTED else q):
            raise KernelError(f"{what}: {kernel} differs from the other kernels")
    again, new_scales = cuda.quantize_with_scales(x, out=other)
    if not torch.equal(again, q) or not torch.equal(new_scales, scales):
        raise KernelError(f"{what}: quantize_with_scales differs")
    back = reference.dequantize(q[some], scales).to(x.dtype)
    for kernel in cuda.KERNELS:
        if not torch.equal(cuda.dequantize(q, scales, kernel=kernel, out=y)[some], back):
            raise KernelError(f"{what}: dequantize {kernel} differs from the reference")
    return _errors(x, y)


def _gpu_case(rows: int, columns: int, copy: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    timed: list[dict[str, Any]] = []
    errors: dict[str, Any] = {}
    n = rows * columns
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = random_matrix(rows, columns, "cuda", seed=rows + columns).to(dtype)
        copies = min(8, max(1, ROTATE_BYTES // (n * (dtype.itemsize + 1))))
        xs = [x, *(x.clone() for _ in range(copies - 1))]
        ys = [torch.empty_like(x) for _ in xs]
        found = _checked(x, ys[0])
        errors = errors or found
        qs = [torch.empty(x.shape, dtype=torch.int8, device="cuda") for _ in xs]
        scales = cuda.compute_scales(x)
        kernels = cuda.KERNELS if dtype == torch.float32 else ("vectorized", "fast")

        def add(
            kernel: str, stage: str, call: Callable[..., object], sets: Any = (xs, ys, qs), dtype: torch.dtype = dtype
        ) -> None:
            us = _gpu_us([functools.partial(call, *some) for some in zip(*sets, strict=True)])
            timed.append(_row(kernel, stage, str(dtype)[6:], "gpu", us, n, copy))

        for k in kernels:
            add(k, "quantize", lambda x, y, q, k=k, s=scales: cuda.quantize(x, s, kernel=k, out=q))
        for k in kernels:
            add(k, "dequantize", lambda x, y, q, k=k, s=scales: cuda.dequantize(q, s, kernel=k, out=y))
        add("fast", "with_scales", lambda x, y, q, s=scales: cuda.quantize_with_scales(x, out=q, scales=s))
        for k in cuda.SCALE_KERNELS if dtype == torch.float32 else ("fast",):
            add(k, "scales", lambda x, y, q, k=k: cuda.compute_scales(x, kernel=k))
        del x, xs, ys, qs
        torch.cuda.empty_cache()
    return errors, timed


# -- rows -----------------------------------------------------------------------------------------------------------


def _errors(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    found = {
        "error_rows": len(x),
        "max_error": max_error(x, y),
        "l2_error": l2_error(x, y),
        "attention_error": attention_error(x, y),
    }
    if x.dtype == torch.float32 and found["max_error"] > ERROR_BOUND * 1.0001:
        raise KernelError(f"largest error {found['max_error']} is above 1 / 254 = {ERROR_BOUND:.5f}")
    return found


def _row(
    kernel: str, stage: str, dtype: str, device: str, us: float, elements: int, copy: float | None
) -> dict[str, Any]:
    item = 4 if dtype == "float32" else 2
    per_element = {"scales": item, "with_scales": 2 * item + 1}.get(stage, item + 1)
    rate = elements * per_element / (us * 1e-6)
    return {
        "kernel": kernel,
        "stage": stage,
        "dtype": dtype,
        "device": device,
        "time_us": us,
        "bytes": elements * per_element,
        "gbytes_per_s": rate / 1e9,
        "share_of_copy": None if copy is None else rate / copy,
    }
