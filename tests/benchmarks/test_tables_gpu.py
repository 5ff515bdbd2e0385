"""The documents' figures of a GPU are those of the committed results, and what is compared is of one session."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import table_serve_vllm
import tables_gpu
from messages import mentions
from speeds import kernel_groups

from kvbits import runs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", tables_gpu.DOCUMENTS)
def test_a_document_s_tables_are_the_results(name):
    text = (ROOT / name).read_text()
    assert tables_gpu.filled(text) == text, "run: python docs/make_tables.py"


def test_every_table_is_in_one_document():
    places = [
        found for name in tables_gpu.DOCUMENTS for found in re.findall(r"<!-- gpu:(\w+) -->", (ROOT / name).read_text())
    ]
    assert sorted(places) == sorted(tables_gpu.BLOCKS)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes a file of runs: {name of a run: (session, utc)}, rows."""
    monkeypatch.setattr(tables_gpu, "RESULTS", tmp_path)

    def write(file, made, rows, **sections):
        records = {
            name: (
                {field: None for field in runs.FIELDS}
                | {"id": name, "session": session, "utc": f"2027-01-{day:02d}T00:00:00Z", "commit": "c0ffee00" + name}
            )
            for name, (session, day) in made.items()
        }
        (tmp_path / "nvidia-x").mkdir(exist_ok=True)
        (tmp_path / "nvidia-x" / file).write_text(json.dumps({"runs": records, "rows": rows, **sections}))

    return write


def test_ratios_of_serving_are_never_of_two_sessions(results):
    def row(run, dtype, ms, **more):
        return {
            "run": run,
            "mode": "decode",
            "geometry": "llama-3.1-8b",
            "gpus": 1,
            "kv_cache_dtype": dtype,
            "batch": 48,
            "context": 8192,
            "compiled": False,
            "options": {},
            "step_ms": ms,
            "tokens_per_s": 1.0,
            "capacity_tokens": 100,
            "ttft_ms": None,
            "largest": False,
        } | more

    made = {"a": ("first", 1), "b": ("first", 1), "c": ("second", 2), "d": ("third", 3), "e": ("third", 3)}
    rows = [row("a", "bf16", 20.0), row("b", "fp8", 10.0), row("c", "fp8", 1.0)]
    results("serve_vllm.json", made, rows)
    assert "| 20.00 | 10.00 (0.50x) |" in tables_gpu.BLOCKS["serving"](), "the newest session that has bf16 as well"
    results(
        "serve_vllm.json",
        made,
        [
            *rows,
            row("d", "bf16", 16.0),
            row("e", "nvfp4", 32.0),
            row("e", "fp8", 12.0),
            row("e", "fp8", 9.0, options={"speculate": 3}),
        ],
    )
    assert (
        "| 16.00 | 12.00 (0.75x) |" in tables_gpu.BLOCKS["serving"]()
        and "`nvfp4` 32.0 ms (2.00x)" in tables_gpu.BLOCKS["serving"]()
    )


def test_peers_stand_above_the_presets_and_absent_cells_are_empty(results):
    shapes = ["B=1 H=32/8 T=32768 D=128", "B=8 H=32/8 T=32768 D=128"]
    rows = [
        {
            "run": "a",
            "scheme": "raw",
            "shape": s,
            "time_us": 1,
            "speedup_real_cache": 0.5,
            "speedup_between_matmuls": 0.25,
        }
        for s in shapes
    ]
    rows.append({"run": "a", "scheme": "klt2", "shape": shapes[1], "time_us": 1, "speedup_real_cache": 3.25})
    peers = [
        {"run": "a", "kernel": "cudnn", "shape": shapes[0], "time_us": 38.4},
        {"run": "a", "kernel": "fa3", "shape": shapes[1], "time_us": 40.6},
    ]
    results("attend_decode.json", {"a": ("s", 1)}, rows, peers=peers)
    said = tables_gpu.BLOCKS["decode"]()
    for line in (
        "| cuDNN, us | 38 |  |",
        "| FlashAttention-3, us |  | 41 |",
        "| `raw` | 0.50 / 0.25 | 0.50 / 0.25 |",
        "| `klt2` |  | 3.25 |",
    ):
        assert line in said


