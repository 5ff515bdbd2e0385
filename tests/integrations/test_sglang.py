"""SGLang itself, its official wheel on a CPU with its own processes, scheduler and model runner: tokens of Transformers
under the same scheme.

Set up by tests/integrations/run_sglang_cpu.sh; without SGLang the tests skip. An engine takes half a minute to start on
an idle core, so tests share them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest
import tiny
import torch
from messages import mentions, raises
from nightly import at_night

if importlib.util.find_spec("sglang_stand_ins") is None:
    pytest.skip("SGLang is not installed (tests/integrations/run_sglang_cpu.sh sets it up)", allow_module_level=True)

from integrations.judged import (
    MODELS,
    VOCABULARY,
    calibrated,
    check,
    distance,
    llama_for,
    random_ids,
    scheme_of,
    transformers_logprobs,
)
from transformers import DeepseekV3Config, Gemma3nTextConfig, GptOssConfig, Lfm2Config, LlamaConfig, Qwen2Config

from kvbits import planner
from kvbits.calibrate import checked
from kvbits.calibrate.checked import Checked
from kvbits.errors import CalibrationError, UnsupportedError
from kvbits.integrations.sglang import options, releases
from kvbits.model_ref import ModelRef
from kvbits.weights import weights_bytes

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
CHUNK = 128
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": CHUNK,
    "context_length": 1024,
    "log_level": "error",
}
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            found, path = MODELS[name](), tmp_path_factory.mktemp(name)
            found.config.architectures = [type(found).__name__]
            # as the Transformers that SGLang pins writes it
            found.config.hidden_act = getattr(found.config, "hidden_activation", "silu")
            found.save_pretrained(path)
            made[name] = found, path
        return made[name]

    return get


@pytest.fixture(scope="module")
def engine(model):
    """An engine by model, format and options (kvbits' own in `kvbits`), with an empty cache; it stays until another one
    is asked for.
    """
    import sglang

    running = {}

    def start(name: str, backend: str, kvbits=None, **more):
        key = repr((name, backend, kvbits, more))
        if key not in running:
            for old in running.values():
                old.shutdown()
            running.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVBITS_SGLANG", json.dumps(kvbits or {}))
                # cores by rank: it must be told where ranks are more than NUMA nodes
                patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
                running[key] = sglang.Engine(
                    model_path=str(model(name)[1]), attention_backend=backend, **(SETTINGS | more)
                )
        running[key].flush_cache()
        return running[key]

    yield start
    for old in running.values():
        old.shutdown()


@pytest.fixture(scope="module")
def calibration(model, tmp_path_factory):
    """Calibrations of tiny models by scheme, each with its file."""
    made = {}

    def get(name: str, scheme: str):
        if (name, scheme) not in made:
            made[name, scheme] = calibrated(
                model(name)[0], scheme, tmp_path_factory.mktemp("calibration") / "c.safetensors"
            )
        return made[name, scheme]

    return get


def sampling(max_tokens):
    return {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}


def read(output):
    """(tokens, their log-probabilities, cached prompt tokens)."""
    meta = output["meta_info"]
    return (
        output["output_ids"],
        torch.tensor([found[0] for found in meta["output_token_logprobs"]]),
        meta["cached_tokens"],
    )


def generate(llm, prompts, max_tokens=24):
    return [read(o) for o in llm.generate(input_ids=prompts, sampling_params=sampling(max_tokens), return_logprob=True)]


def in_chunks(length, hit=0):
    """Parts of a prompt that is alone, behind a hit, whose pages are as the parts before left them."""
    return [n for many in (hit, length - hit) for n in (*[CHUNK] * (many // CHUNK), many % CHUNK) if n]


@pytest.mark.parametrize(
    "backend", ["kvbits_int8_centered", *at_night("kvbits_int8", "kvbits_int8k_int4v", "kvbits_int4")]
)
def test_tokens_are_those_of_transformers_with_the_same_scheme(model, engine, backend):
    """Prompts in chunks, decoding over page borders, and once more where the prompts are found in the radix cache, all
    at once.
    """
    name = llama_for(backend)
    llm = engine(name, backend)
    prompts = [random_ids(n, n) for n in (2, 63, 64, 65, 130, 300)]
    for prompt in prompts:
        result = generate(llm, [prompt])[0]
        assert result[2] == 0
        check(model(name)[0], scheme_of(backend), prompt, result, in_chunks(len(prompt)), backend="auto")
    hits = [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    for prompt, hit, result in zip(prompts, hits, generate(llm, prompts), strict=True):
        assert result[2] == hit
        check(model(name)[0], scheme_of(backend), prompt, result, in_chunks(len(prompt), hit), backend="auto")


def test_aborted_requests_leave_the_others_alone(model, engine):
    llm = engine("llama", "kvbits_int8_centered")
    prompts = {str(n): random_ids(20 * n + 7, n) for n in range(1, 9)}

    async def ask(name):
        found = None
        options = {"rid": name, "stream": True, "return_logprob": True}
        async for output in await llm.async_generate(input_ids=prompts[name], sampling_params=sampling(40), **options):
            found = output
            if name in "381" and output["meta_info"]["completion_tokens"] > int(name):
                llm.tokenizer_manager.abort_request(name)
        return found

    async def all_of_them():
        return await asyncio.gather(*map(ask, prompts))

    ended = {}
    for name, output in zip(prompts, llm.loop.run_until_complete(all_of_them()), strict=True):
        ended[name] = output["meta_info"]["finish_reason"]["type"]
        if ended[name] == "length":
            again = generate(llm, [prompts[name]], 40)[0]
            assert distance(model("llama")[0], prompts[name], again) < 0.05
    assert {name for name, how in ended.items() if how == "abort"} <= set("381")
    assert {name for name, how in ended.items() if how == "length"} >= set("24567")
    assert "abort" in ended.values()


@pytest.mark.night
def test_random_requests_share_prefixes(model, engine):
    rng = random.Random(0)
    stems = [random_ids(n, n) for n in (64, 128, 200)]
    prompts = [rng.choice(stems)[: rng.randint(1, 200)] + random_ids(rng.randint(1, 150), i) for i in range(40)]
    results = generate(engine("llama", "kvbits_int8_centered"), prompts, 12)
    assert sum(r[2] for r in results) > 0
    distances = []
    for prompt, result in zip(prompts, results, strict=True):
        want, _ = transformers_logprobs(model("llama")[0], None, prompt, result[0])
        distances.append((result[1] - want).abs())
    assert torch.cat(distances).mean() < 0.05


@pytest.mark.night
def test_retracted_requests_are_computed_again(model, engine, monkeypatch):
    """By SGLang's own switch: it reserves all tokens of requests that ignore their end, so a small pool would keep them
    waiting instead.
    """
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "10")
    llm = engine("llama", "kvbits_int8_centered", max_total_tokens=2048)
    prompts = [random_ids(n, n) for n in (60, 61, 62, 100, 120, 30)]
    outputs = llm.generate(input_ids=prompts, sampling_params=sampling(40), return_logprob=True)
    assert sum(o["meta_info"]["num_retractions"] for o in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output["output_ids"]) == 40
        assert distance(model("llama")[0], prompt, read(output)) < 0.05


def test_sliding_windows_and_soft_caps(model, engine):
    llm = engine("gemma2", "kvbits_int8_centered", disable_hybrid_swa_memory=True)
    for length in (90, 150, 400):
        prompt = random_ids(length, length)
        check(
            model("gemma2")[0],
            scheme_of("kvbits_int8_centered"),
            prompt,
            generate(llm, [prompt])[0],
            in_chunks(length),
            backend="auto",
        )


@pytest.mark.parametrize("backend", ["kvbits_klt4", *at_night("kvbits_klt3", "kvbits_klt2")])
def test_keys_in_a_calibrated_basis(model, engine, calibration, backend):
    """As above, past a frame of 512, without raw copies."""
    c = calibration("llama", backend.removeprefix("kvbits_"))
    llm = engine("llama", backend, {"calibration": c.path, "raw_newest": 0})
    prompts = [random_ids(n, n) for n in (2, 63, 64, 130, 250, 600)]
    for prompt in prompts:
        check(
            model("llama")[0], scheme_of(backend), prompt, generate(llm, [prompt])[0], in_chunks(len(prompt)), c, "auto"
        )
    hits = [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    for prompt, hit, result in zip(prompts, hits, generate(llm, prompts), strict=True):
        assert result[2] == hit
        check(model("llama")[0], scheme_of(backend), prompt, result, in_chunks(len(prompt), hit), c, "auto")


@pytest.mark.night
def test_channels_in_another_order_are_stored_in_pairs_of_halves(model, engine, calibration):
    c = calibration("cohere", "klt4")
    llm = engine("cohere", "kvbits_klt4", {"calibration": c.path, "raw_newest": 0})
    for length in (40, 300):
        prompt = random_ids(length, length)
        check(
            model("cohere")[0],
            scheme_of("kvbits_klt4"),
            prompt,
            generate(llm, [prompt])[0],
            in_chunks(length),
            c,
            "auto",
        )


@pytest.mark.night
@pytest.mark.parametrize("backend", ["kvbits_int8_centered", "kvbits_klt4"])
def test_two_ranks_give_the_tokens_of_one(model, engine, calibration, backend):
    """Each has a kv head, and its part of a calibration: chunks, decoding over page borders, hits, raw copies."""
    kvbits = {"calibration": calibration("llama", "klt4").path} if backend == "kvbits_klt4" else {}
    prompts = 2 * [random_ids(n, n) for n in (2, 63, 64, 130, 300)]
    found = []
    for ranks in (1, 2):
        llm = engine("llama", backend, kvbits, tp_size=ranks)
        found.append([generate(llm, [p], 40)[0] for p in prompts])
    for one, two in zip(*found, strict=True):
        assert one[0] == two[0] and one[2] == two[2]
        assert (one[1] - two[1]).abs().mean() < 1e-3  # an odd code moves by one
    assert found[1][-1][2] == 256


@pytest.mark.night
def test_newest_and_first_tokens_are_raw_unless_told_otherwise(model, engine, calibration):
    """Up to 192 tokens every page is the first or one of the newest two: neither chunks nor tokens that decode read a
    quantized number. Longer ones read a few, and so do prompts found in the radix cache whose copies later requests
    wrote over.
    """
    llama, c = model("llama")[0], calibration("llama", "klt2")
    llm = engine("llama", "kvbits_klt2", {"calibration": c.path})
    prompts = [random_ids(n, n) for n in (1, 64, 127, 150)]
    for prompt, result in zip(prompts, generate(llm, prompts, 40), strict=True):
        check(llama, None, prompt, result)
    long = [random_ids(n, n) for n in (300, 400)]
    first, again = ([generate(llm, [p], 40)[0] for p in long] for _ in range(2))
    assert [r[2] for r in (*first, *again)] == [0, 0, 256, 384]
    near, hit = (sum(distance(llama, p, r) for p, r in zip(long, results, strict=True)) for results in (first, again))
    llm = engine("llama", "kvbits_klt2", {"calibration": c.path, "raw_newest": 0})
    far = sum(distance(llama, p, generate(llm, [p], 40)[0]) for p in long)
    assert 1e-3 < near < 0.9 * far and hit < 1.1 * far


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("kvbits_int8_centered", {}),
        *at_night(
            ("kvbits_int8_centered", {"hicache_write_policy": "write_back"}),
            ("kvbits_klt4", {"hicache_io_backend": "direct"}),
        ),
    ],
)
def test_answers_behind_pages_of_host_memory_are_equal(model, engine, calibration, backend, more):
    """Chats of eight users, of which the pool holds three: SGLang's controller writes pages to host memory and loads
    them again. Where pages have no copies, numbers are those of the first time.
    """
    kvbits = {"calibration": calibration("llama", "klt4").path, "raw_newest": 0} if backend == "kvbits_klt4" else {}
    llm = engine("llama", backend, kvbits, max_total_tokens=1024, **HOST, **more)
    prompts, found = [random_ids(300, n) for n in range(8)], []
    first = [generate(llm, [p])[0] for p in prompts]
    for prompt, before in zip(prompts, first, strict=True):
        output = llm.generate(input_ids=prompt, sampling_params=sampling(24), return_logprob=True)
        tokens, logprobs, cached = read(output)
        assert cached == 256 and tokens == before[0] and torch.equal(logprobs, before[1])
        found.append(output["meta_info"]["cached_tokens_details"]["host"])
    assert sum(found) > 4 * 256


@pytest.mark.parametrize("mixed", [*at_night(False), True], ids=["overlap", "mixed"])
def test_steps_that_overlap_or_are_of_prompts_and_single_tokens(model, engine, calibration, mixed):
    """SGLang prepares a step while the one before runs, unless told otherwise; it mixes where nobody asks for
    log-probabilities. Copies hold all tokens, so whatever is computed with what, tokens are the model's.
    """
    llama, kvbits = model("llama")[0], {"calibration": calibration("llama", "klt2").path}
    assert resolved(model("llama")[1]).disable_overlap_schedule is False
    prompts = [random_ids(n, n) for n in (20, 64, 150, 127, 100, 149, 63, 140, 5, 130)]
    found = [
        [
            o["output_ids"]
            for o in engine("llama", "kvbits_klt2", kvbits, **more).generate(
                input_ids=prompts, sampling_params=sampling(40)
            )
        ]
        for more in ({"enable_mixed_chunk": mixed}, {"disable_overlap_schedule": True})
    ]
    for prompt, tokens, alone in zip(prompts, *found, strict=True):
        want, best = transformers_logprobs(llama, None, prompt, tokens)
        assert len(tokens) == 40 and (best - want).max() < 1e-4
        assert tokens == alone


@pytest.mark.night
@pytest.mark.parametrize("retract", [False, True], ids=["prefixes", "retracted"])
def test_copies_of_others_are_never_read(model, engine, calibration, monkeypatch, retract):
    """Random requests in a small pool share prefixes, and are computed again in other pages; a copy of another page is
    far off. Those without a hit that copies cover are the model's.
    """
    if retract:
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
        monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "10")
    rng = random.Random(0)
    stems = [random_ids(n, n) for n in (64, 128, 200)]
    prompts = [rng.choice(stems)[: rng.randint(1, 200)] + random_ids(rng.randint(1, 60), i) for i in range(30)]
    # the switch is read as an engine starts
    sizes = {"max_total_tokens": 2048 if retract else 1536, "max_running_requests": 6}
    llm = engine("llama", "kvbits_klt4", {"calibration": calibration("llama", "klt4").path}, **sizes)
    outputs = llm.generate(input_ids=prompts, sampling_params=sampling(40), return_logprob=True)
    assert (sum(o["meta_info"]["num_retractions"] for o in outputs) > 0) == retract
    assert sum(read(o)[2] for o in outputs) > 0
    found = [distance(model("llama")[0], p, read(o)) for p, o in zip(prompts, outputs, strict=True)]
    covered = [
        x
        for x, p, o in zip(found, prompts, outputs, strict=True)
        if len(p) + 40 <= 192 and not read(o)[2] and not o["meta_info"]["num_retractions"]
    ]
    assert covered and max(covered) < 1e-4
    assert sum(found) / len(found) < 0.25 and max(found) < 1


def with_and_without_drafts(engine, *args, **more):
    """Prompts, answers to them and once more, when the corpus of n-grams has the first, and tokens a step of each;
    without drafts, then with them.
    """
    prompts = [random_ids(n, n) for n in (2, 63, 64, 130, 300)]
    for drafted in ({}, DRAFTS):
        llm = engine(*args, **drafted, **more)
        outputs = [llm.generate(input_ids=prompts, sampling_params=sampling(80), return_logprob=True) for _ in range(2)]
        yield (
            prompts,
            [[read(o) for o in of] for of in outputs],
            [[o["meta_info"].get("spec_accept_length") for o in of] for of in outputs],
        )


@pytest.mark.night
@pytest.mark.parametrize("backend", ["kvbits_int4", "kvbits_int8", "kvbits_klt4"])
def test_drafts_of_ngrams_leave_tokens_as_they_are(engine, calibration, backend):
    """None, some or all of a step's accepted, over borders of pages and behind hits of the radix cache."""
    name = llama_for(backend)
    kvbits = {"calibration": calibration(name, "klt4").path, "raw_newest": 0} if backend == "kvbits_klt4" else {}
    (_, plain, _), (_, drafted, accepted) = with_and_without_drafts(engine, name, backend, kvbits)
    for one, two in zip(plain[0] + plain[1], drafted[0] + drafted[1], strict=True):
        assert one[0] == two[0] and one[2] == two[2] and len(one[1]) == len(two[1]) == 80
        assert (one[1] - two[1]).abs().max() < 1e-5
    assert [r[2] for r in drafted[1]] == [0, 0, 0, 128, 256]
    assert 1 < min(accepted[0]) < 1.5 and max(accepted[1]) > 7  # of eight


@pytest.mark.night
@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "kvbits_int8_centered"), ("gemma2", "kvbits_int8_centered"), ("llama", "kvbits_klt4")],
)
def test_drafts_cost_little_accuracy(model, engine, calibration, name, backend):
    """Numbers differ in two cases: wrong drafts count in the mean of a page that opens with them, and a draft over a
    page's border takes the oldest raw copy away. Requests that lack no copy are the model's.
    """
    kvbits = {"calibration": calibration(name, "klt4").path} if backend == "kvbits_klt4" else {}
    more, found = {"disable_hybrid_swa_memory": True} if name == "gemma2" else {}, []
    for prompts, results, _ in with_and_without_drafts(engine, name, backend, kvbits, **more):
        far = [[distance(model(name)[0], p, r) for p, r in zip(prompts, of, strict=True)] for of in results]
        assert not kvbits or max(far[0][:3]) < 1e-4
        found.append(sum(map(sum, far)))
    assert found[1] < (1.5 if kvbits else 1.2) * found[0]


