"""kvbits as a KV-cache backend of stock vLLM: `vllm serve MODEL --kv-cache-dtype kvbits_int8_centered`.

    served     which `--kv-cache-dtype` stores what, and what is refused; without torch
    formats    the torch dtype that stands for each, and its pages
    backend    what vLLM asks before it allocates: page bytes, block size, layout, refusals
    builder    once per step: the decode plan, the pages that open, the prefill passes (`metadata`)
    impl       once per layer: which format, kernels and numbers it has
    flash      vLLM's variable-length FlashAttention, for queries of many tokens
    options    what `--additional-config` says: raw copies of the newest pages, a scheme file
    copies     raw copies: how many requests have them, which, and which blocks have none
    scheme_file   each layer's format from a file
    calibrated    which calibration an engine's layers take
    observe    a calibration made by the engine itself, for models that no single process holds
    announce   what vLLM's help and log say about the dtypes
    dtypes     how vLLM learns the dtypes, by its release
    selector   the backend chosen by the dtype, so that nothing else must be typed

A block of vLLM is a page of kvbits: 64 tokens of a token-local format (docs/reference/formats.md), quantized one by one
as they are written. Every block is complete at every moment, so prefix caching, preemption, chunked prefill,
speculative decoding and transfers of blocks work as they do for any other dtype (docs/internals/serving.md).

vLLM loads `register` as a plugin (entry point `vllm.general_plugins`) in every process. It imports no CUDA and may run
more than once.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Make the kvbits_* dtypes and their backend known to vLLM.

    In releases that are not served it says so in the log and does nothing else.
    """
    from vllm.platforms import current_platform

    from . import dtypes

    if why := dtypes.refuses_version(dtypes.installed(), current_platform.is_cpu()):
        logger.warning(why)
        return
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import announce, copies, selector

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and (other := custom.get_path()) != selector.BACKEND:
        logger.warning(
            "kvbits takes the place of %s as vLLM's CUSTOM backend; to load one of both plugins, set VLLM_PLUGINS",
            other,
        )
    register_backend(custom, selector.BACKEND)
    dtypes.install(type(current_platform))
    selector.install(type(current_platform))
    selector.install_layer(Attention)
    announce.install()
    copies.install()
