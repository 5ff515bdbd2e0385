"""Pages to values: the inverse of close_pages, and the judge of every kernel that reads pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...quant.nested import PLANES
from ...quant.packing import unpack
from ...quant.qparams import TORCH_DTYPES, QParams, dequantize
from ...spec import LowLayout, NumberFormat, PageLayout


def section(pages: torch.Tensor, layout: PageLayout | LowLayout, name: str) -> torch.Tensor:
    """One section of pages [..., H, head_bytes] as its own dtype, [..., H, *section shape] (a view where alignment allows)."""
    s = layout.sections[name]
    raw = pages[..., s.offset : s.offset + s.nbytes]
    return raw.view(TORCH_DTYPES[s.dtype]).unflatten(-1, s.shape)


def stored_qparams(pages: torch.Tensor, layout: PageLayout, kind: str, static: dict[str, torch.Tensor]) -> QParams:
    """Scale, bias and mean of keys ("k") or values ("v") of pages [..., H, head_bytes], float32."""

    def read(name: str) -> torch.Tensor | None:
        full = f"{kind}_{name}"
        if full in layout.sections:
            return section(pages, layout, full).float()
        return static.get(full)

    scale = read("scale")
    if scale is None:
        raise KeyError(f"{kind}_scale is neither stored in the page nor calibrated")
    return QParams(scale, read("bias"), read("mean"))


def dequantize_pages(
    pages: torch.Tensor,
    layout: PageLayout,
    static: dict[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    low: Sequence[tuple[torch.Tensor, LowLayout]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [..., H, page_size, head_dim] of pages uint8 [..., H, head_bytes], computed in `dtype`.

    Args:
        low: the pages of low planes that refine them, [..., H, head_bytes of their layout] each, the coarsest first.
    """
    found = []
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if spec.is_raw:
            found.append(section(pages, layout, f"{kind}_raw").to(dtype))
            continue
        codes = _codes(pages, layout, kind, spec.number_format)
        planes = []
        for fine, fine_layout in low:
            if bits := fine_layout.key_bits if kind == "k" else fine_layout.value_bits:
                planes.append((_codes(fine, fine_layout, kind, PLANES[bits]), bits))
        found.append(dequantize(codes, spec, stored_qparams(pages, layout, kind, static or {}), dtype, planes))
    return found[0], found[1]


def _codes(pages: torch.Tensor, layout: PageLayout | LowLayout, kind: str, fmt: NumberFormat) -> torch.Tensor:
    planes = [section(pages, layout, f"{kind}_plane{i}").flatten(-2) for i in range(len(fmt.planes))]
    return unpack(planes, fmt, kind, layout.page_size, layout.head_dim)