def test_trees_of_ngrams_are_verified_along_their_longest_path():
    """5 - 6 - 7 and 5 - 8 - 9 - 1, and four zeros where there were too few; a tree of zeros at its root alone."""
    from kvbits.integrations.sglang.drafts import chains

    parents = [[-1, 0, 0, 1, 2, 4, 0, 0], [-1, *[0] * 7]]
    mask = np.zeros((2, 8, 8), np.int64)
    for tree, above in zip(mask, parents, strict=True):
        for i, parent in enumerate(above):
            tree[i] = tree[parent] * (parent >= 0)
            tree[i, i] = 1
    tokens, causal = chains(np.array([5, 6, 8, 7, 9, 1, 0, 0, 4, *[0] * 7]), mask.ravel(), 8)
    assert tokens.tolist() == [5, 8, 9, 1, 0, 0, 0, 0, 4, *[0] * 7]
    assert causal.dtype == np.int64 and np.array_equal(causal.reshape(2, 8, 8), np.tile(np.tri(8), (2, 1, 1)))


def test_accepted_tokens_are_where_they_belong():
    from kvbits.integrations.sglang.pool import KVBitsPool

    found, slots = KVBitsPool.__new__(KVBitsPool), torch.tensor([65, 66, 0, 0])
    found.move_kv_cache(slots, slots.clone())
    with raises(RuntimeError, "draft", "chain"):
        found.move_kv_cache(slots, torch.tensor([65, 68, 0, 0]))


