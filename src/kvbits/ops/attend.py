"""Attention over anyone's pages: `plan` once, `update` once a step, `run` for every layer.

    attention = plan([layout], batch_size=64, num_q_heads=32, dtype=torch.bfloat16, device="cuda")
    attention.bind(0, [PageStore(layout, (pages,))])  # uint8 [num_pages, H, head_bytes] of layer 0, wherever they lie
    attention.update([Table(block_table, seq_lens)])  # int32 [B, W] and int32 [B], both on the device
    out = attention.run(q, 0)                         # q [B, T, Hq, D]

On a GPU `update` and `run` are one launch each, for each packed format. They allocate nothing (give `out`) and never
wait for the GPU. They read lengths and page numbers on the device only. So a CUDA graph can capture them, and a replay
reads the lengths that were written there since. Plans whose `reads_host` is true are run by the host instead.

Sequences may read several parts, each with pages of its own format and a table of its own: attention sinks, closed
pages, newest tokens.

Hopper and later start a kernel while the one before it ends. The kernel just ahead of `run` may therefore write tokens
only to the last two pages of every sequence and part, which are read after it has ended. Older pages, tables and
lengths must come from kernels before that one, or from one that is followed by `update`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DataError, SpecError
from ..spec import MOST_TOKENS, PageLayout, whole
from . import dispatch
from .static import check as check_static
from .static import read_with
from .types import BackendPlan, PageStore, Table, check_factors


def plan(
    layouts: Sequence[PageLayout],
    *,
    batch_size: int,
    num_q_heads: int,
    dtype: torch.dtype,
    device: torch.device | str,
    num_queries: int = 1,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    spans: bool = False,
    past_only: bool = False,
    may_wait: bool = False,
    backend: str = "auto",
) -> Attention:
    """Allocate everything that attention of up to `batch_size` sequences needs.

    Threads may share a plan: its calls wait for each other, and a run reads what the last update of any thread said.
    A call that is refused changes nothing. On a GPU kernels run in the order of their streams: give all calls of a plan
    one stream.

    Args:
        layouts: of each part's pages.
        batch_size: most sequences of an update.
        num_q_heads: query heads, a multiple of the layouts' kv heads.
        dtype: of the queries.
        device: where the pages are.
        num_queries: query tokens of a sequence; `update(query_lens=..)` or padding in `update(positions=..)` says where
            a sequence has fewer.
        scaling: factor on the scores, 1 / sqrt(head_dim) if None.
        sliding_window: a query at position p sees keys at positions > p - sliding_window; None for all.
        softcap: scores become softcap * tanh(scores / softcap); None for no cap.
        spans: tables may have spans.
        past_only: no key in the pages comes after a query that is not padding, as with a chunk behind its history or a
            single newest token. A backend may then unpack pages, and read lengths on the host (`Attention.reads_host`).
            With more than one query, `update` takes positions: the newest tokens would lie in the pages.
        may_wait: plans that no kernel of a GPU takes are left to the reference, which waits for the GPU at every step.
        backend: "auto", or the name of one.

    Raises:
        SpecError: invalid numbers, or the named backend refuses; the message says why.
        UnsupportedError: no backend serves such a plan; the message says why.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(f"device={device!r}: plans are for 'cpu' and 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise SpecError(f"device={str(device)!r}: plans are for 'cpu' and 'cuda'")
    bad = [x for x in layouts if not isinstance(x, PageLayout)] if isinstance(layouts, (list, tuple)) else [layouts]
    if bad or not layouts:
        got = type(bad[0]).__name__ if bad else "an empty list"
        raise SpecError(f"layouts must be a list of PageLayout, one for each part and at least one; got {got}")
    for name, n in (("batch_size", batch_size), ("num_q_heads", num_q_heads), ("num_queries", num_queries)):
        whole(name, n, 1, MOST_TOKENS)
    heads, d = layouts[0].num_kv_heads, layouts[0].head_dim
    if len(shapes := list(dict.fromkeys((x.num_kv_heads, x.head_dim, x.value_head_dim) for x in layouts))) > 1:
        raise SpecError(
            f"parts of one plan have the same kv heads and head sizes, got (kv heads, of keys, of values) {shapes}"
        )
    if num_q_heads % heads:
        raise SpecError(f"{num_q_heads} query heads are not a multiple of {heads} kv heads")
    try:
        check_factors(d**-0.5 if scaling is None else scaling, softcap)
    except DataError as error:
        raise SpecError(str(error)) from None
    if sliding_window is not None:
        sliding_window = whole("sliding_window", sliding_window, 1, MOST_TOKENS, "None means no window")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SpecError(f"dtype={dtype!r} must be a floating-point torch dtype, that of the queries")
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "num_q_heads": num_q_heads,
        "dtype": dtype,
        "device": device,
        "num_queries": num_queries,
        "scaling": d**-0.5 if scaling is None else scaling,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "spans": bool(spans),
        "past_only": bool(past_only),
    }
    choice = dispatch.choose("attend", layouts, options | {"may_wait": may_wait or backend != "auto"}, backend=backend)
    return Attention(choice, choice.run(layouts, **options), layouts, options)


