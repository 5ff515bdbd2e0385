"""Calibrations in the user's cache folder: found by a model's weights, made once, by whoever comes first."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tiny
import torch
from full_disk import full_disk
from messages import mentions, raises, warns
from nightly import at_night

from kvbits import files, schemes
from kvbits.calibrate import kept
from kvbits.errors import CalibrationError, KvbitsWarning, SpecError
from kvbits.evaluate.calibrator import fitting, origin
from kvbits.files import cache_folder, cache_folders
from kvbits.geometry import load_config
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.models import load_model
from kvbits.model_ref import ModelRef

SCHEMES = ("klt4", "klt3", "klt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny.model(dtype=torch.bfloat16).save_pretrained(found)
    tiny.tokenizer().save_pretrained(found)
    return str(found)


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    return tmp_path / "calibrations"


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    """A cache folder with the model's calibration in it."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBITS_CACHE", str(place))
        KVCache.for_model(load_model(folder)[0], "klt4")
    return place


def refuse(*_):
    raise AssertionError("nothing is to be made")


def test_one_key_for_files_and_models_in_any_dtype(folder, tmp_path):
    keys = {kept.key_of(ModelRef.of(load_model(folder, dtype=dtype)[0])) for dtype in ("float32", "bfloat16")}
    assert keys == {kept.key_of(ModelRef(folder))}
    with torch.device("meta"):  # vLLM makes layers with a GPU as the default device
        assert keys == {kept.key_of(ModelRef(folder))}
    model = load_model(folder)[0]
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 3] += 0.5
    keys.add(kept.key_of(ModelRef.of(model)))
    model = load_model(folder)[0]
    model.config.rope_parameters["rope_theta"] = 77.0
    keys.add(kept.key_of(ModelRef.of(model)))
    assert len(keys) == 3
    assert kept.key_of(ModelRef(tmp_path, load_config(folder))) is None


def test_keys_tell_weights_apart_whatever_layers_are_called():
    """GPT-2 has "h", DBRX "blocks", BERT "layer": with no row of them the configuration alone would be the key."""
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=50)
    assert len({kept.key_of(ModelRef.of(transformers.GPT2LMHeadModel(config))) for _ in range(2)}) == 2


def test_the_first_cache_makes_it_and_the_others_find_it(folder, home, monkeypatch, capsys):
    model, _ = load_model(folder)
    KVCache.for_model(model, "klt3")
    (file,) = home.glob("*.safetensors")
    assert mentions(capsys.readouterr().err, "klt", file)
    assert file.stem == kept.key_of(ModelRef.of(model))
    monkeypatch.setattr(kept, "measure", refuse)
    again, _ = load_model(folder, dtype="float32")
    for name in SCHEMES:
        cache = KVCache.for_model(again, name, calibrate=False)
        given = KVCache.for_model(again, name, calibration=kept.Calibration.load(file))
        ids = torch.arange(3, 83)[None]
        assert torch.equal(again(ids, past_key_values=cache).logits, again(ids, past_key_values=given).logits)
    assert not capsys.readouterr().err.count("once")


def test_a_calibration_that_was_just_made_says_where_it_lies(folder, home):
    model, _ = load_model(folder)
    first, second = (kept.of_model(ModelRef.of(model), schemes.get("klt4")) for _ in range(2))
    (file,) = home.glob("*.safetensors")
    assert first.path == second.path == str(file) and str(file) in origin(first)
    assert "None" not in origin(dataclasses.replace(first, path=None))


def test_nothing_is_made_where_that_is_said(folder, home):
    with raises(CalibrationError, folder, "kvbits calibrate", "calibration="):
        KVCache.for_model(load_model(folder)[0], "klt3", calibrate=False)
    with raises(CalibrationError, folder, "kvbits calibrate"):
        kept.of_files(ModelRef(folder), schemes.get("klt3"), make=False)
    assert not list(home.glob("*")) if home.exists() else True


def test_a_model_without_a_tokenizer_is_told_the_way_out(home):
    with raises(CalibrationError, "LlamaForCausalLM", "calibration=kvbits.calibrate.calibrate(model, prompts, scheme)"):
        KVCache.for_model(tiny.model(), "klt4")


