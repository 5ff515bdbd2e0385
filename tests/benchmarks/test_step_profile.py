"""Accounts of a step's time, on traces made by hand: what overlaps counts once, and groups and gaps add up to the step."""

from __future__ import annotations

import bench_serve_vllm as bench
import pytest
import step_profile as sp
import tables_gpu
import torch
from messages import raises


def trace(
    steps=8,
    length=100.0,
    kernels=(
        (0, 10, "Argmax"),
        (12, 30, "attend"),
        (13, 4, "_within"),
        (32, 20, "store_tokens_klt"),
        (80, 15, "nvjet_gemm"),
    ),
):
    """Steps of `length` us, kernels as (start, duration, name); half of what stores runs beside the attention of its
    step, all of `_within` inside.
    """
    events = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": 1000 + length * s + at, "dur": d}
        for s in range(steps)
        for at, d, n in kernels
    ]
    return {
        "traceEvents": [
            *reversed(events),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1e6},
            {"ph": "M", "name": "process_name"},
        ]
    }


def test_what_runs_at_once_counts_once():
    found = sp.of_trace(trace())
    assert found["groups"] == {
        "store, close": 10,
        "attention": 30,
        "matrix products": 15,
        "sampling": 10,
        "the engine's set-up": 0,
    }
    assert found["sums"] == {
        "store, close": 20,
        "attention": 30,
        "matrix products": 15,
        "sampling": 10,
        "the engine's set-up": 4,
    }
    assert (
        found["gaps"] == {"short": 7, "long": 28}
        and found["step_us"] == 100
        and found["profiled_steps"] == 8 - sp.OMITTED - 1
    )
    assert sum(found["groups"].values()) + sum(found["gaps"].values()) == found["step_us"]
    assert [(e["name"], e["calls"], e["sum"], e["alone"]) for e in found["kernels"]][:2] == [
        ("attend", 1, 30, 30),
        ("nvjet_gemm", 1, 15, 15),
    ]
    assert {e["name"] for e in found["kernels"][2:]} == {
        "Argmax",
        "store_tokens_klt",
    }, "a kernel of 4 us counts in its group alone"


def test_what_reaches_into_the_next_step_is_counted_once():
    found = sp.of_trace(trace(kernels=((0, 60, "argmax"), (60, 55, "attend"))))
    assert found["step_us"] == 100 and found["gaps"] == {"short": 0, "long": 0} and sum(found["sums"].values()) == 115
    assert sum(found["groups"].values()) == pytest.approx(100, abs=0.2), (
        "15 us of it are beside the next one's first kernel"
    )


def test_steps_are_found_where_the_trace_has_half_of_one():
    half = trace()
    half["traceEvents"] = [e for e in half["traceEvents"] if e["name"] != "Argmax" or e["ts"] > 1000]
    assert sp.of_trace(half)["step_us"] == 100
    with raises(ValueError, 4, "'Argmax': 8"):
        sp.of_trace(trace(), steps=4)
    with raises(ValueError, 8, "none"):
        sp.of_trace({"traceEvents": []})


@pytest.mark.parametrize(
    "group, names",
    [
        (
            "store, close",
            ["store_banded", "store_tokens", "vllm::reshape_and_cache_flash_kernel<bf16>"],
        ),
        ("plan, place", ["work_list", "place", "advance", "void flash::prepare_varlen_num_blocks_kernel<1>"]),
        ("attention", ["attend", "merge_partials", "void cutlass::device_kernel<flash::FlashAttnFwdSm90>"]),
        ("matrix products", ["nvjet_tst_128x64", "sm90_xmma_gemm_bf16", "cublasLt::splitKreduce_kernel"]),
        (
            "norm, rope, activation",
            ["void vllm::fused_add_rms_norm_kernel", "vllm::rotary_embedding_kernel", "vllm::act_and_mul_kernel"],
        ),
        ("sampling", ["at::native::reduce_kernel<ArgMaxOps>"]),
        ("copies", ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]),
        ("the engine's set-up", ["_compute_slot_mapping_kernel", "triton_poi_fused_0"]),
        ("rest", ["at::native::vectorized_elementwise_kernel", "placement"]),
    ],
)
def test_kernels_have_groups_by_name(group, names):
    assert [sp.group_of(name) for name in names] == [group] * len(names)


def test_so_many_steps_run_under_a_profiler():
    """In the loop of the benchmark, with an engine that multiplies; what is timed before, at the end, or of fewer
    sequences is in no trace.
    """

    class Output:
        def __init__(self, i, tokens, finished):
            self.request_id, self.finished, self.outputs = i, finished, [type("Text", (), {"token_ids": [0] * tokens})]

    class Core:
        def __init__(self, tokens):
            self.tokens, self.steps, self.waiting = tokens, 0, []

        def add_request(self, name, *_):
            self.waiting.append(name)

        def has_unfinished_requests(self):
            return self.steps <= self.tokens

        def step(self):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            self.steps += 1
            # the first is of one sequence
            return [Output(i, self.steps - 1, self.steps > self.tokens) for i in self.waiting[: self.steps]]

    def run(tokens):
        core = Core(tokens)
        profiled = sp.Profiled(core.step, 2, [torch.profiler.ProfilerActivity.CPU])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench, "params", lambda *_: None)
            assert bench.decode_step(type("Engine", (), {"llm_engine": core}), 2, 64, None, tokens, profiled) >= 0
        assert core.steps == tokens + 1
        return profiled.trace()

    assert sum(e.get("name") == "aten::mm" for e in run(40)["traceEvents"]) == sp.STEPS
    with raises(SystemExit, 15, 2, 18, "--steps"):
        run(15)


def test_profiles_are_a_table_for_each_shape_above_the_steps_without_a_profiler():
    def rows(dtype, batch, step_ms, **more):
        shape = {
            "geometry": "llama",
            "gpus": 1,
            "kv_cache_dtype": dtype,
            "batch": batch,
            "context": 512,
            "compiled": False,
            "options": {},
        }
        return [
            shape | {"mode": "decode", "step_ms": step_ms},
            shape | {"mode": "profile", "step_ms": None} | sp.of_trace(trace(**more)),
        ]

    slower = rows("fp8", 48, 0.06, kernels=((0, 10, "argmax"), (10, 40, "attend")))
    measured = [*rows("bf16", 48, 0.08), *slower, *rows("fp8", 1, 0.06)]
    measured += [r | {"options": {"speculate": 3}} for r in slower]
    first, second = (one.splitlines() for one in tables_gpu.profiles(measured))
    assert (
        first[0] == "48 x 512 (llama, GPUs: 1)"
        and "| attention | 30.0 | 40.0 |" in first
        and "| store, close | 10.0 | 0.0 |" in first
    )
    assert first[-2:] == ["| step | 100.0 | 100.0 |", "| step without it, ms | 0.08 | 0.06 (0.75x) |"]
    assert second[0] == "1 x 512 (llama, GPUs: 1)" and second[-1] == "| step without it, ms | 0.06 |", (
        "no ratio without 16 bits"
    )
    assert "| `attend` | attention | 1.0 | 30.00 | 30.0 | 30.0 |" in sp.kernel_table(rows("bf16", 48, 0.08)[1])
