"""Bytes of published models' caches, by hand from their config.json: what `kvbits plan` says is that.

Fields are those of the models' config.json that decide a cache; what is left out is the default of the family in
Transformers 5.24, where it is the published model's. Sources: the cards of the models on the hub, from memory where no
other is named, and Transformers' defaults, which name the model they are of.
"""

from __future__ import annotations

import json

import pytest

from kvbits.config_file import read_config
from kvbits.geometry import layer_geometries, plain_layers, state_bytes
from kvbits.planner import plan
from kvbits.spec import LayerGeometry

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
