"""A scheme that was fitted to one model, layer by layer: it says which, and fits no other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..errors import SpecError
from .cache import LayerGeometry
from .codec import serialisable
from .scheme import Scheme


@serialisable
@dataclass(frozen=True, kw_only=True)
class FittedScheme(Scheme):
    """The result that `kvbits fit` writes: a scheme, and the model that it was fitted to.

    A cache of another model refuses it.

    Attributes:
        layers: geometry of each layer of that model.
        weights: identity of it (`kvbits.identity`); empty if nobody said.
        model: its name, for messages.
    """

    layers: tuple[LayerGeometry, ...]
    weights: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or not all(isinstance(g, LayerGeometry) for g in self.layers):
            raise SpecError(
                f"layers={self.layers!r} of a fitted scheme must be the geometry of each layer; `kvbits fit` writes"
                " them"
            )
        for layer in range(len(self.layers)):
            self.for_layer(layer, len(self.layers))  # refuses overrides of layers that are not there

    @property
    def plain(self) -> Scheme:
        """The same without the model: what caches store, and what their bytes are named by."""
        return Scheme(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Scheme)})

    def on(self, layers: tuple[LayerGeometry, ...]) -> Scheme:
        """Return `plain`, if `layers` are those of the model that it was fitted to, or what one of several GPUs holds
        of them.

        Raises:
            SpecError: they are not; the message says what differs.
        """
        if differs := self._differences(layers):
            raise SpecError(
                f"scheme {self.name!r} was fitted to {self.model or 'another model'}: {differs}; run `kvbits fit` on"
                " this model"
            )
        return self.plain

    def require_weights(self, weights: str) -> None:
        """Refuse a model of the same shape with other weights.

        Raises:
            SpecError: with the way out.
        """
        if self.weights and weights != self.weights:
            of = f", {self.model}" if self.model else ""
            raise SpecError(
                f"scheme {self.name!r} was fitted to other weights (fingerprint {self.weights[:12]}{of}) than this"
                f" model's ({weights[:12]}); run `kvbits fit` on this model, or pass the scheme's `plain` to take its"
                " widths all the same"
            )

    def _differences(self, layers: tuple[LayerGeometry, ...]) -> str:
        if len(layers) != len(self.layers):
            return f"it has {len(self.layers)} layers, this one {len(layers)}"
        for i, (own, given) in enumerate(zip(self.layers, layers, strict=True)):
            for name in ("head_dim", "value_head_dim", "sliding_window"):
                if getattr(own, name) != getattr(given, name):
                    return f"layer {i} has {name}={getattr(own, name)} there and {getattr(given, name)} here"
            if own.num_kv_heads % given.num_kv_heads:
                return f"layer {i} has {own.num_kv_heads} kv heads there and {given.num_kv_heads} here"
        return ""
