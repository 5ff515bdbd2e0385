"""Figures in README and docs belong to a run: a table stands in a generated block or beside the result file or command
that it is of, and a number with a measured unit is in a committed result (rounded as it is printed) or in
figures_allowed.txt with the reason why not.

Dated logs (docs/results/log/2026-11.md, docs/results/log/gpu-kernels.md) are history: they say what was seen on the
day, and are left out.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "log")]
ALLOWED = Path(__file__).with_name("figures_allowed.txt")

UNITS = r"(?:ms|us|µs|nats|tokens/s|tokens a second|%|x)"
# "8 x 32,768" is a shape
FIGURE = re.compile(rf"(?<![\w.,])(?<!\w-)([+-]?\d[\d,]*(?:\.\d+)?) ?({UNITS})(?![\w/])(?! \d)")
KL = re.compile(r"KL(?: divergence)?(?: (?:of|is|was|at most|below|above|from))*[ ,:]+(\d+\.\d{3,})")
SCALES = {
    "ms": (1, 1e3, 1e-3),
    "us": (1, 1e6, 1e3),
    "µs": (1, 1e6, 1e3),
    "%": (100, 1),
    "x": (1,),
    "nats": (1,),
    "KL": (1,),
    "tokens/s": (1,),
    "tokens a second": (1,),
    "cell": (1, 100, 1e3, 1e6, 1e-3, 1e-6, 2**-30),
}


def written(text: str) -> str:
    """The text without generated blocks, which tests of their own hold equal to the results, and without code blocks:
    printed output is an example, and README's is held equal to its result by tests/evaluate/test_demo.py. Lines stay
    where they are.
    """
    for part in (r"<!-- ([\w:-]+?)(?:: written by [^>]*)? -->.*?<!-- /\1 -->", r"^(`{3,}).*?^\1"):
        text = re.sub(part, lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    return text


def sections(text: str) -> list[tuple[int, str, str]]:
    """(first line, own text, text with that of the headings above it) of every section."""
    found: list[tuple[int, str, str]] = []
    above: list[tuple[int, str]] = []
    first, lines, level = 1, [], 0
    fenced = False
    for number, line in enumerate([*text.splitlines(), "# end"], 1):
        fenced ^= line.startswith("```")
        if (heading := re.match(r"(#+) ", line)) and not fenced:
            own = "\n".join(lines)
            above = [(n, t) for n, t in above if n < level]
            found.append((first, own, "\n".join([*(t for _, t in above), own])))
            above.append((level, own))
            first, lines, level = number, [], len(heading[1])
        lines.append(line)
    return found


REFERENCE = re.compile(r"(?:benchmarks/results|results)/[\w./*-]*\w|[\w.*-]+\.json")


LINK = re.compile(r"\]\(((?!\S*log/)[\w./-]+\.md)\)")


def files(text: str, folder: Path = ROOT / "docs", linked: bool = True) -> set[Path]:
    """Result files and folders that a text of a document in `folder` names, as they lie under benchmarks/results, and
    those that documents it links to name.
    """
    found: set[Path] = set()
    for name in LINK.findall(text) if linked else ():
        if (folder / name).exists():
            found |= files((folder / name).read_text(), linked=False)
    for name in REFERENCE.findall(text):
        inner = name.removeprefix("benchmarks/").removeprefix("results/")
        found.update(p for pattern in (inner, f"**/{inner}") for p in RESULTS.glob(pattern))
    return found


def over_bf16(rows: list[dict]) -> list[float]:
    """Ratios as docs/internals/serving.md prints them: a cache of vLLM's over bf16 at the same geometry and context, at
    the same or at each one's largest batch.
    """
    base = [r for r in rows if r.get("kv_cache_dtype") == "bf16"]
    alike = [
        (r, b)
        for r in rows
        if "geometry" in r
        for b in base
        if all(r[k] == b[k] for k in ("geometry", "gpus", "context", "mode"))
    ]
    names = ("step_ms", "tokens_per_s", "capacity_tokens", "ttft_ms", "tpot_p99_ms", "tpot_ms")
    return [r[n] / b[n] for r, b in alike for n in names if r.get(n) and b.get(n)]


@functools.cache
def measured(path: Path) -> list[float]:
    """Every number of a result file, or of those in a folder; its runs' facts among them."""
    found: set[float] = set()

    def visit(value: object) -> None:
        if isinstance(value, dict):
            for v in value.values():
                visit(v)
        elif isinstance(value, list):
            for v in value:
                visit(v)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.add(abs(float(value)))

    for one in [path] if path.is_file() else path.rglob("*.json"):
        data = json.loads(one.read_text())
        visit({k: v for k, v in data.items() if k != "items"})
        visit(over_bf16(data.get("rows", [])))
    return sorted(found)


