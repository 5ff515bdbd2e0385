"""Attention over packed and 16-bit pages on NVIDIA GPUs: `plan` once per batch of page tables, `run` per layer.

`plan` chooses the kernels, cuts the work into equal shares and uploads it; `run` only launches: no host
synchronisation, no allocation, so that it can be captured in a CUDA graph. A plan owns its output and scratch buffers:
the next `run` of the same plan overwrites them, and two streams need two plans.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....errors import UnsupportedError
from ....later import upload
from ....spec import PageLayout
from ... import long_queries
from ...break_even import small_on_gpu
from ...descriptor import MATRIX_DTYPES
from ...long_queries import LongQueries
from ...types import AttendCall, PageStore, Part, Table, check_call, last_positions
from ..families import family_of
from .kernels import (
    LEAST_CAPABILITY,
    MAX_PARTS,
    check_query,
    check_static,
    columns,
    folds,
    indexed,
    kernel_for,
    load_kernel,
    query_columns,
    window_of,
)
from .runtime import driver
from .schedule import PartWork, chunks_per_sequence, schedule
from .shape import MAX_PIECES, Ask, Kernel

LayerStatic = Sequence[Mapping[str, torch.Tensor]]


def refuses(q: torch.Tensor, call: AttendCall) -> str | None:
    """Why this backend does not take a call, or None. q: [B, T, Hq, D]."""
    if why := driver.refuses(q.device, LEAST_CAPABILITY):
        return why
    return refuses_on(
        call, q.shape[2], q.dtype, q.shape[1], driver.shared_limit(torch.cuda.get_device_capability(q.device))
    )


def refuses_on(
    call: AttendCall, num_q_heads: int, q_dtype: torch.dtype, num_queries: int, shared_limit: int | None = None
) -> str | None:
    """The part of `refuses` that needs no GPU; `shared_limit`: bytes of shared memory of a block, if known."""
    why = refuses_call(call, num_q_heads, MATRIX_DTYPES.get(q_dtype, str(q_dtype)), shared_limit, num_queries)
    if why and call.parts and q_dtype in MATRIX_DTYPES:
        return why if _refuses_unpacked(call, num_q_heads, q_dtype, 1, True, False) else None
    return why


def _refuses_unpacked(
    call: AttendCall, num_q_heads: int, q_dtype: torch.dtype, num_queries: int, history_only: bool, readable: bool
) -> str | None:
    """Why the pages are not unpacked for such queries (`long_queries.refuses`)."""
    options = {
        "num_q_heads": num_q_heads,
        "num_queries": num_queries,
        "dtype": q_dtype,
        "past_only": history_only,
        "sliding_window": call.sliding_window,
        "softcap": call.softcap,
    }
    return long_queries.refuses([p.store.layout for p in call.parts], options, readable)


def refuses_call(
    call: AttendCall, num_q_heads: int, q_dtype: str, shared_limit: int | None = None, num_queries: int = 1
) -> str | None:
    """`refuses_on`, of the kernel that reads packed pages."""
    if q_dtype not in MATRIX_DTYPES.values():
        return f"queries are {q_dtype}, not float16 or bfloat16"
    if len(call.parts) > MAX_PARTS:
        return f"{len(call.parts)} parts are more than {MAX_PARTS}"
    if not call.parts:
        return "there are no pages to attend to"
    kv_heads = call.parts[0].store.layout.num_kv_heads
    if num_q_heads % kv_heads:
        return f"{num_q_heads} query heads are no multiple of {kv_heads} kv heads"
    for part in call.parts:
        layout = part.store.layout
        if why := family_of(layout).refuses(
            "attend", layout, num_columns=num_queries * num_q_heads // kv_heads, shared_limit=shared_limit
        ):
            return why
    if len({p.store.layout.raw_dtype for p in call.parts if p.store.layout.key.is_raw}) > 1:
        return "raw parts differ in dtype"
    return None


class PagesArgs(ctypes.Structure):
    """struct Pages of args.cuh."""

    _fields_ = [
        ("table", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("base", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int64),
    ]


class PartArgs(ctypes.Structure):
    """struct Part of args.cuh."""

    _fields_ = [
        ("layer_stride", ctypes.c_int64),
        ("head_bytes", ctypes.c_int),
        ("chunks_per_page", ctypes.c_int),
        ("raw", ctypes.c_int),
        ("k_raw", ctypes.c_int),
        ("v_raw", ctypes.c_int),
        ("k_scale", ctypes.c_void_p),
        ("k_bias", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("v_bias", ctypes.c_void_p),
        ("k_level", ctypes.c_void_p),
        ("v_level", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("k_inverse", ctypes.c_void_p),
        ("pages", PagesArgs),
        ("page_size", ctypes.c_int),
    ]


class Args(ctypes.Structure):
    """struct Args of args.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "out",
                "lse",
                "q_positions",
                "segments",
                "page_address",
                "page_tokens",
                "partial",
                "partial_ml",
                "arrived",
            )
        ),
        *((name, ctypes.c_int64) for name in ("q_stride_b", "q_stride_t", "q_stride_h")),
        *(
            (name, ctypes.c_int)
            for name in ("num_queries", "group", "num_kv_heads", "column_blocks", "layer", "window")
        ),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_pieces", "query_columns")),
        ("pieces", ctypes.c_int * 4 * MAX_PIECES),
        ("parts", PartArgs * MAX_PARTS),
    ]


