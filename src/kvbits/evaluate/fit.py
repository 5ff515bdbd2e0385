"""`kvbits fit`: bits for the keys and values of every layer of a model, as a scheme for this model alone.

    1. base       a preset: its bytes are the budget, or it is the best that fits a memory or reaches a quality
    2. pass       one backward pass says what errors of each layer cost                                (`sensitivity`)
    3. walk       the convex hull of expected KL against bytes, from the cheapest choice to the dearest   (`allocate`)
    4. whole      the choice and the base are measured as whole caches on other text; a base that is as good stays

Fitted schemes keep what the base keeps beside its pages: sinks, raw newest tokens, copies. All formats are
token-local, so vLLM serves the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import planner
from .. import schemes as presets
from ..calibrate import Calibration
from ..errors import SpecError, UnsupportedError, counted
from ..files import whole as whole_file
from ..integrations.engine.served import FORMATS
from ..integrations.huggingface import KVCache
from ..integrations.rotary import with_rotary
from ..progress import bar
from ..spec import BAND, CacheSpec, FittedScheme, LayerGeometry, Override, PerGroup, QuantSpec, Scheme, to_dict
from ..spec import bands as banding
from ..units import human_bytes, human_seconds
from .allocate import Option, Step, dealt, walk
from .caches import base_factory
from .fidelity import DECODING_CHUNK, Fidelity, compare, seconds_per_token
from .results import ResultFile
from .sensitivity import Sensitivity, errors

SIDES = ("key", "value")
RAW = 16
"""The width that means: not quantized."""
GAIN = 0.97
"""A fitted scheme is taken if its KL is at most this share of its base's; windows are few."""
CORRECTIONS = 4
"""Choices that are measured on the way to the wanted KL."""
NOMINAL_CONTEXT = 32_768
"""Tokens at which bytes are counted where the context is the unknown."""
KEY_STEPS = (-1.0, -0.5, 0.5, 1.0)
"""Bits by which the mean width of keys may differ from the base's. Few, since each format has kernels of its own."""
VALUE_BITS = (2, 3, 4)
"""Widths of values that the kernels of klt read."""
INTEGERS = (8, 4, 3, 2)
KLT, PLAIN = ("klt2", "klt3", "klt4"), ("int4", "int8k_int4v", "int8_centered")
"""Presets that a fit starts from, the smallest first: of models that klt takes, and of others."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A preset's bytes, or two of memory, context and quality.

    Attributes:
        layers: geometry of each layer on one GPU (`planner.rank`).
        scheme: the preset whose bytes are the budget, or None.
        context: tokens of each sequence, or None: the longest.
        batch: sequences.
        memory_bytes: for the cache of one GPU, or None: as little as does.
        max_kl: nats, or None: as little as fits.
        equal_pages: every layer's page takes as many bytes as the base's.

    Raises:
        SpecError: a preset and memory or quality, or no preset and fewer than two of the three.
    """

    layers: tuple[LayerGeometry, ...]
    scheme: str | None = None
    context: int | None = None
    batch: int = 1
    memory_bytes: int | None = None
    max_kl: float | None = None
    equal_pages: bool = False
    raw_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        sizes = {"memory": self.memory_bytes, "a largest KL": self.max_kl}
        given = [name for name, x in (sizes | {"context": self.context}).items() if x is not None]
        if self.scheme is not None:
            if self.scheme not in KLT + PLAIN:
                raise SpecError(f"a fit starts from {', '.join(KLT)} or {', '.join(PLAIN)}, not from {self.scheme!r}")
            if beside := [name for name, x in sizes.items() if x is not None]:
                raise SpecError(
                    f"the bytes of {self.scheme} are the budget, and {' and '.join(beside)} was given too; omit one"
                )
        elif len(given) < 2:
            raise SpecError(
                f"{given[0] + ' alone' if given else 'no budget'} was given; give --scheme, whose bytes are then the"
                " budget, or two of memory (--memory or --gpu-memory), --context and --max-kl"
            )
        if self.max_kl is not None and not self.max_kl > 0:
            raise SpecError(f"a largest KL of {self.max_kl} nats: it must be above 0; 0.005 is hardly seen, 0.05 is")

    @property
    def weighed_at(self) -> int:
        return NOMINAL_CONTEXT if self.context is None else self.context

    def nbytes(self, scheme: Scheme, layers: tuple[LayerGeometry, ...] | None = None) -> int:
        """Return the exact size in bytes of a cache of the context."""
        return CacheSpec(
            scheme=scheme, layers=self.layers if layers is None else layers, raw_dtype=self.raw_dtype
        ).nbytes(self.weighed_at, self.batch)

    def limit(self, base: Scheme) -> int | None:
        """Return the budget in bytes, or None where quality alone counts."""
        if self.scheme is not None:
            return self.nbytes(base)
        return None if self.context is None else self.memory_bytes


