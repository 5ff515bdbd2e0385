"""The format that `kvbits_auto` takes."""

from contextlib import nullcontext

import pytest
import tiny
import torch
from messages import mentions, raises
from transformers import AutoModelForCausalLM

from kvbits import KVCache, planner, schemes
from kvbits.calibrate import calibrate, checked
from kvbits.calibrate.checked import Checked
from kvbits.errors import CalibrationError, SpecError, UnsupportedError
from kvbits.integrations import huggingface
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
    layers = planner.rank(model.layers, ranks)
    return choose(model, layers, memory_bytes=memory, context=CONTEXT, requests=requests, raw_dtype="bfloat16")


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
    assert mentions(why, TWO, f"{holds[-1]:,}")


def test_only_formats_whose_check_passed_are_taken(model):
    keep(model, klt4=False, klt3=True)
    name, why = take(model, most(model, EIGHT) + 1)
    assert name == THREE
    assert mentions(why, FOUR, TWO, "kvbits check")
    assert take(model, 10**6)[0] == THREE


def test_where_nothing_was_measured_eight_bits_are_taken(model):
    name, why = take(model, 10**6)
    assert name == EIGHT and why.count("was not measured") == 3
    keep(model, int8_centered=False)
    with raises(UnsupportedError, EIGHT, "kvbits check"):
        take(model, 1)


def test_ranks_share_the_heads(model):
    keep(model, klt4=True, klt3=True, klt2=True)
    alone = most(model, EIGHT)
    assert take(model, alone + 1)[0] == FOUR and take(model, alone + 1, ranks=2)[0] == EIGHT


def test_transformers_take_what_a_capacity_needs(model, folder, monkeypatch, capsys):
    """In the memory that is free, but for the share that a plan leaves to all else."""
    keep(model, klt4=False, klt3=True)
    loaded, sizes = AutoModelForCausalLM.from_pretrained(folder), {"batch_size": 3, "max_tokens": CONTEXT}
    memory = {
        name: planner.plan(model.layers, [name], context=CONTEXT, batch=3).rows[0].total_bytes / (1 - planner.RESERVE)
        for name in ("int8_centered", "klt4", "klt3")
    }
    assert memory["klt3"] < memory["klt4"] < memory["int8_centered"]
    for free, name, made in (
        (memory["int8_centered"] + 2, "int8_centered", nullcontext()),
        (memory["int8_centered"] - 2, "klt3", pytest.raises(CalibrationError)),  # its bases are not kept
    ):
        monkeypatch.setattr(huggingface, "free_bytes", lambda device, free=free: int(free))
        with made:
            cache = KVCache.for_model(loaded, "auto", calibrate=False, **sizes)
            assert cache.pages.spec.scheme.name == name and cache.pages.max_tokens == CONTEXT
        said = capsys.readouterr().err
        assert mentions(said, name, "klt4")


def test_transformers_take_a_calibration_for_the_formats_that_need_one(model, folder, monkeypatch):
    keep(model, klt3=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(3, 80, (4, 700), generator=torch.Generator().manual_seed(0))
    given = calibrate(loaded, list(tokens.split(1)), schemes.get("klt4"))
    least = planner.plan(model.layers, ["int8_centered"], context=CONTEXT).rows[0].total_bytes / (1 - planner.RESERVE)
    for free, name in ((least + 2, "int8_centered"), (least - 2, "klt3")):
        monkeypatch.setattr(huggingface, "free_bytes", lambda device, free=free: int(free))
        cache = KVCache.for_model(loaded, "auto", calibration=given, max_tokens=CONTEXT)
        assert cache.pages.spec.scheme.name == name
    with pytest.raises(CalibrationError):
        KVCache.for_model(loaded, "int8_centered", calibration=given)


@pytest.mark.parametrize(
    ("sizes", "free", "parts"), [({}, 1 << 30, ("max_tokens", "batch_size")), ({"max_tokens": 8}, 0, ("cpu", "scheme"))]
)
def test_transformers_choose_nothing_without_a_capacity_or_memory(folder, monkeypatch, sizes, free, parts):
    monkeypatch.setattr(huggingface, "free_bytes", lambda device: free)
    with raises(SpecError, *parts):
        KVCache.for_model(AutoModelForCausalLM.from_pretrained(folder), "auto", **sizes)
