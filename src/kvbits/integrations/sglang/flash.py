"""SGLang's FlashAttention as `engine.call.Attend`."""

from __future__ import annotations

import torch

from ...errors import UnsupportedError
from ..engine.call import Attend
from ..engine.flash import attend_by, version_for


def flash_for(device: torch.device, head_dim: int, value_head_dim: int) -> Attend | None:
    """Return the attention of prompts for layers of these widths, or None on a CPU.

    Raises:
        UnsupportedError: SGLang has none that takes them, or none for this GPU.
    """
    if device.type != "cuda":
        return None
    from sgl_kernel.flash_attn import flash_attn_varlen_func, is_fa3_supported

    if not is_fa3_supported(device):
        have = ".".join(str(x) for x in torch.cuda.get_device_capability(device))
        raise UnsupportedError(
            "prompts are read with sgl_kernel's FlashAttention 3, of compute capabilities 8.0 to 9.0; this GPU has"
            f" {have}: use vLLM's plugin"
        )
    if version_for(head_dim, value_head_dim) > 3:
        raise UnsupportedError(
            f"prompts with keys of {head_dim} and values of {value_head_dim} channels are not read by sgl_kernel's"
            " FlashAttention 3 (one width up to 256, or up to 192 and 128); use another --attention-backend"
        )
    return attend_by(flash_attn_varlen_func)
