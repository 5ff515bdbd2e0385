"""Queries of many tokens: histories are unpacked to 16-bit rows, the step's own keys and values put behind them, then
one variable-length FlashAttention call.

    rows of a step --passes--> those that fit the scratch together, or slices of one that does not --> unpack, copy,
    attend (slices are merged)

A step whose rows have no history skips all of that: FlashAttention reads the fresh keys and values where they lie. A
row's own tokens are read as they came, not quantized, as in kvbits' own caches. Everything about passes is integers on
the host; nothing waits for the GPU. The scratch is allocated with the model, so that engines count it. The call itself
is the engine's (`Call.attend`); on CPUs histories are read packed instead (`host_prefill`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...later import upload
from ...ops import dispatch
from ...ops.reference.dequantize import section
from ...ops.types import store_of
from ...spec import PageLayout
from .call import Call, Scratch, Sink, merge
from .host_prefill import HostPrefill
from .place import Copies
from .served import PAGE_SIZE

MAX_HISTORY = 1 << 16
"""Rows of history unpacked at a time: 268 MB of keys and values at 8 kv heads of 128.

Longer ones are read in slices.
"""


def scratch_for(
    layout: PageLayout,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_tokens: int,
    sliding_window: int | None,
) -> Scratch:
    """Room for a step's tokens behind a history (of a window's length in sliding layers), one for all layers of a
    shape.
    """
    history = max_model_len if sliding_window is None else min(max_model_len, sliding_window + PAGE_SIZE)
    most = MAX_HISTORY if sliding_window is None else max(MAX_HISTORY, history)
    rows = -(-min(history, most) // PAGE_SIZE) * PAGE_SIZE + max_tokens
    return _scratch(rows, layout.num_kv_heads, (layout.head_dim, layout.value_head_dim), dtype, device)


@functools.lru_cache(maxsize=64)
def _scratch(
    rows: int, num_kv_heads: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Scratch:
    # FlashAttention-3 reads values in tiles, past the end of a row's keys: weights of 0 there, which numbers that are
    # not finite would turn to NaN.
    return Scratch(*(torch.zeros(rows, num_kv_heads, d, dtype=dtype, device=device) for d in widths))


@dataclass(frozen=True)
class Pass:
    """Rows `first` .. `last` - 1 attended together, or a slice of the history of one of them.

    Attributes:
        pages: int64 [n, 4] of row, entry of its block table, first row of the scratch, visible tokens.
        starts: int64 [rows + 1]: each row's first key in the scratch, and past the last.
        fresh: whether the rows' own tokens are among the keys (behind the history); a slice without them is seen by all
            queries alike.
    """

    first: int
    last: int
    pages: np.ndarray
    starts: np.ndarray
    fresh: bool


def passes(query_lens: np.ndarray, seq_lens: np.ndarray, window: int | None, capacity: int) -> list[Pass]:
    """Which rows are attended together so that their keys fit `capacity` rows of scratch; the queries of one row always
    fit behind a page.

    Args:
        query_lens, seq_lens: int64 [rows]; a row's queries are its newest tokens.
    """
    history = seq_lens - query_lens
    begin = np.zeros_like(history) if window is None else np.maximum(history - window + 1, 0) // PAGE_SIZE * PAGE_SIZE
    begin = np.minimum(begin, history)
    found, first = [], 0
    while first < len(query_lens):
        room, last = capacity, first
        while last < len(query_lens) and seq_lens[last] - begin[last] <= room:
            room -= int(seq_lens[last] - begin[last])
            last += 1
        if last > first:
            found.append(_pass(first, last, begin, history, query_lens, True))
            first = last
            continue
        step = (capacity - int(query_lens[first])) // PAGE_SIZE * PAGE_SIZE
        at = int(begin[first])
        while at < history[first]:
            end = min(at + step, int(history[first]))
            done = end == history[first]
            found.append(_pass(first, first + 1, {first: at}, {first: end}, query_lens, done))
            at = end
        first += 1
    return found


def _pass(first: int, last: int, begin: Any, history: Any, query_lens: np.ndarray, fresh: bool) -> Pass:
    pages, starts = [np.zeros((0, 4), np.int64)], [0]
    for row in range(first, last):
        at = np.arange(begin[row], history[row], PAGE_SIZE)
        table = np.stack(
            [
                np.full_like(at, row),
                at // PAGE_SIZE,
                starts[-1] + at - begin[row],
                np.minimum(history[row] - at, PAGE_SIZE),
            ],
            1,
        )
        pages.append(table.astype(np.int64))
        starts.append(starts[-1] + int(history[row] - begin[row]) + (int(query_lens[row]) if fresh else 0))
    return Pass(first, last, np.concatenate(pages), np.array(starts), fresh)


class _Placed:
    """A pass with its tables on the device, for all layers."""

    def __init__(
        self, p: Pass, query_lens: np.ndarray, history: np.ndarray, block_table: torch.Tensor, copies: Copies | None
    ) -> None:
        device = block_table.device
        lens = query_lens[p.first : p.last]
        self.fresh, self.causal = p.fresh, p.fresh
        begin = int(query_lens[: p.first].sum())
        self.tokens = slice(begin, begin + int(lens.sum()))
        ends = np.concatenate([[0], np.cumsum(lens)])
        offsets = np.repeat(p.starts[1:] - ends[1:], lens) + np.arange(ends[-1]) if p.fresh else np.zeros(0, np.int64)
        self.max_q, self.max_k = int(lens.max()), int(np.diff(p.starts).max())
        self.num_pages = len(p.pages)
        self.q_starts, self.k_starts = (upload(x.astype(np.int32), device) for x in (ends, p.starts))
        self.targets = upload(offsets, device)
        pages = upload(p.pages, device)
        self.page_ids = block_table[pages[:, 0], pages[:, 1]].long()
        self.rows, self.starts = pages[:, 2:].to(torch.int32), (pages[:, 1] * PAGE_SIZE).to(torch.int32)
        self._unpackers: dict[tuple[PageLayout, int], Any] = {}
        self._copied = None if copies is None else _Copied.of(p, history, block_table, copies)

    def unpack(
        self, call: Call, pages: torch.Tensor, copies: torch.Tensor | None, static: dict[str, torch.Tensor]
    ) -> None:
        """The histories' rows to the scratch: packed ones, and over them what copies hold."""
        if self.num_pages:
            self._unpack(call, pages, static)
        if self._copied and copies is not None and call.raw:
            self._copied.put(call.scratch, section(copies, call.raw, "k_raw"), section(copies, call.raw, "v_raw"))

    def _unpack(self, call: Call, pages: torch.Tensor, static: dict[str, torch.Tensor]) -> None:
        key = (call.layout, pages.stride(0))
        if key not in self._unpackers:
            choice = dispatch.choose("unpack", call.layout, call.dtype, pages.device)
            self._unpackers[key] = choice.run(call.layout, call.dtype, self.page_ids, self.rows, self.starts)
        self._unpackers[key].run(store_of(pages, call.layout, static), call.scratch.keys, call.scratch.values)