@dataclass(frozen=True)
class Measured:
    """A scheme with what it takes and what it costs."""

    scheme: Scheme
    nbytes: int
    kl: float
    bits: float
    predicted: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme.name,
            "nbytes": self.nbytes,
            "kl": self.kl,
            "bits_per_element": self.bits,
            "predicted_kl": self.predicted,
        }


@dataclass(frozen=True)
class Fit:
    """Result of a fit.

    Attributes:
        chosen: what is taken: the fitted scheme, or the preset that is as good.
        fitted: the best choice by layer.
        preset: the preset that the fit started from, or None where it does not fit the memory.
        tried: every choice that was measured.
        steps: the hull as (bytes, bits per element, predicted KL), from the cheapest on.
        context: tokens of each sequence that fit; None where any number does.
    """

    goal: Goal
    chosen: Measured
    fitted: Measured
    preset: Measured | None
    tried: list[Measured]
    steps: list[tuple[int, float, float]]
    context: int | None
    sensitivities: list[Sensitivity] = field(default_factory=list)

    @property
    def gained(self) -> bool:
        return self.chosen is self.fitted

    @property
    def reached(self) -> bool:
        """Flag that tells whether the wanted quality is reached."""
        return self.goal.max_kl is None or self.chosen.kl <= self.goal.max_kl

    def to_dict(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "batch": self.goal.batch,
            "memory_bytes": self.goal.memory_bytes,
            "max_kl": self.goal.max_kl,
            "gained": self.gained,
            "reached": self.reached,
            "chosen": self.chosen.to_dict(),
            "fitted": self.fitted.to_dict(),
            "preset": None if self.preset is None else self.preset.to_dict(),
            "tried": [m.to_dict() for m in self.tried],
            "steps": [{"nbytes": n, "bits_per_element": b, "predicted_kl": k} for n, b, k in self.steps],
            "widths": {side: widths(self.chosen.scheme, self.goal.layers, side) for side in SIDES},
            "sensitivities": [s.to_dict() for s in self.sensitivities],
        }


def widths(scheme: Scheme, layers: tuple[LayerGeometry, ...], side: str) -> list[float]:
    """Return bits of one code of each layer's keys or values, the mean where bands differ."""
    found: list[float] = []
    for i, g in enumerate(layers):
        spec = scheme.for_layer(i, len(layers))[SIDES.index(side)]
        bands = spec.widths(g.dim(side[0]))
        found.append(RAW if spec.is_raw else sum(bands) / len(bands) if bands else spec.bits)
    return found


# -- formats --------------------------------------------------------------------------------------------------------


def family(layers: tuple[LayerGeometry, ...], model: Any = None) -> tuple[str, ...]:
    """Return the names of the presets that a fit starts from: klt's, or integers where klt refuses the model.

    Args:
        model: loaded, which also says whether its keys are turned by position.
    """
    form = FORMATS["kvbits_klt4"]
    if any(form.refuses(g.head_dim, g.value_head_dim) for g in layers):
        return PLAIN
    try:
        if model is not None:
            with_rotary(layers, model)
    except UnsupportedError:
        return PLAIN
    return KLT


