"""Scales, biases and codes:  x ~ level(code) * scale * stretch + bias + mean.

Symmetric:   scale = max|x| / q_max, codes in [1, 2**b - 1] around zero = 2**(b-1)      (arXiv 2512 INT8 paper, eq. 6 to
             8, shifted by `zero`)
Asymmetric:  bias = min(x), scale = (max(x) - bias) / (2**b - 1), codes in [0, 2**b - 1]  (KIVI, arXiv:2402.02750)
Floats:      scale = max|x| / largest finite value, codes are the bits of the nearest float (FP8), half to even
Trellis:     scale fitted per token (`quant.scales`), widths by band of channels, codes of a ring chosen together
             (`quant.trellis`)
Codebook:    bias = (min + max) / 2, scale = max|x - bias|, codes number the nearest entry to (x - bias) / scale
             (KVQuant, arXiv:2401.18079)

With outliers the ranges leave out the elements that widen them most (`quant.outliers`).

Scale, bias and mean are rounded to their storage dtype first, and codes are taken against the rounded values. A bias is
rounded down, so nothing falls below code 0. A subnormal float16 scale is rounded up, so nothing falls past the last
code. Codes round half to even from x * (1 / scale) in float32. A group without spread stores the smallest scale and
decodes to its bias: readers that round weights times scales against the largest of a page (the CPU kernels) lose
nothing to it.

Error of one element (u = 2**-11 for float16, 2**-8 for bfloat16, 2**-24 for float32):

    |x - x'| <= scale * (0.5 + q_max * u) + u * |bias|
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from ..errors import DataError, ScaleOverflowError
from ..spec import SCALE_8BIT, PerChannel, PerToken, QuantSpec
from . import scales, trellis
from .outliers import trimmed_ends

TORCH_DTYPES = {
    name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "uint8", "uint16", "int32")
} | {SCALE_8BIT: torch.uint8}
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
SMALLEST_SCALE = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Smallest scale of each storage dtype: subnormal float16 numbers have float32 reciprocals, those of the others would
be infinite.
"""


@dataclass(frozen=True)
class QParams:
    """Scale, bias, mean and stretch of a run of pages, already rounded to storage precision, as float32, and the
    codebook.

    Shapes after the leading page and head dimensions: scale and bias as `QuantSpec.scale_shape` says, mean [head_dim],
    stretch [tokens]. The codebook is [num_kv_heads, 2**bits], ascending.
    """

    scale: torch.Tensor
    bias: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    stretch: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    def stored(self) -> dict[str, torch.Tensor]:
        """Return what a page holds of them, by section name without the side's prefix."""
        return {name: t for name in ("scale", "bias", "mean", "stretch") if (t := getattr(self, name)) is not None}


def choose_qparams(
    x: torch.Tensor, spec: QuantSpec, static: QParams | None = None, codebook: torch.Tensor | None = None
) -> QParams:
    """Return parameters for `x`: [..., tokens, head_dim] float32, one page per leading index.

    Args:
        static: calibrated parameters, [num_kv_heads, groups or channels]; used as they are when `spec.static`.
        codebook: of codebook formats, passed on.

    Raises:
        DataError: a scale overflows its storage dtype, or calibration is missing.
    """
    if spec.static:
        if static is None:
            raise DataError(
                f"{spec.format} with static scales was given no calibrated scales; calibrate first or use static=False"
            )
        return dataclasses.replace(static, codebook=codebook)
    mean = None
    if spec.has_mean:
        mean = rounded(x.double().mean(-2).float(), spec.offset_dtype)
        x = x - mean.unsqueeze(-2)
    if spec.is_trellis:
        return QParams(scales.fitted_scales(x, spec).unsqueeze(-2), None, mean)
    low, high = _ends(_grouped(x, spec), spec, spec.num_outliers(*x.shape[-2:]))
    if not spec.has_bias:
        return QParams(
            rounded_scale(divided(torch.maximum(-low, high), spec.q_max), spec.scale_dtype), None, mean, None, codebook
        )
    if spec.has_codebook:
        bias = rounded(low + (high - low) / 2, spec.scale_dtype)
        return QParams(
            rounded_scale(torch.maximum(high - bias, bias - low), spec.scale_dtype), bias, mean, None, codebook
        )
    bias = _rounded_down(low, spec.scale_dtype)
    return QParams(rounded_scale(divided(high - bias, spec.q_max), spec.scale_dtype), bias, mean)


