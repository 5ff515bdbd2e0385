"""store on the CPU: keys and values of all sequences in one call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...quant.basis import frames
from ...quant.rotary import page_turns
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..reference.store import open_pages
from ..store import STATUS_FIELDS, check, note, require_positions
from ..types import PageStore, settle
from . import library, structs
from .close import require_basis
from .structs import store_struct

_Status = ctypes.c_int32 * STATUS_FIELDS


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why tokens are not stored here, or None."""
    if device.type != "cpu":
        return f"the tokens are on {device}, not on the CPU"
    if dtype not in TORCH_NUMBERS:
        return f"tokens are {dtype}; the CPU kernels take float32, float16 and bfloat16"
    return refuses_layout(layout) or library.unavailable()


def refuses_layout(layout: PageLayout) -> str | None:
    """Answer the part of `refuses` that a layout decides."""
    if not layout.token_local:
        return f"tokens cannot be stored one by one as {layout.key}, {layout.value}"
    return structs.refuses_layout(layout)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    *,
    previous: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Write tokens in place, see `ops.store`. Copies nothing where the tensors' last dims are dense."""
    check(k, v, pages, slots, previous, starts, status)
    layout = pages.layout
    if layout.is_centered and (opening := _opened_in_part(slots, previous, layout.page_size)) is not None:
        found = open_pages(k, v, pages, opening, previous)
        if any(found):
            return note(found, k, v, layout, status)
    k, v = k if k.stride(-1) == 1 else k.contiguous(), v if v.stride(-1) == 1 else v.contiguous()
    batch, count, heads, _ = (1, *k.shape)[-4:]
    judged = None if status is not None or layout.is_raw else _Status()
    call = library.StoreCall(
        ctypes.addressof(store_struct(pages)),
        slots.data_ptr(),
        batch,
        count,
        heads,
        layout.head_dim,
        layout.value_head_dim,
        TORCH_NUMBERS[k.dtype],
        torch.get_num_threads(),
        k.data_ptr(),
        v.data_ptr(),
        *(0, *k.stride())[-4:-1],
        *(0, *v.stride())[-4:-1],
        layout.used_bytes,
    )
    if status is not None:
        call.status = status.data_ptr()
    elif judged is not None:
        call.status = ctypes.addressof(judged)
    if layout.key.needs_rotary:
        assert starts is not None
        require_basis(pages)
        first = starts.numpy()
        require_positions(first[slots.numpy() >= 0])
        of_pages = np.unique(frames(first))
        turns = page_turns(of_pages, pages.static["k_inv_freq"])
        call.starts, call.frames, call.turn_starts, call.num_frames = (
            first.ctypes.data,
            of_pages.ctypes.data,
            turns.ctypes.data,
            len(of_pages),
        )
    library.check(library.library().kvbits_store_tokens(call))
    if judged is not None:
        settle(layout, k, v, judged[:])


def _opened_in_part(slots: torch.Tensor, previous: torch.Tensor | None, page_size: int) -> torch.Tensor | None:
    """Return the slots by which `open_pages` finds the means that the kernels do not make, others -1, or None.

    Kernels take the mean of a page whose tokens all follow each other in the call. The mean of a page that opens and
    does not fill comes from the page before it, whose slots are kept, too.
    """
    at = slots.numpy()
    first = np.flatnonzero((at >= 0) & (at % page_size == 0))
    places = first[:, None] + np.arange(page_size)
    whole = at[np.minimum(places, len(at) - 1)] == at[first, None] + np.arange(page_size)
    first = first[~whole.all(1)]
    if not len(first):
        return None
    needed = at[first] // page_size
    if previous is not None:
        needed = np.concatenate([needed, previous.numpy()[first]])
    return torch.from_numpy(np.where((at >= 0) & np.isin(at // page_size, needed), at, -1))
