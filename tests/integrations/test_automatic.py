"""The format that `kvbits_auto` takes."""

import pytest
import tiny
import torch

from kvbits import planner
from kvbits.calibrate import checked
from kvbits.calibrate.checked import Checked
from kvbits.errors import UnsupportedError
from kvbits.integrations.engine.automatic import choose
from kvbits.integrations.engine.served import LISTED
from kvbits.model_ref import ModelRef

EIGHT, FOUR, THREE, TWO = LISTED
CONTEXT = 8192


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny.model(dtype=torch.bfloat16).save_pretrained(found)
    return str(found)


@pytest.fixture
def model(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    return ModelRef(folder)


def keep(model, **passed):
    for preset, one in passed.items():
        checked.keep(model, preset, Checked(passed=one, kl=0.01, tokens=512, day="2026-11-27", command="kvbits check"))


def take(model, requests, memory=1 << 26, ranks=1):
    return choose(model, memory_bytes=memory, context=CONTEXT, requests=requests, raw_dtype="bfloat16", ranks=ranks)


def most(model, name, memory=1 << 26):
    rows = planner.plan(model.layers, [name], engine="vllm", context=CONTEXT, memory_bytes=memory).rows
    return next(x.max_batch for x in rows if x.scheme == name)


def test_the_most_accurate_that_holds_what_is_wanted(model):
    keep(model, klt4=True, klt3=True, klt2=True)
    holds = [most(model, name) for name in LISTED]
    assert holds == sorted(holds) and len({*holds}) == len(holds)
    for i, name in enumerate(LISTED):
        assert take(model, holds[i])[0] == name
        assert take(model, holds[i] + 1)[0] == LISTED[min(i + 1, len(LISTED) - 1)]
    _, why = take(model, holds[-1] + 1)
    assert "none holds" in why and f"{TWO} holds {holds[-1]:,}" in why


def test_only_formats_whose_check_passed_are_taken(model):
    keep(model, klt4=False, klt3=True)
    name, why = take(model, most(model, EIGHT) + 1)
    assert name == THREE
    assert f"{FOUR} fails its check" in why and f"{TWO} was not measured (kvbits check" in why
    assert take(model, 10**6)[0] == THREE


def test_where_nothing_was_measured_eight_bits_are_taken(model):
    name, why = take(model, 10**6)
    assert name == EIGHT and why.count("was not measured") == 3
    keep(model, int8_centered=False)
    with pytest.raises(UnsupportedError, match=f"finds no format .* {EIGHT} fails its check"):
        take(model, 1)


def test_ranks_share_the_heads(model):
    keep(model, klt4=True, klt3=True, klt2=True)
    alone = most(model, EIGHT)
    assert take(model, alone + 1)[0] == FOUR and take(model, alone + 1, ranks=2)[0] == EIGHT
