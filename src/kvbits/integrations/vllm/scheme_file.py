"""`--kv-cache-dtype kvbits_scheme`: what each layer stores, from a scheme file (`Scheme.to_json`;
docs/results/schemes.md).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ... import schemes
from ...errors import SpecError, UnsupportedError
from ...geometry import layer_geometries, layer_places, stored_at
from ...spec import LayerGeometry, Scheme
from ..engine.served import PAGE_SIZE
from .formats import SCHEME, Format, tag_for
from .options import options_of

logger = logging.getLogger(__name__)
INSIDE = ("SimpleCPUOffloadConnector", "DecodeBenchConnector")
"""Connectors of vLLM whose blocks never leave an engine."""


def layer_formats(vllm_config: Any) -> tuple[Format | None, ...]:
    """Return the format of each layer of the whole model; None where it stays raw or stores nothing.

    Raises:
        UnsupportedError: no file, or formats that pages of vLLM cannot hold.
        SpecError: a file that is not a scheme, or one that was fitted to a different model.
    """
    config, path = vllm_config.model_config.hf_text_config, options_of(vllm_config).scheme
    if not path:
        raise UnsupportedError(
            f'--kv-cache-dtype {SCHEME} needs a scheme file: pass --additional-config \'{{"kvbits": {{"scheme":'
            ' "FILE.json"}}\''
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in (None, *INSIDE):
        raise UnsupportedError(
            f"{transfer.kv_connector} tells pages apart by the name of the dtype, and all scheme files have one name;"
            f" use a dtype of its own, or {INSIDE[0]}"
        )
    found, stored = _layer_formats(path, layer_geometries(config)), stored_at(config)
    return tuple(found[stored[i]] if i in stored else None for i in range(len(layer_places(config))))


@functools.lru_cache(maxsize=8)
def _layer_formats(path: str, layers: tuple[LayerGeometry, ...]) -> tuple[Format | None, ...]:
    scheme = schemes.for_layers(schemes.read(path), layers)
    if scheme.tiers:
        raise UnsupportedError(f"{path}: tiers, but vLLM's blocks have one format each; use tiers=()")
    if scheme.page_size != PAGE_SIZE:
        raise UnsupportedError(
            f"{path}: page_size={scheme.page_size}; blocks of vLLM hold {PAGE_SIZE} tokens: use page_size={PAGE_SIZE}"
        )
    if scheme.num_sink_tokens or scheme.residual_length:
        logger.warning(
            "%s keeps %d first and %d newest tokens raw; in vLLM that is said by raw_first and raw_newest beside the"
            " file's name",
            path,
            scheme.num_sink_tokens,
            scheme.residual_length,
        )
    return tuple(_format(path, i, scheme, layer, len(layers)) for i, layer in enumerate(layers))


def _format(path: str, layer: int, of: Scheme, geometry: LayerGeometry, count: int) -> Format | None:
    key, value = of.for_layer(layer, count)
    if key.is_raw and value.is_raw:
        return None
    where = f"{path}, layer {layer}"
    if key.is_raw or value.is_raw:
        raise UnsupportedError(
            f"{where}: one of keys and values is raw, and kernels read both packed or both raw; quantize both, or none"
        )
    copies = of.copies_of(key, value)
    sides = [("keys", key), ("values", value)]
    sides += [(f"{side} of copies", spec) for c in copies for side, spec in (("keys", c.key), ("values", c.value))]
    for side, spec in sides:
        if spec.center == "channel" and side == "keys of copies":
            raise UnsupportedError(
                f"{where}: {side} as {spec!r} start from the page before, which may have no copy; use keys without"
                " center='channel'"
            )
        if not spec.token_local:
            raise UnsupportedError(
                f"{where}: {side} as {spec!r} need the other tokens of their page, and vLLM writes tokens one by one;"
                " use PerGroup or PerToken scales without outliers, codebooks or pre_rope (as int8_centered and klt4"
                " do), or KVCache with Transformers"
            )
        if spec.static:
            raise UnsupportedError(
                f"{where}: {side} with calibrated scales, which vLLM's layers are not given; use static=False"
            )
    try:
        scheme = Scheme(name=SCHEME, key=key, value=value, page_size=PAGE_SIZE, token_local=True)
        form = Format(name=f"{SCHEME}, layer {layer}", scheme=scheme, copies=copies)
        why = form.refuses(geometry.head_dim, geometry.value_head_dim)
    except SpecError as e:
        why = str(e)
    if why:
        raise UnsupportedError(f"{where}: {why}")
    tag_for(form)
    return form
