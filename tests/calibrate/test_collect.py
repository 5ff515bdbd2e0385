"""Calibrating a tiny random model sees exactly what its cache stores, and the result serves a real cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from messages import raises

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.calibrate import Calibration, ObservingCache, calibrate, prompts_from_text
from kvbits.errors import CalibrationError, DataError, SpecError, UnsupportedError
from kvbits.geometry import layer_geometries
from kvbits.spec import CacheSpec, Override, PerChannel, PerGroup, PerTensor, QuantSpec, Scheme

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(model_type="llama", **fields):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, pad_token_id=0, **fields)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


def prompts(n=6, length=20, seed=1):
    return list(torch.randint(1, 100, (n, length), generator=torch.Generator().manual_seed(seed)).split(2))


def stored(model, batch, **kw):
    """Return what the stock cache holds after the prompt: [(k, v)] per layer, [B, T, H, D]."""
    with torch.no_grad():
        cache = model(batch, use_cache=True, **kw).past_key_values
    return [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in cache.layers]


STATIC = {
    "per_tensor": QuantSpec(format="fp8_e4m3", granularity=PerTensor(), static=True, scale_dtype="float32"),
    "per_group": QuantSpec(format="int8", granularity=PerGroup(16), static=True, scale_dtype="float32"),
    "per_channel": QuantSpec(
        format="int4", granularity=PerChannel(), symmetric=False, static=True, scale_dtype="float32"
    ),
}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("name", STATIC)
def test_the_maximum_is_that_of_the_stock_cache(model_type, name):
    model = tiny(model_type, head_dim=16, sliding_window=8)
    spec = STATIC[name]
    found = calibrate(model, prompts(), Scheme(name="mine", key=spec, value=spec), percentile=100)
    seen = [stored(model, p[:, :7]) for p in prompts()]  # shorter than the window, so the stock cache has all of it
    short = calibrate(model, [p[:, :7] for p in prompts()], Scheme(name="mine", key=spec, value=spec), percentile=100)
    for layer in range(3):
        for i, side in enumerate("kv"):
            x = torch.cat([s[layer][i].flatten(0, 1) for s in seen])
            scale = short.static[layer][f"{side}_scale"]
            assert found.static[layer][f"{side}_scale"].shape == scale.shape == (2, spec.num_groups(16))
            if name == "per_channel":
                low, high = x.amin(0), x.amax(0)
                torch.testing.assert_close(scale, (high - low) / 15)
                torch.testing.assert_close(short.static[layer][f"{side}_bias"], low)
            elif name == "per_tensor":
                torch.testing.assert_close(scale, (x.abs().max() / 448).expand(2, 1))
            else:
                torch.testing.assert_close(scale, x.abs().amax((0, 2))[:, None] / 127)


def test_padding_and_skipped_tokens_are_left_out(model):
    batch = prompts(2)[0]
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), batch], 1)
    mask = (torch.arange(25) >= 5).long().expand(2, -1)
    positions = {"input_ids": padded, "attention_mask": mask}
    spec = STATIC["per_channel"]
    scheme = Scheme(name="mine", key=spec, value=spec, num_sink_tokens=3)
    plain, left = (calibrate(model, [p], scheme, percentile=100) for p in (batch, positions))
    assert plain.info["tokens"] == left.info["tokens"] == 2 * (20 - 3)
    values = stored(model, batch)[0][1][:, 3:].flatten(0, 1)
    torch.testing.assert_close(plain.static[0]["v_bias"], values.amin(0))
    for layer in range(3):  # values carry no position: left padding changes nothing
        torch.testing.assert_close(plain.static[layer]["v_scale"], left.static[layer]["v_scale"], rtol=1e-4, atol=1e-6)
    everything = calibrate(model, [batch], scheme, percentile=100, skip_tokens=0)
    assert everything.info["tokens"] == 40
    assert not torch.equal(everything.static[0]["v_bias"], plain.static[0]["v_bias"])


def test_percentiles_are_no_larger_than_the_maximum(model):
    scheme = schemes.for_layers("int8_static", layer_geometries(model.config))
    top, usual = (calibrate(model, prompts(), scheme, percentile=p) for p in (100, 99))
    for a, b in zip(top.static, usual.static, strict=True):
        assert all(bool((a[k] > b[k]).all()) for k in a)


def test_only_static_specs_are_measured(model):
    spec = STATIC["per_group"]
    scheme = Scheme(
        name="mine",
        key=QuantSpec(granularity=PerGroup(16)),
        value=spec,
        overrides=(Override(layers=(-1,), key=QuantSpec.raw(), value=QuantSpec.raw()),),
    )
    assert [sorted(layer) for layer in calibrate(model, prompts(), scheme).static] == [["v_scale"], ["v_scale"], []]


def test_prompts_may_be_lists_tensors_or_mappings(model):
    ids = prompts(2)[0]
    as_lists = calibrate(model, [row.tolist() for row in ids], "int8_static")
    as_maps = calibrate(model, [{"input_ids": ids}], "int8_static")
    as_batch = calibrate(model, [ids], "int8_static")
    assert as_lists.info["prompts"] == as_batch.info["prompts"] == 2
    for a, b, c in zip(as_lists.static, as_maps.static, as_batch.static, strict=True):
        assert all(torch.equal(b[k], c[k]) for k in c)
        assert all(torch.allclose(a[k], c[k], rtol=2e-3) for k in c)


def test_the_model_is_left_as_it_was(model):
    model.train()
    try:
        calibrate(model, prompts(), "int8_static")
        assert model.training and all(p.grad is None for p in model.parameters())
    finally:
        model.eval()


def test_a_saved_calibration_serves_a_cache_of_the_same_model_only(model, tmp_path):
    layers = layer_geometries(model.config)
    scheme = dataclasses.replace(schemes.for_layers("int8_static", layers), page_size=32)
    path = tmp_path / "scales.safetensors"
    calibrate(model, prompts(8, 80), scheme, percentile=100).save(path)
    calibration = Calibration.load(path)
    calibration.fitted(model.config, scheme)
    cache = PagedCache(
        CacheSpec(scheme=scheme, layers=layers, raw_dtype="float32"), static=calibration.static, backend="reference"
    )
    batch = prompts(8, 80)[0][:1]
    seen = stored(model, batch)
    cache.begin(1, 80)
    for i, (k, v) in enumerate(seen):
        cache.step(i, torch.zeros(1, 80, 4, 16), k, v, scaling=0.25)
    for i, (k, v) in enumerate(seen):
        for side, x, y in zip("kv", (k[0], v[0]), cache.dequantize(i, 0), strict=True):
            y = y if y.shape == x.shape else y.transpose(0, 1)
            assert (x - y).abs().max() <= calibration.static[i][f"{side}_scale"].max() * 0.51
    assert not any(s for layer in cache.saturated for s in layer.values())
    with raises(CalibrationError, "rope_theta", 77, 10000):
        calibration.fitted(tiny(rope_parameters={"rope_type": "default", "rope_theta": 77.0}).config, scheme)


def test_scales_serve_generation_and_the_kvbits_attention_can_stay_on(model):
    huggingface = pytest.importorskip("kvbits.integrations.huggingface")
    first = calibrate(model, prompts(8, 80), "int8_static", percentile=100)
    ids = prompts(2, 90)[0][:1]
    stock = model.generate(ids, max_new_tokens=8, do_sample=False)
    own = tiny()
    cache = huggingface.KVCache.for_model(own, "int8_static", calibration=first, backend="reference")
    with torch.no_grad():
        logits = own(ids, past_key_values=cache).logits
        expected = model(ids).logits
    assert (logits - expected).abs().max() < 0.05
    cache = huggingface.KVCache.for_model(own, "int8_static", calibration=first, backend="reference")
    assert own.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache).shape == stock.shape
    again = calibrate(own, prompts(8, 80), "int8_static", percentile=100)  # its attention is still kvbits
    for a, b in zip(first.static, again.static, strict=True):
        assert all(torch.allclose(a[k], b[k], rtol=2e-3) for k in a)


@pytest.mark.parametrize(
    ("given", "kwargs", "error", "parts"),
    [
        ([], {}, DataError, ("0 prompts", "longer")),
        ([[1, 2]], {"skip_tokens": 2}, DataError, ("1 prompt", 2, "longer")),
        ([[1, 2]], {"skip_tokens": -1}, SpecError, ("skip_tokens=-1", 0)),
        ([[1, 2]], {"percentile": 50}, SpecError, ("percentile=50", 90, 100)),
        ([[]], {}, DataError, ("(1, 0)", "torch.float32", "[batch, tokens]")),
        ([torch.zeros(2, 2)], {}, DataError, ("(2, 2)", "torch.float32", "[batch, tokens]")),
        (
            [{"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 2)}],
            {},
            DataError,
            ("attention_mask", "(1, 2)", "(1, 3)"),
        ),
    ],
)
def test_bad_prompts_are_refused(model, given, kwargs, error, parts):
    with raises(error, *parts):
        calibrate(model, given, "int8_static", **kwargs)


def test_schemes_and_models_without_static_scales_are_refused(model):
    with raises(CalibrationError, "int8", "int8_static"):
        calibrate(model, prompts(), "int8")
    with raises(SpecError, "int9", "int8"):
        calibrate(model, prompts(), "int9")
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1))
    with raises(UnsupportedError, "MambaConfig", "linear_attention"):
        calibrate(mamba, prompts(), "int8_static")


def test_broken_numerics_name_the_layer():
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = torch.inf
    with raises(DataError, "values", "layer 1", "nan", "(0, 0, 0)"):
        calibrate(model, prompts(), "int8_static")


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral"])
def test_an_observing_cache_changes_nothing_and_keeps_nothing(model_type):
    model = tiny(model_type, head_dim=16, sliding_window=8)  # prompts are longer than the window
    seen = []
    cache = ObservingCache(model.config, lambda layer, k, v: seen.append((layer, k.shape, v.shape)))
    with torch.no_grad():
        out = model(prompts()[0], past_key_values=cache)
        plain = model(prompts()[0], use_cache=False)
    assert torch.equal(out.logits, plain.logits)
    assert seen == [(i, (2, 20, 2, 16), (2, 20, 2, 16)) for i in range(3)]
    assert cache.get_seq_length() == 0


# -- prompts --------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token per letter."""

    def __init__(self, bos=None):
        self.bos_token_id = bos

    def __call__(self, text, add_special_tokens=True, verbose=True):
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": start + [ord(c) for c in text]}


