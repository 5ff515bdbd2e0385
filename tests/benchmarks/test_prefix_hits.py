"""The simulation of prefix caches against a cache that is walked block by block, for every capacity."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import study_prefix_hits as study
from messages import mentions

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "study_prefix_hits.py"
BLOCK = 16


def prompts(seed):
    """Make prompts of a few stems, each with ends of its own. The last block is not full."""
    rng = np.random.default_rng(seed)
    made, fresh = [], 1000
    for _ in range(80):
        stem = int(rng.integers(6))
        found = [0, *(100 * stem + i for i in range(1, int(rng.integers(1, 8))))]
        ends = int(rng.integers(0, 3))
        found += range(fresh, fresh + ends)
        fresh += ends
        made.append((BLOCK * len(found) - int(rng.integers(0, BLOCK)), found))
    return made


def walked(made, capacity):
    """Tokens found by a cache of `capacity` blocks."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for length, blocks in made:
        for i, b in enumerate(blocks):
            if b not in held:
                break
            hits += min(BLOCK, length - i * BLOCK)
        for b in reversed(blocks):
            held[b] = None
            held.move_to_end(b)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_a_cache_that_is_walked(seed):
    made = prompts(seed)
    places, tokens, requests = study.needed(made, BLOCK)
    assert requests == len(made) and tokens.sum() == sum(length for length, _ in made)
    for capacity in range(1, 60):
        assert study.hit_rate(places, tokens, capacity) * tokens.sum() == pytest.approx(walked(made, capacity)), (
            capacity
        )


def test_more_of_fewer_bits_fits_a_card_and_copies_are_counted():
    """Copies take a twentieth of the memory at most, however many requests run."""
    many, few = (study.capacities("H200", running) for running in (512, 1))
    names = ("bf16", "kvbits_int8_centered", "kvbits_klt4", "kvbits_klt3", "kvbits_klt2")
    assert [many[n] for n in names] == sorted(many[n] for n in names)
    assert (
        few["bf16"] == pytest.approx(many["bf16"], rel=0.001) and 0.94 < many["kvbits_klt3"] / few["kvbits_klt3"] < 0.96
    )


def test_a_trace_and_chats_by_name(tmp_path):
    lines = [{"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": blocks} for n, blocks in prompts(0)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path / "trace.jsonl"),
        "--block",
        str(BLOCK),
        "--out",
        str(tmp_path / "hits.json"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((tmp_path / "hits.json").read_text())
    assert {r["kv_cache_dtype"] for r in found["rows"]} == set(study.DTYPES) and found["curve"][-1][
        "hit_rate"
    ] == found["rows"][0]["hit_rate"]
    made = list(study.chats(3, 4, 512))
    assert len(made) == 12 and made == list(study.chats(3, 4, 512))
    places, tokens, _ = study.needed(made, 512)
    assert 0.5 < study.hit_rate(places, tokens, 10**9) < 0.9, "three of four turns begin as those before"
    (tmp_path / "trace.jsonl").write_text('{"input_length": 3}')
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1 and mentions(said.stderr, "line 1", "KeyError('hash_ids')", "input_length", "hash_ids")
