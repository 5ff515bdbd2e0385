"""Meaning of a page's bytes to a kernel: keys or values of a `PageLayout` as named numbers, made once.

Every backend's form of it is an encoder of `Side`.

    C structs of the CPU library    ops/cpu/structs.py
    macros of CUDA kernels          ops/cuda/side.py

The numbers of dtypes, number formats, levels and kinds of scales are the same everywhere. C++ and CUDA read them from
`numbers.h`, which this module writes (`python -m kvbits.ops.descriptor`); a test holds the two equal. What a number
format is comes from `spec.quant.FORMATS` alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..quant.scales import STEP
from ..quant.trellis import FARTHEST, RING, UNIT
from ..spec import BAND, FRAME, MEAN_STEP, OFFSETS, PageLayout, PerChannel, QuantSpec, plane_row_bytes
from ..spec.quant import DTYPE_BYTES, SCALE_BYTES, NumberFormat
from ..spec.quant import FORMATS as NUMBER_FORMATS

DTYPES = {name: i for i, name in enumerate(SCALE_BYTES)}
"""Numbers of dtypes: raw rows (the first ones), scales, biases and means."""
TORCH_NUMBERS = {getattr(torch, name): DTYPES[name] for name in DTYPE_BYTES}
"""The same of raw rows by torch's dtype."""
MATRIX_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Dtypes whose numbers matrix units of GPUs multiply, by name."""
FORMATS = {name: i for i, name in enumerate(["raw", *(n for n in NUMBER_FORMATS if n != "raw")])}
_FLOATS = [f.name for f in NUMBER_FORMATS.values() if f.kind == "float"]
_KINDS = ("int", *_FLOATS, "raw", "codebook", "trellis")
LEVELS = {name: i for i, name in enumerate(_KINDS)}
"""Meanings of a code: an integer, a float of one of the formats, a raw number, an entry of a calibrated codebook,
one of twice as many levels as its width has codes.
"""
STATIC, GROUP, CHANNEL = 0, 1, 2
SCALES = {"static": STATIC, "group": GROUP, "channel": CHANNEL}
"""Sharers of a scale: channels of all pages (calibrated), a group of channels of a token, a channel of a page's tokens.
"""
HEADER = Path(__file__).parent / "numbers.h"


def levels_of(fmt: NumberFormat) -> int:
    """Return the number of what a format's codes stand for."""
    return LEVELS[fmt.name if fmt.kind == "float" else fmt.kind]


def scale_kind(spec: QuantSpec) -> int:
    """Return STATIC, GROUP or CHANNEL."""
    return STATIC if spec.static else CHANNEL if isinstance(spec.granularity, PerChannel) else GROUP


@dataclass(frozen=True, kw_only=True)
class Side:
    """Keys or values of a page. Offsets are bytes from the start of a head struct, None where the page has no such
    section.

    Attributes:
        name, format, levels, planes: the number format, its number, what its codes stand for, and the bits of its
            planes.
        exponent_bits, mantissa_bits: of a float behind its sign, else 0.
        dtype, scale_dtype: numbers of the dtypes of raw rows; of scales, biases, means, stretches and listed elements.
        scale: STATIC, GROUP or CHANNEL.
        group, groups: channels that share a scale within a token, and how many such groups there are (group 1: a scale
            for each channel).
        zero: the code that means 0 before biases and means.
        has_bias, has_mean, turned: whether codes are asymmetric, the page is centred, keys are from before the rotary
            embedding.
        offsets: whether constants of the model are taken off (`k_offsets`).
        widths, basis, fitted: of trellis codes, bits of each band of 16 channels (the planes then hold some channels
            each), what they are multiplied by, and whether levels are 1, 3, 5 and 9 quarters of a scale.
        row_bytes, plane_offset: of a token in each plane; of raw rows and their section where the tensor is raw.
        outliers, index_bytes: listed elements of a page, and the width of their indices.
    """

    name: str
    format: int
    levels: int
    exponent_bits: int
    mantissa_bits: int
    planes: tuple[int, ...]
    dtype: int
    scale_dtype: int
    scale: int
    group: int
    groups: int
    zero: int
    has_bias: bool
    has_mean: bool
    offsets: bool
    turned: bool
    widths: tuple[int, ...]
    basis: str | None
    fitted: bool
    row_bytes: tuple[int, ...]
    plane_offset: tuple[int, ...]
    scale_offset: int | None
    bias_offset: int | None
    mean_offset: int | None
    stretch_offset: int | None
    outliers: int
    index_bytes: int
    outlier_index_offset: int | None
    outlier_value_offset: int | None

    @property
    def is_raw(self) -> bool:
        return self.format == FORMATS["raw"]

    @property
    def packed_widths(self) -> int:
        """Bits of each band, four of them for each, the first lowest."""
        return sum(bits << 4 * i for i, bits in enumerate(self.widths))

    def offset_of_plane(self, bits: int) -> int:
        """Return where the plane of so many bits lies among those of trellis codes, or 0 where there is none."""
        return dict(zip(self.planes, self.plane_offset, strict=True)).get(bits, 0)

    def plane(self, i: int) -> tuple[int, int, int]:
        """Return (bits, bytes of a token's row, offset) of plane i, zeros where the format has fewer."""
        return (self.planes[i], self.row_bytes[i], self.plane_offset[i]) if i < len(self.planes) else (0, 0, 0)


