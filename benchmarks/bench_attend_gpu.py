"""Attention of single tokens on a GPU where caches are small, where many queries come at once, and over tiers
(bench_decode_gpu.py times whole caches): presets beside the 16-bit kernels of the same run.

    python benchmarks/bench_attend_gpu.py --small [--out benchmarks/results/<gpu>/attend_small.json]      where 16-bit
    attention is faster: small batches and contexts
    python benchmarks/bench_attend_gpu.py --prefill [--out .../attend_prefill.json]                       chunks of many
    query tokens over packed history
    python benchmarks/bench_attend_gpu.py --tiers [--schemes tiered] [--out .../attend_tiers.json]   tiers, against what
    each tier's bytes cost at its own bandwidth

A row is timed only after its output has been compared with the float64 reference over the same pages. Times are medians
of CUDA-graph replays of several launches in a row, each on other memory (layers of a cache larger than L2). What a
launch must move: all packed pages once. `--quick` replays a third as often. The 16-bit kernels are those that are
installed: cuDNN, FlashAttention-3 (package fa3-fwd) and FlashInfer; the run's record says why another is missing. The
last line is one JSON object; rows are added to --out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from run_files import append, arguments

from kvbits import schemes
from kvbits.ops import attend
from kvbits.ops.reference.attend import exact
from kvbits.ops.reference.close import close_pages
from kvbits.ops.types import PageStore, Table
from kvbits.quant.basis import completed
from kvbits.quant.scales import steps as band_steps
from kvbits.spec import PageLayout, QuantSpec, Scheme

KV_HEADS, HEAD_DIM, PAGE = 8, 128, 64
SHAPES = ((1, 32, 131072), (32, 64, 4096), (8, 32, 32768))  # sequences, query heads, tokens
# 32 query heads; at most 262,144 tokens in all
SMALL_BATCHES, SMALL_TOKENS = (1, 4, 16, 64), (256, 512, 1024, 2048, 4096, 8192, 16384)
PREFILL = (
    (1, 32, 32, 32768),
    (1, 32, 64, 32768),
    (1, 32, 128, 32768),
    (1, 32, 512, 32768),
    (1, 32, 2048, 32768),
    (4, 32, 512, 8192),
)  # sequences, query heads, chunk, history
BANDED = ("klt4", "klt3", "klt2")
TIMED = {
    "small": ("int8_centered", "int4", "kivi4", "klt4"),
    "prefill": ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt2"),
    "tiers": ("tiered",),
}
REPEATS, QUICK_REPEATS = 30, 10
ROTATE_BYTES = 400 << 20
ERROR_LIMIT = 6e-3  # klt2 at 1 x 32,768 tokens has 5.1e-3: 16-bit queries lose bits against joined fields
CHUNK_ERROR_LIMIT = 1e-2  # keys and values are rounded to bf16 once more, as 16-bit attention has them


def made_up_basis(key: QuantSpec, heads: int, head_dim: int) -> torch.Tensor:
    """Make a basis, float32 [heads, head_dim, head_dim]: another direction for each channel, of lengths at which a step
    of 1 suits normal numbers.
    """
    mixed = torch.eye(head_dim, device="cuda") + torch.randn(heads, head_dim, head_dim, device="cuda") / (
        2 * head_dim**0.5
    )
    return mixed / band_steps(key, head_dim).cuda()


def made_up_mean(basis: torch.Tensor) -> torch.Tensor:
    """Make the `k_mean`, float32 [heads, 2, head_dim], of a made-up basis: means of normal numbers that are not zero,
    and a larger first key.
    """
    heads, head_dim, _ = basis.shape
    return torch.randn(heads, 2, head_dim, device="cuda") * torch.tensor([[0.5], [2.0]], device="cuda")


def calibrated(layout: PageLayout) -> dict[str, torch.Tensor]:
    """Make what calibration would return for normal numbers: even codebooks, one range per channel, a made-up basis,
    Llama's frequencies.
    """
    static = {}
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if spec.has_codebook:
            static[f"{kind}_codebook"] = (
                torch.linspace(-1, 1, 2**spec.bits, device="cuda").expand(layout.num_kv_heads, -1).contiguous()
            )
        if spec.static:
            static[f"{kind}_scale"] = torch.full((layout.num_kv_heads, layout.head_dim), 2.6, device="cuda")
            static[f"{kind}_bias"] = torch.zeros(layout.num_kv_heads, layout.head_dim, device="cuda")
        if spec.basis == "calibrated":
            static[f"{kind}_basis"] = made_up_basis(spec, layout.num_kv_heads, layout.head_dim)
            static[f"{kind}_mean"] = made_up_mean(static[f"{kind}_basis"])
        if spec.needs_rotary:
            half = layout.head_dim // 2
            static = completed(static, 500_000.0 ** (-torch.arange(half, device="cuda") / half))
    return static


replays = REPEATS


def be_quick(quick: bool) -> None:
    """Take a third of the replays, whose medians differ by less than machines do."""
    global replays
    replays = QUICK_REPEATS if quick else REPEATS


def time_us(launches: list[Any]) -> float:
    """Measure the median time of one launch in microseconds: `replays` of a CUDA graph of all `launches`."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Measure the bytes per second of a device-to-device copy, read and written bytes both counted."""
    x = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * x.numel() / float(np.median(times))


