"""Queries of many tokens on a CPU: histories are read packed (`prefill` unpacks them), the step's own keys and values
as they came; row by row.

Takes and gives what `prefill.Prefill` does. Which pages a row reads is integers, laid out once a step for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...ops import chunk_attention, dispatch
from ...ops.types import AttendCall, PageTable, Part, store_of
from .call import Call, Sink, merge
from .place import Copies
from .served import PAGE_SIZE


@dataclass(frozen=True, eq=False)
class _Row:
    """
    Attributes:
        tokens: those of the step that are the row's.
        positions: int64 [1, tokens].
        packed, copied: the pages of its history that are read packed and from copies; None for no pages.
    """

    tokens: slice
    positions: torch.Tensor
    packed: PageTable | None
    copied: PageTable | None


class HostPrefill:
    """Attention of the rows of a step that do not decode; see `prefill.Prefill`."""

    def __init__(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_table: torch.Tensor,
        call: Call,
        copies: Copies | None = None,
    ) -> None:
        self.num_tokens = int(query_lens.sum())
        self.has_history = bool((seq_lens > query_lens).any())
        self._rows: list[_Row] = []
        first, blocks = 0, block_table.numpy()
        for row, (n, length) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
            if n:
                tables = _history(blocks[row], length - n, call.sliding_window, copies)
                self._rows.append(
                    _Row(slice(first, first + n), torch.arange(length - n, length, device="cpu")[None], *tables)
                )
            first += n

    def run(
        self,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        pages: torch.Tensor,
        copies: torch.Tensor | None = None,
        static: dict[str, torch.Tensor] | None = None,
        sink: Sink = None,
    ) -> None:
        """Arguments as `prefill.Prefill.run` takes them."""
        for row in self._rows:
            mine, keys, values = (x[None, row.tokens] for x in (q, k, v))
            fresh = chunk_attention.choose(mine, values, call.softcap)
            results = [fresh.run(mine, keys, values, row.positions, call.scaling, call.sliding_window, call.softcap)]
            parts = [] if row.packed is None else [Part(store_of(pages, call.layout, static), row.packed)]
            if row.copied is not None and copies is not None and call.raw:
                parts.append(Part(store_of(copies, call.raw), row.copied))
            if parts:
                history = AttendCall(tuple(parts), call.scaling, call.sliding_window, call.softcap)
                results.append(dispatch.choose("attend_pages", mine, history).run(mine, history, row.positions))
            if len(results) == 1 and sink is None:
                out[None, row.tokens].copy_(results[0][0])
            else:
                merge(results, sink, out[None, row.tokens])


def _history(
    blocks: np.ndarray, length: int, window: int | None, copies: Copies | None
) -> tuple[PageTable | None, PageTable | None]:
    """The pages of a row's first `length` tokens that its window reaches: those read packed, and those with a copy
    among the newest or of the first.
    """
    begin = 0 if window is None else max(length - window + 1, 0) // PAGE_SIZE
    entry = np.arange(begin, -(-length // PAGE_SIZE))
    ids = blocks[entry].astype(np.int64)
    copy = np.full(len(entry), -1)
    if copies is not None and len(entry):
        kept = (entry > (length - 1) // PAGE_SIZE - copies.newest) | (copies.first & (entry == 0))
        copy = np.where(kept, copies.of_blocks(torch.from_numpy(ids)).numpy(), -1)
    return _table(ids, entry, length, copy < 0), _table(copy, entry, length, copy >= 0)


def _table(ids: np.ndarray, entry: np.ndarray, length: int, where: np.ndarray) -> PageTable | None:
    if not where.any():
        return None
    ids, starts = ids[where], entry[where] * PAGE_SIZE
    return PageTable(np.array([0, len(ids)]), ids, starts, np.minimum(length - starts, PAGE_SIZE).astype(np.int32))
