"""Attention over packed and 16-bit pages: over host lists (`host_plan`) and over block tables on the device (`device_plan`)."""

from .engine.host_plan import attend, plan, refuses

__all__ = ["attend", "plan", "refuses"]
