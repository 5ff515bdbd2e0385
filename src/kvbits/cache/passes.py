"""Forward passes: one at a time, planned for all layers before a byte moves, and taken back whole when one fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import CacheStateError, DataError, counted
from ..later import Findings, upload
from ..ops.types import LowStore, PageStore, SlotMapping
from ..spec import MOST_TOKENS, whole
from . import explain
from .arrivals import Arrivals
from .budget import Budget, OverBudgetError
from .decode_switch import DecodeSwitch
from .device_decode import DeviceDecode
from .group import GroupState, Snapshot
from .step import Step

_NO_POSITIONS = torch.empty(0, 1, dtype=torch.int64, device="cpu")


@dataclass
class Forward:
    """One forward pass under way; dropped when the last layer has been here."""

    num_tokens: int
    counts: list[int]
    valid: torch.Tensor | None  # bool [B, T] on the host, None for all
    positions: torch.Tensor  # int64 [B, T], -1 for padding
    steps: list[Step]
    history_first: bool
    pending: set[int]  # layers that have not been here yet
    before: list[Snapshot] | None  # snapshots of the groups; None once a sequence was freed during the pass
    saturated: list[dict[str, int]]  # before the pass
    overwritten: list[tuple[PageStore | LowStore, int, torch.Tensor]] = field(default_factory=list)  # pages that a layer used again, as they were
    plans: dict[Any, Any] = field(default_factory=dict)  # of backends that plan once per pass
    shares: dict[int, list[np.ndarray]] = field(default_factory=dict)  # per observed group, of each place that was here
    slots: dict[int, dict[str, SlotMapping]] = field(default_factory=dict)  # per group and pool, for all its layers
    device: DeviceDecode | None = None  # what carries the pass out without the host, if it does
    findings: Findings = field(default_factory=Findings)  # of a GPU, looked at when the last layer leaves
    _real: list[torch.Tensor] | None = None

    def require(self, layer: int) -> None:
        """Refuse a layer that has been here already.

        Raises:
            CacheStateError: with the way out.
        """
        self.require_storable()
        if layer not in self.pending:
            raise CacheStateError(
                f"layer {layer} attended twice in one forward pass while {counted(len(self.pending), 'layer')} did not come; "
                "call abandon() to take the pass back, or reset()"
            )

    def require_storable(self) -> None:
        """Refuse anything but an end after the last layer found what cannot be stored in a pass that cannot be taken back.

        Raises:
            CacheStateError: with the way out.
        """
        if not self.pending:
            raise CacheStateError(
                "the last forward pass found numbers that it could not store, after a sequence was freed in it; call reset(), or free() the others"
            )

    def mask(self, layer: int, valid: torch.Tensor | None) -> torch.Tensor | None:
        """The pass's own mask, which padding is cleaned by. On a GPU a layer's is taken for it, since looking would wait.

        Raises:
            DataError: the layer brings another.
        """
        if valid is None or valid.device.type != "cpu" or valid.shape != self.positions.shape:
            return self.valid if valid is None else valid
        if not torch.equal(valid, torch.ones_like(valid) if self.valid is None else self.valid):
            raise DataError(f"layer {layer} brings another mask of real tokens than this forward pass began with; give all layers the same, or none")
        return valid

    def real_tokens(self, device: torch.device) -> list[torch.Tensor]:
        """The real tokens of each row of a batch with padding: int64 [n] on the device, the same for all layers."""
        assert self.valid is not None
        if self._real is None:
            self._real = [upload(x.nonzero().squeeze(1), device) for x in self.valid]
        return self._real

    def slots_of(self, group: int) -> dict[str, SlotMapping]:
        """Where the group's tokens go that are stored as they come, by pool."""
        if group not in self.slots:
            real = None if self.valid is None else [x.nonzero().flatten().tolist() for x in self.valid]
            runs: dict[str, list[tuple[int, ...]]] = {}
            for w in self.steps[group].writes:
                tokens = range(w.fresh, w.fresh + w.count) if real is None else real[w.row][w.fresh : w.fresh + w.count]
                cuts = [0, *(i for i in range(1, w.count) if tokens[i] != tokens[i - 1] + 1), w.count] if real is not None else [0, w.count]
                runs.setdefault(w.pool, []).extend((w.row, tokens[a], w.page_id, w.slot + a, b - a, w.before) for a, b in itertools.pairwise(cuts))
            tables = {pool: np.array(found, np.int64) for pool, found in runs.items()}
            self.slots[group] = {pool: SlotMapping(np.ascontiguousarray(x[:, :5]), x[:, 5]) for pool, x in tables.items()}
        return self.slots[group]


