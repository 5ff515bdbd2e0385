"""lm-eval with the cache inside: a lossless cache gives lm-eval's own scores, problems are put as the benchmarks put them."""

from __future__ import annotations

import json

import pytest
import tiny

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install lm-eval)")
pytest.importorskip("datasets", reason="datasets is not installed (pip install datasets)")

from kvbits.errors import SpecError
from kvbits.evaluate.caches import base_factory, factory
from kvbits.evaluate.harness import KvbitsLM
from kvbits.evaluate.tasks import Context, Options, load
from kvbits.evaluate.texts import Text

pytestmark = pytest.mark.filterwarnings("ignore")
ARC = [
    {"id": str(i), "question": {"stem": f"What is {i} and {i}?", "choices": [{"text": f"{i + j}", "label": "ABCD"[j]} for j in range(4)]}, "answerKey": "ABCD"[i % 4]}
    for i in range(12)
]
MMLU = [{"subject": s, "question": f"{s} {i}?", "choices": ["w", "x", "y", "z"], "answer": i % 4} for s in ("one_thing", "other") for i in range(6)]
GSM = [{"question": f"Add {i} and 1.", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(6)]


def task(name, tmp_path, **changes):
    files = {"arc": ARC, "mmlu": MMLU, "mmlu_dev": MMLU, "gsm8k": GSM, "gsm8k_train": GSM}
    for n, rows in files.items():
        (tmp_path / f"{n}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = {n: str(tmp_path / f"{n}.jsonl") for n in files}
    return load(name)(Context(tiny.model(), tiny.tokenizer(), (Text("t", "x"),), Options(data=data, chunk=24, **changes)))


def test_problems_are_put_as_the_benchmarks_put_them(tmp_path):
    mmlu = task("mmlu", tmp_path, shots=1)
    assert [p["prompt"].split()[2] for p in mmlu.problems[:3]] == ["one", "other", "one"]  # subjects take turns
    assert mmlu.problems[0]["prompt"].endswith("one_thing 0?\nA. w\nB. x\nC. y\nD. z\nAnswer:") and "Answer: A\n\n" in mmlu.problems[0]["prompt"]
    arc = task("arc", tmp_path, limit=11)
    assert arc.problems[1] == {"id": 1, "prompt": "Question: What is 1 and 1?\nAnswer:", "choices": ["1", "2", "3", "4"], "answer": 1}
    assert arc.item_keys() == ["0-10", "10-11"]
    gsm = task("gsm8k", tmp_path, shots=2)
    assert gsm.problems[3]["target"] == "4" and gsm.problems[3]["prompt"].count("####") == 2
    with pytest.raises(SpecError, match="6 examples of 'one_thing'"):
        task("mmlu", tmp_path, shots=7)


def test_a_lossless_cache_scores_as_lm_eval_without_any(tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    arc = task("arc", tmp_path, limit=8)
    factories = {"32-bit": base_factory(arc.context.model), "raw": factory(arc.context.model, "raw"), "kivi2": factory(arc.context.model, "kivi2")}
    records = arc.run("0-8", factories, lambda n: None)
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in arc.problems))
    config = arc.config() | {
        "task": "plain", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path)}, "test_split": "test",
        "doc_to_text": "{{prompt}}", "num_fewshot": 0,
    }  # fmt: skip
    arc.context.model.set_attn_implementation("sdpa")
    plain = HFLM(arc.context.model, tokenizer=arc.context.tokenizer, device="cpu")
    out = lm_eval.simple_evaluate(model=plain, tasks=[config], bootstrap_iters=0)
    want = [int(s["acc"]) for s in sorted(out["samples"]["plain"], key=lambda s: s["doc_id"])]
    assert records["raw"]["right"] == records["32-bit"]["right"] == want
    assert len(records["kivi2"]["right"]) == 8
    summary = arc.summary({"0-8": records["raw"]}, {"0-8": records["32-bit"]})
    assert summary["problems"] == 8 and summary["same_verdict"] == 1.0 and summary["accuracy"] == sum(want) / 8 and "accuracy_norm" in summary


def test_generation_goes_through_the_cache(tmp_path):
    gsm = task("gsm8k", tmp_path, shots=1, limit=2)
    records = gsm.run("0-2", {"raw": factory(gsm.context.model, "raw")}, lambda n: None)
    assert len(records["raw"]["right"]) == 2


def test_the_backend_takes_one_more_argument_and_refuses_padded_batches():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    lm = KvbitsLM(model, scheme="kivi4", tokenizer=tokenizer)
    made = []
    real = lm.factory.make
    object.__setattr__(lm.factory, "make", lambda *a: made.append(real(*a)) or made[-1])
    import torch

    ids = torch.randint(3, 60, (1, 400))
    logits = lm._model_call(ids)
    assert logits.shape == (1, 400, model.config.vocab_size) and made[0].store.seq_lens == [400]
    assert made[0].store.bytes_by_kind()["codes"] > 0  # most tokens were read from closed pages
    exact = model(ids).logits
    assert 1e-6 < (logits - exact).abs().mean() < 0.3
    with pytest.raises(SpecError, match="batch_size=4"):
        KvbitsLM(model, scheme="kivi4", tokenizer=tokenizer, batch_size=4)
