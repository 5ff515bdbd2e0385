"""What planning a forward pass of one token takes on the CPU, for batches of equal and of unequal lengths: page tables
and pages (every backend), and the work lists of the CUDA kernels (132 multiprocessors, 8 kv heads; no GPU needed).

    python benchmarks/bench_planning_cpu.py [--out benchmarks/results/cpu/planning.json]

The pages are checked against the lengths, the lists for reading every chunk once. Medians; the last line is one JSON
object.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from result_file import append, arguments

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.ops.cuda.engine import schedule
from kvbits.spec import CacheSpec, LayerGeometry

SHAPES = ((1, 4096), (1, 131072), (8, 32768), (32, 4096), (128, 4096))  # sequences, tokens of the longest
KV_HEADS, BLOCKS, CHUNK_BYTES = 8, 132, 8704
TOKENS = 70  # steps that are timed: every sequence closes a page within them


def begin_us(batch: int, tokens: int) -> float:
    """Of `PagedCache.begin`, tokens coming one by one."""
    torch.manual_seed(0)
    cache = PagedCache(CacheSpec(scheme=schemes.get("int4"), layers=(LayerGeometry(num_kv_heads=1, head_dim=64),)))
    x = torch.randn(batch, 1024, 1, 64, dtype=torch.bfloat16)
    for _ in range(tokens // 1024):
        cache.append(0, x, x)
    times = []
    for _ in range(TOKENS):
        start = time.perf_counter()
        cache.begin(batch, 1)
        times.append(time.perf_counter() - start)
        cache.append(0, x[:, :1], x[:, :1])
    if cache.seq_lens != [tokens + TOKENS] * batch:
        raise SystemExit(f"the cache holds {cache.seq_lens[:3]}.. tokens, expected {tokens + TOKENS}")
    return statistics.median(times) * 1e6


def lists_ms(batch: int, tokens: int, equal: bool) -> float:
    """Of new work lists of one CUDA launch: closed pages and a raw tail."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(9):
        chunks = np.full(batch, tokens // 64) if equal else rng.integers(tokens // 128, tokens // 64 + 1, batch)
        closed = schedule.PartWork(np.cumsum(chunks) - chunks, chunks, CHUNK_BYTES, 0)
        tail = schedule.PartWork(int(chunks.sum()) + np.arange(batch), np.full(batch, 2), 2 * CHUNK_BYTES, 0, False)
        schedule._made.clear()
        start = time.perf_counter()
        (segments,), _ = schedule.schedule([closed, tail], KV_HEADS, [BLOCKS])
        times.append(time.perf_counter() - start)
        if int(segments[:, 4].sum()) != KV_HEADS * int(chunks.sum() + 2 * batch):
            raise SystemExit("the lists do not read every chunk once")
    return statistics.median(times) * 1e3


def main() -> None:
    parser = arguments(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch, tokens in SHAPES:
        row = {
            "batch": batch,
            "tokens": tokens,
            "begin_us": begin_us(batch, tokens),
            "lists_ms": lists_ms(batch, tokens, True),
            "lists_unequal_ms": lists_ms(batch, tokens, False),
        }
        rows.append(row)
        print(
            f"{batch:4d} x {tokens:6d}: pages {row['begin_us']:6.0f} us, new lists {row['lists_ms']:.2f} ms, of unequal"
            f" lengths {row['lists_unequal_ms']:.2f} ms",
            flush=True,
        )
    append(rows, args.out)


if __name__ == "__main__":
    main()
