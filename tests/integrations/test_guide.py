"""Documents that a user reads work: code and commands of README and the guide run on a tiny model, options exist, links
lead somewhere, generated pages are what their script writes.
"""

import importlib.util
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import tiny
import torch
import typer
from typer.testing import CliRunner

import kvbits
from kvbits.cli import app

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "log"),
]


def blocks(text: str) -> list[tuple[str, str, str | None]]:
    """(language, code, why it is not run) of every block; a plain one has the language ""."""
    return [
        (m[2], m[3], m[1])
        for m in re.finditer(r"(?:<!-- not run: ([^>]*?) -->\n)?^```(\w*)\n(.*?)^```", text, re.S | re.M)
    ]


def commands(code: str) -> list[str]:
    return [line.split("  #")[0].strip() for line in code.splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model and a text under the names that commands give them; what calibrations it makes it keeps."""
    home = tmp_path_factory.mktemp("home")
    model = tiny.model()
    model.config.max_position_embeddings = 1 << 14
    model.save_pretrained(home / "MODEL")
    tiny.tokenizer().save_pretrained(home / "MODEL")
    (home / "mine.txt").write_text("A text of the reader's own, with words that come again. " * 200)
    shutil.copy(ROOT / "LICENSE", home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBITS_CACHE", str(home / "kept"))
        yield home


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDE], ids=lambda p: p.stem)
def test_every_block_runs_or_says_why_not(page, home, monkeypatch):
    monkeypatch.chdir(home)
    model, tokenizer = tiny.model(), tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(kvbits, "load_model", lambda name: (model, tokenizer))
    ids = torch.randint(3, 80, (1, 300), generator=torch.Generator().manual_seed(1))
    names = {
        "kvbits": kvbits,
        "torch": torch,
        "model": model,
        "name": "a model",
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }
    for language, code, why in blocks(page.read_text()):
        if language == "python":
            compiled = compile(code, str(page), "exec")
            if why is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", kvbits.errors.KvbitsWarning)
                    warnings.simplefilter("ignore", ResourceWarning)  # README opens a file in one line
                    exec(compiled, names)
        elif why is None:
            for line in commands(code):
                if page.parent == ROOT and not line.startswith("kvbits "):
                    continue  # what sets an environment up
                assert line.startswith("kvbits "), f"{line}: nobody runs it; say why: <!-- not run: why -->"
                done = CliRunner().invoke(app, shlex.split(line)[1:])
                assert done.exit_code <= line.startswith("kvbits check "), f"{line}: {done.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_and_their_options_exist(page):
    known = typer.main.get_command(app).commands
    for line in (
        line for _, code, _ in blocks(page.read_text()) for line in commands(code) if line.startswith("kvbits ")
    ):
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
            heads = [
                re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-")
                for h in re.findall(r"^#+ (.*)", file.read_text(), re.M)
            ]
            assert anchor in heads, f"{target}: {heads}"


def test_generated_reference_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text() == text, "run: python docs/make_reference.py"
