"""`kvbits check`: does a scheme suit a model, layer by layer, and what would."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Json, Threads, app, new_table, print_json, set_threads, show

if TYPE_CHECKING:
    from ..evaluate.check import Screen


@app.command("check")
def check(
    model: Annotated[str, typer.Argument(help="Local directory, GGUF file or hub id.")],
    scheme: Annotated[str, typer.Option(help="The scheme to screen.")] = "int4",
    text: Annotated[str, typer.Option(help="Text like what the model will read: a file, hub:ID, or novel (shipped).")] = "novel",
    calibration_text: Annotated[str | None, typer.Option(help="For schemes that need it.", show_default="end of the novel")] = None,
    windows: Annotated[int, typer.Option(help="Windows that confirm; the first is looked into layer by layer.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    max_kl: Annotated[float, typer.Option(help="Largest KL divergence that passes, nats.")] = 0.05,
    max_ppl_change: Annotated[float, typer.Option(help="Largest rise of perplexity that passes; 0.02 is 2 %.")] = 0.02,
    dtype: Annotated[str, typer.Option(help="Dtype of the model.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device to run on, like cuda; the CPU if not given.", show_default=False)] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """A two-minute screen: pass or fail per layer, why, and what to change. Exit code 1 if the scheme fails.

    Advice is measured: every remedy is tried on the layers that failed, and the advised scheme goes through the real cache beside the given one.
    """
    from ..evaluate.check import Limits
    from ..evaluate.check import check as screen
    from ..evaluate.texts import novel_end, read_text
    from ..evaluate.texts import windows as cut

    source = read_text(text)
    calibration = novel_end() if calibration_text is None else read_text(calibration_text)
    set_threads(threads)
    from ..evaluate.run import Calibrator
    from ..integrations.models import load_model

    lm, tokenizer = load_model(model, dtype=dtype, device=device)
    ids = cut(tokenizer, source, count=windows, length=length)
    with tempfile.TemporaryDirectory(prefix="kvbits-") as folder:
        calibrator = Calibrator(lm, tokenizer, Path(folder), calibration, (source,))
        found = screen(lm, ids, scheme, limits=Limits(kl=max_kl, ppl_change=max_ppl_change), calibration=calibrator)
    if as_json:
        print_json({"model": model, "text": source.name} | found.to_dict())
    else:
        _print(found, model)
    if not found.passed:
        raise typer.Exit(1)


def _print(found: Screen, model: str) -> None:
    table = new_table(f"{model}, {found.scheme.name}", "layer", "verdict", "logit cosine", "attention moved", "output error", "key bits", "value bits", "why")
    table.columns[1].justify = table.columns[7].justify = "left"
    for v in found.layers:
        m = v.measures
        table.add_row(
            str(v.layer), "FAIL" if v.failures else "pass", f"{m['logit_cosine']:.4f}", f"{m['tvd']:.3f}", f"{m['output_error']:.3f}",
            *(f"{m[k]:.1f}" if k in m else "" for k in ("key_bits", "value_bits")), "; ".join([*v.failures, *v.causes]),
        )  # fmt: skip
    lines = [_line(found.scheme.name, found.overall)]
    if found.advised is not None and found.advised_overall is not None:
        lines.append(_line(found.advised.name, found.advised_overall))
    verdict = f"{found.scheme.name}: {'pass' if found.passed else 'FAIL'}" + "".join(f"; {f}" for f in found.failures)
    show(table, *lines, verdict, *(f"advice: {a}" for a in found.advice))


def _line(name: str, o: dict[str, Any]) -> str:
    return (
        f"{name}: {o['bits_per_element']:.2f} bits, perplexity {o['ppl']:.3f} ({o['ppl_change']:+.2%}), KL {o['kl_mean']:.5f} nats, "
        f"top-1 {o['top1_agreement']:.1%}, probability mass matched {o['mass_matched']:.2%}, {o['tokens']:,} tokens"
    )
