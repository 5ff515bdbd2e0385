"""From a page layout to one instantiation of raw.cu, packed.cu, banded.cu or codebook.cu: its macros, how chunks are cut from pages, how many warps and
stages fit.

The numbers of warps and stages are the measured best on Hopper (docs/log-gpu.md); other chips get what fits their shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from ....errors import UnsupportedError
from ....spec import LowLayout, PageLayout, QuantSpec, plane_row_bytes
from ....spec.quant import SCALE_BYTES
from ...descriptor import CHANNEL, DTYPES, GROUP, STATIC, low_plane, scale_kind
from ...types import kvquant_extras
from ..families.codebook import format as codebook_format
from . import side

FAMILIES = Path(__file__).parent.parent / "families"
MAX_PIECES = 40
MAX_CHUNK_BYTES = 18 << 10
RING_BYTES = 144 << 10
"""More bytes in flight per multiprocessor only lengthen every queue: int8, 8 x 32768 tokens took 139 us with 200 KiB and 132 us with 132 KiB."""
PREFETCH_BYTES, PREFETCH_CHUNKS = 104 << 10, 12
"""Bytes and chunks prefetched into L2 beyond the ring while the previous kernel finishes. 8 x 32768 tokens, int8: 129.4 us with none, 129.9, 128.5, 129.2 and
132.7 us with 17, 103, 206 and 360 KB; int4: 70.0 us with 105 KB, 71.3 without."""
WIDE = 24
"""Query columns of a warp for chunks: a page is unpacked for three column tiles at once. 128 queries of 4 heads over 32,768 tokens took 372 us (int8),
341 (int4) and 323 (int2), with 16 columns 513, 356 and 345, with 32 (which spill) 393, 380 and 403."""
RAW_TOKENS = (32, 16, 8)
"""Raw tokens of a chunk: the most of a step, or what a slot of the ring has room for."""
FLOATS = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
"""Floats that packed_codes.cuh makes matrix operands of."""
BANDED_HEADS = (64, 128, 256)
"""Head sizes of banded codes: the outputs' Hadamard matrix takes whole rows of lanes."""
MOST_BANDED_COLUMNS = 64
"""Query columns of a kv head over banded codes: every eight of them are a unit of their own, which reads all pages."""
MOST_BANDED_WARPS = 11
"""Consumer warps over banded codes, where memory has room. 8 x 32,768 tokens took 72.9 us with 11 and 77.8 with 7 (klt2), 86.6 and 89.8 (klt3)."""
LOW_BITS = 4
"""Width of the low planes that packed.cu reads, and of the codes they refine."""


@dataclass(frozen=True)
class Shape:
    """Launch shape: consumer warps of a block, slots of its ring (a multiple), tokens of a chunk, units of 32 tokens per step."""

    warps: int
    slots: int
    chunk: int
    units: int