@pytest.mark.night
def test_a_server_started_from_the_command_line(model):
    """`python -m sglang.launch_server`, asked over HTTP, with metrics."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model("llama")[1]),
        "--attention-backend",
        "kvbits_int8_centered",
    ]
    command += [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--skip-tokenizer-init",
        "--max-total-tokens",
        "4096",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--enable-metrics",
    ]
    server = subprocess.Popen(
        command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 800
        while True:
            assert server.poll() is None and time.monotonic() < deadline, server.stderr.read().decode()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(1)
        prompt = random_ids(100, 7)
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling(24), "return_logprob": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
        )
        result = read(json.loads(urllib.request.urlopen(request, timeout=120).read()))
        check(model("llama")[0], scheme_of("kvbits_int8_centered"), prompt, result, backend="auto")
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode().splitlines()
        (line,) = [x for x in metrics if x.startswith("sglang:kvbits_cache_info{")]
        bits = options.FORMATS["kvbits_int8_centered"].layout(2, 64, 64, "float32").bits_per_element
        for fact in (
            'format="kvbits_int8_centered"',
            f'bits="{bits:.2f}"',
            'tokens="4096"',
            f'times_bf16="{16 / bits:.2f}"',
            'measured=""',
        ):
            assert fact in line
        assert float(line.rsplit(" ", 1)[1]) == 1
    finally:
        server.terminate()
        server.wait(60)


def record(path, **more):
    """SGLang's options as an engine resolves them, with the plugin loaded."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    args = ServerArgs(model_path=str(path), **(SETTINGS | {"attention_backend": "kvbits_int8_centered"} | more))
    args.resolve_once()
    return args


