"""Keys and values as a model writes them to a cache, and queries as attention reads them, in a forward pass without
gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import runs
from ..errors import CalibrationError
from ..geometry import stored_at, text_config
from ..integrations.masks import passed

NAME = "kvbits_observe"
Observer = Callable[[int, torch.Tensor, torch.Tensor], None]
_readers: list[Observer] = []


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    if _readers:
        _readers[-1](module.layer_idx, query.transpose(1, 2), key.transpose(1, 2))
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class ObservingCache(DynamicCache):
    """Shows each layer's keys and values to `observe(layer, k, v)`, [B, T, H, D] each, and stores nothing: for one
    forward pass.
    """

    def __init__(self, config: Any, observe: Observer) -> None:
        super().__init__(config=config)
        self.observe = observe

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


@contextlib.contextmanager
def in_fast_dtype(model: Any) -> Iterator[None]:
    """`model` with float32 weights while open, if it lies in 16 bits on a CPU that has no instructions for them, which
    multiplies float32 ten times as fast. Left as it is where the weights are of other classes (quantized ones) or half
    of the free memory does not hold the copies.
    """
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    small = {t: t.data for t in tensors if t.dtype in (torch.bfloat16, torch.float16)}
    known = all(type(x) is torch.Tensor and x.device.type == "cpu" for x in small.values())
    if not known or runs.has_bfloat16() or 2 * sum(4 * x.numel() for x in small.values()) > _free_memory():
        small = {}
    try:
        for t, x in small.items():
            t.data = x.float()
        yield
    finally:
        for t, x in small.items():
            t.data = x


def _free_memory() -> int:
    """Bytes that programs may take; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return 0


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, observe: Observer, layers: set[int]) -> None:
    """One forward pass of ids [B, T], up to the language head, whose logits would be the largest tensor of all.

    Layers are counted as `layer_geometries` does.

    Raises:
        CalibrationError: a layer of `layers` that wrote nothing.
    """
    visited: set[int] = set()
    cache = ObservingCache(text_config(model.config), _noting(observe, visited, stored_at(model.config)))
    body = _backbone(model)
    body(
        input_ids=ids.to(model.device),
        attention_mask=None if mask is None else mask.to(model.device),
        **passed(body, cache),
        use_cache=True,
    )
    if missing := layers - visited:
        raise CalibrationError(
            f"layers {sorted(missing)[:4]} of {type(model).__name__} wrote nothing to the cache; kvbits cannot"
            " calibrate this model"
        )


@torch.no_grad()
def forward_with_queries(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None, observe: Observer, layers: set[int]
) -> None:
    """The same, showing `observe(layer, q, k)`, [B, T, Hq, D] and [B, T, H, D], as attention has them.

    Raises:
        CalibrationError: a layer of `layers` whose attention the model does not look up in Transformers' registry.
    """
    visited: set[int] = set()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _readers.append(_noting(observe, visited, stored_at(model.config)))
    try:
        _backbone(model)(
            input_ids=ids.to(model.device),
            attention_mask=None if mask is None else mask.to(model.device),
            use_cache=False,
        )
    finally:
        _readers.pop()
        model.set_attn_implementation(before)
    if missing := layers - visited:
        raise CalibrationError(
            f"the queries of layers {sorted(missing)[:4]} of {type(model).__name__} cannot be seen; kvbits cannot"
            " calibrate a basis for this model"
        )


def _backbone(model: Any) -> Any:
    """The model up to the language head, whose logits would be the largest tensor of all."""
    return getattr(model, "base_model", model)


def _noting(observe: Observer, visited: set[int], stored: dict[int, int]) -> Observer:
    def seen(layer: int, a: torch.Tensor, b: torch.Tensor) -> None:
        if (place := stored.get(layer)) is not None:  # None: it reads the keys and values of another
            visited.add(place)
            observe(place, a, b)

    return seen