@dataclass(frozen=True)
class Call:
    """Attention over packed pages in random places, for layers that share their tables.

    Attributes:
        tables: of each part, on the GPU.
        pools: uint8 [pages, layers, H, bytes] of each part.
    """

    layouts: list[PageLayout]
    tables: list[Table]
    pools: list[torch.Tensor]
    static: dict[str, torch.Tensor]

    @property
    def layers(self) -> int:
        return self.pools[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of a layer."""
        return sum(x[:, 0].numel() for x in self.pools)

    def stores(self, layer: int) -> list[PageStore]:
        return [
            PageStore(layout, (pool[:, layer],), {} if layout.is_raw else self.static)
            for layout, pool in zip(self.layouts, self.pools, strict=True)
        ]

    def plan(self, q: torch.Tensor, positions: torch.Tensor) -> attend.Attention:
        """Make a plan that is ready to run for every layer. All queries come past the pages, or are the newest token."""
        batch, queries, heads, _ = q.shape
        options = {"batch_size": batch, "num_q_heads": heads, "num_queries": queries, "dtype": q.dtype}
        made = attend.plan(self.layouts, **options, device=q.device, past_only=True)
        for layer in range(self.layers):
            made.bind(layer, self.stores(layer))
        tables = self.tables
        if made.reads_host:
            tables = [Table(t.pages, t.tokens.cpu(), t.starts.cpu()) for t in tables]
            positions = positions.cpu()
        made.update(tables, positions=positions)
        return made


def _table(batch: int, pages: int, start: int, page_size: int) -> Table:
    """Make a table of full pages in random places, as many for each sequence."""
    ids = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    tokens, starts = (torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (pages * page_size, start))
    return Table(ids, tokens, starts)


def _pool(layout: PageLayout, pages: int, layers: int, static: dict[str, torch.Tensor], alike: bool) -> torch.Tensor:
    """Make uint8 [pages, layers, H, bytes] of random keys and values; `alike`: of 256 pages, many times."""
    pool = torch.empty(pages, layers, KV_HEADS, layout.head_bytes, dtype=torch.uint8, device="cuda")
    made = None
    for first in range(0, pages, 256):
        if made is None or not alike:
            k, v = (torch.randn(256, KV_HEADS, layout.page_size, HEAD_DIM, device="cuda") for _ in "kv")
            made = close_pages(k, v, layout, static, np.zeros(256, np.int64))[0]
        some = made[torch.randperm(256, device="cuda")] if alike else made
        pool[first : first + 256] = some[: pages - first, None]
    return pool


def packed_call(key: QuantSpec, value: QuantSpec, batch: int, tokens: int, page_size: int = PAGE) -> Call:
    """Make a call of `tokens` tokens of each sequence in one format, with layers of more bytes than L2."""
    layout = PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    pages = tokens // page_size
    layers = max(2, -(-ROTATE_BYTES // (batch * pages * layout.page_size_bytes)))
    static = calibrated(layout)
    pool = _pool(layout, batch * pages, layers, static, alike=bool(static))  # closing then takes sorts
    return Call([layout], [_table(batch, pages, 0, page_size)], [pool], static)


def error_of(call: Call, q: torch.Tensor, out: torch.Tensor, positions: torch.Tensor) -> float:
    """Return the error of the first layer's last 16 queries relative to float64."""
    want, _ = exact(q[:, -16:], call.stores(0), call.tables, positions=positions[:, -16:])
    return float((out[:, -16:].double() - want).norm() / want.norm())


def bench_preset(name: str, batch: int, q_heads: int, tokens: int, queries: int = 1) -> dict[str, Any]:
    """Check and time attention over packed pages. The check of a chunk takes its last 16 queries."""
    scheme = schemes.get(name)
    call = packed_call(scheme.key, scheme.value, batch, tokens, scheme.page_size)
    q = torch.randn(batch, queries, q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    # past the history: one query sees all of it, as do the others
    positions = torch.arange(tokens - 1, tokens - 1 + queries, dtype=torch.int32, device="cuda").repeat(batch, 1)
    plan = call.plan(q, positions)
    error = error_of(call, q, plan.run(q, 0), positions)
    if not error < (ERROR_LIMIT if queries == 1 else CHUNK_ERROR_LIMIT):
        raise SystemExit(f"{name} at {batch} x {tokens}: error {error} against float64; a wrong kernel has no speed")
    launches = _launches(plan, q, call.layers) * max(1, (12 if queries == 1 else 2) // call.layers)
    return {
        "formats": f"{scheme.key.format}/{scheme.value.format}",
        "page_size": scheme.page_size,
        "time_us": time_us(launches),
        "error": error,
        "bytes": call.nbytes,
    }


def _launches(plan: attend.Attention, q: torch.Tensor, layers: int) -> list[Any]:
    """Return one launch for each layer."""
    out = torch.empty_like(q)
    return [lambda layer=layer: plan.run(q, layer, out=out) for layer in range(layers)]


PEERS = ("cudnn", "fa3", "flashinfer")
missing: dict[str, str] = {}
"""16-bit kernels that this process could not time, and why."""


def bench_16_bit(
    batch: int, q_heads: int, tokens: int, queries: int = 1, peers: Sequence[str] = PEERS
) -> dict[str, float]:
    """Measure the microseconds of the installed 16-bit kernels, same shape, bf16, contiguous caches in turn
    (FlashInfer: pages of 64), two or as many as are larger than L2. `missing` names kernels that fail or differ from
    cuDNN; cuDNN must be there.
    """
    shape = (batch, KV_HEADS, tokens, HEAD_DIM)
    copies = max(2, -(-ROTATE_BYTES // (batch * KV_HEADS * tokens * HEAD_DIM * 4)))
    caches = [
        tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv") for _ in range(min(copies, 64))
    ]
    q = torch.randn(batch, q_heads, queries, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    times: dict[str, float] = {}
    want: torch.Tensor | None = None
    for name in ("cudnn", *(p for p in peers if p != "cudnn" and (queries == 1 or p != "flashinfer"))):
        if name in missing:
            continue
        try:
            launches = _PEERS[name](q, caches)
            out = launches[0]().double()
            want = out if want is None else want
            if not (error := float((out - want).norm() / want.norm())) < CHUNK_ERROR_LIMIT:
                raise ValueError(f"error {error} against cuDNN at {batch} x {tokens}")
            times[name] = time_us(launches * max(1, 8 // len(launches)))
        except Exception as error:  # a package that is absent, not built for this GPU, or that refuses the shape
            if name == "cudnn":
                raise
            missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"{name} was not timed: {missing[name]}", flush=True)
        torch.cuda.empty_cache()
    return times


Launches = list[Callable[[], torch.Tensor]]
"""One for each cache; they return [batch, query heads, queries, head_dim]."""


def _cudnn(q: torch.Tensor, caches: list[tuple[torch.Tensor, ...]]) -> Launches:
    def attend(kv: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, *kv, enable_gqa=True)

    return [lambda kv=kv: attend(kv) for kv in caches]


def _fa3(q: torch.Tensor, caches: list[tuple[torch.Tensor, ...]]) -> Launches:
    from fa3_fwd_interface import flash_attn_with_kvcache

    rows = [tuple(x.transpose(1, 2).contiguous() for x in kv) for kv in caches]
    lengths = torch.full((len(q),), rows[0][0].shape[1], dtype=torch.int32, device="cuda")
    queries = q.transpose(1, 2).contiguous()

    def attend(kv: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = flash_attn_with_kvcache(queries, *kv, cache_seqlens=lengths)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return [lambda kv=kv: attend(kv) for kv in rows]


def _flashinfer(q: torch.Tensor, caches: list[tuple[torch.Tensor, ...]]) -> Launches:
    import flashinfer

    batch, heads, tokens, d = caches[0][0].shape
    pages = tokens // PAGE
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    indices = torch.arange(batch * pages, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
    flat = q[:, :, 0].contiguous()
    paged = [tuple(x.transpose(1, 2).reshape(batch * pages, PAGE, heads, d) for x in kv) for kv in caches]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    wrapper.plan(indptr, indices, last, q.shape[1], heads, d, PAGE, q_data_type=q.dtype, kv_data_type=q.dtype)
    return [lambda kv=kv: wrapper.run(flat, kv).unsqueeze(2) for kv in paged]


_PEERS: dict[str, Callable[[torch.Tensor, list[tuple[torch.Tensor, ...]]], Launches]] = {
    "cudnn": _cudnn,
    "fa3": _fa3,
    "flashinfer": _flashinfer,
}


def tiers_call(scheme: Scheme, tiers: dict[str, tuple[int, int]], batch: int) -> Call:
    """Make a call over `tiers`, by name ("sink", "cold", "warm", "raw") and the tokens they span."""
    sinks, raw, tier = scheme.num_sink_tokens, QuantSpec.raw(), scheme.tiers[0]
    layouts = {
        name: PageLayout(key=k, value=v, page_size=size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        for name, (k, v, size) in {
            "sink": (raw, raw, sinks),
            "cold": (scheme.key, scheme.value, PAGE),
            "warm": (*tier.specs(scheme.key, scheme.value), PAGE),
            "raw": (raw, raw, PAGE),
        }.items()
    }
    static = calibrated(layouts["cold"])
    pages = {name: (end - start) // layouts[name].page_size for name, (start, end) in tiers.items()}
    nbytes = sum(batch * n * layouts[name].page_size_bytes for name, n in pages.items())
    layers = max(2, -(-ROTATE_BYTES // nbytes))
    return Call(
        [layouts[name] for name in tiers],
        [_table(batch, pages[name], start, layouts[name].page_size) for name, (start, _) in tiers.items()],
        [_pool(layouts[name], batch * pages[name], layers, static, alike=True) for name in tiers],
        static,
    )


def time_tiers(scheme: Scheme, tiers: dict[str, tuple[int, int]], batch: int, q_heads: int) -> dict[str, float]:
    """Check and time decoding over some tiers."""
    call = tiers_call(scheme, tiers, batch)
    q = torch.randn(batch, 1, q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    newest = max(end for _, end in tiers.values()) - 1
    positions = torch.full((batch, 1), newest, dtype=torch.int32, device="cuda")
    plan = call.plan(q, positions)
    error = error_of(call, q, plan.run(q, 0), positions)
    if not error < ERROR_LIMIT:
        raise SystemExit(f"{tiers}: error {error} against float64; a wrong kernel has no speed")
    return {
        "time_us": time_us(_launches(plan, q, call.layers) * max(1, 12 // call.layers)),
        "bytes": call.nbytes,
        "error": error,
    }


def bench_tiers(args: argparse.Namespace, copy: float) -> None:
    """Measure one step over the tiers of each scheme, and the sum of what the bytes of each tier take at the bandwidth
    of a whole cache of that tier's format.
    """
    for scheme in map(schemes.get, args.schemes):
        hot, warm, sinks = scheme.residual_length, scheme.tiers[0].num_tokens, scheme.num_sink_tokens
        for batch, q_heads, tokens in (SHAPES[i] for i in args.shapes or range(len(SHAPES))):
            ends = np.array([0, max(tokens - hot - warm, 0), tokens - hot, tokens]) + sinks
            bounds = {name: (int(ends[i]), int(ends[i + 1])) for i, name in enumerate(("cold", "warm", "raw"))}
            tiers = {name: span for name, span in bounds.items() if span[1] > span[0]}
            shape = f"B={batch} H={q_heads}/{KV_HEADS} T={tokens} D={HEAD_DIM}"
            alone = {name: time_tiers(scheme, {name: (0, tokens)}, batch, q_heads) for name in tiers}
            torch.cuda.empty_cache()
            mixed = time_tiers(scheme, {"sink": (0, sinks)} | tiers, batch, q_heads)
            share = {name: (end - start) / tokens for name, (start, end) in tiers.items()}
            expected = sum(share[name] * alone[name]["time_us"] for name in tiers)
            row = {
                "scheme": scheme.name,
                "shape": shape,
                **mixed,
                "expected_us": expected,
                "over": mixed["time_us"] / expected - 1,
                "tiers": {
                    name: {
                        "tokens": tiers[name][1] - tiers[name][0],
                        "whole_cache_us": r["time_us"],
                        "share_of_copy": r["bytes"] / (r["time_us"] * 1e-6) / copy,
                        "error": r["error"],
                    }
                    for name, r in alone.items()
                },
            }
            rows = [row | {"share_of_copy": mixed["bytes"] / (mixed["time_us"] * 1e-6) / copy}]
            print(
                f"{scheme.name} {shape}: {mixed['time_us']:.1f} us, {100 * row['over']:+.1f} % of the {expected:.1f} us"
                " of its tiers; whole caches: "
                + ", ".join(
                    f"{n} {z['whole_cache_us']:.1f} us ({z['share_of_copy']:.2f} of copy)"
                    for n, z in row["tiers"].items()
                ),
                flush=True,
            )
            torch.cuda.empty_cache()
            append(rows, args.out, copy_bytes_per_s=copy)


def bench_small(args: argparse.Namespace, copy: float) -> None:
    """Measure the speed against the fastest 16-bit kernel from 256 tokens up, and where it passes 1: 16-bit bytes of
    the whole call's keys and values.
    """
    slower = dict.fromkeys(args.schemes, 0)
    for batch in SMALL_BATCHES:
        for tokens in SMALL_TOKENS:
            if batch * tokens > 1 << 18:
                continue
            times = bench_16_bit(batch, 32, tokens, peers=args.peers)
            best = min(times, key=lambda name: times[name])
            found = {name: bench_preset(name, batch, 32, tokens) for name in args.schemes}
            nbytes = 4 * batch * tokens * KV_HEADS * HEAD_DIM
            shape = {"batch": batch, "tokens": tokens}
            base = {"best_16_bit": best, "time_16_bit_us": times[best], "bytes_16_bit": nbytes}
            rows = [{"scheme": name, **shape, **r, **base} for name, r in found.items()]
            append(
                rows,
                args.out,
                sections={"peers": [{"kernel": name, **shape, "time_us": t} for name, t in times.items()]},
                copy_bytes_per_s=copy,
            )
            slower |= {r["scheme"]: max(nbytes, slower[r["scheme"]]) for r in rows if r["time_us"] > times[best]}
            words = ", ".join(f"{r['scheme']} {r['time_us']:.1f} us x{times[best] / r['time_us']:.2f}" for r in rows)
            print(f"{batch:3d} x {tokens:6d}: {best} {times[best]:.1f} us; {words}", flush=True)
            torch.cuda.empty_cache()
    print(
        "largest 16-bit size at which 16-bit attention was faster:",
        {k: f"{v / 2**20:.0f} MiB" for k, v in slower.items()},
    )


def bench_prefill(args: argparse.Namespace, copy: float) -> None:
    """Measure a chunk of queries over history that all of them see. The 16-bit kernels read as many tokens of 16-bit
    history, unmasked too.
    """
    for batch, q_heads, chunk, tokens in [PREFILL[i] for i in args.shapes or range(len(PREFILL))]:
        times = bench_16_bit(batch, q_heads, tokens, chunk, args.peers)
        best = min(times, key=lambda name: times[name])
        flops = 4 * batch * q_heads * chunk * tokens * HEAD_DIM
        peers = ", ".join(f"{n} {t:.0f} us" for n, t in times.items())
        print(f"{batch} x {chunk} queries over {tokens}: {peers} ({flops / times[best] / 1e6:.0f} TFLOP/s)", flush=True)
        shape, rows = {"batch": batch, "chunk": chunk, "tokens": tokens}, []
        for name in args.schemes:
            r = bench_preset(name, batch, q_heads, tokens, queries=chunk)
            rows.append(
                {"scheme": name, **shape, **r, "best_16_bit": best, "time_16_bit_us": times[best], "flops": flops}
            )
            print(
                f"  {name:14s} {r['time_us']:8.0f} us  x{times[best] / r['time_us']:.2f} "
                f" {flops / r['time_us'] / 1e6:.0f} TFLOP/s  error {r['error']:.1e}",
                flush=True,
            )
            torch.cuda.empty_cache()
        append(
            rows,
            args.out,
            sections={"peers": [{"kernel": name, **shape, "time_us": t} for name, t in times.items()]},
            copy_bytes_per_s=copy,
        )


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    kind = found.add_mutually_exclusive_group(required=True)
    for name in TIMED:
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name)
    found.add_argument("--schemes", nargs="+", help="presets; those of the documents if left out")
    found.add_argument("--shapes", nargs="*", type=int, help="which of the shapes, by number; all if left out")
    found.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="16-bit kernels; cuDNN is always timed"
    )
    found.add_argument("--quick", action="store_true", help="a third of the replays")
    return found


def main() -> None:
    args = parser().parse_args()
    args.schemes = args.schemes or list(TIMED[args.kind])
    be_quick(args.quick)
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s", flush=True)
    {"small": bench_small, "prefill": bench_prefill, "tiers": bench_tiers}[args.kind](args, copy)
    if missing:
        append([], args.out, missing=missing)


if __name__ == "__main__":
    main()
