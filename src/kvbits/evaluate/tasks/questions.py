"""MMLU by likelihood, GSM8K and others by what is written, on local files, prompts in batches; scored as lm-eval scores
them.

    mmlu    --data mmlu=FILE.jsonl {subject, question, choices[4], answer}; shots from mmlu_dev=FILE.jsonl, of the same
            subject (5)
    gsm8k   --data gsm8k=FILE.jsonl {question, answer}; the number after #### in the answer, greedy or sampled; shots
            from gsm8k_train=FILE.jsonl (5)

Shots are what fills the cache: a question alone is shorter than what most schemes keep raw. A record says whether the
question was answered right. For other benchmarks, the cache plugs into lm-eval itself (`evaluate.lm_eval`), which a
test holds equal to the scores here.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...errors import KvbitsError, SpecError
from ...files import home
from ..caches import CacheFactory
from ..paired import clustered, paired
from ..rows import TEMPERATURE, generate, score
from ..texts import bos_of
from . import Context, Record, Task

LETTERS = "ABCD"
NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")
MAX_NEW_TOKENS = 256
STOP_TOKENS = 16
"""Newest tokens looked at for a stop: more than any of them is long."""


def data_file(context: Context, name: str, what: str) -> Path:
    """Return the file given with --data NAME=FILE.

    Raises:
        SpecError: none given, or not there.
    """
    if name not in context.options.data:
        raise SpecError(f"task {name!r} needs its problems: give --data {name}={what}")
    path = home(context.options.data[name], f"data of {name}:")
    if not path.is_file():
        raise SpecError(f"--data {name}={path}: no such file; give --data {name}={what}")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return objects of a JSON lines file. Only newlines end a line: MMLU has U+2028 inside its strings.

    Raises:
        SpecError: something else.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except ValueError as e:
        raise SpecError(f"{path} is not JSON lines: {e}") from e
    if not rows or not all(isinstance(r, dict) for r in rows):
        raise SpecError(f"{path} holds no JSON objects, one a line")
    return rows


def drawn(items: list[Any], seed: int) -> list[Any]:
    """Return all items in an order drawn by `seed`: the first few are a sample, and more of them hold it."""
    return random.Random(seed).sample(items, len(items))


class QuestionsTask(Task):
    """Questions in an order drawn by the seed. Subclasses put them."""

    batched: ClassVar[bool] = True
    SHOTS: ClassVar[int] = 0

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.encode = functools.lru_cache(1024)(self._encode)  # every cache asks the same
        try:
            found = self._problems()
        except KvbitsError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            given = ", ".join(
                f"{name}={path}" for name, path in context.options.data.items() if name.startswith(self.name)
            )
            raise SpecError(f"--data {given}: not {self.name}'s own JSON lines: {e!r}") from e
        self.problems = {str(p["id"]): p for p in found[: context.options.limit]}

    @property
    def shots(self) -> int:
        return self.SHOTS if self.context.options.shots is None else self.context.options.shots

    def lines(self, name: str, what: str) -> list[dict[str, Any]]:
        """Return objects of the file given with --data NAME=FILE."""
        return read_lines(data_file(self.context, name, what))

    def _problems(self) -> list[dict[str, Any]]:
        """Return id, prompt, and choices and answer (index), or what an answer is judged by."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "shots": self.shots, "seed": self.context.options.seed, "prompt": 1}

    def item_keys(self) -> list[str]:
        return list(self.problems)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.context.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompt(self, problem: dict[str, Any]) -> torch.Tensor:
        """Return ids that a problem begins with."""
        return torch.tensor([*bos_of(self.context.tokenizer), *self.encode(problem["prompt"])])

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        """Return answers by the likelihood of each choice after the prompt and a blank."""
        problems = [self.problems[key] for key in keys]
        continuations = []
        for p in problems:
            lead = self.encode(p["prompt"])
            whole = [self.encode(f"{p['prompt']} {c}") for c in p["choices"]]
            continuations.append([torch.tensor(ids[len(lead) :]) for ids in whole])
        found, prompts = [], [self.prompt(p) for p in problems]
        for p, scores in zip(problems, score(self.context.model, f, prompts, continuations, self.chunk), strict=True):
            chosen = max(range(len(scores)), key=lambda i: scores[i][0])
            found.append({"right": int(chosen == p["answer"]), "chosen": chosen})
        return found

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        right = [r["right"] for r in records.values()]
        accuracy = sum(right) / len(right)
        by_problem = clustered({key: [r["right"]] for key, r in records.items()}, problem_of)
        found: dict[str, Any] = {
            "problems": len(by_problem),
            "answers": len(records),
            "accuracy": accuracy,
            "accuracy_se": sum(sum(one - accuracy for one in some) ** 2 for some in by_problem) ** 0.5 / len(right),
        }
        if all(k in base for k in records):
            found["accuracy_base"] = sum(base[k]["right"] for k in records) / len(right)
            found["same_answer"] = sum(records[k]["chosen"] == base[k]["chosen"] for k in records) / len(right)
            outcomes = {key: [(bool(r["right"]), bool(base[key]["right"]))] for key, r in records.items()}
            found |= paired(clustered(outcomes, problem_of))
        return found


