"""Scripts of benchmarks that somebody can find: each is named by a document, a test or another program.

A dated log does not count: it says what was run once, and its script may be gone.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMING = (".py", ".md", ".sh", ".toml", ".yml", ".mjs", "Makefile", "run")


def tracked() -> list[Path]:
    """Files of the repository that may name a script, without results and logs."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [
        ROOT / name
        for name in listed
        if name.endswith(NAMING) and not name.startswith(("benchmarks/results/", "docs/results/log/"))
    ]


@pytest.fixture(scope="module")
def texts():
    if not (ROOT / ".git").exists():
        pytest.skip("no git here, so nothing says which files belong to the repository")
    return {path: path.read_text(encoding="utf-8") for path in tracked() if path.exists()}


def test_every_script_of_benchmarks_is_named_outside_the_logs(texts):
    scripts = [p for p in texts if p.parent == ROOT / "benchmarks"]
    assert len(scripts) > 10
    unnamed = []
    for script in scripts:
        name = re.compile(rf"(?:import|from) {script.stem}\b|\b{script.stem}\.(?:py|sh)\b|\"{script.stem}\"")
        if not any(name.search(text) for path, text in texts.items() if path != script):
            unnamed.append(script.name)
    assert not unnamed
