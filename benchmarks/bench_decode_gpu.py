"""Attention of single tokens in a real cache on a GPU, raw tail included, beside the 16-bit kernels that are installed:
cuDNN, FlashAttention-3, FlashInfer.

    python benchmarks/bench_decode_gpu.py [presets ...] [--shapes 0 1 ..] [--out
    benchmarks/results/<gpu>/attend_decode.json]
    python benchmarks/bench_decode_gpu.py kivi4 --warm                               compiles what a preset needs, into
    the cache on disk, and times nothing

A row is a preset by its name: `PagedCache` with that scheme, filled through `append`, in the middle of a page, decoding
on the device. Its attention is compared with the float64 reference over the same pages before anything is timed. Times
are medians of CUDA-graph replays over all layers of a cache larger than L2; `between_matmuls` has a product of 117 MB
before every launch, as in a model, whose own time is taken off (not with --quick). Speeds are over the fastest 16-bit
kernel of the same shape and run, which each row names. The last line is one JSON object; rows are added to --out shape
by shape.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from bench_attend_gpu import (
    HEAD_DIM,
    KV_HEADS,
    PEERS,
    be_quick,
    bench_16_bit,
    copy_bandwidth,
    made_up_basis,
    made_up_mean,
    missing,
    time_us,
)
from run_files import append, arguments

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import KvbitsError
from kvbits.ops import attend
from kvbits.ops.reference.attend import exact
from kvbits.ops.types import PageStore, Table
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, Rotary, Scheme

# sequences, query heads, tokens
SHAPES = ((1, 32, 32768), (8, 32, 32768), (32, 32, 8192), (32, 64, 4096), (64, 32, 4096), (128, 32, 2048))
PRESETS = ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt3", "klt2")
"""Those of README's table."""
ROTATE_BYTES = 400 << 20
ERROR_LIMIT = 5e-3
MATMUL = (4096, 14336)  # 117 MB in bf16


def calibration(scheme: Scheme, layers: int) -> list[dict[str, torch.Tensor]] | None:
    """Make what calibration would return for normal numbers: even codebooks, or a basis with another
    direction for each channel, of lengths that suit a step of 1.
    """
    if not scheme.needs_calibration:
        return None
    if scheme.key.basis == "calibrated":
        bases = [made_up_basis(scheme.key, KV_HEADS, HEAD_DIM) for _ in range(layers)]
        return [{"k_basis": basis, "k_mean": made_up_mean(basis)} for basis in bases]
    book = torch.linspace(-1, 1, 2**scheme.key.bits, device="cuda").expand(KV_HEADS, -1).contiguous()
    return [{"k_codebook": book, "v_codebook": book} for _ in range(layers)]


