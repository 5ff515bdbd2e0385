"""Which closed pages keep their low planes: integers only.

Tier i of a sequence may hold `boundaries[i]` planes: those of its own pages and of all younger tiers' (a page of a
young tier holds the planes of every older one, because each plane refines the one before). When pages close and a tier
is full, the oldest leave it. What left never comes back, so a page's planes are always those of its tier or of an older
one.
"""

from __future__ import annotations

from dataclasses import dataclass

Planes = list[int | None]
"""Page id of a tier's plane for each closed page, or None."""


@dataclass(frozen=True)
class Demotions:
    """What `plan` decides, per tier.

    Attributes:
        given_back: indices of closed pages that lose the tier's plane.
        fresh: of the pages that close now, how many (the newest ones) get a plane.
    """

    given_back: list[list[int]]
    fresh: list[int]


def plan(low: list[Planes], boundaries: list[int], closings: int) -> Demotions:
    """Make room for `closings` pages.

    Args:
        low: planes of each tier, youngest tier first, parallel to the closed pages (oldest first).
        boundaries: planes that each tier may hold, ascending.
    """
    given_back: list[list[int]] = [[] for _ in low]
    fresh = [0] * len(low)
    gone: set[int] = set()  # gave back an older tier's plane, which this tier's refines
    for i in reversed(range(len(low))):
        held = [j for j, page in enumerate(low[i]) if page is not None]
        given_back[i] = [j for j in held if j in gone]
        held = [j for j in held if j not in gone]
        fresh[i] = min(closings, boundaries[i])
        leaving = held[: max(0, len(held) + fresh[i] - boundaries[i])]
        given_back[i] = sorted(given_back[i] + leaving)
        gone.update(leaving)
    return Demotions(given_back, fresh)
