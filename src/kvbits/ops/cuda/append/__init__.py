"""Fresh tokens into raw pages, and into packed ones whose tokens are quantized one by one."""

from __future__ import annotations

from ....spec import PageLayout
from . import tokens
from .tokens import append, append_later, refuses

__all__ = ["append", "append_later", "refuses", "refuses_layout"]


def refuses_layout(layout: PageLayout) -> str | None:
    """The part of `refuses` that a layout decides."""
    return None if layout.is_raw else tokens.refuses_layout(layout)
