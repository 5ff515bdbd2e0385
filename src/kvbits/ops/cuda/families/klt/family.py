"""Trellis codes: keys in a calibrated basis, widths by band, values of one width."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .....spec import OFFSETS, PageLayout, plane_row_bytes
from ....descriptor import LEVELS, describe
from ....types import PageStore
from ...engine import shape
from ...engine.family import Family
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.shape import RAW_TOKENS, Ask, Kernel, Tile
from ...engine.side import turns_on
from ..plain.family import walked_planes
from . import store as writer
from . import unpack
from .operands import band_defines, basis_on

HEAD_DIMS = (64, 128, 256)
"""Head sizes of attention: the outputs' Hadamard matrix takes whole rows of lanes."""
MOST_COLUMNS = 64
"""Query columns of a kv head: every eight of them are a unit of their own, which reads all pages."""
MOST_WARPS = 11
"""Consumer warps, where memory has room. 8 x 32,768 tokens took 72.9 us with 11 and 77.8 with 7 (klt2), 86.6 and 89.8
(klt3).
"""
MOST_WARPS_BESIDE = 7
"""The same where slots hold whole pages of finer copies. Over eleven warps with slots for half a page of copies, seven
took 0.94 (klt2) and 0.92 (klt3) of the time, the geometric mean of six shapes on an H200.
"""
TIMED_BESIDE = 128
"""Channels of the heads that this was timed with: others keep as many warps as have room."""

LEAST_CHUNK = 32
"""Tokens of a chunk, at least: those of a step."""


class Klt(Family):
    """The family of trellis codes."""

    folds = always_unpacks = True
    refuses_closing, refuses_unpacking = staticmethod(writer.refuses_layout), staticmethod(unpack.refuses_layout)
    close, first, unpacker, stores = (
        staticmethod(writer.launch),
        staticmethod(writer.first_positions),
        unpack.BandedUnpacker,
        writer,
    )

    def serves(self, layout: PageLayout) -> bool:
        return layout.key.is_trellis or layout.value.is_trellis

    def refuses_attention(self, layout: PageLayout, num_columns: int, shared_limit: int | None) -> str | None:
        return _refuses_attention(layout, num_columns)

    def attention(self, layout: PageLayout, ask: Ask) -> Kernel:
        d, chunk = ask.head_dim, shape.chunk_tokens(layout)
        layouts = [layout] if ask.beside is None else [layout, ask.beside]
        ask = dataclasses.replace(ask, fold=ask.fold and all(map(_bytes_fit, layouts)))
        raw_joins = ask.raw and d * ask.cols <= 2048
        least = 4 * d * RAW_TOKENS[-1] if raw_joins else 0
        # with the producer and those that make queries 16 or 12 warps, and 7 where registers are needed
        large = d * ask.cols > 128 * 8
        steps = max(map(_key_steps, layouts))
        makers, most_tiles = _makers(d)
        for chunks, most_warps in _chunks(layout, ask.beside, least, large):
            slot = -(-max(least, *map(_bytes, layouts, chunks)) // 128) * 128
            raw_tokens = next(n for n in RAW_TOKENS if 4 * d * n <= slot) if raw_joins else RAW_TOKENS[0]
            units = [1 if large or n % 64 else 2 for n in chunks]
            for tiles in range(most_tiles, 0, -1):  # fewer only where no other shape fits
                own_bytes = functools.partial(_frame_ring_bytes, d, steps, makers=makers, tiles=tiles, fold=ask.fold)
                chosen = shape.fitting(  # more than two slots were no faster, and merging wants the room
                    ask, slot, chunk, units[0], most_warps, deep=False, own_bytes=own_bytes
                )
                ring = shape.ring_bytes(ask, chosen, slot) + own_bytes(chosen.warps)
                mergers = _mergers(chosen.warps, ask.fold)
                defines: dict[str, int | str] = dict(
                    shape.frame_defines(
                        ask, chosen, ring, merge_cols=4 if ask.fold else None, own_start=True, mergers=mergers
                    )
                )
                if int(defines["SHARED_BYTES"]) <= ask.shared_limit:
                    break
            if chosen.warps == most_warps:
                break
        defines |= shape.slot_defines(chosen, slot, raw_tokens, raw_joins)
        defines |= {"MAKERS": makers, "FRAME_TILES": tiles, "FOLDED": int(ask.fold), "MOST_KEY_STEPS": steps}
        formats = [_format_defines(*of, i) for i, of in enumerate(zip(layouts, chunks, units, strict=True))]
        if ask.beside is None:
            defines |= formats[0]
        else:
            for name, constants in zip(("OLDER_FORMAT", "NEWER_FORMAT"), formats, strict=True):
                defines[name] = shape.constants(constants)
        source = Path(__file__).parent / ("banded.cu" if ask.beside is None else "banded_two.cu")
        pieces, *beside = map(shape.pieces_of, layouts, chunks)
        return shape.kernel(
            source,
            defines,
            chosen,
            pieces,
            raw_joins=raw_joins,
            raw_in_ring=raw_joins,
            raw_tokens=raw_tokens,
            makers=makers,
            folds=ask.fold,
            beside=Tile(chunks[1], tuple(beside[0])) if beside else None,
        )

    def reads_beside(self, layout: PageLayout, other: PageLayout) -> bool:
        sizes = ("page_size", "num_kv_heads", "head_dim", "value_head_dim")
        return (
            other.key.is_trellis
            and all(getattr(layout, x) == getattr(other, x) for x in sizes)
            and layout.value.basis == other.value.basis
            and not any(_refuses_attention(x, 1) for x in (layout, other))
            and len(shape.pieces_of(layout, shape.chunk_tokens(layout))) + len(shape.pieces_of(other, LEAST_CHUNK))
            <= shape.MAX_PIECES
        )

    def static_pointers(
        self, layout: PageLayout, static: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, int]:
        if layout.key.basis != "calibrated":
            return {}
        return {
            "turns": turns_on(static["k_inv_freq"], device).data_ptr(),
            "k_inverse": basis_on(static, device).data_ptr(),
        }

    def closing(self, layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int], appends: bool) -> Source:
        return writer.closing(layout, dtype, appends, capability)

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
        args = writer.StepArgs(num_pages=num_sequences, pages_each=1)
        writer.set_static(args, store.layout, store.static, store.device, tail_starts)
        return *writer.load(store.layout, dtype, device_index, True), args


