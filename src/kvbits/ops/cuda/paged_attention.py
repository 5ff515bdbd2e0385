"""`ops.paged_attention` by block tables on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...spec import PageLayout
from .engine import device_plan
from .engine.device_plan import DevicePlan as paged_attention

__all__ = ["paged_attention", "refuses", "refuses_layout"]


def refuses(layouts: Sequence[PageLayout], max_pages: Sequence[int], options: Mapping[str, Any]) -> str | None:
    """Why such a plan is not served here, or None."""
    return device_plan.refuses(
        layouts, options["num_q_heads"], options["dtype"], options["num_queries"], options["device"]
    )


def refuses_layout(layout: PageLayout) -> str | None:
    """The part of `refuses` that a layout decides, for a query in bfloat16 of four heads to a kv head."""
    return device_plan.refuses_plan([layout], 4 * layout.num_kv_heads, torch.bfloat16, 1)
