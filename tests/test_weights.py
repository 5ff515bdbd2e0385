"""Weights are counted as Transformers builds them, without it where a formula is known; packed ones in the bits that
the configuration names.
"""

from __future__ import annotations

import json

import pytest
from messages import raises

from kvbits.config_file import read_config
from kvbits.errors import SpecError
from kvbits.geometry import load_config
from kvbits.model_ref import ModelRef
from kvbits.weights import COUNTED, counted, estimated, named_format, weights_bytes

transformers = pytest.importorskip("transformers")
count_parameters = pytest.importorskip("make_families").count_parameters
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "vocab_size": 301,
    "pad_token_id": 0,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_local_experts": 5,
    "num_experts": 5,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def written(folder, model_type, **changes):
    own = {
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "n_group",
        "topk_group",
        "n_routed_experts",
        "first_k_dense_replace",
    }
    fields = {k: v for k, v in SMALL.items() if model_type == "deepseek_v3" or k not in own}
    if model_type in ("deepseek_v3", "phi3"):
        del fields["head_dim"]
    if model_type == "deepseek_v3":
        del fields["num_local_experts"]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **fields, **changes}))
    return folder


@pytest.mark.parametrize("model_type", COUNTED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "q_lora_rank": None},
    ],
)
def test_the_formula_counts_what_transformers_builds(tmp_path, model_type, changes):
    if model_type == "qwen2" and "attention_bias" in changes:
        pytest.skip("has its bias always")
    folder = written(tmp_path, model_type, **changes)
    assert counted(read_config(folder)).total == count_parameters(load_config(folder))


@pytest.mark.parametrize("model_type", COUNTED)
def test_the_formula_holds_at_a_family_s_own_sizes(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 4}))
    assert counted(read_config(tmp_path)).total == count_parameters(load_config(tmp_path))


