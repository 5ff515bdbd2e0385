"""`kvbits check`: a screen of minutes, which tells whether a scheme suits a model, layer by layer, or which one does.

    1. observe      one text through the model; every layer's queries, keys and values
    2. judge        the scheme's pages on those inputs: attention error per layer against limits, beside what makes the
                    layer hard (key offset, outliers, sinks)
    3. advise       for layers that fail, every remedy is tried on the same inputs; the cheapest that passes is advised
    4. confirm      KL and perplexity of the scheme and of the advised one, through the real cache on whole windows

So there are two verdicts, on the layers and on the whole cache, and a scheme passes only if both pass
(`Screen.verdict`). A layer whose attention is lost shows it at once. A text of some hundred tokens often does not show
it, because its newest tokens are raw and other layers make up for it.

A remedy is a value of the scheme: per-channel or centred keys, other group sizes, INT8 keys with the values as they
are, raw sinks, raw layers.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import schemes as presets
from ..cache.explain import ranges
from ..errors import KvbitsError, KvbitsWarning, SpecError, UnsupportedError, counted
from ..integrations.models import scheme_for
from ..model_ref import ModelRef
from ..progress import bar
from ..spec import CacheSpec, LayerGeometry, LayerGroup, Override, PerChannel, PerGroup, QuantSpec, Scheme
from ..units import human_seconds, written_tokens
from .attention import QUERIES, LayerInputs, measure, observe, statistics
from .caches import CacheFactory, base_factory, factory
from .fidelity import DECODING_CHUNK, KL_QUANTILES, Fidelity, compare, read_raw, seconds_per_token
from .settings import Limits

KEY_OFFSET = 30.0
"""A constant offset of a key channel this many times the median channel's spread: a group that holds it has no code
left for the others.
"""
SINK_SHARE = 0.25
SHORTEST = 512
"""Tokens of a window, unless a scheme shows nothing of its codes there."""
LONGEST = 1 << 17
"""Tokens up to which windows are looked for that show codes."""
LONG = 4096
"""Tokens of the windows that a verdict on mostly raw ones leads to."""
MOSTLY_RAW = 0.5
"""Share of what was read in 16 bits from which on a verdict says that longer texts cost more."""


@dataclass(frozen=True)
class LayerVerdict:
    """One layer: what failed (empty if it passes), measures, statistics, and the remedy that passed on it."""

    layer: int
    failures: list[str]
    causes: list[str]
    measures: dict[str, float]
    statistics: dict[str, float]
    remedy: str | None = None


@dataclass(frozen=True)
class Screen:
    """The result of a check.

    Attributes:
        overall, advised_overall: the whole cache of the scheme, and of the advised one, beside the 16-bit cache.
        failures: what of `overall` passes its limit.
        further: tokens of windows that show more, where most of what these read was still in 16 bits and the model
            reads longer ones; else None.
    """

    scheme: Scheme
    layers: list[LayerVerdict]
    overall: dict[str, Any]
    advised: Scheme | None
    advised_overall: dict[str, Any] | None
    advice: list[str]
    failures: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    further: int | None = None

    @property
    def failed_layers(self) -> list[int]:
        return [v.layer for v in self.layers if v.failures]

    @property
    def passed(self) -> bool:
        return not self.failures and not self.failed_layers

    @property
    def advised_passed(self) -> bool:
        """Verdict on the advised scheme for the same inputs. It is True if every layer that failed has a remedy and the
        whole cache stays inside the limits.
        """
        overall = self.advised_overall
        return (
            overall is not None
            and all(v.remedy for v in self.layers if v.failures)
            and not _overall_failures(overall, self.limits)
        )

    @property
    def verdict(self) -> str:
        """Explanation, in words, of how the verdicts on the layers and on the whole cache make one."""
        if self.passed:
            return f"every layer passes, and so does the whole cache{self._look_further}"
        if not self.failures:
            return (
                "the whole cache stays inside its limits on this text, but every layer must pass too: a layer's"
                f" attention is lost before a short text, most of it still raw, shows it{self._look_further}"
            )
        layers = ", and so must every layer" if self.failed_layers else "; the layers do"
        return f"the whole cache must pass, and it does not ({'; '.join(self.failures)}){layers}"

    @property
    def _look_further(self) -> str:
        """The end of a verdict on windows that were mostly read in 16 bits; empty for others."""
        raw = self.overall["read_raw"]
        if raw <= MOSTLY_RAW:
            return ""
        said = f"; but {raw:.0%} of what these windows read was still in 16 bits, so long texts cost more"
        if self.further is None:
            return f"{said}, and the model reads no longer ones"
        return f"{said}: `kvbits check .. --length {written_tokens(self.further)}` looks further"

    def to_dict(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme.name,
            "passed": self.passed,
            "verdict": self.verdict,
            "failed_layers": self.failed_layers,
            "failures": self.failures,
            "further": self.further,
            "limits": dataclasses.asdict(self.limits),
            "overall": self.overall,
            "advice": self.advice,
            "advised_scheme": None if self.advised is None else self.advised.to_json(),
            "advised_overall": self.advised_overall,
            "advised_passed": self.advised_passed,
            "layers": [dataclasses.asdict(v) for v in self.layers],
        }


def check(
    model: Any,
    ids: torch.Tensor,
    scheme: str | Scheme,
    *,
    limits: Limits | None = None,
    chunk: int = DECODING_CHUNK,
    calibration: Any = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Screen:
    """Screen a scheme on a loaded model.

    Args:
        ids: int64 [windows, tokens] of text; the first window is observed, all of them confirm.
        scheme: preset name or a `Scheme`.
        calibration: gives the calibration of schemes that need one.
        say: told how long the whole takes, once the first steps were measured.

    Raises:
        SpecError: unknown scheme, one that does not fit, or windows so short that it stores nothing in few bits
            (`require_length`).
        UnsupportedError: a model whose attention cannot be observed.
    """
    limits = Limits() if limits is None else limits
    ref = ModelRef.of(model)
    layers, chosen = ref.layers, scheme_for(ref, scheme)
    require_length(chosen, layers, ids.shape[1])
    tried = factory(model, chosen, calibration=calibration)
    with bar(f"looking into {counted(len(layers), 'layer')}", 4, enabled=progress, even=False) as advance:
        inputs = observe(model, ids[0])
        facts = statistics(inputs)
        advance(1)
        say(_estimate(model, ids, chunk))
        judged = _judge(inputs, tried, limits, facts)
        advance(1)
        advised, notes = _advise(model, inputs, chosen, judged, limits)
        advance(2)
    with warnings.catch_warnings():
        # of the given scheme it was said; what is advised is measured
        warnings.simplefilter("ignore", KvbitsWarning)
        factories = [tried, *([factory(model, advised, calibration=calibration)] if advised is not None else [])]
        with bar(f"confirming {chosen.name}", ids.numel() - len(ids), enabled=progress) as advance:
            overall = _confirm(model, ids, factories, chunk, advance)
    failures = _overall_failures(overall[0], limits)
    if advised is None and failures and not notes:
        notes = [
            f"every layer passes alone, but together they cost {'; '.join(failures)}: take a scheme of more bits, or a"
            " longer residual_length"
        ]
    return Screen(
        chosen,
        judged,
        overall[0],
        advised,
        overall[1] if advised is not None else None,
        notes,
        failures,
        limits,
        look_further(ref, chosen, ids.shape[1], chunk),
    )


def _estimate(model: Any, ids: torch.Tensor, chunk: int) -> str:
    """Return how long confirming takes, from what the model's own cache takes for the first steps of a window.

    The first step warms up and is not timed.
    """
    count, length = ids.shape
    seconds = seconds_per_token(model, base_factory(model).make(1, length), ids[0], chunk)
    return (
        f"about {human_seconds(2 * count * length * seconds)}: two caches read {counted(count, 'window')} of"
        f" {length:,} tokens in steps of {chunk}, at {seconds * chunk:.2f} s a step; half as long again where layers"
        " fail and a remedy is measured"
    )


def look_further(model: ModelRef, scheme: Scheme, length: int, chunk: int) -> int | None:
    """Return the tokens of windows that show more of a scheme, or None where these read little in 16 bits.

    Args:
        length: tokens of the windows that were screened.

    Returns:
        `LONG`, or as many more as it takes to read less than `MOSTLY_RAW` in 16 bits; fewer where the model has fewer
        positions. None if that is not longer than `length`.
    """
    spec = CacheSpec(scheme=scheme, layers=model.layers)
    if read_raw(spec, length, chunk=chunk) <= MOSTLY_RAW:
        return None
    wanted = next((n for n in (LONG, 2 * LONG, 4 * LONG) if read_raw(spec, n, chunk=chunk) <= MOSTLY_RAW), 4 * LONG)
    wanted = min(wanted, model.max_context or wanted)
    return wanted if wanted > length else None


def usual_length(scheme: Scheme, layers: tuple[LayerGeometry, ...]) -> int:
    """Return how many tokens a window has unless told otherwise: `SHORTEST`, or twice as many as show codes of a scheme
    that reads all of those raw or from finer copies.
    """
    groups = _packed(scheme, layers)
    if _shown(groups, SHORTEST):
        return SHORTEST
    return 2 * next((n for n in range(SHORTEST, LONGEST, QUERIES) if _shown(groups, n)), LONGEST)


def require_length(scheme: Scheme, layers: tuple[LayerGeometry, ...], length: int) -> None:
    """Refuse windows so short that a scheme stores nothing of them in few bits before the queries that look at it.

    Raises:
        SpecError: naming a length that does.
    """
    if _shown(_packed(scheme, layers), length):
        return
    raise SpecError(
        f"scheme {scheme.name!r} keeps its newest {scheme.residual_length:,} tokens raw and an unfinished page"
        f"{_read_finer(scheme)}, and the newest {QUERIES} of a window look at what is before them: windows of"
        f" {length:,} tokens show nothing of its codes; give longer ones, --length {usual_length(scheme, layers)} for"
        " example"
    )


def _packed(scheme: Scheme, layers: tuple[LayerGeometry, ...]) -> list[LayerGroup]:
    groups = CacheSpec(scheme=scheme, layers=layers).groups
    return [g for g in groups if not (g.key.is_raw and g.value.is_raw)]


def _shown(packed: list[LayerGroup], length: int) -> bool:
    """Return whether the newest queries of a window look at codes of these groups, or there are no codes."""
    history = length - QUERIES
    return history >= 1 and (not packed or any(g.token_local or _shows_codes(g, history) for g in packed))


def _shows_codes(group: LayerGroup, num_tokens: int) -> bool:
    """Return whether some of so many tokens are read from the scheme's own codes, and not from finer copies."""
    return group.pages_for(num_tokens)["closed"] > max(group.copied_pages, default=0)


