"""Decoding on NVIDIA GPUs (`ops.decode`): lengths, page numbers and what closes live on the GPU.

A step is one launch per layer group (`advance.cu`: lengths, slots, what closes), one for its work list, and two per
layer: `close.cu` (quantize the page that is full, store the token) and attention. Nothing is uploaded, nothing waits,
so a step can be captured in a CUDA graph and replayed over page closings.

Each kind of copies of newest pages adds a launch per layer, which quantizes the same page. It comes before the one that
stores the token, since that may replace a row of the page.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...later import upload
from ...spec import LayerGroup
from ..attend import Attention
from ..decode import (
    CLOSED,
    COPIED,
    COPY_FIRST,
    COPY_READ,
    COPY_START,
    FIRST,
    READ,
    TAIL,
    TAIL_START,
    Pages,
    parts_of,
    row_of_copies,
)
from ..store import STATUS_FIELDS
from ..types import PageStore, Table, page_offsets
from . import attend as attend_cuda
from . import close as close_cuda
from . import store as store_cuda
from .engine.runtime import driver
from .engine.runtime.compile import Source

THREADS = 256
MOST_COPIES = 2
"""Kinds of copies of advance.cu."""
NOWHERE = 1
"""NOWHERE of runs.cuh."""


class _PagesStruct(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("width", ctypes.c_int),
    ]


class _CopiesStruct(ctypes.Structure):
    _fields_ = [("ring", _PagesStruct), ("closings", ctypes.c_void_p), ("pages", ctypes.c_int)]


class _AdvanceArgs(ctypes.Structure):
    """struct Args of advance.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "state",
                "before",
                "residual",
                "valid",
                "runs",
                "closings",
                "query_lens",
                "slots",
                "previous",
                "page_starts",
            )
        ),
        ("tail", _PagesStruct),
        ("closed", _PagesStruct),
        ("copies", _CopiesStruct * MOST_COPIES),
        *((name, ctypes.c_int) for name in ("batch", "page_size", "ring", "valid_stride", "num_copies")),
    ]


ADVANCE = Source(Path(__file__).parent / "engine", "advance.cu", {"THREADS": THREADS})
"""The kernel that advances lengths."""


def load_advance(device_index: int) -> driver.Kernel:
    return driver.load(ADVANCE, "advance", device_index)


