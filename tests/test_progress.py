"""Bars say how long the rest takes, from the rate at which their first part was done."""

from __future__ import annotations

import pytest
from messages import mentions

from kvbits.progress import MEASURED_FOR, WORTH_SAYING, Estimate


def said(total, *parts):
    """Sentences of an estimate whose parts (size, seconds) were done one after another."""
    now, found = [0.0], []
    estimate = Estimate("work", total, found.append, clock=lambda: now[0])
    for size, seconds in parts:
        now[0] += seconds
        estimate.advance(size)
    return found


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_the_rest_is_by_the_rate_of_the_first_part(rate):
    (sentence,) = said(100, (10, 10 * rate), (10, 10 * rate))
    left = 90 * rate
    wanted = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} minutes"
    assert mentions(sentence, "work", wanted, "10%")


def test_nothing_is_said_before_a_rate_is_known_or_of_what_is_short():
    assert not said(100, (1, MEASURED_FOR / 2))
    assert len(said(100, (1, MEASURED_FOR / 2), (1, MEASURED_FOR))) == 1
    assert not said(2, (1, WORTH_SAYING / 2))
    assert not said(1, (1, 1000.0))
