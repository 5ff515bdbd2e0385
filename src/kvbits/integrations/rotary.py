"""The rotary embedding of each layer of a Transformers model, read from the model itself.

    layers = with_rotary(layer_geometries(model.config), model)

Frequencies come from the buffers of the model's rotary module, so linear, llama3, yarn and longrope scaling are in
them. Gemma 3 has one set per layer type. The pairing of channels comes from turning unit vectors with the model's own
`apply_rotary_pos_emb`.

A cache that stores keys before the rotary embedding turns them back with these frequencies when a page closes, and
forth when it is read. So a key comes out as it went in, whatever the model did to it. A frequency that is off (dynamic
scaling, layers without rotary embedding) costs accuracy and never correctness.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import UnsupportedError
from ..geometry import layer_geometries, layer_types, text_config
from ..spec import LayerGeometry, Rotary, Scheme
from .refusals import refuses_turning


def stored_layers(layers: tuple[LayerGeometry, ...], scheme: Scheme, model: Any) -> tuple[LayerGeometry, ...]:
    """Return `layers` of a loaded Transformers model with their rotary embeddings as far as the scheme needs them (see
    `with_rotary`) or has use for them.
    """
    if scheme.needs_rotary:
        return with_rotary(layers, model)
    if not scheme.knows_rotary:
        return layers
    try:
        return with_rotary(layers, model)
    except UnsupportedError:  # means of keys then start as they are
        return layers


def with_rotary(layers: tuple[LayerGeometry, ...], model: Any) -> tuple[LayerGeometry, ...]:
    """Return `layers` of a loaded Transformers model with their rotary embeddings.

    Raises:
        UnsupportedError: the model has no rotary embedding, or one whose channels are not turned in pairs by position.
    """
    config = text_config(model.config)
    name = type(model).__name__
    if (how := refuses_turning(config)) is not None:
        raise UnsupportedError(
            f"{name} {how}, so its keys cannot be turned back; use a scheme without pre_rope and basis='calibrated'"
        )
    found = _frequencies(model)
    if not found:
        raise UnsupportedError(
            f"{name} has no rotary embedding, so its keys cannot be turned back; use a scheme without pre_rope and"
            " basis='calibrated'"
        )
    pairs = _pairs(model, name)
    kinds = layer_types(config)
    return tuple(
        dataclasses.replace(g, rotary=Rotary(inv_freq=found.get(kind, found[""]), pairs=pairs))
        for g, kind in zip(layers, kinds, strict=True)
    )


def _frequencies(model: Any) -> dict[str, tuple[float, ...]]:
    """Return radians per token by layer type; "" for any other."""
    found: dict[str, tuple[float, ...]] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if (
                not name.endswith("inv_freq")
                or name.endswith("original_inv_freq")
                or buffer.ndim != 1
                or "vision" in path
                or "visual" in path
            ):
                continue
            kind = name.removesuffix("inv_freq").rstrip("_")
            if path.endswith("_local"):
                kind = "sliding_attention"
            found.setdefault(kind, tuple(buffer.float().cpu().tolist()))
    if found and "" not in found:
        found[""] = found.get("full_attention", next(iter(found.values())))
    return found


def _pairs(model: Any, name: str) -> str:
    """Return which channels the model's own function turns together: "half" or "interleaved"."""
    apply = next(
        (
            f
            for m in model.modules()
            if hasattr(m, "layer_idx") and (f := getattr(sys.modules[type(m).__module__], "apply_rotary_pos_emb", None))
        ),
        None,
    )
    rotary = next((m for path, m in model.named_modules() if path.rpartition(".")[2] == "rotary_emb"), None)
    if apply is None or rotary is None:
        raise UnsupportedError(
            f"{name} turns its keys in a way kvbits cannot see; use a scheme without pre_rope and basis='calibrated'"
        )
    buffer = next(b for n, b in rotary.named_buffers(recurse=False) if n.endswith("inv_freq"))
    size = 2 * len(buffer)
    units = torch.eye(size, device=buffer.device)[None, None]
    position = torch.ones(1, 1, dtype=torch.long, device=buffer.device)
    kinds = getattr(rotary, "layer_types", None)
    with torch.no_grad():
        cos, sin = rotary(units[0], position, sorted(kinds)[0]) if kinds else rotary(units[0], position)
        angles = cos.expand(1, size, -1), sin.expand(1, size, -1)
        # Gemma 3n and 4 turn queries and keys one after the other
        alone = list(inspect.signature(apply).parameters)[1] == "cos"
        turned = apply(units, *angles)[0, 0] if alone else apply(units, units, *angles)[0][0, 0]
    if turned.shape == (size, size):
        for pairs, partner in (("half", size // 2), ("interleaved", 1)):
            if turned[0].nonzero().flatten().tolist() in ([0, partner], [0]) and turned[0, partner] != 0:
                return pairs
    raise UnsupportedError(
        f"{name} turns channels neither in halves nor in neighbours; use a scheme without pre_rope and"
        " basis='calibrated'"
    )


_layers = WeakIdKeyDictionary()


def layers_of(config: Any) -> tuple[LayerGeometry, ...]:
    """Return the layers of a model with their rotary embeddings, from its Transformers configuration alone:
    Transformers builds the model without weights, once for each configuration.

    Raises:
        UnsupportedError: as `with_rotary`, or a model that Transformers does not build.
    """
    if config not in _layers:
        try:
            _layers[config] = _built(config)
        except UnsupportedError as error:
            _layers[config] = str(error)  # the error itself would keep the configuration alive, by its traceback
            raise
    found: tuple[LayerGeometry, ...] | str = _layers[config]
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found


def _built(config: Any) -> tuple[LayerGeometry, ...]:
    from transformers import AutoModelForCausalLM

    text = text_config(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        kind = getattr(text, "model_type", type(text).__name__)
        raise UnsupportedError(
            f"Transformers does not build a {kind}, so its rotary embedding is unknown: {error}; use a scheme without a"
            " basis"
        ) from error
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if any(n.endswith("inv_freq") for n, _ in module.named_buffers(recurse=False)):
                with torch.device("cpu"):
                    setattr(parent, name, type(module)(text))
    return with_rotary(layer_geometries(config), model)
