"""Turns of keys from a page to the next, as both engines take them from a model's configuration."""

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, PretrainedConfig

from kvbits.integrations.engine.served import PAGE_SIZE
from kvbits.integrations.engine.turns import page_turn
from kvbits.quant.rotary import turned_by

CPU = torch.device("cpu")


@pytest.fixture
def config():
    return LlamaConfig(num_hidden_layers=3, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)


def test_a_page_turns_each_pair_of_channels_by_its_frequency(config):
    angles = PAGE_SIZE * 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
    keys = torch.randn(5, 64)
    first, second = keys.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    want = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(turned_by(keys, page_turn(config, 1, CPU)), want, atol=1e-4, rtol=0)


def test_layers_of_speculation_turn_as_the_last(config):
    assert torch.equal(page_turn(config, 7, CPU), page_turn(config, 2, CPU))


@pytest.mark.parametrize("config", [BloomConfig(n_layer=2), PretrainedConfig()], ids=["no positions", "unknown"])
@pytest.mark.parametrize("layer", [0, 5])
def test_keys_that_are_not_known_to_turn_do_not(config, layer):
    assert page_turn(config, layer, CPU) is None
