"""Raw pages into packed ones."""

from .packed import close, refuses

__all__ = ["close", "refuses"]
