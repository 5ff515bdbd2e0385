"""Loads of an engine, and how long answers took: requests at Poisson times, users of long chats, percentiles, the
highest rate that holds.

No engine and no clock is in here: `drive` takes an `Engine`, which has both. Requests are made from seeds, so every
cache is asked the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Range = tuple[int, int]
"""The least and the most tokens; drawn so that every doubling is as frequent as the next."""
FIRST_ID = 3
"""Token ids below are special in the geometries of bench_serve_vllm.py."""
ENOUGH = 32
"""Tokens of an answer under way whose mean time says what the others will take."""


@dataclass(frozen=True)
class Request:
    """
    Attributes:
        prompt: token ids.
        answer: tokens of the answer, which is never shorter.
    """

    name: str
    prompt: list[int]
    answer: int


@dataclass(frozen=True)
class Update:
    """Result of an engine's step for one request.

    Attributes:
        ids: new tokens.
        cached: tokens of the prompt that were not computed.
    """

    name: str
    ids: list[int]
    finished: bool
    cached: int = 0


@dataclass
class Timing:
    """A request's times, in seconds of the load's clock.

    Attributes:
        asked: when it was due, which may be before the engine had time to take it.
        prompt, answer, cached: tokens; `made` of the answer so far.
        first, last: when its first and its newest token came.
    """

    asked: float
    prompt: int
    answer: int
    first: float | None = None
    last: float | None = None
    made: int = 0
    cached: int = 0

    @property
    def finished(self) -> bool:
        return self.made >= self.answer

    def wait(self, now: float) -> float:
        """Return the seconds to the first token; while there is none, those waited so far."""
        return (now if self.first is None else self.first) - self.asked

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first, of an answer under way so far; None of one that has just begun."""
        if self.first is None or self.last is None or self.made < max(2, min(self.answer, ENOUGH)):
            return None
        return (self.last - self.first) / (self.made - 1)

    def least_per_token(self, now: float) -> float:
        """Return the least seconds per token that this answer can come to."""
        if self.first is None or self.last is None or self.answer < 2:
            return 0.0
        return ((self.last if self.finished else now) - self.first) / (self.answer - 1)


class Engine(Protocol):
    """Server of requests, with a clock."""

    def now(self) -> float:
        """Return the clock's seconds."""

    def wait(self, seconds: float) -> None:
        """Wait so long, with nothing to do."""

    def add(self, request: Request) -> None: ...

    def step(self) -> Iterable[Update]: ...

    def busy(self) -> bool:
        """Return whether any request is unfinished."""

    def abort(self, names: list[str]) -> None: ...


class Load(Protocol):
    """Source of requests over time."""

    def due(self, now: float) -> Iterable[tuple[float, Request]]:
        """Yield the requests whose time has come, each once, with that time."""

    def next(self) -> float | None:
        """Return when the next known request is due; None if all were asked or wait for an answer."""

    def answered(self, name: str, ids: list[int], now: float) -> None:
        """Take the whole answer of a request."""


def drive(
    engine: Engine, load: Load, stop: Callable[[float, dict[str, Timing]], bool]
) -> tuple[dict[str, Timing], float]:
    """Send requests until the load ends or `stop(seconds, timings)` returns True. What is unfinished then is taken
    back.

    Returns:
        timings by request, and the seconds that it took.
    """
    seen: dict[str, Timing] = {}
    answers: dict[str, list[int]] = {}
    begin = engine.now()
    while True:
        now = engine.now() - begin
        for at, request in load.due(now):
            seen[request.name], answers[request.name] = Timing(at, len(request.prompt), request.answer), []
            engine.add(request)
        if stop(now, seen):
            engine.abort(list(answers))
            return seen, now
        if not engine.busy():
            if (then := load.next()) is None:
                return seen, now
            engine.wait(max(0.0, then - now))
            continue
        for update in engine.step():
            now = engine.now() - begin
            timing = seen[update.name]
            timing.cached = max(timing.cached, update.cached)
            if update.ids:
                timing.first = now if timing.first is None else timing.first
                timing.last, timing.made = now, timing.made + len(update.ids)
                answers[update.name] += update.ids
            if update.finished:
                load.answered(update.name, answers.pop(update.name), now)


def drawn(rng: np.random.Generator, limits: Range) -> int:
    return round(math.exp(rng.uniform(math.log(limits[0]), math.log(limits[1]))))