class Passes:
    """The forward pass of a cache that is under way, if one is.

    Args:
        layers: that every pass goes through.
        switch: leads single tokens on the device, where that can be done.
        saturated: of every layer, what its passes count; put back when one is taken back.
        budget: bytes that all pools share, or None.
        arrivals: pages that a layer may have to wait for.

    Attributes:
        forward: the pass that some layers have not been through yet, or None.
    """

    def __init__(
        self, groups: list[GroupState], layers: Iterable[int], switch: DecodeSwitch, saturated: list[dict[str, int]], budget: Budget | None,
        arrivals: Arrivals,
    ) -> None:  # fmt: skip
        self._groups, self._layers, self._switch, self._saturated, self._budget = groups, frozenset(layers), switch, saturated, budget
        self._arrivals = arrivals
        self.forward: Forward | None = None
        self._awaited: set[int] = set()  # layers that a pass which lost all its sequences was waiting for

    def begin(self, batch_size: int, num_tokens: int, valid: torch.Tensor | None) -> None:
        """Plan a pass, see `PagedCache.begin`.

        Raises:
            PoolFullError: pages are missing; nothing changed.
        """
        self._switch.raise_found()
        self._refuse(batch_size, num_tokens)
        if num_tokens == 1 and (device := self._switch.begin(valid)) is not None:
            layers, saturated = set(self._layers), [dict(s) for s in self._saturated]
            self.forward = Forward(1, [1] * batch_size, None, _NO_POSITIONS, [], False, layers, [], saturated, device=device)
            return
        self._switch.host_begins(num_tokens)
        if valid is not None:
            valid = valid.to("cpu", torch.bool)
            if valid.shape != (batch_size, num_tokens):
                raise DataError(f"valid has shape {tuple(valid.shape)}, expected {(batch_size, num_tokens)}")
            valid = None if bool(valid.all()) else valid
        counts = [num_tokens] * batch_size if valid is None else valid.sum(1).tolist()
        self._switch.settle()
        lengths, steps, before = self._with_room(counts, num_tokens > 1)
        ranks = torch.arange(1, num_tokens + 1, device="cpu").expand(batch_size, -1) if valid is None else valid.cumsum(1)
        positions = torch.tensor(lengths, device="cpu")[:, None] + ranks - 1
        if valid is not None:
            positions = positions.masked_fill(~valid, -1)
        layers, saturated = set(self._layers), [dict(s) for s in self._saturated]
        self.forward = Forward(num_tokens, counts, valid, positions, steps, num_tokens > 1, layers, before, saturated)

    def _refuse(self, batch_size: int, num_tokens: int) -> None:
        if self.forward is not None:
            self.forward.require_storable()
            missing = sorted(self.forward.pending)
            raise CacheStateError(
                f"the last forward pass never reached layer {missing[0]} ({counted(len(missing), 'layer')} missing), so their pages hold nothing; "
                "call abandon() to take the pass back, reset(), or free() the sequences"
            )
        for name, n in (("sequences", batch_size), ("tokens", num_tokens)):
            whole(f"{name} of a forward pass", n, -MOST_TOKENS, MOST_TOKENS, error=DataError)
        if num_tokens < 1 or batch_size < 1:
            raise DataError(f"a forward pass of {counted(batch_size, 'sequence')} x {counted(num_tokens, 'token')} is empty; pass at least one token")
        held = len(self._groups[0].sequences)
        if held and batch_size != held:
            raise CacheStateError(f"the cache holds {counted(held, 'sequence')} but was given {batch_size}; {explain.other_batch(held, batch_size)}")

    def _with_room(self, counts: list[int], history_first: bool) -> tuple[list[int], list[Step], list[Snapshot]]:
        """`_advance`, with low planes given back until a budget has room for it."""
        trimmed = False
        while True:
            try:
                return self._advance(counts, history_first)
            except OverBudgetError as error:
                assert self._budget is not None
                if not trimmed:
                    self._budget.trim(self._groups)
                    trimmed = True
                elif not self._budget.make_room(self._groups, counts, error.needed):
                    raise

    def _advance(self, counts: list[int], history_first: bool) -> tuple[list[int], list[Step], list[Snapshot]]:
        """Lengths before, steps of the groups and their snapshots; all groups move, or none."""
        before = [g.snapshot() for g in self._groups]
        try:
            for g in self._groups:
                g.resize(len(counts))
            lengths = [s.length for s in self._groups[0].sequences]
            steps = [g.advance(counts, history_first) for g in self._groups]
        except BaseException:  # pages missing, or out of memory while growing
            self._restore(before)
            raise
        for step, (_, allocators) in zip(steps, before, strict=True):
            step.reused = [(pool, i) for pool, i in step.taken if i < allocators[pool].capacity and allocators[pool].count(i)]
            for pool in ("sink", "tail"):  # the last of those that shared a page writes where others, which let go of it in this step, had tokens
                if shared := allocators[pool].shared():
                    taken = {i for name, i in step.taken if name == pool}
                    step.reused += [(pool, i) for i in sorted({w.page_id for w in step.writes if w.pool == pool} & shared - taken)]
        return lengths, steps, before

    def _restore(self, before: list[Snapshot]) -> None:
        for g, was in zip(self._groups, before, strict=True):
            g.restore(was)

    def arrive(self, layer: int, batch_size: int, num_tokens: int) -> Forward:
        """The pass under way, which a layer with so many tokens comes to.

        Raises:
            CacheStateError: the layer has been here already.
            DataError: the pass is of another shape.
        """
        f = self.forward
        assert f is not None
        f.require(layer)
        if (batch_size, num_tokens) != tuple(f.positions.shape):
            raise DataError(f"layer {layer} was given {(batch_size, num_tokens)} (sequences, tokens), but this forward pass has {tuple(f.positions.shape)}")
        return f

    def leave(self, layer: int, f: Forward) -> None:
        """A layer is done; the last one ends the pass.

        Raises:
            DataError: what a layer of the pass found on a GPU.
        """
        f.pending.discard(layer)
        if not f.pending:
            f.findings.settle()
            self.forward = None
            for g, shares in f.shares.items():
                self._groups[g].observe(f.steps[g].history, np.mean(shares, axis=0))

    def abandon(self) -> None:
        """Take back the pass under way, see `PagedCache.abandon`."""
        f = self.forward
        if f is None:
            return
        if f.before is None:
            raise CacheStateError("abandon() after a sequence was freed during the pass; free() the others too, or call reset()")
        if f.device is not None:
            f.device.take_back(set(self._layers) - f.pending)
        else:
            for store, page_id, page in f.overwritten:
                store.page(page_id).copy_(page)
            self._restore(f.before)
            self._saturated[:] = f.saturated
        self.forward = None

    def fail(self) -> None:
        """An error of ours ends the pass: take it back if that can be done."""
        if self.forward is not None and self.forward.before is not None:
            self.abandon()

    def free(self, row: int) -> None:
        """A sequence was freed: the pass goes on for the others, but cannot be taken back; it ends when nobody is left who waits for layers that never came."""
        if self.forward is not None:
            self.forward.counts[row] = 0
            self.forward.before = None
            if not any(self.forward.counts):
                begun, self.forward = self.forward, None
                self._awaited = begun.pending if begun.pending != self._layers else set()

    def reset(self) -> None:
        """All sequences are gone, and with them the pass under way."""
        self.forward, self._awaited = None, set()

    def require_beginning(self, layer: int) -> None:
        """A layer comes: if no pass is under way, it has to be one that a pass begins with. Its pages are waited for.

        Raises:
            CacheStateError: the layer belongs to a pass that ended because all its sequences were freed.
            FileFormatError: its pages were on their way and are damaged.
        """
        try:
            self._arrivals.wait(layer)
        except BaseException:
            self.fail()
            raise
        if self.forward is None and self._awaited:
            if layer in self._awaited:
                raise CacheStateError(
                    f"layer {layer} comes to a forward pass that ended when its last sequence was freed; begin the next with the first layer, or reset()"
                )
            self._awaited = set()

    def require_none(self, what: str) -> None:
        """Anything but a pass begins.

        Raises:
            CacheStateError: in the middle of a pass.
        """
        self._switch.interrupt()
        if self.forward is not None:
            left = counted(len(self.forward.pending), "layer")
            raise CacheStateError(f"{what} in the middle of a forward pass ({left} to go); finish it, or call reset() or abandon()")
