"""The random cases of a commit are the same whatever is imported beside a test, whatever PYTHONHASHSEED is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import random_cases
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from messages import raises

DRAW = """
import sys

how, beside = sys.argv[1:]
if how == "fixed":
    import random_cases

    random_cases.fix()
else:
    from hypothesis import settings

    settings.register_profile("stock", derandomize=True)
    settings.load_profile("stock")
if beside == "others":
    import hundreds

from hypothesis import given
from hypothesis import strategies as st

drawn = []


@given(st.data())
def collect(data):
    ranges = [st.integers(), st.integers(0, 1000), st.floats(), st.text(), st.sampled_from(range(5000))]
    drawn.append([data.draw(st.lists(r, max_size=9)) for r in ranges])


collect()
print(len(drawn), drawn)
"""


@pytest.fixture
def draws(tmp_path):
    """draws(how, beside, seed): the examples that a process of its own draws.

    It imports a module full of constants where `beside` is "others".
    """
    (tmp_path / "draw.py").write_text(DRAW)
    (tmp_path / "hundreds.py").write_text(
        f"NUMBERS = {[*range(100, 5000, 7)]}\nTEXTS = {[f'text {i}' for i in range(99)]}\nFLOATS ="
        f" {[i / 16 for i in range(99)]}\n"
    )

    def run(how: str, beside: str, seed: int) -> str:
        path = os.pathsep.join([str(tmp_path), str(Path(random_cases.__file__).parent)])
        env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": str(seed), "KVBITS_HYPOTHESIS": "ci"}
        done = subprocess.run(
            [sys.executable, "draw.py", how, beside], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_other_modules_and_hash_seeds_draw_the_same_cases(draws):
    alone = draws("fixed", "alone", 0)
    assert alone.startswith("25 ")
    assert draws("fixed", "others", 4_000_000_000) == alone
    assert draws("stock", "alone", 0) != draws("stock", "others", 0), (
        "hypothesis no longer draws other modules' constants: random_cases.fix is not needed"
    )


def test_this_process_draws_no_other_module_s_constants():
    assert len(providers.HypothesisProvider(None)._local_constants) == 0


def test_other_internals_of_hypothesis_are_named(monkeypatch):
    monkeypatch.delattr(providers.HypothesisProvider, "_local_constants")
    with raises(RuntimeError, "hypothesis", "constraints.txt", "tests/random_cases.py"):
        random_cases.fix()


@pytest.mark.parametrize("profile, counts", [("ci", (60, 15, 40)), ("thorough", (2400, 600, 500))])
def test_counts_of_examples_go_by_the_profile(profile, counts):
    before = os.environ.get("KVBITS_HYPOTHESIS", "ci")
    settings.load_profile(profile)
    try:
        found = [random_cases.examples(60), random_cases.examples(15), random_cases.examples(40, thorough=500)]
    finally:
        settings.load_profile(before)
    assert tuple(x.max_examples for x in found) == counts
