"""Attention over pages some of which no kernel reads packed beside pages that one reads: each by its own plan, merged by log-sum-exp. Such are banded pages
with low planes, which are unpacked to 16-bit rows (`unpack_then_flash`); all others keep their kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...types import AttendCall, Part, banded_sides
from ..merge import merge_partials


class _Plan(Protocol):
    q_positions: torch.Tensor

    def run(self, q: torch.Tensor, *, layer: int, static: Sequence[Mapping[str, torch.Tensor]] | None) -> tuple[torch.Tensor, torch.Tensor]: ...

    def explain(self) -> str: ...


def is_refined(part: Part) -> bool:
    """Whether a part's pages are banded codes with low planes."""
    return bool(part.low) and banded_sides(part.store.layout) is not None


def split(call: AttendCall) -> list[AttendCall]:
    """Calls over the parts that kernels may read packed and over those that they do not, without the empty one."""
    sides = [tuple(p for p in call.parts if is_refined(p) == refined) for refined in (False, True)]
    return [dataclasses.replace(call, parts=parts) for parts in sides if parts]


class SplitPlan:
    """One plan for each call of `split`; same use as `Plan`.

    Args:
        make: makes the plan of one of the calls, given its `layer_strides`.
        layer_strides: of each part of `call`, as for `Plan`.

    Attributes:
        q_positions: int64 [B, num_queries] on the device, those of all plans.
    """

    def __init__(self, call: AttendCall, make: Callable[..., Any], layer_strides: tuple[int, ...] | None) -> None:
        calls = split(call)
        self._parts = [[i for i, p in enumerate(call.parts) if is_refined(p) == is_refined(x.parts[0])] for x in calls]
        self._plans: list[_Plan] = [
            make(x, layer_strides=layer_strides and tuple(layer_strides[i] for i in mine)) for x, mine in zip(calls, self._parts, strict=True)
        ]
        self.q_positions = self._plans[-1].q_positions

    def run(
        self, q: torch.Tensor, q_positions: torch.Tensor | None = None, *, layer: int = 0, static: Sequence[Mapping[str, torch.Tensor]] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, T, Hq, D] in q's dtype, lse float32 [B, T, Hq]); arguments as of `Plan.run`."""
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        found = []
        for plan, mine in zip(self._plans, self._parts, strict=True):
            if plan.q_positions is not self.q_positions:
                plan.q_positions.copy_(self.q_positions)
            found.append(plan.run(q, layer=layer, static=static and [static[i] for i in mine]))
        if len(found) == 1:
            return found[0]
        outs, lses = zip(*found, strict=True)
        return merge_partials(outs, lses)

    def explain(self) -> str:
        """How each of the plans reads its pages."""
        return "\n".join(plan.explain() for plan in self._plans)
