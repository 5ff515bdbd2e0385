"""Arguments of ops: `PageStore`, one layer's pages of one pool, and `Table`, the pages that each sequence reads.

Shapes use B = sequences in the batch, T = query tokens per sequence, H = kv heads, Hq = query heads (a multiple of H).
D is head_dim, or value_head_dim of values and outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DataError, ScaleOverflowError
from ..later import upload
from ..quant.qparams import require_finite
from ..spec import MOST_TOKENS, SCALE_8BIT, PageLayout, QuantSpec

LEAST_SOFTCAP, MOST_SOFTCAP = 1e-3, 1e4
"""Kernels compute tanh to an absolute error, which a cap multiplies."""


@dataclass(frozen=True, eq=False)
class PageStore:
    """The pages of one layer in one pool. What follows from its slabs is found once, however many plans read them.

    Attributes:
        layout: byte layout of a page.
        slabs: uint8 views [num_pages_in_slab, H, head_bytes], the last two dims dense, the first strided; page ids
            count through them in order.
        static: calibrated parameters of the layer, float32, those that the specs need (`static.read_with` has the
            names): `k_scale`, `k_bias`, `v_scale`, `v_bias` [H, groups or channels], levels [H, entries], `k_offsets`
            [H, 33, head_dim], and `k_inv_freq` [head_dim / 2], radians per token.
        turn: float32 [3, head_dim], or None. Centred keys that are stored token by token use it to turn a page's mean
            key on to the next page (`quant.rotary.turn_by` of page_size positions). Without it, as where the rotary
            embedding is not known, codes have more range to cover.
    """

    layout: PageLayout
    slabs: tuple[torch.Tensor, ...]
    static: dict[str, torch.Tensor] = field(default_factory=dict)
    turn: torch.Tensor | None = None

    def __post_init__(self) -> None:
        heads, nbytes = self.layout.num_kv_heads, self.layout.head_bytes
        for slab in self.slabs:
            if not isinstance(slab, torch.Tensor):
                raise DataError(f"pages must be tensors, got {type(slab).__name__}")
            if (
                slab.dtype != torch.uint8
                or slab.dim() != 3
                or tuple(slab.shape[1:]) != (heads, nbytes)
                or slab.stride(2) != 1
                or (heads > 1 and slab.stride(1) != nbytes)
            ):
                raise DataError(
                    f"a slab must be uint8 [pages, {heads}, {nbytes}], dense inside a page, got {slab.dtype}"
                    f" {list(slab.shape)} with strides {slab.stride()}"
                )

    @property
    def device(self) -> torch.device:
        return self.slabs[0].device

    @functools.cached_property
    def num_pages(self) -> int:
        return sum(s.shape[0] for s in self.slabs)

    @functools.cached_property
    def unreadable(self) -> str | None:
        """The reason why attention cannot read the slabs where they lie, or None."""
        if not self.num_pages:
            return "a part without slabs, or whose slabs are empty, has no pages"
        for x in self.slabs:
            if x.device != self.device:
                return f"slabs of one part on {self.device} and {x.device}; all must be on one device"
            if not x.shape[0]:
                return f"a slab holds no page, {list(x.shape)}; leave it out"
            if x.data_ptr() % 16 or x.stride(0) % 16:
                return (
                    f"pages at address {x.data_ptr():#x} with stride {x.stride(0)}; kernels read 16 bytes at a time:"
                    " both must be multiples of 16"
                )
        return None

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """int64 [num_pages]: byte address of each page's first struct, read-only."""
        parts = [s.data_ptr() + s.stride(0) * np.arange(s.shape[0], dtype=np.int64) for s in self.slabs]
        found = np.concatenate([np.zeros(0, np.int64), *parts])
        found.flags.writeable = False
        return found

    @functools.cached_property
    def offsets(self) -> torch.Tensor | None:
        """`page_offsets` of the slabs, on their device."""
        return page_offsets(self.slabs, self.device)

    def gather(self, page_ids: np.ndarray) -> torch.Tensor:
        """Return uint8 [n, H, head_bytes]: copies of a few pages (for the reference; kernels read in place)."""
        if len(self.slabs) == 1:
            return self.slabs[0][upload(page_ids, self.device)]
        return torch.stack([self.page(int(i)) for i in page_ids])

    def page(self, page_id: int) -> torch.Tensor:
        """Return uint8 [H, head_bytes]: the page itself, writable."""
        if page_id < 0:
            raise IndexError(f"page {page_id} is negative")
        for slab in self.slabs:
            if page_id < slab.shape[0]:
                return slab[page_id]
            page_id -= slab.shape[0]
        raise IndexError(f"page {page_id} lies past the pool's end")


