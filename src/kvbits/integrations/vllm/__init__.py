"""kvbits as a KV-cache backend of stock vLLM: `vllm serve MODEL --kv-cache-dtype kvbits_int8_centered`.

    served     which `--kv-cache-dtype` stores what, and what is refused; without torch
    formats    the torch dtype that stands for each, and its pages
    backend    what vLLM asks before it allocates: page bytes, block size, layout, refusals
    builder    once per step: the decode plan, the pages that open, the prefill passes
    impl       once per layer: which format, kernels and numbers it has
    flash      vLLM's variable-length FlashAttention, for queries of many tokens
    options    what `--additional-config` says: copies of the newest pages, a scheme file
    copies     copies: how many requests have them, which, and which blocks have none
    scheme_file   each layer's format from a file
    calibrated    which calibration an engine's layers take
    observe    a calibration made by the engine itself, for models that no single process holds
    announce   what vLLM's help and log say about the dtypes
    releases   what of vLLM the plugin depends on, and what differs between releases
    dtypes     the dtype that a configuration has, or why it cannot start
    selector   the backend chosen by the dtype, so that nothing else must be typed

A block of vLLM is a page of kvbits: 64 tokens of a token-local format (docs/reference/formats.md), quantized one by one
as they are written. Every block is complete at every moment, so prefix caching, preemption, chunked prefill,
speculative decoding and transfers of blocks work as they do for any other dtype (docs/internals/serving.md).

vLLM loads `register` as a plugin (entry point `vllm.general_plugins`) in every process. It imports no CUDA and may run
more than once.
"""

from __future__ import annotations


def register() -> None:
    """Make the kvbits_* dtypes and their backend known to vLLM.

    The log names what a release lacks, and the start is refused where it needs that.
    """
    from vllm.platforms import current_platform

    from . import announce, copies, dtypes, releases, selector

    platform = type(current_platform)
    dtypes.install(platform)  # also what refuses a start
    if releases.CONTRACT.refuses():
        return
    releases.backend()
    selector.install(platform)
    selector.install_layer()
    announce.install()
    copies.install()
