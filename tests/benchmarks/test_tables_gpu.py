"""The documents' figures of a GPU are those of the committed results, and what is compared is of one session."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tables_gpu

from kvbits import runs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", tables_gpu.DOCUMENTS)
def test_a_document_s_tables_are_the_results(name):
    text = (ROOT / name).read_text()
    assert tables_gpu.filled(text) == text, "run: python docs/make_tables.py"


def test_every_table_is_in_one_document():
    places = [found for name in tables_gpu.DOCUMENTS for found in re.findall(r"<!-- gpu:(\w+) -->", (ROOT / name).read_text())]
    assert sorted(places) == sorted(tables_gpu.BLOCKS)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes a file of runs: {name of a run: (session, utc)}, rows."""
    monkeypatch.setattr(tables_gpu, "RESULTS", tmp_path)

    def write(file, made, rows, **sections):
        records = {
            name: {field: None for field in runs.FIELDS} | {"id": name, "session": session, "utc": f"2026-01-{day:02d}T00:00:00Z", "commit": "c0ffee00" + name}
            for name, (session, day) in made.items()
        }
        (tmp_path / file).write_text(json.dumps({"runs": records, "rows": rows, **sections}))

    return write


def test_ratios_of_serving_are_never_of_two_sessions(results):
    def row(run, dtype, ms, **more):
        return {"run": run, "mode": "decode", "geometry": "llama-3.1-8b", "gpus": 1, "kv_cache_dtype": dtype, "batch": 48, "context": 8192, "compiled": False,
                "options": {}, "step_ms": ms, "tokens_per_s": 1.0, "capacity_tokens": 100, "ttft_ms": None, "largest": False} | more  # fmt: skip

    made = {"a": ("first", 1), "b": ("first", 1), "c": ("second", 2), "d": ("third", 3), "e": ("third", 3)}
    rows = [row("a", "bf16", 20.0), row("b", "fp8", 10.0), row("c", "fp8", 1.0)]
    results("serve_vllm.json", made, rows)
    assert "| 20.00 | 10.00 (0.50x) |" in tables_gpu.serving(), "the newest session that has bf16 as well"
    results(
        "serve_vllm.json", made, [*rows, row("d", "bf16", 16.0), row("e", "nvfp4", 32.0), row("e", "fp8", 12.0), row("e", "fp8", 9.0, options={"speculate": 3})]
    )
    assert "| 16.00 | 12.00 (0.75x) |" in tables_gpu.serving() and "`nvfp4` 32.0 ms (2.00x)" in tables_gpu.serving()


def test_peers_stand_above_the_presets_and_absent_cells_are_empty(results):
    shapes = ["B=1 H=32/8 T=32768 D=128", "B=8 H=32/8 T=32768 D=128"]
    rows = [{"run": "a", "scheme": "raw", "shape": s, "time_us": 1, "speedup_real_cache": 0.5, "speedup_between_matmuls": 0.25} for s in shapes]
    rows.append({"run": "a", "scheme": "klt2", "shape": shapes[1], "time_us": 1, "speedup_real_cache": 3.25})
    peers = [{"run": "a", "kernel": "cudnn", "shape": shapes[0], "time_us": 38.4}, {"run": "a", "kernel": "fa3", "shape": shapes[1], "time_us": 40.6}]
    results("attend_decode.json", {"a": ("s", 1)}, rows, peers=peers)
    said = tables_gpu.decode()
    for line in ("| cuDNN, us | 38 |  |", "| FlashAttention-3, us |  | 41 |", "| `raw` | 0.50 / 0.25 | 0.50 / 0.25 |", "| `klt2` |  | 3.25 |"):
        assert line in said


def test_a_cold_load_has_its_own_share(results):
    seconds = {"stock": 0.5, "computed": 0.8, "loaded": 0.1, "loaded_whole": 0.2, "loaded_cold": 0.25}
    row = {"run": "a", "scheme": "int4", "model": "llama-8b", "tokens": 16384, "bytes": 1e9, "file_system": "ext4", "seconds": seconds}
    results("store.json", {"a": ("s", 1)}, [row, row | {"file_system": "tmpfs", "seconds": {k: v for k, v in seconds.items() if k != "loaded_cold"}}])
    assert "| `int4` | ext4 | 1,000 MB | 0.500 | 0.800 | 0.200 | 0.100 | 0.250 | 0.20; cold 0.50 |" in tables_gpu.store()
    assert "| `int4` | tmpfs | 1,000 MB | 0.500 | 0.800 | 0.200 | 0.100 |  | 0.20 |" in tables_gpu.store()
