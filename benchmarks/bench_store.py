"""Costs and savings of a prefix store: bytes, put and load against plain copies of the same bytes, time to the first
token on a real model.

    python benchmarks/bench_store.py --tokens 32768 --schemes int4,kivi2 --where /data/store
    python benchmarks/bench_store.py --model MODEL --prompt 8192 --schemes int8_centered --where /data/store
    python benchmarks/bench_store.py --model llama-8b --prompt 16384 --chunk 4096 --stock --device cuda --schemes
    int8_centered --where /data/store

Without --model: a cache of an 8B model's geometry (32 layers, 8 kv heads of 128) with random numbers is put and loaded
again, and compared page by page and by what every layer's attention returns, so that what is timed is right. Beside it,
in the same run and by turns: `cp` and `dd` of the same files with a flush, and reading them into memory that is there
already (on a GPU: through pinned memory and on). Loads are from files that were just written (warm) and end with an
attention of one token that waits for them. Bits count everything; "entries" is how many prompts fit where one would in
bfloat16. The least of --repeat runs counts; "first_load" is a process's first, which on a GPU pins memory. Bases of
calibrated schemes are random ones. "cold_load" begins without a page of the files in memory (they are flushed and
dropped, and mincore() is asked; what the disk's own host still holds it cannot know); a RAM disk has none. Rows say
what file system --where is on.

With --model: a prompt of real text, computed and put, then loaded: seconds to the first token of each, and that the
tokens are equal: "loaded" starts its first layers while later ones load, "loaded_whole" does not, "loaded_cold" is
"loaded" of files that no memory holds. Each is the median of --repeat runs, and so are "computed" and "stock".
"llama-8b" is an 8B Llama with random weights and a random prompt, on a GPU; --stock computes the prompt once more in
one pass with 16-bit keys and values and the model's own attention. Processor seconds stand beside: on a machine that
others use, they are what stays the same. The last line is one JSON object; rows are added to --out.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_files import append, arguments

import kvbits
from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.cache.reading import readers
from kvbits.spec import CacheSpec, LayerGeometry, Rotary

parser = arguments(__doc__)
parser.add_argument("--where", type=Path, required=True, help="an empty or new folder; it is removed at the end")
parser.add_argument("--tokens", type=int, default=32768)
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--schemes", default="int4,kivi2")
parser.add_argument("--device", default="cpu")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeat", type=int, default=3)
parser.add_argument("--puts", type=int, help="times that files are written, of the repeats: all if not given")
parser.add_argument("--model")
parser.add_argument("--prompt", type=int, default=2048)
parser.add_argument("--chunk", type=int, default=512, help="tokens that go through the model together")
parser.add_argument("--stock", action="store_true", help="also the time of the model's own attention and cache")
parser.add_argument("--dtype", default="auto", help="of the model's weights")
parser.add_argument("--calibration", type=Path, help="of the model, for a scheme that needs one")
args = parser.parse_args()
torch.set_num_threads(args.threads)
DEVICE = torch.device(args.device)
CHUNK = 2048
ROTARY = Rotary(inv_freq=tuple((500_000.0 ** (-np.arange(64) / 64)).tolist()))


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def timed(work: Any) -> float:
    """Measure the seconds of one call."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def bases(spec: CacheSpec) -> list[dict[str, torch.Tensor]] | None:
    """Make random orthogonal bases of the keys of schemes that have one, and means of zero."""
    if not spec.scheme.needs_calibration:
        return None
    g = spec.layers[0]
    made = torch.linalg.qr(torch.randn(len(spec.layers), g.num_kv_heads, g.head_dim, g.head_dim, device=DEVICE)).Q
    return [{"k_basis": x, "k_mean": torch.zeros(g.num_kv_heads, 2, g.head_dim, device=DEVICE)} for x in made]


def filled(spec: CacheSpec, static: list[dict[str, torch.Tensor]] | None) -> PagedCache:
    cache = PagedCache(spec, device=DEVICE, static=static)
    cache.made_for = "random numbers"
    g = spec.layers[0]
    k = torch.randn(1, CHUNK, g.num_kv_heads, g.head_dim, dtype=torch.bfloat16, device=DEVICE)
    for start in range(0, args.tokens, CHUNK):
        n = min(CHUNK, args.tokens - start)
        for layer in range(len(spec.layers)):
            cache.append(layer, k[:, :n], k[:, :n].flip(1))
        k = k.roll(1, 1)
    return cache


def empty(spec: CacheSpec, static: list[dict[str, torch.Tensor]] | None) -> PagedCache:
    """Make a cache whose memory is there already, as a server's is."""
    cache = PagedCache(spec, device=DEVICE, static=static, max_tokens=args.tokens + 64)
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