def resolved(path, **more):
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(record(path, **more))


def test_the_page_size_follows_from_the_backend(model):
    assert resolved(model("llama")[1]).page_size == 64
    assert resolved(model("llama")[1], attention_backend="torch_native").page_size == 1


def test_a_step_has_as_many_drafts_as_attention_takes(model):
    assert resolved(model("llama")[1], **DRAFTS).speculative_num_draft_tokens == 8
    assert resolved(model("llama")[1], **DRAFTS, speculative_num_draft_tokens=3).speculative_num_draft_tokens == 3


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"page_size": 32}, ("64 tokens", "--page-size 64")),
        ({"decode_attention_backend": "torch_native"}, ("torch_native", "--attention-backend")),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("--kv-cache-dtype fp8_e4m3",)),
        (HOST | {"hicache_storage_backend": "file"}, ("--hicache-storage-backend file",)),
        ({"disaggregation_mode": "prefill"}, ("--disaggregation-mode prefill",)),
        ({"pp_size": 2}, ("--pp-size 2",)),
        ({"cuda_graph_backend_prefill": "breakable"}, ("prompts", "graphs", "breakable")),
        ({"speculative_algorithm": "EAGLE"}, ("--speculative-algorithm EAGLE", "NGRAM")),
        ({"speculative_algorithm": "NGRAM"}, ("10 branches", "--speculative-ngram-max-bfs-breadth 1")),
        (DRAFTS | {"speculative_num_draft_tokens": 12}, ("12 drafts", 8, "--speculative-num-draft-tokens")),
        (
            {"attention_backend": "kvbits_klt4", "json_model_override_args": '{"rope_theta": 500.0}'},
            ("--json-model-override-args", "kvbits_klt4", "config.json", "kvbits_int8_centered"),
        ),
        ({"tp_size": 4}, ("2 kv heads", "--tp-size 4")),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_at_start(model, more, parts):
    with raises(UnsupportedError, *parts):
        resolved(model("llama")[1], **more)


