"""append on the CPU: keys and values of all sequences in one call."""

from __future__ import annotations

import ctypes

import torch

from ..cpu.library import AppendStruct, check, library
from ..cpu.structs import TORCH_DTYPES, refuses_writing, store_struct
from ..types import PageStore, SlotMapping


def refuses(k: torch.Tensor, store: PageStore) -> str | None:
    """Why tokens like k [B, T, H, D] cannot be written to pages of this store here, or None."""
    if not store.layout.is_raw:
        return "packed pages are filled token by token by the reference"
    return refuses_writing(k, store)


def append(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> dict[str, int]:
    """Write tokens in place; arguments, result and errors of the reference. Copies nothing where the tensors' last dims are dense."""
    slot_mapping.check(k, v, store)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    batch, tokens, heads, head_dim = k.shape
    check(library().kvbits_append(AppendStruct(
        ctypes.addressof(store_struct(store)), slot_mapping.address, len(slot_mapping.runs), batch, tokens, heads, head_dim, TORCH_DTYPES[k.dtype],
        torch.get_num_threads(), k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3],
    )))  # fmt: skip
    return {}
