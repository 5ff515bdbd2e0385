"""Schemes that a key bias spoils warn once on the models that have one, and name a scheme that does not."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import tiny
from commands import loads, run
from messages import mentions, warns

import kvbits
from kvbits import schemes
from kvbits.errors import KvbitsWarning
from kvbits.geometry import has_key_bias, load_config
from kvbits.integrations.models import KEY_BIAS, key_bias, unfit_for
from kvbits.schemes import PRESETS, RECOMMENDED, weak_to_key_bias

MODELS = Path(os.environ.get("KVBITS_MODELS", Path.home() / "kv-models"))


def test_weak_schemes_share_few_steps_between_the_channels_of_a_key():
    assert {name for name, s in PRESETS.items() if weak_to_key_bias(s)} == {
        "int4",
        "int4_centered",
        "fp8",
        "fp8_e5m2_keys",
    }
    assert not weak_to_key_bias(PRESETS[RECOMMENDED])


@pytest.mark.parametrize(("scheme", "fit"), [("int4", "kivi4"), ("fp8", RECOMMENDED)])
def test_for_model_warns_and_names_a_fit_preset(scheme, fit):
    model = tiny.model(key_bias=200.0)
    assert key_bias(model) == 200 > KEY_BIAS
    with warns(KvbitsWarning, f"'{scheme}'", "LlamaForCausalLM", 200, f"'{fit}'", "kvbits check"):
        kvbits.KVCache.for_model(model, scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in ("raw", "int8", RECOMMENDED, "kivi4", "kivi2", fit):
            kvbits.KVCache.for_model(model, other)
        kvbits.KVCache.for_model(tiny.model(key_bias=KEY_BIAS / 2), scheme)


def test_check_warns_once(monkeypatch):
    model = tiny.model(key_bias=200.0)
    loads(monkeypatch, lambda: model, tiny.tokenizer())
    options = "--windows 1 --length 300 --max-ppl-change 1 --max-kl 100"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        said = run(f"check tiny --scheme int4 {options}", code=1).stderr
        assert said.count("warning: scheme 'int4' is unfit") == 1 and "take 'kivi4'" in said
        assert "warning" not in run(f"check tiny --scheme kivi4 {options}").stderr


def test_a_plan_says_so_from_the_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for config, biased in ((transformers.Qwen2Config(**sizes), True), (transformers.LlamaConfig(**sizes), False)):
        assert has_key_bias(config) is biased
        config.save_pretrained(tmp_path)
        said = run(f"plan {tmp_path} --schemes int8,int4").stdout
        assert mentions(said, "bias", "keys") is biased
    assert has_key_bias(transformers.LlamaConfig(**sizes, attention_bias=True))


@pytest.mark.parametrize(("name", "biased"), [("qwen2.5-coder-0.5b-instruct", True), ("smollm2-135m-instruct", False)])
def test_real_models(name, biased):
    if not (MODELS / name).is_dir():
        pytest.skip(f"{name} is not in KVBITS_MODELS")
    assert has_key_bias(load_config(MODELS / name)) is biased
    model, _ = kvbits.load_model(str(MODELS / name))
    note = unfit_for(model, schemes.get("int4"))
    assert (note is not None) is biased and (note is None or mentions(note, 211, "'kivi4'"))
