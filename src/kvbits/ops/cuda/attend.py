"""`ops.attend` on NVIDIA GPUs: kernels read packed pages where they lie. Many queries past all pages, and formats that
no kernel reads packed, are left to `ops.long_queries`.

Everything is allocated when a plan is made. `update` is a launch that turns lengths on the device into a work list
(work_list.cu), `run` one that reads it; both can be captured in a CUDA graph. Each packed format has a kernel of
its own, or two formats that a family reads together have one. Their results are merged; the first kernel reads raw
pages, too.
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
from ..types import PageStore, Table
from .engine.kernels import LEAST_CAPABILITY, MAX_PARTS, check_query, indexed, refuses_memory
from .engine.launch import Launch, ask_of
from .engine.runtime import driver
from .engine.work_list import MOST_PARTS
from .families import family_of
from .merge import merge_partials
from .merge import prepare as prepare_merging


def refuses(layouts: Sequence[PageLayout], options: Mapping[str, Any]) -> str | None:
    """Return why such a plan is not served here, or None."""
    if why := driver.refuses(options["device"], LEAST_CAPABILITY):
        return why
    why = refuses_packed(layouts, *_kind(options))
    return why if why and long_queries.refuses(layouts, options, readable=False) else None


def _kind(options: Mapping[str, Any]) -> tuple[int, torch.dtype, int, torch.device]:
    return options["num_q_heads"], options["dtype"], options["num_queries"], options["device"]


def refuses_packed(
    layouts: Sequence[PageLayout], num_q_heads: int, dtype: torch.dtype, num_queries: int, device: torch.device
) -> str | None:
    """Return why no kernel reads such pages packed on a device, or None."""
    if why := driver.refuses(device, LEAST_CAPABILITY):
        return why
    limit = driver.shared_limit(torch.cuda.get_device_capability(device))
    return refuses_kernel(layouts, num_q_heads, dtype, num_queries, limit)


def refuses_kernel(
    layouts: Sequence[PageLayout],
    num_q_heads: int,
    dtype: torch.dtype,
    num_queries: int,
    shared_limit: int | None = None,
) -> str | None:
    """Return why no kernel reads such pages packed, or None; needs no GPU.

    Args:
        shared_limit: bytes of shared memory of a block, if known.
    """
    if dtype not in MATRIX_DTYPES:
        return f"queries are {dtype}, not float16 or bfloat16"
    if len(layouts) > MOST_PARTS:
        return f"{len(layouts)} parts; the kernels take 1 to {MOST_PARTS}"
    kernels = launches(layouts)
    if (together := max(map(len, kernels))) > MAX_PARTS:
        return f"{together} parts that one kernel reads; it takes 1 to {MAX_PARTS}"
    if len({x.raw_dtype for x in layouts if x.key.is_raw}) > 1:
        return "raw parts differ in dtype"
    columns = num_queries * num_q_heads // layouts[0].num_kv_heads
    for x in layouts:
        if why := family_of(x).refuses("attend", x, num_columns=columns, shared_limit=shared_limit):
            return why
    if shared_limit is None:
        return None
    for own in kernels:
        read = [layouts[i] for i in own]
        if why := refuses_memory(read[0], ask_of(read, columns, dtype, False, False, shared_limit)):
            return why
    return None


def refuses_layout(layout: PageLayout, num_queries: int = 1) -> str | None:
    """Answer the part of `refuses` that a layout decides: bfloat16 queries past all pages, four heads to a kv head."""
    heads = 4 * layout.num_kv_heads
    if (why := refuses_kernel([layout], heads, torch.bfloat16, num_queries)) is None:
        return None
    options = {"num_q_heads": heads, "num_queries": num_queries, "dtype": torch.bfloat16, "past_only": True}
    options |= {"sliding_window": None, "softcap": None}
    return why if long_queries.refuses([layout], options, readable=False) else None


def launches(layouts: Sequence[PageLayout]) -> list[list[int]]:
    """Return the indices of the parts that each kernel reads: one packed format, or two that a family reads together.

    The first kernel reads the raw parts, too. Raw tokens end a walk over packed ones, whose queries then need no
    registers any more.
    """
    raw = [i for i, x in enumerate(layouts) if x.key.is_raw]
    own: list[list[int]] = []
    alone: PageLayout | None = None  # of the last kernel, if it has no second one
    for layout in dict.fromkeys(x for x in layouts if not x.key.is_raw):
        parts = [i for i, x in enumerate(layouts) if x == layout]
        room = MAX_PARTS - (len(raw) if len(own) == 1 else 0)
        if alone and family_of(alone).reads_beside(alone, layout) and len(own[-1]) + len(parts) <= room:
            own[-1] += parts
            alone = None
        else:
            own.append(parts)
            alone = layout
    own = own or [[]]
    own[0] += raw
    return own


def plan(layouts: Sequence[PageLayout], **options: Any) -> LongQueries | PackedPlan:
    """Plan as `ops.attend.plan` has it; arguments as there, checked there."""
    readable = refuses_packed(layouts, *_kind(options)) is None
    unpacks = long_queries.refuses(layouts, options, readable) is None
    return LongQueries(layouts, **options) if unpacks else PackedPlan(layouts, **options)


class PackedPlan:
    """A plan of kernels that read packed pages."""

    reads_host = False

    def __init__(self, layouts: Sequence[PageLayout], *, device: torch.device, **options: Any) -> None:
        self.device = device = indexed(device)
        self.result_dtype: torch.dtype = options["dtype"]
        self._launches = [Launch(layouts, own, device, options) for own in launches(layouts)]
        rows = (options["num_queries"], options["num_q_heads"])
        self._q_shape, self._value_head_dim = (*rows, layouts[0].head_dim), layouts[0].value_head_dim
        # Results of each launch, the first of which goes to where the merged one goes; and log-sum-exps, also merged.
        batch, several = options["batch_size"], len(self._launches) - 1
        self._outs, self._lses = (
            torch.empty(n, batch, *shape, dtype=dtype, device=device)
            for n, shape, dtype in (
                (several, (*rows, self._value_head_dim), self.result_dtype),
                (several + 2 if several else 0, rows, torch.float32),
            )
        )
        if several:
            prepare_merging(list(self._outs))
        self._layers: set[int] = set()
        self._batch = 0  # of the last update
        self._accepted: tuple | None = None

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        for launch in self._launches:
            launch.bind(layer, stores)
        self._layers.add(layer)

    def update(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        stream = driver.current_stream(self.device)
        for launch in self._launches:
            launch.update(tables, query_lens, positions, stream)
        self._batch = len(tables[0].tokens)

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
        if layer not in self._layers:
            raise DataError(f"layer {layer} was never bound; call bind({layer}, stores) first")
        if not self._batch:
            raise DataError("run() before the first update(); the work list is empty")
        given = (q.shape, q.stride(), q.dtype, q.device, self._batch, q.data_ptr() % 8)
        if given != self._accepted:
            check_query(q, (self._batch, *self._q_shape), self.result_dtype, self.device)
            self._accepted = given
        if out is None:
            out = q.new_empty(*q.shape[:3], self._value_head_dim)
        stream = driver.current_stream(self.device)
        if len(self._launches) == 1:
            self._launches[0].run(q, layer, out, lse, stream)
            return out
        outs, (merged, *lses) = [out, *self._outs[:, : self._batch]], self._lses[:, : self._batch]
        for launch, own, logs in zip(self._launches, outs, lses, strict=True):
            launch.run(q, layer, own, logs, stream)
        merge_partials(outs, lses, into=out, lse=merged if lse is None else lse)
        return out

    def explain(self) -> str:
        """Return the kernels that serve, in a line each."""
        return "\n".join(launch.explain() for launch in self._launches)
