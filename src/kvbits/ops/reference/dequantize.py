"""Pages to values: the inverse of close, and the judge of every kernel that reads pages."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import DataError
from ...quant.basis import offsets_of, out_of_basis
from ...quant.packing import unpack_side
from ...quant.qparams import TORCH_DTYPES, QParams, dequantize
from ...quant.qparams import read as read_stored
from ...quant.rotary import turn
from ...spec import PageLayout


def section(pages: torch.Tensor, layout: PageLayout, name: str) -> torch.Tensor:
    """Return one section of pages [..., H, head_bytes] as its own dtype, [..., H, *section shape] (a view where
    alignment allows).
    """
    s = layout.sections[name]
    raw = pages[..., s.offset : s.offset + s.nbytes]
    return raw.view(TORCH_DTYPES[s.dtype]).unflatten(-1, s.shape)


def stored_qparams(pages: torch.Tensor, layout: PageLayout, kind: str, static: dict[str, torch.Tensor]) -> QParams:
    """Return parameters of keys ("k") or values ("v") of pages [..., H, head_bytes], float32."""

    def read(name: str) -> torch.Tensor | None:
        full = f"{kind}_{name}"
        if full in layout.sections:
            return read_stored(section(pages, layout, full), layout.sections[full].dtype)
        return static.get(full) if name in ("scale", "bias") else None

    scale = read("scale")
    if scale is None:
        raise KeyError(f"{kind}_scale is neither stored in the page nor calibrated")
    return QParams(scale, read("bias"), read("mean"), read("stretch"), static.get(f"{kind}_codebook"))


def require_starts(starts: np.ndarray | None, num_pages: int) -> np.ndarray:
    """Return int64 [num_pages]: `starts`, checked. Raises DataError where there are none or too few."""
    if starts is None or len(starts) != num_pages:
        got = "no" if starts is None else len(starts)
        raise DataError(
            f"{num_pages} pages of keys that were turned back were given {got} starts; pass `starts`, each page's first"
            " position"
        )
    return np.ascontiguousarray(starts, np.int64)


def dequantize_pages(
    pages: torch.Tensor,
    layout: PageLayout,
    static: dict[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    starts: np.ndarray | None = None,
    in_basis: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [n, H, page_size, head_dim] of pages uint8 [n, H, head_bytes], computed in `dtype`.

    Args:
        starts: [n] position of each page's first token, to which keys that were turned back are turned.
        in_basis: leave trellis codes in the basis that they are stored in.

    Raises:
        DataError: outliers outside of a page.
    """
    static = static or {}
    found = []
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if spec.is_raw:
            found.append(section(pages, layout, f"{kind}_raw").to(dtype))
            continue
        x = dequantize(page_codes(pages, layout, kind), spec, stored_qparams(pages, layout, kind, static), dtype, kind)
        if spec.outliers:
            index, error = (section(pages, layout, f"{kind}_outlier_{name}") for name in ("index", "value"))
            index, flat = index.long(), x.flatten(-2)
            if (outside := (index < 0) | (index >= flat.shape[-1])).any():
                raise DataError(
                    f"a page has an outlier at element {int(index[outside][0])} of its {flat.shape[-1]}, which no"
                    " quantized page has: it was written over, or comes from a file that was made by hand; compute its"
                    " tokens again"
                )
            x = flat.scatter_add(-1, index, error.to(dtype)).view_as(x)
        if spec.pre_rope:
            first = torch.from_numpy(require_starts(starts, len(x)))
            x = turn(x, (first[:, None] + torch.arange(layout.page_size, device="cpu"))[:, None], static["k_inv_freq"])
        if spec.has_offsets:
            x = x + offsets_of(static, require_starts(starts, len(x)), layout.page_size).to(dtype)
        if spec.basis is not None and not in_basis:
            x = out_of_basis(x, spec, static, require_starts(starts, len(x)) if spec.needs_rotary else None)
        found.append(x)
    return found[0], found[1]


def page_codes(pages: torch.Tensor, layout: PageLayout, kind: str) -> torch.Tensor:
    """Return codes uint8 [n, H, page_size, head_dim] of keys ("k") or values ("v") of pages [n, H, head_bytes]."""
    spec = layout.key if kind == "k" else layout.value
    planes = [section(pages, layout, f"{kind}_plane{i}").flatten(-2) for i in range(len(spec.planes(layout.dim(kind))))]
    return unpack_side(planes, spec, kind, layout.page_size, layout.dim(kind))
