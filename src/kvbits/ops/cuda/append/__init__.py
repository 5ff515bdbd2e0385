"""Fresh tokens into raw pages, and into packed ones whose tokens are quantized one by one."""

from .tokens import append, append_later, refuses

__all__ = ["append", "append_later", "refuses"]