@dataclass(frozen=True)
class _Launch:
    kernel: Kernel
    loaded: driver.Kernel
    args: Args
    blocks: int
    layout: PageLayout


class Plan:
    """A decode or chunked-prefill step over fixed page tables, ready to run for every layer of the group.

    Args:
        call: pages of layer 0 of the group (any layer where all layers share nothing but this one).
        num_q_heads: query heads.
        q_dtype: dtype of the queries and of the output.
        num_queries: query tokens per sequence.
        layer_strides: bytes from a page of one layer to the same page of the next, one per part; 0 where `run` is only
            called for layer 0.

    Attributes:
        out: [B, num_queries, num_q_heads, value_head_dim] in q_dtype; zeros where nothing was visible.
        lse: float32 [B, num_queries, num_q_heads], natural log; -inf where nothing was visible.
        q_positions: int32 [B, num_queries] on the device: by default the last positions of every sequence.
    """

    def __init__(
        self,
        call: AttendCall,
        num_q_heads: int,
        q_dtype: torch.dtype,
        device: torch.device,
        *,
        num_queries: int = 1,
        layer_strides: tuple[int, ...] | None = None,
    ) -> None:
        if why := refuses_call(call, num_q_heads, MATRIX_DTYPES.get(q_dtype, str(q_dtype)), num_queries=num_queries):
            raise UnsupportedError(f"attend_pages on cuda: {why}")
        check_call(
            call, (len(call.parts[0].table.indptr) - 1, num_queries, num_q_heads, call.parts[0].store.layout.head_dim)
        )
        device = indexed(device)
        layout = call.parts[0].store.layout
        batch, d, heads = len(call.parts[0].table.indptr) - 1, layout.value_head_dim, layout.num_kv_heads
        packed = list(dict.fromkeys(p.store.layout for p in call.parts if not p.store.layout.key.is_raw))
        layouts = packed or [layout]
        group = num_q_heads // heads
        cols = columns(layouts, num_queries * group)
        column_blocks = -(-num_queries * group // cols)
        self.call, self.device, self.num_queries, self._head_dim = call, device, num_queries, layout.head_dim
        self._families = [family_of(p.store.layout) for p in call.parts]
        self._keep: list[torch.Tensor] = []  # what the kernels' arguments point into
        self.out = torch.zeros(batch, num_queries, num_q_heads, d, dtype=q_dtype, device=device)
        self.lse = torch.zeros(batch, num_queries, num_q_heads, dtype=torch.float32, device=device)
        self.q_positions = self._upload(last_positions(call, batch, num_queries))

        raw_dtype = next(
            (p.store.layout.raw_dtype for p in call.parts if p.store.layout.key.is_raw), MATRIX_DTYPES[q_dtype]
        )
        limit = driver.shared_limit(torch.cuda.get_device_capability(device))
        ask = Ask(
            layout.head_dim, cols, MATRIX_DTYPES[q_dtype], raw_dtype, call.softcap is not None, limit, value_head_dim=d
        )
        raw = any(p.store.layout.key.is_raw for p in call.parts)  # the first kernel reads such parts
        kernels = [
            kernel_for(x, dataclasses.replace(ask, fold=folds(x, num_queries * group), raw=raw and i == 0))
            for i, x in enumerate(layouts)
        ]
        work = self._work(call.parts, packed, kernels)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        chunks = [
            sum(int(w.num_chunks.sum()) for w in work if w.launch == i) * heads * column_blocks
            for i in range(len(kernels))
        ]
        blocks = [max(1, min(processors, n)) for n in chunks]
        lists, num_slots = schedule(work, heads * column_blocks, blocks)

        args = Args(
            out=self.out.data_ptr(),
            lse=self.lse.data_ptr(),
            q_positions=self.q_positions.data_ptr(),
            num_queries=num_queries,
            group=group,
            num_kv_heads=heads,
            column_blocks=column_blocks,
            query_columns=query_columns(num_queries * group),
            layer=0,
            window=window_of(call.sliding_window),
            scaling=call.scaling,
            softcap=call.softcap or 1.0,
            **self._tables(call.parts),
            **self._scratch(num_slots, cols, d, batch * heads * column_blocks),
        )
        for i, part in enumerate(call.parts):
            args.parts[i] = self._part(part, kernels, packed, layer_strides[i] if layer_strides else 0)
        self._launches = [self._launch(k, args, lists[i], blocks[i], layouts[i]) for i, k in enumerate(kernels)]

    def run(
        self,
        q: torch.Tensor,
        q_positions: torch.Tensor | None = None,
        *,
        layer: int = 0,
        static: LayerStatic | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [B, num_queries, Hq, D] over the planned pages of `layer`.

        Args:
            q_positions: int32 or int64 [B, num_queries] on the device, kept for later runs; negative marks padding,
                which sees nothing.
            static: what each part's pages share in `layer` (`PageStore.static`); those of the call if None.

        Returns:
            The plan's own `out` and `lse`, overwritten by its next run.
        """
        check_query(q, (*self.out.shape[:3], self._head_dim), self.out.dtype, self.device)
        check_static(self.call, layer, static)
        pointers = [
            family.static_pointers(p.store.layout, own, self.device)
            for family, p, own in zip(
                self._families, self.call.parts, static or [p.store.static for p in self.call.parts], strict=True
            )
        ]
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for launch in self._launches:
            args = launch.args
            args.q, args.layer = q.data_ptr(), layer
            args.q_stride_b, args.q_stride_t, args.q_stride_h = q.stride()[:3]
            for part, own in zip(args.parts, pointers, strict=False):
                for name, pointer in own.items():
                    setattr(part, name, pointer)
            launch.loaded.launch(launch.blocks, launch.kernel.threads, args, stream)
        return self.out, self.lse

    def explain(self) -> str:
        """Which kernel reads what, in a line each."""
        lines = []
        for launch in self._launches:
            what = (
                "raw pages"
                if launch.layout.is_raw
                else f"{launch.layout.key.format}/{launch.layout.value.format} pages (and raw ones)"
            )
            s = launch.kernel.shape
            lines.append(
                f"attend_pages by cuda: {what}, {launch.blocks} blocks of {s.warps} warps, {s.slots} x {s.chunk} tokens"
                " in flight"
            )
        table_tokens = max(
            (int((p.table.starts + p.table.lengths).max()) for p in self.call.parts if p.table.num_pages), default=0
        )
        layout = self.call.parts[0].store.layout
        if note := small_on_gpu(
            self.out.shape[0], table_tokens, layout.num_kv_heads * (layout.head_dim + layout.value_head_dim)
        ):
            lines.append(note)
        return "\n".join(lines)

    def _upload(self, data: np.ndarray) -> torch.Tensor:
        tensor = upload(data, self.device)
        self._keep.append(tensor)
        return tensor

    def _work(self, parts: tuple[Part, ...], packed: list[PageLayout], kernels: list[Kernel]) -> list[PartWork]:
        work, first = [], 0
        for part in parts:
            layout, table = part.store.layout, part.table
            launch = packed.index(layout) if layout in packed else 0
            raw = layout.key.is_raw
            tokens = kernels[launch].raw_tokens if raw else kernels[launch].shape.chunk
            count = chunks_per_sequence(table.indptr, table.lengths, tokens, -(-layout.page_size // tokens))
            cost = layout.head_bytes * tokens // layout.page_size
            # What a walk starts with, calibrated scales, is alike in all its parts.
            joins = kernels[launch].raw_in_ring and not (layout.key.static or layout.value.static)
            walk = int(not raw and not kernels[launch].raw_joins) if joins else None
            in_ring = not raw or kernels[launch].raw_in_ring
            begin, last = (first + x.astype(np.int64) for x in (table.indptr[:-1], table.indptr[1:] - 1))
            work.append(PartWork(begin, count, cost, launch, in_ring, walk, last, ends_walk=raw))
            first += table.num_pages
        return work

    def _tables(self, parts: tuple[Part, ...]) -> dict[str, int]:
        addresses = np.concatenate([p.store.addresses[p.table.page_ids] for p in parts])
        tokens = np.concatenate([np.stack([p.table.starts, p.table.lengths], 1).astype(np.int32) for p in parts])
        return {"page_address": self._upload(addresses).data_ptr(), "page_tokens": self._upload(tokens).data_ptr()}

    def _scratch(self, num_slots: int, cols: int, d: int, units: int) -> dict[str, int]:
        partial = torch.empty(max(num_slots, 1), cols, d, device=self.device)
        partial_ml = torch.empty(max(num_slots, 1), cols, 2, device=self.device)
        arrived = torch.zeros(units, dtype=torch.int32, device=self.device)
        self._keep += [partial, partial_ml, arrived]
        return {"partial": partial.data_ptr(), "partial_ml": partial_ml.data_ptr(), "arrived": arrived.data_ptr()}

    def _part(self, part: Part, kernels: list[Kernel], packed: list[PageLayout], layer_stride: int) -> PartArgs:
        layout = part.store.layout
        raw = layout.key.is_raw
        tokens = kernels[0].raw_tokens if raw else kernels[packed.index(layout)].shape.chunk
        offsets = {"k_raw": layout.sections["k_raw"].offset, "v_raw": layout.sections["v_raw"].offset} if raw else {}
        static = self._kept(family_of(layout).constants(layout, self.device))
        pages = {
            "layer_stride": layer_stride,
            "head_bytes": layout.head_bytes,
            "chunks_per_page": -(-layout.page_size // tokens),
            "raw": raw,
        }
        return PartArgs(**pages, **offsets, **static)

    def _kept(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        self._keep += tensors.values()
        return {name: x.data_ptr() for name, x in tensors.items()}

    def _launch(self, kernel: Kernel, args: Args, segments: np.ndarray, blocks: int, layout: PageLayout) -> _Launch:
        mine = Args.from_buffer_copy(args)
        mine.segments = self._upload(segments).data_ptr()
        mine.num_pieces = len(kernel.pieces)
        for i, piece in enumerate(kernel.pieces):
            mine.pieces[i] = (ctypes.c_int * 4)(*piece)
        return _Launch(kernel, load_kernel(kernel, self.device.index), mine, blocks, layout)


class ChunkPlan:
    """`long_queries.LongQueries` with the tables and layers of an `AttendCall`; same use as `Plan`."""

    def __init__(
        self,
        call: AttendCall,
        num_q_heads: int,
        q_dtype: torch.dtype,
        device: torch.device,
        *,
        num_queries: int = 1,
        layer_strides: tuple[int, ...] | None = None,
    ) -> None:
        batch = len(call.parts[0].table.indptr) - 1
        check_call(call, (batch, num_queries, num_q_heads, call.parts[0].store.layout.head_dim))
        self.call, self._strides = call, layer_strides or (0,) * len(call.parts)
        self._plan = LongQueries(
            [p.store.layout for p in call.parts],
            num_q_heads=num_q_heads,
            dtype=q_dtype,
            device=device,
            num_queries=num_queries,
            scaling=call.scaling,
        )
        self._plan.update([_table_of(p) for p in call.parts], None, None)
        self.q_positions = upload(last_positions(call, batch, num_queries), device)

    def run(
        self,
        q: torch.Tensor,
        q_positions: torch.Tensor | None = None,
        *,
        layer: int = 0,
        static: LayerStatic | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_static(self.call, layer, static)
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        stores = [
            PageStore(p.store.layout, tuple(_shifted(x, layer * stride) for x in p.store.slabs), dict(own))
            for p, stride, own in zip(
                self.call.parts, self._strides, static or [p.store.static for p in self.call.parts], strict=True
            )
        ]
        self._plan.bind(0, stores)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        out = self._plan.run(q, 0, None, lse)
        hidden = (self.q_positions < 0)[..., None]
        return out.masked_fill_(hidden[..., None], 0), lse.masked_fill_(hidden, -torch.inf)

    def explain(self) -> str:
        return self._plan.explain()


def _shifted(slab: torch.Tensor, nbytes: int) -> torch.Tensor:
    return slab.as_strided(slab.shape, slab.stride(), slab.storage_offset() + nbytes)


def _table_of(part: Part) -> Table:
    """A ragged table as a dense one whose pages say for themselves where they stand."""
    t, counts = part.table, np.diff(part.table.indptr)
    row = np.repeat(np.arange(len(counts)), counts)
    at = np.arange(t.num_pages) - np.repeat(t.indptr[:-1], counts)
    shape = len(counts), max(int(counts.max(initial=0)), 1)
    pages, spans, tokens = np.zeros(shape, np.int32), np.zeros((*shape, 2), np.int32), np.zeros(len(counts), np.int32)
    pages[row, at], spans[row, at] = t.page_ids, np.stack([t.starts, t.lengths], 1)
    last = t.indptr[1:][counts > 0] - 1
    tokens[counts > 0] = (counts[counts > 0] - 1) * part.store.layout.page_size + t.lengths[last]
    return Table(torch.from_numpy(pages), torch.from_numpy(tokens), spans=torch.from_numpy(spans))


def plan(
    call: AttendCall,
    num_q_heads: int,
    q_dtype: torch.dtype,
    device: torch.device,
    *,
    num_queries: int = 1,
    history_only: bool = False,
    **options: Any,
) -> Plan | ChunkPlan:
    """A `Plan`, or a `ChunkPlan` where many queries read history that all of them see, and for formats that no kernel
    reads packed.

    Args:
        history_only: every query that is no padding comes after all pages of the call.
    """
    limit = driver.shared_limit(torch.cuda.get_device_capability(device))
    packed = refuses_call(call, num_q_heads, MATRIX_DTYPES.get(q_dtype, str(q_dtype)), limit, num_queries) is None
    if _refuses_unpacked(call, num_q_heads, q_dtype, num_queries, history_only, packed) is None:
        return ChunkPlan(call, num_q_heads, q_dtype, device, num_queries=num_queries, **options)
    return Plan(call, num_q_heads=num_q_heads, q_dtype=q_dtype, device=device, num_queries=num_queries, **options)


def attend(q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run once: out [B, T, Hq, D] in q's dtype and lse [B, T, Hq] float32 (see the reference for the
    contract).
    """
    check_call(call, q.shape)
    return plan(call, q.shape[2], q.dtype, q.device, num_queries=q.shape[1]).run(q.contiguous(), q_positions)
