"""Calls of attention for tests and benchmarks: queries, and a store and a table for each part."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from kvbits.ops import attend
from kvbits.ops.reference.attend import PageList, exact
from kvbits.ops.types import PageStore, Table


@dataclasses.dataclass
class Call:
    """One attention call.

    Attributes:
        stores, tables: of each part.
        q: [B, T, Hq, D].
        positions: int32 [B, T], negative for padding.
        options: scaling, sliding_window and softcap.
    """

    stores: list[PageStore]
    tables: list[Table]
    q: torch.Tensor
    positions: torch.Tensor
    options: dict[str, Any]

    def attend(self, backend: str = "auto", **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse by a backend."""
        given = {"positions": self.positions, "backend": backend} | self.options | changes
        return attend.attend(self.q, self.stores, self.tables, **given)

    def exact(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse by the reference in `dtype`."""
        return exact(self.q, self.stores, self.tables, positions=self.positions, dtype=dtype, **self.options)

    def plan(self, **changes: Any) -> attend.Attention:
        """A plan for such calls."""
        layouts, o = [store.layout for store in self.stores], self.options
        given = {"batch_size": len(self.q), "num_q_heads": self.q.shape[2], "num_queries": self.q.shape[1]}
        given |= {"dtype": self.q.dtype, "device": self.q.device, "spans": self.has_spans}
        return attend.plan(layouts, **given | o | changes)

    @property
    def has_spans(self) -> bool:
        return any(table.spans is not None for table in self.tables)

    def part(self, i: int) -> Call:
        """The call over one part alone."""
        return dataclasses.replace(self, stores=[self.stores[i]], tables=[self.tables[i]])

    @property
    def lists(self) -> list[PageList]:
        """The page list of each part."""
        return [PageList.of(table, s.layout.page_size) for table, s in zip(self.tables, self.stores, strict=True)]


def table_of(pages: PageList, page_size: int, spans: bool = False, offset: int = 0) -> Table:
    """The table of a page list, with spans where pages were dropped or cut, or where they are asked for; else with its
    pages from entry `offset` of a row on.
    """
    counts = np.diff(pages.indptr)
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - pages.indptr[row]
    starts, tokens = np.zeros((2, len(counts)), np.int32)
    held = counts > 0
    starts[held] = pages.starts[pages.indptr[:-1][held]]
    tokens[held] = (counts[held] - 1) * page_size + pages.lengths[pages.indptr[1:][held] - 1]
    if spans or (pages.starts != starts[row] + page_size * column).any():
        at = np.zeros((len(counts), counts.max(initial=1), 2), np.int32)
        at[row, column, 0], at[row, column, 1] = pages.starts, pages.lengths
        ids = np.full(at.shape[:2], -1, np.int32)
        ids[row, column] = pages.page_ids
        return Table(torch.from_numpy(ids), torch.from_numpy(tokens), spans=torch.from_numpy(at))
    ids = np.full((len(counts), counts.max(initial=1) + offset), -1, np.int32)
    ids[row, column + offset] = pages.page_ids
    offsets = torch.full((len(counts),), offset, dtype=torch.int32) if offset else None
    return Table(torch.from_numpy(ids), torch.from_numpy(tokens), torch.from_numpy(starts), offsets)
