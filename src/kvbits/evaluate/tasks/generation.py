"""HumanEval pass@1: completions through the cache, greedy or sampled, run against the benchmark's tests in a
locked-down process.

A record's `passed` is the verdict; `reason` says why not, `isolation` what held the program (see `sandbox`).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...errors import SpecError
from ...files import home
from ..caches import CacheFactory
from ..paired import paired_records
from ..rows import TEMPERATURE, generate
from ..texts import bos_of
from . import Context, Record, Task
from .sandbox import run_program

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\nassert ", "\n```")
MAX_NEW_TOKENS = 256
STOP_TOKENS = 16
"""Newest tokens looked at for a stop: more than any of them is long."""


def data_file(context: Context, name: str, what: str) -> Path:
    """The file given with --data NAME=FILE.

    Raises:
        SpecError: none given, or not there.
    """
    if name not in context.options.data:
        raise SpecError(f"task {name!r} needs its problems: give --data {name}={what}")
    path = home(context.options.data[name], f"data of {name}:")
    if not path.is_file():
        raise SpecError(f"--data {name}={path}: no such file")
    return path


def json_lines(path: Path) -> list[Any]:
    """Values of a JSON lines file. Only newlines end a line: MMLU has U+2028 inside its strings.

    Raises:
        ValueError: a line that is no JSON, or bytes that are no UTF-8.
    """
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def drawn(items: list[Any], seed: int) -> list[Any]:
    """All items in an order drawn by `seed`: the first few are a sample, and more of them hold it."""
    return random.Random(seed).sample(items, len(items))


def asked(problems: list[str], draws: int) -> list[str]:
    """Keys of all answers to problems: a problem's own where answers are greedy, PROBLEM#1, PROBLEM#2, .. where `draws`
    of them are sampled.
    """
    return [f"{p}#{i}" for i in range(1, draws + 1) for p in problems] if draws else list(problems)


def sampling(task: Task) -> str | dict[str, float]:
    """How answers are written, for a task's settings."""
    o = task.context.options
    return {"temperature": TEMPERATURE, "seed": o.seed} if o.draws else "greedy"


def counted(keys: Iterable[str]) -> dict[str, int]:
    """How many problems keys of `asked` are of, and how many answers."""
    found = list(keys)
    return {"problems": len({key.split("#")[0] for key in found}), "answers": len(found)}


def completed(
    task: Task, f: CacheFactory, keys: list[str], prompts: list[torch.Tensor], stops: tuple[str, ...]
) -> list[tuple[list[int], str]]:
    """The tokens that answer each key of `asked`, up to a stop, and their text before it."""
    tokenizer, o = task.context.tokenizer, task.context.options

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def ends(tokens: list[int]) -> bool:
        return tokens[-1] == tokenizer.eos_token_id or any(s in text(tokens[-STOP_TOKENS:]) for s in stops)

    draws = [random.Random(f"{o.seed}:{key}") for key in keys] if o.draws else None
    written = generate(task.context.model, f, prompts, MAX_NEW_TOKENS, task.chunk, ends, draws)
    whole = map(text, written)
    return [
        (tokens, one[: min((one.index(s) for s in stops if s in one), default=len(one))])
        for tokens, one in zip(written, whole, strict=True)
    ]


class HumanEvalTask(Task):
    """HumanEval's JSON lines: task_id, prompt, entry_point, test."""

    name: ClassVar[str] = "humaneval"
    batched: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        path = data_file(context, "humaneval", "HumanEval.jsonl")
        try:
            self._problems = {
                str(r["task_id"]): (str(r["prompt"]), f"{r['test']}\ncheck({r['entry_point']})\n")
                for r in json_lines(path)
            }
        except (KeyError, TypeError, ValueError) as e:
            raise SpecError(f"--data humaneval={path} is not HumanEval's JSON lines: {e!r}") from e

    @property
    def settings(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "max_new_tokens": MAX_NEW_TOKENS, "stops": list(STOPS), "sampling": sampling(self)}

    def item_keys(self) -> list[str]:
        o = self.context.options
        return asked(drawn(list(self._problems), o.seed)[: o.limit], o.draws)

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        tokenizer = self.context.tokenizer
        starts = [self._problem(key)[0].rstrip() for key in keys]
        prompts = [
            torch.tensor([*bos_of(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]])
            for text in starts
        ]
        written = completed(self, f, keys, prompts, STOPS)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            records = list(pool.map(self._judge, keys, starts, [text for _, text in written]))
        return [record | {"tokens": len(tokens)} for record, (tokens, _) in zip(records, written, strict=True)]

    def _problem(self, key: str) -> tuple[str, str]:
        return self._problems[key.split("#")[0]]

    def _judge(self, key: str, start: str, completion: str) -> Record:
        outcome = run_program(start + completion + "\n\n" + self._problem(key)[1])
        return {
            "passed": outcome.passed,
            "reason": outcome.reason,
            "completion": completion,
            "isolation": list(outcome.isolation),
        }

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        passed = sum(r["passed"] for r in records.values())
        same = [records[k]["completion"] == base[k]["completion"] for k in records if k in base]
        return {
            **counted(records),
            "accuracy": passed / len(records),
            "passed": passed,
            "same_completion": sum(same) / len(same) if same else None,
            **paired_records(records, base, "passed"),
        }
