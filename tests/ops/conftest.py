"""Fixtures of the CPU kernel tests."""

from __future__ import annotations

import pytest
from ops.cpu_cases import TIERS

from kvbits.ops.cpu import library


@pytest.fixture(params=TIERS)
def tier(request):
    """The name of an instruction set, in use for the test; every one that this machine can run."""
    before = library.tier()
    library.set_tier(request.param)
    yield request.param
    library.set_tier(before)
