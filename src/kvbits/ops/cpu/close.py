"""close on the CPU: scales, codes and packing in one pass over the raw page, bit for bit what the reference
stores.

Trellis codes: the scale of a token whose squared error hardly differs between two candidates may be the other one (sums
are taken in another order), and keys in a calibrated basis may differ from the reference's in the last bit of float32.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...errors import DataError, UnsupportedError
from ...quant.basis import frames
from ...quant.rotary import page_turns
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..reference.dequantize import require_starts
from ..store import note
from ..types import PageStore, check_closing
from . import structs
from .library import CloseStruct, check, library
from .structs import refuses_writing, store_struct


def refuses(k: torch.Tensor, store: PageStore) -> str | None:
    """Return why pages of this store cannot be closed here, or None."""
    return refuses_layout(store.layout) or refuses_writing(k, store)


def refuses_layout(layout: PageLayout) -> str | None:
    """Answer the part of `refuses` that a layout decides."""
    return structs.refuses_layout(layout)


def require_basis(store: PageStore) -> None:
    """Require the basis of a store's keys.

    Raises:
        DataError: a store without the basis of its keys.
    """
    if "k_basis" not in store.static:
        raise DataError(
            "keys in a calibrated basis need k_basis of [num_kv_heads, head_dim, head_dim] to be stored; calibrate"
            " first"
        )


def close(
    k: torch.Tensor,
    v: torch.Tensor,
    store: PageStore,
    page_ids: np.ndarray,
    starts: np.ndarray | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Close pages in place, see `reference.close`. After NaN, infinity or an overflow they are half written.

    Raises:
        UnsupportedError: pages that `refuses_layout`.
    """
    layout = store.layout
    if why := refuses_layout(layout):
        raise UnsupportedError(f"{why}; use the reference")
    ids = check_closing(store, page_ids)
    for name, x in (("k", k), ("v", v)):
        shape = (len(ids), layout.num_kv_heads, layout.page_size, layout.dim(name))
        if tuple(x.shape) != shape or x.dtype != k.dtype or x.dtype not in TORCH_NUMBERS or x.device.type != "cpu":
            raise DataError(
                f"{name} must be {k.dtype} {list(shape)} on the CPU, got {x.dtype} {list(x.shape)} on {x.device}"
            )
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    struct = CloseStruct(
        ctypes.addressof(store_struct(store)),
        ids.ctypes.data,
        len(ids),
        layout.num_kv_heads,
        layout.head_dim,
        layout.value_head_dim,
        TORCH_NUMBERS[k.dtype],
        torch.get_num_threads(),
        (k.data_ptr(), v.data_ptr()),
        (k.stride()[:3], v.stride()[:3]),
    )
    if layout.key.needs_rotary:
        require_basis(store)
        first = require_starts(starts, len(ids))
        turns = page_turns(frames(first), store.static["k_inv_freq"])
        struct.starts, struct.turn_starts = first.ctypes.data, turns.ctypes.data
    check(library().kvbits_close(struct))
    note([*struct.status, 0], k, v, layout, status)
