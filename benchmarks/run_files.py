"""Files of runs and what they measured: every row belongs to a run, whose record (`kvbits.runs`) stands beside it.

    {"runs": {ID: record}, "rows": [{"run": ID, ...}, ...], NAME: [{"run": ID, ...}, ...], ...}

Runs are appended to a file, never merged: a row stays as it was measured, and a reader takes the newest run's
(`latest`), or both sides of a ratio of one run (`together`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbits.errors import FileFormatError
from kvbits.files import to_json
from kvbits.runs import FIELDS


def problems(data: Any) -> list[str]:
    """What keeps a result file's figures from belonging to a run: entries without one, records without a field.

    Empty for a sound file.
    """
    if not isinstance(data, dict) or not isinstance(data.get("runs"), dict) or not data["runs"]:
        return ["no runs"]
    found = [f"run {name} has no {field}" for name, run in data["runs"].items() for field in FIELDS if field not in run]
    found += [f"run {name} calls itself {run.get('id')}" for name, run in data["runs"].items() if run.get("id") != name]
    for section, entries in data.items():
        listed = (
            entries.items() if isinstance(entries, dict) else enumerate(entries) if isinstance(entries, list) else ()
        )
        if section != "runs":
            found += [
                f"{section}[{key}] has no run of this file"
                for key, e in listed
                if not isinstance(e, dict) or e.get("run") not in data["runs"]
            ]
    return found


def read(path: Path) -> dict[str, Any]:
    """One result file of rows.

    Raises:
        FileFormatError: unreadable, or figures in it belong to no run (the first three said).
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"cannot read {path}: {error}; remove it or name another file") from error
    if wrong := problems(data):
        raise FileFormatError(
            f"{path} holds figures without their run: {'; '.join(wrong[:3])}; write it again with the command that"
            " measures them"
        )
    return data


def newest(data: Mapping[str, Any]) -> dict[str, Any]:
    """The newest run of a file as its measurement returned it: facts, and lists of rows."""
    run = max(data["runs"].values(), key=lambda run: (run["utc"], run["id"]))
    lists = {name: [row for row in rows if row["run"] == run["id"]] for name, rows in data.items() if name != "runs"}
    return run["facts"] | {name: rows for name, rows in lists.items() if rows}


def add(own: Mapping[str, Any], out: Path) -> None:
    """Append runs and their rows to a file, which is replaced once the new one is whole.

    Args:
        own: {"runs", "rows", ...}; of a run that the file has already, its further rows.

    Raises:
        FileFormatError: `out` is there and is no file of runs.
    """
    before = read(out) if out.exists() else {"runs": {}}
    names = [name for name in dict.fromkeys([*before, *own]) if name != "runs"]
    write(
        {"runs": before["runs"] | own["runs"]} | {name: [*before.get(name, []), *own.get(name, [])] for name in names},
        out,
    )


def write(data: Mapping[str, Any], out: Path) -> None:
    """Replace a file of runs once the new one is whole: one line for each run and each row, so that it reads and diffs
    well.
    """
    entries = ",\n".join(f"  {json.dumps(name)}: {to_json(run)}" for name, run in data["runs"].items())
    parts = [f' "runs": {{\n{entries}\n }}']
    parts += [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {to_json(row)}" for row in rows) + "\n ]"
        for name, rows in data.items()
        if name != "runs"
    ]
    partial = out.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    os.replace(partial, out)


def latest(data: Mapping[str, Any], key: Sequence[str], section: str = "rows") -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest run's row for each key; of one run the last.

    Args:
        data: a result file's data.
        key: names of the fields that say what a row measures; a row without one has None there.
        section: which list of rows.

    Returns:
        values of the key's fields (lists and objects as JSON) -> row, in the order in which keys first appear.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in data[section]:
        values = (row.get(field) for field in key)
        name = tuple(json.dumps(v, sort_keys=True) if isinstance(v, dict | list) else v for v in values)
        if name not in found or _age(data, row) >= _age(data, found[name]):
            found[name] = row
    return found


def together(
    data: Mapping[str, Any], *wanted: Mapping[str, Any], by: str = "id", section: str = "rows"
) -> list[dict[str, Any]] | None:
    """Rows of one run, such as both sides of a ratio: of the newest run that has them all.

    Args:
        data: a result file's data.
        wanted: for each row, the fields that it must have, with their values.
        by: "id" for one process, "session" for processes of one sitting (see `record`).
        section: which list of rows.

    Returns:
        a row for each of `wanted`, the last of its run; None where no run has them all.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(data[section], key=lambda row: _age(data, row)):
        groups.setdefault(data["runs"][row["run"]][by], []).append(row)
    for rows in sorted(groups.values(), key=lambda rows: _age(data, rows[-1]), reverse=True):
        found = [next((r for r in reversed(rows) if all(r.get(k) == v for k, v in w.items())), None) for w in wanted]
        if all(r is not None for r in found):
            return [r for r in found if r is not None]
    return None


def _age(data: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, str]:
    run = data["runs"][row["run"]]
    return run["utc"], run["id"]