def refuses_layout(layout: PageLayout, shared_limit: int | None = None) -> str | None:
    """Why no kernel can read pages of this layout, on a GPU whose blocks have `shared_limit` bytes of shared memory if given, or None."""
    d = layout.head_dim
    if d > 256:
        return f"head_dim={d} is above 256"
    if why := _refuses_banded(layout):
        return why
    if extras := kvquant_extras(layout):
        why = codebook_format.refuses(layout)
        if not why and shared_limit and _codebook_shape(layout, 8, shared_limit, False) is None:
            why = f"their tables and a page need more than this GPU's {shared_limit} bytes of shared memory"
        return why and f"{extras}: {why}"
    if layout.key.is_raw and layout.value.is_raw:
        return None if layout.raw_dtype != "float32" else "raw pages are float32; the kernel multiplies float16 and bfloat16"
    if layout.key.is_raw or layout.value.is_raw:
        return "one of keys and values is raw and the other is not"
    if unknown := [s.format for s in (layout.key, layout.value) if s.number_format.kind == "float" and s.format not in FLOATS]:
        return f"{unknown[0]} codes have no matrix operands yet; there are those of {', '.join(FLOATS)}"
    if len(_walked_planes(layout.value, d)) > 1 and scale_kind(layout.value) == CHANNEL:
        return f"head_dim={d}: {layout.value.format} values with a scale per channel need more registers than a thread has; per token or per group they fit"
    if d > 128 and _two_planes(layout):
        return f"3-bit codes at head_dim={d} need more registers than a thread has; at most 128, or a multiple of 32"
    for kind, spec, step in (("key", layout.key, 16), ("value", layout.value, 16 if _scales_codes(layout) else 32)):
        if scale_kind(spec) != GROUP:
            continue
        size = d // spec.num_groups(d)
        for bits in _walked_planes(spec, d) if size < d else ():
            row = plane_row_bytes(d, bits)
            starts = [f * row + r for f in range(8 // bits) for r in range(0, row, step) if f * row + r < d]
            if any(s // size != (min(s + step, (s // row + 1) * row, d) - 1) // size for s in starts):
                return f"{kind} groups of {size} channels cut a {step}-channel step of the matrix unit at head_dim={d}"
        if kind == "value" and spec.has_bias and spec.num_groups(d) > 8:
            return f"{spec.num_groups(d)} value groups with a bias are more than 8"
    if len(_pieces(layout, _chunk_tokens(layout))) > MAX_PIECES:
        return f"a chunk of this layout is cut from more than {MAX_PIECES} places of the page"
    return None


def _refuses_banded(layout: PageLayout) -> str | None:
    """Why no kernel can read the banded codes of this layout, or None."""
    key, value, d = layout.key, layout.value, layout.head_dim
    if not (key.is_banded or value.is_banded):
        return None
    if not (key.is_banded and value.is_banded):
        return f"banded codes of one of keys and values beside {value.format if key.is_banded else key.format}; the CUDA kernel reads both as banded codes"
    if key.basis != "klt":
        return f"banded keys with basis={key.basis!r}; the CUDA kernel reads those with basis='klt'"
    if len(widths := set(value.widths(d))) > 1 or widths - {2, 3, 4}:
        return f"banded values of {', '.join(map(str, sorted(widths)))} bits; the CUDA kernel reads 2, 3 or 4, the same in every band"
    if value.center:
        return "banded values with a mean; the CUDA kernel reads those without"
    return None if d in BANDED_HEADS else f"banded codes at head_dim={d}; the CUDA kernel reads head_dim {', '.join(map(str, BANDED_HEADS))}"


def refuses_columns(layouts: Sequence[PageLayout], num_columns: int) -> str | None:
    """Why no kernel takes that many query columns of a kv head (query tokens times heads) over pages of these layouts, or None."""
    if num_columns <= MOST_BANDED_COLUMNS or not any(x.key.is_banded for x in layouts):
        return None
    return f"{num_columns} query columns of a kv head over banded codes, whose queries are made for each frame; the CUDA kernel takes {MOST_BANDED_COLUMNS}"


def query_columns(num_columns: int) -> int:
    """Columns that queries are made in the keys' basis for: 1, 2, 4 or 8."""
    return min(8, 1 << (num_columns - 1).bit_length())


def _key_steps(layout: PageLayout) -> int:
    """Matrix instructions of the planes of a banded key."""
    return sum(_band_steps(plane_row_bytes(channels, bits) // 4, 8 // bits) for bits, channels in layout.key.planes(layout.head_dim))


def _bytes_fit(layout: PageLayout) -> bool:
    """Whether banded keys may be multiplied as bytes: floats hold what they sum up to (ByteKeys of banded_keys.cuh)."""
    most = {8: 255, 4: 15, 2: 12, 1: 8}
    return not layout.key.is_banded or 128 * sum(channels * most[bits] for bits, channels in layout.key.planes(layout.head_dim)) < 1 << 22


def _makers(layout: PageLayout) -> tuple[int, int]:
    """Warps that make queries in the basis of banded keys, and tiles of them in shared memory; 0 for other formats."""
    if not layout.key.is_banded:
        return 0, 0
    return (4, 3) if layout.head_dim <= 128 else (2, 2)


def _frame_ring_bytes(layout: PageLayout, warps: int, fold: bool) -> int:
    """Shared memory of those warps (struct FrameRing of banded_queries.cuh)."""
    makers, tiles = _makers(layout)
    d = layout.head_dim
    tile = 144 + 32 * (d + 32) + 512 * _key_steps(layout)
    return -(-(tiles * (tile + 16) + d * (64 + 4 * (16 if fold else 2)) + makers * 128 + 4 * warps) // 16) * 16 if makers else 0


def _band_steps(words: int, fields: int) -> int:
    """Matrix instructions of a plane's row (struct BandPlane)."""
    return words // 4 * fields + words % 4 // 2 * (fields // 2) + words % 2 * (fields // 4)


def _scales_codes(layout: PageLayout) -> bool:
    """Whether values' scales are multiplied onto the codes, not onto the weights (ValueTraits::SCALES_CODES): groups may then be as small as 16 channels."""
    value, d = layout.value, layout.head_dim
    return value.format == "fp4_e2m1" and value.has_page_scale and d == 16 * value.num_groups(d)


def may_unpack(layout: PageLayout) -> bool:
    """Whether pages of this layout are unpacked to 16-bit rows where no kernel reads them packed: of banded codes or 4-bit floats, or with a scale for
    each page."""
    return any(s.is_banded or s.has_page_scale or (s.number_format.kind == "float" and s.bits < 8) for s in (layout.key, layout.value))


def refuses_low(layout: PageLayout, low: tuple[LowLayout, ...]) -> str | None:
    """Why no kernel can read pages of this layout with these low planes, or None."""
    if why := side.refuses_low(len(low)):
        return why
    for fine in low:
        if extras := kvquant_extras(layout):
            return f"{extras}: low planes have no CUDA kernel"
        for spec, bits in ((layout.key, fine.key_bits), (layout.value, fine.value_bits)):
            if bits and (spec.format, bits) != (f"int{LOW_BITS}", LOW_BITS):
                return f"a low plane of {bits} bits under {spec.format} codes; the CUDA kernels read {LOW_BITS} bits under int{LOW_BITS}"
        tokens = _chunk_tokens(layout)
        if len(_pieces(layout, tokens)) + len(_pieces(fine, tokens)) > MAX_PIECES:
            return f"a chunk of this layout and its low planes is cut from more than {MAX_PIECES} places of their pages"
    return None


def _walked_planes(spec: QuantSpec, head_dim: int) -> tuple[int, ...]:
    """Bits of the planes that are walked one by one. Two whose rows are 2 : 1 bytes, unpadded, are joined to one (packed_codes.cuh), walked as the first."""
    planes = tuple(bits for bits, _ in spec.planes(head_dim))
    return planes[:1] if planes == (2, 1) and head_dim % 32 == 0 else planes


def _two_planes(layout: PageLayout) -> bool:
    return any(len(_walked_planes(s, layout.head_dim)) > 1 for s in (layout.key, layout.value) if not (s.is_banded and s is layout.key))


@overload
def chunk_layout(layout: PageLayout, tokens: int) -> PageLayout: ...
@overload
def chunk_layout(layout: LowLayout, tokens: int) -> LowLayout: ...
def chunk_layout(layout: PageLayout | LowLayout, tokens: int) -> PageLayout | LowLayout:
    """A chunk in shared memory is laid out like a page of that many tokens."""
    if isinstance(layout, LowLayout):
        return dataclasses.replace(layout, page_size=tokens, num_kv_heads=1)
    return PageLayout(key=layout.key, value=layout.value, page_size=tokens, num_kv_heads=1, head_dim=layout.head_dim, raw_dtype=layout.raw_dtype)


def _used_bytes(layout: PageLayout | LowLayout) -> int:
    last = list(layout.sections.values())[-1]
    return -(-(last.offset + last.nbytes) // 16) * 16


def _chunk_tokens(layout: PageLayout) -> int:
    for tokens in (layout.page_size, 128, 64):
        if layout.page_size % tokens == 0 and _used_bytes(chunk_layout(layout, tokens)) <= MAX_CHUNK_BYTES:
            return tokens
    return 32


def _pieces(layout: PageLayout | LowLayout, tokens: int) -> list[tuple[int, int, int, int]]:
    """(offset in the page, step per chunk, offset in the slot, bytes) of every contiguous run of a chunk."""
    if tokens == layout.page_size:
        return [(0, 0, 0, _used_bytes(layout))]
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
                runs.append((section.offset + g * layout.page_size * item, tokens * item, to + g * tokens * item, tokens * item))
        else:
            runs.append((section.offset, 0, to, -(-section.nbytes // 16) * 16))
    return runs


def merge_bytes(warps: int, cols: int, head_dim: int, with_bias: bool, rounds_at_once: int = 1, merge_cols: int | None = None) -> int:
    """Shared memory for merging warps (struct Merge of finish.cuh); merge_cols: columns that results are of, if fewer than `cols`."""
    merged = warps * cols * 2 + cols * 2 + warps * (16 if with_bias else 1) * cols + warps * rounds_at_once * (merge_cols or cols) * 36
    fragments = cols * (2 * head_dim + 256) if cols > 16 else 0  # at most, of any width of codes
    own = warps * (27 + cols)  # each warp's segment, unit and positions, and what it has left
    return (merged + 2 * cols * head_dim + cols + warps + own) * 4 + 160 + fragments


def _rounds_at_once(warps: int, cols: int, head_dim: int, with_bias: bool, room: int, merge_cols: int | None = None) -> int:
    """Rounds of 32 channels merged between two barriers: as many as fit."""
    return next((n for n in (8, 4, 2) if n * 32 <= max(head_dim, 64) and merge_bytes(warps, cols, head_dim, with_bias, n, merge_cols) <= room), 1)


@dataclass(frozen=True)
class Kernel:
    """One instantiation: source and macros, launch shape and how chunks are cut."""

    source: Path
    defines: tuple[tuple[str, int], ...]
    shape: Shape
    pieces: tuple[tuple[int, int, int, int], ...]
    shared_bytes: int
    low_pieces: tuple[tuple[int, int, int, int], ...] = ()
    raw_joins: bool = False  # raw and packed tokens of a unit come to one result (RAW_JOINS of packed_codes.cuh)
    raw_in_ring: bool = False  # raw tokens come through the ring (RAW_IN_RING of ring.cuh)
    raw_tokens: int = RAW_TOKENS[0]  # of a chunk of raw pages
    makers: int = 0  # warps beside the consumers and the producer

    @property
    def threads(self) -> int:
        return (self.shape.warps + 1 + self.makers) * 32


def columns(head_dim: int, num_columns: int, layouts: list[PageLayout], low: bool = False) -> int:
    """Query columns of a warp: 16 or 24 where more are wanted and the registers of two or three column tiles are there."""
    if any(layout.key.is_banded for layout in layouts):
        return 8
    if num_columns > 2 * WIDE and is_wide(head_dim, layouts) and not low:
        return WIDE
    two_planes = any(_two_planes(layout) for layout in layouts)
    return 16 if num_columns > 8 and head_dim <= 128 and not two_planes and not any(kvquant_extras(layout) for layout in layouts) else 8


def is_wide(head_dim: int, layouts: list[PageLayout]) -> bool:
    """Whether three column tiles fit a thread's registers: one plane, no terms that count weights or scale queries by page."""
    specs = [s for layout in layouts for s in (layout.key, layout.value)]
    return bool(specs) and head_dim <= 128 and all(
        len(_walked_planes(s, head_dim)) == 1 and s.symmetric and not s.center and not s.static and scale_kind(s) == GROUP for s in specs
    ) and not any(kvquant_extras(layout) for layout in layouts)  # fmt: skip


def joins_raw(layout: PageLayout, cols: int) -> bool:
    """Whether a kernel adds raw tokens to the running outputs of this layout (RAW_JOINS): values of one plane, not scaled by page, queries and
    results that no calibrated scale belongs to, and registers. Three column tiles of 128 channels spilled 128 to 168 bytes, 24 to 176 without joining."""
    key, value = layout.key, layout.value
    one_sum = len(_walked_planes(value, layout.head_dim)) == 1 and scale_kind(value) != CHANNEL and not key.static and not value.static
    return one_sum and layout.head_dim * cols <= 2048 and kvquant_extras(layout) is None


def _fragments(layout: PageLayout | None, cols: int) -> int:
    """Key operands of a column tile where more than two tiles share them in shared memory (Query of packed_keys.cuh), else 0."""
    if layout is None or cols <= 16:
        return 0
    bits = layout.key.number_format.planes[0]
    return 8 // bits * -(-plane_row_bytes(layout.head_dim, bits) // 16)


@functools.lru_cache(maxsize=256)
def kernel_for(
    layout: PageLayout | None,
    head_dim: int,
    cols: int,
    q_dtype: str,
    raw_dtype: str,
    softcap: bool,
    shared_limit: int,
    shape: Shape | None = None,
    *,
    fold: bool = False,
    low: LowLayout | None = None,
    raw: bool = False,
    tables: bool = False,
) -> Kernel:
    """The instantiation for a packed layout (None: only raw pages).

    Args:
        shape: launch shape to use instead of the measured choice (for tuning).
        fold: there are at most four query columns (formats of KVQuant, banded codes).
        low: of the low planes that some of the pages have.
        raw: it reads raw pages too, in the walk over packed ones where it can.
        tables: pages come from block tables on the device (`ops.paged_attention`), not from lists of the host.
    """
    fold = fold and (layout is None or _bytes_fit(layout))
    defines = {"HEAD_DIM": head_dim, "COLS": cols, "Q_TYPE": DTYPES[q_dtype], "RAW_TYPE": DTYPES[raw_dtype], "SOFTCAP": int(softcap)}
    fragments = _fragments(layout, cols)
    defines |= {"Q_FRAGMENTS": fragments, "BLOCK_TABLES": int(tables)}
    if layout is None:
        return _raw_kernel(defines, shape or Shape(warps=11 if head_dim * cols <= 1024 else 7, slots=0, chunk=32, units=1), head_dim, cols, shared_limit)
    chunk = shape.chunk if shape else _chunk_tokens(layout)
    raw_joins = joins_raw(layout, cols) and (raw or low is not None)
    raw_in_ring = raw_joins or low is not None
    least = 64 * head_dim if low else 4 * head_dim * RAW_TOKENS[-1] if raw_joins else 0  # raw rows of 32 tokens beside low planes, or keys and values of a few
    slot = -(-max(_used_bytes(chunk_layout(layout, chunk)), least) // 128) * 128
    raw_tokens = RAW_TOKENS[0] if low or not raw_joins else next(n for n in RAW_TOKENS if 4 * head_dim * n <= slot)
    with_bias = layout.value.has_bias and scale_kind(layout.value) == GROUP
    has_codebook = kvquant_extras(layout) is not None
    bias_groups, wide = with_bias and not has_codebook, shared_limit >= codebook_format.WIDE_FROM
    if shape is None:
        shape = (
            _codebook_shape(layout, cols, shared_limit, fold) if has_codebook else _choose_shape(layout, slot, chunk, cols, shared_limit, low is not None, fold)
        )
        if shape is None:
            raise UnsupportedError(f"attend_pages on cuda: {refuses_layout(layout, shared_limit)}")
    table_bytes = codebook_format.shared_bytes(layout, fold, wide) if has_codebook else 0
    ring = shape.slots * (slot + (40 if has_codebook else 24)) + 16 + (shape.warps * 4 + 16 if low else 0) + table_bytes
    ring += _frame_ring_bytes(layout, shape.warps, fold)
    merge_cols = 4 if fold and layout.key.is_banded else cols
    rounds = _rounds_at_once(shape.warps, cols, head_dim, bias_groups, shared_limit - ring, merge_cols)
    shared = ring + merge_bytes(shape.warps, cols, head_dim, bias_groups, rounds, merge_cols)
    # Warps start segments alone but where queries take a calibrated scale, where warps share operands, and where they share a head's tables.
    defines["OWN_START"] = int(scale_kind(layout.key) != STATIC and not fragments and not has_codebook)
    defines |= {
        "ROUNDS_AT_ONCE": rounds,
        "MERGE_COLS": merge_cols,
        "MERGE_BIAS": int(with_bias),
        "BIAS_GROUPS": 16 if bias_groups else 1,
        "WARPS": shape.warps,
        "SLOTS": shape.slots,
    }
    defines |= {"CHUNK": chunk, "UNITS": shape.units, "CHUNKS_PER_PAGE": layout.page_size // chunk}
    defines["PREFETCH_CHUNKS"] = min(PREFETCH_BYTES // slot, PREFETCH_CHUNKS)
    pieces = [*codebook_format.pieces(layout, "k"), *codebook_format.pieces(layout, "v")] if has_codebook else _pieces(layout, chunk)
    defines |= {"SLOT_BYTES": slot, "CHUNK_BYTES": sum(p[3] for p in pieces), "SHARED_BYTES": shared}
    low_pieces = _pieces(low, chunk) if low else []
    defines |= {"HAS_LOW": int(low is not None), "HAS_RAW": int(raw_in_ring), "RAW_TOKENS": raw_tokens}
    defines["LOW_BYTES"] = sum(p[3] for p in low_pieces)
    defines |= _side_defines(layout, low, chunk, has_codebook)
    if has_codebook:
        defines |= codebook_format.defines(layout, fold, wide)
    if layout.key.is_banded:
        makers, tiles = _makers(layout)
        defines |= side.band_defines(chunk_layout(layout, chunk)) | {
            "KEY_STEPS": _key_steps(layout),
            "MAKERS": makers,
            "FRAME_TILES": tiles,
            "FOLDED": int(fold),
        }
    source = "codebook/codebook.cu" if has_codebook else "klt/banded.cu" if layout.key.is_banded else "plain/packed.cu"
    return Kernel(
        FAMILIES / source, tuple(defines.items()), shape, tuple(pieces), shared, tuple(low_pieces), raw_joins, raw_in_ring, raw_tokens, _makers(layout)[0]
    )


def _raw_kernel(defines: dict[str, int], shape: Shape, head_dim: int, cols: int, shared_limit: int) -> Kernel:
    rounds = _rounds_at_once(shape.warps, cols, head_dim, False, shared_limit)
    shared = merge_bytes(shape.warps, cols, head_dim, False, rounds)
    defines |= {"OWN_START": 0, "ROUNDS_AT_ONCE": rounds, "MERGE_COLS": cols, "MERGE_BIAS": 0, "BIAS_GROUPS": 1, "WARPS": shape.warps, "SHARED_BYTES": shared}
    return Kernel(FAMILIES / "raw/raw.cu", tuple(defines.items()), shape, (), shared)


def _side_defines(layout: PageLayout, low: LowLayout | None, chunk: int, has_codebook: bool) -> dict[str, int]:
    """Macros of keys and values, and of their low planes."""
    defines: dict[str, int] = {}
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        planes = spec.number_format.planes if has_codebook else _walked_planes(spec, layout.head_dim)
        defines |= side.attend_defines(chunk_layout(layout, chunk), kind, len(planes))
        bits, offset = low_plane(chunk_layout(low, chunk), kind) if low else (0, 0)
        defines |= {f"{kind.upper()}_LOW_BITS": bits, f"{kind.upper()}_LOW_OFFSET": offset}
    return defines


def _choose_shape(layout: PageLayout, slot: int, chunk: int, cols: int, shared_limit: int, low: bool, fold: bool) -> Shape:
    two_planes = _two_planes(layout)
    specs = (layout.key, layout.value)
    centered = any(s.center for s in specs if not s.is_banded)
    extras = two_planes and any(s.center or s.has_bias or scale_kind(s) == CHANNEL or s.num_groups(layout.head_dim) > 2 for s in specs)
    large = layout.head_dim * cols > 128 * 8 or extras  # what more registers are needed for
    units = 1 if large or chunk % 64 else 2
    spills_at_168 = two_planes or chunk < 64 or layout.head_dim % 64 or (layout.value.has_bias and scale_kind(layout.value) == CHANNEL)
    spills_at_168 |= (low and cols > 8) or layout.key.static or any(scale_kind(s) == GROUP and s.num_groups(layout.head_dim) > 2 for s in specs)
    joined = any(len(s.planes(layout.head_dim)) > 1 for s in specs) and not two_planes  # the instructions of joining want the warps that int2 has
    most = 7 if large or centered or slot > (RING_BYTES // 22 if joined else 5 << 10) or spills_at_168 else 11
    if layout.key.is_banded:  # with the producer and those that make queries 16 or 12 warps, and 7 where registers are needed
        most = 4 if large else MOST_BANDED_WARPS
    for warps in (11, 7, 4, 3, 2, 1):  # with the producer a multiple of 4, mostly: registers are shared out in quarters of a multiprocessor
        ring = 32 + 4 * warps if low else 16
        merge = merge_bytes(warps, cols, layout.head_dim, layout.value.has_bias) + _frame_ring_bytes(layout, warps, fold)
        stages = (shared_limit - ring - merge) // (warps * (slot + 24))
        least = 1 if cols > 16 else 2  # long steps: more warps with a slot each were faster than fewer with two (372 and 400 us, int8)
        if warps <= most and stages >= least:  # a chunk with a low plane takes two slots: the third holds the start of the next
            # Banded pages: more than two slots were no faster, and merging wants the room.
            wanted = 0 if layout.key.is_banded else RING_BYTES // (warps * slot)
            return Shape(warps, warps * min(stages, max(3 if low else 2, wanted)), chunk, units)
    return Shape(1, 2 if low else 1, chunk, units)


def _codebook_shape(layout: PageLayout, cols: int, shared_limit: int, fold: bool) -> Shape | None:
    """As many warps as fit with a slot each, and two if they do."""
    slot, wide = -(-_used_bytes(layout) // 128) * 128, shared_limit >= codebook_format.WIDE_FROM
    for warps in (codebook_format.MAX_WARPS, 7, 3):
        room = shared_limit - 16 - codebook_format.shared_bytes(layout, fold, wide) - merge_bytes(warps, cols, layout.head_dim, False)
        if stages := max(room, 0) // (warps * (slot + 40)):
            return Shape(warps, warps * min(stages, 2), layout.page_size, 2)
    return None
