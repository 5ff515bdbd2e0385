"""Raw pages into packed ones."""

from .engine.close import close, close_later, refuses

__all__ = ["close", "close_later", "refuses"]
