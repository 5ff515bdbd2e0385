"""Loads of the serving benchmarks and their search, with an engine that is a clock and a queue."""

from __future__ import annotations

import itertools
import math

import pytest
from loads import Arrivals, Chats, Limits, Request, Timing, at_share, drive, highest, most_at_once
from queue_engine import QueueEngine

PROMPTS, ANSWERS = (64, 256), (8, 64)


def arrivals(rate, count=40, **more):
    return Arrivals(rate, count, PROMPTS, ANSWERS, vocabulary=1000, **more)


def everything(load):
    return list(load.due(math.inf))


def test_requests_are_the_same_at_every_rate_and_for_every_count():
    slow, fast = everything(arrivals(1.0)), everything(arrivals(4.0, 60))
    assert [r for _, r in slow] == [r for _, r in fast[:40]] and [at for at, _ in slow] == pytest.approx(
        [4 * at for at, _ in fast[:40]]
    )
    assert [r for _, r in everything(arrivals(1.0, seed=1))] != [r for _, r in slow]
    assert all(
        64 <= len(r.prompt) <= 256 and 8 <= r.answer <= 64 and min(r.prompt) >= 3 and max(r.prompt) < 1000
        for _, r in slow
    )
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(everything(arrivals(2.0, 2000)))]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.1) and sum(g < 0.5 for g in gaps) / len(
        gaps
    ) == pytest.approx(1 - math.exp(-1), abs=0.05)


def test_requests_are_asked_when_they_are_due_and_timed_from_then():
    engine = QueueEngine()
    seen, seconds = drive(engine, arrivals(2.0), lambda now, timings: False)
    assert [r.name for r in engine.seen] == list(seen) == [f"r{i}" for i in range(40)]
    assert all(t.finished and t.asked <= t.first <= t.last <= seconds for t in seen.values())
    assert all(
        t.made == r.answer and t.prompt == len(r.prompt) for t, r in zip(seen.values(), engine.seen, strict=True)
    )
    assert most_at_once(seen.values()) <= engine.most <= 8
    assert all(0.0109 < t.per_token < 0.04 for t in seen.values())


def test_what_is_unfinished_at_the_end_is_taken_back():
    engine = QueueEngine(slots=2)
    seen, seconds = drive(engine, arrivals(50.0), lambda now, timings: now > 0.5)
    assert not engine.busy() and 0.5 < seconds < 0.6
    late = [t for t in seen.values() if t.first is None]
    assert late and all(t.wait(seconds) == seconds - t.asked and t.per_token is None for t in late)


def test_percentiles_are_of_the_nearest_rank():
    assert [at_share(range(1, 101), s) for s in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert at_share([3.0, 1.0], 0.99) == 3.0 and at_share([3.0, 1.0], 0.5) == 1.0 and math.isnan(at_share([], 0.5))


def test_a_rate_is_given_up_when_and_only_when_its_percentile_cannot_hold():
    limits = Limits(first=1.0, per_token=0.1)
    good, waits = Timing(0.0, 10, 11, first=0.5, last=1.0, made=11), Timing(0.0, 10, 11)
    assert not limits.broken([waits, *[good] * 99], 5.0, 100) and limits.broken([waits] * 2, 5.0, 100), (
        "one of a hundred may be late"
    )
    assert limits.broken([waits] * 2, 5.0, 199) and not limits.broken([waits] * 2, 5.0, 200)
    slow = Timing(0.0, 10, 11, first=0.5, last=0.6, made=2)
    assert not limits.broken([slow], 1.4, 10) and limits.broken([slow], 1.6, 10), (
        "eleven tokens have 1.0 s after the first"
    )
    assert limits.hold([good] * 99 + [waits], 5.0) and not limits.hold([good] * 98 + [waits] * 2, 5.0)
    under_way = Timing(0.0, 10, 1000, first=0.5, last=5.5, made=41)
    assert under_way.per_token == 0.125 and not limits.hold([under_way], 5.5)
    assert Timing(0.0, 10, 1000, first=0.5, last=5.5, made=20).per_token is None, "too few to tell"


@pytest.mark.parametrize("edge", [0.07, 0.5, 1.0, 3.3, 80.0])
def test_the_search_ends_between_a_rate_that_held_and_one_that_did_not(edge):
    tried = []

    def holds(rate):
        tried.append(rate)
        return rate <= edge

    held, failed = highest(holds, 1.0, within=0.1)
    assert held <= edge < failed <= 1.1 * held * 1.001
    assert len(tried) == len(set(tried)) and tried[0] == 1.0


def test_the_search_ends_without_an_answer_or_time():
    assert highest(lambda rate: False, 1.0) == (None, 0.0156)
    tried = []
    assert highest(lambda rate: tried.append(rate) is None, 1.0, go_on=lambda rate: len(tried) < 3) == (
        4.0,
        None,
    ) and tried == [1.0, 2.0, 4.0]


def test_a_search_with_an_engine_finds_what_it_serves():
    limits = Limits(first=0.5, per_token=0.05)
    seconds = {}

    def holds(rate):
        count = round(max(50, 20 * rate))
        seen, took = drive(
            QueueEngine(), arrivals(rate, count), lambda now, timings: limits.broken(list(timings.values()), now, count)
        )
        seconds[rate] = took
        return len(seen) == count and limits.hold(list(seen.values()), took)

    held, failed = highest(holds, 1.0)
    assert 8 < held < 20 and failed <= 1.1 * held, "8 slots, steps of 10 to 18 ms, 27 tokens: some 16 a second"
    assert seconds[max(seconds)] < seconds[held], "what is far past the limit is given up"


def test_chats_share_a_system_prompt_and_grow_by_what_was_written_and_answered():
    chats = Chats(
        users=5, vocabulary=1000, system=16, history=(32, 128), longest=400, message=(4, 16), answer=(4, 16), think=1.0
    )
    engine = QueueEngine()
    drive(engine, chats, lambda now, timings: now > 60)
    by_user = {u: [r for r in engine.seen if r.name.startswith(f"u{u}.")] for u in range(5)}
    assert (
        len({tuple(r.prompt[:16]) for r in engine.seen}) == 1 and len({tuple(r.prompt[16:24]) for r in engine.seen}) > 5
    )
    fresh = 0
    for turns in by_user.values():
        assert len(turns) > 10 and len({r.name for r in turns}) == len(turns)
        for a, b in itertools.pairwise(turns):
            assert len(b.prompt) + b.answer <= 400
            whole = [*a.prompt, *[7] * a.answer]
            fresh += b.prompt[: len(whole)] != whole
    assert fresh >= 5, "a chat that became too long ends"
    again = QueueEngine()
    drive(
        again,
        Chats(
            users=5,
            vocabulary=1000,
            system=16,
            history=(32, 128),
            longest=400,
            message=(4, 16),
            answer=(4, 16),
            think=1.0,
        ),
        lambda now, _: now > 60,
    )
    assert again.seen == engine.seen


def test_histories_are_those_of_the_last_users_that_fit():
    chats = Chats(users=4, vocabulary=1000, system=16, history=(100, 100))
    assert (
        [len(h) for h in chats.histories(250)] == [100, 100]
        and chats.histories(250) == chats.histories(1000)[2:]
        and len(chats.histories(400)) == 4
    )
    for at, request in chats.due(math.inf):
        assert at >= 0 and isinstance(request, Request)
    assert chats.next() is None, "all wait for an answer"
