"""Keys stored before the rotary embedding: read from the model for every rotary variant, and out of a cache as they
went in.
"""

import dataclasses
import gc
import weakref

import pytest
import torch
import transformers
from messages import raises
from transformers import AutoModelForCausalLM, DynamicCache

from kvbits.cache.paged_cache import PagedCache
from kvbits.calibrate.target import as_stored
from kvbits.errors import SpecError, UnsupportedError
from kvbits.geometry import layer_geometries
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.rotary import layers_of, with_rotary
from kvbits.quant.rotary import turn
from kvbits.spec import CacheSpec, LayerGeometry, PerChannel, PerToken, QuantSpec, Rotary, Scheme

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
SCALED = {"factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": ("llama", {}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "llama3 scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED},
    ),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn"} | SCALED}),
    "qwen2 (key bias)": ("qwen2", {}),
    "qwen3 (norms)": ("qwen3", {"head_dim": 32}),
    "phi3 longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.5] * 8,
                "long_factor": [3.0] * 8,
                "rope_theta": 10_000.0,
            },
        },
    ),
    "gemma3 (two bases)": (
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "cohere (interleaved)": ("cohere", {}),
    "glm4 (interleaved, partial)": ("glm4", {"head_dim": 16}),
    "phi (partial)": ("phi", {}),
    "gpt_neox (partial)": ("gpt_neox", {"num_key_value_heads": 4}),
}
FINE = QuantSpec(format="int8", granularity=PerChannel(), symmetric=False, scale_dtype="float32", pre_rope=True)


def tiny(family):
    torch.manual_seed(0)
    kind, extra = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, **(SMALL | extra))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny(request.param)


def test_frequencies_and_pairs_turn_the_keys_of_one_token_to_each_other(model):
    """Layer 0 sees only the token, so the keys of equal tokens, turned back, are equal."""
    layers = with_rotary(layer_geometries(model.config), model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.full((1, 40), 5), past_key_values=cache)
    keys = cache.layers[0].keys.transpose(1, 2)
    back = as_stored(keys, layers[0], FINE)[0]
    turned = (keys[0, 1:] - keys[0, :1]).abs().amax()
    assert turned > 0.05 * keys.abs().amax()
    assert (back - back[:1]).abs().amax() <= 2e-4 * keys.abs().amax()


def test_a_fine_pre_rope_cache_gives_the_models_own_logits(model):
    scheme = Scheme(name="fine", key=FINE, value=QuantSpec(granularity=PerToken(), symmetric=False), num_sink_tokens=2)
    cache = KVCache.for_model(model, scheme)
    ids = torch.randint(1, 97, (2, 150))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got = torch.cat(
            [model(piece, past_key_values=cache).logits for piece in ids.split([70, 1, 1, 50, 28], dim=1)], 1
        )
    assert cache.pages.groups[0].tables()
    assert (got - want).square().mean().sqrt() <= 0.03 * want.std()


def test_left_padding_and_offsets_only_turn_keys_by_a_constant():
    model = tiny("llama")
    scheme = Scheme(name="fine", key=FINE, value=QuantSpec(granularity=PerToken(), symmetric=False))
    ids = torch.randint(1, 97, (1, 140))
    with torch.no_grad():
        want = model(ids, use_cache=False, position_ids=torch.arange(1000, 1140)[None]).logits
        cache = KVCache.for_model(model, scheme)
        first = model(ids[:, :130], past_key_values=cache, position_ids=torch.arange(1000, 1130)[None]).logits
        rest = model(ids[:, 130:], past_key_values=cache, position_ids=torch.arange(1130, 1140)[None]).logits
    assert (torch.cat([first, rest], 1) - want).square().mean().sqrt() <= 0.03 * want.std()


@pytest.mark.parametrize("kind", ["gptj", "opt"])
def test_models_without_a_rotary_embedding_are_refused(kind):
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    with raises(UnsupportedError, "rotary embedding", "pre_rope", "basis='calibrated'"):
        with_rotary(tuple(LayerGeometry(num_kv_heads=4, head_dim=16) for _ in range(2)), model)


def test_a_configuration_that_was_refused_is_refused_again_and_not_kept():
    config = transformers.AutoConfig.for_model("opt", **SMALL, ffn_dim=96)
    for _ in range(3):
        with raises(UnsupportedError, "OPTForCausalLM", "rotary embedding", "pre_rope", "basis='calibrated'"):
            layers_of(config)
    gone = weakref.ref(config)
    del config
    gc.collect()
    assert gone() is None


def test_a_cache_without_rotary_geometry_is_refused():
    spec = CacheSpec(
        scheme=Scheme(name="x", key=FINE, value=FINE.raw()), layers=(LayerGeometry(num_kv_heads=1, head_dim=16),)
    )
    with raises(SpecError, "'x'", "layer 0", "KVCache.for_model", "LayerGeometry(rotary=...)", "pre_rope"):
        PagedCache(spec)
    with raises(SpecError, "9 pairs", "head_dim=16"):
        LayerGeometry(num_kv_heads=1, head_dim=16, rotary=Rotary(inv_freq=(1.0,) * 9))


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize("pairs_turned", [4, 8])
def test_stored_order_makes_every_pair_a_pair_of_halves(pairs, pairs_turned):
    rotary = Rotary(inv_freq=tuple(0.5**i for i in range(pairs_turned)), pairs=pairs)
    order = rotary.order(16)
    assert sorted(order) == list(range(16))
    partner = pairs_turned if pairs == "half" else 1
    step = 1 if pairs == "half" else 2
    for i in range(pairs_turned):
        assert (order[i], order[i + 8]) == (i * step, i * step + partner)
    assert rotary.frequencies(16)[pairs_turned:] == (0.0,) * (8 - pairs_turned)


def test_turning_back_undoes_turning_far_out():
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    inv_freq = 10_000.0 ** (-torch.arange(32) / 32)
    positions = torch.tensor([0, 1, 4_095, 131_071, 1_000_000])
    assert (turn(turn(x, positions, inv_freq), positions, inv_freq, back=True) - x).abs().max() < 1e-13
    q, k = torch.randn(2, 1, 64, dtype=torch.float64)
    scores = [turn(q, torch.tensor([p + 7]), inv_freq) @ turn(k, torch.tensor([p]), inv_freq).T for p in (0, 131_064)]
    assert (scores[0] - scores[1]).abs().max() < 1e-9


def test_saved_caches_keep_the_rotary_embedding(tmp_path):
    model = tiny("glm4 (interleaved, partial)")
    scheme = Scheme(
        name="fine",
        key=dataclasses.replace(FINE, format="int4", outliers=0.01),
        value=QuantSpec(granularity=PerToken()),
    )
    cache = KVCache.for_model(model, scheme)
    with torch.no_grad():
        model(torch.randint(1, 97, (1, 200)), past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    again = KVCache.load(tmp_path / "cache.safetensors", model)
    for layer in range(2):
        for a, b in zip(cache.pages.dequantize(layer, 0), again.pages.dequantize(layer, 0), strict=True):
            assert torch.equal(a, b)
