"""Calibrations for layers whose keys are stored in a calibrated basis.

Such layers need one rank's part of a calibration, and the model's rotary embedding.

The calibration is the file that the options name, or the model's own in the user's cache folder, made there once
(`calibrate.kept`). Its tensors have a row for each kv head of the whole model. The rotary embedding is the one that
Transformers makes from the model's configuration, as when it was calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...calibrate import Calibration, checked, kept
from ...geometry import stored_at
from ...model_ref import ModelRef
from ...quant.basis import completed
from ...spec import Scheme
from ..rotary import layers_of

found_by_check, accuracy = checked.find, checked.said
"""The result that `kvbits check` found of a preset on a model, and a clause on it. Others take both from here: this
module alone imports `calibrate`.
"""


@dataclass(eq=False)
class Model:
    """Calibration of an engine's layers, with the configuration of the model."""

    calibration: Calibration
    config: Any

    def layer(
        self, index: int, rank: int, size: int, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Return (`PageStore.static`, stored order of channels) of a layer of the whole model, for one of `size` ranks.

        The order is None where it is the model's.

        Raises:
            UnsupportedError: a model whose rotary embedding is unknown.
        """
        index = stored_at(self.config)[index]
        geometry = layers_of(self.config)[index]
        assert geometry.rotary is not None
        heads = heads_of(geometry.num_kv_heads, rank, size)
        static = {name: x[heads].to(device).contiguous() for name, x in self.calibration.static[index].items()}
        inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32, device=device)
        order = geometry.rotary.order(geometry.head_dim)
        given = tuple(range(geometry.head_dim))
        return completed(static, inv_freq), None if order == given else torch.tensor(order, device=device)


def heads_of(num_kv_heads: int, rank: int, size: int) -> slice:
    """Return which kv heads of a layer a rank of tensor parallelism has.

    With fewer heads than ranks, neighbours share one.
    """
    each, sharing = max(1, num_kv_heads // size), max(1, size // num_kv_heads)
    return slice(rank // sharing * each, (rank // sharing + 1) * each)


def read(model: ModelRef, scheme: Scheme, file: str, *, make: bool, device: str, way_out: str) -> Model:
    """Return the calibration of the model that an engine loads, found or made.

    Args:
        file: that the options name; "" where they name none of this model.
        make: whether one may be made, on `device`; `way_out` is said where none can be.

    Raises:
        CalibrationError: a file of another model or scheme, or none, and none can be made.
        FileFormatError: a damaged one, or none under the name that is given.
    """
    if file:
        return Model(Calibration.load(file).fitted(model.config, scheme), model.config)
    return Model(kept.of_files(model, scheme, make=make, device=device, way_out=way_out), model.config)


def model_at(name: str, revision: str | None, pattern: str | None = None, config: Any = None) -> ModelRef:
    """Return the model that an engine loads, by the place of its weights.

    It is a folder, the name of a model, or the folder of the revision that is asked for. That last folder has the files
    that `pattern` matches.

    Args:
        config: Transformers' configuration of it, where the engine has it.
    """
    if revision and not Path(name).is_dir():
        from huggingface_hub import snapshot_download

        name = snapshot_download(name, revision=revision, allow_patterns=pattern)
    return ModelRef(name, config)
