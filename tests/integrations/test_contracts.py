"""Declarations of what the plugins stand on, against sources of engines: read as syntax trees, without an installation
or a GPU.

A failure of a release that is not out yet means that it breaks the line that is named.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from integrations.syntax_trees import Package, parsed
from messages import mentions

import kvbits
from kvbits.contract import Contract, Seen, Symbol, calls, needed_by, overrides, reads, wraps
from kvbits.integrations.sglang import releases as sglang_releases

HERE = Path(kvbits.__file__).parent / "integrations"
BUILD = Path(__file__).parents[2] / "build"
SERVED = ("vllm==0.31.0", "vllm==0.32.0", "vllm==0.33.0", "sglang==0.5.22", "sglang==0.5.23")
PLATFORMS = ("vllm.platforms.cuda:CudaPlatformBase", "vllm.platforms.cpu:CpuPlatform")
"""Classes whose methods may be other than those of vLLM's interface."""


def contract(engine: str) -> Contract:
    if engine == "sglang":
        return sglang_releases.CONTRACT
    from kvbits.integrations.vllm.releases import CONTRACT

    return CONTRACT


def broken(engine: str, root: Path) -> dict[str, str]:
    """Return what differs under a folder from its declaration, among symbols of the packages that the folder has."""
    package, found = Package(root), {}
    for path, symbol in contract(engine).symbols.items():
        if not (root / path.split(":")[0].split(".")[0]).is_dir():
            continue
        found[path] = symbol.differs(package.see(path))
        if path.startswith("vllm.platforms:current_platform."):
            for owner in PLATFORMS:
                at = f"{owner}.{path.rpartition('.')[2]}"
                found[at] = symbol.differs(package.see(at))
    return {path: why for path, why in found.items() if why}


def installed() -> list[tuple[str, Path]]:
    """Engines in the environments that tests of the plugins run in."""
    sites = [*BUILD.glob("*-cpu*/lib/python*/site-packages")]
    return [(name, site) for site in sorted(sites) for name in ("vllm", "sglang") if (site / name).is_dir()]


@pytest.mark.parametrize(("engine", "root"), installed(), ids=lambda x: x if isinstance(x, str) else x.parts[-5])
def test_engines_that_are_installed_for_tests_are_as_declared(engine, root):
    assert not broken(engine, root)


def unpack(requirement: str, folder: Path) -> None:
    """Unpack the Python sources and the metadata of a wheel into a folder; skip the test if the index lacks it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))])
    file.unlink()


@pytest.mark.night
@pytest.mark.parametrize("wheel", [*SERVED, "vllm", "sglang"])
def test_releases_are_as_declared(wheel, tmp_path):
    """Those that are served and the newest, SGLang with the release of its kernels that it requires."""
    unpack(wheel, tmp_path)
    (metadata,) = tmp_path.glob("*/METADATA")
    for kernels in re.findall(r"^Requires-Dist: (sglang-kernel==\S+)$", metadata.read_text(), re.MULTILINE):
        unpack(kernels, tmp_path)
    engine = wheel.partition("=")[0]
    packages = {path.split(":")[0].split(".")[0] for path in contract(engine).symbols}
    assert all((tmp_path / package).is_dir() for package in packages)
    assert not broken(engine, tmp_path)


def plugin_trees(engine: str) -> list[ast.Module]:
    return [parsed(path) for path in sorted((HERE / engine).glob("*.py"))]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_name_that_a_plugin_imports_is_declared(engine):
    declared, lacking = contract(engine).symbols, []
    for tree in plugin_trees(engine):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == engine:
                for alias in node.names:
                    path = f"{node.module}:{alias.name}"
                    if not any(
                        x == path or x.startswith((f"{path}.", f"{node.module}.{alias.name}:")) for x in declared
                    ):
                        lacking.append(path)
    assert not lacking


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_overridden_takes_what_is_declared(engine):
    """An engine passes no more than these, so ours must take them."""
    ours: dict[str, list[ast.FunctionDef]] = {}
    for tree in plugin_trees(engine):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for x in node.body:
                    if isinstance(x, ast.FunctionDef):
                        ours.setdefault(x.name, []).append(x)
                    elif isinstance(x, ast.Assign):  # `forward_decode = forward_extend`
                        names = [t.id for t in x.targets if isinstance(t, ast.Name)]
                        for name in names:
                            ours.setdefault(name, []).extend(ours.get(ast.unparse(x.value), []))
    symbols = [x for x in contract(engine).symbols.values() if x.kind == "overridden" and x.loaded]
    assert len(symbols) > 5
    for symbol in symbols:
        name = symbol.path.rpartition(".")[2]
        found = [Package(HERE)._parameters(x) for x in ours[name]]
        assert any({*symbol.names} <= {*x.required, *x.optional} for x in found), symbol.path


@pytest.mark.parametrize(
    ("symbol", "seen", "says"),
    [
        (calls("m:f", "a"), None, "is not there"),
        (calls("m:f", "a", otherwise="g"), None, None),
        (calls("m:f", "a"), Seen(("a",), ("b",)), None),
        (calls("m:f", "a c"), Seen(("a", "b"), ()), "has no c and has b besides"),
        (calls("m:f", "a c"), Seen(("a",), (), open=True), None),
        (wraps("m:f", "a"), Seen(("a", "b"), ()), None),
        (wraps("m:f", "c"), Seen(("a", "b"), ()), "has no c"),
        (overrides("m:f", "a b"), Seen(("a",), ()), None),
        (overrides("m:f", "a"), Seen(("a",), ("b",)), "has b besides"),
        (reads("m:C", "x"), Seen(attributes=frozenset({"x", "y"})), None),
        (reads("m:C", "x z"), Seen(attributes=frozenset({"x", "y"})), "has no z"),
    ],
)
def test_what_differs_is_said(symbol, seen, says):
    assert symbol.differs(seen) == says


SOURCE = """
import functools
from typing import NamedTuple

