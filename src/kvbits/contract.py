"""Symbols that kvbits takes of an engine, or of torch, and that nobody promises.

Each symbol is declared once, probed when it is first asked for, and wrapped in one way.

A release serves as long as what is requested of it is there. What cannot work is refused with the symbol's name.
`tests/integrations/test_contracts.py` holds the engines' declarations against the sources of releases, read as syntax
trees.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """Parameters or attributes of what is found under a path.

    Attributes:
        required: parameters that have no default, without `self` and `cls`.
        optional: parameters that have one.
        open: whether it takes parameters of any name.
        attributes: of a class and of its instances.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    open: bool = False
    attributes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Symbol:
    """A name of an engine, and what it must be like.

    Attributes:
        path: `module:name`, with dots inside the name.
        kind: "read": has the attributes `names`. "called": takes the parameters `names` and needs no others. "wrapped":
            takes `names` among others, and passes those on. "overridden": the engine passes no others than `names`.
        names: of attributes or parameters.
        feature: which needs it; "": every format.
        otherwise: what stands for it where it is not there; "": nothing.
        loaded: whether its module is loaded for a probe; else only sources are read.
        ends: the upstream thread that would make a patch unnecessary; "": none is known.
    """

    path: str
    kind: str
    names: tuple[str, ...]
    feature: str = ""
    otherwise: str = ""
    loaded: bool = True
    ends: str = ""

    def differs(self, seen: Seen | None) -> str | None:
        """Return how the symbol differs from its declaration, or None."""
        if seen is None:
            return None if self.otherwise else "is not there"
        known = {*seen.required, *seen.optional}
        if self.kind == "read":
            lacking, more = [x for x in self.names if x not in seen.attributes], []
        elif self.kind == "overridden":
            lacking, more = [], [x for x in (*seen.required, *seen.optional) if x not in self.names]
        else:
            lacking = [x for x in self.names if x not in known and not seen.open]
            more = [x for x in seen.required if x not in self.names] if self.kind == "called" else []
        said = [f"has no {', '.join(lacking)}"] if lacking else []
        return " and ".join([*said, *([f"has {', '.join(more)} besides"] if more else [])]) or None


def _declaring(kind: str) -> Callable[..., Symbol]:
    """Return (path, names with blanks between them, fields of `Symbol`) -> `Symbol`."""
    return lambda path, names="", **more: Symbol(path, kind, tuple(names.split()), **more)


reads, calls, wraps, overrides = map(_declaring, ("read", "called", "wrapped", "overridden"))


def needed_by(feature: str, *symbols: Symbol) -> list[Symbol]:
    """Return the symbols as those that one feature needs."""
    return [dataclasses.replace(symbol, feature=feature) for symbol in symbols]


def look_up(path: str) -> Any:
    """Return what is under a path in this process.

    Raises:
        ImportError, AttributeError: nothing is.
    """
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def see(path: str) -> Seen | None:
    """Return the parameters or attributes of what is under a path in this process, or None."""
    try:
        found = look_up(path)
    except (ImportError, AttributeError):
        return None
    if isinstance(found, type):
        names = {*dir(found)}
        for base in found.__mro__:
            names |= {*vars(base), *vars(base).get("__annotations__", {})}
            for x in vars(base).values():  # instances have what methods name
                names |= {*getattr(getattr(x, "__code__", None), "co_names", ())}
        return Seen(attributes=frozenset(names))
    if schema := getattr(found, "__dict__", {}).get("_schema"):  # an operator of torch
        required = tuple(x.name for x in schema.arguments if not x.has_default_value())
        return Seen(required, tuple(x.name for x in schema.arguments if x.has_default_value()))
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return Seen(open=True, attributes=frozenset(dir(found)))
    of = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("self", "cls")]
    return Seen(
        tuple(p.name for p in of if p.default is p.empty),
        tuple(p.name for p in of if p.default is not p.empty),
        any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters),
        frozenset(dir(found)),
    )


class Contract:
    """The symbols that a plugin depends on.

    Args:
        engine: name of the engine.
        distributions: under which its version is found, the first that is there.
        served: releases that tests run in.
        symbols: each once.
    """

    def __init__(self, engine: str, distributions: tuple[str, ...], served: str, symbols: Iterable[Symbol]) -> None:
        self.engine, self.distributions, self.served = engine, distributions, served
        self.symbols = {symbol.path: symbol for symbol in symbols}

    @functools.cached_property
    def broken(self) -> dict[str, str]:
        """Paths that are otherwise than declared, and how; asked, and said in the log, once a process."""
        found = {path: x.differs(see(path)) for path, x in self.symbols.items() if x.loaded}
        for path, why in found.items():
            if why:
                logger.warning("%s %s: %s %s", self.engine, self.version(), path.replace(":", "."), why)
        return {path: why for path, why in found.items() if why}

    def version(self) -> str:
        """Return the version of the engine that is installed; "of no known version" where it is not."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "of no known version"

    def refuses(self, *features: str) -> str | None:
        """Return why nothing that needs these features can start, or None.

        Args:
            features: besides what every format needs.
        """
        for path, why in self.broken.items():
            if (feature := self.symbols[path].feature) in ("", *features):
                needed = f"{feature} of kvbits need it" if feature else "every kvbits format needs it"
                return (
                    f"{self.engine} {self.version()}: {path.replace(':', '.')} {why}, and {needed}; use"
                    f" {self.engine} {self.served}, and report this to kvbits"
                )
        return None

    def wrap(self, path: str, hook: Callable[..., Any], owner: Any = None, absent: Any = None) -> None:
        """Have `hook` called in a declared symbol's place, from now on; nothing changes where its probe failed.

        Args:
            hook: takes the original, then what the symbol is called with. The original of a class method is bound.
            owner: module or class that has it, if another than the path's.
            absent: the original where there is none.
        """
        if path in self.broken:
            return
        module, _, names = self.symbols[path].path.partition(":")
        *parents, name = names.split(".")
        if owner is None:
            owner = functools.reduce(getattr, parents, importlib.import_module(module))
            owner = owner if isinstance(owner, type | ModuleType) else type(owner)
        original = getattr(owner, name, absent)
        if original is None or hasattr(original, "kvbits_original"):
            return

        @functools.wraps(original)
        def wrapped(*args: Any, **options: Any) -> Any:
            return hook(original, *args, **options)

        vars(wrapped)["kvbits_original"] = original
        setattr(owner, name, classmethod(wrapped) if inspect.ismethod(original) else wrapped)
