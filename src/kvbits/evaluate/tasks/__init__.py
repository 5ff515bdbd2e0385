"""The tasks of `kvbits eval`, one module per family.

A task is a list of items; an item runs several caches side by side and gives each a record.

`load(name)` imports a task when it is wanted. To add one: a subclass of `Task`, a line in `TASKS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import SpecError, unknown
from ...model_ref import ModelRef
from ..caches import CacheFactory
from ..settings import Options
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
    "tools": "tools:ToolsTask",
    "humaneval": "humaneval:HumanEvalTask",
    "gsm8k": "questions:Gsm8kTask",
    "mmlu": "questions:MmluTask",
}
"""Task name -> module:class."""

ALIASES = {"ppl": "fidelity", "perplexity": "fidelity", "kl": "fidelity"}


@dataclass(frozen=True)
class Context:
    """Inputs that a task works on.

    Attributes:
        ref: the model; loaded, unless a task only looks at options, texts and data.
    """

    ref: ModelRef
    tokenizer: Any
    texts: tuple[Text, ...]
    options: Options

    @property
    def model(self) -> Any:
        """The loaded model."""
        return self.ref.loaded

    @property
    def max_context(self) -> int | None:
        """Tokens the model was made for, where its configuration says."""
        return self.ref.max_context


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
        """Settings that every figure depends on, besides the item's key."""
        raise NotImplementedError

    def item_keys(self) -> list[str]:
        """Return the items, in order."""
        raise NotImplementedError

    def own_keys(self) -> list[str]:
        """Return the items in this process's share, in order."""
        part, parts = self.context.options.share
        return self.item_keys()[part - 1 :: parts]

    def size(self, key: str) -> int:
        """Return how much progress one cache makes with an item."""
        return 1

    def run(self, key: str, factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, Record]:
        """Return each cache's record of an item. With `relative` the first factory is the base."""
        return self.run_batch([key], factories, advance)[key]

    def run_batch(
        self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]
    ) -> dict[str, dict[str, Record]]:
        """Return `run` of several items."""
        if not self.batched:
            return {key: self.run(key, factories, advance) for key in keys}
        found: dict[str, dict[str, Record]] = {key: {} for key in keys}
        for name, f in factories.items():
            for key, record in zip(keys, self.answers(f, keys), strict=True):
                found[key][name] = record
            advance(sum(map(self.size, keys)))
        return found

    def pairs(self, record: Record, base: Record | None) -> bool:
        """Return whether a cache's record of an item and the base cache's record come from the same input. `base` is
        None where the base cache has no record. A record that does not pair is measured anew.
        """
        return True

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        """Return one cache's records of several items, which run together."""
        raise NotImplementedError

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        """Return figures of one cache over its items; `base` holds the base cache's records of the same items (empty if
        it did not run).
        """
        raise NotImplementedError


def names_of(wanted: list[str]) -> list[str]:
    """Return task names with aliases resolved, each once.

    Raises:
        SpecError: an unknown task.
    """
    for name in wanted:
        if ALIASES.get(name, name) not in TASKS:
            raise SpecError(unknown("task", name, TASKS, " (ppl and kl are part of fidelity)"))
    return list(dict.fromkeys(ALIASES.get(n, n) for n in wanted))


def scored_texts(tasks: Sequence[str], texts: tuple[Text, ...]) -> tuple[Text, ...]:
    """Return `texts`, where one of these tasks measures on them; others take them as filler at most."""
    return texts if any(load(name).scores_texts for name in tasks) else ()


def load(name: str) -> type[Task]:
    """Return the class of a task."""
    module, cls = TASKS[name].split(":")
    found: type[Task] = getattr(importlib.import_module(f".{module}", __name__), cls)
    return found
