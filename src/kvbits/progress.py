"""Progress bars on standard error, so that standard output stays clean for results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .units import human_seconds

MEASURED_FOR = 3.0
"""Seconds of work after which its rate is known."""
WORTH_SAYING = 20.0
"""Seconds: what takes less is not announced."""


class Estimate:
    """An estimate, printed once, of how long the rest of a work takes, by the rate that its first part was measured at.

    Args:
        what: the work.
        total: its size, in any unit in which equal parts take equal times.
        say: told the sentence.
        clock: seconds.
    """

    def __init__(
        self, what: str, total: float, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.what, self.total, self.say, self.clock = what, total, say, clock
        self.done, self.said, self.start = 0.0, False, clock()

    def advance(self, n: float) -> None:
        self.done += n
        elapsed = self.clock() - self.start
        if self.said or elapsed < MEASURED_FOR or not 0 < self.done < self.total:
            return
        self.said = True
        left = elapsed / self.done * (self.total - self.done)
        if left >= WORTH_SAYING:
            self.say(
                f"{self.what}: about {human_seconds(left)} left, by the rate of the first {self.done / self.total:.0%}"
            )


@contextmanager
def bar(what: str, total: float, *, enabled: bool = True, even: bool = True) -> Iterator[Callable[[float], None]]:
    """Show a progress bar; the value is a function that advances it.

    Args:
        even: equal parts of `total` take equal times, so the first of them says how long the rest takes.
    """
    if not enabled:
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:  # a log: a line now and then instead of a moving bar
        yield _lines(console, what, total, even)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        estimate = Estimate(what, total, lambda text: console.print(text, highlight=False))

        def advance(n: float) -> None:
            progress.advance(task, n)
            if even:
                estimate.advance(n)

        yield advance


def _lines(console: Any, what: str, total: float, even: bool) -> Callable[[float], None]:
    done, shown = 0.0, 0
    console.print(f"{what} ...", highlight=False)
    estimate = Estimate(what, total, lambda text: console.print(text, highlight=False, soft_wrap=True))

    def advance(n: float) -> None:
        nonlocal done, shown
        done += n
        if even:
            estimate.advance(n)
        if int(10 * done / total) > shown:
            shown = int(10 * done / total)
            console.print(f"{what}: {10 * shown} %", highlight=False)

    return advance


def say(sentence: str) -> None:
    """Print a line on standard error."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, emoji=False).print(f"kvbits: {sentence}", highlight=False, markup=False)
