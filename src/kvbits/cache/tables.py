"""Page tables from page lists: what attention reads of all sequences of a group."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..ops.types import PageTable
from .sequence import Sequence

PartKey = tuple[str, int]
"""A pool, and how many low planes (of the oldest tiers) its pages have: pages that attention reads alike."""


def of_closed(sequences: list[Sequence], num_tiers: int) -> dict[PartKey, PageTable]:
    """Tables of the closed pages, one per tier that holds any; dropped pages are left out."""
    whole = _table([(s.closed, s.closed_lengths, s.length - s.tail_tokens - sum(s.closed_lengths)) for s in sequences])
    planes = [
        np.array([-1 if x is None else x for s in sequences for x in s.low[i]], np.int64)
        for i in reversed(range(num_tiers))
    ]
    tier = np.where(whole.page_ids >= 0, sum((x >= 0 for x in planes), np.zeros(whole.num_pages, np.int64)), -1)
    found: dict[PartKey, PageTable] = {}
    for k in range(num_tiers + 1):
        keep = tier == k
        if keep.any():
            indptr = np.concatenate([[0], np.cumsum(keep)])[whole.indptr].astype(np.int32)
            low = tuple(x[keep] for x in planes[:k])
            found["closed", k] = PageTable(indptr, whole.page_ids[keep], whole.starts[keep], whole.lengths[keep], low)
    return found


def of_open(sequences: list[Sequence], num_sink_tokens: int) -> dict[PartKey, PageTable]:
    """Tables of the pages that are filled token by token: sinks and tail, as far as there are any."""
    found: dict[PartKey, PageTable] = {}
    if any(s.sink for s in sequences):
        found["sink", 0] = _table([(s.sink, [min(s.length, num_sink_tokens)], 0) for s in sequences])
    if any(s.tail for s in sequences):
        found["tail", 0] = _table([(s.tail, s.tail_lengths, s.length - s.tail_tokens) for s in sequences])
    return found


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
    return PageTable(
        np.array(indptr, np.int32), np.array(ids, np.int64), np.array(starts, np.int64), np.array(lengths, np.int32)
    )
