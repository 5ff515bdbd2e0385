"""Formats by layer against uniform presets of equal bytes, on text unlike the one that they were fitted to.

    python benchmarks/study_fit.py MODEL --text wiki.test.raw --work DIR [--bits 8,6,4.5,3.5,3,2.5] [--calibrate]
    [--windows 2] [--schemes DIR] [--out FILE]

For each number of bits the budget is what a cache of --context tokens takes at so many bits per element, scales
included, plus the raw first and newest tokens of the fitted schemes. `kvbits fit` chooses on the novel that is shipped;
then its choice, the mildest one (`alike`: all layers taken for equally sensitive) and the presets that fit the budget
are measured as whole caches on windows of --text. Measurements are kept in --work: a run that stops goes on. --schemes
keeps the choice of each budget as a scheme file (fitted-3.5.json, its calibration beside it), for `kvbits eval MODEL
--schemes DIR/fitted-3.5.json --tasks gsm8k`.

The rows: bits, KL of the fitted choice before and after (predicted, measured on the novel, measured on --text), the
best preset of equal or fewer bytes on --text and the ratio of the two. `taken` says what `kvbits fit` would have
written: the fitted choice, or the preset that it could not beat. The last line is JSON.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from result_file import append, arguments

from kvbits import schemes
from kvbits.calibrate.sampling import Sample
from kvbits.errors import SpecError
from kvbits.evaluate.calibrator import Calibrator
from kvbits.evaluate.fit import PAGE, RESIDUAL, SINKS, Fit, Goal, bound_to, fit, widths, write
from kvbits.evaluate.sensitivity import SIDES, Bench, State, formats
from kvbits.evaluate.texts import novel_end, novel_start, read_text, windows
from kvbits.geometry import layer_geometries
from kvbits.integrations.identity import identity
from kvbits.integrations.models import load_model
from kvbits.spec import LayerGeometry


def budget(layers: tuple[LayerGeometry, ...], bits: float, context: int) -> int:
    """Bytes of a cache of so many bits per element, its first and newest tokens raw; layers with a window hold that and
    a page.
    """
    raw = SINKS + RESIDUAL + PAGE
    held = (min(context, context if g.sliding_window is None else g.sliding_window + PAGE) for g in layers)
    return sum(
        int(2 * g.num_kv_heads * g.head_dim * (bits / 8 * tokens + 2 * raw))
        for g, tokens in zip(layers, held, strict=True)
    )


def row(found: Fit, bits: float, held_out: Bench, formats_: str) -> dict[str, Any]:
    """What a budget gave, measured on the other text."""
    beside = [found.fitted.scheme, *([] if found.preset is None else [found.preset.scheme])]
    tried = [m.scheme for m in found.tried]
    kl = held_out.whole([*beside, tried[-1]], progress=True)
    preset = (
        None
        if found.preset is None
        else {"name": found.preset.scheme.name, "nbytes": found.preset.nbytes, "bits": found.preset.bits, "kl": kl[1]}
    )
    taken = kl[0] if found.gained or preset is None else kl[1]
    return {
        "bits": bits,
        "formats": formats_,
        "nbytes": found.fitted.nbytes,
        "fitted_bits": found.fitted.bits,
        "predicted": found.fitted.predicted,
        "kl_novel": found.fitted.kl,
        "kl": kl[0],
        "alike_kl": kl[-1],
        "preset": preset,
        "preset_kl_novel": None if found.preset is None else found.preset.kl,
        "taken": "fitted" if found.gained else found.preset and found.preset.scheme.name,
        "temperature": [m.kl for m in found.tried],
        "ratio": None if preset is None else taken / preset["kl"],
        "widths": {s: widths(found.fitted.scheme, len(found.goal.layers), s) for s in SIDES},
    }


def keep(found: Fit, bench: Bench, folder: Path, bits: float, model: str) -> None:
    """The fitted scheme as `kvbits fit` writes it, whether or not a preset is as good."""
    name = f"fitted-{bits:g}"
    weights = identity(bench.model)
    scheme = bound_to(
        found.fitted.scheme,
        found.goal.layers,
        name=name,
        weights=weights,
        model=model,
        description=f"fitted to {model} on the novel, {bits:g} bits",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(scheme, bench, folder / f"{name}.json")


def main() -> None:
    parser = arguments(__doc__, of_model=True)
    parser.add_argument("--text", required=True, help="held-out text")
    parser.add_argument("--work", type=Path, required=True, help="folder for measurements")
    parser.add_argument("--bits", default="8,6,4.5,3.5,3,2.5")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--windows", type=int, default=2, help="of 1,024 tokens, of the held-out text")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--schemes", type=Path, help="folder for the choices as scheme files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.process_time()
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    layers, kind, text = (
        layer_geometries(model.config),
        "calibrated" if args.calibrate else "plain",
        read_text(args.text),
    )
    args.work.mkdir(parents=True, exist_ok=True)
    bases = None
    if args.calibrate:
        calibrator = Calibrator(
            model, tokenizer, novel_start(), tests=(text,), sample=Sample(8, 1024), directory=args.work
        )
        bases = calibrator(schemes.for_layers("klt4", layers)).static
    probes, wholes = (
        windows(tokenizer, novel_start(), count=2, length=512),
        windows(tokenizer, novel_end(), count=2, length=1024),
    )
    other = windows(tokenizer, text, count=args.windows, length=1024)
    facts = {"weights": identity(model), "formats": kind}
    bench = Bench(model, probes, wholes, bases, State(args.work / f"{kind}.json", facts))
    held_out = Bench(
        model,
        probes,
        other,
        bases,
        State(args.work / f"{kind}-held-out.json", facts | {"text": text.sha256, "windows": list(other.shape)}),
    )
    rows = []
    for bits in map(float, args.bits.split(",")):
        goal = Goal(layers=layers, context=args.context, memory_bytes=budget(layers, bits, args.context))
        try:
            found = fit(bench, formats(layers, args.calibrate), goal, name="fitted")
        except SpecError as error:
            print(f"{bits} bits: {error}", flush=True)
            continue
        if args.schemes:
            keep(found, bench, args.schemes, bits, Path(args.model.rstrip("/")).name)
        rows.append(row(found, bits, held_out, kind))
        r = rows[-1]
        beside = (
            "no preset"
            if r["preset"] is None
            else f"{r['preset']['name']} {r['preset']['kl']:.5f}, ratio {r['ratio']:.2f}"
        )
        print(
            f"{bits} bits: predicted {r['predicted']:.5f}, novel {r['kl_novel']:.5f}, {text.name} {r['kl']:.5f}, alike"
            f" {r['alike_kl']:.5f}; {beside}; takes {r['taken']}; keys {r['widths']['key']}, values"
            f" {r['widths']['value']}",
            flush=True,
        )
    append(
        rows,
        args.out,
        benchmark="study_fit",
        model=Path(args.model.rstrip("/")).name,
        text=text.name,
        windows=list(other.shape),
        context=args.context,
        cpu_seconds=round(time.process_time() - began, 1),
        measured_alone=len(bench.state.found),
    )


if __name__ == "__main__":
    main()
