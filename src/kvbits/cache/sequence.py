"""Pages of one sequence in one layer group: integers only.

A sequence is three runs of pages, in token order: the sink page, closed pages, tail pages. Closed pages of a young tier
hold low planes beside them (`tiers` says which).

    [ sinks | closed | closed | ... | tail | tail ]
      raw     quantized once          raw, newest tokens

Where tokens are quantized as they come (`Scheme.token_local`), as where all stay raw, nothing closes: the tail holds
them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..spec import LayerGroup
from .tiers import Planes


@dataclass
class Sequence:
    """Pages of one sequence in one group.

    `*_lengths` count visible tokens; `released` tokens left through a sliding window.

    Attributes:
        closed: pages in token order; None where a page was dropped: its tokens still count, and later ones keep their
            positions.
        low: per tier, parallel to `closed`: the page of the tier's low plane, or None.
        boundaries: low planes that each tier may hold, in pages (see `tiers`).
        residual_length: newest tokens that stay raw.
        dropped: closed pages that left in front (sliding windows).
        speculated: tokens that came since `keep_past`.
        closed_since: pages closed since `keep_past`.
        lost: per tier, 1 + the number (counted from the first page that ever closed) of the newest page demoted since
            `keep_past`; 0 for none.
    """

    length: int = 0
    released: int = 0
    sink: list[int] = field(default_factory=list)  # at most one page
    closed: Planes = field(default_factory=list)
    closed_lengths: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    tail_lengths: list[int] = field(default_factory=list)
    low: list[Planes] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    residual_length: int = 0
    dropped: int = 0
    speculated: int = 0
    closed_since: int = 0
    lost: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, group: LayerGroup) -> Sequence:
        """A sequence of no tokens, with the tiers that the scheme says."""
        tiers = len(group.tiers)
        return cls(
            low=[[] for _ in range(tiers)],
            boundaries=list(group.boundaries),
            residual_length=group.residual_length,
            lost=[0] * tiers,
        )

    @property
    def tail_tokens(self) -> int:
        return sum(self.tail_lengths)

    def pages(self) -> dict[str, list[int]]:
        """Ids held of each pool, in token order."""
        runs = {"closed": self.closed} | {f"low{i}": planes for i, planes in enumerate(self.low)}
        return {"sink": self.sink, "tail": self.tail} | {
            name: [page for page in run if page is not None] for name, run in runs.items()
        }

    def renumber(self, pool: str, ids: Iterable[int]) -> None:
        """Put other ids in the place of those of `pages()[pool]`."""
        new = iter(ids)
        held: Any = (
            self.low[int(pool[3:])]
            if pool.startswith("low")
            else {"sink": self.sink, "closed": self.closed, "tail": self.tail}[pool]
        )
        held[:] = [None if page is None else next(new) for page in held]

    def closed_starts(self, num_sink_tokens: int) -> list[int]:
        """Position of the first token of each closed page; also while a step moves the length."""
        start = self.released + (min(self.length, num_sink_tokens) if self.sink else 0)
        return list(itertools.accumulate(self.closed_lengths, initial=start))[:-1]

    def closed_pages_within(self, length: int) -> int:
        """Closed pages that a crop to `length` leaves."""
        surplus, pages = self.length - length - self.tail_tokens, len(self.closed)
        while pages and surplus >= self.closed_lengths[pages - 1]:
            surplus -= self.closed_lengths[pages - 1]
            pages -= 1
        return pages

    def clone(self) -> Sequence:
        new = Sequence.__new__(Sequence)  # once a sequence and forward pass
        new.__dict__ = {name: x[:] if type(x) is list else x for name, x in self.__dict__.items()}
        new.low = [planes[:] for planes in self.low]
        return new
