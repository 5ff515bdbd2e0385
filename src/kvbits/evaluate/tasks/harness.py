"""MMLU and ARC by likelihood, GSM8K by generation: lm-eval's scoring on local files, the cache plugged into its Transformers backend.

    mmlu    0.. questions of --data mmlu=FILE.jsonl {subject, question, choices[4], answer}; shots from mmlu_dev=FILE.jsonl, of the same subject (5)
    arc     --data arc=FILE.jsonl, AI2's own format; the likelihood of each answer's text, also divided by its length (0 shots)
    gsm8k   --data gsm8k=FILE.jsonl {question, answer}; shots from gsm8k_train=FILE.jsonl (5)

Items are blocks of questions, so that a run goes on where it stopped. A record lists which questions were right.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ...errors import SpecError, UnsupportedError
from ..caches import CacheFactory
from . import Context, Record, Task
from .generation import data_file

BLOCK = 10
LETTERS = "ABCD"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON lines file.

    Raises:
        SpecError: something else.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as e:
        raise SpecError(f"{path} is not JSON lines: {e}") from e
    if not rows or not all(isinstance(r, dict) for r in rows):
        raise SpecError(f"{path} holds no JSON objects, one a line")
    return rows


class HarnessTask(Task):
    """Blocks of problems handed to lm-eval. Subclasses give problems and the task's config."""

    SHOTS: ClassVar[int] = 0
    METRIC: ClassVar[str] = "acc"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        try:
            import lm_eval  # noqa: F401
        except ImportError:
            raise UnsupportedError(f"task {self.name!r} is scored by lm-eval; run `pip install lm-eval`") from None
        self.problems = self._problems()[: context.options.limit]

    @property
    def shots(self) -> int:
        return self.SHOTS if self.context.options.shots is None else self.context.options.shots

    def _problems(self) -> list[dict[str, Any]]:
        """prompt, and choices and answer (index), or target."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """lm-eval's task configuration, without its data."""
        metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
        return {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": metrics}

    @property
    def settings(self) -> dict[str, Any]:
        import lm_eval

        return {"chunk": self.context.options.chunk, "shots": self.shots, "lm_eval": lm_eval.__version__}

    def item_keys(self) -> list[str]:
        return [f"{i}-{min(i + BLOCK, len(self.problems))}" for i in range(0, len(self.problems), BLOCK)]

    def size(self, key: str) -> int:
        first, last = map(int, key.split("-"))
        return last - first

    def run(self, key: str, factories: dict[str, CacheFactory], advance: Callable[[float], None]) -> dict[str, Record]:
        import lm_eval

        from ..harness import KvbitsLM

        first, last = map(int, key.split("-"))
        found: dict[str, Record] = {}
        with tempfile.TemporaryDirectory(prefix="kvbits-") as folder:
            path = Path(folder) / "problems.jsonl"
            path.write_text("".join(json.dumps(p) + "\n" for p in self.problems[first:last]), encoding="utf-8")
            config = self.config() | {
                "task": f"kvbits_{self.name}", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": folder},
                "test_split": "test", "doc_to_text": "{{prompt}}", "num_fewshot": 0,
            }  # fmt: skip
            for name, f in factories.items():
                lm = KvbitsLM(self.context.model, tokenizer=self.context.tokenizer, cache_factory=f, chunk=self.context.options.chunk)
                out = lm_eval.simple_evaluate(model=lm, tasks=[config], bootstrap_iters=0, log_samples=True, random_seed=self.context.options.seed)
                assert out is not None
                samples = sorted(out["samples"][config["task"]], key=lambda s: s["doc_id"])
                found[name] = {"right": [int(s[self.METRIC]) for s in samples]}
                if "acc_norm" in samples[0]:
                    found[name]["right_norm"] = [int(s["acc_norm"]) for s in samples]
                advance(last - first)
        return found

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        right = [x for r in records.values() for x in r["right"]]
        accuracy = sum(right) / len(right)
        found: dict[str, Any] = {"problems": len(right), "accuracy": accuracy, "accuracy_se": (accuracy * (1 - accuracy) / len(right)) ** 0.5}
        if all("right_norm" in r for r in records.values()):
            found["accuracy_norm"] = sum(x for r in records.values() for x in r["right_norm"]) / len(right)
        if all(k in base for k in records):
            pairs = [(x, y) for k, r in records.items() for x, y in zip(r["right"], base[k]["right"], strict=True)]
            found |= {"accuracy_base": sum(y for _, y in pairs) / len(pairs), "same_verdict": sum(x == y for x, y in pairs) / len(pairs)}
        return found


class MmluTask(HarnessTask):
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
        for i, r in enumerate(_spread(rows, "subject")):
            examples = shown.get(r["subject"], [])
            if len(examples) < self.shots:
                raise SpecError(f"--data mmlu_dev has {len(examples)} examples of {r['subject']!r}, but {self.shots} shots need more; lower --shots")
            lead = f"Questions about {r['subject'].replace('_', ' ')} with their answers.\n\n"
            found.append({"id": i, "prompt": lead + "".join(examples[: self.shots]) + self._question(r), "choices": list(LETTERS), "answer": int(r["answer"])})
        return found

    @staticmethod
    def _question(r: dict[str, Any]) -> str:
        choices = "".join(f"{letter}. {c}\n" for letter, c in zip(LETTERS, r["choices"], strict=True))
        return f"{str(r['question']).strip()}\n{choices}Answer:"


def _spread(rows: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Rows with the values of `field` taking turns, so that the first few cover all of them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        groups.setdefault(r[field], []).append(r)
    found = []
    for i in range(max(map(len, groups.values()))):
        found += [g[i] for g in groups.values() if i < len(g)]
    return found


class ArcTask(HarnessTask):
    """Answers' texts by likelihood."""

    name: ClassVar[str] = "arc"

    def _problems(self) -> list[dict[str, Any]]:
        if self.shots:
            raise SpecError(f"--shots {self.shots}: ARC is asked without examples here; use --shots 0")
        found = []
        for i, r in enumerate(read_lines(data_file(self.context, "arc", "ARC-Challenge-Test.jsonl"))):
            labels = [c["label"] for c in r["question"]["choices"]]
            texts = [c["text"] for c in r["question"]["choices"]]
            found.append({"id": i, "prompt": f"Question: {r['question']['stem']}\nAnswer:", "choices": texts, "answer": labels.index(r["answerKey"])})
        return found


class Gsm8kTask(HarnessTask):
    """The number after #### in a greedy answer."""

    name: ClassVar[str] = "gsm8k"
    SHOTS: ClassVar[int] = 5
    METRIC: ClassVar[str] = "exact_match"

    def _problems(self) -> list[dict[str, Any]]:
        rows = read_lines(data_file(self.context, "gsm8k", "test.jsonl"))
        train = read_lines(data_file(self.context, "gsm8k_train", "train.jsonl"))[: self.shots] if self.shots else []
        lead = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in train)
        return [{"id": i, "prompt": f"{lead}Question: {r['question']}\nAnswer:", "target": r["answer"].split("####")[-1].strip()} for i, r in enumerate(rows)]

    def config(self) -> dict[str, Any]:
        number = {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}
        generation = {"until": ["Question:", "\n\n"], "max_gen_toks": 256, "do_sample": False}
        return {
            "output_type": "generate_until", "doc_to_target": "{{target}}", "generation_kwargs": generation,
            "filter_list": [{"name": "strict", "filter": [number, {"function": "take_first"}]}],
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True, "regexes_to_ignore": [","]}],
        }  # fmt: skip