def near(base: Scheme) -> int:
    """Count the newest tokens that a scheme reads raw or from finer copies."""
    return base.residual_length + sum(c.num_tokens for c in base.copies)


def pairs_of(base: Scheme, goal: Goal) -> list[tuple[QuantSpec, QuantSpec]]:
    """Return each (key spec, value spec) that a layer may have in a fit that starts from `base`.

    Keys of klt have the base's own widths by band, and more or fewer bits dealt out by the shares of variance that
    bands have in every model.
    """
    raw = (QuantSpec.raw(), QuantSpec.raw())
    size = presets.common_widths(goal.layers)
    eight = presets.for_layers("int8_centered", goal.layers)
    if base.name not in KLT:
        groups = [PerGroup(min(64, d & -d)) for d in size]
        key = QuantSpec(granularity=groups[0], symmetric=False, center="channel")
        value = QuantSpec(granularity=groups[1], symmetric=False)
        forms = [[dataclasses.replace(one, format=f"int{b}") for b in INTEGERS] for one in (key, value)]
        return [(k, v) for k in forms[0] for v in forms[1]] + [raw]
    values = [presets.for_layers(f"klt{b}", goal.layers).value for b in VALUE_BITS]
    own, keys = base.key.widths(size[0]), [base.key]
    error = {0: 1.0} | {b: errors(dataclasses.replace(base.key, bands=(b,)), BAND)[0] for b in (*range(1, 7), 8)}
    for step in KEY_STEPS:
        # an even number of bits, so that 1-bit planes of two bands fill whole words
        bits = max(2, round((sum(own) + step * len(own)) / 2) * 2)
        if bits != sum(own):
            bands = dealt(banding.shares(len(own)), bits, error.__getitem__)
            keys.append(dataclasses.replace(base.key, bands=bands))
    found = [(key, value) for key in dict.fromkeys(keys) for value in values]
    roomy = goal.scheme is None and base.name == KLT[-1]
    return found + ([(eight.key, eight.value), raw] if roomy else [])


# -- measurements ---------------------------------------------------------------------------------------------------


class Bench:
    """Measurement of whole caches of a loaded model, each once.

    Args:
        windows: int64 [windows, tokens], fed in chunks of `DECODING_CHUNK`.
        calibration: of a klt preset, or None.
        state: where measurements are kept, so that a run that stopped continues.
    """

    def __init__(self, model: Any, windows: torch.Tensor, calibration: Calibration | None, state: ResultFile) -> None:
        self.model, self.windows, self._calibration, self.state = model, windows, calibration, state

    def calibration(self, scheme: Scheme) -> Calibration | None:
        """Return the calibration that the scheme takes, or None if it needs none."""
        if not scheme.needs_calibration:
            return None
        if self._calibration is None:
            raise SpecError(f"scheme {scheme.name!r} needs a calibration, and none was made")
        return self._calibration.fitted(self.model.config, scheme)

    def sensitivities(self, of: str, measure: Callable[[], list[Sensitivity]]) -> list[Sensitivity]:
        """Return what `measure` finds; what it found before is kept by the name `of`."""
        name = f"sensitivities {of}"
        if name not in self.state.items:
            self._put(name, {"layers": [s.to_dict() for s in measure()]})
        return [Sensitivity.from_dict(s) for s in self.state.items[name]["layers"]]

    def kl(self, schemes: Sequence[Scheme], *, progress: bool = False) -> list[float]:
        """Return KL against the 16-bit cache, nats: mean over the tokens of all windows.

        One pass of the 16-bit cache for all of them.
        """
        if missing := self.missing(schemes):
            base = base_factory(self.model)
            sums = {name: Fidelity() for name in (base.name, *map(self._name, missing))}
            with bar(f"{counted(len(missing), 'whole cache')}", self.windows.numel(), enabled=progress) as advance:
                for window in self.windows:
                    caches: dict[str, Any] = {base.name: base.make(1, len(window))}
                    for s in missing:
                        caches[self._name(s)] = KVCache.for_model(
                            self.model, s, batch_size=1, max_tokens=len(window), calibration=self.calibration(s)
                        )
                    compare(self.model, caches, window, chunk=DECODING_CHUNK, results=sums, on_tokens=advance)
            for s in missing:
                self._put(self._name(s), {"value": sums[self._name(s)].kl_mean})
        return [float(self.state.items[self._name(s)]["value"]) for s in schemes]

    def missing(self, schemes: Sequence[Scheme]) -> list[Scheme]:
        """Return those that were not measured yet."""
        return [s for s in dict.fromkeys(schemes) if self._name(s) not in self.state.items]

    def seconds_of(self, caches: int) -> float:
        """Estimate the seconds of so many whole caches from the model's own cache on the first steps of a window."""
        cache = base_factory(self.model).make(1, self.windows.shape[1])
        return caches * seconds_per_token(self.model, cache, self.windows[0], DECODING_CHUNK) * self.windows.numel()

    def _put(self, name: str, record: dict[str, Any]) -> None:
        self.state.add(name, record)
        self.state.write(0.0, dict)

    @staticmethod
    def _name(scheme: Scheme) -> str:
        """Name a scheme by what it stores, not by what it is called."""
        stored = dataclasses.replace(scheme, name="trial", source="", description="")
        return f"whole {hashlib.sha256(json.dumps(to_dict(stored)).encode()).hexdigest()[:12]}"


