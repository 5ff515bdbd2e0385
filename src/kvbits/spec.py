"""WHAT is stored: number formats, who shares a scale, schemes, and the exact bytes of everything.

This module is arithmetic only (no tensors, no torch). Every size in the library comes from here, so the planner's
figure and the pool's allocation cannot drift apart. docs/formats.md pictures the byte layouts that `HeadLayout` describes.

    QuantSpec   how one tensor (keys or values) becomes codes
    Scheme      key spec + value spec + sinks + raw tail + per-layer overrides
    CacheSpec   scheme + model geometry -> layer groups -> page layouts -> bytes

All specs are frozen, keyword-only and validated at birth; `repr` is constructor text; `to_json` / `from_json` round-trip.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import SpecError

FORMATS_VERSION = 1
"""Version of the byte layouts in docs/formats.md. Saved files and format ids carry it."""

STRUCT_ALIGNMENT = 64
SECTION_ALIGNMENT = 16
KEY_TILE = 16
"""Tokens interleaved in a key tile: one 512-bit register holds a 32-bit word of each."""
VALUE_BLOCK = 16
"""Byte positions interleaved in a value block: one 512-bit register holds 4 tokens of each."""
VALUE_TOKEN_ORDER = (0, 1, 4, 5, 2, 3, 6, 7)
"""Slot s of every eight value tokens holds token VALUE_TOKEN_ORDER[s] (docs/formats.md says why)."""

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """One code's number format: its bit planes and, for integers, its largest code.

    `planes` are the field widths a code is split into, high bits first: int3 is a 2-bit plane and a 1-bit plane.
    """

    name: str
    planes: tuple[int, ...]
    kind: str  # "int", "float" or "raw"
    max_value: float = 0.0  # float formats: largest finite value
    saturates_at: float = 0.0  # float formats: where rounding to nearest would pass it

    @property
    def bits(self) -> int:
        return sum(self.planes)


FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat(name="int8", planes=(8,), kind="int"),
        NumberFormat(name="int4", planes=(4,), kind="int"),
        NumberFormat(name="int3", planes=(2, 1), kind="int"),
        NumberFormat(name="int2", planes=(2,), kind="int"),
        NumberFormat(name="fp8_e4m3", planes=(8,), kind="float", max_value=448.0, saturates_at=464.0),
        NumberFormat(name="fp8_e5m2", planes=(8,), kind="float", max_value=57344.0, saturates_at=61440.0),
        NumberFormat(name="raw", planes=(), kind="raw"),
    )
}


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor of a layer, from calibration. Scale shape per head: []."""


@dataclass(frozen=True)
class PerToken:
    """One scale per token and kv head. Scale shape per head and page: [1, page_size]."""


@dataclass(frozen=True)
class PerChannel:
    """One scale per channel and kv head over the tokens of a page. Scale shape per head and page: [head_dim]."""


@dataclass(frozen=True)
class PerGroup:
    """One scale per `size` neighbouring channels of a token. Scale shape per head and page: [head_dim / size, page_size]."""

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise SpecError(f"PerGroup size={self.size!r} is not a positive integer; common sizes are 32, 64 and 128")


Granularity = PerTensor | PerToken | PerChannel | PerGroup
_GRANULARITIES = {c.__name__: c for c in (PerTensor, PerToken, PerChannel, PerGroup)}


