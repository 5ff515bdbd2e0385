"""The op `store` in torch: the judge of all other backends. Reads slots on the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ...errors import ScaleOverflowError
from ...quant.packing import row_positions, rows_of_planes
from ...quant.qparams import QParams, rounded
from ...quant.qparams import stored as as_stored
from ...quant.rotary import turned_by
from ...spec import PageLayout, QuantSpec
from ..store import STATUS_FIELDS, check, note, require_positions
from ..types import PageStore
from .close import encode, rows_as_stored
from .dequantize import dequantize_pages, section


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why tokens are not stored here, or None."""
    return None if layout.token_local else "its pages close whole: use the op close_pages, or a token-local layout"


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    *,
    previous: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Write tokens in place, see `ops.store`. Nothing is written where numbers cannot be stored."""
    check(k, v, pages, slots, previous, starts, status)
    tokens = _tokens_of(k, v, pages, slots, previous, starts)
    found = tokens.write(pages)
    found[6] = int((slots >= pages.num_pages * pages.layout.page_size).sum())
    note(found, tokens.k, tokens.v, pages.layout, status)


def open_pages(
    k: torch.Tensor, v: torch.Tensor, pages: PageStore, slots: torch.Tensor, previous: torch.Tensor | None
) -> list[int]:
    """Store the means of the pages that open in a call of `store`, ahead of their tokens, for backends that take every
    page's mean as given.

    Returns:
        What it found, as `status` has it; nothing is written then.
    """
    tokens = _tokens_of(k, v, pages, slots, previous, None)
    sides, found = [], [0] * STATUS_FIELDS
    for i, (kind, spec) in enumerate((("k", pages.layout.key), ("v", pages.layout.value))):
        if not spec.has_mean:
            continue
        if not bool(torch.isfinite(tokens.side(kind)).all()):
            found[4 + i] = 1
            continue
        try:
            sides.append((kind, tokens.means(kind, spec, pages)))
        except ScaleOverflowError:
            found[2 + i] = 1
    for kind, means in sides if not any(found) else []:
        for page_id, mean in means.items():
            section(pages.page(page_id), pages.layout, f"{kind}_mean").copy_(mean)
    return found


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Tokens that are stored: k, v [n, H, D], and for each its page, its place there, the page before that page (or
    below 0) and the position of the page's first token: int64 [n] on the host.
    """

    k: torch.Tensor
    v: torch.Tensor
    pages: np.ndarray
    places: np.ndarray
    before: np.ndarray
    starts: np.ndarray

    def side(self, kind: str) -> torch.Tensor:
        return self.k if kind == "k" else self.v

    def write(self, to: PageStore) -> list[int]:
        """Compute everything before a byte is written. Return what was found, as `status` has it."""
        sides: list[tuple[str, QuantSpec, torch.Tensor, dict[str, torch.Tensor], dict[int, torch.Tensor]]] = []
        layout, found = to.layout, [0] * STATUS_FIELDS
        for i, (kind, spec) in enumerate((("k", layout.key), ("v", layout.value))):
            x = self.side(kind)
            if not layout.is_raw and not bool(torch.isfinite(x).all()):
                found[4 + i] = 1
            elif spec.is_raw or not len(x):
                sides.append((kind, spec, x, {}, {}))
            else:
                try:
                    codes, stored, means, found[i] = self._encoded(kind, spec, to)
                    sides.append((kind, spec, codes, stored, means))
                except ScaleOverflowError:
                    found[2 + i] = 1
        if any(found[2:]):
            return found
        for page_id, index in self._by_page():
            page, places, at = (
                to.page(page_id),
                torch.from_numpy(self.places[index]).to(self.k.device),
                torch.from_numpy(index).to(self.k.device),
            )
            if not self.places[index].all():
                _zero_padding(page, layout)
            for kind, spec, x, stored, means in sides:
                _write(
                    page,
                    layout,
                    kind,
                    spec,
                    places,
                    x[at],
                    {name: t[at] for name, t in stored.items()},
                    means.get(page_id),
                )
        return found

    def _encoded(
        self, kind: str, spec: QuantSpec, to: PageStore
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[int, torch.Tensor], int]:
        """Return codes [n, H, D] of a side, what is stored beside them, means of the pages that open, and how many
        elements were clamped.
        """
        x = rows_as_stored(self.side(kind).unsqueeze(-2), spec, to.static, self.starts, self.places[:, None]).squeeze(
            -2
        )
        means: dict[int, torch.Tensor] = {}
        if spec.has_mean:
            means = self.means(kind, spec, to)
            x = x - self._mean_of_each(kind, to, means)
        known = QParams(to.static[f"{kind}_scale"], to.static.get(f"{kind}_bias")) if spec.static else None
        # each token a page of its own
        found = encode(x.unsqueeze(-2), kind, dataclasses.replace(spec, center=None), known, None)
        stored = {name: t for name, t in found.stored.items() if f"{kind}_{name}" in to.layout.sections}
        return found.codes.squeeze(-2), stored, means, found.saturated

    def _by_page(self) -> list[tuple[int, np.ndarray]]:
        """Return (page, its tokens by place) of each page in the call."""
        if not len(self.pages):
            return []
        order = np.lexsort((self.places, self.pages))
        found, first = np.unique(self.pages[order], return_index=True)
        return list(zip(found.tolist(), np.split(order, first[1:]), strict=True))

    def means(self, kind: str, spec: QuantSpec, to: PageStore) -> dict[int, torch.Tensor]:
        """Return means [H, D], float32, of the pages that open in this call, by page.

        Raises:
            ScaleOverflowError: one overflows its storage dtype.
        """
        x, turn = self.side(kind).float(), to.turn if kind == "k" else None
        members = dict(self._by_page())
        opened = {}
        for page_id, index in members.items():
            if self.places[index[0]]:
                continue
            whole, before = x[torch.from_numpy(index).to(x.device)], int(self.before[index[0]])
            follows = before >= 0 and len(index) < to.layout.page_size
            if follows:
                # [page_size, H, D]
                whole = dequantize_pages(to.page(before)[None], to.layout, to.static)[kind == "v"][0].transpose(0, 1)
                if before in members:
                    fresh = torch.from_numpy(members[before]).to(x.device)
                    whole[torch.from_numpy(self.places[members[before]]).to(x.device)] = x[fresh]
            mean = whole.double().mean(0).float()
            opened[page_id] = rounded(
                turned_by(mean, turn.to(x.device)) if follows and turn is not None else mean, spec.scale_dtype
            )
        return opened

    def _mean_of_each(self, kind: str, to: PageStore, opened: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the mean of each token's page, [n, H, D]: of pages that open in this call, else the stored one."""
        x = self.side(kind)
        each = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for page_id, index in self._by_page():
            stored = (
                opened[page_id] if page_id in opened else section(to.page(page_id), to.layout, f"{kind}_mean").float()
            )
            each[torch.from_numpy(index).to(each.device)] = stored
        return each


def _tokens_of(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    previous: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> _Tokens:
    """Return the tokens that slots name, of arguments of `store`."""
    at, size = slots.cpu().numpy(), pages.layout.page_size
    stored = np.flatnonzero((at >= 0) & (at < pages.num_pages * size))
    before, first = (
        np.full(len(stored), -1) if x is None else x.cpu().numpy().astype(np.int64)[stored] for x in (previous, starts)
    )
    if starts is not None:
        require_positions(first)
    index = torch.from_numpy(stored).to(k.device)
    k, v = (x.reshape(-1, *x.shape[-2:])[index] for x in (k, v))
    return _Tokens(k, v, at[stored] // size, at[stored] % size, np.where(before < pages.num_pages, before, -1), first)


def _zero_padding(page: torch.Tensor, layout: PageLayout) -> None:
    """Set to zero the bytes of a page that belong to no section."""
    free = torch.ones(layout.head_bytes, dtype=torch.bool, device="cpu")
    for s in layout.sections.values():
        free[s.offset : s.offset + s.nbytes] = False
    page[:, free.to(page.device)] = 0


def _write(
    page: torch.Tensor,
    layout: PageLayout,
    kind: str,
    spec: QuantSpec,
    places: torch.Tensor,
    x: torch.Tensor,
    stored: dict[str, torch.Tensor],
    mean: torch.Tensor | None,
) -> None:
    """Write raw numbers or codes x [n, H, D] and their parameters to the places [n] of a page."""
    if spec.is_raw:
        raw = section(page, layout, f"{kind}_raw")
        raw[:, places] = x.transpose(0, 1).to(raw.dtype)
        return
    for i, rows in enumerate(rows_of_planes(x, spec, kind)):
        positions = row_positions(layout.page_size, rows.shape[-1], kind).to(places.device)[places]
        section(page, layout, f"{kind}_plane{i}").flatten(-2)[:, positions] = rows.transpose(0, 1)
    for name, t in stored.items():
        s = section(page, layout, f"{kind}_{name}")  # [H, groups, page_size]
        s[:, :, places] = as_stored(t, layout.sections[f"{kind}_{name}"].dtype).squeeze(-1).permute(1, 2, 0).to(s.dtype)
    if mean is not None:
        s = section(page, layout, f"{kind}_mean")
        s.copy_(mean)
