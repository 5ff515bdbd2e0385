"""The plan says where 16-bit attention would be as fast, and the limits are those of the committed measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import text_of

from kvbits.ops import break_even

RESULT = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/attend_small.json"


def test_limits_cover_every_measured_loss():
    """A loss is more than 3 %, the spread of runs on different machines."""
    rows = json.loads(RESULT.read_text())["rows"]
    slower = [r for r in rows if r["time_us"] > 1.03 * r["time_16_bit_us"]]
    assert slower and all(break_even.small_on_gpu(r["batch"], r["tokens"], 2048) for r in slower)
    faster = [r for r in rows if not break_even.small_on_gpu(r["batch"], r["tokens"], 2048)]
    assert len(faster) > len(rows) / 2


@pytest.mark.parametrize(
    "batch, tokens, small", [(1, 256, True), (64, 256, True), (1, 2048, True), (1, 2049, False), (4, 1024, False)]
)
def test_both_limits_must_be_passed(batch, tokens, small):
    assert (break_even.small_on_gpu(batch, tokens, 2048) is not None) == small


def test_the_plan_command_says_so():
    command = "plan --layers 4 --kv-heads 8 --head-dim 128 --context"
    note = break_even.small_on_gpu(1, 512, 2048)
    assert note in text_of(f"{command} 512")
    alike = note.split(".")[0]
    assert alike not in text_of(f"{command} 65536")
    assert alike not in text_of(f"{command} 512 --ram 16GB --weights 1GB")  # a machine without a GPU
