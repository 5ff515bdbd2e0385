"""Worth of each part of KVQuant on a model, through the real packed cache: the studies its reviewers asked for.

    python benchmarks/study_kvquant.py MODEL --study ladder --text wiki.test.raw --calibration wiki.valid.tokens
    studies: ladder    per token -> per channel -> pre-RoPE -> codebooks -> outliers -> sinks, and calibrated ranges as
                       in the paper
             weights   Fisher against unweighted codebooks, one per head against one per layer
             prior     how much of a uniform density the codebooks are fitted to
             size      calibration sets of 4, 16 and 64 prompts
             domain    calibration on each --calibration text (name=path ...) against each --text; with --data FOLDER
                       (WikiText-2, CPython's library, GSM8K)
                       on prose, code and math: `--study domain --data FOLDER` is the whole command
             presets   nuq presets beside KIVI and per-token integers of about the same bits

One backward pass per calibration prompt; its keys, values and gradients stay in memory, so every variant is fitted on
the same samples. All caches read the same windows. The last line is one JSON object; it is added to --out.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from run_files import append, arguments
from transformers import DynamicCache

import kvbits
from kvbits import schemes
from kvbits.calibrate import Calibration, fingerprint, prompts_from_text
from kvbits.calibrate.collect import ranges_of
from kvbits.calibrate.target import as_stored
from kvbits.evaluate.fidelity import Fidelity, compare
from kvbits.evaluate.texts import Text, read_text
from kvbits.evaluate.texts import windows as text_windows
from kvbits.geometry import layer_geometries
from kvbits.integrations.rotary import with_rotary
from kvbits.literature.codebooks import PRIOR
from kvbits.literature.fisher import backward, watched
from kvbits.literature.histograms import levels_of
from kvbits.progress import bar
from kvbits.spec import PerChannel, PerToken, QuantSpec, Scheme

STUDIES = ("ladder", "weights", "prior", "size", "domain", "presets")
DOMAINS = {
    "prose": (("wikitext-2/wiki.valid.tokens",), ("wikitext-2/wiki.test.raw",)),
    "code": (("code/cpython311_inspect.py", "code/cpython311_typing.py"), ("code/cpython311__pydecimal.py",)),
    "math": (("gsm8k/train.jsonl",), ("gsm8k/test.jsonl",)),
}
"""Calibration and evaluation files of each domain, in the folder given with --data."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A cache to measure."""

    scheme: Scheme
    calibration: Calibration | None


Wanted = dict[str, Variant]


