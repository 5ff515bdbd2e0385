"""Greedy generation beside the base cache: where does the text first differ?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from ..caches import CacheFactory
from ..rows import generate
from . import Record, Task
from .text import DecodeTask


class GreedyTask(DecodeTask):
    """A context in chunks, then `new_tokens` greedy ones. A record holds the tokens and the first position that differs from the base's."""

    name: ClassVar[str] = "greedy"

    batched: ClassVar[bool] = True
    run = Task.run

    def run_batch(self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, dict[str, Record]]:
        o = self.context.options
        prompts = [self._windows[key][: o.context] for key in keys]
        found: dict[str, dict[str, Record]] = {key: {} for key in keys}
        reference: list[list[int]] = []
        for name, f in factories.items():
            texts = generate(self.context.model, f, prompts, o.new_tokens, o.chunk)
            reference = reference or texts
            for key, tokens, wanted in zip(keys, texts, reference, strict=True):
                same = [a == b for a, b in zip(tokens, wanted, strict=True)]
                found[key][name] = {"tokens": tokens, "first_divergence": same.index(False) if False in same else len(same), "same": sum(same)}
            advance(self._length * len(keys))
        return found

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        total = sum(len(r["tokens"]) for r in records.values())
        return {
            "prompts": len(records), "new_tokens": total // len(records),
            "first_divergence": math.fsum(r["first_divergence"] for r in records.values()) / len(records),
            "identical": sum(r["first_divergence"] == len(r["tokens"]) for r in records.values()),
            "agreement": sum(r["same"] for r in records.values()) / total,
        }  # fmt: skip
