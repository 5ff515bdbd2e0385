"""An engine's variable-length FlashAttention as `call.Attend`: which version reads what, and `attend_by`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...ops.long_queries import Lengths
from .call import Attend, Call


def version_for(head_dim: int, value_head_dim: int) -> int:
    """Return the first version of FlashAttention, 2 to 4, that reads keys and values of these widths."""
    unlike, in_three = head_dim != value_head_dim, 128 < head_dim <= 192 and 96 < value_head_dim <= 128
    return 4 if max(head_dim, value_head_dim) > 256 or (unlike and not in_three) else 3 if unlike else 2


@functools.cache
def attend_by(function: Callable[..., Any], **options: Any) -> Attend:
    """Return the one `Attend` of a `flash_attn_varlen_func`, by the names that both engines' have.

    Args:
        options: more arguments of `function`.
    """

    def attend(
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Lengths,
        causal: bool,
        out: torch.Tensor,
        wants_lse: bool,
    ) -> torch.Tensor | None:
        found = function(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=lengths.max_q,
            cu_seqlens_q=lengths.q_starts,
            max_seqlen_k=lengths.max_k,
            cu_seqlens_k=lengths.k_starts,
            softmax_scale=call.scaling,
            causal=causal,
            window_size=[call.sliding_window - 1, 0] if causal and call.sliding_window else [-1, -1],
            softcap=call.softcap or 0.0,
            out=out,
            return_softmax_lse=wants_lse,
            **options,
        )
        return found[1].transpose(0, 1) if wants_lse else None

    return attend
