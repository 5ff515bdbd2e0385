"""tests/run_gpu.py: what it runs is every GPU test, what it records is what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_files
import run_gpu

TESTS = """
import pytest

def test_a(): pass

def test_b(): pass

@pytest.mark.parametrize("how", ["emulated"])
def test_not_of_a_gpu(how): raise AssertionError

@pytest.mark.skip(reason="not here")
def test_c(): pass

def test_d(): assert 1 == 2

@pytest.fixture
def broken(): raise OSError("set-up")

def test_e(broken): pass
"""


def test_a_pass_covers_every_file_with_gpu_tests():
    # the former: its backend's name only
    found = run_gpu.gpu_files() - {"tests/studies/test_int8_paper.py", "tests/contracts/test_gpu_pass.py"}
    assert found == set(run_gpu.FILES)


def test_passes_are_appended_with_counts_failures_and_reasons(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    out = tmp_path / "gpu_tests.json"
    code = (
        f"import sys, pathlib, run_gpu; sys.exit(run_gpu.run(['test_some.py'], pathlib.Path({str(out)!r}), ['-p',"
        " 'no:cacheprovider'], ['test_some.py']))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(run_gpu.__file__).parent), "KVBITS_COMMIT": "0123abc"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "2 passed, 2 failed, 1 skipped in" in done.stdout and "at 0123abc" in done.stdout
    data = run_files.read(out)
    assert len(data["runs"]) == len(data["rows"]) == 2
    for row in data["rows"]:
        assert (row["passed"], row["failed"], row["skipped"], row["exit_code"], row["all_files"]) == (2, 2, 1, 1, False)
        assert row["failures"] == ["test_some.py::test_d", "test_some.py::test_e"] and row["skips"] == {"not here": 1}


def test_a_pass_in_which_nothing_ran_is_not_recorded(tmp_path, capsys):
    assert run_gpu.run([str(tmp_path / "none.py")], tmp_path / "x.json", ["-p", "no:cacheprovider"], []) != 0
    assert not (tmp_path / "x.json").exists() and "recorded" in capsys.readouterr().err


@pytest.mark.skipif(run_gpu.runs.record()["gpu"] is not None, reason="there is a GPU")
def test_without_a_gpu_nothing_is_recorded(tmp_path, capsys):
    assert run_gpu.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