def attention(cache: PagedCache, layers: int) -> torch.Tensor:
    """Return what one token's queries read in the first layers, [layers, ..]. The cache stays as it is."""
    g = cache.spec.layers[0]
    x = torch.randn(layers, 1, 1, 4 * g.num_kv_heads, g.head_dim, generator=torch.Generator().manual_seed(0)).to(
        DEVICE, torch.bfloat16
    )
    cache.begin(1, 1)
    out = [
        cache.step(layer, q, q[:, :, : g.num_kv_heads], q[:, :, : g.num_kv_heads], scaling=0.1)[0]
        for layer, q in enumerate(x)
    ]
    cache.abandon()
    wait()
    return torch.stack(out)


def file_system(where: Path) -> str:
    """Return the type of the file system that a folder is on: "tmpfs", "ext4", .."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(mount, kind) for mount, kind in mounts if where.resolve().is_relative_to(mount)]
    return max(inside, key=lambda found: len(found[0]))[1]


def resident(path: Path) -> float:
    """Return the share of a file's pages that are in memory."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        view = (ctypes.c_ubyte * size).from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), held
        )
        del view
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return sum(x & 1 for x in held) / len(held)


def drop(where: Path) -> bool:
    """Drop the files below `where` from memory. Return whether no page of theirs is left there."""
    files = [p for p in where.rglob("*") if p.is_file() and p.stat().st_size]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return max(map(resident, files)) < 0.01


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
    """Measure the seconds of a program that writes below `where`, and of the flush of what it wrote."""

    def work() -> None:
        subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
        for path in [where] if where.is_file() else where.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    return timed(work)


def on_geometry(name: str) -> dict[str, Any]:
    layers = (LayerGeometry(num_kv_heads=8, head_dim=128, rotary=ROTARY),) * args.layers
    spec = CacheSpec(scheme=schemes.get(name, head_dim=128), layers=layers)
    static = bases(spec)
    ids = np.random.default_rng(0).integers(0, 100_000, args.tokens)
    donor = filled(spec, static)
    where = args.where / name
    seconds: dict[str, list[float]] = {
        x: []
        for x in ("put", "cp", "dd", "load", "to_first_attention", "plain_copy", "early_first_attention", "early_all")
    }
    for _ in range(args.puts or args.repeat):
        shutil.rmtree(where, ignore_errors=True)
        store = kvbits.PrefixStore(where)
        seconds["put"].append(timed(lambda store=store: store.put(donor, ids)))
        copy = args.where / "copy"
        seconds["cp"].append(flushed(["cp", "-r", str(where), str(copy)], copy))
        shutil.rmtree(copy)
        files = [p for p in where.rglob("*") if p.is_file()]
        one = args.where / "one"
        seconds["dd"].append(
            flushed(["sh", "-c", f"cat {' '.join(map(str, files))} | dd of={one} bs=8M iflag=fullblock"], one)
        )
        one.unlink()
    nbytes = store.nbytes
    cache, room = empty(spec, static), torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    attention(donor, 1)
    cpu_seconds: dict[str, list[float]] = {"load": [], "plain_copy": []}
    for _ in range(args.repeat + 1):
        cache.reset()
        start, cpu_start = time.perf_counter(), time.process_time()
        assert store.load(cache, ids) == args.tokens
        wait()
        seconds["load"].append(time.perf_counter() - start)
        cpu_seconds["load"].append(time.process_time() - cpu_start)
        attention(cache, 1)
        seconds["to_first_attention"].append(time.perf_counter() - start)
        cpu_start = time.process_time()
        seconds["plain_copy"].append(timed(lambda: plain_copy(files, room)))
        cpu_seconds["plain_copy"].append(time.process_time() - cpu_start)
        cache.reset()
        start = time.perf_counter()
        assert store.load(cache, ids, wait=False) == args.tokens
        attention(cache, 1)
        seconds["early_first_attention"].append(time.perf_counter() - start)
        cache.arrivals.wait_for_all()
        wait()
        seconds["early_all"].append(time.perf_counter() - start)
    cold = []
    for _ in range(args.repeat):
        cache.reset()
        if drop(where):
            cold.append(timed(lambda: store.load(cache, ids)))
    if cold:
        seconds["cold_load"] = cold
    else:
        cache.reset()
        store.load(cache, ids)
    assert same(donor, cache), "what was loaded is not what was put"
    expected = attention(donor, args.layers)
    assert torch.equal(expected, attention(cache, args.layers)), (
        "attention to what was loaded is not that to what was put"
    )
    cache.reset()
    store.load(cache, ids, wait=False)
    assert torch.equal(expected, attention(cache, args.layers)), "attention that begins early is another"
    shutil.rmtree(where)
    first_load, best_cpu = seconds["load"][0], {key: min(x) for key, x in cpu_seconds.items()}
    best = {key: min(x) for key, x in seconds.items()}
    raw = spec.raw_nbytes(args.tokens)
    return {
        "scheme": name,
        "bits": round(spec.bits_per_element, 3),
        "tokens": args.tokens,
        "layers": args.layers,
        "bytes": nbytes,
        "bf16_bytes": raw,
        "entries": raw / nbytes,
        "files": len(files),
        "readers": readers(),
        "seconds": best,
        "first_load": first_load,
        "cpu_seconds": best_cpu,
        "median_seconds": {key: statistics.median(x) for key, x in seconds.items()},
        "put_share_of_cp": best["cp"] / best["put"],
        "put_share_of_dd": best["dd"] / best["put"],
        "load_share_of_plain_copy": best["plain_copy"] / best["load"],
        "load_share_of_plain_copy_cpu": best_cpu["plain_copy"] / best_cpu["load"],
        "equal_attention": True,
    }


