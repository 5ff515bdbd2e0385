"""`kvbits bench`: rows say what was checked and timed; a wrong kernel has no speed."""

from __future__ import annotations

import json

import pytest
import torch
from messages import mentions, raises
from typer.testing import CliRunner

from kvbits import runs, schemes
from kvbits.cli import app
from kvbits.errors import DataError
from kvbits.evaluate import speed
from kvbits.ops.cpu import attend as cpu

CPU = torch.device("cpu")
SHAPE = speed.Shape(1, 4, 2, 64, 256, 1)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(speed.ROTATE_BYTES, "cpu", 300_000)


def bench(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_a_result_file_has_every_core_preset_and_the_run(tmp_path):
    out = tmp_path / "mine.json"
    found = bench(
        "--heads", "4/2/64", "--context", "1k", "--chunk", "16", "--rounds", "1", "--device", "cpu", "--out", out
    )
    assert found.exit_code == 0, found.output
    data = json.loads(out.read_text())
    (run,) = data["runs"].values()
    assert set(runs.FIELDS) <= set(run) and run["facts"]["device"] == "cpu" and "tier" in run["facts"]
    core = [n for n, s in schemes.CORE.items() if not s.tiers]
    for what in ("decode", "chunk of 16"):
        rows = [r for r in data["rows"] if r["shape"].startswith(f"{what}, 1 x 1,024 tokens, 4/2 heads of 64")]
        assert [r["name"] for r in rows] == ["torch bfloat16", "torch float32", *core]
        ours = [r for r in rows if r["backend"] != "torch"]
        assert all(0 < r["error"] < 2e-2 and r["seconds"] > 0 and r["over_torch"] > 0 for r in ours)
        assert max(r["over_torch"] for r in rows if r["backend"] == "torch") == 1.0
        by_name = {r["name"]: r["nbytes"] for r in ours}
        assert by_name["klt2"] < by_name["klt4"] < by_name["int8_centered"] < by_name["raw"] == rows[0]["nbytes"]
    assert f"wrote {out}" in " ".join(found.output.split())


def test_a_wrong_kernel_is_an_error_not_a_row(monkeypatch):
    right = cpu.Plan.run
    monkeypatch.setattr(cpu.Plan, "run", lambda *args: 1.1 * right(*args))
    with raises(DataError, "int4", "decode", "1 x 256", "4/2", 64, "cpu", 0.02):
        speed.packed("int4", SHAPE, CPU)


def test_candidates_take_turns_over_layers_that_do_not_fit_a_cache():
    seen = []
    candidate = speed.packed("int8_centered", SHAPE, CPU)
    assert candidate.layers * candidate.nbytes >= 300_000
    spied = speed.Candidate("spied", lambda turn: seen.append(turn), candidate.layers, 1, 0.0, "cpu")
    timer = speed._timer(spied, SHAPE, CPU)
    assert [timer(turn) >= 0 for turn in range(3)] == [True] * 3
    assert seen == [0, 1, 2, 3, 4, 5]


def test_rounds_end_in_time(monkeypatch):
    monkeypatch.setattr(speed, "MOST_SECONDS", 0.0)
    assert {r["rounds"] for r in speed.rows(["int4"], SHAPE, CPU, 50, lambda _: None)} == {speed.LEAST_ROUNDS}


@pytest.mark.parametrize(
    "args, parts",
    [
        (("--schemes", "tiered"), "--schemes tiered"),
        (("--heads", "4/3/64"), "--heads '4/3/64' 32/8/128"),
        (("--device", "meta"), "--device 'meta' cuda cpu"),
        (("--schemes", "int5"), "int5 int4"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_the_work(args, parts, tmp_path):
    found = bench("--out", tmp_path / "x.json", *args)
    assert found.exit_code == 2 and mentions(found.output, *parts.split()) and not (tmp_path / "x.json").exists()
