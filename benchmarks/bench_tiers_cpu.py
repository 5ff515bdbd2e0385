"""Mixed tiers on the CPU: is one decoding step as fast as each tier's bytes at that tier's own measured rate?

    python benchmarks/bench_tiers_cpu.py --context 8192 --threads 1

Four caches hold the same tokens: all raw, all warm, all cold, and the tiers of the scheme.
Checks that the step is right against the float64 judge first. A step walks over all layers, which are more than the
caches hold. Bytes are those that it must read: visible pages, scales and padding included. Times are medians over
interleaved rounds: CPU time of the thread with one thread, wall time with more. Prints one JSON line.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch
from run_files import append, arguments

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.ops import attend
from kvbits.ops.reference.attend import exact
from kvbits.spec import CacheSpec, LayerGeometry, Scheme

SCALING = 0.1


def tiers(name: str, context: int) -> dict[str, Scheme]:
    tiered = schemes.get(name)
    warm = tiered.tiers[0]
    everything = -(-context // tiered.page_size) * tiered.page_size
    return {
        "hot": dataclasses.replace(tiered, residual_length=context, tiers=()),
        "warm": dataclasses.replace(
            tiered, residual_length=0, tiers=(dataclasses.replace(warm, num_tokens=everything),)
        ),
        "cold": dataclasses.replace(tiered, residual_length=0, tiers=()),
        "tiered": tiered,
    }


def filled(scheme: Scheme, context: int, layers: int, heads: int, head_dim: int) -> PagedCache:
    spec = CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=heads, head_dim=head_dim),) * layers)
    cache = PagedCache(spec)
    torch.manual_seed(0)
    for first in range(0, context, 1024):
        n = min(1024, context - first)
        for layer in range(layers):
            cache.append(
                layer, torch.randn(1, n, heads, head_dim).bfloat16(), torch.randn(1, n, heads, head_dim).bfloat16()
            )
    return cache


def bytes_read(cache: PagedCache) -> dict[str, int]:
    """Return the bytes of each tier that one step reads."""
    g = cache.groups[0]
    found = {"hot": 0, "warm": 0, "cold": 0}
    for pool, table in g.tables().items():
        name = {"closed": "cold", "tier0": "warm"}.get(pool, "hot")
        nbytes = g.pools[pool].layout.page_size_bytes
        found[name] += int(table.tokens.sum()) * nbytes // g.pools[pool].layout.page_size * len(g.group.layers)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scheme", default="tiered_8k", help="a preset of integers or trellis codes")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per kv head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    caches = {
        name: filled(s, args.context, args.layers, args.heads, args.head_dim)
        for name, s in tiers(args.scheme, args.context).items()
    }
    q = torch.randn(1, 1, args.heads * args.group, args.head_dim).bfloat16()
    plans = {}
    for name, cache in caches.items():
        history = cache.groups[0].tables()
        stores = [[cache._stores.of_layer(layer, pool) for pool in history] for layer in range(args.layers)]
        plans[name] = attend.plan(
            [store.layout for store in stores[0]],
            batch_size=1,
            num_q_heads=q.shape[2],
            dtype=q.dtype,
            device="cpu",
            scaling=SCALING,
        )
        for layer, its in enumerate(stores):
            plans[name].bind(layer, its)
        plans[name].update(list(history.values()))
        want, _ = exact(q, stores[0], list(history.values()), scaling=SCALING)
        got = plans[name].run(q, 0, out=torch.empty(q.shape))
        assert (got.double() - want).norm() <= 2e-2 * want.norm(), f"{name} is wrong; a speed would mean nothing"
    out = torch.empty(q.shape)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(args.rounds):
        for name, plan in plans.items():
            began = clock()
            for layer in range(args.layers):
                plan.run(q, layer, out=out)
            times[name].append(clock() - began)
    best = {name: statistics.median(t) for name, t in times.items()}
    held = {name: bytes_read(c) for name, c in caches.items()}
    rate = {tier: sum(held[tier].values()) / best[tier] for tier in ("hot", "warm", "cold")}
    explained = sum(n / rate[tier] for tier, n in held["tiered"].items())
    rows = [
        {
            "cache": name,
            "scheme": args.scheme,
            "context": args.context,
            "backend": plans[name].choice.backend,
            "step_s": best[name],
            "bytes": held[name],
        }
        for name in caches
    ]
    for row in rows:
        row |= {"bytes_per_s": rate[row["cache"]]} if row["cache"] in rate else {}
        row |= (
            {"explained_s": explained, "measured_over_explained": best["tiered"] / explained}
            if row["cache"] == "tiered"
            else {}
        )
    append(rows, args.out, threads=args.threads)


if __name__ == "__main__":
    main()
