"""A run's record says what it is of, result files append runs, and readers take the newest one or the sides of a ratio
of one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_files
from messages import mentions, raises

import kvbits
from kvbits import runs
from kvbits.errors import FileFormatError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_of(name: str, utc: str, session: str | None = None) -> dict:
    return {field: None for field in runs.FIELDS} | {"id": name, "utc": utc, "session": session or name}


def test_a_record_has_its_fields_and_no_folder_of_the_machine(monkeypatch):
    monkeypatch.delenv("KVBITS_SESSION", raising=False)
    first, second = (
        runs.record(["/usr/bin/kvbits", "eval", "/models/a/SmolLM2", "--text", "novel=/data/x.txt", "--out", "out"])
        for _ in range(2)
    )
    assert tuple(first) == runs.FIELDS and first["id"] != second["id"] and first["session"] == first["id"]
    assert first["argv"] == ["kvbits", "eval", "SmolLM2", "--text", "novel=x.txt", "--out", "out"]
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}", first["id"]) and re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["utc"]
    )
    assert first["versions"]["kvbits"] == kvbits.__version__ and first["versions"]["torch"]
    assert first["host"]["cores"] >= 1 and first["host"]["cpu"] and first["host"]["gpu"] == (first["gpu"] is not None)
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize(
    ("given", "commit", "dirty"), [("0123abc", "0123abc", False), ("0123abc-dirty", "0123abc", True)]
)
def test_a_tree_that_travelled_without_git_has_its_commit_from_a_variable_or_a_file(
    monkeypatch, tmp_path, given, commit, dirty
):
    monkeypatch.setenv("KVBITS_COMMIT", given)
    assert (runs.record()["commit"], runs.record()["dirty"]) == (commit, dirty)
    monkeypatch.delenv("KVBITS_COMMIT")
    monkeypatch.setattr(runs, "_HOME", tmp_path)
    assert (runs.record()["commit"], runs.record()["dirty"]) == (None, None)
    (tmp_path / "KVBITS_COMMIT").write_text(given + "\n")
    assert (runs.record()["commit"], runs.record()["dirty"]) == (commit, dirty)


def test_a_checkout_says_its_commit_and_whether_its_source_differs(monkeypatch, tmp_path):
    monkeypatch.delenv("KVBITS_COMMIT", raising=False)
    monkeypatch.setattr(runs, "_HOME", tmp_path)

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-qm", "first")
    assert (runs.record()["commit"], runs.record()["dirty"]) == (git("rev-parse", "HEAD").strip(), False)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "a.json").write_text("{}")
    assert runs.record()["dirty"] is False, "a result that a run before wrote is no change of the code"
    (tmp_path / "code.py").write_text("2\n")
    assert runs.record()["dirty"] is True


def test_a_session_is_shared_by_processes(monkeypatch):
    monkeypatch.setenv("KVBITS_SESSION", "h200-evening")
    assert runs.record()["session"] == "h200-evening"


def test_the_newest_run_s_row_is_taken_and_ratios_are_of_one_run():
    data = {
        "runs": {
            "a": run_of("a", "2026-01-01T00:00:00Z", "s"),
            "b": run_of("b", "2026-01-02T00:00:00Z", "s"),
            "c": run_of("c", "2025-01-01T00:00:00Z"),
        },
        "rows": [
            {"run": "b", "scheme": "int4", "us": 2.0},
            {"run": "a", "scheme": "int4", "us": 1.0},
            {"run": "a", "scheme": "fa3", "us": 4.0},
            {"run": "c", "scheme": "fa3", "us": 9.0},
            {"run": "a", "scheme": "int4", "us": 1.5},
        ],
    }
    newest = run_files.latest(data, ("scheme",))
    assert {k: row["us"] for k, row in newest.items()} == {("int4",): 2.0, ("fa3",): 4.0}
    assert [r["us"] for r in run_files.together(data, {"scheme": "int4"}, {"scheme": "fa3"})] == [1.5, 4.0]
    assert [r["us"] for r in run_files.together(data, {"scheme": "int4"}, {"scheme": "fa3"}, by="session")] == [
        2.0,
        4.0,
    ]
    assert run_files.together(data, {"scheme": "int4"}, {"scheme": "cudnn"}) is None


def test_figures_without_a_run_are_refused(tmp_path):
    sound = {
        "runs": {"a": run_of("a", "2026-01-01T00:00:00Z")},
        "rows": [{"run": "a", "us": 1}],
        "peers": [{"run": "a"}],
    }
    assert run_files.problems(sound) == []
    assert run_files.problems({"rows": [{"us": 1}]}) == ["no runs"]
    assert run_files.problems(sound | {"rows": [{"us": 1}]}) == ["rows[0] has no run of this file"]
    assert run_files.problems(sound | {"peers": [{"run": "b"}]}) == ["peers[0] has no run of this file"]
    short = {k: v for k, v in sound["runs"]["a"].items() if k != "commit"}
    assert run_files.problems(sound | {"runs": {"a": short}}) == ["run a has no commit"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"command": "x", "rows": [{"us": 1}]}))
    with raises(FileFormatError, "old.json"):
        run_files.read(path)


def test_benchmarks_append_their_runs(tmp_path):
    """Two processes write one file: the second's rows stand beside the first's, and what it printed last is its own
    part.
    """
    out = tmp_path / "new" / "rows.json"
    script = "import sys, pathlib; sys.argv[0] = '/x/bench_a.py'; import run_files as r; o = pathlib.Path(sys.argv[1]);"
    script += (
        "r.append([{'scheme': 'int4', 'us': float(sys.argv[2])}], o, device='X'); r.append([{'scheme': 'int8', 'us':"
        " 3}], o, sections={'peers': [{'name': 'p'}]}, extra=1)"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script, str(out), us], cwd=BENCHMARKS, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for us in ("1", "nan")
    ]
    data = run_files.read(out)
    assert len(data["runs"]) == 2 and [r["us"] for r in data["rows"]] == [1.0, 3, None, 3] and len(data["peers"]) == 2
    first, second = data["runs"].values()
    assert first["argv"] == ["python", "benchmarks/bench_a.py", "rows.json", "1"] and first["facts"] == {
        "device": "X",
        "extra": 1,
    }
    assert json.loads(said[1][-1])["rows"] == [{"run": second["id"], "scheme": "int8", "us": 3}]
    changed = "import run_files as r; r.append([], None, device='X'); r.append([], None, device='Y')"
    failed = subprocess.run([sys.executable, "-c", changed], cwd=BENCHMARKS, capture_output=True, text=True)
    assert failed.returncode and mentions(failed.stderr, "device", "'X'")