def _refuses_attention(layout: PageLayout, num_columns: int) -> str | None:
    """Return why banded.cu cannot read pages of this layout, or that many query columns of a kv head, or None."""
    key, value, d = layout.key, layout.value, layout.head_dim
    if d > 256:
        return f"head_dim={d} is above 256"
    if d != layout.value_head_dim:
        return (
            f"keys of {d} and values of {layout.value_head_dim} channels in trellis codes; the CUDA kernels take one"
            " width for both"
        )
    if not (key.is_trellis and value.is_trellis):
        return (
            f"trellis codes of one of keys and values beside {value.format if key.is_trellis else key.format}; the CUDA"
            " kernel reads both as trellis codes"
        )
    if key.basis != "calibrated":
        return f"trellis keys with basis={key.basis!r}; the CUDA kernel reads those with basis='calibrated'"
    if len(widths := set(value.widths(d))) > 1 or widths - {2, 3, 4}:
        return (
            f"trellis values of {', '.join(map(str, sorted(widths)))} bits; the CUDA kernel reads 2, 3 or 4, the same"
            " in every band"
        )
    if d not in HEAD_DIMS:
        return f"trellis codes at head_dim={d}; the CUDA kernel reads head_dim {', '.join(map(str, HEAD_DIMS))}"
    if num_columns > MOST_COLUMNS:
        return (
            f"{num_columns} query columns of a kv head over trellis codes, whose queries are made for each frame; the"
            f" CUDA kernel takes {MOST_COLUMNS}"
        )
    return shape.refuses_pieces(layout)


