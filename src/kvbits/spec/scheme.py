"""What a whole cache stores: `Scheme`, with exceptions by layer and head."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..errors import SpecError
from .codec import parse, serialisable, to_dict
from .layout import PageLayout
from .quant import QuantSpec


@serialisable
@dataclass(frozen=True, kw_only=True)
class Override:
    """Other specs for some layers or heads, for example raw keys and values in the first and last layer.

    `layers` are indices, negative ones counted from the end; `heads` are kv heads of those layers, None for all.
    """

    layers: tuple[int, ...]
    key: QuantSpec
    value: QuantSpec
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "heads", None if self.heads is None else tuple(self.heads))

    def covers(self, layer: int, head: int | None, num_layers: int) -> bool:
        """True for a kv head of a layer (head None: for the layer as a whole)."""
        for index in self.layers:
            if not -num_layers <= index < num_layers:
                raise SpecError(f"override for layer {index}, but the model has {num_layers} layers")
        return any(index % num_layers == layer for index in self.layers) and (self.heads is None or (head is not None and head in self.heads))


@serialisable
@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a whole cache stores: key and value specs, raw first and newest tokens, exceptions per layer.

    Attributes:
        name: preset name, used in tables and file names.
        num_sink_tokens: first tokens of a sequence that stay raw for ever (attention sinks).
        residual_length: newest tokens that are always raw. Up to `page_size` more are raw while they wait for their page.
        page_size: tokens quantized together, once; a multiple of 32.
        overrides: exceptions by layer and head; the last match wins.
        source: link to the paper or document the scheme comes from.
    """

    name: str
    key: QuantSpec
    value: QuantSpec
    num_sink_tokens: int = 0
    residual_length: int = 0
    page_size: int = 64
    overrides: tuple[Override, ...] = ()
    source: str = ""
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", tuple(self.overrides))
        if not isinstance(self.page_size, int) or self.page_size < 32 or self.page_size % 32:
            raise SpecError(f"page_size={self.page_size} must be a positive multiple of 32, for example 64 or 128")
        for name in ("num_sink_tokens", "residual_length"):
            if (n := getattr(self, name)) < 0:
                raise SpecError(f"{name}={n} is negative; use 0 for none")

    def for_layer(self, layer: int, num_layers: int, head: int | None = None) -> tuple[QuantSpec, QuantSpec]:
        """(key spec, value spec) of one layer, or of one of its kv heads."""
        key, value = self.key, self.value
        for o in self.overrides:
            if o.covers(layer, head, num_layers):
                key, value = o.key, o.value
        return key, value

    @property
    def needs_calibration(self) -> bool:
        specs = [self.key, self.value, *(s for o in self.overrides for s in (o.key, o.value))]
        return any(s.static for s in specs)

    def bits_per_element(self, head_dim: int = 128) -> float:
        """Stored bits per cached number in a closed page, scales and padding included."""
        layout = PageLayout(key=self.key, value=self.value, page_size=self.page_size, num_kv_heads=1, head_dim=head_dim)
        return layout.bits_per_element

    def to_json(self) -> str:
        return json.dumps(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> Scheme:
        return parse(text, cls)
