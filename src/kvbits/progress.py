"""Progress bars on standard error, so that standard output stays clean for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(what: str, total: float, *, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """A progress bar; the value is a function that advances it."""
    if not enabled:
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:  # a log: a line now and then instead of a moving bar
        yield _lines(console, what, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)


def _lines(console: Any, what: str, total: float) -> Callable[[float], None]:
    done, shown = 0.0, 0
    console.print(f"{what} ...", highlight=False)

    def advance(n: float) -> None:
        nonlocal done, shown
        done += n
        if int(10 * done / total) > shown:
            shown = int(10 * done / total)
            console.print(f"{what}: {10 * shown} %", highlight=False)

    return advance


def say(sentence: str) -> None:
    """A line on standard error."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, emoji=False).print(f"kvbits: {sentence}", highlight=False, markup=False)
