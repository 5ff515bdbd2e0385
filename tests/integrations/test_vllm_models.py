"""Models whose layers are not all alike, in vLLM's official wheel on a CPU: learned sinks, recurrent layers, layers
that read others' pages, attention in chunks.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from integrations import vllm_cpu_recurrent
from integrations.inside_vllm import generate, said
from integrations.judged import MODELS, VOCABULARY, check, distance, random_ids, scheme_of, transformers_logprobs
from integrations.mimo import named_twice
from messages import raises
from nightly import at_night
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    Qwen3NextConfig,
)

from kvbits.errors import UnsupportedError
from kvbits.integrations.engine.flash import attend_by
from kvbits.integrations.vllm import flash
from kvbits.integrations.vllm.backend import HybridBackend, KVBitsBackend

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def gpt_oss():
    """Windows and full attention in turn, eight query heads to a kv head, a learned logit for each that takes most of
    the weight.
    """
    torch.manual_seed(6)
    yarn = {
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 2048,
    }
    config = GptOssConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=100,
        initializer_range=0.15,
        max_position_embeddings=4096,
        rope_parameters=yarn | {"rope_theta": 10000.0},
    )
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for layer in found.model.layers:
        layer.self_attn.sinks.data = torch.linspace(-2, 6, 8)
    return found


def granite():
    """Mamba 2 and attention in turn, two kv heads of 256."""
    torch.manual_seed(7)
    config = GraniteMoeHybridConfig(
        hidden_size=512,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        num_local_experts=0,
        shared_intermediate_size=128,
        position_embedding_type="rope",
        max_position_embeddings=4096,
        initializer_range=0.05,
        attention_multiplier=0.0625,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def lfm2():
    """Convolutions and attention in turn; states of 64 tokens, larger than a page."""
    torch.manual_seed(8)
    config = Lfm2Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        layer_types=["conv", "full_attention"] * 2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        block_auto_adjust_ff_dim=False,
        conv_dim=128,
        conv_L_cache=65,
        block_dim=128,
        block_ff_dim=128,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def qwen3_next():
    """Three gated delta rules before each layer that attends, with two kv heads of 256 and a gate behind; bfloat16, as
    vLLM has it on a CPU.
    """
    torch.manual_seed(12)
    config = Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        vocab_size=VOCABULARY,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=4096,
        initializer_range=0.06,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def gemma3n():
    """The last two layers read the pages of the two before them."""
    torch.manual_seed(9)
    config = Gemma3nTextConfig(
        hidden_size=128,
        intermediate_size=[128] * 6,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        altup_num_inputs=2,
        num_kv_shared_layers=2,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 3,
        max_position_embeddings=4096,
        initializer_range=0.15,
        activation_sparsity_pattern=[0.0] * 6,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _gemma4(seed, layers, **own):
    torch.manual_seed(seed)
    config = Gemma4TextConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        vocab_size=VOCABULARY,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        sliding_window=100,
        max_position_embeddings=4096,
        initializer_range=0.15,
        enable_moe_block=False,
        **own,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def gemma4():
    """The same, windows and full attention of other widths, values that are keys."""
    small = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
    return _gemma4(10, 6, num_attention_heads=4, head_dim=64, global_head_dim=128, **small)


def gemma4_wide():
    """As large Gemma 4 has it: windows of heads of 256, and full attention of one of 512 whose values are its keys."""
    return _gemma4(
        13,
        4,
        num_attention_heads=2,
        head_dim=256,
        global_head_dim=512,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )


def mimo():
    """Keys of 192 and values of 128 channels, windows with twice the kv heads and learned sinks."""
    torch.manual_seed(14)
    config = MiMoV2FlashConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=192,
        v_head_dim=128,
        vocab_size=VOCABULARY,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense"] * 3,
        sliding_window=100,
        max_position_embeddings=4096,
        initializer_range=0.15,
        attention_value_scale=0.707,
    )
    found = AutoModelForCausalLM.from_config(named_twice(config), dtype=torch.float32).eval()
    found.model.layers[1].self_attn.sinks.data = torch.linspace(-2, 4, 4)
    return found


def llama4():
    """Three layers that attend in chunks of 128, and one to everything."""
    torch.manual_seed(11)
    config = Llama4TextConfig(
        hidden_size=128,
        intermediate_size=128,
        intermediate_size_mlp=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=128,
        max_position_embeddings=4096,
        initializer_range=0.15,
        no_rope_layers=[1, 1, 1, 0],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS.update(
    gemma4_wide=gemma4_wide,
    mimo=mimo,
    qwen3_next=qwen3_next,
    llama4=llama4,
    gemma4=gemma4,
    gpt_oss=gpt_oss,
    granite=granite,
    lfm2=lfm2,
    gemma3n=gemma3n,
)
COPIES = {"additional_config": {"kvbits": {"raw_newest": 64, "raw_first": 64}}}


@pytest.mark.parametrize("dtype", ["auto", "kvbits_int8_centered", "kvbits_klt4"])
def test_learned_sinks(model, engine, calibration, dtype):
    """Prompts of one chunk, decoding over page borders, and prefixes found again: prefill without history, decoding,
    prefill with history.
    """
    c = calibration("gpt_oss") if "klt" in dtype else None
    options = {"attention_backend": "KVBITS"} if dtype == "auto" else said(c, raw_newest=0) if c else {}
    llm, scheme = engine("gpt_oss", dtype, **options), None if dtype == "auto" else scheme_of(dtype)
    prompts = [random_ids(n, n) for n in (2, 63, 130, 260)]
    for again in (False, True):
        for prompt, result in zip(prompts, generate(llm, prompts), strict=True):
            cached = (len(prompt) - 1) // 64 * 64 if again else 0
            assert result[2] == cached
            check(model("gpt_oss")[0], scheme, prompt, result, [n for n in (cached, len(prompt) - cached) if n], c)


@pytest.mark.parametrize("dtype", ["kvbits_int8_centered", *at_night("kvbits_int8k_int4v")])
def test_learned_sinks_of_chunks_and_drafts(model, engine, dtype):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine("gpt_oss", dtype, max_num_batched_tokens=96, enable_prefix_caching=False, speculative_config=ngram)
    for length in (90, 150, 400):
        prompt = (random_ids(7, 1) * 60)[:length]
        chunks = [96] * (length // 96) + ([length % 96] if length % 96 else [])
        check(model("gpt_oss")[0], scheme_of(dtype), prompt, generate(llm, [prompt])[0], chunks)


def test_sinks_decide_what_these_models_say(model):
    """So that the tests above can fail."""
    found, prompt = model("gpt_oss")[0], random_ids(150, 3)
    with torch.no_grad():
        tokens = found.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 150:].tolist()
    with_sinks, _ = transformers_logprobs(found, None, prompt, tokens)
    kept = [layer.self_attn.sinks.data for layer in found.model.layers]
    for layer in found.model.layers:
        layer.self_attn.sinks.data = torch.full((8,), -1e4)
    without, _ = transformers_logprobs(found, None, prompt, tokens)
    for layer, sinks in zip(found.model.layers, kept, strict=True):
        layer.self_attn.sinks.data = sinks
    assert (with_sinks - without).abs().mean() > 0.2


@pytest.fixture
def recurrent():
    vllm_cpu_recurrent.install()


@pytest.mark.parametrize(
    ("dtype", "options", "limit"),
    [
        ("auto", {"attention_backend": "KVBITS"}, 1e-4),
        ("kvbits_int8_centered", {}, 0.02),
        ("kvbits_int4", COPIES, 0.1),
        *at_night(("kvbits_int8", {}, 0.02), ("kvbits_int4", {}, 0.3), ("kvbits_klt4", {}, 0.1)),
    ],
)
@pytest.mark.parametrize("name", ["granite", "lfm2"])
def test_recurrent_layers_beside_those_that_attend(model, engine, recurrent, calibration, name, dtype, options, limit):
    """Blocks of several pages, as large as a state.

    Prefixes are found again in whole blocks (vLLM's Mamba 2 on a CPU keeps no states inside of prompts).
    """
    options = said(calibration(name)) if "klt" in dtype else options
    llm = engine(name, dtype, **options, **({"enable_prefix_caching": False} if name == "granite" else {}))
    cache = llm.llm_engine.vllm_config.cache_config
    pages = cache.block_size // 64
    assert cache.block_size % 64 == 0 and cache.kv_cache_layout == "LBHNC" and (pages > 1 or dtype == "auto")
    prompts = [random_ids(n, n) for n in (63, 130, 300, 700)][: 3 if name == "granite" else 4]
    cached = 0
    for _ in range(1 if name == "granite" else 2):
        results = generate(llm, prompts, 16)
        cached = sum(r[2] for r in results)
        found = [distance(model(name)[0], *x) for x in zip(prompts, results, strict=True)]
        assert max(found) < limit
        assert options is not COPIES or max(found[:2]) < 1e-3, "copies hold all of the short ones"
    assert (cached > 0) == (name == "lfm2")


@pytest.mark.night  # two minutes of a core without bfloat16; in float32 recurrent layers are run above
def test_gated_delta_rules_in_bfloat16(model, engine, recurrent):
    """Eight bits are as far from Transformers as vLLM itself is in the model's own numbers; prefixes are found in whole
    blocks.
    """
    prompts, far = [random_ids(n, n) for n in (63, 700)], {}
    for dtype in ("auto", "kvbits_int8_centered"):
        llm = engine("qwen3_next", dtype, dtype="bfloat16", attention_backend="KVBITS")
        assert llm.llm_engine.vllm_config.cache_config.block_size > 64
        results = [*generate(llm, prompts, 12), *(again := generate(llm, prompts, 12))]
        assert again[-1][2] > 0
        far[dtype] = sum(distance(model("qwen3_next")[0], *x) for x in zip(prompts * 2, results, strict=True)) / len(
            results
        )
    assert far["kvbits_int8_centered"] < 1.5 * far["auto"] + 0.02


@pytest.mark.parametrize(("dtype", "tokens"), [("auto", 1088), ("kvbits_int8_centered", 2048), ("kvbits_int4", 3776)])
def test_blocks_of_qwen3_next_hold_a_state(tmp_path, dtype, tokens):
    """The geometry of the model with 80 billion weights, which nothing loads."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from kvbits.integrations.vllm import register

    register()
    config = Qwen3NextConfig()
    config.architectures = ["Qwen3NextForCausalLM"]
    config.save_pretrained(tmp_path)
    args = {
        "kv_cache_dtype": dtype,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 8192,
        "dtype": "bfloat16",
    }
    args["mamba_ssm_cache_dtype"] = "float32"  # vLLM takes it by itself on CPUs with AVX-512 BF16 alone
    engine_config = EngineArgs(model=str(tmp_path), **args).create_engine_config()
    current_platform._align_hybrid_block_size(engine_config, HybridBackend)
    assert engine_config.cache_config.block_size == tokens


def test_blocks_of_several_pages_have_one_format(engine, recurrent):
    with raises(UnsupportedError, "--kv-cache-dtype kvbits_int8", "--kv-cache-dtype-skip-layers"):
        engine("lfm2", "kvbits_int8", kv_cache_dtype_skip_layers=["1"])


@pytest.mark.parametrize(
    ("name", "dtype", "options", "limit"),
    [
        ("gemma4", "kvbits_int8_centered", {}, 0.1),
        ("llama4", "kvbits_int4", COPIES, 1.0),
        *at_night(
            ("gemma3n", "kvbits_int8_centered", {}, 0.1),
            ("gemma4", "auto", {}, 1e-4),
            ("gemma4", "kvbits_int4", COPIES, 1.0),
            ("llama4", "auto", {}, 1e-4),
            ("llama4", "kvbits_int8_centered", {}, 0.1),
        ),
    ],
)
def test_layers_that_read_the_pages_of_others_and_attention_in_chunks(model, engine, name, dtype, options, limit):
    """Layers without pages store nothing, and a prompt's own keys are the other layer's as they came. vLLM makes rows
    of chunks, which are shorter than requests.
    """
    llm = engine(name, dtype, max_num_batched_tokens=96, attention_backend="KVBITS", **options)
    prompts = [random_ids(n, n) for n in (50, 150, 300)]
    for again in (False, True):
        results = generate(llm, prompts, 12)
        assert [r[2] > 0 for r in results] == [False, again, again]
        assert all(distance(model(name)[0], *x) < limit for x in zip(prompts, results, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma4_wide", "auto"),
        ("mimo", "auto"),
        *at_night(
            ("gemma4_wide", "kvbits_int8_centered"),
            ("gemma4_wide", "kvbits_int4"),
            ("mimo", "kvbits_int8_centered"),
            ("mimo", "kvbits_int4"),
        ),
    ],
)
def test_heads_of_512_and_values_narrower_than_keys(model, engine, name, dtype):
    """In chunks that end inside pages, and prefixes found again: the tokens of Transformers with the same scheme."""
    llm, scheme = (
        engine(name, dtype, max_num_batched_tokens=96, attention_backend="KVBITS"),
        (None if dtype == "auto" else scheme_of(dtype)),
    )
    for length in (50, 300):
        for cached in (0, (length - 1) // 64 * 64):
            prompt, ends = (
                random_ids(length, length),
                sorted({*range(0, cached, 96), *range(cached, length, 96), length}),
            )
            result = generate(llm, [prompt], 16)[0]
            assert result[2] == cached
            check(model(name)[0], scheme, prompt, result, [b - a for a, b in itertools.pairwise(ends)])


def named(name):
    """Name the backend for Gemma 4: without FlashAttention 4, as on a CPU, vLLM would choose another one."""
    return {"attention_backend": "KVBITS"} if name == "gemma4_wide" else {}


@pytest.mark.parametrize("name", ["gemma4_wide", *at_night("mimo")])
def test_copies_of_heads_of_512_and_of_unlike_widths(model, engine, name):
    """Those of short requests hold all their tokens, so nothing that decodes reads a quantized number."""
    llm = engine(name, "kvbits_int4", **named(name), enable_prefix_caching=False, **COPIES)
    prompts = [random_ids(n, n) for n in (50, 64, 150)]
    assert all(distance(model(name)[0], *x) < 1e-3 for x in zip(prompts, generate(llm, prompts, 20), strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", ["gemma4_wide", "mimo"])
def test_drafts_with_heads_of_512_and_with_unlike_widths(model, engine, name):
    """Rows of drafts have unlike lengths."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine(name, "kvbits_int8_centered", **named(name), enable_prefix_caching=False, speculative_config=ngram)
    for length in (90, 150):
        prompt = (random_ids(7, 1) * 60)[:length]
        check(model(name)[0], scheme_of("kvbits_int8_centered"), prompt, generate(llm, [prompt])[0])


@pytest.mark.parametrize("name", ["gemma4_wide", "mimo"])
def test_bands_are_for_heads_of_one_width_up_to_256(engine, name):
    with raises(UnsupportedError, "kvbits_klt4", 256, "kvbits_int8_centered"):
        engine(name, "kvbits_klt4", **named(name))


@pytest.mark.parametrize(
    ("widths", "version", "served"),
    [
        ((256, 256), 2, True),
        ((512, 512), 4, True),
        ((512, 512), 2, False),
        ((192, 128), 3, True),
        ((192, 128), 2, False),
        ((128, 64), 4, True),
        ((128, 64), 3, False),
        ((64, 64), None, False),
    ],
)
def test_prompts_are_refused_where_flash_attention_has_not_their_widths(monkeypatch, widths, version, served):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **asked: version)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", function := object(), raising=False)  # a GPU's
    with nullcontext() if served else raises(UnsupportedError, *widths, "FlashAttention"):
        assert flash.flash_for(torch.device("cuda"), *widths) is attend_by(function, fa_version=version)


def test_a_hybrid_may_follow_a_plain_model_of_equal_heads(model, engine, recurrent):
    """In one process, which keeps the backend of such heads."""
    for name, backend in (("llama_plain", KVBitsBackend), ("lfm2", HybridBackend), ("llama_plain", KVBitsBackend)):
        llm = engine(name, "kvbits_int8")
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {x.get_attn_backend() for x in layers if getattr(x, "kv_cache_dtype", "") == "kvbits_int8"} == {backend}
