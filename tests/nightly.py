"""Cases that only `make night` runs."""

import pytest


def at_night(*cases):
    """Mark cases of `parametrize`: repetitions, each of some seconds, of a path that a case in the gate takes."""
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.night) for c in cases]
