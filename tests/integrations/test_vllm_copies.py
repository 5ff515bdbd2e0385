"""Newest and first pages kept raw besides (`additional_config={"kvbits": {"raw_newest": 64, "raw_first": 64}}`), in
vLLM's official wheel on a CPU.
"""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from integrations.inside_vllm import generate
from integrations.judged import check, distance, random_ids
from messages import raises
from nightly import at_night

from kvbits.errors import UnsupportedError
from kvbits.integrations.engine.place import Copies

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
DTYPE = "kvbits_int4"
RAW = {"kvbits": {"raw_newest": 64, "raw_first": 64}}


def test_what_all_copies_cover_is_the_model_itself(model, engine):
    """Up to 192 tokens every page is the first or one of the newest two: nothing that decodes reads a quantized number.

    Longer ones read a few.
    """
    llm = engine("llama_plain", DTYPE, additional_config=RAW, enable_prefix_caching=False)
    short = [random_ids(n, n) for n in (1, 63, 64, 128, 150)]
    for prompt, result in zip(short, generate(llm, short, 40), strict=True):
        check(model("llama_plain")[0], None, prompt, result)
    long = [random_ids(n, n) for n in (300, 400)]
    near = [distance(model("llama_plain")[0], p, r) for p, r in zip(long, generate(llm, long, 40), strict=True)]
    far = [
        distance(model("llama_plain")[0], p, r)
        for p, r in zip(
            long, generate(engine("llama_plain", DTYPE, enable_prefix_caching=False), long, 40), strict=True
        )
    ]
    assert sum(near) < 0.9 * sum(far) and sum(near) > 1e-3


@pytest.mark.night
def test_prompts_in_chunks_read_copies_too(model, engine):
    """Chunks of a page: those of a prompt of up to 192 tokens find all pages before them copied."""
    llm = engine("llama_plain", DTYPE, additional_config=RAW, max_num_batched_tokens=64, enable_prefix_caching=False)
    for length in (65, 128, 150):
        prompt = random_ids(length, length)
        check(model("llama_plain")[0], None, prompt, generate(llm, [prompt], 192 - length)[0])


def test_chunks_prefix_hits_and_windows(model, engine):
    """A prompt in chunks that end inside pages leaves the copies that one pass leaves; hits find those that are still
    there, and are right without.
    """
    llm = engine("llama_plain", DTYPE, additional_config=RAW, max_num_batched_tokens=48)
    stem = random_ids(128, 7)
    prompts = [stem + random_ids(n, n) for n in (1, 30, 64)]
    first = [generate(llm, [p])[0] for p in prompts]
    again = [generate(llm, [p])[0] for p in prompts]
    assert [r[2] for r in first] == [0, 128, 128] and [r[2] for r in again] == [128, 128, 128]
    bound = 1.5 * max(
        distance(model("llama_plain")[0], p, r)
        for p, r in zip(
            prompts, generate(engine("llama_plain", DTYPE, max_num_batched_tokens=48), prompts), strict=True
        )
    )
    for p, r in zip(prompts * 2, first + again, strict=True):
        assert distance(model("llama_plain")[0], p, r) < bound
    windows = engine("mistral", DTYPE, additional_config=RAW, enable_prefix_caching=False)
    prompt = random_ids(150, 3)
    check(model("mistral")[0], None, prompt, generate(windows, [prompt], 40)[0])


@pytest.mark.night
def test_random_requests_in_a_tiny_pool(model, engine):
    """Preempted, recomputed, sharing prefixes, in rows that move: copies of others are never read."""
    rng = random.Random(0)
    stems = [random_ids(n, n) for n in (64, 128)]
    prompts = [rng.choice(stems)[: rng.randint(1, 128)] + random_ids(rng.randint(1, 50), i) for i in range(16)]
    llm = engine(
        "llama_plain",
        DTYPE,
        additional_config=RAW,
        num_gpu_blocks_override=12,
        max_num_batched_tokens=100,
        max_model_len=512,
        max_num_seqs=6,
    )
    results = generate(llm, prompts, 40)
    assert sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0
    assert sum(r[2] for r in results) > 0
    found = [distance(model("llama_plain")[0], p, r) for p, r in zip(prompts, results, strict=True)]
    assert sum(found) / len(found) < 0.25 and max(found) < 1, (
        "0.16 of quantized history; a copy of another block is far off"
    )


