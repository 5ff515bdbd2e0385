"""Serving with stock vLLM: step times, largest batches, capacity, time to first token, time per token, by
`--kv-cache-dtype`.

    python benchmarks/bench_serve_vllm.py decode  --kv-cache-dtype kvbits_int8_centered --shapes 48x8192 8x65536 48x512
                                                  256x1024 --largest 8192
    python benchmarks/bench_serve_vllm.py prefill --kv-cache-dtype kvbits_int8_centered --prompts 8192 65536
    python benchmarks/bench_serve_vllm.py goodput --kv-cache-dtype kvbits_int8_centered --tpot-limit 50 --ttft-limit
    2000
    python benchmarks/bench_serve_vllm.py turns   --kv-cache-dtype kvbits_int8_centered --users 16 32 64
    python benchmarks/bench_serve_vllm.py drafts  --kv-cache-dtype kvbits_klt4 --model MODEL --draft DRAFT

One process measures one dtype and adds its rows to `--out`; ratios are of rows of one session on one machine
(environment variable KVBITS_SESSION, set by all_gpu.py). Each row says vLLM's compilation mode: 0 is without
torch.compile and with full graphs of decoding steps, `--compile` is vLLM's default. Weights are random, of a model's
geometry. `decode` skips prefill (unless `--prefill`; vLLM's DecodeBenchConnector, pages filled with random bytes that
hold finite numbers) and takes the median time of steps in which all sequences decode; with `--speculate K` each of them
brings K drafts that are always right (one token is allowed, so vLLM's n-gram drafts find it), and K = 0 is what to
compare that with. With `--profile`, once all shapes are timed, some steps of each run under torch.profiler: a row of
mode "profile" says which kernels the microseconds of a step go to (step_profile.py). `prefill` sends one prompt alone.
The engine runs in this process.

`goodput` sends the same prompts and answers of many lengths to every dtype, at Poisson times. The rate rises until the
99th percentile of the time to the first token or of the time per token passes its limit, and is then halved in between:
a row for each rate tried, and one for the highest that held (`highest`). A rate is measured until its last request has
a first token, or its percentile cannot hold any more; answers under way then count with their time per token so far.
`--rates 2 4` measures these rates and searches none.

`turns` has users of long chats write, read and think, with prefix caching on: what does not fit is computed again.
Chats that fit are in the cache when the clock starts. A row for each number of users: the share of prompt tokens that
vLLM found in its cache, first tokens, tokens a second.

`drafts` continues windows of a text with a real model: with no drafts, with n-grams of the prompt, and with `--draft`
(a model of the same vocabulary), `--speculate` of them a step (3). A row for each says the share of drafts that was
accepted, tokens a step, and tokens a second while all sequences decode. `table_serve_vllm.py` shows them beside bf16.

Keys in a calibrated basis (kvbits_klt4 ..) of random weights get a random orthogonal one. `decode` fills pages past the plugin, so it
reads their history packed and only the tokens of its own steps raw; with `--prefill` raw copies are those of a server.
On a CPU all of it runs in the environment of tests/integrations/run_vllm_cpu.sh, with `--geometry tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import step_profile
import torch
from loads import Arrivals, Chats, Limits, Request, Timing, Update, at_share, drive, highest, most_at_once
from run_files import append, this_run

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for a GPU starts none: vLLM's workers are forked
}
"""Environment of the process, where nothing else is set."""
GEOMETRIES = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "tiny": {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
}
OUT = Path(__file__).parent / "results" / "nvidia-h200" / "serve_vllm.json"


def model_directory(geometry: str, layers: int | None) -> Path:
    """Write config.json of a geometry; vLLM makes the weights."""
    path = Path(tempfile.mkdtemp()) / geometry
    path.mkdir()
    config = (
        GEOMETRIES[geometry]
        | ({"num_hidden_layers": layers} if layers else {})
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": 2 if geometry == "tiny" else 8,
            "head_dim": 128,
            "vocab_size": 1024 if geometry == "tiny" else 128256,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )
    (path / "config.json").write_text(json.dumps(config))
    return path


def random_bases(model: Path, kv_cache_dtype: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the `additional_config` of a dtype whose keys are in a calibrated basis, empty for others. The file has an
    orthogonal basis for each head of a model, in `folder` or else in the model's.
    """
    from kvbits import schemes
    from kvbits.calibrate import Calibration, fingerprint
    from kvbits.geometry import layer_geometries, load_config
    from kvbits.integrations.engine.served import FORMATS
    from kvbits.ops.static import calibrated

    if kv_cache_dtype not in FORMATS or not FORMATS[kv_cache_dtype].calibrated:
        return {}
    config = load_config(model)
    layers = layer_geometries(config)
    scheme = schemes.for_layers(FORMATS[kv_cache_dtype].scheme.name, layers)
    static = []
    for i, layer in enumerate(layers):
        shapes = calibrated(scheme.for_layer(i, len(layers))[0], "k", layer.num_kv_heads, layer.head_dim)
        draw = torch.Generator().manual_seed(i)
        static.append(
            {
                n: torch.linalg.qr(torch.randn(x, generator=draw)).Q if n.endswith("basis") else torch.zeros(x)
                for n, x in shapes.items()
            }
        )
    file = (folder or model) / "calibration.safetensors"
    Calibration(static, fingerprint(config, scheme), {"model": "random weights", "scheme": scheme.name}).save(file)
    return {"kvbits": {"calibration": str(file)}}


