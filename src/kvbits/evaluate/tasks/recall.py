"""Texts that are fed as they are, and parts of them that a cache would have written, too: copying here, keeping track
in `tracking`.

A prompt is stored in chunks; the text after it continues in chunks of at most 16 tokens (teacher forcing), so one wrong
token spoils no other. A part is right if each of its tokens was the most likely one. Many parts to a prompt make many
questions of little work, and the same ones are put to every cache: what differs from the 16-bit cache comes with an
interval and an exact test (`evaluate.paired`).

    copying    a list of random words, and the same list again: each word is read --contexts tokens back
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from typing import Any, ClassVar

import torch

from ...errors import DataError
from ..caches import CacheFactory
from ..fidelity import DECODING_CHUNK
from ..paired import clustered, paired
from ..rows import follow
from ..texts import bos_of, novel
from . import Context, Record, Task

FILLER = (
    "The river runs past the old mill. Boats come in the morning and leave at night. The market opens, people talk, and"
    " the bells ring again. "
)
Part = tuple[str, bool]
"""(a piece of text, whether it is a question)."""


@functools.cache
def words() -> tuple[str, ...]:
    """Return common words, of 3 to 9 letters, in the order of the alphabet."""
    counted = Counter(re.findall(r"\b[a-z]{3,9}\b", novel()))
    return tuple(sorted(w for w, n in counted.items() if n >= 4))


class PartsTask(Task):
    """Items are KIND:LENGTH:REPEAT, and their records say which parts were right: "1011".

    Attributes:
        usual_contexts: lengths, tokens, where the options name none.
    """

    batched: ClassVar[bool] = True
    usual_contexts: ClassVar[tuple[int, ...]] = (1024, 2048)
    KINDS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.item = functools.lru_cache(max(64, self.batch))(self._fitting)  # every cache is asked the same
        # kind and length, before anything runs; the others differ little
        one_of_each = {key.rsplit(":", 1)[0]: key for key in self.item_keys()}
        for key in one_of_each.values():
            self.item(key)

    def _fitting(self, key: str) -> Any:
        made, limit = self._made(key), self.context.max_context
        if (room := self.room(made)) > (limit or room):
            raise DataError(
                f"{self.name} {key} takes {room} tokens, which pass the model's {limit} positions; lower --contexts"
            )
        return made

    @property
    def settings(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "seed": self.context.options.seed, "prompt": 1}

    def item_keys(self) -> list[str]:
        o = self.context.options
        contexts = self.usual_contexts if o.contexts is None else o.contexts
        return [f"{kind}:{n}:{r}" for n in contexts for r in range(o.repeats) for kind in self.KINDS]

    def size(self, key: str) -> int:
        return int(key.split(":")[1])

    def encode(self, text: str) -> list[int]:
        return list(self.context.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def rng(self, key: str) -> random.Random:
        return random.Random(f"{self.context.options.seed}:{key}")

    def _made(self, key: str) -> Any:
        """Return what an item asks."""
        raise NotImplementedError

    def room(self, item: Any) -> int:
        """Return the number of tokens that an item takes, its answer with it."""
        raise NotImplementedError

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        kinds: dict[str, dict[str, Record]] = {}
        for key, record in records.items():
            kinds.setdefault(key.rsplit(":", 1)[0], {})[key] = record
        return self.figures(records, base) | {
            "by_kind": {kind: self.figures(some, base) for kind, some in kinds.items()}
        }

    def figures(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        """Return shares of parts, and of tokens where they were counted, that are right in some items, and the
        difference to the 16-bit cache's.
        """
        right = [c == "1" for r in records.values() for c in r["right"]]
        found: dict[str, Any] = {"parts": len(right), "accuracy": sum(right) / len(right)}
        if all("tokens" in r for r in records.values()):
            found["token_accuracy"] = sum(r["tokens_right"] for r in records.values()) / sum(
                r["tokens"] for r in records.values()
            )
        outcomes = {
            key: [(a == "1", b == "1") for a, b in zip(r["right"], base[key]["right"], strict=True)]
            for key, r in records.items()
            if key in base
        }
        return found | paired(clustered(outcomes, self.cluster))

    @staticmethod
    def cluster(key: str) -> str:
        """Name what an item's prompt was drawn with: answers about items of one name depend on each other."""
        return key


class ForcedTask(PartsTask):
    """Prompts and what follows them. Subclasses write both."""

    def room(self, item: tuple[torch.Tensor, list[int], list[tuple[int, int]]]) -> int:
        return len(item[0]) + len(item[1]) + DECODING_CHUNK  # the last pass is filled up

    def parts(self, kind: str, length: int, rng: random.Random) -> tuple[list[int], list[Part]]:
        """Return (ids of a prompt of about `length` tokens without BOS, what follows it)."""
        raise NotImplementedError

    def _made(self, key: str) -> tuple[torch.Tensor, list[int], list[tuple[int, int]]]:
        """Return (ids of the prompt, ids after it, (first, end) of each question among these)."""
        kind, length, _ = key.split(":")
        prompt, parts = self.parts(kind, int(length), self.rng(key))
        text: list[int] = []
        where = []
        for piece, asked in parts:
            ids = self.encode(piece)
            where += [(len(text), len(text) + len(ids))] if asked else []
            text += ids
        return torch.tensor([*bos_of(self.context.tokenizer), *prompt]), text, where

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        items = [self.item(key) for key in keys]
        chunk = min(self.chunk, DECODING_CHUNK)
        chosen = follow(
            self.context.model, f, [p for p, *_ in items], [t for _, t, _ in items], self.chunk, text_chunk=chunk
        )
        found = []
        for tokens, (_, text, where) in zip(chosen, items, strict=True):
            same = [a == b for a, b in zip(tokens, text, strict=True)]
            asked = [same[first:end] for first, end in where]
            found.append(
                {
                    "right": "".join("01"[all(one)] for one in asked),
                    "tokens": sum(map(len, asked)),
                    "tokens_right": sum(map(sum, asked)),
                }
            )
        return found


class CopyingTask(ForcedTask):
    """`WORDS` random words are a part, their commas with them; the first of the list, which nothing announces, are no
    question. About `new_tokens` are copied.

    Commas are there for small models: SmolLM2 copies nine tokens of ten of such a list, and two of three of words in
    lines, numbered or not.
    """

    name: ClassVar[str] = "copying"
    KINDS: ClassVar[tuple[str, ...]] = ("words",)
    WORDS: ClassVar[int] = 6

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"new_tokens": self.context.options.new_tokens}

    def parts(self, kind: str, length: int, rng: random.Random) -> tuple[list[int], list[Part]]:
        runs: list[str] = []
        ids: list[int] = []
        while len(ids) < length:
            runs.append(" " + ", ".join(rng.sample(words(), self.WORDS)) + ",")
            ids += self.encode(runs[-1])
        room, copied = self.context.options.new_tokens, 1
        while copied < len(runs) and room > 0:
            room -= len(self.encode(runs[copied]))
            copied += 1
        if copied < 2:
            raise DataError(
                f"copying from {length} tokens back: nothing is left to ask for after the first {self.WORDS} words;"
                " give larger --contexts"
            )
        return ids, [(run, i > 0) for i, run in enumerate(runs[:copied])]
