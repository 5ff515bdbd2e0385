"""The pass over the prompts that fills codebook histograms: forward and, for Fisher weights, backward, resumable after every prompt."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

from ..errors import CalibrationError
from ..progress import bar
from ..quant.rotary import turn
from ..spec import LayerGeometry, QuantSpec, Scheme, to_dict
from . import fisher
from .calibration import read_file, write_file
from .codebooks import Levels

Batch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Ids [B, T], attention mask [B, T] or None, bool [B, T]: tokens to look at."""


def as_stored(x: torch.Tensor, geometry: LayerGeometry, spec: QuantSpec) -> torch.Tensor:
    """Keys or values [B, T, H, D] of tokens 0 to T - 1 as pages store them: turned back, channels in stored order. Also for gradients."""
    if not spec.pre_rope:
        return x
    assert geometry.rotary is not None
    order = torch.tensor(geometry.rotary.order(geometry.head_dim), device=x.device)
    inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32)
    return turn(x[..., order].float().transpose(1, 2), torch.arange(x.shape[1]), inv_freq, back=True).transpose(1, 2)


def collect(
    model: Any,
    batches: list[Batch],
    layers: tuple[LayerGeometry, ...],
    scheme: Scheme,
    levels: dict[tuple[int, str], Levels],
    weighted: bool,
    checkpointing: bool,
    resume: str | os.PathLike[str] | None,
    progress: bool,
) -> None:
    """Fill `levels` from the prompts.

    Raises:
        CalibrationError: a loss that is not finite, or a `resume` file of another calibration.
    """
    identity = _identity(batches, scheme, weighted)
    done = _load(resume, levels, identity)
    tokens: torch.Tensor  # of the prompt whose backward pass is under way

    def seen(layer: int, side: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if (layer, side) not in levels:
            return
        spec = scheme.for_layer(layer, len(layers))["kv".index(side)]
        x, gradient = (as_stored(t, layers[layer], spec) for t in (x, gradient))
        for row, looked_at in enumerate(tokens.to(x.device)):
            levels[layer, side].add(x[row, looked_at], gradient[row, looked_at].float().square() if weighted else None)

    with fisher.watched(model, seen, checkpointing=checkpointing), bar("codebooks", len(batches), enabled=progress) as advance:
        advance(done)
        for i, batch in enumerate(batches[done:], done):
            ids, mask, tokens = batch
            fisher.backward(model, ids.to(model.device), None if mask is None else mask.to(model.device))
            _save(resume, levels, identity, i + 1)
            advance(1)
    if resume is not None and os.path.exists(resume):
        os.unlink(resume)


def _identity(batches: list[Batch], scheme: Scheme, weighted: bool) -> str:
    digest = hashlib.sha256(f"{to_dict(scheme)} {weighted}".encode())
    for ids, _, tokens in batches:
        digest.update(ids.numpy().tobytes() + tokens.numpy().tobytes())
    return digest.hexdigest()


def _load(path: str | os.PathLike[str] | None, levels: dict[tuple[int, str], Levels], identity: str) -> int:
    """Prompts already seen."""
    if path is None or not os.path.exists(path):
        return 0
    metadata, tensors = read_file(path)
    if metadata.get("identity") != identity:
        raise CalibrationError(f"{os.fspath(path)} holds another calibration's state (other prompts, scheme or weights); delete it or name another file")
    for (layer, side), fit in levels.items():
        fit.mass, fit.moment = tensors[f"{layer}.{side}.mass"], tensors[f"{layer}.{side}.moment"]
    return int(metadata["done"])


def _save(path: str | os.PathLike[str] | None, levels: dict[tuple[int, str], Levels], identity: str, done: int) -> None:
    if path is None:
        return
    tensors = {f"{layer}.{side}.{name}": getattr(fit, name) for (layer, side), fit in levels.items() for name in ("mass", "moment")}
    write_file(path, tensors, {"identity": identity, "done": str(done)})
