"""Decoding on a GPU without the host: lengths, page numbers and what closes live on the device, pages are assigned ahead.

While a cache decodes one token after the other, a `DeviceDecode` stands in for the page lists of its sequences. A step is one launch per layer group
(`advance.cu`: lengths, slots, what closes), one for its work list, and two per layer: `close.cu` (quantize the page that is full, store the token) and
attention. Nothing is uploaded, nothing waits, so a step can be captured in a CUDA graph and replayed over page closings.

`settle` turns the device's state back into page lists: before anything else touches the sequences, and when the pages assigned ahead are used up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataError, PoolFullError, counted
from ..later import Later, upload
from ..ops import paged_attention
from ..ops.cuda.append import tokens as append_cuda
from ..ops.cuda.engine import close as close_cuda
from ..ops.cuda.engine import device_plan
from ..ops.cuda.engine.runtime import driver
from ..ops.cuda.engine.side import with_aligned_rows
from ..ops.types import PageStore, wider_scales
from .group import GroupState
from .layer_stores import LayerStores
from .sequence import Sequence

DEVICE = "cuda"
AHEAD = 128
"""Tokens that a growing cache assigns pages for at once."""
MOST_AHEAD = 1 << 20
THREADS = 256
TAIL, CLOSED, FIRST, TAIL_START, LENGTH, FIELDS = range(6)  # rows of the state, as in advance.cu
PARTS = ("sink", "closed", "tail")
NOWHERE = 1
"""NOWHERE of runs.cuh."""


class _Pages(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), ("offset", ctypes.c_void_p), ("stride", ctypes.c_int64), ("width", ctypes.c_int)]


class _AdvanceArgs(ctypes.Structure):
    """struct Args of advance.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("state", "before", "residual", "valid", "runs", "closings", "query_lens", "slots", "previous")),
        ("tail", _Pages), ("closed", _Pages), *((name, ctypes.c_int) for name in ("batch", "page_size", "ring", "valid_stride")),
    ]  # fmt: skip


def load_advance(device_index: int) -> driver.Kernel:
    """The kernel that moves lengths on."""
    return driver.load(Path(device_plan.__file__).parent, "advance.cu", "advance", {"THREADS": THREADS}, device_index)


def refuses(stores: LayerStores, backend: str, num_q_heads: int, dtype: torch.dtype) -> str | None:
    """Why a cache that was built for `backend` cannot decode on the device, whatever its sequences hold, or None."""
    if stores.device.type != DEVICE:
        return f"the pages are on {stores.device.type}"
    if backend not in ("auto", "cuda"):
        return f"backend={backend!r} was asked for"
    if any(g.group.tiers for g in stores.groups):
        return "zones are followed on the host"
    for state in stores.groups:
        g = state.group
        layouts = [g.layouts[name] for name in PARTS if name != "closed" or not g.fills_pages]
        if why := device_plan.refuses(layouts, num_q_heads, dtype, 1, stores.device):
            return why
        if not g.fills_pages and (why := close_cuda.refuses_on(g.layouts["closed"], dtype, stores.device)):
            return why
        if g.raw_dtype != str(dtype).removeprefix("torch."):
            return f"raw pages are {g.raw_dtype}, queries {dtype}"
    return None


def _refuses_sequence(state: GroupState, s: Sequence) -> str | None:
    g, size = state.group, state.group.page_size
    if s.length < g.num_sink_tokens:
        return "attention sinks are not complete"
    if None in s.closed or any(n != size for n in s.closed_lengths) or any(n != size for n in s.tail_lengths[:-1]):
        return "pages were cut or dropped in the middle"
    if not g.fills_pages and s.tail_tokens > s.residual_length + size:
        return "more raw tokens than usual wait"
    return None


@dataclass
class _Row:
    """Pages that a sequence of a group holds while it decodes: those it had, then those assigned ahead."""

    closed: list[int]
    tail: list[int]  # of groups that quantize: a ring


class _StoreStep:
    """`close_cuda.DecodeStep` for pages that are filled token by token: nothing closes, and what a token replaces nobody sees."""

    def __init__(self, store: PageStore, dtype: torch.dtype, slots: torch.Tensor, previous: torch.Tensor, status: torch.Tensor) -> None:
        append_cuda.prepare(store.layout, dtype, store.device)
        self._store, self._slots, self._status = store, slots, status
        self._previous = previous if store.layout.is_centered else None

    def run(self, k: torch.Tensor, v: torch.Tensor, stream: int) -> None:
        to, k, v = self._store, with_aligned_rows(k), with_aligned_rows(v)
        append_cuda.store_tokens(
            k, v, to.slabs[0], to.layout, self._slots, static=to.static, previous_page=self._previous, turn=to.turn, status=self._status
        )  # fmt: skip

    def put_back(self, nothing_closes: torch.Tensor, stream: int) -> None:
        """Nothing to do."""


