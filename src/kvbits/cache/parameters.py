"""Parameters that the pages of a layer share: calibrated ones, the rotary embedding, the stored order of channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import SpecError
from ..ops.static import calibrated
from ..ops.static import check as check_tensors
from ..quant.basis import completed, for_copies
from ..quant.rotary import turn_by
from ..spec import CacheSpec


def check(spec: CacheSpec, static: list[dict[str, torch.Tensor]] | None) -> None:
    """Refuse a calibration that does not fit, or none where one is needed.

    Raises:
        SpecError: naming the layer and tensor.
    """
    if static is None:
        if spec.scheme.needs_calibration:
            raise SpecError(
                f"scheme {spec.scheme.name!r} needs calibrated parameters; run `kvbits calibrate` and pass the"
                " calibration"
            )
        return
    if not isinstance(static, (list, tuple)) or not all(isinstance(found, Mapping) for found in static):
        raise SpecError(
            "static must be a list with one dict of tensors for each layer, as Calibration.static is, got"
            f" {type(static).__name__}"
        )
    if len(static) != len(spec.layers):
        raise SpecError(f"calibration of {len(static)} layers for a cache of {len(spec.layers)}; calibrate this model")
    way_out = f"run `kvbits calibrate` for this model and scheme {spec.scheme.name!r}"
    for layer, (geometry, found) in enumerate(zip(spec.layers, static, strict=True)):
        for side, quant in zip("kv", spec.scheme.for_layer(layer, len(spec.layers)), strict=True):
            check_tensors(
                found, calibrated(quant, side, geometry.num_kv_heads, geometry.dim(side)), f"of layer {layer}", way_out
            )


def shared(
    spec: CacheSpec, static: list[dict[str, torch.Tensor]], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return, per layer what `PageStore.static` holds: the calibration, inverses of its bases, offsets and, for keys
    that are turned back, the rotary embedding's frequencies.

    Raises:
        SpecError: the geometry of such a layer has no rotary embedding.
    """
    found = []
    for layer, (geometry, tensors) in enumerate(zip(spec.layers, static, strict=True)):
        found.append(dict(tensors))
        if layer not in _turned(spec):
            continue
        if geometry.rotary is None:
            raise SpecError(
                f"scheme {spec.scheme.name!r} turns keys back by the rotary embedding, but layer {layer} has none in"
                " its geometry; build the cache with KVCache.for_model, give LayerGeometry(rotary=...), or use a"
                " scheme without pre_rope and basis='calibrated'"
            )
        inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32, device=device)
        found[-1] = completed(found[-1], inv_freq)
    return found


def by_pool(
    spec: CacheSpec, static: list[dict[str, torch.Tensor]], device: torch.device
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return per layer and pool what `PageStore.static` holds. Pages in the scheme's own specs and their copies share
    something, other pools nothing.

    Raises:
        SpecError: as `shared`.
    """
    found: list[dict[str, dict[str, torch.Tensor]]] = [{} for _ in spec.layers]
    known = shared(spec, static, device)
    for group in spec.groups:
        for layer in group.layers:
            found[layer] = {group.packed_pool: known[layer]}
            for pool, copies in zip(group.copy_pools, group.copies, strict=True):
                found[layer][pool] = for_copies(known[layer], group.key, copies.key)
    return found


def orders(spec: CacheSpec, device: torch.device) -> dict[int, torch.Tensor]:
    """Return the stored order of channels of the layers where it is not the model's."""
    found = {}
    for layer in _turned(spec):
        geometry = spec.layers[layer]
        order = geometry.rotary.order(geometry.head_dim) if geometry.rotary else ()
        if order != tuple(range(geometry.head_dim)):
            found[layer] = torch.tensor(order, device=device)
    return found


def turns(spec: CacheSpec, device: torch.device) -> dict[int, torch.Tensor]:
    """Return `PageStore.turn` of the layers that can use one: centred keys stored token by token, of a known rotary
    embedding.
    """
    found: dict[int, torch.Tensor] = {}
    for group in spec.groups:
        if group.token_local and group.key.has_mean and (rotary := group.geometry.rotary) is not None:
            turn = turn_by(rotary, group.geometry.head_dim, group.page_size)
            found |= dict.fromkeys(group.layers, turn.to(device))
    return found


def _turned(spec: CacheSpec) -> set[int]:
    """Return layers whose keys are turned back."""
    return {layer for group in spec.groups if group.key.needs_rotary for layer in group.layers}
