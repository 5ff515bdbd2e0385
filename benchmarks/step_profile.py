"""Time of a serving step by kernel: the kernels of a few steps under torch.profiler, in groups by name, with what runs
at the same time counted once.

`Profiled` stands in for an engine's step, `of_trace` makes of its trace what a row of results has, in microseconds a
step:

    sum     of the kernels' own times: one that starts before the one ahead has ended (programmatic launch) counts in
            full
    alone   of what a kernel adds to the end of all before it. These and the gaps are the step's time

Kernels inside CUDA graphs appear one by one. A profiler slows steps down, and most gaps are its own: how long a step
takes is measured before there is one.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvbits.report.markdown import table

BEFORE, STEPS, OMITTED = 10, 8, 2
"""Steps with a token of every sequence: ahead of the profiler, under it, and the first of those, which its start
changes.
"""
SHORT_US = 20
"""Gaps below are between kernels, longer ones between steps."""
LEAST_US = 5
"""Kernels below this a step count in their group and have no line of their own: lines of half a microsecond and more
made a file of results 1.7 times as long.
"""
GROUPS = {
    "store, close": r"reshape_and_cache|^store_tokens|^store_raw|^store_banded|^close_pages",
    "plan, place": r"^work_list|^place$|^advance$|prepare_varlen|prepare_scheduler|scheduler_metadata",
    "attention": r"^attend$|^merge_partials|flash",
    "matrix products": r"gemm|nvjet|splitk|cublas|xmma|cutlass",
    "norm, rope, activation": r"rms_norm|layer_?norm|rotary|rope_kernel|act_and_mul|silu",
    "sampling": r"argmax|topk|top_k|softmax|gumbel|sampl|logit|bias_kernel|penalt|bincount",
    "copies": r"^memcpy|^memset",
    "the engine's set-up": r"^_\w+$|^triton",
    "rest": r"",
}
"""Group -> pattern of a kernel's name in small letters; the first that is found counts."""
Kernel = tuple[float, float, str]
"""(start, end, name), microseconds."""


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name.lower()))


