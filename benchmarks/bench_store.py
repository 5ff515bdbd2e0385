"""What a prefix store costs and saves: bytes, put and load against plain copies of the same bytes, time to the first token on a real model.

    python benchmarks/bench_store.py --tokens 32768 --schemes int4,kivi2 --where /data/store
    python benchmarks/bench_store.py --model MODEL --prompt 8192 --schemes int8_centered --where /data/store

Without --model: a cache of an 8B model's geometry (32 layers, 8 kv heads of 128) with random numbers is put and loaded again, and compared page by page, so that what is timed is right.
Beside it, in the same run: `cp` and `dd` of the same files with a flush, and reading them into memory that is there already (on a GPU: through pinned memory and on). Loads are from files
that were just written (warm) and end with an attention of one token that waits for them. Bits count everything; "entries" is how many prompts fit where one would in bfloat16.

With --model: a prompt of real text, computed and put, then loaded: seconds to the first token of each, and that the tokens are equal. Processor seconds stand beside them: on a machine that others
use, they are what stays the same.
The last line is one JSON object; it is also written to --out.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import command, merge_result

import kvbits
from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.spec import CacheSpec, LayerGeometry
from kvbits.store.loading import readers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--where", type=Path, required=True, help="an empty or new folder; it is removed at the end")
parser.add_argument("--tokens", type=int, default=32768)
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--schemes", default="int4,kivi2")
parser.add_argument("--device", default="cpu")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeat", type=int, default=3)
parser.add_argument("--model")
parser.add_argument("--prompt", type=int, default=2048)
parser.add_argument("--dtype", default="auto", help="of the model's weights")
parser.add_argument("--out", type=Path)
args = parser.parse_args()
torch.set_num_threads(args.threads)
DEVICE = torch.device(args.device)
CHUNK = 2048


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def timed(work: Any) -> float:
    """Seconds of one call."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def filled(spec: CacheSpec) -> PagedCache:
    cache = PagedCache(spec, device=DEVICE)
    cache.made_for = "random numbers"
    g = spec.layers[0]
    k = torch.randn(1, CHUNK, g.num_kv_heads, g.head_dim, dtype=torch.bfloat16, device=DEVICE)
    for start in range(0, args.tokens, CHUNK):
        n = min(CHUNK, args.tokens - start)
        for layer in range(len(spec.layers)):
            cache.append(layer, k[:, :n], k[:, :n].flip(1))
        k = k.roll(1, 1)
    return cache


def empty(spec: CacheSpec) -> PagedCache:
    """A cache whose memory is there already, as a server's is."""
    cache = PagedCache(spec, device=DEVICE, max_tokens=args.tokens + 64)
    cache.made_for = "random numbers"
    for group in cache.groups:
        for pool in group.pools.values():
            for slab in pool.slabs:
                slab.fill_(1)
    return cache


def same(a: PagedCache, b: PagedCache) -> bool:
    for x, y in zip(a.groups, b.groups, strict=True):
        for mine, theirs in zip(x.sequences[0].closed, y.sequences[0].closed, strict=True):
            if not torch.equal(x.pools["closed"].block(mine), y.pools["closed"].block(theirs)):
                return False
    return a.seq_lens == b.seq_lens


def first_attention(cache: PagedCache) -> None:
    g = cache.spec.layers[0]
    q = torch.ones(1, 1, 4 * g.num_kv_heads, g.head_dim, dtype=torch.bfloat16, device=DEVICE)
    cache.begin(1, 1)
    cache.step(0, q, q[:, :, : g.num_kv_heads], q[:, :, : g.num_kv_heads], scaling=0.1)
    wait()
    cache.abandon()


def plain_copy(files: list[Path], room: torch.Tensor) -> None:
    """Read files into memory that is there already, as many at once as a load does; on a GPU through pinned memory."""
    sizes = [p.stat().st_size for p in files]
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]

    def one(path: Path, start: int, size: int) -> None:
        to = room[start : start + size]
        staged = to if DEVICE.type == "cpu" else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with path.open("rb", buffering=0) as file:
            file.readinto(staged.numpy())
        if staged is not to:
            to.copy_(staged, non_blocking=True)

    with ThreadPoolExecutor(min(readers(), len(files))) as pool:
        list(pool.map(one, files, starts.tolist(), sizes))
    wait()


def flushed(argv: list[str], where: Path) -> float:
    """Seconds of a program that writes below `where`, and of the flush of what it wrote."""

    def work() -> None:
        subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
        for path in [where] if where.is_file() else where.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    return timed(work)


