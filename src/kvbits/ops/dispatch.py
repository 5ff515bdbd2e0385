"""Which backend serves an op, decided once per kind of call, with every refusal kept as text.

A backend is a folder of this package with a module for each op, named like the op's function (`FUNCTIONS`): that, `refuses`, `plan` if it plans once a step,
and the function with `_later` behind its name if it can leave on the device what that would return or raise. The order of the list is the order of preference;
the reference is last and takes everything.
A backend is skipped only for a reason it states, never because it raised.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SpecError

BACKENDS = {
    "attend_pages": ("cpu", "cuda", "reference"), "attend_fresh": ("cpu", "cuda", "reference"),
    "close_pages": ("cpu", "cuda", "reference"), "append": ("cpu", "cuda", "reference"),
}  # fmt: skip
FUNCTIONS = {"attend_pages": "attend", "attend_fresh": "attend_fresh", "close_pages": "close", "append": "append"}


@dataclass(frozen=True)
class Choice:
    """The backend that serves an op, and why the ones before it do not."""

    op: str
    backend: str
    run: Callable[..., Any]
    refusals: dict[str, str]
    plan: Callable[..., Any] | None = None  # backends that plan once per step and then only launch
    later: Callable[..., torch.Tensor | None] | None = None  # as `run`, but what was found stays on the device

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.refusals.items())
        return f"{self.op} by {self.backend}" + (f" ({reasons})" if reasons else "")


def check_backend(backend: str) -> None:
    """Refuse a backend that no op has.

    Raises:
        SpecError: the message lists the known ones.
    """
    known = dict.fromkeys(name for backends in BACKENDS.values() for name in backends)
    if backend != "auto" and backend not in known:
        raise SpecError(f"unknown backend {backend!r}; known: auto, {', '.join(known)}")


def choose(op: str, *args: Any, backend: str = "auto") -> Choice:
    """The first backend that takes a call like `args`, or the one named.

    Raises:
        SpecError: unknown backend, or the named one refuses; the message says why.
    """
    backends = BACKENDS[op]
    if backend != "auto" and backend not in backends:
        raise SpecError(f"unknown backend {backend!r} for {op}; known: auto, {', '.join(backends)}")
    refusals: dict[str, str] = {}
    for name in backends:
        if backend not in ("auto", name):
            continue
        path = f"{__package__}.{name}.{FUNCTIONS[op]}"
        if importlib.util.find_spec(path) is None:
            refusals[name] = "not part of this installation"
            continue
        module = importlib.import_module(path)
        why = module.refuses(*args)
        if why is None:
            plan, later = getattr(module, "plan", None) if op == "attend_pages" else None, getattr(module, f"{FUNCTIONS[op]}_later", None)
            return Choice(op, name, getattr(module, FUNCTIONS[op]), refusals, plan, later)
        refusals[name] = why
    raise SpecError(f"{op}: backend {backend!r} refuses this call: {refusals.get(backend, refusals)}; use backend='auto'")
