"""Raw keys and values to whole pages: turn keys back or change the basis if they are stored so, choose parameters,
quantize, list outliers, pack, once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from ...quant.basis import into_basis
from ...quant.outliers import worst
from ...quant.packing import pack_side
from ...quant.qparams import (
    QParams,
    choose_qparams,
    dequantize,
    expand,
    quantize,
    require_finite,
    rounded,
    rounded_scale,
    stored,
)
from ...quant.rotary import turn_pages_back
from ...spec import PageLayout, QuantSpec
from ..types import PageStore, check_closing
from .dequantize import require_starts, section

PAGES_PER_STEP = 64


@dataclass
class Encoded:
    """Codes of pages and everything stored beside them (parameters and outliers), by section name without the side's
    prefix.
    """

    codes: torch.Tensor
    qparams: QParams
    stored: dict[str, torch.Tensor]
    saturated: int


def encode(x: torch.Tensor, spec: QuantSpec, static: QParams | None, codebook: torch.Tensor | None) -> Encoded:
    """Quantize pages `x` [n, H, tokens, head_dim], float32 and finite."""
    qparams = choose_qparams(x, spec, static, codebook)
    codes, outside = quantize(x, spec, qparams)
    beside = qparams.stored()
    if not spec.outliers:
        return Encoded(codes, qparams, beside, int(outside.sum()))
    listed = worst((x - dequantize(codes, spec, qparams)).abs(), outside, spec.num_outliers(*x.shape[-2:]))
    outside = outside.flatten(-2).scatter(-1, listed, False).view_as(outside)
    if spec.has_stretch:
        qparams = dataclasses.replace(qparams, stretch=_stretch(x, spec, qparams, outside))
        codes, _ = quantize(x, spec, qparams)
        beside = qparams.stored()
        outside = torch.zeros_like(outside)
    error = (x - dequantize(codes, spec, qparams)).flatten(-2).gather(-1, listed)
    return Encoded(
        codes,
        qparams,
        beside | {"outlier_index": listed, "outlier_value": rounded(error, spec.scale_dtype)},
        int(outside.sum()),
    )


def _stretch(x: torch.Tensor, spec: QuantSpec, qparams: QParams, outside: torch.Tensor) -> torch.Tensor:
    """Factor per token [n, H, tokens] that brings its furthest unlisted element just inside, 1 where none is
    outside.
    """
    away = x if qparams.bias is None else x - expand(qparams.bias, spec, x.shape[-1])
    levels = away.abs() * expand(qparams.scale.reciprocal(), spec, x.shape[-1]) / spec.q_max
    return rounded_scale(torch.where(outside, levels, 1.0).amax(-1).clamp(min=1.0), spec.scale_dtype)


def close_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PageLayout,
    static: dict[str, torch.Tensor] | None = None,
    starts: np.ndarray | None = None,
) -> tuple[torch.Tensor, dict[str, int]]:
    """Pages of n x page_size tokens.

    Args:
        k, v: finite [n, H, page_size, head_dim], any float dtype.
        static: calibrated float32 `k_scale` .. `v_bias`, [H, groups or channels], for static specs; `k_codebook`,
            `v_codebook` [H, entries] for codebook formats; `k_inv_freq` [head_dim / 2] for pre-RoPE keys and, with
            `k_basis` [H, head_dim, head_dim] and `k_offsets` [H, 5, head_dim], for those in a calibrated basis.
        starts: [n] position of each page's first token, for keys that are turned back.

    Returns:
        uint8 [n, H, head_bytes], padding zeroed, and how many elements of keys and values were clamped to their code
            range.
    """
    static = static or {}
    pages = torch.zeros(*k.shape[:2], layout.head_bytes, dtype=torch.uint8, device=k.device)
    saturated = {}
    for kind, spec, x in (("k", layout.key, k), ("v", layout.value, v)):
        if spec.is_raw:
            section(pages, layout, f"{kind}_raw").copy_(x)
            continue
        found = encode_side(rows_as_stored(x, spec, static, starts), kind, spec, static)
        saturated[kind] = found.saturated
        for i, plane in enumerate(pack_side(found.codes, spec, kind)):
            section(pages, layout, f"{kind}_plane{i}").copy_(plane.unflatten(-1, (layout.page_size, -1)))
        for name, t in found.stored.items():
            if (s := layout.sections.get(f"{kind}_{name}")) is not None:
                section(pages, layout, s.name).copy_(stored(t, s.dtype))
    return pages, saturated


def rows_as_stored(
    x: torch.Tensor,
    spec: QuantSpec,
    static: dict[str, torch.Tensor],
    starts: np.ndarray | None,
    places: np.ndarray | None = None,
) -> torch.Tensor:
    """Keys or values of pages as they are stored: float32, turned back or in their basis where the spec says so.

    Arguments as of `close_pages`; `places` int64 [n, tokens] where x [n, H, tokens, head_dim] are not whole pages.
    """
    x = x.float()
    if spec.pre_rope:
        return turn_pages_back(x, require_starts(starts, len(x)), static["k_inv_freq"])
    return (
        x
        if spec.basis is None
        else into_basis(x, spec, static, require_starts(starts, len(x)) if spec.needs_rotary else None, places)
    )


def encode_side(as_stored: torch.Tensor, kind: str, spec: QuantSpec, static: dict[str, torch.Tensor]) -> Encoded:
    """Codes of keys ("k") or values ("v") of pages, given as they are stored."""
    known = (
        QParams(static[f"{kind}_scale"], static.get(f"{kind}_bias"))
        if spec.static and f"{kind}_scale" in static
        else None
    )
    return encode(as_stored, spec, known, static.get(f"{kind}_codebook"))


def close(
    k: torch.Tensor,
    v: torch.Tensor,
    store: PageStore,
    page_ids: np.ndarray,
    starts: np.ndarray | None = None,
) -> dict[str, int]:
    """Close pages in place: k, v [n, H, page_size, head_dim] into the store's pages `page_ids` [n], whose first tokens
    are at `starts` [n]. Returns clamped elements by kind.

    Raises:
        DataError: pages that are not the store's own, NaN or infinity (nothing is written), or a scale that overflows
            its storage dtype.
    """
    page_ids = check_closing(store, page_ids)
    for name, x in (("keys", k), ("values", v)):
        require_finite(x, name)
    total: dict[str, int] = {}
    for i in range(0, len(page_ids), PAGES_PER_STEP):
        some = slice(i, i + PAGES_PER_STEP)
        first = None if starts is None else starts[some]
        pages, saturated = close_pages(k[some], v[some], store.layout, store.static, first)
        for page_id, page in zip(page_ids[some], pages, strict=True):
            store.page(int(page_id)).copy_(page)
        for kind, n in saturated.items():
            total[kind] = total.get(kind, 0) + n
    return total