def test_speculation_with_copies(model, engine):
    prompts = [(random_ids(7, 1) * 30)[:n] for n in (40, 63, 150)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine("llama_plain", DTYPE, additional_config=RAW, speculative_config=ngram, enable_prefix_caching=False)
    for prompt, result in zip(prompts, generate(llm, prompts, 40), strict=True):
        assert distance(model("llama_plain")[0], prompt, result) < 0.02, "all but a page whose copy drafts wrote over"


def test_the_numbers_of_taken_blocks_travel_with_the_step():
    """To workers in other processes."""
    from vllm.v1.core.sched.output import SchedulerOutput

    step = SchedulerOutput.make_empty()
    step.kvbits_taken = [3, 1]
    assert pickle.loads(pickle.dumps(step)).kvbits_taken == [3, 1]


@pytest.mark.parametrize("forgetful", [True, *at_night(False)], ids=["taken", "control"])
def test_blocks_that_a_connector_writes_are_read_packed(model, engine, tmp_path, monkeypatch, forgetful):
    """A pool of six blocks: each request takes those of the one before.

    A prompt that is loaded into them is answered as in an engine that never had copies of them.

    The control leaves out what tells copies that blocks are taken, and finds other numbers.
    """
    from integrations.test_vllm_transfer import shared_storage

    if not forgetful:
        monkeypatch.setattr(Copies, "forget", lambda self, blocks: None)
    prompt, pool = random_ids(300), {"num_gpu_blocks_override": 7, "max_model_len": 384, "enable_prefix_caching": False}
    llm = engine("llama_plain", DTYPE, additional_config=RAW, kv_transfer_config=shared_storage(tmp_path), **pool)
    own = generate(llm, [prompt])[0]  # goes into the folder
    again = []
    for n in (300, 40, 150, 340, 260):
        generate(llm, [random_ids(n, n)])
        again.append(generate(llm, [prompt])[0])
    assert [r[2] for r in (own, *again)] == [0] + [256] * 5
    fresh = generate(
        engine("llama_plain", DTYPE, additional_config=RAW, kv_transfer_config=shared_storage(tmp_path), **pool),
        [prompt],
    )[0]
    assert fresh[2] == 256
    same = [r[0] == fresh[0] and torch.equal(r[1], fresh[1]) for r in again]
    assert all(same) if forgetful else not all(same)
    if forgetful:  # the first page and the one before the newest are packed here, and raw there
        assert distance(model("llama_plain")[0], prompt, own) < distance(model("llama_plain")[0], prompt, fresh) < 0.5


@pytest.mark.parametrize("forgetful", [True, False], ids=["taken", "control"])
def test_a_block_that_is_copied_in_part_is_read_packed(model, engine, monkeypatch, forgetful):
    """vLLM matches prefixes inside blocks for models with Mamba layers only. It copies the shared part of a block to a
    block from the pool, here to one that had copies. So the test states the match: 96 tokens of the request before,
    whose blocks stay.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    if not forgetful:
        monkeypatch.setattr(Copies, "forget", lambda self, blocks: None)
    llm = engine(
        "llama_plain", "kvbits_int8_centered", additional_config=RAW, num_gpu_blocks_override=6, max_model_len=320
    )
    stem, kept, free = random_ids(110, 1), [], KVCacheManager.free

    def keeping(self, request):
        kept.extend(self.get_blocks(request.request_id).blocks[0])
        for block in kept:
            block.ref_cnt += 1
        free(self, request)

    monkeypatch.setattr(KVCacheManager, "free", keeping)
    generate(llm, [stem], 10)
    monkeypatch.setattr(KVCacheManager, "free", free)
    generate(llm, [random_ids(150, 2)])  # in all other blocks
    monkeypatch.setattr(
        KVCacheManager,
        "get_computed_blocks",
        lambda self, *request: (self.create_kv_cache_blocks((list(kept),)), 96, 0),
    )
    prompt = stem[:96] + random_ids(15, 3)
    result = generate(llm, [prompt], 12)[0]
    assert result[2] == 96
    assert (distance(model("llama_plain")[0], prompt, result) < 0.05) == forgetful


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"additional_config": {"kvbits": {"raw_newest": 65}}}, ("raw_newest=65", "multiple of 64")),
        ({"additional_config": {"kvbits": {"raw_first": 64}}}, ("raw_first", "raw_newest=64")),
        (
            {"additional_config": {"kvbits": {"raw": 1}}},
            ("'raw'", "raw_newest", "raw_first", "packed_copies", "copies_share"),
        ),
        ({"additional_config": {"kvbit": RAW["kvbits"]}}, ("'kvbit'", "'kvbits'")),
    ],
)
def test_options_that_cannot_be_are_refused(engine, options, parts):
    with raises(UnsupportedError, *parts):
        engine("llama_plain", DTYPE, **options)
