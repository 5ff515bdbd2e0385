"""SGLang itself, its official wheel on a CPU with its own processes, scheduler and model runner: tokens of Transformers under the same scheme.

Set up by tests/integrations/run_sglang_cpu.sh; without SGLang the tests skip. An engine takes half a minute to start on an idle core, so tests share them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import pytest
import torch

if importlib.util.find_spec("sglang_stand_ins") is None:
    pytest.skip("SGLang is not installed (tests/integrations/run_sglang_cpu.sh sets it up)", allow_module_level=True)

from integrations.judged import MODELS, VOCABULARY, check, check_near, llama_for, random_ids, scheme_of, transformers_logprobs
from transformers import Qwen2Config

from kvbits.errors import UnsupportedError
from kvbits.integrations import sglang as plugin
from kvbits.integrations.sglang import options

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
CHUNK = 128
SETTINGS = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_total_tokens": 4096, "max_running_requests": 8, "chunked_prefill_size": CHUNK,
    "context_length": 1024, "log_level": "error",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            found, path = MODELS[name](), tmp_path_factory.mktemp(name)
            found.config.architectures = [type(found).__name__]
            found.config.hidden_act = getattr(found.config, "hidden_activation", "silu")  # as the Transformers that SGLang pins writes it
            found.save_pretrained(path)
            made[name] = found, path
        return made[name]

    return get


@pytest.fixture(scope="module")
def engine(model):
    """An engine by model, format and options, with an empty cache; it stays until another one is asked for."""
    import sglang

    running = {}

    def start(name: str, backend: str, **more):
        key = (name, backend, tuple(more.items()))
        if key not in running:
            for old in running.values():
                old.shutdown()
            running.clear()
            running[key] = sglang.Engine(model_path=str(model(name)[1]), attention_backend=backend, **(SETTINGS | more))
        running[key].flush_cache()
        return running[key]

    yield start
    for old in running.values():
        old.shutdown()


def sampling(max_tokens):
    return {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}


def read(output):
    """(tokens, their log-probabilities, cached prompt tokens)."""
    meta = output["meta_info"]
    return output["output_ids"], torch.tensor([found[0] for found in meta["output_token_logprobs"]]), meta["cached_tokens"]


def generate(llm, prompts, max_tokens=24):
    return [read(o) for o in llm.generate(input_ids=prompts, sampling_params=sampling(max_tokens), return_logprob=True)]


def in_chunks(length, hit=0):
    """Parts of a prompt that is alone, behind a hit, whose pages are as the parts before left them."""
    return [n for many in (hit, length - hit) for n in (*[CHUNK] * (many // CHUNK), many % CHUNK) if n]


@pytest.mark.parametrize("backend", ["kvbits_int8_centered", pytest.param("kvbits_int4", marks=pytest.mark.night)])
def test_tokens_are_those_of_transformers_with_the_same_scheme(model, engine, backend):
    """Prompts in chunks, decoding over page borders, and once more where the prompts are found in the radix cache, all at once."""
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
            check_near(model("llama")[0], prompts[name], again, 0.05)
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
    """By SGLang's own switch: it reserves all tokens of requests that ignore their end, so a small pool would keep them waiting instead."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "10")
    llm = engine("llama", "kvbits_int8_centered", max_total_tokens=2048)
    prompts = [random_ids(n, n) for n in (60, 61, 62, 100, 120, 30)]
    outputs = llm.generate(input_ids=prompts, sampling_params=sampling(40), return_logprob=True)
    assert sum(o["meta_info"]["num_retractions"] for o in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output["output_ids"]) == 40
        check_near(model("llama")[0], prompt, read(output), 0.05)


def test_sliding_windows_and_soft_caps(model, engine):
    llm = engine("gemma2", "kvbits_int8_centered", disable_hybrid_swa_memory=True)
    for length in (90, 150, 400):
        prompt = random_ids(length, length)
        check(model("gemma2")[0], scheme_of("kvbits_int8_centered"), prompt, generate(llm, [prompt])[0], in_chunks(length), backend="auto")


@pytest.mark.night
def test_a_server_started_from_the_command_line(model):
    """`python -m sglang.launch_server`, asked over HTTP."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model("llama")[1]), "--attention-backend", "kvbits_int8_centered"]
    command += ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--port", str(port), "--log-level", "error"]
    server = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
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
        request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
        result = read(json.loads(urllib.request.urlopen(request, timeout=120).read()))
        check(model("llama")[0], scheme_of("kvbits_int8_centered"), prompt, result, backend="auto")
    finally:
        server.terminate()
        server.wait(60)


def resolved(path, **more):
    """SGLang's options as an engine resolves them, with the plugin loaded."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    args = ServerArgs(model_path=str(path), **(SETTINGS | {"attention_backend": "kvbits_int8_centered"} | more))
    args.resolve_once()
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(args)


def test_the_page_size_follows_from_the_backend(model):
    assert resolved(model("llama")[1]).page_size == 64
    assert resolved(model("llama")[1], attention_backend="torch_native").page_size == 1


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"page_size": 32}, "leave --page-size away, or pass --page-size 64"),
        ({"attention_backend": "kvbits_klt4"}, "use one of kvbits_int8, kvbits_int8_centered, kvbits_int8k_int4v, kvbits_int4"),
        ({"decode_attention_backend": "torch_native"}, "pass --attention-backend alone"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 is not served by kvbits' attention backend: the format is the backend's name"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache True is not served"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk True is not served"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill is not served"),
        ({"tp_size": 2}, "--tp-size 2 is not served"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_at_start(model, more, match):
    with pytest.raises(UnsupportedError, match=match):
        resolved(model("llama")[1], **more)


def test_gpus_are_refused():
    why = options.refuses(options.FORMATS["kvbits_int8"], types.SimpleNamespace(device="cuda"))
    assert "was run on CPUs only" in why and "on GPUs use vLLM's" in why


def test_every_option_that_is_refused_is_one_of_sglangs():
    from sglang.srt.server_args import ServerArgs

    usual = ServerArgs(model_path="none")
    assert {name: getattr(usual, name) for name in options.NOT_RUN} == {name: value for name, (value, _) in options.NOT_RUN.items()}


def config_of(family):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return family(**sizes, vocab_size=VOCABULARY, head_dim=64)


def test_formats_and_models_that_do_not_fit_are_refused():
    class Model:
        num_hidden_layers = 2
        hf_text_config = config_of(Qwen2Config)

    with pytest.raises(UnsupportedError, match="use kvbits_int8_centered or kvbits_klt4"):
        options.check_model(options.FORMATS["kvbits_int4"], Model)
    options.check_model(options.FORMATS["kvbits_int8_centered"], Model)
    Model.num_hidden_layers = 3
    with pytest.raises(UnsupportedError, match="2 of 3 layers store keys and values"):
        options.check_model(options.FORMATS["kvbits_int8_centered"], Model)


def test_other_releases_are_refused():
    assert plugin.refuses_version("0.5.23") is None and plugin.refuses_version("0.5.23.post1") is None
    assert "pip install 'sglang==0.5.23'" in plugin.refuses_version("0.5.24")
