"""Where the benchmarks' results go: a file keeps every run's rows beside the run's record (`kvbits.runs`); a new run
appends, nothing is replaced.

    append([{"scheme": "int4", "us": 12.5}, ...], args.out, device="NVIDIA H200", copy_tb_per_s=4.2)
    {"runs": {ID: {"id", "session", "utc", "host", "gpu", "versions", "commit", "dirty", "argv", "facts": {"device",
    "copy_tb_per_s"}}}, "rows": [{"run": ID, ..}]}

A row is of one run for good. Whoever reads takes `run_files.latest`, or `run_files.together` for the sides of a ratio.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import run_files

from kvbits import runs
from kvbits.files import to_json


def arguments(doc: str | None, *, of_model: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is a module's text, with --out.

    Args:
        of_model: also with the model that is measured, and what `load_model` takes.
    """
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, help="file that this run is added to")
    if of_model:
        found.add_argument("model")
        found.add_argument("--dtype", default="float32")
        found.add_argument("--device")
        found.add_argument("--threads", type=int, default=1)
    return found


def append(
    rows: Sequence[Mapping[str, Any]],
    out: Path | None,
    *,
    sections: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Print this run and its rows as one line of JSON, the last one; add them to the file `out`.

    Args:
        rows: what was measured.
        sections: further lists of rows, by name, of what is no row of the main table.
        facts: what holds for all of them, such as a copy's bandwidth or a model's name; it goes into the run's record.
            A later call of the same process may add facts and may not change any.

    Returns:
        The run's part, {"runs", "rows", ...}, as printed.

    Raises:
        FileFormatError: `out` is there and is no file of runs.
        ValueError: a fact that this process gave another value before.
    """
    run = this_run()
    for name, value in json.loads(to_json(facts)).items():
        if run["facts"].setdefault(name, value) != value:
            raise ValueError(
                f"{name} was {run['facts'][name]!r} earlier in this run and is {value!r} now; put it into the rows"
            )
    lists = {"rows": rows} | dict(sections or {})
    own = {"runs": {run["id"]: run}} | {
        name: [{"run": run["id"]} | dict(row) for row in entries] for name, entries in lists.items()
    }
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        run_files.add(own, out)
    print(to_json(own))
    return own


@functools.cache
def this_run() -> dict[str, Any]:
    """The record of this process: one run, however often it appends."""
    return runs.record(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]) | {"facts": {}}


this_run()  # now: the code is what has just been loaded, and the time that of the start


def command() -> str:
    """What was typed."""
    return shlex.join(this_run()["argv"])
