"""Number of requests that have copies, and their owners: in vLLM's official wheel on a CPU."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
import torch
from integrations.inside_vllm import generate, read, said
from integrations.judged import check, distance, random_ids

from kvbits import planner
from kvbits.geometry import layer_geometries
from kvbits.integrations.engine.rings import Rings
from kvbits.integrations.vllm import copies

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
DTYPE = "kvbits_int4"
RAW = {"raw_newest": 64, "raw_first": 64}
PAGE = 64 * 2 * 2 * (64 + 64) * 4
"""Bytes of 64 raw tokens: two layers, two heads of 64 keys and values in float32."""
RING = 3 * PAGE
"""Bytes of a request's copies: the newest two pages and the first."""


def worker_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def load(llm, count, seed, most=120):
    """(prompts, answers) of requests of unlike lengths that come and go."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    prompts = [random_ids(rng.randint(1, most), 1000 * seed + i) for i in range(count)]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 60), temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
        for _ in prompts
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return prompts, [read(o) for o in outputs]


@pytest.mark.night
@pytest.mark.parametrize("owned", [True, False], ids=["requests", "control"])
def test_requests_that_come_and_go_keep_their_copies(model, engine, monkeypatch, owned):
    """All tokens of these requests are copied, so each answer is the model's, whoever ran beside it.

    The control gives rings to rows, which move in this runner.
    """
    if not owned:
        monkeypatch.setattr(copies.Pool, "rings_of", lambda self, m: np.arange(m.num_reqs, dtype=np.int32))
    llm = engine("llama_plain", DTYPE, additional_config={"kvbits": RAW}, enable_prefix_caching=False, max_num_seqs=6)
    found = zip(*load(llm, 40, 1), strict=True)
    far = [distance(model("llama_plain")[0], prompt, result) for prompt, result in found]
    assert (max(far) < 1e-4) == owned, far
    if owned:
        pool = worker_of(llm).kvbits_copies
        generate(llm, [[5]], 1)  # a step that tells of the last ones
        pool.rings.end({r for r in pool.rings._of})
        assert len(set(pool.rings._free)) == pool.rings.count == 6


def test_the_pool_is_a_share_of_the_memory_and_others_are_read_packed(model, engine, monkeypatch):
    """Two of four requests have copies, and the other two answer as without any. The log reports it."""
    said_by = []
    monkeypatch.setattr(copies.logger, "info", lambda text, *values: said_by.append(text % values))
    memory = 40 * RING
    options = {
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": memory,
        "max_model_len": 256,
        "max_num_batched_tokens": 1024,
    }
    llm = engine("llama_plain", DTYPE, additional_config={"kvbits": RAW}, **options)
    impls = [x.impl for x in worker_of(llm).vllm_config.compilation_config.static_forward_context.values()]
    assert [sum(x.nbytes for x in impl.stored.copies) for impl in impls] == [RING] * 2, "two rings, of two layers"
    prompts = [random_ids(n, n) for n in (100, 130, 90, 120)]
    results = generate(llm, prompts, 30)
    plain = model("llama_plain")[0]
    for prompt, result in zip(prompts[:2], results[:2], strict=True):
        check(plain, None, prompt, result)
    again = generate(engine("llama_plain", DTYPE, **options), prompts, 30)
    for one, other in zip(results[2:], again[2:], strict=True):
        assert one[0] == other[0] and (one[1] - other[1]).abs().max() < 1e-4
    assert "2 of 8" in said_by[0] and "2 of 4" in said_by[1]


def test_the_defaults_hold_as_many_tokens_as_planned(model, engine, calibration):
    """With nothing but a dtype (and a calibration that is there): page for page."""
    memory = 1 << 27
    llm = engine(
        "llama",
        "kvbits_klt4",
        **said(calibration("llama", "klt4")),
        max_num_seqs=None,
        kv_cache_memory_bytes=memory,
    )
    row = planner.plan(
        layer_geometries(model("llama")[0].config),
        ["kvbits_klt4"],
        engine="vllm",
        memory_bytes=memory,
        raw_dtype="float32",
    ).rows[0]
    pool = worker_of(llm).kvbits_copies
    assert pool.rings.count == row.copied == memory // 20 // (4 * PAGE) > 1, "three newest pages and the first"
    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * 64 == row.max_context


def test_both_runners_give_a_request_the_same_ring():
    """Requests are known by name, whether a runner gives numbers of requests (V2) or the rows of its batch (V1)."""
    numbers_of = {"a": 4, "b": 0, "c": 7}
    states = types.SimpleNamespace(index_to_req_id={4: "a", 0: "b", 7: "c"}, req_id_to_index=numbers_of)
    first = copies.Pool(types.SimpleNamespace(req_states=states), Rings(2, copies.logger))
    batch = types.SimpleNamespace(req_ids=["b", "a", "c"])
    second = copies.Pool(types.SimpleNamespace(input_batch=batch, requests=numbers_of), Rings(2, copies.logger))
    for rows, numbers in ((["b", "a", "c"], [0, 4, 7]), (["c", "b"], [7, 0]), (["c", "a"], [7, 4])):
        batch.req_ids = rows
        given = [
            pool.rings_of(types.SimpleNamespace(num_reqs=4, req_idx=req_idx)).tolist()
            for pool, req_idx in ((first, np.array(numbers)), (second, None))
        ]
        assert given[0] == given[1] and given[0][len(rows) :] == [-1] * (4 - len(rows))
    drafts = types.SimpleNamespace(num_reqs=2, req_idx=None)
    assert first.rings_of(drafts).tolist() == second.rings_of(drafts).tolist() == [-1, 1], "rows of the model's pass"
    assert torch.equal(torch.from_numpy(copies.Pool().rings_of(drafts)), torch.full((2,), -1, dtype=torch.int32))


def test_rings_of_requests_that_the_engine_forgot_are_taken_back():
    """vLLM's V2 runner warms up with requests that begin and end beside the scheduler."""
    rings = Rings(2, copies.logger)
    assert sorted(rings.of(["warm-up 0", "warm-up 1"], known={"warm-up 0", "warm-up 1"}).tolist()) == [0, 1]
    assert sorted(rings.of(["a", "b"], known={"a", "b"}).tolist()) == [0, 1]
    assert rings.of(["a", "c"], known={"a", "b", "c"}).tolist()[1] == -1, "b runs again later and keeps its ring"