@dataclass(frozen=True, eq=False)
class _Copied:
    """Rows of the scratch that copies may have raw: those of a history's first page and of its newest.

    Attributes:
        rows: int64 [n] of the scratch; copy, place: int64 [n]: where their raw numbers would be; there: bool [n, 1, 1]:
            whether they are.
    """

    rows: torch.Tensor
    copy: torch.Tensor
    place: torch.Tensor
    there: torch.Tensor

    @classmethod
    def of(cls, p: Pass, history: np.ndarray, block_table: torch.Tensor, copies: Copies) -> _Copied | None:
        row, entry, first, count = p.pages.T
        wanted = (entry > (history[row] - 1) // PAGE_SIZE - copies.newest) | (copies.first & (entry == 0))
        row, entry, first, count = (x[wanted] for x in (row, entry, first, count))
        if not len(row):
            return None
        page = np.repeat(np.arange(len(row)), count)
        place = np.arange(len(page)) - np.repeat(np.cumsum(count) - count, count)
        device = block_table.device
        page_of, places, rows = (upload(x, device) for x in (page, place, first[page] + place))
        block = block_table[upload(row, device), upload(entry, device)].long()
        copy = copies.of_blocks(block)
        return cls(rows, copy.clamp(min=0)[page_of], places, (copy >= 0)[page_of][:, None, None])

    def put(self, scratch: Scratch, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys [copies, H, 64, D], values [copies, H, 64, Dv]."""
        for into, raw in ((scratch.keys, keys), (scratch.values, values)):
            into.index_copy_(0, self.rows, torch.where(self.there, raw[self.copy, :, self.place], into[self.rows]))


class Prefill:
    """Attention of the rows of a step that do not decode.

    Args:
        query_lens, seq_lens: int64 [rows], on the host.
        block_table: int32 [rows, pages] on the device.
        call: of the layers.
        copies: raw ones of this step, or None.

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
        kept = query_lens > 0
        if not kept.all():
            block_table = block_table[torch.from_numpy(np.flatnonzero(kept)).to(block_table.device)]
            query_lens, seq_lens = query_lens[kept], seq_lens[kept]
        self._placed: list[_Placed] = []
        if self.has_history:
            found = passes(query_lens, seq_lens, call.sliding_window, call.scratch.rows)
            self._placed = [_Placed(p, query_lens, seq_lens - query_lens, block_table, copies) for p in found]
        elif len(query_lens):
            self._max_len = int(query_lens.max())
            self._starts = upload(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32), block_table.device)

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
        """q [num_tokens, Hq, D], out [.., Dv]; k [num_tokens, H, D], v [.., Dv], stored already; pages, copies,
        calibrated parameters and learned sink of the layer.
        """
        if not self.num_tokens:
            return
        assert call.attend is not None  # calls of GPUs have one
        if not self.has_history:
            lse = call.attend(
                call, q, k, v, self._starts, self._starts, self._max_len, self._max_len, True, out, sink is not None
            )
            if lse is not None:
                merge([(out[None], lse[None])], sink, out[None])
            return
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p in self._placed:
            p.unpack(call, pages, copies, static or {})
            keys, values = call.scratch.keys, call.scratch.values
            if p.fresh:
                keys.index_copy_(0, p.targets, k[p.tokens])
                values.index_copy_(0, p.targets, v[p.tokens])
            mine = out[p.tokens] if p.causal else torch.empty_like(out[p.tokens])
            wants_lse = not p.causal or bool(parts or sink)
            lse = call.attend(
                call, q[p.tokens], keys, values, p.q_starts, p.k_starts, p.max_q, p.max_k, p.causal, mine, wants_lse
            )
            if lse is not None:
                parts.append((mine[None], lse[None]))
            if p.causal and parts:
                merge(parts, sink, mine[None])
                parts = []


def prefills(
    calls: Sequence[Call],
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    block_table: torch.Tensor,
    copies: Copies | None,
) -> dict[Call, Prefill | HostPrefill]:
    """`Step.prefills` of a step's prompts, for layers of these calls; arguments as `Prefill` takes them."""
    kind = HostPrefill if block_table.device.type == "cpu" else Prefill
    return {c: kind(query_lens, seq_lens, block_table, c, copies if c.raw else None) for c in calls}
