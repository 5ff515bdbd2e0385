"""close on a GPU: raw keys and values to packed pages in one launch, against the copy bandwidth of the same run.

    python benchmarks/bench_close_gpu.py [--schemes fp8 ..] [--closing-only] [--out
    benchmarks/results/<gpu>/close_pages.json]

2,048 pages of 64 tokens x 8 kv heads x 128 channels in bf16. A row is timed only after 64 of its pages were compared
with the reference's, byte for byte (keys in a calibrated basis: but for one byte in a thousand, ties of products that
are summed in another order). Times are medians of CUDA-graph replays over several inputs and pools in turn, larger than
L2. What a launch must move: the raw keys and values and the pages, once.

Then store, a token of each of B sequences to its slot in raw pages: microseconds of a layer where 32 layers share a
pass, as a cache calls it (slots uploaded once a pass), by the wall clock; the kernel alone in a graph; and the
reference. And tokens raw or quantized into their slots: a decoding step of 48 sequences and a prompt of 16,384 tokens,
the kernel alone in a graph. Each row is added to --out as it comes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import Any

import numpy as np
import torch
from bench_attend_gpu import BANDED, be_quick, calibrated, copy_bandwidth, time_us
from run_files import append, arguments

from kvbits import schemes
from kvbits.errors import KvbitsError
from kvbits.later import upload
from kvbits.ops.cuda import store as store_cuda
from kvbits.ops.cuda.families import family_of
from kvbits.ops.reference import close as reference
from kvbits.ops.reference import store as store_reference
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, QuantSpec

PAGES, HEADS, PAGE, HEAD_DIM = 2048, 8, 64, 128
COPIES = 2
CHECKED = 64
TIES = 1e-3  # of a page's bytes


def _rows() -> dict[str, tuple[QuantSpec, QuantSpec]]:
    """Name to (keys, values)."""
    presets = {name: schemes.get(name) for name in ("int8_centered", "int4", "kivi4", "fp8", *BANDED)}
    return {name: (s.key, s.value) for name, s in presets.items()}


def same_pages(pages: torch.Tensor, want: torch.Tensor, layout: PageLayout, product: bool) -> bool:
    """Return whether pages hold the reference's bytes. Keys that are products with a basis may differ in ties, and in
    what follows from ties.
    """
    differ, values = (
        (pages != want).double(),
        min(s.offset for name, s in layout.sections.items() if name.startswith("v_plane")),
    )
    if not product:
        return not bool(differ.any())
    print(
        f"    bytes unlike the reference's: {differ.mean():.1e} of a page, {differ[..., values:].mean():.1e} of what"
        " follows the keys' planes",
        flush=True,
    )
    return float(differ.mean()) <= TIES


def bench(key: QuantSpec, value: QuantSpec) -> dict[str, Any]:
    """Check and time closing of `PAGES` pages."""
    layout = PageLayout(key=key, value=value, page_size=PAGE, num_kv_heads=HEADS, head_dim=HEAD_DIM)
    launches, kept = [], []  # a graph's capture gives back memory that nothing holds
    for _ in range(COPIES):
        k, v = (torch.randn(PAGES, HEADS, PAGE, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        slab = torch.empty(PAGES, HEADS, layout.head_bytes, dtype=torch.uint8, device="cuda")
        store = PageStore(layout, (slab,), calibrated(layout))
        addresses = torch.arange(PAGES, device="cuda") * slab.stride(0) + slab.data_ptr()
        status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device="cuda")
        kept.append(slab)
        starts = np.arange(PAGES) * PAGE
        family = family_of(layout)
        first = family.first(store, starts, PAGES, k.device)
        launches.append(functools.partial(family.close, k, v, store, addresses, status, first))
        launches[-1]()
        static = {name: x.cpu() for name, x in store.static.items()}
        want, _ = reference.close_pages(k[:CHECKED].cpu(), v[:CHECKED].cpu(), layout, static, starts[:CHECKED])
        if not same_pages(slab[:CHECKED].cpu(), want, layout, key.basis == "calibrated"):
            raise ValueError("other bytes than the reference's; a wrong kernel has no speed")
    moved = 2 * PAGES * HEADS * PAGE * HEAD_DIM * 2 + slab.numel()
    return {"time_us": time_us(launches * 4), "bytes": moved}


def bench_store_tokens(name: str, count: int) -> float:
    """Measure the microseconds of storing `count` tokens in the preset `name`, checked: single ones of as many
    sequences, each in another page; or one prompt.
    """
    scheme = schemes.get(name)
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=PAGE, num_kv_heads=HEADS, head_dim=HEAD_DIM)
    single = count < PAGE
    num_pages = 2 * count if single else count // PAGE
    places = torch.arange(count, device="cuda")
    slots = places * 2 * PAGE + places % PAGE if single else places
    previous = slots // PAGE + 1 if single else slots // PAGE - 1
    # Sequences of any length, so that tokens of a block are of other frames, as they are when requests decode together.
    starts = (torch.randperm(512, device="cuda")[:count] if single else slots // PAGE).int() * PAGE
    static = calibrated(layout)
    here = {name: x.cpu() for name, x in static.items()}
    store_cuda.prepare(layout, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    launches = []
    for _ in range(COPIES if not single else 64):
        k, v = (torch.randn(count, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        pages = torch.zeros(num_pages, HEADS, layout.head_bytes, dtype=torch.uint8, device="cuda")
        launches.append(
            functools.partial(
                store_cuda.store, k, v, PageStore(layout, (pages,), static), slots, previous=previous, starts=starts
            )
        )
        want = pages.cpu()
        launches[-1]()
        n = min(count, 4 * PAGE)
        entries = [x[:n].cpu() for x in (k, v, slots, previous, starts)]
        judged = PageStore(layout, (want,), here)
        store_reference.store(*entries[:2], judged, entries[2], previous=entries[3], starts=entries[4])
        touched = (entries[2] // PAGE).unique()
        differ = (pages.cpu()[touched] != want[touched]).sum() / (want[touched] != 0).sum()
        if differ > (TIES if layout.key.basis == "calibrated" else 0):
            raise SystemExit(
                f"store as {name}: {differ:.1e} of the bytes are not the reference's; a wrong kernel has no speed"
            )
    return time_us(launches * 4)


def bench_append(batch: int, layers: int = 32) -> dict[str, Any]:
    """Measure the times of writing one token of each of `batch` sequences."""
    layout = PageLayout(
        key=QuantSpec.raw(), value=QuantSpec.raw(), page_size=PAGE, num_kv_heads=HEADS, head_dim=HEAD_DIM
    )
    slabs = {
        name: torch.zeros(batch, layers, HEADS, layout.head_bytes, dtype=torch.uint8, device="cuda")
        for name in ("cuda", "reference")
    }
    stores = {name: [PageStore(layout, (slab[:, i],)) for i in range(layers)] for name, slab in slabs.items()}
    tokens = [
        [torch.randn(batch, 1, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        for _ in range(layers)
    ]
    places = np.array([(batch - 1 - b) * PAGE + b % PAGE for b in range(batch)])

    def one_pass(name: str) -> None:
        slots = upload(places, stores[name][0].device)
        for (k, v), pages in zip(tokens, stores[name], strict=True):
            (store_cuda if name == "cuda" else store_reference).store(k, v, pages, slots)

    waits: dict[str, list[float]] = {name: [] for name in stores}
    for turn in range(12):
        for name, seconds in waits.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            one_pass(name)
            torch.cuda.synchronize()
            seconds += [time.perf_counter() - start] if turn > 1 else []
    if not torch.equal(*slabs.values()):
        raise SystemExit("store: other bytes than the reference's; a wrong kernel has no speed")
    slots = upload(places, stores["cuda"][0].device)
    kernel = time_us(
        [
            functools.partial(store_cuda.store, *kv, pages, slots)
            for kv, pages in zip(tokens, stores["cuda"], strict=True)
        ]
    )
    return {"batch": batch, "kernel_us": kernel} | {
        f"{name}_us": statistics.median(t) / layers * 1e6 for name, t in waits.items()
    }


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--schemes", nargs="+", default=list(_rows()), choices=list(_rows()))
    found.add_argument("--closing-only", action="store_true", help="no tokens that are stored one by one")
    found.add_argument("--quick", action="store_true", help="a third of the replays")
    return found


def main() -> None:
    args = parser().parse_args()
    be_quick(args.quick)
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s", flush=True)
    shape = {"pages": PAGES, "kv_heads": HEADS, "page_size": PAGE, "head_dim": HEAD_DIM}
    failed = []
    for name in args.schemes:
        try:
            r = bench(*_rows()[name])
        except (KvbitsError, RuntimeError, ValueError) as error:  # the others are worth having
            print(f"  {name:24s} failed: {type(error).__name__}: {error}", flush=True)
            failed.append(name)
            continue
        row = {"scheme": name, **r, "share_of_copy": r["bytes"] / (r["time_us"] * 1e-6) / copy}
        print(f"  {name:24s} {r['time_us']:8.1f} us  {row['share_of_copy']:.3f} of copy", flush=True)
        append([row], args.out, copy_bytes_per_s=copy, **shape)
        torch.cuda.empty_cache()
    if not args.closing_only:
        bench_tokens(args, copy, shape)
    if failed:
        raise SystemExit(f"not timed: {', '.join(failed)}")


def bench_tokens(args: argparse.Namespace, copy: float, shape: dict[str, Any]) -> None:
    """Measure single tokens: the newest ones as a cache stores them raw, and the kernel alone."""
    appends = [bench_append(batch) for batch in (1, 32, 256)]
    for a in appends:
        print(
            f"  store of {a['batch']:3d} raw tokens  {a['cuda_us']:8.1f} us a layer (kernel {a['kernel_us']:.1f};"
            f" reference {a['reference_us']:.1f})",
            flush=True,
        )
    stores = [
        {"scheme": name, "tokens": n, "us": bench_store_tokens(name, n)}
        for name in ("raw", "int8_centered", "int4", *BANDED)
        for n in (48, 16384)
    ]
    for s in stores:
        print(f"  store of {s['tokens']:6,d} tokens as {s['scheme']:14s} {s['us']:8.1f} us", flush=True)
    append([], args.out, sections={"append": appends, "store_tokens": stores}, copy_bytes_per_s=copy, **shape)


if __name__ == "__main__":
    main()
