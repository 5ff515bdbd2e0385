"""Zones that move by age against zones that move by attention, at equal bytes: what survives in the middle of a long prompt?

    python benchmarks/study_tiers.py MODEL --contexts 4096,8192 --repeats 4 [--device cuda] [--out FILE]

A prompt hides a fact (passkey, entities; with --text also needle), reads it through a cache of three zones and asks for it. The cold zone is as
coarse as --cold says, because with 4-bit pages per channel every fact is found whatever the boundaries. Four caches read the same prompts:

    warm      every page in the warm zone's format (more bytes: the upper bound)
    cold      every page in the cold zone's format (fewer bytes: the lower bound)
    age       boundaries by age, `tiers=(Tier(..),)`
    attention the same number of pages in each zone, those that attention uses least leave first, `tiers="adaptive"`

The rows say how many answers were found, their mean negative log-likelihood, and the mean paired difference to `age` with its standard error.
The last line is one JSON object; it is added to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from pathlib import Path
from typing import Any

from result_file import append

import kvbits
from kvbits.evaluate.caches import CacheFactory, base_factory, factory, held_bytes
from kvbits.evaluate.tasks import Context, Options, load
from kvbits.evaluate.texts import read_text
from kvbits.progress import bar
from kvbits.spec import PerChannel, PerToken, QuantSpec, Scheme, Tier

COLD = {
    "int2": (2, PerChannel(), 4),
    "int4 per token": (4, PerToken(), 4),
    "int4": (4, PerChannel(), 4),
}
"""Cold formats: bits, granularity of keys, and the bits of the plane that makes a page warm."""


def schemes(cold: str, hot: int, warm: int) -> dict[str, Scheme]:
    bits, granularity, low = COLD[cold]
    key = QuantSpec(format=f"int{bits}", granularity=granularity, symmetric=False)
    value = QuantSpec(format=f"int{bits}", granularity=PerToken(), symmetric=False)
    plain = Scheme(name="cold", key=key, value=value, num_sink_tokens=4, residual_length=hot)
    age = dataclasses.replace(plain, name="age", tiers=(Tier(num_tokens=warm, key_bits=low, value_bits=low),))
    whole = dataclasses.replace(age, name="warm", tiers=(Tier(num_tokens=1 << 20, key_bits=low, value_bits=low),))
    return {"warm": whole, "cold": plain, "age": age, "attention": dataclasses.replace(age, name="attention", demote="attention")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cold", action="append", choices=list(COLD), help="format of the cold zone; int2 if not given; repeatable")
    parser.add_argument("--hot", type=int, default=256, help="raw tokens at the end")
    parser.add_argument("--warm", type=int, default=1024, help="tokens of the warm zone")
    parser.add_argument("--contexts", default="4096", help="prompt lengths, comma-separated")
    parser.add_argument("--depths", default="0.1,0.3,0.5,0.7")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tasks", default="passkey,entities", help="passkey, entities, needle")
    parser.add_argument("--text", help="book of the needle task")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = kvbits.load_model(args.model, dtype=args.dtype, device=args.device)
    began = time.time()
    options = Options(
        contexts=tuple(int(n) for n in args.contexts.split(",")), depths=tuple(float(d) for d in args.depths.split(",")), repeats=args.repeats,
        chunk=args.chunk, batch_size=args.batch_size,
    )  # fmt: skip
    texts = (read_text(args.text),) if args.text else ()
    rows: list[dict[str, Any]] = []
    for cold in args.cold or ["int2"]:
        factories: list[CacheFactory] = [base_factory(model)] + [factory(model, s) for s in schemes(cold, args.hot, args.warm).values()]
        by_name = {f.name: f for f in factories}
        for name in args.tasks.split(","):
            task = load(name)(Context(model, tokenizer, texts, options))
            records: dict[str, dict[str, Any]] = {f.name: {} for f in factories}
            keys = task.item_keys()
            with bar(f"{cold}: {name}", sum(task.size(k) for k in keys) * len(factories)) as advance:
                for size in dict.fromkeys(task.size(k) for k in keys):
                    same = [k for k in keys if task.size(k) == size]
                    for i in range(0, len(same), args.batch_size):
                        some = same[i : i + args.batch_size]
                        found = task.run_batch(some, by_name, advance)
                        for k in some:
                            for f in factories:
                                records[f.name][k] = found[k][f.name]
            rows += _rows(cold, name, records, {n: _bytes(f, max(options.contexts)) for n, f in by_name.items()})
    append(
        rows, args.out, model=Path(args.model).name, hot=args.hot, warm=args.warm, contexts=options.contexts, depths=options.depths, repeats=args.repeats,
        chunk=args.chunk, dtype=str(model.dtype).removeprefix("torch."), seconds=time.time() - began,
    )  # fmt: skip


def _bytes(f: CacheFactory, tokens: int) -> int | None:
    return held_bytes(f.make(1, tokens)) if f.kind == "kvbits" else None


def _rows(cold: str, task: str, records: dict[str, dict[str, Any]], held: dict[str, int | None]) -> list[dict[str, Any]]:
    rows = []
    for name, found in records.items():
        gains = [found[k]["nll"] - records["age"][k]["nll"] for k in found]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        row = {
            "cold": cold, "task": task, "cache": name, "prompts": len(found), "found": sum(r["found"] for r in found.values()),
            "nll": statistics.fmean(r["nll"] for r in found.values()), "nll_over_age": statistics.fmean(gains), "standard_error": error, "bytes": held[name],
        }  # fmt: skip
        print(
            f"{cold:15} {task:9} {name:10} found {row['found']:3} of {row['prompts']:3}  nll {row['nll']:8.3f}  "
            f"over age {row['nll_over_age']:+8.3f} +- {error:.3f}  {row['bytes'] or 0:>12,} bytes"
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
