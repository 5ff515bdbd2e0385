"""Choice between ways to attend that depends on the machine: measured once, at the first long enough history, and kept.

A plan for which several ways are known attends by the first of them until it has been measured. Then it takes the
fastest. Each measurement is a file in the cache folder (`kvbits.files.cache_folders`), named by a hash of the machine,
the library and the kind of call, and `explain()` prints its seconds. To measure again, remove the file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import SpecError
from ...files import cache_folder, cache_folders, whole
from ...progress import say
from ...runs import processor
from ..types import BackendPlan, PageStore, Table
from .library import library, tier

FOLDER = "cpu"
TOKENS = 4096
"""Tokens of each part that a measurement reads, of one sequence. Shorter histories are not measured: their pages stay
in the L2 cache, where kernels read them again for other query rows.
"""
ROUNDS = 3
"""Turns of each way. Their median counts, so that a first turn may be slow."""
SECONDS = 5e-3
"""Least time of a turn. Short calls are repeated."""
MARGIN = 1.05
"""Factor by which another way must be faster than the first one: noise of a shared machine changes nothing."""


@functools.cache
def _library_hash() -> str:
    return hashlib.sha256(Path(library()._name).read_bytes()).hexdigest()[:16]


def facts(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a measurement depends on: the machine, the versions, and the kind of call."""
    machine = {
        "processor": processor(),
        "tier": tier(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "library": _library_hash(),
    }
    return {"machine": machine, "call": dict(call)}


def _file_name(known: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24] + ".json"


_of_this_process: dict[str, dict[str, float]] = {}
"""Seconds that no folder took, by the name that their file would have."""


def kept(known: Mapping[str, Any]) -> tuple[dict[str, float], Path | None] | None:
    """Return the seconds of each way, and the file that they were kept in, or None where nothing was measured."""
    name = _file_name(known)
    if name in _of_this_process:
        return _of_this_process[name], None
    for folder in cache_folders(FOLDER):
        path = folder / name
        try:
            found = json.loads(path.read_text())
            seconds = {str(way): float(x) for way, x in found["seconds"].items()}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            say(f"{path} holds no measurement ({error}), so it is measured again; remove the file if this repeats")
            continue
        return seconds, path
    return None


def keep(known: Mapping[str, Any], seconds: Mapping[str, float]) -> Path | None:
    """Write the seconds of each way to the cache folder. Return the file, or None where no folder is writable."""
    name = _file_name(known)
    try:
        path = cache_folder(FOLDER) / name
        with whole(path) as partial:
            partial.write_text(json.dumps({**known, "seconds": dict(seconds)}, indent=1) + "\n")
    except (OSError, SpecError) as error:
        _of_this_process[name] = dict(seconds)
        say(f"kvbits measured this CPU, cannot keep the result, and measures again in the next process: {error}")
        return None
    return path


class Tuned:
    """A plan that attends by the fastest of several ways.

    Args:
        ways: makes each plan, by name. The first one serves until they have been measured.
        call: what the times depend on, beside the machine.
    """

    reads_host = True
    result_dtype = torch.float32

    def __init__(self, ways: Mapping[str, Callable[[], BackendPlan]], call: Mapping[str, Any]) -> None:
        self._ways, self._facts = dict(ways), facts(call)
        self._layers: dict[int, list[PageStore]] = {}
        self._step: tuple[Sequence[Table], torch.Tensor | None, torch.Tensor | None] | None = None
        self._longest: int | None = None  # sequence of the step that has enough tokens to be measured
        self._seconds: dict[str, float] = {}
        self._path: Path | None = None
        found = kept(self._facts)
        if found is not None and set(found[0]) == set(ways):
            self._seconds, self._path = found
        self._plan = self._ways[self.fastest if self._seconds else next(iter(ways))]()

    @property
    def fastest(self) -> str:
        """The name of the way that is taken once there are seconds of all."""
        first, *others = self._ways
        best = min(others, key=self._seconds.__getitem__)
        return best if self._seconds[best] * MARGIN < self._seconds[first] else first

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        self._plan.bind(layer, stores)
        if not self._seconds:
            self._layers[layer] = list(stores)

    def update(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        self._plan.update(tables, query_lens, positions)
        if not self._seconds:
            self._step = list(tables), query_lens, positions
            tokens = torch.stack([table.tokens for table in tables]).amax(0)
            self._longest = int(tokens.argmax()) if int(tokens.max()) >= TOKENS else None

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        if self._longest is not None and layer in self._layers:
            self._choose(q, layer, self._longest)
        return self._plan.run(q, layer, out, lse)

    def _choose(self, q: torch.Tensor, layer: int, sequence: int) -> None:
        """Measure all ways on the start of one sequence's history, and take the fastest from now on."""
        assert self._step is not None
        self._seconds = self._measure(q[sequence : sequence + 1], layer, slice(sequence, sequence + 1))
        self._path = keep(self._facts, self._seconds)
        if (name := self.fastest) != next(iter(self._ways)):
            self._plan = self._ways[name]()
            for bound, stores in self._layers.items():
                self._plan.bind(bound, stores)
            self._plan.update(*self._step)
        self._layers, self._step, self._longest = {}, None, None

    def _measure(self, q: torch.Tensor, layer: int, sequence: slice) -> dict[str, float]:
        assert self._step is not None
        tables, query_lens, positions = self._step
        start = [_start(table, sequence) for table in tables]
        lens, at = (None if x is None else x[sequence] for x in (query_lens, positions))
        plans = {name: make() for name, make in self._ways.items()}
        out = q.new_empty(*q.shape[:3], self._layers[layer][0].layout.value_head_dim, dtype=self.result_dtype)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for plan in plans.values():
            plan.bind(layer, self._layers[layer])
            plan.update(start, lens, at)
        # a thread that waits for a core of a shared machine says nothing about the way
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        turns: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(ROUNDS):
            for name, plan in plans.items():
                began, runs = clock(), 0
                while (took := clock() - began) < SECONDS:
                    plan.run(q, layer, out, lse)
                    runs += 1
                turns[name].append(took / runs)
        return {name: statistics.median(found) for name, found in turns.items()}

    def explain(self) -> str:
        if not self._seconds:
            others = " and ".join(list(self._ways)[1:])
            return f"{self._plan.explain()}; {others} not measured: no history had {TOKENS:,} tokens yet"
        times = ", ".join(f"{name} {1e3 * x:.3g} ms" for name, x in self._seconds.items())
        where = f"kept in {self._path}" if self._path else "not kept"
        return f"{self._plan.explain()}; measured over {TOKENS:,} tokens: {times}; {where}"


def _start(table: Table, sequence: slice) -> Table:
    """Return a sequence's row of a table, with no more tokens than a measurement reads."""
    row = [None if x is None else x[sequence] for x in (table.starts, table.offsets, table.spans)]
    return Table(table.pages[sequence], table.tokens[sequence].clamp(max=TOKENS), *row)
