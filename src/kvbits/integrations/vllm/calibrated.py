"""What layers need whose keys are stored in a calibrated basis: this rank's part of a calibration, and the model's rotary embedding.

The calibration is a file of `kvbits calibrate`, named in `--additional-config`; it is refused where it was made for another model or scheme. Its tensors have
a row for each kv head of the whole model. The rotary embedding is the one that Transformers makes from the model's configuration, as when it was calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import schemes
from ...calibrate import Calibration
from ...errors import UnsupportedError
from ...geometry import layer_geometries
from ...quant.basis import completed
from ...spec import LayerGeometry, Scheme
from ..rotary import layers_of
from .formats import FORMATS, SCHEME
from .options import options_of


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


def model_of(vllm_config: Any) -> Model:
    """Read once for each engine configuration of a process.

    Raises:
        UnsupportedError: no file named, or layers of a draft model, which it knows nothing of.
        CalibrationError: a file of another model or scheme.
        FileFormatError: a damaged one, or none.
    """
    if vllm_config not in _models:
        _models[vllm_config] = _read(vllm_config)
    return _models[vllm_config]


def _read(vllm_config: Any) -> Model:
    options, name, config = options_of(vllm_config), vllm_config.cache_config.cache_dtype, vllm_config.model_config.hf_text_config
    scheme = _scheme(name, options.scheme, config)
    if not options.calibration:
        stored = options.scheme if name == SCHEME else scheme.name
        raise UnsupportedError(
            f"--kv-cache-dtype {name} needs a calibration of this model: run `kvbits calibrate {vllm_config.model_config.model} --scheme {stored} "
            '--out FILE.safetensors` once, and pass --additional-config \'{"kvbits": {"calibration": "FILE.safetensors"}}\''
        )
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.uses_draft_kv_cache():
        raise UnsupportedError(
            f"a calibration says nothing of the layers that speculation by {speculation.method} has; speculate by ngram, or use kvbits_int4_rotated"
        )
    calibration = Calibration.load(options.calibration)
    calibration.check(config, scheme)
    return Model(calibration, config)


def _scheme(name: str, path: str, config: Any) -> Scheme:
    given = schemes.read(path) if name == SCHEME else FORMATS[name].scheme.name
    return schemes.for_layers(given, layer_geometries(config))