def test_each_card_has_a_table_the_newest_first(results, tmp_path):
    def row(run, us):
        shape = "B=1 H=32/8 T=32768 D=128"
        return {"run": run, "scheme": "raw", "shape": shape, "time_us": us, "speedup_real_cache": us}

    for card, run, day in (("nvidia-b", "a", 1), ("nvidia-a", "b", 3), ("nvidia-c", "c", 2)):
        results("attend_decode.json", {run: ("s", day)}, [row(run, day)])
        (tmp_path / "nvidia-x").rename(tmp_path / card)
    said = tables_gpu.BLOCKS["decode"]()
    order = [said.index(text) for text in ("NVIDIA A", "3.00", "NVIDIA C", "2.00", "NVIDIA B", "1.00")]
    assert order == sorted(order)


@pytest.mark.parametrize("served", [False, True])
def test_a_card_without_what_a_table_compares_has_none(served, results):
    judged = {"run": "a", "phase": "decode", "model": "m", "kv_cache_dtype": "auto", "kl": 0.1}
    results("accuracy_vllm.json", {"a": ("s", 1)}, [judged])
    klt4 = {"run": "a", "scheme": "klt4", "shape": "B=1 H=32/8 T=32768 D=128", "time_us": 1, "speedup_real_cache": 2.0}
    results("attend_decode.json", {"a": ("s", 1)}, [klt4])
    if served:
        results("serve_vllm.json", {"a": ("s", 1)}, [])
    assert tables_gpu.BLOCKS["beside_fp8"]() == tables_gpu.BLOCKS["decode"]() == ""


def test_a_cold_load_has_its_own_share(results):
    seconds = {"stock": 0.5, "computed": 0.8, "loaded": 0.1, "loaded_whole": 0.2, "loaded_cold": 0.25}
    row = {
        "run": "a",
        "scheme": "int4",
        "model": "llama-8b",
        "tokens": 16384,
        "bytes": 1e9,
        "file_system": "ext4",
        "seconds": seconds,
    }
    results(
        "store.json",
        {"a": ("s", 1)},
        [row, row | {"file_system": "tmpfs", "seconds": {k: v for k, v in seconds.items() if k != "loaded_cold"}}],
    )
    assert (
        "| `int4` | ext4 | 1,000 MB | 0.500 | 0.800 | 0.200 | 0.100 | 0.250 | 0.20; cold 0.50 |"
        in tables_gpu.BLOCKS["store"]()
    )
    assert "| `int4` | tmpfs | 1,000 MB | 0.500 | 0.800 | 0.200 | 0.100 |  | 0.20 |" in tables_gpu.BLOCKS["store"]()


LOAD = {
    "prompts": [2048, 16384],
    "answers": [256, 2048],
    "ttft_limit_ms": 2000.0,
    "tpot_limit_ms": 50.0,
    "running": 128,
}
CHATS = {"history": [8192, 30720], "answers": [64, 512], "think_s": 15.0, "running": 128}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Writes rows of one load of bench_serve_vllm.py as a GPU's: (session of each, mode, dtype, fields)."""
    monkeypatch.setattr(tables_gpu, "RESULTS", tmp_path)

    def write(*given, gpu="X"):
        made, rows = {}, []
        for i, (session, mode, dtype, fields) in enumerate(given):
            record = {
                "id": f"r{i}",
                "session": session,
                "utc": f"2027-01-01T00:00:{i:02d}Z",
                "commit": "c0ffee00",
                "gpu": {"name": gpu},
                "versions": {},
            }
            made[f"r{i}"] = {field: None for field in runs.FIELDS} | record
            shape = {
                "geometry": "llama-3.1-8b",
                "gpus": 1,
                "context": 16384,
                "compiled": False,
                "options": {},
                "load": LOAD if mode == "goodput" else CHATS,
            }
            rows.append(shape | {"run": f"r{i}", "mode": mode, "kv_cache_dtype": dtype} | fields)
        (tmp_path / "nvidia-x").mkdir(exist_ok=True)
        (tmp_path / "nvidia-x" / "serve_vllm.json").write_text(json.dumps({"runs": made, "rows": rows}))
        return rows

    return write


