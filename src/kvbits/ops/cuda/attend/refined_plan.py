"""Attention over banded pages with low planes, which no kernel reads packed: in every pass they are unpacked to 16-bit pages in a workspace, and the kernel
that reads the other pages packed reads those too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ....errors import DataError
from ....later import upload
from ....spec import PageLayout, QuantSpec
from ...types import AttendCall, PageStore, PageTable, Part, banded_sides
from ..dequantize import banded
from ..merge import merge_partials

MAX_ROWS = 1 << 16
"""Tokens of the workspace: 268 MB of keys and values at 8 kv heads of 128. Where more have low planes they are read in turns, and the results merged."""


def is_refined(part: Part) -> bool:
    """Whether a part's pages are banded codes with low planes."""
    return bool(part.low) and banded_sides(part.store.layout) is not None


def unpacked_layout(call: AttendCall, q_dtype: torch.dtype) -> PageLayout:
    """Of the pages that those with low planes are unpacked to: raw, in the dtype of the call's raw pages if it has any, else of the queries."""
    layouts = [p.store.layout for p in call.parts]
    sizes = [p.store.layout.page_size for p in call.parts if is_refined(p)]
    dtype = next((x.raw_dtype for x in layouts if x.key.is_raw), str(q_dtype).removeprefix("torch."))
    raw, like = QuantSpec.raw(), layouts[0]
    return PageLayout(key=raw, value=raw, page_size=max(sizes), num_kv_heads=like.num_kv_heads, head_dim=like.head_dim, raw_dtype=dtype)


def as_unpacked(call: AttendCall, q_dtype: torch.dtype) -> AttendCall:
    """A call of the formats that are read once pages with low planes are unpacked; it has no pages of them."""
    layout, none = unpacked_layout(call, q_dtype), np.zeros(0, np.int64)
    table = PageTable(np.zeros_like(call.parts[0].table.indptr), none, none, none.astype(np.int32))
    slab = torch.empty(0, layout.num_kv_heads, layout.head_bytes, dtype=torch.uint8, device=call.parts[0].store.device)
    return dataclasses.replace(call, parts=(*(p for p in call.parts if not is_refined(p)), Part(PageStore(layout, (slab,)), table)))


def refuses_unpacking(call: AttendCall, q_dtype: torch.dtype) -> str | None:
    """Why some page with low planes cannot be unpacked, or None."""
    dtype = getattr(torch, unpacked_layout(call, q_dtype).raw_dtype)
    refined = (p for p in call.parts if is_refined(p))
    return next((why for p in refined if (why := banded.refuses_layout(p.store.layout, dtype, [s.layout for s in p.low]))), None)


