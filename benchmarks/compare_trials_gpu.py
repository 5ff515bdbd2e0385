"""Trials of klt's GPU kernels beside the kernels of this tree, on a GPU.

    python benchmarks/compare_trials_gpu.py [PATCH ..] [--schemes klt4,klt3,klt2] [--out FILE]

A trial is a patch of this tree; without names all of benchmarks/trials run. Each is applied to a copy, and
compare_attend_gpu.py checks and times the copy beside this tree in a process of its own. A trial that does not apply or
compile, is wrong or takes longer than `--limit` seconds is reported, and the next one runs. The table has registers and
spills, and shares of this tree's time: the geometric mean of the shapes, the best and the worst. The last line is one
JSON object; rows are added to --out. In rows the trial is "before", and this tree is "now".
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from run_files import append, arguments, newest, read

from kvbits.errors import DataError

HERE = Path(__file__).parent
COPIED = ("src/kvbits", "benchmarks")
"""Folders that a patch may change."""


def copy_with(patch: Path, folder: Path) -> Path:
    """Copy this tree to a folder and apply a patch to the copy, without git, which not every machine has.

    Raises:
        DataError: a hunk's lines are not in the file, or several times; or the patch adds a file.
    """
    for name in COPIED:
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(HERE.parent / name, folder / name, ignore=ignored)
    changes = patch.read_text(encoding="utf-8")
    _, *files = re.split(r"^--- a/", changes, flags=re.MULTILINE)
    if len(files) != len(re.findall(r"^--- ", changes, flags=re.MULTILINE)):
        raise DataError(f"{patch.name} must be a unified diff of files that are in this tree")
    for of_file in files:
        head, *hunks = re.split(r"^@@ .*\n", of_file.partition("\ndiff --git ")[0] + "\n", flags=re.MULTILINE)
        path = folder / head.split()[0]
        text = path.read_text(encoding="utf-8")
        for hunk in hunks:
            lines = hunk.rstrip("\n").split("\n")
            before, after = ("".join(f"{x[1:]}\n" for x in lines if x[:1] != sign) for sign in "+-")
            if text.count(before) != 1:
                raise DataError(f"{patch.name} does not apply: {path.name} has {text.count(before)} times\n{before}")
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    return folder


def sections_of(patch: Path, options: Sequence[str], limit: float) -> dict[str, list[dict[str, Any]]]:
    """Compare a trial with this tree; return rows of kernels and of times, the trial's as "before" and this tree's as
    "now".

    Raises:
        DataError: the trial does not apply.
        subprocess.CalledProcessError: the trial does not compile, or is wrong.
        subprocess.TimeoutExpired: the trial takes longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "rows.json"
        tree = copy_with(patch, Path(name) / "tree")
        command = [
            sys.executable,
            str(HERE / "compare_attend_gpu.py"),
            str(tree),
            "--quick",
            "--out",
            str(out),
            *options,
        ]
        subprocess.run(command, check=True, timeout=limit, stderr=subprocess.PIPE, stdout=sys.stderr, text=True)
        found = newest(read(out))
    return {
        name: [{"trial": patch.stem} | {k: x for k, x in row.items() if k != "run"} for row in found.get(name, [])]
        for name in ("rows", "kernels")
    }


def paired(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield a trial's row and this tree's of the same kernel or shape."""
    of_trial, of_tree = ([row for row in rows if row["variant"] == label] for label in ("before", "now"))
    yield from zip(of_trial, of_tree, strict=True)


def reason_of(failure: Exception) -> str:
    """Return why a trial failed: the error, and the end of what its command printed."""
    printed = getattr(failure, "stderr", None) or ""
    text = printed if isinstance(printed, str) else printed.decode(errors="replace")  # bytes after a timeout
    return f"{failure} {text.strip()[-1000:]}"


def lines_of(sections: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the table's lines of a trial: each kernel's registers and spills, then each scheme's shares."""
    for x, y in paired(sections["kernels"]):
        yield (
            f"  {x['scheme']}, {x['columns']} columns: {x['registers']} registers, {x['spill_bytes']} bytes spilled;"
            f" this tree {y['registers']}, {y['spill_bytes']}"
        )
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for pair in paired(sections["rows"]):
        pairs.setdefault(pair[0]["scheme"], []).append(pair)
    for scheme, found in pairs.items():
        shares = [x["time_us"] / y["time_us"] for x, y in found]
        errors = [max(pair[i]["error"] for pair in found) for i in (0, 1)]
        yield (
            f"  {scheme}: {math.prod(shares) ** (1 / len(shares)):.3f}, {min(shares):.3f} to {max(shares):.3f}; error"
            f" {errors[0]:.1e}, this tree {errors[1]:.1e}"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("patches", nargs="*", type=Path, default=sorted((HERE / "trials").glob("*.patch")))
    parser.add_argument("--schemes", default="klt4,klt3,klt2")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a trial")
    parser.add_argument("--compile-only", action="store_true", help="registers and spills on sm_90; needs no GPU")
    args = parser.parse_args()
    options = ["--schemes", args.schemes, *(["--compile-only"] if args.compile_only else [])]
    sections: dict[str, list[dict[str, Any]]] = {"rows": [], "kernels": [], "failures": []}
    for patch in args.patches:
        print(patch.stem, flush=True)
        try:
            found = sections_of(patch, options, args.limit)
        except (DataError, subprocess.SubprocessError) as failure:
            sections["failures"].append({"trial": patch.stem, "reason": reason_of(failure)})
            print(f"  failed: {sections['failures'][-1]['reason']}", flush=True)
            continue
        print("\n".join(lines_of(found)), flush=True)
        for name, rows in found.items():
            sections[name] += rows
    append(sections.pop("rows"), args.out, sections=sections)


if __name__ == "__main__":
    main()
