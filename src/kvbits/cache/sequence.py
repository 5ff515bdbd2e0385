"""Pages of one sequence in one layer group: integers only.

A sequence is three runs of pages, in token order: the sink page, closed pages, tail pages. Closed pages are in the pool
of their tier, oldest first; the newest ones are in the youngest tier.

    [ sinks | closed .. | tier1 .. | tier0 .. | tail | tail ]
      raw     quantized, by age                 raw, newest tokens

Of the newest closed pages there may be finer copies (`Scheme.copies`), which are then read in their place.

    [ sinks | closed .. | closed | closed | closed | tail | tail ]
                          copy1    copy1    copy1
                                   copy0    copy0                  read: closed .., copy1, copy0, copy0, tail

Where tokens are quantized as they come (`Scheme.token_local`), as where all stay raw, nothing closes: the tail holds
them all.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..spec import LayerGroup


@dataclass
class Sequence:
    """Pages of one sequence in one group.

    `*_lengths` count visible tokens; `released` tokens left through a sliding window.

    Attributes:
        closed: pages in token order; None where a page was dropped: its tokens still count, and later ones keep their
            positions.
        young: per tier, youngest first: how many of the closed pages, the newest ones, are in it or in a younger one.
        boundaries: most that `young` may be.
        residual_length: newest tokens that stay raw.
        copies: per pool of copies, those of the newest closed pages in token order; None where the page was dropped.
        dropped: closed pages that left in front (sliding windows).
        speculated: tokens that came since `keep_past`.
        closed_since: pages closed since `keep_past`.
        lost: per tier, 1 + the number (counted from the first page that ever closed) of the newest page that left it
            since `keep_past`; 0 for none.
    """

    length: int = 0
    released: int = 0
    sink: list[int] = field(default_factory=list)  # at most one page
    closed: list[int | None] = field(default_factory=list)
    closed_lengths: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    tail_lengths: list[int] = field(default_factory=list)
    young: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    residual_length: int = 0
    copies: list[tuple[int | None, ...]] = field(default_factory=list)
    dropped: int = 0
    speculated: int = 0
    closed_since: int = 0
    lost: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, group: LayerGroup) -> Sequence:
        """Return a sequence of no tokens, with the tiers that the scheme says."""
        tiers = len(group.tiers)
        return cls(
            young=[0] * tiers,
            boundaries=list(group.boundaries),
            residual_length=group.residual_length,
            copies=[()] * len(group.copies),
            lost=[0] * tiers,
        )

    @property
    def tail_tokens(self) -> int:
        return sum(self.tail_lengths)

    def tier_of(self, index: int) -> int:
        """Return the tier of a closed page: 0 for the youngest, `len(young)` for pages older than all tiers."""
        return bisect.bisect_right(self.young, len(self.closed) - 1 - index)

    def pool_of(self, index: int) -> str:
        """Return the pool of a closed page."""
        return pool_name(self.tier_of(index), len(self.young))

    def runs(self) -> dict[str, slice]:
        """Return where the pages of each pool are among the closed ones."""
        edges = [0, *(len(self.closed) - n for n in reversed(self.young)), len(self.closed)]
        tiers = range(len(self.young), -1, -1)
        return {
            pool_name(tier, len(self.young)): slice(*ends)
            for tier, ends in zip(tiers, itertools.pairwise(edges), strict=True)
        }

    def pages(self) -> dict[str, list[int]]:
        """Return ids held of each pool, in token order."""
        found = {"sink": self.sink, "tail": self.tail}
        found |= {name: [page for page in self.closed[run] if page is not None] for name, run in self.runs().items()}
        return found | {
            copy_pool(i): [page for page in copies if page is not None] for i, copies in enumerate(self.copies)
        }

    def renumber(self, pool: str, ids: Iterable[int]) -> None:
        """Put other ids in the place of those of `pages()[pool]`."""
        new = iter(ids)
        if pool.startswith("copy"):
            i = int(pool.removeprefix("copy"))
            self.copies[i] = tuple(None if page is None else next(new) for page in self.copies[i])
            return
        held: Any = {"sink": self.sink, "tail": self.tail}.get(pool, self.closed)
        run = self.runs().get(pool, slice(None))
        held[run] = [None if page is None else next(new) for page in held[run]]

    def closed_starts(self, num_sink_tokens: int) -> list[int]:
        """Return the position of the first token of each closed page; also while a step moves the length."""
        start = self.released + (min(self.length, num_sink_tokens) if self.sink else 0)
        return list(itertools.accumulate(self.closed_lengths, initial=start))[:-1]

    def closed_pages_within(self, length: int) -> int:
        """Return the number of closed pages that a crop to `length` leaves."""
        surplus, pages = self.length - length - self.tail_tokens, len(self.closed)
        while pages and surplus >= self.closed_lengths[pages - 1]:
            surplus -= self.closed_lengths[pages - 1]
            pages -= 1
        return pages

    def clone(self) -> Sequence:
        new = Sequence.__new__(Sequence)  # once a sequence and forward pass
        new.__dict__ = {name: x[:] if type(x) is list else x for name, x in self.__dict__.items()}
        return new


def copy_pool(index: int) -> str:
    """Name the pool of copies by its place in `Scheme.copies`."""
    return f"copy{index}"


def pool_name(tier: int, num_tiers: int) -> str:
    """Return the pool of a tier's closed pages; "closed" has those older than all tiers."""
    return "closed" if tier == num_tiers else f"tier{tier}"
