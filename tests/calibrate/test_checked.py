"""Findings of `kvbits check`, kept for engines that start."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import tiny
import torch
from messages import mentions

from kvbits import schemes
from kvbits.calibrate import checked
from kvbits.calibrate.checked import Checked
from kvbits.model_ref import ModelRef

FOUND = Checked(passed=True, kl=0.00152, tokens=1022, day="2026-11-27", command="kvbits check M --scheme klt4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny.model(dtype=torch.bfloat16).save_pretrained(found)
    tiny.tokenizer().save_pretrained(found)
    return str(found)


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    return tmp_path / "checks"


def test_it_is_found_by_the_weights_and_the_preset(folder, home):
    model = ModelRef(folder)
    assert checked.find(model, "klt4") is None
    checked.keep(model, "klt4", FOUND)
    assert checked.find(ModelRef(folder), "klt4") == FOUND and checked.find(model, "klt3") is None
    (file,) = home.iterdir()
    file.write_text("{")
    assert checked.find(model, "klt4") is None, "a damaged file is none"
    file.write_text(json.dumps(dataclasses.asdict(FOUND) | {"tokens": None}))
    assert checked.find(model, "klt4") is None, "nor does an engine die of one when it starts"


def test_predictions_that_are_not_numbers_are_kept_and_said(folder, home):
    model = ModelRef(folder)
    checked.keep(model, "klt4", dataclasses.replace(FOUND, passed=False, kl=math.nan))
    found = checked.find(model, "klt4")
    assert found is not None and math.isnan(found.kl) and not found.passed
    assert "nan" in checked.said(model, "klt4")


def test_a_preset_that_changed_is_not_measured(folder, home, monkeypatch):
    """Neither one with other fields nor one whose pages have other bytes."""
    model = ModelRef(folder)
    checked.keep(model, "klt2", FOUND)
    (file,) = home.iterdir()
    file.with_name(f"{checked.key_of(model)}-klt2.json").write_bytes(file.read_bytes())
    with monkeypatch.context() as other:
        other.setitem(schemes.PRESETS, "klt2", schemes.get("klt2", copies=()))
        assert checked.find(model, "klt2") is None
    with monkeypatch.context() as other:
        other.setattr(checked, "FORMATS_VERSION", checked.FORMATS_VERSION + 1)
        assert checked.find(model, "klt2") is None
    with monkeypatch.context() as other:
        other.setitem(schemes.PRESETS, "klt2", dataclasses.replace(schemes.get("klt2"), description="in other words"))
        assert checked.find(model, "klt2") == FOUND


def test_an_engine_says_what_was_measured_or_that_nothing_was(folder, home):
    config = ModelRef(folder).config
    unknown = checked.said(ModelRef(folder, config), "klt4")
    assert f"kvbits check {folder} --scheme klt4" in unknown
    checked.keep(ModelRef(folder), "klt4", FOUND)
    known = checked.said(ModelRef(folder, config), "klt4")
    assert mentions(known, "0.00152 nats", "1,022 tokens", "2026-11-27", "kvbits check M --scheme klt4")
    checked.keep(ModelRef(folder), "klt3", Checked(passed=False, kl=1.5, tokens=2, day="2026-11-27", command="c"))
    assert mentions(checked.said(ModelRef(folder, config), "klt3"), "fails", "2026-11-27")
    assert "kvbits check nobody/has-this-model" in checked.said(ModelRef("nobody/has-this-model", config), "klt4")


def test_weights_that_cannot_be_read_are_not_measured(folder, home, monkeypatch):
    def broken(model):
        raise OSError("gone")

    monkeypatch.setattr(checked, "key_of", broken)
    assert checked.find(ModelRef(folder), "klt4") is None


@pytest.mark.night
def test_the_command_keeps_it_unless_its_limits_are_others(folder, home):
    def run(*more):
        command = [sys.executable, "-m", "kvbits", "check", folder, "--scheme", "int8", "--threads", "1"]
        sizes = ["--length", "200", "--windows", "1", "--json"]
        done = subprocess.run([*command, *sizes, *more], capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout)

    run("--max-kl", "9")
    assert checked.find(ModelRef(folder), "int8") is None
    said = run()
    found = checked.find(ModelRef(folder), "int8")
    assert (found.passed, found.kl) == (said["passed"], said["overall"]["kl_mean"])
    assert found.command == f"kvbits check {folder} --scheme int8 --text novel --windows 1 --length 200"