class Base:
    kept: int
    def __init__(self, a, *, b=1):
        self.made = a
    def run(self, x, y=2, *rest): ...

class Engine(Base):
    @classmethod
    def made_of(cls, text, /, more=None): ...

class Pair(NamedTuple):
    left: int

@functools.cache
def cached(a): ...

TABLE = {}
engine = Engine(1)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A module both to be imported and to be read."""
    (tmp_path / "an_engine").mkdir()
    (tmp_path / "an_engine" / "__init__.py").write_text("from .parts import Engine, cached as kept\n")
    (tmp_path / "an_engine" / "parts.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("an_engine")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("symbol", "says"),
    [
        (reads("an_engine:Engine", "kept made run made_of"), None),
        (reads("an_engine:Engine", "gone"), "has no gone"),
        (calls("an_engine:Engine.run", "x y"), None),
        (calls("an_engine:Engine.__init__", "a b"), None),
        (overrides("an_engine:Engine.made_of", "text"), "has more besides"),
        (calls("an_engine:kept", "a"), None),
        (reads("an_engine.parts:cached", "cache_clear"), None),
        (reads("an_engine.parts:Pair", "left _asdict"), None),
        (reads("an_engine.parts:TABLE", "update"), None),
        (reads("an_engine:parts"), None),
        (reads("an_engine:gone"), "is not there"),
        (reads("an_engine.gone:x"), "is not there"),
        (calls("an_engine.parts:Engine.gone"), "is not there"),
    ],
    ids=lambda x: x.path if isinstance(x, Symbol) else "",
)
def test_processes_and_syntax_trees_show_the_same(engine, symbol, says):
    assert Contract("Engine", (), "1", [symbol]).broken.get(symbol.path) == says
    assert symbol.differs(Package(engine).see(symbol.path)) == says


def test_a_start_is_refused_for_what_its_features_need_alone(engine):
    found = Contract(
        "Engine",
        ("an-engine",),
        "1 to 2",
        [*needed_by("raw copies", reads("an_engine:Engine", "gone")), reads("an_engine:kept")],
    )
    assert found.refuses() is found.refuses("centred keys") is None
    why = found.refuses("raw copies")
    assert mentions(why, "an_engine.Engine", "gone", "raw copies", "Engine 1 to 2")
    everything = Contract("Engine", ("an-engine",), "1 to 2", [reads("an_engine:other")])
    assert mentions(everything.refuses(), "an_engine.other", "Engine 1 to 2")


def test_a_symbol_is_wrapped_once_and_what_is_broken_is_left_alone(engine):
    found = Contract(
        "Engine",
        (),
        "1",
        [
            wraps("an_engine:Engine.run", "x"),
            wraps("an_engine:Engine.made_of", "text"),
            wraps("an_engine.parts:cached", "gone"),
            wraps("an_engine.parts:engine.run", "x"),
            wraps("an_engine:Engine.handed_on", otherwise="elsewhere"),
        ],
    )
    returned = lambda original, owner, *given, **named: (original, given, named)  # noqa: E731
    for _ in range(2):
        for path in found.symbols:
            found.wrap(path, returned, absent=print if path.endswith("handed_on") else None)
    from an_engine.parts import Engine, cached, engine

    original, given, named = engine.run(1, y=2)
    assert given == (1,) and named == {"y": 2} and not hasattr(original, "kvbits_original")
    original, given, _ = Engine.made_of("t")
    assert given == ("t",) and original.__self__ is Engine
    assert engine.handed_on()[0] is print
    assert not hasattr(cached, "kvbits_original"), "its probe failed"
