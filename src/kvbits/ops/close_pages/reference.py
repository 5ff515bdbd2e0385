"""Raw keys and values to whole pages: choose parameters, quantize, pack, once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...quant.nested import PLANES, low_codes
from ...quant.packing import pack
from ...quant.qparams import QParams, choose_qparams, normalize, quantize
from ...spec import LowLayout, NumberFormat, PageLayout
from ..dequantize_pages.reference import section
from ..types import LowStore, PageStore

PAGES_PER_STEP = 64


def close_pages(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout, static: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[str, int]]:
    """Pages uint8 [n, H, head_bytes] without low planes, and clamped elements by kind (see `close_nested`)."""
    pages, saturated = close_nested(k, v, layout, static)
    return pages[0], saturated


def close_nested(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout, static: dict[str, torch.Tensor] | None = None, low: Sequence[LowLayout] = ()
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Pages of n x page_size tokens, and the pages of their low planes.

    Args:
        k, v: finite [n, H, page_size, head_dim], any float dtype.
        static: calibrated float32 `k_scale` .. `v_bias`, [H, groups or channels], for static specs.
        low: layouts of the low planes that refine the pages, the coarsest first.

    Returns:
        uint8 [n, H, head_bytes] of each layout, padding zeroed, and how many elements of keys and values were clamped to their code range.
    """
    static = static or {}
    layouts: list[PageLayout | LowLayout] = [layout, *low]
    pages = [torch.zeros(*k.shape[:2], x.head_bytes, dtype=torch.uint8, device=k.device) for x in layouts]
    saturated = {}
    for kind, spec, x in (("k", layout.key, k), ("v", layout.value, v)):
        if spec.is_raw:
            section(pages[0], layout, f"{kind}_raw").copy_(x)
            continue
        known = QParams(static[f"{kind}_scale"], static.get(f"{kind}_bias")) if spec.static and f"{kind}_scale" in static else None
        qparams = choose_qparams(x.float(), spec, known)
        codes, saturated[kind] = quantize(x.float(), spec, qparams)
        _store(pages[0], layout, kind, codes, spec.number_format)
        for name in ("scale", "bias", "mean"):
            if f"{kind}_{name}" in layout.sections:
                section(pages[0], layout, f"{kind}_{name}").copy_(getattr(qparams, name))
        fine = [(i, bits) for i, y in enumerate(low, 1) if (bits := y.key_bits if kind == "k" else y.value_bits)]
        if fine:
            missed = normalize(x.float(), spec, qparams) - (codes.float() - spec.zero)
            for (i, bits), plane in zip(fine, low_codes(missed, [bits for _, bits in fine]), strict=True):
                _store(pages[i], layouts[i], kind, plane, PLANES[bits])
    return pages, saturated


def _store(pages: torch.Tensor, layout: PageLayout | LowLayout, kind: str, codes: torch.Tensor, fmt: NumberFormat) -> None:
    for i, plane in enumerate(pack(codes, fmt, kind)):
        section(pages, layout, f"{kind}_plane{i}").copy_(plane.unflatten(-1, (layout.page_size, -1)))


def refuses(k: torch.Tensor, store: PageStore, low: Sequence[LowStore] = ()) -> None:
    """The reference takes everything."""


def close(k: torch.Tensor, v: torch.Tensor, store: PageStore, page_ids: np.ndarray, low: Sequence[tuple[LowStore, np.ndarray]] = ()) -> dict[str, int]:
    """Close pages in place: k, v [n, H, page_size, head_dim] into the store's pages `page_ids` [n], their low planes into those of `low`,
    the coarsest first. Returns clamped elements by kind."""
    total: dict[str, int] = {}
    targets: list[tuple[PageStore | LowStore, np.ndarray]] = [(store, page_ids), *low]
    for i in range(0, len(page_ids), PAGES_PER_STEP):
        some = slice(i, i + PAGES_PER_STEP)
        pages, saturated = close_nested(k[some], v[some], store.layout, store.static, [s.layout for s, _ in low])
        for (to, ids), made in zip(targets, pages, strict=True):
            for page_id, page in zip(ids[some], made, strict=True):
                to.page(int(page_id)).copy_(page)
        for kind, n in saturated.items():
            total[kind] = total.get(kind, 0) + n
    return total
