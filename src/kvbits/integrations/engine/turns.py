"""How far each layer's keys turn from a page to the next, for means of keys: `page_turn`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import UnsupportedError
from ...geometry import stored_at
from ...quant.rotary import turn_by
from ..rotary import layers_of
from .served import PAGE_SIZE

_turns = WeakIdKeyDictionary()


def page_turn(config: Any, layer: int, device: torch.device) -> torch.Tensor | None:
    """Return `Layer.turn` of a layer of the whole model.

    It is None for layers without a rotary embedding, and where Transformers does not tell the model's. Means then start
    as they are, which costs only accuracy. Layers of speculation behind the model's turn as its last one.

    Args:
        config: a Transformers configuration, with which results are kept.
    """
    if config not in _turns:
        try:
            layers, stored = layers_of(config), stored_at(config)
        except UnsupportedError:
            layers, stored = (), {}
        _turns[config] = {
            i: None if g.rotary is None else turn_by(g.rotary, g.head_dim, PAGE_SIZE)
            for i, g in ((i, layers[at]) for i, at in stored.items())
        }
    turns: dict[int, torch.Tensor | None] = _turns[config]
    found = turns[layer] if layer in turns else turns.get(max(turns, default=-1))
    return None if found is None else found.to(device)