def test_a_damaged_file_is_made_again(folder, made, home, capsys):
    home.mkdir()
    (file,) = (made / "calibrations").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 0xFF
    (home / file.name).write_bytes(data)
    KVCache.for_model(load_model(folder)[0], "klt2")
    assert mentions(capsys.readouterr().err, home / file.name, "klt")
    assert kept.Calibration.load(home / file.name).id == kept.Calibration.load(file).id


def calibrate(folder, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "kvbits", "calibrate", folder, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )


@pytest.mark.night
def test_two_processes_at_once_make_one(folder, home):
    both = [calibrate(folder) for _ in range(2)]
    ends = [one.communicate(timeout=120) for one in both]
    assert [one.returncode for one in both] == [0, 0], ends
    assert sum("bases ..." in err for _, err in ends) == 1
    assert len({out.split("(id ")[1] for out, _ in ends}) == 1
    assert len(list(home.glob("*.safetensors"))) == 1


@pytest.mark.night
def test_one_that_is_killed_leaves_nothing_broken(folder, home):
    process = calibrate(folder)
    until = time.monotonic() + 60
    while not list(home.glob("*.lock")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (lock,) = home.glob("*.lock")
    left = home / f"{lock.name.removesuffix('.lock')}.999.tmp"
    left.write_bytes(b"half of a file")
    KVCache.for_model(load_model(folder)[0], "klt4")
    assert not left.exists() and len(list(home.glob("*.safetensors"))) == 1


def test_an_engine_has_it_made_by_a_process_of_its_own(folder, home):
    ref = ModelRef(folder)
    found = kept.of_files(ref, schemes.for_layers("klt2", ref.layers))
    assert found.info["scheme"] == "klt2" and found.path is not None and found.path.startswith(str(home))
    with raises(CalibrationError, home / "nothing", "say how"):
        kept.of_files(ModelRef(home / "nothing", ref.config), schemes.get("klt2"), way_out="; say how")


@pytest.mark.night
def test_a_home_that_takes_no_files(folder, tmp_path, monkeypatch):
    """kvbits reads what lies there, and puts what it must make among temporary files of this user alone."""
    wall = tmp_path / "wall"
    wall.write_text("no folder")
    monkeypatch.setenv("KVBITS_CACHE", str(wall / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    KVCache.for_model(load_model(folder)[0], "klt4")
    place = tmp_path / "temporary" / f"kvbits-{os.getuid()}"
    assert len(list((place / "calibrations").glob("*.safetensors"))) == 1 and place.stat().st_mode & 0o077 == 0
    place.chmod(0o777)
    with raises(SpecError, "KVBITS_CACHE"):
        cache_folder("calibrations")
    assert cache_folders("calibrations")[0] == wall / "cache" / "calibrations"


@pytest.mark.parametrize("place", ["full", *at_night("no folder")])
def test_a_calibration_that_no_disk_keeps_is_used(folder, home, tmp_path, monkeypatch, place):
    model = load_model(folder)[0]
    if place == "no folder":
        (wall := tmp_path / "wall").write_text("no folder")
        monkeypatch.setenv("KVBITS_CACHE", str(wall / "cache"))
        monkeypatch.setattr("tempfile.tempdir", str(wall))
    with (
        full_disk() if place == "full" else contextlib.nullcontext(files._not_kept.clear()),
        warns(KvbitsWarning, "calibrations", "KVBITS_CACHE"),
        torch.no_grad(),
    ):
        cache = KVCache.for_model(model, "klt4")
        model(torch.arange(3, 60)[None], past_key_values=cache)
    assert cache.pages.seq_lens == [57] and not list(home.glob("*.safetensors"))


@pytest.mark.night
def test_the_command_keeps_it_too(folder, home):
    out, err = calibrate(folder, "--scheme", "klt4,klt3,klt2").communicate(timeout=120)
    (file,) = home.glob("*.safetensors")
    assert mentions(" ".join(out.split()), file, kept.Calibration.load(file).id), err
    written = file.stat().st_mtime_ns
    out, err = calibrate(folder).communicate(timeout=120)
    assert mentions(" ".join(out.split()), file) and "bases" not in err and file.stat().st_mtime_ns == written
    process = calibrate(folder, "--text", "novel", "--windows", "16", "--length", "512")
    refusal = process.communicate(timeout=120)[1]
    assert mentions(refusal, "text", "length", "novel-end+code", "16 windows", file, "--force", "--out")
    assert process.returncode and file.stat().st_mtime_ns == written
    calibrate(folder, "--force", "--text", "novel").communicate(timeout=120)
    assert file.stat().st_mtime_ns != written and kept.Calibration.load(file).info["text"] == "novel"
    process = calibrate(folder, "--scheme", "int8_static")
    assert mentions(process.communicate()[1], "--out FILE.safetensors", "int8_static")
    assert process.returncode


def test_a_calibration_is_taken_from_its_file(folder, made, home):
    (file,) = (made / "calibrations").glob("*.safetensors")
    model = load_model(folder)[0]
    assert KVCache.for_model(model, "klt4", calibration=file, calibrate=False).pages.spec.scheme.name == "klt4"
    with raises(CalibrationError, "calibration=7", "Calibration"):
        KVCache.for_model(model, "klt4", calibration=7)


@pytest.mark.night
def test_eval_takes_what_is_kept_where_it_saw_no_text_that_is_measured_on(folder, made, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBITS_CACHE", str(made))
    (file,) = (made / "calibrations").glob("*.safetensors")
    wanted = fitting([kept.Calibration.load(file)], load_model(folder)[0].config, schemes.PRESETS["klt3"])

    def evaluated(out, *more):
        command = [
            sys.executable,
            "-m",
            "kvbits",
            "eval",
            folder,
            "--schemes",
            "klt3",
            "--out",
            str(tmp_path / out),
            "--name",
            "m",
            "--threads",
            "1",
            *more,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / out / "m").glob("*/klt3.json")
        return done.stderr, json.loads(path.read_text())

    said, found = evaluated("a", "--tasks", "copying", "--contexts", "300")
    assert mentions(said, "klt3", "novel-end+code", file) and "bases" not in said
    assert found["settings"]["calibration"] == found["info"]["calibration"]["id"] == wanted.id
    said, found = evaluated("b", "--length", "300", "--windows", "1")
    assert "bases" not in said and found["settings"]["calibration"] == wanted.id, "the novel's other half is unseen"
    assert next(iter(found["items"])).startswith("novel-start@")
    said, found = evaluated("d", "--length", "300", "--windows", "1", "--text", "code")
    assert mentions(said, "klt3", "code", "--calibration-text") and "saw code" not in said
    assert found["info"]["calibration"]["text"] == "novel-end"
    shutil.copytree(tmp_path / "d" / "m" / "calibration", tmp_path / "c" / "m" / "calibration")
    said, found = evaluated("c", "--tasks", "copying", "--contexts", "300")
    assert found["info"]["calibration"]["text"] == "novel-end" and "calibrated before" not in said, (
        "an earlier run's own goes on"
    )


@pytest.mark.night
def test_one_calibration_serves_eval_check_and_calibrate(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path / "home"))

    def run(*command, code=0):
        made = [sys.executable, "-m", "kvbits", *command, "--threads", "1"]
        done = subprocess.run(made, capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, code), done.stderr
        return done.stderr

    sizes = ("--length", "1300", "--windows", "1")  # longer than what klt3 reads from copies
    said = run("check", folder, "--scheme", "klt3", *sizes, code=1)
    assert said.count("bases ...") == 1 and "kept in" in said
    (file,) = (tmp_path / "home" / "calibrations").glob("*.safetensors")
    written = file.stat().st_mtime_ns
    for again in (
        ("check", folder, "--scheme", "klt2", *sizes),
        ("eval", folder, "--schemes", "klt4", *sizes, "--out", str(tmp_path / "out")),
        ("calibrate", folder),
    ):
        assert "bases" not in run(*again, code=1), again
    assert file.stat().st_mtime_ns == written
    said = run("check", folder, "--scheme", "klt4", *sizes, "--text", "code", code=1)
    assert "bases ..." in said and mentions(said, "klt4", "code", "--calibration-text")
