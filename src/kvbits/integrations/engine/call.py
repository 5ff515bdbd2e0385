"""Common properties of layers that are attended together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...ops.attend import Attention, plan
from ...ops.long_queries import Scratch
from ...ops.merge import Partial
from ...spec import PageLayout
from .served import Ring

RAW_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


Sink = Partial | None
"""A layer's learned sink as one more part of its results (`reference.merge.sink_part`), or None."""
Attend = Callable[..., torch.Tensor | None]
"""The engine's variable-length FlashAttention: a `Call`, then the arguments of `ops.long_queries.Attend`."""


@dataclass(frozen=True, eq=False)
class Call:
    """Properties that layers must have in common to be planned together.

    Attributes:
        num_heads: query heads of this rank.
        dtype: of the model.
        scratch: 16-bit rows that histories are unpacked to, shared by layers of one shape.
        attend: prompts' attention on a GPU, one function for all layers that have the same; None on a CPU.
        rings: copies of a request's pages, finest format first; none where pages are not copied.
    """

    layout: PageLayout
    num_heads: int
    dtype: torch.dtype
    scaling: float
    sliding_window: int | None
    softcap: float | None
    scratch: Scratch
    attend: Attend | None
    rings: tuple[Ring, ...]

    @property
    def layouts(self) -> list[PageLayout]:
        """Layouts of pages, then of the copies of each ring."""
        return [self.layout, *(ring.layout for ring in self.rings)]

    def plan(self, layouts: list[PageLayout], device: torch.device, **more: Any) -> Attention:
        """Plan attention over parts of these layouts; `more` has further arguments of `ops.attend.plan`."""
        return plan(
            layouts,
            num_q_heads=self.num_heads,
            dtype=self.dtype,
            device=device,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            **more,
        )


call_for = functools.lru_cache(maxsize=256)(Call)
"""The one `Call` of these fields."""
