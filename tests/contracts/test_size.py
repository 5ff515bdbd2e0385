"""The size that is printed counts tokens: neither layout nor comments nor docstrings change it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from messages import raises

SCRIPT = Path(__file__).parents[2] / ".ci" / "size.py"


@pytest.fixture
def sizes():
    spec = importlib.util.spec_from_file_location("size", SCRIPT)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_layout_comments_and_docstrings_are_free(sizes):
    dense = "def f(a, b): return a + b\n"
    airy = '"""A module."""\n\n\ndef f(a, b):  # adds\n    """Add."""\n\n    return a + b\n'
    assert sizes.size(dense) == (12, 1) and sizes.size(airy) == (12, 2)
    assert sizes.size('x = """text"""\n')[0] == 3, "a text that is a value counts"


def test_rooms_are_folders_of_the_package(sizes):
    assert (
        sizes.room("src/kvbits/cache/pool.py") == "src/cache" and sizes.room("src/kvbits/units.py") == "src, top level"
    )
    assert sizes.room("src/kvbits/ops/cuda/close.py") == "src/ops" and sizes.room("tests/ops/by_hand.py") == "tests"


def test_a_commit_is_compared_with_the_tree(sizes, tmp_path, monkeypatch, capsys):
    def git(*arguments):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "src" / "kvbits" / "cache").mkdir(parents=True)
    file = tmp_path / "src" / "kvbits" / "cache" / "a.py"
    file.write_text("a = 1\n")
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-qm", "one")
    file.write_text("a = 1\nb = a\n")
    (tmp_path / "src" / "kvbits" / "new.py").write_text("c = 2\n")
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    sizes.main(["HEAD"])
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["src/cache"][:4] == ["6", "+3", "2", "+1"]
    assert rows["src, top level"][:4] == ["3", "+3", "1", "+1"] and rows["src"][:2] == ["9", "+6"]
    with raises(SystemExit, "nothing"):
        sizes.main(["nothing"])


@pytest.mark.night
def test_it_runs_by_itself():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert "tokens a line" in done.stdout
