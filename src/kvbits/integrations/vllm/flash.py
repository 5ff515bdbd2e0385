"""vLLM's FlashAttention as `engine.call.Attend`: which version serves a layer's prompts, and its call."""

from __future__ import annotations

import functools

import torch

from ...errors import UnsupportedError
from ...ops.long_queries import Lengths
from ..engine.call import Attend, Call


def flash_for(device: torch.device, head_dim: int, value_head_dim: int) -> Attend | None:
    """Return the attention of prompts for layers of these widths, or None on a CPU.

    Raises:
        UnsupportedError: vLLM has none that takes them.
    """
    if device.type != "cuda":
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    unlike, in_three = head_dim != value_head_dim, 128 < head_dim <= 192 and 96 < value_head_dim <= 128
    needed = 4 if max(head_dim, value_head_dim) > 256 or (unlike and not in_three) else 3 if unlike else 2
    # On Hopper vLLM takes version 4 for unlike widths if it hears of sinks, which are a part of the results here
    # (`ops.merge`).
    version = get_flash_attn_version(head_size=head_dim, head_size_v=value_head_dim, has_sinks=unlike and needed == 4)
    if version is None or version < needed:
        raise UnsupportedError(
            f"prompts with keys of {head_dim} and values of {value_head_dim} channels are read with FlashAttention"
            f" {needed} (of compute capability 9.0), and vLLM has {version or 'none'} on {device}; use vLLM's own"
            " dtypes"
        )
    return _of_version(version)


@functools.cache
def _of_version(version: int) -> Attend:
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
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        window = [call.sliding_window - 1, 0] if causal and call.sliding_window else [-1, -1]
        found = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=lengths.max_q,
            cu_seqlens_q=lengths.q_starts,
            max_seqlen_k=lengths.max_k,
            cu_seqlens_k=lengths.k_starts,
            softmax_scale=call.scaling,
            causal=causal,
            window_size=window,
            softcap=call.softcap or 0.0,
            out=out,
            return_softmax_lse=wants_lse,
            fa_version=version,
        )
        return found[1].transpose(0, 1) if wants_lse else None

    return attend