class _Plan(Protocol):
    q_positions: torch.Tensor
    out: torch.Tensor

    def run(
        self, q: torch.Tensor, *, layer: int, page_lse: np.ndarray | None, static: Sequence[Mapping[str, torch.Tensor]] | None, in_order: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def explain(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What one filling of the workspace serves.

    Attributes:
        parts: which of the call's parts the plan reads as they are; the workspace is its last.
        unpackers: each with the part whose pages it unpacks.
        pages: of each page of the plan, which of the call's it is.
    """

    plan: _Plan
    parts: list[int]
    unpackers: list[tuple[int, banded.BandedUnpacker]]
    pages: np.ndarray


class RefinedPlan:
    """Same use as `Plan`; every run fills the workspace anew, which layers share.

    Args:
        make: makes the `Plan` of a call, given its `layer_strides`.
        layer_strides: of each part of `call`, as for `Plan`.

    Attributes:
        q_positions: int [B, num_queries] on the device, those of all plans.
    """

    def __init__(self, call: AttendCall, make: Callable[..., _Plan], q_dtype: torch.dtype, layer_strides: tuple[int, ...] | None) -> None:
        self.call, device = call, call.parts[0].store.device
        self._strides = layer_strides or (0,) * len(call.parts)
        layout, refined = unpacked_layout(call, q_dtype), [i for i, p in enumerate(call.parts) if is_refined(p)]
        self._kept = [i for i in range(len(call.parts)) if i not in refined]
        batch = len(call.parts[0].table.indptr) - 1
        part = np.concatenate([np.full(call.parts[i].table.num_pages, i) for i in refined])
        entry = np.concatenate([np.arange(call.parts[i].table.num_pages) for i in refined])
        owner = np.concatenate([np.repeat(np.arange(batch), np.diff(call.parts[i].table.indptr)) for i in refined])
        order = np.argsort(owner, kind="stable")
        part, entry, owner = part[order], entry[order], owner[order]
        most = max(1, MAX_ROWS // layout.page_size)
        slab = torch.empty(min(len(part), most), layout.num_kv_heads, layout.head_bytes, dtype=torch.uint8, device=device)
        self._store = PageStore(layout, (slab,))
        self._keys, self._values = (self._side(name) for name in ("k_raw", "v_raw"))
        self._turns = [
            self._turn(make, part[at : at + most], entry[at : at + most], owner[at : at + most], self._kept if at == 0 else [])
            for at in range(0, max(len(part), 1), most)
        ]
        self.q_positions = self._turns[0].plan.q_positions

    def run(
        self, q: torch.Tensor, q_positions: torch.Tensor | None = None, *, layer: int = 0, page_lse: np.ndarray | None = None,
        static: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(out [B, T, Hq, D] in q's dtype, lse float32 [B, T, Hq]); arguments as of `Plan.run`."""
        if layer and static is None and any(p.store.static for p in self.call.parts):
            raise DataError(f"layer {layer} of a scheme with calibrated parameters was given none; pass `static`, one dict for each part")
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        given = static or [p.store.static for p in self.call.parts]
        found = []
        for turn in self._turns:
            for part, unpacker in turn.unpackers:
                unpacker.run(self._keys, self._values, layer, given[part])
            if turn.plan.q_positions is not self.q_positions:
                turn.plan.q_positions.copy_(self.q_positions)
            own = None if page_lse is None else np.full((len(turn.pages), *page_lse.shape[1:]), -np.inf, page_lse.dtype)
            # All that the kernel reads of the workspace has been written just ahead of it, more than it waits for where it starts early.
            found.append(turn.plan.run(q, layer=layer, page_lse=own, static=[*(given[i] for i in turn.parts), {}], in_order=True))
            if page_lse is not None and own is not None:
                page_lse[turn.pages] = own
        if len(found) == 1:
            return found[0]
        outs, lses = zip(*found, strict=True)
        return merge_partials(outs, lses)

    def explain(self) -> str:
        """How pages are read, in a line each."""
        pages = self._store.num_pages
        turns = "" if len(self._turns) == 1 else f", in {len(self._turns)} turns"
        said = f"attend_pages by cuda: {pages} pages with low planes are unpacked to {self._store.layout.raw_dtype} in every pass{turns}"
        return "\n".join([said, *(turn.plan.explain() for turn in self._turns)])

    def _side(self, name: str) -> torch.Tensor:
        """[pages, H, page_size, D]: keys or values of the workspace."""
        layout = self._store.layout
        at, dtype = layout.sections[name], getattr(torch, layout.raw_dtype)
        rows = self._store.slabs[0][:, :, at.offset : at.offset + at.nbytes].view(dtype)
        return rows.unflatten(-1, (layout.page_size, layout.head_dim))

    def _turn(self, make: Callable[..., _Plan], part: np.ndarray, entry: np.ndarray, owner: np.ndarray, kept: list[int]) -> _Turn:
        """Of pages `entry` [n] of the tables of `part` [n], which sequences `owner` [n] read, and of all pages of the parts `kept`."""
        parts, batch = self.call.parts, len(self.call.parts[0].table.indptr) - 1
        starts, lengths = np.zeros(len(part), np.int64), np.zeros(len(part), np.int32)
        unpackers = []
        for i in map(int, np.unique(part)):
            mine = np.flatnonzero(part == i)
            of_part = entry[mine]
            starts[mine], lengths[mine] = parts[i].table.starts[of_part], parts[i].table.lengths[of_part]
            unpackers.append((i, self._unpacker(i, of_part, np.stack([mine, lengths[mine]], 1).astype(np.int32))))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=batch))]).astype(np.int64)
        unpacked = Part(self._store, PageTable(indptr, np.arange(len(part)), starts, lengths))
        firsts = np.cumsum([0, *(p.table.num_pages for p in parts)])
        pages = np.concatenate([*(firsts[i] + np.arange(parts[i].table.num_pages) for i in kept), firsts[part] + entry]).astype(np.int64)
        own_lse = None
        if self.call.page_lse is not None:
            own_lse = np.full((len(pages), *self.call.page_lse.shape[1:]), -np.inf, self.call.page_lse.dtype)
        call = dataclasses.replace(self.call, parts=(*(parts[i] for i in kept), unpacked), page_lse=own_lse)
        return _Turn(make(call, layer_strides=(*(self._strides[i] for i in kept), 0)), kept, unpackers, pages)

    def _unpacker(self, part: int, entries: np.ndarray, rows: np.ndarray) -> banded.BandedUnpacker:
        """Of the pages `entries` [n] of a part's table to pages rows[:, 0] of the workspace, rows[:, 1] tokens of each."""
        p, device = self.call.parts[part], self._store.device
        low = [(s, upload(s.addresses()[ids[entries]], device)) for s, ids in zip(p.low, p.table.low, strict=True)]
        address, starts = upload(p.store.addresses()[p.table.page_ids[entries]], device), upload(p.table.starts[entries].astype(np.int32), device)
        dtype = getattr(torch, self._store.layout.raw_dtype)
        return banded.BandedUnpacker(p.store, dtype, address, upload(rows, device), self._strides[part], starts, low)
