"""Keys and values as a model writes them to a cache, and queries as attention reads them, in a forward pass without
gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, EncoderDecoderCache

from .. import runs
from ..errors import CalibrationError
from ..geometry import stored_at, text_config
from ..integrations.masks import passed
from ..integrations.placement import free_bytes, input_device

Observer = Callable[[int, torch.Tensor, torch.Tensor], None]
Look = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]
Returned = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any], torch.Tensor], None]


@contextlib.contextmanager
def watched_attention(model: Any, look: Look | None = None, returned: Returned | None = None) -> Iterator[None]:
    """Show `look(module, query, key, value, arguments)`, while open, what each attention function of `model` is given,
    [B, H, T, D] each. `returned` sees the same and then the output [B, T, H, D]. The functions, the masks and
    everything else stay the model's own.
    """
    entry = {id(m) for m in model.modules()}, look, returned
    _watching.append(entry)
    AttentionInterface.get_interface, AttentionInterface.__getitem__ = _watched_default, _watched_item
    try:
        yield
    finally:
        _watching.remove(entry)
        if not _watching:
            AttentionInterface.get_interface = _get_interface
            del AttentionInterface.__getitem__


_watching: list[tuple[set[int], Look | None, Returned | None]] = []
_get_interface = AttentionInterface.get_interface


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        watching = [entry for entry in _watching if id(module) in entry[0]]
        for _, look, _ in watching:
            if look is not None:
                look(module, query, key, value, kwargs)
        result = function(module, query, key, value, *args, **kwargs)
        for *_, returned in watching:
            if returned is not None:
                returned(module, query, key, value, kwargs, result[0])
        return result

    return attend


def _watched_default(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return the watched default, as models pass the function that "eager" means."""
    return _get_interface(self, name, _watched(default))


def _watched_item(self: AttentionInterface, name: str) -> Callable[..., Any]:
    return _watched(super(AttentionInterface, self).__getitem__(name))


class ObservingCache(DynamicCache):
    """A cache that shows each layer's keys and values to `observe(layer, k, v)`, [B, T, H, D] each, and stores nothing:
    for one forward pass.

    Attributes:
        latest: the layer that came last, and its keys as the model uses them.
    """

    def __init__(self, config: Any, observe: Observer) -> None:
        super().__init__(config=config)
        self.observe = observe
        self.latest: tuple[int, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.latest = layer_idx, key_states
        self.observe(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return key_states, value_states


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Keep `model` in evaluation mode while open."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def differentiable(model: Any, *, checkpointing: bool = False) -> Iterator[None]:
    """Keep `model` in evaluation mode while open, with gradients of activations and none of weights.

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
    try:
        yield
    finally:
        if checkpointing:
            _checkpointing(model, "disable")()
        model.disable_input_require_grads()
        for p in trained:
            p.requires_grad_(True)
        model.train(was_training)


def _checkpointing(model: Any, what: str) -> Callable[..., None]:
    """Return the model's method, by its new name where there is one (transformers >= 5.2x)."""
    return getattr(model, f"activation_checkpointing_{what}", None) or getattr(model, f"gradient_checkpointing_{what}")


@contextlib.contextmanager
def in_fast_dtype(model: Any) -> Iterator[None]:
    """Keep `model` with float32 weights while open, if it lies in 16 bits on a CPU that has no instructions for them,
    which multiplies float32 ten times as fast. Left as it is where the weights are of other classes (quantized ones) or
    half of the free memory does not hold the copies.
    """
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    small = {t: t.data for t in tensors if t.dtype in (torch.bfloat16, torch.float16)}
    known = all(type(x) is torch.Tensor and x.device.type == "cpu" for x in small.values())
    free = free_bytes(torch.device("cpu"))
    if not known or runs.has_bfloat16() or 2 * sum(4 * x.numel() for x in small.values()) > free:
        small = {}
    try:
        for t, x in small.items():
            t.data = x.float()
        yield
    finally:
        for t, x in small.items():
            t.data = x


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, observe: Observer, layers: set[int]) -> None:
    """Run one forward pass of ids [B, T], up to the language head, whose logits would be the largest tensor of all.

    Layers are counted as `layer_geometries` does. A model with an encoder is given the same ids on both sides.

    Raises:
        CalibrationError: a layer of `layers` that wrote nothing, or a model that wants more than ids.
    """
    visited: set[int] = set()
    _pass(model, ids, mask, ObservingCache(text_config(model.config), _noting(observe, visited, model)))
    if missing := layers - visited:
        raise CalibrationError(
            f"layers {sorted(missing)[:4]} of {type(model).__name__} wrote nothing to the cache; kvbits cannot"
            " calibrate this model"
        )


@torch.no_grad()
def forward_with_queries(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None, observe: Observer, layers: set[int]
) -> None:
    """Run the same, showing `observe(layer, q, k)`, [B, T, Hq, D] and [B, T, H, D], as attention has them.

    Raises:
        CalibrationError: a layer of `layers` whose attention the model does not look up in Transformers' registry, or a
            model that wants more than ids.
    """
    visited: set[int] = set()
    noting = _noting(observe, visited, model)
    cache = ObservingCache(text_config(model.config), lambda *_: None)

    def look(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]) -> None:
        # others are an encoder's, of its output, or of a layer that reads the keys of another
        if cache.latest is not None and key is cache.latest[1]:
            noting(cache.latest[0], query.transpose(1, 2), key.transpose(1, 2))
            cache.latest = None

    with watched_attention(model, look):
        _pass(model, ids, mask, cache)
    if missing := layers - visited:
        raise CalibrationError(
            f"the queries of layers {sorted(missing)[:4]} of {type(model).__name__} cannot be seen; kvbits cannot"
            " calibrate a basis for this model"
        )


def _pass(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache) -> None:
    """Run one forward pass, as `generate` begins one, up to the language head.

    Raises:
        CalibrationError: the model wants more than ids.
    """
    body, device = getattr(model, "base_model", model), input_device(model)
    ids, mask = ids.to(device), None if mask is None else mask.to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise CalibrationError(
            f"{type(model).__name__} takes {model.main_input_name}, and kvbits calibrates on texts alone; take a scheme"
            " that needs no calibration, such as int4"
        )
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    body(**inputs, **passed(body, cache), use_cache=True)


def _noting(observe: Observer, visited: set[int], model: Any) -> Observer:
    stored = stored_at(model.config)

    def seen(layer: int, a: torch.Tensor, b: torch.Tensor) -> None:
        if (place := stored.get(layer)) is not None:  # None: it reads the keys and values of another
            visited.add(place)
            observe(place, a, b)

    return seen
