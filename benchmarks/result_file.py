"""Where the benchmarks' results go."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any


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


def command() -> str:
    """What was typed, as files of results say it."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
