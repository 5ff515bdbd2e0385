"""Attention of many query tokens to packed history: pages become 16-bit rows, a bounded number at a time, and dense
attention reads those.

    tables --passes--> sequences whose rows fit the scratch together, or slices of one that does not
           --run-----> unpack, put the queries' own keys behind, attend; slices are merged

A kernel that reads packed pages unpacks a page for every 16 query columns. That is right for a few tokens, and four
times slower than 16-bit attention for a chunk of hundreds (docs/results/log/gpu-kernels.md). Softmax does not care
about the order of keys, so pages of all formats go to one run of rows for each sequence.

`Histories` is laid out once a step for all layers: integers on the host, uploaded at once. Nothing waits for a GPU.
`LongQueries` is the plan of `ops.attend` that uses it. Engines use it directly: they put their step's own keys behind
the histories, and bring their own dense attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import DataError
from ..later import upload
from ..spec import PageLayout
from . import dispatch
from .cuda.engine import dense
from .cuda.engine.kernels import check_query, indexed, is_wide
from .cuda.families import family_of
from .merge import Partial, merge
from .reference.attend import PageList
from .types import PageStore, Table

MAX_ROWS = 1 << 16
"""Rows of scratch: 268 MB of keys and values at 8 kv heads of 128. Fewer make slices whose merging shows."""
MIN_COLUMNS = 256
"""Query tokens times heads per kv head from which unpacking pays."""
MIN_COLUMNS_WIDE = 513
"""The same where the kernel that reads packed pages takes `WIDE` columns a warp: at 512 columns it needs 1.15 to 1.28
times the time, and no copy.
"""


def refuses(layouts: Sequence[PageLayout], options: Mapping[str, Any], readable: bool = True) -> str | None:
    """Return why a plan of `ops.attend` on a GPU is left to the kernel that reads packed pages; None where it is not.

    Args:
        layouts, options: as backends of `attend` get them.
        readable: that kernel reads these pages. If it does not, few queries are served here, too.
    """
    first = layouts[0]
    queries, columns = options["num_queries"], options["num_queries"] * options["num_q_heads"] // first.num_kv_heads
    if not options["past_only"]:
        return "queries are not all past the pages"
    wide = is_wide([x for x in layouts if not x.key.is_raw])
    if readable and columns < (MIN_COLUMNS_WIDE if wide else MIN_COLUMNS):
        return f"{queries} query tokens are few"
    if not readable and not any(family_of(x).always_unpacks for x in layouts):
        return "their family's pages are unpacked for many queries only"
    if options["sliding_window"] is not None or options["softcap"] is not None:
        return "it has a sliding window or a softcap"
    if first.head_dim % 8 or first.head_dim > 256:
        return f"head_dim={first.head_dim} is not a multiple of 8 up to 256"
    if first.head_dim != first.value_head_dim:
        return (
            f"torch's FlashAttention takes one width, keys have {first.head_dim} and values {first.value_head_dim}"
            " channels"
        )
    return next((why for x in layouts if (why := family_of(x).refuses("unpack", x, dtype=options["dtype"]))), None)


@dataclass(frozen=True, eq=False)
class Scratch:
    """Rows that pages are unpacked to: keys [rows, H, D], values [rows, H, Dv]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Sequences that one call of dense attention takes.

    Attributes:
        queries, keys: int64 [n], on the host; max_q, max_k: the longest of each.
        q_starts, k_starts: int32 [n + 1] on the device: where each sequence's begin, and past the last.
    """

    queries: np.ndarray
    keys: np.ndarray
    max_q: int
    max_k: int
    q_starts: torch.Tensor
    k_starts: torch.Tensor


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Lengths, bool, torch.Tensor, bool], torch.Tensor | None]
"""Dense attention of sequences of different lengths, of the arguments, by position:

    q, k, v     [tokens, Hq, D]; [at least as many rows as there are keys, H, D]; as many rows, [.., Dv]
    lengths     `Lengths`
    causal      the last query sees the last key, the one before one less; windows count from there. Otherwise all see
                all
    out         [tokens, Hq, Dv], written
    wants_lse   whether float32 log-sum-exps [tokens, Hq] are returned
