"""Decoding speed through Transformers against the stock caches, at several context lengths, in one interleaved run.

    python benchmarks/bench_generate_cpu.py MODEL [MODEL ..] --contexts 2048,8192,32768 --schemes int8,int4,kivi2

Every cache is timed in every dtype of --dtypes, a model each, in turns token by token: what a ratio is over took its
turn beside it. A row has the median over tokens of its ratio to the stock cache of the same dtype, the same to the
stock cache's faster dtype, and the quartiles of the latter.

First real text goes through the lossless scheme and the stock 16-bit cache, whose logits must agree, so that what is
timed is right. Then every cache is filled with the same random keys and values (speed does not depend on them), and
single tokens are decoded, the caches taking turns. Codebooks and bases come from 512 tokens of the novel (speed does
not depend on them either). The stock quantized caches need optimum-quanto and hqq; missing ones are named. With
--compile every cache is timed a second time, under torch.compile. The last line is one JSON object, this run; it is
added to --out (benchmarks/results/cpu/generate.json is one).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run_files import append, arguments
from transformers import DynamicCache, QuantizedCache

import kvbits
from kvbits.calibrate import calibrate
from kvbits.evaluate.caches import held_bytes
from kvbits.evaluate.texts import novel
from kvbits.ops.cpu import library
from kvbits.schemes import PRESETS

parser = arguments(__doc__)
parser.add_argument("models", nargs="+")
parser.add_argument("--contexts", default="2048,8192")
parser.add_argument("--schemes", default="raw,int8,int4,kivi2")
parser.add_argument(
    "--stock", default="quanto4,hqq8,fp8", help="stock quantized caches: quanto4, quanto2, hqq8, hqq4, fp8 or none"
)
parser.add_argument("--dtypes", default="bfloat16,float32")
parser.add_argument("--tokens", type=int, default=12)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument(
    "--compile", metavar="BACKEND", help="a backend of torch.compile, such as inductor: time every cache under it too"
)
args = parser.parse_args()
WARM_UP = 3 if args.compile else 1
"""Tokens before those that are timed: the first compiles, and the second again where lengths had been taken for
constants.
"""
torch.set_num_threads(args.threads)


def stock(name: str, config: Any) -> Any:
    backend, bits = name.rstrip("0123456789") if name != "fp8" else "fp8", int(name[-1])
    if backend == "fp8":
        return QuantizedCache(backend="fp8", config=config)
    return QuantizedCache(
        backend=backend,
        config=config,
        nbits=bits,
        q_group_size=64,
        residual_length=128,
        axis_key=0 if backend == "quanto" else 1,
        axis_value=0 if backend == "quanto" else 1,
    )


def fill(cache: Any, contents: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put keys and values [1, H, T, D] of every layer into a cache."""
    for layer, (k, v) in enumerate(contents):
        if isinstance(cache, kvbits.KVCache):
            cache.pages.append(layer, k.transpose(1, 2), v.transpose(1, 2))
        else:
            cache.update(k, v, layer)
    if isinstance(cache, kvbits.KVCache):
        cache.columns.seen = contents[0][0].shape[2]


def check(model: Any, tokenizer: Any) -> float:
    """Return the relative difference of the logits after 300 tokens of real text, lossless scheme against the stock
    cache.
    """
    ids = tokenizer(novel(), return_tensors="pt").input_ids[:, :300]
    logits = []
    for cache in (DynamicCache(config=model.config), kvbits.KVCache.for_model(model, "raw")):
        with torch.no_grad():
            model(ids[:, :280], past_key_values=cache, logits_to_keep=1)
            for i in range(280, 300):
                out = model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1].float()
        logits.append(out)
    return ((logits[1] - logits[0]).norm() / logits[0].norm()).item()


def quartiles(values: list[float]) -> list[float]:
    return [round(q, 4) for q in statistics.quantiles(values, n=4)[::2]] if len(values) > 1 else values * 2


