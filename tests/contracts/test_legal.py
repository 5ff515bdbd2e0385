"""The licence is ours and whole, third parties are named, and the version stands in one place."""

import re
from pathlib import Path

import kvbits

ROOT = Path(__file__).parents[2]


def test_the_licence_is_the_plain_apache_text_with_our_name():
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    owners = re.findall(r"^ *Copyright (?!License|owner)[^\n]*$", text, re.M)
    assert [o.strip() for o in owners] == ["Copyright 2026 the kvbits authors"]


def test_files_of_others_are_named_with_their_licence():
    """A file under src that carries somebody's copyright line is in NOTICE."""
    notice = (ROOT / "NOTICE").read_text()
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in {".py", ".js", ".css", ".md", ".h", ".cu", ".cuh", ".cpp"} and re.search(
            r"copyright \(c\)|@license", path.read_text(), re.I
        ):
            assert str(path.relative_to(ROOT)) in notice, path
    assert (ROOT / "src/kvbits/evaluate/data/pride_and_prejudice.txt").exists() and "pride_and_prejudice.txt" in notice


def test_the_version_stands_in_one_place():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and not re.search(r"^version\s*=", project, re.M)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", kvbits.__version__)
