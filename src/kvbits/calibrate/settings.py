"""Choices of a calibration, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError
from ..settings import setting

MIN_PERCENTILE = 90.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Choices of a calibration, as `calibrate` takes them.

    Attributes:
        percentile: share of elements inside the range, in percent; 100 takes the maximum. None: all but the outliers of
            a spec that has them, else 99.9.
        weights: of codebooks, "fisher" (squared gradients, one backward pass per prompt) or "none" (KVQuant's ablation;
            forward passes only).
        per_head: a codebook for each kv head instead of one for the layer.
        checkpointing: recompute activations layer by layer in the backward pass: less memory, a third more time.
        skip_tokens: first tokens of each prompt left out; None for the scheme's sinks, which are never quantized.

    Raises:
        SpecError: a percentile out of range, or unknown weights.
    """

    percentile: float | None = setting(
        None,
        "Percent of elements in the range of static scales, 90 to 100. If not given, 99.9, or all but the outliers.",
    )
    weights: str = setting("fisher", "Weights of codebooks: fisher (squared gradients) or none.")
    per_head: bool = setting(False, "Make one codebook for each kv head.")
    checkpointing: bool = setting(
        False, "Recompute activations in the backward pass of codebooks, which takes less memory."
    )
    skip_tokens: int | None = setting(
        None, "First tokens of each window to leave out; the scheme's sinks if not given.", least=0
    )

    def __post_init__(self) -> None:
        if self.percentile is not None:
            require_percentile(self.percentile)
        if self.weights not in ("fisher", "none"):
            raise SpecError(f"weights={self.weights!r} is not 'fisher' or 'none'")


def require_percentile(percentile: float) -> None:
    """Refuse a percentile out of range.

    Raises:
        SpecError: below `MIN_PERCENTILE` or above 100.
    """
    if not MIN_PERCENTILE <= percentile <= 100:
        raise SpecError(
            f"percentile={percentile} is outside {MIN_PERCENTILE:g} to 100; 99.9 is usual, 100 takes the maximum"
        )
