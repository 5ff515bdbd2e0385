"""Largest errors of a round trip through codes, from the arithmetic of `quant`."""

import torch

from kvbits.quant import banded as banded_codes
from kvbits.quant.qparams import UNIT_ROUNDOFF, QParams, expand
from kvbits.spec import QuantSpec


def plain(spec: QuantSpec, qparams: QParams, head_dim: int) -> torch.Tensor:
    """Largest |x - dequantize(quantize(x))| per element, [..., tokens or 1, head_dim], for scales taken from x itself."""
    u = UNIT_ROUNDOFF[spec.scale_dtype]
    scale = expand(qparams.scale, spec, head_dim)
    if spec.number_format.kind == "float":
        return scale * spec.number_format.max_value * (2.0 ** -(spec.number_format.mantissa_bits + 1) + u)
    bound = scale * (0.5 + spec.q_max * u)
    if qparams.bias is not None:
        bound = bound + u * expand(qparams.bias, spec, head_dim).abs()
    return bound + 2.0**-22 * (0 if qparams.mean is None else qparams.mean.abs().unsqueeze(-2))


def banded(x: torch.Tensor, spec: QuantSpec, scale: torch.Tensor) -> torch.Tensor:
    """Largest |x - dequantize(quantize(x))| per element of x [..., tokens, head_dim], whose mean is taken off."""
    top, step = banded_codes._of(spec, x)
    s = scale.unsqueeze(-1)
    bound = torch.maximum(s * (0.5 + 2.0**-15), x.abs() - s * top / 2)
    return torch.where(step > 0, bound, x.abs()) + 2.0**-22 * x.abs()