# -- the fit --------------------------------------------------------------------------------------------------------


class _Search:
    """The choices of one fit: options of each layer, and what they are expected to cost.

    Attributes:
        scale: whole KL of the base, as a multiple of the expected sum over its layers.
    """

    def __init__(self, bench: Bench, base: Scheme, goal: Goal, known: list[Sensitivity], name: str) -> None:
        self.bench, self.base, self.goal, self.known, self.name = bench, base, goal, known, name
        self.pairs, self.scale = pairs_of(base, goal), 1.0
        self._bytes: dict[tuple[LayerGeometry, QuantSpec, QuantSpec], int] = {}

    def _layer_bytes(self, g: LayerGeometry, key: QuantSpec, value: QuantSpec) -> int:
        if (g, key, value) not in self._bytes:
            self._bytes[g, key, value] = self.goal.nbytes(self._alike(key, value), (g,))
        return self._bytes[g, key, value]

    def _alike(self, key: QuantSpec, value: QuantSpec, **changes: Any) -> Scheme:
        """Return the base with other specs, and copies where they are finer than these."""
        copies = self.base.copies_of(key, value)
        return dataclasses.replace(self.base, key=key, value=value, copies=copies, **changes)

    def _page_bytes(self, g: LayerGeometry, key: QuantSpec, value: QuantSpec) -> int:
        group = CacheSpec(scheme=self._alike(key, value), layers=(g,), raw_dtype=self.goal.raw_dtype).groups[0]
        return group.layouts["closed"].page_size_bytes

    def options(self) -> list[list[Option]]:
        """Return the options of each layer, with what they are expected to cost.

        Raises:
            SpecError: pages of equal bytes leave a layer no format.
        """
        found = []
        for g, s in zip(self.goal.layers, self.known, strict=True):
            pairs = self.pairs
            if self.goal.equal_pages:
                wanted = self._page_bytes(g, self.base.key, self.base.value)
                pairs = [p for p in pairs if self._page_bytes(g, *p) == wanted]
                if not pairs:
                    raise SpecError(
                        f"no other widths make pages as large as those of {self.base.name} with {g.head_dim} channels;"
                        " leave --equal-pages away"
                    )
            found.append([Option(k, v, self._layer_bytes(g, k, v), s.kl(k, v, g)) for k, v in pairs])
        return found

    def expected(self, scheme: Scheme) -> float:
        """Add up what the layers of a scheme are expected to cost."""
        count = len(self.known)
        return sum(
            s.kl(*scheme.for_layer(i, count), g)
            for i, (s, g) in enumerate(zip(self.known, self.goal.layers, strict=True))
        )

    def scheme(self, step: Step) -> Scheme:
        """Write a step as a scheme: the commonest pair of formats, and overrides for the layers of others."""
        members: dict[tuple[QuantSpec, QuantSpec], list[int]] = {}
        for layer, o in enumerate(step.options):
            members.setdefault((o.key, o.value), []).append(layer)
        ordered = sorted(members.items(), key=lambda item: -len(item[1]))
        # a scheme's copies are finer than its own specs, so these are of layers that have copies
        (key, value), own = next((item for item in ordered if self.base.copies_of(*item[0])), ordered[0])
        others = (Override(layers=tuple(at), key=k, value=v) for (k, v), at in ordered if at is not own)
        return self._alike(key, value, name=self.name, overrides=tuple(others))

    def measured(self, scheme: Scheme) -> Measured:
        spec = CacheSpec(scheme=scheme, layers=self.goal.layers)
        kl = self.bench.kl([scheme])[0]
        return Measured(scheme, self.goal.nbytes(scheme), kl, spec.bits_per_element, self.scale * self.expected(scheme))


