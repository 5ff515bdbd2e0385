"""Exact percentile ranges of a stream of keys or values, in bounded memory.

    symmetric:   r = P_p(|x|), the range is [-r, r]
    asymmetric:  [P_(100-p)/2 (x), P_(100+p)/2 (x)], so either way a share 1 - p/100 of the elements is clipped

A percentile near 100 needs only the tail: of N elements, linear interpolation reads ranks floor((N-1) p/100) and the
next, so the N - floor((N-1) p/100) largest ones are kept (the same for the smallest if asymmetric) and the result is
that of `torch.quantile` over everything. At 99.9 the tails of all layers together take 0.1 % of the calibration text's
dense float32 cache (asymmetric: two tails of half the length): 8 MB for an 8B Llama on 32,768 tokens. A histogram or a
reservoir would be smaller still, but only approximate where it matters, at the outliers.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import torch

from ..errors import DataError, SpecError
from ..quant.qparams import SMALLEST_SCALE, choose_qparams, require_finite
from ..spec import PerChannel, PerTensor, QuantSpec
from .settings import require_percentile


class Ranges:
    """Ranges of one tensor (keys or values) of one layer.

    Args:
        spec: a static spec; its granularity says who shares a range.
        num_kv_heads, head_dim: shape of the layer.
        max_tokens: most tokens that will ever be added; the tails are sized for it.
        percentile: from 90 to 100; 100 keeps the largest magnitude itself.
        what: names the tensor in messages.

    Raises:
        SpecError: a percentile out of range, or a spec without static scales.
    """

    def __init__(
        self,
        spec: QuantSpec,
        num_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        percentile: float = 99.9,
        what: str = "x",
    ) -> None:
        require_percentile(percentile)
        if not spec.static:
            raise SpecError(f"{what}: {spec!r} takes its scales from each page; only static=True specs are calibrated")
        self.spec, self.num_kv_heads, self.head_dim, self.max_tokens, self.what = (
            spec,
            num_kv_heads,
            head_dim,
            max_tokens,
            what,
        )
        self.num_tokens = 0
        share = Fraction(str(percentile)) / 100
        self.quantile = (1 + share) / 2 if spec.has_bias else share
        self.tail_length = self._tail_ranks(max_tokens * self._elements_per_token)[0] + 1
        self.tails: list[torch.Tensor] = []  # [..., <= tail_length] largest first: of |x|, or of x and of -x

    @property
    def _elements_per_token(self) -> int:
        """Elements of one token that share a range."""
        if isinstance(self.spec.granularity, PerTensor):
            return self.num_kv_heads * self.head_dim
        return self.head_dim // self.spec.num_groups(self.head_dim)

    def _tail_ranks(self, count: int) -> tuple[int, int, float]:
        """Return (lower rank, upper rank, weight of the upper) of the percentile among `count` elements, counted from
        the largest.
        """
        position = max(count - 1, 0) * self.quantile
        low = position.numerator // position.denominator
        high = min(low + 1, max(count - 1, 0))
        return max(count - 1, 0) - low, max(count - 1, 0) - high, float(position - low)

    def add(self, x: torch.Tensor) -> None:
        """See tokens: `x` [tokens, H, D], any float dtype and device, padding already left out.

        Raises:
            DataError: another shape, NaN or infinity, or more tokens than announced.
        """
        if x.ndim != 3 or x.shape[1:] != (self.num_kv_heads, self.head_dim):
            raise DataError(
                f"{self.what} has shape {tuple(x.shape)}, expected [tokens, {self.num_kv_heads}, {self.head_dim}]"
            )
        if self.num_tokens + len(x) > self.max_tokens:
            raise DataError(
                f"{self.what}: {self.num_tokens + len(x)} tokens were added but max_tokens={self.max_tokens}"
            )
        if not len(x):
            return
        require_finite(x, self.what)
        self.num_tokens += len(x)
        values = self._grouped(x.float())
        streams = [values, -values] if self.spec.has_bias else [values.abs()]
        if self.tails:
            streams = [torch.cat(pair, -1) for pair in zip(self.tails, streams, strict=True)]
        self.tails = [s.topk(min(self.tail_length, s.shape[-1]), -1).values for s in streams]

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Return [heads or 1, groups, elements that share a range]."""
        if isinstance(self.spec.granularity, PerTensor):
            return x.reshape(1, 1, -1)
        groups = self.spec.num_groups(self.head_dim)
        return x.unflatten(-1, (groups, -1)).permute(1, 2, 0, 3).flatten(-2)

    def ranges(self) -> list[torch.Tensor]:
        """Return [r] or [low, high], each float32 [H, groups or channels] on the CPU.

        Raises:
            DataError: nothing was added.
        """
        if not self.num_tokens:
            raise DataError(f"{self.what}: no tokens were seen; give prompts longer than the skipped tokens")
        low, high, weight = self._tail_ranks(self.num_tokens * self._elements_per_token)
        # Both ends in float64: near-equal neighbours must not lose the interpolation to rounding.
        ends = [
            (t[..., low].double() * (1 - weight) + t[..., high].double() * weight).float().cpu() for t in self.tails
        ]
        ends = [e.expand(self.num_kv_heads, -1).contiguous() for e in ends]
        return [-ends[1], ends[0]] if self.spec.has_bias else ends

    def qparams(self) -> dict[str, torch.Tensor]:
        """Return {"scale"} or {"scale", "bias"}: float32 [H, groups or channels], rounded to the spec's scale_dtype.

        Where nothing but one number was seen, the scale is the largest of the others, or 1.
        """
        # A page of one or two tokens that holds just the ends, with a scale per column, has exactly these parameters.
        per_column = QuantSpec(
            format=self.spec.format,
            granularity=PerChannel(),
            symmetric=self.spec.symmetric,
            scale_dtype=self.spec.scale_dtype,
        )
        found = choose_qparams(torch.stack(self.ranges(), -2), per_column)
        # Text to come may leave a range that had no spread here; a smallest scale would clamp all of it.
        flat = found.scale <= SMALLEST_SCALE[self.spec.scale_dtype]
        if bool(flat.any()):
            widest = torch.where(flat.all(), 1.0, found.scale.max())
            found = dataclasses.replace(found, scale=torch.where(flat, widest, found.scale))
        return {"scale": found.scale} if found.bias is None else {"scale": found.scale, "bias": found.bias}
