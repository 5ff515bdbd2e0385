"""`ops.attend` on the CPU: one call of libkvbits_cpu for a layer, over the pages of all its parts.

A layer's C structs are made by `bind`, the step's tables by `update`; a run puts its tensors in and calls.

Integer codes are multiplied with integer q and p in exact dot products (csrc/engine/attend/dots_*.h). q and p have 16
bits against 8-bit codes and 8 bits against fewer, so that rounding them stays far below the format's own error:
relative L2 noise 1e-4 and 2e-2. Raw and FP8 pages are computed in fp32.

On processors with AMX chunks are products of tiles (csrc/families/tiles.h): keys, values, queries and weights are one
bfloat16 number where a format has few bits, and the sum of two elsewhere: relative L2 noise 6e-3 and 1e-5. Results of
bfloat16 queries are rounded to bfloat16, by 2e-3, so there one number serves every format if that is faster.

A plan whose calls can be served in several ways takes the fastest, as measured on the machine (autotune.py): chunks by
the tier's kernels, with one term or two in tiles, or unpacked for torch's attention; decoding by AVX-512 or in tiles.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..long_queries import LongQueries, dense_rows
from ..reference.attend import HostPlan
from ..types import BackendPlan, PageStore, Table
from . import dense, structs
from .autotune import Tuned
from .library import (
    TILE_TIERS,
    AttendStruct,
    PartStruct,
    TableStruct,
    amx_refusal,
    check,
    library,
    tier,
    unavailable,
)
from .structs import MAX_QUERY_GROUP, store_struct

MIN_UNPACKED_ROWS = 128
"""Query rows of a kv head from which unpacking is tried. Fewer read packed pages faster than torch reads dense ones."""
MIN_DECODED_ROWS, MAX_DECODED_ROWS = 4, 31
"""Query rows of a kv head for which tiles are tried. More are always in tiles, and of fewer most of a tile is empty."""
FEW_BITS = 5.0
"""Bits of codes, the mean over channels, whose error is far above that of rounding to bfloat16."""
UNPACKED_ROWS = 8192
"""Tokens that are unpacked at a time: 64 MB of float32 with 8 kv heads of 128."""


def refuses(layouts: Sequence[PageLayout], options: Mapping[str, Any]) -> str | None:
    """Return why such a plan is not served here, or None."""
    if options["device"].type != "cpu":
        return f"pages are on {options['device']}, not on the CPU"
    if why := unavailable():
        return why
    if options["dtype"] not in TORCH_NUMBERS:
        return f"queries are {options['dtype']}; the CPU kernels take float32, float16 and bfloat16"
    if (group := options["num_q_heads"] // layouts[0].num_kv_heads) > MAX_QUERY_GROUP:
        return f"{group} query heads per kv head; the CPU kernels take up to {MAX_QUERY_GROUP}"
    return next((why for layout in layouts if (why := structs.refuses_layout(layout))), None)


def refuses_layout(layout: PageLayout, num_queries: int = 1) -> str | None:
    """Answer the part of `refuses` that a layout decides."""
    return structs.refuses_layout(layout)


class _Layer(NamedTuple):
    """The pages of a layer.

    Attributes:
        parts: points to the structs of `stores` and `tables`, which it keeps alive.
    """

    parts: ctypes.Array[PartStruct]
    stores: tuple[PageStore, ...]
    tables: list[TableStruct]


def plan(layouts: Sequence[PageLayout], **options: Any) -> Plan | Tuned:
    """Plan as `ops.attend.plan` has it; arguments as there, checked there."""
    if len(found := ways(layouts, **options)) == 1:
        return Plan(layouts, **options)
    packed = next((x for x in layouts if not x.is_raw), layouts[0])
    rows = options["num_queries"] * options["num_q_heads"] // packed.num_kv_heads
    call = {
        "keys": repr(packed.key),
        "values": repr(packed.value),
        "page_size": packed.page_size,
        "head_dims": [packed.head_dim, packed.value_head_dim],
        "queries": str(options["dtype"]).removeprefix("torch."),
        "query_rows": 1 << rows.bit_length() - 1,  # of a kv head, rounded down
        "past_only": options["past_only"],
        "softcap": options["softcap"] is not None,
        "raw_dtypes": sorted({x.raw_dtype for x in layouts if x.key.is_raw or x.value.is_raw}),
    }
    return Tuned(found, call)


def ways(layouts: Sequence[PageLayout], **options: Any) -> dict[str, Callable[[], BackendPlan]]:
    """Return the plans that serve such calls, by name. The first is the one for a machine that is not measured.

    Calls with a window have no other: a measurement reads the start of a history, which the window leaves out.
    """
    rows = options["num_queries"] * options["num_q_heads"] // layouts[0].num_kv_heads
    found: dict[str, Callable[[], BackendPlan]] = {"kernels": functools.partial(Plan, layouts, **options)}
    if options["sliding_window"] is not None:
        return found
    rounded = _may_round(layouts, options["dtype"])
    if rows >= MIN_UNPACKED_ROWS and not _refuses_unpacking(layouts, options):
        for dtype in (torch.float32, torch.bfloat16) if rounded else (torch.float32,):
            name = f"unpacked to {str(dtype).removeprefix('torch.')}"
            found[name] = functools.partial(_unpacked, layouts, dtype, **options)
    if tier() in TILE_TIERS and MIN_DECODED_ROWS <= rows <= MAX_DECODED_ROWS:
        found["tiles"] = functools.partial(Plan, layouts, min_tile_rows=MIN_DECODED_ROWS, **options)
    if tier() in TILE_TIERS and rows > MAX_DECODED_ROWS and rounded and _has_terms(layouts):
        found["one term"] = functools.partial(Plan, layouts, one_term=True, **options)
    return found


def _refuses_unpacking(layouts: Sequence[PageLayout], options: Mapping[str, Any]) -> bool:
    """Return whether torch's attention over unpacked pages does not compute what the plan asks for."""
    unlike = any(x.head_dim != x.value_head_dim for x in layouts)
    return not options["past_only"] or options["softcap"] is not None or unlike


