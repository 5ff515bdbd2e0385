"""Greedy generation beside the base cache: where does the text first differ (`greedy`), and what would a cache have
written in the base's place (`follow`)?

One token written differently changes all that come after it, so `greedy`'s agreement falls with the length of a text
even where every other token is as good. `follow` feeds every cache the base's own text instead (teacher forcing).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..caches import CacheFactory
from ..fidelity import DECODING_CHUNK
from ..rows import follow, generate
from . import Record, Task
from .text import DecodeTask, standard_error


class GreedyTask(DecodeTask):
    """A context in chunks, then `new_tokens` greedy ones.

    A record holds the tokens and the first position that differs from the base's.
    """

    name: ClassVar[str] = "greedy"

    batched: ClassVar[bool] = True
    run = Task.run

    def run_batch(
        self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]
    ) -> dict[str, dict[str, Record]]:
        o = self.context.options
        prompts = [self._windows[key][: o.context] for key in keys]
        base, *others = factories.values()
        written = generate(self.context.model, base, prompts, o.new_tokens, self.chunk)
        found: dict[str, dict[str, Record]] = {key: {} for key in keys}
        for f in (base, *others):
            texts = self._texts(f, prompts, written, f is base)
            for key, tokens, wanted in zip(keys, texts, written, strict=True):
                same = [a == b for a, b in zip(tokens, wanted, strict=True)]
                found[key][f.name] = {
                    "tokens": tokens,
                    "first_divergence": same.index(False) if False in same else len(same),
                    "same": sum(same),
                }
            advance(self._length * len(keys))
        return found

    def _texts(
        self, f: CacheFactory, prompts: list[torch.Tensor], written: list[list[int]], is_base: bool
    ) -> list[list[int]]:
        """Return the token ids that the cache writes. `written` holds those that the base cache wrote."""
        o = self.context.options
        return written if is_base else generate(self.context.model, f, prompts, o.new_tokens, self.chunk)

    def _summary(self, by_item: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        records, length = list(by_item.values()), self.context.options.new_tokens
        first = [float(r["first_divergence"]) for r in records]
        return {
            "prompts": len(records),
            "new_tokens": length,
            "first_divergence": math.fsum(first) / len(first),
            "first_divergence_se": standard_error(first),
            "identical": sum(r["first_divergence"] == length for r in records),
            "agreement": sum(r["same"] for r in records) / length / len(records),
            "agreement_se": standard_error([r["same"] / length for r in records]),
        }


class FollowTask(GreedyTask):
    """A context in chunks, then the base's greedy text in chunks: at how many of its tokens does a cache choose the
    same one?

    The base's own share is below 1 by what rounds differently in passes of several tokens.
    """

    name: ClassVar[str] = "follow"
    usual_chunk: ClassVar[int] = DECODING_CHUNK

    def _texts(
        self, f: CacheFactory, prompts: list[torch.Tensor], written: list[list[int]], is_base: bool
    ) -> list[list[int]]:
        return follow(self.context.model, f, prompts, written, self.chunk)
