"""Raw pages into packed ones."""

from .families.plain.close import close, close_later, refuses

__all__ = ["close", "close_later", "refuses"]
