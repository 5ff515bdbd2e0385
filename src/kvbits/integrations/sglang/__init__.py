"""kvbits as a KV cache of stock SGLang: `python -m sglang.launch_server --model-path MODEL --attention-backend
kvbits_int8_centered`.

    releases  what of SGLang the plugin depends on
    options   what is refused at start, with the reason; the page size; copies and calibrations
    pool      the pages, in place of SGLang's pool of keys and values
    host      pages in host memory (HiCache)
    backend   tables and plans of a step, and its layers (`engine.step`, `engine.layer`)
    drafts    n-grams to be verified
    flash     SGLang's FlashAttention, for prompts on GPUs

The format is the backend's name, since SGLang's list of cache dtypes is closed. A page of SGLang is one of kvbits: 64
tokens of a token-local format, complete at every moment, so its radix cache, chunked prefill and retraction work as
they do for any other cache (docs/internals/serving.md).

SGLang loads `register` as a plugin (entry point `sglang.srt.plugins`) in every process. What an exception here says is
only logged, and the backends are then no choices of `--attention-backend`: the start fails. So what a release lacks is
said by the step that resolves its options (`options.resolve`).
"""

from __future__ import annotations

import functools

from ..engine.served import FORMATS
from . import releases


def register() -> None:
    """Make the kvbits_* backends known to SGLang, or only refused where the release lacks what they need."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from . import options

    add_attention_backend_choices(list(options.NAMES))
    register_resolution_hook("handle_attention_backend_compatibility")(options.resolve)
    if releases.CONTRACT.refuses():
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import backend, drafts, host, pool

    for name in FORMATS:
        register_attention_backend(name)(functools.partial(backend.KVBitsBackend, name=name))
    for path, hook in (
        (releases.POOL_CLASS, pool.pool_class),
        (releases.BUDGET, pool.budget),
        (releases.CELL_SIZE, pool.cell_size),
        (releases.LAST_LOC, drafts.last_loc),
        (releases.WORKER, drafts.worker_class),
        (releases.HOST_POOL, host.host_pool),
    ):
        if path not in releases.CONTRACT.broken:
            HookRegistry.register(path.replace(":", "."), hook, HookType.AROUND)