@dataclass
class _Group:
    """One layer group on the device."""

    state: GroupState
    rows: list[_Row]
    numbers: torch.Tensor  # int32 [FIELDS, B]
    before: torch.Tensor
    attention: paged_attention.PagedAttention
    args: _AdvanceArgs
    tables: list[torch.Tensor]
    tokens: list[torch.Tensor]
    starts: list[torch.Tensor | None]
    offsets: list[torch.Tensor | None]
    query_lens: torch.Tensor
    status: torch.Tensor  # int32 [layers, STATUS_FIELDS]
    writers: list[close_cuda.DecodeStep | _StoreStep]
    nothing_closes: torch.Tensor
    keep: list[Any] = field(default_factory=list)


class DeviceDecode:
    """A cache that decodes on the device. Made by `enter`; knows nothing of the cache itself, which a cycle would keep alive with its pages."""

    def __init__(self, stores: LayerStores, steps: int, groups: list[_Group], key: tuple[Any, ...]) -> None:
        self.steps_left, self.groups, self.key = steps, groups, key
        self._device, self._scheme = stores.device, stores.spec.scheme.name
        self.steps_taken = 0
        self.of_layer: dict[int, tuple[_Group, int]] = {}
        for g in groups:
            for i, layer in enumerate(g.state.group.layers):
                self.of_layer[layer] = (g, i)
        self._advance = load_advance(-1 if stores.device.index is None else stores.device.index)
        self._statuses = [g.status for g in groups]
        self._status = Later()
        self._valid: torch.Tensor | None = None
        self._captured = False  # the step under way is recorded, not run
        self._stream = 0  # of the step under way

    # -- one step ---------------------------------------------------------------------------------------------------

    def begin(self, valid: torch.Tensor | None) -> None:
        """Move all groups on by a token: valid bool [B, 1] on the device, None for all."""
        self._captured = torch.cuda.is_current_stream_capturing()
        if not self._captured:
            self.count(1)
        self._valid = valid  # kept as long as the launch may read it
        self._stream = stream = driver.current_stream(self._device)
        for g in self.groups:
            g.args.valid = None if valid is None else valid.data_ptr()
            g.args.valid_stride = 0 if valid is None else valid.stride(0)
            self._advance.launch(1, THREADS, g.args, stream)
            g.attention.update(g.tables, g.tokens, starts=g.starts, offsets=g.offsets, query_lens=g.query_lens)

    def count(self, steps: int) -> None:
        """Note that `steps` steps are about to run.

        Raises:
            PoolFullError: pages were assigned ahead for fewer. Nothing changed.
        """
        if steps > self.steps_left:
            raise PoolFullError(f"{counted(steps, 'step')} more, but pages are assigned for {self.steps_left}; build the cache with a larger max_tokens")
        self.steps_left -= steps
        self.steps_taken += steps

    def step(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
        """Store the tokens k, v [B, 1, H, D] of a layer and attend with q [B, 1, Hq, D]."""
        g, i = self.of_layer[layer]
        g.writers[i].run(k, v, self._stream)
        return g.attention.run(q, i, lse=lse)

    def take_back(self, layers: set[int]) -> None:
        """Undo the step under way, of which `layers` have been through: rows that fresh tokens replaced, then lengths. A captured one has not run."""
        if self._captured:
            return
        stream = driver.current_stream(self._device)
        for layer in layers:
            g, i = self.of_layer[layer]
            g.writers[i].put_back(g.nothing_closes, stream)
        for g in self.groups:
            g.numbers.copy_(g.before)
        self.steps_left += 1
        self.steps_taken -= 1

    # -- what closing found -----------------------------------------------------------------------------------------

    def look(self) -> DataError | None:
        """What closing had found when last asked, if it was bad; asks again. Never waits."""
        found = self._status.ask(torch.cat(self._statuses))
        return None if found is None else self._judge(found)

    def _judge(self, found: torch.Tensor) -> DataError | None:
        rows = iter(found.tolist())
        for g in self.groups:
            for layer, row in zip(g.state.group.layers, rows, strict=False):
                for i, name in enumerate(("keys", "values")):
                    way_out = "The page's numbers are unusable: crop or free the sequences, or reset()"
                    if row[4 + i]:
                        return DataError(
                            f"{name} of layer {layer} held NaN or infinity when a page of them was quantized while decoding; fix the model's numerics "
                            f"(float16 overflow is the usual cause: try bfloat16) or pass nonfinite='clamp'. {way_out}"
                        )
                    if row[2 + i]:
                        spec = (g.state.group.key, g.state.group.value)[i]
                        return DataError(
                            f"a scale, bias or mean of the {name} of layer {layer} overflowed {spec.scale_dtype} when a page was quantized while decoding; "
                            f"{wider_scales(spec, f' in the specs of scheme {self._scheme!r}, or ')}keep layer {layer} raw (an Override). {way_out}"
                        )
        return None

    # -- back to page lists -----------------------------------------------------------------------------------------

    def settle(self, saturated: list[dict[str, int]]) -> DataError | None:
        """Give the sequences their page lists again, and the pools what was assigned ahead and not used. Waits for the GPU.

        Args:
            saturated: of every layer, added to: elements of keys and values that were clamped.

        Returns:
            What closing found, if it was bad.
        """
        for g in self.groups:
            numbers = g.numbers.cpu().numpy()
            for b, (s, row) in enumerate(zip(g.state.sequences, g.rows, strict=True)):
                _settle(g.state, s, row, numbers[:, b])
            g.state.forget_tables()
        found = torch.cat(self._statuses).cpu()
        rows = iter(found.tolist())
        for g in self.groups:
            for layer, row in zip(g.state.group.layers, rows, strict=False):
                for kind, n in zip("kv", row[:2], strict=True):
                    saturated[layer][kind] += n
        return self._judge(found)


def _settle(state: GroupState, s: Sequence, row: _Row, numbers: np.ndarray) -> None:
    size = state.group.page_size
    tail_tokens, closed_pages, first = int(numbers[TAIL]), int(numbers[CLOSED]) // size, int(numbers[FIRST])
    s.length = int(numbers[LENGTH])
    s.closed, spare_closed = list(row.closed[:closed_pages]), row.closed[closed_pages:]
    s.closed_lengths = [size] * closed_pages
    count = -(-tail_tokens // size)
    ring = row.tail[first:] + row.tail[:first]
    s.tail, spare_tail = ring[:count], ring[count:]
    s.tail_lengths = [min(size, tail_tokens - i * size) for i in range(count)]
    for name, pages in (("closed", spare_closed), ("tail", spare_tail)):
        for page in pages:
            state.pools[name].allocator.release(page)
    state.release_invisible(s)


def enter(
    stores: LayerStores, plan: Callable[..., paged_attention.PagedAttention], num_q_heads: int, dtype: torch.dtype, scaling: float, softcap: float | None
) -> DeviceDecode | str:
    """Assign pages ahead and put what decoding needs on the device; or why the sequences, as they are, cannot be decoded there.

    Args:
        plan: makes (or has) the plan for layouts, most pages of each, num_q_heads, dtype, scaling, sliding window and softcap.
    """
    for state in stores.groups:
        if state.keep_past:
            return "tokens are speculative"
        for s in state.sequences:
            if why := _refuses_sequence(state, s):
                return why
    if any(state.group.fills_pages and not state.group.is_raw and state.pools["tail"].fixed_capacity is None for state in stores.groups):
        return "pages that are filled token by token lie in one piece on a GPU: build the cache with max_tokens"
    steps = min((_steps(state) for state in stores.groups), default=0)
    if not steps:
        return "no pages are left to assign ahead"
    before = [state.snapshot() for state in stores.groups]
    try:
        groups = [_enter_group(stores, plan, state, steps, num_q_heads, dtype, scaling, softcap) for state in stores.groups]
    except BaseException as error:
        for state, was in zip(stores.groups, before, strict=True):
            state.restore(was)
        if isinstance(error, PoolFullError):  # rings of sequences with other residual lengths
            return str(error)
        raise
    return DeviceDecode(stores, steps, groups, (num_q_heads, dtype, scaling, softcap))


def _closings(state: GroupState, s: Sequence, steps: int) -> int:
    return state.uses(s, steps)[1]


def _ring(state: GroupState, s: Sequence) -> int:
    """Raw pages that a sequence of a group that quantizes uses in turn."""
    return -(-(s.residual_length + state.group.page_size) // state.group.page_size)


def _missing(state: GroupState, steps: int) -> dict[str, int]:
    """Pages to assign for `steps` more tokens of every sequence, raw pages that are shared with others now included."""
    size, tail = state.group.page_size, state.pools["tail"].allocator
    found = {"closed": 0, "tail": 0}
    for s in state.sequences:
        found["closed"] += _closings(state, s, steps)
        want = -(-(s.tail_tokens + steps) // size) if state.group.fills_pages else _ring(state, s)
        shared = s.tail if not state.group.fills_pages else s.tail[-1:]
        found["tail"] += max(0, want - len(s.tail)) + sum(tail.count(page) > 1 for page in shared)
    return found


def _steps(state: GroupState) -> int:
    """Tokens that pages can be assigned for."""
    if state.pools["closed"].fixed_capacity is None:
        return AHEAD

    def fits(steps: int) -> bool:
        return all(n <= state.pools[name].allocator.num_free for name, n in _missing(state, steps).items())

    low, high = 0, MOST_AHEAD
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _take(state: GroupState, pool: str, count: int) -> list[int]:
    return [state.pools[pool].allocator.allocate() for _ in range(count)]


def _enter_row(state: GroupState, s: Sequence, steps: int) -> _Row:
    size, tail = state.group.page_size, state.pools["tail"]
    for i in range(len(s.tail)) if not state.group.fills_pages else range(len(s.tail) - 1, len(s.tail)):
        if i >= 0 and tail.allocator.count(s.tail[i]) > 1:  # pages that will be written are this sequence's own
            (own,) = _take(state, "tail", 1)
            tail.block(own).copy_(tail.block(s.tail[i]))
            tail.allocator.release(s.tail[i])
            s.tail[i] = own
    want = -(-(s.tail_tokens + steps) // size) if state.group.fills_pages else _ring(state, s)
    closed = [page for page in s.closed if page is not None] + _take(state, "closed", _closings(state, s, steps))  # none was dropped (`_refuses_sequence`)
    return _Row(closed, s.tail + _take(state, "tail", max(0, want - len(s.tail))))


def _table(rows: list[list[int]], width: int) -> np.ndarray:
    found = np.full((len(rows), width), -1, np.int32)
    for b, pages in enumerate(rows):
        found[b, : len(pages)] = pages
    return found


def _assign(state: GroupState, steps: int) -> tuple[list[_Row], int]:
    """Pages of every sequence for `steps` tokens more, and how many raw pages each uses in turn (0 where pages are filled token by token)."""
    for name, n in _missing(state, steps).items():
        state.pools[name].reserve(n)
    rows = [_enter_row(state, s, steps) for s in state.sequences]
    ring = 0 if state.group.fills_pages else max(len(r.tail) for r in rows)
    if ring and any(len(r.tail) != ring for r in rows):
        for r in rows:  # sequences that keep fewer raw tokens than others: one ring serves all
            extra = ring - len(r.tail)
            state.pools["tail"].reserve(extra)
            r.tail += _take(state, "tail", extra)
    return rows, ring


def _numbers(state: GroupState) -> list[np.ndarray]:
    """int32 [FIELDS, B] of the state; then [B] each: position of the first closed token, sink tokens, newest tokens that stay raw."""
    batch = len(state.sequences)
    numbers = np.zeros((FIELDS, batch), np.int32)
    closed_start, sinks = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for b, s in enumerate(state.sequences):
        numbers[:, b] = s.tail_tokens, sum(s.closed_lengths), 0, s.length - s.tail_tokens, s.length
        closed_start[b] = s.length - s.tail_tokens - numbers[CLOSED, b]
        sinks[b] = state.group.num_sink_tokens if s.sink else 0
    return [numbers, closed_start, sinks, np.array([s.residual_length for s in state.sequences], np.int32)]


@dataclass
class _Moved:
    """What `advance.cu` writes for the launches after it, [B] rows each."""

    runs: torch.Tensor
    closings: torch.Tensor
    query_lens: torch.Tensor
    slots: torch.Tensor
    previous: torch.Tensor

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> _Moved:
        runs, closings = (torch.empty(batch, n, dtype=torch.int64, device=device) for n in (5, 2))
        slots, previous = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
        return cls(runs, closings, torch.empty(batch, dtype=torch.int32, device=device), slots, previous)


def _writers(
    stores: LayerStores, state: GroupState, names: list[str], attention: paged_attention.PagedAttention, dtype: torch.dtype, moved: _Moved,
    status: torch.Tensor, undo: torch.Tensor, tail_starts: torch.Tensor,
) -> list[close_cuda.DecodeStep | _StoreStep]:  # fmt: skip
    """What stores the token of each layer, whose pages attention is told of."""
    g = state.group
    found: list[close_cuda.DecodeStep | _StoreStep] = []
    for i, layer in enumerate(g.layers):
        of_pool = {name: stores.of_layer(layer, name) for name in names}
        packed = of_pool.get("closed", of_pool["tail"])
        attention.bind(i, [of_pool[name].slabs for name in names], packed.static)
        if g.fills_pages and not g.is_raw:
            found.append(_StoreStep(packed, dtype, moved.slots, moved.previous, status[i]))
        else:
            found.append(close_cuda.DecodeStep(packed, of_pool["tail"], dtype, moved.closings, moved.runs, status[i], undo[i], tail_starts))
    return found


def _enter_group(
    stores: LayerStores, plan: Callable[..., paged_attention.PagedAttention], state: GroupState, steps: int, num_q_heads: int, dtype: torch.dtype,
    scaling: float, softcap: float | None,
) -> _Group:  # fmt: skip
    g, device, batch = state.group, stores.device, len(state.sequences)
    rows, ring = _assign(state, steps)
    numbers = _numbers(state)
    names = [name for name in PARTS if name == "tail" or (numbers[2].any() if name == "sink" else any(r.closed for r in rows))]
    pages = {"sink": [s.sink for s in state.sequences], "closed": [r.closed for r in rows], "tail": [r.tail for r in rows]}
    # Widths in steps, so that one plan serves many times.
    max_pages = {name: ring if name == "tail" and ring else 1 if name == "sink" else _rounded_up(max(map(len, pages[name]))) for name in names}
    tables = [_table([x * 2 for x in pages[n]] if n == "tail" and ring else pages[n], max_pages[n] * (2 if n == "tail" and ring else 1)) for n in names]
    flat = [*numbers, *tables]
    whole = upload(np.concatenate([x.ravel() for x in flat]), device)  # one upload
    parts = [x.view(y.shape) for x, y in zip(whole.split([y.size for y in flat]), flat, strict=True)]
    state_d, closed_start_d, sinks_d, residual_d = parts[:4]
    on_device = dict(zip(names, parts[4:], strict=True))
    tokens = {"sink": sinks_d, "closed": state_d[CLOSED], "tail": state_d[TAIL]}
    starts = {"sink": None, "closed": closed_start_d, "tail": state_d[TAIL_START]}
    offsets = {"sink": None, "closed": None, "tail": state_d[FIRST] if ring else None}
    layouts = tuple(g.layouts[name] for name in names)
    attention = plan(layouts, tuple(max_pages.values()), num_q_heads, dtype, scaling, g.geometry.sliding_window, softcap)

    before, moved = torch.empty_like(state_d), _Moved.empty(batch, device)
    args = _AdvanceArgs(
        state=state_d.data_ptr(), before=before.data_ptr(), residual=None if g.fills_pages else residual_d.data_ptr(), runs=moved.runs.data_ptr(),
        closings=moved.closings.data_ptr(), query_lens=moved.query_lens.data_ptr(), slots=moved.slots.data_ptr(), previous=moved.previous.data_ptr(),
        batch=batch, page_size=g.page_size, ring=ring,
    )  # fmt: skip
    keep: list[Any] = [whole, moved]
    for name, of_pool in (("tail", args.tail), ("closed", args.closed)):
        if name not in names:
            continue
        slabs = state.pools[name].slabs
        of_pool.table, of_pool.width, of_pool.stride = on_device[name].data_ptr(), on_device[name].shape[1], slabs[0].stride(0)
        if (offsets_of_pages := device_plan.page_offsets(slabs, device)) is not None:
            of_pool.offset = offsets_of_pages.data_ptr()
            keep.append(offsets_of_pages)
    status = torch.zeros(len(g.layers), append_cuda.STATUS_FIELDS, dtype=torch.int32, device=device)
    undo = torch.empty(len(g.layers), 2, batch, g.geometry.num_kv_heads, g.geometry.head_dim, dtype=dtype, device=device)
    writers = _writers(stores, state, names, attention, dtype, moved, status, undo, state_d[TAIL_START])
    return _Group(
        state, rows, state_d, before, attention, args, [on_device[n] for n in names], [tokens[n] for n in names], [starts[n] for n in names],
        [offsets[n] for n in names], moved.query_lens, status, writers, torch.full_like(moved.closings, NOWHERE), keep,
    )  # fmt: skip


def _rounded_up(pages: int) -> int:
    return max(64, -(-pages // 64) * 64)