def in_results(text: str, unit: str, known: set[Path]) -> bool:
    """Whether a number of those files rounds to the figure as printed."""
    value, half = abs(float(text.replace(",", ""))), 0.5 * 10 ** -len(text.partition(".")[2])
    for scale in SCALES[unit]:
        low, high = (value - half) / scale * (1 - 1e-9), (value + half) / scale * (1 + 1e-9)
        for path in known:
            numbers = measured(path)
            at = bisect.bisect_left(numbers, low)
            if at < len(numbers) and numbers[at] <= high:
                return True
    return False


CELL = re.compile(r"(?<![\w.,^*:-])[+-]?(\d[\d,]*\.\d+)(?![\w.])")


def figures(text: str) -> list[tuple[int, str, str]]:
    """(line of the text, number, unit) of every figure with a measured unit, and of every decimal number of a table
    ("cell").
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        here = {m.start(1): (number, m[1], m[2]) for m in FIGURE.finditer(line)}
        here |= {m.start(1): (number, m[1], "KL") for m in KL.finditer(line)}
        if line.startswith("|"):
            here |= {
                m.start(1): (number, m[1], "cell")
                for m in CELL.finditer(line)
                if m.start(1) not in here and m.start() not in here
            }
        found += here.values()
    return found


def allowed() -> dict[tuple[str, str], str]:
    """(document, figure) -> why it is in no result, of lines "document | figures with their units, by semicolons |
    reason".
    """
    found = {}
    for line in ALLOWED.read_text().splitlines():
        if line and not line.startswith("#"):
            document, listed, reason = (part.strip() for part in line.split(" | "))
            assert reason, line
            found.update(dict.fromkeys(((document, figure.strip()) for figure in listed.split(";")), reason))
    return found


def unsupported(document: Path) -> list[tuple[int, str]]:
    """(line, figure) of every figure that no result which its section names has."""
    text, found = written(document.read_text()), []
    for first, own, whole in sections(text):
        known = files(whole, document.parent)
        found += [
            (first + line - 1, f"{number} {unit}")
            for line, number, unit in figures(own)
            if not in_results(number, unit, known)
        ]
    return found


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_figure_is_in_a_result_that_its_section_names(document):
    name = str(document.relative_to(ROOT))
    missing = [f"{name}:{line}: {figure}" for line, figure in unsupported(document) if (name, figure) not in allowed()]
    assert not missing, (
        f"in no result file that the section names, and not in {ALLOWED.name}: {'; '.join(missing[:20])}"
    )


def test_no_exception_outlives_its_figure():
    there = {
        (str(d.relative_to(ROOT)), f"{number} {unit}")
        for d in DOCS
        for _, number, unit in figures(written(d.read_text()))
    }
    assert not set(allowed()) - there, "these figures are gone"


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_table_of_figures_names_what_it_is_of(document):
    """A result, a command, a benchmark or a document that has them: in the section of the table or one above it."""
    text = written(document.read_text())
    for first, own, whole in sections(text):
        rows = [line for line in own.splitlines() if line.startswith("|") and CELL.search(line)]
        rows = [
            r
            for r in rows
            if any((str(document.relative_to(ROOT)), f"{n} cell") not in allowed() for n in CELL.findall(r))
        ]
        assert not rows or files(whole, document.parent) or "`kvbits " in whole or "benchmarks/" in whole, (
            f"{document.name}:{first}: {rows[0]}"
        )


def test_what_a_section_names_must_be_there():
    for document in DOCS:
        for name in REFERENCE.findall(written(document.read_text())):
            if (
                name.startswith(("benchmarks/results/", "results/"))
                and not (ROOT / "docs" / name).exists()
                and not name.endswith((".md", ".html"))
            ):
                assert files(name), f"{document.name} names {name}, which is not under benchmarks/results"


def test_a_figure_without_a_result_is_seen(tmp_path, monkeypatch):
    document = tmp_path / "x.md"
    where = "(`results/nvidia-h200/generate.json`)"
    document.write_text(
        f"# A\n\nA token takes 22.2 ms {where}.\n\n## B\n\nAnother takes 3.217 ms, a KL of 9.8765.\n\n| a | 77.777"
        " |\n\n# C\n\n22.2 ms\n\n```\n4.44 ms\n```\n"
    )
    assert unsupported(document) == [(7, "3.217 ms"), (7, "9.8765 KL"), (9, "77.777 cell"), (13, "22.2 ms")]
