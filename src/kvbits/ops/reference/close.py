"""Raw keys and values to whole pages: turn keys back or change the basis if they are stored so, choose parameters,
quantize, list outliers, pack, once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import ScaleOverflowError
from ...quant.basis import into_basis
from ...quant.outliers import worst
from ...quant.packing import pack_side
from ...quant.qparams import (
    QParams,
    choose_qparams,
    dequantize,
    expand,
    quantize,
    rounded,
    rounded_scale,
    stored,
)
from ...quant.rotary import turn_pages_back
from ...spec import PageLayout, QuantSpec
from ..store import STATUS_FIELDS, note
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


def encode(
    x: torch.Tensor, kind: str, spec: QuantSpec, static: QParams | None, codebook: torch.Tensor | None
) -> Encoded:
    """Quantize pages `x` [n, H, tokens, head_dim], float32 and finite, of keys ("k") or values ("v")."""
    qparams = choose_qparams(x, spec, static, codebook)
    codes, outside = quantize(x, spec, qparams, kind)
    beside = qparams.stored()
    if not spec.outliers:
        return Encoded(codes, qparams, beside, int(outside.sum()))
    listed = worst((x - dequantize(codes, spec, qparams, kind=kind)).abs(), outside, spec.num_outliers(*x.shape[-2:]))
    outside = outside.flatten(-2).scatter(-1, listed, False).view_as(outside)
    if spec.has_stretch:
        qparams = dataclasses.replace(qparams, stretch=_stretch(x, spec, qparams, outside))
        codes, _ = quantize(x, spec, qparams, kind)
        beside = qparams.stored()
        outside = torch.zeros_like(outside)
    error = (x - dequantize(codes, spec, qparams, kind=kind)).flatten(-2).gather(-1, listed)
    return Encoded(
        codes,
        qparams,
        beside | {"outlier_index": listed, "outlier_value": rounded(error, spec.scale_dtype)},
        int(outside.sum()),
    )


def _stretch(x: torch.Tensor, spec: QuantSpec, qparams: QParams, outside: torch.Tensor) -> torch.Tensor:
    """Return the factor per token [n, H, tokens] that brings its furthest unlisted element just inside, 1 where none is
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
    """Return pages of n x page_size tokens.

    Args:
        k, v: finite [n, H, page_size, head_dim], any float dtype.
        static: calibrated float32 `k_scale` .. `v_bias`, [H, groups or channels], for static specs; `k_codebook`,
            `v_codebook` [H, entries] for codebook formats; `k_inv_freq` [head_dim / 2] for pre-RoPE keys and, with
            `k_basis` [H, head_dim, head_dim] and `k_offsets` [H, 33, head_dim], for those in a calibrated basis.
        starts: [n] position of each page's first token, for keys that are turned back.

    Returns:
        uint8 [n, H, head_bytes], padding zeroed, and how many elements of keys and values were clamped to their code
            range.
    """
    pages = torch.zeros(*k.shape[:2], layout.head_bytes, dtype=torch.uint8, device=k.device)
    sides = (("k", layout.key, k), ("v", layout.value, v))
    saturated = {kind: _put_side(pages, layout, kind, x, static or {}, starts) for kind, _, x in sides}
    return pages, {kind: saturated[kind] for kind, spec, _ in sides if not spec.is_raw}


def _put_side(
    pages: torch.Tensor,
    layout: PageLayout,
    kind: str,
    x: torch.Tensor,
    static: dict[str, torch.Tensor],
    starts: np.ndarray | None,
) -> int:
    """Write keys ("k") or values ("v") into pages [n, H, head_bytes]. Returns how many elements were clamped."""
    spec = layout.key if kind == "k" else layout.value
    if spec.is_raw:
        section(pages, layout, f"{kind}_raw").copy_(x)
        return 0
    found = encode_side(rows_as_stored(x, spec, static, starts), kind, spec, static)
    for i, plane in enumerate(pack_side(found.codes, spec, kind)):
        section(pages, layout, f"{kind}_plane{i}").copy_(plane.unflatten(-1, (layout.page_size, -1)))
    for name, t in found.stored.items():
        if (s := layout.sections.get(f"{kind}_{name}")) is not None:
            section(pages, layout, s.name).copy_(stored(t, s.dtype))
    return found.saturated


def rows_as_stored(
    x: torch.Tensor,
    spec: QuantSpec,
    static: dict[str, torch.Tensor],
    starts: np.ndarray | None,
    places: np.ndarray | None = None,
) -> torch.Tensor:
    """Return keys or values of pages as they are stored: float32, turned back or in their basis where the spec says so.

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
    """Return codes of keys ("k") or values ("v") of pages, given as they are stored."""
    known = (
        QParams(static[f"{kind}_scale"], static.get(f"{kind}_bias"))
        if spec.static and f"{kind}_scale" in static
        else None
    )
    return encode(as_stored, kind, spec, known, static.get(f"{kind}_codebook"))


def close(
    k: torch.Tensor,
    v: torch.Tensor,
    store: PageStore,
    page_ids: np.ndarray,
    starts: np.ndarray | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Close pages in place.

    Args:
        k, v: [n, H, page_size, head_dim] float32, float16 or bfloat16.
        page_ids: [n] pages of the store to write.
        starts: [n] position of each page's first token, for keys stored before the rotary embedding or in a basis.
        status: int32 [STATUS_FIELDS] on the device, added to, as of `ops.store`. After an overflow, NaN or infinity
            the pages' numbers are unusable.

    Raises:
        DataError: arguments that do not fit together; nothing is written. Without a `status` also what `settle` raises.
    """
    page_ids = check_closing(store, page_ids)
    layout, found = store.layout, [0] * STATUS_FIELDS
    for i, x in enumerate((k, v)):
        found[4 + i] = int(not bool(torch.isfinite(x).all()))
    for first in range(0, 0 if any(found) else len(page_ids), PAGES_PER_STEP):
        some = slice(first, first + PAGES_PER_STEP)
        pages = torch.zeros(len(page_ids[some]), *store.slabs[0].shape[1:], dtype=torch.uint8, device=k.device)
        at = None if starts is None else starts[some]
        for i, (kind, x) in enumerate((("k", k), ("v", v))):
            try:
                found[i] += _put_side(pages, layout, kind, x[some], store.static, at)
            except ScaleOverflowError:
                found[2 + i] = 1
        for page_id, page in zip(page_ids[some], pages, strict=True):
            store.page(int(page_id)).copy_(page)
    note(found, k, v, layout, status)
