"""append on the CPU: keys and values of all sequences in one call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...errors import DataError
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..reference.append import open_pages
from ..types import PageStore, SlotMapping, settle
from . import structs
from .close import frame_turns
from .library import AppendStruct, check, library
from .structs import refuses_writing, store_struct


def refuses(k: torch.Tensor, store: PageStore) -> str | None:
    """Why tokens like k [B, T, H, D] cannot be written to pages of this store here, or None."""
    return refuses_layout(store.layout) or refuses_writing(k, store)


def refuses_layout(layout: PageLayout) -> str | None:
    """The part of `refuses` that a layout decides."""
    if not layout.token_local:
        return f"tokens cannot be stored one by one as {layout.key}, {layout.value}"
    return structs.refuses_layout(layout)


def append(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> dict[str, int]:
    """Write tokens in place; arguments, result and errors of the reference.

    Copies nothing where the tensors' last dims are dense.

    Numbers that cannot be stored in packed pages leave these half written.
    """
    slot_mapping.check(k, v, store)
    layout = store.layout
    if k.dtype not in TORCH_NUMBERS:
        raise DataError(f"k is {k.dtype}; the CPU kernels take float32, float16 and bfloat16")
    if not len(slot_mapping.runs):
        return settle(layout, k, v, [0] * 6)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    if layout.is_centered:
        open_pages(k, v, store, slot_mapping)
    batch, tokens, heads, _ = k.shape
    struct = AppendStruct(
        ctypes.addressof(store_struct(store)),
        slot_mapping.address,
        len(slot_mapping.runs),
        batch,
        tokens,
        heads,
        layout.head_dim,
        layout.value_head_dim,
        TORCH_NUMBERS[k.dtype],
        torch.get_num_threads(),
        k.data_ptr(),
        v.data_ptr(),
        *k.stride()[:3],
        *v.stride()[:3],
    )
    if layout.is_raw:
        check(library().kvbits_append(struct))
        return {}
    struct.used_bytes = layout.used_bytes
    if layout.key.needs_rotary:
        assert slot_mapping.starts is not None
        starts = np.ascontiguousarray(slot_mapping.starts)  # a column of a table, it may be
        turns = frame_turns(store, starts)
        struct.starts, struct.turn_starts = starts.ctypes.data, turns.ctypes.data
    check(library().kvbits_append(struct))
    return settle(layout, k, v, struct.status[:])
