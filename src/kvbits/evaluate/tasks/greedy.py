"""Greedy generation beside the base cache: where does the text first differ?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..caches import CacheFactory
from . import Record
from .text import DecodeTask, prefill


class GreedyTask(DecodeTask):
    """A context in chunks, then `new_tokens` greedy ones. A record holds the tokens and the first position that differs from the base's."""

    name: ClassVar[str] = "greedy"

    def run(self, key: str, factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, Record]:
        o = self.context.options
        ids = self._windows[key][: o.context]
        found: dict[str, Record] = {}
        reference: list[int] | None = None
        for name, f in factories.items():
            tokens = generate(self.context.model, f.make(1, self._length), ids, o.new_tokens, o.chunk)
            reference = tokens if reference is None else reference
            same = [a == b for a, b in zip(tokens, reference, strict=True)]
            found[name] = {"tokens": tokens, "first_divergence": same.index(False) if False in same else len(same), "same": sum(same)}
            advance(self._length)
        return found

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        total = sum(len(r["tokens"]) for r in records.values())
        return {
            "prompts": len(records), "new_tokens": total // len(records),
            "first_divergence": math.fsum(r["first_divergence"] for r in records.values()) / len(records),
            "identical": sum(r["first_divergence"] == len(r["tokens"]) for r in records.values()),
            "agreement": sum(r["same"] for r in records.values()) / total,
        }  # fmt: skip


@torch.no_grad()
def generate(model: Any, cache: Any, ids: torch.Tensor, new_tokens: int, chunk: int, stop: Callable[[list[int]], bool] = lambda tokens: False) -> list[int]:
    """Greedy tokens after ids [num_tokens], prefilled in chunks, until `stop` says so of what came so far."""
    tokens = [int(prefill(model, {"": cache}, ids, chunk)[""].argmax())]
    while len(tokens) < new_tokens and not stop(tokens):
        logits = model(torch.tensor([[tokens[-1]]], device=model.device), past_key_values=cache, use_cache=True).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens
