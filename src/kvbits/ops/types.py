"""What ops take: one layer's pages of one pool, and which of them each sequence reads. Never a cache object.

Shapes use B = sequences in the batch, T = query tokens per sequence, H = kv heads, Hq = query heads (a multiple of H), D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..spec import LowLayout, PageLayout


class _Slabs:
    """Memory of pages: page ids count through the slabs in order."""

    slabs: tuple[torch.Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.slabs[0].device

    def addresses(self) -> np.ndarray:
        """int64 [num_pages]: byte address of each page's first struct."""
        parts = [s.data_ptr() + s.stride(0) * np.arange(s.shape[0], dtype=np.int64) for s in self.slabs]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def gather(self, page_ids: np.ndarray) -> torch.Tensor:
        """uint8 [n, H, head_bytes]: copies of a few pages (for the reference; kernels read in place)."""
        if len(self.slabs) == 1:
            return self.slabs[0][torch.from_numpy(page_ids).to(self.device)]
        return torch.stack([self.page(int(i)) for i in page_ids])

    def page(self, page_id: int) -> torch.Tensor:
        """uint8 [H, head_bytes]: the page itself, writable."""
        for slab in self.slabs:
            if page_id < slab.shape[0]:
                return slab[page_id]
            page_id -= slab.shape[0]
        raise IndexError(f"page {page_id} lies past the pool's end")


@dataclass(frozen=True)
class PageStore(_Slabs):
    """The pages of one layer in one pool.

    Attributes:
        layout: byte layout of a page.
        slabs: uint8 views [num_pages_in_slab, H, head_bytes], the last two dims dense, the first strided; page ids count through them in order.
        static: what the layer's pages share, float32, only names the specs need: calibrated `k_scale`, `k_bias`, `v_scale`, `v_bias`
            [H, groups or channels], `k_codebook`, `v_codebook` [H, entries], and `k_inv_freq` [head_dim / 2], radians per token.
    """

    layout: PageLayout
    slabs: tuple[torch.Tensor, ...]
    static: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LowStore(_Slabs):
    """Low planes of one layer in one pool; `slabs` as in `PageStore`."""

    layout: LowLayout
    slabs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class PageTable:
    """Which pages each sequence reads: ragged lists in one array each (int32 or int64, on the host).

    Attributes:
        indptr: [B + 1]; sequence b reads entries indptr[b] .. indptr[b+1] - 1.
        page_ids: [N] int64, into the store.
        starts: [N] int64, position in its sequence of each page's first token.
        lengths: [N] int32, visible tokens of each page, 0 < length <= page_size.
        low: [N] int64 each, the pages of the low planes that refine these, the coarsest first (`Part.low` are their stores).
    """

    indptr: np.ndarray
    page_ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    low: tuple[np.ndarray, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.page_ids)


@dataclass(frozen=True)
class Part:
    """Pages of one format that a call attends to: those of `store`, refined by low planes where `low` has stores (one for each of `table.low`)."""

    store: PageStore
    table: PageTable
    low: tuple[LowStore, ...] = ()

    @property
    def layouts(self) -> tuple[PageLayout | LowLayout, ...]:
        """What a kernel must know to read the part."""
        return (self.store.layout, *(s.layout for s in self.low))


@dataclass(frozen=True)
class AttendCall:
    """Everything about an attention call but the tensors' contents.

    Attributes:
        parts: closed, sink and tail pages, each with its own format: as many parts as there are zones.
        scaling: factor on the scores before softmax.
        sliding_window: a query at position p sees keys at positions > p - sliding_window; None for all.
        softcap: scores become softcap * tanh(scores / softcap); None for no cap.
        page_lse: None, or an output: float32 [pages of all parts in order, T, Hq] on the host, filled with -inf, where the log-sum-exp of each page's own
            scores goes, -inf where a query sees nothing of it. exp(page_lse - lse) is the share of the attention that the page gets.
    """

    parts: tuple[Part, ...]
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    page_lse: np.ndarray | None = None


def last_positions(call: AttendCall, batch: int, num_queries: int) -> np.ndarray:
    """int32 [B, num_queries]: the last query sees the newest token."""
    newest = np.zeros(batch, np.int64)
    for part in call.parts:
        t = part.table
        owner = np.repeat(np.arange(batch), np.diff(t.indptr))
        np.maximum.at(newest, owner, t.starts + t.lengths)
    return (newest[:, None] - num_queries + np.arange(num_queries)).astype(np.int32)


def kvquant_extras(layout: PageLayout) -> str | None:
    """What of KVQuant a layout uses beyond scales and integer or float codes, in words for a refusal, or None."""
    specs = (layout.key, layout.value)
    found = [
        words
        for words, used in (
            ("codebooks", any(s.has_codebook for s in specs)),
            ("outliers", any(s.outliers for s in specs)),
            ("keys stored before the rotary embedding", layout.key.pre_rope),
        )
        if used
    ]
    return " and ".join(found) or None
