"""`ops.paged_attention` by block tables on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...spec import PageLayout
from .engine import device_plan
from .engine.device_plan import DevicePlan as paged_attention

__all__ = ["paged_attention", "refuses"]


def refuses(layouts: Sequence[PageLayout], max_pages: Sequence[int], options: Mapping[str, Any]) -> str | None:
    """Why such a plan is not served here, or None."""
    return device_plan.refuses(layouts, options["num_q_heads"], options["dtype"], options["num_queries"], options["device"], options["low"])
