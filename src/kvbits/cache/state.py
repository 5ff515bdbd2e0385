"""Which page holds which token: integers only, one `GroupState` per layer group.

A sequence is three runs of pages, in token order: the sink page, closed pages, tail pages. Closed pages of a young zone hold low planes beside them
(`zones` says which).

    [ sinks | closed | closed | ... | tail | tail ]
      raw     quantized once          raw, newest tokens

Where tokens are quantized as they come (`Scheme.token_local`), as where all stay raw, nothing closes: the tail holds them all.

A forward pass is one `Step`, planned once for all layers of the group before any byte is written: `advance` moves the integers and says which bytes each
layer must copy, close and write. If pages are missing nothing moves. Layers then carry out the step one after the other, each in the order
closes, copies, writes, so a page freed by a step can be handed out again within it. `Step.reused` lists those: a layer copies them first, so that a pass
that fails in a later layer can be taken back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import CacheStateError
from ..ops.types import PageTable
from ..spec import LayerGroup
from .allocator import Allocator
from .pool import Pool
from .zones import Demotions, Planes, plan


@dataclass
class Sequence:
    """Pages of one sequence in one group. `*_lengths` count visible tokens; `released` tokens left through a sliding window.

    Attributes:
        closed: pages in token order; None where a page was dropped: its tokens still count, and later ones keep their positions.
        low: per tier, parallel to `closed`: the page of the tier's low plane, or None.
        boundaries: low planes that each tier may hold, in pages (see `zones`).
        residual_length: newest tokens that stay raw.
        dropped: closed pages that left in front (sliding windows).
        speculated: tokens that came since `keep_past`.
        closed_since: pages closed since `keep_past`.
        mass: attention that pages get, by the position of their first token (see `GroupState.observe`).
        lost: per tier, 1 + the number (counted from the first page that ever closed) of the newest page demoted since `keep_past`; 0 for none.
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
    mass: dict[int, float] = field(default_factory=dict)

    @property
    def tail_tokens(self) -> int:
        return sum(self.tail_lengths)

    def pages(self) -> dict[str, list[int]]:
        """Ids held of each pool, in token order."""
        runs = {"closed": self.closed} | {f"low{i}": planes for i, planes in enumerate(self.low)}
        return {"sink": self.sink, "tail": self.tail} | {name: [page for page in run if page is not None] for name, run in runs.items()}

    def renumber(self, pool: str, ids: Iterable[int]) -> None:
        """Put other ids in the place of those of `pages()[pool]`."""
        new = iter(ids)
        held: Any = self.low[int(pool[3:])] if pool.startswith("low") else {"sink": self.sink, "closed": self.closed, "tail": self.tail}[pool]
        held[:] = [None if page is None else next(new) for page in held]

    def clone(self) -> Sequence:
        new = Sequence.__new__(Sequence)  # once a sequence and forward pass
        new.__dict__ = {name: x[:] if type(x) is list else x for name, x in self.__dict__.items()}
        new.low, new.mass = [planes[:] for planes in self.low], dict(self.mass)
        return new


Zone = tuple[str, int]
"""A pool, and how many low planes (of the oldest tiers) its pages have: pages that attention reads alike."""


@dataclass(frozen=True)
class Close:
    """Quantize one page: `count` raw tokens of tail pages, then fresh tokens [fresh, fresh + page_size - count) of a batch row.

    `low` are the pools and pages of its low planes, the coarsest first.
    """

    row: int
    page_id: int
    tail: tuple[int, ...]
    count: int
    fresh: int
    start: int  # position of the page's first token, for messages
    low: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Write:
    """Store `count` fresh tokens of a batch row, from `fresh` on, from slot `slot` of a sink or tail page on: raw, or each quantized by itself.

    `before` is the page before it in the tail, or -1.
    """

    pool: str
    row: int
    page_id: int
    slot: int
    fresh: int
    count: int
    before: int = -1


@dataclass
class Step:
    """What every layer of the group does for one forward pass."""

    closes: list[Close] = field(default_factory=list)
    copies: list[tuple[str, int, int]] = field(default_factory=list)  # (pool, from id, to id)
    writes: list[Write] = field(default_factory=list)
    history: dict[Zone, PageTable] = field(default_factory=dict)
    taken: list[tuple[str, int]] = field(default_factory=list)  # (pool, id) of every page the step allocates
    reused: list[tuple[str, int]] = field(default_factory=list)  # those that held something before it


