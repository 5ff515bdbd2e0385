"""Sources of a package as `kvbits.contract.see` would find it in a process: nothing is imported or installed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from kvbits.contract import Seen


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def file_of(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those behind conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


class Package:
    """Sources under a folder that has the package in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def see(self, path: str) -> Seen | None:
        """Return what is there, or None."""
        module, _, name = path.partition(":")
        found = self._find(module, name.split("."))
        if found is None:
            return None
        module, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self._parameters(node)
        if isinstance(node, ast.ClassDef):
            return Seen(attributes=frozenset(self._attributes(module, node)))
        if isinstance(node, ast.AnnAssign) and node.value is None:  # `current_platform: Platform`
            of = self._named(module, node.annotation)
            return Seen(attributes=frozenset(self._attributes(*of))) if of else Seen(open=True)
        value = getattr(node, "value", None)  # `f = other`; of other values only the type's names are known
        if isinstance(value, ast.Dict):
            return Seen(open=True, attributes=frozenset(dir(dict)))
        return Seen(open=True)

    def _find(self, module: str, names: list[str]) -> tuple[str, ast.AST] | None:
        """(Module, node) of a name, through imports, base classes and annotated names."""
        file = file_of(self.root, module)
        if file is None:
            return None
        if names == [""]:
            return module, parsed(file)
        first, *rest = names
        found = self._defined(module, parsed(file).body, first)
        if found is None and file_of(self.root, f"{module}.{first}"):
            return self._find(f"{module}.{first}", rest or [""])
        while found and rest:
            module, node = found
            name, *rest = rest
            if isinstance(node, ast.AnnAssign):
                found = self._named(module, node.annotation)
                module, node = found or (module, node)
            found = self._member(module, node, name) if isinstance(node, ast.ClassDef) else None
        return found

    def _defined(self, module: str, body: list[ast.stmt], name: str) -> tuple[str, ast.AST] | None:
        file = file_of(self.root, module)
        for node in statements(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if any(isinstance(x, ast.Name) and x.id == name for x in targets(node)):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) in (name, "*"):
                        package = module if file and file.name == "__init__.py" else module.rpartition(".")[0]
                        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                        source = ".".join([*above, *([node.module] if node.module else [])])
                        if (found := self._find(source, [name if alias.name == "*" else alias.name])) is not None:
                            return found
        return None

    def _named(self, module: str, node: ast.expr) -> tuple[str, ast.AST] | None:
        """Find what an expression of names stands for."""
        text = ast.literal_eval(node) if isinstance(node, ast.Constant) else ast.unparse(node)
        return self._find(module, str(text).partition("[")[0].split("."))

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        yield module, node
        for base in node.bases:
            found = self._named(module, base)
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._bases(*found)

    def _member(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        found = (self._defined(where, base.body, name) for where, base in self._bases(module, node))
        return next((x for x in found if x), None)

    def _attributes(self, module: str, node: ast.ClassDef) -> set[str]:
        found = {"_asdict"} if any(ast.unparse(x) == "NamedTuple" for x in node.bases) else set()
        for _, base in self._bases(module, node):
            for x in statements(base.body):
                found |= {getattr(x, "name", "")} | {t.id for t in targets(x) if isinstance(t, ast.Name)}
            for x in ast.walk(base):
                if isinstance(x, ast.stmt):
                    flat = [y for t in targets(x) for y in (t.elts if isinstance(t, ast.Tuple) else [t])]
                    found |= {t.attr for t in flat if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
        return found

    def _parameters(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Seen:
        a = node.args
        names = [x.arg for x in (*a.posonlyargs, *a.args)]
        split = len(names) - len(a.defaults)
        keywords = {x.arg: default for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)}
        required = [*names[:split], *(name for name, default in keywords.items() if default is None)]
        optional = [*names[split:], *(name for name, default in keywords.items() if default is not None)]
        keep = lambda given: tuple(x for x in given if x not in ("self", "cls"))  # noqa: E731
        decorators = frozenset(
            {"cache_clear"}
            if any(ast.unparse(d).partition("(")[0].endswith(("cache", "lru_cache")) for d in node.decorator_list)
            else ()
        )
        return Seen(keep(required), keep(optional), bool(a.vararg or a.kwarg), decorators)
