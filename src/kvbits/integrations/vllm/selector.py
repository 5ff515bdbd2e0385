"""The attention backend chosen by the dtype: whoever asks for `--kv-cache-dtype kvbits_*` need not name `--attention-backend CUSTOM`.

vLLM never selects its CUSTOM backend by itself, so `install` wraps the function of its platform that selects backends; `remove` takes the wrapper off. It
steps in where no backend is named and the engine's cache dtype is one of ours. Layers that are skipped (`--kv-cache-dtype-skip-layers`) and draft models then
get the same backend, whose raw pages share blocks with the packed ones, side by side. A second wrapper keeps vLLM from growing blocks until a packed page is as
large as a raw one, which backends need whose pages cannot share a block.
"""

from __future__ import annotations

import functools
from typing import Any

from ...errors import GONE, unknown
from .formats import NAMES

BACKEND = "kvbits.integrations.vllm.backend.KVBitsBackend"


def install(platform: Any) -> None:
    """Wrap `get_attn_backend_cls` of a platform class of vLLM, once."""
    original = platform.get_attn_backend_cls
    if hasattr(original, "kvbits_original"):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if (dtype := attn_selector_config.kv_cache_dtype) in GONE:
            raise ValueError(unknown("--kv-cache-dtype", dtype, NAMES))
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        custom = AttentionBackendEnum.CUSTOM
        if dtype in NAMES and selected_backend not in (None, custom):
            raise ValueError(
                f"--kv-cache-dtype {dtype} is read by kvbits' attention backend alone, not by {selected_backend.name}; "
                "leave --attention-backend away or pass --attention-backend CUSTOM"
            )
        if selected_backend is None and (dtype in NAMES or _engine_dtype() in NAMES):
            selected_backend = custom
        if selected_backend is custom and cls.device_type == "cpu":  # whose own selection knows one backend only
            return _checked(attn_selector_config)
        return original(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)

    get_attn_backend_cls.kvbits_original = original  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    align = platform._align_heterogeneous_kv_block_size

    @functools.wraps(align)
    def _align_heterogeneous_kv_block_size(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        if ".".join(backend_cls.full_cls_name()) != BACKEND:
            align(vllm_config, backend_cls)

    _align_heterogeneous_kv_block_size.kvbits_original = align  # type: ignore[attr-defined]
    platform._align_heterogeneous_kv_block_size = classmethod(_align_heterogeneous_kv_block_size)


def remove(platform: Any) -> None:
    """Undo `install`."""
    for name in ("get_attn_backend_cls", "_align_heterogeneous_kv_block_size"):
        original = getattr(getattr(platform, name), "kvbits_original", None)
        if original is not None:
            setattr(platform, name, original)


def _engine_dtype() -> str | None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else config.cache_config.cache_dtype


def _checked(attn_selector_config: Any) -> str:
    from .backend import KVBitsBackend

    reasons = KVBitsBackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
    if reasons:
        raise ValueError(f"kvbits' attention backend cannot serve this model: {'; '.join(reasons)}")
    return BACKEND


def handler(dtype: str, tag: Any) -> type:
    """What vLLM's `register_kv_cache_dtype` takes for a dtype of this name, whose pages are of the torch dtype `tag`."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name = dtype

        def torch_dtype(self) -> Any:
            return tag

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    return Handler