def test_a_calibration_is_found_or_made_once(model, monkeypatch, tmp_path, capfd):
    """Before the engine starts, for all widths."""
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    path = tmp_path / "model"
    shutil.copytree(model("llama")[1], path)
    monkeypatch.setenv("KVBITS_SGLANG", '{"calibrate": false}')
    with raises(CalibrationError, path, "kvbits calibrate", "KVBITS_SGLANG="):
        resolved(path, attention_backend="kvbits_klt4")
    monkeypatch.delenv("KVBITS_SGLANG")
    tiny.tokenizer().save_pretrained(path)
    resolved(path, attention_backend="kvbits_klt3")
    assert capfd.readouterr().err.count("bases ...") == 1
    monkeypatch.setenv("KVBITS_SGLANG", '{"calibrate": false}')
    resolved(path, attention_backend="kvbits_klt2")


@pytest.fixture
def memory(model, monkeypatch, tmp_path):
    """Sets a device's memory so that half of it holds the weights and so many requests of 1,024 tokens in 8 bits, of a
    model on which only 4 bits passed a check.
    """
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    path = str(model("llama")[1])
    ref = ModelRef(path)
    checked.keep(ref, "klt4", Checked(passed=True, kl=0.0123, tokens=512, day="2026-11-27", command="kvbits check M"))
    sizes = {"engine": "vllm", "context": 1024, "raw_dtype": "float32"}

    def holds(requests):
        rows = planner.plan(ref.layers, ["kvbits_int8_centered"], batch=requests, **sizes).rows
        total = 2 * (weights_bytes(ref)[0] + rows[0].total_bytes) + 2
        monkeypatch.setattr("sglang.srt.utils.common.get_device_memory_capacity", lambda device: total / 2**20)
        return path

    return holds


