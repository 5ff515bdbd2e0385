"""Forward passes: one at a time, planned for all layers before a byte moves, and taken back whole when one fails.

And every other change to page lists: whole, or not at all.

What is under way is one value (`_Now`), so a single assignment begins, ends or takes back a pass or an operation,
wherever an interrupt comes. What an interrupt left half done is undone by whatever uses the cache next
(`Passes.heal`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import CacheStateError, DataError, counted
from ..later import Findings, upload
from . import explain
from .arrivals import Arrivals
from .decode_switch import DecodeSwitch
from .device_decode import DeviceDecode
from .group import GroupState, Snapshot
from .layer_stores import LayerStores
from .plans import KeptPlan
from .step import Slots, Step, Write, slots_of

_NO_POSITIONS = torch.empty(0, 1, dtype=torch.int64, device="cpu")


class Undo:
    """A cache as it was when this was made: page lists, who holds which page, and bytes that were written over.

    Whoever changes page lists keeps one while it does (`Passes.change`). Taking back can be interrupted too, and done
    again from its beginning.

    Args:
        what: the operation, for messages.
        saturated: of every layer, what is counted in passes.

    Attributes:
        before: snapshots of the groups.
        overwritten: pages that held something and were written over since, with the bytes that they had.
        first: called before anything is undone: ends what still writes into pages.
    """

    def __init__(self, what: str, groups: list[GroupState], saturated: list[dict[str, int]]) -> None:
        self.what, self.thread = what, threading.get_ident()
        self.before = [g.snapshot() for g in groups]
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.first: Callable[[], None] | None = None
        self._groups, self._counted = groups, saturated
        self._saturated = [dict(s) for s in saturated]

    def take_back(self) -> None:
        """Put everything back."""
        if self.first is not None:
            self.first()
        for page, was in self.overwritten:
            page.copy_(was)
        for g, before in zip(self._groups, self.before, strict=True):
            g.restore(before)
        self._counted[:] = [dict(s) for s in self._saturated]


@dataclass
class Forward:
    """One forward pass under way; dropped when the last layer has been here."""

    shape: tuple[int, int]  # (sequences, tokens of each) = (B, T)
    counts: list[int]
    valid: torch.Tensor | None  # bool [B, T] on the host, None for all
    positions: torch.Tensor  # int64 [B, T], -1 for padding; only a device that leads the pass knows its own
    steps: list[Step]
    history_first: bool
    pending: set[int]  # layers that have not been here yet, or come again
    # changes to the cache before the pass; a sequence that is freed during the pass is one more, and then nothing can
    # be taken back
    began: int
    undo: Undo
    reading: set[int] = field(default_factory=set)  # layers that have been here and come again, with other queries
    plans: dict[Any, KeptPlan] = field(default_factory=dict)  # of attention, told what this pass reads
    slots: dict[int, dict[str, Slots]] = field(default_factory=dict)  # per group and pool, for all its layers
    device: DeviceDecode | None = None  # what carries the pass out without the host, if it does
    findings: Findings = field(default_factory=Findings)  # of a GPU, looked at when the last layer leaves
    _real: list[torch.Tensor] | None = None
    _ends: dict[int, torch.Tensor] = field(default_factory=dict)

    def require(self, layer: int) -> None:
        """Refuse a layer that has been here already.

        Raises:
            CacheStateError: with the way out.
        """
        self.require_storable()
        if layer not in self.pending:
            raise CacheStateError(
                f"layer {layer} attended twice in one forward pass while {counted(len(self.pending), 'layer')} did not"
                " come; call abandon() to take the pass back, or reset()"
            )

    def require_storable(self) -> None:
        """Refuse anything but its end to a pass that failed in its last layer and was not taken back.

        Raises:
            CacheStateError: with the way out.
        """
        if not self.pending:
            raise CacheStateError(
                "the last forward pass failed in its last layer and was not taken back; call abandon(), or, if a"
                " sequence was freed in it, reset() or free() the others"
            )

    def mask(self, layer: int, valid: torch.Tensor | None) -> torch.Tensor | None:
        """Return the pass's own mask, which padding is cleaned by.

        On a GPU a layer's is taken for it, since looking would wait.

        Raises:
            DataError: the layer brings another.
        """
        if valid is None or valid.device.type != "cpu" or tuple(valid.shape) != self.shape:
            return self.valid if valid is None else valid
        if not torch.equal(valid, torch.ones_like(valid) if self.valid is None else self.valid):
            raise DataError(
                f"layer {layer} brings another mask of real tokens than this forward pass began with; give all layers"
                " the same, or none"
            )
        return valid

    def ends(self, chunk: int) -> torch.Tensor:
        """Return the last position of the chunk of positions that each token is in, -1 for padding.

        The newest `chunk` tokens before it are those of the chunk.
        """
        if chunk not in self._ends:
            self._ends[chunk] = torch.where(self.positions < 0, -1, self.positions // chunk * chunk + chunk - 1)
        return self._ends[chunk]

    def real_tokens(self, device: torch.device) -> list[torch.Tensor]:
        """Return the real tokens of each row of a batch with padding: int64 [n] on the device, the same for
        all layers.
        """
        assert self.valid is not None
        if self._real is None:
            self._real = [upload(x.nonzero().squeeze(1), device) for x in self.valid]
        return self._real

    def slots_of(self, state: GroupState, index: int, device: torch.device) -> dict[str, Slots]:
        """Return, by pool, where the tokens of a group go that are stored as they come.

        Args:
            index: of the group.
        """
        if index not in self.slots:
            writes: dict[str, list[Write]] = {}
            for w in self.steps[index].writes:
                writes.setdefault(w.pool, []).append(w)
            columns = None if self.valid is None else (~self.valid).int().argsort(dim=1, stable=True).numpy()
            self.slots[index] = {
                pool: slots_of(found, state.pools[pool].layout, columns, self.shape, device)
                for pool, found in writes.items()
            }
        return self.slots[index]


class _Now(NamedTuple):
    """The pass and the operation under way.

    Attributes:
        changes: passes and operations that ended well.
        forward: the pass that some layers have not been through yet.
        undo: of the operation under way, planning a pass included; left behind, it has been interrupted.
    """

    changes: int = 0
    forward: Forward | None = None
    undo: Undo | None = None


class Passes:
    """The forward pass of a cache that is under way, if one is.

    Args:
        stores: the pages of all layers, which every pass goes through.
        backend: "auto", or the one that every op was forced to.
        saturated: of every layer, what its passes count; put back when one is undone.
        arrivals: pages that a layer may have to wait for.

    Attributes:
        switch: leads single tokens on the device, where that can be done.
    """

    def __init__(
        self,
        stores: LayerStores,
        backend: str,
        saturated: list[dict[str, int]],
        arrivals: Arrivals,
    ) -> None:
        self._groups, self._layers, self._saturated = stores.groups, frozenset(stores.places), saturated
        self._stores = stores
        self.switch = DecodeSwitch(stores, backend, saturated)
        self._arrivals = arrivals
        self._now = _Now()
        self._awaited: set[int] = set()  # layers that a pass which lost all its sequences was waiting for

    @property
    def forward(self) -> Forward | None:
        """The pass that some layers have not been through yet."""
        return self._now.forward

    @property
    def changes(self) -> int:
        """The number of passes and operations that have ended well."""
        return self._now.changes

    @contextmanager
    def change(self, what: str, *, ends_pass: bool = False) -> Iterator[Undo]:
        """Carry out what happens inside whole or not at all. An error or an interrupt takes it back at once or, where
        that is interrupted, before the next use.

        Args:
            what: the operation, for messages.
            ends_pass: the pass under way is over with it.
        """
        self.heal()
        now, undo = self._now, Undo(what, self._groups, self._saturated)
        self._now = now._replace(undo=undo)
        try:
            yield undo
        except BaseException:
            self.heal()
            raise
        if self._now.undo is undo:
            self._now = _Now(now.changes + 1, None if ends_pass else now.forward, None)

    def heal(self) -> None:
        """Take back an operation that has begun and has not ended.

        Raises:
            CacheStateError: it is another thread's.
        """
        if (undo := self._now.undo) is None:
            return
        if undo.thread != threading.get_ident() and any(t.ident == undo.thread for t in threading.enumerate()):
            raise CacheStateError(
                f"another thread is in the middle of {undo.what}; use a cache from one thread at a time, and a"
                " copy.deepcopy of it in each other"
            )
        undo.take_back()
        self._stores.plans.clear()  # they hold on to slabs that went
        self._now = self._now._replace(undo=None)

    def settle(self) -> None:
        """Have the page lists on the host, whole: after an interrupt, and taken back from the device, which waits for
        the GPU.
        """
        self.heal()
        self.switch.settle()

    def led_by_device(self, num_tokens: int) -> bool:
        """Return whether the device leads the pass that tokens come to: the one under way, or the one they begin."""
        if self.forward is not None:
            return self.forward.device is not None
        return num_tokens == 1 and not self._arrivals.under_way and self.switch.leads()

    def begin(self, batch_size: int, num_tokens: int, valid: torch.Tensor | None) -> None:
        """Plan a pass, see `PagedCache.begin`.

        Raises:
            PoolFullError: pages are missing; nothing changed.
        """
        self.heal()
        self.switch.raise_found()
        self._refuse(batch_size, num_tokens)
        if num_tokens == 1 and (device := self.switch.begin(valid)) is not None:
            undo = Undo("a token", [], self._saturated)
            f = Forward(
                (batch_size, 1),
                [1] * batch_size,
                None,
                _NO_POSITIONS,
                [],
                False,
                set(self._layers),
                self.changes,
                undo,
                device=device,
            )
            self._now = _Now(self.changes, f, None)
            return
        self.switch.host_begins(num_tokens)
        if valid is not None:
            valid = valid.to("cpu", torch.bool)
            if valid.shape != (batch_size, num_tokens):
                raise DataError(f"valid has shape {tuple(valid.shape)}, expected {(batch_size, num_tokens)}")
            valid = None if bool(valid.all()) else valid
        counts = [num_tokens] * batch_size if valid is None else valid.sum(1).tolist()
        self.switch.settle()
        ranks = (
            torch.arange(1, num_tokens + 1, device="cpu").expand(batch_size, -1) if valid is None else valid.cumsum(1)
        )
        with self.change("planning a forward pass") as undo:
            lengths, steps = self._advance(counts, num_tokens > 1, undo.before)
            positions = torch.tensor(lengths, device="cpu")[:, None] + ranks - 1
            if valid is not None:
                positions = positions.masked_fill(~valid, -1)
            f = Forward(
                (batch_size, num_tokens),
                counts,
                valid,
                positions,
                steps,
                num_tokens > 1,
                set(self._layers),
                self.changes,
                undo,
            )
            self._now = _Now(self.changes, f, None)

    def _refuse(self, batch_size: int, num_tokens: int) -> None:
        if self.forward is not None:
            self.forward.require_storable()
            missing = sorted(self.forward.pending)
            raise CacheStateError(
                f"the last forward pass never reached layer {missing[0]} ({counted(len(missing), 'layer')} missing), so"
                " their pages hold nothing; call abandon() to take the pass back, reset(), or free() the sequences"
            )
        if num_tokens < 1 or batch_size < 1:
            raise DataError(
                f"a forward pass of {counted(batch_size, 'sequence')} x {counted(num_tokens, 'token')} is empty; pass"
                " at least one token"
            )
        held = len(self._groups[0].sequences)
        if held and batch_size != held:
            raise CacheStateError(
                f"the cache holds {counted(held, 'sequence')} but was given {batch_size};"
                f" {explain.other_batch(held, batch_size)}"
            )

    def _advance(self, counts: list[int], history_first: bool, before: list[Snapshot]) -> tuple[list[int], list[Step]]:
        """Return lengths before, and steps of the groups."""
        for g in self._groups:
            g.resize(len(counts))
        lengths = [s.length for s in self._groups[0].sequences]
        steps = [g.advance(counts, history_first) for g in self._groups]
        for step, was in zip(steps, before, strict=True):
            allocators = {name: pool.allocator for name, pool in was.pools.items()}
            step.reused = was.reused(step)
            # the last of those that shared a page writes where others, which let go of it in this step, had tokens
            for pool in ("sink", "tail"):
                if shared := allocators[pool].shared():
                    taken = {i for name, i in step.taken if name == pool}
                    step.reused += [
                        (pool, i) for i in sorted({w.page_id for w in step.writes if w.pool == pool} & shared - taken)
                    ]
        return lengths, steps

    def arrive(self, layer: int, batch_size: int, num_tokens: int) -> Forward:
        """Return the pass under way, which a layer with so many tokens comes to.

        Raises:
            CacheStateError: the layer has been here already.
            DataError: the pass is of another shape.
        """
        f = self.forward
        assert f is not None
        f.require(layer)
        if (batch_size, num_tokens) != f.shape:
            raise DataError(
                f"layer {layer} was given {(batch_size, num_tokens)} (sequences, tokens), but this forward pass has"
                f" {f.shape}"
            )
        return f

    def leave(self, layer: int, f: Forward) -> None:
        """Note that a layer is done; the last one ends the pass.

        Raises:
            DataError: what a layer of the pass found on a GPU.
        """
        f.pending.discard(layer)
        if not f.pending:
            f.findings.settle()
            self._now = _Now(self.changes + 1, None, None)

    def _stands(self, f: Forward) -> bool:
        """Return whether what was before a pass can be had back."""
        return f.began == self.changes

    def abandon(self) -> None:
        """Take back the pass under way, see `PagedCache.abandon`."""
        self.heal()
        f = self.forward
        if f is None:
            return
        if not self._stands(f):
            raise CacheStateError(
                "abandon() after a sequence was freed during the pass; free() the others too, or call reset()"
            )
        if f.device is not None:
            f.device.take_back(set(self._layers) - f.pending)
        self._now = _Now(self.changes, None, f.undo)  # from here on it is undone, here or by the next use
        self.heal()

    def fail(self, error: BaseException) -> None:
        """End the pass after an error, unless it only says what cannot be done now: take it back if that can
        be done.
        """
        if self.forward is not None and not isinstance(error, CacheStateError) and self._stands(self.forward):
            self.abandon()

    def free(self, row: int) -> None:
        """Empty a sequence. A pass under way continues for the others, but cannot be undone; it ends when nobody is
        left who waits for its layers.
        """
        with self.change("free()"):
            for g in self._groups:
                g.free(row)
        if (f := self.forward) is not None:
            f.counts[row] = 0
            if not any(f.counts):
                self._now = _Now(self.changes, None, None)
                self._awaited = f.pending if f.pending != self._layers else set()

    def reset(self) -> None:
        """Forget all sequences, and with them the pass under way."""
        self.switch.settle()
        with self.change("reset()", ends_pass=True):
            for g in self._groups:
                for row in range(len(g.sequences)):
                    g.free(row)
                g.sequences = []
                g.settle()
            self._saturated[:] = [{"k": 0, "v": 0} for _ in self._saturated]
        self._awaited = set()
        self.switch.forget_found()

    def require_beginning(self, layer: int, again: bool = False) -> None:
        """Require that a layer may come: if no pass is under way, it has to be one that a pass begins with. Its pages
        are waited for.

        Args:
            again: with other queries for what it brought in this pass.

        Raises:
            CacheStateError: the layer belongs to a pass that ended because all its sequences were freed, or it brought
                something in a pass that broke off.
            FileFormatError: its pages were on their way and are damaged.
        """
        self.heal()
        if self._arrivals.under_way:
            try:
                self._arrivals.wait(layer)
            except BaseException:
                if self.forward is not None and self._stands(self.forward):
                    self.abandon()
                raise
        if again != (self.forward is not None and layer in self.forward.reading):
            raise CacheStateError(
                f"layer {layer} comes {'again' if again else 'anew'} to a forward pass that broke off before its last"
                " layer; call abandon() to take that pass back, or reset(), and call the model again"
            )
        if self.forward is None and self._awaited:
            if layer in self._awaited:
                raise CacheStateError(
                    f"layer {layer} comes to a forward pass that ended when its last sequence was freed; begin the next"
                    " with the first layer, or reset()"
                )
            self._awaited = set()

    def require_none(self, what: str) -> None:
        """Take back what an interrupt left half done, since anything but a pass begins.

        Raises:
            CacheStateError: in the middle of a pass.
        """
        self.heal()
        self.switch.interrupt()
        if self.forward is not None:
            left = counted(len(self.forward.pending), "layer")
            raise CacheStateError(
                f"{what} in the middle of a forward pass ({left} to go); finish it, or call reset() or abandon()"
            )
