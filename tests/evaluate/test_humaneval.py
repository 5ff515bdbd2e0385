"""HumanEval: completions end where the function ends, and are judged by running them."""

from __future__ import annotations

import json

import pytest
import tiny
from messages import raises

from kvbits.errors import SpecError
from kvbits.evaluate.caches import base_factory, factory
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load, questions
from kvbits.evaluate.texts import Text
from kvbits.model_ref import ModelRef

PROBLEM = {
    "task_id": "T/0",
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n",
}


@pytest.fixture
def task(tmp_path):
    (tmp_path / "h.jsonl").write_text(json.dumps(PROBLEM) + "\n" + json.dumps(PROBLEM | {"task_id": "T/1"}) + "\n")
    return load("humaneval")(
        Context(
            ModelRef.of(tiny.model()),
            tiny.tokenizer(),
            (Text("t", "x"),),
            Options(data={"humaneval": str(tmp_path / "h.jsonl")}, limit=1),
        )
    )


@pytest.mark.parametrize(
    ("completion", "passed"),
    [
        ("\n    return a + b\n\ndef other():\n    broken(", True),
        ("\n    return a - b\n", False),
        ("\n    import os\n    os._exit(0)\n", False),
    ],
)
def test_a_completion_is_cut_at_its_stop_and_run(task, monkeypatch, completion, passed):
    tokens = task.context.tokenizer(completion)["input_ids"]
    monkeypatch.setattr(
        task.context.tokenizer.__class__, "decode", lambda self, ids, **k: "".join(self.convert_ids_to_tokens(ids))
    )
    monkeypatch.setattr(questions, "generate", lambda *a: [tokens])
    (key,) = task.item_keys()
    record = task.run(key, {"32-bit": base_factory(task.context.model)}, lambda n: None)["32-bit"]
    assert record["right"] == passed and "other" not in record["chosen"] and "limits" in record["isolation"]
    summary, alone = (
        task.summary({key: record}, {key: record}),
        {"problems": 1, "answers": 1, "accuracy": float(passed), "same_answer": 1.0},
    )
    assert alone.items() <= summary.items() and (summary["difference"], summary["lost"], summary["gained"]) == (0, 0, 0)


def test_a_real_run_through_the_cache_ends(task, monkeypatch):
    monkeypatch.setattr(questions, "MAX_NEW_TOKENS", 6)
    (key,) = task.item_keys()
    records = task.run(
        key, {"32-bit": base_factory(task.context.model), "raw": factory(task.context.model, "raw")}, lambda n: None
    )
    assert records["raw"]["chosen"] == records["32-bit"]["chosen"] and not records["raw"]["right"]


def test_missing_or_foreign_files_are_named(tmp_path):
    def make(data):
        return load("humaneval")(Context(ModelRef(""), None, (), Options(data=data)))

    with raises(SpecError, "--data humaneval=HumanEval.jsonl"):
        make({})
    with raises(SpecError, f"--data humaneval={tmp_path / 'none'}"):
        make({"humaneval": str(tmp_path / "none")})
    (tmp_path / "x").write_text('{"a": 1}')
    with raises(SpecError, f"--data humaneval={tmp_path / 'x'}", "task_id"):
        make({"humaneval": str(tmp_path / "x")})
