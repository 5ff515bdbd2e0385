"""Largest errors of a round trip through codes, from the arithmetic of `quant`."""

import torch

from kvbits.quant import trellis as coder
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


def trellis(x: torch.Tensor, spec: QuantSpec, scale: torch.Tensor) -> torch.Tensor:
    """Largest |x - dequantize(quantize(x))| per element of x [..., tokens, head_dim], whose mean is taken off: a path may
    take a channel to the coset whose nearest level is farthest.
    """
    u = x / scale.unsqueeze(-1) * coder.UNIT
    bound = u.abs()
    widths = spec.widths(x.shape[-1])
    of = torch.tensor(widths).repeat_interleave(16)[: x.shape[-1]]
    for bits in {*widths} - {0}:
        if bits == 8:
            far = torch.clamp(u.abs() - 255 * 32, min=32.0)
        else:
            levels = torch.tensor(coder.LEVELS[spec.levels][bits])
            far = torch.stack([(u.unsqueeze(-1) - levels[q::4]).abs().amin(-1) for q in range(4)]).amax(0)
        bound = torch.where(of == bits, far + 1, bound)  # u is rounded to half a unit
    return bound * (scale / coder.UNIT).unsqueeze(-1) + 2.0**-22 * x.abs()
