"""Shapes of attention kernels, whatever their pages hold: how chunks are cut from pages, how many warps and slots of
the ring fit, what merging takes.

The numbers of warps and slots are the measured best on Hopper (docs/results/log/gpu-kernels.md); other chips get what
fits their shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....spec import PageLayout
from ....spec.quant import SCALE_BYTES
from ...descriptor import DTYPES
from .runtime.compile import Source
from .side import attend_defines

MAX_PIECES = 40
MAX_CHUNK_BYTES = 18 << 10
WIDE_HEAD, MAX_PAGE_BYTES = 256, 72 << 10
"""Heads of more channels than that share key operands in shared memory, and where their chunks would be cut from too
many places, a slot holds a page of up to so many bytes.
"""
RING_BYTES = 144 << 10
"""More bytes in flight per multiprocessor only lengthen every queue: int8, 8 x 32768 tokens took 139 us with 200 KiB
and 132 us with 132 KiB.
"""
PREFETCH_BYTES, PREFETCH_CHUNKS = 104 << 10, 12
"""Bytes and chunks prefetched into L2 beyond the ring while the previous kernel finishes. 8 x 32768 tokens, int8: 129.4
us with none, 129.9, 128.5, 129.2 and 132.7 us with 17, 103, 206 and 360 KB; int4: 70.0 us with 105 KB, 71.3 without.
"""
WIDE = 24
"""Query columns of a warp for chunks: a page is unpacked for three column tiles at once. 128 queries of 4 heads over
32,768 tokens took 372 us (int8), 341 (int4) and 323 (int2), with 16 columns 513, 356 and 345, with 32 (which spill)
393, 380 and 403.
"""
FOLD_COLUMNS = 4
"""Query columns up to which kernels that fold let half of a matrix instruction's eight columns do as much again."""
RAW_TOKENS = (32, 16, 8)
"""Raw tokens of a chunk: the most of a step, or what a slot of the ring has room for."""
BARRIERS = 24
"""Bytes of a slot's barriers and tokens (struct Ring)."""
Pieces = Sequence[tuple[int, int, int, int]]
"""(offset in the page, step per chunk, offset in the slot, bytes) of every contiguous run of a chunk."""


@dataclass(frozen=True)
class Shape:
    """Shape of a launch: consumer warps of a block, slots of its ring (a multiple), tokens of a chunk, units of 32
    tokens per step.
    """

    warps: int
    slots: int
    chunk: int
    units: int


