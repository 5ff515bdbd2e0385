"""Serving with stock SGLang: step times, largest batches, capacity, and users of long chats, by format;
`bench_serve_vllm.py decode` and `turns` are vLLM's.

    python benchmarks/bench_serve_sglang.py --format bf16 --shapes 48x512 --largest 8192
    python benchmarks/bench_serve_sglang.py --format int8_centered --shapes 48x512 --largest 8192
    python benchmarks/bench_serve_sglang.py --format int8_centered --users 64 --engine
                                            '{"enable_hierarchical_cache": true, "hicache_ratio": 4}'

One process measures one format and adds its rows to `--out`; ratios are of rows of one session on one machine. Weights
are random, of a model's geometry; `bf16` is SGLang's own backend (`--baseline`). Prompts are not computed, for any
format: a plugin of this file skips the layers of their steps and fills the pages with random bytes that hold finite
numbers. A step's time is the median distance of the tokens that one streamed request of the batch gets while all of
them decode. SGLang's own defaults otherwise: overlapped scheduling, full graphs of decoding steps. Keys in a calibrated
basis get a random orthogonal one; their history is read packed, and only the tokens of the batch's own steps raw.

With `--users` all prompts are computed, and chats are those of `bench_serve_vllm.py turns`: a row for each number of
users says what share of prompt tokens SGLang found in its caches, and what share of those came from host memory.
On a CPU all of it runs in the environment of tests/integrations/run_sglang_cpu.sh, with `--geometry tiny`, or with
`--model` and a small model's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from loads import Request, Update, drive

OUT = Path(__file__).parent / "results" / "nvidia-h100" / "serve_sglang.json"


def register() -> None:
    """Register the plugin, in each of SGLang's processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.models.llama.LlamaModel.forward", _without_prompts, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.__init__", _filled, HookType.AROUND)


def _without_prompts(
    original: Any, model: Any, input_ids: Any, positions: Any, forward_batch: Any, *more: Any, **options: Any
) -> Any:
    if forward_batch.forward_mode.is_extend():
        return model.embed_tokens(input_ids)
    return original(model, input_ids, positions, forward_batch, *more, **options)


def _filled(original: Any, pool: Any, *more: Any, **options: Any) -> None:
    """Fill all pages with random numbers, finite ones in every format: bytes 0x20 to 0x3b are small positive float16,
    bfloat16 and float32.
    """
    import torch

    original(pool, *more, **options)
    for x in pool.pages if hasattr(pool, "pages") else [*pool.k_buffer, *pool.v_buffer]:
        x.view(torch.uint8).random_(0x20, 0x3C)


def _install() -> None:
    """Let SGLang's processes find `register`."""
    plugin = Path(tempfile.mkdtemp()) / "bench_serve_sglang-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_serve_sglang\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.plugins]\nbench = bench_serve_sglang:register\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(plugin.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )


def engine(args: argparse.Namespace, context: int, requests: int, captured: list[int]) -> Any:
    """Start `sglang.Engine`, with dummy weights unless `--model` has some."""
    from bench_serve_vllm import model_directory, random_bases

    model, name = (
        args.model or model_directory(args.geometry, args.layers),
        ("auto" if args.format == "bf16" else f"kvbits_{args.format}"),
    )
    if not args.model and (bases := random_bases(model, name)):
        os.environ["KVBITS_SGLANG"] = json.dumps(bases["kvbits"])
    if not args.users:
        _install()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import sglang

    options: dict[str, Any] = {
        "load_format": "auto" if args.model else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "context_length": context,
        "max_running_requests": requests,
        "log_level": "warning",
        "attention_backend": args.baseline if args.format == "bf16" else name,
        "disable_radix_cache": not args.users,
        "cuda_graph_bs_decode": captured,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,
        "stream_interval": 1,
    }
    return sglang.Engine(model_path=str(model), **(options | json.loads(args.engine)))


