"""Attention-level error per layer and head on windows of a text (see `evaluate.attention`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from ..attention import LayerInputs, measure, observe, statistics
from ..caches import CacheFactory
from . import Record, Task
from .text import SPREAD, FidelityTask

MEASURES = ("logit_cosine", "tvd", "output_error", "key_bits", "value_bits")


class AttentionTask(FidelityTask):
    """Every cache on the same observed queries, keys and values."""

    name: ClassVar[str] = "attention"
    relative: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    run_batch = Task.run_batch

    @property
    def settings(self) -> dict[str, Any]:
        return {"length": self._length, "queries": self._queries} | SPREAD

    @property
    def _queries(self) -> int:
        return min(64, self._length // 2)

    def size(self, key: str) -> int:
        return 1

    def run(self, key: str, factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, Record]:
        inputs: list[LayerInputs] = observe(self.context.model, self._windows[key])
        found: dict[str, Record] = {}
        for name, f in factories.items():
            found[name] = {"layers": measure(inputs, f.make(1, self._length), queries=self._queries)}
            if f.kind == "base":
                found[name]["statistics"] = statistics(inputs)
            advance(1)
        return found

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        layers = len(next(iter(records.values()))["layers"])
        by_layer: dict[str, list[Any]] = {
            m: [_mean([h for r in records.values() for h in r["layers"][i][m]]) for i in range(layers)]
            for m in MEASURES
        }
        found: dict[str, Any] = {m: _mean(values) for m, values in by_layer.items()}
        worst = max(range(layers), key=lambda i: by_layer["output_error"][i] or 0.0)
        found |= {
            "worst_layer": worst,
            "worst_output_error": by_layer["output_error"][worst],
            "clipped": sum(
                n
                for r in records.values()
                for x in r["layers"]
                for side in ("clipped_keys", "clipped_values")
                for n in x[side]
            ),
            "saturated": sum(n for r in records.values() for x in r["layers"] for n in x["saturated"].values()),
            "by_layer": by_layer,
        }
        return found


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None
