"""Presets of the literature, each a few lines with its source.

`kvbits.schemes.get` finds them by name as it finds the core's.
"""

from __future__ import annotations

import dataclasses

from ..spec import PerChannel, PerGroup, PerToken, QuantSpec, Scheme, Tier

_PAPER = "https://github.com/MaanasTaneja/cuda-kv-cache-compression"
_KIVI = "https://arxiv.org/abs/2402.02750"
_FP8 = "https://arxiv.org/abs/2209.05433"
_SMOOTH_K = "https://arxiv.org/abs/2410.02367"
_KVQUANT = "https://arxiv.org/abs/2401.18079"

_INT8 = QuantSpec(format="int8", granularity=PerGroup(64))
_INT4 = QuantSpec(format="int4", granularity=PerGroup(32))
_INT2 = QuantSpec(format="int2", granularity=PerChannel(), symmetric=False)


def _nuq(bits: int, outliers: float) -> Scheme:
    value = QuantSpec(format=f"nuq{bits}", granularity=PerToken(), symmetric=False, outliers=outliers)
    listed = f", {outliers:.0%} outliers in 16 bits" if outliers else ""
    return Scheme(
        name=f"nuq{bits}" + (f"-{outliers:.0%}" if outliers else ""),
        key=dataclasses.replace(value, granularity=PerChannel(), pre_rope=True),
        value=value,
        num_sink_tokens=1,
        residual_length=128,
        source=_KVQUANT,
        description=(
            f"KVQuant: {bits}-bit calibrated codebooks, keys per channel of a page before the rotary embedding, values"
            f" per token{listed}"
        ),
    )


def _tiered(name: str, hot: int, warm: int, purpose: str) -> Scheme:
    return Scheme(
        name=name,
        key=QuantSpec(format="int4", granularity=PerChannel(), symmetric=False),
        value=QuantSpec(format="int4", granularity=PerToken(), symmetric=False),
        num_sink_tokens=4,
        residual_length=hot,
        tiers=(Tier(num_tokens=warm),),
        description=(
            f"{purpose}: 4 sinks and the newest {hot:,} tokens raw, the next {warm:,} with 8 bits, the rest with 4;"
            " pages are quantized again as they age"
        ),
    )


FAMILIES = ("kvbits.literature.kvquant.family",)
"""Modules with CUDA kernels for presets below; `kvbits.schemes` has them in its table."""

PRESETS: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme(
            name="int8_per_channel",
            key=QuantSpec(format="int8", granularity=PerChannel(), scale_dtype="float32"),
            value=QuantSpec(format="int8", granularity=PerChannel(), scale_dtype="float32"),
            source=_PAPER,
            description="one float32 scale per channel over a page, symmetric",
        ),
        Scheme(
            name="int8_per_token",
            key=QuantSpec(format="int8", granularity=PerToken()),
            value=QuantSpec(format="int8", granularity=PerToken()),
            description="one scale per token and head, symmetric",
        ),
        Scheme(
            name="int8_asym",
            key=QuantSpec(format="int8", granularity=PerToken(), symmetric=False),
            value=QuantSpec(format="int8", granularity=PerToken(), symmetric=False),
            description="one scale and offset per token and head",
        ),
        Scheme(
            name="int8_static",
            key=dataclasses.replace(_INT8, static=True),
            value=dataclasses.replace(_INT8, static=True),
            description="int8 with calibrated scales per layer, head and group of 64",
        ),
        Scheme(
            name="fp8",
            key=QuantSpec(format="fp8_e4m3", granularity=PerToken()),
            value=QuantSpec(format="fp8_e4m3", granularity=PerToken()),
            source=_FP8,
            description="E4M3 with one scale per token and head",
        ),
        Scheme(
            name="fp8_e5m2_keys",
            key=QuantSpec(format="fp8_e5m2", granularity=PerToken()),
            value=QuantSpec(format="fp8_e4m3", granularity=PerToken()),
            source=_FP8,
            description="E5M2 keys, E4M3 values, one scale per token and head",
        ),
        Scheme(
            name="int4_centered",
            key=dataclasses.replace(_INT4, center="channel", symmetric=False),
            value=dataclasses.replace(_INT4, symmetric=False),
            source=_SMOOTH_K,
            residual_length=64,
            description="asymmetric int4 in groups of 32 with each page's channel means of the keys kept apart",
        ),
        Scheme(
            name="int8k_int4v",
            key=_INT8,
            value=_INT4,
            residual_length=64,
            description="INT8 keys, grouped INT4 values: the fallback when 4-bit keys cost too much",
        ),
        Scheme(
            name="kivi2",
            key=_INT2,
            value=dataclasses.replace(_INT2, granularity=PerGroup(32)),
            residual_length=128,
            page_size=32,
            source=_KIVI,
            description=(
                "2-bit asymmetric, keys per channel over 32 tokens, values per token in groups of 32, newest 128"
                " tokens raw"
            ),
        ),
        *(_nuq(bits, outliers) for bits in (4, 3, 2) for outliers in (0.01, 0.0)),
        _tiered("tiered", 2048, 14336, "the tiers of the 32k example"),
        _tiered("tiered_8k", 512, 2048, "tiers for contexts of 8k, small models and edge devices"),
    )
}