def _key_steps(layout: PageLayout) -> int:
    """Return the number of matrix instructions of the planes of a key."""
    return sum(
        _band_steps(plane_row_bytes(channels, bits) // 4, 8 // bits)
        for bits, channels in layout.key.planes(layout.head_dim)
    )


def _band_steps(words: int, fields: int) -> int:
    """Return the number of matrix instructions of a plane's row (struct BandPlane)."""
    return words // 4 * fields + words % 4 // 2 * (fields // 2) + words % 2 * (fields // 4)


def _bytes_fit(layout: PageLayout) -> bool:
    """Return whether keys may be multiplied as bytes: floats hold what they sum up to (ByteKeys of
    banded_keys.cuh).
    """
    most = {8: 255, 4: 31, 2: 64, 1: 64}
    return 128 * sum(channels * most[bits] for bits, channels in layout.key.planes(layout.head_dim)) < 1 << 22


def _bytes(layout: PageLayout, tokens: int) -> int:
    """Count the bytes of a chunk of so many tokens."""
    return shape.used_bytes(shape.chunk_layout(layout, tokens))


def _chunks(layout: PageLayout, beside: PageLayout | None, least: int, large: bool) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of a chunk of each format and the most warps that read them, the fastest first, which is taken
    where so many warps have room: whole pages of copies, then as much of a page as slots of the first format hold.
    """
    chunk, most_warps = shape.chunk_tokens(layout), 4 if large else MOST_WARPS
    if beside is None:
        yield [chunk], most_warps
        return
    whole, room = shape.chunk_tokens(beside), max(least, _bytes(layout, chunk))
    if not large and layout.head_dim == TIMED_BESIDE:
        yield [chunk, whole], MOST_WARPS_BESIDE
    sizes = (n for n in (whole, 128, 64) if n <= whole and whole % n == 0)
    yield [chunk, next((n for n in sizes if _bytes(beside, n) <= room), LEAST_CHUNK)], most_warps


def _format_defines(layout: PageLayout, chunk: int, units: int, number: int) -> dict[str, int]:
    """Return the macros that belong to one of a kernel's formats; units: of 32 tokens per step."""
    d, small = layout.head_dim, shape.chunk_layout(layout, chunk)
    planes = len(walked_planes(layout.key, d)), len(walked_planes(layout.value, d))
    defines = shape.chunk_defines(layout, chunk, units, planes)
    for kind in "kv":  # operands are numbers around the middle of their range: indices, or fitted ones (ValueRing)
        side = describe(small, kind)
        middle, turned = 15 if side.fitted else 2 ** (side.widths[0] + 1) - 1, int(side.basis == "hadamard")
        defines |= {
            f"{kind.upper()}_{name}": n
            for name, n in (
                ("FLOAT", LEVELS["int"]),
                ("MIDDLE", middle),
                ("TURNED", turned),
                ("RINGS", 2 if side.fitted else 1),
            )
        }
    return defines | band_defines(small) | {"KEY_STEPS": _key_steps(layout), "FORMAT": number}


def _mergers(warps: int, fold: bool) -> int:
    """Return how many warps merge a unit that warps leave one by one.

    All do, since makers of queries use the wait, but only two of many warps that fold. klt4 at 128 x 2,048 tokens took
    156.4 us with seven of seven and 165.3 us with four. klt2 at 32 x 4,096 took 85.8 us with eleven of eleven and 90.1
    us with four; folding, at 128 x 2,048, 205.6 us with two of eleven and 217.2 us with four.
    """
    return 2 if fold and warps > 7 else warps


def _makers(head_dim: int) -> tuple[int, int]:
    """Return warps that make queries in the keys' basis, and the most tiles of them in shared memory."""
    return (4, 3) if head_dim <= 128 else (2, 2)


def _frame_ring_bytes(d: int, steps: int, warps: int, *, makers: int, tiles: int, fold: bool) -> int:
    """Return the shared memory of those warps (struct FrameRing of banded_frames.cuh), steps: of keys in the basis."""
    tile = 144 + 64 * OFFSETS + 512 * steps
    scratch = 32 * (d + 32) + d * (64 + 4 * (16 if fold else 2)) + makers * 192
    return -(-(tiles * (tile + 16) + scratch + 4 * warps) // 16) * 16