def page_offsets(slabs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return int64 [pages] on `device`: bytes from the first slab's start to every page. None for one slab, whose pages
    lie a stride apart.
    """
    if len(slabs) == 1:
        return None
    first = slabs[0].data_ptr()
    return _offsets(tuple((x.data_ptr() - first, x.stride(0), len(x)) for x in slabs), device)


@functools.lru_cache(maxsize=256)
def _offsets(slabs: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Return `page_offsets` of slabs given as (start, stride, pages)."""
    found = [start + stride * torch.arange(pages, dtype=torch.int64, device="cpu") for start, stride, pages in slabs]
    return upload(torch.cat(found), device)


_stores = WeakIdKeyDictionary()


def store_of(
    pages: torch.Tensor,
    layout: PageLayout,
    static: dict[str, torch.Tensor] | None = None,
    turn: torch.Tensor | None = None,
) -> PageStore:
    """Return the store of one slab, the same one for a tensor at every call: kernels keep structs on it, which take
    longer to make than a token to store. A tensor that got other memory (`set_`, `data`) gets another one.
    """
    (at, known), given = _stores.get(pages, (None, None)), static or {}
    now = layout, pages.data_ptr(), pages.shape, pages.stride()
    same = at == now and known.turn is turn and known.static.keys() == given.keys()
    if not same or any(known.static[name] is not x for name, x in given.items()):
        # another tensor of the same memory: the key must not keep itself alive
        known = PageStore(layout, (pages.data,), dict(given), turn)
        _stores[pages] = now, known
    return known


@dataclass(frozen=True, eq=False)
class Table:
    """Pages that each sequence reads of one part, as tensors on the pages' device.

    Without spans, the pages of a row follow each other, and every page is full but the last: page j after the first
    holds the part's tokens from j * page_size on. With spans, each page has its own position and length.

    Attributes:
        pages: int32 [B, W], rows dense: page numbers. A number that the pool has not reads the pool's last page, never
            other memory.
        tokens: int32 [B]: visible tokens of the part, this step's included; 0 for a sequence that reads nothing of it.
            A sequence that reads nothing of any part is a padding row, whose output is 0. Numbers past the row count as
            its end. With spans: (pages - 1) * page_size + visible tokens of the last page.
        starts: int32 [B], or None for 0: position of the part's first token.
        offsets: int32 [B], or None for 0: entry of the row at which the part's first page stands. Rows do not wrap:
            tokens end with the row, so list the pages of a ring twice. One outside the row counts as the row's first or
            last entry.
        spans: int32 [B, W, 2], dense, or None: position of each page's first token, and its visible tokens, 1 to
            page_size. Rows whose pages were dropped or cut need them. `starts` and `offsets` are then None.
    """

    pages: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    spans: torch.Tensor | None = None


def check_starts(starts: np.ndarray, page_size: int) -> None:
    """Refuse invalid positions.

    Raises:
        DataError: a position of a page's first token below 0, or past the most tokens.
    """
    most = MOST_TOKENS - page_size
    if len(starts) and (starts.min() < 0 or starts.max() > most):
        raise DataError(
            f"a table's starts must not be negative and at most {most}, got {starts[(starts < 0) | (starts > most)][0]}"
        )


def _check_ids(name: str, ids: np.ndarray, store: PageStore) -> None:
    pages = store.num_pages
    if len(ids) and (ids.min() < 0 or ids.max() >= pages):
        raise DataError(
            f"{name} names a page that its store does not have: {ids[(ids < 0) | (ids >= pages)][0]} of {pages}"
        )


def check_factors(scaling: float, softcap: float | None) -> None:
    """Refuse factors on scores that kernels do not take alike.

    Raises:
        DataError: the number and its limits.
    """
    if not _is_number(scaling) or not 0 < scaling < 1e30:
        raise DataError(f"scaling={scaling!r} must be a positive number below 1e30")
    if softcap is not None and not (_is_number(softcap) and LEAST_SOFTCAP <= softcap <= MOST_SOFTCAP):
        raise DataError(
            f"softcap={softcap!r} must lie between {LEAST_SOFTCAP:g} and {MOST_SOFTCAP:g}; None for no cap, which a"
            " larger one would be"
        )


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def check_closing(store: PageStore, page_ids: np.ndarray) -> np.ndarray:
    """Check the pages to close and return them as int64 [n].

    Raises:
        DataError: ids that are not ids of the store's pages.
    """
    ids = np.asarray(page_ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(f"page_ids must be one-dimensional integers, got {ids.dtype} {list(ids.shape)}")
    _check_ids("page_ids", ids, store)
    return np.ascontiguousarray(ids, np.int64)


def settle(layout: PageLayout, k: torch.Tensor, v: torch.Tensor, status: Sequence[int]) -> None:
    """Judge the status of a call that wrote k and v.

    Args:
        status: two each, of keys and of values: clamped elements; 1 where scales overflowed; 1 where numbers were not
            finite.

    Raises:
        DataError: NaN or infinity, or a scale that overflows its storage dtype.
    """
    for i, (name, x, spec) in enumerate((("keys", k, layout.key), ("values", v, layout.value))):
        if status[4 + i]:
            require_finite(x, name)
        if status[2 + i]:
            way_out = wider_scales(spec) or "keep the layer raw (an Override)"
            raise ScaleOverflowError(f"a scale, bias or mean of the {name} overflows {spec.scale_dtype}; {way_out}")


def wider_scales(spec: QuantSpec, then: str = "") -> str:
    """Return what to do about a scale that overflows, and `then`; nothing where a format's scales have one dtype."""
    return "" if spec.scale_dtype == SCALE_8BIT else f"use scale_dtype='float32' or 'bfloat16'{then}"


class BackendPlan(Protocol):
    """A backend's plan of attention, whose methods are those of `ops.attend.Attention`."""

    reads_host: bool
    result_dtype: torch.dtype

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None: ...
    def update(
        self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None
    ) -> None: ...
    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor: ...
    def explain(self) -> str: ...
