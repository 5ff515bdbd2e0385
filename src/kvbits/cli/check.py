"""`kvbits check`: does a scheme suit a model, layer by layer, and what would."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .. import RECOMMENDED
from ..errors import SpecError
from ..evaluate.settings import Limits
from ..settings import setting
from .common import InDtype, command, new_table, one_scheme, print_json
from .output import show, tell

if TYPE_CHECKING:
    from rich.table import Table

    from ..evaluate.check import Screen
    from ..model_ref import ModelRef
    from ..spec import QuantSpec, Scheme


@dataclass(frozen=True, kw_only=True)
class Checked(InDtype):
    """Options of `kvbits check`: what is screened."""

    scheme: str = setting(RECOMMENDED, "The scheme to check: a preset, or a file of your own (.json).")
    text: str = setting("novel", "Text like what the model will read: a file, hub:ID, or the shipped novel or code.")
    calibration: Path | None = setting(
        None, "File of `kvbits calibrate`, for schemes that need one. --text must be a text that it was not made on."
    )
    calibration_text: str | None = setting(
        None,
        "Text to calibrate on first, instead of --calibration.",
        shown="klt: the calibration in the cache folder; else the novel's end",
    )
    windows: int = setting(2, "Number of windows to measure; the first is also measured layer by layer.", least=1)
    length: int | None = setting(
        None,
        "Tokens of a window; 1k is 1,024. Longer ones read less of their history in 16 bits.",
        tokens=2,
        shown="512; more where a scheme reads all of those raw or from finer copies",
    )
    limits: Limits = field(default_factory=Limits)


@command("check")
def check(options: Checked) -> None:
    """Check in minutes that a scheme suits a model: pass or fail per layer and for the whole cache, with remedies.

    The command prints how long it takes after the first steps. It exits with code 1 if a layer or the whole cache
    fails.

    It measures each remedy on the layers that failed, and the advised scheme in the real cache beside the given one.
    """
    ref = options.ref
    from .. import runs, schemes
    from ..evaluate.texts import read_text

    chosen = schemes.find(one_scheme(options.scheme))  # refuses an unknown one before the model loads
    if options.calibration is not None and options.calibration_text is not None:
        raise SpecError(
            f"--calibration {options.calibration} and --calibration-text {options.calibration_text} exclude each other;"
            " give one"
        )
    source = read_text(options.text)
    to_calibrate = None if options.calibration_text is None else read_text(options.calibration_text)
    options.require_place()
    from ..calibrate import Calibration
    from ..evaluate.calibrator import Calibrator, chosen_for
    from ..evaluate.check import check as screen
    from ..evaluate.check import require_length, usual_length
    from ..evaluate.texts import windows
    from ..integrations.models import load_tokenizer

    scheme = schemes.for_layers(chosen, ref.layers)
    length = usual_length(scheme, ref.layers) if options.length is None else options.length
    require_length(scheme, ref.layers, length)
    given = [] if options.calibration is None else [Calibration.load(options.calibration)]
    for one in given:
        one.fitted(ref.config, scheme)
    (source,), given = chosen_for(ref, [scheme], (source,), given, to_calibrate, say=tell)
    ids = windows(load_tokenizer(ref), source, count=options.windows, length=length, limit=ref.max_context)
    lm, tokenizer = options.load()
    calibrator = Calibrator(lm, tokenizer, to_calibrate, tests=(source,), given=given, say=tell)
    found = screen(lm, ids, chosen, limits=options.limits, calibration=calibrator, say=tell)
    asked = f"--text {source.name} --windows {options.windows} --length {length}"
    _keep(found, ref, chosen, asked)
    if options.as_json:
        print_json({"run": runs.record(), "model": options.model, "text": source.name} | found.to_dict())
    else:
        _print(found, options.model)
    if not found.passed:
        raise typer.Exit(1)


def _keep(found: Screen, model: ModelRef, chosen: str | Scheme, asked: str) -> None:
    """Keep what engines report of a preset when they start, if the usual limits judged the preset."""
    from ..calibrate import checked

    if isinstance(chosen, str) and found.limits == Limits():
        checked.keep(
            model,
            chosen,
            checked.Checked(
                passed=found.passed,
                kl=found.overall["kl_mean"],
                tokens=found.overall["tokens"],
                day=f"{datetime.now(timezone.utc):%Y-%m-%d}",
                command=f"kvbits check {model} --scheme {chosen} {asked}",
            ),
        )


def _print(found: Screen, model: str) -> None:
    limits = found.limits
    measured = (
        f"logit cosine\n>= {limits.logit_cosine:g}",
        f"attention moved\n<= {limits.tvd:g}",
        f"output error\n<= {limits.output_error:g}",
    )
    table = new_table(
        f"{model}, {found.scheme.name}", "layer", "verdict", *measured, "key bits\nleft", "value bits\nleft", "why"
    )
    table.columns[1].justify = table.columns[7].justify = "left"
    for v in found.layers:
        m = v.measures
        table.add_row(
            str(v.layer),
            _word(not v.failures),
            f"{m['logit_cosine']:.4f}",
            f"{m['tvd']:.3f}",
            f"{m['output_error']:.3f}",
            *(f"{m[k]:.1f}" if k in m else "" for k in ("key_bits", "value_bits")),
            "; ".join([*v.failures, *v.causes]),
        )
    show(table, _LEGEND.format(bits=found.overall["bits_per_element"]), "", _summary(found))


_LEGEND = (
    "Each row compares attention of the newest tokens over the scheme's pages with attention over 16 bits, as the mean"
    " over kv heads. Attention moved is the share that goes to other tokens.\nBits left are 1/2 log2(variance / squared"
    " error) in the worst kv head, and 0 if the error is as large as the variance. They have no limit. The scheme"
    " stores {bits:.2f} bits."
)


def _summary(found: Screen) -> Table:
    """Return a table of what passed, what did not, which of it counts, and what to change."""
    from rich.table import Table

    from ..cache.explain import ranges

    failed = found.failed_layers
    lines = Table.grid(padding=(0, 2))
    count = (
        f"{len(failed)} of {len(found.layers)} fail: {ranges(failed)}" if failed else f"all {len(found.layers)} pass"
    )
    lines.add_row("layers", _word(not failed), count)
    lines.add_row("whole cache", _word(not found.failures), _line(found.overall, found.limits))
    lines.add_row("verdict", _word(found.passed), f"exit code {0 if found.passed else 1}: {found.verdict}")
    for i, advice in enumerate(found.advice):
        lines.add_row("" if i else "what to change", "", advice)
    if found.advised is not None and found.advised_overall is not None and found.advised.overrides:
        lines.add_row(
            "then", _word(found.advised_passed), f"{found.advised.name}: {_line(found.advised_overall, found.limits)}"
        )
        lines.add_row("as code", "", _code(found.advised, found.scheme.name))
    return lines


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def _line(o: dict[str, Any], limits: Limits) -> str:
    window, position = o["kl_worst"]
    return (
        f"KL {o['kl_mean']:.5f} nats (at most {limits.kl:g}), median {o['kl_median']:.5f}, 99.9th percentile"
        f" {o['kl_p999']:.3f}, worst {o['kl_max']:.3f} at token {position:,} of window"
        f" {window}, {o['kl_lost']:.2%} of tokens above 1; perplexity {o['ppl']:.3f}, {o['ppl_change']:+.2%} (at most"
        f" {limits.ppl_change:+.2%}); top-1 {o['top1_agreement']:.1%}, RMS change of the next token's probability"
        f" {o['dp_rms']:.2%}, probability mass matched"
        f" {o['mass_matched']:.2%}, {o['bits_per_element']:.2f} bits; {o['tokens']:,} tokens, which read"
        f" {o['read_raw']:.0%} of their history in 16 bits"
    )


def _code(advised: Scheme, preset: str) -> str:
    """Return the constructor call of the advised scheme, defaults left out."""
    from .. import schemes

    given = schemes.get(preset)
    fitted = (
        []
        if (given.key, given.value) == (advised.key, advised.value)
        else [f"key={_spec(advised.key)}", f"value={_spec(advised.value)}"]
    )
    overrides = "".join(
        f"Override(layers={o.layers}, key={_spec(o.key)}, value={_spec(o.value)}), " for o in advised.overrides
    )
    return f"schemes.get({', '.join([repr(preset), *fitted, f'overrides=({overrides.rstrip()})'])})"


def _spec(spec: QuantSpec) -> str:
    if spec.is_raw:
        return "QuantSpec.raw()"
    changed = [f for f in dataclasses.fields(spec) if f.name == "format" or getattr(spec, f.name) != f.default]
    return f"QuantSpec({', '.join(f'{f.name}={getattr(spec, f.name)!r}' for f in changed)})"