def engine(args: argparse.Namespace, max_model_len: int, max_num_seqs: int, captured: list[int], **more: Any) -> Any:
    """Start `vllm.LLM`, with dummy weights unless `--model` has some."""
    model, given = args.model or model_directory(args.geometry, args.layers), json.loads(args.engine)
    options: dict[str, Any] = {
        "load_format": "auto" if args.model else "dummy",
        "skip_tokenizer_init": True,
        "seed": 0,
        "kv_cache_dtype": "auto" if args.kv_cache_dtype == "bf16" else args.kv_cache_dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(args.chunk, max_num_seqs),
        "enable_prefix_caching": False,
    }
    asked = given.get("additional_config", {})
    if not args.model and (bases := random_bases(model, args.kv_cache_dtype)):
        given["additional_config"] = asked | {"kvbits": bases["kvbits"] | asked.get("kvbits", {})}
    if not torch.cuda.is_available():
        import vllm_cpu

        raw = {"attention_backend": "KVBITS"} if args.kv_cache_dtype == "bf16" else {}
        options |= raw
        if "speculative_config" in more:  # a draft model's backend is asked for by itself
            more["speculative_config"] = more["speculative_config"] | raw
        return vllm_cpu.engine(model, **(options | more | given))
    from vllm import LLM

    compilation = {"cudagraph_capture_sizes": captured} | (
        {} if args.compile else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    )
    options |= {
        "dtype": "bfloat16",
        "tensor_parallel_size": args.tensor_parallel,
        "disable_custom_all_reduce": args.tensor_parallel > 1,
        "gpu_memory_utilization": args.memory,
        "compilation_config": compilation,
    }
    if args.warm:  # a fixed size, so that several can start at once
        options["kv_cache_memory_bytes"] = 1 << 30
    return LLM(model=str(model), **(options | more | given))


def _fill(worker: Any) -> None:
    """Fill the pages of a worker with random numbers, finite ones in every dtype: bytes 0x20 to 0x3b are small positive
    float16, float32 and fp8.
    """
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        pages = getattr(layer, "kv_cache", None)
        if pages is None or not pages.numel():
            continue
        if pages.is_floating_point() and pages.element_size() > 1:
            pages.normal_()
        else:
            pages.view(dtype=torch.uint8).random_(0x20, 0x3C)


def capacity(llm: Any) -> int:
    """Return the tokens that the KV cache holds."""
    config = llm.llm_engine.vllm_config.cache_config
    return config.kv_cache_size_tokens or config.num_gpu_blocks * config.block_size