TEXT = "".join(chr(1000 + i) for i in range(1000))


def test_windows_do_not_overlap_and_follow_the_seed():
    a, b, c = (torch.cat(prompts_from_text(Letters(), TEXT, num_prompts=10, length=50, seed=s)) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.shape == (10, 50) and a.unique().numel() == 500
    assert bool((a[:, 1:] - a[:, :-1] == 1).all())


def test_windows_begin_as_the_tokenizer_begins():
    batches = prompts_from_text(Letters(bos=7), TEXT, num_prompts=5, length=10, batch_size=2)
    assert [len(b) for b in batches] == [2, 2, 1]
    assert all(bool((b[:, 0] == 7).all()) and b.shape[1] == 10 for b in batches)


def test_short_texts_give_fewer_or_shorter_windows():
    assert sum(len(b) for b in prompts_from_text(Letters(), TEXT, num_prompts=128, length=300)) == 3
    assert prompts_from_text(Letters(), "abc", length=300)[0].shape == (1, 3)
    with raises(DataError, "empty"):
        prompts_from_text(Letters(), "")


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"num_prompts": 0}, ("num_prompts=0", 1)),
        ({"length": 1}, ("length=1", 2)),
        ({"batch_size": 0}, ("batch_size=0", 1)),
    ],
)
def test_bad_counts_are_refused(kwargs, parts):
    with raises(SpecError, *parts):
        prompts_from_text(Letters(), TEXT, **kwargs)


