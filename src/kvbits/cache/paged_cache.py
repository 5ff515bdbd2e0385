"""The cache: sequences of tokens on packed pages, for all layers of a model.

A forward pass of T tokens is one step. The first layer that arrives plans it for all layers (page ids only, atomic);
each layer then stores its own bytes and attends:

    T = 1   write the token, then attend to all pages               (decode)
    T > 1   attend to the history, attend to the chunk itself in its own precision, merge, then write      (prefill,
            chunks, speculation)

so a chunk always sees its own tokens exactly and its history as stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import CacheStateError, DataError, PoolFullError, SpecError, UnsupportedError
from ..ops import dispatch
from ..ops.reference.merge import add_sink_logit
from ..ops.types import PageStore
from ..spec import MOST_TOKENS, CacheSpec, whole
from . import blob, capacity, explain, parameters, saved, transfer
from .arrivals import Arrivals
from .blob import Identity
from .device_decode import DeviceDecode
from .explain import Explanation
from .group import GroupState
from .inputs import InputCheck, chosen_pages, lengths_of, listed, require_layer
from .layer_runner import LayerRunner
from .layer_stores import LayerStores
from .passes import Forward, Passes, Undo


class PagedCache:
    """Keys and values of a batch of sequences, stored as a `CacheSpec` says.

    Args:
        spec: scheme and geometry.
        max_tokens, batch_size: fix the capacity to `max_tokens` tokens (a number, or a text like "8k") of each of
            `batch_size` sequences (1 if not given): exactly `spec.nbytes(max_tokens, batch_size)` bytes are allocated
            now and never more, whole pages, which take up to `spec.room(max_tokens)` tokens. Without them the cache
            grows. Cropping inside a closed page wastes the rest of that page; crops of up to `residual_length` tokens
            never do.
        device: where pages live; queries, keys and values must be there too.
        static: calibrated parameters per layer (`Calibration.static`), needed by schemes with `needs_calibration`.
        backend: "auto", or force one ("reference", "cpu", "cuda") for every op that has it.

    Raises:
        UnsupportedError: chunked layers on a GPU.
        CacheError: the device has no memory for a fixed capacity; the message says how much that is.

    Attributes:
        held_groups: page lists of every layer group, out of date while the cache decodes on the device (`groups` are
            not).
        arrivals: pages of a stored prefix that are still on their way: each layer of the next pass waits for its own,
            anything else for all.
        beyond_ids: what passes were given of a prompt besides token ids, since the cache was empty: names of arguments,
            each with True or a tensor [] that says whether it counts.
        built_for: sequences, and tokens of each, of the fixed capacity; None each for a cache that grows.
        made_for: names the model that fills the cache (`kvbits.identity`), kept in files; None if nobody said.
        owner: what says which model that is now (`integrations.identity.Owner`), or None.
        saturated: per layer, elements of keys ("k") and values ("v") that were clamped to their largest code.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        batch_size: int | None = None,
        max_tokens: int | str | None = None,
        device: torch.device | str = "cpu",
        static: list[dict[str, torch.Tensor]] | None = None,
        backend: str = "auto",
    ) -> None:
        self.built_for = capacity.checked(batch_size, max_tokens)
        parameters.check(spec, static)
        self.spec = spec
        self.device = torch.device(device)
        dispatch.check_backend(backend, self.device)
        if self.device.type != "cpu" and any(g.chunked for g in spec.layers):
            raise UnsupportedError(
                "chunked attention (Llama 4) has no kernel on GPUs; use the stock cache there, or the model on the CPU"
            )
        self.backend = backend
        self.static = static or [{} for _ in spec.layers]
        self.saturated = [{"k": 0, "v": 0} for _ in spec.layers]
        self.made_for: str | None = None
        self.beyond_ids: dict[str, Any] = {}
        self.owner: Any = None
        self.held_groups: list[GroupState] = []
        # refuses what cannot be before anything is allocated
        self._stores = LayerStores(spec, self.held_groups, self.static, self.device)
        self.held_groups += capacity.allocate(spec, *self.built_for, self.device)
        self._inputs = InputCheck(spec, self.device)
        self._layers = LayerRunner(self._stores, backend, self.saturated)
        self.arrivals = Arrivals(len(spec.layers), self.device)
        self._passes = Passes(self._stores, backend, self.saturated, self.arrivals)

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        self._passes.heal()
        return len(self.held_groups[0].sequences)

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence, those that left a sliding window included."""
        self._passes.settle()
        return [s.length for s in self.held_groups[0].sequences]

    @property
    def max_tokens(self) -> int | None:
        """Tokens of each sequence that the capacity was fixed for; None for a cache that grows."""
        return self.built_for[1]

    @property
    def groups(self) -> list[GroupState]:
        """Page lists of every layer group.

        A cache that decodes on the device takes them back from there first, which waits for the GPU. FileFormatError
        where pages that were on their way are damaged: `reset()`, or `free()` their sequence.
        """
        self._passes.heal()
        self.arrivals.wait_for_all()
        self._passes.settle()
        return self.held_groups

    @property
    def changes(self) -> int:
        """The number of passes and operations that have changed the sequences so far. It grows by one as soon as one
        has ended well, and never for one that was taken back.
        """
        return self._passes.changes

    def change(self, what: str) -> AbstractContextManager[Undo]:
        """Change `held_groups` as a whole in a with block. An error or an interrupt undoes the change.

        Nothing else of this cache is to be used there.

        Args:
            what: the operation, for messages.

        Raises:
            CacheStateError: a pass is unfinished, or another thread changes them.
        """
        self._passes.require_none(what)
        self.arrivals.wait_for_all()
        self._passes.settle()
        return self._passes.change(what)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for pages, free ones included."""
        self._passes.heal()
        return sum(p.nbytes for g in self.held_groups for p in g.pools.values())

    def bytes_by_kind(self) -> dict[str, int]:
        """Return allocated bytes split into codes, scales, outliers, raw, padding and free. Their sum is `nbytes`."""
        return explain.bytes_by_kind(self.groups)

    def explain(self) -> Explanation:
        """Return a report: the stored format, the backend of each operation, why other backends do not serve, and the
        bytes by kind.

        Returns:
            A dict, which prints as a few lines.
        """
        ops = {str(c) for c in self._layers.choices.values()} | self._passes.switch.explain()
        notes = [f"Python plans each new token, which is slower: {self.led_by_host}"] if self.led_by_host else []
        return explain.facts(self.spec, self.groups, self.built_for, self.saturated, ops, notes)

    # -- forward passes ---------------------------------------------------------------------------------------------

    def begin(self, batch_size: int, num_tokens: int, valid: torch.Tensor | None = None) -> None:
        """Plan a forward pass of `num_tokens` tokens per sequence for all layers.

        Args:
            valid: bool [B, T]; False marks padding, which is neither stored nor seen.

        Raises:
            PoolFullError: pages are missing; nothing changed.
            CacheStateError: the batch size changed, or the pass before was left unfinished.
        """
        for name, n in (("sequences", batch_size), ("tokens", num_tokens)):
            whole(f"{name} of a forward pass", n, -MOST_TOKENS, MOST_TOKENS, error=DataError)
        self._begin(batch_size, num_tokens, valid)

    def _begin(self, batch_size: int, num_tokens: int, valid: torch.Tensor | None) -> None:
        try:
            self._passes.begin(batch_size, num_tokens, valid)
        except PoolFullError as error:
            room = None if self.max_tokens is None else self.spec.room(self.max_tokens)
            raise PoolFullError(
                explain.full(self.built_for, self.groups, batch_size, num_tokens, str(error), room)
            ) from None

    @property
    def in_pass(self) -> bool:
        """True if a forward pass has begun that some layers have not been through yet."""
        return self._passes.forward is not None

    def abandon(self) -> None:
        """Undo a forward pass that some layers have not been through, because the model raised or was interrupted, or a
        `change`.

        Passes that an error of this cache ends are undone without this. Does nothing between passes.

        Raises:
            CacheStateError: a sequence was freed since the pass began, so what was before it is gone.
        """
        self._passes.abandon()

    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
        more: bool = False,
        again: bool = False,
        within: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store this layer's keys and values and attend. The first layer of a pass calls `begin` by itself.

        Args:
            q: [B, T, Hq, D]; k, v: [B, T, H, D], all of the cache's dtype and device.
            scaling: factor on the scores.
            sink_logits: [Hq], one more score per head with value 0 (gpt-oss).
            valid: bool [B, T], see `begin`.
            more: other queries come next for the same keys and values (layers of a model that share them): the layer
                stays in the pass. See `read_again`.
            again: these are such queries.
            within: bool [B, T, T], which tokens of the chunk each one sees, where that is not those before it; of
                tokens before the chunk it sees all (that its window reaches).

        Returns:
            [B, T, Hq, D] in q's dtype; zeros for padding queries.
        """
        try:
            self._inputs.check(layer, q, k, v)
            self._inputs.check_scores(q, scaling, softcap, sink_logits)
            self._inputs.check_queries(layer, q, valid)
            self._passes.require_beginning(layer, again)
            if q.shape[1] == 1 and not self.in_pass and not self.arrivals.under_way:
                self._passes.switch.enter(q, scaling, softcap)
            k, v, f = self._enter(layer, k, v, valid)
            out, lse = self._layers.step(layer, q, k, v, scaling, softcap, f, more, within, sink_logits is not None)
            if not more:
                self._passes.leave(layer, f)
        except BaseException as error:
            self._passes.fail(error)
            raise
        if sink_logits is not None and lse is not None:
            out = add_sink_logit(out, lse, sink_logits)
        return out.to(q.dtype)

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, *, valid: torch.Tensor | None = None, read: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Store keys and values [B, T, H, D] without attending (a prefix computed elsewhere).

        Every layer must follow, as in `step`.

        Args:
            read: return keys and values [tokens, H, D] of each sequence before the new ones, as far as a layer's window
                reaches, in their dtype.
        """
        self._inputs.check(layer, k, k, v)
        try:
            self._passes.require_beginning(layer)
            if read and not self.in_pass:
                self._passes.settle()  # page lists on the host say what is read
            k, v, f = self._enter(layer, k, v, valid)
            past = self._layers.append(layer, k, v, f, read)
            self._passes.leave(layer, f)
        except BaseException as error:
            self._passes.fail(error)
            raise
        return past

    def _enter(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Forward]:
        """Let a layer arrive with checked keys and values: begin the pass if it is the first.

        A device that leads the pass looks at padding and at numbers itself.
        """
        if self._passes.led_by_device(k.shape[1]):
            if self._passes.forward is None:
                self._begin(k.shape[0], 1, valid)
            return k, v, self._passes.arrive(layer, k.shape[0], 1)
        if valid is not None:
            valid = torch.as_tensor(valid, device=k.device).bool()
        if self._passes.forward is not None:
            valid = self._passes.forward.mask(layer, valid)
        k, v = self._inputs.clean(layer, k, v, valid)
        if self._passes.forward is None:
            self._begin(k.shape[0], k.shape[1], valid)
        f = self._passes.arrive(layer, k.shape[0], k.shape[1])
        self._inputs.ask(layer, k, v, f.findings)
        return k, v, f

    # -- decoding on the device -------------------------------------------------------------------------------------

    @property
    def decoding(self) -> DeviceDecode | None:
        """The object that decodes single tokens on the device, while it does.

        A step captured under one cannot be replayed under another.
        """
        return self._passes.switch.decoding

    @property
    def led_by_host(self) -> str | None:
        """The reason why the last single token was not decoded on the device, or None."""
        return self._passes.switch.led_by_host

    def cannot_decode_on_device(self, num_q_heads: int, dtype: torch.dtype) -> str | None:
        """Return why the host runs single-token steps, whatever the sequences hold, or None."""
        return self._passes.switch.refuses(num_q_heads, dtype)

    def read_again(self) -> None:
        """Announce steps with `more`. The host then runs single tokens, since a step on the device stores and attends
        once.
        """
        self._passes.switch.host_only = "layers of this model share keys and values"

    def expect_tokens(self) -> None:
        """Take the next single token for the beginning of many. Decoding on the device then begins with it, and not
        with the third in a row.
        """
        self._passes.switch.expect_tokens()

    def count_replays(self, steps: int) -> None:
        """Count `steps` replays of a captured decode step. Call it before the replays, because the host cannot see
        them.

        Raises:
            PoolFullError: the capacity has no room for so many tokens more. Nothing changed; do not replay.
            CacheStateError: page lists were taken back from the device since the step was captured (by anything but
                decoding): capture again.
            DataError: what closing found some tokens ago. Nothing changed.
        """
        if self.in_pass and self.decoding is not None:
            self._passes.require_none("replaying a step")
        self._passes.switch.count_replays(steps)

    def store_of(self, layer: int, pool: str) -> PageStore:
        """Return a layer's pages of one pool."""
        self.arrivals.wait(layer)
        return self._stores.of_layer(layer, pool)

    def __getstate__(self) -> dict[str, Any]:
        self._passes.require_none("copying or pickling a cache")
        self.arrivals.wait_for_all()
        self._passes.settle()
        return self.__dict__

    # -- sequences --------------------------------------------------------------------------------------------------

    def _rows(self, rows: Rows[int]) -> list[int]:
        checked = [whole("sequence", r, -MOST_TOKENS, MOST_TOKENS, error=DataError) for r in listed("sequences", rows)]
        if bad := [r for r in checked if not 0 <= r < self.batch_size]:
            raise DataError(f"sequence {bad[0]} does not exist; the cache holds {self.batch_size}")
        return checked

    def crop(self, lengths: Rows[int] | int) -> None:
        """Keep the first `lengths[b]` tokens of each sequence (one number: of all).

        A closed page that is cut keeps its codes and shows fewer tokens. Ends a `keep_past`.

        Raises:
            DataError: a length below 0 or above the sequence's.
            CacheStateError: a sliding window has already released tokens that would be needed. Nothing changed.
        """
        self._passes.require_none("crop")
        for row, n in enumerate(wanted := lengths_of(lengths, self.seq_lens)):
            for g in self.groups:
                g.check_crop(row, n)
        with self.change("crop()") as undo:
            for g in self.held_groups:
                g.keep_past = False
                for row, n in enumerate(wanted):
                    g.crop(row, n)
            self._layers.recode([g.settle() for g in self.held_groups], undo)

    def keep_past(self) -> None:
        """Prepare for tokens that may be removed again, until the next `crop`.

        Sliding-window layers keep everything. A fixed capacity has no room for that, so prompts longer than their
        window need a cache that grows. Tiers keep the pages that newer tokens push out. In a cache without a fixed
        capacity, up to a page of new tokens closes nothing. Removing that many leaves exactly what was there before.
        """
        with self.change("keep_past()"):
            for g in self.held_groups:
                g.speculate()

    def set_tiers(self, row: int, tiers: Rows[int], *, residual_length: int | None = None) -> None:
        """Give one sequence tiers of its own sizes, from now on.

        Args:
            tiers: tokens of each tier of the scheme, youngest first, in whole pages. Smaller: pages leave their tier at
                once. Larger: pages that left a tier do not return; newer ones stay longer.
            residual_length: newest tokens that stay raw; None leaves it.

        Raises:
            SpecError: invalid sizes, or a number of tiers that differs from the scheme's.
            PoolFullError: a fixed capacity has no room for the pages that leave a tier. Nothing changed.
        """
        self._passes.require_none("set_tiers")
        (row,) = self._rows([row])
        scheme, tiers = self.spec.scheme, listed("tiers", tiers, error=SpecError)
        if len(tiers) != len(scheme.tiers):
            raise SpecError(
                f"{len(tiers)} tier sizes for a scheme of {len(scheme.tiers)} tiers; pass one number of tokens for each"
            )
        wanted = dataclasses.replace(
            scheme,
            tiers=tuple(dataclasses.replace(t, num_tokens=n) for t, n in zip(scheme.tiers, tiers, strict=True)),
            residual_length=scheme.residual_length if residual_length is None else residual_length,
        )
        with self.change("set_tiers()") as undo:
            steps = []
            for g in self.held_groups:
                sized = dataclasses.replace(g.group, tiers=wanted.tiers if g.group.tiers else ())
                length = g.sequences[row].residual_length if residual_length is None else residual_length
                steps.append(g.set_tiers(row, list(sized.boundaries), length))
            self._layers.recode(steps, undo)

    def closed_pages(self, row: int) -> list[list[int]]:
        """Return, per layer group, the positions of the first tokens of the closed pages that a sequence holds."""
        (row,) = self._rows([row])
        found = [
            (g.sequences[row].closed_starts(g.group.num_sink_tokens), g.sequences[row].closed) for g in self.groups
        ]
        return [[at for at, page in zip(starts, pages, strict=True) if page is not None] for starts, pages in found]

    def drop_pages(self, row: int, starts: Rows[Rows[int]]) -> None:
        """Evict closed pages of a sequence. They return to their pool, and later queries do not see their tokens. All
        other tokens keep their positions.

        Sinks and raw tokens stay. `seq_lens` still counts the tokens; forks of the sequence keep their own.

        Args:
            starts: per layer group, some of `closed_pages(row)`.

        Raises:
            DataError: not a list per group, or positions where no closed page begins. Nothing changed.
            CacheStateError: a pass is unfinished, or tokens are speculative.
        """
        self._passes.require_none("drop_pages")
        (row,) = self._rows([row])
        chosen = chosen_pages(starts, self.closed_pages(row), row)
        if any(g.keep_past for g in self.groups):
            raise CacheStateError("drop_pages() while tokens are speculative; crop() to the present length first")
        with self.change("drop_pages()"):
            for state, wanted in zip(self.held_groups, chosen, strict=True):
                state.drop(row, wanted)

    def select(self, rows: Rows[int]) -> None:
        """Make sequence i the old sequence rows[i].

        Repeats share pages until one of them writes (fork, beam reorder, repeat); sequences not named are freed.
        """
        self._passes.require_none("select")
        chosen = self._rows(rows)
        if not chosen:
            raise DataError("select() of no sequence; use reset() to empty the cache")
        with self.change("select()"):
            for g in self.held_groups:
                g.select(chosen)

    def fork(self, row: int) -> int:
        """Add a copy of a sequence that shares its pages; returns the new row."""
        self.select([*range(self.batch_size), *self._rows([row])])
        return self.batch_size - 1

    def repeat(self, n: int) -> None:
        """Repeat every sequence n times, copies next to each other."""
        n = whole("repeat", n, 1, MOST_TOKENS, "use reset() to empty the cache", error=DataError)
        self.select([row for row in range(self.batch_size) for _ in range(n)])

    def free(self, row: int) -> None:
        """Empty a sequence; its row stays, with length 0."""
        (row,) = self._rows([row])
        self.arrivals.forget(row)
        self.arrivals.wait_for_all()
        self._passes.settle()
        self._passes.free(row)

    def reset(self) -> None:
        """Forget all sequences. Allocated pages stay, free."""
        self.arrivals.forget()
        self._passes.reset()
        self.beyond_ids.clear()
        if self.owner is not None:
            self.owner.strayed = False

    def swap_out(self, row: int) -> transfer.SwappedSequence:
        """Move a sequence to host memory and free its pages; its row stays, empty."""
        self._passes.require_none("swap_out")
        (row,) = self._rows([row])
        with self.change("swap_out()"):
            return transfer.swap_out(self.held_groups, row, self.identity, tuple(self.named_beyond_ids))

    def swap_in(self, row: int, swapped: transfer.SwappedSequence) -> None:
        """Bring a sequence back, byte for byte, into an empty row of this or an equal cache.

        Raises:
            DataError: the row does not exist, or the sequence is of another spec, calibration or model.
            CacheStateError: the row holds tokens.
            PoolFullError: pages are missing. Nothing changed.
        """
        self._passes.require_none("swap_in")
        (row,) = self._rows([row])
        with self.change("swap_in()"):
            transfer.swap_in(self.held_groups, row, swapped, self.identity)
        self.beyond_ids |= dict.fromkeys(swapped.beyond_ids, True)

    def save(self, path: str | Path) -> None:
        """Write all sequences to a file, whole or not at all (see `cache.saved`).

        Raises:
            SpecError: a directory is there, or none that the file could be in.
            CacheStateError: a pass is unfinished, or the model changed since the cache was made.
        """
        self._passes.require_none("save")
        self.require_same_model()
        facts = self.spec, self.static, self.built_for, self.saturated, self.made_for
        saved.save(saved.Contents(*facts, self.groups, self.named_beyond_ids), path)

    @cached_property
    def _unnamed_identity(self) -> Identity:
        """Return it without a model; spec and calibration are what they are for as long as the cache lives."""
        return Identity.of(self.spec, None, blob.calibration_id(self.static))

    @property
    def identity(self) -> Identity:
        """Return the identity of the model whose pages these are, as blobs state it."""
        return self._unnamed_identity.of_model(self.made_for)

    @property
    def named_beyond_ids(self) -> list[str]:
        """The names in `beyond_ids` that count; waits for a GPU that has not answered yet."""
        return [name for name, counts in self.beyond_ids.items() if bool(counts)]

    def require_same_model(self) -> None:
        """Refuse to write pages if a model that differs from `made_for` may have filled them.

        Raises:
            CacheStateError: the model's weights, adapters or settings changed since the cache was made.
        """
        if self.owner is None or self.made_for is None:
            return
        if self.owner.strayed:
            raise CacheStateError(
                "a pass filled this cache that was not that of the model it was made for: of another model, or of this"
                " one with other adapters, hooks or weights (see kvbits.identity); reset() it, or make a cache for each"
            )
        now = self.owner.now()
        if now is not None and now != self.made_for:
            raise CacheStateError(
                "the model changed since this cache was made: its weights, adapters or settings differ (identity"
                f" {now[:12]}, {str(self.made_for)[:12]} then; see kvbits.identity), so nobody knows which of them made"
                " these keys; put back what was then, fill a new cache, or name what a hook holds by made_for=.."
            )

    def watch(self, module: Any, whole: bool) -> None:
        """Note a pass of a model that `made_for` does not name (`integrations.identity.Owner.watch`)."""
        if self.owner is not None and self.made_for is not None and not self.owner.strayed:
            self.owner.strayed = not self.owner.watch(module, self.made_for, whole)

    def require_named_model(self) -> None:
        """Refuse pages from elsewhere if the model that would continue them differs from `made_for`.

        Raises:
            CacheStateError: it changed since the cache was made.
        """
        if self.owner is not None and self.made_for is not None and self.owner.changed(self.made_for):
            self.require_same_model()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        spec: CacheSpec | None = None,
        grow: bool = False,
        shard: tuple[int, int] = (0, 1),
    ) -> PagedCache:
        """Build the cache that `save` wrote, with equal bytes, sharing and capacity, or no capacity with `grow`.

        `spec` refuses a file of another spec. `shard` (rank, ranks) reads that part of every layer's kv heads.

        Raises:
            FileFormatError: the file is truncated, corrupt, foreign, of another version or of another spec; the message
                says which.
        """
        with saved.opened(path, device, spec, shard) as file:
            cache = cls(file.spec, device=device, static=file.static, backend=backend)
            file.fill(cache.held_groups, grow)
            cache.built_for = (None, None) if grow else file.built_for
            cache.saturated[:] = file.saturated
            cache.made_for, cache.beyond_ids = file.made_for, dict.fromkeys(file.beyond_ids, True)
        return cache

    def dequantize(self, layer: int, row: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the keys and values [tokens, H, D] that a sequence holds, as attention sees them (for inspection and
        tests).

        Tokens of dropped pages, and those that left a sliding window, are missing; where heads are stored in different
        ways, so is what not all of them hold.
        """
        (row,) = self._rows([row])
        require_layer(self.spec, layer)
        self.arrivals.wait(layer)
        self._passes.settle()
        return self._stores.dequantize(layer, row, dtype)
