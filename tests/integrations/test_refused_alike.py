"""`kvbits plan` and `KVCache.for_model` refuse the same models, for the same reason."""

from __future__ import annotations

import json

import pytest
import transformers
from commands import error

from kvbits.config_file import Fields, known
from kvbits.errors import UnsupportedError
from kvbits.integrations import refusals
from kvbits.integrations.huggingface import KVCache

KINDS = sorted(refusals.OWN_CACHE.keys() & set(known()))


def test_every_kind_of_the_list_is_read_or_is_none_of_transformers():
    for kind in refusals.OWN_CACHE.keys() - set(known()):
        with pytest.raises(Exception):  # noqa: B017  each release says it in its own way
            transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_plan_refuses_what_the_list_names(kind, tmp_path):
    why = refusals.refuses(Fields({"model_type": kind}))
    assert why == refusals.OWN_CACHE[kind]
    if kind not in ("gemma4_assistant", "gemma4_unified_assistant"):  # Transformers refuses their own defaults
        assert why == refusals.refuses(transformers.AutoConfig.for_model(kind))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    error(f"plan {tmp_path}", why.split(",")[0])


@pytest.mark.parametrize(
    "config",
    [
        transformers.OpenAIGPTConfig(vocab_size=50, n_embd=32, n_layer=1, n_head=2),
        transformers.XLMConfig(vocab_size=50, emb_dim=32, n_layers=1, n_heads=2),
        transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=64),
        transformers.RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2),
        transformers.RecurrentGemmaConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            lru_width=32,
        ),
    ],
    ids=lambda c: c.model_type,
)
def test_for_model_refuses_what_plan_refuses(config):
    model = {
        "xlm": transformers.XLMWithLMHeadModel,
        "xlnet": transformers.XLNetLMHeadModel,
        "openai-gpt": transformers.OpenAIGPTLMHeadModel,
    }.get(config.model_type, transformers.AutoModelForCausalLM)
    made = model(config) if model is not transformers.AutoModelForCausalLM else model.from_config(config)
    for dense in (False, True):
        with pytest.raises(UnsupportedError) as raised:
            KVCache.for_model(made, "int8_centered", dense=dense)
        assert refusals.OWN_CACHE[config.model_type] in str(raised.value)
