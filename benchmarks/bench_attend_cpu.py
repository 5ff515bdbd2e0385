"""Attention of single tokens on the CPU: kvbits pages against the best torch 16-bit attention, one interleaved run.

    python benchmarks/bench_attend_cpu.py                       one thread: CPU time, medians
    python benchmarks/bench_attend_cpu.py kivi4 kivi2           these presets, in their own pages
    python benchmarks/bench_attend_cpu.py --formats int4_g64    a format that no preset has
    python benchmarks/bench_attend_cpu.py --threads 2           wall time, on an idle machine or under `chrt -f 50`
    python benchmarks/bench_attend_cpu.py --chunks 32,128,512   chunks of a prompt over a history, beside torch's SDPA:
                                                                what `kvbits bench` times
    python benchmarks/bench_attend_cpu.py --shapes 32/8/128/8192/8 --prefix 7680   sequences that share pages

Every candidate is checked against float64 on its dequantized values first, rotates over layers of at least 130 MB so
that K and V come from memory, and takes turns with the others round by round. A plain read of 512 MB in the same rounds
is the limit that shares are taken of. Our pages lie in 2 MiB pages, as the cache's pools do; torch's K and V in default
memory, as the stock caches do, and once more in 2 MiB pages (`_huge`). Peers, bf16, one query token:

    matmul   query heads of a kv head packed as rows: matmul, softmax, matmul (the fastest that torch has; ratios are
             against this one)
    sdpa     scaled_dot_product_attention with the same packing
    llama_*  llama.cpp's flash attention with its f16, q8_0 and q4_0 caches, in its layout and (`_contiguous`) with each
             head's tokens side by side, where
             llama-cpp-python is installed or --ggml names a folder with its libraries

With several threads every timed call follows a matrix product on all threads, as in a decoding step, and one thread
takes its turn in the same rounds. What the machine itself allows is printed beside: as many processes with one thread
each, over the same pages, against one such process.

Bytes are those of K and V in their format, scales included. The last line is one JSON object.
"""

from __future__ import annotations

import os
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_attention
import numpy as np
import torch
import torch.nn.functional as F
from run_files import append, arguments

from kvbits import schemes
from kvbits.cache.pool import allocate_slab
from kvbits.evaluate import speed
from kvbits.ops import attend
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.cpu import library
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference.attend import exact
from kvbits.ops.types import PageStore, Table
from kvbits.schemes import PRESETS
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec, Scheme

ROTATE_BYTES = 130_000_000
NOISE = {"int8": 1e-4, "raw": 1e-5, "fp8_e4m3": 1e-5, "fp8_e5m2": 1e-5}  # fewer bits: 2e-2
LLAMA_PEER = {"int8": "q8_0", "int4": "q4_0", "int4_g64": "q4_0", "raw": "f16"}
DEFAULT = ("raw", "int8_centered", "int8", "int4", "kivi4", "kivi2")
CHUNKED = ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt3", "klt2")
# tiers: bench_tiers_cpu.py; made-up scales of int8 say nothing
TIMED = [s.name for s in PRESETS.values() if not s.tiers and s.name != "int8_static"]


def study(name: str, key: QuantSpec, value: QuantSpec | None = None) -> Scheme:
    return Scheme(name=name, key=key, value=value or key)


FORMATS = {
    s.name: s
    for s in (
        *(study(f"{fmt}_g64", QuantSpec(format=fmt, granularity=PerGroup(64))) for fmt in ("int4", "int3", "int2")),
        study("fp8_g64", QuantSpec(format="fp8_e4m3", granularity=PerGroup(64))),
        study(
            "int8_channel",
            QuantSpec(format="int8", granularity=PerChannel()),
            QuantSpec(format="int8", granularity=PerGroup(64)),
        ),
        study(
            "kivi2_per_token",
            QuantSpec(format="int2", granularity=PerChannel(), symmetric=False),
            QuantSpec(format="int2", granularity=PerToken(), symmetric=False),
        ),
    )
}
"""Formats that no preset has, in pages of 64."""

