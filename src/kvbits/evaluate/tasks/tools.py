"""Calls of functions in conversations that grow: does a cache write the call that the 16-bit cache writes?

A conversation (`conversations`) is filled with minutes up to --contexts tokens, as the model's chat template writes it.
Its history is stored once. Each of `ToolsTask.ASKED` last turns continues a fork of it. The template opens a call, and
the model writes the rest, greedily: the function's name and its arguments.

A call is right if its name and all arguments are those that users told, compared as JSON. It agrees if it is the call
that the 16-bit cache wrote, whether that one is right or not. Conversations whose 16-bit call does not parse are left
out of the agreement. The calls of one history, at all its lengths, are a cluster of its interval (`paired`).
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from typing import Any, ClassVar

import torch

from ...errors import DataError
from ..caches import CacheFactory
from ..paired import agreement, clustered
from ..rows import generate_forked
from ..texts import bos_of
from . import Record
from .conversations import Call, Conversation, chat_text, converse
from .questions import STOP_TOKENS
from .recall import PartsTask

MAX_NEW_TOKENS = 192
END = "</tool_call>"
"""The end of a call, where the format has such an end; others end with the turn."""

Item = tuple[torch.Tensor, list[torch.Tensor], list[Call]]


class ToolsTask(PartsTask):
    """Histories of every length. Each call is a part.

    The same repeat has the same functions, cases and questions at every length: minutes alone make it longer.
    """

    name: ClassVar[str] = "tools"
    usual_contexts: ClassVar[tuple[int, ...]] = (2000, 4000)
    KINDS: ClassVar[tuple[str, ...]] = ("calls",)
    ASKED: ClassVar[int] = 10

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"asked": self.ASKED, "max_new_tokens": MAX_NEW_TOKENS}

    def room(self, item: Item) -> int:
        history, asked, _ = item
        return len(history) + max(map(len, asked)) + MAX_NEW_TOKENS

    def _made(self, key: str) -> Item:
        kind, length, repeat = key.split(":")
        talk = converse(self.rng(f"{kind}:{repeat}"), asked=self.ASKED)
        longest = max(talk.asked, key=lambda asked: len(self._ids(talk, 0, asked)))

        def size(turns: int) -> int:
            return len(self._ids(talk, turns, longest))

        if (least := size(0)) > int(length):
            raise DataError(
                f"{self.name} {key}: {length} tokens have no room for what is asked; give --contexts of {least} at"
                " least"
            )
        most = (int(length) - least) // max(1, size(1) - least) * 2 + 2
        turns = bisect.bisect_right(range(most), int(length), key=size) - 1
        ids = [self._ids(talk, turns, asked) for asked in talk.asked]
        alike = next(i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1)
        return torch.tensor(ids[0][:alike]), [torch.tensor(one[alike:]) for one in ids], talk.wanted

    def _ids(self, talk: Conversation, turns: int, asked: str) -> list[int]:
        tokenizer = self.context.tokenizer
        text, bos = chat_text(tokenizer, talk.messages(turns, asked), talk.functions), bos_of(tokenizer)
        return [*bos, *self.encode(text.removeprefix(tokenizer.bos_token) if bos else text)]

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        tokenizer = self.context.tokenizer

        def text(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        def ends(tokens: list[int]) -> bool:
            return tokens[-1] == tokenizer.eos_token_id or END in text(tokens[-STOP_TOKENS:])

        histories, asked, wanted = zip(*map(self.item, keys), strict=True)
        written = generate_forked(self.context.model, f, histories, asked, MAX_NEW_TOKENS, self.chunk, ends)
        found = []
        for mine, turns, right in zip(written, asked, wanted, strict=True):
            texts = [text([*turn.tolist(), *tokens]) for turn, tokens in zip(turns, mine, strict=True)]
            calls = [digest(call_of(one)) for one in texts]
            same = "".join("01"[call == digest(one)] for call, one in zip(calls, right, strict=True))
            found.append({"right": same, "calls": calls, "answer": texts})
        return found

    @staticmethod
    def cluster(key: str) -> str:
        """Name the repeat: the same questions are asked at every length."""
        return key.rsplit(":", 1)[1]

    def figures(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        calls = [call for r in records.values() for call in r["calls"]]
        parsed = {"parsed": sum(call is not None for call in calls) / len(calls)}
        return agreement(calls_together(records, base)) | parsed | super().figures(records, base)


def calls_together(records: dict[str, Record], base: dict[str, Record]) -> list[list[bool]]:
    """Return for each repeat whether its calls are the other's, where the other's parse."""
    same = {
        key: [
            call == wanted
            for call, wanted in zip(records[key]["calls"], other["calls"], strict=True)
            if wanted is not None
        ]
        for key, other in base.items()
        if key in records
    }
    return clustered(same, ToolsTask.cluster)


def call_of(text: str) -> Call | None:
    """Return the first call in what a model wrote: a JSON object with a name and an object of arguments, which some
    formats call parameters. None if nothing parses so.
    """
    decoder = json.JSONDecoder(parse_constant=_refused)
    for brace in re.finditer("{", text):
        try:
            found, _ = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):  # a model may write brackets without end
            continue
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(found.get("name"), str) and isinstance(arguments, dict):
            return {"name": found["name"], "arguments": arguments}
    return None


def digest(call: Call | None) -> str | None:
    """Name a call by 8 hexadecimal digits: equal for equal JSON, in whatever order its members stand."""
    if call is None:
        return None
    return hashlib.sha256(json.dumps(_whole(call), sort_keys=True).encode()).hexdigest()[:8]


def _whole(value: Any) -> Any:
    """Return JSON data whose whole numbers are integers: 14.0 is 14."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_whole, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
