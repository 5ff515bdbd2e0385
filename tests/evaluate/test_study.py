"""benchmarks/study_kvquant.py: pages leave as a study says, and each study runs to its table on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch

from kvbits.evaluate.texts import novel
from kvbits.integrations.huggingface import KVCache

PATH = Path(__file__).parents[2] / "benchmarks" / "study_kvquant.py"


@pytest.fixture(scope="module")
def study():
    folder = str(PATH.parent)  # as when it runs: its neighbours can be imported
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location("study_kvquant", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["study_kvquant"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_what_attention_used_least_leaves_first(study):
    model = tiny.model()
    store = KVCache.for_model(model, "kivi2").store
    cache = KVCache(store)
    store.watching = True
    ids = torch.tensor(tiny.tokenizer()(novel()[:500])["input_ids"])[None]
    for piece in ids.split(100, 1):
        model(piece, past_key_values=cache, use_cache=True)
    (held,), (mass,) = store.closed_pages(0), store.mass(0)
    assert len(held) == 11 and set(held[:8]) <= set(mass)
    oldest = store.fork(0)
    study.Eviction(0.5).apply(store)
    (left,) = store.closed_pages(0)
    gone = set(held) - set(left)
    assert len(left) == 6 and max(mass[at] for at in gone) <= min(mass.get(at, 1.0) for at in left)
    store.select([oldest])
    study.Eviction(0.5, "age").apply(store)
    assert store.closed_pages(0) == [held[-6:]]


@pytest.mark.parametrize(("name", "rows", "tables"), [("eviction", 1 + 5, 1), ("domain", 1 + 6, 3)])
def test_a_study_runs_in_one_command(study, tmp_path, monkeypatch, capsys, name, rows, tables):
    texts = {path: novel()[3000 * i : 3000 * (i + 1)] for i, path in enumerate(p for sides in study.DOMAINS.values() for side in sides for p in side)}
    for path, content in texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(json.dumps({"question": content, "answer": "1"}) if path.endswith("l") else content)
    monkeypatch.setattr(study.kvbits, "load_model", lambda *a, **k: (tiny.model(), tiny.tokenizer()))
    words = "--prompts 2 --prompt-length 300 --windows 2 --length 400 --bits 3 --workers 2"
    monkeypatch.setattr(sys, "argv", ["study", "tiny", "--study", name, "--data", str(tmp_path), *words.split()])
    sys.modules["result_file"].this_run.cache_clear()  # each case is a run
    study.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = report["runs"].values()
    found = {text: [r for r in report["rows"] if r["text"] == text] for text in dict.fromkeys(r["text"] for r in report["rows"])}
    assert [len(listed) for listed in found.values()] == [rows] * tables
    for listed in found.values():
        assert listed[0]["name"] == "16-bit" and all(r["kl"] > 0 for r in listed[1:])
    if name == "eviction":
        by_name = {r["name"]: r for r in report["rows"]}
        assert by_name["eviction: 3 bit, 25% of pages"]["bits_kept"] == pytest.approx(by_name["eviction: 3 bit, 100% of pages"]["bits_kept"] / 4)
        assert run["facts"]["context"] == 300 and report["rows"][0]["tokens"] == 2 * 99
