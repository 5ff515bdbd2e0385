"""merge: attention over disjoint sets of keys becomes attention over their union. Formats, parts, slices of a
history, a chunk behind its history and learned sinks are all joined by it. A backend's module has

    refuses(outs) -> str | None
    merge_partials(outs, lses, *, into=None) -> (out, lse)

whose arguments are

    outs    each [B, T, Hq, D]; others than the first may be 1 where it is more
    lses    each float32 [B, T, Hq], natural log of the sum of exponentiated scores; -inf where a set was empty
    into    takes the merged `out` if given; it may be one of `outs`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import dispatch

Partial = tuple[torch.Tensor, torch.Tensor]
"""Results and log-sum-exps over some of the keys."""


def choose(parts: Sequence[Partial]) -> dispatch.Choice:
    """Choose the backend that merges results like these."""
    return dispatch.choose("merge", [out for out, _ in parts])


def merge(
    parts: Sequence[Partial], *, into: torch.Tensor | None = None, choice: dispatch.Choice | None = None
) -> Partial:
    """Merge attention over disjoint sets of keys.

    Args:
        parts: out [B, T, Hq, D] and lse float32 [B, T, Hq] over each set.
        into: takes the merged `out` if given; it may be one of the parts'.
        choice: of the backend, if it was made before.

    Returns:
        out and lse float32 [B, T, Hq] over all keys; rows that saw no key at all are 0 and -inf.
    """
    outs, lses = (list(xs) for xs in zip(*parts, strict=True))
    return (choice or choose(parts)).run(outs, lses, into=into)
