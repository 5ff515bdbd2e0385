"""A tiny model of any family that generates text: its default configuration with small numbers, and random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "embed_dim",
    "word_embed_proj_dim",
    "embedding_size",
    "dim",
    "hidden_dim",
    "emb_dim",
    "text_hidden_size",
    "out_hidden_size",
    "projection_dim",
    "encoder_hidden_size",
    "width",
    "dim_model",
    "n_hidden",
    "mm_hidden_size",
    "adapter_in_dim",
    "adapter_input_size",
)
INNER = (
    "d_ff",
    "ffn_hidden_size",
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "intermediate_size_mlp",
    "dim_ff",
    "n_inner",
)
DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
    "num_encoder_layers",
)
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
    "swa_num_attention_heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "swa_num_key_value_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
HEAD_DIMS = (
    "d_kv",
    "head_dim",
    "kv_channels",
    "attention_head_dim",
    "global_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "index_head_dim",
    "dim_head",
)
SMALL: dict[str, Any] = (
    dict.fromkeys(WIDTHS, 64)
    | dict.fromkeys(INNER, 96)
    | dict.fromkeys(DEPTHS, 2)
    | dict.fromkeys(HEADS, 4)
    | dict.fromkeys(EXPERTS, 4)
    | dict.fromkeys(ACTIVE, 2)
    | dict.fromkeys(HEAD_DIMS, 16)
    | {
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "n_positions": 256,
        "moe_intermediate_size": 32,
        "shared_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "index_n_heads": 2,
        "index_topk": 24,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "initializer_range": 0.3,
        "init_std": 0.3,
        "image_size": 28,
        "patch_size": 14,
        "sliding_window": 24,
        "attention_chunk_size": 24,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "rotary_dim": 8,
        "num_kv_shared_layers": 0,
        "swa_head_dim": 32,
        "d_rel": 8,
        "rel_extent": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "mamba_d_ssm": 128,
        "ssm_state_size": 16,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        "unpadded_vocab_size": 97,
    }
)
LISTS = (
    "layers_block_type",
    "per_layer_config",
    "kv_sharing_modes",
    "attention_types",
    "attention_layers",
    "indexer_types",
    "block_types",
    "no_rope_layers",
    "kv_source_layers",
    "layer_type_list",
    "pyramid_num_routed",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
)
"""Fields that a family makes anew for its number of layers."""
LOOPED = {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"],
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
}
THREE_ROTARY_PARTS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MORE: dict[str, dict[str, Any]] = {
    **{
        kind: {"text_config": {"rope_parameters": THREE_ROTARY_PARTS}}
        for kind in ("glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl")
    },
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": THREE_ROTARY_PARTS | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
        }
    },
    "apertus1p5": {
        "audio_config": {"codebook_dim": 64, "codebook_size": 8},
        "vision_config": {"base_channels": 32, "codebook_size": 8},
        "image_token_offset": 80,
        "audio_token_offset": 88,
    },
    "chameleon": {"vocabulary_map": {"<image>": 96}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "hy_v4_vl": {"text_config": {"rope_parameters": THREE_ROTARY_PARTS | {"mrope_section": [2, 1, 1]}}},
    "inkling2_loop": {"text_config": LOOPED},
    "inkling2_loop_text": LOOPED,
    "step3p7": {"text_config": {"sliding_window": 24}},
    "xmod": {"default_language": "en_XX"},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 95, "text_config": {"rope_parameters": THREE_ROTARY_PARTS}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 95},
}
"""Settings that single families need besides."""
UNBUILT = (
    dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "wants timm")
    | {"inkling_mm_model": "wants scipy"}
    | dict.fromkeys(
        (
            "blip",
            "blip-2",
            "idefics",
            "instructblip",
            "instructblipvideo",
            "kosmos-2",
            "pix2struct",
            "pp_formulanet",
            "udop",
            "vision-encoder-decoder",
        ),
        "generates from no text alone",
    )
    | dict.fromkeys(("musicgen", "musicgen_melody"), "generates sound")
    | dict.fromkeys(
        (
            "cohere_compass",
            "cohere_compass_text",
            "dots3_note",
            "deepseek_ocr2",
            "diffusion_gemma",
            "ernie4_5_vl_moe",
            "evolla",
            "granite4_vision",
            "hrm_text",
            "hunyuan_vl",
            "molmo2",
            "muse_spark",
        ),
        "its default configuration is not made small by small numbers alone",
    )
)
"""Families of which no tiny model was made here, and why."""


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration with small numbers."""
    latent, found = "kv_lora_rank" in fields, {}
    for name, x in fields.items():
        number = isinstance(x, (int, float)) and not isinstance(x, bool)
        if (
            name in LISTS
            or name in ("architectures", "transformers_version", "dtype")
            or (name == "head_dim" and latent)
        ):
            continue
        if name in ("rope_parameters", "rope_scaling") and isinstance(x, dict):
            found[name] = _rotary(x)
        elif isinstance(x, dict) and (name.endswith("config") or name in ("encoder", "decoder")):
            found[name] = shrunk(x)
        elif name == "layer_types" and x:
            found[name] = [x[0], next((t for t in x if t != x[0]), x[0])]
        elif name == "mlp_layer_types" and x:
            found[name] = [x[0], x[-1]]
        elif number and name in KV_HEADS:
            found[name] = 4 if latent or x == fields.get("num_attention_heads") else 2
        elif name in INNER and isinstance(x, list):
            found[name] = [SMALL[name]] * 2
        elif name in SMALL and (number or name == "eos_token_id"):
            found[name] = SMALL[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(x, int):
            found[name] = min(x, 96)
        else:
            found[name] = x
    return found


def _rotary(x: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(part, dict) for part in x.values()):
        return {name: _rotary(part) if isinstance(part, dict) else part for name, part in x.items()}
    if "mrope_section" not in x:
        return x
    half = int(8 * (x.get("partial_rotary_factor") or 1))
    other = (half - half // 4) // 2
    return x | {"mrope_section": [half - 2 * other, other, other]}


def build(kind: str, attending: dict[str, Any]) -> Any:
    """A model of two layers and random weights, in float32; `attending`: what its published models say that its default
    configuration leaves out.
    """
    made = CONFIG_MAPPING[kind]
    fields = shrunk(made(**attending).to_dict()) | {"tie_word_embeddings": False}
    fields.pop("model_type")
    for name, x in MORE.get(kind, {}).items():
        fields[name] = fields[name] | x if isinstance(fields.get(name), dict) else x
    if isinstance(text := fields.get("text_config"), dict):
        text["tie_word_embeddings"] = False
    try:
        config = made(**fields)
    except Exception:  # a head_dim that is hidden_size / heads in this family
        config = made(**{name: x for name, x in fields.items() if name != "head_dim"})
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    of = (
        transformers.AutoModelForCausalLM
        if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        else transformers.AutoModelForImageTextToText
    )
    if getattr(config, "is_encoder_decoder", False) and kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        of = transformers.AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    return of.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
