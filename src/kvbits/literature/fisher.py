"""Diagonal Fisher information of cached keys and values: the squared gradient of the loss at what a cache stores.

The gradient is taken at the tensors that attention reads, before kv heads are repeated, so with grouped-query attention
it sums over the query heads of a kv head by itself. Sources: KVQuant, arXiv:2401.18079, section 3.4; SqueezeLLM,
arXiv:2306.07629.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..calibrate.observe import differentiable, watched_attention
from ..errors import CalibrationError
from ..geometry import stored_at

Seen = Callable[[int, str, torch.Tensor, torch.Tensor], None]


@contextlib.contextmanager
def watched(model: Any, seen: Seen, *, checkpointing: bool = False) -> Iterator[None]:
    """Call `seen(layer, "k" or "v", x, gradient)` in every backward pass of `model` while open, both [B, T, H, D].

    Args:
        checkpointing: see `differentiable`.
    """
    stored = stored_at(model.config)

    def look(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]) -> None:
        if key.requires_grad and (place := stored.get(getattr(module, "layer_idx", -1))) is not None:
            for side, x in (("k", key), ("v", value)):
                at = x.detach().transpose(1, 2)
                x.register_hook(lambda slope, side=side, at=at: seen(place, side, at, slope.transpose(1, 2)))

    with differentiable(model, checkpointing=checkpointing), watched_attention(model, look):
        yield


@torch.enable_grad()
def backward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> float:
    """Run one backward pass of the next-token loss of `ids` [B, T]; the loss, in nats per token."""
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    if not bool(torch.isfinite(loss)):
        raise CalibrationError(
            f"the loss of a calibration prompt is {loss.item()}; load the model in bfloat16 or float32"
        )
    loss.backward()
    return float(loss.detach())
