"""Models whose keys and values are of unlike widths: MiMo-V2-Flash, which has as many again kv heads and attention
sinks where it slides, too.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, MiMoV2FlashConfig, MiMoV2FlashForCausalLM

from kvbits.geometry import layer_geometries
from kvbits.integrations.huggingface import KVCache
from kvbits.spec import LayerGeometry

TOKENS = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MiMoV2FlashConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=192,
        v_head_dim=128,
        sliding_window=24,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    model = MiMoV2FlashForCausalLM._from_config(config, attn_implementation="eager").eval()
    for layer in model.model.layers:
        if layer.self_attn.sinks is not None:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def generated(model, cache, attention):
    model.set_attn_implementation(attention)
    ids = torch.arange(3, 83)[None]
    found = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, 80:], torch.stack(found.logits)[:, 0]


def test_the_shape_of_the_cache_is_read_from_the_configuration(model):
    full, sliding = (
        LayerGeometry(num_kv_heads=2, head_dim=192, value_head_dim=128),
        LayerGeometry(num_kv_heads=4, head_dim=192, value_head_dim=128, sliding_window=24),
    )
    assert layer_geometries(model.config) == (full, sliding, full)


@pytest.mark.parametrize("scheme, most", [("raw", 1e-4), ("int8_centered", 0.02), ("int8", 0.02), ("kivi4", 0.5)])
def test_greedy_tokens_of_the_packed_cache_are_those_of_the_stock_one(model, scheme, most):
    tokens, logits = generated(model, DynamicCache(config=model.config), "eager")
    cache = KVCache.for_model(model, scheme, batch_size=1, max_tokens=120)
    got, got_logits = generated(model, cache, "kvbits")
    first = int((got != tokens).nonzero()[0]) if (got != tokens).any() else TOKENS
    assert first == TOKENS or scheme != "raw"
    difference = (got_logits[: first + 1] - logits[: first + 1]).norm() / logits[: first + 1].norm()
    assert difference < most
    assert cache.nbytes == cache.pages.spec.nbytes(120)


def test_a_saved_cache_of_unlike_widths_is_read_back(model, tmp_path):
    cache = KVCache.for_model(model, "int8")
    generated(model, cache, "kvbits")
    cache.pages.save(tmp_path / "saved.kvbits")
    again = type(cache.pages).load(tmp_path / "saved.kvbits")
    for layer in range(3):
        for x, y in zip(cache.pages.dequantize(layer, 0), again.dequantize(layer, 0), strict=True):
            assert torch.equal(x, y)
