"""Fixtures of the CPU kernel tests."""

from __future__ import annotations

import pytest
from ops.cpu_cases import TIERS, VECTOR_TIERS

from kvbits.ops.cpu import library


def _in_use(name):
    before = library.tier()
    library.set_tier(name)
    yield name
    library.set_tier(before)


@pytest.fixture(params=VECTOR_TIERS)
def tier(request):
    """The name of an instruction set, in use for the test; every one that this machine can run and that has kernels of
    its own for all calls.
    """
    yield from _in_use(request.param)


@pytest.fixture(params=TIERS)
def tier_of_chunks(request):
    """The same for calls that are served in tiles where a tier has them."""
    yield from _in_use(request.param)