AUTO = {"attention_backend": "kvbits_auto", "mem_fraction_static": 0.5}


def test_a_format_is_chosen_for_the_context_and_the_requests(memory, engine, calibration, capfd):
    """Before the engine starts; its log says why, and what the format holds and costs."""
    assert resolved(memory(8), **AUTO).attention_backend == "kvbits_int8_centered"
    memory(7)
    capfd.readouterr()
    own = {"calibration": calibration("llama", "klt4").path}
    llm = engine("llama", "kvbits_auto", own, mem_fraction_static=0.5, log_level="info")
    said = capfd.readouterr().err
    assert mentions(said, "kvbits_auto", "kvbits_klt4", "kvbits_int8_centered", 7)
    layout = options.FORMATS["kvbits_klt4"].layout(2, 64, 64, "float32")
    bits = 8 * layout.head_bytes / (64 * (64 + 64))
    assert mentions(said, f"{bits:.2f} bits", "4,096 tokens", f"{16 / bits:.2f} times", "bf16")
    assert "KL 0.01230 nats (512 tokens, 2026-11-27): kvbits check M" in said
    assert len(generate(llm, [random_ids(70, 3)], 4)[0][0]) == 4


@pytest.mark.parametrize(
    ("unsaid", "parts"), [("max_running_requests", ("--max-running-requests",)), ("memory", ("memory", "format"))]
)
def test_nothing_is_chosen_without_a_number_of_requests_or_memory(memory, monkeypatch, unsaid, parts):
    path = memory(8)
    if unsaid == "memory":
        monkeypatch.setattr("sglang.srt.utils.common.get_device_memory_capacity", lambda device: None)
    with raises(UnsupportedError, *parts):
        resolved(path, **AUTO | ({unsaid: None} if unsaid != "memory" else {}))


