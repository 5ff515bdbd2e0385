"""A cache with a budget as it fills: quality at each fill level, beside uniform 8 bits and the 16-bit cache on the same
tokens.

    python benchmarks/study_budget.py MODEL --text wiki.test.raw [--length 3072] [--chunk 128] [--out FILE]

The budget is what --length tokens take in the fewest bits, so the cache is full when the text ends. Text goes through
the caches side by side in chunks; KL against the 16-bit cache of each quarter of the text says what the fill costs.
int8 grows without a limit here: in the same budget it would end at `int8_context` tokens. The last line is JSON, this
run; it is added to --out.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from result_file import append, arguments

from kvbits import KVCache, planner, schemes
from kvbits.evaluate.caches import base_factory
from kvbits.evaluate.fidelity import Fidelity, compare
from kvbits.evaluate.texts import read_text, windows
from kvbits.geometry import layer_geometries
from kvbits.integrations.models import load_model
from kvbits.progress import bar
from kvbits.spec import CacheSpec

LEVELS = 4


def main() -> None:
    parser = arguments(__doc__, of_model=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=3072)
    parser.add_argument("--chunk", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    layers, text = layer_geometries(model.config), read_text(args.text)
    (window,) = windows(tokenizer, text, count=1, length=args.length)
    elastic = CacheSpec(scheme=schemes.elastic(layers), layers=layers, raw_dtype="float32")
    narrow = CacheSpec(
        scheme=dataclasses.replace(schemes.elastic(layers), tiers=()), layers=layers, raw_dtype="float32"
    )
    budget = narrow.nbytes(args.length) * 65 // 64  # what free ends of slabs take
    eight = {
        name: CacheSpec(scheme=schemes.for_layers(name, layers), layers=layers, raw_dtype="float32")
        for name in ("int8", "int8_centered")
    }
    base = base_factory(model)
    caches = {base.name: base.make(None, None), "budget": KVCache.for_model(model, budget=budget)}
    caches |= {name: KVCache.for_model(model, name) for name in eight}
    results = {name: Fidelity() for name in caches}
    planes = []

    def look(tokens: int) -> None:
        advance(tokens)
        s = caches["budget"].pages.groups[0].sequences[0]
        planes.append([sum(low[i] is not None for low in s.low) for i in range(len(s.closed))])

    with bar("tokens", args.length, enabled=True) as advance:
        compare(model, caches, window, first=0, chunk=args.chunk, results=results, on_tokens=look)
    scored, rows = results[base.name].num_tokens, []
    for level in range(LEVELS):
        part = slice(level * scored // LEVELS, (level + 1) * scored // LEVELS)
        end = planes[min(len(planes), (level + 1) * len(planes) // LEVELS) - 1]
        kl = {name: sum(r.kl[part]) / len(r.kl[part]) for name, r in results.items() if name != base.name}
        rows.append(
            {
                "fill": (level + 1) / LEVELS,
                "kl": kl,
                "pages_by_planes": {str(n): end.count(n) for n in sorted(set(end))},
            }
        )
        print(
            f"to {rows[-1]['fill']:.0%}: "
            + ", ".join(f"{n} {x:.6f}" for n, x in kl.items())
            + f"; pages by low planes {rows[-1]['pages_by_planes']}",
            flush=True,
        )
    append(
        rows,
        args.out,
        benchmark="study_budget",
        model=Path(args.model.rstrip("/")).name,
        text=text.name,
        tokens=args.length,
        budget=budget,
        held=caches["budget"].nbytes,
        given_back=caches["budget"].pages.budget.given_back,
        int8_context=planner.max_context(eight["int8"], budget, 1),
        widest_bytes=elastic.nbytes(args.length),
    )


if __name__ == "__main__":
    main()
