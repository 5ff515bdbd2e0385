"""What the pages of a layer share: calibrated scales, codebooks and bases, the rotary embedding, the stored order of channels."""

from __future__ import annotations

import torch

from ..errors import SpecError
from ..quant.basis import conditions, inverse
from ..quant.rotary import turn_by
from ..quant.rotation import rotated_turn
from ..spec import CacheSpec, LayerGeometry, LayerGroup, QuantSpec

MOST_CONDITION = 1e6
"""Of a basis: beyond it float32 products lose what codes keep."""


def wanted(spec: QuantSpec, side: str, geometry: LayerGeometry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the calibrated tensors that a side ("k", "v") of a layer needs."""
    shape = (geometry.num_kv_heads, *spec.scale_shape(0, geometry.head_dim)) if spec.static else ()
    names = {f"{side}_scale": shape} if spec.static else {}
    if spec.static and spec.has_bias:
        names[f"{side}_bias"] = shape
    if spec.has_codebook:
        names[f"{side}_codebook"] = (geometry.num_kv_heads, 2**spec.bits)
    if spec.basis == "klt":
        names[f"{side}_basis"] = (geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
    return names


def check(spec: CacheSpec, static: list[dict[str, torch.Tensor]] | None) -> None:
    """Refuse a calibration that does not fit, or none where one is needed.

    Raises:
        SpecError: naming the layer and tensor.
    """
    if static is None:
        if spec.scheme.needs_calibration:
            raise SpecError(f"scheme {spec.scheme.name!r} has static scales, codebooks or a basis; run `kvbits calibrate` and pass the calibration")
        return
    if len(static) != len(spec.layers):
        raise SpecError(f"calibration of {len(static)} layers for a cache of {len(spec.layers)}; calibrate this model")
    for layer, (geometry, found) in enumerate(zip(spec.layers, static, strict=True)):
        for side, quant in zip("kv", spec.scheme.for_layer(layer, len(spec.layers)), strict=True):
            for name, want in wanted(quant, side, geometry).items():
                if name not in found:
                    raise SpecError(f"calibration of layer {layer} has no {name}, which scheme {spec.scheme.name!r} needs; calibrate for this scheme")
                if tuple(found[name].shape) != want:
                    raise SpecError(f"{name} of layer {layer} has shape {tuple(found[name].shape)}, expected {want}; calibrate this model for this scheme")
                if name.endswith("_codebook") and not bool((found[name].diff() >= 0).all() and (found[name].abs() <= 1).all()):
                    raise SpecError(f"{name} of layer {layer} must hold ascending numbers in [-1, 1], as `kvbits calibrate` writes them")
                if name.endswith("_basis"):
                    _check_basis(found[name], f"{name} of layer {layer}")


def _check_basis(basis: torch.Tensor, what: str) -> None:
    """Refuse matrices [H, D, D] that cannot be inverted in float32."""
    found = conditions(basis)
    if not bool((found <= MOST_CONDITION).all()):
        head = int((found > MOST_CONDITION).nonzero()[0])
        raise SpecError(f"{what}, kv head {head}, has condition number {found[head].item():.3g}, above {MOST_CONDITION:g}; run `kvbits calibrate` again")


def shared(spec: CacheSpec, static: list[dict[str, torch.Tensor]], device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Per layer what `PageStore.static` holds: the calibration, inverses of its bases and, for keys that are turned back, the rotary embedding's frequencies.

    Raises:
        SpecError: the geometry of such a layer has no rotary embedding.
    """
    found = []
    for layer, (geometry, tensors) in enumerate(zip(spec.layers, static, strict=True)):
        found.append(dict(tensors))
        if (basis := tensors.get("k_basis")) is not None:
            found[-1]["k_inverse"] = inverse(basis).to(device)
        if layer in _turned(spec):
            if geometry.rotary is None:
                raise SpecError(
                    f"scheme {spec.scheme.name!r} turns keys back by the rotary embedding, but layer {layer} has none in its geometry; "
                    "build the cache with KVCache.for_model, give LayerGeometry(rotary=...), or use a scheme without pre_rope and basis='klt'"
                )
            found[-1]["k_inv_freq"] = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32, device=device)
    return found


def of_heads(tensors: dict[str, torch.Tensor], heads: tuple[int, ...], group: LayerGroup) -> dict[str, torch.Tensor]:
    """What pages that hold some kv heads of a layer share, as far as their specs, the group's, need it."""
    names = {*wanted(group.key, "k", group.geometry), *wanted(group.value, "v", group.geometry)}
    names |= {"k_inv_freq"} if group.key.needs_rotary else set()
    names |= {"k_inverse"} if group.key.basis == "klt" else set()
    return {name: x[list(heads)] if x.ndim > 1 else x for name, x in tensors.items() if name in names}


def orders(spec: CacheSpec, device: torch.device) -> dict[int, torch.Tensor]:
    """Stored order of channels of the layers where it is not the model's."""
    found = {}
    for layer in _turned(spec):
        geometry = spec.layers[layer]
        order = geometry.rotary.order(geometry.head_dim) if geometry.rotary else ()
        if order != tuple(range(geometry.head_dim)):
            found[layer] = torch.tensor(order, device=device)
    return found


def turns(spec: CacheSpec, device: torch.device) -> dict[int, torch.Tensor]:
    """`PageStore.turn` of the layers that can use one: centred keys stored token by token, of a known rotary embedding."""
    found: dict[int, torch.Tensor] = {}
    for group in spec.groups:
        if group.token_local and group.key.center and (rotary := group.geometry.rotary) is not None:
            turn = turn_by(rotary, group.geometry.head_dim, group.page_size)
            found |= dict.fromkeys(group.layers, (rotated_turn(turn) if group.key.rotated else turn).to(device))
    return found


def _turned(spec: CacheSpec) -> set[int]:
    """Layers with a kv head whose keys are turned back."""
    return {layer for group in spec.groups if group.key.needs_rotary for layer in group.layers}