"""


class Copies(Protocol):
    """Copies in one finer format that some pages have elsewhere, and that are read where they are there."""

    def wanted(self, entries: np.ndarray, newest: np.ndarray) -> np.ndarray:
        """Return bool [n], true for pages that may have one, by their entry in their row and the newest page's."""

    def of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the copy of each page (int64, on its device), or -1."""


PART, SEQUENCE, ENTRY, POSITION, VISIBLE, ROW = range(6)
"""Columns of pages: the part, the sequence, the entry of its table's row, the position of the first token, visible
tokens, and the first row of the scratch.
"""


@dataclass(frozen=True)
class Pass:
    """Sequences `first` .. `last` - 1 that are attended to together, or a slice of one.

    Attributes:
        pages: int64 [n, 6], see above.
        starts: int64 [sequences + 1]: each sequence's first row, and past the last.
        ends: the sequences end here, and their own keys are behind the history. A slice before has none.
    """

    first: int
    last: int
    pages: np.ndarray
    starts: np.ndarray
    ends: bool


def pages_of(layouts: Sequence[PageLayout], tables: Sequence[Table]) -> np.ndarray:
    """List the pages of tables whose lengths are on the host, sequence by sequence.

    Returns:
        int64 [n, 5], the columns above but `ROW`.

    Raises:
        DataError: invalid positions or lengths of pages.
    """
    found = [np.zeros((0, 5), np.int64)]
    for part, (layout, table) in enumerate(zip(layouts, tables, strict=False)):  # copies have no table
        entries = torch.arange(table.pages.shape[1], device="cpu").expand(len(table.tokens), -1)
        listed = PageList.of(dataclasses.replace(table, pages=entries), layout.page_size)
        sequence = np.repeat(np.arange(len(table.tokens)), np.diff(listed.indptr))
        columns = np.full_like(sequence, part), sequence, listed.page_ids, listed.starts, listed.lengths
        found.append(np.stack(columns, 1).astype(np.int64))
    pages = np.concatenate(found)
    return pages[np.argsort(pages[:, SEQUENCE], kind="stable")]


def passes(pages: np.ndarray, own: np.ndarray, capacity: int) -> Iterator[Pass]:
    """Cut sequences into passes whose rows fit a scratch.

    Args:
        pages: as `pages_of` gives them.
        own: int64 [B]: keys that each sequence has behind its history. A sequence without any key is in no pass.
        capacity: rows; at least a page and the most own keys of a sequence.
    """
    batch, visible = len(own), pages[:, VISIBLE]
    history = np.bincount(pages[:, SEQUENCE], visible, batch).astype(np.int64)
    total, begin = history + own, np.searchsorted(pages[:, SEQUENCE], np.arange(batch + 1))
    first = 0
    while first < batch:
        last, room = first, capacity
        # own keys without a history are read where they lie
        while last < batch and total[last] > 0 and (total[last] <= room or (last == first and not history[last])):
            room -= total[last]
            last += 1
        if last > first:
            yield _pass(first, last, pages[begin[first] : begin[last]], own[first:last], True)
        elif total[first]:
            mine = pages[begin[first] : begin[first + 1]]
            ends, at = np.cumsum(mine[:, VISIBLE]), 0
            while at < len(mine):
                most = ends[at] - mine[at, VISIBLE] + capacity - own[first]
                stop = max(int(np.searchsorted(ends, most, "right")), at + 1)
                yield _pass(first, first + 1, mine[at:stop], own[first : first + 1], stop == len(mine))
                at = stop
        first = max(last, first + 1)


def _pass(first: int, last: int, pages: np.ndarray, own: np.ndarray, ends: bool) -> Pass:
    sequence, visible = pages[:, SEQUENCE] - first, pages[:, VISIBLE]
    own = own if ends else np.zeros_like(own)
    keys = np.bincount(sequence, visible, last - first).astype(np.int64) + own
    row = np.cumsum(visible) - visible + (np.cumsum(own) - own)[sequence]
    return Pass(first, last, np.column_stack([pages, row]), np.concatenate([[0], np.cumsum(keys)]), ends)


def _with_copies(p: Pass, pages: np.ndarray, copies: Sequence[Copies]) -> Pass:
    """Return a pass with the pages that may have a copy once more for each format, as parts from 1 on in the same rows.

    Args:
        pages: of all passes.
    """
    newest, found = np.searchsorted(pages[:, SEQUENCE], p.pages[:, SEQUENCE], "right") - 1, [p.pages]
    for part, of_format in enumerate(copies, 1):
        copied = p.pages[of_format.wanted(p.pages[:, ENTRY], pages[newest, ENTRY])]
        copied[:, PART] = part
        found.append(copied)
    return dataclasses.replace(p, pages=np.concatenate(found))


class Histories:
    """Histories of a step's sequences, read by queries that come after them, for all layers whose pages lie alike.

    Args:
        layouts: of each part's pages, then of each format of copies.
        tables: of each part. Page numbers are on the host or on the device, all else is on the host.
        query_lens: int64 [B]: queries of each sequence.
        dtype: of rows and queries.
        device: of the pages.
        capacity: rows of scratch.
        own: each sequence's own keys, as many as its queries, are behind its history, and its queries see each other.
        copies: of the pages of one table, in each format. Later ones are unpacked over earlier ones.

    Attributes:
        rows: of scratch that are needed.
        covers: every sequence has a key to see.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        tables: Sequence[Table],
        query_lens: np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        *,
        own: bool = False,
        copies: Sequence[Copies] = (),
    ) -> None:
        self._layouts, self._tables, self._dtype, self._copies = tuple(layouts), list(tables), dtype, tuple(copies)
        pages = pages_of(layouts, tables)
        found = list(passes(pages, query_lens if own else np.zeros_like(query_lens), capacity))
        self.rows = max((int(p.starts[-1]) for p in found if len(p.pages)), default=0)
        self.covers = sum(p.last - p.first for p in found if p.ends) == len(query_lens)
        if copies and tables:
            found = [_with_copies(p, pages, copies) for p in found]
            self._tables += [tables[0]] * len(copies)
        ends = np.concatenate([[0], np.cumsum(query_lens)])
        there = _uploaded([self._integers(p, ends) for p in found], device)
        self._passes = [self._placed(p, ends, *given) for p, given in zip(found, there, strict=True)]

    def _integers(self, p: Pass, ends: np.ndarray) -> list[np.ndarray]:
        """Return what a pass needs on the device: see `_placed`.

        Args:
            ends: int64 [B + 1], past the last query of each sequence.
        """
        q_starts = ends[p.first : p.last + 1] - ends[p.first]
        targets = np.repeat(p.starts[1:] - q_starts[1:], np.diff(q_starts)) + np.arange(q_starts[-1])
        found = [q_starts.astype(np.int32), p.starts.astype(np.int32), targets]
        for part, table in enumerate(self._tables):
            mine = p.pages[p.pages[:, PART] == part]
            at = mine[:, [SEQUENCE, ENTRY]].T
            on_host = table.pages.device.type == "cpu"
            found.append(table.pages.numpy()[at[0], at[1]].astype(np.int32) if on_host else at)
            found += [mine[:, [ROW, VISIBLE]].astype(np.int32), mine[:, POSITION].astype(np.int32)]
        return found

    def _placed(
        self,
        p: Pass,
        ends: np.ndarray,
        q_starts: torch.Tensor,
        k_starts: torch.Tensor,
        targets: torch.Tensor,
        *of_parts: torch.Tensor,
    ) -> _Placed:
        """Return a pass whose integers are on the device.

        Args:
            q_starts, k_starts: as in `Lengths`; targets: as in `_Placed`.
            of_parts: of each part page numbers int32 [n], or, where the device alone knows them, places in the table,
                int64 [2, n]; then int32 [n, 2] and [n] as the op `unpack` takes rows and starts.
        """
        queries, keys = np.diff(ends[p.first : p.last + 1]), np.diff(p.starts)
        lengths = Lengths(queries, keys, int(queries.max()), int(keys.max()), q_starts, k_starts)
        unpacks = []
        for part, (layout, table) in enumerate(zip(self._layouts, self._tables, strict=True)):
            ids, rows, starts = of_parts[3 * part : 3 * part + 3]
            if not len(rows):
                continue
            if ids.dim() == 2:
                ids = table.pages[ids[0], ids[1]]
            if self._copies and part:
                copy = self._copies[part - 1].of_blocks(ids.long())
                ids, rows = copy.int(), torch.stack([rows[:, 0], rows[:, 1] * (copy >= 0)], 1)  # none: read packed
            choice = dispatch.choose("unpack", layout, self._dtype, rows.device)
            unpacks.append((part, choice.run(layout, self._dtype, ids, rows, starts)))
        return _Placed(slice(int(ends[p.first]), int(ends[p.last])), lengths, p.ends, unpacks, targets)

    def run(
        self,
        stores: Sequence[PageStore],
        q: torch.Tensor,
        out: torch.Tensor,
        attend: Attend,
        scratch: Scratch,
        *,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
        lse: torch.Tensor | None = None,
        others: Sequence[Partial] = (),
    ) -> None:
        """Attend with a layer's queries.

        Args:
            stores: of each layout.
            q: [tokens, Hq, D], sequence by sequence; out: [tokens, Hq, Dv], written but where there is no key.
            own: the queries' own keys [tokens, H, D] and values [.., Dv].
            lse: float32 [tokens, Hq], written but where there is no key.
            others: results over other keys, to be merged in.
        """
        slices: list[Partial] = []
        for p in self._passes:
            keys, values = p.unpack(stores, scratch, own)
            mine = out[p.queries] if p.ends else torch.empty_like(out[p.queries])
            wants_lse = lse is not None or not p.ends or bool(slices or others)
            found = attend(q[p.queries], keys, values, p.lengths, own is not None and p.ends, mine, wants_lse)
            if found is None:
                continue
            slices.append((mine[None], found[None]))
            if not p.ends:
                continue
            if len(slices) + len(others) > 1:
                found = merge([*slices, *others], into=mine[None])[1][0]
            if lse is not None:
                lse[p.queries] = found
            slices = []


