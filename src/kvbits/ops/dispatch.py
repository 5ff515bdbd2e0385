"""Choice of the backend that serves an op, made once per kind of call, with every refusal kept as text.

A backend is a folder of this package with a module for each op, named like the op (else `FUNCTIONS` says how). The
module has the op's function and may have

    refuses(*args)          why it does not take such a call, or None; without it, it takes every call
    prepare(*args)          what must be there before a CUDA graph is captured
    refuses_layout(layout)  the part of `refuses` that pages alone decide, without a device or a built library:
                            `natives` asks it

The order of the list is the order of preference; the reference is last. A backend is skipped only for a reason it
states, never because it raised. `python -m kvbits.ops.dispatch` prints who serves which kind of format.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .. import schemes
from ..errors import SpecError, UnsupportedError
from ..spec import PageLayout

BACKENDS = {
    "attend": ("cpu", "cuda", "reference"),
    "store": ("cpu", "cuda", "reference"),
    "close": ("cpu", "cuda", "reference"),
    "attend_fresh": ("cpu", "cuda", "reference"),
    "merge": ("cpu", "cuda", "reference"),
    "unpack": ("cpu", "cuda", "reference"),
}
FUNCTIONS = {
    "attend": ("attend", "plan"),
    "merge": ("merge", "merge_partials"),
    "unpack": ("unpack", "Rows"),
}
"""(module, function) of an op that is not named like both."""


@dataclass(frozen=True)
class Choice:
    """The backend that serves an op, and why the ones before it do not."""

    op: str
    backend: str
    run: Callable[..., Any]
    refusals: dict[str, str]
    prepare: Callable[[], Any]

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.refusals.items())
        return f"{self.op} by {self.backend}" + (f" ({reasons})" if reasons else "")


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that no op has, and kernels of another device.

    Raises:
        SpecError: the message lists those that can be.
    """
    known = sorted({name for backends in BACKENDS.values() for name in backends})
    if backend != "auto" and backend not in known:
        raise SpecError(f"unknown backend {backend!r}; known: auto, {', '.join(known)}")
    if backend not in ("auto", "reference", device.type):
        raise SpecError(
            f"backend={backend!r} has no kernel for what lies on {device.type}; use {device.type!r}, 'reference' or"
            " 'auto'"
        )


@functools.cache
def _module(backend: str, op: str) -> ModuleType | None:
    path = f"{__package__}.{backend}.{FUNCTIONS.get(op, (op,))[0]}"
    return None if importlib.util.find_spec(path) is None else importlib.import_module(path)


def _nothing() -> None:
    """Do nothing, for a backend without `prepare`. It has a name so that a cache's choices can be pickled."""


def choose(op: str, *args: Any, backend: str = "auto") -> Choice:
    """Return the first backend that takes a call like `args`, or the one named.

    Raises:
        SpecError: unknown backend, or the named one refuses; the message says why.
        UnsupportedError: every backend refuses; the message says why each does.
    """
    backends = BACKENDS[op]
    if backend != "auto" and backend not in backends:
        raise SpecError(f"unknown backend {backend!r} for {op}; known: auto, {', '.join(backends)}")
    refusals: dict[str, str] = {}
    for name in backends:
        if backend not in ("auto", name):
            continue
        module = _module(name, op)
        why = (
            "not part of this installation"
            if module is None
            else module.refuses(*args)
            if hasattr(module, "refuses")
            else None
        )
        if module is not None and why is None:
            function = FUNCTIONS.get(op, (op, op))[1]
            prepare = functools.partial(module.prepare, *args) if hasattr(module, "prepare") else _nothing
            return Choice(
                op,
                name,
                getattr(module, function),
                refusals,
                prepare,
            )
        refusals[name] = str(why)
    if backend == "auto":
        raise UnsupportedError(f"{op}: " + "; ".join(f"{name}: {why}" for name, why in refusals.items()))
    raise SpecError(f"{op}: backend {backend!r} refuses this call: {refusals[backend]}; use backend='auto'")


OPERATIONS: dict[str, tuple[str, dict[str, int]]] = {
    "decode": ("attend", {}),
    "chunk": ("attend", {"num_queries": 512}),
    "close": ("close", {}),
    "store": ("store", {}),
    "unpack": ("unpack", {}),
}
"""Operations on pages: decoding, many queries past them, a page that closes, tokens one by one, and unpacking. The
op of each, and what `refuses_layout` is asked beside the layout.
"""


def natives(layout: PageLayout) -> dict[str, dict[str, str | None]]:
    """Return, for each of OPERATIONS that a layout has, why each backend with kernels does not serve it. The value is
    None where the backend serves it. The function asks no device.

    Raw pages are not closed; only token-local ones take tokens one by one.
    """
    found: dict[str, dict[str, str | None]] = {}
    for name, (op, options) in OPERATIONS.items():
        if (op == "close" and layout.is_raw) or (op == "store" and not layout.token_local):
            continue
        modules = {backend: _module(backend, op) for backend in BACKENDS[op] if backend != "reference"}
        found[name] = {
            backend: "not part of this installation" if m is None else m.refuses_layout(layout, **options)
            for backend, m in modules.items()
        }
    return found


def table(names: Mapping[str, str], head_dim: int = 128) -> str:
    """Return schemes (by title) x operations x backends: "native", "-" where a backend has none and the reference
    serves, or the number of a refusal, listed below.
    """
    refusals: dict[str, int] = {}
    lines = [f"{'':24}{'':18}{'cpu':10}cuda"]
    for title, name in names.items():
        scheme = schemes.get(name, head_dim=head_dim)
        layout = PageLayout(
            key=scheme.key, value=scheme.value, page_size=scheme.page_size, num_kv_heads=8, head_dim=head_dim
        )
        for i, (operation, answers) in enumerate(natives(layout).items()):
            cells = {
                b: f"[{refusals.setdefault(why, len(refusals) + 1)}]" if why else "native" for b, why in answers.items()
            }
            lines.append(f"{'' if i else title:24}{operation:18}{cells.get('cpu', '-'):10}{cells.get('cuda', '-')}")
    asked = {op for op, _ in OPERATIONS.values()}
    others = [f"{op} ({', '.join(backends[:-1])})" for op, backends in BACKENDS.items() if op not in asked]
    return "\n".join(
        [*lines, *(f"[{n}] {why}" for why, n in refusals.items()), f"Native whatever the format: {', '.join(others)}."]
    )


if __name__ == "__main__":
    first: dict[str, str] = {}  # preset of each kind of number
    for preset, scheme in schemes.PRESETS.items():
        first.setdefault(scheme.key.number_format.kind, preset)
    print(
        table({name: name for name in sys.argv[1:]} or {f"{kind}: {preset}": preset for kind, preset in first.items()})
    )
