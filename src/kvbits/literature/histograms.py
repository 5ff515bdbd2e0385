"""The pass over the prompts that fills codebook histograms: forward and, for Fisher weights only, backward; resumable
after every prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

import torch

from ..calibrate.calibration import read_file, write_file
from ..calibrate.observe import evaluating, forward
from ..calibrate.target import Place, Prompt, Target, as_stored
from ..errors import CalibrationError
from ..integrations.placement import input_device
from ..progress import bar
from ..quant.qparams import QParams
from ..spec import LayerGeometry, Scheme, to_dict
from . import fisher
from .codebooks import Levels


def levels_of(
    scheme: Scheme, layers: tuple[LayerGeometry, ...], static: list[dict[str, torch.Tensor]]
) -> dict[Place, Levels]:
    """Return one histogram per layer and side that has a codebook."""
    found = {}
    for i, g in enumerate(layers):
        for side, what, spec in zip("kv", ("keys", "values"), scheme.for_layer(i, len(layers)), strict=True):
            if "codebook" in spec.calibrates:
                known = QParams(static[i][f"{side}_scale"], static[i].get(f"{side}_bias")) if spec.static else None
                found[i, side] = Levels(spec, g.num_kv_heads, scheme.page_size, known, f"{what} of layer {i}")
    return found


def collect(
    model: Any,
    prompts: list[Prompt],
    targets: list[Target],
    weighted: bool,
    checkpointing: bool,
    resume: str | os.PathLike[str] | None,
    progress: bool,
) -> None:
    """Fill the targets' levels from the prompts, one backward pass each for all of them, or a forward pass only where
    nothing is `weighted`.

    Raises:
        CalibrationError: a loss that is not finite, or a `resume` file of another calibration.
    """
    shared = _shared(targets)
    identity = _identity(model, prompts, targets, weighted)
    done = _load(resume, shared, identity)
    current = 0  # the prompt whose pass is under way

    def seen(layer: int, side: str, x: torch.Tensor, gradient: torch.Tensor | None) -> None:
        turned: dict[bool, tuple[torch.Tensor, ...]] = {}
        for target, alike in shared.get((layer, side), ()):
            spec = target.spec((layer, side))
            if spec.pre_rope not in turned:
                turned[spec.pre_rope] = tuple(
                    as_stored(t, target.layers[layer], spec) for t in (x, gradient) if t is not None
                )
            stored, *slope = turned[spec.pre_rope]
            for row, looked_at in enumerate(target.tokens[current].to(x.device)):
                alike[0].add(stored[row, looked_at], slope[0][row, looked_at].float().square() if slope else None)

    def both(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        seen(layer, "k", k, None)
        seen(layer, "v", v, None)

    watching = fisher.watched(model, seen, checkpointing=checkpointing) if weighted else evaluating(model)
    with watching, bar("codebooks", len(prompts), enabled=progress) as advance:
        advance(done)
        for current, (ids, mask) in list(enumerate(prompts))[done:]:
            if weighted:
                device = input_device(model)
                fisher.backward(model, ids.to(device), None if mask is None else mask.to(device))
            else:
                forward(model, ids, mask, both, {layer for layer, _ in shared})
            _save(resume, shared, identity, current + 1)
            advance(1)
    for places in shared.values():
        for _, alike in places:
            for other in alike[1:]:
                other.mass, other.moment = alike[0].mass, alike[0].moment
    if resume is not None and os.path.exists(resume):
        os.unlink(resume)


Shared = dict[Place, list[tuple[Target, list[Levels]]]]


def _shared(targets: list[Target]) -> Shared:
    """Return levels by place, those that normalise values alike together: how many entries a codebook will have does
    not matter yet.
    """
    found: dict[Place, dict[Any, tuple[Target, list[Levels]]]] = {}
    for target in targets:
        for place, levels in target.levels.items():
            alike: Any = (
                (dataclasses.replace(levels.spec, format="nuq4"), levels.page_size, target.skip)
                if levels.static is None
                else id(levels)
            )
            found.setdefault(place, {}).setdefault(alike, (target, []))[1].append(levels)
    return {place: list(groups.values()) for place, groups in found.items()}


def _identity(model: Any, prompts: list[Prompt], targets: list[Target], weighted: bool) -> str:
    """Return the identity of what the sums depend on: prompts, schemes, calibrated ranges, and the model, by the shape
    and the first numbers of each of its parameters.
    """
    digest = hashlib.sha256(f"{[(to_dict(t.scheme), t.skip) for t in targets]} {weighted}".encode())
    for name, p in model.named_parameters():
        digest.update(f"{name} {tuple(p.shape)}".encode() + p.detach().flatten()[:16].float().cpu().numpy().tobytes())
    for ranges in (levels.static for t in targets for levels in t.levels.values() if levels.static is not None):
        for known in (ranges.scale, ranges.bias):
            digest.update(b"" if known is None else known.detach().float().cpu().numpy().tobytes())
    for i, (ids, _) in enumerate(prompts):
        digest.update(ids.numpy().tobytes() + targets[0].tokens[i].numpy().tobytes())
    return digest.hexdigest()


def _load(path: str | os.PathLike[str] | None, shared: Shared, identity: str) -> int:
    """Return the number of prompts already seen."""
    if path is None or not os.path.exists(path):
        return 0
    metadata, tensors = read_file(path)
    if metadata.get("identity") != identity:
        raise CalibrationError(
            f"{os.fspath(path)} holds another calibration's state (of another model, prompts, schemes, ranges or"
            " weights); delete it"
        )
    for name, levels in _named(shared).items():
        levels.mass, levels.moment = tensors[f"{name}.mass"], tensors[f"{name}.moment"]
    return int(metadata["done"])


def _save(path: str | os.PathLike[str] | None, shared: Shared, identity: str, done: int) -> None:
    if path is None:
        return
    tensors = {
        f"{name}.{kind}": getattr(levels, kind)
        for name, levels in _named(shared).items()
        for kind in ("mass", "moment")
    }
    write_file(path, tensors, {"identity": identity, "done": str(done)})


def _named(shared: Shared) -> dict[str, Levels]:
    """Return, by name, the levels that numbers are added to."""
    return {
        f"{layer}.{side}.{i}": alike[0]
        for (layer, side), places in shared.items()
        for i, (_, alike) in enumerate(places)
    }