def decode_step(llm: Any, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Measure the median milliseconds of a step in which `batch` sequences of about `context` tokens decode, and for
    how many ms their last tokens came apart.
    """
    from bench_serve_vllm import ids

    rng, sampling = random.Random(0), {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    prompts = [ids(rng, context - steps // 2) for _ in range(batch)]
    times: list[float] = []
    ends: list[float] = []

    async def ask(i: int) -> None:
        if i:
            await llm.async_generate(input_ids=prompts[i], sampling_params=sampling)
        else:
            async for _ in await llm.async_generate(input_ids=prompts[i], sampling_params=sampling, stream=True):
                times.append(time.perf_counter())
        ends.append(time.perf_counter())

    async def everything() -> None:
        await asyncio.gather(*map(ask, range(batch)))

    llm.loop.run_until_complete(everything())
    distances = [b - a for a, b in itertools.pairwise(times)][steps // 4 : -2]
    if len(distances) < 10:
        raise SystemExit(f"{batch} x {context}: only {len(times)} tokens came one by one")
    step, apart = statistics.median(distances), max(ends) - min(ends)
    if apart > steps / 2 * step:
        raise SystemExit(
            f"{batch} x {context}: sequences ended {1000 * apart:.0f} ms apart at {1000 * step:.1f} ms a step: they did"
            " not all decode together"
        )
    return 1000 * step, 1000 * apart


class Served:
    """An engine of SGLang as `loads.drive` asks it: each request is a task of its event loop.

    Attributes:
        from_host: tokens of prompts that came from host memory.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self.now, self.from_host = llm, time.perf_counter, 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._updates: list[Update] = []

    def wait(self, seconds: float) -> None:
        self._llm.loop.run_until_complete(asyncio.sleep(seconds))

    def add(self, request: Request) -> None:
        self._tasks[request.name] = self._llm.loop.create_task(self._ask(request))

    async def _ask(self, request: Request) -> None:
        asked = {"temperature": 0, "max_new_tokens": request.answer, "ignore_eos": True}
        stream = await self._llm.async_generate(
            input_ids=request.prompt, sampling_params=asked, rid=request.name, stream=True
        )
        made = 0
        async for output in stream:
            meta, ids = output["meta_info"], output["output_ids"]
            new = ids[made - meta["completion_tokens"] :] if made < meta["completion_tokens"] else []
            made = meta["completion_tokens"]
            finished = meta["finish_reason"] is not None
            if finished:
                self.from_host += (meta.get("cached_tokens_details") or {}).get("host", 0)
            self._updates.append(Update(request.name, new, finished, meta["cached_tokens"]))

    def step(self) -> list[Update]:
        self.wait(0.001)
        found, self._updates = self._updates, []
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done() or task.result()}
        return found

    def busy(self) -> bool:
        return bool(self._tasks or self._updates)

    def abort(self, names: list[str]) -> None:
        async def ended() -> None:
            for name in names:
                self._llm.tokenizer_manager.abort_request(name)
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

        self._llm.loop.run_until_complete(ended())
        self._tasks, self._updates = {}, []


def run_turns(args: argparse.Namespace) -> None:
    from bench_serve_vllm import long_chats, milliseconds
    from run_files import append

    history, answers = tuple(args.history), tuple(args.answer_tokens)
    longest = history[1] + 4 * answers[1]
    llm = engine(args, longest + 8, args.running, [n for n in (1, 2, 4, *range(8, 257, 8)) if n <= args.running])
    total = llm.get_server_info()["max_total_num_tokens"]
    for users in args.users:
        llm.flush_cache()
        chats = long_chats(args, users, history, answers, longest)
        # every chat was in the cache once, in the order in which users wrote
        before = chats.histories(users * longest)
        for prompt in before:
            llm.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
        server = Served(llm)
        seen, seconds = drive(server, chats, lambda now, _: now >= args.seconds)
        begun = [t for t in seen.values() if t.first is not None]
        prompts = max(1, sum(t.prompt for t in begun))
        found = {
            "mode": "turns",
            "kv_cache_dtype": args.format if args.format == "bf16" else f"kvbits_{args.format}",
            "geometry": args.geometry,
            "layers": args.layers,
            "gpus": 1,
            "compiled": False,
            "options": json.loads(args.engine),
            "batch": users,
            "context": history[1],
            "load": {"history": history, "answers": answers, "think_s": args.think, "running": args.running},
            "users": users,
            "turns": len(begun),
            "waiting": len(seen) - len(begun),
            "seconds": round(seconds, 1),
            "held_at_start": len(before),
            "hit_rate": round(sum(t.cached for t in begun) / prompts, 4),
            "host_rate": round(server.from_host / prompts, 4),
            **milliseconds(list(seen.values()), seconds),
            "tokens_per_s": round(sum(t.made for t in seen.values()) / seconds, 1),
            "capacity_tokens": total,
        }
        append([found], args.out)
    llm.shutdown()


