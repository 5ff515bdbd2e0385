"""A calibration survives its file bit by bit, and is refused for any other model, scheme or damaged file, by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from messages import raises
from safetensors.torch import load_file, save_file

import kvbits.calibrate
from kvbits.calibrate import Calibration, fingerprint
from kvbits.calibrate.calibration import FORMAT
from kvbits.errors import CalibrationError, FileFormatError, SpecError
from kvbits.spec import Override, PerChannel, PerGroup, QuantSpec, Scheme

KEY = QuantSpec(format="int8", granularity=PerChannel(), symmetric=False, static=True)
VALUE = QuantSpec(format="int4", granularity=PerGroup(8), static=True)
SCHEME = Scheme(name="mine", key=KEY, value=VALUE, overrides=(Override(layers=(0,), key=QuantSpec.raw(), value=VALUE),))
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def config(**changes):
    return SimpleNamespace(**{**CONFIG, **changes})


@pytest.fixture
def calibration():
    layer = {"k_scale": torch.rand(2, 16) + 0.1, "k_bias": torch.randn(2, 16), "v_scale": torch.rand(2, 2) + 0.1}
    first = {"v_scale": torch.rand(2, 2) + 0.1}
    return Calibration(
        [first, layer, {k: v + 1 for k, v in layer.items()}],
        fingerprint(config(), SCHEME),
        {"percentile": 99.9, "model": "tiny"},
    )


def test_round_trip_is_exact(calibration, tmp_path):
    path = tmp_path / "scales.safetensors"
    calibration.save(path)
    found = Calibration.load(path)
    assert found.path == str(path) and found.to("cpu").path == found.path
    assert (
        found.id == calibration.id and found.info == calibration.info and found.fingerprint == calibration.fingerprint
    )
    for a, b in zip(found.static, calibration.static, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    found.fitted(config(), SCHEME)
    assert [p.name for p in tmp_path.iterdir()] == ["scales.safetensors"]


def test_saving_replaces_and_a_failed_save_keeps_the_old_file(calibration, tmp_path, monkeypatch):
    path = tmp_path / "scales.safetensors"
    path.write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save", fail)
        with raises(OSError, "disk full"):
            calibration.save(path)
    assert path.read_bytes() == b"old"
    calibration.save(path)
    assert Calibration.load(path).id == calibration.id


def test_the_id_names_scales_and_purpose(calibration):
    other = Calibration(
        [*calibration.static[:2], {k: v * 2 for k, v in calibration.static[2].items()}], calibration.fingerprint
    )
    elsewhere = Calibration(calibration.static, fingerprint(config(rms_norm_eps=1e-6), SCHEME))
    assert len({calibration.id, other.id, elsewhere.id}) == 3
    assert Calibration(calibration.static, calibration.fingerprint, {"other": "info"}).id == calibration.id
    assert calibration.to("cpu").id == calibration.id


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            ("rope.rope_parameters.rope_theta", 500000, 10000),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            ("rope.rope_parameters.factor", 4, "absent"),
        ),
        ({"hidden_size": 128}, ("model.hidden_size", 128, 64)),
        ({"num_key_value_heads": 4}, ("geometry[0].num_kv_heads", 4, 2)),
        ({"sliding_window": 32}, ("geometry[0].sliding_window", 32, "absent")),
        ({"num_hidden_layers": 5}, ("geometry", 5, 3)),
        ({"model_type": "qwen2", "attention_bias": True}, ("model.model_type", "'qwen2'", "'llama'")),
    ],
)
def test_another_model_is_refused(calibration, changes, parts):
    with raises(CalibrationError, "tiny", *parts, "kvbits calibrate"):
        calibration.fitted(config(**changes), SCHEME)


@pytest.mark.parametrize(
    ("scheme", "parts"),
    [
        (
            dataclasses.replace(SCHEME, value=dataclasses.replace(VALUE, granularity=PerGroup(16))),
            ("specs[1].v.granularity.size", 16, 8),
        ),
        (
            dataclasses.replace(SCHEME, key=dataclasses.replace(KEY, symmetric=True)),
            ("specs[1].k.symmetric", True, False),
        ),
        (dataclasses.replace(SCHEME, value=dataclasses.replace(VALUE, static=False)), ("specs[1].v", "absent", "int4")),
        (dataclasses.replace(SCHEME, overrides=()), ("specs[0].k", "absent", "int8")),
    ],
)
def test_another_scheme_is_refused(calibration, scheme, parts):
    with raises(CalibrationError, "mine", *parts, "kvbits calibrate"):
        calibration.fitted(config(), scheme)
    named = Calibration(calibration.static, calibration.fingerprint, {"scheme": "theirs"}, "scales.safetensors")
    with raises(CalibrationError, "scales.safetensors", "theirs", "mine", "kvbits calibrate"):
        named.fitted(config(), scheme)
    with raises(
        CalibrationError, "scales.safetensors", "theirs", "mine", "model.hidden_size", 128, 64, "kvbits calibrate"
    ):
        named.fitted(config(hidden_size=128), scheme)


def test_what_does_not_change_scales_does_not_matter(calibration):
    calibration.fitted(
        config(rms_norm_eps=1.0000000116e-5, use_cache=False),
        dataclasses.replace(SCHEME, residual_length=64, num_sink_tokens=4, page_size=32, name="x"),
    )


def test_many_differences_are_counted(calibration):
    with raises(CalibrationError, "model.vocab_size", 1, 64, 4, "kvbits calibrate"):
        calibration.fitted(
            config(
                model_type="a", vocab_size=1, hidden_size=2, intermediate_size=3, rms_norm_eps=1.0, hidden_act="relu"
            ),
            SCHEME,
        )


# -- files ----------------------------------------------------------------------------------------------------------


def rewrite(path, metadata=None, **tensors):
    """The file at `path` with some tensors and metadata changed (None removes)."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        meta = {**f.metadata(), **(metadata or {})}
    data = {
        k: v
        for k, v in {**load_file(path), **{k.replace("__", "."): v for k, v in tensors.items()}}.items()
        if v is not None
    }
    save_file(data, path, metadata={k: v for k, v in meta.items() if v is not None})


