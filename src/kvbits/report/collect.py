"""Result files to rows: what every table and chart is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..evaluate.results import OF_SCHEME, different, read_all
from ..schemes import PRESETS, get
from ..spec import to_dict

_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of models, in the order in which a report takes them."""
PROSE = {"description", "source"}
"""Fields of a scheme that say nothing about what it stores."""
STOCK_GROUP = 64
"""Numbers that share a scale in Transformers' quantized caches, their default."""


@dataclass(frozen=True)
class Cell:
    """One cache's results of one task on one model."""

    scheme: str
    kind: str
    info: dict[str, Any]
    settings: dict[str, Any]
    summary: dict[str, Any]
    items: dict[str, Any]
    runs: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Cell:
        """Take a result file's data (`evaluate.results.read`)."""
        return cls(*(data[name] for name in ("scheme", "kind", "info", "settings", "summary", "items", "runs")))

    @property
    def outdated(self) -> bool:
        """A preset that is gone, or that stored otherwise then than the preset of that name does today."""
        if (
            self.kind != "kvbits" or "scheme" in self.settings
        ):  # another's cache, or a scheme that says itself what it is
            return False
        if self.scheme not in PRESETS:
            return True
        # presets are fitted to the heads' width
        widths = self.info.get("head_dims", [])
        today = [PRESETS[self.scheme], *(get(self.scheme, head_dim=n) for n in {*widths, math.gcd(*widths)} if n)]
        return all(_differ(self.info.get("scheme"), to_dict(one)) for one in today)

    @property
    def run(self) -> dict[str, Any]:
        """The newest of its runs."""
        return max(self.runs.values(), key=lambda run: (run["utc"], run["id"]))


@dataclass(frozen=True)
class Model:
    """One model's results: task -> cache name -> cell, the base cache first, then by bits, largest first."""

    name: str
    facts: dict[str, Any]
    tasks: dict[str, dict[str, Cell]]

    @property
    def title(self) -> str:
        return self.name if self.facts["dtype"] == "bfloat16" else f"{self.name}, {self.facts['dtype']}"


@dataclass(frozen=True)
class Results:
    """Everything measured below a results folder.

    Attributes:
        simulated: files left out, because no packed cache was measured for them (`kvbits eval --simulate`).
        outdated: names of caches left out, because their format is gone or stored otherwise then (`of_today`).
    """

    models: dict[str, Model]
    simulated: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()

    def of_today(self) -> Results:
        """Return the same without caches whose format is gone, or stores otherwise today than when it was measured."""
        names: dict[str, None] = {}
        models = {}
        for key, m in self.models.items():
            tasks = {}
            for task, cells in m.tasks.items():
                names |= dict.fromkeys(name for name, c in cells.items() if c.outdated)
                tasks[task] = {name: c for name, c in cells.items() if not c.outdated}
            models[key] = Model(m.name, m.facts, tasks)
        return Results(models, self.simulated, tuple(names))

    @property
    def as_used(self) -> dict[str, Model]:
        """Every model in one dtype: bfloat16, in which it is used; else float16, else float32, whichever was measured,
        with the task fidelity if any was.
        """
        best: dict[str, str] = {}
        # else by dtype, see `collect`
        for key, m in sorted(self.models.items(), key=lambda item: "fidelity" not in item[1].tasks):
            best.setdefault(m.name, key)
        return {k: m for k, m in self.models.items() if best[m.name] == k}

    @property
    def finer(self) -> list[Model]:
        """The other runs, which take rounding noise out: float32 and float16 of models that `as_used` has in a coarser
        dtype.
        """
        return [m for k, m in self.models.items() if k not in self.as_used]


