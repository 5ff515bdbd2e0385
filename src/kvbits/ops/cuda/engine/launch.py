"""One attention kernel over parts that it reads together, and the work list that it is launched with."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ....errors import UnsupportedError
from ....spec import PageLayout
from ...descriptor import MATRIX_DTYPES
from ...types import PageStore, Table, page_offsets
from ..families import family_of
from . import work_list
from .kernels import Args, PartArgs, folds, kernel_for, load_kernel, query_columns, window_of
from .runtime import driver
from .shape import Ask
from .work_list import PartWork, WorkArgs


def ask_of(
    layouts: Sequence[PageLayout], num_columns: int, dtype: torch.dtype, softcap: bool, spans: bool, shared_limit: int
) -> Ask:
    """Return the needs that a kernel must meet to read pages of these layouts, the packed ones first.

    Args:
        num_columns: query columns of a kv head (query tokens times heads).
        dtype: of the queries, 16 bits.
    """
    main = layouts[0]
    return Ask(
        main.head_dim,
        family_of(main).columns(main, num_columns),
        MATRIX_DTYPES[dtype],
        next((x.raw_dtype for x in layouts if x.key.is_raw), MATRIX_DTYPES[dtype]),
        softcap,
        shared_limit,
        fold=folds(main, num_columns),
        raw=any(x.key.is_raw for x in layouts),
        spans=spans,
        value_head_dim=main.value_head_dim,
        beside=next((x for x in layouts if not x.key.is_raw and x != main), None),
    )


class Launch:
    """One kernel, its work list, and the arguments of each layer. Everything is allocated here.

    Args:
        layouts: of all parts of the plan.
        own: indices of the parts that the kernel reads: those of one packed format, those of another that it reads
            beside it, then raw ones. The others count for what the newest tokens are.
        options: as `ops.attend.plan` gives them to a backend.
    """

    def __init__(
        self, layouts: Sequence[PageLayout], own: Sequence[int], device: torch.device, options: dict[str, Any]
    ) -> None:
        self.device, self._own = device, tuple(own)
        self._order = [*own, *(i for i in range(len(layouts)) if i not in own)]
        self.layouts = tuple(layouts[i] for i in own)
        batch_size, num_queries, dtype = options["batch_size"], options["num_queries"], options["dtype"]
        softcap, main = options["softcap"], self.layouts[0]
        limit = driver.shared_limit(torch.cuda.get_device_capability(device))
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        if batch_size > (most := work_list.most_sequences(self.blocks, len(own), limit)):
            raise UnsupportedError(
                f"a plan for {batch_size} sequences; on this GPU one takes at most {most}: let fewer run at once"
            )
        heads, group = main.num_kv_heads, options["num_q_heads"] // main.num_kv_heads
        ask = ask_of(self.layouts, num_queries * group, dtype, softcap is not None, options["spans"], limit)
        column_blocks = -(-num_queries * group // ask.cols)
        units = batch_size * heads * column_blocks
        rows = self.blocks + units * len(own)
        if rows > work_list.MOST_ROWS:
            raise UnsupportedError(
                f"a plan for {batch_size} sequences of {num_queries} queries has {rows} segments, above"
                f" {work_list.MOST_ROWS}: let fewer run at once, or give the queries in several chunks"
            )
        self.kernel = kernel_for(main, ask)
        self._attend, self._threads = load_kernel(self.kernel, device.index), self.kernel.threads
        self._list = work_list.load(len(own), work_list.shared_bytes(batch_size, self.blocks, len(own)), device.index)

        # Parts of one walk have one result. A walk begins with what is calibrated for its first part.
        two = self.kernel.beside is not None
        walks = [0 if self.kernel.raw_joins or (two and not x.key.is_raw) else i for i, x in enumerate(self.layouts)]
        num_walks = len(set(walks))
        slots = work_list.num_slots(self.blocks, num_walks)
        empty = functools.partial(torch.empty, device=device)
        self._segments = empty(rows, len(work_list.SEGMENT_FIELDS), dtype=torch.int32)
        self.q_positions = empty(batch_size, num_queries, dtype=torch.int32)
        self._partial, self._partial_ml = empty(slots, ask.cols, main.value_head_dim), empty(slots, ask.cols, 2)
        self._arrived = torch.zeros(units, dtype=torch.int32, device=device)
        self._constants = family_of(main).constants(main, device)
        self._work = WorkArgs(
            segments=self._segments.data_ptr(),
            q_positions=self.q_positions.data_ptr(),
            segment_cost=work_list.SEGMENT_COST,
            num_others=len(layouts) - len(own),
            num_walks=num_walks,
            repeats=heads * column_blocks,
            blocks=self.blocks,
            num_queries=num_queries,
            window=window_of(options["sliding_window"]),
        )
        self._args = Args(
            q_positions=self.q_positions.data_ptr(),
            segments=self._segments.data_ptr(),
            partial=self._partial.data_ptr(),
            partial_ml=self._partial_ml.data_ptr(),
            arrived=self._arrived.data_ptr(),
            num_queries=num_queries,
            group=group,
            num_kv_heads=heads,
            column_blocks=column_blocks,
            query_columns=query_columns(num_queries * group) if self.kernel.folds else 8,
            window=self._work.window,
            scaling=options["scaling"],
            softcap=softcap or 1.0,
            num_pieces=sum(len(x.pieces) for x in self.kernel.tiles),
        )
        for i, piece in enumerate(piece for tile in self.kernel.tiles for piece in tile.pieces):
            self._args.pieces[i] = (ctypes.c_int * 4)(*piece)
        for i, (layout, walk) in enumerate(zip(self.layouts, walks, strict=True)):
            self._work.parts[i], self._args.parts[i] = self._part(layout, walk)
        for i, part in enumerate(self._order[len(own) :], len(own)):
            self._work.parts[i] = PartWork(page_size=layouts[part].page_size)
        self._layers: dict[int, tuple[Args, tuple]] = {}
        self._keep: tuple = ()  # what the last list points to
        self._pointers: list[tuple[int, int | None]] = []  # page numbers and spans of the kernel's parts
        self._in_order = True

    def _part(self, layout: PageLayout, walk: int) -> tuple[PartWork, PartArgs]:
        """Return what both kernels know of a part before its pages are bound."""
        raw, number = layout.key.is_raw, int(not layout.key.is_raw and layout != self.layouts[0])
        tile = self.kernel.tiles[number]
        chunk = self.kernel.raw_tokens if raw else tile.chunk
        work = PartWork(
            chunk_cost=layout.head_bytes * chunk // layout.page_size,
            page_size=layout.page_size,
            chunk=min(chunk, layout.page_size),
            in_ring=int(not raw or self.kernel.raw_in_ring),
            walk=walk,
        )
        part = PartArgs(
            head_bytes=layout.head_bytes,
            chunks_per_page=-(-layout.page_size // chunk),
            raw=raw,
            page_size=layout.page_size,
            format=number,
            chunk=chunk,
            chunk_bytes=tile.nbytes,
            first_piece=len(self.kernel.pieces) if number else 0,
            num_pieces=len(tile.pieces),
        )
        if raw:
            part.k_raw, part.v_raw = (layout.sections[name].offset for name in ("k_raw", "v_raw"))
        else:
            for name, x in self._constants.items():
                setattr(part, name, x.data_ptr())
        return work, part

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        args = Args.from_buffer_copy(self._args)
        kept: list[Any] = [stores]
        for part, store in zip(args.parts, (stores[i] for i in self._own), strict=False):
            slabs, pages = store.slabs, part.pages
            pages.base, pages.stride, pages.count = slabs[0].data_ptr(), slabs[0].stride(0), store.num_pages
            if (offsets := page_offsets(slabs, self.device)) is not None:
                pages.offset = offsets.data_ptr()
                kept.append(offsets)
            if not store.layout.key.is_raw:
                pointers = family_of(store.layout).static_pointers(store.layout, store.static, self.device)
                for name, pointer in pointers.items():
                    setattr(part, name, pointer)
        self._point(args)
        self._layers[layer] = (args, tuple(kept))

    def _point(self, args: Args) -> None:
        """Have a layer read the tables of the last update."""
        for part, (pages, spans) in zip(args.parts, self._pointers, strict=False):
            part.pages.table, part.pages.spans = pages, spans

    def update(
        self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None, stream: int
    ) -> None:
        work = self._work
        self._keep = (tuple(tables), query_lens, positions)
        for part, i in zip(work.parts, self._order, strict=False):
            table = tables[i]
            part.table_stride, part.table_width = table.pages.stride(0), table.pages.shape[1]
            part.span_stride = 0 if table.spans is None else table.pages.shape[1]
            part.tokens = table.tokens.data_ptr()
            part.positions, part.offsets = (None if x is None else x.data_ptr() for x in (table.starts, table.offsets))
        pointers = [
            (tables[i].pages.data_ptr(), None if (spans := tables[i].spans) is None else spans.data_ptr())
            for i in self._own
        ]
        if pointers != self._pointers:
            self._pointers = pointers
            for args, _ in self._layers.values():
                self._point(args)
        work.query_lens = None if query_lens is None else query_lens.data_ptr()
        work.positions = None if positions is None else positions.data_ptr()
        work.batch = len(tables[0].tokens)
        rows = self.blocks + work.batch * work.repeats * len(self._own)
        work.grid = min(work_list.MOST_GRID, -(-rows // work_list.THREADS))
        self._list.launch(work.grid, work_list.THREADS, work, stream)
        self._in_order = True

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor, lse: torch.Tensor | None, stream: int) -> None:
        """Run attention of checked queries to the kernel's own parts."""
        args = self._layers[layer][0]
        args.q, args.out, args.lse = q.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
        args.q_stride_b, args.q_stride_t, args.q_stride_h, _ = q.stride()
        self._attend.launch(self.blocks, self._threads, args, stream, in_order=self._in_order)
        self._in_order = False

    def explain(self) -> str:
        main, s = self.layouts[0], self.kernel.shape
        what = "raw pages" if main.key.is_raw else f"{main.key.format}/{main.value.format} pages"
        what += " and raw ones" if len({x.key.is_raw for x in self.layouts}) > 1 else ""
        return (
            f"attend by cuda: {what}, {self.blocks} blocks of {s.warps} warps, {s.slots} x {s.chunk} tokens in flight"
        )
