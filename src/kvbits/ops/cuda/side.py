"""Template arguments of struct Side in side.cuh: what keys or values of a page are stored as."""

from __future__ import annotations

import torch

from ...spec import PageLayout, PerChannel, QuantSpec

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
TYPE_NAMES = {"float16": 0, "bfloat16": 1, "float32": 2}
STATIC, GROUP, CHANNEL = 0, 1, 2
FLOATS = {"fp8_e4m3": 1, "fp8_e5m2": 2, "raw": 3}


def side_arguments(layout: PageLayout, prefix: str, spec: QuantSpec) -> str:
    """For keys (prefix "k") or values ("v") of a layout."""

    def offset(name: str) -> int:
        found = layout.sections.get(f"{prefix}_{name}")
        return found.offset if found else 0

    planes = (*spec.number_format.planes, 0, 0)
    scale = STATIC if spec.static else CHANNEL if isinstance(spec.granularity, PerChannel) else GROUP
    groups = spec.num_groups(layout.head_dim)
    values = [
        FLOATS.get(spec.format, 0), planes[0] or 8, planes[1], scale, layout.head_dim // groups, spec.zero, int(spec.has_bias), int(spec.center is not None),
        TYPE_NAMES[spec.scale_dtype], offset("raw" if spec.is_raw else "plane0"), offset("plane1"), offset("scale"), offset("bias"), offset("mean"),
    ]  # fmt: skip
    return ", ".join(map(str, values))
