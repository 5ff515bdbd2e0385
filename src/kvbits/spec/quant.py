"""Rules by which one tensor, keys or values, becomes codes: number formats, who shares a scale, `QuantSpec`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

from ..errors import SpecError
from . import bands as banding
from .codec import choice, serialisable, whole

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
SCALE_8BIT = "float8_e5m3"
"""Scales of trellis codes: 5 bits of exponent, 3 of mantissa, no sign; the byte is bits 7 to 14 of the same number in
float16.
"""
SCALE_BYTES = DTYPE_BYTES | {SCALE_8BIT: 1}
MAX_OUTLIERS = 0.125
MAX_GROUP = 65_536
BASES = (None, "hadamard", "calibrated")
LEVELS = ("uniform", "fitted")
FRAME = 512
"""Positions of a frame, in which a calibrated basis holds: a page's keys are turned back by the largest multiple of it
up to the page's first token.
"""
MEAN_STEP = 16
"""Tokens of a page, and positions of a frame, that share a calibrated mean of keys: a key tile."""
OFFSETS = FRAME // MEAN_STEP + 1
"""Calibrated means of a kv head: one for each `MEAN_STEP` positions of a frame, and the key of position 0."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """One code's number format: its bit planes and, for floats, its range.

    `planes` are the field widths a code is split into, high bits first: int3 is a 2-bit plane and a 1-bit plane.
    """

    name: str
    planes: tuple[int, ...]
    kind: str  # "int", "float", "codebook", "trellis" or "raw"
    exponent_bits: int = 0  # float formats: behind the sign
    mantissa_bits: int = 0
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
        NumberFormat(
            name="fp8_e4m3",
            planes=(8,),
            kind="float",
            exponent_bits=4,
            mantissa_bits=3,
            max_value=448.0,
            saturates_at=464.0,
        ),
        NumberFormat(
            name="fp8_e5m2",
            planes=(8,),
            kind="float",
            exponent_bits=5,
            mantissa_bits=2,
            max_value=57344.0,
            saturates_at=61440.0,
        ),
        NumberFormat(name="nuq4", planes=(4,), kind="codebook"),
        NumberFormat(name="nuq3", planes=(2, 1), kind="codebook"),
        NumberFormat(name="nuq2", planes=(2,), kind="codebook"),
        NumberFormat(name="trellis", planes=(), kind="trellis"),
        NumberFormat(name="raw", planes=(), kind="raw"),
    )
}


@serialisable
@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor of a layer, from calibration. Scale shape per head: []."""


@serialisable
@dataclass(frozen=True)
class PerToken:
    """One scale per token and kv head. Scale shape per head and page: [1, page_size]."""


@serialisable
@dataclass(frozen=True)
class PerChannel:
    """One scale per channel and kv head over the tokens of a page. Scale shape per head and page: [head_dim]."""


