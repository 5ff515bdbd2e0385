"""What layers need whose keys are stored in a calibrated basis: this rank's part of a calibration, and the model's rotary embedding.

The calibration is the one that `--additional-config` names, or the model's own in the user's cache folder, made there once (`calibrate.kept`). Its tensors have
a row for each kv head of the whole model. The rotary embedding is the one that Transformers makes from the model's configuration, as when it was calibrated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import schemes
from ...calibrate import Calibration, kept
from ...errors import UnsupportedError
from ...geometry import layer_geometries, stored_at
from ...quant.basis import completed
from ...spec import LayerGeometry, Scheme
from ..rotary import layers_of
from .formats import FORMATS, HEADS, SCHEME
from .options import options_of

NAMED = '\'{"kvbits": {"calibration": "FILE.safetensors"}}\''


@dataclass(eq=False)
class Model:
    """What an engine's layers were calibrated to.

    Attributes:
        layers: of the whole model, with rotary embeddings.
    """

    calibration: Calibration
    config: Any
    layers: tuple[LayerGeometry, ...] = field(default=())

    def layer(self, index: int, rank: int, size: int, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """(`PageStore.static`, stored order of channels) of a layer of the whole model, for one of `size` ranks. The order is None where it is the model's.

        Raises:
            UnsupportedError: a model whose rotary embedding cannot be told.
        """
        self.layers = self.layers or layers_of(self.config)
        index = stored_at(self.config)[index]
        geometry = self.layers[index]
        assert geometry.rotary is not None
        heads = heads_of(geometry.num_kv_heads, rank, size)
        static = {name: x[heads].to(device).contiguous() for name, x in self.calibration.static[index].items()}
        inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32, device=device)
        order = geometry.rotary.order(geometry.head_dim)
        given = tuple(range(geometry.head_dim))
        return completed(static, inv_freq), None if order == given else torch.tensor(order, device=device)


def heads_of(num_kv_heads: int, rank: int, size: int) -> slice:
    """Which kv heads of a layer a rank of tensor parallelism has; with fewer heads than ranks, neighbours share one."""
    each, sharing = max(1, num_kv_heads // size), max(1, size // num_kv_heads)
    return slice(rank // sharing * each, (rank // sharing + 1) * each)


_models = WeakIdKeyDictionary()


def model_of(vllm_config: Any, device: torch.device) -> Model:
    """Read, or made on `device`, once for each engine configuration of a process.

    Raises:
        CalibrationError: a file of another model or scheme, or none, and none can be made.
        FileFormatError: a damaged one, or none under the name that is given.
    """
    if vllm_config not in _models:
        with torch.device("cpu"):  # vLLM makes layers with the GPU as the default device
            _models[vllm_config] = _read(vllm_config, str(device))
    return _models[vllm_config]


def _read(vllm_config: Any, device: str) -> Model:
    options, name, config = options_of(vllm_config), vllm_config.cache_config.cache_dtype, vllm_config.model_config.hf_text_config
    scheme = _scheme(name, options.scheme, config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    drafts = model.runner_type == "draft"
    if options.calibration and not drafts:  # the file that is named is the served model's
        return Model(Calibration.load(options.calibration).fitted(config, scheme), config)
    engine = {"tensor_parallel_size": parallel.tensor_parallel_size, "pipeline_parallel_size": parallel.pipeline_parallel_size}
    sizes = json.dumps({name: n for name, n in engine.items() if n > 1})
    else_pass = f'--speculative-config \'{{.., "kv_cache_dtype": "{HEADS}"}}\'' if drafts else f"--additional-config {NAMED}"
    way_out = f"; run `kvbits calibrate {model.model} --engine vllm --engine-options '{sizes}'` once, or pass {else_pass}"
    found = kept.of_files(_place(model), config, scheme, make=options.calibrate, device=device, way_out=way_out)
    return Model(found, config)


def _place(model_config: Any) -> str:
    """What the engine loads weights from: a folder, the name of a model, or the folder of the revision that is asked for."""
    if not model_config.revision or Path(model_config.model).is_dir():
        return str(model_config.model)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model_config.model, revision=model_config.revision))


def _scheme(name: str, path: str, config: Any) -> Scheme:
    layers = layer_geometries(config)
    if name == SCHEME:
        return schemes.for_layers(schemes.read(path), layers)
    if why := next((why for g in layers if (why := FORMATS[name].refuses(g.head_dim, g.value_head_dim))), None):
        raise UnsupportedError(why)
    return schemes.for_layers(FORMATS[name].scheme.name, layers)
