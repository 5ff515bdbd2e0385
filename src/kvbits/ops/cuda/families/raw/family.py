"""16-bit pages. Closed (by packing nothing) and unpacked as plain ones are."""

from __future__ import annotations

from pathlib import Path

from .....spec import PageLayout
from ...engine import shape
from ...engine.shape import Ask, Kernel, Shape
from ..plain.family import MOST_HEAD_DIM, Plain
from . import store


class Raw(Plain):
    """The family of raw pages."""

    stores = store

    def serves(self, layout: PageLayout) -> bool:
        return layout.is_raw

    def refuses_attention(self, layout: PageLayout, num_columns: int, shared_limit: int | None) -> str | None:
        if (d := max(layout.head_dim, layout.value_head_dim)) > MOST_HEAD_DIM:
            return f"head_dim={d} is above {MOST_HEAD_DIM}"
        return (
            "raw pages are float32; the kernel multiplies float16 and bfloat16"
            if layout.raw_dtype == "float32"
            else None
        )

    def is_wide(self, layout: PageLayout) -> bool:
        return False

    def columns(self, layout: PageLayout, num_columns: int) -> int:
        return 16 if num_columns > 8 and max(layout.head_dim, layout.value_head_dim) <= 128 else 8

    def attention(self, layout: PageLayout, ask: Ask) -> Kernel:
        chosen = Shape(warps=11 if max(ask.dims) * ask.cols <= 1024 else 7, slots=0, chunk=32, units=1)
        return shape.kernel(Path(__file__).parent / "raw.cu", shape.frame_defines(ask, chosen, 0), chosen)
