"""Layers that attend to an image alone (Llama 3.2 Vision) keep what the stock cache keeps, beside pages of the text."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvbits import KVCache  # noqa: E402
from kvbits.geometry import layer_geometries  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = {
        "vocab_size": 99,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "cross_attention_layers": [1, 3],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 64,
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "intermediate_layers_indices": [0],
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=98)
    found = transformers.MllamaForConditionalGeneration(config).eval()
    for name, p in found.named_parameters():
        if "gate" in name:  # of random weights they are shut
            p.data.fill_(1.0)
    return found


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_about_an_image_are_those_of_the_stock_cache(model, dense, beams):
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = 98
    image = {
        "pixel_values": torch.randn(1, 1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(2)),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 40, 1, 1, dtype=torch.long),
    }
    how = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    KVCache.detach(model)
    stock = model.generate(ids, past_key_values=transformers.DynamicCache(config=model.config), **image, **how)
    cache = KVCache.for_model(model, "raw", dense=dense)
    assert torch.equal(model.generate(ids, past_key_values=cache, **image, **how), stock)
    assert len(layer_geometries(model.config)) == len(cache.pages.spec.layers) == 3 and cache.state_nbytes > 0
    KVCache.detach(model)
