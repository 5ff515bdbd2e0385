"""benchmarks/study_kvquant.py: pages leave as a study says, and each study runs to its table on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import tiny

from kvbits.evaluate.texts import novel

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


@pytest.mark.night
@pytest.mark.parametrize(("name", "rows", "tables"), [("domain", 1 + 6, 3)])
def test_a_study_runs_in_one_command(study, tmp_path, monkeypatch, capsys, name, rows, tables):
    texts = {
        path: novel()[3000 * i : 3000 * (i + 1)]
        for i, path in enumerate(p for sides in study.DOMAINS.values() for side in sides for p in side)
    }
    for path, content in texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(
            json.dumps({"question": content, "answer": "1"}) if path.endswith("l") else content
        )
    monkeypatch.setattr(study.kvbits, "load_model", lambda *a, **k: (tiny.model(), tiny.tokenizer()))
    words = "--prompts 2 --prompt-length 300 --windows 2 --length 400 --bits 3 --workers 2"
    monkeypatch.setattr(sys, "argv", ["study", "tiny", "--study", name, "--data", str(tmp_path), *words.split()])
    sys.modules["run_files"].this_run.cache_clear()  # each case is a run
    study.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(report["runs"]) == 1
    found = {
        text: [r for r in report["rows"] if r["text"] == text]
        for text in dict.fromkeys(r["text"] for r in report["rows"])
    }
    assert [len(listed) for listed in found.values()] == [rows] * tables
    for listed in found.values():
        assert listed[0]["name"] == "16-bit" and all(r["kl"] > 0 for r in listed[1:])