def main() -> None:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--format", required=True, help="bf16, int8_centered, klt4, ..")
    found.add_argument("--baseline", default="fa3", help="SGLang's own backend, of --format bf16")
    found.add_argument("--geometry", default="llama-3.1-8b")
    found.add_argument("--layers", type=int, help="fewer than the geometry has; rows say so")
    found.add_argument("--model", type=Path, help="users: a folder of a model, instead of random weights")
    found.add_argument("--engine", default="{}", help="more options of the engine, JSON")
    found.add_argument("--shapes", nargs="*", default=[], help="BATCHxCONTEXT ..")
    found.add_argument(
        "--largest", type=int, default=0, help="context at which the largest batch that fits is measured"
    )
    found.add_argument(
        "--max-batch",
        type=int,
        default=400,
        help="bound of the largest batch, a multiple of 8; graphs are captured from half of it up",
    )
    found.add_argument("--steps", type=int, default=64, help="tokens of each sequence, half of them past its context")
    found.add_argument("--users", type=int, nargs="*", default=[], help="of long chats, instead of shapes")
    found.add_argument("--history", type=int, nargs=2, default=[8192, 30720], help="tokens of a chat when it begins")
    found.add_argument("--answer-tokens", type=int, nargs=2, default=[64, 512], help="of answers, messages as well")
    found.add_argument("--think", type=float, default=15, help="mean seconds between an answer and the next message")
    found.add_argument("--running", type=int, default=128, help="requests of chats that run at once")
    found.add_argument("--seconds", type=float, default=90, help="of chats that are measured")
    found.add_argument("--out", type=Path, default=OUT)
    args = found.parse_args()
    from run_files import append, this_run

    this_run()
    if args.model and not args.users:
        raise SystemExit("steps are timed with random weights; pass --users, or leave --model away")
    if args.model:
        args.geometry = args.model.name
    if args.users:
        run_turns(args)
        return
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes]
    captured = sorted(
        {b for b, _ in shapes}
        | (set(range(args.max_batch // 16 * 8, args.max_batch + 1, 8)) if args.largest else set())
    )
    context = max([c for _, c in shapes] + [args.largest]) + args.steps
    llm = engine(args, context, max(captured), captured)
    capacity = llm.get_server_info()["max_total_num_tokens"]
    if args.largest:
        # SGLang sets a page aside for each
        fits = capacity // (-(-(args.largest + args.steps // 2 + 1) // 64) * 64 + 64)
        shapes.append((min(fits // 8 * 8, args.max_batch), args.largest))
    for i, (batch, context) in enumerate(shapes):
        ms, apart = decode_step(llm, batch, context, args.steps)
        own = {  # as bench_serve_vllm.py has them
            "mode": "decode",
            "kv_cache_dtype": args.format if args.format == "bf16" else f"kvbits_{args.format}",
            "geometry": args.geometry,
            "layers": args.layers,
            "gpus": 1,
            "compiled": False,
            "options": json.loads(args.engine),
            "batch": batch,
            "context": context,
        }
        rate = round(1000 * batch / ms, 1)
        largest = bool(args.largest) and i == len(shapes) - 1
        append(
            [
                own
                | {
                    "step_ms": round(ms, 3),
                    "tokens_per_s": rate,
                    "capacity_tokens": capacity,
                    "largest": largest,
                    "ends_apart_ms": round(apart, 1),
                }
            ],
            args.out,
        )
    llm.shutdown()


if __name__ == "__main__":
    main()
