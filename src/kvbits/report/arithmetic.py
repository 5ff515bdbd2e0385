"""What the page's calculator needs to compute `CacheSpec.nbytes` in the browser, for every preset and head size.

A preset's bytes are  layers x kv heads x sum over pools of (bytes of a head's struct x pages);  the struct's bytes come from `PageLayout` here, the
number of pages from the context by the rule of `LayerGroup.pages_for`, which assets/report.js repeats (a test holds the two equal).
"""

from __future__ import annotations

from typing import Any

from .. import schemes
from ..errors import SpecError
from ..spec import CacheSpec, LayerGeometry

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {"layers": 30, "kv_heads": 3, "head_dim": 64, "context": 8192, "parameters": 134_515_008},
    "Qwen2.5-0.5B": {"layers": 24, "kv_heads": 2, "head_dim": 64, "context": 32768, "parameters": 494_032_768},
    "Llama-3.1-8B": {"layers": 32, "kv_heads": 8, "head_dim": 128, "context": 131072, "parameters": 8_030_261_248},
    "Qwen2.5-7B": {"layers": 28, "kv_heads": 4, "head_dim": 128, "context": 131072, "parameters": 7_615_616_512},
    "Llama-2-7B": {"layers": 32, "kv_heads": 32, "head_dim": 128, "context": 4096, "parameters": 6_738_415_616},
    "Llama-3.1-70B": {"layers": 80, "kv_heads": 8, "head_dim": 128, "context": 131072, "parameters": 70_553_706_496},
}
"""Shapes the sliders can be set to; a parameter of the weights takes 2 bytes."""


def presets() -> dict[str, Any]:
    """preset -> {page_size, residual, sinks, raw, heads: head_dim -> bytes of one kv head by pool, tiers: head_dim -> [[pages, bytes], ..]}."""
    found: dict[str, Any] = {}
    for name in schemes.PRESETS:
        entry: dict[str, Any] = {}
        for head_dim in HEAD_DIMS:
            try:
                spec = CacheSpec(scheme=schemes.get(name, head_dim=head_dim), layers=(LayerGeometry(num_kv_heads=1, head_dim=head_dim),))
            except SpecError:
                continue  # a preset that this head size cannot have
            if len(spec.groups) != 1:
                break  # overrides by layer: no uniform arithmetic
            (group,) = spec.groups
            entry |= {
                "page_size": group.page_size, "residual": group.residual_length, "sinks": group.num_sink_tokens, "raw": group.fills_pages,
                "description": schemes.PRESETS[name].description,
            }  # fmt: skip
            entry.setdefault("heads", {})[head_dim] = {pool: layout.page_size_bytes for pool, layout in group.layouts.items()}
            entry.setdefault("tiers", {})[head_dim] = [
                [pages + group.SPECULATED_PAGES, group.low_layouts[pool].page_size_bytes] for pool, pages in zip(group.low_pools, group.boundaries, strict=True)
            ]
        if entry:
            found[name] = entry
    return found
