"""Drafts of a head (multi-token prediction), three at a time, in vLLM's official wheel on a CPU: of a dense model, and
of one with recurrent layers.
"""

from __future__ import annotations

import random

import pytest
import torch
from integrations import heads, vllm_cpu_recurrent
from integrations.inside_vllm import generate, said
from integrations.judged import MODELS, VOCABULARY, check, distance, random_ids, scheme_of
from integrations.test_vllm_klt import layers_by_owner
from integrations.test_vllm_models import COPIES, qwen3_next
from nightly import at_night
from transformers import Qwen2Config

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def mimo():
    torch.manual_seed(13)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        initializer_range=0.15,
        max_position_embeddings=4096,
    )
    return heads.mimo(config)


MODELS |= {"mimo_mtp": mimo, "qwen3_next_mtp": lambda: heads.qwen3_next(qwen3_next())}


def drafts(dtype, **options):
    raw = {"attention_backend": "KVBITS"} if dtype == "auto" else {}
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3} | raw} | raw | options


def some_accepted(llm):
    """Most first drafts, not all, and some third ones."""
    first, _, third = heads.accepted(llm)
    return 0.4 < first < 0.9 and third > 0.1


@pytest.mark.night
@pytest.mark.parametrize("dtype", ["kvbits_int8_centered", "kvbits_klt4"])
def test_tokens_are_those_of_transformers_with_the_same_scheme(model, engine, calibration, dtype):
    """In chunks, of which the last may be as short as drafts, and again where prompts are found in the prefix cache."""
    c, scheme = calibration("mimo_mtp") if "klt" in dtype else None, None if dtype == "auto" else scheme_of(dtype)
    llm = engine("mimo_mtp", dtype, **drafts(dtype, **(said(c, raw_newest=0) if c else {})), max_num_batched_tokens=96)
    cases = (([63],) * 2, ([96, 1, 1, 1], [64, 35]), ([96, 96, 96, 12], [96, 96, 64, 44]))
    for first, again in cases:
        prompt = random_ids(sum(first), sum(first))
        for chunks in (first, again):
            result = generate(llm, [prompt], 40)[0]
            assert result[2] == (sum(again[:-1]) if chunks is again else 0)
            check(model("mimo_mtp")[0], scheme, prompt, result, chunks, c)
    assert some_accepted(llm), heads.accepted(llm)


@pytest.mark.night
@pytest.mark.parametrize(("dtype", "limit"), [("kvbits_int8_centered", 0.05), ("kvbits_klt4", 0.4)])
def test_newest_tokens_may_be_raw(model, engine, calibration, dtype, limit):
    """In the model's own layers, not in the head.

    Requests of up to 192 tokens are read raw throughout, unless a page that others left has no copy.
    """
    llm = engine("mimo_mtp", dtype, **drafts(dtype, **(said(calibration("mimo_mtp")) if "klt" in dtype else COPIES)))
    prompts = [random_ids(n, n) for n in (2, 40, 63, 120, 300)]
    for again in (False, True):
        results = generate(llm, prompts, 40)
        assert [r[2] for r in results] == ([0, 0, 0, 64, 256] if again else [0] * 5)
        for prompt, result in zip(prompts, results, strict=True):
            if len(prompt) > 150 or result[2]:
                assert distance(model("mimo_mtp")[0], prompt, result) < limit
            else:
                check(model("mimo_mtp")[0], None, prompt, result)
    own, (head,) = layers_by_owner(llm, 2)
    assert head.call.layout.is_centered and head.call.rings == () and all(x.call.rings for x in own)
    assert some_accepted(llm), heads.accepted(llm)


@pytest.mark.night
def test_random_requests_in_a_tiny_pool(model, engine, calibration):
    """Preempted, recomputed, sharing prefixes, prompts in chunks beside drafts."""
    rng = random.Random(0)
    stems = [random_ids(n, n) for n in (64, 128)]
    prompts = [rng.choice(stems)[: rng.randint(1, 128)] + random_ids(rng.randint(1, 50), i) for i in range(20)]
    sizes = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 100, "max_model_len": 512, "max_num_seqs": 6}
    llm = engine("mimo_mtp", "kvbits_klt4", **drafts("kvbits_klt4", **said(calibration("mimo_mtp"))), **sizes)
    results = generate(llm, prompts, 60)
    assert sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0
    assert sum(r[2] for r in results) > 0
    found = [distance(model("mimo_mtp")[0], p, r) for p, r in zip(prompts, results, strict=True)]
    assert sum(found) / len(found) < 0.25 and max(found) < 1
    assert some_accepted(llm), heads.accepted(llm)


@pytest.mark.parametrize(
    ("dtype", "options"),
    at_night(("auto", {"attention_backend": "KVBITS"}), ("kvbits_int8_centered", {}), ("kvbits_int4", COPIES)),
)
def test_recurrent_layers(model, engine, dtype, options):
    """As far from Transformers as without drafts: states of rejected ones are left with their tokens' pages, and
    prefixes are found in whole blocks. bfloat16, as vLLM has gated delta rules on a CPU.
    """
    vllm_cpu_recurrent.install()
    prompts, name = [random_ids(n, n) for n in (2, 63, 700)], "qwen3_next_mtp"

    def far(results):
        return sum(distance(model(name)[0], *x) for x in zip(prompts, results, strict=True)) / len(prompts)

    plain = far(generate(engine(name, dtype, **options, dtype="bfloat16"), prompts, 40))
    llm = engine(name, dtype, **drafts(dtype, **options), dtype="bfloat16")
    assert llm.llm_engine.vllm_config.cache_config.block_size > 64
    for again in (False, True):
        results = generate(llm, prompts, 40)
        assert far(results) < 1.3 * plain + 0.002 and (results[-1][2] > 0) == again
    assert some_accepted(llm), heads.accepted(llm)