def test_a_release_is_refused_by_the_symbol_that_it_lacks(model, monkeypatch):
    """To those who ask for a format of ours, alone."""
    broken = {"sglang.srt.mem_cache.allocation:get_last_loc": "is not there"}
    monkeypatch.setitem(vars(releases.CONTRACT), "broken", broken)
    with raises(
        UnsupportedError, "--attention-backend kvbits_int8_centered", "sglang.srt.mem_cache.allocation.get_last_loc"
    ):
        resolved(model("llama")[1])
    assert resolved(model("llama")[1], attention_backend="torch_native").page_size == 1


def test_files_of_other_models_and_options_that_cannot_be_are_refused(model, calibration, monkeypatch):
    other = calibration("stablelm", "klt4").path
    names = "raw_newest", "raw_first", "packed_copies", "copies_share", "calibration", "calibrate"
    for said, error, parts in (
        (json.dumps({"calibration": other}), CalibrationError, (other, "kvbits calibrate")),
        ('{"raw_newest": 65}', UnsupportedError, ("raw_newest=65", "multiple of 64")),
        ('{"raw": 1}', UnsupportedError, ("KVBITS_SGLANG", "'raw'", *names)),
        ("raw", UnsupportedError, ("KVBITS_SGLANG", "'raw'", "dict", *names)),
    ):
        monkeypatch.setenv("KVBITS_SGLANG", said)
        with raises(error, *parts):
            resolved(model("llama")[1], attention_backend="kvbits_klt4")


@pytest.mark.parametrize("said", ['{"calibration": "c.safetensors"}', '{"calibrate": false}'])
def test_calibrations_that_a_format_never_reads_are_refused(model, monkeypatch, said):
    monkeypatch.setenv("KVBITS_SGLANG", said)
    with raises(UnsupportedError, "KVBITS_SGLANG", *json.loads(said), "kvbits_int8_centered"):
        resolved(model("llama")[1])


