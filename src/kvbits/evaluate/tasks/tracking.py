"""Keeping track of what changes: a state is told in small steps that fill --contexts tokens, and then asked for, part by part, with the right answers
fed (`recall`).

    variables   names are given numbers again and again; only the last one counts
    sums        visitors come to houses; how many are in each is told after every step, and the next count is asked for
    brackets    blocks with names are opened inside one another; they are closed from the inside out
    lists       things are put at the end of a list or taken out of it; what is left is asked for in order

How hard they are is in --contexts: take the lengths at which the 16-bit cache scores 85 to 95 %.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar, Protocol

from .recall import ForcedTask, Part, words

NAMES = ("red", "blue", "green", "gold", "pink", "gray", "black", "white")
ASKED = 16
"""Questions of a prompt, at most."""


class TrackingTask(ForcedTask):
    """Every kind of state, at every length."""

    name: ClassVar[str] = "tracking"

    def parts(self, kind: str, length: int, rng: random.Random) -> tuple[list[int], list[Part]]:
        ids: list[int] = []
        tell = STATES[kind](rng)
        while len(ids) < length:
            ids += self.encode(tell.step())
        return ids, tell.questions()


class State(Protocol):
    """What is kept track of."""

    def step(self) -> str:
        """One change, told."""

    def questions(self) -> list[Part]:
        """What is asked in the end."""


class Variables:
    """The number each name has last, asked for in another order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.state = rng, dict.fromkeys(NAMES, 0)
        self.due: list[str] = list(NAMES)

    def step(self) -> str:
        name = self.due.pop() if self.due else self.rng.choice(NAMES)
        self.state[name] = self.rng.randrange(100, 1000)
        return f" {name} = {self.state[name]}\n"

    def questions(self) -> list[Part]:
        asked: list[Part] = [("Now the values are:\n", False)]
        for name in self.rng.sample(NAMES, len(NAMES)):
            if name not in self.due:
                asked += [(f" {name} =", False), (f" {self.state[name]}", True), ("\n", False)]
        return asked


class Sums:
    """Counts that go up by 1 to 3, of houses in turns that are drawn, after each had one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.state = rng, {name: rng.randrange(5, 50) for name in NAMES}
        self.due: list[str] = list(NAMES)

    def _step(self) -> tuple[str, str]:
        name, more = self.due.pop() if self.due else self.rng.choice(NAMES), self.rng.randrange(1, 4)
        before = self.state[name]
        self.state[name] += more
        return f" {name} house: {before} + {more} =", f" {self.state[name]}"

    def step(self) -> str:
        return "".join(self._step()) + "\n"

    def questions(self) -> list[Part]:
        asked: list[Part] = []
        for _ in range(ASKED):
            told, answer = self._step()
            at = told.index(":") + 1
            before = told[at:].split(" + ")[0]
            asked += [(told[:at], False), (before, True), (told[at + len(before) :], False), (answer, True), ("\n", False)]
        return asked


class Brackets:
    """Names of the innermost open blocks. Lines of words stand between openings, so that few blocks are many tokens away."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.open: list[str] = []

    def step(self) -> str:
        self.open.append(self.rng.choice(words()))
        filler = " ".join(self.rng.sample(words(), 6))
        return f"<{self.open[-1]}>\n {filler}\n"

    def questions(self) -> list[Part]:
        asked: list[Part] = []
        for name in self.open[::-1][:ASKED]:
            asked += [("</", False), (name, True), (">\n", False)]
        return asked


class Lists:
    """Things of a list that stays about `ASKED` / 2 long."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.things: list[str] = []

    def step(self) -> str:
        if len(self.things) > ASKED // 2 or (len(self.things) > 3 and self.rng.random() < 0.5):
            return f" Remove {self.things.pop(self.rng.randrange(len(self.things)))}.\n"
        self.things.append(self.rng.choice([w for w in words() if w not in self.things]))
        return f" Add {self.things[-1]}.\n"

    def questions(self) -> list[Part]:
        asked: list[Part] = [("What was added and not removed, in order:", False)]
        for thing in self.things[:ASKED]:
            asked += [(f" {thing}", True), (",", False)]
        return asked


STATES: dict[str, Callable[[random.Random], State]] = {"variables": Variables, "sums": Sums, "brackets": Brackets, "lists": Lists}
TrackingTask.KINDS = tuple(STATES)