def attend(
    q: torch.Tensor,
    stores: Sequence[PageStore],
    tables: Sequence[Table],
    *,
    query_lens: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan, bind, update and run once.

    Args:
        q: [B, T, Hq, D] queries.
        stores, tables, query_lens, positions: as in `Attention.bind` and `Attention.update`.
        options: scaling, sliding_window, softcap, past_only and backend as in `plan`.

    Returns:
        out [B, T, Hq, value_head_dim] in the backend's `result_dtype` and lse float32 [B, T, Hq].

    Raises:
        SpecError, DataError, UnsupportedError: as `plan`, `bind`, `update` and `run`.
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        raise DataError(f"q must be a tensor [B, T, Hq, D], got {list(getattr(q, 'shape', [])) or type(q).__name__}")
    attention = plan(
        [store.layout for store in stores],
        batch_size=q.shape[0],
        num_q_heads=q.shape[2],
        dtype=q.dtype,
        device=q.device,
        num_queries=q.shape[1],
        spans=any(table.spans is not None for table in tables),
        **options,
    )
    attention.bind(0, stores)
    attention.update(tables, query_lens=query_lens, positions=positions)
    out = q.new_empty(*q.shape[:3], stores[0].layout.value_head_dim, dtype=attention.result_dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return attention.run(q, 0, out=out, lse=lse), lse


class Attention:
    """A plan. What `update` was given stays the caller's: the plan keeps references, and a captured graph reads the
    same memory at every replay.

    Attributes:
        choice: the backend that serves, and why others do not.
        layouts: of each part's pages.
    """

    def __init__(
        self, choice: dispatch.Choice, backend: BackendPlan, layouts: Sequence[PageLayout], options: dict[str, Any]
    ) -> None:
        self.choice, self._backend = choice, backend
        self.layouts = tuple(layouts)
        self._wants = [{} if x.is_raw else read_with(x) for x in layouts]
        self.batch_size: int = options["batch_size"]
        self.num_queries: int = options["num_queries"]
        self.device: torch.device = options["device"]
        self._spans: bool = options["spans"]
        self._past_only: bool = options["past_only"]
        self._accepted: tuple[Any, ...] | None = None
        self._lock = threading.Lock()  # backends write into structs that their kernels read while other threads run

    @property
    def reads_host(self) -> bool:
        """True where lengths are read on the host. `update` then takes tokens, starts, offsets, spans, query_lens and
        positions as CPU tensors, and page numbers from either side.
        """
        return self._backend.reads_host

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype that results are computed in. `run` rounds them to the queries' unless `out` has this one."""
        return self._backend.result_dtype

    def bind(self, layer: int, stores: Sequence[PageStore]) -> None:
        """Set where a layer's pages lie; again when they move or their pool grew.

        Args:
            layer: a number of the caller's, for `run`.
            stores: of each part, pages of the plan's layout. Page numbers count through the slabs in order. The numbers
                of a calibrated parameter are checked once for each tensor, which waits for a GPU.

        Raises:
            DataError: pages of another layout, shape, dtype or alignment than planned.
            SpecError: calibrated parameters that are missing, have another shape, or are invalid (a scale that is 0,
                negative or NaN).
        """
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise DataError(f"layer={layer!r} must be a number of yours, for run()")
        if not isinstance(stores, (list, tuple)) or not all(isinstance(x, PageStore) for x in stores):
            raise DataError(f"stores must be a list of PageStore, one for each part, got {type(stores).__name__}")
        if len(stores) != len(self.layouts):
            raise DataError(f"stores of {len(stores)} parts for a plan of {len(self.layouts)}")
        for layout, want, store in zip(self.layouts, self._wants, stores, strict=True):
            if store.layout != layout:
                raise DataError(
                    f"pages of layer {layer} have another layout than planned: {store.layout}, not {layout}"
                )
            if why := store.unreadable:
                raise DataError(why)
            self._check_device("pages", store.slabs[0])
            if want:
                self._check_static(layer, store, want)
        with self._lock:
            self._backend.bind(layer, stores)

    def _check_static(self, layer: int, store: PageStore, want: dict[str, tuple[int, ...]]) -> None:
        way_out = f"pass PageStore(.., static={{..}}) with {', '.join(want)}"
        check_static(store.static, want, f"for pages of layer {layer}", way_out)
        if self.device.type == "cpu":  # a plan for a GPU brings them there
            for name in want:
                self._check_device(f"static {name}", store.static[name])

    def _check_device(self, name: str, x: torch.Tensor, also_host: bool = False) -> None:
        if also_host and x.device.type == "cpu":
            return
        if x.device.type != self.device.type or (self.device.index is not None and x.device.index != self.device.index):
            raise DataError(f"{name} on {x.device} for a plan on {self.device}")

    def update(
        self,
        tables: Sequence[Table],
        *,
        query_lens: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Take other lengths and tables, for all layers.

        Args:
            tables: of each part.
            query_lens: int32 [B]: queries of each sequence, at most the plan's; they are its newest tokens, up to the
                last position that its parts show. Rows of q after them are padding, and so are all rows of a sequence
                with fewer tokens than queries. None for all.
            positions: int32 [B, num_queries], dense: position of each query, negative for padding, which sees nothing;
                instead of query_lens. A key at position p is visible to a query at position t if p <= t. Needed where
                tables have spans, and for more than one query of a plan with past_only.

        Raises:
            DataError: tensors of another shape, dtype or device than this, or more sequences than planned.
        """
        if not isinstance(tables, (list, tuple)) or not all(isinstance(x, Table) for x in tables):
            raise DataError(f"update() takes a list of Table, one for each part, got {type(tables).__name__}")
        tensors = [
            *(x for table in tables for x in (table.pages, table.tokens, table.starts, table.offsets, table.spans)),
            query_lens,
            positions,
        ]
        for x in tensors:
            if x is not None and not isinstance(x, torch.Tensor):
                raise DataError(f"tables and lengths must be tensors, got {type(x).__name__}")
        given = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors)
        if given != self._accepted:
            self._check(tables, query_lens, positions)
            self._accepted = given
        with self._lock:
            self._backend.update(tables, query_lens, positions)

    def _check(self, tables: Sequence[Table], query_lens: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        if len(tables) != len(self.layouts):
            raise DataError(f"update() takes {len(self.layouts)} tables, one for each part of the plan")
        if any(table.pages is None or table.tokens is None for table in tables):
            raise DataError("a table has at least pages and tokens")
        batch = tables[0].tokens.shape[0] if tables[0].tokens.dim() else 0
        if not 1 <= batch <= self.batch_size:
            raise DataError(
                f"{batch} sequences for a plan of at most {self.batch_size}; make a plan with a larger batch_size"
            )
        for i, table in enumerate(tables):
            pages = table.pages
            self._check_device("tables must be where the pages are: one", pages, also_host=self.reads_host)
            if (
                pages.dtype != torch.int32
                or pages.dim() != 2
                or pages.shape[0] < batch
                or not pages.shape[1]
                or (pages.shape[1] > 1 and pages.stride(1) != 1)
            ):
                raise DataError(
                    f"pages of table {i} must be int32 [at least {batch}, at least 1] with dense rows, got"
                    f" {pages.dtype} {list(pages.shape)}"
                )
            for name in ("tokens", "starts", "offsets"):
                self._check_numbers(f"{name} of table {i}", getattr(table, name), (batch,))
            if table.spans is not None:
                self._check_numbers(f"spans of table {i}", table.spans, (*pages.shape, 2))
                if not self._spans:
                    raise DataError(f"table {i} has spans; make the plan with spans=True")
                if table.starts is not None or table.offsets is not None:
                    raise DataError(
                        f"table {i} has spans, which say where every page stands; leave out its starts and offsets"
                    )
                if positions is None:
                    raise DataError("tables with spans do not say which tokens are the newest; give positions")
        self._check_numbers("query_lens", query_lens, (batch,))
        self._check_numbers("positions", positions, (batch, self.num_queries))
        if self._past_only and self.num_queries > 1 and positions is None:
            raise DataError(
                f"{self.num_queries} queries of a plan with past_only=True come after all pages, which say where older"
                " tokens stand; give positions"
            )
        if query_lens is not None and positions is not None:
            raise DataError("give positions, negative for padding, or query_lens, not both")

    def _check_numbers(self, name: str, x: torch.Tensor | None, shape: tuple[int, ...]) -> None:
        if x is None:
            return
        if self.reads_host:
            if x.device.type != "cpu":
                raise DataError(f"{name} on {x.device}: this plan reads lengths on the host; give CPU tensors")
        else:
            self._check_device(f"tables and lengths must be where the pages are: {name}", x)
        if x.dtype != torch.int32 or tuple(x.shape) != shape or not x.is_contiguous():
            raise DataError(f"{name} must be dense int32 {list(shape)}, got {x.dtype} {list(x.shape)}")

    def run(
        self, q: torch.Tensor, layer: int = 0, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return attention of q [B, T, Hq, D] over the pages of `layer`.

        Args:
            out: dense, of q's dtype or `result_dtype`, and of q's shape, the last dimension the values'; made in q's
                dtype if None.
            lse: float32 [B, T, Hq], dense: filled with the log-sum-exps, natural log, -inf where nothing was visible.
                Not computed if None.

        Returns:
            `out`; zeros where nothing was visible.

        Raises:
            DataError: tensors that are not what was planned, or no `bind` and `update` before.
        """
        if not isinstance(q, torch.Tensor):
            raise DataError(f"q must be a tensor [B, T, Hq, D], got {type(q).__name__}")
        if out is not None:
            dtype = self.result_dtype if isinstance(out, torch.Tensor) and out.dtype == self.result_dtype else q.dtype
            self._check_result("out", out, dtype, (*q.shape[:3], self.layouts[0].value_head_dim), q.device)
        if lse is not None:
            self._check_result("lse", lse, torch.float32, tuple(q.shape[:3]), q.device)
        with self._lock:
            return self._backend.run(q, layer, out, lse)

    @staticmethod
    def _check_result(name: str, x: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
        if not isinstance(x, torch.Tensor):
            raise DataError(f"{name} must be dense {dtype} {list(shape)} on {device}, got {type(x).__name__}")
        if x.shape != shape or x.dtype != dtype or x.device != device or not x.is_contiguous():
            raise DataError(
                f"{name} must be dense {dtype} {list(shape)} on {device}, got {x.dtype} {list(x.shape)} on {x.device}"
            )

    def explain(self) -> str:
        """Name the kernels that serve, one a line."""
        return self._backend.explain()
