"""append: fresh keys and values to their slots in pages, straight from the projections' output: raw pages, and those
whose tokens are quantized one by one.

A token's bytes in a packed page depend on the token alone (`PageLayout.token_local`), and no byte holds codes of two
tokens, so pages fill token by token: what n stores leave is what closing a page with these tokens leaves at their
slots.

Centred keys need one number more per channel, the page's mean, and a page that fills token by token cannot know its
own. It is fixed when the page opens, that is when slot 0 is stored, and stays until slot 0 is stored again. Any mean
reads back right, since the page holds it; how near it comes to the page's own decides the code range only:

    all tokens of the page are in this call      the page's own mean, as close_pages takes it
    the sequence has a page before               that page's mean (its fresh tokens as they came, the others decoded),
                                                 turned on by page_size positions of
                                                 the rotary embedding where it is known
    the first page                               the mean of the call's tokens of the page
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import DataError
from ...quant.packing import row_positions, rows_of_planes
from ...quant.qparams import QParams, require_finite, rounded
from ...quant.qparams import stored as as_stored
from ...quant.rotary import turned_by
from ...spec import PageLayout, QuantSpec
from ..types import PageStore, SlotMapping
from .close import encode, rows_as_stored
from .dequantize import dequantize_pages, section

STATUS_FIELDS = 7
"""Of `store_tokens`: clamped elements of keys and values; whether their scales overflowed (two), and whether they held
NaN or infinity (two); entries that were skipped because they lead out of the pages.
"""
_turns = WeakIdKeyDictionary()  # of turns whose numbers passed, the version that did


def append(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> dict[str, int]:
    """Write tokens in place.

    Args:
        k, v: [B, T, H, D], any strides.
        store: raw pages [H, page_size, D] of the tensors' dtype, or packed token-local ones.
        slot_mapping: which token goes where; tokens that it does not name are not stored. A slot is named once.

    Returns:
        How many elements of keys and of values were clamped to their code range (quantized tensors only).

    Raises:
        DataError: tensors, pages and mapping do not fit together (see `SlotMapping.check`); in packed pages also NaN,
            infinity, and scales that overflow their storage dtype. Nothing is written.
    """
    slot_mapping.check(k, v, store)
    if store.layout.is_raw:
        for row, token, page_id, slot, count in slot_mapping.runs.tolist():
            page = store.page(page_id)
            for name, x in (("k_raw", k), ("v_raw", v)):
                section(page, store.layout, name)[:, slot : slot + count] = x[row, token : token + count].transpose(
                    0, 1
                )
        return {}
    row, token, pages, slots, before, starts = slot_mapping.tokens.T
    rows, tokens = (torch.from_numpy(np.ascontiguousarray(x)).to(k.device) for x in (row, token))
    return _Tokens(k[rows, tokens], v[rows, tokens], pages, slots, before, starts).write(
        store.layout, store.page, store.static, store.turn
    )


def store_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    slot_mapping: torch.Tensor,
    *,
    static: dict[str, torch.Tensor] | None = None,
    previous_page: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Write tokens in place to anybody's pages: the judge of `append.cuda.store_tokens`, which says what the arguments
    are.

    Raises:
        DataError: arguments that do not fit; NaN, infinity or scales that overflow (the kernel notes these in
            `status`).
    """
    check_tokens(k, v, pages, layout, slot_mapping, static, previous_page, starts, turn, status)
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    slots = slot_mapping.cpu().numpy()
    wanted = np.flatnonzero((slots >= 0) & (slots < len(pages) * layout.page_size))
    before = np.full(len(slots), -1) if previous_page is None else previous_page.cpu().numpy()
    before = np.where(before < len(pages), before, -1)[wanted]
    first = (np.full(len(slots), -1) if starts is None else starts.cpu().numpy().astype(np.int64))[wanted]
    index = torch.from_numpy(wanted).to(k.device)
    tokens = _Tokens(
        k[index], v[index], slots[wanted] // layout.page_size, slots[wanted] % layout.page_size, before, first
    )
    saturated = tokens.write(layout, lambda i: pages[i], static or {}, turn)
    if status is not None:
        status += torch.tensor(
            [
                saturated.get("k", 0),
                saturated.get("v", 0),
                0,
                0,
                0,
                0,
                int((slots >= len(pages) * layout.page_size).sum()),
            ],
            device="cpu",
        )