@pytest.mark.parametrize(
    ("metadata", "tensors", "parts"),
    [
        ({"format": "other"}, {}, f"'other' '{FORMAT}'"),
        ({"version": "9"}, {}, "9 4"),
        ({"fingerprint": "{"}, {}, "JSONDecodeError"),
        (
            {"fingerprint": json.dumps({"specs": [{"k": {"type": "Nothing"}}], "geometry": [{"num_kv_heads": 1}]})},
            {},
            "'Nothing'",
        ),
        ({"info": None}, {}, "'info'"),
        ({"info": "[]"}, {}, "info []"),
        ({"fingerprint": json.dumps({"specs": [3], "geometry": [3]})}, {}, "metadata"),
        ({}, {"layers__1__k_bias": None}, "layers.1.k_bias"),
        ({}, {"layers__9__k_scale": torch.ones(1)}, "layers.9.k_scale"),
        ({}, {"layers__1__k_scale": torch.ones(2, 8)}, "layers.1.k_scale 8) 16)"),
        ({}, {"layers__1__k_scale": torch.ones(2, 16, dtype=torch.float16)}, "layers.1.k_scale torch.float16 float32"),
        ({}, {"layers__1__k_scale": torch.zeros(2, 16)}, "layers.1.k_scale zero"),
        ({}, {"layers__1__k_bias": torch.full((2, 16), torch.nan)}, "layers.1.k_bias NaN"),
    ],
)
def test_foreign_and_damaged_files_are_refused(calibration, tmp_path, metadata, tensors, parts):
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    rewrite(path, metadata, **tensors)
    with raises(FileFormatError, path, *parts.split()):
        Calibration.load(path)


def test_truncated_missing_and_plain_files_are_refused(calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    whole = path.read_bytes()
    for cut in (0, 7, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with raises(FileFormatError, path, "kvbits calibrate"):
            Calibration.load(path)
    with raises(FileFormatError, tmp_path / "nothing", "kvbits calibrate"):
        Calibration.load(tmp_path / "nothing")
    save_file({"x": torch.ones(1)}, path)
    with raises(FileFormatError, path, FORMAT):
        Calibration.load(path)


def test_reading_a_calibration_needs_no_transformers():
    code = "from kvbits.calibrate import Calibration, Ranges; import sys; print('transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
    with raises(AttributeError, "nothing", "Calibration"):
        _ = kvbits.calibrate.nothing


def test_where_no_file_can_be_is_said_before_anything_is_written(calibration, tmp_path):
    (tmp_path / "folder").mkdir()
    with raises(SpecError, "save", "folder"):
        calibration.save(tmp_path / "folder")
    with raises(SpecError, "nowhere"):
        calibration.save(tmp_path / "nowhere" / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_calibration_prints_in_a_line(calibration, tmp_path):
    assert repr(calibration) == f"<Calibration {calibration.id}: ? of tiny, 3 layers, 0 tokens>"
    calibration.info.update(scheme="mine", tokens=4096, text="novel-end")
    calibration.save(tmp_path / "c")
    assert (
        str(Calibration.load(tmp_path / "c"))
        == f"<Calibration {calibration.id}: mine of tiny, 3 layers, 4,096 tokens on novel-end, {tmp_path / 'c'}>"
    )


def test_a_scheme_that_needs_none_is_told_so(calibration):
    plain = Scheme(name="plain", key=QuantSpec.raw(), value=QuantSpec.raw())
    with raises(CalibrationError, "plain", "another"):
        calibration.fitted(config(), plain)
