"""append: fresh keys and values to their slots in raw pages, straight from the projections' output."""

from __future__ import annotations

import torch

from ..dequantize_pages.reference import section
from ..types import PageStore, SlotMapping


def refuses(k: torch.Tensor, store: PageStore) -> None:
    """The reference takes everything."""


def append(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> None:
    """Write tokens in place.

    Args:
        k, v: [B, T, H, D], any strides.
        store: raw pages [H, page_size, D] of the tensors' dtype.
        slot_mapping: which token goes where; tokens that it does not name are not stored.

    Raises:
        DataError: tensors, pages and mapping do not fit together (see `SlotMapping.check`).
    """
    slot_mapping.check(k, v, store)
    for row, token, page_id, slot, count in slot_mapping.runs.tolist():
        page = store.page(page_id)
        for name, x in (("k_raw", k), ("v_raw", v)):
            section(page, store.layout, name)[:, slot : slot + count] = x[row, token : token + count].transpose(0, 1)