@dataclass(frozen=True)
class Tile:
    """Tokens of a chunk, and where they are cut from a page."""

    chunk: int
    pieces: tuple[tuple[int, int, int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(p[3] for p in self.pieces)


@dataclass(frozen=True)
class Ask:
    """The needs that an attention kernel must meet, beside the layout of its pages.

    Attributes:
        cols: query columns of a warp.
        shared_limit: bytes of shared memory that a block can have.
        fold: there are at most `FOLD_COLUMNS` query columns, and the family folds.
        raw: it reads raw pages too, in the walk over packed ones where it can.
        spans: tables may say of each page where it begins and how much of it is visible.
        value_head_dim: channels of values, `head_dim` if None.
        beside: a second packed layout that the kernel reads (`Family.reads_beside`).
    """

    head_dim: int
    cols: int
    q_dtype: str
    raw_dtype: str
    softcap: bool
    shared_limit: int
    fold: bool = False
    raw: bool = False
    spans: bool = False
    value_head_dim: int | None = None
    beside: PageLayout | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of keys, and of values."""
        return self.head_dim, self.value_head_dim or self.head_dim


@dataclass(frozen=True)
class Kernel:
    """One instantiation: source and macros, launch shape and how chunks are cut."""

    source: Path
    defines: tuple[tuple[str, int | str], ...]
    shape: Shape
    pieces: tuple[tuple[int, int, int, int], ...]
    shared_bytes: int
    raw_joins: bool = False  # raw and packed tokens of a unit come to one result (RAW_JOINS of packed_codes.cuh)
    raw_in_ring: bool = False  # raw tokens come through the ring (RAW_IN_RING of ring.cuh)
    raw_tokens: int = RAW_TOKENS[0]  # of a chunk of raw pages
    makers: int = 0  # warps beside the consumers and the producer
    folds: bool = False  # queries are made for as few columns as there are, not for 8
    beside: Tile | None = None  # of the second packed format

    @property
    def threads(self) -> int:
        return (self.shape.warps + 1 + self.makers) * 32

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Chunks of each packed format."""
        return (Tile(self.shape.chunk, self.pieces), *([] if self.beside is None else [self.beside]))

    @property
    def instance(self) -> Source:
        return Source(self.source.parent, self.source.name, dict(self.defines))


def chunk_layout(layout: PageLayout, tokens: int) -> PageLayout:
    """Return the layout of a chunk in shared memory, which is that of a page of so many tokens."""
    return dataclasses.replace(layout, page_size=tokens, num_kv_heads=1)


def used_bytes(layout: PageLayout) -> int:
    """Return bytes of a kv head's struct that sections take, rounded up to 16."""
    return -(-layout.used_bytes // 16) * 16


def chunk_tokens(layout: PageLayout) -> int:
    """Return the number of tokens of a chunk: a whole page, or a part of it that a slot can hold."""
    for tokens in (layout.page_size, 128, 64):
        if layout.page_size % tokens == 0 and used_bytes(chunk_layout(layout, tokens)) <= MAX_CHUNK_BYTES:
            return tokens
    in_one = (
        max(layout.head_dim, layout.value_head_dim) > WIDE_HEAD
        and used_bytes(layout) <= MAX_PAGE_BYTES
        and len(pieces_of(layout, 32)) > MAX_PIECES
    )
    return layout.page_size if in_one else 32


def pieces_of(layout: PageLayout, tokens: int) -> Pieces:
    """Return the runs of a chunk of so many tokens."""
    if tokens == layout.page_size:
        return [(0, 0, 0, used_bytes(layout))]
    runs = []
    small = chunk_layout(layout, tokens)
    for name, section in layout.sections.items():
        to = small.sections[name].offset
        if name.startswith("k_plane"):
            nbytes = small.sections[name].nbytes  # tiles of 16 tokens follow one another
            runs.append((section.offset, nbytes, to, nbytes))
        elif name.startswith("v_plane"):
            row = section.nbytes // layout.page_size
            for r in range(0, row, 16):
                width = min(16, row - r)
                runs.append((section.offset + r * layout.page_size, width * tokens, to + r * tokens, width * tokens))
        elif len(section.shape) == 2:
            item = SCALE_BYTES[section.dtype]
            for g in range(section.shape[0]):
                runs.append(
                    (section.offset + g * layout.page_size * item, tokens * item, to + g * tokens * item, tokens * item)
                )
        else:
            runs.append((section.offset, 0, to, -(-section.nbytes // 16) * 16))
    return runs


def refuses_pieces(layout: PageLayout) -> str | None:
    """Return why a chunk of such a page is cut from more places than a launch can name, or None."""
    if len(pieces_of(layout, chunk_tokens(layout))) <= MAX_PIECES:
        return None
    return f"a chunk of this layout is cut from more than {MAX_PIECES} places of the page"


def merge_bytes(
    warps: int,
    cols: int,
    dims: tuple[int, int],
    with_bias: bool,
    rounds_at_once: int = 1,
    merge_cols: int | None = None,
) -> int:
    """Return the shared memory for merging warps (struct Merge of finish.cuh); dims: channels of keys and of values;
    merge_cols: columns that results are of, if fewer than `cols`.
    """
    merged = (
        warps * cols * 2
        + cols * 2
        + warps * (16 if with_bias else 1) * cols
        + warps * rounds_at_once * (merge_cols or cols) * 36
    )
    fragments = cols * (2 * dims[0] + 256) if cols > 16 or dims[0] > WIDE_HEAD else 0  # at most, of any width of codes
    own = warps * (27 + cols)  # each warp's segment, unit and positions, and what it has left
    return (merged + cols * sum(dims) + cols + warps + own) * 4 + 160 + fragments


def fitting(
    ask: Ask,
    slot: int,
    chunk: int,
    units: int,
    most_warps: int,
    *,
    with_bias: bool = False,
    own_bytes: Callable[[int], int] = lambda _: 0,
    deep: bool = True,
) -> Shape:
    """Return the most warps that fit with two slots each (one where steps are long), and slots up to `RING_BYTES`.

    Args:
        own_bytes: shared memory beside ring and merging, by warps.
        deep: more than two slots a warp are worth their memory.
    """
    # with the producer a multiple of 4, mostly: registers are shared out in quarters of a multiprocessor
    for warps in (11, 7, 4, 3, 2, 1):
        merge = merge_bytes(warps, ask.cols, ask.dims, with_bias) + own_bytes(warps)
        stages = (ask.shared_limit - 16 - merge) // (warps * (slot + BARRIERS))
        # long steps: more warps with a slot each were faster than fewer with two (372 and 400 us, int8)
        least = 1 if ask.cols > 16 else 2
        if warps <= most_warps and stages >= least:
            wanted = RING_BYTES // (warps * slot) if deep else 0
            return Shape(warps, warps * min(stages, max(2, wanted)), chunk, units)
    return Shape(1, 1, chunk, units)


def frame_defines(
    ask: Ask,
    shape: Shape,
    ring_bytes: int,
    *,
    merge_cols: int | None = None,
    merge_bias: bool = False,
    bias_groups: bool = False,
    own_start: bool = False,
    mergers: int | None = None,
    fragments: int = 0,
) -> dict[str, int]:
    """Return macros of every attention kernel (config.cuh); SHARED_BYTES counts what its ring takes and what merging
    does.

    Args:
        merge_cols: columns that results are of, if fewer than `ask.cols`.
        merge_bias, bias_groups: sums of weights go with results, of each of up to 16 groups.
        own_start: warps start segments alone. Not where queries take a calibrated scale, warps share operands, or a
            block shares tables of its head.
        mergers: warps that merge a unit which warps leave one by one, None for half of them. One alone kept its pages
            waiting for 4.5 us. int4 at 128 x 2,048 tokens took 136.7 us with four of seven warps, 139.0 with one, 140.9
            with all; int8_centered at 32 x 4,096 100.3 us with two of four, 101.7 with all.
        fragments: key operands of a column tile that warps share.
    """
    merge_cols = merge_cols or ask.cols
    merged = (shape.warps, ask.cols, ask.dims, bias_groups)
    room = ask.shared_limit - ring_bytes  # as many rounds of 32 channels are merged between two barriers as fit
    rounds = next(
        (n for n in (8, 4, 2) if n * 32 <= max(ask.dims[1], 64) and merge_bytes(*merged, n, merge_cols) <= room), 1
    )
    return {
        "HEAD_DIM": ask.dims[0],
        "VALUE_HEAD_DIM": ask.dims[1],
        "COLS": ask.cols,
        "Q_TYPE": DTYPES[ask.q_dtype],
        "RAW_TYPE": DTYPES[ask.raw_dtype],
        "SOFTCAP": int(ask.softcap),
        "Q_FRAGMENTS": fragments,
        "SPANS": int(ask.spans),
        "OWN_START": int(own_start),
        "MERGERS": mergers or (shape.warps + 1) // 2,
        "ROUNDS_AT_ONCE": rounds,
        "MERGE_COLS": merge_cols,
        "MERGE_BIAS": int(merge_bias),
        "BIAS_GROUPS": 16 if bias_groups else 1,
        "WARPS": shape.warps,
        "SHARED_BYTES": ring_bytes + merge_bytes(*merged, rounds, merge_cols),
    }


def ring_bytes(ask: Ask, shape: Shape, slot: int, barriers: int = BARRIERS) -> int:
    """Return the shared memory of a ring with its slots (struct Ring)."""
    return shape.slots * (slot + barriers) + 16


def ring_defines(
    ask: Ask,
    layout: PageLayout,
    shape: Shape,
    slot: int,
    num_planes: tuple[int, int],
    raw_tokens: int,
    has_raw: bool,
) -> dict[str, int]:
    """Return macros of kernels that read chunks from a ring.

    Args:
        num_planes: bit planes of keys and of values that are walked one by one.
        has_raw: raw tokens come through the ring, `raw_tokens` a chunk.
    """
    return slot_defines(shape, slot, raw_tokens, has_raw) | chunk_defines(layout, shape.chunk, shape.units, num_planes)


def slot_defines(shape: Shape, slot: int, raw_tokens: int, has_raw: bool) -> dict[str, int]:
    """Return the macros of the ring, whatever is packed in it."""
    return {
        "SLOTS": shape.slots,
        "SLOT_BYTES": slot,
        "PREFETCH_CHUNKS": min(PREFETCH_BYTES // slot, PREFETCH_CHUNKS),
        "HAS_RAW": int(has_raw),
        "RAW_TOKENS": raw_tokens,
    }


def chunk_defines(layout: PageLayout, chunk: int, units: int, num_planes: tuple[int, int]) -> dict[str, int]:
    """Return the macros of chunks of so many tokens; units: of 32 tokens per step."""
    found = {"CHUNK": chunk, "UNITS": units, "CHUNKS_PER_PAGE": layout.page_size // chunk}
    for kind, planes in zip("kv", num_planes, strict=True):
        found |= attend_defines(chunk_layout(layout, chunk), kind, planes)
    return found


def constants(defines: Mapping[str, int]) -> str:
    """Write macros as constants, for a kernel that has several formats' in namespaces."""
    return " ".join(f"constexpr {'int' if n < 2**31 else 'unsigned'} {name} = {n};" for name, n in defines.items())


def kernel(source: Path, defines: Mapping[str, int | str], shape: Shape, pieces: Pieces = (), **options: Any) -> Kernel:
    """Return a `Kernel` of these macros."""
    return Kernel(source, tuple(defines.items()), shape, tuple(pieces), int(defines["SHARED_BYTES"]), **options)