@pytest.mark.parametrize(
    ("form", "running", "share", "copied"),
    [("klt4", 8, None, 8), ("klt4", None, None, 51), ("klt4", None, 0.5, 512), ("klt2", None, None, 48)],
)
def test_copies_are_taken_off_the_memory_for_pages(model, calibration, monkeypatch, form, running, share, copied):
    """A share of it, if so many requests can run: of two layers, and each request's newest three pages, in klt2 two,
    and the first: two heads of 64 keys and values in float32. klt2 also has nine pages of klt4.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from kvbits.integrations.sglang.pool import budget, pool_class

    said = {"calibration": calibration("llama", form).path} | ({"copies_share": share} if share else {})
    monkeypatch.setenv("KVBITS_SGLANG", json.dumps(said))
    assert (
        resolved(
            model("llama")[1], attention_backend=f"kvbits_{form}", max_running_requests=running
        ).max_running_requests
        == running
    )
    args = record(model("llama")[1], attention_backend=f"kvbits_{form}", max_running_requests=running)
    fields = {
        "server_args": args,
        "model_config": model_config_of(args),
        "layer_info": types.SimpleNamespace(num_effective_layers=2),
    }
    configurator = types.SimpleNamespace(**fields, kv_cache_dtype=torch.float32)
    memory, of_request = 1 << 29, 2 * (4 if form == "klt4" else 3) * 64 * 2 * (64 + 64) * 4
    if form == "klt2":
        of_request += 2 * 9 * options.FORMATS["kvbits_klt4"].layout(2, 64, 64, "float32").page_size_bytes
    assert copied in (running, int(memory * (share or 0.05)) // of_request)
    assert budget(lambda *_: memory, configurator, 0) == memory - copied * of_request
    assert pool_class(None, configurator, kind="mha", default=object).copied == copied


def test_other_devices_are_refused():
    why = options.refuses(options.FORMATS["kvbits_int8"], types.SimpleNamespace(device="xpu"))
    assert mentions(why, "cuda", "cpu", "xpu", "--attention-backend")


def test_every_option_that_is_refused_is_one_of_sglangs():
    from sglang.srt.server_args import ServerArgs

    usual = ServerArgs(model_path="none")
    assert {name: getattr(usual, name) for name in options.NOT_RUN} == {
        name: value for name, (value, _) in options.NOT_RUN.items()
    }


def config_of(family):
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return family(**sizes, vocab_size=VOCABULARY, head_dim=64)


def test_formats_and_models_that_do_not_fit_are_refused():
    class Model:
        num_hidden_layers = 2
        hf_text_config = config_of(Qwen2Config)

    with raises(UnsupportedError, "kvbits_int4", "kvbits_int8_centered", "kvbits_klt4"):
        options.check_model(options.FORMATS["kvbits_int4"], Model, 1)
    options.check_model(options.FORMATS["kvbits_int8_centered"], Model, 1)
    Model.num_hidden_layers = 3
    with raises(UnsupportedError, 2, "3 layers", "--attention-backend"):
        options.check_model(options.FORMATS["kvbits_int8_centered"], Model, 1)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            DeepseekV3Config(num_hidden_layers=2),
            ("latent attention", "--attention-backend"),
        ),
        (
            Lfm2Config(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
            (2, "4 layers", "1 kinds", "--attention-backend"),
        ),
        (Gemma3nTextConfig(), (20, "35 layers", "--attention-backend")),
        (LlamaConfig(hidden_size=96, num_attention_heads=2, num_key_value_heads=2), ("head_dim=48", 64)),
    ],
    ids=["latents", "recurrent", "shared", "narrow"],
)
def test_models_that_do_not_fit_are_refused_at_start(tmp_path, config, parts):
    config.architectures = [type(config).__name__.replace("Text", "").replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    with raises(UnsupportedError, *parts):
        resolved(tmp_path)


def test_sinks_are_left_to_backends_that_sglang_names(tmp_path):
    config = GptOssConfig(num_hidden_layers=2)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    with raises(AssertionError, "GptOssForCausalLM"):
        resolved(tmp_path)


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"sinks": torch.zeros(2)}, ("sinks",)),
        ({"k": None, "v": None}, ("keys",)),
        ({"save_kv_cache": False}, ("keys",)),
    ],
    ids=str,
)
def test_what_a_model_asks_of_a_layer_is_refused(asked, parts):
    """The configuration of the model does not show it."""
    from kvbits.integrations.sglang.backend import KVBitsBackend

    x = torch.zeros(1, 2, 64)
    with raises(UnsupportedError, "layer 3", *parts, "--attention-backend"):
        KVBitsBackend.__new__(KVBitsBackend).forward_extend(
            **({"q": x, "k": x, "v": x} | asked), layer=types.SimpleNamespace(layer_id=3), forward_batch=None
        )
