"""Poisoned memory, fixed seeds, few threads, a cache folder of the checkout, the same random cases everywhere
(random_cases.py).
"""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # shared helpers: `from dense_model import ...`

import random_cases

random_cases.fix()

# glibc: fresh memory is 0x7F, the largest numbers that integers and floats have
if hasattr(_libc := ctypes.CDLL(None), "mallopt"):
    _libc.mallopt(-6, 0x80)  # M_PERTURB


@pytest.fixture(scope="session", autouse=True)
def poisoned_page_memory():
    """Fresh page memory is 0xFF: NaN in every float format, the top code in packed integers."""
    from kvbits.cache import pool

    allocate = pool.allocate_slab
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "allocate_slab", lambda nbytes, device: allocate(nbytes, device).fill_(0xFF))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder():
    """Calibrations, kernels and measurements are kept in build/, so tests never write to the user's cache folder. A folder
    that the environment names is taken.
    """
    folder = os.environ.get("KVBITS_CACHE") or str(Path(__file__).parents[1] / "build" / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBITS_CACHE", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    torch.set_num_threads(int(os.environ.get("KVBITS_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    np.random.seed(0)


def pytest_terminal_summary(terminalreporter):
    """Print what kernels keep in local memory, beside what their tests state."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = sorted(
        {
            (*found, r.nodeid.split("::")[1])
            for r in reports
            if r.when == "call"
            for name, found in map(tuple, r.user_properties)
            if name == "spilt" and found[1]
        }
    )
    if rows:
        terminalreporter.section("bytes that CUDA kernels spill to local memory")
        for kernel, nbytes, most, test in rows:
            terminalreporter.line(f"{nbytes:6} of {most:5} stated  {kernel}, {test}")
