"""Which pages of a sequence go into which blob, and a sequence put together from blobs: integers only.

    tokens   | sinks | page | page | .. | page | page | .. | newest ..          a page's column is its number after the
             sinks
    blobs    |        PAGES 0           |     PAGES 1      |  END

A PAGES blob holds whole pages that never change again: closed ones of no tier, or full tail pages of layers where
nothing closes.
Its bytes depend on nothing but the tokens up to its end (and how they were computed), so every sequence that begins
with them can read it. An END blob holds what only a sequence of exactly these tokens has: pages after the last PAGES
blob, those of tiers among them, the raw tail, and all that layers with a sliding window still hold.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from ..cache.blob import Page
from ..cache.group import GroupState
from ..cache.sequence import Sequence
from ..errors import DataError, FileFormatError
from ..spec import LayerGroup

BLOB_TOKENS = 256


@dataclass(frozen=True)
class Cuts:
    """Where the blobs of a sequence end: after the sinks and whole multiples of `blob_pages` pages."""

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
        """Tokens in the first `blobs` blobs."""
        return self.num_sinks + blobs * self.blob_pages * self.page_size if blobs else 0

    def within(self, num_tokens: int) -> int:
        """Blobs that end at or before a token."""
        return max(0, num_tokens - self.num_sinks) // (self.blob_pages * self.page_size)

    def ends(self, num_tokens: int) -> list[int]:
        return [self.end(i + 1) for i in range(self.within(num_tokens))]


def run_of(group: LayerGroup) -> str:
    """The pool whose pages are good for every sequence that begins with their tokens, once they are full."""
    return "tail" if group.fills_pages else "closed"


def columns(group: LayerGroup, s: Sequence) -> tuple[dict[int, int], bool]:
    """Page ids by column of the pages of `run_of` that are full, and whether all pages, those of tiers included, lie
    where those of a sequence lie that was never cropped into a page; of others, those in front of the first that does
    not.
    """
    size, sinks, tail = group.page_size, group.num_sink_tokens, group.fills_pages
    ids: list[Any] = s.tail if tail else s.closed
    lengths = s.tail_lengths if tail else s.closed_lengths
    start = s.length - s.tail_tokens - (0 if tail else sum(s.closed_lengths)) - sinks
    if ids and (start < 0 or start % size):
        return {}, False
    whole = next((i for i, n in enumerate(lengths) if n != size), len(ids))
    oldest = ids[:whole] if tail else ids[:whole][s.runs()["closed"]]
    found = {start // size + i: page for i, page in enumerate(oldest) if page is not None}
    return found, whole >= len(ids) - tail


def whole_blobs(groups: list[GroupState], row: int, cuts: Cuts) -> int:
    """PAGES blobs that a sequence has the pages of, in all layers that see everything."""
    found = []
    for state in groups:
        held, _ = columns(state.group, state.sequences[row])
        if state.group.geometry.sliding_window is None:
            n = 0
            while n in held:
                n += 1
            found.append(n // cuts.blob_pages)
        else:
            found.append((max(held, default=-1) + 1) // cuts.blob_pages)
    return min(found, default=0)


def pages_of(groups: list[GroupState], row: int, cuts: Cuts, index: int) -> list[tuple[Page, int]]:
    """Pages of PAGES blob `index` with their ids; of layers with a window as far as they are still there."""
    found: list[tuple[Page, int]] = []
    for g, state in enumerate(groups):
        s, run = state.sequences[row], run_of(state.group)
        held, _ = columns(state.group, s)
        if index == 0 and s.sink:
            found.append((Page(g, "sink", 0), s.sink[0]))
        found += [
            (Page(g, run, c), held[c])
            for c in range(index * cuts.blob_pages, (index + 1) * cuts.blob_pages)
            if c in held
        ]
    return found


def fit(pages: Iterable[Page], groups: Rows[LayerGroup], held: range) -> bool:
    """Whether these can be the pages of a PAGES blob of such columns."""
    runs = [run_of(g) for g in groups]
    return all(
        p.column in held if p.pool == runs[p.group] else p == Page(p.group, "sink", 0) and not held.start for p in pages
    )


def is_plain(groups: list[GroupState], row: int) -> bool:
    """Whether a sequence is what its tokens alone make of it: never cropped into a page, nothing dropped, nothing
    speculative, tiers as the scheme says.
    """
    for state in groups:
        s, g = state.sequences[row], state.group
        closed = len(s.closed) + s.dropped
        if closed != g.closed_after(s.length) and not (g.geometry.sliding_window and s.released):
            return False
        if (
            not columns(g, s)[1]
            or state.keep_past
            or None in s.closed
            or s.residual_length != g.residual_length
            or s.boundaries != list(g.boundaries)
        ):
            return False
    return True


def end_of(groups: list[GroupState], row: int, cuts: Cuts, blobs: int) -> tuple[list[tuple[Page, int]], bytes]:
    """Pages of the END blob behind `blobs` PAGES blobs, with their ids; and what of the sequence does not follow from
    them, as JSON.
    """
    found: list[tuple[Page, int]] = []
    state_of: list[dict[str, Any]] = []
    for g, state in enumerate(groups):
        s, group = state.sequences[row], state.group
        window = group.geometry.sliding_window is not None
        if s.sink and (window or not blobs):
            found.append((Page(g, "sink", 0), s.sink[0]))
        first = s.length - s.tail_tokens - group.num_sink_tokens  # token of the tail, after the sinks
        for run, ids, at in (("closed", s.closed, first - sum(s.closed_lengths)), ("tail", s.tail, first)):
            start = max(0, at) // group.page_size
            shared = blobs * cuts.blob_pages if run == run_of(group) and not window else 0
            found += [
                (Page(g, s.pool_of(i) if run == "closed" else run, start + i), page)
                for i, page in enumerate(ids)
                if page is not None and start + i >= shared
            ]
        state_of.append({"released": s.released, "dropped": s.dropped})
    return found, json.dumps({"groups": state_of}).encode()


def prefix(groups: Rows[LayerGroup], cuts: Cuts, blobs: int) -> list[tuple[Sequence, list[Page]]]:
    """Per group, the sequence that the first `blobs` PAGES blobs make, as if a longer one had been cropped to their
    end, and the pages it has, in the order of its lists (page numbers in the lists are indices into the pages of their
    pool).
    """
    length = cuts.end(blobs)
    made = []
    for g, group in enumerate(groups):
        need = group.first_visible(length)
        sinks = group.num_sink_tokens if group.num_sink_tokens > need else 0
        first = 0 if sinks or need <= group.num_sink_tokens else (need - group.num_sink_tokens) // group.page_size
        last = blobs * cuts.blob_pages
        s = Sequence.empty(group)
        s.length, s.released = length, 0 if sinks else min(length, group.num_sink_tokens + first * group.page_size)
        s.sink = [0] if sinks else []
        numbers: list[Any] = list(range(last - first))
        if group.fills_pages:
            s.tail, s.tail_lengths = numbers, [group.page_size] * len(numbers)
        else:
            s.closed, s.closed_lengths, s.dropped = numbers, [group.page_size] * len(numbers), first
        pages = [Page(g, "sink", 0)] if sinks else []
        run = run_of(group)
        made.append((s, pages + [Page(g, run, c) for c in range(first, last)]))
    return made


def whole(
    groups: Rows[LayerGroup], length: int, pages: Iterable[Page], state: bytes, what: str
) -> list[tuple[Sequence, list[Page]]]:
    """As `prefix`, for the sequence of `length` tokens that an END blob ends.

    Args:
        pages: of the END blob, in its order.

    Raises:
        FileFormatError: pages or state that no sequence of this length has.
    """
    try:
        stated = json.loads(state)["groups"]
        held: list[dict[str, list[int]]] = [{name: [] for name in g.pools} for g in groups]
        for page in pages:
            held[page.group][page.pool].append(page.column)
        made = [
            _whole(g, group, length, own, about)
            for g, (group, own, about) in enumerate(zip(groups, held, stated, strict=True))
        ]
        if foreign := set(pages) - {page for _, listed in made for page in listed}:
            raise ValueError(f"it holds {min(foreign)}")
        return made
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise FileFormatError(f"{what} ends a sequence that cannot be ({type(error).__name__}: {error})") from error


def _whole(
    g: int, group: LayerGroup, length: int, own: dict[str, list[int]], about: dict[str, Any]
) -> tuple[Sequence, list[Page]]:
    size, sinks = group.page_size, group.num_sink_tokens
    window = group.geometry.sliding_window
    released, dropped = about["released"], about["dropped"]
    if not all(type(n) is int and 0 <= n <= length for n in (released, dropped)) or (
        window is None and (released or dropped)
    ):
        raise ValueError(f"layer group {g} released {released!r} tokens")
    after_sinks = max(0, length - sinks)
    first = max(0, released - sinks) // size if released else 0
    if released and (released - sinks) % size and released != length:
        raise ValueError(f"layer group {g} released {released} tokens, which ends in the middle of a page")
    s = Sequence.empty(group)
    s.length, s.released, s.dropped = length, released, dropped
    s.sink = [0] if sinks and not released else []
    closed = 0 if group.fills_pages else max(first, group.closed_after(length))
    last = -(-after_sinks // size)
    s.closed = [0] * (0 if group.fills_pages else closed - first)
    s.closed_lengths = [size] * len(s.closed)
    s.young = list(itertools.accumulate(len(own[name]) for name in group.tier_pools))
    if s.young and s.young[-1] > len(s.closed):
        raise ValueError(f"layer group {g} has {s.young[-1]} pages of tiers, but {len(s.closed)} closed ones")
    for run in s.runs().values():
        s.closed[run] = range(run.stop - run.start)
    tail_first = first if group.fills_pages else closed
    s.tail = list(range(last - tail_first))
    s.tail_lengths = [min(size, after_sinks - c * size) for c in range(tail_first, last)]
    pages = [Page(g, "sink", 0)] if s.sink else []
    pages += [Page(g, s.pool_of(i), first + i) for i in range(len(s.closed))]
    pages += [Page(g, "tail", tail_first + i) for i in range(len(s.tail))]
    return s, pages
