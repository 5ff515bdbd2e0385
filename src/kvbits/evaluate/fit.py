"""`kvbits fit`: give two of memory, context and quality, get the third, by a scheme of its own for every layer of a
model.

    1. alone      what the keys and the values of each layer cost in few bits, all others raw       (`sensitivity`)
    2. walk       the convex hull of KL against bytes, from the cheapest choice to the dearest       (`allocate`)
    3. whole      the choices are measured as whole caches, on other windows, beside the uniform presets of as many
                  bytes
    4. back off   sensitivities drawn towards their mean make milder choices; what was measured best is taken. A preset
                  that is as good wins.

The sum over single layers does not predict the whole cache, because errors of layers interact. `Curve` measures by how
much, where all layers are alike.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import planner
from .. import schemes as presets
from ..errors import SpecError, counted
from ..files import whole as whole_file
from ..progress import bar
from ..spec import CacheSpec, FittedScheme, LayerGeometry, Override, Scheme
from ..units import human_bytes, human_seconds
from .allocate import Curve, Option, Step, tempered, walk
from .sensitivity import RAW, SIDES, Bench, Formats, fill_in

TEMPERATURES = (1.0, 0.7, 0.4, 0.0)
"""Milder and milder choices (see `allocate.tempered`): as measured, two between, every layer alike."""
GAIN = 0.95
"""A fitted scheme is taken if its KL is at most this share of the best preset's; windows are few."""
PRESETS_BESIDE = 4
"""Uniform presets that are measured beside a choice: those of the most bytes that fit."""
CORRECTIONS = 4
"""Choices that are measured on the way to the wanted KL."""
NOMINAL_CONTEXT = 32_768
"""Tokens at which bytes are counted where the context is the unknown."""
SINKS, RESIDUAL, PAGE = 4, 128, 64
"""Sinks, raw newest tokens and page size of fitted schemes: those of the presets of few bits."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Two of memory, context and quality.

    Attributes:
        layers: geometry of each layer on one GPU (`planner.rank`).
        context: tokens of each sequence, or None: the longest.
        batch: sequences.
        memory_bytes: for the cache of one GPU, or None: as little as does.
        max_kl: nats, or None: as little as fits.

    Raises:
        SpecError: fewer than two are given.
    """

    layers: tuple[LayerGeometry, ...]
    context: int | None = None
    batch: int = 1
    memory_bytes: int | None = None
    max_kl: float | None = None
    raw_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        given = {"memory": self.memory_bytes, "context": self.context, "a largest KL": self.max_kl}
        if len([x for x in given.values() if x is not None]) < 2:
            named = [name for name, x in given.items() if x is not None]
            raise SpecError(
                "two of memory, context and a largest KL make the third, and"
                f" {named[0] + ' alone was' if named else 'none was'} given; give --memory or --gpu-memory, --context,"
                " --max-kl, two of them"
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
        preset: the best uniform preset of equal or fewer bytes, or None where none fits.
        tried: every choice that was measured, milder ones after.
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
    alone: dict[str, dict[int, list[float]]] = field(default_factory=dict)

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
            "widths": {side: widths(self.chosen.scheme, len(self.goal.layers), side) for side in SIDES},
        }


def widths(scheme: Scheme, count: int, side: str) -> list[float]:
    """Bits of one code of each layer's keys or values, the mean where bands differ."""
    specs = [scheme.for_layer(i, count)[SIDES.index(side)] for i in range(count)]
    return [RAW if s.is_raw else s.mean_bits for s in specs]


def _uniform(name: str, key: Any, value: Any, overrides: tuple[Override, ...] = ()) -> Scheme:
    return Scheme(
        name=name,
        key=key,
        value=value,
        num_sink_tokens=SINKS,
        residual_length=RESIDUAL,
        page_size=PAGE,
        overrides=overrides,
    )


