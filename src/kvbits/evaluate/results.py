"""Results on disk: one JSON file per model, task and scheme, written after every item, so that a run that stops goes on where it was.

    OUT / MODEL / TASK / SCHEME.json
    {"format": "kvbits-eval", "version": 1, "task", "scheme", "kind", "info", "settings", "model", "environment", "items": {KEY: record}, "summary"}

`settings` and `model` (with its fingerprint) are what the figures depend on: a file with others is refused, never mixed. `environment` is of the
run that wrote last. How many items a file has is no setting: sixteen windows go on from eight.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import FileFormatError, SpecError
from ..files import to_json

FORMAT = "kvbits-eval"
VERSION = 1


def model_facts(model: Any, name: str) -> dict[str, Any]:
    """Name, sizes and a fingerprint of a loaded model: 16 hex digits over its configuration and a sample of every weight tensor."""
    import torch

    config = model.config.get_text_config(decoder=True)
    digest = hashlib.sha256()
    with torch.no_grad():
        for key, weight in sorted(model.state_dict().items()):
            flat = weight.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 64)][:64].double().cpu().numpy()
            digest.update(f"{key}{tuple(weight.shape)}".encode() + sample.tobytes())
    return {
        "name": name, "architecture": type(model).__name__, "fingerprint": digest.hexdigest()[:16], "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()), "layers": config.num_hidden_layers,
        "max_context": getattr(config, "max_position_embeddings", None),
    }  # fmt: skip


def environment(device: Any, seconds: float | None = None) -> dict[str, Any]:
    """Versions, machine and command line of this process."""
    import torch
    import transformers

    from .. import __version__

    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "command": command_line(), "kvbits": __version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(), "device": _device_name(device), "threads": torch.get_num_threads(),
    } | ({} if seconds is None else {"seconds": round(seconds, 3)})  # fmt: skip


def command_line() -> str:
    """The command that runs, with directories of the machine left out of paths."""
    words = [_without_directory(w) for w in sys.argv]
    words[0] = "kvbits" if words[0] in ("__main__.py", "kvbits", "-c", "-m") else words[0]
    return " ".join(words)


def _without_directory(word: str) -> str:
    """The last part of an absolute path, also of NAME=PATH."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{os.path.basename(path.rstrip('/'))}" if os.path.isabs(path) else word


def _device_name(device: Any) -> str:
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo") as f:
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
        return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


class ResultFile:
    """One scheme's results of one task on one model.

    Args:
        path: the JSON file; read if it exists.
        header: task, scheme, kind, info, settings, model.
        overwrite: begin anew where the file has other settings, instead of refusing.

    Raises:
        FileFormatError: a file that is not ours or is damaged.
        SpecError: a file of another model or other settings, naming what differs.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self.data: dict[str, Any] = {"format": FORMAT, "version": VERSION} | header | {"environment": {}, "items": {}, "summary": {}}
        if path.exists():
            old = read(path) if overwrite else require_same(path, {k: header[k] for k in ("settings", "model")})
            if old is not None and not _different(header, old):
                self.data |= {"items": old["items"], "environment": old["environment"], "summary": old["summary"]}

    @property
    def items(self) -> dict[str, Any]:
        found: dict[str, Any] = self.data["items"]
        return found

    def add(self, key: str, record: dict[str, Any]) -> None:
        self.items[key] = record

    def write(self, environment: dict[str, Any], summary: dict[str, Any]) -> None:
        """Replace the file once the new one is whole."""
        before = self.data["environment"].get("seconds", 0.0)
        self.data["environment"] = environment | {"seconds": round(before + environment.get("seconds", 0.0), 3)}
        self.data["summary"] = summary
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(dumps(self.data) + "\n")
        os.replace(partial, self.path)


def require_same(path: Path, header: dict[str, Any]) -> dict[str, Any] | None:
    """What a file holds, or None if there is none.

    Args:
        header: `settings` and `model`, or one of them, that it must be of.

    Raises:
        FileFormatError: a file that is not ours or is damaged.
        SpecError: a file of another model or other settings, naming what differs.
    """
    if not path.exists():
        return None
    old = read(path)
    if differs := _different(header, old):
        raise SpecError(f"{path} holds results of something else: {'; '.join(differs[:3])}; give another --out, or --overwrite")
    return old


def _different(header: dict[str, Any], old: dict[str, Any]) -> list[str]:
    return [d for part in ("settings", "model") if part in header for d in _differences(header[part], old[part])]


def dumps(data: dict[str, Any]) -> str:
    """JSON with a line per entry and per item: it reads and diffs well."""

    def one(value: Any) -> str:
        return to_json(value, compact=True)

    items = ",\n".join(f"  {one(k)}:{one(v)}" for k, v in data["items"].items())
    lines = [f' "items":{{\n{items}\n }}' if key == "items" else f" {one(key)}:{one(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def read(path: Path) -> dict[str, Any]:
    """One result file.

    Raises:
        FileFormatError: unreadable, not ours, or of another version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FileFormatError(f"cannot read {path}: {e}; remove it or name another folder") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FileFormatError(f"{path} is not a result of `kvbits eval` version {VERSION}; remove it or name another folder")
    return data


def read_all(directory: Path) -> list[dict[str, Any]]:
    """Every result file below a directory, by model, task and scheme.

    Raises:
        SpecError: none there.
        FileFormatError: a damaged one.
    """
    if not directory.is_dir():
        raise SpecError(f"{directory}: no such folder; give the one that `kvbits eval MODEL --out FOLDER` wrote, or benchmarks/results/eval of a checkout")
    found = [read(p) for p in sorted(directory.glob("*/*/*.json"))]
    if not found:
        raise SpecError(f"{directory} holds no results of `kvbits eval` (MODEL/TASK/SCHEME.json); give the folder itself that its --out named, or run it first")
    return found


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    keys = dict.fromkeys([*ours, *theirs])
    return [f"{k} is {ours.get(k)!r} here and {theirs.get(k)!r} in the file" for k in keys if _plain(ours.get(k)) != _plain(theirs.get(k))]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
