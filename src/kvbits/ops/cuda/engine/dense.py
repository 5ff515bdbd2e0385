"""Attention over 16-bit rows on a GPU, with its log-sum-exp: the fastest kernel that torch has for the shape.

FlashAttention serves every shape. On Hopper cuDNN takes 0.55 times as long for long ones. It plans anew for every shape
and set of strides, which costs tens of milliseconds of host time, so it gets few shapes: whole multiples of an eighth
of a power of two where a chunk attends to itself, and powers of two of a history. FlashAttention gets the rest, and the
results are merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...torch_operators import CUDNN, FLASH, operator
from ..merge import merge_partials

CUDNN_QUERIES = 512
"""Fewest query tokens that cuDNN is asked for."""
CUDNN_ROWS = 2048
"""Fewest keys."""
MOST_ROWS = 1 << 15
"""Keys of a history that cuDNN takes at once."""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, causal: bool = False, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of 16-bit queries to 16-bit rows.

    Args:
        q: [B, T, Hq, D]; k, v: [B, S, H, D]; rows dense.
        causal: the last query sees the last key, the one before one less.
        window: how many newest keys a query sees, with `causal`.

    Returns:
        out [B, T, Hq, D] in q's dtype and lse float32 [B, T, Hq], natural log.
    """
    if not _cudnn_serves(q, k, causal, window):
        return flash_attention(q, k, v, scaling, causal, window)
    if causal:
        t = q.shape[1]
        whole = t - t % max(CUDNN_QUERIES // 2, (1 << t.bit_length() - 1) // 8)
        out, lse = cudnn_attention(q[:, :whole], k[:, :whole], v[:, :whole], scaling, True)
        if whole == t:
            return out, lse
        last = flash_attention(q[:, whole:], k, v, scaling, True)
        return torch.cat([out, last[0]], 1), torch.cat([lse, last[1]], 1)
    found = []
    for start, end in _slices(k.shape[1]):
        if end - start >= CUDNN_ROWS:
            found.append(_of_slice(q, k, v, start, end, scaling))
        else:
            found.append(flash_attention(q, k[:, start:end], v[:, start:end], scaling))
    return found[0] if len(found) == 1 else merge_partials(*zip(*found, strict=True))


def _cudnn_serves(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None) -> bool:
    """Return whether cuDNN is the faster one, for shapes that will come again."""
    if (
        window is not None
        or q.shape[-1] not in (64, 128)
        or torch.cuda.get_device_capability(q.device) < (9, 0)
        or not torch.backends.cudnn.is_available()
    ):
        return False
    if causal:
        return q.shape[1] == k.shape[1] >= CUDNN_ROWS
    return q.shape[1] >= CUDNN_QUERIES and q.shape[1] % 256 == 0 and k.shape[1] >= CUDNN_ROWS


def _of_slice(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, end: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `cudnn_attention` to some of the keys.

    Strides are part of the shapes it plans for, and a sequence's would be that of the whole history, another every
    time: so each sequence comes alone, dense.
    """
    if end - start == k.shape[1]:
        return cudnn_attention(q, k, v, scaling, False)
    found = [
        cudnn_attention(q[b][None], k[b, start:end][None], v[b, start:end][None], scaling, False) for b in range(len(q))
    ]
    return found[0] if len(found) == 1 else (torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found]))


def _slices(rows: int) -> Iterator[tuple[int, int]]:
    """Yield powers of two from `CUDNN_ROWS` to `MOST_ROWS`, the longest first, and what is left."""
    at = 0
    while rows - at >= CUDNN_ROWS:
        size = min(1 << (rows - at).bit_length() - 1, MOST_ROWS)
        yield at, at + size
        at += size
    if at < rows:
        yield at, rows


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, causal: bool = False, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention` by torch's FlashAttention, float16 or bfloat16. Where queries are few it splits the keys."""
    left, right = (None, None) if window is None else (window - 1, 0)
    out, lse, *_ = operator(FLASH)(
        q,
        k,
        v,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        causal,
        False,
        scale=scaling,
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse.transpose(1, 2)


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention` by cuDNN; with `causal` as many keys as queries."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = operator(CUDNN)(q, k, v, None, True, 0.0, causal, False, scale=scaling)
    return out.transpose(1, 2), lse.reshape(q.shape[:3]).transpose(1, 2)
