"""Attention over packed pages, a few pages at a time, with online softmax: never a dense copy of the history.

    m' = max(m, max(s)),  l' = l exp(m - m') + sum(exp(s - m')),  o' = o exp(m - m') + exp(s - m') V
                                                                  (arXiv:1805.02867)

Keys and values in a basis stay in it: queries go there once per frame, and outputs come back (quant/basis.py).
Runs anywhere torch runs. With `dtype=torch.float64` it is the judge of every kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import DataError
from ...quant.basis import frames, hadamard
from ...quant.rotary import turn
from ...spec import PageLayout
from ..types import PageStore, Table, check_starts
from .dequantize import dequantize_pages

PAGES_PER_STEP = 16


def refuses(layouts: Sequence[PageLayout], options: Mapping[str, Any]) -> str | None:
    """Return why such a plan is not served here, or None."""
    if options["device"].type != "cpu" and not options["may_wait"]:
        return f"it would wait for {options['device']} at every step"
    return None


@dataclass(frozen=True)
class PageList:
    """The pages that sequences read of one part, one after the other: sequence b has those from indptr[b] to
    indptr[b + 1].

    Attributes:
        indptr: int64 [B + 1].
        page_ids: int64 [N], as the table gave them: a number that the pool has not means its last page.
        starts: int64 [N], position of each page's first token.
        lengths: int32 [N], visible tokens of each page, 1 to page_size.
    """

    indptr: np.ndarray
    page_ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, table: Table, page_size: int) -> PageList:
        """Make the list of pages that a table describes.

        Raises:
            DataError: invalid positions or lengths of pages.
        """
        pages, tokens = _host(table.pages), _host(table.tokens).astype(np.int64)
        batch, width = len(tokens), pages.shape[1]
        at = np.zeros(batch, np.int64) if table.offsets is None else _host(table.offsets).clip(0, width - 1)
        visible = np.minimum(np.maximum(tokens, 0), (width - at) * page_size)
        counts = -(-visible // page_size)
        indptr = np.zeros(batch + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        row = np.repeat(np.arange(batch), counts)
        page = np.arange(len(row)) - indptr[row]
        ids = pages[row, at[row] + page].astype(np.int64)
        if table.spans is not None:
            starts, lengths = _host(table.spans)[row, page].astype(np.int64).T
            if ((lengths < 1) | (lengths > page_size)).any():
                bad = lengths[(lengths < 1) | (lengths > page_size)][0]
                raise DataError(
                    f"a page of a table shows {bad} tokens, which must lie between 1 and page_size={page_size}; leave"
                    " out pages of which nothing is visible"
                )
        else:
            first = np.zeros(batch, np.int64) if table.starts is None else _host(table.starts).astype(np.int64)
            starts, lengths = first[row] + page * page_size, np.minimum(visible[row] - page * page_size, page_size)
        check_starts(starts, page_size)
        return cls(indptr, ids, np.ascontiguousarray(starts), lengths.astype(np.int32))

    def within(self, num_pages: int) -> np.ndarray:
        """Return int64 [N]: page numbers of a pool of so many pages."""
        return np.minimum(self.page_ids.astype(np.uint64), num_pages - 1).astype(np.int64)

    def of_sequence(self, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return page numbers, starts and lengths of one sequence."""
        its = slice(self.indptr[b], self.indptr[b + 1])
        return self.page_ids[its], self.starts[its], self.lengths[its]

    def newest(self) -> np.ndarray:
        """Return int64 [B]: position after the newest token of each sequence; 0 for none."""
        found = np.zeros(len(self.indptr) - 1, np.int64)
        np.maximum.at(found, np.repeat(np.arange(len(found)), np.diff(self.indptr)), self.starts + self.lengths)
        return found


