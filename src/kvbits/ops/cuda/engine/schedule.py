"""Balanced work lists: every block of a launch gets an equal share of the bytes, as runs of chunks.

Integers only, so it tests without a GPU.

A unit is one (sequence, kv head, block of query columns). Its chunks, part after part, are laid end to end with those
of all other units and the line is cut into as many equal pieces as there are blocks. A piece of one unit and part is a
segment. Segments of a unit that follow one another in a block and are read by one walk (tiers of a tiered cache) join:
one result for all. A unit with several results gets a slot for each, which the kernel sums. Starting and ending a walk
costs time, so pieces are equal in bytes plus SEGMENT_COST for each: whole units where that is cheaper.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

SEGMENT_COST = 256 << 10
"""Bytes that a multiprocessor could have read while it starts and ends a walk and its result is merged (8 us).

Without it blocks with two segments were 6 us late; 64, 160 and 256 KiB took 44.8, 42.2 and 41.3 us (int4, one sequence
of 131,072 tokens).
"""
SEARCH_STEPS = 24
KEPT = 16
"""Schedules: one serves the tokens that change no number of chunks, 32 in a row for one sequence."""
_made: dict[tuple[Any, ...], tuple[list[np.ndarray], int]] = {}
SEGMENT_FIELDS = (
    "unit",
    "part",
    "first_entry",
    "first_chunk",
    "num_chunks",
    "slot",
    "unit_slots",
    "num_slots",
    "next",
    "chunks_before",
    "joins",
    "last_entry",
    "position",
    "tokens",
    "",
    "",
)
"""struct Segment of work.cuh."""


@dataclass(frozen=True)
class PartWork:
    """Chunks of one part.

    Attributes:
        first_entry, num_chunks: int64 [B]: where a sequence's entries start in the entry arrays and how many chunks it
            reads.
        chunk_cost: bytes of a chunk.
        launch: which kernel reads it.
        in_ring: read through the ring of shared memory.
        walk: segments of parts of one launch and walk join; None joins nothing.
        last_entry: int64 [B]: a sequence's last entry. It and the one before are not read before the kernel just ahead
            has ended; None: nothing is.
        ends_walk: it comes after the parts of its walk that do not: raw tokens after packed ones, whose queries then
            need no registers any more.
    """

    first_entry: np.ndarray
    num_chunks: np.ndarray
    chunk_cost: int
    launch: int
    in_ring: bool = True
    walk: int | None = None
    last_entry: np.ndarray | None = None
    ends_walk: bool = False

    def key(self) -> tuple[Any, ...]:
        last = None if self.last_entry is None else self.last_entry.tobytes()
        return (
            self.first_entry.tobytes(),
            self.num_chunks.tobytes(),
            self.chunk_cost,
            self.launch,
            self.in_ring,
            self.walk,
            last,
            self.ends_walk,
        )


def chunks_per_sequence(indptr: np.ndarray, lengths: np.ndarray, chunk_tokens: int, chunks_per_page: int) -> np.ndarray:
    """int64 [B]: chunks of every sequence, invisible ones at the end of its last page left out."""
    pages = np.diff(indptr).astype(np.int64)
    last = np.maximum(indptr[1:] - 1, 0)
    visible = -(-lengths[last].astype(np.int64) // chunk_tokens) if len(lengths) else np.zeros_like(pages)
    return np.where(pages > 0, (pages - 1) * chunks_per_page + visible, 0)


def schedule(parts: list[PartWork], repeats: int, num_blocks: list[int]) -> tuple[list[np.ndarray], int]:
    """Segments of every launch.

    Args:
        repeats: units of one sequence (kv heads times column blocks), all reading the same chunks.
        num_blocks: blocks of each launch.

    Returns:
        Segments int32 [n, 16] of each launch in SEGMENT_FIELDS order, block i's first at row i (unit -1: it has none),
            and how many slots all need.
        Not to be written: the next call with the same work returns them again.
    """
    key = (*(p.key() for p in parts), repeats, *num_blocks)
    if (made := _made.get(key)) is None:
        made = _made[key] = _schedule(parts, repeats, num_blocks)
        while len(_made) > KEPT:
            _made.pop(next(iter(_made)), None)
    return made


def _schedule(parts: list[PartWork], repeats: int, num_blocks: list[int]) -> tuple[list[np.ndarray], int]:
    batch = len(parts[0].num_chunks)
    starts, segments = [], []
    for launch, blocks in enumerate(num_blocks):
        order = [(p.walk is None, p.walk, p.ends_walk, i) for i, p in enumerate(parts) if p.launch == launch]
        mine = np.array([i for *_, i in sorted(order)])
        chunks = np.repeat(np.stack([parts[i].num_chunks for i in mine], 1), repeats, axis=0).ravel()  # [unit, part]
        walks = [i if parts[i].walk is None else -1 - (parts[i].walk or 0) for i in mine]
        start, cut = _cut(chunks, np.array([parts[i].chunk_cost for i in mine]), mine, walks, blocks)
        if launch == 0:  # a unit that reads nothing still needs its empty result written
            empty = np.flatnonzero(np.repeat(sum(p.num_chunks for p in parts) == 0, repeats))
            cut = np.concatenate([cut, np.stack([empty, np.full_like(empty, mine[0]), *[0 * empty] * 3], 1)])
            start[-1] += len(empty)
        starts.append(start)
        segments.append(cut)
    counts = np.bincount(np.concatenate([s[s[:, 4] == 0, 0] for s in segments]), minlength=batch * repeats)
    first_slot = np.concatenate([[0], np.cumsum(np.where(counts > 1, counts, 0))])
    used = np.zeros(batch * repeats, np.int64)
    result = []
    for start, s in zip(starts, segments, strict=True):
        unit, part = s[:, 0], s[:, 1]
        ends = s[:, 4] == 0
        result_of = np.cumsum(ends) - ends  # which result a segment is of
        slot = np.where(counts[unit] > 1, first_slot[unit] + used[unit] + _rank(unit[ends])[result_of], -1)
        np.add.at(used, unit[ends], 1)
        entry = np.stack([p.first_entry for p in parts], 1)[unit // repeats, part]
        rows = np.stack([unit, part, entry, s[:, 2], s[:, 3], slot, first_slot[unit], counts[unit]], 1)
        linked, place = _linked(rows, start, np.array([p.in_ring for p in parts])[part])
        linked[place, 10] = s[:, 4]
        last = np.stack([p.first_entry if p.last_entry is None else p.last_entry for p in parts], 1)
        linked[place, 11] = last[unit // repeats, part]
        result.append(linked)
    return result, int(first_slot[-1])


def _linked(rows: np.ndarray, start: np.ndarray, in_ring: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in block order as linked lists, first rows first, then the others; and where each row went."""
    blocks = len(start) - 1
    has = np.diff(start) > 0
    # after all first rows
    place = np.arange(len(rows)) - np.searchsorted(start[:-1][has], np.arange(len(rows)), "right") + blocks
    place[start[:-1][has]] = np.flatnonzero(has)
    follows = np.ones(len(rows), bool)
    follows[start[1:][has] - 1] = False  # last rows
    result = np.zeros((blocks + len(rows) - int(has.sum()), len(SEGMENT_FIELDS)), np.int32)
    result[:blocks, 0], result[:, 8] = -1, -1
    result[place, :8] = rows
    before = np.concatenate([[0], np.cumsum(rows[:, 4] * in_ring)])
    result[place, 9] = before[:-1] - np.repeat(before[start[:-1]], np.diff(start))
    result[place[:-1], 8] = np.where(follows[:-1], place[1:], -1) if len(rows) else []
    return result, place


