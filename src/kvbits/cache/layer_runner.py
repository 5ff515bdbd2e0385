"""One layer's part of a forward pass: it attends to its pages, writes its tokens, quantizes the pages that close.

`Passes` plans a pass for all layers; a `LayerRunner` carries the plan out for one layer at a time, place by place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CacheStateError, DataError, counted
from ..later import Findings
from ..ops import chunk_attention, dispatch
from ..ops import merge as merge_op
from ..ops import store as store_op
from ..ops.attend import Attention, plan
from ..ops.reference.attend_fresh import masked
from ..ops.reference.close import encode_side, rows_as_stored
from ..ops.reference.dequantize import dequantize_pages, section
from ..ops.types import PageStore, wider_scales
from ..quant.qparams import TORCH_DTYPES, largest, require_finite
from ..spec import QuantSpec, Scheme
from . import inputs, tables
from .layer_stores import LayerStores, Place
from .passes import Forward, Undo
from .plans import KeptPlan
from .step import Close, Recode, Step


def _closed_at_once(closes: list[Close], page_size: int) -> list[list[Close]]:
    """Return group pages that one call quantizes: those of any sequences that waited whole in the tail, and those that
    follow each other in a sequence's fresh tokens, which are read where they lie.
    """
    runs: list[list[Close]] = []
    waited: dict[str, list[Close]] = {}  # by pool
    for c in closes:
        if c.count == page_size:
            if c.pool not in waited:
                runs.append(waited.setdefault(c.pool, []))
            waited[c.pool].append(c)
            continue
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and not c.count
            and not last.count
            and c.row == last.row
            and c.fresh == last.fresh + page_size
            and c.pool == last.pool
        )
        runs[-1].append(c) if joins else runs.append([c])
    return runs


def _pages(store: PageStore, page_ids: list[int]) -> torch.Tensor:
    """Return uint8 [n, H, head_bytes]: a page where it lies, or several put side by side."""
    return store.page(page_ids[0])[None] if len(page_ids) == 1 else store.gather(np.array(page_ids, np.int64))


def _name_the_page(
    x: torch.Tensor, kind: str, place: Place, run: Sequence[Close | Recode], store: PageStore, scheme: Scheme
) -> None:
    """Refuse the first page of the pages x [n, H, page_size, D] of a run that holds NaN or infinity, or whose scales
    overflow.
    """
    spec = store.layout.key if kind == "k" else store.layout.value
    of = _named(kind, place)
    for c, page in zip(run, x, strict=True):
        what = f"{of}, page of tokens {c.start} to {c.start + page.shape[1] - 1} of sequence {c.row}"
        require_finite(page, what)
        if spec.is_raw:
            continue
        try:
            encode_side(rows_as_stored(page[None], spec, store.static, np.array([c.start])), kind, spec, store.static)
        except DataError as error:
            raise DataError(
                f"{what}: {error} {_in_the_specs(spec, scheme, place)}; crop or free sequence {c.row}, or select the"
                " others, which can then continue"
            ) from error


_NOTHING_STORED = "Nothing was stored in this pass"


def _in_the_specs(spec: QuantSpec, scheme: Scheme, place: Place) -> str:
    limit = largest(spec.scale_dtype)
    return (
        f"({spec.scale_dtype} ends at {limit:g}) in the specs of scheme {scheme.name!r}, or keep layer {place.layer}"
        f" raw (an Override). {_NOTHING_STORED}"
    )


def _named(kind: str, place: Place) -> str:
    """Name keys or values and their layer, for messages."""
    return f"{'keys' if kind == 'k' else 'values'} of layer {place.layer}"


def _pages_named(run: Sequence[Close | Recode], page_size: int) -> str:
    """Name the pages that close, for messages."""
    rows = sorted({c.row for c in run})
    first, last = min(c.start for c in run), max(c.start for c in run) + page_size - 1
    pages = f"page of tokens {first} to {last}" if len(run) == 1 else f"{len(run)} pages of tokens {first} to {last}"
    return f"{pages} of {'sequence' if len(rows) == 1 else 'sequences'} {', '.join(map(str, rows))}"


class LayerRunner:
    """Runner of the steps of forward passes, one layer at a time.

    Args:
        backend: "auto", or force one for every op that has it.
        saturated: of every layer, added to: elements of keys and values that were clamped to their largest code.

    Attributes:
        choices: who serves each kind of call.
    """

    def __init__(self, stores: LayerStores, backend: str, saturated: list[dict[str, int]]) -> None:
        self._stores, self._groups, self._backend = stores, stores.groups, backend
        self._saturated = saturated
        self.choices: dict[Any, dispatch.Choice] = {}
        self._nothing_found = torch.zeros(store_op.STATUS_FIELDS, dtype=torch.int32, device=stores.device)

    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        softcap: float | None,
        f: Forward,
        more: bool = False,
        within: torch.Tensor | None = None,
        wants_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the tokens k, v [B, T, H, D] of a layer and attend with q [B, T, Hq, D].

        Args:
            more: the layer comes again with other queries. A single token is stored at the first visit, a chunk at the
                last, since it attends to the history as it was before.
            within: see `PagedCache.step`.

        Returns:
            out [B, T, Hq, D], and lse float32 [B, T, Hq], which may be None unless it is wanted.
        """
        place = self._stores.places[layer]
        if (order := self._stores.order(place)) is not None:
            q, k = q[..., order], k[..., order]
        first = layer not in f.reading
        (f.reading.add if more else f.reading.discard)(layer)
        if f.device is not None:
            f.device.write(layer, k, v)
            return f.device.attend(layer, q, scaling, softcap, wants_lse)
        if not f.history_first:
            if first:
                self._write(place, k, v, f)
            return self._attend(place, q, scaling, softcap, f)
        out, lse = (
            self._fresh(place, q, k, v, scaling, softcap, f)
            if within is None
            else masked(q, k, v, f.positions, within, scaling, softcap)
        )
        if f.steps[place.group].history:
            parts = [self._attend(place, q, scaling, softcap, f), (out, lse)]
            key = ("merge", out.shape[3], *(x.dtype for x, _ in parts))
            if key not in self.choices:
                self.choices[key] = merge_op.choose(parts)
            out, lse = merge_op.merge(parts, choice=self.choices[key])
        if not more:
            self._write(place, k, v, f)
        return out, lse

    def _fresh(
        self,
        place: Place,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        softcap: float | None,
        f: Forward,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = ("attend_fresh", q.dtype, q.shape[3], v.shape[3], softcap is None)
        if key not in self.choices:
            self.choices[key] = chunk_attention.choose(q, v, softcap, self._writer)
        run, chunk = self.choices[key].run, self._chunk(place)
        attend = run if chunk is None else chunk_attention.within_chunks(run, chunk)
        return attend(q, k, v, f.positions, scaling, self._stores.spec.layers[place.layer].sliding_window, softcap)

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, f: Forward, read: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Store the tokens k, v [B, T, H, D] of a layer without attending.

        Returns:
            With `read`, the keys and values [tokens, H, D] before them that they see of each sequence.

        Raises:
            CacheStateError: `read` in a pass that the device leads.
        """
        place = self._stores.places[layer]
        order = self._stores.order(place)
        stored = k if order is None else k[..., order]
        if f.device is not None:
            if read:
                raise CacheStateError(
                    f"layer {layer} reads what tokens see in a pass that the device runs; append(.., read=True) before"
                    " any other layer of the pass"
                )
            f.device.write(layer, stored, v)
            return []
        if not f.history_first:  # what a single token sees counts itself
            self._write(place, stored, v, f)
        rows, history = range(len(k) if read else 0), f.steps[place.group].history
        past = [self._stores.dequantize(layer, row, k.dtype, history) for row in rows]
        if f.history_first:
            self._write(place, stored, v, f)
            return past
        return [(keys[:-1], values[:-1]) for keys, values in past]

    def _attend(
        self, place: Place, q: torch.Tensor, scaling: float, softcap: float | None, f: Forward
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to what a pass reads of the stored pages."""
        history, g = f.steps[place.group].history, self._stores.spec.layers[place.layer]
        if not history:  # every token so far was padding
            return q.new_zeros(*q.shape[:3], g.value_head_dim, dtype=torch.float32), q.new_full(
                q.shape[:3], -torch.inf, dtype=torch.float32
            )
        key = (place.group, q.shape, q.dtype, scaling, softcap)
        if (kept := f.plans.get(key)) is None:  # the first layer of the group in this pass
            kept = f.plans[key] = self._plan_of_pass(place, q, scaling, softcap, f)
        kept.bind(place.layer, [self._stores.store(place, pool) for pool in history])
        out = q.new_empty(*q.shape[:3], g.value_head_dim, dtype=kept.attention.result_dtype)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return kept.attention.run(q, place.layer, out=out, lse=lse), lse

    def _plan_of_pass(
        self, place: Place, q: torch.Tensor, scaling: float, softcap: float | None, f: Forward
    ) -> KeptPlan:
        """Return the plan that serves a group in a pass, told of what it reads."""
        history = f.steps[place.group].history
        spans = any(table.spans is not None for table in history.values())
        key = (place.group, tuple(history), q.shape[:3], q.dtype, scaling, softcap, spans, f.history_first)
        kept = self._stores.plans.get(key, lambda: self._plan(place, q, scaling, softcap, f))
        positions = f.positions if (chunk := self._chunk(place)) is None else f.ends(chunk)
        read, positions = list(history.values()), positions.to(torch.int32)
        if not kept.attention.reads_host and q.device.type != "cpu":
            read, positions = tables.uploaded(read, positions, q.device)
        kept.attention.update(read, positions=positions)
        return kept

    def _plan(self, place: Place, q: torch.Tensor, scaling: float, softcap: float | None, f: Forward) -> Attention:
        history = f.steps[place.group].history
        attention = plan(
            [self._stores.store(place, pool).layout for pool in history],
            batch_size=q.shape[0],
            num_q_heads=q.shape[2],
            dtype=q.dtype,
            device=q.device,
            num_queries=q.shape[1],
            scaling=scaling,
            sliding_window=self._stores.spec.layers[place.layer].sliding_window,
            softcap=softcap,
            spans=any(table.spans is not None for table in history.values()),
            past_only=f.history_first or q.shape[1] == 1,
            may_wait=True,
            backend=self._backend,
        )
        self.choices["attend", place.group, f.history_first, q.dtype, tuple(history)] = attention.choice
        return attention

    def _chunk(self, place: Place) -> int | None:
        """Return the number of tokens of the chunks that a place's attention is cut into, or None."""
        g = self._stores.spec.layers[place.layer]
        return g.sliding_window if g.chunked else None

    def _write(self, place: Place, k: torch.Tensor, v: torch.Tensor, f: Forward) -> None:
        step = f.steps[place.group]
        self._recode(place, step, f.undo, f.findings)
        if step.closes:
            fresh = (
                list(zip(k, v, strict=True))
                if f.valid is None
                else [(k[b, i], v[b, i]) for b, i in enumerate(f.real_tokens(k.device))]
            )
            self._close(place, fresh, step.closes, f.findings)
        for pool, source, target in step.copies:
            store = self._stores.store(place, pool)
            store.page(target).copy_(store.page(source))
        for pool, to in f.slots_of(self._groups[place.group], place.group, k.device).items():
            pages = self._stores.store(place, pool)
            key = ("store", place.group, pool, k.dtype)
            if (choice := self.choices.get(key)) is None:
                choice = self.choices[key] = store_op.choose(pages.layout, k.dtype, k.device, self._writer)
            at_once = k.device.type in inputs.AT_ONCE
            # single tokens of a GPU are not looked at: that would wait in every layer of every step
            looks = not pages.layout.is_raw and (at_once or k.shape[1] > 1)
            status = self._nothing_found.clone() if looks else None
            choice.run(k, v, pages, to.slots, previous=to.previous, starts=to.starts, status=status)
            if status is not None and not (at_once and not any(status.tolist())):
                self._ask(place, f.findings, status, pages, f"the {counted(k.shape[1], 'new token')} of each sequence")

    def _ask(self, place: Place, findings: Findings, status: torch.Tensor, store: PageStore, what: str) -> None:
        """Have a status (see `ops.store`) judged, on a GPU at the end of the pass; `what`: whose keys and values were
        written.
        """
        sides, scheme = (("k", store.layout.key), ("v", store.layout.value)), self._stores.spec.scheme

        def judge(found: list[float]) -> None:
            for i, (kind, spec) in enumerate(sides):
                if found[4 + i]:
                    raise DataError(
                        f"{_named(kind, place)}, {what}: NaN or infinity; fix the model's numerics. {_NOTHING_STORED}"
                    )
                if found[2 + i]:
                    raise DataError(
                        f"{_named(kind, place)}, {what}: a scale, bias or mean overflows {spec.scale_dtype}; "
                        f"{wider_scales(spec, ' ')}{_in_the_specs(spec, scheme, place)}"
                    )
            for n, (kind, spec) in zip(found, sides, strict=False):
                if not spec.is_raw:
                    self._saturated[place.layer][kind] += int(n)

        if status.device.type in inputs.AT_ONCE:
            judge(status.tolist())
        else:
            findings.ask(status, judge)

    @property
    def _writer(self) -> str:
        """Backend of the ops that write pages or attend to fresh tokens; one named for attention to pages may have
        none.
        """
        return self._backend if self._backend == "reference" else "auto"

    def recode(self, steps: list[Step], undo: Undo) -> None:
        """Carry out steps of the groups, of recodes only, for all layers.

        Raises:
            DataError: a scale overflows. The caller takes everything back.
        """
        findings = Findings()
        for place in self._stores.places.values():
            step = steps[place.group]
            step.reused = undo.before[place.group].reused(step)
            self._recode(place, step, undo, findings)
        findings.settle()

    def _recode(self, place: Place, step: Step, undo: Undo, findings: Findings) -> None:
        """Keep what a step writes over, then quantize the pages that leave their tier in their next one's format."""
        for pool, page_id in step.reused:
            page = self._stores.store(place, pool).page(page_id)
            undo.overwritten.append((page, page.clone()))
        dtype = TORCH_DTYPES[self._stores.spec.raw_dtype]
        for (pool, _), moved in itertools.groupby(step.recodes, key=lambda r: (r.source, r.target)):
            run, source = list(moved), self._stores.store(place, pool)
            ids, starts = np.array([r.source_id for r in run], np.int64), np.array([r.start for r in run], np.int64)
            pages = dequantize_pages(source.gather(ids), source.layout, source.static, starts=starts)
            self._encode(place, [x.to(dtype) for x in pages], run, run[0].target, findings)

    def _close(
        self, place: Place, fresh: list[tuple[torch.Tensor, torch.Tensor]], closes: list[Close], findings: Findings
    ) -> None:
        """Quantize the pages a step closes."""
        size = self._stores.spec.scheme.page_size
        tail = self._stores.store(place, "tail")
        for run in _closed_at_once(closes, size):
            c = run[0]
            sides = []
            waited = (
                [section(_pages(tail, [x.tail[0] for x in run]), tail.layout, name) for name in ("k_raw", "v_raw")]
                if c.count
                else []
            )
            for i, x in enumerate(fresh[c.row]):
                if c.count == size:
                    sides.append(waited[i])
                    continue
                rows = x[c.fresh : c.fresh + len(run) * size - c.count].transpose(0, 1)  # [H, tokens, D]
                if c.count:
                    rows = torch.cat([waited[i][0, :, : c.count], rows], dim=1)
                sides.append(rows.unflatten(1, (len(run), size)).transpose(0, 1))
            self._encode(place, sides, run, c.pool, findings)

    def _encode(
        self,
        place: Place,
        sides: list[torch.Tensor],
        run: Sequence[Close | Recode],
        pool: str,
        findings: Findings,
    ) -> None:
        """Quantize keys and values [n, H, page_size, D] into pages of a pool."""
        store = self._stores.store(place, pool)
        key = ("close", store.layout, sides[0].dtype)
        if key not in self.choices:
            self.choices[key] = dispatch.choose("close", sides[0], store, backend=self._writer)
        ids, starts = (np.array(x, np.int64) for x in zip(*((c.page_id, c.start) for c in run), strict=True))
        status = self._nothing_found.clone()
        self.choices[key].run(sides[0], sides[1], store, ids, starts, status)
        if status.device.type in inputs.AT_ONCE and any(status.tolist()[2:]):
            for kind, x in zip("kv", sides, strict=True):
                _name_the_page(x, kind, place, run, store, self._stores.spec.scheme)
        self._ask(place, findings, status, store, _pages_named(run, store.layout.page_size))