def caches_of(model: Any, calibrations: dict[str, Any], context: int, room: int) -> dict[str, Any]:
    """Fill the caches of one model, by their names, the stock one first."""
    config = model.config.get_text_config()
    heads, dim = (
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    torch.manual_seed(0)
    contents = [
        tuple(torch.randn(1, heads, context, dim, dtype=model.dtype) for _ in "kv")
        for _ in range(config.num_hidden_layers)
    ]
    caches: dict[str, Any] = {"16-bit": DynamicCache(config=model.config)}
    for name in args.schemes.split(","):
        caches[name] = kvbits.KVCache.for_model(
            model, name, batch_size=1, max_tokens=context + room, calibration=calibrations.get(name)
        )
    for name in [] if args.stock == "none" else args.stock.split(","):
        try:
            caches[name] = stock(name, model.config)
        except ImportError as error:
            print(f"stock {name} left out: {error}")
    for cache in caches.values():
        fill(cache, contents)
    return caches


rows = []
for path in args.models:
    models = {}
    for dtype in args.dtypes.split(","):
        model, tokenizer = kvbits.load_model(path, dtype=dtype)
        error = check(model, tokenizer)
        assert error < 0.03, f"the lossless scheme's logits differ from the stock cache's by {error}"
        print(f"{Path(path).name}, {dtype}: logits of the lossless scheme differ from the stock cache's by {error:.4f}")
        models[dtype] = model
    some_text = tokenizer(novel(), return_tensors="pt").input_ids[:, :512]
    needing = [name for name in args.schemes.split(",") if PRESETS[name].needs_calibration]
    calibrations = {name: calibrate(model, [some_text], name, weights="none") for name in needing}
    config = model.config.get_text_config()
    for context in map(int, args.contexts.split(",")):
        if context > config.max_position_embeddings:
            print(f"{Path(path).name}: {context} tokens exceed its {config.max_position_embeddings} positions: skipped")
            continue
        caches = {
            (dtype, name): c
            for dtype, m in models.items()
            for name, c in caches_of(m, calibrations, context, args.tokens + WARM_UP).items()
        }
        calls: dict[tuple[str, str], Callable[..., Any]] = {key: models[key[0]] for key in caches}
        if args.compile:
            torch.compiler.reset()
            compiled = {dtype: torch.compile(m, backend=args.compile, fullgraph=True) for dtype, m in models.items()}
            caches |= {(dtype, f"{name}, compiled"): copy.deepcopy(cache) for (dtype, name), cache in caches.items()}
            calls |= {key: compiled[key[0]] for key in caches if key not in calls}
        token = torch.tensor([[11]])
        times: dict[tuple[str, str], list[float]] = {key: [] for key in caches}
        with torch.no_grad():
            for key, cache in caches.items():
                for _ in range(WARM_UP):
                    calls[key](token, past_key_values=cache)
            for _ in range(args.tokens):
                for key, cache in caches.items():
                    began = time.perf_counter()
                    calls[key](token, past_key_values=cache)
                    times[key].append(time.perf_counter() - began)
        bases = {dtype: times[dtype, "16-bit"] for dtype in models}
        best = min(models, key=lambda dtype: statistics.median(bases[dtype]))
        width = max(len(f"{name}, {dtype}") for dtype, name in caches)
        for (dtype, name), cache in caches.items():
            mine = times[dtype, name]
            beside, over_best = (
                [b / t for b, t in zip(base, mine, strict=True)] for base in (bases[dtype], bases[best])
            )
            row = {
                "model": Path(path).name,
                "context": context,
                "cache": name,
                "dtype": dtype,
                "tokens_per_s": 1 / statistics.median(mine),
                "ratio_vs_16bit": statistics.median(beside),
                "best_16_bit_dtype": best,
                "ratio_vs_best_16bit": statistics.median(over_best),
                "ratio_quartiles": quartiles(over_best),
                "bytes": held_bytes(cache),
            }
            row["memory_reduction"] = held_bytes(caches[dtype, "16-bit"]) / row["bytes"] if row["bytes"] else None
            rows.append(row)
            memory = f"{row['memory_reduction']:.2f}x less memory" if row["memory_reduction"] else ""
            label, low, high = f"{name}, {dtype}", *row["ratio_quartiles"]
            print(
                f"{row['model']:28} {context:6} {label:{width}} {row['tokens_per_s']:7.2f} tokens/s "
                f" {row['ratio_vs_best_16bit']:5.2f}x ({low:.2f} to {high:.2f}) the 16-bit cache in {best}  {memory}",
                flush=True,
            )
        del caches
append(rows, args.out, threads=args.threads, tier=library.tier())
