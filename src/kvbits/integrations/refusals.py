"""Models that a KVCache refuses by their configuration: `KVCache.for_model` and `kvbits plan` ask the same functions.

Each answers None, or what the model does, to follow its name. No torch: a configuration of Transformers and
`config_file.Fields` are read alike.
"""

from __future__ import annotations

from typing import Any

from ..geometry import only_dense, text_config

UNFIT = {
    "diffllama": "splits its values in halves after caching them",
    "doge": "makes a mask of its values after caching them",
    "git": "attends by code of its own",
    "jetmoe": "repeats its keys and values after caching them",
    "t5gemma2_decoder": "joins its keys with those of its encoder after caching them",
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"),
        "adds a position bias to its scores, which no kernel takes",
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano", "pix2struct_text_model"),
        "adds a position bias to its scores, which no kernel takes",
    ),
    "moshi": "has a window by its configuration, and masks that know none",
    "bigbird_pegasus": "has an encoder that makes masks of its own",
}
"""Models by `model_type` whose attention is looked up in the registry and still cannot read pages, and why."""
OWN_CACHE = {
    "minimax": "takes no cache but a class of its own (MiniMaxCache)",
    "recurrent_gemma": "keeps its recurrent states in itself, where no cache can select, copy or reset them",
    **dict.fromkeys(("rwkv", "xlstm"), "keeps states of one size and no keys or values, in a class of its own"),
    "openai-gpt": "has no cache: it computes the whole sequence for every token",
    "xlm": "takes no past_key_values: generate() has it compute the whole sequence for every token",
    "xlnet": "keeps hidden states (mems) instead of keys and values",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "has no cache: it reads the keys and values of the model that it drafts for, which may have a KVCache",
    ),
    "reformer": "caches hidden states and hashed buckets instead of keys and values",
    "blt": (
        "has one cache for its encoder of bytes and one for its decoder, and no configuration that says what both hold"
    ),
    "pi0": "predicts a robot's actions: it generates no text, and crops its cache for every step of them",
    "deepseek_v4": (
        "compresses the keys of many tokens into one, in cache layers of its own (heavily_compressed_attention,"
        " compressed_sparse_attention)"
    ),
    "unlimited_ocr_text": (
        "keeps an image's tokens for ever in front of a window, in a cache layer of its own"
        " (reference_sliding_attention)"
    ),
    "qwen4_exp_text": "writes the positions of its index keys into the layers of its cache, and index keys before keys",
    "glm5_next_text": (
        "reads the shape of cached keys beside its index keys, which it pools, and some of its latents have no rotary"
        " part"
    ),
}
"""Models by `model_type` that keep what they know of a sequence in a way that pages cannot, and how."""


def refuses(config: Any) -> str | None:
    """Return why no KVCache holds what a model keeps of a sequence, or None."""
    kinds = (str(getattr(c, "model_type", "")) for c in (config, text_config(config)))
    return next((OWN_CACHE[kind] for kind in kinds if kind in OWN_CACHE), None)


def refuses_pages(config: Any) -> str | None:
    """Return why a model cannot attend over pages, so that it wants `for_model(dense=True)`, or None.

    Models whose attention is not looked up in Transformers' registry are found when they are switched, not here.
    """
    text = text_config(config)
    found = UNFIT.get(str(getattr(text, "model_type", ""))) or only_dense(config)
    return found or getattr(text, "unattached", None)


def refuses_turning(config: Any) -> str | None:
    """Return why a model's keys cannot be turned back by their positions, as a calibrated basis needs, or None.

    Only what the configuration says counts; `rotary.with_rotary` looks at the loaded model, too.
    """
    text = text_config(config)
    if any("mrope_section" in (getattr(text, name, None) or {}) for name in ("rope_parameters", "rope_scaling")):
        return "turns channels by several positions (M-RoPE)"
    return getattr(text, "unturned", None) or only_dense(text)