def _ends(groups: torch.Tensor, spec: QuantSpec, num_outliers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (smallest, largest) element of each group, a page's `num_outliers` worst ones left out."""
    if not num_outliers:
        return groups.amin(-1), groups.amax(-1)
    shape = groups.shape[:-1]
    if not isinstance(spec.granularity, PerChannel):
        groups = groups.flatten(-3, -2)
    low, high = trimmed_ends(groups if spec.has_bias else groups.abs(), num_outliers, high_only=not spec.has_bias)
    return (low if spec.has_bias else -high).reshape(shape), high.reshape(shape)


def quantize(x: torch.Tensor, spec: QuantSpec, qparams: QParams, kind: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [..., tokens, head_dim], and bool: which elements lie past the ends of the code range.

    Args:
        kind: "k" or "v", which trellis codes ask for.
    """
    if spec.is_trellis:  # a fitted scale cuts off what costs less than a coarser step would
        away = x if qparams.mean is None else x - qparams.mean.unsqueeze(-2)
        widths, levels = spec.widths(x.shape[-1]), trellis.LEVELS[spec.levels]
        codes = trellis.quantize(away, widths, kind, qparams.scale.squeeze(-2), levels)
        return codes, torch.zeros_like(codes, dtype=torch.bool)
    scaled = normalize(x, spec, qparams)
    if spec.number_format.kind == "float":
        codes = scaled.clamp(-spec.q_max, spec.q_max).to(FP8_DTYPES[spec.format]).view(torch.uint8)
        return codes, scaled.abs() >= spec.number_format.saturates_at
    if spec.has_codebook:
        return _nearest(scaled, qparams.codebook), scaled.abs() > 1 + 2 * UNIT_ROUNDOFF[spec.scale_dtype]
    codes = scaled.round() + spec.zero
    low, high = spec.code_range
    return codes.clamp(low, high).to(torch.uint8), (codes < low) | (codes > high)


def _nearest(scaled: torch.Tensor, codebook: torch.Tensor | None) -> torch.Tensor:
    """Return numbers of the nearest codebook entries, uint8, ties to the lower: [..., H, tokens, D] with a codebook [H,
    entries].
    """
    if codebook is None:
        raise DataError("a codebook format was given no calibrated codebook; calibrate first")
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for i in range(codebook.shape[-1] - 1):
        codes += scaled > ((codebook[:, i] + codebook[:, i + 1]) * 0.5)[:, None, None]
    return codes


def _levels(codes: torch.Tensor, spec: QuantSpec, codebook: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return what codes stand for before the scale."""
    if spec.format in FP8_DTYPES:
        return codes.view(FP8_DTYPES[spec.format]).to(dtype)
    if not spec.has_codebook:
        return codes.to(dtype) - spec.zero
    if codebook is None:
        raise DataError("a codebook format was given no calibrated codebook; calibrate first")
    first = torch.arange(len(codebook), device=codes.device)[:, None, None] * codebook.shape[-1]
    return codebook.to(dtype).flatten()[codes.long() + first]


def normalize(x: torch.Tensor, spec: QuantSpec, qparams: QParams) -> torch.Tensor:
    """Return (x - mean - bias) / scale / stretch, in the order and precision that codes are taken in."""
    if qparams.mean is not None:
        x = x - qparams.mean.unsqueeze(-2)
    if qparams.bias is not None:
        x = x - expand(qparams.bias, spec, x.shape[-1])
    scaled = x * expand(qparams.scale.reciprocal(), spec, x.shape[-1])
    return scaled if qparams.stretch is None else scaled * qparams.stretch.reciprocal().unsqueeze(-1)


def dequantize(
    codes: torch.Tensor,
    spec: QuantSpec,
    qparams: QParams,
    dtype: torch.dtype = torch.float32,
    kind: str = "",
) -> torch.Tensor:
    """Return values [..., tokens, head_dim] of `codes`, computed in `dtype` (float64 for the judge), without outliers;
    `kind` as in `quantize`.
    """
    if spec.is_trellis:
        widths, levels = spec.widths(codes.shape[-1]), trellis.LEVELS[spec.levels]
        values = trellis.dequantize(codes, widths, kind, qparams.scale.squeeze(-2), levels, dtype)
    else:
        values = _levels(codes, spec, qparams.codebook, dtype)
        values = values * expand(qparams.scale.to(dtype), spec, codes.shape[-1])
    if qparams.stretch is not None:
        values = values * qparams.stretch.to(dtype).unsqueeze(-1)
    if qparams.bias is not None:
        values = values + expand(qparams.bias.to(dtype), spec, codes.shape[-1])
    if qparams.mean is not None:
        values = values + qparams.mean.to(dtype).unsqueeze(-2)
    return values


def require_finite(x: torch.Tensor, what: str) -> None:
    """Refuse NaN and infinity.

    Args:
        what: names the tensor and layer in the message.

    Raises:
        DataError: with the position of the first bad element.
    """
    # one pass for a token: any NaN or infinity reaches the sum
    if x.numel() < 1 << 14 and math.isfinite(x.sum(dtype=torch.float32).item()):
        return
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        bad = (~finite).nonzero()
        where = tuple(bad[0].tolist())
        raise DataError(
            f"{what} holds {x[where].item()} at position {where} ({len(bad)} of {x.numel()} elements are not finite); "
            "fix the model's numerics (float16 overflow is the usual cause: try bfloat16)"
        )


def expand(s: torch.Tensor, spec: QuantSpec, head_dim: int) -> torch.Tensor:
    """Broadcast a scale (or bias) to [..., tokens or 1, head_dim]."""
    if isinstance(spec.granularity, PerChannel):
        return s.unsqueeze(-2)
    s = s.unsqueeze(-2) if spec.static else s.transpose(-1, -2)
    return s.repeat_interleave(head_dim // s.shape[-1], dim=-1)


def _grouped(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Return a view with the elements that share a scale in the last dimension and the scales' own shape before it."""
    if isinstance(spec.granularity, PerChannel):
        return x.transpose(-1, -2)
    groups = 1 if isinstance(spec.granularity, PerToken) else spec.num_groups(x.shape[-1])
    return x.unflatten(-1, (groups, -1)).transpose(-2, -3)


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """Return x / number, correctly rounded: on GPUs torch multiplies by the reciprocal of a Python number, which is off
    in the last bit of some quotients.
    """
    return x / torch.tensor(float(number), dtype=x.dtype, device=x.device)


def stored(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return numbers that `dtype` can hold, float32, as a page's section of it takes them."""
    return scales.scale_codes(x).to(torch.uint8) if dtype == SCALE_8BIT else x


def read(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return float32 numbers of a page's section of `dtype`."""
    return scales.scale_values(x) if dtype == SCALE_8BIT else x.float()


def largest(dtype: str) -> float:
    """Return the largest number of a storage dtype of scales."""
    return (
        float(scales.scale_values(torch.tensor(scales.LARGEST_CODE, device="cpu")))
        if dtype == SCALE_8BIT
        else torch.finfo(TORCH_DTYPES[dtype]).max
    )


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return `x` as a storage dtype holds it, in float32. Raises ScaleOverflowError where it overflows."""
    y = x.to(TORCH_DTYPES[dtype]).float()
    if not bool(torch.isfinite(y).all()):
        raise ScaleOverflowError(
            f"a scale, bias or mean of magnitude {x.abs().max().item():.3g} overflows {dtype}; use"
            " scale_dtype='float32' or 'bfloat16'"
        )
    return y


def rounded_scale(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return scales as a storage dtype holds them, in float32: subnormal ones of float16 rounded up, none below
    `SMALLEST_SCALE`, 0 included.
    """
    y = rounded(scale, dtype)
    if dtype == "float16":
        y = torch.where(scale < 2.0**-14, torch.ceil(scale * 2.0**24) * 2.0**-24, y)
    return y.clamp(min=SMALLEST_SCALE[dtype])


def _rounded_down(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the largest value of `dtype` that is not above x; never -0, because which zero of a range is the smallest
    depends on the order of its elements.
    """
    x = x + 0.0
    y = rounded(x, dtype)
    if dtype == "float32":
        return y
    bits = y.to(TORCH_DTYPES[dtype]).view(torch.int16)
    # One step toward minus infinity: away from zero for negative numbers, toward it for positive ones.
    lower = torch.where(y == 0, torch.full_like(bits, -32767), torch.where(y > 0, bits - 1, bits + 1))
    return rounded(torch.where(y > x, lower.view(TORCH_DTYPES[dtype]).float(), y), dtype)