def on_geometry(name: str) -> dict[str, Any]:
    layers = (LayerGeometry(num_kv_heads=8, head_dim=128),) * args.layers
    spec = CacheSpec(scheme=schemes.get(name, head_dim=128), layers=layers)
    ids = np.random.default_rng(0).integers(0, 100_000, args.tokens)
    donor = filled(spec)
    where = args.where / name
    seconds: dict[str, list[float]] = {x: [] for x in ("put", "cp", "dd", "load", "to_first_attention", "plain_copy")}
    for _ in range(args.repeat):
        shutil.rmtree(where, ignore_errors=True)
        store = kvbits.PrefixStore(where)
        seconds["put"].append(timed(lambda store=store: store.put(donor, ids)))
        copy = args.where / "copy"
        seconds["cp"].append(flushed(["cp", "-r", str(where), str(copy)], copy))
        shutil.rmtree(copy)
        files = [p for p in where.rglob("*") if p.is_file()]
        one = args.where / "one"
        seconds["dd"].append(flushed(["sh", "-c", f"cat {' '.join(map(str, files))} | dd of={one} bs=8M iflag=fullblock"], one))
        one.unlink()
    nbytes = store.nbytes
    cache, room = empty(spec), torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    first_attention(donor)
    for _ in range(args.repeat + 1):
        cache.reset()
        start = time.perf_counter()
        assert store.load(cache, ids) == args.tokens
        wait()
        seconds["load"].append(time.perf_counter() - start)
        first_attention(cache)
        seconds["to_first_attention"].append(time.perf_counter() - start)
        seconds["plain_copy"].append(timed(lambda: plain_copy(files, room)))
    assert same(donor, cache), "what was loaded is not what was put"
    shutil.rmtree(where)
    best = {key: min(x) for key, x in seconds.items()}
    raw = spec.raw_nbytes(args.tokens)
    return {
        "scheme": name, "bits": round(spec.bits_per_element, 3), "tokens": args.tokens, "layers": args.layers, "bytes": nbytes, "bf16_bytes": raw, "entries": raw / nbytes,
        "files": len(files), "readers": readers(), "seconds": best, "median_seconds": {key: statistics.median(x) for key, x in seconds.items()},
        "put_share_of_cp": best["cp"] / best["put"], "put_share_of_dd": best["dd"] / best["put"], "load_share_of_plain_copy": best["plain_copy"] / best["load"],
    }  # fmt: skip


def on_model(name: str) -> dict[str, Any]:
    from kvbits.evaluate.texts import novel

    model, tokenizer = kvbits.load_model(args.model, args.dtype, args.device)
    ids = tokenizer(novel(), return_tensors="pt").input_ids[:, : args.prompt].to(model.device)
    shutil.rmtree(args.where / "model", ignore_errors=True)
    store = kvbits.PrefixStore(args.where / "model")
    seconds, cpu_seconds, tokens = {}, {}, {}
    for what in ("computed", "loaded"):
        wait()
        start, cpu_start = time.perf_counter(), time.process_time()
        cache = kvbits.KVCache.from_prefix(model, ids, store=store, scheme=name, put=False)
        wait()
        seconds[f"{what}_cache"], cpu_cache = time.perf_counter() - start, time.process_time() - cpu_start
        if what == "computed":
            seconds["put"] = timed(lambda cache=cache: store.put(cache, ids[:, :-1]))
        start, cpu_start = time.perf_counter(), time.process_time()
        tokens[what] = model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        wait()
        seconds[what], cpu_seconds[what] = seconds[f"{what}_cache"] + time.perf_counter() - start, cpu_cache + time.process_time() - cpu_start
    nbytes = store.nbytes
    shutil.rmtree(args.where / "model")
    return {
        "scheme": name, "model": Path(args.model).name, "dtype": str(model.dtype)[6:], "threads": args.threads, "tokens": ids.shape[1], "bytes": nbytes,
        "seconds": seconds, "cpu_seconds": cpu_seconds, "share_of_cpu_seconds": cpu_seconds["loaded"] / cpu_seconds["computed"],
        "equal_token": bool(torch.equal(tokens["computed"], tokens["loaded"])), "share_of_computing": seconds["loaded"] / seconds["computed"],
    }  # fmt: skip


rows = [on_model(name) if args.model else on_geometry(name) for name in args.schemes.split(",")]
for row in rows:
    print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items() if not isinstance(x, dict)})
    print("   seconds:", {key: round(x, 3) for key, x in row["seconds"].items()})
shutil.rmtree(args.where, ignore_errors=True)
machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine()
merge_result({"command": command(), "machine": machine, "torch": torch.__version__, "rows": rows}, args.out, ("scheme", "model", "tokens"))
