"""Messages of vLLM about the kvbits_* dtypes.

The help of vLLM lists them, and its log and its metrics say what is stored. The log does not say that they lack scaling
factors.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ... import planner, schemes
from ...errors import KvbitsError
from ...geometry import layer_geometries, stored_at
from ..engine.announce import Announcement
from ..engine.calibrated import model_at
from ..engine.served import raw_of
from . import releases
from .formats import NAMES, RAW_DTYPES, SCHEME, SHOWN
from .options import options_of

logger = logging.getLogger("vllm.kvbits")
"""Below vLLM's own: its level and its handlers."""
HELP = (
    '\n\nOf the kvbits plugin: "kvbits_*", packed pages that need no scaling factors ("kvbits_scheme": formats by'
    " layer, from a file)."
)


def keeps(record: logging.LogRecord) -> bool:
    """Return whether a record is shown: all but the one that these dtypes may cost accuracy "without a proper scaling
    factor". Every page has scales of its own.
    """
    said = record.getMessage()
    return "scaling factor" not in said or "kvbits_" not in said


def install() -> None:
    """Install the announcement in this process, once."""
    logging.getLogger("vllm.config.cache").addFilter(keeps)
    _extend_help()
    from vllm.v1.core import kv_cache_utils

    for module in (kv_cache_utils, sys.modules.get("vllm.v1.engine.core")):  # which may have taken the name before
        if module is not None:
            releases.CONTRACT.wrap("vllm.v1.core.kv_cache_utils:update_kv_cache_capacity", _announce, module)
    releases.CONTRACT.wrap("vllm.v1.metrics.loggers:PrometheusStatLogger.log_metrics_info", _publish)


def _announce(update_kv_cache_capacity: Any, vllm_config: Any, kv_cache_config: Any) -> None:
    update_kv_cache_capacity(vllm_config, kv_cache_config)
    if found := announcement(vllm_config):
        logger.info("%s", found.line())


def _publish(log_metrics_info: Any, logged: Any, type: str, config_obj: Any) -> None:
    log_metrics_info(logged, type, config_obj)
    if type == "cache_config" and (found := announcement(logged.vllm_config)):
        found.publish(logged._gauge_cls, "vllm")


def announcement(vllm_config: Any) -> Announcement | None:
    """Return the facts on an engine's cache, or None where the dtype is not ours, or a layer is not known (logged)."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if cache.cache_dtype not in NAMES:
        return None
    options = options_of(vllm_config)
    try:
        bits = _bits(vllm_config, options.scheme)
    except KvbitsError as e:
        logger.warning("%s is neither described here nor among the metrics: %s", cache.cache_dtype, e)
        return None
    return Announcement(
        name=cache.cache_dtype,
        model=model_at(model.model, model.revision, "config.json", model.hf_text_config),
        options=options,
        bits=bits,
        tokens=cache.kv_cache_size_tokens,
        raw_layers=tuple(map(str, cache.kv_cache_dtype_skip_layers)),
        file=options.scheme if cache.cache_dtype == SCHEME else "",
    )


def _bits(vllm_config: Any, path: str) -> float:
    """Return bits of a number in the layers that have keys and values, raw ones included.

    Raises:
        UnsupportedError: layers that kvbits does not know.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layers, skipped = layer_geometries(model.hf_text_config), {*map(str, cache.kv_cache_dtype_skip_layers)}
    scheme = schemes.for_layers(schemes.read(path), layers) if cache.cache_dtype == SCHEME else cache.cache_dtype
    pages = planner.vllm_layouts(scheme, layers, RAW_DTYPES[model.dtype])
    for n, (i, g) in enumerate(zip(stored_at(model.hf_text_config), layers, strict=True)):
        if str(i) in skipped or (g.sliding_window is not None and "sliding_window" in skipped):
            pages[n] = raw_of(pages[n])
    counts = [x.num_kv_heads * (x.head_dim + x.value_head_dim) for x in pages]
    return sum(x.bits_per_element * n for x, n in zip(pages, counts, strict=True)) / sum(counts)


def _extend_help() -> None:
    """Extend the help of vLLM's command line in place. vLLM computes its arguments once, from a list that plugins
    cannot reach.
    """
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None or not releases.takes_names():
        return
    from vllm.config import CacheConfig

    found = arguments._compute_kwargs(CacheConfig)["cache_dtype"]
    found["metavar"] = sorted({*found["metavar"]} - {*NAMES} | {*SHOWN})
    if found.get("help") and HELP not in found["help"]:
        found["help"] += HELP
