"""Committed results: every figure belongs to a run, and all of them together stay small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_files

from kvbits.evaluate.results import FORMAT, read
from kvbits.report.collect import Cell

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = sorted(FOLDER.rglob("*.json"))
LIMIT = 4_000_000
"""Bytes of all files: results are text in a repository that everybody clones.

`benchmarks/trim_results.py` drops what no table reads.
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_row_and_item_belongs_to_a_run(path):
    data = json.loads(path.read_text())
    if data.get("format") == FORMAT:
        data = {"runs": read(path)["runs"], "items": data["items"]}
    assert run_files.problems(data) == []
    for run in data["runs"].values():
        assert run["utc"] and run["commit"], (
            "a figure that nobody can repeat; run it again in a checkout, or give KVBITS_COMMIT where the tree travels"
            " without git"
        )
        if run.get("reconstructed"):
            assert run["id"] == f"before-records-{run['commit'][:8]}"
        else:
            assert run["argv"] and run["versions"] and run["host"]


def test_results_stay_small():
    assert FILES and all(path.suffix == ".json" for path in FOLDER.rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in FILES) <= LIMIT, (
        "run benchmarks/trim_results.py on new folders of `kvbits eval`, and drop what no table reads"
    )


def test_no_figure_is_of_an_earlier_edition_of_klt():
    """A reader takes a row for what the preset of that name does today."""
    found = []
    for path in FILES:
        data = json.loads(path.read_text())
        if data.get("format") == FORMAT:
            found += [path] * ("klt" in data["scheme"] and Cell.of(read(path)).outdated)
        else:
            rows = [r for rows in data.values() if isinstance(rows, list) for r in rows]
            named = [(r.get(field), r["run"]) for r in rows for field in ("scheme", "kv_cache_dtype", "cache", "name")]
            found += [path] * any(isinstance(n, str) and run_files.outdated(n, data["runs"][run]) for n, run in named)
    assert not found