def rate(at, held, tokens, first=900.0, **more):
    return {
        "batch": at,
        "rate_per_s": at,
        "held": held,
        "tokens_per_s": tokens,
        "ttft_ms": 400.0,
        "ttft_p99_ms": first,
        "tpot_ms": 20.0,
        "tpot_p99_ms": 31.25,
        "most_at_once": round(40 * at),
        "capacity_tokens": 1000,
    } | more


def test_rates_within_limits_stand_beside_the_article(served):
    four = "kvbits_klt4"
    rows = served(
        ("old", "goodput", "fp8", rate(9.0, True, 9000.0, highest=True)),
        ("one", "goodput", "bf16", rate(1.0, True, 800.0)),
        ("one", "goodput", "bf16", rate(2.0, False, 1500.0, 2100.0)),
        ("one", "goodput", "bf16", rate(1.0, True, 800.0, highest=True)),
        ("one", "goodput", four, rate(2.0, True, 1600.0)),
        ("one", "goodput", four, rate(2.0, True, 1600.0, highest=True)),
    )
    said = tables_gpu.goodput()
    assert "| 1 | 900 / 31.2 |  |" in said and "| 2 | 2,100 / 31.2 past | 900 / 31.2 |" in said and "fp8" not in said, (
        "of one sitting"
    )
    assert mentions(
        said, "1 x X", "llama-3.1-8b", "random weights", "2,048 to 16,384", "256 to 2,048", "2,000 ms", "50 ms"
    )
    assert (
        "| FP16 | 32 (1.00x) | 3,891 (1.00x) | 112 (1.00x) | `bf16` | 40 (1.00x) | 800.0 (1.00x) | 31.25 (1.00x) | 1.0"
        " (1.00x) |" in said
    )
    assert (
        "| INT4 | 96 (3.00x) | 6,892 (1.77x) | 95 (0.85x) | `kvbits_klt4` | 80 (2.00x) | 1,600.0 (2.00x) | 31.25"
        " (1.00x) | 2.0 (2.00x) |" in said
    )
    lines = table_serve_vllm.speeds(rows[1:], "goodput").splitlines()
    assert any("| kvbits_klt4 | 2 (highest) | 2.0 (2.00x) |" in line for line in lines), "over bf16's highest"
    assert any("| kvbits_klt4 | 2 | 2.0 (1.00x) |" in line for line in lines) and any(
        "| bf16 | 2 (too many) |" in line for line in lines
    )
    (group,) = kernel_groups(tables_gpu.RESULTS)
    assert [(b["label"], b["value"]) for b in group["bars"]] == [("bf16", 1.0), ("kvbits_klt4", 2.0)]
    assert (
        "answers of up to 2,048, P99 of 2000 ms to the first token and 50 ms per token" in group["title"]
        and "within the limits" in group["unit"]
    )


def test_chats_by_users(served):
    users = lambda n, hits: {  # noqa: E731
        "batch": n,
        "users": n,
        "hit_rate": hits,
        "ttft_ms": 300.0,
        "ttft_p99_ms": 1500.0,
        "tokens_per_s": 700.0,
        "capacity_tokens": 1234,
    }
    served(
        ("one", "turns", "bf16", users(16, 0.9)),
        ("one", "turns", "bf16", users(64, 0.2)),
        ("one", "turns", "kvbits_klt3", users(64, 0.85)),
    )
    said = tables_gpu.turns()
    assert "| capacity, tokens | 1,234 | 1,234 |" in said and "| 16 users | 90%; 300 / 1,500; 700 |  |" in said
    assert (
        "| 64 users | 20%; 300 / 1,500; 700 | 85%; 300 / 1,500; 700 |" in said
        and "chats of 8,192 to 30,720 tokens, 15 s of thought" in said
    )


def test_what_was_not_measured_is_said(served):
    served(("one", "turns", "kvbits_klt3", {"batch": 1}))
    assert tables_gpu.goodput() == tables_gpu.turns() == "Not measured."
