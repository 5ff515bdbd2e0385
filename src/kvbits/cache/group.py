"""Record of the page that holds each token, in one layer group: integers only.

A forward pass is one `Step`, planned once for all layers of the group before any byte is written: `advance` moves the
integers and says which bytes each layer must copy, close and write. If pages are missing the caller restores the
snapshot it took. Layers then carry out the step one after the other, each in the order recodes, closes, copies,
writes, so a page freed by a step can be handed out again within it. `Step.reused` lists those: a layer copies them
first, so that a pass that fails in a later layer can be undone.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..errors import CacheStateError
from ..ops.types import Table
from ..spec import LayerGroup
from . import tables
from .pool import Pool, PoolBefore
from .sequence import Sequence, pool_name
from .step import Close, Cut, Move, Recode, Run, Step, Write

MAX_SPECULATED_PAGES = 16
"""A tier of a growing cache holds so many pages more while tokens are speculative; a long prompt under `keep_past`
recodes past them.
"""


class Snapshot(NamedTuple):
    """A group as it was: page lists, and who holds which page of each pool."""

    sequences: list[Sequence]
    keep_past: bool
    pools: dict[str, PoolBefore]

    def reused(self, step: Step) -> list[tuple[str, int]]:
        """Return (pool, id) of the pages that a step takes and that held something."""
        held = {name: pool.allocator for name, pool in self.pools.items()}
        return [(pool, i) for pool, i in step.taken if i < held[pool].capacity and held[pool].count(i)]


class GroupState:
    """Page lists of all sequences of one layer group."""

    def __init__(self, group: LayerGroup, pools: dict[str, Pool]) -> None:
        self.group = group
        self.pools = pools
        self.sequences: list[Sequence] = []
        self.keep_past = False  # speculation: window pages and pages of tiers stay until the next crop
        self._closed_tables: dict[str, Table] | None = None  # of closed pages; None after any change to them

    # -- forward passes ---------------------------------------------------------------------------------------------

    def advance(self, counts: list[int], history_first: bool) -> Step:
        """Append counts[b] tokens to each sequence.

        Args:
            history_first: True when the step's queries read the pages as they are before it (a chunk that attends to
                itself separately), False when they read them after it (one token, already written).

        Raises:
            PoolFullError: pages are missing. The caller restores the snapshot it took.
        """
        step = Step()
        if history_first:
            step.history = self.tables()
        cuts = [self._make_room(row, n, history_first) for row, n in enumerate(counts) if n]
        self._reserve(cuts)
        for cut in cuts:
            self._place(cut, step)
        if not history_first:
            step.history = self.tables()
        return step

    def uses(self, s: Sequence, n: int) -> tuple[int, int, int]:
        """Return (sink tokens, closings, tail pages these consume) of n more tokens."""
        g, tail_tokens = self.group, s.tail_tokens
        sinks = min(n, max(0, g.num_sink_tokens - s.length))
        waiting = tail_tokens + n - sinks - s.residual_length - 1
        if self.keep_past and self.pools["tail"].fixed_capacity is None:
            waiting -= min(s.speculated + n, g.page_size)  # what a token that is taken back would close stays raw
        closings = 0 if g.fills_pages else max(0, waiting // g.page_size)
        return sinks, closings, closings if closings * g.page_size <= tail_tokens else len(s.tail)

    def _first_needed(self, s: Sequence, position: int) -> int:
        """Return the oldest token that must stay for a query at `position`."""
        return s.released if self.keep_past else self.group.first_visible(position)

    def _make_room(self, row: int, n: int, history_first: bool) -> Cut:
        """Move the length, free what n more tokens use up or push out of sight, and cut them into where they go."""
        s = self.sequences[row]
        need = self._first_needed(s, s.length + n if history_first else s.length)
        sinks, closings, consumed = self.uses(s, n)
        waiting = s.tail_tokens
        run = Run(s.length - waiting, waiting, 0, waiting + n)
        s.length += n
        s.speculated += n if self.keep_past else 0
        sources: list[int] = []
        if consumed:
            sources, s.tail, s.tail_lengths = s.tail[:consumed], s.tail[consumed:], s.tail_lengths[consumed:]
            for page_id in sources:
                self.pools["tail"].allocator.release(page_id)
        self._release_invisible(s, need)
        cut = self._cut(row, run, sinks, closings, need, sources, self._demote(s, closings) if closings else [])
        self._trim_copies(s, len(cut.pages))
        return cut

    def _cut(
        self, row: int, run: Run, sinks: int, closings: int, need: int, sources: list[int], moves: list[Move]
    ) -> Cut:
        """Return sinks, pages that close and tail of a run of tokens; what lies before `need` is left out, where
        nothing older stays.
        """
        s, g, size = self.sequences[row], self.group, self.group.page_size
        to_sink: Run | None = None
        if sinks:
            to_sink, run = run.cut(sinks)
            if need >= g.num_sink_tokens:
                s.released, to_sink = g.num_sink_tokens, None
        first = not s.sink and to_sink is None
        if closings and first and not s.closed and (unseen := min(closings, max(0, (need - run.start) // size))):
            _, run = run.cut(unseen * size)
            sources, closings = sources[unseen:], closings - unseen
            s.released, s.dropped = run.start, s.dropped + unseen
        pages: list[Run] = []
        for _ in range(closings):
            page, run = run.cut(size)
            pages.append(page)
        # where the page of the oldest token that stays begins
        whole = g.num_sink_tokens + (need - g.num_sink_tokens) // size * size
        if first and g.fills_pages and not s.tail and whole > run.start + run.waiting:
            _, run = run.cut(whole - run.start)
            s.released = run.start
        return Cut(row, to_sink, pages, sources, moves, run)

    def _reserve(self, cuts: list[Cut]) -> None:
        """Extend growing pools once for all rows, so that a long prompt is one slab."""
        if self.pools["closed"].fixed_capacity is not None:
            return
        for name, n in self._wanted(cuts).items():
            if n:
                self.pools[name].reserve(n)

    def _wanted(self, cuts: list[Cut]) -> dict[str, int]:
        """Return pages of each pool that these take."""
        size, found = self.group.page_size, dict.fromkeys(self.pools, 0)
        for cut in cuts:
            s = self.sequences[cut.row]
            if cut.sinks is not None:
                found["sink"] += not s.sink or self._is_shared("sink", s.sink[0])
            for i in range(len(cut.pages)):
                for pool in (self._closes_into(s, cut, i), *self._copied_into(cut, i)):
                    found[pool] += 1
            if fresh := cut.tail.num_tokens - cut.tail.waiting:
                room = size - s.tail_lengths[-1] if s.tail else 0
                found["tail"] += max(0, -((room - fresh) // size))
                found["tail"] += room > 0 and self._is_shared("tail", s.tail[-1])
        for *_, target in {move[1:] for cut in cuts for move in cut.moves}:
            found[target] += 1
        return found

    @staticmethod
    def _closes_into(s: Sequence, cut: Cut, i: int) -> str:
        """Return the pool of page i of those that a cut closes."""
        return pool_name(bisect.bisect_right(s.young, len(cut.pages) - 1 - i), len(s.young))

    def _copied_into(self, cut: Cut, i: int) -> tuple[str, ...]:
        """Return the pools of copies that page i of those that a cut closes is copied into."""
        newer = len(cut.pages) - 1 - i
        return self.group.copy_pools[bisect.bisect_right(self.group.copied_pages, newer) :]

    def _place(self, cut: Cut, step: Step) -> None:
        """Find room for the tokens of a row and list the work of each layer."""
        s, sinks = self.sequences[cut.row], cut.sinks
        if sinks is not None:
            if s.sink:
                self._own(s.sink, 0, "sink", step)
            else:
                s.sink.append(self._allocate("sink", step))
            step.writes.append(Write("sink", cut.row, s.sink[0], sinks.start, sinks.fresh, sinks.num_tokens, 0))
        self._move(cut.row, cut.moves, step)
        copies: dict[str, list[Close]] = {pool: [] for pool in self.group.copy_pools}
        for i, page in enumerate(cut.pages):
            pool = self._closes_into(s, cut, i)
            page_id = self._allocate(pool, step)
            source = (cut.sources[i],) if page.waiting else ()
            close = Close(cut.row, pool, page_id, source, page.waiting, page.fresh, page.start)
            step.closes.append(close)
            s.closed.append(page_id)
            s.closed_lengths.append(page.num_tokens)
            for name in self._copied_into(cut, i):
                copies[name].append(dataclasses.replace(close, pool=name, page_id=self._allocate(name, step)))
            self._closed_tables = None
        for grade, made in enumerate(copies.values()):
            step.closes += made
            s.copies[grade] += tuple(c.page_id for c in made)
        s.young = [min(n, len(s.closed)) for n in s.young]
        self._write_tail(cut, step)

    def _move(self, row: int, moves: list[Move], step: Step) -> None:
        """Find room for pages that leave their tier. Sequences that share such a page share what becomes of it."""
        if not moves:
            return
        s = self.sequences[row]
        starts = s.closed_starts(self.group.num_sink_tokens)
        moved = {(r.source, r.source_id, r.target): r.page_id for r in step.recodes}
        for move in moves:
            if (page_id := moved.get(move[1:])) is not None:
                self.pools[move.target].allocator.share([page_id])
            else:
                page_id = self._allocate(move.target, step)
                step.recodes.append(Recode(row, move.source, move.page_id, move.target, page_id, starts[move.place]))
            s.closed[move.place] = page_id
        self._closed_tables = None
        order = {name: i for i, name in enumerate(reversed(self.group.tier_pools))}
        step.recodes.sort(key=lambda r: (order[r.source], r.target))

    def _write_tail(self, cut: Cut, step: Step) -> None:
        s, size = self.sequences[cut.row], self.group.page_size
        fresh, end = cut.tail.fresh, cut.tail.fresh + cut.tail.num_tokens - cut.tail.waiting
        while fresh < end:
            if s.tail and s.tail_lengths[-1] < size:
                self._own(s.tail, -1, "tail", step)
            else:
                s.tail.append(self._allocate("tail", step))
                s.tail_lengths.append(0)
            count = min(end - fresh, size - s.tail_lengths[-1])
            start = cut.tail.start + cut.tail.waiting + fresh - cut.tail.fresh - s.tail_lengths[-1]
            step.writes.append(
                Write(
                    "tail",
                    cut.row,
                    s.tail[-1],
                    s.tail_lengths[-1],
                    fresh,
                    count,
                    start,
                    s.tail[-2] if len(s.tail) > 1 else -1,
                )
            )
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
        if self._is_shared(pool, old):
            ids[index] = self._allocate(pool, step)
            step.copies.append((pool, old, ids[index]))
            self.pools[pool].allocator.release(old)

    def _is_shared(self, pool: str, page_id: int) -> bool:
        return self.pools[pool].allocator.count(page_id) > 1

    # -- letting go -------------------------------------------------------------------------------------------------

    def _give_back(self, pool: str, page_id: int | None) -> None:
        if page_id is not None:
            self.pools[pool].allocator.release(page_id)

    def _release_invisible(self, s: Sequence, need: int) -> None:
        """Free pages whose tokens all lie before position `need`."""
        if not need:
            return
        if s.sink and self.group.num_sink_tokens <= need:
            self.pools["sink"].allocator.release(s.sink.pop())
            s.released = self.group.num_sink_tokens
        runs: list[tuple[str, Any, list[int]]] = [
            ("closed", s.closed, s.closed_lengths),
            ("tail", s.tail, s.tail_lengths),
        ]
        for pool, ids, lengths in runs if self.group.fills_pages else runs[:1]:
            # a tail page fills up first
            while ids and not s.sink and s.released + (self.group.page_size if pool == "tail" else lengths[0]) <= need:
                self._give_back(s.pool_of(0) if pool == "closed" else pool, ids.pop(0))
                s.released += lengths.pop(0)
                if pool == "closed":
                    s.dropped += 1
                    s.young = [min(n, len(ids)) for n in s.young]
                    self._closed_tables = None
        self._trim_copies(s)

    def _trim_copies(self, s: Sequence, closings: int = 0) -> None:
        """Let go of copies that are too old once so many more pages have closed, or whose page has left."""
        for grade, (copies, most) in enumerate(zip(s.copies, self.group.copied_pages, strict=True)):
            kept = min(len(s.closed), max(0, most - closings))
            if (surplus := len(copies) - kept) <= 0:
                continue
            for page_id in copies[:surplus]:
                self._give_back(self.group.copy_pools[grade], page_id)
            s.copies[grade] = copies[surplus:]
            self._closed_tables = None

    def release_invisible(self, s: Sequence) -> None:
        """Free what the newest token could not see any more."""
        self._release_invisible(s, self._first_needed(s, s.length - 1))

    # -- tiers ------------------------------------------------------------------------------------------------------

    def _allowed(self, s: Sequence, closings: int) -> list[int]:
        """Return pages that each tier and all younger ones may hold after `closings` more.

        While tokens are speculative, as many more as pages closed since, so that they can be taken back.
        """
        if not self.keep_past:
            return s.boundaries
        fixed = any(p.fixed_capacity is not None for p in self.pools.values())
        slack = min(s.closed_since + closings, self.group.SPECULATED_PAGES if fixed else MAX_SPECULATED_PAGES)
        return [n + slack if n else 0 for n in s.boundaries]

    def _demote(self, s: Sequence, closings: int) -> list[Move]:
        """Make room in the tiers so that `closings` pages can close: the oldest pages of each leave it, for good.

        `young` then counts the pages that are about to close, too.
        """
        count, before = len(s.closed), s.young
        s.young = [min(n + closings, most) for n, most in zip(before, self._allowed(s, closings), strict=True)]
        moves = []
        for j in range(count - (before[-1] if before else 0), count):
            rank = count - 1 - j
            source, target = bisect.bisect_right(before, rank), bisect.bisect_right(s.young, rank + closings)
            if source == target:
                continue
            if (page_id := s.closed[j]) is not None:
                moves.append(Move(j, pool_name(source, len(before)), page_id, pool_name(target, len(before))))
                self.pools[moves[-1].source].allocator.release(page_id)
            if self.keep_past:
                for i in range(source, target):
                    s.lost[i] = max(s.lost[i], s.dropped + j + 1)
        if self.keep_past:
            s.closed_since += closings
        return moves

    def _shrink(self, rows: Iterable[int]) -> Step:
        """Recode what the tiers of these sequences may not hold any more.

        Raises:
            PoolFullError: pages are missing. The caller restores the snapshot it took.
        """
        step = Step()
        moves = {row: self._demote(self.sequences[row], 0) for row in rows}
        for row, found in moves.items():
            self._move(row, found, step)
        return step

    def set_tiers(self, row: int, boundaries: list[int], residual_length: int) -> Step:
        """Set other tier sizes for a sequence from now on: pages past a smaller boundary leave their tier at once, and
        do not return.

        Raises:
            PoolFullError: pages are missing. The caller restores the snapshot it took.
        """
        s = self.sequences[row]
        s.boundaries, s.residual_length = boundaries, residual_length
        return self._shrink([row])

    def speculate(self) -> None:
        """Keep what speculated tokens could make leave, until `settle`."""
        self.keep_past = True

    def settle(self) -> Step:
        """End speculation and let go of what it kept."""
        self.keep_past = False
        for s in self.sequences:
            s.speculated, s.closed_since, s.lost = 0, 0, [0] * len(s.young)
        return self._shrink(range(len(self.sequences)))

    # -- whole sequences --------------------------------------------------------------------------------------------

    def resize(self, batch_size: int) -> None:
        if missing := batch_size - len(self.sequences):
            self.sequences += [Sequence.empty(self.group) for _ in range(missing)]
            self._closed_tables = None

    def replace(self, row: int, sequence: Sequence) -> None:
        """Put a sequence in the place of an empty one."""
        self.sequences[row] = sequence
        self._closed_tables = None

    def select(self, rows: list[int]) -> None:
        """Make rows copies of `rows` (repeats share pages); rows not named are freed."""
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
        for j, start in enumerate(s.closed_starts(self.group.num_sink_tokens)):
            if start in wanted:
                self._give_back(s.pool_of(j), s.closed[j])
                s.closed[j] = None
                self._give_back_copies(s, j - len(s.closed))
        self._closed_tables = None

    def _give_back_copies(self, s: Sequence, place: int) -> None:
        """Give back the copies of the closed page at `place`, counted from the end: -1 is the newest."""
        for grade, copies in enumerate(s.copies):
            if len(copies) >= -place:
                self._give_back(self.group.copy_pools[grade], copies[place])
                s.copies[grade] = (*copies[:place], None, *copies[len(copies) + place + 1 :])

    def free(self, row: int) -> None:
        self._release(self.sequences[row])
        self.sequences[row] = Sequence.empty(self.group)
        self._closed_tables = None

    def _release(self, s: Sequence) -> None:
        for pool, ids in s.pages().items():
            for page_id in ids:
                self.pools[pool].allocator.release(page_id)

    def check_crop(self, row: int, length: int) -> None:
        """Raise CacheStateError if the sequence cannot be cut back to `length` tokens."""
        s = self.sequences[row]
        if length and s.released > self.group.first_visible(length):
            raise CacheStateError(
                f"cannot crop sequence {row} from {s.length} to {length} tokens: layers {self.group.layers[0]}.. have a"
                f" sliding window of {self.group.geometry.sliding_window} and released tokens before {s.released}; call"
                " keep_past() before speculating"
            )
        if self.keep_past and length and any(s.lost):
            left = s.dropped + s.closed_pages_within(length)
            for lost, boundary in zip(s.lost, s.boundaries, strict=True):
                if left - boundary < lost <= left:
                    raise CacheStateError(
                        f"cannot take back sequence {row} from {s.length} to {length} tokens: page {lost - 1} left its"
                        " tier while they were speculative and would be in it again; take back fewer tokens at once,"
                        " or crop to the present length first, which ends the speculation"
                    )

    def crop(self, row: int, length: int) -> None:
        """Keep the first `length` tokens. A closed page that is cut keeps its bytes and shows fewer tokens."""
        s = self.sequences[row]
        surplus = s.length - length
        runs: list[tuple[str, Any, list[int]]] = [
            ("tail", s.tail, s.tail_lengths),
            ("closed", s.closed, s.closed_lengths),
        ]
        for pool, ids, lengths in runs:
            while surplus and ids:
                cut = min(surplus, lengths[-1])
                lengths[-1] -= cut
                surplus -= cut
                self._closed_tables = None
                if not lengths[-1]:
                    lengths.pop()
                    if pool == "closed":
                        self._give_back_copies(s, -1)
                        s.copies = [copies[:-1] for copies in s.copies]
                    self._give_back(s.pool_of(len(ids) - 1) if pool == "closed" else pool, ids.pop())
                    if pool == "closed":
                        s.young = [max(0, n - 1) for n in s.young]
        s.length = length
        if not length:
            self.free(row)
        elif self.group.geometry.sliding_window is not None:
            self._release_invisible(s, self._first_needed(s, s.length))

    # -- tables -----------------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, Table]:
        """Return tables of all sequences as they are now, on the host, by pool, as far as it holds anything."""
        if self._closed_tables is None:
            self._closed_tables = tables.of_closed(self.sequences, self.group)
        return self._closed_tables | tables.of_open(self.sequences, self.group.num_sink_tokens)

    def forget_tables(self) -> None:
        """Forget the tables, since page lists changed."""
        self._closed_tables = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling: tables carry raw addresses and are made anew."""
        return self.__dict__ | {"_closed_tables": None}

    # -- undo -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            [s.clone() for s in self.sequences], self.keep_past, {name: p.snapshot() for name, p in self.pools.items()}
        )

    def restore(self, was: Snapshot) -> None:
        """Put everything back."""
        for name, pool in was.pools.items():
            self.pools[name].restore(pool)
        self.sequences, self.keep_past, self._closed_tables = was.sequences, was.keep_past, None
