"""Integers and floats with a scale per token, group of channels or channel, with a mean, or raw on one
side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .....spec import PageLayout, QuantSpec, plane_row_bytes
from ....descriptor import CHANNEL, GROUP, STATIC, scale_kind
from ....types import PageStore
from ...engine import shape
from ...engine.family import Family
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.shape import RAW_TOKENS, RING_BYTES, WIDE, WIDE_HEAD, Ask, Kernel, Shape
from . import close, store, unpack

MOST_HEAD_DIM = 512


class Plain(Family):
    """The family of plain formats."""

    refuses_closing, refuses_unpacking = staticmethod(close.refuses_layout), staticmethod(unpack.refuses_layout)
    close, unpacker, stores = staticmethod(close.launch), unpack.Unpacker, store

    def serves(self, layout: PageLayout) -> bool:
        return True

    def refuses_attention(self, layout: PageLayout, num_columns: int, shared_limit: int | None) -> str | None:
        return _refuses_attention(layout)

    def is_wide(self, layout: PageLayout) -> bool:
        """Return whether there is one plane, without terms that count weights or scale queries by page."""
        return _most(layout) <= 128 and all(
            len(walked_planes(s, d)) == 1 and s.symmetric and not s.center and not s.static and scale_kind(s) == GROUP
            for s, d in _sides(layout)
        )

    def columns(self, layout: PageLayout, num_columns: int) -> int:
        """Return 16 or 24 where more are wanted and the registers of two or three column tiles are there."""
        if num_columns > 2 * WIDE and self.is_wide(layout):
            return WIDE
        return 16 if num_columns > 8 and _most(layout) <= 128 and not _two_planes(layout) else 8

    def attention(self, layout: PageLayout, ask: Ask) -> Kernel:
        d, dv = ask.dims
        chunk = shape.chunk_tokens(layout)
        raw_joins = _joins_raw(layout, ask.cols) and ask.raw
        least = 2 * (d + dv) * RAW_TOKENS[-1] if raw_joins else 0  # keys and values of a few raw tokens
        slot = -(-max(shape.used_bytes(shape.chunk_layout(layout, chunk)), least) // 128) * 128
        raw_tokens = RAW_TOKENS[0] if not raw_joins else next(n for n in RAW_TOKENS if 2 * (d + dv) * n <= slot)
        chosen = _choose_shape(layout, slot, chunk, ask)
        with_bias, fragments = layout.value.has_bias and scale_kind(layout.value) == GROUP, _fragments(layout, ask.cols)
        defines = shape.frame_defines(
            ask,
            chosen,
            shape.ring_bytes(ask, chosen, slot),
            merge_bias=with_bias,
            bias_groups=with_bias,
            fragments=fragments,
            own_start=scale_kind(layout.key) != STATIC and not fragments,
        )
        pieces = shape.pieces_of(layout, chunk)
        planes = len(walked_planes(layout.key, d)), len(walked_planes(layout.value, dv))
        defines |= shape.ring_defines(ask, layout, chosen, slot, planes, raw_tokens, raw_joins)
        return shape.kernel(
            Path(__file__).parent / "packed.cu",
            defines,
            chosen,
            pieces,
            raw_joins=raw_joins,
            raw_in_ring=raw_joins,
            raw_tokens=raw_tokens,
        )

    def closing(self, layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int], appends: bool) -> Source:
        return close.source(layout, dtype, appends)

    def unpacking(self, layout: PageLayout, dtype: torch.dtype) -> Source:
        return unpack.source(layout, dtype)

    def step(
        self,
        store: PageStore,
        dtype: torch.dtype,
        device_index: int,
        num_sequences: int,
        tail_starts: torch.Tensor | None,
    ) -> tuple[driver.Kernel, int, Any]:
        args = close.StepArgs()
        close.set_static(args, store)
        return *close.load(store.layout, dtype, device_index, True), args


def walked_planes(spec: QuantSpec, head_dim: int) -> tuple[int, ...]:
    """Return bits of the planes that are walked one by one.

    Two whose rows are 2 : 1 bytes, unpadded, are joined to one (packed_codes.cuh), walked as the first.
    """
    planes = tuple(bits for bits, _ in spec.planes(head_dim))
    return planes[:1] if planes == (2, 1) and head_dim % 32 == 0 else planes


def _two_planes(layout: PageLayout) -> bool:
    return any(len(walked_planes(s, d)) > 1 for s, d in _sides(layout))


def _sides(layout: PageLayout) -> tuple[tuple[QuantSpec, int], tuple[QuantSpec, int]]:
    """Return keys and values, and how many channels each have."""
    return (layout.key, layout.head_dim), (layout.value, layout.value_head_dim)


def _most(layout: PageLayout) -> int:
    """Return the larger of both widths, which registers are needed for."""
    return max(layout.head_dim, layout.value_head_dim)


def _refuses_attention(layout: PageLayout) -> str | None:
    """Return why packed.cu cannot read pages of this layout, or None."""
    d, key, value = _most(layout), layout.key, layout.value
    if d > MOST_HEAD_DIM:
        return f"head_dim={d} is above {MOST_HEAD_DIM}"
    if key.is_raw or value.is_raw:
        return "one of keys and values is raw and the other is not"
    if len(walked_planes(value, layout.value_head_dim)) > 1 and scale_kind(value) == CHANNEL:
        of = f"head_dim={layout.value_head_dim}: {value.format} values with a scale per channel"
        return f"{of} need more registers than a thread has; per token or per group they fit"
    if d > 128 and _two_planes(layout):
        return f"3-bit codes at head_dim={d} need more registers than a thread has; at most 128, or a multiple of 32"
    for kind, spec, step, d in (("key", key, 16, layout.head_dim), ("value", value, 32, layout.value_head_dim)):
        if scale_kind(spec) != GROUP:
            continue
        size = d // spec.num_groups(d)
        for bits in walked_planes(spec, d) if size < d else ():
            row = plane_row_bytes(d, bits)
            starts = [f * row + r for f in range(8 // bits) for r in range(0, row, step) if f * row + r < d]
            if any(s // size != (min(s + step, (s // row + 1) * row, d) - 1) // size for s in starts):
                return f"{kind} groups of {size} channels cut a {step}-channel step of the matrix unit at head_dim={d}"
        if kind == "value" and spec.has_bias and spec.num_groups(d) > 8:
            return f"{spec.num_groups(d)} value groups with a bias are more than 8"
    return shape.refuses_pieces(layout)


def _joins_raw(layout: PageLayout, cols: int) -> bool:
    """Return whether the kernel adds raw tokens to the running outputs of this layout (RAW_JOINS). That takes values of
    one plane, not scaled by page, queries and results that no calibrated scale belongs to, and registers. Three column
    tiles of 128 channels spilled 128 to 168 bytes, 24 to 176 without joining.
    """
    key, value = layout.key, layout.value
    one_sum = (
        len(walked_planes(value, layout.value_head_dim)) == 1
        and scale_kind(value) != CHANNEL
        and not key.static
        and not value.static
    )
    return one_sum and _most(layout) * cols <= 2048


def _fragments(layout: PageLayout, cols: int) -> int:
    """Return key operands of a column tile where more than two tiles, or heads of more than `WIDE_HEAD` channels, share
    them in shared memory (Query of packed_keys.cuh), else 0.
    """
    bits = layout.key.number_format.planes[0]
    return (
        8 // bits * -(-plane_row_bytes(layout.head_dim, bits) // 16) if cols > 16 or layout.head_dim > WIDE_HEAD else 0
    )


def _choose_shape(layout: PageLayout, slot: int, chunk: int, ask: Ask) -> Shape:
    d, two_planes, specs = _most(layout), _two_planes(layout), _sides(layout)
    extras = two_planes and any(
        s.center or s.has_bias or scale_kind(s) == CHANNEL or s.num_groups(n) > 2 for s, n in specs
    )
    large = d * ask.cols > 128 * 8 or extras  # what more registers are needed for
    spills_at_168 = (
        two_planes
        or chunk < 64
        or any(n % 64 for _, n in specs)
        or (layout.value.has_bias and scale_kind(layout.value) == CHANNEL)
    )
    spills_at_168 |= layout.key.static or any(scale_kind(s) == GROUP and s.num_groups(n) > 2 for s, n in specs)
    # the instructions of joining want the warps that int2 has
    joined = any(len(s.planes(n)) > 1 for s, n in specs) and not two_planes
    few = large or any(s.center for s, _ in specs) or slot > (RING_BYTES // 22 if joined else 5 << 10) or spills_at_168
    return shape.fitting(
        ask, slot, chunk, 1 if large or chunk % 64 else 2, 7 if few else 11, with_bias=layout.value.has_bias
    )
