"""vLLM on a CPU with the kernels that serve there: tokens of Transformers under the same scheme, whatever the requests
do.
"""

from __future__ import annotations

import functools

import pytest
from integrations.inside_vllm import generate
from integrations.judged import check, llama_for, random_ids, scheme_of
from messages import raises
from nightly import at_night

from kvbits.errors import UnsupportedError
from kvbits.integrations.vllm import releases
from kvbits.ops import dispatch

on_kernels = functools.partial(check, backend="auto")
"""Queries and weights of attention are rounded there, too (ops/cpu/attend.py), by Transformers' cache as well."""
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture
def served(monkeypatch):
    """Note which backend was chosen for each operation."""
    found, choose = {}, dispatch.choose

    def noting(op, *args, **options):
        choice = choose(op, *args, **options)
        found.setdefault(op, set()).add(choice.backend)
        return choice

    monkeypatch.setattr(dispatch, "choose", noting)
    return found


@pytest.mark.parametrize("dtype", ["kvbits_int8_centered", "kvbits_int4"])
def test_kernels_give_the_tokens_of_transformers(model, engine, served, dtype):
    """Prompts in chunks that end inside pages, decoding over page borders, and prompts found in the prefix cache."""
    name = llama_for(dtype)
    llm = engine(name, dtype, max_num_batched_tokens=200)
    prompts = [random_ids(n, n) for n in (2, 64, 130, 300)]
    hits = [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    for prompt in prompts:
        result = generate(llm, [prompt])[0]
        assert result[2] == 0
        on_kernels(
            model(name)[0],
            scheme_of(dtype),
            prompt,
            result,
            [n for n in (min(len(prompt), 200), len(prompt) - 200) if n > 0],
        )
    # together, pages as the chunks before left them
    for prompt, hit, result in zip(prompts, hits, generate(llm, prompts), strict=True):
        assert result[2] == hit
        chunks = [n for n in (min(hit, 200), hit - 200, len(prompt) - hit) if n > 0]
        on_kernels(model(name)[0], scheme_of(dtype), prompt, result, chunks)
    assert served["attend"] == served["store"] == served["attend_fresh"] == {"cpu"}


@pytest.mark.parametrize("name", ["gemma2", *at_night("gemma3")])
def test_windows_and_soft_caps(model, engine, name):
    llm = engine(name, "kvbits_int8_centered", max_num_batched_tokens=96, enable_prefix_caching=False)
    for length in (90, 400):
        prompt = random_ids(length, length)
        chunks = [96] * (length // 96) + ([length % 96] if length % 96 else [])
        on_kernels(model(name)[0], scheme_of("kvbits_int8_centered"), prompt, generate(llm, [prompt])[0], chunks)


def test_raw_copies_are_read_where_they_are(model, engine):
    """The first page and the newest ones as they came."""
    raw = {"kvbits": {"raw_newest": 64, "raw_first": 64}}
    llm = engine(
        "llama", "kvbits_int8k_int4v", max_num_batched_tokens=96, enable_prefix_caching=False, additional_config=raw
    )
    plain = engine("llama", "kvbits_int8k_int4v", max_num_batched_tokens=96, enable_prefix_caching=False)
    exact = engine("llama", "auto", attention_backend="KVBITS", max_num_batched_tokens=96, enable_prefix_caching=False)
    prompt = random_ids(190, 5)
    want, near, far = (generate(x, [prompt], 12)[0] for x in (exact, llm, plain))
    distance = [(x[1][:1] - want[1][:1]).abs().item() for x in (near, far)]
    assert distance[0] < distance[1], "two of three pages are raw"


def test_a_dtype_is_named_the_way_the_release_takes_it(model, engine):
    if releases.takes_names():
        with raises(UnsupportedError, "--kv-cache-dtype kvbits_int8"):
            engine("llama", "auto", additional_config={"kvbits": {"dtype": "int8"}})
    else:
        with raises(UnsupportedError, "kvbits_int9"):
            engine("llama", "auto", additional_config={"kvbits": {"dtype": "int9"}})
        with raises(UnsupportedError, 'additional_config["kvbits"]', "kvbits_int8", "--kv-cache-dtype", "fp8"):
            engine("llama", "fp8", additional_config={"kvbits": {"dtype": "int8"}})
