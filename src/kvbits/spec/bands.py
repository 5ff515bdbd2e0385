"""Number of bits that each band of channels has, at any head_dim: `widths`.

Channels of a calibrated basis come with the most important first, and the shares of their variance are much the same in
every model: `SHARES` are those of Gemma-3-270M (head_dim 256; geometric mean over layers, two windows of 1,024 tokens
of WikiText-2). Dealt out by them, bands of 64 channels are 5 3 2 0 at a mean of 2.5 bits and 6 4 3 1 at 3.5, which is
also what SmolLM2-135M and Qwen2.5-Coder-0.5B get from their own variances.
"""

from __future__ import annotations

import functools
import itertools

from ..errors import SpecError

BAND = 16
"""Channels of a band: those of trellis codes that have one width: a ring of keys, a step of the matrix units."""
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
PLANES = (8, 4, 2, 1)
"""Planes that a width is a sum of, high bits of a code first."""
MOST_DEALT = 6
SHARES = (
    0.82044,
    0.06787,
    0.03439,
    0.0209,
    0.01436,
    0.0105,
    0.00792,
    0.00613,
    0.0048,
    0.00377,
    0.00292,
    0.00222,
    0.00163,
    0.00115,
    0.00076,
    0.00025,
)
DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104)
"""Squared error of the best uniform quantizer of a Gaussian of variance 1 at 0, 1, .. bits (J.

Max, IRE Trans. Inf. Theory 6(1), 1960).
"""


@functools.lru_cache(maxsize=256)
def widths(bands: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """Return bits of each band of a head: `bands` where they are as many as the head has, else as many bits in the
    mean, dealt out anew.

    The last band is narrower where head_dim is not a multiple of `BAND`.

    Raises:
        SpecError: the mean cannot be dealt out: above `MOST_DEALT` bits a band, or less than 2 bits in all.
    """
    count = -(-head_dim // BAND)
    if len(bands) == count:
        return bands
    if len(set(bands)) == 1:
        return bands[:1] * count
    mean = sum(bands) / len(bands)
    if mean > MOST_DEALT or mean * count < 2:
        raise SpecError(
            f"bands={bands} are those of head_dim {len(bands) * BAND}; head_dim={head_dim} has {count}, and {mean:g}"
            f" bits in the mean cannot be dealt out to them (at most {MOST_DEALT} a band, at least 2 in all); give"
            f" {count} widths"
        )
    return _dealt(mean, count)


def shares(count: int) -> tuple[float, ...]:
    """Return the share of the variance that each of `count` bands of a head has, the most important first."""
    sums = [0.0, *itertools.accumulate(SHARES)]

    def below(share: float) -> float:
        at = min(share * len(SHARES), len(SHARES) - 1e-9)
        return sums[int(at)] + (at - int(at)) * SHARES[int(at)]

    return tuple(below((i + 1) / count) - below(i / count) for i in range(count))


def _dealt(mean: float, count: int) -> tuple[int, ...]:
    """Return bits for `count` bands, each next one where it takes off most squared error.

    An even number of them: 1-bit planes of two bands fill whole words.
    """
    energy, found = shares(count), [0] * count
    for _ in range(int(mean * count) // 2 * 2):
        gains = [
            e * (DISTORTION[b] - DISTORTION[b + 1]) if b < MOST_DEALT else 0.0
            for e, b in zip(energy, found, strict=True)
        ]
        found[gains.index(max(gains))] += 1
    return tuple(found)