parser = arguments(__doc__)
parser.add_argument(
    "--shapes",
    default="32/8/128/16384,14/2/64/16384",
    help="query heads / kv heads / head_dim / tokens[/ batch], several with commas",
)
parser.add_argument(
    "presets",
    nargs="*",
    help=f"of {', '.join(TIMED)}; without any, and without --formats: {', '.join(DEFAULT)}".replace("%", "%%"),
)
parser.add_argument("--formats", default="", help=f"with commas, of {', '.join(FORMATS)}")
parser.add_argument(
    "--chunks", default="", help="query tokens, several with commas; the history of each shape is one sequence's"
)
parser.add_argument("--prefix", type=int, default=0, help="first tokens whose pages all sequences of a batch share")
parser.add_argument("--rounds", type=int, default=40)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--tier", help="force an instruction set")
parser.add_argument(
    "--ggml", type=Path, help="folder with libggml-base.so and libggml-cpu.so; default: those of llama-cpp-python"
)
args = parser.parse_args()
FORMAT_NAMES = [name for name in args.formats.split(",") if name]
for unknown in (*(n for n in args.presets if n not in TIMED), *(n for n in FORMAT_NAMES if n not in FORMATS)):
    parser.error(
        f"{unknown!r} is no preset that can be timed here and no format; presets: {', '.join(TIMED)}; --formats:"
        f" {', '.join(FORMATS)}"
    )
NAMES = [*args.presets, *FORMAT_NAMES] or [*DEFAULT]
SHORTEST = min(int(text.split("/")[3]) for text in args.shapes.split(","))
if args.prefix and args.chunks:
    parser.error("--prefix is for decoding; leave it or --chunks away")
if not 0 <= args.prefix < SHORTEST:
    parser.error(
        f"--prefix {args.prefix} must be less than the {SHORTEST} tokens of the shortest of --shapes, and at least 0"
    )
torch.set_num_threads(args.threads)
torch.manual_seed(0)
if args.tier:
    library.set_tier(args.tier)
clock = time.process_time if args.threads == 1 else time.perf_counter