def _rank(unit: np.ndarray) -> np.ndarray:
    """How many earlier rows name the same unit."""
    order = np.argsort(unit, kind="stable")
    ranks = np.empty(len(unit), np.int64)
    ranks[order] = np.arange(len(unit)) - np.searchsorted(unit[order], unit[order])
    return ranks


def _cut(
    chunks: np.ndarray, costs: np.ndarray, parts: np.ndarray, walks: list[int], blocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """(segment_start [blocks + 1], [n, 5] of unit, part, first chunk, number of chunks, joins the next) for runs of
    chunks in [unit, part] order.
    """
    held = np.flatnonzero(chunks)
    count, (unit, part) = chunks[held], np.divmod(held, len(costs))
    cost, walk = costs[part], np.array(walks)[part]
    starts_walk = np.ones(len(held), bool)  # unless it goes on with the walk of the run before
    starts_walk[1:] = (unit[1:] != unit[:-1]) | (walk[1:] != walk[:-1])
    runs = _Runs(
        count.tolist(),
        cost.tolist(),
        (SEGMENT_COST * starts_walk).tolist(),
        np.cumsum(SEGMENT_COST * starts_walk + count * cost).tolist(),
    )
    low, high = float(np.dot(count, cost)) / blocks, None
    share, step, best = low + SEGMENT_COST, SEGMENT_COST, None
    for _ in range(SEARCH_STEPS):  # the smallest share with which the blocks suffice
        if (found := runs.share_out(share, blocks)) is not None:
            high, best = share, found
        else:
            low, step = share, 2 * step
        share = (low + high) / 2 if high else share + step
        if high and high - low < 0.005 * high:
            break
    assert best is not None, "no share was large enough"
    begin = np.array(best, np.int64)
    width = int(count.max(initial=0)) + 1
    # where segments begin: runs, and blocks inside them
    keys = np.union1d(np.arange(len(held)) * width, (begin @ [width, 1])[begin[:, 0] < len(held)])
    run, first = np.divmod(keys, width)
    ends_run = np.append(run[1:] != run[:-1], True)[: len(run)]
    number = np.where(ends_run, count[run], np.append(first[1:], 0)[: len(run)]) - first
    start = np.append(np.searchsorted(keys, begin @ [width, 1]), len(keys))
    joins = np.zeros(len(keys), np.int64)
    joins[:-1] = (unit[run][1:] == unit[run][:-1]) & (walk[run][1:] == walk[run][:-1])
    joins[start[1:][np.diff(start) > 0] - 1] = 0  # last of a block
    return start, np.stack([unit[run], parts[part[run]], first, number, joins], 1)


@dataclass(frozen=True)
class _Runs:
    """Runs of chunks, one after the other: how many chunks, bytes of each, what starting costs after the run before,
    and all costs up to and with a run.
    """

    count: list[int]
    cost: list[int]
    start: list[int]
    through: list[int]

    def share_out(self, share: float, blocks: int) -> list[tuple[int, int]] | None:
        """Where each block begins, (run, chunk), if every one takes `share`, in order; None if chunks are left over.

        Whole runs are found by bisection: a plan is made for every generated token, and a batch has a run for each kv
        head.
        """
        begin, run, first, runs = [], 0, 0, len(self.count)
        for _ in range(blocks):
            begin.append((run, first))
            if run == runs:
                continue
            rest, fits = self.count[run] - first, int((share - SEGMENT_COST) / self.cost[run])
            if rest > fits:
                first += max(fits, 0)
                continue
            left = self.through[run] + share - SEGMENT_COST - rest * self.cost[run]
            run = bisect_right(self.through, left, run + 1)
            first = 0
            if run < runs:
                left -= self.through[run - 1]
                first = min(max(int((left - self.start[run]) / self.cost[run]), 0), self.count[run] - 1)
        return begin if run == runs else None