def _differ(then: Any, now: Any) -> bool:
    """Compare two specs as JSON data, in the fields that both have and that are not prose: True if they differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        return any(_differ(then[key], now[key]) for key in (then.keys() & now.keys()) - PROSE)
    return then is not None and bool(then != now)


def collect(directory: Path) -> Results:
    """Read a folder that `kvbits eval` wrote. Simulated results are left out.

    Raises:
        SpecError: no results there, only simulated ones, or some beside a base cache's that was measured on something
            else.
        FileFormatError: a damaged file.
    """
    found: dict[str, dict[str, dict[str, Cell]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    files: dict[tuple[str, str], list[dict[str, Any]]] = {}
    simulated = []
    for data in read_all(directory):
        if data["kind"] == "simulated":
            simulated.append(f"{data['model']['name']}/{data['task']}/{data['scheme']}")
            continue
        dtype = data["model"]["dtype"]
        name = data["model"]["name"] + ("" if dtype == "bfloat16" else f"-{dtype}")
        facts[name] = data["model"]
        files.setdefault((name, data["task"]), []).append(data)
        found.setdefault(name, {}).setdefault(data["task"], {})[data["scheme"]] = Cell.of(data)
    if not found:
        raise SpecError(
            f"{directory} holds simulated results only; reports show what packed caches measured: run `kvbits eval`"
            " without --simulate"
        )
    for beside in files.values():
        _require_alike(beside)
    models = {}
    for name in sorted(found, key=lambda n: (_DTYPES.index(facts[n]["dtype"]), facts[n]["parameters"], n)):
        tasks = {
            t: dict(sorted(cells.items(), key=lambda kv: _order(kv[1], cells)))
            for t, cells in sorted(found[name].items())
        }
        models[name] = Model(facts[name]["name"], facts[name], tasks)
    return Results(models, tuple(simulated))


def _require_alike(files: list[dict[str, Any]]) -> None:
    """Refuse results of a model and task some of which were measured on something else than the base, as `kvbits eval
    --overwrite` of a few caches leaves.
    """
    shared = [
        {"settings": {k: v for k, v in f["settings"].items() if k not in OF_SCHEME}, "model": f["model"]} for f in files
    ]
    at = next((i for i, f in enumerate(files) if f["kind"] == "base"), 0)
    base = files[at]["items"]
    for f, mine in zip(files, shared, strict=True):
        other = [
            key
            for key, item in f["items"].items()
            if item.get("chain_sha256") != base.get(key, item).get("chain_sha256")
        ]
        if differs := different(mine, shared[at]) + [f"{key} is a different chain" for key in other]:
            raise SpecError(
                f"{f['model']['name']}/{f['task']}/{f['scheme']}.json was measured on something else than"
                f" {files[at]['scheme']}.json beside it: {differs[0]}; measure it again, or move it to another folder"
            )


def _order(cell: Cell, cells: dict[str, Cell]) -> tuple[Any, ...]:
    b = bits(cell, cells)
    return (cell.kind != "base", b is None, -(b or 0.0), cell.kind == "stock", cell.scheme)


def bits(cell: Cell, cells: dict[str, Cell]) -> float | None:
    """Return bits per cached number: at long context where they are known, else those really held at the end of a
    window.
    """
    stated = long_bits(cell)
    return held_bits(cell, cells) if stated is None else stated


def long_bits(cell: Cell) -> float | None:
    """Return bits per cached number at long context: what the spec says, or of Transformers' own caches the code's and
    those of a scale and a zero point of 16 bits for each `STOCK_GROUP` numbers; None where neither is known.
    """
    stated, code = cell.info.get("bits_per_element"), cell.info.get("options", {}).get("nbits")
    if stated is None and code is not None:
        stated = code + 2 * 16 / STOCK_GROUP
    return None if stated is None else float(stated)


def held_bits(cell: Cell, cells: dict[str, Cell]) -> float | None:
    """Return bits per cached number really held at the end of a window, raw tokens and scales included."""
    base = next((c for c in cells.values() if c.kind == "base"), None)
    if base is None or "bytes_held" not in cell.summary or not base.summary.get("bytes_held"):
        return None
    return float(base.info["bits_per_element"]) * float(cell.summary["bytes_held"]) / float(base.summary["bytes_held"])
