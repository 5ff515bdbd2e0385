"""A scheme to calibrate on prompts, and keys and values as its pages hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..quant.rotary import turn
from ..spec import LayerGeometry, QuantSpec, Scheme

Prompt = tuple[torch.Tensor, torch.Tensor | None]
"""Ids [B, T], attention mask [B, T] or None."""
Place = tuple[int, str]
"""Layer, and side: "k" or "v"."""


@dataclass(frozen=True)
class Target:
    """A scheme to calibrate.

    Attributes:
        layers: the model's geometry, with rotary embeddings where the scheme needs them.
        tokens: for each prompt, bool [B, T]: tokens to look at.
        levels: of codebooks, what is collected (`literature.histograms`).
    """

    scheme: Scheme
    layers: tuple[LayerGeometry, ...]
    skip: int
    tokens: list[torch.Tensor]
    levels: dict[Place, Any] = field(default_factory=dict)

    def spec(self, place: Place) -> QuantSpec:
        return self.scheme.for_layer(place[0], len(self.layers))["kv".index(place[1])]


def as_stored(x: torch.Tensor, geometry: LayerGeometry, spec: QuantSpec) -> torch.Tensor:
    """Return keys or values [B, T, H, D] of tokens 0 to T - 1 as pages store them: turned back, channels in stored
    order.

    Also for gradients.
    """
    if not spec.pre_rope:
        return x
    assert geometry.rotary is not None
    order = torch.tensor(geometry.rotary.order(geometry.head_dim), device=x.device)
    inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32)
    return turn(x[..., order].float().transpose(1, 2), torch.arange(x.shape[1]), inv_freq, back=True).transpose(1, 2)