class Uses(NamedTuple):
    """What a row's new tokens use: sink tokens, pages to close, the tail pages these consume, tail tokens before, pages that get each tier's plane."""

    sinks: int
    closings: int
    consumed: list[int]
    tail_tokens: int
    num_low: list[int]


MAX_SPECULATED_PAGES = 16
"""A growing cache keeps the planes of so many pages more while tokens are speculative; a long prompt under `keep_past` demotes past them."""


MASS_DECAY = 0.9
"""What an observation leaves of the ones before it: with one in 8 tokens, the last 80 tokens count most."""


class GroupState:
    """Page tables of all sequences of one layer group."""

    def __init__(self, group: LayerGroup, pools: dict[str, Pool]) -> None:
        self.group = group
        self.pools = pools
        self.sequences: list[Sequence] = []
        self.keep_past = False  # speculation: window pages and low planes stay until the next crop
        self._closed_tables: dict[Zone, PageTable] | None = None  # of closed pages; None after any change to them

    # -- forward passes ---------------------------------------------------------------------------------------------

    def advance(self, counts: list[int], history_first: bool) -> Step:
        """Append counts[b] tokens to each sequence.

        Args:
            history_first: True when the step's queries read the pages as they are before it (a chunk that attends to itself separately), False
                when they read them after it (one token, already written).

        Raises:
            PoolFullError: pages are missing. The caller restores the snapshot it took.
        """
        step = Step()
        if history_first:
            step.history = self.tables()
        needs = self._needs(counts, history_first)
        uses = [self._release_consumed(row, n, need) for row, (n, need) in enumerate(zip(counts, needs, strict=True))]
        for row, n in enumerate(counts):
            if n:
                self._place(row, n, needs[row], uses[row], step)
        if not history_first:
            step.history = self.tables()
        return step

    def _needs(self, counts: list[int], history_first: bool) -> list[int]:
        return [self._first_needed(s, s.length + n if history_first else s.length) for s, n in zip(self.sequences, counts, strict=True)]

    def _first_needed(self, sequence: Sequence, position: int) -> int:
        """Oldest token that must stay for a query at `position`."""
        return sequence.released if self.keep_past else self.group.first_visible(position)

    def _release_consumed(self, row: int, n: int, need: int) -> Uses:
        """Move the length and free what the step uses up."""
        s = self.sequences[row]
        tail_tokens = s.tail_tokens
        sinks, closings, num_consumed = self.uses(s, n)
        consumed = s.tail[:num_consumed]
        s.length += n
        if self.keep_past:
            s.speculated += n
        num_low = [0] * len(s.low)
        if n:
            s.tail, s.tail_lengths = s.tail[len(consumed) :], s.tail_lengths[len(consumed) :]
            for page_id in consumed:
                self.pools["tail"].allocator.release(page_id)
            self._release_invisible(s, need)
            if closings:
                num_low = self._demote(s, closings)
        return Uses(sinks, closings, consumed, tail_tokens, num_low)

    def uses(self, s: Sequence, n: int) -> tuple[int, int, int]:
        """(sink tokens, closings, tail pages these consume) of n more tokens."""
        g, tail_tokens = self.group, s.tail_tokens
        sinks = min(n, max(0, g.num_sink_tokens - s.length))
        waiting = tail_tokens + n - sinks - s.residual_length - 1
        if self.keep_past and self.pools["tail"].fixed_capacity is None:
            waiting -= min(s.speculated + n, g.page_size)  # what a token that is taken back would close stays raw
        closings = 0 if g.fills_pages else max(0, waiting // g.page_size)
        return sinks, closings, closings if closings * g.page_size <= tail_tokens else len(s.tail)

    def _release_invisible(self, s: Sequence, need: int) -> None:
        """Free pages whose tokens all lie before position `need`."""
        if s.sink and self.group.num_sink_tokens <= need:
            self.pools["sink"].allocator.release(s.sink.pop())
            s.released = self.group.num_sink_tokens
        runs: list[tuple[str, Any, list[int]]] = [("closed", s.closed, s.closed_lengths)]
        if self.group.fills_pages:
            runs.append(("tail", s.tail, s.tail_lengths))
        for pool, ids, lengths in runs:
            while ids and not s.sink and s.released + lengths[0] <= need:
                self._give_back(pool, ids.pop(0))
                s.released += lengths.pop(0)
                if pool == "closed":
                    s.dropped += 1
                    self._closed_tables = None
                    for i, planes in enumerate(s.low):
                        self._give_back(f"low{i}", planes.pop(0))

    def release_invisible(self, s: Sequence) -> None:
        """Free what the newest token could not see any more."""
        self._release_invisible(s, self._first_needed(s, s.length - 1))

    def forget_tables(self) -> None:
        """Page lists changed."""
        self._closed_tables = None

    # -- zones ------------------------------------------------------------------------------------------------------

    def _give_back(self, pool: str, page_id: int | None) -> None:
        if page_id is not None:
            self.pools[pool].allocator.release(page_id)

    def _allowed(self, s: Sequence, closings: int) -> list[int]:
        """Planes each tier may hold after `closings` more pages. While tokens are speculative, as many more as pages closed since, so that they
        can be taken back."""
        if not self.keep_past:
            return s.boundaries
        fixed = any(p.fixed_capacity is not None for p in self.pools.values())
        slack = min(s.closed_since + closings, self.group.SPECULATED_PAGES if fixed else MAX_SPECULATED_PAGES)
        return [n + slack if n else 0 for n in s.boundaries]

    def _plan_demotions(self, s: Sequence, closings: int) -> Demotions:
        return plan(s.low, self._allowed(s, closings), closings, self._mass(s))

    def _mass(self, s: Sequence) -> list[float] | None:
        """Attention of each closed page, the mean of the others where it is not known yet; None where age decides."""
        if self.group.demote != "attention":
            return None
        mean = sum(s.mass.values()) / max(1, len(s.mass))
        return [s.mass.get(at, mean) for at in self.closed_starts(s)]

    def closed_starts(self, s: Sequence) -> list[int]:
        """Position of the first token of each closed page; also while a step moves the length."""
        start = s.released + (min(s.length, self.group.num_sink_tokens) if s.sink else 0)
        return list(itertools.accumulate(s.closed_lengths, initial=start))[:-1]

    def observe(self, tables: dict[Zone, PageTable], shares: np.ndarray) -> None:
        """Note what share of the attention each page got.

        Args:
            tables: the history that queries read in a pass now over.
            shares: of every page of these tables in order, a mean over queries, heads and layers.
        """
        seen: list[dict[int, float]] = [{} for _ in self.sequences]
        first = 0
        for (pool, _), table in tables.items():
            for row in range(len(self.sequences) if pool != "sink" else 0):
                mine = slice(table.indptr[row], table.indptr[row + 1])
                seen[row].update(zip(table.starts[mine].tolist(), shares[first:][mine].tolist(), strict=True))
            first += table.num_pages
        for s, new in zip(self.sequences, seen, strict=True):
            s.mass = {at: share + MASS_DECAY * (s.mass.get(at, share) - share) for at, share in new.items() if at < s.length}

    def _demote(self, s: Sequence, closings: int) -> list[int]:
        """Give back planes so that `closings` pages can close. Returns how many of these, the newest, get a plane of each tier."""
        found = self._plan_demotions(s, closings)
        for i, pages in enumerate(found.given_back):
            for j in pages:
                self._closed_tables = None
                self._give_back(f"low{i}", s.low[i][j])
                s.low[i][j] = None
                if self.keep_past:
                    s.lost[i] = max(s.lost[i], s.dropped + j + 1)
        if self.keep_past:
            s.closed_since += closings
        return found.fresh

    def set_zones(self, row: int, boundaries: list[int], residual_length: int) -> None:
        """Other zone sizes for a sequence from now on: planes past a smaller boundary go back at once, those already given back do not return."""
        s = self.sequences[row]
        s.boundaries = boundaries
        s.residual_length = residual_length
        self._demote(s, 0)

    def speculate(self) -> None:
        """Keep what speculated tokens could make leave, until `settle`."""
        self.keep_past = True

    def settle(self) -> None:
        """Speculation is over: let go of what it kept."""
        self.keep_past = False
        for s in self.sequences:
            s.speculated, s.closed_since, s.lost = 0, 0, [0] * len(s.low)
            self._demote(s, 0)

    # -- placing ----------------------------------------------------------------------------------------------------

    def _place(self, row: int, n: int, need: int, uses: Uses, step: Step) -> None:
        """Find room for the fresh tokens and list the work of each layer."""
        s, g, size = self.sequences[row], self.group, self.group.page_size
        sinks, closings, consumed, tail_tokens, num_low = uses
        if sinks and need >= g.num_sink_tokens:
            s.released = g.num_sink_tokens  # already out of the window: never stored
        elif sinks:
            if s.sink:
                self._own(s.sink, 0, "sink", step)
            else:
                s.sink.append(self._allocate("sink", step))
            step.writes.append(Write("sink", row, s.sink[0], s.length - n, 0, sinks))
        first = s.length - n + sinks - tail_tokens  # position of the first token of (tail, fresh)
        fresh = sinks
        for i in range(closings):
            start = first + i * size
            from_tail = min(size, max(0, tail_tokens - i * size))
            if start + size <= need and not s.closed and not s.sink:
                s.released = start + size  # likewise
                s.dropped += 1
            else:
                page_id = self._allocate("closed", step)
                sources = tuple(consumed[i : i + 1]) if from_tail else ()
                low: list[tuple[str, int]] = []
                for tier in reversed(range(len(s.low))):
                    kept = i >= closings - num_low[tier]
                    if kept:
                        low.append((f"low{tier}", self._allocate(f"low{tier}", step)))
                    s.low[tier].append(low[-1][1] if kept else None)
                step.closes.append(Close(row, page_id, sources, from_tail, fresh, start, tuple(low)))
                s.closed.append(page_id)
                s.closed_lengths.append(size)
                self._closed_tables = None
            fresh += size - from_tail
        if g.fills_pages and need > s.length - n + sinks and not s.tail and not s.sink:
            skip = (need - (s.length - n + fresh)) // size * size  # whole pages no query will see
            fresh += max(0, skip)
            s.released = s.length - n + fresh
        self._write_tail(row, n, fresh, step)

    def _write_tail(self, row: int, n: int, fresh: int, step: Step) -> None:
        s, size = self.sequences[row], self.group.page_size
        while fresh < n:
            if s.tail and s.tail_lengths[-1] < size:
                self._own(s.tail, -1, "tail", step)
            else:
                s.tail.append(self._allocate("tail", step))
                s.tail_lengths.append(0)
            count = min(n - fresh, size - s.tail_lengths[-1])
            step.writes.append(Write("tail", row, s.tail[-1], s.tail_lengths[-1], fresh, count, s.tail[-2] if len(s.tail) > 1 else -1))
            s.tail_lengths[-1] += count
            fresh += count

    def _allocate(self, pool: str, step: Step) -> int:
        self.pools[pool].reserve(1)
        page_id = self.pools[pool].allocator.allocate()
        step.taken.append((pool, page_id))
        return page_id

    def _own(self, ids: list[int], index: int, pool: str, step: Step) -> None:
        """Copy on write: make the page at `index` this sequence's own."""
        old = ids[index]
        if self.pools[pool].allocator.count(old) > 1:
            ids[index] = self._allocate(pool, step)
            step.copies.append((pool, old, ids[index]))
            self.pools[pool].allocator.release(old)

    def pages_wanted(self, counts: list[int], history_first: bool) -> dict[str, int]:
        """Ids a step needs free before it, per pool: those it allocates less those it frees first. Never too few."""
        wanted = dict.fromkeys(self.pools, 0)
        for s, n, need in zip(self.sequences, counts, self._needs(counts, history_first), strict=True):
            if not n:
                continue
            g, size = self.group, self.group.page_size
            sinks, closings, consumed = self.uses(s, n)
            wanted["sink"] += sinks > 0 and (not s.sink or self.pools["sink"].allocator.count(s.sink[0]) > 1)
            first = s.length + sinks - s.tail_tokens
            stored = closings - min(closings, max(0, (need - first) // size))
            wanted["closed"] += stored
            if closings and s.low:
                self._low_wanted(s, closings, stored, need, wanted)
            wanted["closed"] -= self._freed("closed", s.closed, s.closed_lengths, s.length - s.tail_tokens - sum(s.closed_lengths), need)
            start, tokens = s.length - s.tail_tokens, s.tail_tokens + n - sinks - closings * size
            kept, lengths = s.tail[consumed:], s.tail_lengths[consumed:]
            wanted["tail"] -= sum(self.pools["tail"].allocator.count(i) == 1 for i in s.tail[:consumed])
            if g.fills_pages:
                wanted["tail"] -= self._freed("tail", kept, lengths, start, need)
                while kept and start + lengths[0] <= need:
                    start, tokens = start + lengths[0], tokens - lengths.pop(0)
                    kept.pop(0)
                if not kept:
                    tokens -= max(0, need - s.length - sinks) // size * size
            wanted["tail"] += -(-tokens // size) - len(kept)
            wanted["tail"] += bool(kept) and lengths[-1] < size and self.pools["tail"].allocator.count(kept[-1]) > 1  # copy on write
        return {pool: max(0, n) for pool, n in wanted.items()}

    def _low_wanted(self, s: Sequence, closings: int, stored: int, need: int, wanted: dict[str, int]) -> None:
        gone, end = 0, s.length - s.tail_tokens - sum(s.closed_lengths)
        while gone < len(s.closed) and end + s.closed_lengths[gone] <= need:  # what `_release_invisible` takes
            end += s.closed_lengths[gone]
            gone += 1
        mass = self._mass(s)
        found = plan([planes[gone:] for planes in s.low], self._allowed(s, closings), closings, None if mass is None else mass[gone:])
        for i, planes in enumerate(s.low):
            given_back = [*range(gone), *(gone + j for j in found.given_back[i])]
            freed = sum(planes[j] is not None and self.pools[f"low{i}"].allocator.count(planes[j]) == 1 for j in given_back)
            wanted[f"low{i}"] += min(found.fresh[i], stored) - freed

    def _freed(self, pool: str, ids: Iterable[int | None], lengths: list[int], start: int, need: int) -> int:
        """How many of these pages `_release_invisible` gives back to the pool."""
        freed = 0
        for page_id, n in zip(ids, lengths, strict=True):
            start += n
            if start > need:
                break
            freed += page_id is not None and self.pools[pool].allocator.count(page_id) == 1
        return freed

    # -- whole sequences --------------------------------------------------------------------------------------------

    def resize(self, batch_size: int) -> None:
        if missing := batch_size - len(self.sequences):
            self.sequences += [self._empty() for _ in range(missing)]
            self._closed_tables = None

    def replace(self, row: int, sequence: Sequence) -> None:
        """Put a sequence in the place of an empty one."""
        self.sequences[row] = sequence
        self._closed_tables = None

    def _empty(self) -> Sequence:
        g = self.group
        return Sequence(
            low=[[] for _ in g.tiers], boundaries=list(g.boundaries), residual_length=g.residual_length, lost=[0] * len(g.tiers),
        )  # fmt: skip

    def select(self, rows: list[int]) -> None:
        """Rows become copies of `rows` (repeats share pages); rows not named are freed."""
        chosen = [self.sequences[r].clone() for r in rows]
        for s in chosen:
            for pool, ids in s.pages().items():
                self.pools[pool].allocator.share(ids)
        for s in self.sequences:
            self._release(s)
        self.sequences = chosen
        self._closed_tables = None

    def drop(self, row: int, starts: Iterable[int]) -> None:
        """Give back the closed pages whose first tokens are at `starts`."""
        s, wanted = self.sequences[row], set(starts)
        for j, start in enumerate(self.closed_starts(s)):
            if start in wanted:
                self._give_back("closed", s.closed[j])
                s.closed[j] = None
                for i, planes in enumerate(s.low):
                    self._give_back(f"low{i}", planes[j])
                    planes[j] = None
                s.mass.pop(start, None)
        self._closed_tables = None

    def free(self, row: int) -> None:
        self._release(self.sequences[row])
        self.sequences[row] = self._empty()
        self._closed_tables = None

    def _release(self, s: Sequence) -> None:
        for pool, ids in s.pages().items():
            for page_id in ids:
                self.pools[pool].allocator.release(page_id)

    def check_crop(self, row: int, length: int) -> None:
        """Raises CacheStateError if the sequence cannot be cut back to `length` tokens."""
        s = self.sequences[row]
        if length and s.released > self.group.first_visible(length):
            raise CacheStateError(
                f"cannot crop sequence {row} from {s.length} to {length} tokens: layers {self.group.layers[0]}.. have a sliding window of "
                f"{self.group.geometry.sliding_window} and released tokens before {s.released}; call keep_past() before speculating"
            )
        if self.keep_past and length and any(s.lost):
            left = s.dropped + self._closed_pages_of(s, length)
            for lost, boundary in zip(s.lost, s.boundaries, strict=True):
                if left - boundary < lost <= left:
                    raise CacheStateError(
                        f"cannot take back sequence {row} from {s.length} to {length} tokens: page {lost - 1} left its tier while they were speculative and "
                        "would be in it again; take back fewer tokens at once, or crop to the present length first, which ends the speculation"
                    )

    def _closed_pages_of(self, s: Sequence, length: int) -> int:
        """Closed pages that a crop to `length` leaves."""
        surplus, pages = s.length - length - s.tail_tokens, len(s.closed)
        while pages and surplus >= s.closed_lengths[pages - 1]:
            surplus -= s.closed_lengths[pages - 1]
            pages -= 1
        return pages

    def crop(self, row: int, length: int) -> None:
        """Keep the first `length` tokens. A closed page that is cut keeps its bytes and shows fewer tokens."""
        s = self.sequences[row]
        surplus = s.length - length
        runs: list[tuple[str, Any, list[int]]] = [("tail", s.tail, s.tail_lengths), ("closed", s.closed, s.closed_lengths)]
        for pool, ids, lengths in runs:
            while surplus and ids:
                cut = min(surplus, lengths[-1])
                lengths[-1] -= cut
                surplus -= cut
                self._closed_tables = None
                if not lengths[-1]:
                    lengths.pop()
                    self._give_back(pool, ids.pop())
                    if pool == "closed":
                        for i, planes in enumerate(s.low):
                            self._give_back(f"low{i}", planes.pop())
        s.length = length
        s.mass = {at: x for at, x in s.mass.items() if at < length}
        if not length:
            self.free(row)
        elif self.group.geometry.sliding_window is not None:
            self._release_invisible(s, self._first_needed(s, s.length))

    # -- tables -----------------------------------------------------------------------------------------------------

    def tables(self) -> dict[Zone, PageTable]:
        """Page tables of all sequences as they are now, one per zone that holds anything: closed pages by their low planes, sinks, tail."""
        if self._closed_tables is None:
            self._closed_tables = self._tables_of_closed()
        found = dict(self._closed_tables)
        for pool in ("sink", "tail"):
            rows = []
            for s in self.sequences:
                run = [min(s.length, self.group.num_sink_tokens)] if pool == "sink" else s.tail_lengths
                start = 0 if pool == "sink" else s.length - s.tail_tokens
                rows.append((s.sink if pool == "sink" else s.tail, run, start))
            if any(ids for ids, _, _ in rows):
                found[pool, 0] = _table(rows)
        return found

    def _tables_of_closed(self) -> dict[Zone, PageTable]:
        rows = [(s.closed, s.closed_lengths, s.length - s.tail_tokens - sum(s.closed_lengths)) for s in self.sequences]
        whole = _table(rows)
        planes = [np.array([-1 if x is None else x for s in self.sequences for x in s.low[i]], np.int64) for i in reversed(range(len(self.group.tiers)))]
        zone = np.where(whole.page_ids >= 0, sum((x >= 0 for x in planes), np.zeros(whole.num_pages, np.int64)), -1)
        found = {}
        for k in range(len(planes) + 1):
            keep = zone == k
            if keep.any():
                indptr = np.concatenate([[0], np.cumsum(keep)])[whole.indptr].astype(np.int32)
                low = tuple(x[keep] for x in planes[:k])
                found["closed", k] = PageTable(indptr, whole.page_ids[keep], whole.starts[keep], whole.lengths[keep], low)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For copying and pickling: tables carry raw addresses and are made anew."""
        return self.__dict__ | {"_closed_tables": None}

    # -- undo -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[list[Sequence], dict[str, Allocator]]:
        return [s.clone() for s in self.sequences], {name: p.allocator.clone() for name, p in self.pools.items()}

    def restore(self, sequences: list[Sequence], allocators: dict[str, Allocator]) -> None:
        self.sequences = sequences
        self._closed_tables = None
        for name, allocator in allocators.items():
            allocator.grow(self.pools[name].allocator.capacity)  # slabs added since stay
            self.pools[name].allocator = allocator


def _table(rows: list[tuple[Any, list[int], int]]) -> PageTable:
    """Of (page ids, visible tokens of each, position of the first) per sequence; ids of dropped pages are -1."""
    ids: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    indptr = [0]
    for held, run, position in rows:
        if held:
            ids += [-1 if page is None else page for page in held]
            lengths += run
            starts += itertools.accumulate(run[:-1], initial=position)
        indptr.append(len(ids))
    return PageTable(np.array(indptr, np.int32), np.array(ids, np.int64), np.array(starts, np.int64), np.array(lengths, np.int32))
