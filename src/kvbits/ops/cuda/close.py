"""close on NVIDIA GPUs: scales, codes and packing in one launch, by the kernel of the pages' family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import DataError
from ...later import upload
from ...spec import PageLayout
from ..store import STATUS_FIELDS, check_column
from ..types import PageStore, check_closing, settle
from .engine.family import Op
from .engine.runtime import driver
from .engine.side import with_aligned_rows
from .families import family_of


def refuses(k: torch.Tensor, store: PageStore) -> str | None:
    """Return why pages of this store cannot be closed here, or None."""
    if k.device.type != "cuda" or store.device.type != "cuda":
        return f"keys are on {k.device}, pages on {store.device}, not on a GPU"
    return refuses_on(store.layout, k.dtype, k.device, "close")


def refuses_on(layout: PageLayout, dtype: torch.dtype, device: torch.device, op: Op = "step") -> str | None:
    """Return why pages of a layout cannot be closed from `dtype` on a device, by default in a decode step, or None."""
    if why := driver.refuses(device):
        return why
    return refuses_layout(layout, dtype, torch.cuda.get_device_capability(device), op)


def refuses_layout(
    layout: PageLayout,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (8, 9),
    op: Op = "close",
) -> str | None:
    """Return `refuses_on` a device of a compute capability."""
    if capability < (8, 9) and any(spec.format.startswith("fp8") for spec in (layout.key, layout.value)):
        return f"compute capability {capability[0]}.{capability[1]} cannot round to fp8 (8.9 can)"
    return family_of(layout).refuses(op, layout, dtype=dtype)


class DecodeStep:
    """The work on the pages of one layer in every decode step: pages that close are quantized, the fresh tokens stored
    raw. It is one launch, which can be captured in a CUDA graph: it asks the device what closes and where tokens go.

    Args:
        store: pages that close, or `tail` again where nothing does.
        tail: raw pages.
        closings: int64 [B, 2] on the device, struct Closing of runs.cuh; runs: int64 [B, 5], struct Run. Bytes count
            from the first slab of each store.
        status: int32 [STATUS_FIELDS] on the device, added to (see `family.Close`).
        undo: of keys and of values [B, H, D] of `dtype`, dense: takes the rows that tokens replace, for `put_back`;
            None where runs hold no token.
        tail_starts: int32 [B] on the device, position of the first token of the raw pages that stay, for keys in the
            frame of their page.
    """

    def __init__(
        self,
        store: PageStore,
        tail: PageStore,
        dtype: torch.dtype,
        closings: torch.Tensor,
        runs: torch.Tensor,
        status: torch.Tensor,
        undo: Sequence[torch.Tensor] | None,
        tail_starts: torch.Tensor | None = None,
    ) -> None:
        layout, raw, family = store.layout, tail.layout, family_of(store.layout)
        device_index = -1 if store.device.index is None else store.device.index
        self._kernel, self._threads, args = family.step(store, dtype, device_index, len(runs), tail_starts)
        self._grid = 2 * layout.num_kv_heads * len(runs)
        self._keep = (store, tail, closings, runs, status, undo, tail_starts)
        self._undo = undo
        self._given: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # strides that need no copy
        self._args: Any = args
        args.status, args.num_heads, args.head_bytes, args.tail_head_bytes = (
            status.data_ptr(),
            layout.num_kv_heads,
            layout.head_bytes,
            raw.head_bytes,
        )
        args.closings, args.runs, args.closed, args.tail = (
            x.data_ptr() for x in (closings, runs, store.slabs[0], tail.slabs[0])
        )
        for i, kind in enumerate("kv"):
            args.tail_offset[i] = raw.sections[f"{kind}_raw"].offset
        self._fresh = args.fresh  # the same memory
        args.before[0], args.before[1] = (None, None) if undo is None else (x.data_ptr() for x in undo)

    def run(self, k: torch.Tensor, v: torch.Tensor, stream: int) -> None:
        """Store keys and values [B, 1, H, D] of the pages' dtype; the rows they replace go to `undo`."""
        given = (k.stride(), v.stride())
        k_at, v_at = k.data_ptr(), v.data_ptr()
        if given != self._given or (k_at | v_at) % 16:
            k, v = with_aligned_rows(k), with_aligned_rows(v)
            k_at, v_at, size = k.data_ptr(), v.data_ptr(), k.element_size()
            for i, x in enumerate((k, v)):
                self._args.fresh_stride[i][0], self._args.fresh_stride[i][1] = x.stride(0) * size, x.stride(2) * size
            self._given = given if given == (k.stride(), v.stride()) else None
        self._fresh[0], self._fresh[1] = k_at, v_at
        self._kernel.launch(self._grid, self._threads, self._args, stream)

    def put_back(self, nothing_closes: torch.Tensor, stream: int) -> None:
        """Write what `run` replaced; `nothing_closes`: as `closings`, NOWHERE alone."""
        assert self._undo is not None
        args, (k, v) = self._args, (x.unsqueeze(1) for x in self._undo)
        args.closings, args.before[0], args.before[1] = nothing_closes.data_ptr(), None, None
        self.run(k, v, stream)
        args.closings, args.before[0], args.before[1] = self._keep[2].data_ptr(), k.data_ptr(), v.data_ptr()


def close(
    k: torch.Tensor,
    v: torch.Tensor,
    store: PageStore,
    page_ids: np.ndarray,
    starts: np.ndarray | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Close pages in place, see `reference.close`; with a `status` without waiting."""
    layout = store.layout
    family = family_of(layout)
    page_ids = check_closing(store, page_ids)
    for name, x in (("k", k), ("v", v)):
        shape = (len(page_ids), layout.num_kv_heads, layout.page_size, layout.dim(name))
        if tuple(x.shape) != shape or x.dtype != k.dtype or x.device != store.device:
            raise DataError(
                f"{name} must be {k.dtype} {list(shape)} on {store.device}, got {x.dtype} {list(x.shape)} on {x.device}"
            )
    if status is not None:
        check_column("status", status, torch.int32, STATUS_FIELDS, store.device)
    if not len(page_ids):
        return
    for spec, kind in ((layout.key, "k"), (layout.value, "v")):
        if spec.static and f"{kind}_scale" not in store.static:
            raise DataError(
                f"{spec.format} with static scales was given no calibrated scales; calibrate first or use static=False"
            )
    k, v = with_aligned_rows(k), with_aligned_rows(v)
    addresses = upload(store.addresses[page_ids], k.device)
    found = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=k.device) if status is None else status
    family.close(k, v, store, addresses, found, family.first(store, starts, len(page_ids), k.device))
    if status is None:
        settle(layout, k, v, found.tolist())