@functools.lru_cache(maxsize=512)
def describe(layout: PageLayout, kind: str) -> Side:
    """Return keys (kind "k") or values ("v") of a layout."""
    spec = layout.key if kind == "k" else layout.value
    d, fmt = layout.dim(kind), spec.number_format
    planes = spec.planes(d)

    def offset(name: str) -> int | None:
        section = layout.sections.get(f"{kind}_{name}")
        return section.offset if section else None

    stored = ["raw"] if spec.is_raw else [f"plane{i}" for i in range(len(planes))]
    groups = 1 if spec.is_raw else spec.num_groups(d)
    return Side(
        name=spec.format,
        format=FORMATS[spec.format],
        levels=levels_of(fmt),
        exponent_bits=fmt.exponent_bits,
        mantissa_bits=fmt.mantissa_bits,
        planes=tuple(bits for bits, _ in planes),
        dtype=DTYPES[layout.raw_dtype],
        scale_dtype=DTYPES[spec.scale_dtype],
        scale=scale_kind(spec),
        group=d // groups,
        groups=groups,
        zero=spec.zero,
        has_bias=spec.has_bias,
        has_mean=spec.has_mean,
        offsets=spec.has_offsets,
        turned=spec.pre_rope,
        widths=spec.widths(d),
        basis=spec.basis,
        fitted=spec.levels == "fitted",
        row_bytes=tuple(plane_row_bytes(channels, bits) for bits, channels in planes)
        or (d * DTYPE_BYTES[layout.raw_dtype],),
        plane_offset=tuple(layout.sections[f"{kind}_{name}"].offset for name in stored),
        scale_offset=offset("scale"),
        bias_offset=offset("bias"),
        mean_offset=offset("mean"),
        stretch_offset=offset("stretch"),
        outliers=spec.num_outliers(layout.page_size, d),
        index_bytes=2 if layout.outlier_index_dtype == "uint16" else 4,
        outlier_index_offset=offset("outlier_index"),
        outlier_value_offset=offset("outlier_value"),
    )


def header() -> str:
    """Return the text of `numbers.h`."""
    short = {name: name.split("_")[1].upper() for name in _FLOATS} | {
        "int": "INTEGER",
        "raw": "RAW",
        "codebook": "CODEBOOK",
        "trellis": "TRELLIS",
    }
    rows = []
    for name in FORMATS:
        fmt = NUMBER_FORMATS[name]
        first, second = (*fmt.planes, 0, 0)[:2]
        bits, ends = (
            f"{first}, {second}, {fmt.exponent_bits}, {fmt.mantissa_bits}",
            f"{fmt.max_value:.1f}f, {fmt.saturates_at:.1f}f",
        )
        rows.append(f"        {{{short[name if fmt.kind == 'float' else fmt.kind]}, {bits}, {ends}}},  // {name}")
    return "\n".join(
        [
            (
                "// Numbers by which kernels know what a page stores, and what its number formats are. Written by"
                " `python -m kvbits.ops.descriptor`; a test compares."
            ),
            "#pragma once",
            "",
            "// Dtypes of raw rows, scales, biases, means.",
            _enum("Dtype", {name.upper(): i for name, i in DTYPES.items()} | {"NUM_RAW_DTYPES": len(DTYPE_BYTES)}),
            "// What a code stands for.",
            _enum("LevelKind", {short[name]: i for name, i in LEVELS.items()}),
            "// Who shares a scale.",
            _enum("ScaleKind", {f"SCALE_{name.upper()}": i for name, i in SCALES.items()}),
            _enum(
                "Format", {f"FORMAT_{name.upper()}": i for name, i in FORMATS.items()} | {"NUM_FORMATS": len(FORMATS)}
            ),
            (
                "// Trellis codes: channels of a band, positions of a frame and of a mean in it, rows of offsets"
                " (quant/basis.py); channels of a ring, parts of a scale, the largest of them (quant/trellis.py)."
            ),
            _enum(
                "Trellis",
                {"BAND": BAND, "FRAME": FRAME, "MEAN_STEP": MEAN_STEP, "OFFSETS": OFFSETS}
                | {"RING": RING, "UNIT": UNIT, "FARTHEST": FARTHEST},
            ),
            "",
            (
                "/// Codes lie in one or two bit planes, high bits first (trellis ones in those of their widths)."
                " For floats: the bits behind the sign, the largest value, and where rounding passes it."
            ),
            "struct NumberFormat {",
            "    int levels, bits0, bits1, exponent_bits, mantissa_bits;",
            "    float max_value, saturates_at;",
            "};",
            "constexpr NumberFormat number_format(int format) {",
            "    constexpr NumberFormat all[NUM_FORMATS] = {",
            *rows,
            "    };",
            "    return all[format];",
            "}",
            "",
            (
                "/// Step of the best uniform quantizer of a Gaussian of variance 1 at a band's bits (quant/scales.py),"
                " 0 where it has none."
            ),
            "constexpr float band_step(int bits) {",
            f"    constexpr float all[9] = {{{', '.join(f'{STEP.get(bits, 0.0)}f' for bits in range(9))}}};",
            "    return all[bits];",
            "}",
            "",
        ]
    )


def _enum(name: str, numbers: dict[str, int]) -> str:
    return f"enum {name} {{ " + ", ".join(f"{key} = {i}" for key, i in numbers.items()) + " };"


if __name__ == "__main__":
    HEADER.write_text(header())
