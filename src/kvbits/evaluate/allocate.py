"""Choice of how many bits each layer gets. It follows the lower convex hull of KL against bytes, from the cheapest
choice to the dearest. The module handles numbers only.

Every layer has options. Each option has its bytes and the KL that it costs alone. On the hull, each next option of a
layer buys less KL per byte than the one before. So the best purchase of all layers is taken again and again. At every
step, this gives the least sum of KL for the bytes spent (up to one purchase).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SpecError
from ..spec import QuantSpec
from ..units import human_bytes


@dataclass(frozen=True)
class Option:
    """One way to store a layer.

    Attributes:
        nbytes: what the layer takes so.
        kl: what it costs alone, nats.
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
    """The options on the lower convex hull of KL against bytes: ascending bytes, descending KL, each purchase of less
    KL a byte than the one before.
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
    """KL taken off for each byte more."""
    return (a.kl - b.kl) / (b.nbytes - a.nbytes) if b.nbytes > a.nbytes else math.inf


def walk(layers: Sequence[Sequence[Option]], budget: int | None = None) -> list[Step]:
    """Choices from the cheapest on, each with the best next purchase of any layer; with a budget, purchases that would
    pass it are left out.

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


def tempered(kl: Sequence[float], temperature: float) -> list[float]:
    """Sensitivities drawn towards their geometric mean: 1 leaves them, 0 makes all alike.

    What one layer costs alone says too much about the extremes.
    """
    positive = [x for x in kl if x > 0]
    if not positive:
        return list(kl)
    mean = math.exp(math.fsum(map(math.log, positive)) / len(positive))
    return [mean * (x / mean) ** temperature if x > 0 else 0.0 for x in kl]


class Curve:
    """Prediction of the whole cache's KL from a sum of KLs of single layers. The curve is measured at choices where all
    layers are alike. Between these points and beyond them it is straight in logarithms.

    Args:
        points: (sum of single layers, measured whole), nats.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._points = sorted((math.log(a), math.log(b)) for a, b in points if a > 0 and b > 0)

    def __call__(self, total: float) -> float:
        """Predicted KL of the whole cache, nats."""
        known = self._points
        if total <= 0 or not known:
            return max(total, 0.0)
        x = math.log(total)
        if len(known) == 1 or x <= known[0][0]:
            return math.exp(x - known[0][0] + known[0][1])
        if x >= known[-1][0]:
            return math.exp(x - known[-1][0] + known[-1][1])
        (x0, y0), (x1, y1) = next((a, b) for a, b in itertools.pairwise(known) if x <= b[0])
        return math.exp(y0 + (x - x0) / (x1 - x0) * (y1 - y0))
