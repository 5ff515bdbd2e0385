"""Low planes of banded pages that a kernel has closed, by the reference's operations on the pages' device: no kernel of their own, since a page closes once in
64 tokens. The pages' own bytes stay those of the kernel, with planes or without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....later import upload
from ...reference.close import low_pages, rows_as_stored
from ...types import LowStore, PageStore

PAGES_AT_ONCE = 64
"""67 MB of float64 rows of keys at 8 kv heads of 128 and 64 tokens a page."""


def close_low(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, page_ids: np.ndarray, low: Sequence[tuple[LowStore, np.ndarray]], starts: np.ndarray | None
) -> None:
    """Write the low planes of pages `page_ids` [n], which a launch on the same stream has closed, into those of `low`, the coarsest first. Arguments as of
    `packed.close`."""
    layout, fine = store.layout, [s.layout for s, _ in low]
    sides = [(kind, x, spec) for kind, x, spec in (("k", k, layout.key), ("v", v, layout.value)) if any((y.key_bits, y.value_bits)[kind == "v"] for y in fine)]
    for i in range(0, len(page_ids), PAGES_AT_ONCE):
        some = slice(i, i + PAGES_AT_ONCE)
        first = None if starts is None else starts[some]
        as_stored = {kind: rows_as_stored(x[some], spec, store.static, first) for kind, x, spec in sides}
        for (to, ids), made in zip(low, low_pages(store.gather(page_ids[some]), as_stored, layout, store.static, fine), strict=True):
            _put(to, ids[some], made)


def _put(store: LowStore, ids: np.ndarray, pages: torch.Tensor) -> None:
    """Write pages [n, H, head_bytes] to the pages `ids` [n] of a store."""
    first = 0
    for slab in store.slabs:
        mine = np.flatnonzero((ids >= first) & (ids < first + len(slab)))
        if len(mine):
            slab[upload(ids[mine] - first, slab.device)] = pages[upload(mine, slab.device)]
        first += len(slab)
