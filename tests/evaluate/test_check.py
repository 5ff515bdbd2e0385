"""`kvbits check` catches schemes that ruin a model, says which layers and why, and its advice works."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from commands import error, loads, run, run_json
from messages import mentions, raises

from kvbits import schemes
from kvbits.cache.explain import ranges
from kvbits.calibrate import calibrate, prompts_from_text
from kvbits.errors import SpecError
from kvbits.evaluate.check import MOSTLY_RAW, Limits, check, remedies, require_length, usual_length
from kvbits.evaluate.fidelity import DECODING_CHUNK, read_raw
from kvbits.evaluate.texts import novel
from kvbits.geometry import layer_geometries
from kvbits.spec import CacheSpec, PerChannel, PerGroup, QuantSpec, Scheme

IDS = torch.tensor(tiny.tokenizer()(novel()[:1024])["input_ids"]).view(2, 512)
pytestmark = pytest.mark.filterwarnings("ignore::kvbits.errors.KvbitsWarning")
MODELS = Path(os.environ.get("KVBITS_MODELS", Path.home() / "kv-models"))


def test_a_key_bias_under_grouped_int4_fails_its_layer_and_the_advice_passes():
    model = tiny.model(key_bias=200.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = check(model, IDS, "int4", progress=False)
    assert said and not [w for w in said if "advice" in str(w.message)], "what is advised is measured, not warned of"
    assert not found.passed
    assert [bool(v.failures) for v in found.layers] == [True, False]
    assert any("key bias" in c for c in found.layers[0].causes)
    assert any(a.startswith("layer 0: ") and ("centred keys" in a or "per-channel keys" in a) for a in found.advice)
    assert found.advised is not None and found.advised_overall["kl_mean"] < found.overall["kl_mean"] / 3
    again = check(model, IDS, found.advised, progress=False)
    assert not any(v.failures for v in again.layers)


def test_a_model_without_one_passes():
    found = check(tiny.model(), IDS, "kivi4", progress=False)
    assert found.passed and not found.advice and found.advised is None and not found.advised_passed
    assert all(not v.failures for v in found.layers)


@pytest.mark.parametrize("scheme", ["int4", "kivi4", "int8_centered"])
@pytest.mark.parametrize("length", [300, 512])
def test_a_verdict_on_windows_read_in_16_bits_names_windows_that_show_more(scheme, length):
    model = tiny.model()
    model.config.max_position_embeddings = 1 << 16
    found = check(model, IDS[:, :length], scheme, progress=False)
    if found.overall["read_raw"] <= MOSTLY_RAW:
        assert found.further is None and "--length" not in found.verdict
        return
    spec = CacheSpec(scheme=found.scheme, layers=layer_geometries(model.config))
    assert read_raw(spec, found.further, chunk=DECODING_CHUNK) <= MOSTLY_RAW
    assert "--length 4k`" in found.verdict and found.to_dict()["further"] == 4096


def test_a_verdict_leads_to_no_windows_that_the_model_cannot_read():
    model = tiny.model()
    for positions, further in ((512, None), (600, 600), (3000, 3000)):
        model.config.max_position_embeddings = positions
        found = check(model, IDS, "int4", progress=False)
        assert found.overall["read_raw"] > MOSTLY_RAW and found.further == further
        assert (f"--length {further}`" in found.verdict) == (further is not None)


def test_windows_that_stay_raw_are_no_screen():
    with raises(SpecError, "tiered_8k", "512 tokens", "--length 5504"):
        check(tiny.model(), IDS, "tiered_8k", progress=False)
    assert check(tiny.model(), IDS, "raw", progress=False).passed


def test_limits_are_limits():
    found = check(tiny.model(), IDS, "int8", limits=Limits(kl=0.0), progress=False)
    assert not found.passed and found.failures[0].startswith("KL ") and all(not v.failures for v in found.layers)
    assert mentions(found.advice[0], "layer", "KL") and mentions(found.verdict, "layers")


def test_saturation_of_static_scales_is_seen():
    model = tiny.model()

    def tight(scheme: Scheme):
        from kvbits.calibrate import calibrate

        return calibrate(model, [IDS[0]], scheme, percentile=90.0)

    found = check(model, IDS, "int8_static", calibration=tight, progress=False)
    assert not found.passed and any("saturated" in f for v in found.layers for f in v.failures)
    assert found.advised is None and any(mentions(a, "calibration", "bits") for a in found.advice)


def test_remedies_are_values_of_the_scheme_and_end_with_raw():
    spec = QuantSpec(format="int4", granularity=PerGroup(32))
    found = remedies(spec, spec)
    assert found[-1] == ("keep raw", QuantSpec.raw(), QuantSpec.raw())
    kinds = {(k.format, k.granularity, k.center) for _, k, _ in found}
    assert {
        ("int4", PerChannel(), None),
        ("int4", PerGroup(32), "channel"),
        ("int4", PerGroup(16), None),
        ("int4", PerGroup(64), None),
    } <= kinds
    assert any(k.format == "int8" and v.format == "int4" for _, k, v in found)
    assert not any((k, v) == (spec, spec) for _, k, v in found)
    assert [t for t, *_ in remedies(QuantSpec.raw(), QuantSpec.raw())] == ["keep raw"]


def test_ranges_read_well():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8"


@pytest.mark.parametrize(("scheme", "code"), [("int4", 1), ("kivi4", 0)])
def test_the_command_says_pass_or_fail_by_its_exit_code(monkeypatch, scheme, code):
    model = tiny.model(key_bias=200.0)
    loads(monkeypatch, lambda: model, tiny.tokenizer())
    command = f"check tiny --scheme {scheme} --windows 1 --length 300 --max-ppl-change 1 --max-kl 100"
    data = run_json(command, code)
    assert data["passed"] == (code == 0) and len(data["layers"]) == 2 and data["text"] == "novel"
    overall = data["overall"]
    assert 0 < overall["kl_median"] <= overall["kl_p99"] <= overall["kl_p999"] <= overall["kl_max"]
    assert 0 < overall["dp_rms"] < 1
    shown = run(command, code).stdout
    flat = " ".join(shown.split())
    assert ("FAIL" in shown) == bool(code) and "cosine" in flat and "Bits left" in flat
    assert f"{data['overall']['read_raw']:.0%} of their history" in flat
    assert f"{overall['kl_median']:.5f}" in flat and f"{overall['dp_rms']:.2%}" in flat
    verdicts = {
        line.split("  ")[0]: line.split()[1 + line.startswith("whole")]
        for line in shown.splitlines()
        if line.startswith(("layers ", "whole cache ", "verdict "))
    }
    assert verdicts == (
        {"layers": "FAIL", "whole cache": "pass", "verdict": "FAIL"}
        if code
        else dict.fromkeys(("layers", "whole cache", "verdict"), "pass")
    )
    assert f"exit code {code}: " in flat


def test_the_code_it_prints_makes_the_advised_scheme():
    from kvbits import Override
    from kvbits.cli.check import _code

    model = tiny.model(key_bias=200.0)
    # in short chunks this random model passes with no advice
    found = check(model, IDS, "int4", chunk=128, progress=False)
    assert found.failed_layers == [0] and found.advised_passed and "layer" in found.verdict
    for advised in (
        found.advised,
        dataclasses.replace(
            found.advised,
            key=QuantSpec(format="int4", granularity=PerGroup(16)),
            overrides=(
                Override(layers=(0, 1), key=QuantSpec.raw(), value=QuantSpec.raw()),
                Override(layers=(1,), key=QuantSpec(format="int8"), value=QuantSpec.raw()),
            ),
        ),
    ):
        made = eval(
            _code(advised, "int4"),
            {
                "schemes": schemes,
                "Override": Override,
                "QuantSpec": QuantSpec,
                "PerChannel": PerChannel,
                "PerGroup": PerGroup,
            },
        )
        assert dataclasses.replace(made, name=advised.name) == advised


@pytest.mark.skipif(
    not (MODELS / "qwen2.5-coder-1.5b-instruct").is_dir(),
    reason="no qwen2.5-coder-1.5b-instruct in KVBITS_MODELS (docs/results/evaluation.md)",
)
def test_qwen_1_5b_with_per_token_int4_is_caught():
    """Its key bias makes per-token 4-bit keys useless (perplexity 9.3 becomes tens of thousands), and the screen must
    say so.
    """
    import kvbits
    from kvbits.evaluate.texts import read_text, windows

    model, tokenizer = kvbits.load_model(str(MODELS / "qwen2.5-coder-1.5b-instruct"))
    ids = windows(tokenizer, read_text("novel"), count=1, length=384)
    spec = QuantSpec(format="int4", granularity=schemes.get("int8_per_token").key.granularity)
    found = check(model, ids, Scheme(name="int4_per_token", key=spec, value=spec), progress=False)
    assert not found.passed and found.layers[0].failures and any("key bias" in c for c in found.layers[0].causes)
    assert found.overall["kl_mean"] > 1 and found.advised_overall["kl_mean"] < found.overall["kl_mean"] / 10


def test_a_calibration_file_serves_and_two_sources_of_one_are_refused(monkeypatch, tmp_path):
    model, tokenizer = tiny.model(), tiny.tokenizer()
    loads(monkeypatch, lambda: model, tokenizer)
    scales = tmp_path / "scales.safetensors"
    prompts = prompts_from_text(tokenizer, novel()[40_000:44_000], length=300, num_prompts=2)
    calibrate(model, prompts, "int8_static").save(scales)
    command = "check tiny --scheme int8_static --windows 1 --max-ppl-change 1 --max-kl 100"
    assert run_json(f"{command} --length 300 --calibration {scales}")["scheme"] == "int8_static"
    error(f"{command} --length 300 --calibration {scales} --calibration-text novel", "--calibration", "exclude")
    error(f"{command} --length 5000", "5000", "4096", "--length")


@pytest.mark.parametrize(
    ("scheme", "length", "least"), [("kivi4", 224, 225), ("int8", 128, 129), ("nuq4-1%", 257, 258), ("raw", 64, 65)]
)
def test_windows_too_short_for_a_scheme_are_refused_before_the_model_loads(monkeypatch, scheme, length, least):
    model = tiny.model()
    layers = layer_geometries(model.config)
    chosen = schemes.for_layers(scheme, layers)
    require_length(chosen, layers, least)
    with raises(SpecError, scheme, f"{length} tokens", "--length"):
        require_length(chosen, layers, length)
    with raises(SpecError, scheme, f"{length} tokens", "--length"):
        check(model, torch.zeros(1, length, dtype=torch.int64), chosen)


def test_windows_are_as_long_as_a_scheme_needs_unless_told_otherwise(monkeypatch, tmp_path):
    model = tiny.model()
    layers = layer_geometries(model.config)
    lengths = {name: usual_length(schemes.for_layers(name, layers), layers) for name in schemes.PRESETS}
    for name, length in lengths.items():
        require_length(schemes.for_layers(name, layers), layers, length)
    assert {n for n, length in lengths.items() if length > 512} == {"klt3", "klt2", "tiered", "tiered_8k"}
    loads(monkeypatch, lambda: model, tiny.tokenizer())
    file = tmp_path / "long_tail.json"
    file.write_text(schemes.get("int4", residual_length=512).to_json())
    found = run_json(f"check tiny --scheme {file} --windows 1 --max-ppl-change 1 --max-kl 100")
    assert found["overall"]["tokens"] > 512
    error(f"check tiny --scheme {file} --length 512", "show nothing of its codes", "--length")


def test_the_shortest_window_that_is_taken_shows_codes():
    layers = layer_geometries(tiny.model().config)
    ids = torch.randint(3, 60, (1, 225))
    require_length(schemes.for_layers("kivi4", layers), layers, 225)
    assert "key_bits" in check(tiny.model(), ids, "kivi4", progress=False).layers[0].measures
