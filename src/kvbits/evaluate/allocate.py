"""Choice of how many bits each layer gets. It follows the lower convex hull of KL against bytes, from the cheapest
choice to the dearest. The module handles numbers only.

Every layer has options. Each option has its bytes and the KL that it is expected to cost. On the hull, each next option
of a layer buys less KL per byte than the one before. So the best purchase of all layers is taken again and again. At
every step, this gives the least sum of KL for the bytes spent (up to one purchase).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import SpecError
from ..spec import QuantSpec
from ..units import human_bytes


@dataclass(frozen=True)
class Option:
    """One way to store a layer.

    Attributes:
        nbytes: what the layer takes so.
        kl: what it is expected to cost, nats per token.
    """

    key: QuantSpec
    value: QuantSpec
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Step:
    """A choice for all layers: `options[layer]`, with its bytes and sum of KL."""

    options: tuple[Option, ...]
    nbytes: int
    kl: float


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of KL against bytes: ascending bytes, descending KL, each purchase of
    less KL a byte than the one before.
    """
    found: list[Option] = []
    for new in sorted(options, key=lambda o: (o.nbytes, o.kl)):
        if found and new.kl >= found[-1].kl:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-2], new):
            found.pop()
        found.append(new)
    return found


def _slope(a: Option, b: Option) -> float:
    """Return KL taken off for each byte more."""
    return (a.kl - b.kl) / (b.nbytes - a.nbytes) if b.nbytes > a.nbytes else math.inf


def walk(layers: Sequence[Sequence[Option]], budget: int | None = None) -> list[Step]:
    """Return choices from the cheapest on, each with the best next purchase of any layer; with a budget, purchases that
    would pass it are left out.

    Args:
        layers: options of each layer.

    Raises:
        SpecError: the cheapest choice takes more than the budget.
    """
    hulls = [hull(options) for options in layers]
    at = [0] * len(hulls)
    nbytes, kl = sum(h[0].nbytes for h in hulls), math.fsum(h[0].kl for h in hulls)
    if budget is not None and nbytes > budget:
        raise SpecError(
            f"even in the fewest bits this cache takes {human_bytes(nbytes)}, more than the {human_bytes(budget)} that"
            " are there"
        )
    steps = [Step(tuple(h[0] for h in hulls), nbytes, kl)]
    queue = [(-_slope(h[0], h[1]), layer) for layer, h in enumerate(hulls) if len(h) > 1]
    heapq.heapify(queue)
    while queue:
        _, layer = heapq.heappop(queue)
        old, new = hulls[layer][at[layer] : at[layer] + 2]
        if budget is not None and nbytes + new.nbytes - old.nbytes > budget:
            continue
        at[layer] += 1
        nbytes, kl = nbytes + new.nbytes - old.nbytes, kl + new.kl - old.kl
        steps.append(Step(tuple(h[i] for h, i in zip(hulls, at, strict=True)), nbytes, max(kl, 0.0)))
        if at[layer] + 1 < len(hulls[layer]):
            heapq.heappush(queue, (-_slope(*hulls[layer][at[layer] : at[layer] + 2]), layer))
    return steps


def dealt(shares: Sequence[float], bits: int, error: Callable[[int], float]) -> tuple[int, ...]:
    """Deal out bits to bands of keys, each next one where it takes off most expected error. Above 6 bits a band has 8.

    Args:
        shares: what an error of each band costs.
        bits: of all bands together.
        error: squared error of a number of variance 1 at so many bits.
    """
    found = [0] * len(shares)
    while (left := bits - sum(found)) > 0:
        wider = [b + (2 if b == 6 else 1) if b < 8 else b for b in found]
        gains = [
            s * (error(b) - error(w)) / (w - b) if 0 < w - b <= left else -1.0
            for s, b, w in zip(shares, found, wider, strict=True)
        ]
        best = max(range(len(found)), key=gains.__getitem__)
        if gains[best] < 0:
            break
        found[best] = wider[best]
    return tuple(found)
