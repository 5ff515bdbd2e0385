"""`ops.paged_attention` on the CPU.

A layer's C structs are made by `bind`, the step's tables by `update`; a run puts its tensors in and calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..reference import paged_attention as reference
from .library import AttendStruct, PartStruct, TableStruct, check, library, unavailable
from .structs import MAX_QUERY_GROUP, refuses_layout, store_struct, table_struct

__all__ = ["paged_attention", "refuses", "refuses_layout"]


def refuses(layouts: Sequence[PageLayout], max_pages: Sequence[int], options: Mapping[str, Any]) -> str | None:
    """Why such a plan is not served here, or None."""
    if why := reference.refuses(layouts, max_pages, options) or unavailable():
        return why
    if options["dtype"] not in TORCH_NUMBERS:
        return f"queries are {options['dtype']}; the CPU kernels take float32, float16 and bfloat16"
    if (group := options["num_q_heads"] // layouts[0].num_kv_heads) > MAX_QUERY_GROUP:
        return f"{group} query heads per kv head; the CPU kernels take up to {MAX_QUERY_GROUP}"
    return next((why for layout in layouts if (why := refuses_layout(layout))), None)


class Plan(reference.HostPlan):
    """See `ops.paged_attention.plan`; arguments as there, checked there."""

    def __init__(self, layouts: Sequence[PageLayout], max_pages: Sequence[int], **options: Any) -> None:
        super().__init__(layouts, max_pages, **options)
        # of a part and the pages of its pool, while a layer reads it
        self._tables_of = WeakValueDictionary[tuple[int, int], TableStruct]()

    def bind(self, layer: int, pages: Sequence[Sequence[torch.Tensor]], static: Mapping[str, torch.Tensor]) -> None:
        stores, o = self._stores(pages, static), self.options
        parts, tables = (PartStruct * len(stores))(), []
        for i, store in enumerate(stores):
            if (table := self._tables_of.get((i, store.num_pages))) is None:
                table = TableStruct()
                if self._tables:
                    self._fill(table, i, store.num_pages)
                self._tables_of[i, store.num_pages] = table
            tables.append(table)
            parts[i].store, parts[i].table = ctypes.addressof(store_struct(store)), ctypes.addressof(table)
        first = self.layouts[0]
        struct = AttendStruct(
            parts=ctypes.addressof(parts),
            num_parts=len(parts),
            num_tokens=o["num_queries"],
            num_heads=o["num_q_heads"],
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            value_head_dim=first.value_head_dim,
            q_dtype=TORCH_NUMBERS[o["dtype"]],
            scaling=o["scaling"],
            softcap=o["softcap"] or 0.0,
            sliding_window=o["sliding_window"] or 0,
        )
        self._layers[layer] = struct, parts, stores, tables  # with all that it points to, at once

    def update(self, *args: Any) -> None:
        super().update(*args)
        try:
            for key, table in self._tables_of.items():
                self._fill(table, *key)
            shape = len(self._positions), self.options["num_queries"], self.options["num_q_heads"]
            shapes = (*shape, self.layouts[0].value_head_dim), shape
            # where the caller's cannot be written
            self._out, self._lse = (torch.empty(x, dtype=torch.float32, device="cpu") for x in shapes)
        except BaseException:  # Ctrl-C, too
            self._tables = []  # structs point to nothing now
            raise

    def _fill(self, struct: TableStruct, part: int, num_pages: int) -> None:
        """The table of this step to the struct that layers point to."""
        ctypes.pointer(struct)[0] = table_struct(self._table_within(part, num_pages))

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        self._check(q, layer)
        struct = self._layers[layer][0]
        if q.stride(3) != 1:
            q = q.contiguous()
        if out is None:
            out = q.new_empty(*q.shape[:3], struct.value_head_dim)
        into, logs = out if out.dtype == torch.float32 else self._out, self._lse if lse is None else lse
        struct.batch, struct.num_threads, struct.q, struct.q_positions = (
            len(q),
            torch.get_num_threads(),
            q.data_ptr(),
            self._positions.data_ptr(),
        )
        struct.q_stride[:] = q.stride()[:3]
        struct.out, struct.lse = into.data_ptr(), logs.data_ptr()
        check(library().kvbits_attend(struct))
        return out if into is out else out.copy_(into)

    def explain(self) -> str:
        return "paged attention by host lists: attend_pages by cpu"


paged_attention = Plan
