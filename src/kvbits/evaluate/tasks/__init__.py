"""The tasks of `kvbits eval`, one module per family.

A task is a list of items; an item runs several caches side by side and gives each a record.

`load(name)` imports a task when it is wanted. To add one: a subclass of `Task`, a line in `TASKS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import SpecError, unknown
from ...geometry import max_context
from ..caches import CacheFactory
from ..texts import Text

Record = dict[str, Any]

TASKS: dict[str, str] = {
    "fidelity": "text:FidelityTask",
    "decode": "text:DecodeTask",
    "greedy": "greedy:GreedyTask",
    "follow": "greedy:FollowTask",
    "replay": "replay:ReplayTask",
    "attention": "attention:AttentionTask",
    "entities": "retrieval:EntitiesTask",
    "copying": "recall:CopyingTask",
    "tracking": "tracking:TrackingTask",
    "ruler": "ruler:RulerTask",
    "humaneval": "generation:HumanEvalTask",
    "gsm8k": "questions:Gsm8kTask",
    "mmlu": "questions:MmluTask",
}
"""Task name -> module:class."""

DATA = ("humaneval", "gsm8k", "gsm8k_train", "mmlu", "mmlu_dev")
"""Files that benchmarks read."""

ALIASES = {"ppl": "fidelity", "perplexity": "fidelity", "kl": "fidelity"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of an evaluation; the command line's options of the same names.

    Attributes:
        windows, length: windows of each text, spread over it, and their tokens (fidelity, attention); chains and their
            tokens (replay).
        chunk: tokens per forward pass; older history is read as stored. None for the task's usual number
            (`Task.usual_chunk`).
        context, new_tokens: tokens before decoding starts and tokens decoded one by one (decode, greedy; follow: in
            chunks); new_tokens: copied (copying).
        contexts, depths: prompt lengths in tokens (copying: how far back), and which of the people told of is asked
            for (0 the first, 1 the last).
        repeats: prompts per length and depth, or kind.
        limit: problems of a benchmark (humaneval, gsm8k, mmlu), drawn by `seed`; a larger limit adds to a smaller
            one's. None for all.
        shots: worked examples before each question; None for the benchmark's usual number.
        batch_size: prompts or windows that go through a cache together (attention, decode: always one); figures depend
            on it by rounding alone, but for speeds, which are of single windows only. None for the task's usual number
            (`Task.usual_batch`).
        draws: answers of a benchmark that is written (gsm8k, humaneval), sampled by `seed` and alike for all caches; 0
            for one that is greedy.
        data: benchmark name -> its local file.
        seed: draws prompts and samples.
    """

    windows: int = 16
    length: int = 1024
    chunk: int | None = None
    context: int = 512
    new_tokens: int = 64
    contexts: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    repeats: int = 1
    limit: int | None = None
    shots: int | None = None
    batch_size: int | None = None
    draws: int = 0
    data: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("windows", "length", "chunk", "context", "new_tokens", "repeats", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SpecError(f"{name}={value} must be at least 1")
        if self.draws < 0:
            raise SpecError(f"draws={self.draws} is negative; 0 writes one greedy answer")
        if self.limit is not None and self.limit < 1:
            raise SpecError(f"limit={self.limit} must be at least 1; leave it out for all problems")
        if bad_contexts := [n for n in self.contexts if n < 1]:
            raise SpecError(f"contexts: a prompt of {bad_contexts[0]} tokens is none; at least 1 is needed")
        if unknown := [name for name in self.data if name not in DATA]:
            raise SpecError(f"data {unknown[0]!r} belongs to no benchmark; known: {', '.join(DATA)}")
        if bad := [d for d in self.depths if not 0 <= d <= 1]:
            raise SpecError(f"depth {bad[0]} is outside 0 (start) to 1 (end)")


@dataclass(frozen=True)
class Context:
    """What a task works on.

    Attributes:
        model: None while a task only looks at options, texts and data, before a model is loaded.
        config: the model's configuration, where there is no model yet.
    """

    model: Any
    tokenizer: Any
    texts: tuple[Text, ...]
    options: Options
    config: Any = None

    @property
    def max_context(self) -> int | None:
        """Tokens the model was made for, where its configuration says."""
        config = self.config if self.model is None else self.model.config
        return None if config is None else max_context(config)


class Task:
    """One kind of measurement.

    Attributes:
        name: the folder results go to.
        relative: every record compares with the base cache on the same item, so the base runs along.
        batched: items of equal size run together, up to `batch` of them.
        usual_batch: so many, where the options name no number.
        usual_chunk: tokens per forward pass where the options name none.
        scores_texts: it measures on the texts themselves: nothing may be calibrated on them.
        kept: the base cache's records of items that are there already.

    A subclass defines `run`, or, if it is batched, `answers` or `run_batch`.
    """

    name: ClassVar[str]
    relative: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    usual_batch: ClassVar[int] = 8
    usual_chunk: ClassVar[int] = 128
    scores_texts: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self.context = context
        self.kept: dict[str, Record] = {}

    @property
    def chunk(self) -> int:
        """Tokens per forward pass."""
        given = self.context.options.chunk
        return self.usual_chunk if given is None else given

    @property
    def batch(self) -> int:
        """Items that go through a cache together."""
        given = self.context.options.batch_size
        return self.usual_batch if given is None else given

    @property
    def settings(self) -> dict[str, Any]:
        """What every figure depends on, besides the item's key."""
        raise NotImplementedError

    def item_keys(self) -> list[str]:
        """The items, in order."""
        raise NotImplementedError

    def size(self, key: str) -> int:
        """How much progress one cache makes with an item."""
        return 1

    def run(self, key: str, factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, Record]:
        """Each cache's record of an item. With `relative` the first factory is the base."""
        return self.run_batch([key], factories, advance)[key]

    def run_batch(
        self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]
    ) -> dict[str, dict[str, Record]]:
        """`run` of several items."""
        if not self.batched:
            return {key: self.run(key, factories, advance) for key in keys}
        found: dict[str, dict[str, Record]] = {key: {} for key in keys}
        for name, f in factories.items():
            for key, record in zip(keys, self.answers(f, keys), strict=True):
                found[key][name] = record
            advance(sum(map(self.size, keys)))
        return found

    def pairs(self, record: Record, base: Record | None) -> bool:
        """Whether a cache's record of an item and the base cache's, None where it has none, are of the same; one that
        is not is measured anew.
        """
        return True

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        """One cache's records of several items, which run together."""
        raise NotImplementedError

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        """Figures of one cache over its items; `base` holds the base cache's records of the same items (empty if it did
        not run).
        """
        raise NotImplementedError


def names_of(wanted: list[str]) -> list[str]:
    """Task names with aliases resolved, each once.

    Raises:
        SpecError: an unknown task.
    """
    for name in wanted:
        if ALIASES.get(name, name) not in TASKS:
            raise SpecError(unknown("task", name, TASKS, " (ppl and kl are part of fidelity)"))
    return list(dict.fromkeys(ALIASES.get(n, n) for n in wanted))


def scored_texts(tasks: Sequence[str], texts: tuple[Text, ...]) -> tuple[Text, ...]:
    """`texts`, where one of these tasks measures on them; others take them as filler at most."""
    return texts if any(load(name).scores_texts for name in tasks) else ()


def load(name: str) -> type[Task]:
    """The class of a task."""
    module, cls = TASKS[name].split(":")
    found: type[Task] = getattr(importlib.import_module(f".{module}", __name__), cls)
    return found
