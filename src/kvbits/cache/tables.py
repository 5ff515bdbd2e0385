"""Page tables from page lists: what attention reads of all sequences of a group."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..ops.types import PageTable
from .sequence import Sequence, pool_name


def of_closed(sequences: list[Sequence]) -> dict[str, PageTable]:
    """Tables of the closed pages by pool, as far as there are any; dropped pages are left out."""
    whole = _table([(s.closed, s.closed_lengths, s.length - s.tail_tokens - sum(s.closed_lengths)) for s in sequences])
    num_tiers = len(sequences[0].young) if sequences else 0
    tier = np.array([s.tier_of(i) for s in sequences for i in range(len(s.closed))], np.int64)
    tier[whole.page_ids < 0] = -1
    found: dict[str, PageTable] = {}
    for k in range(num_tiers, -1, -1):
        keep = tier == k
        if keep.any():
            indptr = np.concatenate([[0], np.cumsum(keep)])[whole.indptr].astype(np.int32)
            found[pool_name(k, num_tiers)] = PageTable(
                indptr, whole.page_ids[keep], whole.starts[keep], whole.lengths[keep]
            )
    return found


def of_open(sequences: list[Sequence], num_sink_tokens: int) -> dict[str, PageTable]:
    """Tables of the pages that are filled token by token: sinks and tail, as far as there are any."""
    found: dict[str, PageTable] = {}
    if any(s.sink for s in sequences):
        found["sink"] = _table([(s.sink, [min(s.length, num_sink_tokens)], 0) for s in sequences])
    if any(s.tail for s in sequences):
        found["tail"] = _table([(s.tail, s.tail_lengths, s.length - s.tail_tokens) for s in sequences])
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