@serialisable
@dataclass(frozen=True)
class PerGroup:
    """One scale per `size` neighbouring channels of a token.

    Scale shape per head and page: [head_dim / size, page_size].
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "size", whole("PerGroup size", self.size, 2, MAX_GROUP, "common sizes are 32, 64 and 128")
        )


Granularity = PerTensor | PerToken | PerChannel | PerGroup
_GRANULARITIES = {c.__name__: c for c in (PerTensor, PerToken, PerChannel, PerGroup)}


@serialisable
@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """The rules by which one tensor, keys or values, becomes codes.

    A stored element decodes as

        x ~ level(code) * scale * stretch + bias + mean + outlier

    `level` is code - zero for integers (`zero` is 2**(bits - 1) if symmetric, else 0), the float itself for fp8, and an
    entry of the calibrated codebook, in [-1, 1], for nuq formats (KVQuant, arXiv:2401.18079, section 3.4). `bias`
    exists for asymmetric specs, `mean` for `center="channel"`, `outlier` for the listed elements of a page, `stretch`
    per token for static per-channel specs with outliers.

    Attributes:
        format: one of `FORMATS`; "raw" keeps the model's own 16-bit (or 32-bit) values.
        granularity: who shares a scale (and a bias).
        symmetric: integers only; False adds a float `bias` beside each scale.
        scale_dtype: storage dtype of scale, bias and mean.
        static: scales come from a `Calibration` instead of from the page, and are not stored in it.
        center: what is taken off before codes, so that a constant offset (a key bias) costs no code range; a score
            gains q . mean once per page and head. "channel": each channel's mean over the page, stored in it.
            "calibrated" (keys in a calibrated basis): a constant of the model by the place of the token's run of 16 in
            its page's frame, and one for position 0 (quant/basis.py); nothing is stored.
        outliers: share of a page's elements, those that the codes would represent worst, whose error is listed in the
            page beside the codes (`scale_dtype` each), so that they do not widen the range of the others (KVQuant,
            section 3.5).
        pre_rope: keys only; a page stores keys turned back to before the rotary embedding, and attention turns them
            again when it reads (KVQuant, section 3.2).
        basis: what keys or values are multiplied by before they become codes (quant/basis.py). "hadamard" (trellis
            codes): a Hadamard matrix, no calibration. "calibrated" (trellis keys): a basis of each kv head, in the
            frame of the page's `FRAME` positions, whose channels are uncorrelated, the most important first.
        bands: of trellis codes: bits of each band of 16 neighbouring channels (0 to 6, or 8). A code of b bits picks
            one of 2**(b + 1) levels together with the lowest bits of its neighbours (quant/trellis.py); no level is 0.
            A code of 8 bits means code - 127.5 steps, and a band of 0 bits reads as its mean. Heads with another number
            of bands get as many bits in the mean, see `widths`. Values have one width.
        levels: of trellis codes. "uniform": half a step apart. "fitted" (values of 2 bits): 1, 3, 5 and 9 quarters of a
            step to both sides, which a Gaussian loses less to.

    Raises:
        SpecError: for any invalid combination.
    """

    format: str = "int8"
    granularity: Granularity = PerGroup(64)
    symmetric: bool = True
    scale_dtype: str = "float16"
    static: bool = False
    center: str | None = None
    outliers: float = 0.0
    pre_rope: bool = False
    basis: str | None = None
    bands: tuple[int, ...] = ()
    levels: str = field(default="uniform", metadata={"said": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", tuple(self.bands))
        choice("number format", self.format, FORMATS)
        choice("scale_dtype", self.scale_dtype, SCALE_BYTES)
        choice("basis", self.basis, BASES)
        choice("levels", self.levels, LEVELS)
        choice("center", self.center, (None, "channel", "calibrated"))
        if not isinstance(self.granularity, Granularity):
            raise SpecError(f"granularity={self.granularity!r} is not one of {', '.join(_GRANULARITIES)}()")
        kind = FORMATS[self.format].kind
        if kind == "float" and not self.symmetric:
            raise SpecError(f"{self.format} has a sign of its own and takes no offset; use symmetric=True")
        if kind == "raw" and self != QuantSpec._raw():
            raise SpecError("a raw spec has no granularity, scale or center; use QuantSpec.raw()")
        self._check_trellis()
        if isinstance(self.granularity, PerTensor) and not self.static:
            raise SpecError("PerTensor scales are shared by all pages, so they must come from calibration: static=True")
        if isinstance(self.granularity, PerToken) and self.static:
            raise SpecError(
                "a per-token scale cannot be known before the token; use PerGroup(size) or PerChannel() with"
                " static=True"
            )
        if self.static and self.center:
            raise SpecError("center='channel' is taken from each page; with static scales use symmetric=False instead")
        if not 0 <= self.outliers <= MAX_OUTLIERS:
            raise SpecError(
                f"outliers={self.outliers} is a share of all elements, from 0 to {MAX_OUTLIERS}; the usual one is 0.01"
            )
        if self.outliers and kind == "float":
            raise SpecError(f"{self.format} has a wide range of its own and takes no outliers; use outliers=0")
        if self.outliers and self.static and not (self.has_codebook and isinstance(self.granularity, PerChannel)):
            raise SpecError(
                "calibrated ranges with outliers are stretched token by token, which only per-channel codebook formats"
                " (nuq) can; use static=False"
            )
        if self.center and isinstance(self.granularity, PerChannel) and not self.symmetric:
            raise SpecError("asymmetric per-channel codes already hold the channel's offset; drop center='channel'")

    def _check_trellis(self) -> None:
        if not self.is_trellis:
            if self.center == "calibrated":
                raise SpecError(
                    f"center='calibrated' is of keys in basis='calibrated', not of {self.format!r}; use"
                    " center='channel'"
                )
            if self.bands or self.basis or self.scale_dtype == SCALE_8BIT or self.levels != "uniform":
                what = (
                    f"bands, basis={self.basis!r}, levels={self.levels!r} and scale_dtype={SCALE_8BIT!r} belong to"
                    f" format='trellis', not to {self.format!r}"
                )
                raise SpecError(what + "; instead of int4_rotated take klt4" * (self.basis == "hadamard"))
            return
        for width in self.bands:
            choice("width of a band", width, banding.WIDTHS)
        if not any(self.bands):
            raise SpecError(
                f"bands={self.bands} hold no bits; give one width for each {banding.BAND} channels, such as (5, 3, 2,"
                " 0) for head_dim 64"
            )
        if self.levels == "fitted" and {*self.bands} != {2}:
            raise SpecError(
                f"levels='fitted' are those of 2 bits, and bands={self.bands} hold others; use levels='uniform'"
            )
        usual = isinstance(self.granularity, PerToken) and self.symmetric and self.scale_dtype == SCALE_8BIT
        if not usual or self.static or self.outliers or self.pre_rope:
            raise SpecError(
                "trellis codes have one fitted 8-bit scale per token: granularity=PerToken(), symmetric=True,"
                f" scale_dtype={SCALE_8BIT!r}, no static scales, no outliers, no pre_rope"
            )
        if self.center == "channel" or (self.center and self.basis != "calibrated"):
            raise SpecError(
                f"trellis codes with center={self.center!r} and basis={self.basis!r}: a mean of theirs is calibrated"
                " with their basis, so that a token can be stored by itself; use center='calibrated' with"
                " basis='calibrated', or center=None (what kvbits before this stored with a page's own mean must be"
                " computed again)"
            )

    @classmethod
    def raw(cls) -> QuantSpec:
        """Return values kept in the model's own dtype."""
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
        """Bits of one code (of the widest, where bands differ), without metadata."""
        return max(self.bands) if self.is_trellis else self.number_format.bits

    @property
    def is_trellis(self) -> bool:
        return self.number_format.kind == "trellis"

    @property
    def offset_dtype(self) -> str:
        """Storage dtype of bias, mean and outliers: the scale's own, or float16 beside 8-bit scales."""
        return self.scale_dtype if self.scale_dtype in DTYPE_BYTES else "float16"

    def widths(self, head_dim: int) -> tuple[int, ...]:
        """Return bits of each band of trellis codes; () for others."""
        return banding.widths(self.bands, head_dim) if self.is_trellis else ()

    @property
    def mean_bits(self) -> float:
        """Bits of a code, the mean where bands differ."""
        return sum(self.bands) / len(self.bands) if self.is_trellis else self.bits

    def planes(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """Return (bits, channels) of each stored plane, high bits first: all channels, or of trellis codes those of the
        bands whose width has that plane.
        """
        if not self.is_trellis:
            return tuple((bits, head_dim) for bits in self.number_format.planes)
        widths = self.widths(head_dim)
        counts = [
            (bits, sum(bool(widths[c // banding.BAND] & bits) for c in range(head_dim))) for bits in banding.PLANES
        ]
        return tuple((bits, channels) for bits, channels in counts if channels)

    @property
    def has_mean(self) -> bool:
        """True where a page stores a mean of its own."""
        return self.center == "channel"

    @property
    def has_offsets(self) -> bool:
        """True where constants of the model are taken off (`center="calibrated"`)."""
        return self.center == "calibrated"

    @property
    def has_bias(self) -> bool:
        return self.number_format.kind in ("int", "codebook") and not self.symmetric

    @property
    def has_codebook(self) -> bool:
        return self.number_format.kind == "codebook"

    @property
    def has_stretch(self) -> bool:
        """True where a page cannot fit the scale to its own numbers: each token then has a factor, so that none is cut
        off.
        """
        return bool(self.outliers) and self.static

    @property
    def calibrates(self) -> tuple[str, ...]:
        """Names of the tensors that calibration makes for such keys or values: "scale", "bias", "codebook", "basis",
        "mean".
        """
        needed = {
            "scale": self.static,
            "bias": self.static and self.has_bias,
            "codebook": self.has_codebook,
            "basis": self.basis == "calibrated",
            "mean": self.has_offsets,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    @property
    def needs_calibration(self) -> bool:
        return bool(self.calibrates)

    @property
    def needs_rotary(self) -> bool:
        """True where keys are turned back by positions before they are stored, so that the cache must know the rotary
        embedding.
        """
        return self.pre_rope or self.basis == "calibrated"

    @property
    def token_local(self) -> bool:
        """True where a token's bytes depend on no other token of its page, so that tokens can be stored one by one,
        quantized as they come.

        That is where scales belong to a token alone or come from calibration. A mean (`center="channel"`) is the page's
        own, but any number does for it: one fixed when the page opens. Codebooks, outliers and keys before the rotary
        embedding are left to whole pages.
        """
        if self.has_codebook or self.outliers or self.pre_rope:
            return False
        return self.is_raw or self.static or not isinstance(self.granularity, PerChannel)

    def num_outliers(self, page_size: int, head_dim: int) -> int:
        """Return the number of outliers listed in one page of one kv head: always that many."""
        return max(1, round(self.outliers * page_size * head_dim)) if self.outliers else 0

    @property
    def code_range(self) -> tuple[int, int]:
        """(smallest, largest) stored integer code.

        Symmetric codes leave out the most negative value, so both ends are equally far.
        """
        top = 2**self.bits - 1
        return (1, top) if self.symmetric and self.number_format.kind == "int" else (0, top)

    @property
    def zero(self) -> int:
        """The stored code that means 0 before `bias` and `mean` are added."""
        return 2 ** (self.bits - 1) if self.number_format.kind == "int" and self.symmetric else 0

    @property
    def q_max(self) -> float:
        """Levels from zero (asymmetric integers: from the lowest) to the far end of the range: that distance / q_max is
        the scale.
        """
        if self.number_format.kind == "float":
            return self.number_format.max_value
        if self.has_codebook:
            return 1.0
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    def num_groups(self, head_dim: int) -> int:
        """Return the number of groups of channels that have a scale of their own inside one token and head."""
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
        """Return the shape of one kv head's scales (and biases): per page, or per layer for static scales."""
        groups = self.num_groups(head_dim)
        if self.static or isinstance(self.granularity, PerChannel):
            return (groups,)
        return (groups, page_size)


def require_pair(key: QuantSpec, value: QuantSpec) -> None:
    """Refuse keys and values that no page holds together.

    Raises:
        SpecError: trellis keys beside values with a codebook or outliers; fitted levels of keys; values in a calibrated
            basis or of several widths.
    """
    if key.is_trellis and (value.has_codebook or value.outliers):
        what = f"{value.format} values" + (f" with outliers={value.outliers}" if value.outliers else "")
        raise SpecError(
            f"trellis keys (klt4, klt3, klt2) are not stored beside {what}; use trellis or integer values, as these"
            " presets do, or nuq keys"
        )
    if key.levels != "uniform":
        raise SpecError(f"levels={key.levels!r} are those of values; use keys with levels='uniform'")
    if value.basis == "calibrated":
        raise SpecError("basis='calibrated' is of keys, calibrated against their queries; values take basis='hadamard'")
    if len({*value.bands}) > 1:
        raise SpecError(
            f"bands={value.bands} of values differ, and a ring of values has channels of many bands; give values one"
            f" width, such as {(max(value.bands),) * len(value.bands)}"
        )
