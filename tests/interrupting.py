"""Interrupts at chosen places of an operation: between two instructions of this library or of `contextlib`."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvbits

FILES = (str(Path(kvbits.__file__).parent), contextlib.__file__)
THOROUGH = os.environ.get("KVBITS_HYPOTHESIS") == "thorough"


class Counter:
    """Counts instructions, and raises KeyboardInterrupt before one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.count, self.at = 0, at

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                self.at = None
                raise KeyboardInterrupt
        return self

    def run(self, work: Callable[[], Any]) -> bool:
        """Run the work. Return whether it came to its end."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
            return True
        except KeyboardInterrupt:
            return False
        finally:
            sys.settrace(before)


def points(total: int, most: int) -> list[int]:
    """Some places of so many, always the same ones; ten times as many in a thorough run."""
    most = min(total, most * (10 if THOROUGH else 1))
    return sorted(random.Random(total).sample(range(1, total + 1), most))


def interrupted(make: Callable[[], Any], work: Callable[[Any], Any], most: int) -> Iterator[tuple[int, Any]]:
    """Yield what `make` makes, each time after `work` on it was interrupted at another place."""
    work(make())  # what is chosen or compiled once
    counter = Counter()
    assert counter.run(lambda: work(subject)) if (subject := make()) is not None else False
    for at in points(counter.count, most):
        subject = make()
        Counter(at).run(lambda: work(subject))  # noqa: B023
        yield at, subject
