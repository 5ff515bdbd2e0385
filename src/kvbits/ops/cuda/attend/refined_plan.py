"""Attention over calls that have banded pages with low planes: these are read packed by a kernel of their own (refined.cu), all others by a `Plan`, and the
results are merged in one more launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ....errors import DataError
from ....later import upload
from ....spec import FRAME
from ...types import AttendCall, Part, banded_sides, last_positions
from ..runtime import driver
from ..side import column_powers, high_operands, most_powers, rows_as_columns, turns_on
from . import refined

NO_WINDOW = 2**30


def is_refined(part: Part) -> bool:
    """Whether a part's pages are banded codes with low planes."""
    return bool(part.low) and banded_sides(part.store.layout) is not None


def split(call: AttendCall) -> tuple[list[int], list[int]]:
    """Which of the call's parts have banded pages with low planes, and which have not."""
    found = [is_refined(p) for p in call.parts]
    return [i for i, x in enumerate(found) if x], [i for i, x in enumerate(found) if not x]


def refuses_refined(call: AttendCall) -> str | None:
    """Why some page with low planes is not read packed, or None."""
    return next((why for p in call.parts if is_refined(p) and (why := refined.refuses(p.store.layout, [s.layout for s in p.low]))), None)


class _Plan(Protocol):
    out: torch.Tensor
    lse: torch.Tensor
    q_positions: torch.Tensor

    def run(
        self, q: torch.Tensor, *, layer: int, page_lse: np.ndarray | None, static: Sequence[Mapping[str, torch.Tensor]] | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def explain(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Attention to the pages of one part."""

    part: int
    kernel: driver.Kernel
    threads: int
    args: refined.Args
    blocks: int
    layer_stride: int


class RefinedPlan:
    """Same use as `Plan`.

    Args:
        make: makes the `Plan` of a call, given its `layer_strides`.
        layer_strides: of each part of `call`, as for `Plan`.

    Attributes:
        out, lse, q_positions: as those of `Plan`.
    """

    def __init__(
        self, call: AttendCall, make: Callable[..., _Plan], num_q_heads: int, q_dtype: torch.dtype, device: torch.device, num_queries: int,
        layer_strides: tuple[int, ...] | None,
    ) -> None:  # fmt: skip
        self.call, self.device = call, device
        strides = layer_strides or (0,) * len(call.parts)
        young, self._kept = split(call)
        layout, batch = call.parts[0].store.layout, len(call.parts[0].table.indptr) - 1
        self._rest: _Plan | None = None
        if self._kept:
            rest = dataclasses.replace(call, parts=tuple(call.parts[i] for i in self._kept))
            self._rest = make(rest, layer_strides=tuple(strides[i] for i in self._kept))
        self._keep: list[torch.Tensor] = []  # what the kernels' arguments point into
        self._pages_lse: dict[int, torch.Tensor] = {}  # by part
        self.out = torch.zeros(batch, num_queries, num_q_heads, layout.head_dim, dtype=q_dtype, device=device)
        self.lse = torch.zeros(batch, num_queries, num_q_heads, dtype=torch.float32, device=device)
        self.q_positions = self._upload(last_positions(call, batch, num_queries))
        if self._rest:  # both read the same
            self.q_positions = self._rest.q_positions.copy_(self.q_positions)
        group = num_q_heads // layout.num_kv_heads
        column_blocks = -(-num_queries * group // refined.COLUMNS)
        runs = [_runs(call.parts[i], refined.pages_each(call.parts[i].store.layout, [s.layout for s in call.parts[i].low])) for i in young]
        of_run = layout.num_kv_heads * column_blocks  # slots
        slots = sum(map(len, runs)) * of_run
        partial = self._kept_alive(torch.empty(slots, refined.COLUMNS, layout.head_dim, device=device))
        partial_ml = self._kept_alive(torch.empty(slots, refined.COLUMNS, 2, device=device))
        owner = np.concatenate([r[:, 2] for r in runs])
        listed = np.argsort(owner, kind="stable")
        common = refined.Args(
            q_positions=self.q_positions.data_ptr(), partial=partial.data_ptr(), partial_ml=partial_ml.data_ptr(), num_queries=num_queries, group=group,
            num_kv_heads=layout.num_kv_heads, column_blocks=column_blocks, window=min(call.sliding_window or NO_WINDOW, NO_WINDOW), scaling=call.scaling,
            softcap=call.softcap or 0.0, over_group=1 / group, listed=self._upload((listed * of_run).astype(np.int32)).data_ptr(),
            first=self._upload(np.searchsorted(owner[listed], np.arange(batch + 1)).astype(np.int32)).data_ptr(),
            out=self.out.data_ptr(), lse=self.lse.data_ptr(), num_rows=self.lse.numel(),
        )  # fmt: skip
        if self._rest:
            common.rest_out, common.rest_lse = self._rest.out.data_ptr(), self._rest.lse.data_ptr()
        firsts = np.cumsum([0, *(len(r) * of_run for r in runs)])
        self._launches = [self._launch(i, r, int(first), common, strides[i]) for i, r, first in zip(young, runs, firsts[:-1], strict=True)]
        self._merging = _copy(common)

    def run(
        self, q: torch.Tensor, q_positions: torch.Tensor | None = None, *, layer: int = 0, page_lse: np.ndarray | None = None,
        static: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(out [B, T, Hq, D] in q's dtype, lse float32 [B, T, Hq]); arguments and results as of `Plan.run`."""
        if q.shape != self.out.shape or q.dtype != self.out.dtype or q.device != self.device:
            raise DataError(f"q is {tuple(q.shape)} {q.dtype} on {q.device}; the plan is for {tuple(self.out.shape)} {self.out.dtype} on {self.device}")
        if q.stride(-1) != 1 or any(s % 4 for s in q.stride()[:-1]) or q.data_ptr() % 8:
            raise DataError(f"q has strides {q.stride()}: the last must be 1, the others multiples of 4, and it must start at 8 bytes; use q.contiguous()")
        if layer and static is None and any(p.store.static for p in self.call.parts):
            raise DataError(f"layer {layer} of a scheme with calibrated parameters was given none; pass `static`, one dict for each part")
        given = static or [p.store.static for p in self.call.parts]
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        own = None if page_lse is None else np.full((sum(self.call.parts[i].table.num_pages for i in self._kept), *page_lse.shape[1:]), -np.inf, np.float32)
        if self._rest:
            self._rest.run(q, layer=layer, page_lse=own, static=[given[i] for i in self._kept])
        stream = driver.current_stream(self.device) if self.device.type == "cuda" else 0
        for x in self._launches:
            self._set_layer(x, q, layer, given[x.part])
            x.kernel.launch(x.blocks, x.threads, x.args, stream)
        merge, threads = self._merge
        merge.launch(-(-self._merging.num_rows // (threads // 32)), threads, self._merging, stream)
        if page_lse is not None and own is not None:
            self._note_pages(page_lse, own)
        return self.out, self.lse

    def explain(self) -> str:
        """How pages are read, in a line each."""
        said = "attend_pages by cuda: {} {}/{} pages with low planes read packed by a kernel of their own, and merged with others"
        layouts = [(self.call.parts[x.part].table.num_pages, self.call.parts[x.part].store.layout) for x in self._launches]
        lines = [said.format(n, layout.key.format, layout.value.format) for n, layout in layouts]
        return "\n".join([*lines, *([self._rest.explain()] if self._rest else [])])

    def _launch(self, part: int, runs: np.ndarray, first_slot: int, common: refined.Args, layer_stride: int) -> _Launch:
        p, args = self.call.parts[part], _copy(common)
        layout, fine = p.store.layout, tuple(s.layout for s in p.low)
        index = -1 if self.device.index is None else self.device.index
        kernel, merge, threads = refined.load(layout, fine, str(self.out.dtype).removeprefix("torch."), index)
        self._merge = merge, threads
        args.runs, args.first_slot = self._upload(runs).data_ptr(), first_slot
        args.page_address = self._upload(p.store.addresses()[p.table.page_ids]).data_ptr()
        args.page_tokens = self._upload(np.stack([p.table.starts, p.table.lengths], 1).astype(np.int32)).data_ptr()
        args.head_bytes = layout.head_bytes
        for i, (store, ids) in enumerate(zip(p.low, p.table.low, strict=True)):
            args.low_address[i], args.low_head_bytes[i] = self._upload(store.addresses()[ids]).data_ptr(), store.layout.head_bytes
        if self.call.page_lse is not None:
            self._pages_lse[part] = torch.full((p.table.num_pages, *self.lse.shape[1:]), -torch.inf, device=self.device)
            args.page_lse = self._pages_lse[part].data_ptr()
        return _Launch(part, kernel, threads, args, len(runs) * args.num_kv_heads * args.column_blocks, layer_stride)

    def _set_layer(self, x: _Launch, q: torch.Tensor, layer: int, static: Mapping[str, torch.Tensor]) -> None:
        """Points a launch to the queries, the pages and the calibrated parameters of a layer."""
        args, inverse = x.args, static["k_inverse"]
        args.q, args.layer_offset = q.data_ptr(), layer * x.layer_stride
        args.q_stride_b, args.q_stride_t, args.q_stride_h = q.stride()[:3]
        for i, store in enumerate(self.call.parts[x.part].low):
            args.low_layer_offset[i] = layer * store.layout.page_size_bytes if x.layer_stride else 0
        rows = rows_as_columns(inverse, self.device)
        args.basis, args.power = high_operands(rows, self.device).data_ptr(), column_powers(rows, self.device).data_ptr()
        args.most_power = most_powers(rows, self.device).data_ptr()
        args.turns = turns_on(static["k_inv_freq"], self.device).data_ptr()

    def _note_pages(self, page_lse: np.ndarray, own: np.ndarray) -> None:
        """Put log-sum-exps by page of all launches where those of the call's parts belong."""
        pages = [p.table.num_pages for p in self.call.parts]
        if page_lse.shape != (sum(pages), *self.lse.shape[1:]) or page_lse.dtype != np.float32:
            raise DataError(f"page_lse must be a float32 array {[sum(pages), *self.lse.shape[1:]]}, got {page_lse.dtype} {list(page_lse.shape)}")
        firsts, at = np.cumsum([0, *pages]), 0
        for i, n in enumerate(pages):
            found = self._pages_lse[i].cpu().numpy() if i in self._pages_lse else own[at : at + n]
            at += 0 if i in self._pages_lse else n
            page_lse[firsts[i] : firsts[i] + n] = found

    def _upload(self, data: np.ndarray) -> torch.Tensor:
        return self._kept_alive(upload(data, self.device))

    def _kept_alive(self, x: torch.Tensor) -> torch.Tensor:
        self._keep.append(x)
        return x


def _copy(args: refined.Args) -> refined.Args:
    return refined.Args.from_buffer_copy(args)


def _runs(part: Part, most: int) -> np.ndarray:
    """int32 [n, 4], struct Run of refined.cu: pages of one sequence and frame that follow one another in the table, at most `most`."""
    table = part.table
    frame, owner = table.starts // FRAME, np.repeat(np.arange(len(table.indptr) - 1), np.diff(table.indptr))
    changes = np.ones(table.num_pages, bool)
    changes[1:] = (np.diff(frame) != 0) | (np.diff(owner) != 0)
    starts = np.flatnonzero(changes)
    place = np.arange(table.num_pages) - np.repeat(starts, np.diff([*starts, table.num_pages]))  # in its frame
    first = np.flatnonzero(place % most == 0)
    return np.stack([first, np.diff([*first, table.num_pages]), owner[first], frame[first]], 1).astype(np.int32)
