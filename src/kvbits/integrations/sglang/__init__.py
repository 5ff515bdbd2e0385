"""kvbits as a KV cache of stock SGLang: `python -m sglang.launch_server --model-path MODEL --attention-backend
kvbits_int8_centered`.

    options   what is refused at start, with the reason; the page size; raw copies and calibrations
    pool      the pages, in place of SGLang's pool of keys and values
    backend   tables and plans of a step, and its layers (`engine.step`, `engine.layer`)
    drafts    n-grams to be verified
    flash     SGLang's FlashAttention, for prompts on GPUs

The format is the backend's name, since SGLang's list of cache dtypes is closed. A page of SGLang is one of kvbits: 64
tokens of a token-local format, complete at every moment, so its radix cache, chunked prefill and retraction work as
they do for any other cache (docs/internals/serving.md).

SGLang loads `register` as a plugin (entry point `sglang.srt.plugins`) in every process. What an exception here says is
only logged, and the backends are then no choices of `--attention-backend`: the start fails.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging

from ..engine.served import FORMATS

logger = logging.getLogger(__name__)
VERSIONS = "==0.5.23"
"""The release of SGLang that this plugin runs in: three of its hooks stand on private methods."""


def refuses_version(version: str) -> str | None:
    """Why this version of SGLang is not served, or None."""
    if version.split("+")[0].split(".post")[0] == VERSIONS.removeprefix("=="):
        return None
    return (
        f"kvbits' attention backends work with SGLang {VERSIONS}, this is {version}: no kvbits_* backend is available;"
        f" pip install 'sglang{VERSIONS}'"
    )


def register() -> None:
    """Make the kvbits_* backends known to SGLang.

    In releases that are not served it says so in the log and does nothing else.
    """
    if why := refuses_version(importlib.metadata.version("sglang")):
        logger.warning(why)
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import backend, drafts, options, pool

    if set(FORMATS) <= set(ATTENTION_BACKENDS):
        return
    add_attention_backend_choices(list(FORMATS))
    for name in FORMATS:
        register_attention_backend(name)(functools.partial(backend.KVBitsBackend, name=name))
    register_resolution_hook("handle_attention_backend_compatibility")(options.resolve)
    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    HookRegistry.register(f"{configurator}._resolve_kv_pool_class", pool.pool_class, HookType.AROUND)
    HookRegistry.register(f"{configurator}._profile_available_bytes", pool.budget, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        pool.cell_size,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", drafts.worker_class, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", drafts.last_loc, HookType.AROUND)
