"""Messages of vLLM about the kvbits_* dtypes.

The help of vLLM lists them, and its log and its metrics say what is stored. The log does not say that they lack scaling
factors.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ...errors import KvbitsError
from ...geometry import layer_geometries
from ...model_ref import ModelRef
from ..engine.calibrated import accuracy, place
from ..engine.metrics import publish
from . import releases
from .formats import FORMATS, NAMES, PAGE_SIZE, RAW_DTYPES, SCHEME, SHOWN
from .options import options_of
from .scheme_file import formats_of

logger = logging.getLogger("vllm.kvbits")
"""Below vLLM's own: its level and its handlers."""
HELP = (
    '\n\nOf the kvbits plugin: "kvbits_*", packed pages that need no scaling factors ("kvbits_scheme": formats by'
    " layer, from a file)."
)


class NoScalingFactors(logging.Filter):
    """A filter that drops the one message that these dtypes may cost accuracy "without a proper scaling factor": every
    page has scales of its own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not (
            "scaling factor" in str(record.msg)
            and isinstance(record.args, tuple)
            and record.args
            and record.args[0] in NAMES
        )


def install() -> None:
    """Install the announcement in this process, once."""
    configuration = logging.getLogger("vllm.config.cache")
    if not any(isinstance(f, NoScalingFactors) for f in configuration.filters):
        configuration.addFilter(NoScalingFactors())
    _extend_help()
    from vllm.v1.core import kv_cache_utils

    for module in (kv_cache_utils, sys.modules.get("vllm.v1.engine.core")):  # which may have taken the name before
        if module is not None:
            releases.CONTRACT.wrap("vllm.v1.core.kv_cache_utils:update_kv_cache_capacity", _announced, module)
    releases.CONTRACT.wrap("vllm.v1.metrics.loggers:PrometheusStatLogger.log_metrics_info", _published)


def _announced(original: Any) -> Any:
    def update_kv_cache_capacity(vllm_config: Any, kv_cache_config: Any) -> None:
        original(vllm_config, kv_cache_config)
        if vllm_config.cache_config.cache_dtype in NAMES:
            logger.info("%s", summary(vllm_config, kv_cache_config))

    return update_kv_cache_capacity


def _published(original: Any) -> Any:
    def log_metrics_info(self: Any, type: str, config_obj: Any) -> None:
        original(self, type, config_obj)
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        if type != "cache_config" or cache.cache_dtype not in NAMES:
            return
        try:
            bits = 16 * share(self.vllm_config)
        except KvbitsError as e:
            logger.warning("%s is not among the metrics: %s", cache.cache_dtype, e)
            return
        publish(self._gauge_cls, "vllm", _model(model), cache.cache_dtype, bits=bits, tokens=cache.kv_cache_size_tokens)

    return log_metrics_info


def _model(config: Any) -> ModelRef:
    """Return the model of a `ModelConfig`."""
    return ModelRef(place(config.model, config.revision, ["config.json"]), config.hf_text_config)


def share(vllm_config: Any) -> float:
    """Return bytes of packed pages over those of 16 bits, in the layers that are packed.

    Raises:
        UnsupportedError: layers that kvbits does not know.
    """
    model, dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    layers = layer_geometries(model.hf_text_config)
    forms = formats_of(vllm_config) if dtype == SCHEME else [FORMATS[dtype]] * len(layers)
    packed = dense = 0
    for form, g in zip(forms, layers, strict=True):
        if form is not None:
            layout = form.layout(g.num_kv_heads, g.head_dim, g.value_head_dim, RAW_DTYPES[model.dtype])
            packed += layout.page_size_bytes
            dense += 2 * PAGE_SIZE * g.num_kv_heads * (g.head_dim + g.value_head_dim)
    return packed / dense


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


def summary(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return one line: the format, what a token takes, how many fit a rank and how many of 16 bits would, what is raw,
    and what the format costs this model.
    """
    cache, options = vllm_config.cache_config, options_of(vllm_config)
    held, tokens = sum(t.size for t in kv_cache_config.kv_cache_tensors), cache.kv_cache_size_tokens
    raw = []
    if options.copies:
        newest = options.raw_newest
        first = f" and the first {options.raw_first}" if options.raw_first else ""
        raw.append(f"the newest {newest} to {newest + PAGE_SIZE - 1}{first} tokens of a request with copies also raw")
        finer = FORMATS[cache.cache_dtype].copies if cache.cache_dtype in FORMATS and options.packed_copies else ()
        raw += [
            f"the {c.num_tokens} behind them also with keys of {c.key.mean_bits:.3g} and values of"
            f" {c.value.mean_bits:.3g} bits"
            for c in finer
        ]
    if cache.kv_cache_dtype_skip_layers:
        raw.append(f"layers {', '.join(map(str, cache.kv_cache_dtype_skip_layers))} raw")
    if options.calibration:
        raw.append(f"calibration {options.calibration}")
    model = vllm_config.model_config
    if cache.cache_dtype == SCHEME:
        form, cost = (
            f"each layer as {options.scheme} says",
            f"kvbits check {model.model} --scheme {options.scheme} says its cost",
        )
    else:
        cost = accuracy(_model(model), cache.cache_dtype)
        key, value = FORMATS[cache.cache_dtype].scheme.key, FORMATS[cache.cache_dtype].scheme.value
        if key.has_offsets:
            form = f"{key.mean_bits:.3g}-bit keys in a calibrated basis, {value.mean_bits:.3g}-bit values"
        else:
            form = f"{'centred ' * (key.center is not None)}{key.format} keys, {value.format} values"
    share = _share(kv_cache_config)
    return (
        f"{cache.cache_dtype}: {form}, {16 * share:.2f} bits with scales; {held / 1e9:.2f} GB a rank hold {tokens:,}"
        f" tokens, {held / tokens:,.0f} bytes each, {1 / share:.2f} times as many as of bf16;"
        f" {'; '.join(raw) or 'no token raw'}; {cost}"
    )


def _share(kv_cache_config: Any) -> float:
    """Return bytes of packed pages over those of 16 bits, in the layers that have keys and values."""
    packed = dense = 0
    for group in kv_cache_config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # one for each, where they differ
        for spec in of_layers.values() if of_layers else [group.kv_cache_spec] * len(group.layer_names):
            if (content := getattr(spec, "state_content_bytes", None)) is not None:
                packed += spec.num_kv_heads * content
                dense += 2 * spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    return packed / dense
