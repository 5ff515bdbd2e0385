"""Fresh tokens into anybody's token-local pages, by slots on the device."""

from __future__ import annotations

import torch

from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from .append.tokens import prepare, refuses_layout, store_tokens
from .engine.runtime import driver

__all__ = ["prepare", "refuses", "refuses_layout", "store_tokens"]


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why tokens of `dtype` are not stored here in pages of this layout, or None."""
    if why := driver.refuses(device):
        return why
    if dtype not in TORCH_NUMBERS:
        return f"tokens are {dtype}; the kernel takes float32, float16 and bfloat16"
    return refuses_layout(layout, torch.cuda.get_device_capability(device))