def problem_of(key: str) -> str:
    """Return the key of a problem from that of one of its answers."""
    return key.split("#")[0]


class MmluTask(QuestionsTask):
    """Letters by likelihood after 5 examples of the subject."""

    name: ClassVar[str] = "mmlu"
    SHOTS: ClassVar[int] = 5

    def _problems(self) -> list[dict[str, Any]]:
        rows = self.lines("mmlu", "mmlu_test.jsonl")
        shown: dict[str, list[str]] = {}
        if self.shots:
            for r in self.lines("mmlu_dev", "mmlu_dev.jsonl"):
                shown.setdefault(r["subject"], []).append(f"{self._question(r)} {LETTERS[int(r['answer'])]}\n\n")
        found = []
        for i, r in _spread(drawn(list(enumerate(rows)), self.context.options.seed), lambda row: row[1]["subject"]):
            examples = shown.get(r["subject"], [])
            if len(examples) < self.shots:
                raise SpecError(
                    f"--data mmlu_dev has {len(examples)} examples of {r['subject']!r}, but {self.shots} shots need"
                    " more; lower --shots"
                )
            lead = f"Questions about {r['subject'].replace('_', ' ')} with their answers.\n\n"
            found.append(
                {
                    "id": i,
                    "prompt": lead + "".join(examples[: self.shots]) + self._question(r),
                    "choices": list(LETTERS),
                    "answer": int(r["answer"]),
                }
            )
        return found

    @staticmethod
    def _question(r: dict[str, Any]) -> str:
        choices = "".join(f"{letter}. {c}\n" for letter, c in zip(LETTERS, r["choices"], strict=True))
        return f"{str(r['question']).strip()}\n{choices}Answer:"


def _spread(rows: list[Any], group: Callable[[Any], str]) -> list[Any]:
    """Return rows with their groups taking turns, so that the first few cover all of them."""
    groups: dict[str, list[Any]] = {}
    for r in rows:
        groups.setdefault(group(r), []).append(r)
    found = []
    for i in range(max(map(len, groups.values()))):
        found += [g[i] for g in groups.values() if i < len(g)]
    return found


class WrittenTask(QuestionsTask):
    """Answers that are written, up to a stop: a greedy one, or as many as are drawn, PROBLEM#1, PROBLEM#2, .."""

    STOPS: ClassVar[tuple[str, ...]]

    @property
    def settings(self) -> dict[str, Any]:
        o = self.context.options
        how = {"temperature": TEMPERATURE, "seed": o.seed} if o.draws else "greedy"
        return super().settings | {"max_new_tokens": MAX_NEW_TOKENS, "stops": list(self.STOPS), "sampling": how}

    def item_keys(self) -> list[str]:
        keys, draws = super().item_keys(), self.context.options.draws
        return [f"{key}#{i}" for i in range(1, draws + 1) for key in keys] if draws else keys

    def judged(self, problems: list[dict[str, Any]], texts: list[str]) -> list[Record]:
        """Return records that say whether each text is `right`, and what was `chosen`."""
        raise NotImplementedError

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        tokenizer, o = self.context.tokenizer, self.context.options

        def text(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        def ends(tokens: list[int]) -> bool:
            return tokens[-1] == tokenizer.eos_token_id or any(s in text(tokens[-STOP_TOKENS:]) for s in self.STOPS)

        problems = [self.problems[problem_of(key)] for key in keys]
        draws = [random.Random(f"{o.seed}:{key}") for key in keys] if o.draws else None
        prompts = [self.prompt(p) for p in problems]
        written = generate(self.context.model, f, prompts, MAX_NEW_TOKENS, self.chunk, ends, draws)
        texts = [re.split("|".join(map(re.escape, self.STOPS)), text(tokens), maxsplit=1)[0] for tokens in written]
        found = self.judged(problems, texts)
        return [record | {"tokens": len(tokens)} for record, tokens in zip(found, written, strict=True)]


class Gsm8kTask(WrittenTask):
    """The number after #### in what the model writes."""

    name: ClassVar[str] = "gsm8k"
    SHOTS: ClassVar[int] = 5
    STOPS: ClassVar[tuple[str, ...]] = ("Question:", "\n\n")

    def _problems(self) -> list[dict[str, Any]]:
        rows = self.lines("gsm8k", "test.jsonl")
        train = self.lines("gsm8k_train", "train.jsonl")[: self.shots] if self.shots else []
        lead = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in train)
        return [
            {
                "id": i,
                "prompt": f"{lead}Question: {r['question']}\nAnswer:",
                "target": r["answer"].split("####")[-1].strip(),
            }
            for i, r in drawn(list(enumerate(rows)), self.context.options.seed)
        ]

    def judged(self, problems: list[dict[str, Any]], texts: list[str]) -> list[Record]:
        found = []
        for p, text in zip(problems, texts, strict=True):
            number = NUMBER.search(text)
            chosen = number[1].replace(",", "") if number else None
            found.append({"right": int(chosen == p["target"].replace(",", "")), "chosen": chosen})
        return found
