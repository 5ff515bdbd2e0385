"""The bytes of one page (docs/reference/formats.md)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..errors import SpecError, too_small
from .codec import fill, same_as
from .quant import DTYPE_BYTES, SCALE_BYTES, QuantSpec, require_pair

FORMATS_VERSION = 2
"""Version of the byte layouts in docs/reference/formats.md. Saved files and format ids carry it."""

_INDEX_BYTES = {"uint16": 2, "int32": 4}
STRUCT_ALIGNMENT = 64
SECTION_ALIGNMENT = 16
KEY_TILE = 16
"""Tokens interleaved in a key tile: one 512-bit register holds a 32-bit word of each."""
VALUE_BLOCK = 16
"""Byte positions interleaved in a value block: one 512-bit register holds 4 tokens of each."""
VALUE_TOKEN_ORDER = (0, 1, 4, 5, 2, 3, 6, 7)
"""Slot s of every eight value tokens holds token VALUE_TOKEN_ORDER[s] (docs/reference/formats.md says why)."""


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Section:
    """A run of bytes inside a head struct. `shape` is in elements of `dtype`, in storage order."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def plane_row_bytes(head_dim: int, plane_bits: int) -> int:
    """Return bytes of one token's row in a bit plane, padded to whole 32-bit words."""
    return _round_up(head_dim * plane_bits, 32) // 8


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Byte layout of one page of one layer: `num_kv_heads` identical structs, one after the other.

    Sections appear in this order, each aligned to 16 bytes, the struct padded to 64 bytes:
    key planes, value planes, then key scale, bias, mean, stretch, outlier indices, outlier values, and the same of the
    values.

    Attributes:
        head_dim, value_head_dim: channels of keys, and of values: as many unless said otherwise.
    """

    key: QuantSpec
    value: QuantSpec
    page_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int = same_as("head_dim")
    raw_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        fill(self)
        for name in ("page_size", "num_kv_heads", "head_dim", "value_head_dim"):
            if (n := getattr(self, name)) < 1:
                raise SpecError(too_small(name, n, 1))
        require_pair(self.key, self.value)

    @functools.cached_property
    def sections(self) -> dict[str, Section]:
        """The places of all sections in a kv head's struct, by name."""
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
                add(f"{prefix}_raw", self.raw_dtype, DTYPE_BYTES[self.raw_dtype], (self.page_size, self.dim(prefix)))
            for i, (plane_bits, channels) in enumerate(spec.planes(self.dim(prefix))):
                add(f"{prefix}_plane{i}", "uint8", 1, (self.page_size, plane_row_bytes(channels, plane_bits)))
        for prefix, spec in (("k", self.key), ("v", self.value)):
            if spec.is_raw:
                continue
            itemsize = DTYPE_BYTES[spec.offset_dtype]
            if not spec.static:
                shape = spec.scale_shape(self.page_size, self.dim(prefix))
                add(f"{prefix}_scale", spec.scale_dtype, SCALE_BYTES[spec.scale_dtype], shape)
                if spec.has_bias:
                    add(f"{prefix}_bias", spec.offset_dtype, itemsize, shape)
            if spec.has_mean:
                add(f"{prefix}_mean", spec.offset_dtype, itemsize, (self.dim(prefix),))
            if spec.has_stretch:
                add(f"{prefix}_stretch", spec.offset_dtype, itemsize, (self.page_size,))
            if spec.outliers:
                n = spec.num_outliers(self.page_size, self.dim(prefix))
                add(f"{prefix}_outlier_index", self.outlier_index_dtype, _INDEX_BYTES[self.outlier_index_dtype], (n,))
                add(f"{prefix}_outlier_value", spec.offset_dtype, itemsize, (n,))
        return found

    def dim(self, kind: str) -> int:
        """Return the number of channels of keys ("k") or values ("v")."""
        return self.head_dim if kind == "k" else self.value_head_dim

    @functools.cached_property
    def used_bytes(self) -> int:
        """Bytes of one kv head's struct up to its padding."""
        last = list(self.sections.values())[-1]
        return last.offset + last.nbytes

    @functools.cached_property
    def head_bytes(self) -> int:
        """Bytes of one kv head's struct, padding included."""
        return _round_up(self.used_bytes, STRUCT_ALIGNMENT)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page of one layer, all kv heads, padding included."""
        return self.num_kv_heads * self.head_bytes

    @functools.cached_property
    def is_raw(self) -> bool:
        return self.key.is_raw and self.value.is_raw

    @functools.cached_property
    def is_centered(self) -> bool:
        """True where a page holds a mean of its keys or values."""
        return self.key.has_mean or self.value.has_mean

    @functools.cached_property
    def token_local(self) -> bool:
        """True where a page can be filled token by token (`QuantSpec.token_local`)."""
        return self.key.token_local and self.value.token_local

    @property
    def outlier_index_dtype(self) -> str:
        """Wide enough for token * head_dim + channel."""
        return "uint16" if self.page_size * max(self.head_dim, self.value_head_dim) <= 2**16 else "int32"

    @property
    def bits_per_element(self) -> float:
        """Stored bits per cached number, scales and padding included."""
        return 8 * self.head_bytes / (self.page_size * (self.head_dim + self.value_head_dim))

    def bytes_by_kind(self) -> dict[str, int]:
        """Return bytes of one page split into codes, scales (with biases, means and stretches), outliers, raw and
        padding.
        """
        kinds = {"codes": 0, "scales": 0, "outliers": 0, "raw": 0}
        for s in self.sections.values():
            kind = (
                "raw"
                if s.name.endswith("_raw")
                else "codes"
                if "_plane" in s.name
                else "outliers"
                if "_outlier" in s.name
                else "scales"
            )
            kinds[kind] += s.nbytes * self.num_kv_heads
        kinds["padding"] = self.page_size_bytes - sum(kinds.values())
        return kinds
