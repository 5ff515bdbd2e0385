"""Right and wrong answers of two caches to the same questions: their difference, how sure it is, and whether it is
chance.

Only questions that the two answer unlike tell them apart: b that the 16-bit cache alone answers right, c that the other
alone does.

    difference   (c - b) / n, with a 95 % interval after Agresti and Min (2005): half a question is added to each of the
                 four cells, so that no disagreement
                 at all leaves an interval of more than nothing
    p            McNemar's exact test: how likely b and c are this uneven, or more, if each disagreement falls either
    way
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

Z = 1.959964
"""Standard errors of a 95 % interval."""
BOUNDS = ("difference_low", "difference_high")
"""Names of its ends, which `points` writes beside the difference."""
AGREEMENT_BOUNDS = ("agreement_low", "agreement_high")
"""Names of the ends of an agreement's interval, which `share` writes beside the agreement."""


def paired(outcomes: Iterable[tuple[bool, bool]]) -> dict[str, Any]:
    """Return figures of (this cache right, the 16-bit one right) for each question; nothing where there is no question.

    Returns:
        difference, difference_low, difference_high: of the shares that are right, and its 95 % interval.
        lost, gained: questions that the 16-bit cache alone, and this one alone, answers right.
        p: of McNemar's exact test, two-sided.
    """
    pairs = list(outcomes)
    if not pairs:
        return {}
    lost, gained = sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)
    n, b, c = len(pairs) + 2, lost + 0.5, gained + 0.5
    middle, width = (c - b) / n, Z * math.sqrt(b + c - (c - b) ** 2 / n) / n
    odd = lost + gained
    tail = sum(math.comb(odd, k) for k in range(min(lost, gained) + 1))
    return {
        "difference": (gained - lost) / len(pairs),
        "difference_low": max(-1.0, middle - width),
        "difference_high": min(1.0, middle + width),
        "lost": lost,
        "gained": gained,
        "p": min(1.0, 2 * tail / 2**odd),
    }


def paired_records(records: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return `paired` of what records of one question each say under `name`, where the 16-bit cache has
    answered, too.
    """
    return paired((bool(records[k][name]), bool(base[k][name])) for k in records if k in base)


def agreement(same: list[bool]) -> dict[str, Any]:
    """Return the share of questions to which two caches give the same answer; nothing where there is no question.

    Returns:
        agreement, agreement_low, agreement_high: the share and its 95 % interval, that of `paired` against a cache that
        agrees everywhere.
        compared: questions.
    """
    if not same:
        return {}
    against = paired((one, True) for one in same)
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
