"""Which page holds which token: integers only, one `GroupState` per layer group.

A sequence is three runs of pages, in token order: the sink page, closed pages, tail pages.

    [ sinks | closed | closed | ... | tail | tail ]
      raw     quantized once          raw, newest tokens

A forward pass is one `Step`, planned once for all layers of the group before any byte is written: `advance` moves the integers and says which bytes each
layer must copy, close and write. If pages are missing nothing moves. Layers then carry out the step one after the other, each in the order
closes, copies, writes, so a page freed by a step can be handed out again within it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from ..errors import CacheStateError
from ..ops.types import PageTable
from ..spec import LayerGroup
from .allocator import Allocator
from .pool import Pool


@dataclass
class Sequence:
    """Pages of one sequence in one group. `*_lengths` count visible tokens; `released` tokens left through a sliding window."""

    length: int = 0
    released: int = 0
    sink: list[int] = field(default_factory=list)  # at most one page
    closed: list[int] = field(default_factory=list)
    closed_lengths: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    tail_lengths: list[int] = field(default_factory=list)

    @property
    def tail_tokens(self) -> int:
        return sum(self.tail_lengths)

    def pages(self) -> dict[str, list[int]]:
        return {"sink": self.sink, "closed": self.closed, "tail": self.tail}

    def clone(self) -> Sequence:
        lists = (self.sink, self.closed, self.closed_lengths, self.tail, self.tail_lengths)
        return Sequence(self.length, self.released, *(x[:] for x in lists))


@dataclass(frozen=True)
class Close:
    """Quantize one page: `count` raw tokens of tail pages, then fresh tokens [fresh, fresh + page_size - count) of a batch row."""

    row: int
    page_id: int
    tail: tuple[int, ...]
    count: int
    fresh: int
    start: int  # position of the page's first token, for messages


@dataclass(frozen=True)
class Write:
    """Store `count` fresh tokens of a batch row, from `fresh` on, raw from slot `slot` of a sink or tail page on."""

    pool: str
    row: int
    page_id: int
    slot: int
    fresh: int
    count: int


@dataclass
class Step:
    """What every layer of the group does for one forward pass."""

    closes: list[Close] = field(default_factory=list)
    copies: list[tuple[str, int, int]] = field(default_factory=list)  # (pool, from id, to id)
    writes: list[Write] = field(default_factory=list)
    history: dict[str, PageTable] = field(default_factory=dict)


class GroupState:
    """Page tables of all sequences of one layer group."""

    def __init__(self, group: LayerGroup, pools: dict[str, Pool]) -> None:
        self.group = group
        self.pools = pools
        self.sequences: list[Sequence] = []
        self.keep_past = False  # speculation: window pages stay until the next crop

    # -- forward passes ---------------------------------------------------------------------------------------------

    def advance(self, counts: list[int], history_first: bool) -> Step:
        """Append counts[b] tokens to each sequence.

        Args:
            history_first: True when the step's queries read the pages as they are before it (a chunk that attends to itself separately), False
                when they read them after it (one token, already written).

        Raises:
            PoolFullError: pages are missing. The caller restores the snapshot it took (`may_run_out` says when one is needed).
        """
        step = Step()
        if history_first:
            step.history = self.tables()
        needs = self._needs(counts, history_first)
        plans = [self._release_consumed(row, n, need) for row, (n, need) in enumerate(zip(counts, needs, strict=True))]
        for row, n in enumerate(counts):
            if n:
                self._place(row, n, needs[row], plans[row], step)
        if not history_first:
            step.history = self.tables()
        return step

    def _needs(self, counts: list[int], history_first: bool) -> list[int]:
        return [self._first_needed(s, s.length + n if history_first else s.length) for s, n in zip(self.sequences, counts, strict=True)]

    def _first_needed(self, sequence: Sequence, position: int) -> int:
        """Oldest token that must stay for a query at `position`."""
        return sequence.released if self.keep_past else self.group.first_visible(position)

    def _release_consumed(self, row: int, n: int, need: int) -> tuple[int, int, list[int], int]:
        """Move the length and free what the step uses up. Returns (sink tokens, closings, consumed tail pages, tail tokens before)."""
        s = self.sequences[row]
        tail_tokens = s.tail_tokens
        sinks, closings, num_consumed = self._uses(s, n)
        consumed = s.tail[:num_consumed]
        s.length += n
        if n:
            s.tail, s.tail_lengths = s.tail[len(consumed) :], s.tail_lengths[len(consumed) :]
            for page_id in consumed:
                self.pools["tail"].allocator.release(page_id)
            self._release_invisible(s, need)
        return sinks, closings, consumed, tail_tokens

    def _uses(self, s: Sequence, n: int) -> tuple[int, int, int]:
        """(sink tokens, closings, tail pages these consume) of n more tokens."""
        g, tail_tokens = self.group, s.tail_tokens
        sinks = min(n, max(0, g.num_sink_tokens - s.length))
        closings = 0 if g.is_raw else max(0, (tail_tokens + n - sinks - g.residual_length - 1) // g.page_size)
        return sinks, closings, closings if closings * g.page_size <= tail_tokens else len(s.tail)

    def _release_invisible(self, s: Sequence, need: int) -> None:
        """Free pages whose tokens all lie before position `need`."""
        if s.sink and self.group.num_sink_tokens <= need:
            self.pools["sink"].allocator.release(s.sink.pop())
            s.released = self.group.num_sink_tokens
        runs = [("closed", s.closed, s.closed_lengths)]
        if self.group.is_raw:
            runs.append(("tail", s.tail, s.tail_lengths))
        for pool, ids, lengths in runs:
            while ids and not s.sink and s.released + lengths[0] <= need:
                self.pools[pool].allocator.release(ids.pop(0))
                s.released += lengths.pop(0)

    def _place(self, row: int, n: int, need: int, plan: tuple[int, int, list[int], int], step: Step) -> None:
        """Find room for the fresh tokens and list the work of each layer."""
        s, g, size = self.sequences[row], self.group, self.group.page_size
        sinks, closings, consumed, tail_tokens = plan
        if sinks and need >= g.num_sink_tokens:
            s.released = g.num_sink_tokens  # already out of the window: never stored
        elif sinks:
            if s.sink:
                self._own(s.sink, 0, "sink", step)
            else:
                s.sink.append(self._allocate("sink"))
            step.writes.append(Write("sink", row, s.sink[0], s.length - n, 0, sinks))
        first = s.length - n + sinks - tail_tokens  # position of the first token of (tail, fresh)
        fresh = sinks
        for i in range(closings):
            start = first + i * size
            from_tail = min(size, max(0, tail_tokens - i * size))
            if start + size <= need and not s.closed and not s.sink:
                s.released = start + size  # likewise
            else:
                page_id = self._allocate("closed")
                sources = tuple(consumed[i : i + 1]) if from_tail else ()
                step.closes.append(Close(row, page_id, sources, from_tail, fresh, start))
                s.closed.append(page_id)
                s.closed_lengths.append(size)
            fresh += size - from_tail
        if g.is_raw and need > s.length - n + sinks and not s.tail and not s.sink:
            skip = (need - (s.length - n + fresh)) // size * size  # raw groups: whole pages no query will see
            fresh += max(0, skip)
            s.released = s.length - n + fresh
        self._write_tail(row, n, fresh, step)

    def _write_tail(self, row: int, n: int, fresh: int, step: Step) -> None:
        s, size = self.sequences[row], self.group.page_size
        while fresh < n:
            if s.tail and s.tail_lengths[-1] < size:
                self._own(s.tail, -1, "tail", step)
            else:
                s.tail.append(self._allocate("tail"))
                s.tail_lengths.append(0)
            count = min(n - fresh, size - s.tail_lengths[-1])
            step.writes.append(Write("tail", row, s.tail[-1], s.tail_lengths[-1], fresh, count))
            s.tail_lengths[-1] += count
            fresh += count

    def _allocate(self, pool: str) -> int:
        self.pools[pool].reserve(1)
        return self.pools[pool].allocator.allocate()

    def _own(self, ids: list[int], index: int, pool: str, step: Step) -> None:
        """Copy on write: make the page at `index` this sequence's own."""
        old = ids[index]
        if self.pools[pool].allocator.count(old) > 1:
            ids[index] = self._allocate(pool)
            step.copies.append((pool, old, ids[index]))
            self.pools[pool].allocator.release(old)

    def pages_wanted(self, counts: list[int], history_first: bool) -> dict[str, int]:
        """Ids a step needs free before it, per pool: those it allocates less those it frees first. Never too few."""
        wanted = {"sink": 0, "closed": 0, "tail": 0}
        for s, n, need in zip(self.sequences, counts, self._needs(counts, history_first), strict=True):
            if not n:
                continue
            g, size = self.group, self.group.page_size
            sinks, closings, consumed = self._uses(s, n)
            wanted["sink"] += sinks > 0 and (not s.sink or self.pools["sink"].allocator.count(s.sink[0]) > 1)
            first = s.length + sinks - s.tail_tokens
            wanted["closed"] += closings - min(closings, max(0, (need - first) // size))
            wanted["closed"] -= self._freed("closed", s.closed, s.closed_lengths, s.length - s.tail_tokens - sum(s.closed_lengths), need)
            start, tokens = s.length - s.tail_tokens, s.tail_tokens + n - sinks - closings * size
            kept, lengths = s.tail[consumed:], s.tail_lengths[consumed:]
            wanted["tail"] -= sum(self.pools["tail"].allocator.count(i) == 1 for i in s.tail[:consumed])
            if g.is_raw:
                wanted["tail"] -= self._freed("tail", kept, lengths, start, need)
                while kept and start + lengths[0] <= need:
                    start, tokens = start + lengths[0], tokens - lengths.pop(0)
                    kept.pop(0)
                if not kept:
                    tokens -= max(0, need - s.length - sinks) // size * size
            wanted["tail"] += -(-tokens // size) - len(kept)
            wanted["tail"] += bool(kept) and lengths[-1] < size and self.pools["tail"].allocator.count(kept[-1]) > 1  # copy on write
        return {pool: max(0, n) for pool, n in wanted.items()}

    def _freed(self, pool: str, ids: list[int], lengths: list[int], start: int, need: int) -> int:
        """How many of these pages `_release_invisible` gives back to the pool."""
        freed = 0
        for page_id, n in zip(ids, lengths, strict=True):
            start += n
            if start > need:
                break
            freed += self.pools[pool].allocator.count(page_id) == 1
        return freed

    def may_run_out(self, counts: list[int], history_first: bool) -> bool:
        return any(self.pools[p].shortfall(n) for p, n in self.pages_wanted(counts, history_first).items())

    # -- whole sequences --------------------------------------------------------------------------------------------

    def resize(self, batch_size: int) -> None:
        self.sequences += [Sequence() for _ in range(batch_size - len(self.sequences))]

    def select(self, rows: list[int]) -> None:
        """Rows become copies of `rows` (repeats share pages); rows not named are freed."""
        chosen = [self.sequences[r].clone() for r in rows]
        for s in chosen:
            for pool, ids in s.pages().items():
                self.pools[pool].allocator.share(ids)
        for s in self.sequences:
            self._release(s)
        self.sequences = chosen

    def free(self, row: int) -> None:
        self._release(self.sequences[row])
        self.sequences[row] = Sequence()

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

    def crop(self, row: int, length: int) -> None:
        """Keep the first `length` tokens. A closed page that is cut keeps its bytes and shows fewer tokens."""
        s = self.sequences[row]
        surplus = s.length - length
        for pool, ids, lengths in (("tail", s.tail, s.tail_lengths), ("closed", s.closed, s.closed_lengths)):
            while surplus and ids:
                cut = min(surplus, lengths[-1])
                lengths[-1] -= cut
                surplus -= cut
                if not lengths[-1]:
                    lengths.pop()
                    self.pools[pool].allocator.release(ids.pop())
        s.length = length
        if not length:
            self.free(row)
        elif self.group.geometry.sliding_window is not None:
            self._release_invisible(s, self._first_needed(s, s.length))

    # -- tables -----------------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, PageTable]:
        """Page tables of all sequences as they are now, one per pool that holds anything."""
        found = {}
        g = self.group
        for pool in ("closed", "sink", "tail"):
            ids: list[int] = []
            lengths: list[int] = []
            starts: list[int] = []
            indptr = [0]
            for s in self.sequences:
                run = {"sink": [min(s.length, g.num_sink_tokens)], "closed": s.closed_lengths, "tail": s.tail_lengths}[pool]
                held = s.pages()[pool]
                if held:
                    ids += held
                    lengths += run
                    position = {"sink": 0, "closed": s.length - s.tail_tokens - sum(s.closed_lengths), "tail": s.length - s.tail_tokens}[pool]
                    for n in run:
                        starts.append(position)
                        position += n
                indptr.append(len(ids))
            if ids:
                found[pool] = PageTable(
                    np.array(indptr, np.int32), np.array(ids, np.int64), np.array(starts, np.int64), np.array(lengths, np.int32)
                )  # fmt: skip
        return found

    # -- undo -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[list[Sequence], dict[str, Allocator]]:
        return [s.clone() for s in self.sequences], {name: copy.deepcopy(p.allocator) for name, p in self.pools.items()}

    def restore(self, sequences: list[Sequence], allocators: dict[str, Allocator]) -> None:
        self.sequences = sequences
        for name, allocator in allocators.items():
            self.pools[name].allocator = allocator
