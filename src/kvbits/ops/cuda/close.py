"""Raw pages into packed ones."""

from __future__ import annotations

import torch

from ...spec import PageLayout
from .engine.close import close, close_later, refuses
from .families import family_of

__all__ = ["close", "close_later", "refuses", "refuses_layout"]


def refuses_layout(layout: PageLayout) -> str | None:
    """The part of `refuses` that a layout decides."""
    return family_of(layout).refuses("close", layout, dtype=torch.bfloat16)
