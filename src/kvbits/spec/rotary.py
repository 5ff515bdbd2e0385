"""The rotary embedding of a layer, as far as a cache must know it to turn keys back and forth (arXiv:2104.09864)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import SpecError
from .codec import choice, serialisable


@serialisable
@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Channel pair i of a key at position p is turned by p * inv_freq[i] radians.

    Attributes:
        inv_freq: radians per token of each pair; scaled variants (linear, llama3, yarn, longrope) have their scaling in
            it. A factor on the length of keys (yarn, longrope) needs no record: it stays in the key.
        pairs: "half" pairs channel i with i + n of the first 2n channels (Llama), "interleaved" 2i with 2i + 1 (GPT-J,
            Cohere). Channels past 2n are not turned.
    """

    inv_freq: tuple[float, ...]
    pairs: str = "half"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", tuple(float(f) for f in self.inv_freq))
        choice("pairs", self.pairs, ("half", "interleaved"))
        if not self.inv_freq or not all(math.isfinite(f) for f in self.inv_freq):
            raise SpecError(f"inv_freq of {len(self.inv_freq)} entries must hold finite numbers, one per channel pair")

    def frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Return radians per token of pair (d, d + head_dim / 2) in `order`; 0 for channels that are not turned."""
        n = len(self.inv_freq)
        if 2 * n > head_dim:
            raise SpecError(f"a rotary embedding of {n} pairs does not fit head_dim={head_dim}")
        return self.inv_freq + (0.0,) * (head_dim // 2 - n)

    def order(self, head_dim: int) -> tuple[int, ...]:
        """Return the model's channel that each stored channel holds, so that every turned pair is (d, d + head_dim /
        2).
        """
        n, rest = len(self.inv_freq), head_dim // 2 - len(self.inv_freq)
        first, second = (
            (range(n), range(n, 2 * n)) if self.pairs == "half" else (range(0, 2 * n, 2), range(1, 2 * n, 2))
        )
        return (*first, *range(2 * n, 2 * n + rest), *second, *range(2 * n + rest, head_dim))