@pytest.mark.filterwarnings("ignore:.*positions of a frame")
@pytest.mark.parametrize(
    "native, memory, seen",
    [(False, 1 << 40, torch.float32), (False, 0, torch.bfloat16), (True, 1 << 40, torch.bfloat16)],
)
def test_bases_of_16_bit_weights_are_measured_in_float32_where_the_cpu_multiplies_them_slowly(
    monkeypatch, native, memory, seen
):
    """bfloat16 on a CPU without instructions for it runs at a tenth of float32's rate; the weights afterwards are the
    same tensors as before.
    """
    from kvbits.calibrate import observe

    monkeypatch.setattr(observe.runs, "has_bfloat16", lambda: native)
    monkeypatch.setattr(observe, "free_bytes", lambda device: memory)
    model = tiny("qwen2", tie_word_embeddings=True).bfloat16()
    before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    during = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: during.append((module.up_proj.weight.dtype, args[0].dtype))
    )
    found = calibrate(model, prompts(), schemes.get("klt4", head_dim=16))
    assert set(during) == {(seen, seen)}
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
    assert found.static[0]["k_basis"].isfinite().all()
    hook.remove()

    def stop(*args):
        raise KeyboardInterrupt

    model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, prompts(), schemes.get("klt4", head_dim=16))
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
