"""Cases that hypothesis draws: the same ones on every machine and in every order, or with KVBITS_HYPOTHESIS=thorough
many others.

`derandomize` fixes the stream of random numbers, but hypothesis draws one number in twenty from the constants of
whatever local modules have been imported, which depends on the tests that a worker ran before. `fix` empties that pool.
"""

from __future__ import annotations

import os

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

EXAMPLES = {"ci": 25, "thorough": 1000}
"""Examples of a test that asks for no number of its own, by profile."""


def fix() -> None:
    """Load the profile that KVBITS_HYPOTHESIS names ("ci" without it) and take other modules' constants out of every
    draw.
    """
    try:  # what the patch rests on: other code of hypothesis would draw other cases on every machine without a word
        none = providers.Constants()
        known = (
            not len(none)
            and "_get_local_constants" in providers.HypothesisProvider._local_constants.func.__code__.co_names
        )
    except AttributeError:
        known = False
    if not known:
        raise RuntimeError(
            f"hypothesis {hypothesis.__version__} has other internals than 6.170.15 (constraints.txt): adapt"
            " tests/random_cases.py"
        )
    providers._get_local_constants = lambda: none
    common = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    }
    settings.register_profile("ci", max_examples=EXAMPLES["ci"], derandomize=True, print_blob=True, **common)
    settings.register_profile("thorough", max_examples=EXAMPLES["thorough"], print_blob=True, **common)
    settings.load_profile(os.environ.get("KVBITS_HYPOTHESIS", "ci"))


def examples(in_gate: int, thorough: int | None = None) -> settings:
    """Settings of a test that takes more or fewer examples than others: `in_gate` of them, `thorough` in a long run (as
    many times more as all tests take).
    """
    factor = settings().max_examples / EXAMPLES["ci"]
    return settings(max_examples=in_gate if factor == 1 else thorough or round(in_gate * factor))
