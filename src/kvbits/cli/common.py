"""What the commands share: the application, tables, JSON, errors turned into one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import KvbitsError, SpecError
from ..files import to_json

if TYPE_CHECKING:
    from rich.table import Table


PIPE_WIDTH = 220
"""Columns where standard output is no terminal: tables are not cut."""

_OPTIONAL = {"transformers": "hf", "gguf": "hf", "accelerate": "hf", "tokenizers": "hf", "matplotlib": "plot"}


class _Group(TyperGroup):
    """Turns errors raised on purpose, and files that cannot be used, into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvbitsError as e:
            message = str(e)
        except OSError as e:  # a file that cannot be read or written, a full disk
            if e.filename is None:
                raise
            message = f"{e.filename}: {e.strerror or e}"
        except ModuleNotFoundError as e:
            package = (e.name or "").split(".")[0]
            if package not in _OPTIONAL:
                raise
            message = f"this needs {e.name}, which is not installed; run `pip install 'kvbits[{_OPTIONAL[package]}]'`"
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Few-bit KV caches for LLM inference: what they cost in memory and accuracy, and static scales for them.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads for torch; its own choice if not given.", min=1)]


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")] = False) -> None:
    pass


def print_json(data: dict[str, Any]) -> None:
    typer.echo(to_json(data))


def show(*things: Any) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for thing in things:
        console.print(thing, highlight=False)


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are text and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    return table


def names_of(option: str, text: str) -> list[str]:
    """What a comma-separated option names.

    Raises:
        SpecError: nothing.
    """
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise SpecError(f"{option} {text!r} names nothing; give names, comma-separated")
    return names


def require_model(model: str) -> None:
    """Refuse what is no model, before torch is imported."""
    from ..geometry import find_model

    find_model(model, look_up=False)


def set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
