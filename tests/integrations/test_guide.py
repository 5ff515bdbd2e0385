"""What a user reads works: Python blocks of the guide run on a tiny model, commands and options exist, links lead somewhere, generated pages are what their script writes."""

import importlib.util
import re
import shlex
import warnings
from pathlib import Path

import pytest
import tiny
import torch
import typer

import kvbits
from kvbits.cli import app

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "log")]
MOST_WORDS = 900


def blocks(text: str, language: str) -> list[tuple[str, str | None]]:
    """(code, why it is not run) of every block in a language; "" are plain ones."""
    return [(m[2], m[1]) for m in re.finditer(rf"(?:<!-- not run: ([^>]*?) -->\n)?^```{language}\n(.*?)^```", text, re.S | re.M)]


@pytest.mark.parametrize("page", GUIDE, ids=lambda p: p.stem)
def test_python_of_the_guide_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny.model()
    ids = torch.randint(3, 80, (1, 300), generator=torch.Generator().manual_seed(1))
    names = {"kvbits": kvbits, "torch": torch, "model": model, "name": "a model", "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
    ran = 0
    for code, why in blocks(page.read_text(), "python"):
        compiled = compile(code, str(page), "exec")
        if why is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", kvbits.errors.KvbitsWarning)
                exec(compiled, names)
            ran += 1
    assert ran or page.stem in ("evaluate", "planning", "vllm", "vllm-cpu")


def commands(text: str) -> list[str]:
    lines = [line for code, _ in blocks(text, "") for line in code.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.startswith("kvbits ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_and_their_options_exist(page):
    known = typer.main.get_command(app).commands
    for line in commands(page.read_text()):
        words = shlex.split(line)[1:]
        assert words[0] in known, line
        options = {opt for p in known[words[0]].params for opt in (*p.opts, *p.secondary_opts)}
        assert {w.split("=")[0] for w in words if w.startswith("--")} <= options | {"--help"}, line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            heads = [re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)", file.read_text(), re.M)]
            assert anchor in heads, f"{target}: {heads}"


@pytest.mark.parametrize("page", GUIDE, ids=lambda p: p.stem)
def test_a_page_of_the_guide_is_short(page):
    assert len(page.read_text().split()) <= MOST_WORDS


def test_generated_reference_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text() == text, "run: python docs/make_reference.py"
