"""The work of a forward pass on one layer group. `GroupState.advance` decides it, and every layer carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..later import upload
from ..ops.types import Table
from ..spec import PageLayout


class Run(NamedTuple):
    """Tokens of a row that have no place for good yet: `waiting` ones in tail pages, then fresh ones from `fresh` on.
    Cut from the front, page by page.

    Attributes:
        start: position of the first token.
        num_tokens: the waiting ones included.
    """

    start: int
    waiting: int
    fresh: int
    num_tokens: int

    def cut(self, n: int) -> tuple[Run, Run]:
        """Split into the first n tokens and the rest."""
        waiting = n if n < self.waiting else self.waiting
        return Run(self.start, waiting, self.fresh, n), Run(
            self.start + n, self.waiting - waiting, self.fresh + n - waiting, self.num_tokens - n
        )


class Move(NamedTuple):
    """A closed page leaves its tier.

    Attributes:
        place: among the closed pages of its sequence.
        source, page_id: its pool and page so far.
        target: its pool from now on.
    """

    place: int
    source: str
    page_id: int
    target: str


class Cut(NamedTuple):
    """Places where the new tokens of a row go: sinks | pages that close | tail.

    Tokens that no query will see are in none of them.

    Attributes:
        row: of the batch.
        sinks: fresh tokens for the sink page; None for none.
        pages: one run of page_size tokens for each page that closes.
        sources: the tail pages that hold what waited of `pages`, one for each page that has any.
        moves: closed pages that leave their tier.
        tail: what stays in the tail, then fresh tokens for it.
    """

    row: int
    sinks: Run | None
    pages: list[Run]
    sources: list[int]
    moves: list[Move]
    tail: Run


@dataclass(frozen=True)
class Close:
    """A step that quantizes one page: `count` raw tokens of tail pages, then fresh tokens [fresh, fresh + page_size -
    count) of a batch row.
    """

    row: int
    pool: str
    page_id: int
    tail: tuple[int, ...]
    count: int
    fresh: int
    start: int  # position of the page's first token


@dataclass(frozen=True)
class Recode:
    """A step that quantizes a closed page again, in the format of the pool `target`."""

    row: int
    source: str
    source_id: int
    target: str
    page_id: int
    start: int  # position of the page's first token


class Write(NamedTuple):
    """A step that stores `num_tokens` fresh tokens of a batch row, from `fresh` on, from place `place` of a sink or
    tail page on: raw, or each quantized by itself.

    `start` is the position of the page's first token, `before` the page before it in the tail, or -1.
    """

    pool: str
    row: int
    page_id: int
    place: int
    fresh: int
    num_tokens: int
    start: int
    before: int = -1


class Slots(NamedTuple):
    """Places of the tokens [B, T] of a pass in one pool, as `ops.store` takes them; the same for all layers.

    `previous` and `starts` are None where the pages' layout does not need them.
    """

    slots: torch.Tensor
    previous: torch.Tensor | None
    starts: torch.Tensor | None


def slots_of(
    writes: list[Write], layout: PageLayout, columns: np.ndarray | None, shape: tuple[int, int], device: torch.device
) -> Slots:
    """Make the slots of a pass of [B, T] tokens from its writes to one pool.

    Args:
        columns: int64 [B, T], where the real tokens of each row are, those first; None: there is no padding.
    """
    table = np.array([w[1:] for w in writes], np.int64)
    row, page, place, fresh, _, start, before = np.repeat(table, table[:, 4], 0).T
    rank = np.arange(len(row)) - np.repeat(table[:, 4].cumsum() - table[:, 4], table[:, 4])
    token = fresh + rank
    at = row * shape[1] + (token if columns is None else columns[row, token])

    def column(x: np.ndarray) -> torch.Tensor:
        found = np.full(shape[0] * shape[1], -1, x.dtype)
        found[at] = x
        return upload(found, device)

    return Slots(
        column(page * layout.page_size + place + rank),
        column(before) if layout.is_centered else None,
        column(start.astype(np.int32)) if layout.key.needs_rotary else None,
    )


@dataclass
class Step:
    """The work of every layer of a group in one forward pass: recodes, then closes, copies and writes.

    Attributes:
        recodes: pages of older tiers first, so that none is written over before it is read.
        copies: (pool, from id, to id).
        history: what queries read of each pool, on the host.
        taken: (pool, id) of every page the step allocates.
        reused: (pool, id) of pages that held something before the step and are written over: of those taken, and of
            pages that were shared.
    """

    recodes: list[Recode] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    copies: list[tuple[str, int, int]] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    history: dict[str, Table] = field(default_factory=dict)
    taken: list[tuple[str, int]] = field(default_factory=list)
    reused: list[tuple[str, int]] = field(default_factory=list)
