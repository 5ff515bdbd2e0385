"""Result files that documents name are there.

Dated logs (docs/results/log) are history: they say what was seen on the day, and are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "log")]
REFERENCE = re.compile(r"(?:benchmarks/results|results)/[\w./*-]*\w|[\w.*-]+\.json")


def written(text: str) -> str:
    """The text without generated blocks and without code blocks; lines stay where they are."""
    for part in (r"<!-- ([\w:-]+?)(?:: written by [^>]*)? -->.*?<!-- /\1 -->", r"^(`{3,}).*?^\1"):
        text = re.sub(part, lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    return text


def missing(document: Path) -> list[str]:
    """Names of result files and folders in a document that are not under benchmarks/results."""
    found = []
    for name in REFERENCE.findall(written(document.read_text(encoding="utf-8"))):
        if not name.startswith(("benchmarks/results/", "results/")) or name.endswith((".md", ".html")):
            continue
        inner = name.removeprefix("benchmarks/").removeprefix("results/")
        if not (ROOT / "docs" / name).exists() and not any(
            any(RESULTS.glob(pattern)) for pattern in (inner, f"**/{inner}")
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document):
    assert not missing(document)


def test_a_result_that_is_gone_is_seen(tmp_path):
    document = tmp_path / "x.md"
    document.write_text("See `benchmarks/results/none/gone.json` and `results/nvidia-h200/generate.json`.\n")
    assert missing(document) == ["benchmarks/results/none/gone.json"]
