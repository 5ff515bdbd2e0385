"""Forced replay of chains: what the 16-bit model thought and wrote, read by every cache as if it had written it itself.

The 16-bit cache writes chains, sampled by a seed. Each is fed again, prompt and text, to all caches side by side in
chunks of at most 16 tokens, so that pages close and are read as in decoding, and no cache is led astray by a token of
its own. KL by octave of position says whether a cache gets worse as a chain gets longer (`fidelity.drift`). A chain is
kept with the 16-bit cache's results, and caches that are measured later replay the same tokens; every record names its
chain by a hash, so that no two chains are ever compared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...errors import DataError, SpecError, UnsupportedError
from ...integrations.graphs import graphed
from ..caches import CacheFactory, factory
from ..fidelity import DECODING_CHUNK
from ..rows import TEMPERATURE, Rows, sampled
from ..texts import bos_of, write_chat
from . import Context, Record, Task
from .questions import data_file, read_lines
from .text import FidelityTask

PROMPTS = {"gsm8k": "question", "humaneval": "prompt"}
"""Benchmark -> the field of its file that is a prompt."""
PLACES = (
    "the harbour",
    "the old mill",
    "the library",
    "the school",
    "the hospital",
    "the north gate",
    "the market",
    "the bakery",
    "the station",
    "the museum",
)
GOODS = ("medicine", "bread", "books", "tools", "letters", "flowers", "glass", "cheese", "paper", "lamps")


class ReplayTask(FidelityTask):
    """Chains of `length` tokens, `windows` of them: of every --data that has prompts, and of plans, which need none, in
    turns. Items are KIND@NUMBER.

    As many chains as go together are written, then replayed. They are sampled: greedy text of a small model repeats
    itself, which flatters every cache.
    """

    name: ClassVar[str] = "replay"
    usual_batch: ClassVar[int] = 4
    scores_texts: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        Task.__init__(self, context)
        o = context.options
        if self.chunk > DECODING_CHUNK:
            raise SpecError(
                f"replay reads as decoding does, in chunks of at most {DECODING_CHUNK} tokens, not --chunk"
                f" {self.chunk}; leave --chunk out"
            )
        if context.max_context is not None and o.length > context.max_context:
            raise DataError(
                f"chains of {o.length} tokens pass the model's {context.max_context} positions; lower --length"
            )
        files = {name: data_file(context, name, f"{name}.jsonl") for name in PROMPTS if name in o.data}
        self._prompts = {name: prompts_of(path, PROMPTS[name]) for name, path in files.items()}
        self._kinds = {"planning": None} | {
            name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
        }
        self._windows: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}
        longest = max((self._begun(key)[2] for key in self.item_keys()), key=len)
        if len(longest) + 2 > o.length:
            raise DataError(
                f"chains of {o.length} tokens have no room after a prompt of {len(longest)}; give --length"
                f" {len(longest) + 2} at least, and several times that for a chain to tell anything"
            )

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "length": self._length,
            "chunk": self.chunk,
            "temperature": TEMPERATURE,
            "prompts": self._kinds,
            "seed": self.context.options.seed,
            "chains": 2,
        }

    def item_keys(self) -> list[str]:
        kinds = list(self._kinds)
        return [f"{kinds[i % len(kinds)]}@{i // len(kinds)}" for i in range(self.context.options.windows)]

    def _first(self, key: str) -> int:
        return self._starts[key] + 1

    def run_batch(
        self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]
    ) -> dict[str, dict[str, Record]]:
        base = next(iter(factories.values()))
        for key in keys:
            self._know(base, key)
        found = super().run_batch(keys, factories, advance)
        for key in keys:
            chain = self._windows[key].tolist()
            for record in found[key].values():
                record["chain_sha256"] = chain_sha256(chain)
            found[key][base.name] |= {"prompt_tokens": self._starts[key], "chain": chain}
        return found

    def pairs(self, record: Record, base: Record | None) -> bool:
        return base is not None and record.get("chain_sha256") == base.get("chain_sha256")

    def _know(self, base: CacheFactory, key: str) -> None:
        """Find the chain of an item: as the 16-bit cache's results have it, or a new one, written together with those
        of the next items of this process that lack theirs.
        """
        if key in self.kept:
            self._windows[key], self._starts[key] = (
                torch.tensor(self.kept[key]["chain"]),
                self.kept[key]["prompt_tokens"],
            )
        if key in self._windows:
            return
        keys = self.own_keys()
        new = [k for k in keys[keys.index(key) :] if k not in self._windows and k not in self.kept][: self.batch]
        starts, chains = self._written(new, base)
        for one, start, chain in zip(new, starts, chains, strict=True):
            self._windows[one], self._starts[one] = torch.tensor(chain), len(start)

    def _written(self, keys: list[str], base: CacheFactory) -> tuple[Sequence[list[int]], list[list[int]]]:
        """Return ids of the prompts, and the chains. 16-bit pages write them, several times as fast as the stock cache,
        which copies all it holds at each token; on a GPU in a CUDA graph. The stock cache writes if the model cannot
        use pages, or a graph cannot capture it.
        """
        model, end = self.context.model, self.context.tokenizer.eos_token_id

        def written(f: CacheFactory, captured: bool) -> tuple[Sequence[list[int]], list[list[int]]]:
            draws, turns, starts = zip(*map(self._begun, keys), strict=True)
            return starts, write(model, f, starts, turns, self._length, end, draws, captured)

        try:
            return written(factory(model, "raw"), model.device.type == "cuda")
        except UnsupportedError:
            return written(base, False)

    def _begun(self, key: str) -> tuple[random.Random, Iterator[list[int]], list[int]]:
        """Return the generator that a chain is drawn from, the prompts after its first, and the ids of the first
        prompt.
        """
        rng = random.Random(f"{self.context.options.seed}:{key}")
        turns = self._turns(key, rng)
        return rng, turns, [*bos_of(self.context.tokenizer), *next(turns)]

    def _turns(self, key: str, rng: random.Random) -> Iterator[list[int]]:
        """Yield ids of one prompt after another, as the model's chat template puts them."""
        tokenizer, prompts = self.context.tokenizer, self._prompts.get(key.split("@")[0])
        while True:
            asked = plan(rng) if prompts is None else rng.choice(prompts)
            text = f"\n\nQuestion: {asked}\nAnswer:"
            if tokenizer.chat_template is not None:
                text = write_chat(tokenizer, [{"role": "user", "content": asked}], add_generation_prompt=True)
                text = text.removeprefix(tokenizer.bos_token or "") if bos_of(tokenizer) else text
            yield list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def prompts_of(path: Path, field: str) -> list[str]:
    """Return the prompts of JSON lines.

    Raises:
        SpecError: a line without the field, or with no text in it.
    """
    found = []
    for number, row in enumerate(read_lines(path), 1):
        if not isinstance(prompt := row.get(field), str) or not prompt.strip():
            raise SpecError(
                f"{path}: object {number} has no text as its {field!r}, with which a chain begins; give the benchmark's"
                " own file"
            )
        found.append(prompt)
    return found


