"""Results on disk: one JSON file per model, task and scheme, written after every item, so that a stopped run continues
where it was.

    OUT / MODEL / TASK / SCHEME.json
    {"format": "kvbits-eval", "version": 2, "task", "scheme", "kind", "info", "settings", "model",
     "runs": {ID: record}, "items": {KEY: {"run": ID, ...}}, "summary", "sum"}

`settings` and `model` (with its fingerprint) are what the figures depend on: a file with others is refused, never
mixed. A run that continues a stopped one adds its record (`kvbits.runs`, and `device`, `threads`, and `seconds`
spent on this file) and its items; each item names its run. The number of items is not a setting: a run of sixteen
windows continues one of eight. Runs at the same time add to one file: each takes over what others wrote before it
writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import runs
from ..errors import FileFormatError, SpecError
from ..files import locked, to_json, whole

FORMAT = "kvbits-eval"
VERSION = 2
PARTS = {
    "task": str,
    "scheme": str,
    "kind": str,
    "info": dict,
    "settings": dict,
    "model": dict,
    "runs": dict,
    "items": dict,
    "summary": dict,
}
"""Top-level keys of a result file other than the items."""
OF_SCHEME = ("scheme", "calibration", "formats")
"""Settings of one scheme alone."""
FACTS = {"name", "dtype", "parameters"}
"""Facts about the model that every result file must contain."""


def model_facts(model: Any, name: str) -> dict[str, Any]:
    """Return name, sizes, a fingerprint of a loaded model (16 hex digits of its `kvbits.identity`), and what its
    weights were made of, where `load_model` found that out.
    """
    from ..integrations.identity import identity

    config = model.config.get_text_config(decoder=True)
    return {
        "name": name,
        "architecture": type(model).__name__,
        "fingerprint": identity(model)[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers,
        "max_context": getattr(config, "max_position_embeddings", None),
        "weights": getattr(model, "kvbits_weights", None),
    }


def new_run(device: Any) -> dict[str, Any]:
    """Return the record of a run of this process on a torch device."""
    import torch

    record = runs.record()
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{record['host']['cpu']} ({record['host']['cores']} cores)"
    )
    return record | {"device": name, "threads": torch.get_num_threads()}


class ResultFile:
    """One scheme's results of one task on one model, or what `kvbits fit` measured.

    Args:
        path: the JSON file; read if it exists. None keeps results in memory.
        header: task, scheme, kind, info, settings, model.
        run: the record of the run that adds items, see `new_run`.
        overwrite: begin anew where the file has other settings or was trimmed for keeping, instead of refusing.

    Raises:
        FileFormatError: a file that is not ours or is damaged.
        SpecError: see `require_same`.
    """

    def __init__(
        self, path: Path | None, header: dict[str, Any], run: dict[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path, self.run = path, run | {"seconds": 0.0}
        self.data: dict[str, Any] = (
            {"format": FORMAT, "version": VERSION} | header | {"runs": {}, "items": {}, "summary": {}}
        )
        self._version = _version(path)
        self._added = set[str]()  # keys of items that were measured here, which stand
        self._dropped: dict[str, Any] = {}  # items that are to be measured anew, by key
        if path is not None and path.exists():
            old = read(path) if overwrite else require_same(path, {k: header[k] for k in ("settings", "model")})
            if old is not None and not old.get("trimmed") and not different(header, old):
                self.data |= {"runs": old["runs"], "items": old["items"], "summary": old["summary"]}

    @property
    def items(self) -> dict[str, Any]:
        found: dict[str, Any] = self.data["items"]
        return found

    def add(self, key: str, record: dict[str, Any]) -> None:
        self.items[key] = {"run": self.run["id"]} | record
        self._added.add(key)

    def drop(self, key: str) -> None:
        """Remove an item that is to be measured anew, by this process or by another one."""
        self._dropped[key] = self.items.pop(key)
        self._added.discard(key)

    def write(self, seconds: float, summarize: Callable[[], dict[str, Any]]) -> None:
        """Replace the file once the new one is whole. Items that another process wrote meanwhile are taken over.

        Args:
            seconds: spent on what was added since the last call.
            summarize: returns the summary of `items`.

        Raises:
            SpecError: another process wrote a file of other settings, or of another model, in its place.
        """
        self.run["seconds"] = round(self.run["seconds"] + seconds, 3)
        with contextlib.nullcontext() if self.path is None else locked(self.path.parent):
            self.take_over()
            used = {item["run"] for item in self.items.values()}
            self.data["runs"] = {
                name: r for name, r in (self.data["runs"] | {self.run["id"]: self.run}).items() if name in used
            }
            self.data["summary"] = summarize()
            if self.path is not None:
                with whole(self.path) as partial:
                    partial.write_text(dumps(self.data) + "\n")
                self._version = _version(self.path)

    def take_over(self) -> None:
        """Take over the items that another process wrote since the file was read or written here. Items that were
        added here stay.

        Raises:
            SpecError: it wrote a file of other settings, or of another model, in its place.
        """
        version = _version(self.path)
        if self.path is None or version == self._version:
            return
        there = require_same(self.path, {part: self.data[part] for part in ("settings", "model")})
        if there is None:
            return
        self.data["runs"] |= there["runs"]
        for key, item in there["items"].items():
            if key not in self._added and item != self._dropped.get(key):
                self.items[key] = item
        self._version = version


def _version(path: Path | None) -> tuple[int, int, int] | None:
    """Return what tells a file from the one that takes its place; None where there is none."""
    try:
        about = None if path is None else path.stat()
    except FileNotFoundError:
        return None
    return about and (about.st_ino, about.st_mtime_ns, about.st_size)


def require_same(path: Path, header: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a file holds, or None if there is no file.

    Args:
        header: `settings` and `model`, or one of them, that it must be of.

    Raises:
        FileFormatError: a file that is not ours or is damaged.
        SpecError: a file of another model or other settings, naming what differs, or one that was trimmed for keeping.
    """
    if not path.exists():
        return None
    old = read(path)
    if left_out := old.get("trimmed"):
        raise SpecError(
            f"{path} was trimmed for keeping ({', '.join(left_out)} left out of its items): a run cannot continue; give"
            " another --out, or --overwrite"
        )
    if differs := different(header, old):
        raise SpecError(
            f"{path} holds results of something else: {'; '.join(differs[:3])}; give another --out, or --overwrite"
        )
    return old


