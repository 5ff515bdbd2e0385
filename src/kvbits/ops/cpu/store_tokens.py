"""store_tokens on the CPU: slots become the runs of `append`, once for all layers of a step."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...errors import DataError
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..reference.append import check_tokens
from ..types import SlotMapping, store_of
from .append import append, refuses_layout
from .library import unavailable

__all__ = ["refuses", "refuses_layout", "store_tokens"]


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why tokens are not stored here, or None."""
    if device.type != "cpu":
        return f"the tokens are on {device}, not on the CPU"
    if dtype not in TORCH_NUMBERS:
        return f"tokens are {dtype}; the CPU kernels take float32, float16 and bfloat16"
    return refuses_layout(layout) or unavailable()


def store_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    slot_mapping: torch.Tensor,
    *,
    static: dict[str, torch.Tensor] | None = None,
    previous_page: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Write tokens in place to anybody's pages; arguments and errors of the reference.

    Numbers that cannot be stored in packed pages leave these half written.
    """
    check_tokens(k, v, pages, layout, slot_mapping, static, previous_page, starts, turn, status)
    if layout.is_raw and str(k.dtype) != f"torch.{layout.raw_dtype}":
        raise DataError(f"k is {k.dtype}; raw pages hold {layout.raw_dtype}")
    k, v = (x.reshape(1, -1, *x.shape[-2:]) for x in (k, v))
    columns = (None if x is None else x.numpy().tobytes() for x in (slot_mapping, previous_page, starts))
    runs, outside = _runs(*columns, layout.page_size, len(pages))
    saturated = append(k, v, store_of(pages, layout, static, turn), runs)
    if status is not None:
        status += torch.tensor([saturated.get("k", 0), saturated.get("v", 0), 0, 0, 0, 0, outside], device="cpu")


@functools.lru_cache(maxsize=8)
def _runs(
    slots: bytes, previous: bytes | None, starts: bytes | None, page_size: int, num_pages: int
) -> tuple[SlotMapping, int]:
    """Tokens in a row that go to slots in a row of one page, and how many slots lead out of the pages."""
    slot = np.frombuffer(slots, np.int64)
    inside = (slot >= 0) & (slot < num_pages * page_size)
    token = np.flatnonzero(inside)
    slot = slot[token]
    breaks = (np.diff(token, prepend=-2) != 1) | (np.diff(slot, prepend=-2) != 1) | (slot % page_size == 0)
    first = np.flatnonzero(breaks)
    count = np.diff(first, append=len(slot))
    runs = np.stack([np.zeros_like(first), token[first], slot[first] // page_size, slot[first] % page_size, count], 1)
    before = begin = None
    if previous is not None:
        before = np.frombuffer(previous, np.int64)[token[first]]
        before = np.where(before < num_pages, before, -1)
    if starts is not None:
        begin = np.frombuffer(starts, np.int32)[token[first]].astype(np.int64)
    return SlotMapping(np.ascontiguousarray(runs), before, begin), int(
        (np.frombuffer(slots, np.int64) >= num_pages * page_size).sum()
    )
