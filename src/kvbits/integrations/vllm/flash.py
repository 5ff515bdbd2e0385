"""vLLM's FlashAttention as `engine.call.Attend`: which version serves a layer's prompts, and its call."""

from __future__ import annotations

import torch

from ...errors import UnsupportedError
from ..engine.call import Attend
from ..engine.flash import attend_by, version_for


def flash_for(device: torch.device, head_dim: int, value_head_dim: int) -> Attend | None:
    """Return the attention of prompts for layers of these widths, or None on a CPU.

    Raises:
        UnsupportedError: vLLM has none that takes them.
    """
    if device.type != "cuda":
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    needed = version_for(head_dim, value_head_dim)
    # On Hopper vLLM takes version 4 for unlike widths if it hears of sinks, which are a part of the results here
    # (`ops.merge`).
    version = get_flash_attn_version(
        head_size=head_dim, head_size_v=value_head_dim, has_sinks=head_dim != value_head_dim and needed == 4
    )
    if version is None or version < needed:
        raise UnsupportedError(
            f"prompts with keys of {head_dim} and values of {value_head_dim} channels are read with FlashAttention"
            f" {needed} (of compute capability 9.0), and vLLM has {version or 'none'} on {device}; use vLLM's own"
            " dtypes"
        )
    return attend_by(flash_attn_varlen_func, fa_version=version)
