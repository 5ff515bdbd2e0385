"""The attention backend chosen by the dtype: whoever asks for `--kv-cache-dtype kvbits_*` need not name
`--attention-backend KVBITS`.

vLLM never selects backends of plugins by itself, so `install` wraps the function of its platform that selects them. It
steps in where no backend is named and the engine's cache dtype is one of ours.
Layers that are skipped (`--kv-cache-dtype-skip-layers`) and draft models then get the same backend, whose raw pages
share blocks with the packed ones, side by side. A second wrapper refuses models whose layers bring backends of their
own, which would take our bytes for theirs. A third keeps vLLM from growing blocks until a packed page is as large as a
raw one, which backends need whose pages cannot share a block. A fourth, around vLLM's layer, drops what models name
where values are not as wide as keys: a backend for no other reason, which is ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...errors import GONE, UnsupportedError, unknown
from . import releases
from .formats import NAMES, SCHEME, SHOWN

HYBRID = "kvbits.integrations.vllm.backend.HybridBackend"


def install(platform: Any) -> None:
    """Wrap what a platform class of vLLM asks about backends, once."""
    for name, hook in (
        ("get_attn_backend_cls", _select),
        ("update_block_size_for_backend", _require_fit),
        ("_align_heterogeneous_kv_block_size", _align),
    ):
        releases.CONTRACT.wrap(f"vllm.platforms:current_platform.{name}", hook, platform)


def install_layer() -> None:
    """Wrap the initialization of vLLM's attention layer, once."""
    releases.CONTRACT.wrap("vllm.model_executor.layers.attention:Attention.__init__", _make)


def _select(
    get_attn_backend_cls: Callable[..., str],
    platform: Any,
    selected_backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
) -> str:
    if (dtype := attn_selector_config.kv_cache_dtype) in GONE:
        raise ValueError(unknown("--kv-cache-dtype", dtype, SHOWN))
    ours = releases.backend()
    if dtype in NAMES and selected_backend not in (None, ours):
        raise ValueError(
            f"--kv-cache-dtype {dtype} is read by kvbits' attention backend alone, not by {selected_backend.name}; "
            f"leave --attention-backend away or pass --attention-backend {ours.name}"
        )
    config = _engine()
    if selected_backend is None and (
        dtype in NAMES or (config is not None and config.cache_config.cache_dtype in NAMES)
    ):
        selected_backend = ours
    if dtype in NAMES and (other := ours.get_path()) != releases.BACKEND:
        raise ValueError(
            f"--kv-cache-dtype {dtype} is read by kvbits' attention backend, and another plugin registered {other}"
            f" as vLLM's {ours.name} backend; load one of them: VLLM_PLUGINS=kvbits"
        )
    if selected_backend is ours and platform.device_type == "cpu":  # whose own selection knows one backend only
        found = _checked(attn_selector_config)
    else:
        found = get_attn_backend_cls(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)
    return (
        HYBRID
        if found == releases.BACKEND
        and config is not None
        and config.model_config is not None
        and config.model_config.is_hybrid
        else found
    )


def _require_fit(update_block_size_for_backend: Callable[..., None], platform: Any, vllm_config: Any) -> None:
    if vllm_config.cache_config.cache_dtype in NAMES and (why := _refuses(vllm_config)):
        raise UnsupportedError(f"--kv-cache-dtype {vllm_config.cache_config.cache_dtype}: {why}")
    update_block_size_for_backend(vllm_config)


def _refuses(vllm_config: Any) -> str | None:
    """Return why a model whose layers are there cannot be served, or None."""
    cache, layers = vllm_config.cache_config, vllm_config.compilation_config.static_forward_context.values()
    backends = {x.get_attn_backend() for x in layers if getattr(x, "kv_cache_dtype", None) in NAMES}
    if foreign := sorted(x.get_name() for x in backends if not _is_ours(x)):
        return (
            f"layers of this model bring attention backends of their own ({', '.join(foreign)}), which cannot read"
            " kvbits' pages; use vLLM's own dtypes"
        )
    if not vllm_config.model_config.is_hybrid:
        return None
    if cache.cache_dtype == SCHEME or cache.kv_cache_dtype_skip_layers:
        return (
            "blocks of a model with recurrent layers have one size in all layers; use one kvbits dtype for all, without"
            " --kv-cache-dtype-skip-layers"
        )
    return None


def _align(align_block_size: Callable[..., None], platform: Any, vllm_config: Any, backend_cls: Any) -> None:
    if not _is_ours(backend_cls):
        align_block_size(vllm_config, backend_cls)


def _is_ours(backend: Any) -> bool:
    return any(f"{x.__module__}.{x.__qualname__}" == releases.BACKEND for x in backend.__mro__)


def _make(init: Callable[..., None], layer: Any, *args: Any, attn_backend: Any = None, **options: Any) -> None:
    from vllm.model_executor.layers.attention import Attention

    config = _engine()
    _forget_other_engines(config)
    named = attn_backend is not None and attn_backend.get_name().endswith("_DIFFKV")
    asked = config is not None and (
        config.cache_config.cache_dtype in NAMES or config.attention_config.backend is releases.backend()
    )
    dropped = named and asked and type(layer) is Attention
    init(layer, *args, attn_backend=None if dropped else attn_backend, **options)


_last: weakref.ref[Any] | None = None


def _forget_other_engines(config: Any) -> None:
    """Forget the backends of other engines. vLLM keeps those that it selected in a process by heads and dtypes, and
    hybrids with the same ones have another.
    """
    global _last
    from vllm.v1.attention.selector import _cached_get_attn_backend

    if config is not None and (_last is None or _last() is not config):
        _cached_get_attn_backend.cache_clear()
        _last = weakref.ref(config)


def _engine() -> Any:
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _checked(attn_selector_config: Any) -> str:
    from .backend import KVBitsBackend

    reasons = KVBitsBackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
    if reasons:
        raise ValueError(f"kvbits' attention backend cannot serve this model: {'; '.join(reasons)}")
    return releases.BACKEND
