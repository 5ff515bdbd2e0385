"""`ops.paged_attention` by host lists: tables and lengths are read on the CPU, as everywhere else in this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import DataError
from ...spec import PageLayout
from ..types import AttendCall, PageStore, PageTable, Part, check_starts
from .attend_pages import attend


def refuses(layouts: Sequence[PageLayout], max_pages: Sequence[int], options: Mapping[str, Any]) -> str | None:
    """Why such a plan is not served here, or None."""
    device = options["device"]
    return None if device.type == "cpu" else f"the block tables are on {device}; the reference reads them on the host"


class HostPlan:
    """The contract with host lists."""

    def __init__(self, layouts: Sequence[PageLayout], max_pages: Sequence[int], **options: Any) -> None:
        self.layouts, self.max_pages, self.options = tuple(layouts), tuple(max_pages), options
        self._layers: dict[int, tuple[Any, ...]] = {}
        self._tables: list[PageTable] = []
        self._within: dict[tuple[int, int], PageTable] = {}  # of a part and the pages of its pool

    def bind(self, layer: int, pages: Sequence[Sequence[torch.Tensor]], static: Mapping[str, torch.Tensor]) -> None:
        self._layers[layer] = self._stores(pages, static)

    def _stores(
        self, pages: Sequence[Sequence[torch.Tensor]], static: Mapping[str, torch.Tensor]
    ) -> tuple[PageStore, ...]:
        given = zip(self.layouts, pages, strict=True)
        return tuple(PageStore(layout, tuple(slabs), {} if layout.is_raw else dict(static)) for layout, slabs in given)

    def update(
        self,
        block_tables: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor | None],
        offsets: Sequence[torch.Tensor | None],
        query_lens: torch.Tensor | None,
    ) -> None:
        batch, t = len(tokens[0]), self.options["num_queries"]
        newest = np.zeros(batch, np.int64)
        tables = []
        parts = zip(self.layouts, self.max_pages, block_tables, tokens, starts, offsets, strict=True)
        for layout, most, table, n, start, offset in parts:
            size = layout.page_size
            first, at = (
                np.zeros(batch, np.int64) if x is None else x.numpy().astype(np.int64) for x in (start, offset)
            )
            at = at.clip(0, table.shape[1] - 1)
            visible = n.numpy().astype(np.int64).clip(0, np.minimum(most, table.shape[1] - at) * size)
            newest = np.maximum(newest, np.where(visible > 0, first + visible, 0))
            pages = -(-visible // size)
            row = np.repeat(np.arange(batch), pages)
            page = np.arange(len(row)) - np.repeat(np.cumsum(pages) - pages, pages)
            ids = table.numpy()[row, at[row] + page].astype(np.int64)
            lengths = np.minimum(visible[row] - page * size, size).astype(np.int32)
            check_starts(begin := first[row] + page * size, size)
            tables.append(PageTable(np.concatenate([[0], np.cumsum(pages)]).astype(np.int64), ids, begin, lengths))
        count = np.full(batch, t) if query_lens is None else query_lens.numpy().clip(0, t)
        positions = newest[:, None] - count[:, None] + np.arange(t)
        positions = np.where((np.arange(t) < count[:, None]) & (newest >= count)[:, None], positions, -1)
        # last: what is refused changes nothing
        self._tables, self._within, self._positions = tables, {}, torch.from_numpy(positions)

    def _check(self, q: torch.Tensor, layer: int) -> None:
        """
        Raises:
            DataError: queries of another shape or elsewhere than planned, a layer without pages, no lengths.
        """
        if layer not in self._layers:
            raise DataError(f"layer {layer} was never bound; call bind({layer}, pages) first")
        if not self._tables:
            raise DataError("run() before the first update(); there are no lengths")
        want = (
            len(self._positions),
            self.options["num_queries"],
            self.options["num_q_heads"],
            self.layouts[0].head_dim,
        )
        if tuple(q.shape) != want or q.dtype != self.options["dtype"] or q.device.type != "cpu":
            raise DataError(
                f"q is {list(q.shape)} {q.dtype} on {q.device}; the plan is for {list(want)} {self.options['dtype']} on"
                " the CPU"
            )

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        self._check(q, layer)
        stores = self._layers[layer]
        parts = tuple(Part(store, self._table_within(i, store.num_pages)) for i, store in enumerate(stores))
        found, logs = attend(
            q,
            AttendCall(parts, self.options["scaling"], self.options["sliding_window"], self.options["softcap"]),
            self._positions,
        )
        if lse is not None:
            lse.copy_(logs)
        return found.to(q.dtype) if out is None else out.copy_(found)

    def _table_within(self, part: int, num_pages: int) -> PageTable:
        """The table of a part for a pool of so many pages, one for all layers; a number that the pool has not is the
        last page's.
        """
        if (part, num_pages) not in self._within:
            table = self._tables[part]
            ids = np.minimum(table.page_ids.astype(np.uint64), num_pages - 1).astype(np.int64)
            self._within[part, num_pages] = PageTable(table.indptr, ids, table.starts, table.lengths)
        return self._within[part, num_pages]

    def explain(self) -> str:
        return "paged attention by host lists: attend_pages by the reference"


paged_attention = HostPlan
