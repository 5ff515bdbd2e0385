"""Formats by layer from a scheme file (`--kv-cache-dtype kvbits_scheme`), in vLLM's official wheel on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
from integrations.inside_vllm import generate
from integrations.judged import check, random_ids
from messages import raises

from kvbits import schemes
from kvbits.errors import SpecError, UnsupportedError
from kvbits.geometry import layer_geometries
from kvbits.spec import FittedScheme, Override, PerGroup, QuantSpec, Scheme

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
EIGHT, FOUR = schemes.get("int8_centered", head_dim=64), schemes.get("int4", head_dim=64)
LAST = Override(
    layers=(-1,),
    key=QuantSpec(format="int8", granularity=PerGroup(32)),
    value=QuantSpec(format="int4", granularity=PerGroup(32)),
)
TWO = Scheme(name="two", key=FOUR.key, value=FOUR.value, overrides=(LAST,), token_local=True)
"""The last layer in a format that is no dtype of its own."""


def options(path):
    return {"additional_config": {"kvbits": {"scheme": str(path)}}}


def write(scheme, path):
    (path / "mine.json").write_text(scheme.to_json())
    return options(path / "mine.json")


def test_each_layer_is_stored_as_the_file_says(model, engine, tmp_path):
    llama = model("llama")[0]
    values = {f.name: getattr(TWO, f.name) for f in dataclasses.fields(Scheme)}
    fitted = FittedScheme(**values, layers=layer_geometries(llama.config), model="tiny")
    llm = engine(
        "llama", "kvbits_scheme", **write(fitted, tmp_path), max_num_batched_tokens=48, enable_prefix_caching=False
    )
    for length in (30, 64, 130):
        prompt = random_ids(length, length)
        chunks = [48] * (length // 48) + ([length % 48] if length % 48 else [])
        check(llama, TWO, prompt, generate(llm, [prompt])[0], chunks)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert [layer.impl.call.layout.key.format for layer in layers] == ["int4"] * (len(layers) - 1) + ["int8"]


def test_raw_layers_and_copies_of_the_others(model, engine, tmp_path):
    raw = Override(layers=(0,), key=QuantSpec.raw(), value=QuantSpec.raw())
    given = write(dataclasses.replace(TWO, overrides=(raw,)), tmp_path)
    given["additional_config"]["kvbits"] |= {"raw_newest": 64, "raw_first": 64}
    llm = engine("llama", "kvbits_scheme", **given)
    prompt = random_ids(100)
    check(model("llama")[0], None, prompt, generate(llm, [prompt], 40)[0])


def test_a_draft_model_is_no_part_of_the_file(model, engine, tmp_path):
    drafts = {
        "speculative_config": {"method": "draft_model", "model": str(model("llama")[1]), "num_speculative_tokens": 3}
    }
    llm = engine("llama", "kvbits_scheme", **write(TWO, tmp_path), **drafts, enable_prefix_caching=False)
    prompt = random_ids(100)
    check(model("llama")[0], TWO, prompt, generate(llm, [prompt])[0])
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert [(x.impl.call.layout.key.format, x.impl.call.layout.is_centered) for x in layers] == [
        ("int4", False),
        ("int8", False),
        ("int8", True),
        ("int8", True),
    ]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"key": schemes.get("kivi4").key, "token_local": False, "overrides": ()},
            ("layer 0", "keys", "PerToken", "int8_centered"),
        ),
        (
            {"key": dataclasses.replace(EIGHT.key, outliers=0.01), "token_local": False},
            ("keys", "outliers=0.01", "int8_centered"),
        ),
        ({"key": dataclasses.replace(EIGHT.key, center=None, static=True)}, ("keys", "static=False")),
        ({"value": QuantSpec.raw()}, ("keys", "values", "raw")),
        ({"page_size": 128}, ("page_size=128", "page_size=64")),
    ],
    ids=["kivi", "outliers", "static", "raw", "pages"],
)
def test_what_pages_of_vllm_cannot_hold_is_refused_by_name(engine, tmp_path, changes, parts):
    with raises(UnsupportedError, *parts):
        engine("llama", "kvbits_scheme", **write(dataclasses.replace(TWO, **changes), tmp_path))


def test_connectors_between_engines_are_refused(engine, tmp_path):
    from integrations.test_vllm_transfer import shared_storage

    with raises(UnsupportedError, "ExampleConnector", "dtype"):
        engine("llama", "kvbits_scheme", **write(TWO, tmp_path), kv_transfer_config=shared_storage(tmp_path))


def test_files_that_are_missing_or_of_another_model_are_refused(model, engine, tmp_path):
    with raises(UnsupportedError, "--kv-cache-dtype kvbits_scheme", "--additional-config", "scheme"):
        engine("llama", "kvbits_scheme")
    with raises(ValueError, tmp_path / "none.json"):  # vLLM's check of its options wraps it
        engine("llama", "kvbits_scheme", **options(tmp_path / "none.json"))
    values = {f.name: getattr(TWO, f.name) for f in dataclasses.fields(Scheme)}
    other = FittedScheme(**values, layers=layer_geometries(model("gemma3")[0].config), model="gemma")
    with raises(SpecError, "gemma", "kvbits fit"):
        engine("llama", "kvbits_scheme", **write(other, tmp_path))