class _Search:
    """The choices of one fit: options of each layer from what each costs alone."""

    def __init__(self, bench: Bench, known: Formats, goal: Goal, name: str) -> None:
        self.bench, self.known, self.goal = bench, known, goal
        self._scheme = functools.partial(_uniform, name)
        self.say: Callable[[str], None] = lambda text: None
        self.alone: dict[str, dict[int, list[float]]] = {}
        self._curve: Curve | None = None
        self._bytes: dict[tuple[LayerGeometry, int, int], int] = {}

    def measure_alone(self, progress: bool) -> None:
        count = len(self.bench.layers)
        measured: dict[str, list[dict[int, float]]] = {side: [{} for _ in range(count)] for side in SIDES}
        steps = len(SIDES) * count * len(self.known.measured)
        timed = started = False
        with bar("single layers", steps, enabled=progress) as advance:
            for layer in range(count):
                for side in SIDES:
                    for width in self.known.measured:
                        new, began = not self.bench.has_alone(layer, side, width), time.perf_counter()
                        measured[side][layer][width] = self.bench.alone(layer, side, width, self.known.of(side)[width])
                        if new and started and not timed:  # the first of a run also reads the prefix
                            timed, seconds = True, time.perf_counter() - began
                            left = sum(
                                not self.bench.has_alone(i, s, w)
                                for i in range(count)
                                for s in SIDES
                                for w in self.known.measured
                            )
                            self.say(_estimate(self.bench, seconds, left))
                        started |= new
                        advance(1)
        for side in SIDES:
            filled = [fill_in(m, list(self.known.of(side))) for m in measured[side]]
            self.alone[side] = {b: [f[b] for f in filled] for b in self.known.of(side)}

    def options(self, temperature: float) -> list[list[Option]]:
        """Options of each layer: every width of keys with every width of values."""
        kl = {side: {b: tempered(x, temperature) for b, x in self.alone[side].items()} for side in SIDES}
        pairs = [(k, v) for k in self.known.key for v in self.known.value]
        return [
            [
                Option(
                    self.known.key[k],
                    self.known.value[v],
                    self._nbytes(g, k, v),
                    kl["key"][k][layer] + kl["value"][v][layer],
                )
                for k, v in pairs
            ]
            for layer, g in enumerate(self.goal.layers)
        ]

    def _nbytes(self, g: LayerGeometry, k: int, v: int) -> int:
        if (g, k, v) not in self._bytes:
            self._bytes[g, k, v] = self.goal.nbytes(self._scheme(self.known.key[k], self.known.value[v]), (g,))
        return self._bytes[g, k, v]

    def scheme(self, step: Step) -> Scheme:
        """A step as a scheme: the commonest pair of formats, and overrides for the layers of others."""
        members: dict[tuple[Any, Any], list[int]] = {}
        for layer, o in enumerate(step.options):
            members.setdefault((o.key, o.value), []).append(layer)
        (base, _), *others = sorted(members.items(), key=lambda item: -len(item[1]))
        return self._scheme(
            *base, tuple(Override(layers=tuple(layers), key=key, value=value) for (key, value), layers in others)
        )

    def total(self, scheme: Scheme) -> float:
        """Sum of what each layer costs alone."""
        total = 0.0
        for layer in range(len(self.bench.layers)):
            for side, spec in zip(SIDES, scheme.for_layer(layer, len(self.bench.layers)), strict=True):
                width = next(b for b, known in self.known.of(side).items() if known == spec)
                total += self.alone[side][width][layer]
        return total

    def alike(self) -> dict[int, Scheme]:
        """Every layer in one width: where the curve is measured."""
        return {b: self._scheme(self.known.key[b], self.known.value[b]) for b in self.known.key if b != RAW}

    def near(self, total: float) -> list[Scheme]:
        """The two uniform choices between which, or beside which, a sum lies."""
        ordered = sorted(self.alike().values(), key=self.total)
        at = min(max(1, sum(self.total(s) <= total for s in ordered)), len(ordered) - 1)
        return ordered[at - 1 : at + 1]

    def curve(self, total: float) -> Curve:
        """Return the curve that tells what sums near `total` mean. It is measured at the widths on both sides of
        `total`.
        """
        near = self.near(total)
        return Curve([(self.total(s), kl) for s, kl in zip(near, self.bench.whole(near), strict=True)])

    def uniform(self, limit: int) -> list[tuple[int, Scheme]]:
        """Presets that take at most `limit` bytes, those of the most: (bytes, scheme)."""
        found = []
        for name, preset in presets.PRESETS.items():
            if preset.tiers or (
                preset.needs_calibration and not (self.known.calibrated and "basis" in preset.calibrates)
            ):
                continue
            try:
                scheme = presets.for_layers(name, self.goal.layers)
                if self.known.token_local and not (
                    scheme.page_size == PAGE and scheme.key.token_local and scheme.value.token_local
                ):
                    continue
                found.append((self.goal.nbytes(scheme), scheme))
            except SpecError:
                continue  # does not fit these heads
        return sorted([(n, s) for n, s in found if n <= limit], key=lambda x: -x[0])[:PRESETS_BESIDE]

    def measured(self, schemes: list[Scheme], predicted: Sequence[float | None]) -> list[Measured]:
        found = []
        for scheme, kl, p in zip(schemes, self.bench.whole(schemes), predicted, strict=True):
            bits = CacheSpec(scheme=scheme, layers=self.goal.layers).bits_per_element
            found.append(Measured(scheme, self.goal.nbytes(scheme), kl, bits, p))
        return found


