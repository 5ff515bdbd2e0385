"""What a layer's keys or values cost in few bits, alone and together: formats to choose from, measurements on the real
packed cache, a file that keeps them.

A layer alone is measured on one chunk of tokens after a prefix, which is computed once and put into every cache as it
is: only that layer's keys, or its values, are packed, all others stay raw. So one trial costs the forward pass of a
chunk. Whole caches are measured as `kvbits eval` does (`fidelity.compare`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import runs
from .. import schemes as presets
from ..calibrate import Calibration
from ..calibrate.calibration import fingerprint
from ..calibrate.moments import for_widths
from ..errors import FileFormatError, SpecError, counted
from ..files import to_json, whole
from ..geometry import layer_geometries
from ..integrations.huggingface import KVCache
from ..integrations.masks import passed
from ..progress import bar
from ..spec import LayerGeometry, Override, PerChannel, PerGroup, QuantSpec, Scheme, to_dict
from .attention import observe
from .caches import base_factory
from .fidelity import Fidelity, compare, divergence

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
    """What a layer may store: keys and values by width, each width with one format.

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


class State:
    """Measurements by name, kept in a file after each with the run that made it (see `kvbits.runs`), so that a run that
    stops goes on.

    Args:
        path: None keeps them in memory only.
        header: what they depend on; a file of another is refused.

    Raises:
        FileFormatError: a file that is not ours, or is damaged.
        SpecError: a file of another model, text or settings, naming what differs.
    """

    FORMAT = "kvbits-fit"

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path, self.header = path, json.loads(json.dumps(header))
        self.found: dict[str, float] = {}
        self._runs: dict[str, Any] = {}
        self._made_by: dict[str, str] = {}
        if path is None or not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != self.FORMAT or not all(
                isinstance(x["value"], float | int) and x["run"] in data["runs"] for x in data["found"].values()
            ):
                raise ValueError("not measurements of `kvbits fit`")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise FileFormatError(f"cannot go on from {path}: {e!r}; remove it, or give another --out") from e
        theirs = data.get("header", {})
        if differs := [
            f"{k} is {v!r} here and {theirs.get(k)!r} there" for k, v in self.header.items() if theirs.get(k) != v
        ]:
            raise SpecError(
                f"{path} holds measurements of something else: {'; '.join(differs[:3])}; remove it, or give another"
                " --out"
            )
        self.found = {name: x["value"] for name, x in data["found"].items()}
        self._runs, self._made_by = data["runs"], {name: x["run"] for name, x in data["found"].items()}

    @functools.cached_property
    def _run(self) -> dict[str, Any]:
        return runs.record()

    def put(self, name: str, value: float) -> None:
        self.found[name] = value
        if self.path is not None:
            self._runs[self._run["id"]], self._made_by[name] = self._run, self._run["id"]
            found = {name: {"value": value, "run": self._made_by[name]} for name, value in self.found.items()}
            with whole(self.path) as partial:
                partial.write_text(
                    to_json(
                        {"format": self.FORMAT, "header": self.header, "runs": self._runs, "found": found}, indent=0
                    )
                    + "\n"
                )


class Bench:
    """Measures schemes on a loaded model, each once.

    Args:
        probes: int64 [windows, tokens]: single layers are measured on the last `SCORED` tokens of each.
        wholes: int64 [windows, tokens]: whole caches are measured on these, in chunks of `SCORED`.
        bases: per layer what keys in a calibrated basis need (`Calibration.static` of `klt4`), or None.
        state: where measurements are kept.
    """

    def __init__(
        self,
        model: Any,
        probes: torch.Tensor,
        wholes: torch.Tensor,
        bases: list[dict[str, torch.Tensor]] | None,
        state: State,
    ) -> None:
        self.model, self.probes, self.wholes, self.bases, self.state = (
            model,
            probes.to(model.device),
            wholes,
            bases,
            state,
        )
        self.layers = layer_geometries(model.config)
        self._bases: dict[tuple[int, tuple[int, ...]], dict[str, torch.Tensor]] = {}
        self._prefix: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._reference: tuple[torch.Tensor, torch.Tensor] | None = None

    def calibration(self, scheme: Scheme) -> Calibration | None:
        """What the scheme needs of `bases`, or None."""
        if not scheme.needs_calibration:
            return None
        if self.bases is None:
            raise SpecError(f"scheme {scheme.name!r} needs a calibration, and none was made")
        specs = [scheme.for_layer(i, len(self.layers))[0] for i in range(len(self.layers))]
        static = [self._basis(layer, key) if "basis" in key.calibrates else {} for layer, key in enumerate(specs)]
        return Calibration(static, fingerprint(self.model.config, scheme), {"scheme": scheme.name})

    def _basis(self, layer: int, key: QuantSpec) -> dict[str, torch.Tensor]:
        assert self.bases is not None
        if (layer, key.bands) not in self._bases:
            made_for = presets.get("klt4", head_dim=math.gcd(*(g.head_dim for g in self.layers))).key
            self._bases[layer, key.bands] = self.bases[layer] | {
                "k_basis": for_widths(self.bases[layer]["k_basis"], made_for, key)
            }
        return self._bases[layer, key.bands]

    def has_alone(self, layer: int, side: str, width: int) -> bool:
        """Whether `alone` was measured before."""
        return f"layer {layer} {side} {width}" in self.state.found

    def alone(self, layer: int, side: str, width: int, spec: QuantSpec) -> float:
        """KL of one layer's keys or values in a format, all others raw; nats."""
        name = f"layer {layer} {side} {width}"
        if name not in self.state.found:
            raw = QuantSpec.raw()
            key, value = (spec, raw) if side == "key" else (raw, spec)
            trial = Scheme(
                name="trial",
                key=raw,
                value=raw,
                num_sink_tokens=4,
                overrides=(Override(layers=(layer,), key=key, value=value),),
            )
            self.state.put(name, self._probe(trial))
        return self.state.found[name]

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
        missing = [s for s in dict.fromkeys(schemes) if self._name(s) not in self.state.found]
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
                    compare(self.model, caches, window, first=0, chunk=SCORED, results=sums, on_tokens=advance)
            for s in missing:
                self.state.put(self._name(s), sums[self._name(s)].kl_mean)
        return [self.state.found[self._name(s)] for s in schemes]

    def seconds_of_whole(self) -> float:
        """Estimate the seconds of one whole cache from the model's own cache on the first steps of a window."""
        read = min(2 * SCORED + 1, self.wholes.shape[1])
        base = base_factory(self.model)
        steps = compare(
            self.model,
            {base.name: base.make(1, read)},
            self.wholes[0, :read],
            first=min(SCORED, read - 1),
            chunk=SCORED,
        )
        timed = steps[base.name]
        return timed.seconds / max(1, timed.num_timed) * self.wholes.numel()

    @staticmethod
    def _name(scheme: Scheme) -> str:
        """By what is stored, not by what it is called."""
        stored = dataclasses.replace(scheme, name="trial", source="", description="")
        return f"whole {hashlib.sha256(json.dumps(to_dict(stored)).encode()).hexdigest()[:12]}"
