"""Attention over anyone's pages: `plan` once, `update` on the device, `run` for every layer.

    attention = plan([layout], max_pages=[128], batch_size=64, num_q_heads=32, dtype=torch.bfloat16, device="cuda")
    attention.bind(0, [pages])                      # uint8 [num_pages, H, head_bytes] of layer 0, wherever they lie
    attention.update([block_table], [seq_lens])     # int32 [B, max_pages] and int32 [B], both on the device
    out = attention.run(q, 0)                       # q [B, T, Hq, D]

On a GPU `update` and `run` are one launch each: they allocate nothing (give `out`), never wait for the GPU, read
lengths and page numbers on the device only, and can be captured in a CUDA graph and replayed after other lengths were
written there. Elsewhere the same contract is served by host lists and whichever backend `dispatch` finds for them.

Sequences may read several parts, each with pages of its own format and a table of its own: attention sinks, closed
pages, newest tokens. Tokens of a part lie on its pages in order, every page full but the last; a part's first token has
position `starts` (0 if not given).

What may still be written while attention starts (Hopper and later overlap the end of one kernel with the start of the
next): the kernel just ahead of `run` may have written tokens to the last two pages of every sequence and part, which
are read after it has ended. Older pages, tables and lengths must come from kernels before that one, or from one that is
followed by `update`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import DataError, SpecError
from ..spec import PageLayout
from . import dispatch
from .static import check as check_static
from .static import read_with
from .types import check_factors

Slabs = torch.Tensor | Sequence[torch.Tensor]


class _Backend(Protocol):
    def bind(self, layer: int, pages: Sequence[Sequence[torch.Tensor]], static: Mapping[str, torch.Tensor]) -> None: ...
    def update(
        self,
        block_tables: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor | None],
        offsets: Sequence[torch.Tensor | None],
        query_lens: torch.Tensor | None,
    ) -> None: ...
    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor: ...
    def explain(self) -> str: ...


def plan(
    layouts: Sequence[PageLayout],
    *,
    max_pages: Sequence[int],
    batch_size: int,
    num_q_heads: int,
    dtype: torch.dtype,
    device: torch.device | str,
    num_queries: int = 1,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> PagedAttention:
    """Allocate everything that attention of up to `batch_size` sequences needs.

    Threads may share a plan: its calls wait for each other, a run reads what the last update of any thread said, and a
    call that is refused changes nothing. On a GPU kernels then run in the order of their streams: give all calls of a
    plan one stream.

    Args:
        layouts: of each part's pages.
        max_pages: of each part: pages of a sequence, the columns of its block table.
        num_queries: query tokens of a sequence, 1 to 8 on a GPU; `update(query_lens=..)` says where a sequence has
            fewer.
        scaling: factor on the scores, 1 / sqrt(head_dim) if None.
        sliding_window, softcap: as in `AttendCall`.

    Raises:
        SpecError: numbers that cannot be.
        UnsupportedError: no kernel on this GPU; the message says why.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise SpecError(f"device={str(device)!r}: plans are for 'cpu' and 'cuda'")
    _require_list("layouts", layouts, PageLayout)
    _require_list("max_pages", max_pages, int)
    if not layouts or len(layouts) != len(max_pages):
        raise SpecError(
            f"{len(layouts)} layouts and {len(max_pages)} numbers of pages; give one of each for every part, and at"
            " least one part"
        )
    for name, n in (
        ("batch_size", batch_size),
        ("num_q_heads", num_q_heads),
        ("num_queries", num_queries),
        *(("max_pages", n) for n in max_pages),
    ):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise SpecError(f"{name}={n!r} must be a whole number of at least 1")
    heads, d = layouts[0].num_kv_heads, layouts[0].head_dim
    if len(shapes := list(dict.fromkeys((x.num_kv_heads, x.head_dim, x.value_head_dim) for x in layouts))) > 1:
        raise SpecError(
            f"parts of one plan have the same kv heads and head sizes, got (kv heads, of keys, of values) {shapes}"
        )
    if num_q_heads % heads:
        raise SpecError(f"{num_q_heads} query heads are no multiple of {heads} kv heads")
    try:
        check_factors(d**-0.5 if scaling is None else scaling, softcap)
    except DataError as error:
        raise SpecError(str(error)) from None
    if sliding_window is not None and (
        not isinstance(sliding_window, int) or isinstance(sliding_window, bool) or sliding_window < 1
    ):
        raise SpecError(f"sliding_window={sliding_window!r} must be a whole number of at least 1, or None")
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
    }
    choice = dispatch.choose("paged_attention", layouts, max_pages, options)
    return PagedAttention(choice.run(layouts, max_pages, **options), layouts, max_pages, options)


