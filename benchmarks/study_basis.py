"""What a calibrated basis is worth on a model, through the real packed cache: klt presets beside KVQuant, KIVI and
plain integers on the same windows.

    python benchmarks/study_basis.py MODEL --text wiki.test.raw --calibration wiki.valid.tokens
    python benchmarks/study_basis.py MODEL --text wiki.test.raw --calibration wiki.valid.tokens --calibration
    cpython311_inspect.py --schemes klt3,klt2

TurboQuant's recipe, simulated, is there by the names turboquant4, turboquant3 and turboquant2. Several --calibration
texts measure what another domain costs, several --prompts (as 2x1024 or 16x512) what more tokens give. Codebooks are
fitted without gradients, which on these models is as good (docs/results/schemes.md). The last line is one JSON object;
it is added to --out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import turboquant
from result_file import append, arguments

import kvbits
from kvbits import schemes
from kvbits.calibrate import Calibration, calibrate_all
from kvbits.calibrate.collect import Settings
from kvbits.calibrate.sampling import Sample, windows_of
from kvbits.evaluate.caches import CacheFactory, base_factory, factory
from kvbits.evaluate.fidelity import Fidelity, compare
from kvbits.evaluate.texts import mixed, read_text, windows
from kvbits.geometry import layer_geometries
from kvbits.spec import Scheme

SCHEMES = "klt4,klt3,klt2,nuq4-1%,nuq3-1%,nuq2-1%,kivi4,kivi2,int4"


def calibrated(
    model: Any, tokenizer: Any, wanted: list[Scheme], source: str, prompts: str
) -> tuple[dict[str, Calibration], float]:
    """Calibrations of the schemes by name, and the seconds they took together."""
    count, length = (int(n) for n in prompts.split("x"))
    batches = windows_of(tokenizer, mixed([read_text(one) for one in source.split("+")]), Sample(count, length))
    began = time.perf_counter()
    found = calibrate_all(model, batches, wanted, Settings(weights="none"))
    return {s.name: c for s, c in zip(wanted, found, strict=True)}, time.perf_counter() - began


def row(name: str, bits: float, result: Fidelity, base: Fidelity) -> dict[str, Any]:
    return {
        "scheme": name,
        "bits_per_element": bits,
        "kl": result.kl_mean,
        "perplexity_change": result.perplexity / base.perplexity - 1,
        "top1_agreement": result.top1_agreement,
        "tokens": result.num_tokens,
    }


def main() -> None:
    parser = arguments(__doc__, of_model=True)
    parser.add_argument("--text", required=True, help="evaluation text")
    parser.add_argument(
        "--calibration",
        action="append",
        required=True,
        help="calibration text, or several joined by + that are mixed; several options are measured each",
    )
    parser.add_argument(
        "--prompts",
        action="append",
        help="windows x tokens to calibrate on; several are measured each; 4x1024 if not given",
    )
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = kvbits.load_model(args.model, dtype=args.dtype, device=args.device)
    layers = layer_geometries(model.config)
    names = args.schemes.split(",")
    wanted = [schemes.for_layers(name, layers) for name in names if name not in turboquant.NAMES]
    prompts = args.prompts or ["4x1024"]
    factories: dict[str, CacheFactory] = {"base": base_factory(model)}
    seconds = {}
    for source in args.calibration:
        for size in prompts:
            label = "" if len(args.calibration) * len(prompts) == 1 else f" ({Path(source).stem}, {size})"
            found, seconds[f"{Path(source).stem} {size}"] = calibrated(
                model, tokenizer, [s for s in wanted if s.needs_calibration], source, size
            )
            made = {
                f"{s.name}{label}": factory(model, s, calibration=lambda scheme, found=found: found[scheme.name])
                for s in wanted
                if s.needs_calibration
            }
            factories |= made
    factories |= {s.name: factory(model, s) for s in wanted if not s.needs_calibration}
    factories |= {name: turboquant.factory(model, name) for name in names if name in turboquant.NAMES}
    results: dict[str, Fidelity] | None = None
    for window in windows(tokenizer, read_text(args.text), count=args.windows, length=args.length):
        results = compare(
            model,
            {n: f.make(1, args.length) for n, f in factories.items()},
            window,
            first=0,
            chunk=args.chunk,
            results=results,
        )
        print(" ".join(f"{name} {r.kl_mean:.5f}" for name, r in results.items() if name != "base"), flush=True)
    assert results is not None
    rows = [
        row(name, factories[name].info["bits_per_element"], r, results["base"])
        for name, r in results.items()
        if name != "base"
    ]
    for r in rows:
        print(
            f"{r['scheme']:40s} {r['bits_per_element']:6.3f} bits   KL {r['kl']:.5f}   perplexity"
            f" {r['perplexity_change']:+.2%}"
        )
    append(
        rows,
        args.out,
        benchmark="study_basis",
        model=Path(args.model).name,
        text=Path(args.text).name,
        windows=args.windows,
        length=args.length,
        chunk=args.chunk,
        dtype=args.dtype,
        calibration_seconds=seconds,
    )


if __name__ == "__main__":
    main()
