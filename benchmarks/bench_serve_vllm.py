"""Serving with stock vLLM: step times, largest batches, capacity, time to first token, time per token, by `--kv-cache-dtype`.

    python benchmarks/bench_serve_vllm.py decode  --kv-cache-dtype kvbits_int8_centered --shapes 48x8192 8x65536 48x512 256x1024 --largest 8192
    python benchmarks/bench_serve_vllm.py prefill --kv-cache-dtype kvbits_int8_centered --prompts 8192 65536
    python benchmarks/bench_serve_vllm.py serve   --kv-cache-dtype kvbits_int8_centered --rate 4 --requests 200

One process measures one dtype and adds its rows to `--out`; ratios are of rows of one session on one machine (environment variable KVBITS_SESSION, set by all_gpu.py). Each row says
vLLM's compilation mode: 0 is without torch.compile and with full graphs of decoding steps, `--compile` is vLLM's default. Weights are random, of a model's geometry. `decode` skips prefill (unless `--prefill`; vLLM's DecodeBenchConnector, pages filled with random bytes that hold finite numbers) and takes the
median time of steps in which all sequences decode; with `--speculate K` each of them brings K drafts that are always right (one token is allowed, so vLLM's n-gram
drafts find it), and K = 0 is what to compare that with. `prefill` sends one prompt alone. `serve` sends ragged prompts at Poisson times. The engine runs in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from result_file import append

GEOMETRIES = {
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3.1-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "tiny": {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
}
OUT = Path(__file__).parent / "results" / "nvidia-h200" / "serve_vllm.json"


def model_directory(geometry: str, layers: int | None) -> Path:
    """config.json of a geometry; vLLM makes the weights."""
    path = Path(tempfile.mkdtemp()) / geometry
    path.mkdir()
    config = GEOMETRIES[geometry] | ({"num_hidden_layers": layers} if layers else {}) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2 if geometry == "tiny" else 8, "head_dim": 128,
        "vocab_size": 1024 if geometry == "tiny" else 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine(args: argparse.Namespace, max_model_len: int, max_num_seqs: int, captured: list[int], **more: Any) -> Any:
    """`vllm.LLM` with dummy weights."""
    from vllm import LLM

    compilation = {"cudagraph_capture_sizes": captured} | ({} if args.compile else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
    options: dict[str, Any] = {
        "model": str(model_directory(args.geometry, args.layers)), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "kv_cache_dtype": "auto" if args.kv_cache_dtype == "bf16" else args.kv_cache_dtype, "tensor_parallel_size": args.tensor_parallel,
        "disable_custom_all_reduce": args.tensor_parallel > 1, "gpu_memory_utilization": args.memory, "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": args.chunk, "compilation_config": compilation, "enable_prefix_caching": False,
    }  # fmt: skip
    if args.warm:  # a fixed size, so that several can start at once
        options["kv_cache_memory_bytes"] = 1 << 30
    return LLM(**(options | json.loads(args.engine) | more))


def _fill(worker: Any) -> None:
    """Random numbers in the pages of a worker, finite ones in every dtype: bytes 0x20 to 0x3b are small positive float16, float32 and fp8."""
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        pages = getattr(layer, "kv_cache", None)
        if pages is None or not pages.numel():
            continue
        if pages.is_floating_point() and pages.element_size() > 1:
            pages.normal_()
        else:
            pages.view(dtype=__import__("torch").uint8).random_(0x20, 0x3C)


def capacity(llm: Any) -> int:
    """Tokens that the KV cache holds."""
    config = llm.llm_engine.vllm_config.cache_config
    return config.kv_cache_size_tokens or config.num_gpu_blocks * config.block_size


def params(max_tokens: int, allowed: list[int] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, allowed_token_ids=allowed)


def ids(rng: random.Random, n: int) -> list[int]:
    first = rng.randrange(3, 1000)
    return [3 + (first + 7 * i) % 1000 for i in range(n)]


def decode_step(llm: Any, batch: int, context: int, speculate: int | None, steps: int) -> float:
    """Median milliseconds of a step in which `batch` sequences of `context` tokens decode, with as many drafts each."""
    core, rng = llm.llm_engine, random.Random(0)
    width, allowed = 1 + (speculate or 0), None if speculate is None else [1010]
    for i in range(batch):
        prompt = ids(rng, context - steps * width // 2)
        core.add_request(f"{batch}x{context}-{i}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params(steps * width, allowed))
    made: dict[str, int] = {}
    times = []
    while core.has_unfinished_requests():
        start = time.perf_counter()
        outputs = core.step()
        passed = time.perf_counter() - start
        grown = 0
        for o in outputs:
            n = len(o.outputs[0].token_ids)
            grown += n - made.get(o.request_id, 0) == width
            made[o.request_id] = n
        if grown == batch and not any(o.finished for o in outputs):
            times.append(passed)
    if len(times) < 10:
        raise SystemExit(f"{batch} x {context}: only {len(times)} steps had all sequences; the cache holds {capacity(llm)} tokens")
    return 1000 * statistics.median(times[4:])


def run_decode(args: argparse.Namespace) -> None:
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes]
    most_context = max([c for _, c in shapes] + ([args.largest] if args.largest else []))
    most_batch = max([b for b, _ in shapes] + ([args.max_batch] if args.largest else []))
    captured = sorted({b for b, _ in shapes} | (set(range(args.largest_step, args.max_batch + 1, args.largest_step)) if args.largest else set()))
    kv = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"startup_fill": True}}
    more: dict[str, Any] = {} if args.prefill else {"kv_transfer_config": kv}
    width = 1 + (args.speculate or 0)
    if width > 1:
        captured = [width * n for n in captured]
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": args.speculate, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = engine(args, most_context + args.steps * width, most_batch, captured, **more)
    if not args.prefill:
        llm.collective_rpc(_fill)
    total = capacity(llm)
    if args.largest:
        fits = total // (-(-(args.largest + args.steps // 2) // 64) * 64)
        shapes.append((min(fits // args.largest_step * args.largest_step, args.max_batch), args.largest))
    for i, (batch, context) in enumerate(shapes):
        largest = bool(args.largest) and i == len(shapes) - 1
        if batch * (context + args.steps * width) > total:
            print(f"{batch} x {context} does not fit {total} tokens", flush=True)
            continue
        ms = decode_step(llm, batch, context, args.speculate, args.steps)
        rate = round(1000 * batch * width / ms, 1)
        keep(args, llm, row(args, "decode", batch, context, step_ms=round(ms, 3), tokens_per_s=rate, capacity_tokens=total, largest=largest))


def run_prefill(args: argparse.Namespace) -> None:
    llm = engine(args, max(args.prompts) + 8, 8, [1, 2, 4, 8])
    rng = random.Random(1)
    llm.generate([{"prompt_token_ids": ids(rng, 600)}], params(2), use_tqdm=False)
    for n in args.prompts:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": ids(rng, n)}], params(1), use_tqdm=False)
            times.append(time.perf_counter() - start)
        keep(args, llm, row(args, "prefill", 1, n, ttft_ms=round(1000 * statistics.median(times), 2), capacity_tokens=capacity(llm)))


def run_serve(args: argparse.Namespace) -> None:
    sizes = [8, 16, 32, 64, 128, 256]
    llm = engine(args, args.longest + args.output + 8, 256, sizes)
    rng, core = random.Random(2), llm.llm_engine
    llm.generate([{"prompt_token_ids": ids(rng, 600)}], params(2), use_tqdm=False)
    arrivals, at = [], 0.0
    for i in range(args.requests):
        at += rng.expovariate(args.rate)
        arrivals.append((at, f"r{i}", ids(rng, round(args.longest * rng.uniform(0.02, 1.0) ** 2) + 16)))
    asked, first, last, made = {}, {}, {}, {}
    begin = time.perf_counter()
    while arrivals or core.has_unfinished_requests():
        now = time.perf_counter() - begin
        while arrivals and arrivals[0][0] <= now:
            at, name, prompt = arrivals.pop(0)
            asked[name] = at
            core.add_request(name, {"prompt_token_ids": prompt}, params(args.output))
        if not core.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[0][0] - now))
            continue
        for o in core.step():
            now = time.perf_counter() - begin
            name, n = o.request_id, len(o.outputs[0].token_ids)
            if n and name not in first:
                first[name] = now
            last[name], made[name] = now, n
    per_token = sorted(1000 * (last[r] - first[r]) / (made[r] - 1) for r in made if made[r] > 1)
    waits = sorted(1000 * (first[r] - asked[r]) for r in first)
    seconds = max(last.values())
    found = row(
        args, "serve", args.rate, args.longest, tokens_per_s=round(sum(made.values()) / seconds, 1), capacity_tokens=capacity(llm),
        ttft_ms=round(at_share(waits, 0.5), 1), ttft_p99_ms=round(at_share(waits, 0.99), 1), tpot_ms=round(at_share(per_token, 0.5), 2),
        tpot_p99_ms=round(at_share(per_token, 0.99), 2), requests=args.requests, rate_per_s=args.rate,
    )  # fmt: skip
    keep(args, llm, found)


def at_share(xs: list[float], share: float) -> float:
    return xs[min(len(xs) - 1, int(share * len(xs)))]


def row(args: argparse.Namespace, mode: str, batch: float, context: int, **found: Any) -> dict[str, Any]:
    numbers = {"step_ms": None, "tokens_per_s": None, "capacity_tokens": None, "ttft_ms": None, "tpot_p99_ms": None}
    shape = {"mode": mode, "geometry": args.geometry, "gpus": args.tensor_parallel, "kv_cache_dtype": args.kv_cache_dtype, "batch": batch, "context": context}
    options = json.loads(args.engine) | ({} if args.speculate is None else {"speculate": args.speculate})
    options |= ({"prefill": True} if args.prefill else {}) | ({"layers": args.layers} if args.layers else {})
    return shape | {"compiled": args.compile, "options": options} | numbers | found


def keep(args: argparse.Namespace, llm: Any, found: dict[str, Any]) -> None:
    """A row, as soon as it is measured."""
    append([found | how_compiled(llm)], None if args.warm else args.out)


def how_compiled(llm: Any) -> dict[str, Any]:
    """What vLLM made of its settings: compilation mode, kinds of graphs."""
    config = llm.llm_engine.vllm_config.compilation_config
    return {"compilation_mode": int(config.mode), "cudagraph_mode": getattr(config.cudagraph_mode, "name", str(config.cudagraph_mode))}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("what", choices=["decode", "prefill", "serve"])
    found.add_argument("--kv-cache-dtype", required=True, help="bf16, fp8, int8_per_token_head, kvbits_int8, ..")
    found.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    found.add_argument("--layers", type=int, help="fewer than the geometry has; rows say so")
    found.add_argument("--tensor-parallel", type=int, default=1)
    found.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory that vLLM may take")
    found.add_argument("--chunk", type=int, default=16384, help="tokens of a step (max_num_batched_tokens)")
    found.add_argument("--compile", action="store_true", help="vLLM's default compilation and kinds of graphs instead of mode 0 with FULL_DECODE_ONLY")
    found.add_argument("--engine", default="{}", help="more options of the engine, JSON")
    found.add_argument("--out", type=Path, default=OUT)
    found.add_argument("--shapes", nargs="*", default=[], help="decode: BATCHxCONTEXT ..")
    found.add_argument("--largest", type=int, default=0, help="decode: context at which the largest batch that fits is measured")
    found.add_argument("--largest-step", type=int, default=16, help="decode: largest batches are multiples of this")
    found.add_argument("--max-batch", type=int, default=400, help="decode: bound of the largest batch; graphs are captured up to here")
    found.add_argument("--steps", type=int, default=40, help="decode: tokens of each sequence, half of them past its context")
    found.add_argument("--prefill", action="store_true", help="decode: prefill the prompts instead of filling pages; raw copies are made so")
    found.add_argument("--speculate", type=int, help="decode: drafts of each sequence in a step")
    found.add_argument("--prompts", type=int, nargs="*", default=[8192, 65536])
    found.add_argument("--rate", type=float, default=4.0, help="serve: requests per second")
    found.add_argument("--requests", type=int, default=200)
    found.add_argument("--longest", type=int, default=8192, help="serve: longest prompt; the others are shorter, most of them much")
    found.add_argument("--output", type=int, default=128, help="serve: tokens of an answer")
    found.add_argument(
        "--warm", action="store_true", help="decode: the same with one layer and little memory, so that kernels are compiled and kept; times nothing"
    )
    found.add_argument("--quick", action="store_true", help="decode: half the steps")
    return found


def main() -> None:
    args = parser().parse_args()
    args.steps = args.steps // 2 if args.quick else args.steps
    if args.warm:
        args.layers, args.memory, args.what = 1, 0.06, "decode"
        run_decode(args)
        return
    {"decode": run_decode, "prefill": run_prefill, "serve": run_serve}[args.what](args)


if __name__ == "__main__":
    main()
