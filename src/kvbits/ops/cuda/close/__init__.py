"""Raw pages into packed ones."""

from .packed import close, close_later, refuses

__all__ = ["close", "close_later", "refuses"]
