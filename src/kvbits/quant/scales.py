"""Scales of trellis codes: one 8-bit float per token, fitted to integers of the same widths.

Numbers come in units in which a step of 1 is about right for every channel (keys: the calibrated basis has the
channels' spread in it), so one scale per token says only how loud the token is. It is fitted, not the maximum, to plain
integers x ~ (code - (2**b - 1) / 2) * scale of b bits, which the best scale of trellis codes is also that of:

    s0 = sqrt(mean((x STEP[b])**2)) over the channels that have bits, as an 8-bit float: the scale of a Gaussian token
    of the 8-bit float 1 above it and those 4 below and above that the one with the least squared error; then of that
    one and those 2 below and above; then of that one and those 1 below and above (`OFFSETS`). The first of equals. Rows
    multiplied by a Hadamard matrix come close to Gaussian ones; for them: of s0 and those 2 below and above, then 1
    (`TURNED_OFFSETS`)
    fitted levels (1 3 5 9 quarters of a scale) reach farther: `FITTED_OFFSET`, two 8-bit floats lower

Scales (`float8_e5m3`) have 5 bits of exponent, 3 of mantissa and no sign: the byte is bits 7 to 14 of the number in
float16, so a reader shifts and has it. None is below 2**-17 (code 1), none above 61,440 (code 247).
"""

from __future__ import annotations

import functools

import torch

from ..errors import ScaleOverflowError
from ..spec import BAND, QuantSpec

STEP = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
"""Step of the best uniform mid-rise quantizer of a Gaussian of variance 1, by bits (J.

Max, IRE Trans. Inf. Theory 6(1), 1960, table II).
"""
OFFSETS = ((1,), (-4, 4), (-2, 2), (-1, 1))
"""8-bit floats that are tried, counted from s0, then from the best so far. 7 of the 15 from 6 below to 8 above: on
keys of SmolLM2-135M the squared error is 0.2 % above that of trying 13 (values: none). Those 7 and 8 above are few
tokens' and matter: without them the squared error stays, but `klt4`'s KL on SmolLM2 is two to five times as large
(docs/results/log/gpu-kernels.md).
"""
TURNED_OFFSETS = ((0,), (-2, 2), (-1, 1))
"""Those of a Gaussian of 128 channels miss the least squared error by less than 0.02 % with 2 and 3 bits, 0.13 % with
4.
"""
FITTED_OFFSET = -2
"""Distance from the 8-bit float that is best for integers to that of fitted levels."""
SMALLEST_CODE, LARGEST_CODE = 1, 247


def scale_codes(x: torch.Tensor) -> torch.Tensor:
    """Return int32 codes of the 8-bit floats nearest to x >= 0, from `SMALLEST_CODE` to `LARGEST_CODE`; ties go up."""
    return ((x.clamp(max=65504.0).half().view(torch.int16).int() + 64) >> 7).clamp(SMALLEST_CODE, LARGEST_CODE)


def scale_values(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 values of 8-bit float codes (any integer dtype)."""
    return (codes.int() << 7).to(torch.int16).view(torch.float16).float()


@functools.lru_cache(maxsize=64)
def _by_channel(widths: tuple[int, ...], head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [head_dim] each: highest code, and `STEP` (0 where a channel has no bits)."""
    top = torch.tensor([2.0**b - 1 for b in widths], device="cpu").repeat_interleave(BAND)[:head_dim]
    return top, torch.tensor([STEP.get(b, 0.0) for b in widths], device="cpu").repeat_interleave(BAND)[:head_dim]


def steps(spec: QuantSpec, head_dim: int) -> torch.Tensor:
    """Return float32 [head_dim]: `STEP` of each channel's width, 1 where it has none."""
    step = _by_channel(spec.widths(head_dim), head_dim)[1]
    return torch.where(step > 0, step, 1.0)


def fitted_scales(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Return float32 [..., tokens]: the scale of each token of x [..., tokens, head_dim], float32, whose mean is taken
    off.

    Raises:
        ScaleOverflowError: a token so large that its scale overflows 8 bits.
    """
    top, step = (t.to(x.device) for t in _by_channel(spec.widths(x.shape[-1]), x.shape[-1]))
    start = (x * step).square().sum(-1).div(float((step > 0).sum())).sqrt()
    largest = scale_values(torch.tensor(LARGEST_CODE, device="cpu")).item()
    if not bool((start <= largest).all()):
        raise ScaleOverflowError(
            f"a scale of magnitude {start.max().item():.3g} overflows {spec.scale_dtype}, which ends at {largest:g};"
            " keep the layer raw (an Override)"
        )
    best, least = scale_codes(start), torch.full_like(start, torch.inf)
    for offsets in TURNED_OFFSETS if spec.basis == "hadamard" else OFFSETS:
        around = best
        for offset in offsets:
            codes = (around + offset).clamp(SMALLEST_CODE, LARGEST_CODE)
            scale = scale_values(codes).unsqueeze(-1)
            integers = torch.addcmul(top / 2, x, scale.reciprocal()).round().clamp(min=0).minimum(top)
            error = ((x - (integers - top / 2) * scale) * (step > 0)).square().sum(-1)
            best, least = torch.where(error < least, codes, best), torch.minimum(error, least)
    if spec.levels == "fitted":
        best = (best + FITTED_OFFSET).clamp(min=SMALLEST_CODE)
    return scale_values(best)
