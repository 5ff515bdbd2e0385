"""TurboQuant's recipe (arXiv:2504.19874, its MSE form), simulated in a dense cache: a peer for studies, with no packed
bytes and no kernel.

Each token's key and value of a head is a norm in float16 and a direction, turned by a Hadamard matrix with fixed random
signs, whose numbers are then nearly normal; each is rounded to the nearest level of the Lloyd-Max codebook of the
normal distribution. The first tokens and the newest stay exact as in the klt presets, so that only the code differs;
TurboQuant itself keeps none.
"""

from __future__ import annotations

from typing import Any

import torch
from peers import lloyd_max
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvbits import schemes
from kvbits.evaluate.caches import CacheFactory
from kvbits.geometry import layer_geometries
from kvbits.quant.basis import hadamard

LIKE = schemes.PRESETS["klt4"]
NAMES = {f"turboquant{bits}": bits for bits in (4, 3, 2)}


class TurboQuantLayer(DynamicLayer):
    """A stock layer whose older tokens are replaced by what the recipe would give back."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.levels, self.done = lloyd_max(bits), LIKE.num_sink_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        due = keys.shape[2] - LIKE.residual_length
        if due <= self.done:
            return keys, values
        where = slice(self.done, due)
        self.keys, self.values, self.done = keys.clone(), values.clone(), due
        for x in (self.keys, self.values):
            x[:, :, where] = self._rounded(x[:, :, where].float()).to(x.dtype)
        return (self.keys, self.values) if key_states.shape[2] == 1 else (keys, values)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        d = x.shape[-1]
        signs = (torch.rand(d, generator=torch.Generator().manual_seed(d)) < 0.5).to(x) * 2 - 1
        norm = x.norm(dim=-1, keepdim=True).half().float()
        turned = hadamard(x * signs) / norm.clamp(min=1e-6) * d**0.5
        levels = self.levels.to(x)
        code = torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2)
        return hadamard(levels[code] * norm / d**0.5) * signs


def factory(model: Any, name: str) -> CacheFactory:
    """What makes caches of `turboquant4`, `turboquant3` or `turboquant2` for a model."""
    bits, layers = NAMES[name], layer_geometries(model.config)
    numbers = sum(g.num_kv_heads * g.head_dim for g in layers)
    norms = sum(16 * g.num_kv_heads for g in layers) / numbers
    info = {"bits_per_element": bits + norms}
    return CacheFactory(
        name, "simulated", lambda batch, tokens: Cache(layers=[TurboQuantLayer(bits) for _ in layers]), info
    )