def different(header: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """List where `settings` and `model`, or one of them, differ from a file."""
    return [
        d
        for part in ("settings", "model")
        if part in header
        for d in _differences(header[part], old[part])
        if not d.startswith("weights is ")
    ]


def dumps(data: dict[str, Any]) -> str:
    """Return JSON with a line per entry and per item: it reads and diffs well. Its last line is a sum over
    the others.
    """
    data = {k: v for k, v in data.items() if k != "sum"}
    data |= {"sum": _sum(data)}

    def one(value: Any) -> str:
        return to_json(value, compact=True)

    def each(entries: dict[str, Any]) -> str:
        return "{\n" + ",\n".join(f"  {one(k)}:{one(v)}" for k, v in entries.items()) + "\n }"

    lines = [f" {one(key)}:{each(value) if key in ('runs', 'items') else one(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def read(path: Path) -> dict[str, Any]:
    """Return one result file.

    Raises:
        FileFormatError: unreadable, not ours, of another version, or with items that belong to no run.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FileFormatError(f"cannot read {path}: {e}; remove it or name another folder") from e
    said = data.pop("sum", None) if isinstance(data, dict) else None  # older files have none
    if said is not None and said != _sum(data):
        raise FileFormatError(
            f"{path} is damaged or was edited: its values do not match its sum; copy it again, remove it, or"
            ' keep an edit by removing the entry "sum"'
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FileFormatError(
            f"{path} is not a result of `kvbits eval` version {VERSION}; remove it or name another folder"
        )
    if wrong := [part for part, kind in PARTS.items() if not isinstance(data.get(part), kind)]:
        raise FileFormatError(f"{path} has no {wrong[0]} that could be read; remove it or name another folder")
    if not all(isinstance(item, dict) for item in data["items"].values()) or not data["model"].keys() >= FACTS:
        raise FileFormatError(
            f"{path} has damaged items or a model without {', '.join(sorted(FACTS))}; remove it or name another folder"
        )
    if wrong := [key for key, item in data["items"].items() if item.get("run") not in data["runs"]]:
        raise FileFormatError(f"{path} has items of no run, such as {wrong[0]}; remove it or name another folder")
    return data


def _sum(data: dict[str, Any]) -> str:
    """Return 32 hex digits of the SHA-256 of a file's entries, in whatever order."""
    same = json.loads(to_json(data))  # as a reader finds it
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:32]


def read_all(directory: Path) -> list[dict[str, Any]]:
    """Return every result file below a directory, by model, task and scheme.

    Raises:
        SpecError: none there.
        FileFormatError: a damaged one.
    """
    if not directory.is_dir():
        raise SpecError(
            f"{directory}: no such folder; give the one that `kvbits eval MODEL --out FOLDER` wrote, or"
            " benchmarks/results/eval of a checkout"
        )
    found = [read(p) for p in sorted(directory.glob("*/*/*.json"))]
    if not found:
        raise SpecError(
            f"{directory} holds no results of `kvbits eval` (MODEL/TASK/SCHEME.json); give the folder itself that its"
            " --out named, or run it first"
        )
    return found


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    keys = dict.fromkeys([*ours, *theirs])
    return [
        f"{k} is {ours.get(k)!r} here and {theirs.get(k)!r} in the file"
        for k in keys
        if _plain(ours.get(k)) != _plain(theirs.get(k))
    ]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
