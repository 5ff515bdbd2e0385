"""Trials of klt's GPU kernels beside the kernels of this tree, on a GPU.

    python benchmarks/compare_trials_gpu.py [PATCH ..] [--schemes klt4,klt3,klt2] [--out FILE]

A trial is a patch of this tree; without names all of benchmarks/trials run. Each is applied to a copy, and
compare_attend_gpu.py checks and times the copy beside this tree in a process of its own. A trial that does not apply or
compile, is wrong or takes longer than `--limit` seconds is reported, and the next one runs. The table has shares of this
tree's time: the geometric mean of the shapes, the best and the worst. The last line is one JSON object; rows are added
to --out.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run_files import append, arguments, read

HERE = Path(__file__).parent
COPIED = ("src/kvbits", "benchmarks")
"""What a patch may change."""


def copy_with(patch: Path, folder: Path) -> Path:
    """Copy this tree to a folder and apply a patch to the copy.

    Raises:
        subprocess.CalledProcessError: the patch does not apply.
    """
    for name in COPIED:
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(HERE.parent / name, folder / name, ignore=ignored)
    subprocess.run(["git", "apply", str(patch.resolve())], cwd=folder, check=True, capture_output=True, text=True)
    return folder


def rows_of(patch: Path, schemes: str, limit: float) -> list[dict[str, Any]]:
    """Time a trial, and return its share of this tree's time at each shape.

    Raises:
        subprocess.CalledProcessError: the trial does not apply or compile, or is wrong.
        subprocess.TimeoutExpired: the trial takes longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "rows.json"
        tree = copy_with(patch, Path(name) / "tree")
        command = [sys.executable, str(HERE / "compare_attend_gpu.py"), str(tree), "--schemes", schemes, "--quick"]
        subprocess.run(
            [*command, "--out", str(out)],
            check=True,
            timeout=limit,
            stderr=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
        )
        found = read(out)["rows"]
    of_trial, of_tree = ([row for row in found if row["variant"] == label] for label in ("before", "now"))
    return [
        {"trial": patch.stem, "scheme": x["scheme"], "shape": x["shape"], "share": x["time_us"] / y["time_us"]}
        | {"time_us": x["time_us"], "error": x["error"], "tree_time_us": y["time_us"], "tree_error": y["error"]}
        for x, y in zip(of_trial, of_tree, strict=True)
    ]


def reason_of(failure: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    """Return how a command failed and the end of what it printed."""
    printed = failure.stderr or ""  # bytes after a timeout
    text = printed if isinstance(printed, str) else printed.decode(errors="replace")
    return f"{failure} {text.strip()[-1000:]}"


def line(trial: str, shares: dict[str, list[float]]) -> str:
    """Return a line of the table: mean, best and worst share of each scheme."""
    cells = [
        f"{scheme} {math.prod(found) ** (1 / len(found)):.3f}, {min(found):.3f} to {max(found):.3f}"
        for scheme, found in shares.items()
    ]
    return "  ".join([f"{trial:24s}", *cells])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("patches", nargs="*", type=Path, default=sorted((HERE / "trials").glob("*.patch")))
    parser.add_argument("--schemes", default="klt4,klt3,klt2")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a trial")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = []
    for patch in args.patches:
        try:
            found = rows_of(patch, args.schemes, args.limit)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
            rows.append({"trial": patch.stem, "failure": reason_of(failure)})
            table.append(f"{patch.stem:24s}  failed: {rows[-1]['failure']}")
        else:
            rows += found
            schemes = dict.fromkeys(row["scheme"] for row in found)
            table.append(line(patch.stem, {s: [row["share"] for row in found if row["scheme"] == s] for s in schemes}))
        print(table[-1], flush=True)
    print("\n".join(table))
    append(rows, args.out)


if __name__ == "__main__":
    main()