class PagedAttention:
    """A plan. What `update` was given stays the caller's: the plan keeps references, and a captured graph reads the
    same memory at every replay.
    """

    def __init__(
        self, backend: _Backend, layouts: Sequence[PageLayout], max_pages: Sequence[int], options: dict[str, Any]
    ) -> None:
        self._backend = backend
        self.layouts, self.max_pages = tuple(layouts), tuple(max_pages)
        self.batch_size: int = options["batch_size"]
        self.num_queries: int = options["num_queries"]
        self.device: torch.device = options["device"]
        self._accepted: tuple[Any, ...] | None = None
        self._lock = threading.Lock()  # backends write into structs that their kernels read while other threads run

    def bind(self, layer: int, pages: Sequence[Slabs], static: Mapping[str, torch.Tensor] | None = None) -> None:
        """Say where a layer's pages lie; again when they move or their pool grew.

        Args:
            layer: a number of the caller's, for `run`.
            pages: of each part: uint8 [num_pages, H, head_bytes], the last two dims dense, the first strided; or
                several such slabs, through which page numbers count in order.
            static: calibrated parameters of the layer's packed pages (`PageStore.static`): all that `static.read_with`
                names of their layouts. Their numbers are looked at once for a tensor, which waits for a GPU.

        Raises:
            DataError: pages of another shape, dtype or alignment than the layouts say.
            SpecError: calibrated parameters that are missing, of another shape, or cannot be (a scale that is 0,
                negative or no number).
        """
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise DataError(f"layer={layer!r} must be a number of yours, for run()")
        if isinstance(pages, torch.Tensor) or not isinstance(pages, Sequence):
            raise DataError(
                f"pages must be a list, of each part a tensor or a list of slabs, got {type(pages).__name__}"
            )
        if len(pages) != len(self.layouts):
            raise DataError(f"pages of {len(pages)} parts for a plan of {len(self.layouts)}")
        own = [self._slabs(layout, x) for layout, x in zip(self.layouts, pages, strict=True)]
        used = self._static(layer, static)
        with self._lock:
            self._backend.bind(layer, own, used)

    def _static(self, layer: int, given: Any) -> dict[str, torch.Tensor]:
        """What the layouts need out of what was given, checked."""
        if given is not None and not isinstance(given, Mapping):
            raise DataError(f"static must be a dict of tensors by name, got {type(given).__name__}")
        given = given or {}
        used: dict[str, torch.Tensor] = {}
        for layout in self.layouts:
            want = {} if layout.is_raw else read_with(layout)
            check_static(given, want, f"for pages of layer {layer}", f"pass static={{..}} with {', '.join(want)}")
            used |= {name: given[name] for name in want}
        if self.device.type == "cpu":  # a device plan brings them there
            for name, x in used.items():
                self._require_device(f"static {name}", x)
        return used

    def _slabs(self, layout: PageLayout, given: Slabs) -> tuple[torch.Tensor, ...]:
        slabs = (given,) if isinstance(given, torch.Tensor) else given
        _require_tensors("pages of a part", slabs)
        slabs = tuple(slabs)
        want = (layout.num_kv_heads, layout.head_bytes)
        if not slabs:
            raise DataError("a part without slabs has no pages")
        for x in slabs:
            self._require_device("pages", x)
            if (
                x.dtype != torch.uint8
                or x.dim() != 3
                or tuple(x.shape[1:]) != want
                or x.stride()[1:] != (layout.head_bytes, 1)
                or not len(x)
            ):
                raise DataError(
                    f"pages must be uint8 [num_pages, {want[0]}, {want[1]}] with dense structs, got {x.dtype}"
                    f" {list(x.shape)} of strides {x.stride()}"
                )
            if x.data_ptr() % 16 or x.stride(0) % 16:
                raise DataError(
                    f"pages at address {x.data_ptr():#x} with stride {x.stride(0)}; kernels read 16 bytes at a time:"
                    " both must be multiples of 16"
                )
        return slabs

    def _require_device(self, name: str, x: torch.Tensor) -> None:
        if x.device.type != self.device.type or (self.device.index is not None and x.device.index != self.device.index):
            raise DataError(f"{name} on {x.device} for a plan on {self.device}")

    def update(
        self,
        block_tables: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        *,
        starts: Sequence[torch.Tensor | None] | None = None,
        offsets: Sequence[torch.Tensor | None] | None = None,
        query_lens: torch.Tensor | None = None,
    ) -> None:
        """Take other lengths and tables, for all layers.

        Args:
            block_tables: of each part int32 [B, at least max_pages], rows dense: page numbers. A number that the pool
                has not reads the pool's last page, never other memory.
            tokens: of each part int32 [B]: visible tokens, this step's included; 0 for a sequence that reads nothing of
                the part. In no part: a padding row, whose output is 0. Numbers past max_pages, or past the row, count
                as their end.
            starts: of each part int32 [B] or None for 0: position of the part's first token.
            offsets: of each part int32 [B] or None for 0: entry of the row where the part's first page stands (a ring
                of pages, say). One outside the row counts as the row's first or last entry; tokens then end with the
                row.
            query_lens: int32 [B]: queries of each sequence, at most the plan's; they are its newest tokens. Rows of q
                after them are padding.

        Raises:
            DataError: tensors of another shape, dtype or device than this, or more sequences than planned.
        """
        none: list[torch.Tensor | None] = [None] * len(self.layouts)
        starts, offsets = (none if x is None else x for x in (starts, offsets))
        lists = {
            "block_tables": block_tables,
            "tokens": tokens,
            "starts": starts,
            "offsets": offsets,
            "query_lens": [query_lens],
        }
        for name, xs in lists.items():
            _require_tensors(f"update(): {name}", xs, optional=name not in ("block_tables", "tokens"))
        given = tuple(
            tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in xs) for xs in lists.values()
        )
        if given != self._accepted:
            self._check(block_tables, tokens, starts, offsets, query_lens)
            self._accepted = given
        with self._lock:
            self._backend.update(block_tables, tokens, starts, offsets, query_lens)

    def _check(
        self,
        block_tables: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        starts: Sequence[torch.Tensor | None],
        offsets: Sequence[torch.Tensor | None],
        query_lens: torch.Tensor | None,
    ) -> None:
        n = len(self.layouts)
        if any(len(x) != n for x in (block_tables, tokens, starts, offsets)):
            raise DataError(
                f"update() takes {n} block tables, tokens, starts and offsets, one for each part of the plan"
            )
        batch = tokens[0].shape[0] if tokens[0].dim() else 0
        if not 1 <= batch <= self.batch_size:
            raise DataError(
                f"{batch} sequences for a plan of at most {self.batch_size}; make a plan with a larger batch_size"
            )
        for x in (*block_tables, *tokens, *starts, *offsets, query_lens):
            if x is not None:
                self._require_device("tables and lengths must be where the pages are: one", x)
        for i, (table, pages) in enumerate(zip(block_tables, self.max_pages, strict=True)):
            if (
                table.dtype != torch.int32
                or table.dim() != 2
                or table.shape[0] < batch
                or table.shape[1] < pages
                or table.stride(1) != 1
            ):
                raise DataError(
                    f"block table {i} must be int32 [at least {batch}, at least {pages}] with dense rows, got"
                    f" {table.dtype} {list(table.shape)}; a plan with fewer max_pages takes narrower ones"
                )
        vectors = {"tokens": tokens, "starts": starts, "offsets": offsets, "query_lens": [query_lens]}
        for name, xs in vectors.items():
            for x in xs:
                if x is not None and (
                    x.dtype != torch.int32 or x.shape != (batch,) or (batch > 1 and x.stride(0) != 1)
                ):
                    raise DataError(f"{name} must be dense int32 [{batch}], got {x.dtype} {list(x.shape)}")

    def run(
        self, q: torch.Tensor, layer: int = 0, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of q [B, T, Hq, D] over the pages of `layer`.

        Args:
            out: dense, of q's dtype and shape, the last dimension the values'; made if None.
            lse: float32 [B, T, Hq], dense: filled with the log-sum-exps, natural log, -inf where nothing was visible.
                Not computed if None.

        Returns:
            `out`; zeros where nothing was visible.

        Raises:
            DataError: tensors that are not what was planned, or no `bind` and `update` before.
        """
        if not isinstance(q, torch.Tensor):
            raise DataError(f"q must be a tensor [B, T, Hq, D], got {type(q).__name__}")
        outs = (*q.shape[:3], self.layouts[0].value_head_dim)
        given = (
            ()
            if out is None and lse is None
            else (("out", out, q.dtype, outs), ("lse", lse, torch.float32, q.shape[:3]))
        )
        for name, x, dtype, shape in given:
            if x is not None and (
                not isinstance(x, torch.Tensor)
                or x.shape != shape
                or x.dtype != dtype
                or x.device != q.device
                or not x.is_contiguous()
            ):
                got = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
                raise DataError(f"{name} must be dense {dtype} {list(shape)} on {q.device}, got {got}")
        with self._lock:
            return self._backend.run(q, layer, out, lse)

    def explain(self) -> str:
        """Which kernel serves."""
        return self._backend.explain()


def _require_list(name: str, given: Any, kind: type) -> None:
    """
    Raises:
        SpecError: no list of such things, one for each part.
    """
    bad = [x for x in given if not isinstance(x, kind)] if isinstance(given, (list, tuple)) else [given]
    if bad:
        raise SpecError(f"{name} must be a list of {kind.__name__}, one for each part; got {type(bad[0]).__name__}")


def _require_tensors(name: str, given: Any, optional: bool = False) -> None:
    """
    Raises:
        DataError: not a list of tensors (or, if `optional`, None).
    """
    bad = (
        given
        if not isinstance(given, (list, tuple))
        else next((x for x in given if not (isinstance(x, torch.Tensor) or (optional and x is None))), given)
    )
    if bad is not given or not isinstance(given, (list, tuple)):
        raise DataError(
            f"{name} must be a list of tensors{', or None for each' * optional}, one for each part; got"
            f" {type(bad).__name__}"
        )