def _read_finer(scheme: Scheme) -> str:
    copied = sum(c.num_tokens for c in scheme.copies)
    return f", it reads {copied:,} before them from finer copies" if copied else ""


# -- judging --------------------------------------------------------------------------------------------------------


def _means(layer: dict[str, Any]) -> dict[str, float]:
    found = {m: math.fsum(layer[m]) / len(layer[m]) for m in ("logit_cosine", "tvd", "output_error")}
    for side in ("key_bits", "value_bits"):
        known = [b for b in layer[side] if b is not None]
        if known:
            found[side] = min(known)
    return found | {
        "saturated": float(sum(layer["saturated"].values())),
        "clipped": float(sum(layer["clipped_keys"]) + sum(layer["clipped_values"])),
    }


def _failures(m: dict[str, float], limits: Limits, elements: int) -> list[str]:
    found = []
    if not m["logit_cosine"] >= limits.logit_cosine:
        found.append(f"logit cosine {m['logit_cosine']:.3f} < {limits.logit_cosine}")
    for name, what in (("tvd", "attention moved"), ("output_error", "output error")):
        if not m[name] <= getattr(limits, name):
            found.append(f"{what} {m[name]:.3f} > {getattr(limits, name)}")
    if m["saturated"] > limits.saturated * elements:
        found.append(f"{m['saturated'] / elements:.1%} of elements saturated > {limits.saturated:.1%}")
    return found


