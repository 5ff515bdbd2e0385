"""Decoding on a device without the host: pages are assigned ahead, and the device moves lengths on by itself
(`ops.decode`).

While a cache decodes one token after the other, a `DeviceDecode` stands in for the page lists of its sequences.
`settle` turns the device's state back into page lists: before anything else touches the sequences, and when the pages
assigned ahead are used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import DataError, PoolFullError, counted
from ..later import Later
from ..ops import decode
from ..ops.attend import Attention, plan
from ..ops.decode import (
    CLOSED,
    COPIED,
    COPY_FIRST,
    FIELDS,
    FIRST,
    LENGTH,
    READ,
    TAIL,
    parts_of,
    row_of_copies,
)
from ..ops.types import wider_scales
from .group import GroupState
from .layer_stores import LayerStores
from .plans import KeptPlan
from .sequence import Sequence, copy_pool

AHEAD = 128
"""Tokens that a growing cache assigns pages for at once."""
MOST_AHEAD = 1 << 20


def refuses(stores: LayerStores, backend: str, num_q_heads: int, dtype: torch.dtype) -> str | None:
    """Return why a cache that was built for `backend` cannot decode on the device whatever its sequences
    hold, or None.
    """
    if not decode.leads(stores.device):
        return f"the pages are on {stores.device.type}"
    if backend not in ("auto", decode.BACKENDS[stores.device.type]):
        return f"backend={backend!r} was asked for"
    if any(g.group.tiers for g in stores.groups):
        return "tiers are followed on the host"
    return decode.backend_of(stores.device).refuses(
        [state.group for state in stores.groups], num_q_heads, dtype, stores.device
    )


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
    copies: list[list[int]]  # of each kind a ring


@dataclass
class _Lent:
    """One layer group whose pages the device has."""

    state: GroupState
    rows: list[_Row]
    attention: Attention


class DeviceDecode:
    """A cache that decodes on the device.

    Made by `enter`; knows nothing of the cache itself, which a cycle would keep alive with its pages.

    Attributes:
        steps_left: tokens that pages are assigned for.
        steps_taken: tokens since `enter`.
        key: num_q_heads, dtype, scaling and softcap that every step has.
        stepper: what carries steps out.
    """

    def __init__(
        self, stores: LayerStores, steps: int, lent: list[_Lent], stepper: decode.Stepper, key: tuple[Any, ...]
    ) -> None:
        self.steps_left, self.steps_taken, self.key, self.stepper = steps, 0, key, stepper
        self._lent, self._scheme, self._backend = lent, stores.spec.scheme.name, decode.backend_of(stores.device)
        self._plan_of = {layer: g.attention for g in lent for layer in g.state.group.layers}
        self._status = Later()
        self._captured = False  # the step under way is recorded, not run

    # -- one step ---------------------------------------------------------------------------------------------------

    def begin(self, valid: torch.Tensor | None) -> None:
        """Move all groups on by a token: valid bool [B, 1] on the device, None for all."""
        self._captured = self._backend.capturing()
        if not self._captured:
            self.count(1)
        self.stepper.begin(valid)

    def count(self, steps: int) -> None:
        """Note that `steps` steps are about to run.

        Raises:
            PoolFullError: pages were assigned ahead for fewer. Nothing changed.
        """
        if steps > self.steps_left:
            raise PoolFullError(
                f"{counted(steps, 'step')} more, but pages are assigned for {self.steps_left}; build the cache with a"
                " larger max_tokens"
            )
        self.steps_left -= steps
        self.steps_taken += steps

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the tokens k, v [B, 1, H, D] of a layer."""
        self.stepper.store(layer, k, v)

    def attend(
        self, layer: int, q: torch.Tensor, scaling: float, softcap: float | None, wants_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with q [B, 1, Hq, D] to the pages of a layer: (out [B, 1, Hq, D], lse float32 [B, 1, Hq] or None).

        Raises:
            DataError: heads, dtype, scaling or softcap differ from those that decoding began with.
        """
        if (key := (q.shape[2], q.dtype, scaling, softcap)) != self.key:
            names = "query heads", "dtype", "scaling", "softcap"
            given, begun = (", ".join(f"{n} {x}" for n, x in zip(names, y, strict=True)) for y in (key, self.key))
            raise DataError(f"layer {layer} attends with {given}; this pass began with {begun}")
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if wants_lse else None
        return self._plan_of[layer].run(q, layer, lse=lse), lse

    def take_back(self, layers: set[int]) -> None:
        """Undo the step under way, which `layers` have run. A captured step has not run."""
        if not self._captured:
            self.stepper.take_back(layers)
            self.steps_left += 1
            self.steps_taken -= 1

    def explain(self) -> set[str]:
        """Return who serves attention."""
        return {attention.explain() for attention in self._plan_of.values()}

    # -- what closing found -----------------------------------------------------------------------------------------

    def look(self) -> DataError | None:
        """Return what closing had found when last asked, if it was bad, and ask again. The call never waits."""
        found = self._status.ask(self.stepper.status())
        return None if found is None else self._judge(found)

    def _judge(self, found: torch.Tensor) -> DataError | None:
        rows = iter(found.tolist())
        for g in self._lent:
            for layer, row in zip(g.state.group.layers, rows, strict=False):
                for i, name in enumerate(("keys", "values")):
                    way_out = "The page's numbers are unusable: crop or free the sequences, or reset()"
                    if row[4 + i]:
                        return DataError(
                            f"{name} of layer {layer} held NaN or infinity when a page of them was quantized while"
                            " decoding; fix the model's numerics (float16 overflow is the usual cause: try bfloat16)."
                            f" {way_out}"
                        )
                    if row[2 + i]:
                        spec = (g.state.group.key, g.state.group.value)[i]
                        return DataError(
                            f"a scale, bias or mean of the {name} of layer {layer} overflowed {spec.scale_dtype} when a"
                            " page was quantized while decoding;"
                            f" {wider_scales(spec, f' in the specs of scheme {self._scheme!r}, or ')}keep layer {layer}"
                            f" raw (an Override). {way_out}"
                        )
        return None

    # -- back to page lists -----------------------------------------------------------------------------------------

    def settle(self, saturated: list[dict[str, int]]) -> DataError | None:
        """Give the sequences their page lists again, and the pools what was assigned ahead and not used.

        Waits for the device.

        Args:
            saturated: of every layer, added to: elements of keys and values that were clamped.

        Returns:
            What closing found, if it was bad.
        """
        for g, numbers in zip(self._lent, self.stepper.numbers(), strict=True):
            for b, (s, row) in enumerate(zip(g.state.sequences, g.rows, strict=True)):
                _settle(g.state, s, row, numbers[:, b])
            g.state.forget_tables()
        found = self.stepper.status().cpu()
        rows = iter(found.tolist())
        for g in self._lent:
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
    spare = {"closed": spare_closed, "tail": spare_tail}
    for i, pages in enumerate(row.copies):
        copied, first = (int(numbers[row_of_copies(i) + n]) for n in (COPIED, COPY_FIRST))
        turned = pages[first:] + pages[:first]
        s.copies[i], spare[copy_pool(i)] = tuple(turned[: copied // size]), turned[copied // size :]
    for name, pages in spare.items():
        for page in pages:
            state.pools[name].allocator.release(page)
    state.release_invisible(s)


def enter(
    stores: LayerStores, num_q_heads: int, dtype: torch.dtype, scaling: float, softcap: float | None
) -> DeviceDecode | str:
    """Assign pages ahead and put what decoding needs on the device; or return why the device cannot decode these
    sequences.
    """
    for state in stores.groups:
        if state.keep_past:
            return "tokens are speculative"
        for s in state.sequences:
            if why := _refuses_sequence(state, s):
                return why
    steps = min((_steps(state) for state in stores.groups), default=0)
    if not steps:
        return "no pages are left to assign ahead"
    before = [state.snapshot() for state in stores.groups]
    try:
        lent, pages = zip(
            *(_lend(stores, state, steps, num_q_heads, dtype, scaling, softcap) for state in stores.groups),
            strict=True,
        )
        stepper = decode.backend_of(stores.device).stepper(list(pages), dtype, stores.device)
    except BaseException as error:
        for state, was in zip(stores.groups, before, strict=True):
            state.restore(was)
        stores.plans.clear()  # they hold on to slabs that went
        if isinstance(error, PoolFullError):  # rings of sequences with other residual lengths
            return str(error)
        raise
    return DeviceDecode(stores, steps, list(lent), stepper, (num_q_heads, dtype, scaling, softcap))


def _closings(state: GroupState, s: Sequence, steps: int) -> int:
    return state.uses(s, steps)[1]


def _ring(state: GroupState, s: Sequence) -> int:
    """Return the number of raw pages that a sequence of a group that quantizes uses in turn."""
    return -(-(s.residual_length + state.group.page_size) // state.group.page_size)


def _round_the_ring(held: int, most: int, closings: int) -> tuple[int, int]:
    """Return (pages that copies of closing pages take beside those held, oldest held ones written over)."""
    return min(most - held, closings), min(held, max(0, held + closings - most))


def _missing(state: GroupState, steps: int) -> dict[str, int]:
    """Return pages to assign for `steps` more tokens of every sequence, raw pages that are shared with others now
    included.
    """
    size, tail = state.group.page_size, state.pools["tail"].allocator
    found = {"closed": 0, "tail": 0} | dict.fromkeys(state.group.copy_pools, 0)
    for s in state.sequences:
        found["closed"] += _closings(state, s, steps)
        want = -(-(s.tail_tokens + steps) // size) if state.group.fills_pages else _ring(state, s)
        shared = s.tail if not state.group.fills_pages else s.tail[-1:]
        found["tail"] += max(0, want - len(s.tail)) + sum(tail.count(page) > 1 for page in shared)
        for name, copies, most in zip(state.group.copy_pools, s.copies, state.group.copied_pages, strict=True):
            of_pool = state.pools[name].allocator
            fresh, reused = _round_the_ring(len(copies), most, _closings(state, s, steps))
            found[name] += fresh + sum(of_pool.count(page) > 1 for page in copies[:reused] if page is not None)
    return found


def _steps(state: GroupState) -> int:
    """Return the number of tokens that pages can be assigned for."""
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


def _own(state: GroupState, pool: str, page_id: int) -> int:
    """Return a page that will be written as its sequence's own: itself, or a copy of one that others hold, too."""
    pages = state.pools[pool]
    if pages.allocator.count(page_id) == 1:
        return page_id
    (own,) = _take(state, pool, 1)
    pages.block(own).copy_(pages.block(page_id))
    pages.allocator.release(page_id)
    return own


def _enter_row(state: GroupState, s: Sequence, steps: int) -> _Row:
    size = state.group.page_size
    for i in range(len(s.tail)) if not state.group.fills_pages else range(len(s.tail) - 1, len(s.tail)):
        if i >= 0:
            s.tail[i] = _own(state, "tail", s.tail[i])
    want = -(-(s.tail_tokens + steps) // size) if state.group.fills_pages else _ring(state, s)
    # none was dropped (`_refuses_sequence`)
    closed = [page for page in s.closed if page is not None] + _take(state, "closed", _closings(state, s, steps))
    tail = s.tail + _take(state, "tail", max(0, want - len(s.tail)))
    copies = []
    for name, held, most in zip(state.group.copy_pools, s.copies, state.group.copied_pages, strict=True):
        fresh, reused = _round_the_ring(len(held), most, _closings(state, s, steps))
        pages = [page for page in held if page is not None]
        own = [_own(state, name, page) for page in pages[:reused]]
        copies.append([*own, *pages[reused:], *_take(state, name, fresh)])
    return _Row(closed, tail, copies)


def _assign(state: GroupState, steps: int) -> tuple[list[_Row], int]:
    """Return pages of every sequence for `steps` tokens more, and how many raw pages each uses in turn (0 where pages
    are filled token by token).
    """
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
    """Return int32 [rows, B] of the state; then [B] each: position of the first closed token, sink tokens, newest
    tokens that stay raw.
    """
    batch = len(state.sequences)
    size, kinds = state.group.page_size, len(state.group.copies)
    numbers = np.zeros((row_of_copies(kinds), batch), np.int32)
    closed_start, sinks = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for b, s in enumerate(state.sequences):
        tail_start = s.length - s.tail_tokens
        numbers[:FIELDS, b] = s.tail_tokens, sum(s.closed_lengths), 0, tail_start, s.length, 0
        finer = 0  # tokens that have a finer copy
        for i, copies in enumerate(s.copies):
            copied = len(copies) * size
            numbers[row_of_copies(i) : row_of_copies(i + 1), b] = copied, 0, copied - finer, tail_start - copied
            finer = copied
        numbers[READ, b] = numbers[CLOSED, b] - finer
        closed_start[b] = s.length - s.tail_tokens - numbers[CLOSED, b]
        sinks[b] = state.group.num_sink_tokens if s.sink else 0
    return [numbers, closed_start, sinks, np.array([s.residual_length for s in state.sequences], np.int32)]


def _lend(
    stores: LayerStores,
    state: GroupState,
    steps: int,
    num_q_heads: int,
    dtype: torch.dtype,
    scaling: float,
    softcap: float | None,
) -> tuple[_Lent, decode.Pages]:
    """Assign pages ahead in a layer group and hand all over."""
    g = state.group
    rows, ring = _assign(state, steps)
    numbers, closed_start, sinks, residual = _numbers(state)
    names = [
        name
        for name in parts_of(g)
        if name == "tail" or (sinks.any() if name == "sink" else any(r.closed for r in rows))
    ]
    held = {
        "sink": [s.sink for s in state.sequences],
        "closed": [r.closed for r in rows],
        "tail": [r.tail for r in rows],
    } | {name: [r.copies[i] for r in rows] for i, name in enumerate(g.copy_pools)}
    ids = {name: held[name] for name in names}
    slabs = {name: state.pools[name].slabs for name in names}
    of_layers = [{name: stores.of_layer(layer, name) for name in names} for layer in g.layers]
    attention = _plan(stores, state, names, num_q_heads, dtype, scaling, softcap)
    for layer, of_pool in zip(g.layers, of_layers, strict=True):
        attention.bind(layer, list(of_pool.values()))
    plan = attention.attention
    return _Lent(state, rows, plan), decode.Pages(
        g, numbers, closed_start, sinks, residual, ids, ring, slabs, of_layers, plan
    )


def _plan(
    stores: LayerStores,
    state: GroupState,
    names: list[str],
    num_q_heads: int,
    dtype: torch.dtype,
    scaling: float,
    softcap: float | None,
) -> KeptPlan:
    """Return the plan for decoding a group on the device with the parts `names`: kept, as pages are assigned again and
    again.
    """
    g, batch_size = state.group, len(state.sequences)
    key = ("device", tuple(g.layers), tuple(names), batch_size, num_q_heads, dtype, scaling, softcap)
    return stores.plans.get(
        key,
        lambda: plan(
            [g.layouts[name] for name in names],
            batch_size=batch_size,
            num_q_heads=num_q_heads,
            dtype=dtype,
            device=stores.device,
            scaling=scaling,
            sliding_window=g.geometry.sliding_window,
            softcap=softcap,
        ),
    )
