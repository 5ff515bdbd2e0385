"""Tables from page lists: what attention reads of all sequences of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..later import upload
from ..ops.types import Table
from ..spec import LayerGroup
from .sequence import Sequence


class _Pages(NamedTuple):
    """Pages of all sequences, one after the other: the sequence, id, visible tokens, and first position of each."""

    row: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray


def of_closed(sequences: list[Sequence], group: LayerGroup) -> dict[str, Table]:
    """Return tables of what is read of the closed pages, by pool, as far as there are any; dropped pages are left out.

    A page that has copies is read from the finest of them.
    """
    whole = _pages([(s.closed, s.closed_lengths, s.length - s.tail_tokens - sum(s.closed_lengths)) for s in sequences])
    pools = ("closed", *reversed(group.tier_pools or group.copy_pools))  # oldest first
    pool = _read_from(whole, sequences) if group.copies else _runs(sequences)
    pool[whole.ids < 0] = -1
    found: dict[str, Table] = {}
    for i, name in enumerate(pools):
        if (keep := pool == i).any():
            own = whole if keep.all() else _Pages(*(x[keep] for x in whole))
            found[name] = _table(len(sequences), own, group.page_size)
    return found


def _runs(sequences: list[Sequence]) -> np.ndarray:
    """Return the run of its sequence that each closed page is in: 0 for the oldest."""
    sizes = [run.stop - run.start for s in sequences for run in s.runs().values()]
    runs = len(sequences[0].young) + 1 if sequences else 1
    return np.repeat(np.tile(np.arange(runs), len(sequences)), sizes)


def _read_from(pages: _Pages, sequences: list[Sequence]) -> np.ndarray:
    """Return what each closed page is read from: 0 for itself, then copies, the finest last. The ids of those that are
    read from copies become the copies'.
    """
    found = np.zeros(len(pages.ids), np.int64)
    end = 0
    for s in sequences:
        end += len(s.closed)
        for rank, copies in enumerate(reversed(s.copies), 1):
            for at, page_id in enumerate(copies, end - len(copies)):
                if page_id is not None:
                    pages.ids[at], found[at] = page_id, rank
    return found


def of_open(sequences: list[Sequence], num_sink_tokens: int) -> dict[str, Table]:
    """Return tables of the pages that are filled token by token: sinks and tail, as far as there are any."""
    found: dict[str, Table] = {}
    if any(s.sink for s in sequences):
        found["sink"] = _filling([(s.sink, min(s.length, num_sink_tokens), 0) for s in sequences])
    if any(s.tail for s in sequences):
        found["tail"] = _filling([(s.tail, s.tail_tokens, s.length - s.tail_tokens) for s in sequences])
    return found


def _filling(rows: list[tuple[list[int], int, int]]) -> Table:
    """Return a table of (page ids, tokens, position of the first token) per sequence, whose pages are full but the
    last.
    """
    width = max(len(ids) for ids, _, _ in rows)
    pages = [ids + [-1] * (width - len(ids)) for ids, _, _ in rows]
    tokens, starts = np.array([(n, start) if ids else (0, 0) for ids, n, start in rows], np.int32).T.copy()
    return Table(*map(torch.from_numpy, (np.array(pages, np.int32), tokens, starts)))


def _pages(rows: list[tuple[Any, list[int], int]]) -> _Pages:
    """Make one list of pages of (page ids, visible tokens of each, position of the first) per sequence.

    Ids of dropped pages are -1.
    """
    counts = [len(held) for held, _, _ in rows]
    row = np.repeat(np.arange(len(rows)), counts)
    ids = np.array([-1 if page is None else page for held, _, _ in rows for page in held], np.int64)
    lengths = np.array([n for held, run, _ in rows if held for n in run], np.int64)
    before = lengths.cumsum() - lengths
    first = (np.cumsum(counts) - counts)[row]
    return _Pages(row, ids, lengths, np.array([at for _, _, at in rows], np.int64)[row] + before - before[first])


def _table(batch: int, pages: _Pages, page_size: int) -> Table:
    """Return a table on the host, with spans where a page other than a sequence's last one does not end where the next
    one begins.
    """
    counts = np.bincount(pages.row, minlength=batch)
    end = counts.cumsum()
    at = pages.row, np.arange(len(pages.row)) - (end - counts)[pages.row]
    ids = np.full((batch, counts.max()), -1, np.int32)
    ids[at] = pages.ids
    held = counts > 0
    tokens, starts = np.zeros((2, batch), np.int32)
    tokens[held] = (counts[held] - 1) * page_size + pages.lengths[end[held] - 1]
    if ((np.diff(pages.starts) == page_size) | (np.diff(pages.row) > 0)).all():
        starts[held] = pages.starts[(end - counts)[held]]
        return Table(*map(torch.from_numpy, (ids, tokens, starts)))
    spans = np.zeros((*ids.shape, 2), np.int32)
    spans[at] = np.stack([pages.starts, pages.lengths], 1)
    return Table(torch.from_numpy(ids), torch.from_numpy(tokens), spans=torch.from_numpy(spans))


def uploaded(tables: list[Table], positions: torch.Tensor, device: torch.device) -> tuple[list[Table], torch.Tensor]:
    """Return tables and positions of the host on a device, in one copy."""
    names = ("pages", "tokens", "starts", "spans")
    given = [(i, name, x) for i, t in enumerate(tables) for name in names if (x := getattr(t, name)) is not None]
    flat = [positions, *(x for _, _, x in given)]
    whole = upload(torch.cat([x.flatten() for x in flat]), device).split([x.numel() for x in flat])
    there: list[dict[str, torch.Tensor]] = [{} for _ in tables]
    for (i, name, x), y in zip(given, whole[1:], strict=True):
        there[i][name] = y.view(x.shape)
    return [Table(**x) for x in there], whole[0].view(positions.shape)