def test_packed_weights_take_the_bits_that_the_configuration_names(tmp_path):
    plain, said = weights_bytes(ModelRef.stated(str(written(tmp_path, "llama"))))
    count = counted(read_config(tmp_path))
    assert plain == 2 * count.total and "2 bytes" in said
    for how, bits in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            8,
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    ):
        packed, said = weights_bytes(ModelRef.stated(str(written(tmp_path, "llama", quantization_config=how))))
        assert packed == round(count.dense * bits / 8) + 2 * count.rest and how["quant_method"] in said
    folder = written(tmp_path, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    count = counted(read_config(folder))
    assert weights_bytes(ModelRef.stated(str(folder)))[0] == round(count.experts * 4.25 / 8) + 2 * (
        count.total - count.experts
    )
    with raises(SpecError, "made_up", "--weights"):
        weights_bytes(ModelRef.stated(str(written(tmp_path, "llama", quantization_config={"quant_method": "made_up"}))))


GROUPS = {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}
METHODS = {  # bits of a matrix's number, 16 where the weights are not packed, None where that is unknown
    "AWQ of older releases": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, 4 + 20 / 128),
    "GPTQ": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    "bitsandbytes, as it is saved": ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, 4.5),
    "bitsandbytes without its name": ({"load_in_8bit": True}, 8),
    "bitsandbytes, neither": ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}, 16),
    "a dense model in mxfp4": ({"quant_method": "mxfp4"}, 4.25),
    "modelopt_fp4": ({"quant_method": "modelopt_fp4"}, 4.5),
    "modelopt, nested": ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}}, 8),
    "modelopt, a cache": ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, 16),
    "torchao by name": ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, 8),
    "torchao by object": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        4.125,
    ),
    "AQLM": (
        {"quant_method": "aqlm", "num_codebooks": 2, "nbits_per_codebook": 8, "in_group_size": 8, "out_group_size": 1},
        2,
    ),
    "Quark": ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8),
    "SINQ": ({"quant_method": "sinq", "nbits": 4, "group_size": 64}, 4 + 20 / 64),
    "MLX": ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, 4.25),
    "compressed-tensors": ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, 4 + 20 / 128),
    "compressed-tensors, a cache": (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
        16,
    ),
    "compressed-tensors, mixed": (
        {"quant_method": "compressed-tensors", "config_groups": GROUPS | {"h": {"weights": {"num_bits": 8}}}},
        None,
    ),
    "groups as a list": ({"quant_method": "compressed-tensors", "config_groups": [GROUPS]}, None),
    "weights as a list": ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": [4]}}}, None),
    "HQQ with a text": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": "4"}}, None),
    "bits as a text": ({"quant_method": "gptq", "bits": "4"}, None),
    "bits below 0": ({"quant_method": "gptq", "bits": -4}, None),
    "no number of bits": ({"quant_method": "gptq", "bits": float("nan")}, None),
    "more bits than a number has": ({"quant_method": "gptq", "bits": 64}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_s_bits_are_read_or_refused(name, tmp_path):
    how, bits = METHODS[name]
    folder = written(tmp_path, "llama", quantization_config=how)
    config = read_config(folder)
    count = counted(config)
    if bits is None:
        with raises(SpecError, "--weights"):
            weights_bytes(ModelRef(folder, config))
    else:
        nbytes, _ = weights_bytes(ModelRef(folder, config))
        assert nbytes == round((count.dense + count.experts) * bits / 8) + count.rest * 2


@pytest.mark.parametrize(
    "name", ["x-FP8-dynamic", "x-NF4", "x.nvfp4a16", "x-4.0bpw-exl2", "x-1.58bit", "x-HQQ", "x-EETQ"]
)
def test_a_name_that_says_packed_weights_is_doubted(name):
    assert named_format(name) and not named_format("x-4B-Instruct") and not named_format("phi-4")


def test_published_sizes_come_out(tmp_path):
    """Parameters that model cards state, from the published configurations."""
    for stated, fields in (
        (
            8_030_261_248,
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "tie_word_embeddings": False,
            },
        ),
        (
            70_553_706_496,
            {
                "model_type": "llama",
                "hidden_size": 8192,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "intermediate_size": 28672,
                "vocab_size": 128256,
                "tie_word_embeddings": False,
            },
        ),
        (
            30_532_122_624,
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "vocab_size": 151936,
            },
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert counted(read_config(tmp_path)).total == stated


def test_an_index_says_what_missing_files_take(tmp_path):
    written(tmp_path, "llama")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps(
            {"metadata": {"total_size": 777}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        )
    )
    assert weights_bytes(ModelRef.stated(str(tmp_path))) == (
        777,
        "stated by model.safetensors.index.json, whose files are not here",
    )
    for name, size in (("model-1.safetensors", 100), ("model-2.safetensors", 50)):
        (tmp_path / name).write_bytes(bytes(size))
    assert weights_bytes(ModelRef.stated(str(tmp_path))) == (150, "2 weight files")
    (tmp_path / "model-2.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with raises(SpecError, "model-2.safetensors", "--weights"):
        weights_bytes(ModelRef.stated(str(tmp_path)))


def test_weights_of_models_that_see_count_too(tmp_path):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {
        "model_type": "mistral",
        **{
            k: SMALL[k]
            for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
        },
    }
    stated = {
        "model_type": "mistral3",
        "text_config": text | {"intermediate_size": 64},
        "vision_config": {"model_type": "pixtral", **vision},
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    said = []
    nbytes, _ = weights_bytes(ModelRef.stated(str(tmp_path)), said.append)
    model = transformers.AutoModelForImageTextToText.from_config(load_config(tmp_path))
    assert "estimated" in said[0] and 0.5 < nbytes / (2 * sum(p.numel() for p in model.parameters())) < 2


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon", "starcoder2", "glm4", "cohere2", "olmoe", "exaone4"])
def test_families_without_a_formula_are_estimated(tmp_path, model_type):
    """At other sizes than those that families.json has the ratio of."""
    fields = {"model_type": model_type, "num_hidden_layers": 6, "hidden_size": 1536, "num_attention_heads": 12}
    fields |= {"ffn_dim": 6144} if model_type == "opt" else {}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert 0.85 < estimated(read_config(tmp_path)).total / count_parameters(load_config(tmp_path)) < 1.15
