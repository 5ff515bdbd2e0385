"""Fresh tokens into anybody's token-local pages: `append` by slots instead of runs."""

from __future__ import annotations

import torch

from ...spec import PageLayout
from .append import store_tokens

__all__ = ["refuses", "store_tokens"]


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why tokens are not stored here, or None."""
    return None if device.type == "cpu" else f"the tokens are on {device}; the reference reads slots on the host"
