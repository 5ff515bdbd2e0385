"""Forced replay of chains: what the 16-bit model thought and wrote, read by every cache as if it had written it itself.

The 16-bit cache writes chains, sampled by a seed. Each is fed again, prompt and text, to all caches side by side in chunks of at most 16 tokens, so that
pages close and are read as in decoding, and no cache is led astray by a token of its own. KL by octave of position says whether a cache gets worse as a chain
gets longer (`fidelity.drift`). A chain is kept with the 16-bit cache's results, and caches that are measured later replay the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from ...errors import DataError, SpecError
from ..caches import CacheFactory
from ..fidelity import DECODING_CHUNK
from ..rows import Rows
from ..texts import bos_of
from . import Context, Record, Task
from .generation import data_file
from .questions import read_lines
from .text import FidelityTask

TEMPERATURE = 0.8
"""Of sampling: greedy text of a small model repeats itself, which flatters every cache."""
PROMPTS = {"gsm8k": "question", "humaneval": "prompt"}
"""Benchmark -> the field of its file that is a prompt."""
PLACES = ("the harbour", "the old mill", "the library", "the school", "the hospital", "the north gate", "the market", "the bakery", "the station", "the museum")
GOODS = ("medicine", "bread", "books", "tools", "letters", "flowers", "glass", "cheese", "paper", "lamps")


class ReplayTask(FidelityTask):
    """Chains of `length` tokens, `windows` of them: of every --data that has prompts, and of plans, which need none, in turns. Items are KIND@NUMBER."""

    name: ClassVar[str] = "replay"
    batched: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        Task.__init__(self, context)
        o = context.options
        if self.chunk > DECODING_CHUNK:
            raise SpecError(f"replay reads as decoding does, in chunks of at most {DECODING_CHUNK} tokens, not --chunk {self.chunk}; leave --chunk out")
        if context.max_context is not None and o.length > context.max_context:
            raise DataError(f"chains of {o.length} tokens pass the model's {context.max_context} positions; lower --length")
        given = [name for name in PROMPTS if name in o.data]
        self._prompts = {name: [str(r[PROMPTS[name]]) for r in read_lines(data_file(context, name, f"{name}.jsonl"))] for name in given}
        self._kinds = ["planning", *given]
        self._windows: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return {"length": self._length, "chunk": self.chunk, "temperature": TEMPERATURE, "prompts": self._kinds, "seed": self.context.options.seed}

    def item_keys(self) -> list[str]:
        return [f"{self._kinds[i % len(self._kinds)]}@{i // len(self._kinds)}" for i in range(self.context.options.windows)]

    def _start(self, key: str) -> int:
        return self._starts[key]

    def run_batch(self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, dict[str, Record]]:
        base = next(iter(factories.values()))
        self._know(base, keys)
        found = {key: FidelityTask.run(self, key, factories, advance) for key in keys}
        for key in keys:
            found[key][base.name] |= {"prompt_tokens": self._starts[key], "chain": self._windows[key].tolist()}
        return found

    def _know(self, base: CacheFactory, keys: list[str]) -> None:
        """Chains of these items: those that the 16-bit cache's results have, and new ones."""
        for key in keys:
            if key in self.kept:
                self._windows[key], self._starts[key] = torch.tensor(self.kept[key]["chain"]), self.kept[key]["prompt_tokens"]
        if not (new := [key for key in keys if key not in self._windows]):
            return
        draws = [random.Random(f"{self.context.options.seed}:{key}") for key in new]
        turns = [self._turns(key, rng) for key, rng in zip(new, draws, strict=True)]
        starts = [[*bos_of(self.context.tokenizer), *next(turn)] for turn in turns]
        if long := next((s for s in starts if len(s) + 2 > self._length), None):
            raise DataError(f"chains of {self._length} tokens have no room after a prompt of {len(long)}; give a larger --length")
        limit, most = self.context.max_context, self._length + max(map(len, starts)) - min(map(len, starts))
        if limit is not None and most > limit:  # the longest goes on until the shortest is written
            raise DataError(
                f"chains written together run to {most} tokens, which pass the model's {limit} positions; lower --length, or write one by one: --batch-size 1"
            )
        chains = write(self.context.model, base, starts, turns, self._length, self.context.tokenizer.eos_token_id, draws)
        for key, start, chain in zip(new, starts, chains, strict=True):
            self._windows[key], self._starts[key] = torch.tensor(chain), len(start)

    def _turns(self, key: str, rng: random.Random) -> Iterator[list[int]]:
        """Ids of one prompt after another, as the model's chat template puts them."""
        tokenizer, prompts = self.context.tokenizer, self._prompts.get(key.split("@")[0])
        while True:
            asked = plan(rng) if prompts is None else rng.choice(prompts)
            text = f"\n\nQuestion: {asked}\nAnswer:"
            if tokenizer.chat_template is not None:
                text = str(tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False))
                text = text.removeprefix(tokenizer.bos_token or "") if bos_of(tokenizer) else text
            yield list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def plan(rng: random.Random) -> str:
    """A problem of planning: deliveries with places, loads and times."""
    places, goods = rng.sample(PLACES, 5), rng.sample(GOODS, 5)
    orders = " ".join(
        f"{place.capitalize()} wants {rng.randrange(2, 30)} boxes of {good} before {rng.randrange(9, 18)}:{rng.choice(('00', '15', '30', '45'))}."
        for place, good in zip(places, goods, strict=True)
    )
    return (
        f"One van carries {rng.randrange(20, 40)} boxes at a time and needs {rng.randrange(10, 30)} minutes for each way. It starts at 8:00. {orders} "
        "Plan the deliveries step by step: for each trip say what is loaded, where the van goes, when it arrives, and what remains. "
        "Check the plan at the end."
    )


@torch.no_grad()
def write(
    model: Any, f: CacheFactory, starts: list[list[int]], turns: list[Iterator[list[int]]], length: int, end: int | None, draws: list[random.Random]
) -> list[list[int]]:
    """Sampled chains of `length` tokens each, prompts included.

    Args:
        starts: ids of each chain's prompt.
        turns: where a chain is ended by the model, its next prompt goes on.
        end: id by which the model ends a text.
        draws: one random number a token, of each chain.
    """
    chains = [list(s) for s in starts]
    queues: list[list[int]] = [[] for _ in starts]
    cache = f.make(len(starts), max(map(len, starts)) + length)
    rows = Rows(model, cache, [torch.tensor(s) for s in starts], DECODING_CHUNK)
    logits = rows.logits
    while True:
        odds = torch.softmax(logits.float() / TEMPERATURE, -1).double().cumsum(-1).cpu()
        for chain, queue, turn, row, rng in zip(chains, queues, turns, odds, draws, strict=True):
            if not queue:
                token = min(int(torch.searchsorted(row, rng.random() * float(row[-1]), right=True)), len(row) - 1)
                queue += [token, *(next(turn) if token == end else ())]
            chain.append(queue.pop(0))
        if min(map(len, chains)) >= length:
            return [chain[:length] for chain in chains]
        logits = rows.feed(torch.tensor([chain[-1:] for chain in chains]))[:, -1]