def _choice(what: str, value: object, known: Any) -> None:
    if not isinstance(value, str | None) or value not in known:
        raise SpecError(f"unknown {what} {value!r}; known: {', '.join(str(k) for k in known)}")


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """How one tensor, keys or values, becomes codes.

    A stored element decodes as  x ~ (code - zero) * scale + bias + mean  where `zero` is 2**(bits - 1) for symmetric
    integers and 0 otherwise, `bias` exists for asymmetric integers and `mean` for `center="channel"`.

    Attributes:
        format: one of `FORMATS`; "raw" keeps the model's own 16-bit (or 32-bit) values.
        granularity: who shares a scale (and a bias).
        symmetric: integers only; False adds a float `bias` beside each scale.
        scale_dtype: storage dtype of scale, bias and mean.
        static: scales come from a `Calibration` instead of from the page, and are not stored in it.
        center: "channel" keeps each channel's mean over the page apart, so that a constant offset (a key bias) costs no
            code range. A score then gains q . mean once per page and head.

    Raises:
        SpecError: for any combination that cannot be.
    """

    format: str = "int8"
    granularity: Granularity = PerGroup(64)
    symmetric: bool = True
    scale_dtype: str = "float16"
    static: bool = False
    center: str | None = None

    def __post_init__(self) -> None:
        _choice("number format", self.format, FORMATS)
        _choice("scale_dtype", self.scale_dtype, DTYPE_BYTES)
        _choice("center", self.center, (None, "channel"))
        if not isinstance(self.granularity, Granularity):
            raise SpecError(f"granularity={self.granularity!r} is not one of {', '.join(_GRANULARITIES)}()")
        kind = FORMATS[self.format].kind
        if kind == "float" and not self.symmetric:
            raise SpecError(f"{self.format} has a sign of its own and takes no offset; use symmetric=True")
        if kind == "raw" and self != QuantSpec._raw():
            raise SpecError("a raw spec has no granularity, scale or center; use QuantSpec.raw()")
        if isinstance(self.granularity, PerTensor) and not self.static:
            raise SpecError("PerTensor scales are shared by all pages, so they must come from calibration: static=True")
        if isinstance(self.granularity, PerToken) and self.static:
            raise SpecError("a per-token scale cannot be known before the token; use PerGroup(size) or PerChannel() with static=True")
        if self.static and self.center:
            raise SpecError("center='channel' is taken from each page; with static scales use symmetric=False instead")
        if self.center and isinstance(self.granularity, PerChannel) and not self.symmetric:
            raise SpecError("asymmetric per-channel codes already hold the channel's offset; drop center='channel'")

    @classmethod
    def raw(cls) -> QuantSpec:
        """Values kept in the model's own dtype."""
        return cls._raw()

    @staticmethod
    @functools.cache
    def _raw() -> QuantSpec:
        spec = object.__new__(QuantSpec)
        for f in dataclasses.fields(QuantSpec):
            object.__setattr__(spec, f.name, f.default)
        object.__setattr__(spec, "format", "raw")
        object.__setattr__(spec, "granularity", PerToken())
        return spec

    @property
    def is_raw(self) -> bool:
        return self.format == "raw"

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.format]

    @property
    def bits(self) -> int:
        """Bits of one code, without metadata."""
        return self.number_format.bits

    @property
    def has_bias(self) -> bool:
        return self.number_format.kind == "int" and not self.symmetric

    @property
    def code_range(self) -> tuple[int, int]:
        """(smallest, largest) stored integer code. Symmetric codes leave out the most negative value, so both ends are equally far."""
        top = 2**self.bits - 1
        return (1, top) if self.symmetric else (0, top)

    @property
    def zero(self) -> int:
        """The stored code that means 0 before `bias` and `mean` are added."""
        return 2 ** (self.bits - 1) if self.number_format.kind == "int" and self.symmetric else 0

    @property
    def q_max(self) -> float:
        """Codes one scale step away from the far end of the range: amax / q_max (or (max - min) / q_max) is the scale."""
        if self.number_format.kind == "float":
            return self.number_format.max_value
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    def num_groups(self, head_dim: int) -> int:
        """Groups of channels that have a scale of their own inside one token and head."""
        if isinstance(self.granularity, PerGroup):
            if head_dim % self.granularity.size:
                ways = [g for g in (128, 64, 32, 16) if head_dim % g == 0]
                raise SpecError(
                    f"head_dim={head_dim} is not divisible by group_size={self.granularity.size}; use "
                    + (f"group_size={ways[0]} or " if ways else "")
                    + "per-token scales"
                )
            return head_dim // self.granularity.size
        return head_dim if isinstance(self.granularity, PerChannel) else 1

    def scale_shape(self, page_size: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one kv head's scales (and biases): per page, or per layer for static scales."""
        groups = self.num_groups(head_dim)
        if self.static or isinstance(self.granularity, PerChannel):
            return (groups,)
        return (groups, page_size)


@dataclass(frozen=True)
class Section:
    """A run of bytes inside a head struct. `shape` is in elements of `dtype`, in storage order."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def plane_row_bytes(head_dim: int, plane_bits: int) -> int:
    """Bytes of one token's row in a bit plane, padded to whole 32-bit words."""
    return _round_up(head_dim * plane_bits, 32) // 8


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Byte layout of one page of one layer: `num_kv_heads` identical structs, one after the other.

    Sections appear in this order, each aligned to 16 bytes, the struct padded to 64 bytes:
    key planes, value planes, then key scale, bias, mean and value scale, bias, mean.
    """

    key: QuantSpec
    value: QuantSpec
    page_size: int
    num_kv_heads: int
    head_dim: int
    raw_dtype: str = "bfloat16"

    @functools.cached_property
    def sections(self) -> dict[str, Section]:
        found: dict[str, Section] = {}
        end = 0

        def add(name: str, dtype: str, itemsize: int, shape: tuple[int, ...]) -> None:
            nonlocal end
            offset = _round_up(end, SECTION_ALIGNMENT)
            nbytes = math.prod(shape) * itemsize
            found[name] = Section(name, offset, nbytes, dtype, shape)
            end = offset + nbytes

        for prefix, spec in (("k", self.key), ("v", self.value)):
            if spec.is_raw:
                add(f"{prefix}_raw", self.raw_dtype, DTYPE_BYTES[self.raw_dtype], (self.page_size, self.head_dim))
            for i, plane_bits in enumerate(spec.number_format.planes):
                add(f"{prefix}_plane{i}", "uint8", 1, (self.page_size, plane_row_bytes(self.head_dim, plane_bits)))
        for prefix, spec in (("k", self.key), ("v", self.value)):
            if spec.is_raw:
                continue
            itemsize = DTYPE_BYTES[spec.scale_dtype]
            if not spec.static:
                shape = spec.scale_shape(self.page_size, self.head_dim)
                add(f"{prefix}_scale", spec.scale_dtype, itemsize, shape)
                if spec.has_bias:
                    add(f"{prefix}_bias", spec.scale_dtype, itemsize, shape)
            if spec.center:
                add(f"{prefix}_mean", spec.scale_dtype, itemsize, (self.head_dim,))
        return found

    @functools.cached_property
    def head_bytes(self) -> int:
        """Bytes of one kv head's struct, padding included."""
        last = list(self.sections.values())[-1]
        return _round_up(last.offset + last.nbytes, STRUCT_ALIGNMENT)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page of one layer, all kv heads, padding included."""
        return self.num_kv_heads * self.head_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per cached number, scales and padding included."""
        return 8 * self.head_bytes / (2 * self.page_size * self.head_dim)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of one page split into codes, scales (with biases and means), raw and padding."""
        kinds = {"codes": 0, "scales": 0, "raw": 0}
        for s in self.sections.values():
            kind = "raw" if s.name.endswith("_raw") else "codes" if "_plane" in s.name else "scales"
            kinds[kind] += s.nbytes * self.num_kv_heads
        kinds["padding"] = self.page_size_bytes - sum(kinds.values())
        return kinds


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
        return _parse(text, cls)


@dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """Shape of one attention layer's cache. `sliding_window` counts the query's own token; None means full attention."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise SpecError(f"num_kv_heads={self.num_kv_heads} must be at least 1")
        if self.head_dim < 8 or self.head_dim % 8:
            raise SpecError(f"head_dim={self.head_dim} must be a positive multiple of 8")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise SpecError(f"sliding_window={self.sliding_window} must be at least 1, or None for full attention")


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that store alike and therefore share one page table: a page id names one page in each of these layers.

    `heads` are the kv heads that the group holds of each layer: all of them, unless the scheme has overrides by head.
    """

    layers: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    geometry: LayerGeometry
    key: QuantSpec
    value: QuantSpec
    num_sink_tokens: int
    residual_length: int
    page_size: int
    raw_dtype: str

    POOLS: ClassVar[tuple[str, ...]] = ("sink", "closed", "tail")

    @property
    def is_raw(self) -> bool:
        """True where nothing is ever quantized: all tokens after the sinks live in tail pages."""
        return self.key.is_raw and self.value.is_raw

    def _layout(self, key: QuantSpec, value: QuantSpec, page_size: int) -> PageLayout:
        g = self.geometry
        return PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=g.num_kv_heads, head_dim=g.head_dim, raw_dtype=self.raw_dtype)

    @functools.cached_property
    def layouts(self) -> dict[str, PageLayout]:
        """Page layout of each pool: raw sink pages, closed pages, raw tail pages."""
        raw = QuantSpec.raw()
        return {
            "sink": self._layout(raw, raw, max(self.num_sink_tokens, 1)),
            "closed": self._layout(self.key, self.value, self.page_size),
            "tail": self._layout(raw, raw, self.page_size),
        }

    def block_bytes(self, pool: str) -> int:
        """Bytes one page id takes in a pool: one page in each layer of the group."""
        return len(self.layers) * self.layouts[pool].page_size_bytes

    @property
    def tail_pages(self) -> int:
        """Tail pages a sequence can hold at once (not for raw groups, whose tail grows)."""
        return -(-(self.residual_length + self.page_size) // self.page_size)

    def closed_after(self, num_tokens: int) -> int:
        """Pages ever closed once a sequence has `num_tokens` tokens: the newest token is always raw."""
        if self.is_raw:
            return 0
        return max(0, (num_tokens - self.num_sink_tokens - self.residual_length - 1) // self.page_size)

    def first_visible(self, num_tokens: int) -> int:
        """Position of the oldest token that the next query can still see."""
        w = self.geometry.sliding_window
        return 0 if w is None else max(0, num_tokens - w + 1)

    def pages_for(self, num_tokens: int) -> dict[str, int]:
        """Most pages of each pool that one sequence holds on its way to `num_tokens` tokens."""
        if num_tokens < 0:
            raise SpecError(f"num_tokens={num_tokens} is negative")
        sinks, size, w = self.num_sink_tokens, self.page_size, self.geometry.sliding_window

        def alive(n: int) -> int:
            dead = max(0, self.first_visible(max(0, n - 1)) - sinks) // size  # what the newest token itself could see
            if self.is_raw:
                return max(0, -(-(n - sinks) // size) - dead)
            return max(0, self.closed_after(n) - dead)

        grown = alive(num_tokens) if w is None else max((alive(n) for n in range(max(0, num_tokens - 2 * size), num_tokens + 1)), default=0)
        if w is not None and self.is_raw:
            grown = max(grown, 1 if num_tokens > sinks else 0)
        return {
            "sink": 1 if sinks and num_tokens else 0,
            "closed": 0 if self.is_raw else grown,
            "tail": grown if self.is_raw else (self.tail_pages if num_tokens else 0),
        }


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A scheme on a model: every byte of the cache follows from this.

    Attributes:
        scheme: what is stored.
        layers: geometry of each attention layer, in model order.
        raw_dtype: dtype of raw pages (sinks, tail, raw layers): the model's own.
    """

    scheme: Scheme
    layers: tuple[LayerGeometry, ...]
    raw_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise SpecError("a cache needs at least one layer")
        _choice("raw_dtype", self.raw_dtype, DTYPE_BYTES)
        for group in self.groups:  # refuses what does not fit, with the layer's own numbers
            for layout in group.layouts.values():
                _ = layout.head_bytes

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers with equal geometry and specs, in order of first appearance."""
        members: dict[tuple[Any, ...], list[tuple[int, tuple[int, ...]]]] = {}
        for i, geometry in enumerate(self.layers):
            for specs, heads in self._heads_by_specs(i, geometry).items():
                part = dataclasses.replace(geometry, num_kv_heads=len(heads))
                members.setdefault((part, *specs), []).append((i, tuple(heads)))
        s = self.scheme
        return tuple(
            LayerGroup(
                layers=tuple(i for i, _ in parts), heads=tuple(heads for _, heads in parts), geometry=geometry, key=key, value=value,
                num_sink_tokens=s.num_sink_tokens, residual_length=s.residual_length, page_size=s.page_size, raw_dtype=self.raw_dtype,
            )
            for (geometry, key, value), parts in members.items()
        )  # fmt: skip

    def _heads_by_specs(self, layer: int, geometry: LayerGeometry) -> dict[tuple[QuantSpec, QuantSpec], list[int]]:
        for o in self.scheme.overrides:
            if o.heads is not None and o.covers(layer, o.heads[0] if o.heads else None, len(self.layers)):
                if bad := [h for h in o.heads if not 0 <= h < geometry.num_kv_heads]:
                    raise SpecError(f"override for kv head {bad[0]} of layer {layer}, which has {geometry.num_kv_heads} kv heads")
        found: dict[tuple[QuantSpec, QuantSpec], list[int]] = {}
        for head in range(geometry.num_kv_heads):
            found.setdefault(self.scheme.for_layer(layer, len(self.layers), head), []).append(head)
        return found

    def nbytes(self, num_tokens: int, batch_size: int = 1) -> int:
        """Bytes a cache of this capacity allocates: `batch_size` sequences of `num_tokens` tokens each, everything included."""
        if batch_size < 0:
            raise SpecError(f"batch_size={batch_size} is negative")
        return sum(g.block_bytes(pool) * n * batch_size for g in self.groups for pool, n in g.pages_for(num_tokens).items())

    def raw_nbytes(self, num_tokens: int, batch_size: int = 1, bytes_per_element: int = 2) -> int:
        """Bytes the stock 16-bit cache holds for the same tokens (sliding layers hold their window only)."""
        total = 0
        for g in self.layers:
            held = num_tokens if g.sliding_window is None else min(num_tokens, g.sliding_window - 1)
            total += 2 * g.num_kv_heads * g.head_dim * held * bytes_per_element * batch_size
        return total

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Bytes one more token costs at long context: closed pages of the full-attention layers (all layers if none is)."""
        full = [g for g in self.groups if g.geometry.sliding_window is None] or list(self.groups)
        return sum(g.block_bytes("tail" if g.is_raw else "closed") / g.page_size for g in full)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per cached number in closed pages over all layers, metadata and padding included."""
        bits = sum(8 * g.block_bytes("tail" if g.is_raw else "closed") for g in self.groups)
        elements = sum(2 * len(g.layers) * g.geometry.num_kv_heads * g.geometry.head_dim * g.page_size for g in self.groups)
        return bits / elements

    @property
    def format_id(self) -> str:
        """Names the byte layout of saved pages: equal ids mean interchangeable bytes."""
        return f"kvbits-{FORMATS_VERSION}:" + json.dumps(to_dict(self), sort_keys=True)

    def to_json(self) -> str:
        return json.dumps(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> CacheSpec:
        return _parse(text, cls)


_TYPES = {c.__name__: c for c in (QuantSpec, Override, Scheme, LayerGeometry, CacheSpec, *_GRANULARITIES.values())}


def to_dict(value: Any) -> Any:
    """Plain JSON data for a spec, with the class name under "type"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [to_dict(v) for v in value] if isinstance(value, tuple) else value


def from_dict(data: Any) -> Any:
    """The spec that `to_dict` described.

    Raises:
        SpecError: unknown type or field, or values the spec refuses.
    """
    if isinstance(data, list):
        return tuple(from_dict(v) for v in data)
    if not isinstance(data, dict):
        return data
    fields = dict(data)
    name = fields.pop("type", None)
    _choice("spec type", name, _TYPES)
    if name == "QuantSpec" and fields.get("format") == "raw":
        return QuantSpec.raw()
    known = {f.name for f in dataclasses.fields(_TYPES[name])}
    if unknown := set(fields) - known:
        raise SpecError(f"{name} has no field {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    try:
        return _TYPES[name](**{k: from_dict(v) for k, v in fields.items()})
    except TypeError as error:  # a field is missing, or holds a value of another kind
        raise SpecError(f"{name} cannot be made from {sorted(fields)}: {error}") from error


def _parse(text: str, wanted: type) -> Any:
    try:
        spec = from_dict(json.loads(text))
    except json.JSONDecodeError as error:
        raise SpecError(f"the text is not JSON ({error}); pass what to_json() returned") from error
    if not isinstance(spec, wanted):
        raise SpecError(f"the JSON describes a {type(spec).__name__}, not a {wanted.__name__}")
    return spec
