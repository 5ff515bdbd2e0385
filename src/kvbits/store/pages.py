"""Pages of a sequence by the blob that they go into, and a sequence made of the first blobs of another: integers only.

    tokens   | sinks | page | page | .. | page | page | .. | newest ..          a page's column is its number after the
             sinks
    blobs    |        PAGES 0           |     PAGES 1      |  END

A PAGES blob holds whole pages that never change again: closed ones of no tier, or full tail pages of layers where
nothing closes. Its bytes depend only on the tokens up to its end (and how they were computed), so every sequence that
begins with them can read it. An END blob holds pages that only a sequence of exactly these tokens has. Those are the
pages after the last PAGES blob, those of tiers, copies of newest pages, the raw tail, and all that layers with a
sliding window still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ..cache.blob import Page
from ..cache.group import GroupState
from ..cache.sequence import Sequence
from ..cache.transfer import BLOB_TOKENS, describe, run_of
from ..errors import DataError
from ..spec import LayerGroup


@dataclass(frozen=True)
class Cuts:
    """Ends of the blobs of a sequence: the sinks and whole multiples of `blob_pages` pages."""

    num_sinks: int
    page_size: int
    blob_tokens: int = BLOB_TOKENS

    def __post_init__(self) -> None:
        if type(self.blob_tokens) is not int or self.blob_tokens < 1:
            raise DataError(f"blob_tokens={self.blob_tokens!r} must be a whole number of tokens, at least 1")

    @property
    def blob_pages(self) -> int:
        return max(1, self.blob_tokens // self.page_size)

    def end(self, blobs: int) -> int:
        """Count the tokens in the first `blobs` blobs."""
        return self.num_sinks + blobs * self.blob_pages * self.page_size if blobs else 0

    def within(self, num_tokens: int) -> int:
        """Count the blobs that end at or before a token."""
        return max(0, num_tokens - self.num_sinks) // (self.blob_pages * self.page_size)

    def ends(self, num_tokens: int) -> list[int]:
        return [self.end(i + 1) for i in range(self.within(num_tokens))]


class _Held(NamedTuple):
    """A page of a sequence.

    Attributes:
        shared: whether it can be a page of a PAGES blob.
    """

    page: Page
    page_id: int
    shared: bool


def _held(g: int, group: LayerGroup, s: Sequence) -> Iterator[_Held]:
    """Yield the pages that lie where those of a sequence lie that was never cropped into a page."""
    size, run = group.page_size, run_of(group)
    if s.sink:
        yield _Held(Page(g, "sink", 0), s.sink[0], True)
    start = s.length - s.tail_tokens - sum(s.closed_lengths) - group.num_sink_tokens
    starts = list(accumulate(s.closed_lengths, initial=start))[:-1]
    for pool, copies in zip(group.copy_pools, s.copies, strict=True):
        for at, page_id in zip(starts[len(starts) - len(copies) :], copies, strict=True):
            if page_id is not None and not at % size:
                yield _Held(Page(g, pool, at // size), page_id, False)
    listed: list[tuple[str, int | None, int]] = [
        (s.pool_of(i), page_id, n) for i, (page_id, n) in enumerate(zip(s.closed, s.closed_lengths, strict=True))
    ]
    listed += [("tail", page_id, n) for page_id, n in zip(s.tail, s.tail_lengths, strict=True)]
    for pool, page_id, n in listed:
        if page_id is not None and not start % size:
            yield _Held(Page(g, pool, start // size), page_id, pool == run and n == size)
        start += n


def whole_blobs(groups: list[GroupState], row: int, cuts: Cuts) -> int:
    """Count the PAGES blobs that a sequence has the pages of, in all layers that see everything."""
    found = []
    for g, state in enumerate(groups):
        held = {
            x.page.column for x in _held(g, state.group, state.sequences[row]) if x.shared and x.page.pool != "sink"
        }
        end = max(held, default=-1) + 1
        if state.group.geometry.sliding_window is None:
            end = next((n for n in range(end) if n not in held), end)
        found.append(end // cuts.blob_pages)
    return min(found, default=0)


def parts(groups: list[GroupState], row: int, cuts: Cuts, blobs: int) -> list[list[tuple[Page, int]]]:
    """List the pages of the first `blobs` PAGES blobs with their ids, and after them those of the END blob. Pages that
    a sliding window has released are in none.
    """
    found: list[list[tuple[Page, int]]] = [[] for _ in range(blobs + 1)]
    for g, state in enumerate(groups):
        for page, page_id, shared in _held(g, state.group, state.sequences[row]):
            index = page.column // cuts.blob_pages
            if shared and index < blobs:
                found[index].append((page, page_id))
            if not (shared and index < blobs) or state.group.geometry.sliding_window is not None:
                found[-1].append((page, page_id))
    return found


def state_of(groups: list[GroupState], row: int) -> bytes:
    """Write the page lists of a plain sequence as JSON."""
    sequences = [state.sequences[row] for state in groups]
    columns = [
        {(x.page.pool, x.page_id): x.page.column for x in _held(g, state.group, s)}
        for g, (state, s) in enumerate(zip(groups, sequences, strict=True))
    ]
    return describe(sequences, columns)


def is_plain(groups: list[GroupState], row: int) -> bool:
    """Return whether the tokens of a sequence alone say what it holds: it was never cropped into a page, and has
    neither dropped pages, nor speculative tokens, nor tiers of its own.
    """
    return all(_is_plain(g, state, state.sequences[row]) for g, state in enumerate(groups))


def _is_plain(g: int, state: GroupState, s: Sequence) -> bool:
    group, lengths = state.group, [*s.closed_lengths, *s.tail_lengths]
    released = bool(group.geometry.sliding_window and s.released)
    return (
        (len(s.closed) + s.dropped == group.closed_after(s.length) or released)
        and sum(x.page.pool not in group.copy_pools for x in _held(g, group, s)) == len(s.sink) + len(lengths)
        and all(n == group.page_size for n in lengths[: len(lengths) - bool(s.tail)])
        and not state.keep_past
        and s.residual_length == group.residual_length
        and s.boundaries == list(group.boundaries)
    )


def fit(pages: Iterable[Page], groups: Rows[LayerGroup], held: range) -> bool:
    """Return whether these can be the pages of a PAGES blob of such columns."""
    runs = [run_of(g) for g in groups]
    return all(
        p.column in held if p.pool == runs[p.group] else p == Page(p.group, "sink", 0) and not held.start for p in pages
    )


def prefix(groups: Rows[LayerGroup], cuts: Cuts, blobs: int) -> list[Sequence]:
    """Make, per group, the sequence of the first `blobs` PAGES blobs, as if a longer one had been cropped to their end:
    page lists by columns.
    """
    length, last = cuts.end(blobs), blobs * cuts.blob_pages
    made = []
    for group in groups:
        s, sinks, size = Sequence.empty(group), group.num_sink_tokens, group.page_size
        need = group.first_visible(length)
        s.length, s.sink = length, [0] if sinks > need else []
        first = max(0, need - sinks) // size
        s.released = 0 if s.sink else min(length, sinks + first * size)
        columns: list[Any] = list(range(first, last))
        if group.fills_pages:
            s.tail, s.tail_lengths = columns, [size] * len(columns)
        else:
            s.closed, s.closed_lengths, s.dropped = columns, [size] * len(columns), first
        made.append(s)
    return made