def tokens(rng: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    found: list[int] = rng.integers(FIRST_ID, vocabulary, count).tolist()
    return found


class Arrivals:
    """`count` requests at Poisson times.

    Request i has the same tokens at every rate, and times are those of one request a second, divided by the rate.
    """

    def __init__(
        self, rate: float, count: int, prompts: Range, answers: Range, *, vocabulary: int, seed: int = 0
    ) -> None:
        self._made = self._requests(rate, count, prompts, answers, vocabulary, seed)
        self._waiting = next(self._made, None)

    @staticmethod
    def _requests(
        rate: float, count: int, prompts: Range, answers: Range, vocabulary: int, seed: int
    ) -> Iterator[tuple[float, Request]]:
        at = 0.0
        for i in range(count):
            rng = np.random.default_rng((seed, i))
            at += rng.exponential() / rate
            length, answer = drawn(rng, prompts), drawn(rng, answers)
            yield at, Request(f"r{i}", tokens(rng, length, vocabulary), answer)

    def due(self, now: float) -> Iterator[tuple[float, Request]]:
        while self._waiting is not None and self._waiting[0] <= now:
            yield self._waiting
            self._waiting = next(self._made, None)

    def next(self) -> float | None:
        return None if self._waiting is None else self._waiting[0]

    def answered(self, name: str, ids: list[int], now: float) -> None:
        pass


@dataclass(kw_only=True)
class Chats:
    """Users who each write, read the answer, think, and write again.

    All chats begin with one system prompt; each has a history of its own when the load begins, and a user whose chat
    has become too long begins another one.

    Attributes:
        users: how many.
        system: tokens of the system prompt.
        history: tokens of a chat when the load begins, the system prompt among them.
        longest: tokens that a chat may reach.
        message, answer: tokens of each turn.
        think: mean seconds between an answer's last token and the next message, exponential; the first messages come as
            if all were thinking.
    """

    users: int
    vocabulary: int
    system: int = 1024
    history: Range = (8192, 30720)
    longest: int = 32768
    message: Range = (64, 512)
    answer: Range = (64, 512)
    think: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = [np.random.default_rng((self.seed, 1, u)) for u in range(self.users)]
        self._prompt = tokens(np.random.default_rng((self.seed, 2)), self.system, self.vocabulary)
        self._chats = [self._begun(u) for u in range(self.users)]
        self._due = {u: self._rng[u].exponential(self.think) for u in range(self.users)}
        self._turn = [0] * self.users

    def _begun(self, user: int) -> list[int]:
        return [
            *self._prompt,
            *tokens(self._rng[user], max(1, drawn(self._rng[user], self.history) - self.system), self.vocabulary),
        ]

    def histories(self, capacity: int) -> list[list[int]]:
        """Return the chats that a cache of so many tokens holds when the load begins: as if the last users had written
        last.
        """
        kept: list[list[int]] = []
        left = capacity
        for chat in reversed(self._chats):
            left -= len(chat)
            if left < 0:
                break
            kept.insert(0, list(chat))
        return kept

    def due(self, now: float) -> Iterator[tuple[float, Request]]:
        for user, at in sorted(self._due.items(), key=lambda pair: pair[1]):
            if at > now:
                return
            del self._due[user]
            rng = self._rng[user]
            message, answer = tokens(rng, drawn(rng, self.message), self.vocabulary), drawn(rng, self.answer)
            if len(self._chats[user]) + len(message) + answer > self.longest:
                self._chats[user] = self._begun(user)
            self._chats[user] += message
            yield at, Request(f"u{user}.{self._turn[user]}", list(self._chats[user]), answer)

    def next(self) -> float | None:
        return min(self._due.values(), default=None)

    def answered(self, name: str, ids: list[int], now: float) -> None:
        user = int(name[1:].split(".")[0])
        self._chats[user] += ids
        self._turn[user] += 1
        self._due[user] = now + self._rng[user].exponential(self.think)


def at_share(xs: Iterable[float], share: float) -> float:
    """Return the least of `xs` that at least this share of them do not exceed; NaN of none."""
    ordered = sorted(xs)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def most_at_once(timings: Iterable[Timing]) -> int:
    """Return the most requests whose answers were under way at one time."""
    events = [e for t in timings if t.first is not None and t.last is not None for e in ((t.first, 1), (t.last, -1))]
    most = here = 0
    for _, change in sorted(events, key=lambda e: (e[0], -e[1])):
        here += change
        most = max(most, here)
    return most


@dataclass(frozen=True)
class Limits:
    """Limits of the 99th percentiles, in seconds: for the first token, and for each token after it."""

    first: float
    per_token: float
    share: float = 0.99

    def broken(self, timings: Sequence[Timing], now: float, count: int) -> bool:
        """Return whether `count` requests, these among them, will be past a limit whatever becomes of the others."""
        late = (
            sum(t.wait(now) > self.first for t in timings),
            sum(t.least_per_token(now) > self.per_token for t in timings),
        )
        return max(late) > count - math.ceil(self.share * count)

    def hold(self, timings: Sequence[Timing], now: float) -> bool:
        """Return whether these requests are within the limits. Requests that wait count with their wait so far, and
        answers under way with their time per token so far.
        """
        waits, rates = [t.wait(now) for t in timings], [x for t in timings if (x := t.per_token) is not None]
        return not any(at_share(xs, self.share) > limit for xs, limit in ((waits, self.first), (rates, self.per_token)))


def highest(
    holds: Callable[[float], bool],
    start: float,
    *,
    factor: float = 2.0,
    within: float = 0.1,
    least: float = 0.01,
    go_on: Callable[[float], bool] = lambda rate: True,
) -> tuple[float | None, float | None]:
    """Find the highest rate that holds: multiplied from `start` until one does not, or divided until one does, then
    halved between on a scale of ratios.

    Args:
        holds: measures a rate.
        within: the two rates of the answer are at most this share apart.
        least: no rate below is tried.
        go_on: asked before each rate; False ends the search where it is.

    Returns:
        the highest rate that held and the lowest that did not; None where there was none.
    """
    held: float | None = None
    failed: float | None = None
    rate = start
    while rate >= least and (held is None or failed is None or failed / held > 1 + within) and go_on(rate):
        if holds(rate):
            held = rate
        else:
            failed = rate
        rate = rounded(
            held * factor
            if held and failed is None
            else failed / factor
            if failed and held is None
            else math.sqrt((held or 0) * (failed or 0))
        )
        if rate in (held, failed):
            break
    return held, failed


def rounded(rate: float) -> float:
    """Return a rate to three digits."""
    return float(f"{rate:.3g}")
