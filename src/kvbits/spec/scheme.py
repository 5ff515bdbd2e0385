"""Description of what a whole cache stores: `Scheme`, with exceptions by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from .codec import dumps, parse, serialisable, whole
from .layout import PageLayout
from .quant import QuantSpec, require_pair


def _require_specs(key: Any, value: Any) -> None:
    for name, spec in (("key", key), ("value", value)):
        if not isinstance(spec, QuantSpec):
            raise SpecError(f"{name}={spec!r} is not a QuantSpec; pass QuantSpec(format=..), or QuantSpec.raw()")
    require_pair(key, value)


@serialisable
@dataclass(frozen=True, kw_only=True)
class Override:
    """Other specs for some layers, for example raw keys and values in the first and last one.

    `layers` are indices, negative ones counted from the end.
    """

    layers: tuple[int, ...]
    key: QuantSpec
    value: QuantSpec

    def __post_init__(self) -> None:
        _require_specs(self.key, self.value)
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise SpecError("an Override with layers=() covers nothing; name its layers, or leave it out")

    def covers(self, layer: int, num_layers: int) -> bool:
        """Return whether the layer is one of these."""
        for index in self.layers:
            if not -num_layers <= index < num_layers:
                raise SpecError(f"override for layer {index}, but the model has {num_layers} layers")
        return any(index % num_layers == layer for index in self.layers)


def _missing(copy: QuantSpec, own: QuantSpec) -> list[str]:
    """Name the tensors that a copy is calibrated with and pages of `own` are not. A basis and its mean are shared."""
    return sorted(set(copy.calibrates) - (set(own.calibrates) & {"basis", "mean"}))


MAX_PAGE_SIZE = 65_536
"""Tokens of a page: some hundred times the usual ones."""
MOST_TOKENS = 2**31 - 1
"""Tokens of a sequence: positions are int32 in kernels."""


@serialisable
@dataclass(frozen=True, kw_only=True)
class Tier:
    """A tier of closed pages between the raw tail and older pages, in a format of its own.

    A page that gets too old for its tier is unpacked and quantized again in the format of the next one.

    Attributes:
        num_tokens: size of the tier, in whole pages: the newest tokens that are closed and in no younger tier.
        key, value: what its pages store; None stores the scheme's own spec with 8-bit integers. Neither calibration nor
            the rotary embedding may be needed.
    """

    num_tokens: int
    key: QuantSpec | None = None
    value: QuantSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "num_tokens", whole("num_tokens", self.num_tokens, 0, MOST_TOKENS, "the size of the tier in tokens")
        )

    def specs(self, key: QuantSpec, value: QuantSpec) -> tuple[QuantSpec, QuantSpec]:
        """Return (key spec, value spec) of the pages, in a scheme of these specs."""
        return self.key or dataclasses.replace(key, format="int8"), self.value or dataclasses.replace(
            value, format="int8"
        )


@serialisable
@dataclass(frozen=True, kw_only=True)
class Copies:
    """A finer format that the newest closed pages are held in as well, and are read from.

    A page is complete in the scheme's own format from the moment it closes. Its copy is a page beside it, made from the
    model's own keys and values. Where a copy is missing, the page itself is read.

    Attributes:
        num_tokens: tokens that are read from these copies, in whole pages: the newest closed ones that no finer copies
            cover.
        key, value: what the copies store. They need no calibration that the scheme's own specs do not need.
    """

    num_tokens: int
    key: QuantSpec
    value: QuantSpec

    def __post_init__(self) -> None:
        _require_specs(self.key, self.value)
        if self.key.is_raw and self.value.is_raw:
            raise SpecError("copies of raw keys and values; make residual_length larger instead")
        object.__setattr__(
            self, "num_tokens", whole("num_tokens", self.num_tokens, 1, MOST_TOKENS, "the tokens read from copies")
        )


@serialisable
@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Description of what a whole cache stores: key and value specs, raw first and newest tokens, exceptions per layer.

    Attributes:
        name: preset name, used in tables and file names.
        num_sink_tokens: first tokens of a sequence that stay raw for ever (attention sinks).
        residual_length: newest tokens that are always raw. Up to `page_size` more are raw while they wait for their
            page.
        page_size: tokens quantized together, once; a multiple of 32.
        tiers: of closed pages, youngest first; pages older than all of them are stored as `key` and `value` say.
            Layers with an override have none.
        copies: finer copies of the newest closed pages, youngest first. The tokens behind the raw tail are read from
            the first, those behind them from the next. Layers with an override have those that are finer than their own
            pages (`copies_of`). A scheme has tiers or copies.
        token_local: quantize every token as it comes, straight into its slot of a packed page, so that nothing waits
            raw. Only for specs whose scales belong to a token or are calibrated (`QuantSpec.token_local`), without
            residual_length, tiers and copies. Centred keys take the mean of the page before.
        overrides: exceptions by layer; the last match wins.
        source: link to the paper or document the scheme comes from.
    """

    name: str
    key: QuantSpec
    value: QuantSpec
    num_sink_tokens: int = 0
    residual_length: int = 0
    page_size: int = 64
    tiers: tuple[Tier, ...] = ()
    copies: tuple[Copies, ...] = field(default=(), metadata={"said": True})
    token_local: bool = False
    overrides: tuple[Override, ...] = ()
    source: str = ""
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _require_specs(self.key, self.value)
        if not isinstance(self.name, str) or "/" in self.name or "\0" in self.name:
            raise SpecError(
                f"name={self.name!r} must be a text without '/' and zero bytes, since files are named after it; for"
                " example 'mine'"
            )
        for name, kind in (("overrides", "Override"), ("tiers", "Tier"), ("copies", "Copies")):
            if not isinstance(given := getattr(self, name), Iterable):
                raise SpecError(f"{name}={given!r} must be a tuple of {kind}; {name}=() is for none")
            object.__setattr__(self, name, tuple(given))
        if wrong := [o for o in self.overrides if not isinstance(o, Override)]:
            raise SpecError(
                f"overrides hold {wrong[0]!r}, which is not an Override; pass Override(layers=(0,), key=.., value=..)"
            )
        object.__setattr__(
            self,
            "page_size",
            whole("page_size", self.page_size, 32, MAX_PAGE_SIZE, "a multiple of 32, for example 64 or 128"),
        )
        if self.page_size % 32:
            raise SpecError(f"page_size={self.page_size} must be a multiple of 32, for example 64 or 128")
        for name in ("num_sink_tokens", "residual_length"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 0, MOST_TOKENS, "0 means none"))
        if any(value.pre_rope for value in (self.value, *(o.value for o in self.overrides))):
            raise SpecError("values have no rotary embedding; pre_rope=True belongs to the key spec")
        older = (self.key, self.value)
        for tier in reversed(self.tiers):
            older = self._check_tier(tier, older)
        self._check_copies()
        if self.token_local:
            self._check_token_local()

    def _check_token_local(self) -> None:
        if self.residual_length:
            raise SpecError(
                f"token_local=True keeps no token raw, but residual_length={self.residual_length}; use"
                " residual_length=0"
            )
        if self.tiers:
            raise SpecError("token_local=True closes no pages, which tiers consist of; use tiers=()")
        if self.copies:
            raise SpecError("token_local=True closes no pages, which copies are made of; use copies=()")
        for spec in self._specs:
            if not spec.token_local:
                raise SpecError(
                    f"token_local=True, but {spec!r} needs the other tokens of a page; use PerToken(), PerGroup(size)"
                    " or calibrated scales of an integer or fp8 format without outliers or pre_rope, or"
                    " token_local=False"
                )

    def _require_pages(self, what: str, num_tokens: int) -> None:
        if num_tokens % self.page_size:
            near = max(1, round(num_tokens / self.page_size)) * self.page_size
            raise SpecError(
                f"{what} of {num_tokens} tokens {'are' if what == 'copies' else 'is'} no whole number of pages of"
                f" {self.page_size}; use num_tokens={near}"
            )

    def _check_copies(self) -> None:
        if not self.copies:
            return
        if wrong := [c for c in self.copies if not isinstance(c, Copies)]:
            raise SpecError(
                f"copies hold {wrong[0]!r}, which is not Copies; pass Copies(num_tokens=.., key=.., value=..)"
            )
        if self.tiers:
            raise SpecError(
                "a scheme has tiers, whose pages are quantized anew as they age, or copies of its newest pages, not"
                " both; use tiers=() or copies=()"
            )
        if self.key.is_raw and self.value.is_raw:
            raise SpecError("copies beside raw keys and values, which lose nothing; use copies=()")
        older = [(c.key, c.value) for c in self.copies[1:]] + [(self.key, self.value)]
        for copies, specs in zip(self.copies, older, strict=True):
            self._require_pages("copies", copies.num_tokens)
            if (copies.key, copies.value) == specs:
                raise SpecError(
                    f"copies store {copies.key!r}, {copies.value!r}, as what is older than they are does; leave them"
                    " out"
                )
            for name in ("key", "value"):
                self._check_copy(name, getattr(copies, name), getattr(self, name))

    @staticmethod
    def _check_copy(name: str, copy: QuantSpec, own: QuantSpec) -> None:
        """Refuse copies that need what the scheme's own pages do without."""
        if missing := _missing(copy, own):
            raise SpecError(
                f"{name}s of copies are {copy!r}, which needs calibration ({', '.join(missing)}) beside that of"
                f" {own!r}; a copy shares a calibrated basis and its mean, and takes scales from the page"
            )
        if copy.needs_rotary and not own.needs_rotary:
            raise SpecError(
                f"{name}s of copies are stored before the rotary embedding and the scheme's own are not: {copy!r}; use"
                " pre_rope=False"
            )

    def _check_tier(self, tier: Tier, older: tuple[QuantSpec, QuantSpec]) -> tuple[QuantSpec, QuantSpec]:
        """Return (key spec, value spec) of a tier whose pages become those of `older` specs."""
        if not isinstance(tier, Tier):
            raise SpecError(f"tiers hold {tier!r}, which is not a Tier; pass Tier(num_tokens=..), youngest first")
        self._require_pages("a tier", tier.num_tokens)
        for name, given, spec in (("key", tier.key, self.key), ("value", tier.value, self.value)):
            if given is None and spec.number_format.kind != "int":
                raise SpecError(
                    f"a tier above {spec.format} {name}s has no 8-bit form by itself; say what it stores: Tier(..,"
                    f" {name}=QuantSpec(format='int8'))"
                )
        specs = tier.specs(self.key, self.value)
        _require_specs(*specs)
        for name, spec in zip(("key", "value"), specs, strict=True):
            if spec.calibrates or spec.needs_rotary:
                raise SpecError(
                    f"{name}s of a tier are {spec!r}, which needs calibration or the rotary embedding; give a tier a"
                    f" format without, like Tier(.., {name}=QuantSpec(format='int8'))"
                )
        if specs == older:
            raise SpecError(f"a tier stores {specs[0]!r}, {specs[1]!r}, as what is older than it does; leave it out")
        if specs[0].is_raw and specs[1].is_raw:
            raise SpecError("a tier of raw keys and values; make residual_length larger instead")
        return specs

    def for_layer(self, layer: int, num_layers: int) -> tuple[QuantSpec, QuantSpec]:
        """Return (key spec, value spec) of one layer."""
        key, value = self.key, self.value
        for o in self.overrides:
            if o.covers(layer, num_layers):
                key, value = o.key, o.value
        return key, value

    def copies_of(self, key: QuantSpec, value: QuantSpec) -> tuple[Copies, ...]:
        """Return the copies that layers of these specs have: those of more bits and of the same calibration.

        Raw layers have none.
        """
        if key.is_raw or value.is_raw:
            return ()
        own = key.mean_bits + value.mean_bits
        return tuple(
            c
            for c in self.copies
            if c.key.mean_bits + c.value.mean_bits > own
            and all(not _missing(copy, spec) for copy, spec in ((c.key, key), (c.value, value)))
        )

    def on(self, layers: tuple[Any, ...]) -> Scheme:
        """Return the scheme as a cache of a model of these layers (`LayerGeometry`) stores it. It is this scheme
        itself, unless that was fitted to a model (`FittedScheme.on`).
        """
        return self

    @property
    def calibrates(self) -> set[str]:
        """Names of the tensors that calibration makes for some layer's keys or values (`QuantSpec.calibrates`)."""
        return {name for s in self._specs for name in s.calibrates}

    @property
    def needs_basis_alone(self) -> bool:
        """True where calibration is bases and what comes with them, so that one of a model serves it whatever its
        widths.
        """
        return bool(self.calibrates) and set(self.calibrates) <= {"basis", "mean"}

    @property
    def needs_calibration(self) -> bool:
        return bool(self.calibrates)

    @property
    def needs_rotary(self) -> bool:
        """True if any layer's keys are turned back by positions before they are stored, so that the cache must know the
        rotary embedding.
        """
        return any(s.needs_rotary for s in self._specs)

    @property
    def knows_rotary(self) -> bool:
        """True if the rotary embedding is of use without being needed: centred keys stored token by token start from a
        mean turned on by it.
        """
        return self.token_local and any(s.has_mean for s in self._specs)

    @property
    def _specs(self) -> list[QuantSpec]:
        return [self.key, self.value, *(s for o in self.overrides for s in (o.key, o.value))]

    def bits_per_element(self, head_dim: int = 128) -> float:
        """Return stored bits per cached number in a closed page, scales and padding included."""
        layout = PageLayout(key=self.key, value=self.value, page_size=self.page_size, num_kv_heads=1, head_dim=head_dim)
        return layout.bits_per_element

    def to_json(self) -> str:
        return dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Scheme:
        return parse(text, cls)