def open_pages(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> None:
    """Store the means of the pages that open in a call of `append`, ahead of their tokens, for backends that take every
    page's mean as given.

    Raises:
        DataError: NaN or infinity, or a mean that overflows its storage dtype. Nothing is written.
    """
    row, token, pages, slots, before, starts = slot_mapping.tokens.T
    if len(slots) and slots.all():
        return
    rows, tokens = (torch.from_numpy(np.ascontiguousarray(x)).to(k.device) for x in (row, token))
    given = _Tokens(k[rows, tokens], v[rows, tokens], pages, slots, before, starts)
    found = {}
    for kind, spec, x in (("k", store.layout.key, given.k), ("v", store.layout.value, given.v)):
        require_finite(x, "keys" if kind == "k" else "values")
        if spec.has_mean:
            found[kind] = given.means(
                kind, spec, store.layout, store.page, store.static, store.turn if kind == "k" else None
            )
    for kind, means in found.items():
        for page_id, mean in means.items():
            section(store.page(page_id), store.layout, f"{kind}_mean").copy_(mean)


def check_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    slot_mapping: torch.Tensor,
    static: Any,
    previous_page: torch.Tensor | None,
    starts: torch.Tensor | None,
    turn: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    """Refuse arguments of `store_tokens` that do not fit together."""
    if not layout.token_local:
        raise DataError(f"tokens cannot be stored one by one as {layout.key}, {layout.value}; use a token-local layout")
    for name, x in (("k", k), ("v", v)):
        if (
            x.dim() not in (3, 4)
            or x.shape[:-1] != k.shape[:-1]
            or x.dtype != k.dtype
            or tuple(x.shape[-2:]) != (layout.num_kv_heads, layout.dim(name))
        ):
            raise DataError(
                f"{name} must be {k.dtype} [.., {layout.num_kv_heads}, {layout.dim(name)}], got {x.dtype}"
                f" {list(x.shape)}"
            )
    if (
        pages.dtype != torch.uint8
        or pages.dim() != 3
        or tuple(pages.shape[1:]) != (layout.num_kv_heads, layout.head_bytes)
        or pages.stride(2) != 1
        or (layout.num_kv_heads > 1 and pages.stride(1) != layout.head_bytes)
    ):
        raise DataError(
            f"pages must be uint8 [pages, {layout.num_kv_heads}, {layout.head_bytes}], dense inside a page, got"
            f" {pages.dtype} {list(pages.shape)}"
        )
    count = k.shape[:-2].numel()
    for name, numbers in (("slot_mapping", slot_mapping), ("previous_page", previous_page)):
        if numbers is not None and (
            numbers.dtype != torch.int64 or numbers.shape != (count,) or not numbers.is_contiguous()
        ):
            raise DataError(
                f"{name} must be dense int64 [{count}], one entry for each token, got {numbers.dtype}"
                f" {list(numbers.shape)}"
            )
    if layout.is_centered and previous_page is None:
        raise DataError("centred keys take the mean of the page before when a page opens; give previous_page")
    if starts is not None and (starts.dtype != torch.int32 or starts.shape != (count,) or not starts.is_contiguous()):
        raise DataError(
            f"starts must be dense int32 [{count}], the position of the first token of each token's page, got"
            f" {starts.dtype} {list(starts.shape)}"
        )
    if layout.key.needs_rotary and starts is None:
        raise DataError("keys in a calibrated basis are turned back by their page's first position; give starts")
    tensors = {
        "v": v,
        "pages": pages,
        "slot_mapping": slot_mapping,
        "previous_page": previous_page,
        "starts": starts,
        "turn": turn,
        "status": status,
    }
    for name, given in tensors.items():
        if given is not None and given.device != k.device:
            raise DataError(f"{name} is on {given.device}, k on {k.device}; all must be on one device")
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if not spec.static:
            continue
        want = (layout.num_kv_heads, *spec.scale_shape(0, layout.dim(kind)))
        for name in (f"{kind}_scale", *([f"{kind}_bias"] if spec.has_bias else [])):
            found = (static or {}).get(name)
            if found is None:
                raise DataError(
                    f"{spec.format} with static scales was given no calibrated {name}; calibrate first or use"
                    " static=False"
                )
            if (
                tuple(found.shape) != want
                or found.dtype != torch.float32
                or found.device != k.device
                or not found.is_contiguous()
            ):
                raise DataError(
                    f"{name} must be dense float32 {list(want)} on {k.device}, got {found.dtype} {list(found.shape)} on"
                    f" {found.device}"
                )
    if turn is not None:
        _check_turn(turn, layout.head_dim)
    if status is not None and (status.dtype != torch.int32 or tuple(status.shape) != (STATUS_FIELDS,)):
        raise DataError(f"status must be int32 [{STATUS_FIELDS}], got {status.dtype} {list(status.shape)}")


def _check_turn(turn: torch.Tensor, head_dim: int) -> None:
    if turn.dtype != torch.float32 or tuple(turn.shape) != (3, head_dim) or not turn.is_contiguous():
        raise DataError(f"turn must be dense float32 [3, {head_dim}], got {turn.dtype} {list(turn.shape)}")
    version = 0 if turn.is_inference() else turn._version
    if turn.device.type == "cpu" and _turns.get(turn) != version:
        if not bool(turn.isfinite().all() & (turn[2] >= 0).all() & (turn[2] < head_dim).all()):
            raise DataError(
                f"turn must hold finite numbers, in its last row channels from 0 to {head_dim - 1};"
                " quant.rotary.turn_by makes it"
            )
        _turns[turn] = version


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """k, v [n, H, D] and for each token its page, its slot there, the page before that page (or -1) and the position of
    the page's first token: int64 [n] on the host.
    """

    k: torch.Tensor
    v: torch.Tensor
    pages: np.ndarray
    slots: np.ndarray
    before: np.ndarray
    starts: np.ndarray

    def write(
        self,
        layout: PageLayout,
        page_of: Callable[[int], torch.Tensor],
        static: dict[str, torch.Tensor],
        turn: torch.Tensor | None,
    ) -> dict[str, int]:
        """Everything is computed before a byte is written, so that an error leaves the pages as they were."""
        sides: list[tuple[str, QuantSpec, torch.Tensor, dict[str, torch.Tensor], dict[int, torch.Tensor]]] = []
        saturated: dict[str, int] = {}
        for kind, spec, x in (("k", layout.key, self.k), ("v", layout.value, self.v)):
            if layout.is_raw:
                sides.append((kind, spec, x, {}, {}))
                continue
            require_finite(x, "keys" if kind == "k" else "values")
            if spec.is_raw:
                sides.append((kind, spec, x, {}, {}))
                continue
            x = rows_as_stored(x.unsqueeze(-2), spec, static, self.starts, self.slots[:, None]).squeeze(-2)
            means: dict[int, torch.Tensor] = {}
            if spec.has_mean and len(x):
                means = self.means(kind, spec, layout, page_of, static, turn if kind == "k" else None)
                x = x - self._mean_of_each(kind, layout, page_of, means)
            known = (
                QParams(static[f"{kind}_scale"], static.get(f"{kind}_bias"))
                if spec.static and f"{kind}_scale" in static
                else None
            )
            # each token a page of its own
            found = encode(x.unsqueeze(-2), dataclasses.replace(spec, center=None), known, None) if len(x) else None
            saturated[kind] = found.saturated if found else 0
            stored = (
                {name: t for name, t in found.stored.items() if f"{kind}_{name}" in layout.sections} if found else {}
            )
            sides.append((kind, spec, found.codes.squeeze(-2) if found else x, stored, means))
        for page_id, index in self._by_page():
            page, slots, at = (
                page_of(page_id),
                torch.from_numpy(self.slots[index]).to(self.k.device),
                torch.from_numpy(index).to(self.k.device),
            )
            if not self.slots[index].all():
                _zero_padding(page, layout)
            for kind, spec, x, stored, means in sides:
                _store(
                    page,
                    layout,
                    kind,
                    spec,
                    slots,
                    x[at],
                    {name: t[at] for name, t in stored.items()},
                    means.get(page_id),
                )
        return saturated

    def _by_page(self) -> list[tuple[int, np.ndarray]]:
        """(page, its tokens by slot) of each page in the call."""
        if not len(self.pages):
            return []
        order = np.lexsort((self.slots, self.pages))
        found, first = np.unique(self.pages[order], return_index=True)
        return list(zip(found.tolist(), np.split(order, first[1:]), strict=True))

    def means(
        self,
        kind: str,
        spec: QuantSpec,
        layout: PageLayout,
        page_of: Callable[[int], torch.Tensor],
        static: dict[str, torch.Tensor],
        turn: torch.Tensor | None,
    ) -> dict[int, torch.Tensor]:
        """Means [H, D], float32, of the pages that open in this call, by page."""
        x = (self.k if kind == "k" else self.v).float()
        members = dict(self._by_page())
        opened = {}
        for page_id, index in members.items():
            if self.slots[index[0]]:
                continue
            whole, before = x[torch.from_numpy(index).to(x.device)], int(self.before[index[0]])
            follows = before >= 0 and len(index) < layout.page_size
            if follows:
                # [page_size, H, D]
                whole = dequantize_pages(page_of(before)[None], layout, static)[kind == "v"][0].transpose(0, 1)
                if before in members:
                    fresh = torch.from_numpy(members[before]).to(x.device)
                    whole[torch.from_numpy(self.slots[members[before]]).to(x.device)] = x[fresh]
            mean = whole.double().mean(0).float()
            opened[page_id] = rounded(
                turned_by(mean, turn.to(x.device)) if follows and turn is not None else mean, spec.scale_dtype
            )
        return opened

    def _mean_of_each(
        self, kind: str, layout: PageLayout, page_of: Callable[[int], torch.Tensor], opened: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """The mean of each token's page, [n, H, D]: of pages that open in this call, else the stored one."""
        x = self.k if kind == "k" else self.v
        each = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for page_id, index in self._by_page():
            stored = opened[page_id] if page_id in opened else section(page_of(page_id), layout, f"{kind}_mean").float()
            each[torch.from_numpy(index).to(each.device)] = stored
        return each


def _zero_padding(page: torch.Tensor, layout: PageLayout) -> None:
    """Bytes of a page that belong to no section."""
    free = torch.ones(layout.head_bytes, dtype=torch.bool, device="cpu")
    for s in layout.sections.values():
        free[s.offset : s.offset + s.nbytes] = False
    page[:, free.to(page.device)] = 0


def _store(
    page: torch.Tensor,
    layout: PageLayout,
    kind: str,
    spec: QuantSpec,
    slots: torch.Tensor,
    x: torch.Tensor,
    stored: dict[str, torch.Tensor],
    mean: torch.Tensor | None,
) -> None:
    """Raw numbers or codes x [n, H, D] and their parameters to the slots [n] of a page."""
    if spec.is_raw:
        raw = section(page, layout, f"{kind}_raw")
        raw[:, slots] = x.transpose(0, 1).to(raw.dtype)
        return
    for i, rows in enumerate(rows_of_planes(x, spec)):
        positions = row_positions(layout.page_size, rows.shape[-1], kind).to(slots.device)[slots]
        section(page, layout, f"{kind}_plane{i}").flatten(-2)[:, positions] = rows.transpose(0, 1)
    for name, t in stored.items():
        s = section(page, layout, f"{kind}_{name}")  # [H, groups, page_size]
        s[:, :, slots] = as_stored(t, layout.sections[f"{kind}_{name}"].dtype).squeeze(-1).permute(1, 2, 0).to(s.dtype)
    if mean is not None:
        s = section(page, layout, f"{kind}_mean")
        s.copy_(mean)
