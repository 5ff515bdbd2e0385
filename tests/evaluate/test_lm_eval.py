"""Questions: put as the benchmarks put them, scored as lm-eval scores them; and lm-eval with the cache inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import tiny
import torch
from messages import raises

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install lm-eval)")
pytest.importorskip("datasets", reason="datasets is not installed (pip install datasets)")

from kvbits.errors import SpecError
from kvbits.evaluate.caches import base_factory, factory
from kvbits.evaluate.lm_eval import KvbitsLM
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load, questions
from kvbits.evaluate.texts import Text
from kvbits.model_ref import ModelRef

pytestmark = pytest.mark.filterwarnings("ignore")
MMLU = [
    {"subject": s, "question": f"{s} {i}\u2028?", "choices": ["w", "x", "y", "z"], "answer": i % 4}
    for s in ("one_thing", "other")
    for i in range(6)
]
GSM = [{"question": f"Add {i} and 1.", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(6)]


def task(name, tmp_path, **changes):
    files = {"mmlu": MMLU, "mmlu_dev": MMLU, "gsm8k": GSM, "gsm8k_train": GSM}
    for n, rows in files.items():
        (tmp_path / f"{n}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    data = {n: str(tmp_path / f"{n}.jsonl") for n in files}
    return load(name)(
        Context(ModelRef.of(tiny.model()), tiny.tokenizer(), (Text("t", "x"),), Options(data=data, chunk=24, **changes))
    )


def test_problems_are_put_as_the_benchmarks_put_them(tmp_path):
    mmlu = task("mmlu", tmp_path, shots=1)
    problems = list(mmlu.problems.values())
    subjects = [p["prompt"].split()[2] for p in problems]
    # they take turns
    assert len(problems) == 12 and all(set(subjects[i : i + 2]) == {"one", "other"} for i in range(0, 12, 2))
    assert problems[0]["prompt"].count("Answer:") == 2 and problems[0]["prompt"].endswith(
        "A. w\nB. x\nC. y\nD. z\nAnswer:"
    )
    gsm = task("gsm8k", tmp_path, shots=2)
    assert gsm.problems["3"]["target"] == "4" and gsm.problems["3"]["prompt"].count("####") == 2
    with raises(SpecError, "examples"):
        task("mmlu", tmp_path, shots=99)


def test_a_limit_draws_a_sample_that_a_larger_one_holds(tmp_path):
    few, more, other = (
        task("gsm8k", tmp_path, limit=n, shots=0, seed=s).item_keys() for n, s in ((2, 0), (5, 0), (5, 1))
    )
    assert few == more[:2] and more != other


def test_scores_are_lm_evals(tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    mmlu = task("mmlu", tmp_path, limit=8, shots=0)
    factories = {
        "32-bit": base_factory(mmlu.context.model),
        "raw": factory(mmlu.context.model, "raw"),
        "kivi2": factory(mmlu.context.model, "kivi2"),
    }
    records = mmlu.run_batch(mmlu.item_keys(), factories, lambda n: None)
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in mmlu.problems.values()))
    config = {
        "task": "plain",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "num_fewshot": 0,
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    mmlu.context.model.set_attn_implementation("sdpa")
    plain = HFLM(mmlu.context.model, tokenizer=mmlu.context.tokenizer, device="cpu")
    out = lm_eval.simple_evaluate(model=plain, tasks=[config], bootstrap_iters=0)
    want = {str(s["doc"]["id"]): int(s["acc"]) for s in out["samples"]["plain"]}
    for name in ("raw", "32-bit"):
        assert {k: r[name]["right"] for k, r in records.items()} == want
    summary = mmlu.summary({k: r["raw"] for k, r in records.items()}, {k: r["32-bit"] for k, r in records.items()})
    assert summary["problems"] == 8 and summary["same_answer"] == 1.0 and summary["accuracy"] == sum(want.values()) / 8


@pytest.mark.parametrize("name", ["mmlu", "gsm8k"])
def test_answers_do_not_depend_on_the_batch(tmp_path, name):
    t = task(name, tmp_path, shots=1, limit=5)
    factories = {"32-bit": base_factory(t.context.model), "int4": factory(t.context.model, "int4")}
    together = t.run_batch(t.item_keys(), factories, lambda n: None)
    assert together == {key: t.run(key, factories, lambda n: None) for key in t.item_keys()}


@pytest.mark.parametrize(
    ("written", "right"),
    [("It is 4.\n#### 4\n\nQuestion: #### 5", 1), ("#### 1,004", 0), ("4", 0), ("Question: #### 4", 0)],
)
def test_the_number_after_the_mark_is_the_answer(tmp_path, monkeypatch, written, right):
    gsm = task("gsm8k", tmp_path, shots=1)
    tokens = gsm.context.tokenizer(written)["input_ids"]
    monkeypatch.setattr(
        gsm.context.tokenizer.__class__, "decode", lambda self, ids, **k: "".join(self.convert_ids_to_tokens(ids))
    )
    monkeypatch.setattr(questions, "generate", lambda *a: [tokens])
    assert gsm.run("3", {"32-bit": base_factory(gsm.context.model)}, lambda n: None)["32-bit"]["right"] == right


def test_the_backend_takes_one_more_argument_and_refuses_padded_batches():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    lm = KvbitsLM(model, scheme="kivi4", tokenizer=tokenizer)
    made = []
    real = lm.factory.make
    object.__setattr__(lm.factory, "make", lambda *a: made.append(real(*a)) or made[-1])
    ids = torch.randint(3, 60, (1, 400))
    logits = lm._model_call(ids)
    assert logits.shape == (1, 400, model.config.vocab_size) and made[0].pages.seq_lens == [400]
    assert made[0].pages.bytes_by_kind()["codes"] > 0  # most tokens were read from closed pages
    exact = model(ids).logits
    assert 1e-6 < (logits - exact).abs().mean() < 0.3
    with raises(SpecError, "batch_size=4"):
        KvbitsLM(model, scheme="kivi4", tokenizer=tokenizer, batch_size=4)


def test_the_command_line_of_lm_eval_knows_the_model(tmp_path):
    """A real process, a real model folder, a task of one's own."""
    tiny.model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"q": f"word {i} " * 30, "choices": ["a", "b"], "gold": i % 2}) + "\n" for i in range(2))
    )
    (tmp_path / "t.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/t.jsonl}}}}\ntest_split:"
        ' test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice:'
        ' "{{choices}}"\ndoc_to_target: "{{gold}}"\nmetric_list: [{metric: acc}]\n'
    )
    command = [
        sys.executable,
        "-m",
        "kvbits.evaluate.lm_eval",
        "run",
        "--model",
        "kvbits",
        "--tasks",
        "mine",
        "--include_path",
        str(tmp_path),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [*command, "--model_args", f"pretrained={tmp_path}/model,scheme=kivi4"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert out.returncode == 0 and "|mine" in out.stdout, out.stderr
