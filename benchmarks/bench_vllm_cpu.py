"""vLLM on a CPU: kvbits' kernels against vLLM's own, in its build for CPUs (the second environment of
tests/integrations/run_vllm_cpu.sh).

    OMP_NUM_THREADS=2 build/vllm-cpu-kernels/bin/python benchmarks/bench_vllm_cpu.py attention --shape 8x8192
    OMP_NUM_THREADS=2 build/vllm-cpu-kernels/bin/python benchmarks/bench_vllm_cpu.py chunk --shape 2048x6144
    OMP_NUM_THREADS=2 build/vllm-cpu-kernels/bin/python benchmarks/bench_vllm_cpu.py decode --model MODEL --shape 1x2048
    4x2048 --formats raw int8_centered --rounds 1 --out FILE

`attention` is a layer's part of a decoding step, storing the step's tokens and attending over pages of random numbers:
vLLM's operators on a bf16 cache, then each format as the plugin calls it, in interleaved rounds. Outputs are checked
first against dense attention in float32. `chunk` is a layer's part of a step of a prompt, whose SHAPE is fresh tokens x
tokens before them: vLLM's operators as a whole, and the parts of each format one by one, storing, attention among fresh
tokens, attention to the tokens before in every way that the plan may choose, and merging both. Outputs are checked in
the same way. `decode` runs engines of a model on disk, vLLM's own and one of each format (`raw`: kvbits' kernels on 16
or 32 bits), each in a process of its own with as many threads, one after the other:
prompts of random tokens, the first token of the first of them, the time from the last token but one of these to the
last, then the median of the steps in which all sequences decode, and the process's largest resident memory, its cache
no larger than the sequences. Prints a JSON line, `decode` one a case; a case that FILE has is not run again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import run_files
import torch
from run_files import append, arguments

BLOCK = 128
"""Tokens of a block of vLLM's own on a CPU."""
WORST = {"int8": 0.02, "int8_centered": 0.02, "int4": 0.25, "klt4": 0.25, "klt3": 0.45}
"""Relative distance from dense attention over random numbers, at most."""


def static_of(layout: Any) -> dict[str, torch.Tensor]:
    """Make the calibrated parameters of random bases."""
    from kvbits.ops.static import read_with

    heads, d = layout.num_kv_heads, layout.head_dim
    basis = torch.linalg.qr(torch.randn(heads, d, d)).Q
    known = {
        "k_basis": basis,
        "k_inverse": basis.mT.contiguous(),
        "k_inv_freq": 10000.0 ** -(torch.arange(0, d, 2) / d),
    }
    return {
        name: known.get(name, torch.zeros(shape))
        for name, shape in (read_with(layout) | ({"k_basis": ()} if layout.key.needs_rotary else {})).items()
    }