def require_room(goal: Goal, names: Sequence[str]) -> None:
    """Refuse a memory that the fewest bits do not fit into, before anything is measured.

    Args:
        names: `family`.

    Raises:
        SpecError: with the least that does.
    """
    if goal.context is None or goal.memory_bytes is None:
        return
    base = presets.for_layers(names[0], goal.layers)
    alike = Sensitivity((1.0,) * len(base.key.widths(goal.layers[0].head_dim)), 1.0, 1.0)
    search = _Search(None, base, goal, [alike] * len(goal.layers), "least")  # type: ignore[arg-type]
    cheapest = search.scheme(walk(search.options())[0])
    least = goal.nbytes(cheapest)
    if least <= goal.memory_bytes:
        return
    longest = planner.max_context(
        CacheSpec(scheme=cheapest, layers=goal.layers, raw_dtype=goal.raw_dtype), goal.memory_bytes, goal.batch
    )
    raise SpecError(
        f"even in the fewest bits {human_bytes(goal.memory_bytes)} do not hold {counted(goal.batch, 'sequence')} of"
        f" {goal.context:,} tokens: the fewest bits take {human_bytes(least)}; give more memory, or a context of at"
        f" most {longest or 0:,} tokens"
    )


def require_start(goal: Goal, names: Sequence[str]) -> None:
    """Refuse a preset that a fit of this model does not start from, before anything is measured.

    Args:
        names: `family`.

    Raises:
        SpecError: with the presets that it does start from.
    """
    if goal.scheme is not None and goal.scheme not in names:
        raise SpecError(f"--scheme {goal.scheme}: a fit of this model starts from {', '.join(names)}; take one of them")


def base_of(bench: Bench, goal: Goal, names: Sequence[str], *, progress: bool = False) -> Scheme:
    """Return the preset that a fit starts from: the one that was named, the largest one that fits the memory, or the
    smallest one that reaches the quality.

    Raises:
        SpecError: see `require_start`.
    """
    require_start(goal, names)
    known = [presets.for_layers(name, goal.layers) for name in names]
    if goal.scheme is not None:
        return known[names.index(goal.scheme)]
    if goal.context is not None and (memory := goal.memory_bytes) is not None:
        return next((s for s in reversed(known) if goal.nbytes(s) <= memory), known[0])
    assert goal.max_kl is not None
    measured = bench.kl(known, progress=progress)
    return next((s for s, kl in zip(known, measured, strict=True) if kl <= goal.max_kl), known[-1])


