"""From a page layout to an instantiation of attend.cu that reads codes as levels of a table (levels_walk.cuh): the formats of KVQuant.

Layouts with these techniques that it cannot read are unpacked to 16-bit rows (chunk.py).
"""

from __future__ import annotations

import torch

from ...spec import PageLayout, PerChannel, PerToken, QuantSpec

PAGE = 64
HEAD_DIMS = (64, 128)
MAX_WARPS = 11
TABLE_ROWS = {4: 256, 3: 0x78, 2: 0x34}


def refuses(layout: PageLayout) -> str | None:
    """Why levels_walk.cuh cannot read pages of this layout, or None."""
    key, value = layout.key, layout.value
    for kind, spec in (("key", key), ("value", value)):
        if spec.is_raw or spec.number_format.kind == "float" or spec.bits > 4:
            return f"{spec.format} {kind}s are no numbers of at most 16 levels"
        if spec.center or spec.scale_dtype != "float16":
            return f"{kind}s have a mean or scales in {spec.scale_dtype}"
    if not isinstance(key.granularity, PerChannel):
        return "keys have no scale per channel"
    if not isinstance(value.granularity, PerToken):
        return "values have no scale per token"
    if layout.head_dim not in HEAD_DIMS or layout.page_size != PAGE:
        return f"head_dim={layout.head_dim} and page_size={layout.page_size} are not 64 or 128 and {PAGE}"
    return None


def shared_bytes(layout: PageLayout, warps: int) -> int:
    """Struct Levels of levels.cuh, rounded up to where the ring begins."""
    d = layout.head_dim
    rows = max(TABLE_ROWS[s.bits] for s in (layout.key, layout.value))
    scales = 1 if layout.key.static else warps
    size = rows * 256 + 2 * (d // 32) * 2 * 32 * 16 + d // 2 * 8 * (2 + warps + scales + 8) + d // 32 * 512 + 16
    return -(-size // 128) * 128


def defines(layout: PageLayout) -> dict[str, int]:
    """Macros beside those of every packed format."""
    found = {"HAS_LEVELS": 1, "K_STRETCH": int(layout.key.has_stretch)}
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        found[f"{kind.upper()}_OUTLIERS"] = spec.num_outliers(layout.page_size, layout.head_dim)
        for name in ("stretch", "outlier_index", "outlier_value"):
            section = layout.sections.get(f"{kind}_{name}")
            found[f"{kind}_{name}".upper() + ("_OFFSET" if name == "stretch" else "")] = section.offset if section else 0
    return found


def levels(spec: QuantSpec, codebook: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """float32 [num_heads, 2**bits]: what every code stands for."""
    if codebook is not None:
        return codebook.float().contiguous()
    return (torch.arange(2**spec.bits, dtype=torch.float32) - spec.zero).repeat(num_heads, 1)