def require_room(goal: Goal, known: Formats) -> None:
    """Refuse a memory that the fewest bits do not fit into, before anything is measured.

    Raises:
        SpecError: with the least that does.
    """
    if goal.context is None or goal.memory_bytes is None:
        return
    cheapest = _uniform("least", known.key[min(known.key)], known.value[min(known.value)])
    least = goal.nbytes(cheapest)
    if least <= goal.memory_bytes:
        return
    longest = planner.max_context(
        CacheSpec(scheme=cheapest, layers=goal.layers, raw_dtype=goal.raw_dtype), goal.memory_bytes, goal.batch
    )
    raise SpecError(
        f"even in the fewest bits {human_bytes(goal.memory_bytes)} do not hold {counted(goal.batch, 'sequence')} of"
        f" {goal.context:,} tokens: the fewest bits take {human_bytes(least)}; give more memory, a context of at most"
        f" {longest or 0:,} tokens"
        + ("" if known.calibrated or known.token_local else ", or --calibrate for formats of fewer bits")
    )


def _estimate(bench: Bench, seconds: float, left: int) -> str:
    """Say how long the rest takes.

    Args:
        seconds: that one measurement of a single layer took.
        left: measurements of single layers to come.
    """
    # choices by temperature, the widths on both sides of each, and presets; the 16-bit cache runs beside them
    wholes = len(TEMPERATURES) + 2 + PRESETS_BESIDE + 1
    of_one = bench.seconds_of_whole()
    return (
        f"about {human_seconds(seconds * left + wholes * of_one)}: {left} measurements of single layers at"
        f" {seconds:.1f} s, then at most {wholes} whole caches at {human_seconds(of_one)}; both were timed here"
    )