def _may_round(layouts: Sequence[PageLayout], queries: torch.dtype) -> bool:
    """Return whether keys and values may be rounded to bfloat16, as results are, and raw ones are already."""
    raw = [x.raw_dtype for x in layouts if x.key.is_raw or x.value.is_raw]
    return queries == torch.bfloat16 and all(dtype == "bfloat16" for dtype in raw)


def _has_terms(layouts: Sequence[PageLayout]) -> bool:
    """Return whether tiles multiply two terms of packed pages, or of raw ones where there are no others."""
    packed = [x for x in layouts if not x.is_raw] or layouts
    keys = any(not x.key.is_raw and x.key.mean_bits > FEW_BITS for x in packed)
    return keys or any(x.value.is_raw or x.value.mean_bits > FEW_BITS for x in packed)


def _unpacked(layouts: Sequence[PageLayout], rows: torch.dtype, **options: Any) -> LongQueries:
    attend = functools.partial(dense_rows, dense.attention, options["scaling"])
    return LongQueries(
        layouts,
        attend=attend,
        rows=rows,
        results=torch.float32,
        max_rows=UNPACKED_ROWS,
        by_head=True,
        **options,
    )


class Plan(HostPlan):
    """A plan of this backend's kernels.

    Args:
        min_tile_rows: query rows of a kv head from which a tier that has tiles takes them; 0 for its own limit.
        one_term: whether tiles round every number to bfloat16; otherwise those of 8 and 16 bits are sums of two.
    """

    def __init__(
        self, layouts: Sequence[PageLayout], min_tile_rows: int = 0, one_term: bool = False, **options: Any
    ) -> None:
        super().__init__(layouts, **options)
        o, first = options, self.layouts[0]
        self._struct = AttendStruct(  # of the run under way; what is given here stays
            num_parts=len(layouts),
            num_tokens=o["num_queries"],
            num_heads=o["num_q_heads"],
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            value_head_dim=first.value_head_dim,
            q_dtype=TORCH_NUMBERS[o["dtype"]],
            min_tile_rows=min_tile_rows,
            one_term=one_term,
            scaling=o["scaling"],
            softcap=o["softcap"] or 0.0,
            sliding_window=o["sliding_window"] or 0,
        )
        self._layers: dict[int, _Layer] = {}
        # of a part and the pages of its pool, while a layer reads it
        self._tables = WeakValueDictionary[tuple[int, int], TableStruct]()
        self._keep: list[np.ndarray] = []  # what the tables point to
        self._scratches: dict[str, torch.Tensor] = {}

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        parts, tables = (PartStruct * len(stores))(), []
        for i, store in enumerate(stores):
            parts[i].store = ctypes.addressof(store_struct(store))
            tables.append(self._table(i, store.num_pages))
            parts[i].table = ctypes.addressof(tables[i])
        self._layers[layer] = _Layer(parts, tuple(stores), tables)  # at once: what is refused changes nothing

    def _table(self, part: int, num_pages: int) -> TableStruct:
        """Return the struct that layers point to whose pools have so many pages."""
        if (found := self._tables.get((part, num_pages))) is None:
            found = TableStruct()
            if self._lists:
                self._fill(found, part, num_pages, self._keep)
            self._tables[part, num_pages] = found  # last: no other layer finds one that is not filled
        return found

    def update(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        super().update(tables, query_lens, positions)
        try:
            keep: list[np.ndarray] = []
            for (part, num_pages), struct in self._tables.items():
                self._fill(struct, part, num_pages, keep)
            self._keep = keep
        except BaseException:  # Ctrl-C, too
            self._lists = []  # structs point to nothing now
            raise

    def _fill(self, struct: TableStruct, part: int, num_pages: int, keep: list[np.ndarray]) -> None:
        """Write the page list of this step to a struct that layers point to."""
        pages, ids = self._lists[part], self._lists[part].within(num_pages)
        struct.num_entries = len(ids)
        struct.indptr, struct.page_ids = pages.indptr.ctypes.data, ids.ctypes.data
        struct.starts, struct.lengths = pages.starts.ctypes.data, pages.lengths.ctypes.data
        keep.append(ids)

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        self._check(q, layer, self._layers)
        struct, parts = self._struct, self._layers[layer].parts
        if q.stride(3) != 1:
            q = q.contiguous()
        if out is None:
            out = q.new_empty(*q.shape[:3], struct.value_head_dim)
        into, logs = out if out.dtype == torch.float32 else self._scratch("out", out), lse
        if logs is None:
            logs = self._scratch("lse", out[..., 0])
        struct.parts, struct.batch, struct.num_threads = ctypes.addressof(parts), len(q), torch.get_num_threads()
        struct.q, struct.q_positions = q.data_ptr(), self._positions.data_ptr()
        struct.q_stride[:] = q.stride()[:3]
        struct.out, struct.lse = into.data_ptr(), logs.data_ptr()
        check(library().kvbits_attend(struct))
        return out if into is out else out.copy_(into)

    def _scratch(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return float32, of the shape of `like`: where the caller's cannot be written."""
        if (kept := self._scratches.get(name)) is None or kept.shape != like.shape:
            kept = self._scratches[name] = torch.empty(like.shape, dtype=torch.float32, device="cpu")
        return kept

    def explain(self) -> str:
        """Name the instruction set, and say why a better one is left out. It depends on the formats that are bound."""
        used, reasons = tier(), []
        if self._layers:
            name = ctypes.c_char_p()
            self._struct.parts = ctypes.addressof(next(iter(self._layers.values())).parts)
            if why := library().kvbits_attend_refusal(self._struct, name):
                reasons.append(f"{used}: {why.decode()}")
            used = (name.value or b"").decode()
        if tier() == "avx512" and (why := amx_refusal()):
            reasons.append(f"amx: {why}")
        return f"attend by cpu ({'; '.join([used, *reasons])})"