def chain_sha256(chain: list[int]) -> str:
    """Return a name of a chain by its tokens: 16 hexadecimal digits."""
    return hashlib.sha256(torch.tensor(chain, dtype=torch.int32).numpy().tobytes()).hexdigest()[:16]


def plan(rng: random.Random) -> str:
    """Return a problem of planning: deliveries with places, loads and times."""
    places, goods = rng.sample(PLACES, 5), rng.sample(GOODS, 5)
    orders = " ".join(
        f"{place.capitalize()} wants {rng.randrange(2, 30)} boxes of {good} before"
        f" {rng.randrange(9, 18)}:{rng.choice(('00', '15', '30', '45'))}."
        for place, good in zip(places, goods, strict=True)
    )
    return (
        f"One van carries {rng.randrange(20, 40)} boxes at a time and needs {rng.randrange(10, 30)} minutes for each"
        f" way. It starts at 8:00. {orders} Plan the deliveries step by step: for each trip say what is loaded, where"
        " the van goes, when it arrives, and what remains. Check the plan at the end."
    )


@torch.no_grad()
def write(
    model: Any,
    f: CacheFactory,
    starts: Sequence[list[int]],
    turns: Sequence[Iterator[list[int]]],
    length: int,
    end: int | None,
    draws: Sequence[random.Random],
    captured: bool = False,
) -> list[list[int]]:
    """Return sampled chains of `length` tokens each, prompts included.

    Prompts are fed token by token as well: so all chains are as long, and none is padded.

    Args:
        starts: ids of each chain's prompt.
        turns: where a chain is ended by the model, its next prompt continues.
        end: id by which the model ends a text.
        draws: one random number a token, of each chain.
        captured: tokens are decoded in a CUDA graph; `f` makes a KVCache.

    Raises:
        UnsupportedError: `captured`, and a graph cannot capture the model (`graphed`).
    """
    chains, queues = [list(s[:1]) for s in starts], [list(s[1:]) for s in starts]
    cache = f.make(len(starts), length)
    with graphed(model, cache) if captured else nullcontext():
        rows = Rows(model, cache, [torch.tensor(c) for c in chains], 1)
        logits = rows.logits
        for n in range(1, length):
            waiting = [i for i, queue in enumerate(queues) if not queue]
            for i, token in zip(
                waiting, sampled(logits[waiting], [draws[i] for i in waiting]) if waiting else [], strict=True
            ):
                queues[i] += [token, *(next(turns[i]) if token == end else ())]
            for chain, queue in zip(chains, queues, strict=True):
                chain.append(queue.pop(0))
            if n + 1 < length:
                logits = rows.feed(torch.tensor([chain[-1:] for chain in chains]))[:, -1]
    return chains