def fit(
    bench: Bench,
    known: Formats,
    goal: Goal,
    *,
    name: str,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Find the scheme that a goal asks for.

    Args:
        name: what the scheme is called.
        say: told how long it takes, once that can be known.

    Raises:
        SpecError: even in the fewest bits the cache does not fit.
    """
    require_room(goal, known)
    search = _Search(bench, known, goal, name)
    search.say = say
    search.measure_alone(progress)
    limit = goal.memory_bytes if goal.context is not None else None
    tried = _by_quality(search) if limit is None else _by_memory(search, limit, progress)
    passing = [m for m in tried if goal.max_kl is None or m.kl <= goal.max_kl]
    fitted = (
        min(passing, key=lambda m: (m.nbytes, m.kl)) if passing and limit is None else min(tried, key=lambda m: m.kl)
    )
    beside = [s for _, s in search.uniform(fitted.nbytes if limit is None else limit)]
    found = search.measured(beside, [None] * len(beside))
    preset = min(found, key=lambda m: m.kl, default=None)
    chosen = fitted if preset is None or fitted.kl <= GAIN * preset.kl else preset
    if goal.max_kl is not None and limit is None and preset is not None and fitted.kl <= goal.max_kl < preset.kl:
        chosen = fitted  # only it reaches the wanted quality
    spec = CacheSpec(scheme=chosen.scheme, layers=goal.layers, raw_dtype=goal.raw_dtype)
    context = goal.context if goal.memory_bytes is None else planner.max_context(spec, goal.memory_bytes, goal.batch)
    return Fit(goal, chosen, fitted, preset, tried, _steps(search, fitted), context, search.alone)


def _by_memory(search: _Search, limit: int, progress: bool) -> list[Measured]:
    """The best choice that fits, by sensitivities more and more alike."""
    schemes = list(dict.fromkeys(search.scheme(walk(search.options(t), limit)[-1]) for t in TEMPERATURES))
    alike = [one for s in schemes for one in search.near(search.total(s))]
    # side by side: the 16-bit cache is run once for all
    search.bench.whole([*schemes, *alike, *(s for _, s in search.uniform(limit))], progress=progress)
    return search.measured(schemes, [search.curve(search.total(s))(search.total(s)) for s in schemes])


def _by_quality(search: _Search) -> list[Measured]:
    """The cheapest choice within the wanted KL: predicted, measured, and corrected by the error of the prediction."""
    assert search.goal.max_kl is not None
    steps = walk(search.options(1.0))
    wanted, tried = search.goal.max_kl, []
    seen: set[int] = set()
    for _ in range(CORRECTIONS):
        at = next((i for i, s in enumerate(steps) if search.curve(s.kl)(s.kl) <= wanted), len(steps) - 1)
        if at in seen:
            break
        seen.add(at)
        found = search.measured([search.scheme(steps[at])], [search.curve(steps[at].kl)(steps[at].kl)])[0]
        tried.append(found)
        wanted *= min(2.0, max(0.5, search.goal.max_kl / max(found.kl, 1e-9)))
    if not any(m.kl <= search.goal.max_kl for m in tried):
        tried += search.measured([search.scheme(steps[-1])], [0.0])
    return tried


def _steps(search: _Search, fitted: Measured) -> list[tuple[int, float, float]]:
    """The hull for people: bytes, bits, predicted KL.

    Bits in steps of about a half; what is near the choice is predicted by what was measured there.
    """
    curve = search.curve(search.total(fitted.scheme))
    found: list[tuple[int, float, float]] = []
    for step in walk(search.options(1.0)):
        scheme = search.scheme(step)
        bits = CacheSpec(scheme=scheme, layers=search.goal.layers).bits_per_element
        if not found or bits >= found[-1][1] + 0.5:
            found.append((step.nbytes, bits, curve(step.kl)))
    return found


def write(scheme: FittedScheme, bench: Bench, out: Path) -> None:
    """Write a scheme to `out`, and the calibration that it needs beside it (.safetensors)."""
    with whole_file(out) as partial:
        partial.write_text(scheme.to_json() + "\n")
    if (needed := bench.calibration(scheme.plain)) is not None:
        needed.save(out.with_suffix(".safetensors"))


def bound_to(
    scheme: Scheme, layers: tuple[LayerGeometry, ...], *, name: str, weights: str, model: str, description: str
) -> FittedScheme:
    """The scheme with the model that it was fitted to, for a file."""
    fields = {f.name: getattr(scheme, f.name) for f in dataclasses.fields(Scheme)} | {
        "name": name,
        "description": description,
    }
    return FittedScheme(**fields, layers=layers, weights=weights, model=model)
