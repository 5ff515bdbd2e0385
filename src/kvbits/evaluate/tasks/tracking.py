"""Keeping track of what changes: a state is told in small steps and asked for in the end, part by part, with the right
answers fed (`recall`).

    variables   names are given numbers of two digits; one line in ten gives a name told before another one, and only
                the last one counts
    lists       the same with three digits; one is exchanged
    sums        visitors come to four houses in turn; how many are in each is told at every visit, and the next counts
                are asked for

What variables and lists tell is told in `Table.STEPS` lines, and noise fills --contexts; lines of sums have noise
behind them. So questions reach further back than the newest tokens, and how hard they are does not depend on
--contexts. All values are numbers: models of some hundred million parameters recall them, and do not recall words, or
which of many blocks is open (docs/results/log/evaluation-2026-11.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar, Protocol

from ...errors import DataError
from .recall import FILLER, ForcedTask, Part, words
from .ruler import sentences

HOUSES = ("red", "blue", "green", "gold")


class TrackingTask(ForcedTask):
    """Every kind of state, at every length."""

    name: ClassVar[str] = "tracking"

    def parts(self, kind: str, length: int, rng: random.Random) -> tuple[list[int], list[Part]]:
        ids: list[int] = []
        tell = STATES[kind](rng)
        while len(ids) < length:
            ids += self.encode(tell.step())
        asked = tell.questions()
        if not any(question for _, question in asked):
            raise DataError(f"{self.name} {kind}: {length} tokens tell too little to ask for; give larger --contexts")
        return ids, asked


class State(Protocol):
    """State that a text keeps track of."""

    def step(self) -> str:
        """Return one change, told, or noise."""

    def questions(self) -> list[Part]:
        """Return what is asked in the end."""


class Table:
    """Names with numbers, told in `STEPS` lines. The first names that are asked for are examples of a question."""

    STEPS: ClassVar[int] = 20
    AGAIN: ClassVar[float] = 1 / 10
    ASKED: ClassVar[int] = 10
    EXAMPLES: ClassVar[int] = 2

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.left, self.noise = rng, self.STEPS, sentences()
        self.state: dict[str, list[int]] = {}

    def numbers(self, old: list[int] | None) -> list[int]:
        """Return the numbers that a name is given. `old` holds its earlier numbers, or is None if it had none."""
        raise NotImplementedError

    def step(self) -> str:
        if not self.left:
            return next(self.noise)
        self.left -= 1
        again = bool(self.state) and self.rng.random() < self.AGAIN
        name = self.rng.choice(list(self.state) if again else [w for w in words() if w not in self.state])
        self.state[name] = self.numbers(self.state.get(name))
        return f" {name} = {', '.join(map(str, self.state[name]))}\n"

    def questions(self) -> list[Part]:
        asked: list[Part] = [("\n", False)]
        for i, name in enumerate(self.rng.sample(list(self.state), min(self.ASKED + self.EXAMPLES, len(self.state)))):
            asked.append((f" {name} =", False))
            for j, number in enumerate(self.state[name]):
                asked += [*([(",", False)] if j else []), (f" {number}", i >= self.EXAMPLES)]
            asked.append(("\n", False))
        return asked


class Variables(Table):
    """One number a name."""

    def numbers(self, old: list[int] | None) -> list[int]:
        return [self.rng.choice([n for n in range(10, 100) if [n] != old])]


class Lists(Table):
    """Three digits a name. One digit is exchanged."""

    def numbers(self, old: list[int] | None) -> list[int]:
        found = [self.rng.randrange(10) for _ in range(3)] if old is None else list(old)
        if old is not None:
            at = self.rng.randrange(3)
            found[at] = self.rng.choice([n for n in range(10) if n != old[at]])
        return found


class Sums:
    """Counts that go up by one."""

    ASKED: ClassVar[int] = 12

    def __init__(self, rng: random.Random) -> None:
        self.state, self.turn = {name: rng.randrange(5, 50) for name in HOUSES}, 0

    def _step(self) -> list[Part]:
        name, known = HOUSES[self.turn % len(HOUSES)], self.turn >= len(HOUSES)
        self.turn += 1
        self.state[name] += 1
        return [(f" {name} house:", False), (f" {self.state[name]}", known), (f". {FILLER.strip()}\n", False)]

    def step(self) -> str:
        return "".join(piece for piece, _ in self._step())

    def questions(self) -> list[Part]:
        return [part for _ in range(self.ASKED) for part in self._step()]


STATES: dict[str, Callable[[random.Random], State]] = {"variables": Variables, "lists": Lists, "sums": Sums}
TrackingTask.KINDS = tuple(STATES)