def fit(
    bench: Bench,
    base: Scheme,
    goal: Goal,
    known: list[Sensitivity],
    *,
    name: str,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Find the scheme that a goal asks for.

    Args:
        base: see `base_of`.
        known: what errors of each layer cost.
        name: what the scheme is called.
        say: told how long it takes, once that can be known.

    Raises:
        SpecError: even in the fewest bits the cache does not fit.
    """
    search = _Search(bench, base, goal, known, name)
    limit = goal.limit(base)
    steps = walk(search.options())
    choices = [] if limit is None else [search.scheme(walk(search.options(), limit)[-1])]
    if left := bench.missing([base, *choices]):
        say(
            f"about {human_seconds(bench.seconds_of(len(left) + 1))} to measure {counted(len(left), 'whole cache')} and"
            " the 16-bit one"
        )
    search.scale = bench.kl([base, *choices], progress=progress)[0] / max(search.expected(base), 1e-30)
    preset: Measured | None = (start := search.measured(base))
    if limit is None:
        tried = _by_quality(search, steps)
        passing = [m for m in tried if goal.max_kl is None or m.kl <= goal.max_kl]
        fitted = min(passing, key=lambda m: (m.nbytes, m.kl)) if passing else min(tried, key=lambda m: m.kl)
        chosen = fitted
        if start.kl <= (goal.max_kl or 0.0) and (start.nbytes <= fitted.nbytes or not passing):
            chosen = start
    else:
        tried = [search.measured(choices[0])]
        fitted, preset = tried[0], start if start.nbytes <= limit else None
        chosen = fitted if preset is None or fitted.kl <= GAIN * preset.kl else preset
    spec = CacheSpec(scheme=chosen.scheme, layers=goal.layers, raw_dtype=goal.raw_dtype)
    context = goal.context if goal.memory_bytes is None else planner.max_context(spec, goal.memory_bytes, goal.batch)
    return Fit(goal, chosen, fitted, preset, tried, _shown(search, steps), context, known)


def _by_quality(search: _Search, steps: list[Step]) -> list[Measured]:
    """Return the cheapest choice within the wanted KL: predicted, measured, and corrected by the error of the
    prediction.
    """
    assert search.goal.max_kl is not None
    wanted, tried = search.goal.max_kl, []
    seen: set[int] = set()
    for _ in range(CORRECTIONS):
        at = next((i for i, s in enumerate(steps) if search.scale * s.kl <= wanted), len(steps) - 1)
        if at in seen:
            break
        seen.add(at)
        tried.append(search.measured(search.scheme(steps[at])))
        wanted *= min(2.0, max(0.5, search.goal.max_kl / max(tried[-1].kl, 1e-9)))
    if not any(m.kl <= search.goal.max_kl for m in tried):
        tried.append(search.measured(search.scheme(steps[-1])))
    return tried


def _shown(search: _Search, steps: list[Step]) -> list[tuple[int, float, float]]:
    """Return the hull for people: bytes, bits, predicted KL, in steps of about a quarter of a bit."""
    found: list[tuple[int, float, float]] = []
    for step in steps:
        scheme = search.scheme(step)
        bits = CacheSpec(scheme=scheme, layers=search.goal.layers).bits_per_element
        if not found or bits >= found[-1][1] + 0.25:
            found.append((step.nbytes, bits, search.scale * step.kl))
    return found


def write(scheme: FittedScheme, calibration: Calibration | None, out: Path) -> None:
    """Write a scheme to `out`, and a calibration beside it (.safetensors) where there is one."""
    with whole_file(out) as partial:
        partial.write_text(scheme.to_json() + "\n")
    if calibration is not None:
        calibration.save(out.with_suffix(".safetensors"))


def bound_to(
    scheme: Scheme, layers: tuple[LayerGeometry, ...], *, name: str, weights: str, model: str, description: str
) -> FittedScheme:
    """Return the scheme with the model that it was fitted to, for a file."""
    fields = {f.name: getattr(scheme, f.name) for f in dataclasses.fields(Scheme)} | {
        "name": name,
        "description": description,
    }
    return FittedScheme(**fields, layers=layers, weights=weights, model=model)