def huge(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in 2 MiB pages."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return allocate_slab(nbytes, torch.device("cpu"))[:nbytes].view(dtype).view(shape)


def our_candidate(name: str, hq: int, h: int, d: int, tokens: int, batch: int) -> tuple[Callable[[int], object], int]:
    """Return (decode over layer i, bytes of one layer), checked on layer 0."""
    scheme = schemes.get(name, head_dim=d) if name in PRESETS else FORMATS[name]
    key, value, size = scheme.key, scheme.value, scheme.page_size
    layout = PageLayout(key=key, value=value, page_size=size, num_kv_heads=h, head_dim=d)
    per, shared = tokens // size, args.prefix // size
    own = per - shared
    pages = shared + batch * own
    nbytes = pages * layout.page_size_bytes
    layers = -(-ROTATE_BYTES // nbytes) + 1
    slab = huge(layers, pages, h, layout.head_bytes, dtype=torch.uint8)
    k, v = (torch.randn(256, h, size, d).bfloat16() for _ in range(2))
    static = speed.made_up(layout, torch.device("cpu"))
    close = close_reference.close if close_cpu.refuses(k, PageStore(layout, (slab[0],), static)) else close_cpu.close
    for i in range(layers):
        if close is close_reference.close and i:  # too slow to do again
            slab[i] = slab[0]
            continue
        store = PageStore(layout, (slab[i],), static)
        for first in range(0, pages, 256):
            n = min(256, pages - first)
            ids = np.random.permutation(np.arange(first, first + n))
            of_sequence = np.where(ids < shared, ids, shared + (ids - shared) % max(own, 1))
            close(k[:n], v[:n], store, ids, starts=of_sequence * size)
    q = torch.randn(batch, 1, hq, d).bfloat16()
    plan = attend.plan([layout], batch_size=batch, num_q_heads=hq, dtype=q.dtype, device="cpu", backend="cpu")
    stores = [PageStore(layout, (slab[i],), static) for i in range(layers)]
    for i, store in enumerate(stores):
        plan.bind(i, [store])
    every = torch.arange(pages, dtype=torch.int32)
    read = torch.cat([every[:shared].expand(batch, -1), every[shared:].view(batch, own)], 1)
    table = Table(read, torch.full((batch,), tokens).int())
    plan.update([table])
    out = plan.run(q, 0, out=torch.empty(batch, 1, hq, d))
    want, _ = exact(q, stores[:1], [table])
    noise = float((out - want).norm() / want.norm())
    assert noise <= max(NOISE.get(s.format, 2e-2) for s in (key, value)), f"{name}: relative L2 error {noise:.2e}"
    print(f"  {name:15s} {nbytes / 1e6:7.1f} MB a layer x {layers:3d}   relative L2 error {noise:.1e}", flush=True)
    return lambda i: plan.run(q, i % layers, out=out), nbytes


def torch_candidate(kind: str, hq: int, h: int, d: int, tokens: int, batch: int) -> tuple[Callable[[int], object], int]:
    nbytes = 2 * batch * h * tokens * d * 2
    layers = -(-ROTATE_BYTES // nbytes) + 1
    shape = (layers, 2, batch, h, tokens, d)
    kv = huge(*shape, dtype=torch.bfloat16) if kind.endswith("_huge") else torch.empty(shape, dtype=torch.bfloat16)
    for layer in kv:
        layer.copy_(torch.randn(1, batch, h, 256, d).repeat(2, 1, 1, -(-tokens // 256), 1)[..., :tokens, :])
    q = torch.randn(batch, h, hq // h, d).bfloat16()
    scale = d**-0.5

    def matmul(i: int) -> torch.Tensor:
        k, v = kv[i % layers]
        return torch.softmax((q * scale) @ k.transpose(-1, -2), -1) @ v

    def sdpa(i: int) -> torch.Tensor:
        k, v = kv[i % layers]
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    run = matmul if kind.startswith("matmul") else sdpa
    k, v = kv[0].double()
    want = torch.softmax(q.double() @ k.transpose(-1, -2) * scale, -1) @ v
    noise = float((run(0).double() - want).norm() / want.norm())
    assert noise < 3e-2, f"{kind}: relative L2 error {noise:.2e}"
    return run, nbytes


probe = huge(64 << 20, dtype=torch.int64).fill_(1)


product = torch.randn(1024, 1024)


def timed(run: Callable[[int], object], turn: int, threads: int) -> float:
    """Measure the seconds of one call after one that brings the code and the threads back."""
    torch.set_num_threads(threads)
    run(turn)
    if args.threads > 1:
        product @ product[0]
    start = clock()
    run(turn + 1)
    return clock() - start


def calls_in_processes(run: Callable[[int], object], processes: int, seconds: float = 0.3) -> int:
    """Count the calls that so many processes of one thread finish at the same time. Each process begins at another
    layer.
    """
    torch.set_num_threads(1)
    begin = time.time() + 0.05
    pipes = []
    for p in range(processes):
        receive, send = os.pipe()
        if not os.fork():
            calls = 0
            time.sleep(max(0.0, begin - time.time()))
            while time.time() < begin + seconds:
                run(calls + 2 * p)
                calls += 1
            os.write(send, struct.pack("q", calls))
            os._exit(0)
        os.close(send)
        pipes.append(receive)
    calls = sum(struct.unpack("q", os.read(pipe, 8))[0] for pipe in pipes)
    for pipe in pipes:
        os.close(pipe)
        os.wait()
    return calls


def measure(
    candidates: dict[str, tuple[Callable[[int], object], int]],
) -> tuple[dict[str, float], dict[str, float], float]:
    """Measure all in turn. Return (median seconds of each candidate, seconds of ours on one thread, bytes per second of
    a plain read).
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    single: dict[str, list[float]] = {name: [] for name in NAMES} if args.threads > 1 else {}
    reads = []
    turn = 0
    for _ in range(args.rounds):
        torch.set_num_threads(args.threads)
        start = clock()
        probe.sum()
        reads.append(clock() - start)
        for name, (run, _) in candidates.items():
            turn += 1
            times[name].append(timed(run, turn, args.threads))
            if name in single:
                single[name].append(timed(run, turn + 2, 1))
    torch.set_num_threads(args.threads)
    return (
        {name: statistics.median(t) for name, t in times.items()},
        {n: statistics.median(t) for n, t in single.items()},
        probe.nbytes / statistics.median(reads),
    )


facts = {
    "threads": args.threads,
    "time": "cpu" if args.threads == 1 else "wall",
    "tier": library.tier(),
    "load": os.getloadavg()[0],
    "prefix": args.prefix,
}
if args.chunks:
    found = []
    for text in args.shapes.split(","):
        hq, h, d, tokens = (int(x) for x in text.split("/"))
        for chunk in map(int, args.chunks.split(",")):
            shape = speed.Shape(1, hq, h, d, tokens, chunk)
            found += speed.rows(args.presets or CHUNKED, shape, torch.device("cpu"), args.rounds, print)
            for r in found[-len(args.presets or CHUNKED) :]:
                print(f"  {r['name']:15s} {r['seconds'] * 1e3:9.2f} ms  {r['over_torch']:5.2f}x torch's fastest")
    append(found, args.out, **facts)
    raise SystemExit
rows: list[dict[str, Any]] = []
reads: list[dict[str, Any]] = []
ggml, no_ggml = llama_attention.find(args.ggml)
if ggml is None:
    print(f"llama.cpp is left out: {no_ggml}")
for text in args.shapes.split(","):
    hq, h, d, tokens, *rest = (int(x) for x in text.split("/"))
    batch = rest[0] if rest else 1
    print(f"{text}: {hq} query heads, {h} kv heads of {d}, {tokens} tokens, batch {batch}", flush=True)
    candidates = {name: our_candidate(name, hq, h, d, tokens, batch) for name in NAMES}
    for kind in ("matmul", "sdpa", "matmul_huge"):
        candidates[kind] = torch_candidate(kind, hq, h, d, tokens, batch)
    for kind in llama_attention.TYPES if ggml is not None and batch == 1 else ():
        for contiguous in (False, True):
            layers = -(-ROTATE_BYTES // (2 * h * tokens * d * {"f16": 16, "q8_0": 8, "q4_0": 4}[kind] // 8)) + 1
            candidates[f"llama_{kind}" + "_contiguous" * contiguous] = llama_attention.candidate(
                ggml, kind, contiguous, hq, h, d, tokens, layers, args.threads
            )
    seconds, single, bandwidth = measure(candidates)
    print(f"  read probe {bandwidth / 1e9:.1f} GB/s")
    for name, (_, nbytes) in candidates.items():
        rate = nbytes / seconds[name]
        print(
            f"  {name:21s} {seconds[name] * 1e3:8.3f} ms  {rate / 1e9:5.1f} GB/s  {rate / bandwidth:4.0%} of the read"
            f" probe  {seconds['matmul'] / seconds[name]:5.1f}x torch"
        )
    ceilings = {}
    for name in single:
        run = candidates[name][0]
        rates = [calls_in_processes(run, args.threads) / calls_in_processes(run, 1) for _ in range(3)]
        ceilings[name] = statistics.median(rates)
        print(
            f"  {name:15s} {args.threads} threads {single[name] / seconds[name]:.2f}x one; {args.threads} processes"
            f" {ceilings[name]:.2f}x one"
        )
    for name in candidates:
        row = {"shape": text, "name": name, "decode_s": seconds[name]}
        if name in NAMES:
            row["ratio_vs_torch16"] = round(seconds["matmul"] / seconds[name], 2)
            row["ratio_vs_torch16_huge_pages"] = round(seconds["matmul_huge"] / seconds[name], 2)
            row["share_of_read_bandwidth"] = round(candidates[name][1] / seconds[name] / bandwidth, 3)
        peers = (
            [m for m in candidates if m.startswith(f"llama_{LLAMA_PEER[name]}")]
            if name in NAMES and name in LLAMA_PEER
            else []
        )
        row |= {"ratio_vs_llama": {m: round(seconds[m] / seconds[name], 1) for m in peers}} if peers else {}
        row |= (
            {"threads_vs_one": round(single[name] / seconds[name], 2), "processes_vs_one": round(ceilings[name], 2)}
            if name in single
            else {}
        )
        rows.append(row)
    reads.append({"shape": text, "bytes_per_s": bandwidth})

append(rows, args.out, sections={"reads": reads}, **facts)
