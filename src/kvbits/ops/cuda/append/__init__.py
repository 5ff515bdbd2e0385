"""Fresh tokens into raw pages, and into packed ones whose tokens are quantized one by one."""

from .tokens import append, refuses

__all__ = ["append", "refuses"]
