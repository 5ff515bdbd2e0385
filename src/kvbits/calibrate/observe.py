"""Keys and values as a model writes them to a cache, in a forward pass without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from ..errors import CalibrationError
from ..geometry import text_config

Observer = Callable[[int, torch.Tensor, torch.Tensor], None]


class ObservingCache(DynamicCache):
    """Shows each layer's keys and values to `observe(layer, k, v)`, [B, T, H, D] each, and stores nothing: for one forward pass."""

    def __init__(self, config: Any, observe: Observer) -> None:
        super().__init__(config=config)
        self.observe = observe

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.observe(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return key_states, value_states


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """`model` in evaluation mode while open."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, observe: Observer, layers: set[int]) -> None:
    """One forward pass of ids [B, T], up to the language head, whose logits would be the largest tensor of all.

    Raises:
        CalibrationError: a layer of `layers` that wrote nothing.
    """
    visited: set[int] = set()

    def seen(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        visited.add(layer)
        observe(layer, k, v)

    backbone = getattr(model, "base_model", model)
    cache = ObservingCache(text_config(model.config), seen)
    backbone(input_ids=ids.to(model.device), attention_mask=None if mask is None else mask.to(model.device), past_key_values=cache, use_cache=True)
    if missing := layers - visited:
        raise CalibrationError(f"layers {sorted(missing)[:4]} of {type(model).__name__} wrote nothing to the cache; kvbits cannot calibrate this model")