def filled(scheme: Scheme, batch: int, tokens: int, layers: int, room: int = 256) -> PagedCache:
    """Make a cache of fixed capacity that holds `tokens` random tokens of every sequence."""
    rotary = (
        Rotary(inv_freq=tuple(500_000.0 ** (-i / (HEAD_DIM // 2)) for i in range(HEAD_DIM // 2)))
        if scheme.needs_rotary
        else None
    )
    spec = CacheSpec(
        scheme=scheme, layers=(LayerGeometry(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary=rotary),) * layers
    )
    cache = PagedCache(
        spec, batch_size=batch, max_tokens=tokens + room, device="cuda", static=calibration(scheme, layers)
    )
    whole = max(1, (1 << 28) // (batch * KV_HEADS * HEAD_DIM * 2)) // 64 * 64 or 64
    for first in range(0, tokens, whole):
        n = min(whole, tokens - first)
        k, v = (torch.randn(batch, n, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        for layer in range(layers):
            cache.append(layer, k, v)
    return cache


def layers_for(scheme: Scheme, batch: int, tokens: int) -> int:
    layout = PageLayout(
        key=scheme.key, value=scheme.value, page_size=scheme.page_size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    return max(2, -(-ROTATE_BYTES // (batch * tokens // scheme.page_size * layout.page_size_bytes)))


def read_of(cache: PagedCache, layer: int, rows: list[int]) -> tuple[list[PageStore], list[Table]]:
    """Return the stores and tables that attention of some sequences reads, as the host leads it."""
    found = cache.groups[0].tables()

    def of_rows(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[rows]

    tables = [Table(*map(of_rows, (t.pages, t.tokens, t.starts, t.offsets, t.spans))) for t in found.values()]
    return [cache.store_of(layer, pool) for pool in found], tables


def decode_a_little(cache: PagedCache, q_heads: int, layers: int, steps: int = 4) -> torch.Tensor:
    batch = cache.batch_size
    for _ in range(steps):
        q, k, v = (
            torch.randn(batch, 1, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            for n in (q_heads, KV_HEADS, KV_HEADS)
        )
        for layer in range(layers):
            cache.step(layer, q, k, v, scaling=HEAD_DIM**-0.5)
    return q


def check(cache: PagedCache, q: torch.Tensor, out: torch.Tensor, what: str) -> float:
    """Compare the first and last sequence of the last layer with float64. Take the pages back from the device."""
    rows = sorted({0, cache.batch_size - 1})
    lengths = cache.seq_lens
    layer = len(cache.spec.layers) - 1
    positions = torch.tensor([[lengths[r] - 1] for r in rows], dtype=torch.int32)
    want, _ = exact(q[rows], *read_of(cache, layer, rows), positions=positions)
    error = float((out[rows].double() - want).norm() / want.norm())
    if not error < ERROR_LIMIT:
        raise ValueError(f"{what}: error {error} against float64; a wrong kernel has no speed")
    return error


def matmuls() -> Any:
    x = torch.randn(16, MATMUL[0], device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(*MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    outs = [torch.empty(16, MATMUL[1], device="cuda", dtype=torch.bfloat16) for _ in weights]
    return lambda i: torch.mm(x, weights[i % 4], out=outs[i % 4])


def bench_preset(name: str, batch: int, q_heads: int, tokens: int, product: Any) -> dict[str, Any]:
    """Measure a preset. `product`: what runs before each launch in the second timing, None for no second timing."""
    scheme = schemes.get(name)
    layers = layers_for(scheme, batch, tokens)
    repeat = max(1, 12 // layers)
    # Half a page waits beyond the newest tokens that stay raw: what a cache holds on average.
    cache = filled(scheme, batch, tokens - 4, layers)
    if name != "raw":
        short = scheme.page_size // 2 - (tokens - scheme.residual_length - scheme.num_sink_tokens) % scheme.page_size
        cache.crop(tokens - 4 + short - (scheme.page_size if short > 0 else 0))
    q = decode_a_little(cache, q_heads, layers)
    found: dict[str, Any] = {"layers": layers}
    decode = cache.decoding
    if decode is None:  # a scheme that the host leads: the plan of a step, made once
        found["led_by"] = cache.led_by_host
        return found | host_led(cache, q, scheme, layers, repeat)
    (group,) = decode.stepper.groups
    run = group.attention.run
    out = torch.empty_like(q)
    launches = [lambda i=i: run(q, i, out=out) for i in range(layers)] * repeat
    found["tail_tokens"] = int(group.numbers[0, 0])
    found["time_us"] = time_us(launches)
    if product:
        rounds = [f for i, launch in enumerate(launches) for f in (lambda i=i: product(i), launch)]
        alone = time_us([lambda i=i: product(i) for i in range(len(launches))])
        found["between_matmuls_us"] = 2 * time_us(rounds) - alone
    found["error"] = check(cache, q, run(q, layers - 1), f"{name} at {batch} x {tokens}")
    return found


def host_led(cache: PagedCache, q: torch.Tensor, scheme: Scheme, layers: int, repeat: int) -> dict[str, Any]:
    stores, tables = read_of(cache, 0, list(range(cache.batch_size)))
    options = {"batch_size": len(q), "num_q_heads": q.shape[2], "dtype": q.dtype, "device": q.device}
    plan = attend.plan([x.layout for x in stores], **options)
    for i in range(layers):
        plan.bind(i, [cache.store_of(i, pool) for pool in cache.groups[0].tables()])
    if not plan.reads_host:
        tables = [Table(*(x.cuda() for x in (t.pages, t.tokens, t.starts))) for t in tables]
    plan.update(tables)
    out = torch.empty_like(q)
    return {
        "time_us": time_us([lambda i=i: plan.run(q, i, out=out) for i in range(layers)] * repeat),
        "error": check(cache, q, plan.run(q, layers - 1), scheme.name),
    }


def bench_shapes(args: argparse.Namespace, copy: float) -> list[str]:
    """Measure every shape. Return the names of what could not be timed."""
    failed, product = [], None if args.quick else matmuls()
    for batch, q_heads, tokens in (SHAPES[i] for i in args.shapes):
        shape = f"B={batch} H={q_heads}/{KV_HEADS} T={tokens} D={HEAD_DIM}"
        times = bench_16_bit(batch, q_heads, tokens, peers=args.peers)
        best = min(times, key=lambda name: times[name])
        peers = [{"kernel": name, "shape": shape, "time_us": t} for name, t in times.items()]
        print(f"{shape}: " + ", ".join(f"{name} {t:.1f} us" for name, t in times.items()), flush=True)
        torch.cuda.empty_cache()
        rows = []
        for name in args.presets:
            try:
                r = bench_preset(name, batch, q_heads, tokens, product)
            except (KvbitsError, RuntimeError, ValueError) as error:  # the others are worth having
                print(f"  {name:14s} failed: {type(error).__name__}: {error}", flush=True)
                failed.append(f"{name} at {shape}")
                continue
            row = {
                "scheme": name,
                "shape": shape,
                **r,
                "best_16_bit": best,
                "speedup_real_cache": times[best] / r["time_us"],
            }
            more = ""
            if "between_matmuls_us" in r:
                row["speedup_between_matmuls"] = times[best] / r["between_matmuls_us"]
                more = f"matmuls x{row['speedup_between_matmuls']:.2f}  "
            rows.append(row)
            print(
                f"  {name:14s} {r['time_us']:8.1f} us  real x{row['speedup_real_cache']:.2f}  {more}tail"
                f" {r.get('tail_tokens', '-')}  error {r['error']:.1e}",
                flush=True,
            )
            torch.cuda.empty_cache()
        append(rows, args.out, sections={"peers": peers}, copy_tb_per_s=copy)
    if missing:
        append([], args.out, missing=missing)
    return failed


def warm(presets: list[str]) -> None:
    """Compile everything that the rows of these presets need: a short cache of each, with both numbers of query heads;
    and the 16-bit kernels.
    """
    for q_heads in (32, 64):
        for name in presets:
            print(name, q_heads, f"{bench_preset(name, 8, q_heads, 8192, None)['time_us']:.1f} us", flush=True)
        print(bench_16_bit(8, q_heads, 8192), flush=True)


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("presets", nargs="*", default=list(PRESETS))
    found.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    found.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="16-bit kernels; cuDNN is always timed"
    )
    found.add_argument("--warm", action="store_true")
    found.add_argument("--quick", action="store_true", help="a third of the replays, nothing between matrix products")
    return found


def main() -> None:
    args = parser().parse_args()
    be_quick(args.quick)
    torch.manual_seed(0)
    failed: list[str] = []
    if args.warm:
        warm(args.presets)
    else:
        failed = bench_shapes(args, copy_bandwidth() / 1e12)
    if failed:
        raise SystemExit(f"not timed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
