"""Imports are free and layered: `import kvbits` brings no torch, and no module imports from a layer above its own."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from messages import mentions

import kvbits

ROOT = Path(kvbits.__file__).parent
LAYERS = [
    {"errors", "progress", "files", "units", "embedded", "runs", "settings", "contract"},
    {"spec"},
    {"schemes", "literature"},
    {"quant", "later"},
    {"ops"},
    {"cache"},
    {"store"},
    {"integrations", "geometry", "model_ref", "planner", "weights", "gpus", "config_file", "gguf_header"},
    {"calibrate", "evaluate"},
    {"report"},
    {"cli", "__main__"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
UPWARD = {
    "integrations/engine/calibrated.py": "calibrate",
    "integrations/vllm/observe.py": "calibrate",
    "integrations/huggingface.py": "calibrate",
}
"""Both doors find or make what a model's keys need: nobody above them is asked for it."""
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """First-level parts of kvbits that a file imports, anywhere in it (TYPE_CHECKING blocks left out)."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("kvbits."):
                    found.add(alias.name.split(".")[1])
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                target = [*base, *(node.module.split(".") if node.module else [])]
                found.update([target[0]] if target else [a.name for a in node.names])
            elif node.module and node.module.split(".")[0] == "kvbits":
                found.update([node.module.split(".")[1]] if "." in node.module else [a.name for a in node.names])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name for name in found if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_from_a_layer_above_its_own(path):
    mine = part_of(path)
    if mine == "literature" and path.stem != "schemes":
        mine = "calibrate"  # its presets are looked up early, its calibration is used late
    assert mine in LEVEL, f"{mine} has no place in the import order; docs/internals/architecture.md lists it"
    above = {p for p in imported_parts(path) if LEVEL.get(p, 99) > LEVEL[mine]} - {
        UPWARD.get(str(path.relative_to(ROOT)))
    }
    assert not above, f"{path.relative_to(ROOT)} imports {', '.join(sorted(above))} from above its layer"


def test_the_core_does_not_import_the_literature():
    """The table of presets looks its schemes up, and calibration loads it inside a function; nothing else knows it."""
    early, late = set(), set()
    for path in FILES:
        if part_of(path) != "literature" and "literature" in imported_parts(path):
            at_top = any(
                "literature" in ast.unparse(n)
                for n in ast.parse(path.read_text()).body
                if isinstance(n, ast.Import | ast.ImportFrom)
            )
            (early if at_top else late).add(str(path.relative_to(ROOT)))
    assert (early, late) == ({"schemes.py"}, {"calibrate/collect.py"})


def test_the_order_test_sees_a_violation(tmp_path, monkeypatch):
    (tmp_path / "quant").mkdir()
    (tmp_path / "cache").mkdir()
    bad = tmp_path / "quant" / "bad.py"
    bad.write_text("def f():\n    from ..cache.pool import Pool\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imported_parts(bad) == {"cache"}


def modules_imported(path: Path) -> set[Path]:
    """Files of kvbits that a file imports from, for types or for real, anywhere in it."""
    package, found = path.relative_to(ROOT).parts[:-1], set()
    for node in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.level):
        folder = ROOT.joinpath(
            *package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])
        )
        for alias in node.names:
            candidates = (
                folder / f"{alias.name}.py",
                folder / alias.name / "__init__.py",
                folder.with_suffix(".py"),
                folder / "__init__.py",
            )
            found.update([next(p for p in candidates if p.exists())])
    return found - {path}


def test_the_modules_of_the_package_form_no_circle():
    left = {path: modules_imported(path) for path in FILES}
    assert len(left[ROOT / "cache" / "paged_cache.py"]) > 10
    while free := {path for path, needs in left.items() if not needs & left.keys()}:
        left = {path: needs for path, needs in left.items() if path not in free}
    while unused := left.keys() - set().union(*left.values()):  # what only leads to a circle
        left = {path: needs for path, needs in left.items() if path not in unused}
    assert not left, f"a circle among {', '.join(sorted(str(p.relative_to(ROOT)) for p in left))}"


def loaded_by(statement: str) -> set[str]:
    code = (
        f"{statement}\nimport sys\nprint(' '.join(m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in"
        " sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT.parent), "PATH": ""},
    )
    return set(out.stdout.split())


@pytest.mark.parametrize("statement", ["import kvbits", "import kvbits.spec, kvbits.schemes, kvbits.errors"])
def test_specs_and_the_package_import_without_torch(statement):
    assert loaded_by(statement) == set()


def test_the_cache_imports_without_transformers():
    assert "transformers" not in loaded_by("import kvbits.cache.paged_cache, kvbits.ops.dispatch")


def test_importing_the_cache_does_not_initialise_cuda():
    code = "import kvbits.cache.paged_cache, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT.parent), "PATH": ""})


WITHOUT_TORCH = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "huggingface_hub", "gguf", "fsspec", "filelock", "xxhash"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
"""Imports of a machine that has only what `pip install kvbits` brings."""
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "command",
    [
        [
            "plan",
            "--layers",
            "32",
            "--kv-heads",
            "8",
            "--head-dim",
            "128",
            "--gpu-memory",
            "H100",
            "--weights",
            "16GB",
            "--scheme",
            "all",
        ],
        ["plan", "config.json", "--gpu-memory", "24GB", "--engine", "vllm"],
        ["schemes"],
        ["report", "RESULTS", "--html", "page.html", "--markdown", "tables.md"],
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_runs_without_it(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "eval"
    command = [str(results) if word == "RESULTS" else word for word in command]
    done = without_torch(f"import kvbits\nfrom kvbits.cli import main\nsys.argv[1:] = {command!r}\nmain()")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code, parts",
    [
        ("import kvbits; kvbits.PagedCache", ("torch", "pip install 'kvbits[torch]'")),
        ("import kvbits; kvbits.KVCache", ("torch", "pip install 'kvbits[hf]'")),
        (
            "from kvbits.cli import main\nsys.argv[1:] = ['demo']\nmain()",
            ("torch", "pip install 'kvbits[hf]'"),
        ),
        (
            "from kvbits.cli import main\nsys.argv[1:] = ['plan', 'org/model']\nmain()",
            ("huggingface_hub", "pip install huggingface_hub"),
        ),
    ],
)
def test_what_needs_more_says_what_to_install(code, parts):
    done = without_torch(code)
    assert done.returncode and mentions(done.stderr.splitlines()[-1], *parts), done.stderr
