"""The engine of examples/minimal_engine.py gives the tokens that Transformers gives with kvbits' cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import model

from kvbits import KVCache, schemes

EXAMPLE = Path(__file__).parents[2] / "examples/minimal_engine.py"
PROMPTS = {"short": list(range(3, 40)), "long": [3 + i * i % 70 for i in range(150)]}
NEW = 90


@pytest.fixture(scope="module")
def engine():
    spec = importlib.util.spec_from_file_location("minimal_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("scheme", ["raw", "int8", "int8_centered"])
def test_its_tokens_are_those_of_transformers(scheme, engine):
    lm = model()
    made = engine.Engine(lm, scheme, max_batch=2, max_tokens=256)
    for name, prompt in PROMPTS.items():
        made.add(name, prompt)
    for _ in range(NEW - 1):
        made.step()
    same = schemes.get("raw") if scheme == "raw" else schemes.get(scheme, token_local=True, residual_length=0)
    for name, prompt in PROMPTS.items():
        want = lm.generate(
            torch.tensor([prompt]),
            past_key_values=KVCache.for_model(lm, same),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
        assert made.tokens[name] == want[0].tolist()
        assert len(set(made.tokens[name][-NEW:])) > 5


def test_pages_are_taken_as_they_fill(engine):
    made = engine.Engine(model(), max_batch=2, max_tokens=128)
    made.add("a", PROMPTS["short"])
    assert len(made.tables["a"]) == 1 and len(made.free) == 3
    for _ in range(64 - len(PROMPTS["short"])):
        made.step()
    assert len(made.tables["a"]) == 1
    made.step()
    assert len(made.tables["a"]) == 2 and len({*made.tables["a"], *made.free}) == 4
