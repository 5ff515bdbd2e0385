"""Private operators of torch: of its public ones none gives the log-sum-exp of attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..contract import Contract, calls
from ..errors import UnsupportedError

FLASH, CUDNN, CPU = (
    "_flash_attention_forward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_scaled = "query key value dropout_p is_causal scale"
CONTRACT = Contract(
    "torch",
    ("torch",),
    "2.11 to 2.14",
    (
        calls(
            f"torch:ops.aten.{FLASH}.default",
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale "
            "window_size_left window_size_right",
            feature="prompts on GPUs",
        ),
        calls(
            f"torch:ops.aten.{CUDNN}.default",
            f"{_scaled} attn_bias compute_log_sumexp return_debug_mask",
            feature="long prompts on GPUs",
        ),
        calls(f"torch:ops.aten.{CPU}.default", f"{_scaled} attn_mask", feature="prompts on CPUs"),
    ),
)


@functools.cache
def operator(name: str) -> Any:
    """Return an operator of torch that takes what is passed to it here.

    Raises:
        UnsupportedError: this torch has none.
    """
    if why := CONTRACT.refuses(CONTRACT.symbols[f"torch:ops.aten.{name}.default"].feature):
        raise UnsupportedError(why)
    return getattr(torch.ops.aten, name)
