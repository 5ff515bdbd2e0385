"""Measurement of static scales, codebooks and bases: a model runs over short prompts and shows every key and value
where it writes the cache.

    prompts = prompts_from_text(tokenizer, text)             # 128 windows of 256 tokens
    calibration = calibrate(model, prompts, "int8_static")   # 99.9th percentile per layer, head and group
    calibration.save("scales.safetensors")

The model runs under its own attention with an `ObservingCache`, a stock Transformers cache that shows keys and values
to an observer and hands them back: keys are exactly those a cache stores (after rotation and norms). Nothing is kept,
so memory is one prompt's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import schemes as presets
from ..errors import CalibrationError, DataError, SpecError, counted, too_small
from ..geometry import layer_geometries
from ..integrations.identity import identity
from ..integrations.rotary import with_rotary
from ..progress import bar
from ..spec import CacheSpec, LayerGeometry, QuantSpec, Scheme
from .calibration import Calibration, fingerprint
from .moments import Moments, warn_of
from .observe import evaluating, forward, forward_with_queries, in_fast_dtype
from .ranges import Ranges
from .settings import Settings
from .target import Place, Target, as_stored
from .target import Prompt as Batch

Prompt = torch.Tensor | Sequence[int] | Mapping[str, torch.Tensor]


def prompts_from_text(
    tokenizer: Any, text: str, *, num_prompts: int = 128, length: int = 256, seed: int = 0, batch_size: int = 4
) -> list[torch.Tensor]:
    """Return windows of a text, drawn without overlap, as batches of token ids.

    Args:
        tokenizer: a Transformers tokenizer; if it begins texts with special tokens (BOS), each window does.
        num_prompts: windows wanted; 128 to 512 are usual. A shorter text gives fewer.
        length: tokens of a window.
        seed: which windows are drawn.
        batch_size: windows in a batch.

    Returns:
        int64 [up to batch_size, length] each; one shorter window if the text has less than `length` tokens.

    Raises:
        SpecError: an invalid number.
        DataError: an empty text.
    """
    for name, n, least in (("num_prompts", num_prompts, 1), ("length", length, 2), ("batch_size", batch_size, 1)):
        if n < least:
            raise SpecError(too_small(name, n, least))
    bos = tokenizer.bos_token_id
    start = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    if not len(ids):
        raise DataError("the calibration text is empty; give a text of some thousand words")
    body = length - len(start)
    windows = ids[: len(ids) // body * body].view(-1, body) if len(ids) >= body else ids[None]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:num_prompts].sort().values
    windows = torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(order), -1), windows[order]], 1)
    return list(windows.split(batch_size))


def calibrate(
    model: Any,
    prompts: Sequence[Prompt],
    scheme: str | Scheme,
    *,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Calibration:
    """Return static scales, codebooks and bases of `scheme` for `model`, measured over `prompts`.

    Args:
        model: a Transformers decoder model.
        prompts: token ids, each a tensor [B, T], a list of ids, or a mapping with `input_ids` and `attention_mask`
            (padding is left out).
        scheme: preset name (groups fitted to the model's head_dim) or a `Scheme` (taken as it is) with static or
            codebook specs.
        resume: file that keeps what codebooks have seen after each prompt and is read if it is there; deleted at the
            end.
        progress: show a bar on standard error.
        settings: fields of `Settings`.

    Raises:
        CalibrationError: the scheme needs no calibration, or `resume` belongs to another one.
        DataError: no tokens, or NaN or infinity in keys or values.
        UnsupportedError: a model without a plain KV cache.
    """
    return calibrate_all(model, prompts, [scheme], Settings(**settings), resume=resume, progress=progress)[0]


def calibrate_all(
    model: Any,
    prompts: Sequence[Prompt],
    schemes: Sequence[str | Scheme],
    settings: Settings | None = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> list[Calibration]:
    """Return what `calibrate` returns for each scheme. One pass over the prompts serves all static scales, one serves
    all bases, and one serves all codebooks.
    """
    how = settings or Settings()
    given = [_batch(p) for p in prompts]
    targets = [_target(model, scheme, given, how.skip_tokens) for scheme in schemes]
    batches = [(ids, mask) for ids, mask, _ in given]
    found: list[list[dict[str, torch.Tensor]]] = []
    ranges = [ranges_of(t.scheme, t.layers, _count(t), how.percentile) for t in targets]
    if any(ranges):
        _run(model, batches, targets, ranges, progress)
    for target, measured in zip(targets, ranges, strict=True):
        found.append([{} for _ in target.layers])
        for (layer, side), r in measured.items():
            found[-1][layer] |= {f"{side}_{name}": t for name, t in r.qparams().items()}
    moments = [moments_of(t.scheme, t.layers) for t in targets]
    if any(moments):
        _see_queries(model, given, moments, progress)
    for static, measured_bases in zip(found, moments, strict=True):
        for layer, m in measured_bases.items():
            static[layer] |= {"k_basis": m.basis()} | ({"k_mean": m.mean()} if "mean" in m.spec.calibrates else {})
    warn_of((head for of_scheme in moments for m in of_scheme.values() for head in m.weak), stacklevel=3)
    _fill_codebooks(model, batches, targets, found, how, resume, progress)
    for target, static in zip(targets, found, strict=True):
        for (layer, side), fit in target.levels.items():
            static[layer][f"{side}_codebook"] = fit.fit(how.per_head)
    measured_on = {"identity": identity(model), "dtype": str(model.dtype)}
    return [
        Calibration(
            static,
            fingerprint(model.config, t.scheme),
            {
                "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
                "measured_on": measured_on,
                "scheme": t.scheme.name,
                "percentile": _share(t.scheme.key if t.scheme.key.static else t.scheme.value, how.percentile),
                "weights": how.weights if t.levels else None,
                "per_head": how.per_head if t.levels else None,
                "prompts": sum(len(ids) for ids, _ in batches),
                "tokens": _count(t),
                "skip_tokens": t.skip,
            },
        )
        for t, static in zip(targets, found, strict=True)
    ]


def _target(
    model: Any,
    scheme: str | Scheme,
    given: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]],
    skip_tokens: int | None,
) -> Target:
    layers = layer_geometries(model.config)
    chosen = presets.for_layers(scheme, layers)
    if not chosen.needs_calibration:
        raise CalibrationError(presets.without_calibration(chosen))
    if chosen.needs_rotary:
        layers = with_rotary(layers, model)
    CacheSpec(scheme=chosen, layers=layers)  # refuses what no cache could use
    skip = chosen.num_sink_tokens if skip_tokens is None else skip_tokens
    if skip < 0:
        raise SpecError(f"skip_tokens={skip} is negative; use 0 for none")
    target = Target(chosen, layers, skip, [valid & (valid.cumsum(-1) > skip) for _, _, valid in given])
    if not _count(target):
        raise DataError(
            f"{counted(len(given), 'prompt')} or windows of a text leave no token behind the {skip} that are skipped;"
            " give a longer text, or more prompts"
        )
    return target


def _count(target: Target) -> int:
    return sum(int(seen.sum()) for seen in target.tokens)


def _batch(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return (ids [B, T], attention mask [B, T] or None, bool [B, T]: no padding)."""
    ids, mask = (prompt["input_ids"], prompt.get("attention_mask")) if isinstance(prompt, Mapping) else (prompt, None)
    ids = torch.as_tensor(ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        raise DataError(
            f"a prompt has shape {tuple(ids.shape)} and dtype {ids.dtype}; token ids [batch, tokens] with at least one"
            " token are needed"
        )
    mask = None if mask is None else torch.as_tensor(mask)
    if mask is not None and mask.shape != ids.shape:
        raise DataError(f"attention_mask has shape {tuple(mask.shape)} but input_ids has {tuple(ids.shape)}")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return ids.long(), mask, valid


def _share(spec: QuantSpec, percentile: float | None) -> float:
    """Return the percent of elements inside a calibrated range."""
    return percentile if percentile is not None else 100 * (1 - spec.outliers) if spec.outliers else 99.9


def ranges_of(
    scheme: Scheme, layers: tuple[LayerGeometry, ...], num_tokens: int, percentile: float | None
) -> dict[tuple[int, str], Ranges]:
    """Return one observer per layer and side ("k", "v") that is static."""
    found = {}
    for i, g in enumerate(layers):
        for side, what, spec in zip("kv", ("keys", "values"), scheme.for_layer(i, len(layers)), strict=True):
            if spec.static:
                found[i, side] = Ranges(
                    spec, g.num_kv_heads, g.dim(side), num_tokens, _share(spec, percentile), f"{what} of layer {i}"
                )
    return found


def _fill_codebooks(
    model: Any,
    prompts: list[Batch],
    targets: list[Target],
    found: list[list[dict[str, torch.Tensor]]],
    how: Settings,
    resume: str | os.PathLike[str] | None,
    progress: bool,
) -> None:
    """Fill `levels` of the targets whose schemes have codebooks."""
    having = [(t, static) for t, static in zip(targets, found, strict=True) if "codebook" in t.scheme.calibrates]
    if having:
        from ..literature import histograms

        for target, static in having:
            target.levels.update(histograms.levels_of(target.scheme, target.layers, static))
        weighted = how.weights == "fisher"
        histograms.collect(model, prompts, [t for t, _ in having], weighted, how.checkpointing, resume, progress)


def moments_of(scheme: Scheme, layers: tuple[LayerGeometry, ...]) -> dict[int, Moments]:
    """Return one pair of moments per layer whose keys are stored in a calibrated basis."""
    keys = (scheme.for_layer(i, len(layers))[0] for i in range(len(layers)))
    return {i: Moments(key, layers[i], f"layer {i}") for i, key in enumerate(keys) if "basis" in key.calibrates}


def _see_queries(
    model: Any,
    prompts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]],
    moments: list[dict[int, Moments]],
    progress: bool,
) -> None:
    """Fill `moments`. Those of a layer see the same whatever is stored of it, so the first of them looks."""
    looking: dict[int, Moments] = {}
    for wanted in moments:
        looking = wanted | looking
    with (
        evaluating(model),
        in_fast_dtype(model),
        bar("calibrating bases", sum(len(ids) for ids, _, _ in prompts), enabled=progress) as advance,
    ):
        for ids, mask, valid in prompts:

            def observe(layer: int, q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor = valid) -> None:
                for row, real in enumerate(valid if layer in looking else ()):
                    positions = real.nonzero().squeeze(1).to(k.device)
                    looking[layer].add(q[row, positions], k[row, positions], positions)

            forward_with_queries(model, ids, mask, observe, set(looking))
            advance(len(ids))
    for wanted in moments:
        for layer, m in wanted.items():
            m.load(looking[layer].state())


def _run(
    model: Any, prompts: list[Batch], targets: list[Target], ranges: list[dict[Place, Ranges]], progress: bool
) -> None:
    layers = {layer for wanted in ranges for layer, _ in wanted}
    with evaluating(model), bar("calibrating", sum(len(ids) for ids, _ in prompts), enabled=progress) as advance:
        for i, (ids, mask) in enumerate(prompts):

            def observe(layer: int, k: torch.Tensor, v: torch.Tensor, i: int = i) -> None:
                for target, wanted in zip(targets, ranges, strict=True):
                    for place, x in (((layer, "k"), k), ((layer, "v"), v)):
                        if place in wanted:
                            wanted[place].add(
                                as_stored(x, target.layers[layer], target.spec(place))[target.tokens[i].to(x.device)]
                            )

            forward(model, ids, mask, observe, layers)
            advance(len(ids))
