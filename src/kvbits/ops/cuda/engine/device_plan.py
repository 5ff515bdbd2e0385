"""Decode attention on NVIDIA GPUs over anybody's pages: the CUDA half of `ops.paged_attention`, which has the contract.

Everything is allocated when a plan is made. `update` is one launch that turns lengths on the device into a work list
(work_list.cu), `run` one launch that reads it; both can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ....errors import DataError, UnsupportedError
from ....later import upload
from ....spec import PageLayout
from ...descriptor import MATRIX_DTYPES
from ..families import family_of
from .host_plan import Args, PartArgs
from .kernels import (
    LEAST_CAPABILITY,
    MAX_PARTS,
    check_query,
    columns,
    folds,
    indexed,
    kernel_for,
    load_kernel,
    query_columns,
    window_of,
)
from .runtime import driver
from .runtime.compile import Source
from .schedule import SEGMENT_COST, SEGMENT_FIELDS
from .shape import Ask

Slabs = Sequence[torch.Tensor]
MAX_QUERIES = 8
MAX_BATCH = 4096
THREADS = 256
MOST_LIST_BLOCKS = 64


def refuses(
    layouts: Sequence[PageLayout], num_q_heads: int, dtype: torch.dtype, num_queries: int, device: torch.device
) -> str | None:
    """Why the CUDA kernels do not serve such a plan, or None."""
    return driver.refuses(device, LEAST_CAPABILITY) or refuses_plan(
        layouts, num_q_heads, dtype, num_queries, driver.shared_limit(torch.cuda.get_device_capability(device))
    )


def refuses_plan(
    layouts: Sequence[PageLayout],
    num_q_heads: int,
    dtype: torch.dtype,
    num_queries: int,
    shared_limit: int | None = None,
) -> str | None:
    """The part of `refuses` that needs no GPU."""
    if dtype not in MATRIX_DTYPES:
        return f"queries are {dtype}, not float16 or bfloat16"
    if not 1 <= len(layouts) <= MAX_PARTS:
        return f"{len(layouts)} parts; the kernel takes 1 to {MAX_PARTS}"
    if not 1 <= num_queries <= MAX_QUERIES:
        return f"{num_queries} queries of a sequence; plans made on the device take 1 to {MAX_QUERIES}"
    shapes = {(x.num_kv_heads, x.head_dim, x.value_head_dim) for x in layouts}
    if len(shapes) > 1:
        return f"parts of different kv heads and head sizes: {sorted(shapes)}"
    if len(packed := {x for x in layouts if not x.key.is_raw}) > 1:
        return f"{len(packed)} packed formats in one plan; make one for each and merge their results"
    if len({x.raw_dtype for x in layouts if x.key.is_raw}) > 1:
        return "raw parts differ in dtype"
    limits: dict[str, Any] = {
        "num_columns": num_queries * num_q_heads // layouts[0].num_kv_heads,
        "shared_limit": shared_limit,
    }
    return next((why for x in layouts if (why := family_of(x).refuses("attend", x, **limits))), None)


class _PartWork(ctypes.Structure):
    """struct PartWork of work_list.cu."""

    _fields_ = [
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("chunk_cost", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("table_stride", "table_width", "max_tokens", "page_size", "chunk", "in_ring", "walk")
        ),
    ]


class _WorkArgs(ctypes.Structure):
    """struct Args of work_list.cu."""

    _fields_ = [
        ("parts", _PartWork * MAX_PARTS),
        ("segments", ctypes.c_void_p),
        ("q_positions", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("segment_cost", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("num_walks", "batch", "repeats", "blocks", "num_queries", "window", "grid")
        ),
    ]


def list_shared_bytes(batch: int, blocks: int, num_parts: int) -> int:
    """Shared memory of work_list.cu (struct Line)."""
    return (
        24 * THREADS // 32
        + 16
        + 8 * (batch + 1 + blocks + 1)
        + 4 * (2 * (batch + 1) + 2 * blocks + 1)
        + 4 * (2 * num_parts + 1) * batch
    )


def most_sequences(blocks: int, num_parts: int, limit: int) -> int:
    """Of a plan whose work list is made in `limit` bytes of shared memory."""
    empty = list_shared_bytes(0, blocks, num_parts)
    return min(MAX_BATCH, (limit - empty) // (list_shared_bytes(1, blocks, num_parts) - empty))


def list_source(num_parts: int) -> Source:
    """What makes work lists."""
    return Source(Path(__file__).parent, "work_list.cu", {"THREADS": THREADS, "NUM_PARTS": num_parts})


@functools.lru_cache(maxsize=64)
def load_list_kernel(num_parts: int, shared_bytes: int, device_index: int) -> driver.Kernel:
    """The kernel that makes work lists."""
    return driver.load(list_source(num_parts), "work_list", device_index, shared_bytes)


class DevicePlan:
    """See `ops.paged_attention.plan`; arguments as there, checked there."""

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        max_pages: Sequence[int],
        *,
        batch_size: int,
        num_q_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        num_queries: int,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> None:
        self.device = indexed(device)
        # Raw tokens end a walk over packed ones, whose queries then need no registers any more.
        self._order = sorted(range(len(layouts)), key=lambda i: layouts[i].key.is_raw)
        layouts, max_pages = self._sorted(layouts), self._sorted(max_pages)
        self.layouts, self.batch_size, self.num_queries, self.dtype = tuple(layouts), batch_size, num_queries, dtype
        first = layouts[0]
        d, heads = first.head_dim, first.num_kv_heads
        limit = driver.shared_limit(torch.cuda.get_device_capability(self.device))
        self.blocks = torch.cuda.get_device_properties(self.device).multi_processor_count
        if batch_size > (most := most_sequences(self.blocks, len(layouts), limit)):
            raise UnsupportedError(
                f"a plan for {batch_size} sequences; on this GPU one takes at most {most}: let fewer run at once"
            )
        packed = next((x for x in layouts if not x.key.is_raw), None)
        raw_dtype = next((x.raw_dtype for x in layouts if x.key.is_raw), MATRIX_DTYPES[dtype])
        group = num_q_heads // heads
        main = packed or first  # what the kernel is made for
        cols = columns([main], num_queries * group)
        column_blocks = -(-num_queries * group // cols)
        has_raw = any(x.key.is_raw for x in layouts)
        ask = Ask(
            d,
            cols,
            MATRIX_DTYPES[dtype],
            raw_dtype,
            softcap is not None,
            limit,
            fold=folds(main, num_queries * group),
            raw=has_raw,
            spans=False,
            value_head_dim=first.value_head_dim,
        )
        self.kernel = kernel_for(main, ask)
        self._attend, self._threads = load_kernel(self.kernel, self.device.index), self.kernel.threads
        self._list = load_list_kernel(
            len(layouts), list_shared_bytes(batch_size, self.blocks, len(layouts)), self.device.index
        )
        self._q_shape = (num_queries, num_q_heads, d)

        joins = self.kernel.raw_joins
        walks = [0 if joins or not x.key.is_raw else 1 + i for i, x in enumerate(layouts)]
        units = batch_size * heads * column_blocks
        num_walks = len(set(walks))
        slots = 2 * self.blocks if num_walks == 1 else units * num_walks + self.blocks
        empty = functools.partial(torch.empty, device=self.device)
        self._segments = empty(self.blocks + units * len(layouts), len(SEGMENT_FIELDS), dtype=torch.int32)
        self.q_positions = empty(batch_size, num_queries, dtype=torch.int32)
        self._partial, self._partial_ml = empty(slots, cols, first.value_head_dim), empty(slots, cols, 2)
        self._arrived = torch.zeros(units, dtype=torch.int32, device=self.device)
        self._families = [family_of(x) for x in layouts]
        self._constants = family_of(main).constants(main, self.device)
        self._work = _WorkArgs(
            segments=self._segments.data_ptr(),
            q_positions=self.q_positions.data_ptr(),
            segment_cost=SEGMENT_COST,
            num_walks=num_walks,
            repeats=heads * column_blocks,
            blocks=self.blocks,
            num_queries=num_queries,
            window=window_of(sliding_window),
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
            query_columns=query_columns(num_queries * group),
            window=self._work.window,
            scaling=scaling,
            softcap=softcap or 1.0,
            num_pieces=len(self.kernel.pieces),
        )
        for i, piece in enumerate(self.kernel.pieces):
            self._args.pieces[i] = (ctypes.c_int * 4)(*piece)
        for i, part in enumerate(zip(layouts, max_pages, walks, strict=True)):
            self._work.parts[i], self._args.parts[i] = self._part(*part)
        self._layers: dict[int, tuple[Args, tuple]] = {}
        self._keep: tuple = ()  # what the last list points to
        self._pointers: list[int] = []
        self._in_order = True
        self._batch = 0  # of the last update
        self._accepted: tuple | None = None

    def _part(self, layout: PageLayout, max_pages: int, walk: int) -> tuple[_PartWork, PartArgs]:
        """What both kernels know of a part before its pages are bound."""
        raw = layout.key.is_raw
        chunk = self.kernel.raw_tokens if raw else self.kernel.shape.chunk
        work = _PartWork(
            chunk_cost=layout.head_bytes * chunk // layout.page_size,
            max_tokens=max_pages * layout.page_size,
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
        )
        if raw:
            part.k_raw, part.v_raw = (layout.sections[name].offset for name in ("k_raw", "v_raw"))
            return work, part
        for name, x in self._constants.items():
            setattr(part, name, x.data_ptr())
        return work, part

    def _sorted(self, parts: Sequence[Any]) -> list[Any]:
        return [parts[i] for i in self._order]

    def bind(self, layer: int, pages: Sequence[Slabs], static: Mapping[str, torch.Tensor]) -> None:
        pages = self._sorted(pages)
        args = Args.from_buffer_copy(self._args)
        kept: list[Any] = [pages, static]
        for part, family, layout, slabs in zip(args.parts, self._families, self.layouts, pages, strict=False):
            part.pages.base, part.pages.stride, part.pages.count = (
                slabs[0].data_ptr(),
                slabs[0].stride(0),
                sum(len(s) for s in slabs),
            )
            if (offsets := page_offsets(slabs, self.device)) is not None:
                part.pages.offset = offsets.data_ptr()
                kept.append(offsets)
            for name, pointer in family.static_pointers(layout, {} if layout.is_raw else static, self.device).items():
                setattr(part, name, pointer)
        self._point(args)
        self._layers[layer] = (args, tuple(kept))

    def _point(self, args: Args) -> None:
        """Have a layer read the tables of the last update."""
        if self._keep:
            for part, table in zip(args.parts, self._keep[0], strict=False):
                part.pages.table = table.data_ptr()

    def update(
        self,
        block_tables: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor | None],
        offsets: Sequence[torch.Tensor | None],
        query_lens: torch.Tensor | None,
    ) -> None:
        block_tables, tokens, starts, offsets = (self._sorted(x) for x in (block_tables, tokens, starts, offsets))
        work = self._work
        pointers = [x.data_ptr() for x in block_tables]
        self._keep = (tuple(block_tables), tuple(tokens), tuple(starts), tuple(offsets), query_lens)
        if pointers != self._pointers:
            self._pointers = pointers
            for args, _ in self._layers.values():
                self._point(args)
        for part, table, n, start, offset in zip(work.parts, block_tables, tokens, starts, offsets, strict=False):
            part.table_stride, part.table_width, part.tokens = table.stride(0), table.shape[1], n.data_ptr()
            part.positions, part.offsets = (None if x is None else x.data_ptr() for x in (start, offset))
        work.query_lens = None if query_lens is None else query_lens.data_ptr()
        work.batch = self._batch = len(tokens[0])
        rows = self.blocks + work.batch * work.repeats * len(self.layouts)
        work.grid = min(MOST_LIST_BLOCKS, -(-rows // THREADS))
        self._list.launch(work.grid, THREADS, work, self._stream())
        self._in_order = True

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        if layer not in self._layers:
            raise DataError(f"layer {layer} was never bound; call bind({layer}, pages) first")
        if not self._keep:
            raise DataError("run() before the first update(); the work list is empty")
        at, strides = q.data_ptr(), q.stride()
        given = (q.shape, strides, q.dtype, q.device, self._batch, at % 8)
        if given != self._accepted:
            check_query(q, (self._work.batch, *self._q_shape), self.dtype, self.device)
            self._accepted = given
        if out is None:
            out = q.new_empty(*q.shape[:3], self.layouts[0].value_head_dim)
        args = self._layers[layer][0]
        args.q, args.out, args.lse = at, out.data_ptr(), None if lse is None else lse.data_ptr()
        args.q_stride_b, args.q_stride_t, args.q_stride_h, _ = strides
        self._attend.launch(self.blocks, self._threads, args, self._stream(), in_order=self._in_order)
        self._in_order = False
        return out

    def _stream(self) -> int:
        return driver.current_stream(self.device)

    def explain(self) -> str:
        packed = next((x for x in self.layouts if not x.key.is_raw), None)
        what = "raw pages" if packed is None else f"{packed.key.format}/{packed.value.format} pages"
        s = self.kernel.shape
        return (
            f"paged attention by cuda: {what}, {self.blocks} blocks of {s.warps} warps, {s.slots} x {s.chunk} tokens in"
            " flight"
        )


def page_offsets(slabs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """int64 [pages] on `device`: bytes from the first slab's start to every page; None for one slab, whose pages lie a
    stride apart.
    """
    return (
        None
        if len(slabs) == 1
        else _offsets(tuple((x.data_ptr() - slabs[0].data_ptr(), x.stride(0), len(x)) for x in slabs), device)
    )


@functools.lru_cache(maxsize=256)
def _offsets(slabs: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Of (start, stride, pages) of each slab."""
    return upload(
        torch.cat(
            [begin + stride * torch.arange(pages, dtype=torch.int64, device="cpu") for begin, stride, pages in slabs]
        ),
        device,
    )
