"""Merge attention over disjoint sets of keys: by one launch where 16-bit results are on a GPU, else by the reference."""

from __future__ import annotations

import torch

from .cuda import merge as cuda
from .reference import merge as reference


def merge_partials(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of key sets (see `reference.merge`).

    Args:
        outs: each [B, T, Hq, D]; lses: each float32 [B, T, Hq].

    Returns:
        out, of the results' own dtype if that is one of 16 bits on a GPU, else float32; lse float32.
    """
    if all(x.dtype == outs[0].dtype for x in outs) and cuda.refuses(outs[0]) is None:
        return cuda.merge_partials(outs, lses)
    return reference.merge_partials(outs, lses)
