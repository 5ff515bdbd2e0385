"""Attention over a `KVCache` inside `torch.compile`: one operation that no compiler looks into.

Compiled code is given tensors only: queries, keys, values, the padding mask and `Columns.numbers`, by which the
operation finds the cache when it runs. It then does what the attention function does without a compiler. Lengths, page
lists and the scheme are not part of the graph, so that one graph serves every token and every cache of a model. The
operation writes `numbers`, and says so: nothing moves it, drops it or runs it twice.
"""

from __future__ import annotations

import torch

from ..errors import CacheStateError, UnsupportedError
from .masks import numbered


def refuse_capture(device: torch.device) -> None:
    """Refuse to be recorded, which a graph of torch.compile's would do with what the host decides for this one token.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a KVCache in compiled code cannot be captured in a CUDA graph; compile without mode='reduce-overhead', or"
            " decode uncompiled inside kvbits.graphed"
        )


@torch.library.custom_op(
    "kvbits::cached_attention",
    mutates_args=("numbers",),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sink_logits, Tensor(a0!) numbers, int layer, float"
        " scaling, float? softcap, bool more, bool again) -> Tensor"
    ),
)
def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    numbers: torch.Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
    more: bool,
    again: bool,
) -> torch.Tensor:
    """Call `Columns.attend` of the cache that `numbers` names: [B, T, Hq, D].

    Args:
        mask: bool [B, at least seen + T], real tokens; None for all.
        numbers: `Columns.numbers`, or a copy that a compiler made.

    Raises:
        UnsupportedError: see `refuse_capture`.
        What `PagedCache.step` and `Columns.known` raise.
    """
    number, seen = numbers.tolist()
    columns = numbered(number)
    if not columns.captured:
        refuse_capture(q.device)
        if not columns.been and seen != columns.seen:  # which corrected `numbers`
            raise CacheStateError(
                f"an interrupt came between {seen} and {columns.seen} tokens of this cache; call the model again"
            )
    known = valid = None
    if mask is not None:  # copied once a pass: the compiler uses its memory again
        known = (
            columns.known(mask, q.shape[1])
            if columns.captured
            else columns.mask
            if columns.been
            else columns.known(mask, q.shape[1]).clone()
        )
        valid = None if known is None else known[:, -q.shape[1] :]
    out = columns.attend(layer, q, k, v, known, valid, scaling, softcap, sink_logits, more, again)
    numbers[1] = columns.seen
    return out.contiguous()


@cached_attention.register_fake
def _(q, k, v, mask, sink_logits, numbers, layer, scaling, softcap, more, again):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[3])
