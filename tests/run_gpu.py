"""Runs the GPU tests and keeps a record of the pass: when, on what, at which commit, how many passed, failed and were
skipped, and why.

    python tests/run_gpu.py [--out benchmarks/results/gpu_tests.json] [FILE ..] [-- PYTEST OPTION ..]

`make test-gpu` runs the same.

Without FILE all of `FILES`, about 1,000 tests. The tree needs no installation and no network: torch, transformers,
pytest, hypothesis, NVRTC and, for tests/integrations/test_gpu_trained.py, the embedded model or KVBITS_TEST_MODEL.
KVBITS_COMMIT names the commit where there is no .git. With pytest-xdist `-- -n 2` compiles kernels in two processes.

Exit code: that of pytest; 2 without a GPU, and then nothing is recorded.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / "src"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)  # of children

import run_files  # noqa: E402

from kvbits import runs  # noqa: E402

FILES = (
    "tests/integrations/test_gpu.py",
    "tests/integrations/test_gpu_decode.py",
    "tests/integrations/test_gpu_graphs.py",
    "tests/integrations/test_gpu_trained.py",
    "tests/integrations/test_compile.py",
    "tests/ops/test_chunk_attention.py",
    "tests/ops/test_cuda_attend.py",
    "tests/ops/test_long_queries.py",
    "tests/ops/test_cuda_close.py",
    "tests/ops/test_cuda_store.py",
    "tests/ops/test_cuda_store_banded.py",
    "tests/ops/test_cuda_kvquant.py",
    "tests/ops/test_cuda_merge.py",
    "tests/integrations/test_place.py",
    "tests/integrations/test_engine_copies.py",
    "tests/store/test_gpu.py",
    "tests/studies/test_int8_paper_cuda.py",
)
"""Every file with tests that need a GPU or take it where there is one."""
LISTED = 50
"""Failures that a record names."""


class Tally:
    """pytest plugin: counts as its summary does, each test once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.counts["failed"] += report.nodeid not in self.failures
            self.failures += [report.nodeid] * (report.nodeid not in self.failures)
        elif report.skipped:
            self.counts["skipped"] += 1
            reason = (
                report.longrepr[2]
                if isinstance(report.longrepr, tuple)
                else str(getattr(report, "wasxfail", report.longrepr))
            )
            self.reasons[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self.failures.append(report.nodeid)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.counts["skipped"] += 1
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def run(files: list[str], out: Path, options: list[str], argv: list[str]) -> int:
    """One pass over `files`; its row goes to the file of runs `out`. Returns pytest's exit code."""
    record, tally, began = runs.record(["python", "tests/run_gpu.py", *argv]), Tally(), time.monotonic()
    code = int(
        pytest.main(
            [
                *(files or [str(ROOT / f) for f in FILES]),
                "-q",
                "-k",
                "not emulated",
                "--durations=10",
                "-p",
                "no:benchmark",
                *options,
            ],
            plugins=[tally],
        )
    )
    if not tally.counts:  # pytest itself failed: no pass
        print(f"no test ran (pytest's exit code {code}); nothing is recorded", file=sys.stderr)
        return code or 1
    row: dict[str, Any] = {
        "run": record["id"],
        "all_files": not files,
        "exit_code": code,
        "seconds": round(time.monotonic() - began),
    }
    row |= {kind: tally.counts[kind] for kind in ("passed", "failed", "skipped")} | {
        "failures": tally.failures[:LISTED],
        "skips": dict(tally.reasons),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    run_files.add({"runs": {record["id"]: record}, "rows": [row]}, out)
    where = f"{record['gpu']['name']}, driver {record['gpu']['driver']}" if record["gpu"] else "no GPU"
    print(
        f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped in {row['seconds']} s on {where} at"
        f" {record['commit']}: {out}"
    )
    return code


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_tests.json")
    args = parser.parse_args(argv[:cut])
    import torch

    if not torch.cuda.is_available():
        print(
            "torch sees no GPU: every test would be skipped and nothing shown; run this where there is one, or `make"
            " test` here",
            file=sys.stderr,
        )
        return 2
    return run(args.files, args.out, argv[cut + 1 :], argv)


def gpu_files() -> set[str]:
    """Files of tests whose text asks for a GPU and does not leave where there is one."""
    asks = re.compile(r"needs_gpu|DEVICES|cuda\.is_available\(\)|param\(\"cuda\"")
    leaves = re.compile(r"^if torch\.cuda\.is_available\(\):", re.M)
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "tests").rglob("test_*.py")}
    return {name for name, text in texts.items() if asks.search(text) and not leaves.search(text)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
