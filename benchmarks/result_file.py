"""Where the benchmarks' results go: a file keeps every run's rows beside the run's record (`kvbits.runs`); a new run appends, nothing is replaced.

    append([{"scheme": "int4", "us": 12.5}, ...], args.out, device="NVIDIA H200", copy_tb_per_s=4.2)
    {"runs": {ID: {"id", "session", "utc", "host", "gpu", "versions", "commit", "dirty", "argv", "facts": {"device", "copy_tb_per_s"}}}, "rows": [{"run": ID, ..}]}

A row is of one run for good. Whoever reads takes `kvbits.runs.latest`, or `kvbits.runs.together` for the sides of a ratio.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbits import runs
from kvbits.files import to_json


def append(
    rows: Sequence[Mapping[str, Any]], out: Path | None, *, sections: Mapping[str, Sequence[Mapping[str, Any]]] | None = None, **facts: Any
) -> dict[str, Any]:
    """Print this run and its rows as one line of JSON, the last one; add them to the file `out`.

    Args:
        rows: what was measured.
        sections: further lists of rows, by name, of what is no row of the main table.
        facts: what holds for all of them, such as a copy's bandwidth or a model's name; it goes into the run's record. A later call of the same process may
            add facts and may not change any.

    Returns:
        The run's part, {"runs", "rows", ...}, as printed.

    Raises:
        FileFormatError: `out` is there and is no file of runs.
        ValueError: a fact that this process gave another value before.
    """
    run = this_run()
    for name, value in json.loads(to_json(facts)).items():
        if run["facts"].setdefault(name, value) != value:
            raise ValueError(f"{name} was {run['facts'][name]!r} earlier in this run and is {value!r} now; put it into the rows")
    lists = {"rows": rows} | dict(sections or {})
    own = {"runs": {run["id"]: run}} | {name: [{"run": run["id"]} | dict(row) for row in entries] for name, entries in lists.items()}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        before = runs.read(out) if out.exists() else {"runs": {}}
        whole = {"runs": before["runs"] | own["runs"]} | {
            name: [*before.get(name, []), *own.get(name, [])] for name in dict.fromkeys([*before, *own]) if name != "runs"
        }
        write(whole, out)
    print(to_json(own))
    return own


def write(data: Mapping[str, Any], out: Path) -> None:
    """Replace a file of runs once the new one is whole: one line for each run and each row, so that it reads and diffs well."""
    entries = ",\n".join(f"  {json.dumps(name)}: {to_json(run)}" for name, run in data["runs"].items())
    parts = [f' "runs": {{\n{entries}\n }}']
    parts += [f" {json.dumps(name)}: [\n" + ",\n".join(f"  {to_json(row)}" for row in rows) + "\n ]" for name, rows in data.items() if name != "runs"]
    partial = out.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    os.replace(partial, out)


@functools.cache
def this_run() -> dict[str, Any]:
    """The record of this process: one run, however often it appends."""
    return runs.record(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]) | {"facts": {}}


def command() -> str:
    """What was typed."""
    return shlex.join(this_run()["argv"])


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as one line of JSON, the last one; also write it to `out`."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def merge_result(result: dict[str, Any], out: Path | None, key: tuple[str, ...]) -> None:
    """`write_result`, into a file whose other rows and fields stay: those of `result["rows"]` replace rows that are equal in `key`, "command" becomes the
    commands of all."""
    if out and out.exists():
        before = json.loads(out.read_text())
        new = {tuple(row.get(name) for name in key) for row in result["rows"]}
        kept = [row for row in before["rows"] if tuple(row.get(name) for name in key) not in new]
        commands = before["command"] if isinstance(before["command"], list) else [before["command"]]
        result = before | result | {"command": [*(c for c in commands if c != result["command"]), result["command"]], "rows": [*kept, *result["rows"]]}
    write_result(result, out)
