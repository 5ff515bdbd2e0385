"""Right and wrong answers of two caches to the same questions: their difference, how sure it is, and whether it is
chance.

Only questions that the two answer unlike tell them apart: b that the 16-bit cache alone answers right, c that the other
alone does.

    difference   (c - b) / n, with a 95 % interval after Agresti and Min (2005): half a question is added to each of the
                 four cells, so that no disagreement at all leaves an interval of more than nothing
    p            how likely b and c are this uneven, or more, if the sign of each cluster's c - b is chance

Questions about one prompt are a cluster: their answers fail together. The interval takes as many questions as are
independent (Korn and Graubard, 1998), and a sign is drawn for each cluster. In clusters of one question each, p is
McNemar's exact test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Z = 1.959964
"""Standard errors of a 95 % interval."""
BOUNDS = ("difference_low", "difference_high")
"""Names of its ends, which `points` writes beside the difference."""
AGREEMENT_BOUNDS = ("agreement_low", "agreement_high")
"""Names of the ends of an agreement's interval, which `share` writes beside the agreement."""


Outcome = tuple[bool, bool]
"""(this cache right, the 16-bit cache right) of one question."""


def paired(clusters: Iterable[Sequence[Outcome]]) -> dict[str, Any]:
    """Return how the outcomes of two caches differ; nothing where there is no question.

    Args:
        clusters: outcomes of questions that depend on each other, such as those about one prompt.

    Returns:
        difference, difference_low, difference_high: of the shares that are right, and its 95 % interval.
        lost, gained: questions that the 16-bit cache alone, and this one alone, answers right.
        p: of the exact test, two-sided.
    """
    signs = [[int(own) - int(base) for own, base in some] for some in clusters if some]
    if not signs:
        return {}
    flat = [sign for some in signs for sign in some]
    lost, gained = flat.count(-1), flat.count(1)
    independent = count_independent(signs)
    n, (b, c) = independent + 2, (count * independent / len(flat) + 0.5 for count in (lost, gained))
    middle, width = (c - b) / n, Z * math.sqrt(b + c - (c - b) ** 2 / n) / n
    return {
        "difference": (gained - lost) / len(flat),
        "difference_low": max(-1.0, middle - width),
        "difference_high": min(1.0, middle + width),
        "lost": lost,
        "gained": gained,
        "p": sign_probability(list(map(sum, signs))),
    }


def count_independent(clusters: Sequence[Sequence[float]]) -> float:
    """Return how many independent questions say as much about a mean as these do: n by the design effect, and fewer
    where few clusters tell the design effect (Korn and Graubard, 1998). At least one for each cluster.

    Args:
        clusters: a value for each question of each cluster, none empty.
    """
    n, num_clusters = sum(map(len, clusters)), len(clusters)
    if num_clusters == 1:
        return 1.0  # a single cluster does not say how clusters differ
    mean = sum(map(sum, clusters)) / n
    alone = sum((v - mean) ** 2 for some in clusters for v in some) * n / (n - 1)
    together = sum(sum(v - mean for v in some) ** 2 for some in clusters) * num_clusters / (num_clusters - 1)
    design_effect = together / alone if alone else 1.0
    few = (student_quantile(n - 1) / student_quantile(num_clusters - 1)) ** 2
    return min(float(n), max(float(num_clusters), n * few / max(1.0, design_effect)))


def student_quantile(dof: int) -> float:
    """Return the 97.5 % quantile of Student's t by Abramowitz and Stegun, 26.7.5: 11 % too small for one degree of
    freedom, 1 % for two, 0.1 % for four.
    """
    z = Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof**power for power, term in enumerate(terms, 1))


def sign_probability(sums: Sequence[int]) -> float:
    """Return the share of all choices of the signs of whole numbers whose sum is at least as far from 0 as theirs."""
    ways = {0: 1}
    for size, count in Counter(abs(one) for one in sums if one).items():
        binomials = [1]
        for k in range(count):
            binomials.append(binomials[-1] * (count - k) // (k + 1))
        steps = [(size * (2 * k - count), n) for k, n in enumerate(binomials)]
        found: Counter[int] = Counter()
        for at, before in ways.items():
            for step, n in steps:
                found[at + step] += before * n
        ways = dict(found)
    far = abs(sum(sums))
    return sum(n for at, n in ways.items() if abs(at) >= far) / sum(ways.values())


def clustered(items: dict[str, list[T]], name: Callable[[str], str]) -> list[list[T]]:
    """Return what items hold, those of one name together.

    Args:
        items: key -> a value for each question of an item.
        name: returns the name of the cluster that an item's key belongs to.
    """
    found: dict[str, list[T]] = {}
    for key, values in items.items():
        found.setdefault(name(key), []).extend(values)
    return list(found.values())


def agreement(clusters: Iterable[Sequence[bool]]) -> dict[str, Any]:
    """Return the share of questions to which two caches give the same answer; nothing where there is no question.

    Args:
        clusters: whether the answers are the same, of questions that depend on each other.

    Returns:
        agreement, agreement_low, agreement_high: the share and its 95 % interval, that of `paired` against a cache that
        agrees everywhere.
        compared: questions.
    """
    groups = [some for some in clusters if some]
    if not groups:
        return {}
    same = [one for some in groups for one in some]
    against = paired([(one, True) for one in some] for some in groups)
    ends = (min(1.0, 1 + against[end]) for end in BOUNDS)
    return {"agreement": sum(same) / len(same), **dict(zip(AGREEMENT_BOUNDS, ends, strict=True)), "compared": len(same)}


def share(summary: dict[str, Any]) -> str:
    """Write an agreement with its interval, in percent; one without an interval alone."""
    ends = [f"{summary[name]:.1%}" for name in AGREEMENT_BOUNDS if name in summary]
    return f"{summary['agreement']:.2%}" if not ends else f"{summary['agreement']:.1%} ({' to '.join(ends)})"


def points(summary: dict[str, Any]) -> str:
    """Return a difference with its interval as text, in points of 100; empty where there is none."""
    if "difference" not in summary:
        return ""
    low, high = (100 * summary[name] for name in BOUNDS)
    return f"{100 * summary['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
