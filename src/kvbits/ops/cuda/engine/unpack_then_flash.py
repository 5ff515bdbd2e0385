"""Many query tokens over packed history on a GPU: pages are unpacked once to 16-bit rows, a bounded number at a time,
and a dense kernel reads those.

The decode kernel unpacks a page for every 16 query columns, which is right for a few tokens and four times slower than
16-bit attention for a chunk of hundreds (docs/results/log/gpu-kernels.md). Softmax does not care about the order of
keys, so pages of all formats go to one run of rows per sequence; sequences of a batch share a launch, and a history
longer than `MAX_ROWS` is attended in slices that are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....later import upload
from ...types import AttendCall, check_call, last_positions
from ..families import family_of
from ..merge import merge_partials
from .dense import attention
from .family import Unpacks
from .kernels import check_query, check_static, indexed, is_wide

MAX_ROWS = 1 << 16
"""Rows of scratch: 268 MB of keys and values at 8 kv heads of 128. Fewer make slices whose merging shows."""
MIN_COLUMNS = 256
"""Query tokens times heads per kv head from which unpacking pays."""
MIN_COLUMNS_WIDE = 513
"""The same where the kernel that reads packed pages takes `WIDE` columns a warp: at 512 columns it needs 1.15 to 1.28
times the time, and no copy.
"""


def refuses(
    call: AttendCall, num_q_heads: int, q_dtype: torch.dtype, num_queries: int, history_only: bool
) -> str | None:
    """Why a call is left to the kernel that reads packed pages directly, or None."""
    layout = call.parts[0].store.layout
    if not history_only:
        return "queries are not all past the pages"
    packed = [p.store.layout for p in call.parts if not p.store.layout.key.is_raw]
    if num_queries * num_q_heads // layout.num_kv_heads < (MIN_COLUMNS_WIDE if is_wide(packed) else MIN_COLUMNS):
        return f"{num_queries} query tokens are few"
    if call.sliding_window is not None or call.softcap is not None:
        return "it has a sliding window or a softcap"
    if layout.head_dim % 8 or layout.head_dim > 256:
        return f"head_dim={layout.head_dim} is not a multiple of 8 up to 256"
    if layout.head_dim != layout.value_head_dim:
        return (
            f"torch's FlashAttention takes one width, keys have {layout.head_dim} and values {layout.value_head_dim}"
            " channels"
        )
    layouts = (p.store.layout for p in call.parts)
    return next((why for x in layouts if (why := family_of(x).refuses("unpack", x, dtype=q_dtype))), None)


@dataclass(frozen=True)
class _Pass:
    """Sequences `first` .. `last` - 1 (those with history), or a slice of one; `starts`: first row of each, and past
    the last.
    """

    first: int
    last: int
    starts: list[int]
    unpackers: list[tuple[int, Unpacks]]


class ChunkPlan:
    """Attention of a chunk to history that all its tokens see; same use as `cuda.Plan`.

    Attributes:
        q_positions: int64 [B, num_queries] on the device; negative marks padding, which sees nothing. Other positions
            are not looked at.
    """

    def __init__(
        self,
        call: AttendCall,
        num_q_heads: int,
        q_dtype: torch.dtype,
        device: torch.device,
        *,
        num_queries: int,
        layer_strides: tuple[int, ...] | None = None,
    ) -> None:
        check_call(
            call, (len(call.parts[0].table.indptr) - 1, num_queries, num_q_heads, call.parts[0].store.layout.head_dim)
        )
        device = indexed(device)
        layout = call.parts[0].store.layout
        batch = len(call.parts[0].table.indptr) - 1
        self.call, self.device, self.dtype = call, device, q_dtype
        self.shape = (batch, num_queries, num_q_heads, layout.head_dim)
        self.q_positions = upload(last_positions(call, batch, num_queries), device)
        strides = layer_strides or (0,) * len(call.parts)
        self._passes = [self._pass(found, strides) for found in passes(call, MAX_ROWS)]
        rows = max((p.starts[-1] for p in self._passes), default=0)
        self._keys, self._values = (
            torch.empty(rows, layout.num_kv_heads, layout.head_dim, dtype=q_dtype, device=device) for _ in "kv"
        )

    def run(
        self,
        q: torch.Tensor,
        q_positions: torch.Tensor | None = None,
        *,
        layer: int = 0,
        static: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, T, Hq, D] in q's dtype, lse float32 [B, T, Hq]); arguments as of `cuda.Plan.run`."""
        check_query(q, self.shape, self.dtype, self.device, rows=False)
        check_static(self.call, layer, static)
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for p in self._passes:
            for part, unpacker in p.unpackers:
                unpacker.run(self._keys, self._values, layer, static[part] if static else None)
            lengths = np.diff(p.starts)
            step = len(lengths) if (lengths == lengths[0]).all() else 1  # one call for sequences of one length
            for b in range(0, len(lengths), step):
                k, v = (
                    x[p.starts[b] : p.starts[b + step]].unflatten(0, (step, -1)) for x in (self._keys, self._values)
                )
                outs, lses = attention(q[p.first + b : p.first + b + step], k, v, self.call.scaling)
                for i in range(step):
                    found.setdefault(p.first + b + i, []).append((outs[i], lses[i]))
        out, lse = (
            torch.stack(x) for x in zip(*(self._merged(found.get(b, [])) for b in range(self.shape[0])), strict=True)
        )
        hidden = (self.q_positions < 0)[..., None]
        return out.masked_fill_(hidden[..., None], 0), lse.masked_fill_(hidden, -torch.inf)

    def explain(self) -> str:
        """How the history is read, in a line."""
        rows, dtype = max((p.starts[-1] for p in self._passes), default=0), str(self.dtype)[6:]
        return (
            f"attend_pages by cuda: {len(self._passes)} x up to {rows} tokens unpacked to {dtype}, then dense attention"
            f" of {self.shape[1]} queries"
        )

    def _merged(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        t, heads, d = self.shape[1:]
        if not found:
            return torch.zeros(t, heads, d, dtype=self.dtype, device=self.device), torch.full(
                (t, heads), -torch.inf, device=self.device
            )
        if len(found) == 1:
            return found[0]
        out, lse = merge_partials([o[None] for o, _ in found], [m[None] for _, m in found])
        return out[0], lse[0]

    def _pass(
        self, found: tuple[int, int, np.ndarray, list[tuple[int, np.ndarray, np.ndarray]]], strides: tuple[int, ...]
    ) -> _Pass:
        first, last, starts, entries = found
        unpackers: list[tuple[int, Unpacks]] = []
        for part, ids, rows in entries:
            p = self.call.parts[part]
            addresses = upload(p.store.addresses[p.table.page_ids[ids]], self.device)
            starts_of = upload(p.table.starts[ids].astype(np.int32), self.device)
            unpacker = family_of(p.store.layout).unpacker(
                p.store, self.dtype, addresses, upload(rows, self.device), strides[part], starts_of
            )
            unpackers.append((part, unpacker))
        return _Pass(first, last, starts.tolist(), unpackers)


def passes(
    call: AttendCall, max_rows: int
) -> list[tuple[int, int, np.ndarray, list[tuple[int, np.ndarray, np.ndarray]]]]:
    """Which pages are unpacked together.

    Returns:
        For each pass (first sequence, past the last, first row of every sequence [n + 1], and per part with pages in
            it: (part, entries of its table [m],
        int32 [m, 2] of first row and visible tokens)). Every visible token is in one pass; a pass holds whole sequences
            or pages of one.
    """
    batch = len(call.parts[0].table.indptr) - 1
    part = np.concatenate([np.full(p.table.num_pages, i) for i, p in enumerate(call.parts)])
    entry = np.concatenate([np.arange(p.table.num_pages) for p in call.parts])
    owner = np.concatenate([np.repeat(np.arange(batch), np.diff(p.table.indptr)) for p in call.parts])
    length = np.concatenate([p.table.lengths for p in call.parts]).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    part, entry, owner, length = part[order], entry[order], owner[order], length[order]
    ends = np.cumsum(length)
    found, at = [], 0
    while at < len(owner):
        base = ends[at] - length[at]
        fit = max(int(np.searchsorted(ends, base + max_rows, "right")), at + 1)  # first entry that no longer fits
        if fit < len(owner) and owner[fit] == owner[fit - 1]:
            # the last sequence does not fit: leave it to the next pass, or cut it if it is alone
            whole = int(np.searchsorted(owner, owner[fit]))
            fit = whole if whole > at else fit
        first, last = int(owner[at]), int(owner[fit - 1]) + 1
        # a sequence without history in between: FlashAttention gets none of those
        if (np.diff(np.unique(owner[at:fit])) > 1).any():
            fit = at + int(np.argmax(np.diff(owner[at:fit]) > 1)) + 1
            last = int(owner[fit - 1]) + 1
        mine = slice(at, fit)
        rows = np.stack([ends[mine] - length[mine] - base, length[mine]], 1).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(np.bincount(owner[mine] - first, length[mine], last - first))]).astype(
            np.int64
        )
        found.append(
            (
                first,
                last,
                starts,
                [(int(i), entry[mine][part[mine] == i], rows[part[mine] == i]) for i in np.unique(part[mine])],
            )
        )
        at = fit
    return found
