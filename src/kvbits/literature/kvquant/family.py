"""CUDA kernels of KVQuant's formats: levels of a calibrated table, listed elements, keys stored before the rotary
embedding. `ops.cuda.families` finds `FAMILY` through `schemes.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ...ops.cuda.engine import shape
from ...ops.cuda.engine.family import Family
from ...ops.cuda.engine.runtime.compile import Source
from ...ops.cuda.engine.shape import RAW_TOKENS, Ask, Kernel, Shape
from ...ops.cuda.engine.side import as_float32, turns_on
from ...ops.cuda.families.plain import unpack
from ...ops.descriptor import GROUP, scale_kind
from ...spec import PageLayout
from . import format

BARRIERS = 40
"""Bytes of a slot's barriers and tokens, those of keys and values apart (struct Ring of codebook_ring.cuh)."""


class KVQuant(Family):
    """The family of KVQuant's formats."""

    folds = always_unpacks = True
    steps = "pages of KVQuant's formats are closed from the host"
    refuses_unpacking, unpacker = staticmethod(unpack.refuses_layout), unpack.Unpacker

    def serves(self, layout: PageLayout) -> bool:
        return format.extras(layout) is not None

    def refuses_closing(self, layout: PageLayout, dtype: torch.dtype | None) -> str | None:
        return f"{format.extras(layout)}: the reference closes their pages"

    def refuses_attention(self, layout: PageLayout, num_columns: int, shared_limit: int | None) -> str | None:
        why = format.refuses(layout)
        if not why and shared_limit and _choose_shape(layout, 8, shared_limit, False) is None:
            why = f"their tables and a page need more than this GPU's {shared_limit} bytes of shared memory"
        return why and f"{format.extras(layout)}: {why}"

    def attention(self, layout: PageLayout, ask: Ask) -> Kernel | None:
        wide = ask.shared_limit >= format.WIDE_FROM
        slot = -(-shape.used_bytes(layout) // 128) * 128
        chosen = _choose_shape(layout, ask.cols, ask.shared_limit, ask.fold)
        if chosen is None:
            return None
        ring = shape.ring_bytes(ask, chosen, slot, BARRIERS) + format.shared_bytes(layout, ask.fold, wide)
        defines = shape.frame_defines(
            ask, chosen, ring, merge_bias=layout.value.has_bias and scale_kind(layout.value) == GROUP
        )
        pieces = [*format.pieces(layout, "k"), *format.pieces(layout, "v")]
        planes = len(layout.key.number_format.planes), len(layout.value.number_format.planes)
        defines |= shape.ring_defines(ask, layout, chosen, slot, planes, RAW_TOKENS[0], False)
        defines |= format.defines(layout, ask.fold, wide) | {"CHUNK_BYTES": sum(p[3] for p in pieces)}
        return shape.kernel(Path(__file__).parent / "codebook.cu", defines, chosen, pieces)

    def unpacking(self, layout: PageLayout, dtype: torch.dtype) -> Source:
        return unpack.source(layout, dtype)

    def constants(self, layout: PageLayout, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the values that codes of formats without codebooks stand for, and the angles of keys that are not
        turned.
        """
        sides = (("k", layout.key), ("v", layout.value))
        found = {
            f"{kind}_level": format.integer_levels(spec, layout.num_kv_heads)
            for kind, spec in sides
            if not spec.has_codebook
        }
        if not layout.key.pre_rope:
            found["turns"] = torch.zeros(layout.head_dim // 2, 2, device="cpu")
        return {name: x.to(device) for name, x in found.items()}

    def static_pointers(
        self, layout: PageLayout, static: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, int]:
        found = super().static_pointers(layout, static, device)
        for kind, spec in (("k", layout.key), ("v", layout.value)):
            if spec.has_codebook:
                found[f"{kind}_level"] = as_float32(static[f"{kind}_codebook"], device).data_ptr()
        if layout.key.pre_rope:
            found["turns"] = turns_on(static["k_inv_freq"], device).data_ptr()
        return found


FAMILY = KVQuant()


def _choose_shape(layout: PageLayout, cols: int, shared_limit: int, fold: bool) -> Shape | None:
    """Return as many warps as fit with a slot each, and two if they do."""
    slot, wide = -(-shape.used_bytes(layout) // 128) * 128, shared_limit >= format.WIDE_FROM
    for warps in (format.MAX_WARPS, 7, 3):
        room = (
            shared_limit
            - 16
            - format.shared_bytes(layout, fold, wide)
            - shape.merge_bytes(warps, cols, (layout.head_dim, layout.value_head_dim), False)
        )
        if stages := max(room, 0) // (warps * (slot + BARRIERS)):
            return Shape(warps, warps * min(stages, 2), layout.page_size, 2)
    return None