class Samples:
    """Keys, values and squared gradients of calibration prompts, bfloat16, as the model caches them."""

    def __init__(self, model: Any, tokenizer: Any, text: str, prompts: int, length: int) -> None:
        self.model = model
        self.seen: list[dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]] = []
        windows = prompts_from_text(tokenizer, text, num_prompts=prompts, length=length, batch_size=1)

        def keep(layer: int, side: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
            self.seen[-1][layer, side] = (x.to(torch.bfloat16), gradient.to(torch.bfloat16))

        with watched(model, keep), bar("backward passes", len(windows)) as advance:
            for ids in windows:
                self.seen.append({})
                backward(model, ids.to(model.device), None)
                advance(1)

    def calibrate(
        self,
        scheme: Scheme,
        *,
        prompts: int | None = None,
        weights: str = "fisher",
        per_head: bool = False,
        prior: float = PRIOR,
    ) -> Calibration:
        """Return what `kvbits.calibrate.calibrate` would return for the first `prompts` prompts."""
        layers = layer_geometries(self.model.config)
        if scheme.needs_rotary:
            layers = with_rotary(layers, self.model)
        seen = self.seen[:prompts]
        skip = scheme.num_sink_tokens
        tokens = sum(next(iter(s.values()))[0].shape[1] - skip for s in seen)

        def sides(i: int, side: str) -> Any:
            spec = scheme.for_layer(i, len(layers))["kv".index(side)]
            for s in seen:
                yield tuple(as_stored(t.float(), layers[i], spec)[0, skip:] for t in s[i, side])

        found: list[dict[str, torch.Tensor]] = [{} for _ in layers]
        for (i, side), r in ranges_of(scheme, layers, tokens, None).items():
            for x, _ in sides(i, side):
                r.add(x)
            found[i] |= {f"{side}_{name}": t for name, t in r.qparams().items()}
        for (i, side), fit in levels_of(scheme, layers, found).items():
            for x, gradient in sides(i, side):
                fit.add(x, gradient.square() if weights == "fisher" else None)
            found[i][f"{side}_codebook"] = fit.fit(per_head, prior)
        return Calibration(
            found, fingerprint(self.model.config, scheme), {"prompts": len(seen), "tokens": tokens, "weights": weights}
        )


def integers(bits: int, **key: Any) -> tuple[QuantSpec, QuantSpec]:
    value = QuantSpec(format=f"int{bits}", granularity=PerToken(), symmetric=False)
    return dataclasses.replace(value, **key), value


def ladder(bits: int) -> dict[str, Scheme]:
    """Return the steps of the ladder. Each step keeps what came before it; the raw tail is the same in all."""
    nuq = {"format": f"nuq{bits}"}
    channel: dict[str, Any] = {"granularity": PerChannel()}
    steps: dict[str, tuple[QuantSpec, QuantSpec]] = {
        "per-token keys": integers(bits),
        "per-channel keys": integers(bits, **channel),
        "pre-RoPE keys": integers(bits, **channel, pre_rope=True),
    }
    before = steps["pre-RoPE keys"]
    steps["codebooks"] = tuple(dataclasses.replace(s, **nuq) for s in before)  # type: ignore[assignment]
    steps["1 % outliers"] = tuple(dataclasses.replace(s, outliers=0.01) for s in steps["codebooks"])  # type: ignore[assignment]
    steps["1 % outliers, integers"] = tuple(dataclasses.replace(s, outliers=0.01) for s in before)  # type: ignore[assignment]
    found = {name: Scheme(name=name, key=k, value=v, residual_length=64) for name, (k, v) in steps.items()}
    found["sinks"] = dataclasses.replace(found["1 % outliers"], name="sinks", num_sink_tokens=1)
    k, v = steps["codebooks"]
    static = dataclasses.replace(k, static=True)
    found["calibrated ranges: codebooks"] = Scheme(name="static", key=static, value=v, residual_length=64)
    k = dataclasses.replace(static, outliers=0.01)
    found["calibrated ranges: sinks"] = Scheme(
        name="static1", key=k, value=steps["1 % outliers"][1], residual_length=64, num_sink_tokens=1
    )
    return found


def presets() -> dict[str, Scheme]:
    def token(bits: int) -> Scheme:
        k, v = integers(bits)
        return Scheme(name=f"int{bits} per token", key=k, value=v, residual_length=64)

    names = ("nuq4-1%", "nuq4", "kivi4", "int4", "nuq3-1%", "nuq3", "nuq2-1%", "nuq2", "kivi2")
    return {n: schemes.get(n) for n in names} | {f"int{b} per token": token(b) for b in (4, 3, 2)}


def variants(study: str, bits: int, samples: dict[str, Samples]) -> Iterator[tuple[str, Scheme, str, dict[str, Any]]]:
    """Yield (name, scheme, calibration text, how it is fitted) of a study at one width."""
    first = next(iter(samples))
    top = ladder(bits)["calibrated ranges: sinks"]  # where codebooks matter most
    if study == "ladder":
        yield from ((name, scheme, first, {}) for name, scheme in ladder(bits).items())
    elif study == "weights":
        for weights in ("fisher", "none"):
            for per_head in (False, True):
                yield (
                    f"{weights}, one per {'head' if per_head else 'layer'}",
                    top,
                    first,
                    {"weights": weights, "per_head": per_head},
                )
    elif study == "prior":
        yield from ((f"prior {prior:g}", top, first, {"prior": prior}) for prior in (0.0, 0.3, 1.0, 3.0, 10.0))
    elif study == "size":
        yield from ((f"{n} prompts", top, first, {"prompts": n}) for n in (4, 16, 64))
    elif study == "domain":
        yield from ((f"calibrated ranges, on {name}", top, name, {}) for name in samples)
        yield from ((f"nuq{bits}-1%, on {name}", schemes.get(f"nuq{bits}-1%"), name, {}) for name in samples)
    else:
        yield from ((name, scheme, first, {}) for name, scheme in presets().items() if str(bits) in name)


def measure(
    model: Any, wanted: Wanted, ids: torch.Tensor, chunk: int, workers: int, label: str
) -> list[dict[str, Any]]:
    """Measure the rows of every cache over the windows.

    Workers are processes that share the model's memory and take some caches of one window each.
    """
    names = list(wanted)
    each = max(1, -(-len(names) * len(ids) // max(workers, 1)))
    tasks = [(w, names[i : i + each]) for w in range(len(ids)) for i in range(0, len(names), each)]

    def run(task: tuple[int, list[str]]) -> dict[str, Fidelity]:
        w, some = task
        caches: dict[str, Any] = {"16-bit": DynamicCache(config=model.config)}
        for n in some:
            v = wanted[n]
            caches[n] = kvbits.KVCache.for_model(model, v.scheme, calibration=v.calibration)
        return compare(model, caches, ids[w], chunk=chunk)

    results: dict[str, Fidelity] = {}
    with bar(label, len(tasks)) as advance:
        for (_, some), found in zip(tasks, forked(run, tasks, workers), strict=True):
            for n in (["16-bit"] if some[0] == names[0] else []) + some:
                r = results.setdefault(n, Fidelity())
                for f in dataclasses.fields(Fidelity):
                    setattr(r, f.name, getattr(r, f.name) + getattr(found[n], f.name))
            advance(1)
    base = results["16-bit"]
    rows = []
    for name, f in results.items():
        row = {
            "name": name,
            "ppl": f.perplexity,
            "ppl_change": f.perplexity / base.perplexity - 1,
            "kl": f.kl_mean,
            "kl_p99": f.kl_quantile(0.99),
            "tvd": f.tvd_mean,
        }
        rows.append(row | {"top1": f.top1_agreement, "tokens": f.num_tokens})
    return rows


def forked(run: Callable[[Any], Any], tasks: list[Any], workers: int) -> Iterator[Any]:
    """Yield the results of the tasks in order, from forked processes (none for 1 worker)."""
    if workers < 2:
        yield from map(run, tasks)
        return
    global _run
    _run = run
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(_forked, tasks)


def _forked(task: Any) -> Any:
    return _run(task)


_run: Callable[[Any], Any]


def main() -> None:
    parser = arguments(__doc__, of_model=True)
    parser.add_argument("--study", choices=STUDIES, required=True, action="append")
    parser.add_argument(
        "--text", action="append", help="evaluation text, PATH or NAME=PATH; several for the domain study"
    )
    parser.add_argument("--calibration", action="append", help="calibration text, PATH or NAME=PATH")
    parser.add_argument(
        "--data", type=Path, help="folder of texts: prose, code and math for the domain study, prose for the others"
    )
    parser.add_argument("--bits", type=int, action="append")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="processes that evaluate, on the CPU")
    args = parser.parse_args()
    if not args.data and not (args.text and args.calibration):
        parser.error("give --text and --calibration, or --data FOLDER")
    torch.set_num_threads(args.threads)
    model, tokenizer = kvbits.load_model(args.model, dtype=args.dtype, device=args.device)
    began = time.time()

    def texts(given: list[str] | None, side: int) -> dict[str, Text]:
        if given:
            return {
                name or (t := read_text(path)).name: t if not name else read_text(path)
                for name, _, path in (g.rpartition("=") for g in given)
            }
        names = DOMAINS if "domain" in args.study else ("prose",)
        return {
            n: Text(n, "\n\n".join(read_text(str(args.data / path)).content for path in DOMAINS[n][side]))
            for n in names
        }

    prompts = 64 if "size" in args.study else args.prompts
    samples = {
        name: Samples(model, tokenizer, text.content, prompts, args.prompt_length)
        for name, text in texts(args.calibration, 0).items()
    }
    wanted: Wanted = {}
    for study in args.study:
        for b in args.bits or {"presets": [4, 3, 2]}.get(study, [3]):
            fitted: dict[str, Calibration] = {}
            for name, scheme, source, how in variants(study, b, samples):
                how.setdefault("prompts", args.prompts)
                key = f"{scheme} {source} {how}"
                if scheme.needs_calibration and key not in fitted:
                    fitted[key] = samples[source].calibrate(scheme, **how)
                wanted[f"{study}: {b} bit, {name}"] = Variant(scheme, fitted.get(key))
    calibrations = list(samples)
    samples.clear()  # keys, values and gradients are not needed any more
    if args.workers > 1:
        model = model.to("cpu")
    head_dim = layer_geometries(model.config)[0].head_dim
    found: list[dict[str, Any]] = []
    for name, text in texts(args.text, 1).items():
        ids = text_windows(tokenizer, text, count=args.windows, length=args.length)
        rows = measure(model, wanted, ids, args.chunk, args.workers, f"windows of {name}")
        for row in rows:
            v = wanted.get(row["name"])
            row["bits"] = v.scheme.bits_per_element(head_dim) if v else 16.0
            print(
                f"{name:18.18} {row['name']:38} {row['bits']:6.3f} bits  ppl {row['ppl']:9.4f}"
                f" {row['ppl_change']:+8.2%}  KL {row['kl']:.5f}  p99 {row['kl_p99']:.4f}  TVD {row['tvd']:.4f}"
            )
        found += [{"text": name} | row for row in rows]
    append(
        found,
        args.out,
        study=args.study,
        model=Path(args.model).name,
        calibration=calibrations,
        prompts=prompts,
        prompt_length=args.prompt_length,
        windows=args.windows,
        length=args.length,
        chunk=args.chunk,
        workers=args.workers,
        dtype=args.dtype,
        seconds=time.time() - began,
    )


if __name__ == "__main__":
    main()
