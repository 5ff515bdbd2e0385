"""kvbits as a KV-cache backend of stock vLLM: `vllm serve MODEL --kv-cache-dtype kvbits_int8_centered`.

    served     which `--kv-cache-dtype` stores what, and what is refused; without torch
    formats    the torch dtype that stands for each, and its pages
    backend    what vLLM asks before it allocates: page bytes, block size, layout, refusals
    metadata   once per step: the decode plan, the pages that open, the prefill passes
    impl       once per layer: store the step's tokens, attend
    prefill    queries of many tokens: history unpacked to 16 bits, then one variable-length FlashAttention call
    options    what `--additional-config` says: raw copies of the newest pages, a scheme file
    taken      blocks that leave vLLM's pool, which have no raw copies
    scheme_file   each layer's format from a file
    calibrated    what layers take whose keys are stored in a calibrated basis
    observe    a calibration made by the engine itself, for models that no single process holds
    announce   what vLLM's help and log say about the dtypes
    selector   the backend chosen by the dtype, so that nothing else must be typed

A block of vLLM is a page of kvbits: 64 tokens of a token-local format (docs/reference/formats.md), quantized one by one as they are written. Every block is
complete at every moment, so prefix caching, preemption, chunked prefill, speculative decoding and transfers of blocks work as they do for any other dtype
(docs/internals/serving.md).

vLLM loads `register` as a plugin (entry point `vllm.general_plugins`) in every process. It imports no CUDA and may run more than once.
"""

from __future__ import annotations

import importlib.metadata
import logging

VERSIONS = ">=0.33,<0.34"
"""Releases of vLLM that this plugin runs in; the interface of attention backends changes with every minor release."""

logger = logging.getLogger(__name__)


def refuses_version(version: str) -> str | None:
    """Why this version of vLLM is not served, or None."""
    if version.split(".")[:2] == ["0", "33"]:
        return None
    return f"kvbits' KV-cache formats work with vLLM {VERSIONS}, this is {version}: no kvbits_* dtype is available; pip install 'vllm{VERSIONS}'"


def register() -> None:
    """Make the kvbits_* dtypes and their backend known to vLLM. Elsewhere than in `VERSIONS` it says so in the log and does nothing else."""
    if why := refuses_version(importlib.metadata.version("vllm")):
        logger.warning(why)
        return
    from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from ...errors import GONE
    from . import announce, selector, taken
    from .formats import NAMES, PLACEHOLDER, TAGS

    register_backend(AttentionBackendEnum.CUSTOM, selector.BACKEND)
    for name in (*NAMES, *(gone for gone in GONE if gone.startswith("kvbits_"))):  # which the selector refuses
        if get_kv_cache_dtype_handler(name) is None:
            register_kv_cache_dtype(name)(selector.handler(name, TAGS.get(name, PLACEHOLDER)))
    selector.install(type(current_platform))
    selector.install_layer(Attention)
    announce.install()
    taken.install()
