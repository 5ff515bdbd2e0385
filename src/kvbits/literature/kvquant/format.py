"""Mapping of a page layout to an instantiation of codebook.cu, which reads codes as levels of a table: the formats of
KVQuant.

Layouts with these techniques that it cannot read are unpacked to 16-bit rows (ops/long_queries.py).
"""

from __future__ import annotations

import torch

from ...spec import PageLayout, PerChannel, PerToken, QuantSpec

PAGE = 64
HEAD_DIMS = (64, 128)
MAX_WARPS = 11
WIDE_FROM = 160 << 10
"""Bytes of shared memory from which tables have a row for every byte."""
TABLE_ROWS = {4: 256, 3: 0x78, 2: 0x34}


def extras(layout: PageLayout) -> str | None:
    """Name what a layout uses of KVQuant beyond scales and integer or float codes. The words are for a refusal. Return
    None if there is nothing to name.
    """
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


def refuses(layout: PageLayout) -> str | None:
    """Return why codebook.cu cannot read pages of this layout, or None."""
    key, value = layout.key, layout.value
    if layout.head_dim != layout.value_head_dim:
        return f"keys have {layout.head_dim} channels and values {layout.value_head_dim}; the kernel reads one width"
    for kind, spec in (("key", key), ("value", value)):
        if spec.is_raw or spec.number_format.kind == "float" or spec.bits > 4:
            return f"{spec.format} {kind}s are not numbers of at most 16 levels"
        if spec.center or spec.scale_dtype != "float16":
            return f"{kind}s have a mean or scales in {spec.scale_dtype}"
    if not isinstance(key.granularity, PerChannel):
        return "keys have no scale per channel"
    if not isinstance(value.granularity, PerToken):
        return "values have no scale per token"
    if layout.head_dim not in HEAD_DIMS or layout.page_size != PAGE:
        return f"head_dim={layout.head_dim} and page_size={layout.page_size} are not 64 or 128 and {PAGE}"
    return None


def shared_bytes(layout: PageLayout, fold: bool, wide: bool) -> int:
    """Return the bytes of struct Tables of codebook_tables.cuh, rounded up to where the ring begins."""
    d = layout.head_dim
    rows = 256 if wide else max(TABLE_ROWS[s.bits] for s in (layout.key, layout.value))
    turns, queries, columns = (
        (1 if fold else 2) * (d // 32) * 1024,
        4 * (d // 32) * 512,
        (2 if fold else 4) if layout.key.outliers else 0,
    )
    size = rows * 256 + turns + queries + d // 2 * 8 * (2 + int(layout.key.static) + columns) + 64 + 16
    return -(-size // 128) * 128


def pieces(layout: PageLayout, prefix: str) -> list[tuple[int, int, int, int]]:
    """Return runs of bytes, as shape.pieces_of has them, that belong to keys ("k") or values ("v"): their planes, then
    the rest.
    """
    found = []
    names = [n for n in layout.sections if n.startswith(prefix)]
    for some in ([n for n in names if "plane" in n], [n for n in names if "plane" not in n]):
        if some:
            first, last = layout.sections[some[0]], layout.sections[some[-1]]
            found.append((first.offset, 0, first.offset, -(-(last.offset + last.nbytes - first.offset) // 16) * 16))
    return found


def defines(layout: PageLayout, fold: bool, wide: bool) -> dict[str, int]:
    """Return macros beside those of every packed format. fold: at most four query columns."""
    mine = pieces(layout, "k")
    found = {"FOLDED": int(fold), "WIDE_TABLE": int(wide), "K_STRETCH": int(layout.key.has_stretch)}
    found |= {"K_PIECES": len(mine), "K_BYTES": sum(p[3] for p in mine)}
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        found[f"{kind.upper()}_OUTLIERS"] = spec.num_outliers(layout.page_size, layout.head_dim)
        for name in ("stretch", "outlier_index", "outlier_value"):
            section = layout.sections.get(f"{kind}_{name}")
            found[f"{kind}_{name}".upper() + ("_OFFSET" if name == "stretch" else "")] = (
                section.offset if section else 0
            )
    return found


def integer_levels(spec: QuantSpec, num_heads: int) -> torch.Tensor:
    """Return float32 [num_heads, 2**bits]: what every code of an integer format stands for."""
    return (torch.arange(2**spec.bits, dtype=torch.float32, device="cpu") - spec.zero).repeat(num_heads, 1)
