"""MiMo-V2-Flash's config.json as vLLM reads it: names that Transformers has others for."""

from __future__ import annotations

from typing import Any


def named_twice(config: Any) -> Any:
    """A `MiMoV2FlashConfig` of dense layers, in place, with vLLM's names beside its own."""
    full, slides = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    config.update(
        {
            "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
            "moe_layer_freq": [0] * config.num_hidden_layers,
            "sliding_window_size": config.sliding_window,
            "add_swa_attention_sink_bias": True,
            "layernorm_epsilon": config.rms_norm_eps,
            "swa_num_attention_heads": config.num_attention_heads,
            "swa_num_key_value_heads": 2 * config.num_key_value_heads,
            "swa_head_dim": config.head_dim,
            "swa_v_head_dim": config.v_head_dim,
            "rope_theta": full["rope_theta"],
            "swa_rope_theta": slides["rope_theta"],
            "partial_rotary_factor": full["partial_rotary_factor"],
        }
    )
    return config