def model_and_prompt() -> tuple[Any, torch.Tensor]:
    """Load a model and make the token ids [1, prompt]."""
    if args.model == "llama-8b":
        from bench_generate_gpu import llama

        return llama(), torch.randint(0, 100_000, (1, args.prompt), generator=torch.Generator().manual_seed(0)).to(
            DEVICE
        )
    from kvbits.evaluate.texts import novel

    model, tokenizer = kvbits.load_model(args.model, args.dtype, args.device)
    return model, tokenizer(novel(), return_tensors="pt").input_ids[:, : args.prompt].to(model.device)


def stock_seconds(model: Any, ids: torch.Tensor) -> float:
    """Measure the seconds to the first token with the model's own attention and cache, the whole prompt in one pass."""
    kvbits.KVCache.detach(model)
    with torch.no_grad():
        times = [
            timed(lambda: model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item())
            for _ in range(args.repeat + 1)
        ]
        return statistics.median(times[1:])


def on_model(name: str) -> dict[str, Any]:
    model, ids = model_and_prompt()
    shutil.rmtree(args.where / "model", ignore_errors=True)
    store = kvbits.PrefixStore(args.where / "model")
    how: dict[str, Any] = {"store": store, "scheme": name, "put": False, "chunk": args.chunk}
    how |= {"calibration": kvbits.Calibration.load(args.calibration)} if args.calibration else {}
    # seconds, those of them until the cache was there, processor seconds
    runs: dict[str, list[tuple[float, float, float]]] = {}
    token: torch.Tensor | None = None
    if DEVICE.type == "cuda":  # kernels are compiled before anything is timed
        first = kvbits.KVCache.from_prefix(model, ids[:, : 2 * args.chunk + 2], **how)
        model.generate(ids[:, : 2 * args.chunk + 2], past_key_values=first, max_new_tokens=1, do_sample=False)
    order = [*["computed"] * args.repeat, *["loaded", "loaded_whole", "loaded_cold"] * args.repeat]
    for turn, what in enumerate(order):
        if what == "loaded_cold" and not drop(args.where / "model"):
            continue
        wait()
        start, cpu_start = time.perf_counter(), time.process_time()
        cache = kvbits.KVCache.from_prefix(model, ids, wait=what == "loaded_whole", **how)
        if what == "computed":
            wait()
        loaded, cpu_loaded = time.perf_counter() - start, time.process_time() - cpu_start
        if turn == args.repeat - 1:
            put = timed(lambda cache=cache: store.put(cache, ids[:, :-1]))
        start, cpu_start = time.perf_counter(), time.process_time()
        before, token = token, model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        wait()
        runs.setdefault(what, []).append(
            (loaded + time.perf_counter() - start, loaded, cpu_loaded + time.process_time() - cpu_start)
        )
        assert before is None or torch.equal(token, before), "another token from the loaded prefix"
    seconds = {what: statistics.median(r[0] for r in found) for what, found in runs.items()} | {"put": put}
    seconds |= {f"{what}_cache": statistics.median(r[1] for r in found) for what, found in runs.items()}
    cpu_seconds = {what: statistics.median(r[2] for r in found) for what, found in runs.items()}
    if args.stock:
        seconds["stock"] = stock_seconds(model, ids)
    nbytes, raw = store.nbytes, cache.pages.spec.raw_nbytes(ids.shape[1])
    shutil.rmtree(args.where / "model")
    return {
        "scheme": name,
        "model": Path(args.model).name,
        "dtype": str(model.dtype)[6:],
        "threads": args.threads,
        "tokens": ids.shape[1],
        "bytes": nbytes,
        "entries": raw / nbytes,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "share_of_cpu_seconds": cpu_seconds["loaded"] / cpu_seconds["computed"],
        "equal_token": True,
        "share_of_computing": seconds["loaded"] / seconds["computed"],
        "chunk": args.chunk,
        **({"share_of_stock": seconds["loaded"] / seconds["stock"]} if args.stock else {}),
    }


args.where.mkdir(parents=True, exist_ok=True)
for name in args.schemes.split(","):
    row = on_model(name) if args.model else on_geometry(name)
    print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items() if not isinstance(x, dict)})
    print("   seconds:", {key: round(x, 3) for key, x in row["seconds"].items()}, flush=True)
    append([row | {"device": args.device, "file_system": file_system(args.where)}], args.out)
shutil.rmtree(args.where, ignore_errors=True)