def refuses(groups: list[LayerGroup], num_q_heads: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why single tokens of these layer groups cannot be run by the GPU, whatever their sequences hold,
    or None.
    """
    for g in groups:
        if len(g.copies) > MOST_COPIES:
            return f"{len(g.copies)} kinds of copies of newest pages; the kernels take {MOST_COPIES}"
        layouts = [g.layouts[name] for name in parts_of(g)]
        if why := attend_cuda.refuses_packed(layouts, num_q_heads, dtype, 1, device):
            return why
        for name in () if g.fills_pages else ("closed", *g.copy_pools):
            if why := close_cuda.refuses_on(g.layouts[name], dtype, device):
                return why
        if g.raw_dtype != str(dtype).removeprefix("torch."):
            return f"raw pages are {g.raw_dtype}, queries {dtype}"
    return None


def capturing() -> bool:
    """Return whether the current stream is captured in a graph."""
    return torch.cuda.is_current_stream_capturing()


class _StoreStep:
    """`close_cuda.DecodeStep` for pages that are filled token by token: nothing closes, and what a token replaces
    nobody sees.
    """

    def __init__(self, store: PageStore, dtype: torch.dtype, moved: _Moved, status: torch.Tensor) -> None:
        store_cuda.prepare(store.layout, dtype, store.device)
        self._store, self._slots, self._status = store, moved.slots, status
        self._previous = moved.previous if store.layout.is_centered else None
        self._starts = moved.page_starts if store.layout.key.needs_rotary else None

    def run(self, k: torch.Tensor, v: torch.Tensor, stream: int) -> None:
        store_cuda.store(
            k, v, self._store, self._slots, previous=self._previous, starts=self._starts, status=self._status
        )

    def put_back(self, nothing_closes: torch.Tensor, stream: int) -> None:
        """Do nothing."""


@dataclass
class _Group:
    """One layer group on the device."""

    layers: tuple[int, ...]
    numbers: torch.Tensor  # int32 [rows, B]
    before: torch.Tensor
    attention: Attention
    args: _AdvanceArgs
    tables: list[Table]
    query_lens: torch.Tensor
    status: torch.Tensor  # int32 [layers, STATUS_FIELDS]
    writers: list[close_cuda.DecodeStep | _StoreStep]
    copiers: list[list[close_cuda.DecodeStep]]  # of each layer, one for each kind of copies
    nothing_closes: torch.Tensor
    keep: list[Any]


class _Stepper:
    """`ops.decode.Stepper` of a GPU."""

    def __init__(self, groups: list[_Group], device: torch.device) -> None:
        self.groups, self._device = groups, device
        self._of_layer = {layer: (g, i) for g in groups for i, layer in enumerate(g.layers)}
        self._advance = load_advance(-1 if device.index is None else device.index)
        self._statuses = [g.status for g in groups]
        self._valid: torch.Tensor | None = None
        self._stream = 0  # of the step under way

    def begin(self, valid: torch.Tensor | None) -> None:
        self._valid = valid  # kept as long as the launch may read it
        self._stream = stream = driver.current_stream(self._device)
        for g in self.groups:
            g.args.valid = None if valid is None else valid.data_ptr()
            g.args.valid_stride = 0 if valid is None else valid.stride(0)
            self._advance.launch(1, THREADS, g.args, stream)
            g.attention.update(g.tables, query_lens=g.query_lens)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        g, i = self._of_layer[layer]
        for copier in g.copiers[i]:
            copier.run(k, v, self._stream)
        g.writers[i].run(k, v, self._stream)

    @torch.inference_mode()  # as the step may have been
    def take_back(self, layers: set[int]) -> None:
        stream = driver.current_stream(self._device)
        for layer in layers:
            g, i = self._of_layer[layer]
            g.writers[i].put_back(g.nothing_closes, stream)
        for g in self.groups:
            _put_back(g.numbers, g.before, g.args.num_copies, g.args.page_size)

    def status(self) -> torch.Tensor:
        return torch.cat(self._statuses)

    def numbers(self) -> list[np.ndarray]:
        return [g.numbers.cpu().numpy() for g in self.groups]


def _put_back(numbers: torch.Tensor, before: torch.Tensor, num_copies: int, page_size: int) -> None:
    """Make a group's numbers those before the step, without copies that a page which closed in it was written over."""
    closed = numbers[CLOSED] != before[CLOSED]
    rings = [
        (row, closed & (numbers[row + COPIED] == before[row + COPIED]), numbers[row + COPY_FIRST].clone())
        for row in map(row_of_copies, range(num_copies))
    ]
    numbers.copy_(before)
    finer: torch.Tensor | int = 0
    for row, written_over, first in rings:
        numbers[row + COPIED] -= page_size * written_over
        numbers[row + COPY_FIRST] = torch.where(written_over, first, numbers[row + COPY_FIRST])
        numbers[row + COPY_READ] = numbers[row + COPIED] - finer
        numbers[row + COPY_START] = numbers[TAIL_START] - numbers[row + COPIED]
        finer = numbers[row + COPIED]
    numbers[READ] = numbers[CLOSED] - finer


def stepper(groups: list[Pages], dtype: torch.dtype, device: torch.device) -> _Stepper:
    """Put what decoding needs on the GPU."""
    return _Stepper([_uploaded(pages, dtype, device) for pages in groups], device)


def _table(rows: list[list[int]], times: int) -> np.ndarray:
    """Return int32 [B, width] of page ids, each row's `times` times, -1 after them."""
    found = np.full((len(rows), max(map(len, rows)) * times), -1, np.int32)
    for b, pages in enumerate(rows):
        found[b, : len(pages) * times] = pages * times
    return found


@dataclass
class _Moved:
    """The tensors that `advance.cu` writes for the launches after it, [B] rows each."""

    runs: torch.Tensor
    closings: torch.Tensor
    query_lens: torch.Tensor
    slots: torch.Tensor
    previous: torch.Tensor
    page_starts: torch.Tensor

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> _Moved:
        runs, closings = (torch.empty(batch, n, dtype=torch.int64, device=device) for n in (5, 2))
        slots, previous = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
        query_lens, page_starts = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
        return cls(runs, closings, query_lens, slots, previous, page_starts)


def _uploaded(pages: Pages, dtype: torch.dtype, device: torch.device) -> _Group:
    g, ring, batch, names = pages.group, pages.ring, pages.numbers.shape[1], list(pages.ids)
    # of a ring, any part that wraps is one run
    ids = [_table(pages.ids[n], 2 if n in g.copy_pools or (n == "tail" and ring) else 1) for n in names]
    flat = [pages.numbers, pages.closed_start, pages.sinks, pages.residual, *ids]
    whole = upload(np.concatenate([x.ravel() for x in flat]), device)  # one upload
    parts = [x.view(y.shape) for x, y in zip(whole.split([y.size for y in flat]), flat, strict=True)]
    state_d, closed_start_d, sinks_d, residual_d = parts[:4]
    on_device = dict(zip(names, parts[4:], strict=True))
    tokens = {"sink": sinks_d, "closed": state_d[READ], "tail": state_d[TAIL]}
    starts = {"sink": None, "closed": closed_start_d, "tail": state_d[TAIL_START]}
    offsets = {"sink": None, "closed": None, "tail": state_d[FIRST] if ring else None}
    for n, row in ((n, row_of_copies(i)) for i, n in enumerate(g.copy_pools)):
        tokens[n], starts[n], offsets[n] = (state_d[row + field] for field in (COPY_READ, COPY_START, COPY_FIRST))
    before, moved = torch.empty_like(state_d), _Moved.empty(batch, device)
    args = _AdvanceArgs(
        state=state_d.data_ptr(),
        before=before.data_ptr(),
        residual=None if g.fills_pages else residual_d.data_ptr(),
        runs=moved.runs.data_ptr(),
        closings=moved.closings.data_ptr(),
        query_lens=moved.query_lens.data_ptr(),
        slots=moved.slots.data_ptr(),
        previous=moved.previous.data_ptr(),
        page_starts=moved.page_starts.data_ptr(),
        batch=batch,
        page_size=g.page_size,
        ring=ring,
    )
    keep: list[Any] = [whole, moved]
    copied = [name for name in g.copy_pools if name in names]
    args.num_copies = len(copied)
    of_copies = torch.empty(len(copied), batch, 2, dtype=torch.int64, device=device)
    for kind, closings, most in zip(args.copies, of_copies, g.copied_pages, strict=False):
        kind.closings, kind.pages = closings.data_ptr(), most
    keep.append(of_copies)
    rings = zip(copied, (kind.ring for kind in args.copies), strict=False)
    for name, of_pool in (("tail", args.tail), ("closed", args.closed), *rings):
        if name not in names:
            continue
        slabs = pages.slabs[name]
        of_pool.table, of_pool.width, of_pool.stride = (
            on_device[name].data_ptr(),
            on_device[name].shape[1],
            slabs[0].stride(0),
        )
        if (offsets_of_pages := page_offsets(slabs, device)) is not None:
            of_pool.offset = offsets_of_pages.data_ptr()
            keep.append(offsets_of_pages)
    status = torch.zeros(len(g.layers), STATUS_FIELDS, dtype=torch.int32, device=device)
    undo = [
        torch.empty(len(g.layers), batch, g.geometry.num_kv_heads, g.geometry.dim(kind), dtype=dtype, device=device)
        for kind in "kv"
    ]
    writers = [
        _writer(pages, i, dtype, moved, status[i], [x[i] for x in undo], state_d[TAIL_START])
        for i in range(len(g.layers))
    ]
    no_runs = torch.zeros_like(moved.runs)
    copiers = [
        [
            close_cuda.DecodeStep(of[name], of["tail"], dtype, to, no_runs, status[i], None, state_d[TAIL_START])
            for name, to in zip(copied, of_copies, strict=True)
        ]
        for i, of in enumerate(pages.stores)
    ]
    return _Group(
        tuple(g.layers),
        state_d,
        before,
        pages.attention,
        args,
        [Table(on_device[n], tokens[n], starts[n], offsets[n]) for n in names],
        moved.query_lens,
        status,
        writers,
        copiers,
        torch.full_like(moved.closings, NOWHERE),
        keep,
    )


def _writer(
    pages: Pages,
    i: int,
    dtype: torch.dtype,
    moved: _Moved,
    status: torch.Tensor,
    undo: list[torch.Tensor],
    tail_starts: torch.Tensor,
) -> close_cuda.DecodeStep | _StoreStep:
    """Return the step that stores the token of the group's layer `i`."""
    of_pool = pages.stores[i]
    packed = of_pool.get("closed", of_pool["tail"])
    if pages.group.fills_pages and not pages.group.is_raw:
        return _StoreStep(packed, dtype, moved, status)
    return close_cuda.DecodeStep(packed, of_pool["tail"], dtype, moved.closings, moved.runs, status, undo, tail_starts)
