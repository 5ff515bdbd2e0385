"""Files of runs and what they measured: every row belongs to a run, whose record (`kvbits.runs`) stands beside it.

    {"runs": {ID: record}, "rows": [{"run": ID, ...}, ...], NAME: [{"run": ID, ...}, ...], ...}

Runs are appended to a file, never merged: a row stays as it was measured, and a reader takes the newest run's
(`latest`), or both sides of a ratio of one run (`together`).

A benchmark takes its parser from `arguments`, and `append` writes what it measured:

    append([{"scheme": "int4", "us": 12.5}, ...], args.out, device="NVIDIA H200", copy_tb_per_s=4.2)
    {"runs": {ID: {"id", "session", "utc", "host", "gpu", "versions", "commit", "dirty", "argv", "facts": {"device",
    "copy_tb_per_s"}}}, "rows": [{"run": ID, ..}]}
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbits import runs
from kvbits.errors import FileFormatError
from kvbits.files import locked, to_json, whole
from kvbits.runs import FIELDS

SECOND_EDITION = "2026-11-27T12"
"""UTC from which on klt presets store trellis codes. Runs before it timed what presets of these names stored then."""


def outdated(name: str, run: Mapping[str, Any]) -> bool:
    """Return whether a run timed a cache of this name in a format that the preset of that name has no more."""
    return "klt" in name and (run["utc"] or "") < SECOND_EDITION


def problems(data: Any) -> list[str]:
    """List what keeps a result file's figures from belonging to a run: entries without one, records without a field.

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
    """Read one result file of rows.

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


def joined(paths: Iterable[Path]) -> dict[str, Any]:
    """Read several result files as one: their runs, and the rows of each list one after another.

    Raises:
        FileFormatError: as `read`.
    """
    whole: dict[str, Any] = {"runs": {}, "rows": []}
    for path in paths:
        for name, entries in read(path).items():
            whole[name] = whole["runs"] | entries if name == "runs" else [*whole.get(name, []), *entries]
    return whole


def newest(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest run of a file as its measurement returned it: facts, and lists of rows."""
    run = max(data["runs"].values(), key=lambda run: (run["utc"], run["id"]))
    lists = {name: [row for row in rows if row["run"] == run["id"]] for name, rows in data.items() if name != "runs"}
    return run["facts"] | {name: rows for name, rows in lists.items() if rows}


def add(own: Mapping[str, Any], out: Path) -> None:
    """Append runs and their rows to a file, which is replaced once the new one is whole. Processes that append at once
    take turns.

    Args:
        own: {"runs", "rows", ...}; of a run that the file has already, its further rows.

    Raises:
        FileFormatError: `out` is there and is no file of runs.
    """
    with locked(out.parent):
        before = read(out) if out.exists() else {"runs": {}}
        names = [name for name in dict.fromkeys([*before, *own]) if name != "runs"]
        lists = {name: [*before.get(name, []), *own.get(name, [])] for name in names}
        write({"runs": before["runs"] | own["runs"]} | lists, out)


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
    with whole(out) as partial:
        partial.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def arguments(doc: str | None, *, of_model: bool = False) -> argparse.ArgumentParser:
    """Make a parser whose help is a module's text, with --out. The record of this run begins here.

    Args:
        of_model: also with the model that is measured, and what `load_model` takes.
    """
    this_run()
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
        sections: further lists of rows, by name, for what does not belong into the main table.
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
        add(own, out)
    print(to_json(own))
    return own


def measured_before(out: Path | None, key: Sequence[str], **facts: Any) -> set[tuple[Any, ...]]:
    """Return what a stopped run need not measure again: values of the key's fields, of rows in `out` of runs with the
    commit, GPU and processor of this one and with these facts.

    Nothing where this run's source differs from its commit, as two such sources may differ, too.

    Raises:
        FileFormatError: `out` is there and is no file of runs.
    """
    if out is None or not out.exists() or (run := this_run())["commit"] is None or run["dirty"] is not False:
        return set()
    data, wanted = read(out), json.loads(to_json(facts))
    alike = {
        name
        for name, one in data["runs"].items()
        if all(one[field] == run[field] for field in ("commit", "dirty", "gpu", "host"))
        and all(one["facts"].get(fact) == value for fact, value in wanted.items())
    }
    return {tuple(row[field] for field in key) for row in data.get("rows", ()) if row["run"] in alike}


@functools.cache
def this_run() -> dict[str, Any]:
    """Return the record of this process: one run, however often it appends. The first call decides when it began."""
    return runs.record(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]) | {"facts": {}}


def latest(data: Mapping[str, Any], key: Sequence[str], section: str = "rows") -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the newest run's row for each key; of one run the last.

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
    """Return the rows of one run, such as both sides of a ratio: of the newest run that has them all.

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
