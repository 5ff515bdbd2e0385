"""Bytes of published models' caches, by hand from their config.json: what `kvbits plan` says is that.

Fields are those of the models' config.json that decide a cache; what is left out is the default of the family in
Transformers 5.24, where it is the published model's. Sources: the cards of the models on the hub, from memory where no
other is named, and Transformers' defaults, which name the model they are of.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages import raises

from kvbits.config_file import read_config
from kvbits.errors import SpecError, UnsupportedError
from kvbits.geometry import layer_geometries, plain_layers, state_bytes
from kvbits.model_ref import ModelRef
from kvbits.planner import plan
from kvbits.spec import LayerGeometry
from kvbits.weights import named_format, weights_bytes

GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
}
PUBLISHED = {  # name: (fields, bytes of 16 bits a token, bytes of full windows, bytes of states)
    "Qwen3.5-35B-A3B": (
        {"model_type": "qwen3_5_moe_text"},
        10 * 2 * 2 * 256 * 2,
        0,
        30 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2),
    ),
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next"},
        12 * 2 * 2 * 256 * 2,
        0,
        36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2),
    ),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, 18 * 2 * 8 * 64 * 2, 18 * 127 * 2 * 8 * 64 * 2, 0),
    "MiniMax-M2": ({"model_type": "minimax_m2"}, 62 * 2 * 8 * 128 * 2, 0, 0),
    "GLM-4.5": (
        {
            "model_type": "glm4_moe",
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        92 * 2 * 8 * 128 * 2,
        0,
        0,
    ),
    "Qwen3-235B-A22B": (
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        94 * 2 * 4 * 128 * 2,
        0,
        0,
    ),
    "Gemma 4 31B (flashinfer-ai/flashinfer, issue 3327)": (
        GEMMA4,
        10 * 2 * 4 * 512 * 2,
        50 * 1023 * 2 * 16 * 256 * 2,
        0,
    ),
    "Gemma 3n E4B": ({"model_type": "gemma3n_text"}, 4 * 2 * 2 * 256 * 2, 16 * 511 * 2 * 2 * 256 * 2, 0),
    "Llama 4 Scout": ({"model_type": "llama4_text"}, 12 * 2 * 8 * 128 * 2, 36 * 8191 * 2 * 8 * 128 * 2, 0),
    "Nemotron-H-8B": (NEMOTRON, 4 * 2 * 8 * 128 * 2, 0, 24 * (128 * 64 * 128 * 4 + (128 * 64 + 2 * 8 * 128) * 4 * 2)),
    "Granite 4.0 H Small": (GRANITE, 4 * 2 * 8 * 128 * 2, 0, 36 * (128 * 64 * 128 * 4 + (128 * 64 + 2 * 128) * 4 * 2)),
    "Jamba v0.1": ({"model_type": "jamba"}, 4 * 2 * 8 * 128 * 2, 0, 28 * (8192 * 16 * 4 + 8192 * 4 * 2)),
    "Whisper large-v3": (
        {
            "model_type": "whisper",
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
        },
        32 * 2 * 20 * 64 * 2,
        0,
        0,
    ),
}
LATENT = {"DeepSeek-V3": ({"model_type": "deepseek_v3"}, 61 * (512 + 64) * 2)}


def written(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return read_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_a_token_of_windows_and_of_states(name, tmp_path):
    fields, token, windows, states = PUBLISHED[name]
    config, tokens, users = written(tmp_path, fields), 32_768, 3
    assert state_bytes(config) == states
    found = plan(layer_geometries(config), ["bf16"], context=tokens, batch=users, state_bytes=states)
    (row,) = found.rows
    assert row.bytes_per_token == token
    assert row.total_bytes == users * (tokens * token + windows + states)


def test_few_bits_leave_states_as_they_are(tmp_path):
    fields, _, _, states = PUBLISHED["Qwen3.5-35B-A3B"]
    layers = layer_geometries(written(tmp_path, fields))
    assert layers == (LayerGeometry(num_kv_heads=2, head_dim=256),) * 10
    bf16, packed = plan(layers, ["bf16", "klt4"], context=32_768, state_bytes=states).rows
    assert packed.total_bytes - states < 0.31 * (bf16.total_bytes - states)
    assert packed.memory_reduction == bf16.total_bytes / packed.total_bytes > 2.7


@pytest.mark.parametrize("name", LATENT)
def test_latents_in_16_bits(name, tmp_path):
    fields, token = LATENT[name]
    assert plan(plain_layers(written(tmp_path, fields)), ["bf16"]).rows[0].bytes_per_token == token


STATED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
"""Fields of published config.json files that decide a cache, and where they were read."""


@pytest.fixture(scope="module")
def theirs():
    """`make_families`, where the installed Transformers is the one that families.json was made with."""
    pytest.importorskip("transformers")
    found = pytest.importorskip("make_families")
    from kvbits.config_file import _families

    if found.transformers.__version__ != _families()["transformers"]:
        pytest.skip("families.json was made with another Transformers")
    return found


@pytest.mark.parametrize("name", STATED)
def test_a_published_file_is_read_as_transformers_reads_it(theirs, name):
    assert not theirs.differs("", STATED[name]["config"])


def test_many_files_are_compared_and_not_refused(theirs, tmp_path):
    assert len(STATED) > 150 and all(x["from"] for x in STATED.values())
    taken = 0
    for one in STATED.values():
        try:
            taken += bool(layer_geometries(written(tmp_path, one["config"])))
        except (SpecError, UnsupportedError):
            continue
    assert taken > 130


@pytest.mark.parametrize(
    "stated, kinds",
    [
        ("LiquidAI/LFM2-1.2B (as first published)", [(6, None)]),
        ("LGAI-EXAONE/EXAONE-4.0-32B", [(48, 4096), (16, None)]),
        ("meta-llama/Llama-3.2-90B-Vision", [(80, None)]),
        ("moonshotai/Kimi-K2.5", [(61, None)]),
    ],
)
def test_layers_that_keep_no_text_are_not_counted(tmp_path, stated, kinds):
    found = [g.sliding_window for g in layer_geometries(written(tmp_path, STATED[stated]["config"]))]
    assert [(found.count(w), w) for w in dict.fromkeys(found)] == kinds


@pytest.mark.parametrize("name", [n for n, x in STATED.items() if "hf_quant_config" in x])
def test_a_quantizer_s_file_beside_the_configuration_counts(tmp_path, name):
    one = STATED[name]
    try:
        config = written(tmp_path, one["config"])
        plain, _ = weights_bytes(ModelRef(tmp_path, config))
    except SpecError:
        pytest.skip("not a family of Transformers")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(one["hf_quant_config"]))
    how = one["hf_quant_config"]["quantization"]["quant_algo"]
    if how == "MIXED_PRECISION":
        with raises(SpecError, "--weights"):
            weights_bytes(ModelRef(tmp_path, config))
        return
    packed, said = weights_bytes(ModelRef(tmp_path, config))
    assert how.lower() in said and plain / packed > (1.7 if how == "FP8" else 2.5)


def test_70_billion_in_fp8(tmp_path):
    one = STATED["nvidia/Llama-3.1-70B-Instruct-FP8"]
    config = written(tmp_path, one["config"])
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(one["hf_quant_config"]))
    assert 71e9 < weights_bytes(ModelRef(tmp_path, config))[0] < 74e9


@pytest.mark.parametrize(
    "name, found",
    [
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "FP8"),
        ("x/y-NVFP4", "NVFP4"),
        ("a/Qwen2.5-7B-Instruct-AWQ", "AWQ"),
        ("a/b-GPTQ-Int4", "Int4"),
        ("a/b.w4a16", "w4a16"),
        ("mlx-community/Llama-3-8B-4bit", "4bit"),
        ("a/b-MXFP4", "MXFP4"),
        ("a/b-GGUF", "GGUF"),
        ("Qwen/Qwen3-8B", None),
        ("meta-llama/Llama-3.1-8B", None),
    ],
)
def test_a_name_that_says_packed_weights_is_doubted(tmp_path, name, found):
    assert named_format(name) == found
    folder = tmp_path / name.split("/")[1]
    folder.mkdir()
    said = []
    config = written(folder, {"model_type": "llama"})
    weights_bytes(ModelRef(folder, config), said.append)
    assert bool(said) == (found is not None)