def stock(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, length: int
) -> tuple[torch.Tensor, Callable[[], None], Callable[[], None], int]:
    """Run vLLM's operators over k, v [B, N, H, D] with q [B, T, Hq, D], the newest tokens. Return what `ours` returns."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    batch, _, heads, d = k.shape
    pages = -(-length // BLOCK)
    cache = torch.zeros(batch * pages, heads, BLOCK * 2, d, dtype=torch.bfloat16)
    key, value = cache.chunk(2, dim=2)
    isa = _get_attn_isa(torch.bfloat16, BLOCK, d, "auto")
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    for b in range(batch):
        slots = torch.arange(length) + b * pages * BLOCK
        ops.cpu_attn_reshape_and_cache(k[b], v[b], key, value, slots, isa)
    count, asked = q.shape[1], q.flatten(0, 1)
    lens, starts = torch.full((batch,), length, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32) * count
    newest = (torch.arange(batch)[:, None] * pages * BLOCK + torch.arange(length - count, length)).flatten()
    out, fresh = torch.empty_like(asked), [x[:, length - count : length].flatten(0, 1) for x in (k, v)]
    given = ops.cpu_attn_get_scheduler_metadata(
        batch, q.shape[2], heads, d, lens, torch.bfloat16, starts, True, -1, isa, True
    )

    def attend() -> None:
        ops.cpu_attention_with_kv_cache(
            asked, key, value, out, starts, lens, d**-0.5, True, None, -1, table, 0.0, given, None
        )

    def store() -> None:
        ops.cpu_attn_reshape_and_cache(*fresh, key, value, newest, isa)

    return out, attend, store, cache.nbytes


def ours(
    name: str, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, length: int
) -> tuple[torch.Tensor, Callable[[], None], Callable[[], None], int]:
    """Return (out, attend, store, bytes of the pages): as the plugin does it for a layer, the step's plan made."""
    from kvbits.integrations.engine.served import FORMATS, PAGE_SIZE
    from kvbits.ops import attend
    from kvbits.ops import store as op
    from kvbits.ops.types import PageStore, Table

    batch, _, heads, d = k.shape
    layout, pages = FORMATS[f"kvbits_{name}"].layout(heads, d, d), -(-length // PAGE_SIZE)
    pool = torch.zeros(batch * pages, heads, layout.head_bytes, dtype=torch.uint8)
    static = static_of(layout)
    choice, stored = op.choose(layout, torch.bfloat16, pool.device), PageStore(layout, (pool,), static)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    at = torch.arange(length)
    for b in range(batch):
        before = torch.where((at % PAGE_SIZE == 0) & (at > 0), b * pages + at // PAGE_SIZE - 1, -1)
        starts = (at // PAGE_SIZE * PAGE_SIZE).int()
        choice.run(k[b], v[b], stored, b * pages * PAGE_SIZE + at, previous=before, starts=starts)
    plan = attend.plan([layout], batch_size=batch, num_q_heads=q.shape[2], dtype=q.dtype, device="cpu")
    plan.bind(0, [stored])
    plan.update([Table(table, torch.full((batch,), length, dtype=torch.int32))])
    out, newest = torch.empty_like(q), torch.arange(batch) * pages * PAGE_SIZE + length - 1
    none, first = (
        torch.full((batch,), -1),
        torch.full((batch,), (length - 1) // PAGE_SIZE * PAGE_SIZE, dtype=torch.int32),
    )

    def read() -> None:
        plan.run(q, 0, out=out)

    def store() -> None:
        choice.run(k[:, -1], v[:, -1], stored, newest, previous=none, starts=first)

    read()
    assert "cpu" in plan.explain() and choice.backend == "cpu", plan.explain()
    return out[:, 0], read, store, pool.nbytes


def attention(args: argparse.Namespace, shape: str) -> list[dict[str, Any]]:
    import vllm  # noqa: F401

    batch, length = map(int, shape.split("x"))
    torch.manual_seed(0)
    k, v = (torch.randn(batch, length, args.heads, args.head_dim, dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(batch, 1, args.heads * args.group, args.head_dim, dtype=torch.bfloat16)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x[:1].float().transpose(1, 2) for x in (q, k, v)), enable_gqa=True
    )[0, :, 0]
    sides = {"vllm": stock(k, v, q, length)} | {name: ours(name, k, v, q, length) for name in args.formats}
    for name, (out, attend, _, _) in sides.items():
        attend()
        distance = float((out[0].float() - dense).norm() / dense.norm())
        assert distance <= WORST.get(name, 0.02), f"{name} is wrong by {distance:.3g}; a speed would mean nothing"
    times: dict[str, list[list[float]]] = {name: [[], []] for name in sides}
    for _ in range(args.rounds):
        for name, (_, attend, store, _) in sides.items():
            for i, run in enumerate((attend, store)):
                began = time.perf_counter()
                run()
                times[name][i].append(time.perf_counter() - began)
    found = {name: [statistics.median(x) for x in t] for name, t in times.items()}
    least = {name: min(t[0]) for name, t in times.items()}
    return [
        {
            "mode": "attention",
            "cache": name,
            "shape": shape,
            "heads": args.heads,
            "head_dim": args.head_dim,
            "bytes": sides[name][3],
            "attend_s": found[name][0],
            "store_s": found[name][1],
            "attend_least_s": least[name],
            "over_vllm": found["vllm"][0] / found[name][0],
            "least_over_vllm": least["vllm"] / least[name],
        }
        for name in sides
    ]


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median of the seconds of each call, in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(x) for name, x in times.items()}


def exact_chunk(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return dense attention in float32; arguments as those of `parts_of_chunk`."""
    (_, count, q_heads, _), (_, tokens, heads, _) = q.shape, k.shape
    seen = torch.arange(tokens) <= torch.arange(tokens - count, tokens)[:, None]
    keys, values = (x.float().transpose(1, 2).repeat_interleave(q_heads // heads, 1) for x in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q.float().transpose(1, 2), keys, values, attn_mask=seen).transpose(1, 2)


def check_chunk(name: str, out: torch.Tensor, exact: torch.Tensor) -> None:
    """Refuse a result that is further from dense attention than `WORST` allows; vLLM's as far as 8 bits."""
    distance = float((out.float() - exact).norm() / exact.norm())
    assert distance <= WORST.get(name, WORST["int8"]), f"{name} is {distance:.3g} from dense attention"


def parts_of_chunk(
    name: str, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, exact: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """Return the parts of a layer's step of a prompt in a format, by name. Results are checked first.

    Args:
        k, v: [1, tokens, H, D]; q: [1, T, Hq, D] of the last T of them, which follow whole pages.
    """
    from kvbits.integrations.engine.served import FORMATS, PAGE_SIZE
    from kvbits.ops import chunk_attention
    from kvbits.ops import store as op
    from kvbits.ops.cpu.attend import ways
    from kvbits.ops.merge import merge
    from kvbits.ops.types import PageStore, Table

    (_, tokens, heads, d), (_, count, q_heads, _) = k.shape, q.shape
    layout, history = FORMATS[f"kvbits_{name}"].layout(heads, d, d), tokens - count
    pages = -(-tokens // PAGE_SIZE)
    pool = torch.zeros(pages, heads, layout.head_bytes, dtype=torch.uint8)
    stored, choice = PageStore(layout, (pool,), static_of(layout)), op.choose(layout, q.dtype, pool.device)
    slots = torch.arange(tokens)
    page, scaling = slots // PAGE_SIZE, d**-0.5
    before = torch.where((slots % PAGE_SIZE == 0) & (page > 0), page - 1, -1)

    def store(some: slice) -> None:
        starts = (page[some] * PAGE_SIZE).int()
        choice.run(k[0, some], v[0, some], stored, slots[some], previous=before[some], starts=starts)

    store(slice(0, history))
    own, positions = slice(history, tokens), slots[None, history:]
    fresh = chunk_attention.choose(q, v, None)
    result = torch.empty(1, count, q_heads, d), torch.empty(1, count, q_heads)
    calls: dict[str, Callable[[], Any]] = {
        "store": lambda: store(own),
        "fresh": lambda: fresh.run(q, k[:, own], v[:, own], positions, scaling, None, None),
    }
    options: dict[str, Any] = {
        "batch_size": 1,
        "num_queries": count,
        "num_q_heads": q_heads,
        "dtype": q.dtype,
        "device": pool.device,
        "scaling": scaling,
        "softcap": None,
        "sliding_window": None,
        "past_only": True,
        "spans": False,
    }
    table = Table(torch.arange(pages, dtype=torch.int32)[None], torch.tensor([history], dtype=torch.int32))
    for way, make in ways([layout], **options).items():
        plan = make()
        plan.bind(0, [stored])
        plan.update([table], None, positions.int())
        calls[f"history: {way}"] = lambda plan=plan: plan.run(q, 0, *result)  # type: ignore[misc]
    found, out = calls["fresh"](), torch.empty_like(q)
    for way in (call for part, call in calls.items() if part.startswith("history")):
        way()
        check_chunk(name, merge([found, result], into=out)[0], exact)
    return calls | {"merge": lambda: merge([found, result], into=out)}


def chunk(args: argparse.Namespace, shape: str) -> list[dict[str, Any]]:
    import vllm  # noqa: F401

    count, history = map(int, shape.split("x"))
    torch.manual_seed(0)
    k, v = (torch.randn(1, history + count, args.heads, args.head_dim, dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(1, count, args.heads * args.group, args.head_dim, dtype=torch.bfloat16)
    exact = exact_chunk(k, v, q)
    out, attend, store, _ = stock(k, v, q, history + count)
    attend()
    check_chunk("vllm", out.unflatten(0, (1, -1)), exact)
    sides: dict[str, dict[str, Callable[[], Any]]] = {"vllm": {"store": store, "attend": attend}}
    sides |= {name: parts_of_chunk(name, k, v, q, exact) for name in args.formats}
    calls = {f"{name}/{part}": call for name, parts in sides.items() for part, call in parts.items()}
    found = medians(calls, args.rounds)
    case = {"mode": "chunk", "shape": shape, "heads": args.heads, "group": args.group, "head_dim": args.head_dim}
    return [
        case | {"cache": name, "seconds": {part: found[f"{name}/{part}"] for part in parts}}
        for name, parts in sides.items()
    ]


def one_engine(args: argparse.Namespace, shape: str, name: str) -> dict[str, Any]:
    """Run the steps of one engine, in this process.

    Sequences end at their length, which may be the model's longest; no token is shared but by chance.
    """
    from bench_serve_vllm import random_bases
    from vllm import LLM, SamplingParams

    batch, length = map(int, shape.split("x"))
    folder = tempfile.TemporaryDirectory()  # goes with this process
    config: dict[str, Any] = (
        {"block_size": BLOCK} if name == "vllm" else {"block_size": 64, "attention_backend": "KVBITS"}
    )
    options = {"dtype": name} if name not in ("vllm", "raw") else {}
    if args.dummy:
        config |= {"load_format": "dummy", "skip_tokenizer_init": True}
        options |= random_bases(args.model, f"kvbits_{name}", Path(folder.name)).get("kvbits", {})
    config |= {"additional_config": {"kvbits": options}} if options else {}
    config |= (
        {"kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}} if args.filled else {}
    )
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=args.pool << 20,
        num_gpu_blocks_override=batch * -(-length // config["block_size"]) + 1,
        disable_log_stats=True,
        **config,
    )
    core, params = (
        llm.llm_engine,
        SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True, detokenize=False),
    )
    for b in range(batch):
        prompt = torch.randint(100, 20000, (length - args.tokens,), generator=torch.Generator().manual_seed(b)).tolist()
        core.add_request(str(b), {"prompt_token_ids": prompt}, params)
    began, prompts, steps = time.perf_counter(), [0.0], []
    first: set[str] = set()
    while core.has_unfinished_requests():
        before, all_decode = time.perf_counter(), len(first) == batch
        new = {output.request_id for output in core.step()} - first
        first |= new
        now = time.perf_counter()
        if all_decode:
            steps.append(now - before)
        elif new:
            prompts.append(now - began)
    found = {"step_s": statistics.median(steps), "tokens_per_s": batch / statistics.median(steps), "steps": len(steps)}
    if not args.filled:
        found |= {"first_token_s": prompts[1], "prompts_s": prompts[-1], "last_prompt_s": prompts[-1] - prompts[-2]}
    return found | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def decode(args: argparse.Namespace, threads: int) -> None:
    """Run a process for each case, and print a line for each. Cases of an earlier run of the same command, in the same
    file, are left out.
    """
    context = multiprocessing.get_context("forkserver")
    # ten seconds of imports, once
    context.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])
    known = run_files.read(args.out)["rows"] if args.out and args.out.exists() else []
    for shape, name in [
        (shape, name) for shape in args.shape for _ in range(args.rounds) for name in ["vllm", *args.formats]
    ]:
        case = {
            "mode": "decode",
            "model": args.model.name,
            "dtype": args.dtype,
            "shape": shape,
            "cache": name,
            "tokens": args.tokens,
            "filled": args.filled,
            "dummy": args.dummy,
        }
        if same := [row for row in known if case.items() <= ({"dummy": False} | row).items()]:
            known.remove(same[0])
            continue
        with ProcessPoolExecutor(1, context) as alone:
            append([case | alone.submit(one_engine, args, shape, name).result()], args.out, threads=threads)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("mode", choices=("attention", "chunk", "decode"))
    parser.add_argument("--shape", nargs="+", default=["8x8192"], help="sequences x tokens of each")
    parser.add_argument("--formats", nargs="*", default=["int8_centered", "int4", "klt4"])
    parser.add_argument("--heads", type=int, default=8, help="kv heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per kv head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12, help="of attention and of parts of a chunk; pairs of engines")
    parser.add_argument("--model", type=Path, help="folder of a model, for decode")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--tokens", type=int, default=24, help="decoded by each sequence")
    parser.add_argument(
        "--pool", type=int, default=8192, help="MiB that an engine's cache may take; it takes what the sequences need"
    )
    parser.add_argument(
        "--filled",
        action="store_true",
        help="decode behind prompts that vLLM's DecodeBenchConnector makes up instead of computing them",
    )
    parser.add_argument(
        "--dummy",
        action="store_true",
        help="weights and calibrations are random numbers: MODEL needs config.json alone",
    )
    args = parser.parse_args()
    threads = torch.get_num_threads()
    if args.mode == "decode":
        decode(args, threads)
        return
    run = chunk if args.mode == "chunk" else attention
    append([row for shape in args.shape for row in run(args, shape)], args.out, threads=threads)


if __name__ == "__main__":
    main()
