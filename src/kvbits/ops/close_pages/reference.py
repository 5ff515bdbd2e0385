"""Raw keys and values to whole pages: choose parameters, quantize, pack, once."""

from __future__ import annotations

import numpy as np
import torch

from ...quant.packing import pack
from ...quant.qparams import QParams, choose_qparams, quantize
from ...spec import PageLayout
from ..dequantize_pages.reference import section
from ..types import PageStore

PAGES_PER_STEP = 64


def close_pages(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout, static: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[str, int]]:
    """Pages of n x page_size tokens.

    Args:
        k, v: finite [n, H, page_size, head_dim], any float dtype.
        static: calibrated float32 `k_scale` .. `v_bias`, [H, groups or channels], for static specs.

    Returns:
        uint8 [n, H, head_bytes], padding zeroed, and how many elements of keys and values were clamped to their code range.
    """
    static = static or {}
    pages = torch.zeros(*k.shape[:2], layout.head_bytes, dtype=torch.uint8, device=k.device)
    saturated = {}
    for kind, spec, x in (("k", layout.key, k), ("v", layout.value, v)):
        if spec.is_raw:
            section(pages, layout, f"{kind}_raw").copy_(x)
            continue
        known = QParams(static[f"{kind}_scale"], static.get(f"{kind}_bias")) if spec.static and f"{kind}_scale" in static else None
        qparams = choose_qparams(x.float(), spec, known)
        codes, saturated[kind] = quantize(x.float(), spec, qparams)
        for i, plane in enumerate(pack(codes, spec.number_format, kind)):
            section(pages, layout, f"{kind}_plane{i}").copy_(plane.unflatten(-1, (layout.page_size, -1)))
        for name in ("scale", "bias", "mean"):
            if f"{kind}_{name}" in layout.sections:
                section(pages, layout, f"{kind}_{name}").copy_(getattr(qparams, name))
    return pages, saturated


def refuses(k: torch.Tensor, store: PageStore) -> None:
    """The reference takes everything."""


def close(k: torch.Tensor, v: torch.Tensor, store: PageStore, page_ids: np.ndarray) -> dict[str, int]:
    """Close pages in place: k, v [n, H, page_size, head_dim] into the store's pages `page_ids` [n]. Returns clamped elements by kind."""
    total: dict[str, int] = {}
    for i in range(0, len(page_ids), PAGES_PER_STEP):
        some = slice(i, i + PAGES_PER_STEP)
        pages, saturated = close_pages(k[some], v[some], store.layout, store.static)
        for page_id, page in zip(page_ids[some], pages, strict=True):
            store.page(int(page_id)).copy_(page)
        for kind, n in saturated.items():
            total[kind] = total.get(kind, 0) + n
    return total
