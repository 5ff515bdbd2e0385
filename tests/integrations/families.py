"""Tiny models of the families in Transformers' registry, and what a KVCache says to each: the table of
docs/reference/models.md.

PYTHONPATH=tests python -m integrations.families      # writes it anew
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbits.errors import KvbitsError
from kvbits.geometry import layer_geometries, only_dense, text_config
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.refusals import OWN_CACHE, UNFIT

from .shrunk import UNBUILT

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
TOKENS = 40
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
EACH_HEAD = {"num_key_value_heads": None, "head_dim": None}
"""For configurations without these: as many kv heads as query heads."""
OLD = EACH_HEAD | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96}
"""Names of GPT-2's configuration and its heirs'."""
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 24}
TWO_STACKS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
}
T5 = EACH_HEAD | {
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "initializer_factor": 10.0,
}
WINDOW = {"sliding_window": 24}
GATED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
"""Gated delta rule."""
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
}
IMAGE, IMAGE_START, IMAGE_END = 96, 95, 94
"""Tokens that stand for an image's patches, and what is put before and behind them."""
IMAGES = {"vision_config": {"model_type": "siglip_vision_model"} | VISION, "image_token_index": IMAGE}
PIXTRAL = {"vision_config": {"model_type": "pixtral"} | VISION, "image_token_index": IMAGE}
QWEN_IMAGES = {
    "vision_config": VISION | {"embed_dim": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    "image_token_id": IMAGE,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        names: of well-known models, for the table.
        config: class of the configuration.
        extra: what it needs beside or instead of `SMALL`.
        parts: of a multimodal model, what its `text_config` needs beside `SMALL`; `extra` is then the rest.
    """

    names: str
    config: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: dict[str, Any] | None = None

    @property
    def model_type(self) -> str:
        return getattr(transformers, self.config).model_type


FAMILIES = (
    Family("Llama 2, 3; SmolLM, SmolLM2; TinyLlama", "LlamaConfig"),
    Family("Mistral; Mistral-Small-24B", "MistralConfig", WINDOW),
    Family("Ministral", "MinistralConfig", WINDOW),
    Family("Ministral 3", "Ministral3Config"),
    Family("Qwen2, Qwen2.5", "Qwen2Config"),
    Family("Qwen3", "Qwen3Config"),
    Family("Phi-2", "PhiConfig"),
    Family("Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini (longrope: see below)", "Phi3Config"),
    Family("Gemma", "GemmaConfig"),
    Family("Gemma 2", "Gemma2Config", WINDOW | {"query_pre_attn_scalar": 16}),
    Family(
        "Gemma 3",
        "Gemma3TextConfig",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    ),
    Family(
        "Gemma 3n",
        "Gemma3nTextConfig",
        {"num_kv_shared_layers": 1, "layer_types": ["full_attention", "full_attention"]},
    ),
    Family(
        "Gemma 4",
        "Gemma4TextConfig",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16},
    ),
    Family(
        "Gemma 4 with shared layers (E2B, E4B)",
        "Gemma4TextConfig",
        WINDOW
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
        },
    ),
    Family(
        "Gemma 4 with keys as values (31B)",
        "Gemma4TextConfig",
        WINDOW
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    Family("GLM-4", "Glm4Config"),
    Family("GLM-4-9B-chat-hf", "GlmConfig"),
    Family("Command R", "CohereConfig"),
    Family("Command R7B", "Cohere2Config", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    Family("OLMo", "OlmoConfig"),
    Family("OLMo 2", "Olmo2Config"),
    Family("OLMo 3", "Olmo3Config", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    Family("SmolLM3", "SmolLM3Config"),
    Family("Granite 3", "GraniteConfig"),
    Family("StableLM", "StableLmConfig"),
    Family("StarCoder 2", "Starcoder2Config"),
    Family("Nemotron, Minitron", "NemotronConfig"),
    Family("Persimmon", "PersimmonConfig", EACH_HEAD),
    Family("Helium", "HeliumConfig"),
    Family("Pythia, GPT-NeoX", "GPTNeoXConfig", EACH_HEAD),
    Family("GPT-2", "GPT2Config", OLD),
    Family("StarCoder", "GPTBigCodeConfig", OLD),
    Family("OPT", "OPTConfig", EACH_HEAD | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Family("EXAONE 4", "Exaone4Config", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    Family("ERNIE 4.5", "Ernie4_5Config"),
    Family("Seed-OSS", "SeedOssConfig"),
    Family("Hunyuan", "HunYuanDenseV1Config"),
    Family("Apertus", "ApertusConfig"),
    Family("Arcee AFM", "ArceeConfig"),
    Family("BitNet", "BitNetConfig"),
    Family(
        "ModernBERT decoder (Ettin)",
        "ModernBertDecoderConfig",
        EACH_HEAD | {"local_attention": 24, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    Family(
        "Gemma 3 with images",
        "Gemma3Config",
        IMAGES | {"mm_tokens_per_image": 4},
        WINDOW | {"query_pre_attn_scalar": 16},
    ),
    Family("LLaVA", "LlavaConfig", IMAGES | {"vision_feature_select_strategy": "full"}, {"model_type": "llama"}),
    Family("Mistral-Small-3.1", "Mistral3Config", PIXTRAL, {"model_type": "mistral"}),
    Family(
        "Qwen2-VL",
        "Qwen2VLConfig",
        QWEN_IMAGES | {"vision_config": VISION | {"embed_dim": 32, "hidden_size": 64}},
        {"rope_parameters": MROPE},
    ),
    Family("Qwen2.5-VL", "Qwen2_5_VLConfig", QWEN_IMAGES, {"rope_parameters": MROPE}),
    Family("Qwen3-VL", "Qwen3VLConfig", QWEN_IMAGES, {"rope_parameters": MROPE}),
    Family("Qwen3-VL-MoE", "Qwen3VLMoeConfig", QWEN_IMAGES, EXPERTS | {"rope_parameters": MROPE}),
    Family(
        "Qwen3.5, Qwen3.6 with images", "Qwen3_5Config", QWEN_IMAGES, GATED | LINEAR_FIRST | {"rope_parameters": MROPE}
    ),
    Family("PaliGemma", "PaliGemmaConfig", IMAGES | {"projection_dim": 64}, {"model_type": "gemma"}),
    Family("Mixtral", "MixtralConfig", EXPERTS),
    Family("Qwen2-MoE (Qwen1.5-MoE)", "Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 32}),
    Family("Qwen3-MoE (Qwen3-30B-A3B)", "Qwen3MoeConfig", EXPERTS),
    Family("OLMoE", "OlmoeConfig", EXPERTS),
    Family("gpt-oss", "GptOssConfig", EXPERTS | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    Family("GLM-4.5", "Glm4MoeConfig", EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    Family(
        "dots.llm1",
        "Dots1Config",
        EXPERTS | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    Family(
        "MiMo-V2-Flash",
        "MiMoV2FlashConfig",
        EXPERTS | WINDOW | {"head_dim": 24, "v_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family("MiniMax-M2", "MiniMaxM2Config", EXPERTS | {"rotary_dim": 16}),
    Family("Phi-3.5-MoE", "PhimoeConfig", EXPERTS),
    Family("Granite 3 MoE", "GraniteMoeConfig", EXPERTS),
    Family("ERNIE 4.5 MoE", "Ernie4_5_MoeConfig", EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    Family("Hunyuan-A13B", "HunYuanMoEV1Config", EXPERTS | {"moe_topk": 2}),
    Family(
        "Llama 4 (on CPUs)",
        "Llama4TextConfig",
        EXPERTS
        | {
            "attention_chunk_size": 24,
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 96,
        },
    ),
    Family("DiffLlama", "DiffLlamaConfig"),
    Family("DeepSeek V2", "DeepseekV2Config", EXPERTS | LATENT | {"topk_method": "greedy"}),
    Family("DeepSeek V3, R1", "DeepseekV3Config", EXPERTS | LATENT),
    Family(
        "DeepSeek V3 with latents as wide as rotary keys (none is published)",
        "DeepseekV3Config",
        EXPERTS | LATENT | {"qk_rope_head_dim": 16, "head_dim": 16},
    ),
    Family("A.X K1", "AXK1Config", EXPERTS | LATENT),
    Family(
        "Ling hybrid", "BailingHybridConfig", EXPERTS | LATENT | {"layer_types": ["linear_attention", "full_attention"]}
    ),
    Family("GLM-4.7-Flash", "Glm4MoeLiteConfig", EXPERTS | LATENT),
    Family(
        "Kimi Linear", "KimiLinearConfig", EXPERTS | LATENT | {"layer_types": ["linear_attention", "full_attention"]}
    ),
    Family("LongCat-Flash", "LongcatFlashConfig", EXPERTS | LATENT),
    Family("Youtu-LLM", "YoutuConfig", LATENT),
    Family("A.X K2", "AXK2Config", EXPERTS | LATENT | INDEXED),
    Family("DeepSeek V3.2", "DeepseekV32Config", EXPERTS | LATENT | INDEXED),
    Family("GLM-5", "GlmMoeDsaConfig", EXPERTS | LATENT | INDEXED),
    Family("Hunyuan 4", "HYV4Config", EXPERTS | LATENT | INDEXED),
    Family("dots3 note", "Dots3NoteTextConfig", EXPERTS | LATENT | INDEXED),
    Family("MiniCPM 3", "MiniCPM3Config", LATENT),
    Family(
        "GPT-Neo", "GPTNeoConfig", EACH_HEAD | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    ),
    Family("GPT-NeoX Japanese", "GPTNeoXJapaneseConfig", EACH_HEAD),
    Family("XGLM", "XGLMConfig", EACH_HEAD | {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
    Family("Doge", "DogeConfig"),
    Family("JetMoE", "JetMoeConfig", {"kv_channels": 16, "num_local_experts": 4, "num_attention_heads": None}),
    Family(
        "TrOCR's decoder",
        "TrOCRConfig",
        EACH_HEAD | {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    ),
    Family("BioGPT", "BioGptConfig", EACH_HEAD),
    Family("BERT as a decoder", "BertConfig", EACH_HEAD | {"is_decoder": True}),
    Family("GPT-J", "GPTJConfig", OLD | {"rotary_dim": 8}),
    Family("CodeGen", "CodeGenConfig", OLD | {"rotary_dim": 8}),
    Family("Falcon 7B", "FalconConfig", EACH_HEAD | {"multi_query": True}),
    Family("Falcon-RW (ALiBi)", "FalconConfig", EACH_HEAD | {"alibi": True}),
    Family("BLOOM", "BloomConfig", EACH_HEAD | {"n_layer": 2, "n_head": 4, "initializer_range": 0.1}),
    Family(
        "MPT",
        "MptConfig",
        EACH_HEAD
        | {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "initializer_range": 0.1,
            "use_cache": True,
        },
    ),
    Family("Qwen3-Next", "Qwen3NextConfig", EXPERTS | GATED | LINEAR_FIRST | {"shared_expert_intermediate_size": 32}),
    Family("Qwen3.5, Qwen3.6 (dense)", "Qwen3_5TextConfig", GATED | LINEAR_FIRST),
    Family(
        "Qwen3.5, Qwen3.6 (MoE)",
        "Qwen3_5MoeTextConfig",
        EXPERTS | GATED | LINEAR_FIRST | {"shared_expert_intermediate_size": 32},
    ),
    Family("OLMo hybrid", "OlmoHybridConfig", GATED | LINEAR_FIRST),
    Family("MiniMax-Text-01", "MiniMaxConfig", EXPERTS),
    Family("Mamba", "MambaConfig"),
    Family(
        "Mamba 2",
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    ),
    Family(
        "Jamba",
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    Family("Bamba", "BambaConfig", MAMBA2 | {"attn_layer_indices": [1]}),
    Family("Falcon-H1", "FalconH1Config", MAMBA2 | {"mamba_d_ssm": 128}),
    Family("LFM2", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    Family("LFM2-MoE", "Lfm2MoeConfig", EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Family(
        "LFM3",
        "Lfm3Config",
        WINDOW | {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    ),
    Family(
        "Nemotron-H",
        "NemotronHConfig",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaConfig",
        {"block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": 24},
    ),
    Family(
        "Granite 4 hybrid",
        "GraniteMoeHybridConfig",
        MAMBA2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    ),
    Family(
        "Zamba",
        "ZambaConfig",
        {
            "head_dim": None,
            "attention_head_dim": 32,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "Zamba 2",
        "Zamba2Config",
        {
            "head_dim": None,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
            "num_key_value_heads": 4,
        },
    ),
    Family("ZAYA", "ZayaConfig", EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    Family(
        "Inkling",
        "InklingTextConfig",
        EXPERTS
        | {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": 24,
            "d_rel": 8,
            "rel_extent": 32,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "n_shared_experts": 1,
        },
    ),
    Family(
        "Dory",
        "DoryConfig",
        WINDOW
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "n_input_layers": 1,
            "n_output_layers": 1,
            "n_recurrent_loops": 3,
        },
    ),
    Family("T5", "T5Config", T5),
    Family("mT5", "MT5Config", T5),
    Family("BART", "BartConfig", EACH_HEAD | TWO_STACKS),
    Family("mBART", "MBartConfig", EACH_HEAD | TWO_STACKS),
    Family("Marian (OPUS-MT)", "MarianConfig", EACH_HEAD | TWO_STACKS | {"decoder_start_token_id": 2}),
    Family("Pegasus", "PegasusConfig", EACH_HEAD | TWO_STACKS),
    Family("PLBart", "PLBartConfig", EACH_HEAD | TWO_STACKS | {"decoder_start_token_id": 2}),
    Family("MVP", "MvpConfig", EACH_HEAD | TWO_STACKS),
    Family("Blenderbot", "BlenderbotConfig", EACH_HEAD | TWO_STACKS),
    Family("Blenderbot small", "BlenderbotSmallConfig", EACH_HEAD | TWO_STACKS),
    Family("BigBird-Pegasus", "BigBirdPegasusConfig", EACH_HEAD | TWO_STACKS | {"attention_type": "original_full"}),
    Family("M2M100, NLLB", "M2M100Config", EACH_HEAD | TWO_STACKS),
    Family(
        "ProphetNet",
        "ProphetNetConfig",
        EACH_HEAD
        | {
            "num_hidden_layers": None,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
        },
    ),
    Family("T5Gemma", "T5GemmaConfig", {"encoder": SMALL | WINDOW, "decoder": SMALL | WINDOW}),
    Family(
        "Whisper",
        "WhisperConfig",
        EACH_HEAD
        | TWO_STACKS
        | {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 128,
            "decoder_start_token_id": 2,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
)


WITH_IMAGES = {f.model_type for f in FAMILIES if f.parts is not None}


def build(family: Family) -> Any:
    """A model of two layers and random weights, in float32."""
    fields = {name: x for name, x in (SMALL | family.extra).items() if x is not None or name == "eos_token_id"}
    if family.parts is not None:
        fields = {"text_config": SMALL | family.parts, **family.extra, "pad_token_id": 0, "tie_word_embeddings": False}
    config = getattr(transformers, family.config)(**fields)
    auto = transformers.AutoModelForImageTextToText if family.parts is not None else transformers.AutoModelForCausalLM
    if getattr(config, "is_encoder_decoder", False):
        auto = (
            transformers.AutoModelForSpeechSeq2Seq
            if family.config == "WhisperConfig"
            else transformers.AutoModelForSeq2SeqLM
        )
    torch.manual_seed(0)
    return auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


PROMPT_OF_DECODER = {"decoder_input_ids": torch.arange(3, 43).view(2, 20)}


def ids_of_text() -> torch.Tensor:
    """Token ids [2, 50] of no image."""
    return torch.randint(3, 90, (2, 50), generator=torch.Generator().manual_seed(1))


def inputs(model: Any, padded: bool = True) -> tuple[dict[str, torch.Tensor], list[int]]:
    """(What `generate` takes: a batch of two, left-padded, of a model with an encoder its input, tokens of each sequence
    after `TOKENS` more).
    """
    ids = torch.randint(2, IMAGE_END, (2, 50), generator=torch.Generator().manual_seed(1))
    if hasattr(model.config, "num_mel_bins"):
        frames = 2 * model.config.max_source_positions
        return {
            "input_features": torch.randn(
                2, model.config.num_mel_bins, frames, generator=torch.Generator().manual_seed(1)
            )
        }, [TOKENS, TOKENS]
    mask = torch.ones_like(ids)
    mask[1, : 20 * padded] = 0
    call = {"input_ids": ids * mask} | ({"attention_mask": mask} if padded else {})
    if model.config.model_type in WITH_IMAGES:
        call |= images(model, call["input_ids"])
    prompt = [1, 1] if model.config.is_encoder_decoder else [50, 50 - 20 * padded]
    return call, [n + TOKENS - 1 for n in prompt]


def images(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Puts an image into each of two prompts, in place, and returns the other arguments that it is passed in."""
    kind, generator = model.config.model_type, torch.Generator().manual_seed(2)
    tokens = 1 if kind == "mistral3" else 4
    ids[:, 30], ids[:, 31 : 31 + tokens], ids[:, 31 + tokens] = IMAGE_START, IMAGE, IMAGE_END
    if kind.startswith("qwen"):
        vision = model.config.vision_config
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.randn(2 * 16, patch, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }
    found = {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}
    if kind == "mistral3":
        found["image_sizes"] = torch.tensor([[28, 28]] * 2)
    if kind in ("gemma3", "paligemma"):
        found["token_type_ids"] = (ids == IMAGE).long()
    return found


def said(model: Any) -> tuple[bool, str | None]:
    """(Whether a cache of a model has to be `dense`, why `for_model` refuses it then, or None: it is taken)."""
    dense, why = False, ""
    for dense in (False, True):
        try:
            with quiet():
                KVCache.for_model(model, "raw", dense=dense)
            return dense, None
        except KvbitsError as error:
            if dense or "dense=True" not in str(error):
                return dense, why or str(error)
            why = str(error)
    raise AssertionError(why)


@contextlib.contextmanager
def quiet() -> Any:
    """Without what Transformers says of configurations this small."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def row(family: Family) -> str:
    """Write a family's row of a table of models."""
    return f"| {family.names} | `{family.model_type}` |"


def table() -> str:
    """Models that are taken, and those that are with `dense=True`, by what was `said`; `census` has what is refused."""
    rows: tuple[list[str], list[str]] = ([], [])
    with quiet():
        for family in FAMILIES:
            dense, why = said(build(family))
            if why is None:
                rows[dense].append(row(family))
    taken, dense_only = (
        "| models | `model_type` |\n|---|---|\n" + "\n".join(sorted(some, key=str.lower)) for some in rows
    )
    refused = len(FAMILIES) - len(rows[0]) - len(rows[1])
    return (
        f"{len(rows[0])} of {len(FAMILIES)} kinds of models tried are taken, and {refused} refused:\n\n{taken}\n\n"
        f"{len(rows[1])} more are taken with `dense=True`:\n\n{dense_only}\n"
    )


ATTENDING = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
}
"""Settings of a family's published models that its default configuration leaves out: which layers attend, how wide a
head is.
"""


def census() -> str:
    """Count the families of Transformers that generate text and are taken, by their configuration and by where their
    modeling code takes attention from.
    """
    kinds, found = all_kinds(), dict[str, list[str]]()
    for kind in kinds:
        found.setdefault(verdict(kind), []).append(kind)
    taken, dense = found.pop("yes"), found.pop("dense")
    rows = [f"| {', '.join(f'`{x}`' for x in k)} | {why} |" for why, k in sorted(found.items(), key=lambda x: x[1])]
    return (
        f"Transformers {transformers.__version__} has {len(kinds)} families that generate text from text or images:\n\n"
        f"- {len(taken)} are taken by their configuration.\n"
        f"- {len(dense)} more are taken with `dense=True`.\n"
        f"- {len(kinds) - len(taken) - len(dense)} are refused.\n\n"
        f"| `model_type` taken with `dense=True` |\n|---|\n| {', '.join(f'`{x}`' for x in dense)} |\n\n"
        "| refused `model_type` | what it does that pages do not |\n|---|---|\n"
        + "\n".join(rows)
        + f"\n\nThe next tables have tiny models of {len(named())} of these families. {len(others())} more decode the"
        " stock cache's 40 tokens in a tiny model of their default configuration (`tests/integrations/shrunk.py`)."
        f" {len(UNBUILT)} have no tiny model.\n"
    )


def all_kinds() -> list[str]:
    """`model_type` of all families that generate text from text or images."""
    return sorted({**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


@functools.cache
def named() -> set[str]:
    """Those that `FAMILIES` has a model of."""
    return {f.model_type for f in FAMILIES} & set(all_kinds())


def others() -> list[str]:
    """Those of which a tiny model can be made besides, and that are taken."""
    return [
        kind
        for kind in all_kinds()
        if kind not in named() and kind not in UNBUILT and verdict(kind) in ("yes", "dense")
    ]


def verdict(kind: str) -> str:
    """Return "yes", "dense", or why a family is refused, by its configuration and by where its modeling code takes
    attention from.
    """
    if kind in OWN_CACHE:
        return OWN_CACHE[kind]
    try:
        with quiet():
            text = text_config(CONFIG_MAPPING[kind](**ATTENDING.get(kind, {})))
            if text.model_type in OWN_CACHE:
                return OWN_CACHE[text.model_type]
            layer_geometries(text)
    except KvbitsError as error:
        return str(error)
    module = Path(transformers.__file__).parent / "models" / type(text).__module__.split(".")[-2]
    modeling = "".join(f.read_text() for f in module.glob("modeling_*.py"))
    if (
        text.model_type in UNFIT
        or only_dense(text) is not None
        or (modeling and "ALL_ATTENTION_FUNCTIONS" not in modeling)
    ):
        return "dense"
    return "yes"  # also models of another family under a name of their own, without modeling code


STEPS, PROMPT = 41, 150
COMPARED = (
    "LlamaConfig",
    "Qwen3Config",
    "MixtralConfig",
    "Qwen2MoeConfig",
    "Qwen3MoeConfig",
    "OlmoeConfig",
    "GptOssConfig",
    "Glm4MoeConfig",
    "MiniMaxM2Config",
)


def errors(family: Family, scheme: str = "int8") -> torch.Tensor:
    """Relative error of the logits [steps], token by token after a prompt, against the stock cache on the same tokens."""
    model = build(family)
    ids = torch.randint(2, 97, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(2))
    found = []
    with torch.no_grad(), quiet():
        for cache in (KVCache.for_model(model, scheme), transformers.DynamicCache(config=model.config)):
            model(ids[:, :PROMPT], past_key_values=cache)
            found.append(
                torch.cat(
                    [model(ids[:, i : i + 1], past_key_values=cache).logits[0] for i in range(PROMPT, PROMPT + STEPS)]
                )
            )
    return (found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)


def experts_table() -> str:
    head = "| models | experts | median step | mean | worst step |\n|---|---|---:|---:|---:|\n"
    rows = []
    for family in (f for f in FAMILIES if f.config in COMPARED and f.parts is None):
        e = errors(family)
        rows.append(
            f"| {family.names} | {'yes' if 'num_experts' in family.extra else 'no'} | {e.median():.1%} | {e.mean():.1%}"
            f" | {e.max():.1%} |"
        )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    text = DOCUMENT.read_text()
    for name, made in (("census", census()), ("models-table", table()), ("experts-table", experts_table())):
        begin, end = f"<!-- {name}: written by tests/integrations/families.py -->\n", f"<!-- /{name} -->\n"
        text = text.partition(begin)[0] + begin + made + end + text.partition(end)[2]
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