def _uploaded(lists: Sequence[Sequence[np.ndarray]], device: torch.device) -> list[list[torch.Tensor]]:
    """Return the arrays of each list, int32 or int64, on the device, of one upload."""
    sizes = [-(-x.nbytes // 16) * 16 for arrays in lists for x in arrays]
    starts = iter(np.cumsum([0, *sizes]).tolist())
    whole, at = np.zeros(sum(sizes), np.uint8), []
    for arrays in lists:
        at.append([(next(starts), x) for x in arrays])
        for start, x in at[-1]:
            whole[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    there = upload(whole, device)
    kinds = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
    return [[there[i : i + x.nbytes].view(kinds[x.dtype]).view(x.shape) for i, x in arrays] for arrays in at]


@dataclass(frozen=True, eq=False)
class _Placed:
    """A pass with its integers on the device.

    Attributes:
        queries: of the step's.
        unpacks: part and rows of each layout with pages.
        targets: int64 [queries]: rows of the own keys.
    """

    queries: slice
    lengths: Lengths
    ends: bool
    unpacks: list[tuple[int, Any]]
    targets: torch.Tensor

    def unpack(
        self, stores: Sequence[PageStore], scratch: Scratch, own: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the pass: own ones without a history where they lie, all others in the scratch."""
        mine = own and (own[0][self.queries], own[1][self.queries])
        if mine and not self.unpacks:
            return mine
        for part, rows in self.unpacks:
            rows.run(stores[part], scratch.keys, scratch.values)
        if mine and self.ends:
            scratch.keys.index_copy_(0, self.targets, mine[0])
            scratch.values.index_copy_(0, self.targets, mine[1])
        return scratch.keys, scratch.values


def dense_rows(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    causal: bool,
    out: torch.Tensor,
    wants_lse: bool,
) -> torch.Tensor | None:
    """Return `Attend` by torch's kernels: one call for sequences of one length, else one for each.

    Args:
        attention: as `cuda.engine.dense.attention`.
    """
    n = len(lengths.keys)
    alike = lengths.max_q * n == lengths.queries.sum() and lengths.max_k * n == lengths.keys.sum()
    step = n if alike else 1
    queries, keys = (np.concatenate([[0], np.cumsum(x)]) for x in (lengths.queries, lengths.keys))
    lses = []
    for b in range(0, n, step):
        mine, theirs = (slice(int(x[b]), int(x[b + step])) for x in (queries, keys))
        asked, seen, read = (x.unflatten(0, (step, -1)) for x in (q[mine], k[theirs], v[theirs]))
        found, lse = attention(asked, seen, read, scaling, causal)
        out[mine] = found.flatten(0, 1)
        lses.append(lse.flatten(0, 1))
    if not wants_lse:
        return None
    return lses[0] if len(lses) == 1 else torch.cat(lses)


class LongQueries:
    """A plan of `ops.attend` for queries that all come past the pages; arguments as there, checked there.

    Args:
        attend: dense attention; torch's by default.
        rows: dtype of unpacked rows; that of the queries by default.
        results: dtype of results that `run` rounds to the queries'; that of the rows by default.
        max_rows: rows of scratch.
        by_head: whether the rows of a head lie side by side in the scratch. Otherwise the heads of a row do, as CUDA
            kernels write them.
    """

    reads_host = True

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        *,
        num_q_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        num_queries: int,
        scaling: float,
        attend: Attend | None = None,
        rows: torch.dtype | None = None,
        results: torch.dtype | None = None,
        max_rows: int = MAX_ROWS,
        by_head: bool = False,
        **options: Any,
    ) -> None:
        self._layouts, self._device = tuple(layouts), device if device.type == "cpu" else indexed(device)
        self._shape = num_queries, num_q_heads, layouts[0].head_dim
        self._dtype, self._rows, self._max_rows, self._by_head = dtype, rows or dtype, max_rows, by_head
        self.result_dtype = results or self._rows
        self._attend = attend or functools.partial(dense_rows, dense.attention, scaling)
        self._layers: dict[int, tuple[PageStore, ...]] = {}
        self._step: tuple[int, Histories, torch.Tensor | None] | None = None

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        self._layers[layer] = tuple(stores)

    def update(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        batch, t = len(tables[0].tokens), self._shape[0]
        hidden = np.zeros((batch, t), bool)
        if positions is not None:
            hidden = positions.numpy() < 0
        elif query_lens is not None:
            hidden = np.arange(t) >= query_lens.numpy()[:, None]
        lens = np.full(batch, t, np.int64)
        histories = Histories(self._layouts, tables, lens, self._rows, self._device, self._max_rows)
        self._step = batch, histories, upload(hidden, self._device) if hidden.any() else None

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        if layer not in self._layers:
            raise DataError(f"layer {layer} was never bound; call bind({layer}, stores) first")
        if self._step is None:
            raise DataError("run() before the first update(); there are no lengths")
        batch, histories, hidden = self._step
        check_query(q, (batch, *self._shape), self._dtype, self._device, rows=False)
        layout = self._layouts[0]
        if out is None:
            out = q.new_empty(*q.shape[:3], layout.value_head_dim)
        given, q = out, q.to(self._rows)
        if out.dtype != self.result_dtype:
            out = torch.empty_like(out, dtype=self.result_dtype)
        if not histories.covers:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        histories.run(
            self._layers[layer],
            q.flatten(0, 1),
            out.flatten(0, 1),
            self._attend,
            Scratch(*(self._empty(q, histories.rows, d) for d in (layout.head_dim, layout.value_head_dim))),
            lse=None if lse is None else lse.flatten(0, 1),
        )
        if hidden is not None:
            out.masked_fill_(hidden[..., None, None], 0)
            if lse is not None:
                lse.masked_fill_(hidden[..., None], -torch.inf)
        return out if given is out else given.copy_(out)

    def _empty(self, q: torch.Tensor, rows: int, head_dim: int) -> torch.Tensor:
        """Return [rows, H, head_dim], not written, of the dtype and device of the queries."""
        heads = self._layouts[0].num_kv_heads
        if self._by_head:
            return q.new_empty(heads, rows, head_dim).transpose(0, 1)
        return q.new_empty(rows, heads, head_dim)

    def explain(self) -> str:
        return f"attend: pages unpacked to {str(self._rows)[6:]}, then dense attention of {self._shape[0]} queries"
