"""Measurement of what a layer's keys or values cost in few bits, alone and together. The module holds formats to choose
from and measurements on the real packed cache.

A layer alone is measured on one chunk of tokens after a prefix. The prefix is computed once and put into every cache as
it is. Only that layer's keys, or its values, are packed. All others stay raw. So one trial costs the forward pass of a
chunk. Whole caches are measured as `kvbits eval` does (`fidelity.compare`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import schemes as presets
from ..calibrate import Calibration
from ..errors import SpecError, counted
from ..integrations.huggingface import KVCache
from ..integrations.masks import passed
from ..model_ref import ModelRef
from ..progress import bar
from ..spec import LayerGeometry, Override, PerChannel, PerGroup, QuantSpec, Scheme, to_dict
from .attention import observe
from .caches import base_factory
from .fidelity import Fidelity, compare, divergence, seconds_per_token
from .results import ResultFile

SIDES = ("key", "value")
RAW = 16
"""The width that means: not quantized."""
SCORED = 128
"""Tokens of a window that are scored, behind the prefix: a chunk."""
STEP_EXPONENT = 2.0
"""How KL follows the step between two levels where nothing was measured: squared, as the error does."""
VALUE_GROUP = 64


@dataclasses.dataclass(frozen=True)
class Formats:
    """Formats that a layer may store: keys and values by width, each width with one format.

    Attributes:
        measured: widths that are measured; the others follow from these (`fill_in`).
        calibrated: keys need a calibrated basis.
        token_local: none needs the other tokens of a page, so engines that store tokens one by one (vLLM) hold them
            all.
    """

    key: dict[int, QuantSpec]
    value: dict[int, QuantSpec]
    measured: tuple[int, ...]
    calibrated: bool = False
    token_local: bool = False

    @property
    def kind(self) -> str:
        """By which measurements are kept apart."""
        return "calibrated" if self.calibrated else "token-local" if self.token_local else "plain"

    def of(self, side: str) -> dict[int, QuantSpec]:
        return self.key if side == "key" else self.value


def formats(layers: tuple[LayerGeometry, ...], calibrated: bool, token_local: bool = False) -> Formats:
    """Formats for a model: integers whose scales come from the page, with a calibration those of the klt presets (all
    token-local), or those that tokens have by themselves without one: keys centred, in groups.
    """
    size = math.gcd(VALUE_GROUP, *presets.common_widths(layers))
    widths = (8, 4, 3, 2)
    if calibrated:
        eight = QuantSpec(format="int8", granularity=PerGroup(size))
        klt = {b: presets.for_layers(f"klt{b}", layers) for b in (4, 3, 2)}
        keys = {b: s.key for b, s in klt.items()} | {8: dataclasses.replace(eight, center="channel")}
        values = {b: s.value for b, s in klt.items()} | {8: eight}
    elif token_local:
        key = QuantSpec(format="int8", granularity=PerGroup(size), symmetric=False, center="channel")
        keys = {b: dataclasses.replace(key, format=f"int{b}") for b in widths}
        values = {b: QuantSpec(format=f"int{b}", granularity=PerGroup(size), symmetric=False) for b in widths}
    else:
        keys = {b: QuantSpec(format=f"int{b}", granularity=PerChannel(), symmetric=False) for b in widths}
        values = {b: QuantSpec(format=f"int{b}", granularity=PerGroup(size), symmetric=False) for b in widths}
    raw = {RAW: QuantSpec.raw()}
    return Formats(
        {b: keys[b] for b in widths} | raw, {b: values[b] for b in widths} | raw, (4, 2), calibrated, token_local
    )


def fill_in(measured: dict[int, float], widths: Sequence[int]) -> dict[int, float]:
    """KL at every width: between two that were measured straight in the logarithms of KL and step, beyond by
    `STEP_EXPONENT`; 0 where nothing is quantized.
    """
    known = sorted((math.log(1 / (2**b - 1)), math.log(max(kl, 1e-12))) for b, kl in measured.items())
    found = {}
    for b in widths:
        x = math.log(1 / (2**b - 1))
        below, above = [p for p in known if p[0] <= x + 1e-9], [p for p in known if p[0] > x + 1e-9]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            y = y0 + (x - x0) / (x1 - x0) * (y1 - y0)
        else:
            x0, y0 = below[-1] if below else above[0]
            y = y0 + STEP_EXPONENT * (x - x0)
        found[b] = 0.0 if b == RAW else math.exp(y)
    return found


class Bench:
    """Measures schemes on a loaded model, each once.

    Args:
        probes: int64 [windows, tokens]: single layers are measured on the last `SCORED` tokens of each.
        wholes: int64 [windows, tokens]: whole caches are measured on these, in chunks of `SCORED`.
        bases: a calibration for `klt4`, of which keys of all widths take theirs; or None.
        state: where measurements are kept, so that a run that stops goes on.
    """

    def __init__(
        self,
        model: Any,
        probes: torch.Tensor,
        wholes: torch.Tensor,
        bases: Calibration | None,
        state: ResultFile,
    ) -> None:
        self.model, self.probes, self.wholes, self.bases, self.state = (
            model,
            probes.to(model.device),
            wholes,
            bases,
            state,
        )
        self.layers = ModelRef.of(model).layers
        self._prefix: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._reference: tuple[torch.Tensor, torch.Tensor] | None = None

    def calibration(self, scheme: Scheme) -> Calibration | None:
        """Return the calibration that the scheme takes from `bases`, or None if the scheme needs none."""
        if not scheme.needs_calibration:
            return None
        if self.bases is None:
            raise SpecError(f"scheme {scheme.name!r} needs a calibration, and none was made")
        return self.bases.fitted(self.model.config, scheme)

    def has_alone(self, layer: int, side: str, width: int) -> bool:
        """Tell whether `alone` was measured before."""
        return f"layer {layer} {side} {width}" in self.state.items

    def alone(self, layer: int, side: str, width: int, spec: QuantSpec) -> float:
        """KL of one layer's keys or values in a format, all others raw; nats."""
        name = f"layer {layer} {side} {width}"
        if name not in self.state.items:
            raw = QuantSpec.raw()
            key, value = (spec, raw) if side == "key" else (raw, spec)
            trial = Scheme(
                name="trial",
                key=raw,
                value=raw,
                num_sink_tokens=4,
                overrides=(Override(layers=(layer,), key=key, value=value),),
            )
            self._put(name, self._probe(trial))
        return float(self.state.items[name]["value"])

    def _put(self, name: str, value: float) -> None:
        self.state.add(name, {"value": value})
        self.state.write(0.0, {})

    @torch.no_grad()
    def _probe(self, scheme: Scheme) -> float:
        if self._reference is None:
            windows = [observe(self.model, ids[:-SCORED]) for ids in self.probes]
            self._prefix = [
                (torch.stack([w[i].k for w in windows]), torch.stack([w[i].v for w in windows]))
                for i in range(len(self.layers))
            ]
            log_p = self._log_p(Scheme(name="trial", key=QuantSpec.raw(), value=QuantSpec.raw(), num_sink_tokens=4))
            self._reference = log_p, log_p.exp()
        return divergence(self._log_p(scheme), *self._reference).mean().item()

    def _log_p(self, scheme: Scheme) -> torch.Tensor:
        """Log-probabilities [windows x SCORED, vocabulary] behind the prefix as `scheme` stores it."""
        cache = KVCache.for_model(self.model, scheme, calibration=self.calibration(scheme))
        for layer, (k, v) in enumerate(self._prefix):
            cache.pages.append(layer, k, v)
        cache.columns.seen = self.probes.shape[1] - SCORED
        logits = self.model(self.probes[:, -SCORED:], **passed(self.model, cache), use_cache=True).logits
        return torch.log_softmax(logits.flatten(0, 1).float(), -1)

    def whole(self, schemes: Sequence[Scheme], *, progress: bool = False) -> list[float]:
        """KL of whole caches against the 16-bit cache, nats: mean over the tokens of all windows.

        One pass of the 16-bit cache for all of them.
        """
        missing = [s for s in dict.fromkeys(schemes) if self._name(s) not in self.state.items]
        if missing:
            base = base_factory(self.model)
            sums = {name: Fidelity() for name in (base.name, *map(self._name, missing))}
            with bar(f"{counted(len(missing), 'whole cache')}", self.wholes.numel(), enabled=progress) as advance:
                for window in self.wholes:
                    caches: dict[str, Any] = {base.name: base.make(1, len(window))}
                    for s in missing:
                        caches[self._name(s)] = KVCache.for_model(
                            self.model, s, batch_size=1, max_tokens=len(window), calibration=self.calibration(s)
                        )
                    compare(self.model, caches, window, chunk=SCORED, results=sums, on_tokens=advance)
            for s in missing:
                self._put(self._name(s), sums[self._name(s)].kl_mean)
        return [float(self.state.items[self._name(s)]["value"]) for s in schemes]

    def seconds_of_whole(self) -> float:
        """Estimate the seconds of one whole cache from the model's own cache on the first steps of a window."""
        cache = base_factory(self.model).make(1, self.wholes.shape[1])
        return seconds_per_token(self.model, cache, self.wholes[0], SCORED) * self.wholes.numel()

    @staticmethod
    def _name(scheme: Scheme) -> str:
        """By what is stored, not by what it is called."""
        stored = dataclasses.replace(scheme, name="trial", source="", description="")
        return f"whole {hashlib.sha256(json.dumps(to_dict(stored)).encode()).hexdigest()[:12]}"
