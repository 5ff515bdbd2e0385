"""`ops.attend` on NVIDIA GPUs, by today's plans: `device_plan` over block tables on the device, `host_plan` over host
lists for what that does not take, and `long_queries` for many queries past the pages and pages that no kernel reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import DataError
from ...spec import PageLayout
from .. import long_queries
from ..descriptor import MATRIX_DTYPES
from ..long_queries import LongQueries
from ..reference.attend import PageList, query_positions
from ..types import AttendCall, PageStore, PageTable, Part, Table
from .engine import device_plan, host_plan
from .engine.device_plan import DevicePlan
from .engine.kernels import LEAST_CAPABILITY
from .engine.runtime import driver


def refuses(layouts: Sequence[PageLayout], options: Mapping[str, Any]) -> str | None:
    """Why such a plan is not served here, or None."""
    why = _refuses_packed(layouts, options)
    if why is None or driver.refuses(options["device"], LEAST_CAPABILITY):
        return why
    return why if long_queries.refuses(layouts, options, readable=False) else None


def _refuses_packed(layouts: Sequence[PageLayout], options: Mapping[str, Any]) -> str | None:
    """Why no kernel reads such pages packed, or None."""
    heads, dtype, queries, device = (options[name] for name in ("num_q_heads", "dtype", "num_queries", "device"))
    why = device_plan.refuses(layouts, heads, dtype, queries, device)
    if why is None or device.type != "cuda":
        return why
    limit = driver.shared_limit(torch.cuda.get_device_capability(device))
    return host_plan.refuses_call(_call(layouts), heads, MATRIX_DTYPES.get(dtype, str(dtype)), limit, queries)


def _call(layouts: Sequence[PageLayout]) -> AttendCall:
    return AttendCall(tuple(Part(PageStore(layout, ()), PageTable.empty()) for layout in layouts), 1.0)


def refuses_layout(layout: PageLayout, num_queries: int = 1) -> str | None:
    """The part of `refuses` that a layout decides, for queries in bfloat16, four heads to a kv head."""
    return host_plan.refuses_on(_call([layout]), 4 * layout.num_kv_heads, torch.bfloat16, num_queries)


def Plan(layouts: Sequence[PageLayout], **options: Any) -> LongQueries | PackedPlan:
    """See `ops.attend.plan`; arguments as there, checked there."""
    unpacks = long_queries.refuses(layouts, options, _refuses_packed(layouts, options) is None) is None
    return LongQueries(layouts, **options) if unpacks else PackedPlan(layouts, **options)


class PackedPlan:
    """A plan of kernels that read packed pages."""

    def __init__(self, layouts: Sequence[PageLayout], *, spans: bool, past_only: bool, **options: Any) -> None:
        self.layouts, self.options = tuple(layouts), options
        self.result_dtype = options["dtype"]
        given = (options[name] for name in ("num_q_heads", "dtype", "num_queries", "device"))
        self.reads_host = spans or past_only or device_plan.refuses(layouts, *given) is not None
        most = [(2**31 - 1) // x.page_size for x in layouts]
        self._device = None if self.reads_host else DevicePlan(layouts, most, **options)
        self._stores: dict[int, list[PageStore]] = {}
        self._step: tuple[list[PageList], torch.Tensor] | None = None

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        self._stores[layer] = list(stores)
        if self._device is not None:
            static = {name: x for store in stores for name, x in store.static.items()}
            self._device.bind(layer, [store.slabs for store in stores], static)

    def update(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        if self._device is not None and positions is None:
            pages, tokens = [t.pages for t in tables], [t.tokens for t in tables]
            self._device.update(pages, tokens, [t.starts for t in tables], [t.offsets for t in tables], query_lens)
            self._step = None
            return
        lists = [PageList.of(table, layout.page_size) for table, layout in zip(tables, self.layouts, strict=True)]
        at = query_positions(lists, self.options["num_queries"], query_lens) if positions is None else positions
        self._step = lists, at

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        if self._step is None:
            if self._device is None:
                raise DataError("run() before the first update(); there are no lengths")
            return self._device.run(q, layer, out, lse)
        o = self.options
        lists, positions = self._step
        parts = tuple(
            Part(store, PageTable(x.indptr, x.within(store.num_pages), x.starts, x.lengths))
            for store, x in zip(self._stores[layer], lists, strict=True)
        )
        plan = host_plan.plan(
            AttendCall(parts, o["scaling"], o["sliding_window"], o["softcap"]),
            o["num_q_heads"],
            o["dtype"],
            q.device,
            num_queries=o["num_queries"],
        )
        found, logs = plan.run(q.contiguous(), positions.to(q.device))
        if lse is not None:
            lse.copy_(logs)
        return found if out is None else out.copy_(found)

    def explain(self) -> str:
        return "attend by cuda, led by the host" if self._device is None else self._device.explain()