def _judge(
    inputs: list[LayerInputs], tried: CacheFactory, limits: Limits, facts: list[dict[str, float]]
) -> list[LayerVerdict]:
    found = []
    for i, layer in enumerate(measure(inputs, tried.make(1, len(inputs[0].k)))):
        m = _means(layer)
        failures = _failures(m, limits, _elements(inputs[i]))
        found.append(LayerVerdict(i, failures, _causes(facts[i]) if failures else [], m, facts[i]))
    return found


def _elements(inputs: LayerInputs) -> int:
    """Count the numbers of keys and values of a layer."""
    return inputs.k.numel() + inputs.v.numel()


def _causes(facts: dict[str, float]) -> list[str]:
    found = []
    if facts["key_offset"] > KEY_OFFSET:
        found.append(f"key bias: a channel's constant offset is {facts['key_offset']:.0f} times the usual spread")
    if facts["outlier_channels"]:
        found.append(f"{facts['outlier_channels']:.0f} outlier channels in the keys (largest {facts['key_max']:.0f})")
    if facts["sink_attention"] > SINK_SHARE:
        found.append(f"{facts['sink_attention']:.0%} of the attention goes to the first tokens")
    return found


# -- advising -------------------------------------------------------------------------------------------------------


def remedies(key: QuantSpec, value: QuantSpec) -> list[tuple[str, QuantSpec, QuantSpec]]:
    """Return (what to do, key spec, value spec) to try for a layer stored as `key` and `value`, raw last."""
    found: list[tuple[str, QuantSpec, QuantSpec]] = []

    def add(text: str, make: Callable[[], tuple[QuantSpec, QuantSpec]]) -> None:
        try:
            k, v = make()
        except SpecError:
            return  # this combination cannot be
        if (k, v) != (key, value):
            found.append((text, k, v))

    if not key.is_raw and key.number_format.kind == "int":
        plain = QuantSpec(format=key.format, granularity=key.granularity, scale_dtype=key.scale_dtype)
        add(
            "centred keys (center='channel')",
            lambda: (dataclasses.replace(plain, center="channel", symmetric=False), value),
        )
        add(
            "per-channel keys (PerChannel(), symmetric=False)",
            lambda: (dataclasses.replace(plain, granularity=PerChannel(), symmetric=False), value),
        )
        if isinstance(key.granularity, PerGroup):
            for size in (key.granularity.size // 2, key.granularity.size * 2):
                add(
                    f"groups of {size} in the keys",
                    lambda size=size: (dataclasses.replace(plain, granularity=PerGroup(size)), value),  # type: ignore[misc]
                )
        if key.bits < 8:
            eight = QuantSpec(format="int8", granularity=PerChannel(), symmetric=False)
            add(f"INT8 keys with the {value.format} values", lambda: (dataclasses.replace(plain, format="int8"), value))
            add(f"INT8 per-channel keys with the {value.format} values", lambda: (eight, value))
        if not value.is_raw and value.bits < 8:
            better = QuantSpec(format="int8", granularity=PerChannel(), symmetric=False)
            add(
                "INT8 per-channel keys and INT8 values",
                lambda: (better, QuantSpec(format="int8", granularity=value.granularity)),
            )
    found.append(("keep raw", QuantSpec.raw(), QuantSpec.raw()))
    return found


def _advise(
    model: Any, inputs: list[LayerInputs], scheme: Scheme, judged: list[LayerVerdict], limits: Limits
) -> tuple[Scheme | None, list[str]]:
    """Return (a scheme that passes on the observed inputs or None, sentences). Fills in each failed layer's remedy."""
    failed = [v.layer for v in judged if v.failures]
    if not failed:
        return None, []
    chosen: dict[int, tuple[float, str, QuantSpec, QuantSpec]] = {}
    whole = len(failed) > len(judged) // 2
    key, value = scheme.for_layer(failed[0], len(judged))
    any_tried = False
    for text, k, v in remedies(key, value):
        try:
            trial = dataclasses.replace(
                scheme, overrides=(*scheme.overrides, Override(layers=tuple(failed), key=k, value=v))
            )
            tried = factory(model, trial)
            measured = measure(inputs, tried.make(1, len(inputs[0].k)))
        except (SpecError, UnsupportedError):
            continue  # a remedy that does not fit this model's heads, or needs a calibration of its own
        any_tried = True
        bits = dataclasses.replace(scheme, key=k, value=v, overrides=()).bits_per_element(inputs[0].k.shape[-1])
        for layer in failed:
            m = _means(measured[layer])
            if not _failures(m, limits, _elements(inputs[layer])) and (layer not in chosen or bits < chosen[layer][0]):
                chosen[layer] = (bits, text, k, v)
    overrides = []
    notes = []
    for text in dict.fromkeys(c[1] for c in chosen.values()):
        layers = tuple(sorted(i for i, c in chosen.items() if c[1] == text))
        bits, _, k, v = chosen[layers[0]]
        overrides.append(Override(layers=layers, key=k, value=v))
        where = (
            "every layer" if len(layers) == len(judged) else f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"
        )
        notes.append(f"{where}: {text}, {bits:.2f} bits there")
    for layer in failed:
        judged[layer] = dataclasses.replace(judged[layer], remedy=chosen[layer][1] if layer in chosen else None)
    if hopeless := [layer for layer in failed if layer not in chosen]:
        why = (
            "none of the remedies tried passes, not even raw"
            if any_tried
            else "no remedy was tried, each needs a calibration of its own; take more bits"
        )
        notes.append(f"layer{'s' if len(hopeless) > 1 else ''} {ranges(hopeless)}: {why}")
    if whole:
        alike = [
            s
            for s in presets.PRESETS.values()
            if not s.needs_calibration and not s.key.is_raw and s.key.bits == scheme.key.bits
        ]
        better = [s.name for s in alike if s.name != scheme.name]
        notes.append(
            f"{len(failed)} of {len(judged)} layers fail: rather take another scheme of as many bits, such as"
            f" {', '.join(better) or 'one of 8 bits'}"
        )
    if any(judged[i].statistics["sink_attention"] > SINK_SHARE for i in failed) and not scheme.num_sink_tokens:
        notes.append("much attention goes to the first tokens: num_sink_tokens=4 would keep them raw (not tried here)")
    return (
        dataclasses.replace(scheme, name=f"{scheme.name}+advice", overrides=(*scheme.overrides, *overrides))
        if overrides
        else None
    ), notes


# -- confirming -----------------------------------------------------------------------------------------------------


def _confirm(
    model: Any, ids: torch.Tensor, factories: list[CacheFactory], chunk: int, advance: Callable[[float], None]
) -> list[dict[str, Any]]:
    base = base_factory(model)
    sums: dict[str, Fidelity] | None = None
    shares: dict[str, float] = {}
    for window in ids:
        caches = {f.name: f.make(1, len(window)) for f in (base, *factories)}
        shares = shares or {f.name: read_raw(caches[f.name].pages.spec, len(window), chunk=chunk) for f in factories}
        sums = compare(model, caches, window, chunk=chunk, results=sums, on_tokens=advance)
    if sums is None:
        raise KvbitsError("no window to confirm on")
    reference = sums[base.name].perplexity
    return [
        {
            "ppl": sums[f.name].perplexity,
            "ppl_base": reference,
            "ppl_change": sums[f.name].perplexity / reference - 1,
            "kl_mean": sums[f.name].kl_mean,
            **{name: sums[f.name].kl_quantile(q) for name, q in KL_QUANTILES.items()},
            "kl_max": sums[f.name].kl_max,
            "kl_worst": sums[f.name].kl_worst,
            "kl_lost": sums[f.name].num_lost / sums[f.name].num_tokens,
            "top1_agreement": sums[f.name].top1_agreement,
            "dp_rms": sums[f.name].dp_rms,
            "mass_matched": 1 - sums[f.name].tvd_mean,
            "tokens": sums[f.name].num_tokens,
            "read_raw": shares[f.name],
            "bits_per_element": f.info["bits_per_element"],
        }
        for f in factories
    ]


def _overall_failures(overall: dict[str, Any], limits: Limits) -> list[str]:
    found = []
    if not overall["kl_mean"] <= limits.kl:
        found.append(f"KL {overall['kl_mean']:.4f} > {limits.kl} nats")
    if not overall["ppl_change"] <= limits.ppl_change:
        found.append(f"perplexity {overall['ppl_change']:+.1%} > {limits.ppl_change:.0%}")
    return found
