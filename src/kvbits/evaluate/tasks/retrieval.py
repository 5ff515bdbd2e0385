"""Facts about many alike names, told in a long prompt. `ruler` has the other kinds of finding.

A prompt of exactly N tokens is prefilled in chunks, so that the fact is read from the cache as stored, and the answer
is fed token by token. It counts as found if each of its tokens is the most likely one, which is when greedy decoding
would have written it.

    entities   many people with a number each, some of them alike, told twice in shuffled order; the question is one of
               them
"""

from __future__ import annotations

import functools
import math
import random
from typing import Any, ClassVar

import torch

from ...errors import DataError
from ..caches import CacheFactory
from ..paired import paired_records
from ..rows import Rows, together
from ..texts import bos_of
from . import Context, Record, Task

FILLER = (
    "The river runs past the old mill. Boats come in the morning and leave at night. The market opens, people talk, and"
    " the bells ring again. "
)
NAMES = (
    "Anna",
    "Hanna",
    "Johanna",
    "Marta",
    "Martha",
    "Jon",
    "John",
    "Joan",
    "Peter",
    "Petra",
    "Carl",
    "Carla",
    "Louis",
    "Louise",
    "Paul",
    "Paula",
)


class EntitiesTask(Task):
    """Alike names with a number each. Items are LENGTH:DEPTH:REPEAT; DEPTH is the position in the first telling of the
    person in the question.
    """

    name: ClassVar[str] = "entities"
    batched: ClassVar[bool] = True
    ANSWER_ROOM: ClassVar[int] = 12

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.prompt = functools.lru_cache(self.batch)(self._made)  # every cache asks the same
        limit = context.max_context
        if limit is not None and (long := [n for n in context.options.contexts if n + self.ANSWER_ROOM > limit]):
            raise DataError(
                f"a prompt of {long[0]} tokens and its answer pass the model's {limit} positions; lower --contexts"
            )

    @property
    def settings(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "seed": self.context.options.seed, "prompt": 1}

    def item_keys(self) -> list[str]:
        o = self.context.options
        return [f"{n}:{d:g}:{r}" for n in o.contexts for d in o.depths for r in range(o.repeats)]

    def size(self, key: str) -> int:
        return int(key.split(":")[0])

    def parts(self, length: int, depth: float, rng: random.Random) -> tuple[str, str, str, str]:
        """Return (lead, filler, question, answer); filler may be longer than needed."""
        people = rng.sample(NAMES, len(NAMES))
        numbers = rng.sample(range(100, 1000), len(people))
        told = [f"{p} keeps the number {n}." for p, n in zip(people, numbers, strict=True)]
        again = rng.sample(told, len(told))
        asked = min(int(depth * len(people)), len(people) - 1)
        lead = "A list of people and their numbers.\n" + " ".join([*told, *again]) + "\n"
        return (
            lead,
            FILLER * (length // 12 + 2),
            f"Which number does {people[asked]} keep? {people[asked]} keeps the number",
            f" {numbers[asked]}",
        )

    def _made(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids of the prompt, exactly LENGTH; ids of the answer)."""
        length, depth, _ = key.split(":")
        tokenizer = self.context.tokenizer
        lead, filler, question, answer = self.parts(
            int(length), float(depth), random.Random(f"{self.context.options.seed}:{key}")
        )

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        start, end = [*bos_of(tokenizer), *encode(lead)], encode("\n" + question)
        whole = encode(question + answer)
        room = int(length) - len(start) - len(end)
        body = encode(filler)
        if room < 0:
            raise DataError(
                f"a prompt of {length} tokens has no room for what is asked, which takes {int(length) - room}; give"
                " --contexts of more"
            )
        if len(body) < room:
            raise DataError(
                f"a prompt of {length} tokens needs {room} tokens of filler, but there are {len(body)}; give"
                " --contexts of fewer"
            )
        ids = [*start, *body[:room], *end]
        target = whole[len(encode(question)) :]
        return torch.tensor(ids), torch.tensor(target)

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        prompts = [self.prompt(key) for key in keys]
        return [record for some in together(f, len(keys)) for record in self._answer(f, prompts[some])]

    def _answer(self, f: CacheFactory, prompts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Record]:
        """Each answer fed token by token after its prompt, all through one cache."""
        cache = f.make(len(prompts), max(len(ids) + len(answer) for ids, answer in prompts))
        rows = Rows(self.context.model, cache, [ids for ids, _ in prompts], self.chunk)
        nll, right, logits = [0.0] * len(prompts), [0] * len(prompts), rows.logits
        live = list(range(len(prompts)))
        for i in range(max(len(answer) for _, answer in prompts)):
            tokens = torch.tensor([int(prompts[row][1][i]) for row in live])
            log_p = torch.log_softmax(logits.float(), -1).cpu()
            for row, p, token in zip(live, log_p, tokens.tolist(), strict=True):
                nll[row] -= float(p[token])
                right[row] += int(p.argmax()) == token
            going = [r for r, row in enumerate(live) if i + 1 < len(prompts[row][1])]
            live = [live[r] for r in going]
            if live:
                rows.select(going)
                logits = rows.feed(tokens[going][:, None])[:, -1]
        return [
            {"found": right[row] == len(answer), "tokens": len(answer), "right": right[row], "nll": nll[row]}
            for row, (_, answer) in enumerate(prompts)
        ]

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        places = dict.fromkeys(k.rsplit(":", 1)[0] for k in records)
        maps = {p: _share([r["found"] for k, r in records.items() if k.rsplit(":", 1)[0] == p]) for p in places}
        known = [k for k in records if k in base and base[k]["found"]]
        return {
            "prompts": len(records),
            "accuracy": _share([r["found"] for r in records.values()]),
            "found_of_base": _share([records[k]["found"] for k in known]) if known else None,
            "base_found": len(known),
            "nll": math.fsum(r["nll"] for r in records.values()) / len(records),
            "heat_map": maps,
            **paired_records(records, base, "found"),
        }


def _share(values: list[bool]) -> float:
    return sum(values) / len(values)
