"""The calibration of an engine of vLLM: which model and scheme it is of (`engine.calibrated` has the rest)."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import schemes
from ...errors import UnsupportedError
from ...geometry import layer_geometries
from ...spec import Scheme
from ..engine.calibrated import Model, model_at, read
from .formats import FORMATS, HEADS, SCHEME
from .options import options_of

NAMED = '\'{"kvbits": {"calibration": "FILE.safetensors"}}\''
_models = WeakIdKeyDictionary()


def model_of(vllm_config: Any, device: torch.device) -> Model:
    """Read, or made on `device`, once for each engine configuration of a process.

    Raises:
        CalibrationError, FileFormatError: as `engine.calibrated.read`.
    """
    if vllm_config not in _models:
        with torch.device("cpu"):  # vLLM makes layers with the GPU as the default device
            _models[vllm_config] = _read(vllm_config, str(device))
    return _models[vllm_config]


def _read(vllm_config: Any, device: str) -> Model:
    options, model = options_of(vllm_config), vllm_config.model_config
    config, drafts = model.hf_text_config, model.runner_type == "draft"
    ranks = ("tensor_parallel_size", "pipeline_parallel_size")
    sizes = json.dumps({name: n for name in ranks if (n := getattr(vllm_config.parallel_config, name)) > 1})
    else_pass = (
        f'--speculative-config \'{{.., "kv_cache_dtype": "{HEADS}"}}\'' if drafts else f"--additional-config {NAMED}"
    )
    way_out = (
        f"; run `kvbits calibrate {model.model} --engine vllm --engine-options '{sizes}'` once, or pass {else_pass}"
    )
    file = "" if drafts else options.calibration  # which is the served model's
    return read(
        model_at(model.model, None if file else model.revision, None, config),
        _scheme(vllm_config.cache_config.cache_dtype, options.scheme, config),
        file,
        make=options.calibrate,
        device=device,
        way_out=way_out,
    )


def _scheme(name: str, path: str, config: Any) -> Scheme:
    layers = layer_geometries(config)
    if name == SCHEME:
        return schemes.for_layers(schemes.read(path), layers)
    if why := FORMATS[name].refuses_any(layers):
        raise UnsupportedError(why)
    return schemes.for_layers(FORMATS[name].scheme.name, layers)
