"""The rows of bench_serve_vllm.py's loads, with an engine that is a clock and a queue; what keys in a calibrated basis
get where weights are random.
"""

from __future__ import annotations

import bench_serve_vllm as bench
import pytest
import run_files
from messages import raises
from queue_engine import QueueEngine

from kvbits import schemes
from kvbits.calibrate import Calibration
from kvbits.geometry import layer_geometries, load_config


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the benchmark with words of a command line; its rows, and the engine."""
    monkeypatch.setattr(bench, "capacity", lambda llm: llm.tokens)
    monkeypatch.setattr(bench, "params", lambda most: most)
    monkeypatch.setattr(bench, "how_compiled", lambda llm: {"compilation_mode": 0})

    def run(what, *argv, **changes):
        engine = QueueEngine(**changes)
        engine.tokens, engine.filled, engine.resets = 500, [], 0
        engine.generate = lambda prompts, *_, **__: engine.filled.append(len(prompts))
        engine.reset_prefix_cache = lambda: setattr(engine, "resets", engine.resets + 1)
        monkeypatch.setattr(bench, "served", lambda args, longest, **more: (engine, engine))
        args = bench.parser().parse_args(
            [what, "--kv-cache-dtype", "fp8", "--geometry", "tiny", *argv, "--out", str(tmp_path / "rows.json")]
        )
        {"goodput": bench.run_goodput, "turns": bench.run_turns}[what](args)
        return run_files.read(tmp_path / "rows.json")["rows"], engine

    return run


SMALL = ("--prompt-tokens", "64", "256", "--answer-tokens", "8", "64")


def test_goodput_has_a_row_for_each_rate_and_one_for_the_highest(measured):
    rows, engine = measured("goodput", *SMALL, "--ttft-limit", "500", "--seconds", "20", "--requests", "50")
    *tried, best = rows
    assert (
        best["highest"]
        and not any(r.get("highest") for r in tried)
        and {r["rate_per_s"]: r for r in tried}[best["rate_per_s"]]["held"]
    )
    assert best["rate_per_s"] == max(r["rate_per_s"] for r in tried if r["held"]) and best["failed_at"] == min(
        r["rate_per_s"] for r in tried if not r["held"]
    )
    assert best["load"] == {
        "prompts": [64, 256],
        "answers": [8, 64],
        "ttft_limit_ms": 500.0,
        "tpot_limit_ms": 50,
        "running": 128,
    }
    assert all(
        r["requests"] == max(50, round(20 * r["rate_per_s"])) and r["ttft_p99_ms"] <= 500 for r in tried if r["held"]
    )
    assert all(r["ttft_p99_ms"] > 500 for r in tried if not r["held"]) and best["most_at_once"] == engine.slots


def test_goodput_of_given_rates_searches_none(measured):
    rows, _ = measured("goodput", *SMALL, "--rates", "2", "4", "--seconds", "5", "--requests", "10")
    assert [(r["rate_per_s"], r["held"]) for r in rows] == [(2.0, True), (4.0, True)]


def test_goodput_without_a_rate_that_holds_says_so(measured):
    with raises(SystemExit, 1, 0.5, "--start"):
        measured("goodput", *SMALL, "--tpot-limit", "1", "--requests", "10")


def test_turns_has_a_row_for_each_number_of_users(measured):
    rows, engine = measured(
        "turns",
        "--users",
        "2",
        "8",
        "--history",
        "100",
        "200",
        "--answer-tokens",
        "8",
        "16",
        "--think",
        "1",
        "--seconds",
        "20",
        cached=90,
    )
    assert [r["users"] for r in rows] == [2, 8] and engine.resets == 2
    assert (
        [r["held_at_start"] for r in rows] == engine.filled and engine.filled[0] == 2 and 2 <= engine.filled[1] < 5
    ), "what fits 500 tokens"
    assert all(0.3 < r["hit_rate"] < 0.9 and r["ttft_ms"] <= r["ttft_p99_ms"] and 20 <= r["seconds"] < 21 for r in rows)
    assert rows[1]["turns"] > 3 * rows[0]["turns"] and rows[1]["tokens_per_s"] > rows[0]["tokens_per_s"]


def test_all_shapes_are_timed_before_there_is_a_profiler(tmp_path, monkeypatch):
    did = []

    class Profiled:
        def __init__(self, step, batch):
            did.append(f"profiler of {batch}")

        def trace(self):
            return {}

    engine = type("Engine", (), {"llm_engine": type("Core", (), {"step": None}), "collective_rpc": lambda *_: None})()
    monkeypatch.setattr(bench, "engine", lambda *_, **__: engine)
    monkeypatch.setattr(bench, "capacity", lambda llm: 100_000)
    monkeypatch.setattr(bench, "how_compiled", lambda llm: {"compilation_mode": 0})
    monkeypatch.setattr(
        bench,
        "decode_step",
        lambda llm, batch, context, drafts, steps, step=None: did.append(f"{batch} {step is not None}") or 2.0,
    )
    monkeypatch.setattr(bench.step_profile, "Profiled", Profiled)
    monkeypatch.setattr(
        bench.step_profile,
        "of_trace",
        lambda trace: {"groups": {"attention": 5.0}, "gaps": {"short": 1, "long": 2}, "step_us": 8, "kernels": []},
    )
    out = tmp_path / "rows.json"
    argv = [
        "decode",
        "--kv-cache-dtype",
        "fp8",
        "--shapes",
        "4x512",
        "2x128",
        "9x99999",
        "--profile",
        "--out",
        str(out),
    ]
    bench.run_decode(bench.parser().parse_args(argv))
    assert did == [
        "4 False",
        "2 False",
        "profiler of 4",
        "4 True",
        "profiler of 2",
        "2 True",
    ], "and what does not fit is neither timed nor profiled"
    rows = run_files.read(out)["rows"]
    assert [(r["mode"], r["batch"], r["step_ms"]) for r in rows] == [
        ("decode", 4, 2.0),
        ("decode", 2, 2.0),
        ("profile", 4, None),
        ("profile", 2, None),
    ]
    assert rows[2]["groups"] == {"attention": 5.0} and rows[2]["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize("name", ["klt4", "klt3", "klt2"])
def test_random_weights_get_random_orthogonal_bases(name):
    model = bench.model_directory("tiny", None)
    given = bench.random_bases(model, f"kvbits_{name}")
    found, config = Calibration.load(given["kvbits"]["calibration"]), load_config(model)
    found.fitted(config, schemes.for_layers(name, layer_geometries(config)))
    basis = found.static[1]["k_basis"]
    assert basis.shape == (2, 128, 128) and (basis[0] @ basis[0].T).sub(basis.new_ones(128).diag()).abs().max() < 1e-5
    assert bench.random_bases(model, "fp8") == bench.random_bases(model, "kvbits_int8_centered") == {}
