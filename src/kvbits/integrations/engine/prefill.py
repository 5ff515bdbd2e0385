"""Queries of many tokens: each row of a step that does not decode attends to its history and to its own tokens, which
are read as they came, not quantized, as in kvbits' own caches.

On a GPU histories are unpacked (`ops.long_queries`), the step's own keys and values put behind them, and the engine's
variable-length FlashAttention (`Call.attend`) reads both; the scratch is allocated with the model, so that engines
count it. On a CPU, where `Call.attend` is None, a plan of `ops.attend` reads histories packed, row by row, and
`attend_fresh` the own tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ops import chunk_attention
from ...ops.attend import Attention
from ...ops.long_queries import ENTRY, MAX_ROWS, POSITION, SEQUENCE, VISIBLE, Histories, Scratch, pages_of
from ...ops.merge import Partial, merge
from ...ops.types import PageStore, Table
from ...spec import PageLayout
from .call import Call, Sink
from .place import Copied, Copies
from .served import PAGE_SIZE


def scratch_for(
    layout: PageLayout,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_tokens: int,
    sliding_window: int | None,
) -> Scratch:
    """Return room for a step's tokens behind a history, one for all layers of a shape: of a window's length in sliding
    layers, of `MAX_ROWS` at most in others, where longer histories are read in slices.
    """
    history = max_model_len if sliding_window is None else min(max_model_len, sliding_window + PAGE_SIZE)
    most = MAX_ROWS if sliding_window is None else max(MAX_ROWS, history)
    rows = -(-min(history, most) // PAGE_SIZE) * PAGE_SIZE + max_tokens
    return _scratch(rows, layout.num_kv_heads, (layout.head_dim, layout.value_head_dim), dtype, device)


@functools.lru_cache(maxsize=64)
def _scratch(
    rows: int, num_kv_heads: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Scratch:
    # FlashAttention-3 reads values in tiles, past the end of a row's keys: weights of 0 there, which numbers that are
    # not finite would turn to NaN.
    return Scratch(*(torch.zeros(rows, num_kv_heads, d, dtype=dtype, device=device) for d in widths))


def history_of(history: np.ndarray, block_table: torch.Tensor, window: int | None) -> Table:
    """Return the pages of each row's first `history` [rows] tokens that its window reaches, with lengths on
    the host.
    """
    begin = np.zeros_like(history) if window is None else np.maximum(history - window + 1, 0) // PAGE_SIZE * PAGE_SIZE
    begin = np.minimum(begin, history)
    numbers = (torch.from_numpy(x.astype(np.int32)) for x in (history - begin, begin, begin // PAGE_SIZE))
    return Table(block_table, *numbers)


@dataclass(frozen=True)
class _Row:
    """A row of a step on a CPU.

    Attributes:
        tokens: of the step's prompts.
        positions: int64 [1, tokens].
        past: attention to its history; None without one.
        result: what `past` writes, in memory that all layers share.
    """

    tokens: slice
    positions: torch.Tensor
    past: Attention | None = None
    result: Partial | None = None


class Prefill:
    """Attention of the rows of a step that do not decode.

    Args:
        query_lens, seq_lens: int64 [rows], on the host; a row's queries are its newest tokens.
        block_table: int32 [rows, pages] on the device.
        call: of the layers.
        copies: of this step; None where no layer has some.

    Attributes:
        num_tokens: of all rows.
        has_history: whether any row has tokens before this step.
    """

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
        kept = np.flatnonzero(query_lens)
        if len(kept) < len(query_lens):
            block_table = block_table[torch.from_numpy(kept).to(block_table.device)]
            query_lens, seq_lens = query_lens[kept], seq_lens[kept]
        layouts, tables = [], []
        formats = copies.formats[: len(call.rings)][::-1] if copies else ()
        if self.has_history:
            layouts = _by_part(call.layouts)
            tables = [history_of(seq_lens - query_lens, block_table, call.sliding_window)]
        self._call, self._histories = call, None
        self._rows: list[_Row] = []  # on a CPU
        if call.attend is None:
            pages, ends = pages_of(layouts[:1], tables), np.cumsum(query_lens)
            for row, (n, length) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
                history = _tables(block_table[row], pages[pages[:, SEQUENCE] == row], formats)
                found = _Row(slice(int(ends[row]) - n, int(ends[row])), torch.arange(length - n, length)[None])
                if history:
                    device, shape = found.positions.device, (1, n, call.num_heads)
                    past = call.plan(layouts, device, batch_size=1, num_queries=n, spans=True, past_only=True)
                    past.update(history, positions=found.positions.int())
                    result = torch.empty(*shape, call.layout.value_head_dim, dtype=past.result_dtype)
                    found = dataclasses.replace(found, past=past, result=(result, torch.empty(shape)))
                self._rows.append(found)
            return
        self._histories = Histories(
            layouts, tables, query_lens, call.dtype, block_table.device, call.scratch.rows, own=True, copies=formats
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stores: list[PageStore],
        sink: Sink = None,
    ) -> None:
        """Attend with q [num_tokens, Hq, D], out [.., Dv]; k [num_tokens, H, D], v [.., Dv], stored already; stores
        (`Layer.stores`) and learned sink of a layer.
        """
        call, stores, others = self._call, _by_part(stores), [] if sink is None else [sink]
        if self._histories is not None and call.attend is not None:
            dense = functools.partial(call.attend, call)
            self._histories.run(stores, q, out, dense, call.scratch, own=(k, v), others=others)
        for row in self._rows:
            mine, keys, values, into = (x[None, row.tokens] for x in (q, k, v, out))
            fresh = chunk_attention.choose(mine, values, call.softcap)
            factors = call.scaling, call.sliding_window, call.softcap
            found = [fresh.run(mine, keys, values, row.positions, *factors), *others]
            if row.past is not None and row.result is not None:
                row.past.bind(0, stores)
                row.past.run(mine, 0, out=row.result[0], lse=row.result[1])
                found.append(row.result)
            if len(found) == 1:
                into.copy_(found[0][0])
            else:
                merge(found, into=into)


def _by_part(each: list[Any]) -> list[Any]:
    """Return what belongs to pages and to copies, finest first, in the order of the parts of a history: a finer copy is
    read over a coarser one.
    """
    return [each[0], *each[:0:-1]]


def _tables(blocks: torch.Tensor, pages: np.ndarray, formats: Sequence[Copied]) -> list[Table]:
    """Return the history of one row: pages that are read packed, then those read from copies of each format.

    The coarsest format comes first. A page is read from the finest copy that it has.
    """
    if not len(pages):
        return []
    ids, entries = blocks.numpy()[pages[:, ENTRY]], pages[:, ENTRY]
    left, found = np.ones(len(ids), bool), []
    for f in reversed(formats):
        copy = f.of_blocks(torch.from_numpy(ids).long()).numpy()
        copied = left & f.wanted(entries, entries[-1:]) & (copy >= 0)
        found.append(_table(copy[copied], pages[copied]))
        left &= ~copied
    return [_table(ids[left], pages[left]), *reversed(found)]


def _table(ids: np.ndarray, pages: np.ndarray) -> Table:
    """Return the table of one row that reads these pages, each at its own position."""
    tokens = (len(ids) - 1) * PAGE_SIZE + int(pages[-1, VISIBLE]) if len(ids) else 0
    width = max(len(ids), 1)  # one entry that is not read, where there is none
    numbers = np.resize(ids, (1, width)), [tokens], np.resize(pages[:, [POSITION, VISIBLE]], (1, width, 2))
    block, count, spans = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in numbers)
    return Table(block, count, spans=spans)
