"""Turn of each layer's keys from a page to the next, for means of keys: `page_turn`."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...geometry import stored_at
from ...quant.rotary import turn_by
from ..rotary import layers_of
from .served import PAGE_SIZE


def page_turn(config: Any, layer: int, device: torch.device) -> torch.Tensor | None:
    """Return `Layer.turn` of a layer of the whole model.

    It is None for layers without a rotary embedding, and where Transformers does not tell the model's. Means then start
    as they are, which costs only accuracy. Layers of speculation behind the model's turn as its last one.

    Args:
        config: a Transformers configuration.
    """
    try:
        found = layers_of(config)[stored_at(config).get(layer, -1)]
    except UnsupportedError:
        return None
    return None if found.rotary is None else turn_by(found.rotary, found.head_dim, PAGE_SIZE).to(device)
