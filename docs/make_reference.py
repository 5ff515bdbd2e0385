"""Writer of docs/reference/api.md and cli.md from docstrings and commands: `python docs/make_reference.py`. A test
holds them equal.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer

import kvbits
from kvbits.cli import app
from kvbits.report.markdown import table

FOLDER = Path(__file__).parent / "reference"
CLASSES = ("KVCache", "PagedCache", "PrefixStore", "Calibration", "Scheme", "QuantSpec")
"""Classes whose methods are listed."""


def first(doc: str | None) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = re.sub(r"\s+", " ", inspect.cleandoc(doc or "").split("\n\n")[0])
    return re.split(r"(?<=\.) (?=[A-Z`0])", paragraph, maxsplit=1)[0].replace("|", "\\|")


def methods(cls: type) -> list[tuple[str, str]]:
    """Return (name with parameters, first sentence) of what a class itself makes public and documents."""
    found = []
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not getattr(function, "__doc__", None) or not callable(function):
            continue
        names = (
            []
            if isinstance(member, property)
            else [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        )
        found.append(
            (f"`{name}`" if isinstance(member, property) else f"`{name}({', '.join(names)})`", first(function.__doc__))
        )
    return found


def api() -> str:
    lines = [
        "# Python",
        "",
        (
            "Names of `kvbits`, with the first sentence of their docstrings. `help()` prints the rest: shapes, units,"
            " errors and limits."
        ),
        "",
        table(
            ["name", "what it is"],
            [(f"`{name}`", first(getattr(kvbits, name).__doc__)) for name in kvbits.__all__ if name != "__version__"],
            left=2,
        ),
    ]
    for name in CLASSES:
        lines += ["", f"## {name}", "", table(["", ""], methods(getattr(kvbits, name)), left=2)]
    return "\n".join(lines) + "\n"


def options(command: Any) -> list[str]:
    return [
        (
            f"`{max(p.opts, key=len)}`"
            if p.param_type_name == "option"
            else f"`{(p.metavar or p.name).strip('{}').upper()}`"
        )
        for p in command.params
        if p.name != "help"
    ]


def cli() -> str:
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "`kvbits COMMAND --help` explains each option.",
        "",
        table(
            ["command", "what it does", "takes"],
            [(f"`{name}`", first(c.help), ", ".join(options(c))) for name, c in sorted(group.commands.items())],
            left=3,
        ),
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    return {FOLDER / "api.md": api(), FOLDER / "cli.md": cli()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
