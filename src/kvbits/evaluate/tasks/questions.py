"""MMLU by likelihood, GSM8K by generation, on local files, prompts in batches; scored as lm-eval scores them.

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
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...errors import KvbitsError, SpecError
from ..caches import CacheFactory
from ..paired import paired_records
from ..rows import score
from ..texts import bos_of
from . import Context, Record, Task
from .generation import MAX_NEW_TOKENS, asked, completed, counted, data_file, drawn, json_lines, sampling

LETTERS = "ABCD"
NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")
STOPS = ("Question:", "\n\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON lines file.

    Raises:
        SpecError: something else.
    """
    try:
        rows = json_lines(path)
    except ValueError as e:
        raise SpecError(f"{path} is not JSON lines: {e}") from e
    if not rows or not all(isinstance(r, dict) for r in rows):
        raise SpecError(f"{path} holds no JSON objects, one a line")
    return rows


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

    def _problems(self) -> list[dict[str, Any]]:
        """id, prompt, and choices and answer (index), or target."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "shots": self.shots, "seed": self.context.options.seed, "prompt": 1}

    def item_keys(self) -> list[str]:
        return list(self.problems)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.context.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        """By the likelihood of each choice after the prompt and a blank; also divided by the choice's characters."""
        start = bos_of(self.context.tokenizer)
        prompts, continuations = [], []
        problems = [self.problems[key] for key in keys]
        for p in problems:
            lead = self.encode(p["prompt"])
            whole = [self.encode(f"{p['prompt']} {c}") for c in p["choices"]]
            prompts.append(torch.tensor([*start, *lead]))
            continuations.append([torch.tensor(ids[len(lead) :]) for ids in whole])
        found = []
        for p, scores in zip(problems, score(self.context.model, f, prompts, continuations, self.chunk), strict=True):
            plain = [nats for nats, _ in scores]
            each = [nats / len(c) for nats, c in zip(plain, p["choices"], strict=True)]
            found.append(
                {
                    "right": int(_largest(plain) == p["answer"]),
                    "right_norm": int(_largest(each) == p["answer"]),
                    "chosen": _largest(plain),
                }
            )
        return found

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        right = [r["right"] for r in records.values()]
        accuracy = sum(right) / len(right)
        found: dict[str, Any] = {
            **counted(records),
            "accuracy": accuracy,
            "accuracy_se": (accuracy * (1 - accuracy) / len(right)) ** 0.5,
        }
        if all("right_norm" in r for r in records.values()):
            found["accuracy_norm"] = sum(r["right_norm"] for r in records.values()) / len(right)
        shared = [k for k in records if k in base]
        if len(shared) == len(records):
            found["accuracy_base"] = sum(base[k]["right"] for k in shared) / len(shared)
            found["same_answer"] = sum(records[k]["chosen"] == base[k]["chosen"] for k in shared) / len(shared)
            found |= paired_records(records, base, "right")
        return found


def _largest(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


class MmluTask(QuestionsTask):
    """Letters by likelihood after 5 examples of the subject."""

    name: ClassVar[str] = "mmlu"
    SHOTS: ClassVar[int] = 5

    def _problems(self) -> list[dict[str, Any]]:
        rows = read_lines(data_file(self.context, "mmlu", "mmlu_test.jsonl"))
        shown: dict[str, list[str]] = {}
        if self.shots:
            for r in read_lines(data_file(self.context, "mmlu_dev", "mmlu_dev.jsonl")):
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
    """Rows with their groups taking turns, so that the first few cover all of them."""
    groups: dict[str, list[Any]] = {}
    for r in rows:
        groups.setdefault(group(r), []).append(r)
    found = []
    for i in range(max(map(len, groups.values()))):
        found += [g[i] for g in groups.values() if i < len(g)]
    return found


class Gsm8kTask(QuestionsTask):
    """The number after #### in what the model writes."""

    name: ClassVar[str] = "gsm8k"
    SHOTS: ClassVar[int] = 5

    def _problems(self) -> list[dict[str, Any]]:
        rows = read_lines(data_file(self.context, "gsm8k", "test.jsonl"))
        train = read_lines(data_file(self.context, "gsm8k_train", "train.jsonl"))[: self.shots] if self.shots else []
        lead = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in train)
        return [
            {
                "id": i,
                "prompt": f"{lead}Question: {r['question']}\nAnswer:",
                "target": r["answer"].split("####")[-1].strip(),
            }
            for i, r in drawn(list(enumerate(rows)), self.context.options.seed)
        ]

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"max_new_tokens": MAX_NEW_TOKENS, "stops": list(STOPS), "sampling": sampling(self)}

    def item_keys(self) -> list[str]:
        return asked(super().item_keys(), self.context.options.draws)

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        problems = [self.problems[key.split("#")[0]] for key in keys]
        prompts = [torch.tensor([*bos_of(self.context.tokenizer), *self.encode(p["prompt"])]) for p in problems]
        found = []
        for p, (tokens, answer) in zip(problems, completed(self, f, keys, prompts, STOPS), strict=True):
            number = NUMBER.search(answer)
            chosen = number[1].replace(",", "") if number else None
            found.append(
                {"right": int(chosen == p["target"].replace(",", "")), "chosen": chosen, "tokens": len(tokens)}
            )
        return found
