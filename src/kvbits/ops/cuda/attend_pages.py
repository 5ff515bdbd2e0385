"""Attention over packed and 16-bit pages: over host lists (`host_plan`) and over block tables on the device
(`device_plan`).
"""

from __future__ import annotations

import torch

from ...spec import PageLayout
from ..types import AttendCall, PageStore, PageTable, Part
from .engine.host_plan import attend, plan, refuses, refuses_on

__all__ = ["attend", "plan", "refuses", "refuses_layout"]


def refuses_layout(layout: PageLayout, num_queries: int = 1) -> str | None:
    """The part of `refuses` that a layout decides, for queries in bfloat16, four heads to a kv head."""
    call = AttendCall((Part(PageStore(layout, ()), PageTable.empty()),), 1.0)
    return refuses_on(call, 4 * layout.num_kv_heads, torch.bfloat16, num_queries)