def params(max_tokens: int, allowed: list[int] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, allowed_token_ids=allowed
    )


def ids(rng: random.Random, n: int) -> list[int]:
    first = rng.randrange(3, 1000)
    return [3 + (first + 7 * i) % 1000 for i in range(n)]


def decode_step(
    llm: Any,
    batch: int,
    context: int,
    speculate: int | None,
    steps: int,
    step: Callable[[], Sequence[Any]] | None = None,
) -> float:
    """Measure the median milliseconds of a step in which `batch` sequences of `context` tokens decode, with as many
    drafts each.

    `step`: instead of the engine's.
    """
    core, rng = llm.llm_engine, random.Random(0)
    step = step or core.step
    width, allowed = 1 + (speculate or 0), None if speculate is None else [1010]
    for i in range(batch):
        prompt = ids(rng, context - steps * width // 2)
        core.add_request(
            f"{batch}x{context}-{i}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params(steps * width, allowed)
        )
    made: dict[str, int] = {}
    times = []
    while core.has_unfinished_requests():
        start = time.perf_counter()
        outputs = step()
        passed = time.perf_counter() - start
        grown = 0
        for o in outputs:
            n = len(o.outputs[0].token_ids)
            grown += n - made.get(o.request_id, 0) == width
            made[o.request_id] = n
        if grown == batch and not any(o.finished for o in outputs):
            times.append(passed)
    if len(times) < 10:
        raise SystemExit(
            f"{batch} x {context}: only {len(times)} steps had all sequences; the cache holds {capacity(llm)} tokens"
        )
    return 1000 * statistics.median(times[4:])


def run_decode(args: argparse.Namespace) -> None:
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes]
    most_context = max([c for _, c in shapes] + ([args.largest] if args.largest else []))
    most_batch = max([b for b, _ in shapes] + ([args.max_batch] if args.largest else []))
    captured = sorted(
        {b for b, _ in shapes}
        | (set(range(args.largest_step, args.max_batch + 1, args.largest_step)) if args.largest else set())
    )
    kv = {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"startup_fill": True},
    }
    more: dict[str, Any] = {} if args.prefill else {"kv_transfer_config": kv}
    width = 1 + (args.speculate or 0)
    if width > 1:
        captured = [width * n for n in captured]
        more["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.speculate,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }
    llm = engine(args, most_context + args.steps * width, most_batch, captured, **more)
    if not args.prefill:
        llm.collective_rpc(_fill)
    total = capacity(llm)
    if args.largest:
        fits = total // (-(-(args.largest + args.steps // 2) // 64) * 64)
        shapes.append((min(fits // args.largest_step * args.largest_step, args.max_batch), args.largest))
    timed = []
    for i, (batch, context) in enumerate(shapes):
        largest = bool(args.largest) and i == len(shapes) - 1
        if batch * (context + args.steps * width) > total:
            print(f"{batch} x {context} does not fit {total} tokens", flush=True)
            continue
        ms = decode_step(llm, batch, context, args.speculate, args.steps)
        rate = round(1000 * batch * width / ms, 1)
        keep(
            args,
            llm,
            row(
                args,
                "decode",
                batch,
                context,
                step_ms=round(ms, 3),
                tokens_per_s=rate,
                capacity_tokens=total,
                largest=largest,
            ),
        )
        timed.append((batch, context, largest))
    for batch, context, largest in timed if args.profile else []:
        profiled = step_profile.Profiled(llm.llm_engine.step, batch)
        decode_step(llm, batch, context, args.speculate, args.steps, profiled)
        found = row(
            args,
            "profile",
            batch,
            context,
            capacity_tokens=total,
            largest=largest,
            **step_profile.of_trace(profiled.trace()),
        )
        print(
            "\n".join(
                [f"{batch} x {context}", "", step_profile.table_of([found]), "", step_profile.kernel_table(found), ""]
            ),
            flush=True,
        )
        keep(args, llm, found)


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
        keep(
            args,
            llm,
            row(
                args, "prefill", 1, n, ttft_ms=round(1000 * statistics.median(times), 2), capacity_tokens=capacity(llm)
            ),
        )


class Served:
    """An engine of vLLM as `loads.drive` asks it."""

    def __init__(self, llm: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self.llm, self.core, self.new = llm, llm.llm_engine, RequestOutputKind.DELTA
        self.now, self.wait = time.perf_counter, time.sleep

    def add(self, request: Request) -> None:
        asked = params(request.answer)
        asked.output_kind = self.new
        self.core.add_request(request.name, {"prompt_token_ids": request.prompt}, asked)

    def step(self) -> Iterator[Update]:
        for o in self.core.step():
            yield Update(o.request_id, list(o.outputs[0].token_ids), o.finished, o.num_cached_tokens or 0)

    def busy(self) -> bool:
        return bool(self.core.has_unfinished_requests())

    def abort(self, names: list[str]) -> None:
        self.core.abort_request(names)
        while self.busy():
            self.core.step()


def vocabulary(args: argparse.Namespace) -> int:
    if args.model:
        return json.loads((args.model / "config.json").read_text())["vocab_size"]
    return 1024 if args.geometry == "tiny" else 128256


def served(args: argparse.Namespace, longest: int, **more: Any) -> tuple[Any, Served]:
    """Start an engine for `--running` requests at once.

    Its kernels are compiled: prompts have been cut between steps, continued beside others that decode, and found again.
    """
    sizes = [n for n in (1, 2, 4, *range(8, 65, 8), *range(80, 1025, 16)) if n <= args.running]
    llm = engine(args, longest + 8, args.running, sizes, **more)
    length = min(longest, args.chunk // 2 + 300)
    for _ in range(2):
        llm.generate(
            [{"prompt_token_ids": ids(random.Random(n), length - 100 * n // 4)} for n in range(4)],
            params(16),
            use_tqdm=False,
        )
    return llm, Served(llm)


def milliseconds(timings: list[Timing], now: float) -> dict[str, float | None]:
    """Return P50 and P99 of first tokens and of times per token. Requests that wait for a first token count with what
    they have waited.
    """
    waits, rates = [t.wait(now) for t in timings], [x for t in timings if (x := t.per_token) is not None]
    found = {
        "ttft_ms": (waits, 0.5, 1),
        "ttft_p99_ms": (waits, 0.99, 1),
        "tpot_ms": (rates, 0.5, 2),
        "tpot_p99_ms": (rates, 0.99, 2),
    }
    return {
        name: round(1000 * at_share(xs, share), digits) if xs else None for name, (xs, share, digits) in found.items()
    }


def run_goodput(args: argparse.Namespace) -> None:
    prompts, answers = tuple(args.prompt_tokens), tuple(args.answer_tokens or (256, 2048))
    limits = Limits(first=args.ttft_limit / 1000, per_token=args.tpot_limit / 1000)
    load = {
        "prompts": prompts,
        "answers": answers,
        "ttft_limit_ms": args.ttft_limit,
        "tpot_limit_ms": args.tpot_limit,
        "running": args.running,
    }
    llm, server = served(args, prompts[1] + answers[1])
    tried: dict[float, dict[str, Any]] = {}
    begin = time.perf_counter()

    def holds(rate: float) -> bool:
        count = max(args.requests, round(rate * args.seconds))
        looked = 0.0

        def stop(now: float, seen: dict[str, Timing]) -> bool:
            nonlocal looked
            if now - looked < 0.25:
                return False
            looked = now
            return (len(seen) == count and all(t.first is not None for t in seen.values())) or limits.broken(
                list(seen.values()), now, count
            )

        seen, seconds = drive(server, Arrivals(rate, count, prompts, answers, vocabulary=vocabulary(args)), stop)
        timings = list(seen.values())
        held = len(timings) == count and limits.hold(timings, seconds)
        tried[rate] = row(
            args,
            "goodput",
            rate,
            prompts[1],
            load=load,
            rate_per_s=rate,
            requests=len(timings),
            held=held,
            seconds=round(seconds, 1),
            **milliseconds(timings, seconds),
            tokens_per_s=round(sum(t.made for t in timings) / seconds, 1),
            capacity_tokens=capacity(llm),
            most_at_once=most_at_once(timings),
        )
        keep(args, llm, tried[rate])
        return held

    if args.rates:
        for rate in args.rates:
            holds(rate)
        return
    held, failed = highest(
        holds,
        args.start,
        within=args.within,
        go_on=lambda rate: (
            time.perf_counter() - begin + max(args.seconds, args.requests / rate) < 60 * args.minutes or not tried
        ),
    )
    if held is None:
        raise SystemExit(
            f"no rate held: {', '.join(f'{rate:g}' for rate in tried)} requests a second did not; begin lower (--start)"
        )
    keep(args, llm, tried[held] | {"highest": True, "failed_at": failed})


def long_chats(
    args: argparse.Namespace, users: int, history: tuple[int, int], answers: tuple[int, int], longest: int
) -> Chats:
    """Return the chats of `users`; lengths are in tokens, the least and the most."""
    return Chats(
        users=users,
        vocabulary=vocabulary(args),
        system=min(1024, history[0] // 2),
        history=history,
        longest=longest,
        message=answers,
        answer=answers,
        think=args.think,
    )


def run_turns(args: argparse.Namespace) -> None:
    history, answers = tuple(args.history), tuple(args.answer_tokens or (64, 512))
    longest = history[1] + 4 * answers[1]
    llm, server = served(args, longest, enable_prefix_caching=True)
    total = capacity(llm)
    for users in args.users:
        llm.reset_prefix_cache()
        chats = long_chats(args, users, history, answers, longest)
        before = chats.histories(total)
        if before:
            llm.generate([{"prompt_token_ids": h} for h in before], params(1), use_tqdm=False)
        seen, seconds = drive(server, chats, lambda now, _: now >= args.seconds)
        begun = [t for t in seen.values() if t.first is not None]
        load = {"history": history, "answers": answers, "think_s": args.think, "running": args.running}
        found = row(
            args,
            "turns",
            users,
            history[1],
            load=load,
            users=users,
            turns=len(begun),
            waiting=len(seen) - len(begun),
            seconds=round(seconds, 1),
            held_at_start=len(before),
            hit_rate=round(sum(t.cached for t in begun) / max(1, sum(t.prompt for t in begun)), 4),
            **milliseconds(list(seen.values()), seconds),
            tokens_per_s=round(sum(t.made for t in seen.values()) / seconds, 1),
            capacity_tokens=total,
        )
        keep(args, llm, found)


def run_drafts(args: argparse.Namespace) -> None:
    from accuracy_serve_vllm import close, windows

    shapes, count = [tuple(map(int, s.split("x"))) for s in args.shapes or ["8x1024"]], args.speculate or 3
    args.speculate, args.geometry = None, args.model.name  # said by each row's load
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    kinds = {"none": None, "ngram": ngram} | (
        {args.draft.name: {"method": "draft_model", "model": str(args.draft)}} if args.draft else {}
    )
    for name, config in kinds.items():
        width = 1 + (count if config else 0)
        more = {"speculative_config": config | {"num_speculative_tokens": count}} if config else {}
        most = max(b for b, _ in shapes)
        captured = sorted({width * b for b, _ in shapes})
        llm = engine(args, max(c for _, c in shapes) + args.answer + 8, most, captured, disable_log_stats=False, **more)
        for batch, context in shapes:
            texts = windows(args.model, args.text, batch, context)
            continued(llm, texts, args.answer)  # compiles what the first steps of a shape run
            before = accepted_of(llm)
            rate, steps = continued(llm, texts, args.answer)
            steps_drafted, drafted, accepted = (b - a for a, b in zip(before, accepted_of(llm), strict=True))
            load = {"drafts": name, "count": width - 1, "text": args.text, "answer": args.answer}
            found = row(
                args,
                "drafts",
                batch,
                context,
                load=load,
                acceptance=round(accepted / drafted, 4) if drafted else None,
                tokens_per_step=round(1 + accepted / steps_drafted, 3) if steps_drafted else 1,
                tokens_per_s=round(rate, 1),
                steps=steps,
                capacity_tokens=capacity(llm),
            )
            keep(args, llm, found)
        close(llm)
        del llm  # whose memory the next one takes


def accepted_of(llm: Any) -> tuple[int, int, int]:
    """Return steps of a sequence that had drafts, drafts, and those that were accepted, since the engine began."""
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, drafted, accepted = (int(found.get(f"vllm:spec_decode_{name}", 0)) for name in names)
    return drafts, drafted, accepted


def continued(llm: Any, prompts: list[list[int]], answer: int) -> tuple[float, int]:
    """Return tokens a second of all sequences, from the step in which the last of them began to decode until one ends, and how
    many steps that took.
    """
    core, made = llm.llm_engine, dict[str, int]()
    for i, prompt in enumerate(prompts):
        core.add_request(f"{i}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params(answer))
    marks: list[tuple[float, int]] = []
    while core.has_unfinished_requests():
        outputs = core.step()
        for o in outputs:
            made[o.request_id] = len(o.outputs[0].token_ids)
        if len(made) == len(prompts) and max(made.values()) < answer:
            marks.append((time.perf_counter(), sum(made.values())))
    if len(marks) < 3:
        raise SystemExit(f"only {len(marks)} steps had all {len(prompts)} sequences; raise --answer")
    (start, first), (end, last) = marks[0], marks[-1]
    return (last - first) / (end - start), len(marks) - 1


def row(args: argparse.Namespace, mode: str, batch: float, context: int, **found: Any) -> dict[str, Any]:
    numbers = {"step_ms": None, "tokens_per_s": None, "capacity_tokens": None, "ttft_ms": None, "tpot_p99_ms": None}
    shape = {
        "mode": mode,
        "geometry": args.geometry,
        "gpus": args.tensor_parallel,
        "kv_cache_dtype": args.kv_cache_dtype,
        "batch": batch,
        "context": context,
    }
    options = json.loads(args.engine) | ({} if args.speculate is None else {"speculate": args.speculate})
    options |= ({"prefill": True} if args.prefill else {}) | ({"layers": args.layers} if args.layers else {})
    return shape | {"compiled": args.compile, "options": options} | numbers | found


def keep(args: argparse.Namespace, llm: Any, found: dict[str, Any]) -> None:
    """Keep a row, as soon as it is measured."""
    append([found | how_compiled(llm)], None if args.warm else args.out)


def how_compiled(llm: Any) -> dict[str, Any]:
    """Return what vLLM made of its settings: the compilation mode and the kinds of graphs."""
    config = llm.llm_engine.vllm_config.compilation_config
    return {
        "compilation_mode": int(config.mode),
        "cudagraph_mode": getattr(config.cudagraph_mode, "name", str(config.cudagraph_mode)),
    }


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("what", choices=["decode", "prefill", "goodput", "turns", "drafts"])
    found.add_argument("--kv-cache-dtype", required=True, help="bf16, fp8, int8_per_token_head, kvbits_int8, ..")
    found.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    found.add_argument("--layers", type=int, help="fewer than the geometry has; rows say so")
    found.add_argument("--tensor-parallel", type=int, default=1)
    found.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory that vLLM may take")
    found.add_argument("--chunk", type=int, default=16384, help="tokens of a step (max_num_batched_tokens)")
    found.add_argument(
        "--compile",
        action="store_true",
        help="vLLM's default compilation and kinds of graphs instead of mode 0 with FULL_DECODE_ONLY",
    )
    found.add_argument("--engine", default="{}", help="more options of the engine, JSON")
    found.add_argument("--out", type=Path, default=OUT)
    found.add_argument("--shapes", nargs="*", default=[], help="decode, drafts: BATCHxCONTEXT ..")
    found.add_argument(
        "--largest", type=int, default=0, help="decode: context at which the largest batch that fits is measured"
    )
    found.add_argument("--largest-step", type=int, default=16, help="decode: largest batches are multiples of this")
    found.add_argument(
        "--max-batch", type=int, default=400, help="decode: bound of the largest batch; graphs are captured up to here"
    )
    found.add_argument(
        "--steps", type=int, default=40, help="decode: tokens of each sequence, half of them past its context"
    )
    found.add_argument(
        "--prefill",
        action="store_true",
        help="decode: prefill the prompts instead of filling pages; raw copies are made so",
    )
    found.add_argument(
        "--profile", action="store_true", help="decode: afterwards, which kernels a step's microseconds go to"
    )
    found.add_argument("--speculate", type=int, help="decode, drafts: drafts of each sequence in a step")
    found.add_argument(
        "--model", type=Path, help="a folder of a model, instead of random weights; drafts: with its tokenizer"
    )
    found.add_argument("--draft", type=Path, help="drafts: one of a smaller model with the same vocabulary")
    found.add_argument("--text", default="novel", help="drafts: see kvbits.evaluate.texts")
    found.add_argument("--answer", type=int, default=256, help="drafts: tokens that each sequence is continued by")
    found.add_argument("--prompts", type=int, nargs="*", default=[8192, 65536])
    found.add_argument(
        "--answer-tokens",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="goodput: 256 2048; turns: 64 512, messages as well",
    )
    found.add_argument(
        "--running", type=int, default=128, help="goodput, turns: requests that run at once (max_num_seqs)"
    )
    found.add_argument(
        "--seconds", type=float, default=90, help="goodput: of arrivals at a rate, at least; turns: that are measured"
    )
    found.add_argument(
        "--prompt-tokens", type=int, nargs=2, metavar=("LEAST", "MOST"), default=[2048, 16384], help="goodput"
    )
    found.add_argument(
        "--rates", type=float, nargs="*", help="goodput: requests per second to measure, instead of the search"
    )
    found.add_argument("--start", type=float, default=1, help="goodput: the first rate")
    found.add_argument(
        "--within",
        type=float,
        default=0.1,
        help="goodput: how far apart, as a share, the rate that held and the one that did not may be",
    )
    found.add_argument("--requests", type=int, default=100, help="goodput: at a rate, at least")
    found.add_argument(
        "--minutes", type=float, default=30, help="goodput: of the search; no rate begins that would end later"
    )
    found.add_argument("--ttft-limit", type=float, default=2000, help="goodput: P99 of the time to the first token, ms")
    found.add_argument("--tpot-limit", type=float, default=50, help="goodput: P99 of the time per token, ms")
    found.add_argument("--users", type=int, nargs="*", default=[8, 16, 32, 64], help="turns")
    found.add_argument(
        "--history",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        default=[8192, 30720],
        help="turns: tokens of a chat when it begins",
    )
    found.add_argument(
        "--think", type=float, default=15, help="turns: mean seconds between an answer and the next message"
    )
    found.add_argument(
        "--warm",
        action="store_true",
        help="decode: the same with one layer and little memory, so that kernels are compiled and kept; times nothing",
    )
    found.add_argument("--quick", action="store_true", help="decode: half the steps")
    return found


def main() -> None:
    this_run()
    os.environ.update(ENVIRONMENT | os.environ)
    args = parser().parse_args()
    if not torch.cuda.is_available():  # before vLLM is imported
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
        __import__("vllm_cpu").install()
    args.steps = args.steps // 2 if args.quick else args.steps
    if args.warm:
        args.layers, args.memory, args.what = 1, 0.06, "decode"
        run_decode(args)
        return
    if args.what == "drafts" and args.model is None:
        raise SystemExit("drafts of random weights are never right; pass --model")
    modes = {"decode": run_decode, "prefill": run_prefill, "goodput": run_goodput, "turns": run_turns}
    (modes | {"drafts": run_drafts})[args.what](args)


if __name__ == "__main__":
    main()
