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

from ..calibrate.observe import watched_attention
from ..errors import CalibrationError
from ..geometry import stored_at

Seen = Callable[[int, str, torch.Tensor, torch.Tensor], None]


@contextlib.contextmanager
def watched(model: Any, seen: Seen, *, checkpointing: bool = False) -> Iterator[None]:
    """While open, every backward pass of `model` calls `seen(layer, "k" or "v", x, gradient)`, both [B, T, H, D].

    Args:
        checkpointing: recompute activations layer by layer in the backward pass instead of keeping them: memory of one
            layer, a third more time.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    was_training = model.training
    model.requires_grad_(False)
    model.enable_input_require_grads()
    if checkpointing:
        _checkpointing(model, "enable")({"use_reentrant": False})
        model.train()
        for m in model.modules():
            if isinstance(m, torch.nn.Dropout):
                m.eval()
    else:
        model.eval()
    stored = stored_at(model.config)

    def look(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]) -> None:
        if key.requires_grad and (place := stored.get(getattr(module, "layer_idx", -1))) is not None:
            for side, x in (("k", key), ("v", value)):
                at = x.detach().transpose(1, 2)
                x.register_hook(lambda slope, side=side, at=at: seen(place, side, at, slope.transpose(1, 2)))

    try:
        with watched_attention(model, look):
            yield
    finally:
        if checkpointing:
            _checkpointing(model, "disable")()
        model.disable_input_require_grads()
        for p in trained:
            p.requires_grad_(True)
        model.train(was_training)


def _checkpointing(model: Any, what: str) -> Callable[..., None]:
    """The model's method, by its new name where there is one (transformers >= 5.2x)."""
    return getattr(model, f"activation_checkpointing_{what}", None) or getattr(model, f"gradient_checkpointing_{what}")


@torch.enable_grad()
def backward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> float:
    """One backward pass of the next-token loss of `ids` [B, T]; the loss, in nats per token."""
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    if not bool(torch.isfinite(loss)):
        raise CalibrationError(
            f"the loss of a calibration prompt is {loss.item()}; load the model in bfloat16 or float32"
        )
    loss.backward()
    return float(loss.detach())
