"""The table of tool calls pairs each cache with the same model in another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import raises
from table_tools import tools_table

from kvbits.errors import SpecError
from kvbits.evaluate import results
from kvbits.evaluate.tasks.tools import ToolsTask
from kvbits.runs import FIELDS

RUN = dict.fromkeys(FIELDS) | {"id": "r", "utc": "2027-01-01T00:00:00Z", "commit": "0123abc", "dirty": False}
BASE = [*"abcdefghi", None]


@pytest.fixture
def write(tmp_path):
    def write(dtype, scheme, kind, calls, base):
        header = {
            "task": "tools",
            "scheme": scheme,
            "kind": kind,
            "info": {},
            "settings": {"asked": 10},
            "model": {"name": "m", "dtype": dtype, "parameters": 1, "fingerprint": "0"},
        }
        folder = tmp_path / ("m" if dtype == "bfloat16" else f"m-{dtype}")
        file = results.ResultFile(folder / "tools" / f"{scheme}.json", header, RUN | {"device": "x", "threads": 1})
        file.add("calls:2000:0", {"right": "1" * 5 + "0" * 5, "calls": calls})
        of_base = {"calls:2000:0": {"right": "1" * 10, "calls": base}}
        file.write(1.0, lambda: ToolsTask.summary(object.__new__(ToolsTask), file.items, of_base))
        return tmp_path

    return write


def test_results_of_other_tasks_alone_are_an_error():
    with raises(SpecError, "kvbits eval --tasks tools", "--out"):
        tools_table(Path(__file__).parents[2] / "benchmarks" / "results" / "eval-1024")


def row(folder):
    (line,) = [line for line in tools_table(folder).splitlines() if line.startswith("| m, 2,000 ")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_each_cache_is_paired_with_the_other_dtype(write):
    """The test has ten calls, and nine of them parse. The pages write eight of these, and float16 seven."""
    write("bfloat16", "16-bit", "base", BASE, BASE)
    write("bfloat16", "int8_centered", "kvbits", [*"abcdefghX", "j"], BASE)
    other = [*"abcdefgXX", None]
    calls, parsed, right, agreed, mine = row(write("float16", "16-bit", "base", other, other))
    assert (calls, parsed, right) == ("10", "90.0%", "50.0%")
    assert agreed.startswith("77.8% (") and agreed.endswith(" float16") and mine.startswith("88.9%; +11.1 (")


def test_one_dtype_alone_has_its_own_interval(write):
    write("bfloat16", "16-bit", "base", BASE, BASE)
    *_, agreed, mine = row(write("bfloat16", "int8_centered", "kvbits", [*"abcdefghX", "j"], BASE))
    assert agreed == "" and mine.startswith("88.9% (")
