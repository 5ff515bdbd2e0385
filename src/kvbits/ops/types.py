"""What ops take: one layer's pages of one pool, and which of them each sequence reads. Never a cache object.

Shapes use B = sequences in the batch, T = query tokens per sequence, H = kv heads, Hq = query heads (a multiple of H),
D = head_dim, of values and outputs value_head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DataError
from ..later import upload
from ..quant.qparams import require_finite
from ..spec import MOST_TOKENS, SCALE_8BIT, PageLayout, QuantSpec

LEAST_SOFTCAP, MOST_SOFTCAP = 1e-3, 1e4
"""Kernels compute tanh to an absolute error, which a cap multiplies."""


@dataclass(frozen=True)
class PageStore:
    """The pages of one layer in one pool.

    Attributes:
        layout: byte layout of a page.
        slabs: uint8 views [num_pages_in_slab, H, head_bytes], the last two dims dense, the first strided; page ids
            count through them in order.
        static: what the layer's pages share, float32, only names the specs need: calibrated `k_scale`, `k_bias`,
            `v_scale`, `v_bias` [H, groups or channels], levels [H, entries], `k_offsets` [H, 5, head_dim], and
            `k_inv_freq` [head_dim / 2], radians per token (`static.read_with` has the names).
        turn: for centred keys stored token by token, float32 [3, head_dim]: how the mean key of a page is turned on to
            the next one (`quant.rotary.turn_by` of page_size positions); None where the rotary embedding is not known,
            which costs code range and nothing else.
    """

    layout: PageLayout
    slabs: tuple[torch.Tensor, ...]
    static: dict[str, torch.Tensor] = field(default_factory=dict)
    turn: torch.Tensor | None = None

    def __post_init__(self) -> None:
        heads, nbytes = self.layout.num_kv_heads, self.layout.head_bytes
        for slab in self.slabs:
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

    @property
    def num_pages(self) -> int:
        return sum(s.shape[0] for s in self.slabs)

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
        """uint8 [n, H, head_bytes]: copies of a few pages (for the reference; kernels read in place)."""
        if len(self.slabs) == 1:
            return self.slabs[0][upload(page_ids, self.device)]
        return torch.stack([self.page(int(i)) for i in page_ids])

    def page(self, page_id: int) -> torch.Tensor:
        """uint8 [H, head_bytes]: the page itself, writable."""
        if page_id < 0:
            raise IndexError(f"page {page_id} is negative")
        for slab in self.slabs:
            if page_id < slab.shape[0]:
                return slab[page_id]
            page_id -= slab.shape[0]
        raise IndexError(f"page {page_id} lies past the pool's end")


def page_offsets(slabs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """int64 [pages] on `device`: bytes from the first slab's start to every page; None for one slab, whose pages lie a
    stride apart.
    """
    return (
        None
        if len(slabs) == 1
        else _offsets(tuple((x.data_ptr() - slabs[0].data_ptr(), x.stride(0), len(x)) for x in slabs), device)
    )


@functools.lru_cache(maxsize=256)
def _offsets(slabs: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Of (start, stride, pages) of each slab."""
    return upload(
        torch.cat(
            [begin + stride * torch.arange(pages, dtype=torch.int64, device="cpu") for begin, stride, pages in slabs]
        ),
        device,
    )


_stores = WeakIdKeyDictionary()


def store_of(
    pages: torch.Tensor,
    layout: PageLayout,
    static: dict[str, torch.Tensor] | None = None,
    turn: torch.Tensor | None = None,
) -> PageStore:
    """The store of one slab: the same one for a tensor at every call, since what kernels keep of it takes longer to
    make than a token to store. Another one once the tensor is of other memory (`set_`, `data`).
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
    """Which pages each sequence reads of one part, as tensors on the pages' device.

    Without spans, the pages of a row follow each other: the page j after the first holds tokens j * page_size and on of
    the part, and every page is full but the last. With spans, each page says for itself where its tokens stand.

    Attributes:
        pages: int32 [B, W], rows dense: page numbers. A number that the pool has not reads the pool's last page, never
            other memory.
        tokens: int32 [B]: visible tokens of the part, this step's included; 0 for a sequence that reads nothing of it.
            In no part: a padding row, whose output is 0. Numbers past the row count as its end. With spans:
            (pages - 1) * page_size + visible tokens of the last page.
        starts: int32 [B], or None for 0: position of the part's first token.
        offsets: int32 [B], or None for 0: entry of the row at which the part's first page stands (a ring, say).
            One outside the row counts as the row's first or last entry; tokens then end with the row.
        spans: int32 [B, W, 2], dense, or None: position of the page's first token, and its visible tokens, 1 to
            page_size; where pages were dropped or cut. `starts` and `offsets` are then None.
    """

    pages: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    spans: torch.Tensor | None = None


def check_starts(starts: np.ndarray, page_size: int) -> None:
    """
    Raises:
        DataError: a position of a page's first token that cannot be.
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
    """int64 [n]: the pages to close, checked.

    Raises:
        DataError: ids that are no ids of the store's pages.
    """
    ids = np.asarray(page_ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(f"page_ids must be one-dimensional integers, got {ids.dtype} {list(ids.shape)}")
    _check_ids("page_ids", ids, store)
    return np.ascontiguousarray(ids, np.int64)


def settle(layout: PageLayout, k: torch.Tensor, v: torch.Tensor, status: Sequence[int]) -> dict[str, int]:
    """What storing k and v has found: how many elements of keys and of values were clamped to their code range
    (quantized ones only).

    Args:
        status: two each, of keys and of values: clamped elements, whether scales overflowed, whether numbers were not
            finite.

    Raises:
        DataError: NaN or infinity, or a scale that overflows its storage dtype.
    """
    if any(status[2:6]):
        for i, (name, x, spec) in enumerate((("keys", k, layout.key), ("values", v, layout.value))):
            if status[4 + i]:
                require_finite(x, name)
            if status[2 + i]:
                way_out = wider_scales(spec) or "keep the layer raw (an Override)"
                raise DataError(f"a scale, bias or mean of the {name} overflows {spec.scale_dtype}; {way_out}")
    return {
        kind: n for kind, spec, n in (("k", layout.key, status[0]), ("v", layout.value, status[1])) if not spec.is_raw
    }


def wider_scales(spec: QuantSpec, then: str = "") -> str:
    """What to do about a scale that overflows, and `then`; nothing where a format's scales have one dtype."""
    return "" if spec.scale_dtype == SCALE_8BIT else f"use scale_dtype='float32' or 'bfloat16'{then}"
