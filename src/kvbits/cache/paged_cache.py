"""The cache: sequences of tokens on packed pages, for all layers of a model.

A forward pass of T tokens is one step. The first layer that arrives plans it for all layers (page ids only, atomic); each layer then
stores its own bytes and attends:

    T = 1   write the token, then attend to all pages               (decode)
    T > 1   attend to the history, attend to the chunk itself in its own precision, merge, then write      (prefill, chunks, speculation)

so a chunk always sees its own tokens exactly and its history as stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CacheStateError, DataError, PoolFullError, SpecError, counted
from ..ops import dispatch
from ..ops.break_even import small_on_gpu
from ..ops.paged_attention import PagedAttention, plan
from ..ops.reference.merge import add_sink_logit
from ..ops.types import PageStore
from ..quant.qparams import TORCH_DTYPES, require_finite
from ..spec import CacheSpec, PageLayout
from . import device_decode, parameters, serialize, swap
from .allocator import Allocator
from .layer_steps import Forward, LayerSteps, Place
from .pool import Pool
from .state import GroupState, Sequence

LOOK_EVERY = 16
"""Tokens between two looks at what pages that closed on the device found."""
MOST_CHECKED = 4096
_NO_POSITIONS = torch.empty(0, 1, dtype=torch.int64)


class PagedCache(LayerSteps):
    """Keys and values of a batch of sequences, stored as a `CacheSpec` says.

    Args:
        spec: scheme and geometry.
        max_tokens, batch_size: fix the capacity to `max_tokens` tokens of each of `batch_size` sequences (1 if not given): exactly
            `spec.nbytes(max_tokens, batch_size)` bytes are allocated now and never more. Without them the cache grows.
        device: where pages live; queries, keys and values must be there too.
        static: calibrated parameters per layer (`Calibration.static`), needed by schemes with static scales or codebooks.
        nonfinite: "refuse" NaN and infinity in keys and values with a DataError (single tokens on a GPU: when their page closes, so not where nothing
            closes), or "clamp" them (NaN to 0, infinity to the largest finite value).
        backend: "auto", or force one ("reference", "cpu", "cuda", "triton") for every op that has it.

    Attributes:
        led_by_host: why the last single token was not decoded on the device, or None.
        made_for: fingerprint of the model that fills the cache, kept in files; None if nobody said.
        watching: note which pages attention uses (`mass`), also for schemes that do not need it. Costs a look at the newest queries of every chunk, and
            at one in `layer_steps.OBSERVE_EVERY` tokens.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        device: torch.device | str = "cpu",
        static: list[dict[str, torch.Tensor]] | None = None,
        nonfinite: str = "refuse",
        backend: str = "auto",
    ) -> None:
        if max_tokens is None and batch_size is not None:
            raise SpecError(f"batch_size={batch_size} fixes nothing without max_tokens, the tokens of each sequence; give both, or neither: the cache grows")
        if max_tokens is not None and batch_size is None:
            batch_size = 1
        if nonfinite not in ("refuse", "clamp"):
            raise SpecError(f"nonfinite={nonfinite!r} is not 'refuse' or 'clamp'")
        for name, n in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
                raise SpecError(f"{name}={n!r} must be a whole number of at least 1")
        parameters.check(spec, static)
        dispatch.check_backend(backend)
        self.spec = spec
        self.device = torch.device(device)
        self.nonfinite = nonfinite
        self.backend = backend
        self.watching = False
        self.static = static or [{} for _ in spec.layers]
        self._shared = parameters.shared(spec, self.static, self.device)
        self._orders = parameters.orders(spec, self.device)
        self._turns = parameters.turns(spec, self.device)
        self.saturated = [{"k": 0, "v": 0} for _ in spec.layers]
        self._where: dict[int, tuple[Place, ...]] = {}
        self.held_groups: list[GroupState] = []
        for g, group in enumerate(spec.groups):
            wanted = None if max_tokens is None or batch_size is None else {p: n * batch_size for p, n in group.pages_for(max_tokens).items()}
            pools = {name: Pool(group, name, None if wanted is None else wanted[name], self.device) for name in group.pools}
            self.held_groups.append(GroupState(group, pools))
            for i, (layer, heads) in enumerate(zip(group.layers, group.heads, strict=True)):
                whole = len(heads) == spec.layers[layer].num_kv_heads
                self._where[layer] = (*self._where.get(layer, ()), Place(layer, g, i, None if whole else heads))
        self._forward: Forward | None = None
        self._capacity = (batch_size, max_tokens)
        self._choices: dict[Any, dispatch.Choice] = {}
        self._decode: device_decode.DeviceDecode | None = None
        self._decode_refusals: dict[Any, str | None] = {}
        self.led_by_host: str | None = None
        self.made_for: str | None = None
        self._single_passes = 0  # passes of one token since anything else was done
        self._plans: dict[Any, PagedAttention] = {}
        self._checked: set[tuple[Any, ...]] = set()  # what `_check` has let pass
        self._found: DataError | None = None  # what closing found on the device, not yet raised

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self.held_groups[0].sequences)

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence, those that left a sliding window included."""
        return [s.length for s in self.groups[0].sequences]

    @property
    def max_tokens(self) -> int | None:
        """Tokens of each sequence that the capacity was fixed for; None for a cache that grows."""
        return self._capacity[1]

    @property
    def groups(self) -> list[GroupState]:
        """Page lists of every layer group. A cache that decodes on the device takes them back from there first, which waits for the GPU."""
        self._settle()
        return self.held_groups

    @property
    def has_head_overrides(self) -> bool:
        return any(len(places) > 1 for places in self._where.values())

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for pages, free ones included."""
        return sum(p.nbytes for g in self.held_groups for p in g.pools.values())

    def bytes_by_kind(self) -> dict[str, int]:
        """Allocated bytes split into codes, scales, outliers, raw, padding and free. Their sum is `nbytes`."""
        kinds = dict.fromkeys(("codes", "scales", "outliers", "raw", "padding", "free"), 0)
        for g in self.groups:
            for pool in g.pools.values():
                for kind, n in pool.layout.bytes_by_kind().items():
                    kinds[kind] += n * pool.num_layers * pool.allocator.num_used
                kinds["free"] += pool.nbytes - pool.block_bytes * pool.allocator.num_used
        return kinds

    def explain(self) -> dict[str, Any]:
        """What is stored, who serves each op and why the others do not, and where the bytes are."""
        return {
            "scheme": self.spec.scheme.name,
            "bits_per_element": round(self.spec.bits_per_element, 4),
            "layers": [
                {
                    "layers": list(g.group.layers),
                    "kv_heads": [list(heads) for heads in g.group.heads] if self.has_head_overrides else "all",
                    "keys": repr(g.group.key),
                    "values": repr(g.group.value),
                    "sliding_window": g.group.geometry.sliding_window,
                    "pages": {name: {"used": p.allocator.num_used, "allocated": p.allocator.capacity} for name, p in g.pools.items()},
                }
                for g in self.groups
            ],
            "ops": sorted({str(c) for c in self._choices.values()} | {p.explain() for p in self._plans.values()}),
            "notes": self._notes(),
            "bytes": self.bytes_by_kind() | {"total": self.nbytes},
            "saturated": {i: s for i, s in enumerate(self.saturated) if any(s.values())},
        }

    def _notes(self) -> list[str]:
        """Why tokens are slower than they could be, and where another cache would serve better at the present size."""
        notes = [f"single tokens are led by the host: {self.led_by_host}"] if self.led_by_host else []
        tokens = max(self.seq_lens, default=0)
        if self.device.type != "cuda" or not tokens:
            return notes
        sizes = {(min(tokens, g.group.geometry.sliding_window or tokens), g.group.geometry.num_kv_heads, g.group.geometry.head_dim) for g in self.groups}
        return notes + [note for n, heads, d in sorted(sizes) if (note := small_on_gpu(self.batch_size, n, heads, d))]

    # -- forward passes ---------------------------------------------------------------------------------------------

    def begin(self, batch_size: int, num_tokens: int, valid: torch.Tensor | None = None) -> None:
        """Plan a forward pass of `num_tokens` tokens per sequence for all layers.

        Args:
            valid: bool [B, T]; False marks padding, which is neither stored nor seen.

        Raises:
            PoolFullError: pages are missing; nothing changed.
            CacheStateError: the batch size changed, or the pass before was left unfinished.
        """
        if self._found is not None:
            found, self._found = self._found, None
            raise found
        if self._forward is not None:
            missing = sorted(self._forward.pending)
            raise CacheStateError(
                f"the last forward pass never reached layer {missing[0]} ({counted(len(missing), 'layer')} missing), so their pages hold nothing; "
                "call abandon() to take the pass back, reset(), or free() the sequences"
            )
        if num_tokens < 1 or batch_size < 1:
            raise DataError(f"a forward pass of {counted(batch_size, 'sequence')} x {counted(num_tokens, 'token')} is empty; pass at least one token")
        if self.batch_size and batch_size != self.batch_size:
            raise CacheStateError(f"the cache holds {counted(self.batch_size, 'sequence')} but was given {batch_size}; {self.other_batch_text(batch_size)}")
        if num_tokens == 1 and self._decode is not None and self._begin_on_device(self._decode, valid):
            return
        self._single_passes = self._single_passes + 1 if num_tokens == 1 else 0
        if valid is not None:
            valid = valid.to("cpu", torch.bool)
            if valid.shape != (batch_size, num_tokens):
                raise DataError(f"valid has shape {tuple(valid.shape)}, expected {(batch_size, num_tokens)}")
            valid = None if bool(valid.all()) else valid
        counts = [num_tokens] * batch_size if valid is None else valid.sum(1).tolist()
        history_first = num_tokens > 1
        before = [g.snapshot() for g in self.groups]
        try:
            for g in self.groups:
                g.resize(batch_size)
            lengths = torch.tensor(self.seq_lens)[:, None]
            for g in self.groups:  # grow in one piece, so that a long prompt is one slab
                if g.pools["closed"].fixed_capacity is None:
                    for name, n in g.pages_wanted(counts, history_first).items():
                        g.pools[name].reserve(n)
            steps = [g.advance(counts, history_first) for g in self.groups]
        except BaseException as error:  # pages missing, or out of memory while growing
            self._restore(before)
            if not isinstance(error, PoolFullError):
                raise
            raise PoolFullError(f"{self._capacity_text()} was given {batch_size} x {num_tokens} tokens more: {error}{self._speculation_text()}") from None
        for step, (_, allocators) in zip(steps, before, strict=True):
            step.reused = [(pool, i) for pool, i in step.taken if i < allocators[pool].capacity and allocators[pool].count(i)]
        ranks = torch.arange(1, num_tokens + 1).expand(batch_size, -1) if valid is None else valid.cumsum(1)
        positions = lengths + ranks - 1
        if valid is not None:
            positions = positions.masked_fill(~valid, -1)
        saturated = [dict(s) for s in self.saturated]
        self._forward = Forward(num_tokens, counts, valid, positions, steps, history_first, set(self._where), before, saturated)

    # -- decoding on the device -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take the page lists back from the device, if they are there."""
        if self._decode is not None:
            decode, self._decode, self._single_passes = self._decode, None, 0
            self._found = decode.settle(self.saturated) or self._found

    @property
    def decoding(self) -> device_decode.DeviceDecode | None:
        """What decodes single tokens on the device, while it does. A step captured under one cannot be replayed under another."""
        return self._decode

    def cannot_decode_on_device(self, num_q_heads: int, dtype: torch.dtype) -> str | None:
        """Why single tokens are led by the host, whatever the sequences hold, or None."""
        key = (num_q_heads, dtype)
        if key not in self._decode_refusals:
            self._decode_refusals[key] = device_decode.refuses(self, num_q_heads, dtype)
        return self._decode_refusals[key]

    def expect_tokens(self) -> None:
        """Take the next single token for the beginning of many: decode on the device from it on, not from the third in a row."""
        self._single_passes = max(self._single_passes, 2)

    def attention_plan(
        self, layouts: tuple[PageLayout, ...], max_pages: tuple[int, ...], batch_size: int, num_q_heads: int, dtype: torch.dtype, scaling: float,
        sliding_window: int | None, softcap: float | None,
    ) -> PagedAttention:  # fmt: skip
        """A plan for decoding on the device, kept: pages are assigned again and again."""
        key = (layouts, max_pages, batch_size, num_q_heads, dtype, scaling, sliding_window, softcap)
        if key not in self._plans:
            self._plans[key] = plan(
                layouts, max_pages=max_pages, batch_size=batch_size, num_q_heads=num_q_heads, dtype=dtype, device=self.device, scaling=scaling,
                sliding_window=sliding_window, softcap=softcap,
            )  # fmt: skip
        return self._plans[key]

    def store_of(self, layer: int, pool: str) -> PageStore:
        """A layer's pages of one pool."""
        (place,) = self._where[layer]
        return self._store(place, pool)

    def _enter_device(self, q: torch.Tensor, scaling: float, softcap: float | None) -> None:
        """Decode on the device from here on, if that can be done: two passes of a token in a row are taken for the beginning of many."""
        if self.device.type != device_decode.DEVICE or self._found is not None:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if (decode := self._decode) is not None:
            if capturing or (decode.steps_left and not self.watching and decode.key == (q.shape[2], q.dtype, scaling, softcap)):
                return
            self._settle()
            self._single_passes = 2  # on with other pages
        why: str | None = f"{counted(self._single_passes, 'token')} came one by one so far; two must have"
        if self._single_passes >= 2 and q.shape[0] == self.batch_size:
            why = "the attention of pages is watched" if self.watching else self.cannot_decode_on_device(q.shape[2], q.dtype)
            if why is None and not capturing:
                made = device_decode.enter(self, q.shape[2], q.dtype, scaling, softcap)
                if not isinstance(made, str):
                    self._decode, self.led_by_host = made, None
                    return
                why = made
            self.led_by_host = why
        if capturing:
            raise CacheStateError(f"a step of this cache cannot be captured in a graph now: {why or 'decode a token first'}")

    def _begin_on_device(self, decode: device_decode.DeviceDecode, valid: torch.Tensor | None) -> bool:
        """Begin a pass of one token on the device; False if the pages assigned ahead are used up."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and self.max_tokens is None:
            raise CacheStateError("a cache that grows assigns pages from the host again and again, so its steps cannot be captured; build it with max_tokens")
        if not decode.steps_left and not capturing:
            self._settle()
            return False
        if valid is not None:
            if tuple(valid.shape) != (self.batch_size, 1):
                raise DataError(f"valid has shape {tuple(valid.shape)}, expected {(self.batch_size, 1)}")
            if valid.device.type == "cpu":
                valid = None if bool(valid.all()) else valid.to(self.device)
            elif valid.dtype != torch.bool:
                valid = valid.bool()
        if not capturing and decode.steps_taken % LOOK_EVERY == 0 and (found := decode.look()) is not None:
            raise found
        decode.begin(valid)
        self._forward = Forward(
            1, [1] * self.batch_size, None, _NO_POSITIONS, [], False, set(self._where), [], [dict(s) for s in self.saturated], device=decode
        )  # fmt: skip
        return True

    def count_replays(self, steps: int) -> None:
        """Call before a captured decode step is replayed `steps` times: the host cannot see replays.

        Raises:
            PoolFullError: the capacity has no room for so many tokens more. Nothing changed; do not replay.
            CacheStateError: page lists were taken back from the device since the step was captured (by anything but decoding): capture again.
            DataError: what closing found some tokens ago. Nothing changed.
        """
        if self._decode is None:
            raise CacheStateError("no captured step of this cache can be replayed: its pages have been assigned anew since; decode a token and capture again")
        if self._forward is not None:
            self._finished("replaying a step")
        if self._decode.steps_taken % LOOK_EVERY + steps >= LOOK_EVERY and (found := self._decode.look()) is not None:
            raise found
        self._decode.count(steps)

    def _step_on_device(
        self, decode: device_decode.DeviceDecode, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, f: Forward, scaling: float,
        softcap: float | None, sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if layer not in f.pending:
            raise CacheStateError(f"layer {layer} attended twice in one forward pass while {counted(len(f.pending), 'layer')} did not come; call reset()")
        if (q.shape[2], q.dtype, scaling, softcap) != decode.key:
            raise DataError(f"layer {layer} attends with {q.shape[2]} heads, scaling {scaling}, softcap {softcap}; this pass began with {decode.key}")
        if self.nonfinite == "clamp":
            k, v = _clamp(k), _clamp(v)
        lse = None if sink_logits is None else torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        try:
            out = decode.step(layer, q, k, v, lse)
        except BaseException:
            self._fail()
            raise
        f.pending.discard(layer)
        if not f.pending:
            self._forward = None
        return out if lse is None or sink_logits is None else add_sink_logit(out, lse, sink_logits).to(q.dtype)

    def _restore(self, before: list[tuple[list[Sequence], dict[str, Allocator]]]) -> None:
        for g, state in zip(self.groups, before, strict=True):
            g.restore(*state)

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass has begun that some layers have not been through yet."""
        return self._forward is not None

    def abandon(self) -> None:
        """Take back a forward pass that not all layers have been through (the model raised, or was interrupted): as if it had never begun.

        Passes that an error of this cache ends are taken back without this. Does nothing between passes.

        Raises:
            CacheStateError: a sequence was freed since the pass began, so what was before it is gone.
        """
        f = self._forward
        if f is None:
            return
        if f.before is None:
            raise CacheStateError("abandon() after a sequence was freed during the pass; free() the others too, or call reset()")
        if f.device is not None:
            f.device.take_back(set(self._where) - f.pending)
            self._forward = None
            return
        for store, page_id, page in f.overwritten:
            store.page(page_id).copy_(page)
        self._restore(f.before)
        self.saturated = f.saturated
        self._forward = None

    def _fail(self) -> None:
        """An error of ours ends the pass: take it back if that can be done."""
        if self._forward is not None and self._forward.before is not None:
            self.abandon()

    def _capacity_text(self) -> str:
        batch_size, max_tokens = self._capacity
        built = "a cache of fixed capacity"
        if batch_size is not None and max_tokens is not None:
            built = f"a cache built for {counted(batch_size, 'sequence')} of {counted(max_tokens, 'token')}"
        return f"{built}, now empty," if not self.batch_size else f"{built}, now of {counted(max(self.seq_lens), 'token')},"

    def other_batch_text(self, batch_size: int) -> str:
        """What to call before a pass of another batch size."""
        n, rest = divmod(batch_size, self.batch_size)
        if rest:
            return "use batch_select_indices() (PagedCache: select()), or reset() first"
        return (
            f"call batch_repeat_interleave({n}) first (PagedCache: repeat({n})) if each is to be continued in {n} ways, as num_beams={n} and "
            f"num_return_sequences={n} do; or reset()"
        )

    def _speculation_text(self) -> str:
        windows = sorted({w for g in self.groups if g.keep_past and (w := g.group.geometry.sliding_window) is not None})
        if not windows:
            return ""
        return (
            f". Tokens may be taken back (keep_past, assisted decoding), so layers with a sliding window of {windows[0]} give nothing back until the next "
            "crop; a fixed capacity has no room for that, however large max_tokens is: let the cache grow"
        )

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
    ) -> torch.Tensor:
        """Store this layer's keys and values and attend. The first layer of a pass calls `begin` by itself.

        Args:
            q: [B, T, Hq, D]; k, v: [B, T, H, D], all of the cache's dtype and device.
            scaling: factor on the scores.
            sink_logits: [Hq], one more score per head with value 0 (gpt-oss).
            valid: bool [B, T], see `begin`.

        Returns:
            [B, T, Hq, D] in q's dtype; zeros for padding queries.
        """
        self._check(layer, q, k, v)
        if softcap is not None and not softcap > 0:
            raise DataError(f"softcap={softcap} must be positive, or None for no cap")
        if q.shape[1] == 1:
            if self._forward is None:
                self._enter_device(q, scaling, softcap)
                if self._decode is not None:
                    self.begin(q.shape[0], 1, valid)
            if (f := self._forward) is not None and f.device is not None:
                return self._step_on_device(f.device, layer, q, k, v, f, scaling, softcap, sink_logits)
        k, v, f = self._enter(layer, k, v, valid)
        try:
            if len(self._where[layer]) == 1:
                out, lse = self._step(self._where[layer][0], q, k, v, scaling, softcap, f)
            else:
                out, lse = self._step_by_heads(layer, q, k, v, scaling, softcap, f)
        except BaseException:
            self._fail()
            raise
        self._leave(layer, f)
        if sink_logits is not None:
            out = add_sink_logit(out, lse, sink_logits)
        return out.to(q.dtype)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, *, valid: torch.Tensor | None = None) -> None:
        """Store keys and values [B, T, H, D] without attending (a prefix computed elsewhere). Every layer must follow, as in `step`."""
        self._check(layer, k, k, v)
        k, v, f = self._enter(layer, k, v, valid)
        try:
            for place in self._where[layer]:
                heads = slice(None) if place.heads is None else list(place.heads)
                self._write(place, self._stored_order(place, k[:, :, heads]), v[:, :, heads], f)
        except BaseException:
            self._fail()
            raise
        self._leave(layer, f)

    def _enter(self, layer: int, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, Forward]:
        """A layer arrives with checked keys and values: begin the pass if it is the first."""
        if valid is not None and valid.shape == k.shape[:2]:  # padding may hold anything, NaN included; begin() refuses other shapes
            real = valid.to(k.device)[..., None, None]
            k, v = torch.where(real, k, 0), torch.where(real, v, 0)
        if self.nonfinite == "clamp":
            k, v = _clamp(k), _clamp(v)
        elif k.shape[1] > 1 or k.device.type == "cpu":  # asking a GPU about every token would wait for it; there the page's closing asks
            try:
                require_finite(k, f"keys of layer {layer}")
                require_finite(v, f"values of layer {layer}")
            except DataError:
                self._fail()
                raise
        if self._forward is None:
            self.begin(k.shape[0], k.shape[1], valid)
        f = self._forward
        assert f is not None
        if layer not in f.pending:
            raise CacheStateError(f"layer {layer} attended twice in one forward pass while {counted(len(f.pending), 'layer')} did not come; call reset()")
        if (k.shape[0], k.shape[1]) != tuple(f.positions.shape):
            raise DataError(f"layer {layer} was given {tuple(k.shape[:2])} (sequences, tokens), but this forward pass has {tuple(f.positions.shape)}")
        return k, v, f

    def _leave(self, layer: int, f: Forward) -> None:
        f.pending.discard(layer)
        if not f.pending:
            self._forward = None
            for g, shares in f.shares.items():
                self.groups[g].observe(f.steps[g].history, np.mean(shares, axis=0))

    def _check(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        given = (layer, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        if given in self._checked:
            return
        if layer not in self._where:
            raise DataError(f"layer {layer} does not exist; the cache has {len(self.spec.layers)} layers")
        g = self.spec.layers[layer]
        if q.ndim != 4 or not q.shape[2] or q.shape[2] % g.num_kv_heads or q.shape[3] != g.head_dim:
            raise DataError(
                f"queries of layer {layer} have shape {tuple(q.shape)}; they need 4 dimensions (sequences, tokens, heads, head_dim), "
                f"heads a positive multiple of {g.num_kv_heads}, head_dim {g.head_dim}"
            )
        want = (q.shape[0], q.shape[1], g.num_kv_heads, g.head_dim)
        for name, x in (("queries", q), ("keys", k), ("values", v)):
            if name != "queries" and tuple(x.shape) != want:
                raise DataError(f"{name} of layer {layer} have shape {tuple(x.shape)}, expected {want} = (sequences, tokens, kv heads, head_dim)")
            if x.dtype != TORCH_DTYPES[self.spec.raw_dtype]:
                raise DataError(
                    f"{name} of layer {layer} are {x.dtype}, but the cache was built for {self.spec.raw_dtype}; build it again "
                    f"(KVCache.for_model, or CacheSpec with raw_dtype={str(x.dtype)[6:]!r})"
                )
            if x.device.type != self.device.type:
                raise DataError(f"{name} of layer {layer} are on {x.device}, but the cache is on {self.device}; build it with device={str(x.device)!r}")
        if len(self._checked) < MOST_CHECKED:
            self._checked.add(given)

    def __getstate__(self) -> dict[str, Any]:
        self._finished("copying or pickling a cache")
        _ = self.groups
        return self.__dict__ | {"_plans": {}, "_checked": set()}

    # -- sequences --------------------------------------------------------------------------------------------------

    def _finished(self, what: str) -> None:
        self._single_passes = 0
        if self._forward is not None:
            left = counted(len(self._forward.pending), "layer")
            raise CacheStateError(f"{what} in the middle of a forward pass ({left} to go); finish it, or call reset() or abandon()")

    def _rows(self, rows: Rows[int]) -> list[int]:
        checked = [int(r) for r in rows]
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
        self._finished("crop")
        wanted = [int(n) for n in lengths] if np.ndim(lengths) else [int(lengths)] * self.batch_size  # type: ignore[arg-type, union-attr]
        if len(wanted) != self.batch_size:
            raise DataError(f"{counted(len(wanted), 'length')} for {counted(self.batch_size, 'sequence')}")
        for row, (n, have) in enumerate(zip(wanted, self.seq_lens, strict=True)):
            if not 0 <= n <= have:
                raise DataError(f"cannot crop sequence {row} to {n} tokens; it has {have}")
            for g in self.groups:
                g.check_crop(row, n)
        for g in self.groups:
            g.keep_past = False
            for row, n in enumerate(wanted):
                g.crop(row, n)
            g.settle()

    def keep_past(self) -> None:
        """Prepare for tokens that may be taken back, until the next `crop`.

        Sliding-window layers keep everything (a fixed capacity has no room for that: prompts longer than their window need a cache that grows), tiers keep
        the planes that newer tokens push out, and (in a cache without a fixed capacity) up to a page of new tokens closes nothing: taking back that many
        leaves exactly what was there before.
        """
        for g in self.groups:
            g.speculate()

    def set_zones(self, row: int, tiers: Rows[int], *, residual_length: int | None = None) -> None:
        """Give one sequence zones of its own sizes, from now on.

        Args:
            tiers: tokens of each tier of the scheme, youngest first, in whole pages. Smaller: planes go back to their pool at once. Larger: pages that
                lost a plane do not get it back; newer ones keep theirs longer.
            residual_length: newest tokens that stay raw; None leaves it.

        Raises:
            SpecError: sizes that cannot be, or another number of tiers than the scheme has.
        """
        self._finished("set_zones")
        (row,) = self._rows([row])
        scheme = self.spec.scheme
        if len(tiers) != len(scheme.tiers):
            raise SpecError(f"{len(tiers)} tier sizes for a scheme of {len(scheme.tiers)} tiers; pass one number of tokens for each")
        wanted = dataclasses.replace(
            scheme, tiers=tuple(dataclasses.replace(t, num_tokens=n) for t, n in zip(scheme.tiers, tiers, strict=True)),
            residual_length=scheme.residual_length if residual_length is None else residual_length,
        )  # fmt: skip
        for g in self.groups:
            sized = dataclasses.replace(g.group, tiers=wanted.tiers if g.group.tiers else ())
            g.set_zones(row, list(sized.boundaries), g.sequences[row].residual_length if residual_length is None else residual_length)

    def mass(self, row: int) -> list[dict[int, float]]:
        """Per layer group, the share of the attention that the pages of a sequence get lately, by the position of their first token.

        Kept for schemes with demote="attention", and while `watching`: a running mean over queries, heads and layers, taken every
        `layer_steps.OBSERVE_EVERY` tokens.
        """
        (row,) = self._rows([row])
        return [dict(g.sequences[row].mass) for g in self.groups]

    def closed_pages(self, row: int) -> list[list[int]]:
        """Per layer group, the positions of the first tokens of the closed pages that a sequence holds."""
        (row,) = self._rows([row])
        found = [(g.closed_starts(g.sequences[row]), g.sequences[row].closed) for g in self.groups]
        return [[at for at, page in zip(starts, pages, strict=True) if page is not None] for starts, pages in found]

    def drop_pages(self, row: int, starts: Rows[Rows[int]]) -> None:
        """Evict closed pages of a sequence: they go back to their pool, no later query sees their tokens, and all other tokens keep their positions.

        Sinks and raw tokens stay. `seq_lens` still counts the tokens; forks of the sequence keep their own.

        Args:
            starts: per layer group, some of `closed_pages(row)`; `mass(row)` says what attention they got.

        Raises:
            DataError: not a list per group, or positions where no closed page begins. Nothing changed.
            CacheStateError: a pass is unfinished, or tokens are speculative.
        """
        self._finished("drop_pages")
        (row,) = self._rows([row])
        held = self.closed_pages(row)
        if len(starts) != len(held):
            raise DataError(f"{len(starts)} lists of pages for {len(held)} layer groups; pass one for each, as closed_pages() gives them")
        for g, (wanted, known) in enumerate(zip(starts, held, strict=True)):
            if bad := sorted(set(wanted) - set(known)):
                raise DataError(f"no closed page of sequence {row} begins at token {bad[0]} in layer group {g}; closed_pages({row}) lists them")
        if any(g.keep_past for g in self.groups):
            raise CacheStateError("drop_pages() while tokens are speculative; crop() to the present length first")
        for state, wanted in zip(self.groups, starts, strict=True):
            state.drop(row, wanted)

    def select(self, rows: Rows[int]) -> None:
        """Sequence i becomes the old sequence rows[i]. Repeats share pages until one of them writes (fork, beam reorder, repeat);
        sequences not named are freed."""
        self._finished("select")
        chosen = self._rows(rows)
        if not chosen:
            raise DataError("select() of no sequence; use reset() to empty the cache")
        for g in self.groups:
            g.select(chosen)

    def fork(self, row: int) -> int:
        """Add a copy of a sequence that shares its pages; returns the new row."""
        self.select([*range(self.batch_size), *self._rows([row])])
        return self.batch_size - 1

    def repeat(self, n: int) -> None:
        """Every sequence n times, copies next to each other."""
        if n < 1:
            raise DataError(f"repeat({n}) must be at least 1; use reset() to empty the cache")
        self.select([row for row in range(self.batch_size) for _ in range(n)])

    def free(self, row: int) -> None:
        """Empty a sequence; its row stays, with length 0."""
        (row,) = self._rows([row])
        for g in self.groups:
            g.free(row)
        if self._forward is not None:
            self._forward.counts[row] = 0
            self._forward.before = None
            if not any(self._forward.counts):  # nobody is left who waits for the layers that never came
                self._forward = None

    def reset(self) -> None:
        """Forget all sequences. Allocated pages stay, free."""
        for g in self.groups:
            for row in range(len(g.sequences)):
                g.free(row)
            g.sequences = []
            g.settle()
        self._forward, self._found = None, None
        self.saturated = [{"k": 0, "v": 0} for _ in self.spec.layers]

    def swap_out(self, row: int) -> swap.SwappedSequence:
        """Move a sequence to host memory and free its pages; its row stays, empty."""
        return swap.swap_out(self, row)

    def swap_in(self, row: int, swapped: swap.SwappedSequence) -> None:
        """Bring a sequence back, byte for byte, into an empty row of this or an equal cache."""
        swap.swap_in(self, row, swapped)

    def save(self, path: str | Path) -> None:
        """Write all sequences to a safetensors file, whole or not at all (see `cache.serialize`)."""
        serialize.save(self, path)

    @classmethod
    def load(
        cls, path: str | Path, *, device: torch.device | str = "cpu", backend: str = "auto", spec: CacheSpec | None = None, grow: bool = False
    ) -> PagedCache:
        """The cache that `save` wrote: equal bytes, equal sharing, equal capacity, or with `grow` none. `spec` refuses a file of another spec."""
        return serialize.load(path, device=device, backend=backend, spec=spec, grow=grow)

    def dequantize(self, layer: int, row: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, H, D] that a sequence holds, as attention sees them (inspection and tests; attention never calls this).

        Tokens of dropped pages, and those that left a sliding window, are missing; where heads are stored in different ways, so is what not all of them hold.
        """
        (row,) = self._rows([row])
        if layer not in self._where:
            raise DataError(f"layer {layer} does not exist; the cache has {len(self.spec.layers)} layers")
        g = self.spec.layers[layer]
        places = [(place, *self._dequantize(place, row, dtype)) for place in self._where[layer]]
        shared = functools.reduce(np.intersect1d, [at for _, at, _, _ in places])  # pages leave a window whole, and those of other specs at other times
        k, v = (torch.zeros(len(shared), g.num_kv_heads, g.head_dim, dtype=dtype, device=self.device) for _ in "kv")
        for place, at, *sides in places:
            held = torch.from_numpy(np.isin(at, shared)).to(self.device)
            for to, x in zip((k, v), sides, strict=True):
                to[:, slice(None) if place.heads is None else list(place.heads)] = x[held]
        return k, v


def _clamp(x: torch.Tensor) -> torch.Tensor:
    """NaN to 0, infinity to the largest finite value. Does not wait for a GPU."""
    finite = torch.isfinite(x)
    top = torch.where(finite, x.abs(), 0).amax()
    return torch.where(finite, x, torch.where(torch.isnan(x), 0, x.sign() * top))
