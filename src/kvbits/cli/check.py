"""`kvbits check`: does a scheme suit a model, layer by layer, and what would."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import RECOMMENDED
from ..errors import SpecError
from ..evaluate import MAX_KL, MAX_PPL_CHANGE
from ..units import dtype_name
from .common import (
    Device,
    Dtype,
    Json,
    Loading,
    Model,
    Threads,
    command,
    new_table,
    one_scheme,
    print_json,
    read_config,
    require_model,
    set_threads,
    tokens,
)
from .output import show, tell

if TYPE_CHECKING:
    from rich.table import Table

    from ..evaluate.check import Limits, Screen
    from ..evaluate.texts import Text
    from ..model_ref import ModelRef
    from ..spec import QuantSpec, Scheme


@command("check")
def check(
    model: Model,
    scheme: Annotated[
        str, typer.Option(help="The one scheme to screen: a preset, or a file of your own (.json).")
    ] = RECOMMENDED,
    text: Annotated[
        str, typer.Option(help="Text like what the model will read: a file, hub:ID, or novel (shipped).")
    ] = "novel",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File of `kvbits calibrate`, for schemes that need one; with a --text that it was not made on.",
            show_default=False,
        ),
    ] = None,
    calibration_text: Annotated[
        str | None,
        typer.Option(
            help="Without such a file: calibrate on this text first.",
            show_default="klt: what is kept of the model, made once; else the novel's end",
        ),
    ] = None,
    windows: Annotated[
        int, typer.Option(help="Windows that confirm; the first is looked into layer by layer.", min=1)
    ] = 2,
    length: Annotated[
        int,
        typer.Option(
            help="Tokens of a window; 1k is 1,024. Longer ones read less of their history in 16 bits.", parser=tokens(2)
        ),
    ] = 512,
    max_kl: Annotated[float, typer.Option(help="Largest KL divergence that passes, nats.")] = MAX_KL,
    max_ppl_change: Annotated[
        float, typer.Option(help="Largest rise of perplexity that passes; 0.02 is 2 %.")
    ] = MAX_PPL_CHANGE,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """A screen of minutes: pass or fail per layer and for the whole cache, why, and what to change.

    It says how long it takes once it has measured the first steps. Exit code 1 if a layer or the whole fails.

    Advice is measured: every remedy is tried on the layers that failed, and the advised scheme goes through the real
    cache beside the given one.
    """
    ref = require_model(model)
    from .. import runs, schemes

    chosen = schemes.find(one_scheme(scheme))  # refuses an unknown one before the model loads
    if calibration is not None and calibration_text is not None:
        raise SpecError(
            f"--calibration {calibration} and --calibration-text {calibration_text} exclude each other; give one"
        )
    from ..evaluate.check import Limits
    from ..evaluate.texts import read_text

    limits = Limits(kl=max_kl, ppl_change=max_ppl_change)
    source = read_text(text)
    to_calibrate = None if calibration_text is None else read_text(calibration_text)
    set_threads(threads)
    loading = Loading(ref, dtype_name(dtype), device)
    found = _screen(loading, chosen, limits, source, (windows, length), calibration or to_calibrate)
    _keep(found, ref, chosen, f"--text {source.name} --windows {windows} --length {length}")
    if as_json:
        print_json({"run": runs.record(), "model": model, "text": source.name} | found.to_dict())
    else:
        _print(found, model)
    if not found.passed:
        raise typer.Exit(1)


def _screen(
    loading: Loading,
    scheme: str | Scheme,
    limits: Limits,
    source: Text,
    size: tuple[int, int],
    calibration: Path | Text | None,
) -> Screen:
    """Everything is looked at that the configuration and the tokenizer tell; then the model is loaded.

    Args:
        size: windows and their tokens.
        calibration: a file, or a text to calibrate on where the scheme needs that; None for what is kept of the model
            where the text allows it, else the novel's end.
    """
    model, (count, length) = loading.model, size
    from .. import schemes
    from ..calibrate import Calibration
    from ..evaluate.calibrator import Calibrator, beside, kept_of, origin, require_other_text
    from ..evaluate.check import check, require_length
    from ..evaluate.texts import novel_end, windows
    from ..integrations.models import load_tokenizer

    config = read_config(model)
    chosen = schemes.for_layers(scheme, model.layers)
    require_length(chosen, model.layers, length)
    given = None if not isinstance(calibration, Path) else Calibration.load(calibration)
    (source,) = beside((source,), [] if given is None else [given], chosen.needs_calibration and calibration is None)
    if given is not None:
        given = given.fitted(config, chosen)
        require_other_text([given], (source,))
    ids = windows(load_tokenizer(model), source, count=count, length=length, limit=model.max_context)
    lm, tokenizer = loading.load()
    if calibration is None and chosen.needs_calibration:
        given, why = kept_of(lm, [chosen], (source,))
        tell(
            f"note: {chosen.name} is calibrated for this command alone, on novel-end: {why}"
            if given is None
            else f"note: {chosen.name}: {origin(given)}"
        )
    make: Any = (
        Calibrator(lm, tokenizer, novel_end() if calibration is None else calibration, tests=(source,))
        if given is None and not isinstance(calibration, Path)
        else lambda _: given
    )
    return check(lm, ids, scheme, limits=limits, calibration=make, say=tell)


def _keep(found: Screen, model: ModelRef, chosen: str | Scheme, asked: str) -> None:
    """What engines say of a preset when they start, if it was judged by the usual limits."""
    from ..calibrate import checked
    from ..evaluate.check import Limits

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
    "Attention of the newest tokens over the scheme's pages beside the same over 16 bits, mean over kv heads; attention"
    " moved: the share that goes elsewhere.\nBits left: how many bits of the numbers survive in the worst kv head, 1/2"
    " log2(variance / squared error), 0 where the error is as large as what varies. They have no limit; what is stored"
    " is {bits:.2f} bits."
)


def _summary(found: Screen) -> Table:
    """What passed, what did not, which of it counts, and what to change."""
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
        f"KL {o['kl_mean']:.5f} nats (at most {limits.kl:g}), worst {o['kl_max']:.3f} at token {position:,} of window"
        f" {window}, {o['kl_lost']:.2%} of tokens above 1; perplexity {o['ppl']:.3f}, {o['ppl_change']:+.2%} (at most"
        f" {limits.ppl_change:+.2%}); top-1 {o['top1_agreement']:.1%}, probability mass matched"
        f" {o['mass_matched']:.2%}, {o['bits_per_element']:.2f} bits; {o['tokens']:,} tokens, which read"
        f" {o['read_raw']:.0%} of their history in 16 bits"
    )


def _code(advised: Scheme, preset: str) -> str:
    """The constructor call of the advised scheme, defaults left out."""
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
