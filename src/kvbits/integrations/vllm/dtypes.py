"""The dtype that an engine's configuration has: named in the way that the release takes it, or refused before a model
is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ... import planner
from ...errors import GONE, UnsupportedError, unknown
from ..engine.automatic import beside_weights, choose
from ..engine.calibrated import model_at
from ..engine.served import PAGE_SIZE
from . import releases
from .copies import has_copies
from .formats import AUTO, NAMES, RAW_DTYPES, SHOWN
from .options import misspelt, options_of

logger = logging.getLogger("vllm.kvbits")
"""Below vLLM's own: its level and its handlers."""
BESIDES = 0.04
"""Share of a GPU that is neither weights nor cache, of what vLLM may use: `planner.RESERVE` at its usual 92 %."""
CHECKED = "vllm.platforms:current_platform.check_and_update_config"


def install(platform: Any) -> None:
    """Make the dtypes known, and check what is asked of them, once.

    Args:
        platform: vLLM's class of the platform.
    """
    releases.register_dtypes(tuple(gone for gone in GONE if gone.startswith("kvbits_")))  # which the selector refuses
    releases.CONTRACT.wrap(CHECKED, _name, platform)


def _name(check_and_update_config: Callable[..., None], platform: Any, vllm_config: Any) -> None:
    cache, named = vllm_config.cache_config, releases.takes_names()
    if why := misspelt(vllm_config.additional_config, not named or cache.cache_dtype in NAMES):
        raise UnsupportedError(why)
    if dtype := options_of(vllm_config).dtype:
        name = f"kvbits_{dtype.removeprefix('kvbits_')}"
        if name not in NAMES:
            raise UnsupportedError(unknown("dtype", name, SHOWN))
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
    if cache.cache_dtype == AUTO:
        cache.cache_dtype = _chosen(platform, vllm_config)
    if cache.cache_dtype in NAMES:
        # `has_copies` refuses options that are never read
        needs = {releases.COPIES: has_copies(vllm_config), releases.CLOSED: not named}
        if why := releases.CONTRACT.refuses(*(feature for feature, needed in needs.items() if needed)):
            raise UnsupportedError(f"--kv-cache-dtype {cache.cache_dtype}: {why}")
    check_and_update_config(vllm_config)
    if dtype and not cache.user_specified_block_size:
        cache.block_size = PAGE_SIZE  # a default of the platform, which asks no backend


def _chosen(platform: Any, vllm_config: Any) -> str:
    """Return the format that this engine's context and number of requests need, said in the log.

    Raises:
        UnsupportedError: no format, or nobody says how much memory there is.
    """
    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    ref = model_at(model.model, model.revision, "*.json", model.hf_text_config)
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    memory = cache.kv_cache_memory_bytes
    if memory is None:
        if platform.device_type == "cpu":
            raise UnsupportedError(
                f"--kv-cache-dtype {AUTO} on a CPU needs --kv-cache-memory-bytes; pass it, or a format"
            )
        if why := releases.CONTRACT.refuses(releases.AUTOMATIC):
            raise UnsupportedError(f"--kv-cache-dtype {AUTO}: {why}")
        share = cache.gpu_memory_utilization - BESIDES
        memory = beside_weights(ref, platform.get_device_total_memory(), share, ranks * stages)
    found, why = choose(
        ref,
        planner.rank(ref.layers, ranks),
        memory_bytes=memory * stages,
        context=model.max_model_len,
        requests=vllm_config.scheduler_config.max_num_seqs,
        raw_dtype=RAW_DTYPES[model.dtype],
    )
    logger.info("%s: %s", AUTO, why)
    return found
