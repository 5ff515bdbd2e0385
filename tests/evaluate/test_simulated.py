"""The simulated cache against the packed one: same tokens exact, same pages quantized, what is left is rounding."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from messages import raises
from nightly import at_night

from kvbits import KVCache, schemes
from kvbits.calibrate import calibrate, prompts_from_text
from kvbits.errors import SpecError, UnsupportedError
from kvbits.evaluate.caches import factory
from kvbits.evaluate.fidelity import compare, prefill
from kvbits.evaluate.rows import Rows, generate
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.texts import Text, novel
from kvbits.report.collect import collect
from kvbits.spec import Override, QuantSpec

IDS = torch.tensor(tiny.tokenizer()(novel()[:700])["input_ids"])


@pytest.fixture(scope="module")
def model():
    return tiny.model(key_bias=4.0)


def both(model, scheme, by_reference=False):
    def fit(s):
        return calibrate(
            model, prompts_from_text(tiny.tokenizer(), novel()[40_000:42_000], length=300, num_prompts=4), s
        )

    packed, simulated = (factory(model, scheme, calibration=fit, simulate=s) for s in (False, True))

    def make(batch, tokens):
        found = fit(packed.scheme) if packed.scheme.needs_calibration else None
        return KVCache.for_model(
            model, packed.scheme, batch_size=batch, max_tokens=tokens, calibration=found, backend="reference"
        )

    return (dataclasses.replace(packed, make=make) if by_reference else packed), simulated


def test_a_result_names_the_calibrated_model_without_this_machine_s_folders(model, monkeypatch):
    monkeypatch.setattr(model.config, "_name_or_path", "/home/somebody/models/tiny")
    packed, simulated = both(model, "int8_static")
    assert packed.info["calibration"]["model"] == simulated.info["calibration"]["model"] == "tiny"


WANTED = [
    "raw",
    "int8",
    "int4",
    "int4_centered",
    "fp8",
    "kivi2",
    "int8_static",
    "nuq3-1%",
    "nuq2",
    dataclasses.replace(schemes.get("int4"), name="sinks", num_sink_tokens=5, residual_length=20),
    dataclasses.replace(
        schemes.get("kivi2"),
        name="a raw layer",
        overrides=(Override(layers=(1,), key=QuantSpec.raw(), value=QuantSpec.raw()),),
    ),
]


@pytest.mark.parametrize("scheme", WANTED, ids=lambda s: s if isinstance(s, str) else s.name)
@pytest.mark.parametrize("chunk", [1, *at_night(7, 100)])
def test_it_agrees_with_the_packed_cache(model, scheme, chunk):
    packed, simulated = both(model, scheme, by_reference=True)
    assert simulated.kind == "simulated" and simulated.name == f"{packed.name}-simulated"
    length = 700 if chunk > 1 else 230
    first = 0 if chunk > 1 else 180
    held = {"packed": packed.make(1, 700), "simulated": simulated.make(1, 700)}
    prefill(model, held, IDS[None, :first], 180)
    found = compare(model, held, IDS[first:length], chunk=chunk)
    assert found["simulated"].perplexity == pytest.approx(found["packed"].perplexity, rel=1e-3)
    assert found["simulated"].kl_mean < 1e-5


def test_it_holds_what_pages_give_back_token_by_token(model):
    packed, simulated = both(model, "kivi2")
    a, b = packed.make(1, 700), simulated.make(1, 700)
    for cache in (a, b):
        Rows(model, cache, [IDS[:600]], 100)
    k, v = a.pages.dequantize(0, 0)  # in later layers a rounding of the layer before may flip a code
    assert torch.allclose(k, b.layers[0].keys[0].transpose(0, 1), atol=1e-5) and torch.allclose(
        v, b.layers[0].values[0].transpose(0, 1), atol=1e-5
    )
    assert [b.layers[0].pages, b.layers[1].pages] == [(600 - 128 - 1) // 32] * 2


def test_it_is_no_packed_cache_and_differs_from_the_model_s_own(model):
    from kvbits.evaluate.caches import base_factory

    _, simulated = both(model, "kivi2")
    found = compare(
        model, {"base": base_factory(model).make(1, 700), "simulated": simulated.make(1, 700)}, IDS, chunk=50
    )
    assert found["simulated"].kl_mean > 1e-4


def test_prompts_of_many_lengths_go_through_it_one_by_one(model):
    _, simulated = both(model, "int4")
    prompts = [IDS[:300], IDS[50:90]]
    assert generate(model, simulated, prompts, 6, 32) == [generate(model, simulated, [p], 6, 32)[0] for p in prompts]


def test_tiers_are_refused(model):
    with raises(UnsupportedError, "'tiered'", "tiers"):
        both(model, "tiered")


def test_reports_leave_simulated_results_out(model, tmp_path):
    text, options = (Text("one", novel()[:4000]),), Options(windows=2, length=200, chunk=32)
    found = Evaluation(
        name="tiny", schemes=["int4"], tasks=["fidelity"], texts=text, out=tmp_path, options=options, simulate=True
    ).run(model, tiny.tokenizer(), progress=False)["fidelity"]
    assert found["int4-simulated"]["kl_mean"] == pytest.approx(found["int4"]["kl_mean"], rel=0.05)
    results = collect(tmp_path)
    assert list(results.models["tiny-float32"].tasks["fidelity"]) == ["32-bit", "int4"]
    assert results.simulated == ("tiny/fidelity/int4-simulated",)
    for name in ("32-bit", "int4"):
        (tmp_path / "tiny-float32" / "fidelity" / f"{name}.json").unlink()
    with raises(SpecError, "kvbits eval", "--simulate"):
        collect(tmp_path)