def _host(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()


def query_positions(lists: Sequence[PageList], num_queries: int, query_lens: torch.Tensor | None) -> torch.Tensor:
    """Return int64 [B, num_queries]: positions of the newest tokens of page lists, -1 for padding."""
    newest = np.maximum.reduce([x.newest() for x in lists])[:, None]
    count = np.full((1, 1), num_queries) if query_lens is None else _host(query_lens)[:, None].clip(0, num_queries)
    index = np.arange(num_queries)
    return torch.from_numpy(np.where((index < count) & (newest >= count), newest - count + index, -1))


class HostPlan:
    """A plan whose tables are read on the host; those of the CPU and the reference."""

    reads_host = True
    result_dtype = torch.float32

    def __init__(self, layouts: Sequence[PageLayout], **options: Any) -> None:
        self.layouts, self.options = tuple(layouts), options
        self._lists: list[PageList] = []
        self._positions = torch.empty(0, options["num_queries"], dtype=torch.int64, device="cpu")

    def update(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        lists = [PageList.of(table, layout.page_size) for table, layout in zip(tables, self.layouts, strict=True)]
        at = query_positions(lists, self.options["num_queries"], query_lens) if positions is None else positions.long()
        # last: what is refused changes nothing
        self._lists, self._positions = lists, at

    def _check(self, q: torch.Tensor, layer: int, layers: Mapping[int, Any]) -> None:
        """Check queries and layers against the plan.

        Raises:
            DataError: queries of another shape or elsewhere than planned, a layer without pages, no lengths.
        """
        if layer not in layers:
            raise DataError(f"layer {layer} was never bound; call bind({layer}, stores) first")
        if not self._lists:
            raise DataError("run() before the first update(); there are no lengths")
        o = self.options
        want = (len(self._positions), o["num_queries"], o["num_q_heads"], self.layouts[0].head_dim)
        if tuple(q.shape) != want or q.dtype != o["dtype"] or q.device.type != o["device"].type:
            raise DataError(
                f"q is {list(q.shape)} {q.dtype} on {q.device}; the plan is for {list(want)} {o['dtype']} on"
                f" {o['device']}"
            )


def plan(layouts: Sequence[PageLayout], **options: Any) -> Plan:
    """Plan as `ops.attend.plan` has it; arguments as there, checked there."""
    return Plan(layouts, **options)


class Plan(HostPlan):
    """A plan of this backend."""

    def __init__(self, layouts: Sequence[PageLayout], **options: Any) -> None:
        super().__init__(layouts, **options)
        self._layers: dict[int, list[PageStore]] = {}

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        self._layers[layer] = list(stores)

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        self._check(q, layer, self._layers)
        o = self.options
        found, logs = judge(
            q,
            self._layers[layer],
            self._lists,
            self._positions,
            o["scaling"],
            o["sliding_window"],
            o["softcap"],
            torch.float32,
        )
        if lse is not None:
            lse.copy_(logs)
        return found.to(q.dtype) if out is None else out.copy_(found)

    def explain(self) -> str:
        return "attend by the reference"


def exact(
    q: torch.Tensor,
    stores: Sequence[PageStore],
    tables: Sequence[Table],
    *,
    query_lens: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `ops.attend.attend` should give, computed in `dtype`. Every kernel is judged by it.

    Args:
        q: [B, T, Hq, D].
        stores, tables, query_lens, positions, scaling, sliding_window, softcap: as in `ops.attend`.

    Returns:
        out [B, T, Hq, value_head_dim] and lse [B, T, Hq] (natural log) in `dtype`.

    Raises:
        DataError: invalid positions or lengths of pages.
    """
    lists = [PageList.of(table, store.layout.page_size) for table, store in zip(tables, stores, strict=True)]
    at = query_positions(lists, q.shape[1], query_lens) if positions is None else positions.long()
    return judge(
        q, stores, lists, at, q.shape[3] ** -0.5 if scaling is None else scaling, sliding_window, softcap, dtype
    )


def judge(
    q: torch.Tensor,
    stores: Sequence[PageStore],
    lists: Sequence[PageList],
    positions: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of every query over the pages of its sequence.

    Args:
        q: [B, T, Hq, D].
        positions: int64 [B, T]; a key at position p is visible to a query at position t if t - sliding_window < p <=
            t. Negative marks a padding query, which sees nothing.

    Returns:
        out [B, T, Hq, value_head_dim] and lse [B, T, Hq] (natural log) in `dtype`; 0 and -inf where nothing was
            visible, NaN where something was and the query holds NaN or infinity (CUDA kernels answer such a query with
            0 and -inf or NaN, without looking).
    """
    parts = list(zip(stores, lists, strict=True))
    outs, lses = zip(
        *(
            _attend_sequence(q[b], parts, positions[b], b, scaling, sliding_window, softcap, dtype)
            for b in range(q.shape[0])
        ),
        strict=True,
    )
    return torch.stack(outs), torch.stack(lses)


def _attend_sequence(
    q: torch.Tensor,
    parts: Sequence[tuple[PageStore, PageList]],
    positions: torch.Tensor,
    b: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    t, hq = q.shape[:2]
    layout = parts[0][0].layout
    h = layout.num_kv_heads
    rows = q.to(dtype).unflatten(1, (h, hq // h)).permute(1, 0, 2, 3).reshape(h, -1, q.shape[2])  # [H, T * G, D]
    finite = torch.isfinite(rows).all(-1, keepdim=True)
    rows = torch.where(finite, rows, 0)
    row_positions = positions.to(q.device).repeat_interleave(hq // h)
    best = rows.new_full((h, rows.shape[1], 1), -torch.inf)
    total = torch.zeros_like(best)
    out = rows.new_zeros(*rows.shape[:2], layout.value_head_dim)
    for store, pages in parts:
        queries = _Queries(rows, store, pages)
        for k, v, key_positions, page_of in _steps(store, pages, b, dtype):
            scores = queries.dot(k, page_of) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            hidden = (key_positions < 0) | (key_positions > row_positions[:, None])
            if sliding_window is not None:
                hidden |= key_positions <= row_positions[:, None] - sliding_window
            scores = scores.masked_fill(hidden, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            safe = torch.where(torch.isinf(new_best), 0.0, new_best)
            p = torch.exp(scores - safe)
            alpha = torch.exp(best - safe)
            total = total * alpha + p.sum(-1, keepdim=True)
            seen_here = p @ v
            out = out * alpha + (hadamard(seen_here) if store.layout.value.basis == "hadamard" else seen_here)
            best = new_best
    seen = total > 0
    total = torch.where(finite, total, torch.nan)
    out = torch.where(seen, out / torch.where(seen, total, 1.0), 0.0)
    lse = torch.where(seen, best + torch.log(total), -torch.inf)
    return (
        out.view(h, t, hq // h, -1).permute(1, 0, 2, 3).reshape(t, hq, -1),
        lse.view(h, t, hq // h).permute(1, 0, 2).reshape(t, hq),
    )


class _Queries:
    """Queries [H, n, D] of one sequence for the keys of a part, each in the basis that its page stores them in."""

    def __init__(self, rows: torch.Tensor, store: PageStore, pages: PageList) -> None:
        self.rows, self.store, self.pages = rows, store, pages
        self._in_frame: dict[int, torch.Tensor] = {}

    def dot(self, k: torch.Tensor, page_of: np.ndarray) -> torch.Tensor:
        """Return [H, n, tokens] with keys [H, tokens, D] of the pages `page_of` [tokens], entries of the page list."""
        basis = self.store.layout.key.basis
        if basis != "calibrated":
            return (hadamard(self.rows) if basis == "hadamard" else self.rows) @ k.transpose(-1, -2)
        frame_of = frames(self.pages.starts[page_of])
        found = [
            self._of(int(f)) @ k[:, torch.from_numpy(np.flatnonzero(frame_of == f)).to(k.device)].mT
            for f in np.unique(frame_of)
        ]
        order = np.argsort(np.argsort(frame_of, kind="stable"))
        return torch.cat(found, -1)[..., torch.from_numpy(order).to(k.device)]

    def _of(self, frame: int) -> torch.Tensor:
        if frame not in self._in_frame:
            static = self.store.static
            self._in_frame[frame] = (
                turn(self.rows, torch.tensor([frame], device="cpu"), static["k_inv_freq"], back=True)
                @ static["k_inverse"].to(self.rows).mT
            )
        return self._in_frame[frame]


def _steps(
    store: PageStore, pages: PageList, b: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]]:
    """Yield [H, n, D] keys and values of a few pages at a time, dequantized in the basis that they are stored in, their
    positions [n] and their entries in the page list [n].
    """
    layout, page_ids = store.layout, pages.within(store.num_pages)
    for first in range(pages.indptr[b], pages.indptr[b + 1], PAGES_PER_STEP):
        entries = slice(first, min(first + PAGES_PER_STEP, pages.indptr[b + 1]))
        k, v = dequantize_pages(
            store.gather(page_ids[entries]), layout, store.static, dtype, pages.starts[entries], True
        )
        inside = np.arange(layout.page_size)
        shown = inside < pages.lengths[entries, None]
        positions = np.where(shown, pages.starts[entries, None] + inside, -1).reshape(-1)
        keep = torch.from_numpy(positions >= 0).to(k.device)
        # Rows past the visible length may hold anything, NaN included, and 0 * NaN would spread it.
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, keep] for x in (k, v))
        page_of = np.repeat(np.arange(entries.start, entries.stop), layout.page_size)[positions >= 0]
        yield k, v, torch.from_numpy(positions).to(k.device)[keep], page_of