class Profiled:
    """An engine's `step` that runs `STEPS` times under torch.profiler.

    Args:
        batch: sequences that must all be among a step's outputs for it to count.
        activities: of the profiler; kernels of a GPU if not given.
    """

    def __init__(
        self,
        step: Callable[[], Sequence[Any]],
        batch: int,
        activities: Sequence[Any] = (torch.profiler.ProfilerActivity.CUDA,),
    ) -> None:
        self.step, self.batch, self.seen, self.began = step, batch, 0, False
        self.profiler = torch.profiler.profile(activities=activities)
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def __call__(self) -> Sequence[Any]:
        if self.seen == BEFORE and not self.began:
            self.began = True
            self.wait()
            self.profiler.start()
        outputs = self.step()
        whole = len(outputs) == self.batch
        self.seen += whole
        if self.seen == BEFORE + STEPS and whole:
            self.wait()
            self.profiler.stop()
        return outputs

    def trace(self) -> dict[str, Any]:
        """Return the Chrome trace of the profiled steps."""
        if self.seen < BEFORE + STEPS:
            if self.began:
                self.profiler.stop()
            raise SystemExit(
                f"only {self.seen} steps had all {self.batch} sequences; a profile takes {BEFORE + STEPS} (--steps)"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            return dict(json.loads(path.read_text()))


def of_trace(trace: Mapping[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Return the `account` of a Chrome trace of so many steps.

    Raises:
        ValueError: no kernel is there once a step, so that none says where steps begin.
    """
    events = [
        e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return account(
        *whole_steps(sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]) for e in events), steps)
    )


def whole_steps(kernels: Sequence[Kernel], steps: int) -> tuple[list[Kernel], float, int]:
    """Return (kernels by start, end, number of steps): from the first to the last time of the longest kernel that each
    step has once, without the first steps.
    """
    counts = Counter(name for *_, name in kernels)
    once = [name for name, n in counts.items() if n == steps] or [
        name for name, n in counts.items() if abs(n - steps) == 1
    ]
    if not once:
        raise ValueError(
            f"no kernel is there {steps} times, once a step; seen: {dict(counts.most_common(10)) or 'none'}"
        )
    anchor = max(once, key=lambda name: sum(end - start for start, end, n in kernels if n == name))
    begins = [start for start, _, name in kernels if name == anchor][OMITTED:]
    return [k for k in kernels if begins[0] <= k[0] < begins[-1]], begins[-1], len(begins) - 1


def account(kernels: Sequence[Kernel], end: float, steps: int) -> dict[str, Any]:
    """Compute microseconds a step: `groups` (group -> alone), `sums` (group -> sum), `gaps` (short and long ones),
    `step_us`, which `groups` and `gaps` add up to, and `kernels`, [{name, group, calls, sum, alone}], the longest
    first.
    """
    names: dict[str, dict[str, Any]] = {}
    gaps, frontier = {"short": 0.0, "long": 0.0}, kernels[0][0]
    for start, stop, name in [*kernels, (end, end, "")]:
        gap = max(0.0, start - frontier)
        gaps["short" if gap < SHORT_US else "long"] += gap
        entry = names.setdefault(
            name, {"name": _short(name), "group": group_of(name), "calls": 0.0, "sum": 0.0, "alone": 0.0}
        )
        entry["calls"] += 1 / steps
        entry["sum"] += (stop - start) / steps
        entry["alone"] += max(0.0, min(stop, end) - max(start, frontier)) / steps
        frontier = max(frontier, stop)
    del names[""]

    def by_group(what: str) -> dict[str, float]:
        return {
            g: round(sum(e[what] for e in names.values() if e["group"] == g), 1)
            for g in GROUPS
            if any(e["group"] == g for e in names.values())
        }

    listed = sorted((e for e in names.values() if e["sum"] > LEAST_US), key=lambda e: -e["alone"])
    return {
        "groups": by_group("alone"),
        "sums": by_group("sum"),
        "gaps": {name: round(us / steps, 1) for name, us in gaps.items()},
        "step_us": round((end - kernels[0][0]) / steps, 1),
        "profiled_steps": steps,
        "kernels": [{name: round(x, 2) if isinstance(x, float) else x for name, x in e.items()} for e in listed],
    }


def _short(name: str) -> str:
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|cutlass::", "", name)
    return name if len(name) <= 90 else f"{name[:60]} .. {name[-26:]}"


def table_of(rows: Sequence[Mapping[str, Any]], *more: Sequence[str]) -> str:
    """Write a Markdown table of microseconds of each group alone, a column for each row of one shape.

    Args:
        more: further lines, the label first.
    """
    lines = [
        [g, *(f"{r['groups'].get(g, 0):,.1f}" for r in rows)] for g in GROUPS if any(g in r["groups"] for r in rows)
    ]
    for name, words in (("short", f"gaps below {SHORT_US}"), ("long", "longer gaps")):
        lines.append([words, *(f"{r['gaps'][name]:,.1f}" for r in rows)])
    lines.append(["step", *(f"{r['step_us']:,.1f}" for r in rows)])
    return table(["us a step, under a profiler", *(f"`{r['kv_cache_dtype']}`" for r in rows)], [*lines, *more])


def kernel_table(row: Mapping[str, Any]) -> str:
    """Write a Markdown table of every kernel of a row."""
    lines = [
        [
            f"`{e['name'].replace('|', '/')}`",
            e["group"],
            f"{e['calls']:.1f}",
            f"{e['sum'] / max(e['calls'], 0.01):.2f}",
            f"{e['sum']:.1f}",
            f"{e['alone']:.1f}",
        ]
        for e in row["kernels"]
    ]
    return table(["kernel", "group", "calls a step", "us a call", "sum, us", "alone, us"], lines, left=2)
