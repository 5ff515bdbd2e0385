"""HumanEval pass@1: completions through the cache, greedy or sampled, run against the benchmark's tests in a
locked-down process.

A record's `right` is the verdict; `reason` says why not, `isolation` what held the program (see `sandbox`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from . import Record
from .questions import WrittenTask, drawn
from .sandbox import run_program


class HumanEvalTask(WrittenTask):
    """HumanEval's JSON lines: task_id, prompt, entry_point, test."""

    name: ClassVar[str] = "humaneval"
    STOPS: ClassVar[tuple[str, ...]] = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\nassert ", "\n```")

    @property
    def settings(self) -> dict[str, Any]:
        """Problems have names and no examples, so a greedy answer depends neither on the seed nor on shots."""
        return {name: value for name, value in super().settings.items() if name not in ("seed", "shots")}

    def _problems(self) -> list[dict[str, Any]]:
        found = [
            {
                "id": str(r["task_id"]),
                "prompt": str(r["prompt"]).rstrip(),
                "test": f"{r['test']}\ncheck({r['entry_point']})\n",
            }
            for r in self.lines("humaneval", "HumanEval.jsonl")
        ]
        return drawn(found, self.context.options.seed)

    def judged(self, problems: list[dict[str, Any]], texts: list[str]) -> list[Record]:
        programs = [f"{p['prompt']}{text}\n\n{p['test']}" for p, text in zip(problems, texts, strict=True)]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = list(pool.map(run_program, programs))
        return [
            {"right": int(o.passed), "chosen": text, "reason": o.reason, "isolation": list(o.isolation)}
            for o, text in zip(found, texts, strict=True)
        ]
