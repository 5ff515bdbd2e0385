"""The dtype that an engine's configuration has: named in the way that the release takes it, or refused before a model
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import GONE, UnsupportedError
from . import releases
from .copies import has_copies
from .formats import NAMES, PAGE_SIZE
from .options import misspelt, options_of

CHECKED = "vllm.platforms:current_platform.check_and_update_config"


def install(platform: Any) -> None:
    """Make the dtypes known, and check what is asked of them, once.

    Args:
        platform: vLLM's class of the platform.
    """
    releases.register_dtypes(tuple(gone for gone in GONE if gone.startswith("kvbits_")))  # which the selector refuses
    releases.CONTRACT.wrap(CHECKED, _naming, platform)


def _naming(original: Callable[..., None]) -> Callable[..., None]:
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        named = releases.takes_names()
        asked = not named or (cache is not None and cache.cache_dtype in NAMES)
        if why := misspelt(vllm_config.additional_config, asked):
            raise UnsupportedError(why)
        name = options_of(vllm_config, calibrated=True).named  # no dtype is known yet
        if name is not None and cache is not None:
            if named:
                raise UnsupportedError(
                    f'additional_config["kvbits"] has the dtype {name}, which is for vLLM before 0.33; pass'
                    f" --kv-cache-dtype {name}"
                )
            if cache.cache_dtype not in ("auto", name):
                raise UnsupportedError(
                    f'additional_config["kvbits"] has the dtype {name}, --kv-cache-dtype is {cache.cache_dtype}; leave'
                    " one of them away"
                )
            cache.cache_dtype = name
        if cache is not None and cache.cache_dtype in NAMES:
            needs = releases.needs_of(vllm_config, has_copies(vllm_config))  # refuses options that are never read
            if why := releases.CONTRACT.refuses(*needs):
                raise UnsupportedError(f"--kv-cache-dtype {cache.cache_dtype}: {why}")
        original(vllm_config)
        if name is not None and cache is not None and not cache.user_specified_block_size:
            cache.block_size = PAGE_SIZE  # a default of the platform, which asks no backend

    return check_and_update_config
