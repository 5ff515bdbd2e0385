"""Prefill and decoding through Transformers on a GPU: a model of Llama-3.1-8B's geometry with random weights, packed
caches beside 16-bit ones.

    python benchmarks/bench_generate_gpu.py [rows ..] [--modes eager graph] [--shapes 0 1 2] [--out
    benchmarks/results/<gpu>/generate.json]
    python benchmarks/bench_generate_gpu.py stock_flash int8_centered --generate [--out ..]      generate() from a
    prompt of 2,048 tokens, one sequence
    python benchmarks/bench_generate_gpu.py stock stock_flash int8_centered --prefill --shapes 3 4       prompts alone,
    three in a row: the first pays for what libraries plan anew
    .. --chunk 2048     the prompt in chunks        .. --grow     caches that grow, as the stock cache does
    .. --filled         random keys and values instead of a prompt: decoding alone, in a few seconds a row
    .. --warm           compiles what the rows need, into the caches on disk, with a model of one layer; times nothing
    .. --quick          fewer steps
    torchrun --nproc-per-node 2 benchmarks/bench_generate_gpu.py ..     the model's heads spread over two GPUs (rows
                                                                        with "ranks"; peaks are of one of them)

Rows are presets by name, and:
    stock         DynamicCache, SDPA as torch chooses it (cuDNN, which plans anew for every length of a decode step)
    stock_flash   DynamicCache with PyTorch's FlashAttention forced
    static        StaticCache, compiled by generate() itself (mode "compiled")
    fa3           a 16-bit cache allocated once and FlashAttention-3 (fa3_fwd_interface), which also stores the token,
                  eager and in a graph
    A+B           two presets, even layers as A, odd ones as B, with B's newest raw tokens: what formats by layer cost
                  at run time

Mode "graph" is `kvbits.graphed`, or what generate() does by itself; "eager" the plain call; "compiled" `torch.compile`
of the forward pass of a token (the prompt runs uncompiled); "compiled_graph" that pass captured in a graph:
`kvbits.graphed(compile=True)`, and the same done to FlashAttention-3. The cache is filled by the model's own prefill,
then tokens are decoded one by one with a padding mask. `ms_per_token` is wall time over steps that are not waited for
one by one; `slowest_ms` and `median_ms` are of steps that are. Peaks are of the whole process, weights included:
`bytes_before` is what was allocated before the row's cache. Each row is added to --out as it comes. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from bench_decode_gpu import calibration
from run_files import append, arguments
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.generation.streamers import BaseStreamer

from kvbits import schemes
from kvbits.calibrate.calibration import Calibration, fingerprint
from kvbits.errors import KvbitsError
from kvbits.integrations.graphs import graphed
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.models import scheme_for
from kvbits.model_ref import ModelRef
from kvbits.spec import Override, Scheme

SHAPES = ((1, 32768), (8, 16384), (32, 8192), (1, 8192), (4, 8192))  # sequences, tokens
MODES = ("eager", "graph", "compiled", "compiled_graph")
ROWS = ("stock_flash", "fa3", "raw", "int8_centered", "kivi4", "klt4", "klt2")
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
WARM, STEPS, WATCHED, QUICKLY_WATCHED = 24, 40, 140, 40
ROOM = 320
PROMPT, NEW_TOKENS = 2048, 256


def spread(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Spread a model over the ranks, where torchrun started several."""
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
        return model
    from transformers import DistributedConfig  # 5.23

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    how, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=ranks))
    return LlamaForCausalLM.maybe_distribute_model(model, how, mesh)


def llama(layers: int = LAYERS) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=KV_HEADS,
        vocab_size=128256,
        max_position_embeddings=131072,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = spread(LlamaForCausalLM(config).to(torch.bfloat16))
    model = model.to_empty(device="cuda")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    for module in model.modules():  # buffers that to_empty left without content
        if hasattr(module, "original_inv_freq"):
            inv = 1.0 / (500_000.0 ** (torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM))
            module.inv_freq, module.original_inv_freq = inv, inv.clone()
    return model.eval()


class Flash16:
    """16-bit keys and values allocated once, read by FlashAttention-3: an attention function that needs no cache
    object.
    """

    def __init__(self, layers: int, batch: int, tokens: int) -> None:
        from fa3_fwd_interface import flash_attn_func, flash_attn_with_kvcache

        self._fresh, self._decode = flash_attn_func, flash_attn_with_kvcache
        self.kv = torch.empty(layers, 2, batch, tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.seen = torch.zeros(batch, dtype=torch.int32, device="cuda")
        AttentionInterface.register("bench_fa3", self.attend)
        _fa3[:] = [self]

    @staticmethod
    def release() -> None:
        """Forget the cache, so that its bytes are in no peak of a later row."""
        _fa3.clear()
        AttentionInterface.register("bench_fa3", no_fa3)

    def token(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scaling: float | None
    ) -> torch.Tensor:
        """Store and attend with q, k, v [B, 1, H, D]: one call, as those who serve with it do."""
        held = self.kv[layer]
        out = self._decode(q, held[0], held[1], k=k, v=v, cache_seqlens=self.seen, softmax_scale=scaling, causal=True)
        return out[0] if isinstance(out, tuple) else out

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        held = self.kv[module.layer_idx]
        if q.shape[1] > 1:  # a whole prompt
            held[0][:, : q.shape[1]], held[1][:, : q.shape[1]] = k, v
            out = self._fresh(q, k, v, softmax_scale=scaling, causal=True)
            return (out[0] if isinstance(out, tuple) else out), None
        if torch.compiler.is_compiling():
            return token_of_fa3(q, k, v, module.layer_idx, scaling), None
        return self.token(q, k, v, module.layer_idx, scaling), None


_fa3: list[Flash16] = []


def no_fa3(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    raise KvbitsError("the 16-bit cache of FlashAttention-3 was released")


@torch.library.custom_op("bench::token_of_fa3", mutates_args=())
def token_of_fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
    """Call `Flash16.token` of the one there is, as one operation to the compiler."""
    return _fa3[0].token(q, k, v, layer, scaling).contiguous()


@token_of_fa3.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def forward(model: LlamaForCausalLM, cache: Any, ids: torch.Tensor, seen: int) -> Any:
    """Run one pass after `seen` tokens, with the mask that generate() passes for padded batches."""
    if isinstance(cache, Flash16):
        return model(
            ids, position_ids=seen + torch.arange(ids.shape[1], device="cuda")[None], use_cache=False, logits_to_keep=1
        )
    mask = torch.ones(len(ids), seen + ids.shape[1], device="cuda", dtype=torch.long)
    torch._dynamo.maybe_mark_dynamic(mask, 1)  # one graph, where it is compiled
    return model(ids, past_key_values=cache, attention_mask=mask, use_cache=True, logits_to_keep=1)


def prefill(model: LlamaForCausalLM, cache: Any, batch: int, context: int, chunk: int | None = None) -> float:
    """Measure the tokens a second of one prompt of `context` tokens per sequence, in one pass or in chunks."""
    ids = torch.randint(0, 1000, (batch, context), device="cuda")
    torch.cuda.synchronize()
    start, seen = time.perf_counter(), 0
    for part in ids.split(chunk or context, 1):
        forward(model, cache, part, seen)
        seen += part.shape[1]
    torch.cuda.synchronize()
    if isinstance(cache, Flash16):
        cache.seen.fill_(context)
    return batch * context / (time.perf_counter() - start)


def fill(cache: Any, batch: int, tokens: int) -> None:
    """Fill all layers with the same random keys and values."""
    if isinstance(cache, Flash16):
        cache.kv.normal_()
        cache.seen.fill_(tokens)
        return
    if isinstance(cache, DynamicCache):
        for layer in range(LAYERS):
            cache.update(
                *(torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv"),
                layer,
            )
        return
    if not isinstance(cache, KVCache):
        raise KvbitsError("--filled is for presets, fa3 and the stock cache")
    k, v = (torch.randn(batch, tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    for layer in range(LAYERS):
        cache.pages.append(layer, k, v)
    cache.columns.seen = tokens


def time_steps(step: Callable[[], Any], watched: int) -> dict[str, float]:
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    mean = 1e3 * (time.perf_counter() - start) / STEPS
    walls = []
    for _ in range(watched):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        walls.append(1e3 * (time.perf_counter() - start))
    return {"ms_per_token": mean, "median_ms": statistics.median(walls), "slowest_ms": max(walls)}


def decode(model: LlamaForCausalLM, cache: Any, batch: int, context: int, watched: int) -> dict[str, float]:
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    seen = context

    def step() -> None:
        nonlocal seen
        forward(model, cache, ids, seen)
        seen += 1

    return time_steps(step, watched)


def decode_fa3(model: LlamaForCausalLM, cache: Flash16, batch: int, mode: str, watched: int) -> dict[str, float]:
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    run = torch.compile(model.forward, dynamic=False) if mode == "compiled_graph" else model

    def step() -> None:
        run(ids, position_ids=cache.seen[:, None].long(), use_cache=False)
        cache.seen.add_(1)

    if mode == "eager":
        return time_steps(step, watched)
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return time_steps(graph.replay, watched)


class Stamps(BaseStreamer):
    """Streamer that notes when tokens came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def generate(
    model: LlamaForCausalLM, cache: Any, batch: int, context: int, new_tokens: int, eager: bool = False
) -> dict[str, float]:
    """Measure generate(), after a cache that holds all but the last of `context` tokens, or an empty one."""
    ids, stamps = torch.randint(0, 1000, (batch, context), device="cuda"), Stamps()
    # streamers take one sequence
    options: dict[str, Any] = {"disable_compile": eager} | ({} if batch > 1 else {"streamer": stamps})
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        **options,
    )
    torch.cuda.synchronize()
    if batch > 1:
        return {"ms_per_token": 1e3 * (time.perf_counter() - start) / new_tokens, "median_ms": 0.0, "slowest_ms": 0.0}
    walls = [1e3 * (b - a) for a, b in zip(stamps.at[1:], stamps.at[2:], strict=False)]
    late = walls[8:]  # without what is compiled or captured
    return {
        "ms_per_token": statistics.mean(late),
        "median_ms": statistics.median(late),
        "slowest_ms": max(late),
        "ms_per_token_all": statistics.mean(walls),
    }


@contextmanager
def compiled_forward(model: LlamaForCausalLM) -> Iterator[None]:
    model.forward = torch.compile(model.forward, fullgraph=True)
    try:
        yield
    finally:
        del model.forward
        torch.compiler.reset()


@contextmanager
def prepared(model: LlamaForCausalLM, row: str, batch: int, tokens: int | None, mode: str) -> Iterator[Any]:
    """Yield the row's empty cache, the model switched to it; without `tokens` one that grows."""
    with ExitStack() as stack:
        KVCache.detach(model)
        if row == "fa3":
            cache: Any = Flash16(model.config.num_hidden_layers, batch, tokens)
            stack.callback(Flash16.release)
            model.set_attn_implementation("bench_fa3")
        elif row in ("stock", "stock_flash", "static"):
            model.set_attn_implementation("sdpa")
            cache = (
                StaticCache(config=model.config, max_cache_len=tokens)
                if row == "static"
                else DynamicCache(config=model.config)
            )
            stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION) if row == "stock_flash" else nullcontext())
        else:
            model.set_attn_implementation("sdpa")
            cache = KVCache.for_model(
                model,
                scheme_of(row),
                batch_size=batch if tokens else None,
                max_tokens=tokens,
                calibration=made_up(model, row),
            )
            if mode in ("graph", "compiled_graph"):
                stack.enter_context(graphed(model, cache, compile=mode == "compiled_graph"))
        yield cache


def scheme_of(row: str) -> str | Scheme:
    """Return a preset, or two of them in turn, layer by layer."""
    even, _, odd = row.partition("+")
    if not odd:
        return row
    first = schemes.get(even)
    return dataclasses.replace(
        schemes.get(odd),
        name=row,
        overrides=(Override(layers=tuple(range(0, LAYERS, 2)), key=first.key, value=first.value),),
    )


def made_up(model: LlamaForCausalLM, row: str) -> Calibration | None:
    """Make even codebooks, for presets that are calibrated."""
    scheme = scheme_for(ModelRef.of(model), scheme_of(row))
    static = calibration(scheme, model.config.num_hidden_layers)
    return Calibration(static, fingerprint(model.config, scheme)) if static else None


def warm_up(model: LlamaForCausalLM, row: str, batch: int, chunk: int | None, room: int | None) -> None:
    """Compile the kernels, and let libraries choose theirs."""
    tokens = 2 * chunk if chunk else 512
    for _ in range(2):
        with prepared(model, row, batch, room and tokens + room, "eager") as cache:
            prefill(model, cache, batch, tokens, chunk)


def measure(
    model: LlamaForCausalLM, row: str, mode: str, batch: int, context: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure prefill and decoding of one row."""
    room, chunk, watched = None if args.grow else ROOM, args.chunk, QUICKLY_WATCHED if args.quick else WATCHED
    if not args.filled:
        warm_up(model, row, batch, chunk, room)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # the weights, and what libraries keep
    with prepared(model, row, batch, room and context + room, mode) as cache:
        prompt: dict[str, Any] = {"filled": True}
        if args.filled:
            fill(cache, batch, context)
        else:
            prompt = {
                "prefill_tokens_per_s": prefill(model, cache, batch, context, chunk),
                "prefill_peak_bytes": torch.cuda.max_memory_allocated(),
            }
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if row == "fa3":
            found: dict[str, Any] = decode_fa3(model, cache, batch, mode, watched)
        elif row == "static":
            found = {"through": "generate"} | compiled(model, cache, batch, context)
        else:
            with compiled_forward(model) if mode == "compiled" else nullcontext():
                found = decode(
                    model, cache, batch, context, 20 if row == "stock_flash" and mode == "eager" else watched
                )
        on_device = cache.pages.decoding is not None if isinstance(cache, KVCache) else None
    return {
        "scheme": row,
        "mode": mode,
        "batch": batch,
        "context": context,
        "through": "forward",
        "on_device": on_device,
        **prompt,
        "bytes_before": before,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        **found,
        **({"chunk": chunk} if chunk else {}),
        **({"grows": True} if args.grow else {}),
    }


def compiled(model: LlamaForCausalLM, cache: StaticCache, batch: int, context: int) -> dict[str, float]:
    """Measure a static cache, whose decoding generate() compiles; its first run pays for that."""
    generate(model, cache, batch, context + 1, 12)
    seen = int(cache.get_seq_length())
    return generate(model, cache, batch, seen + 1, 64)


def measure_prefill(model: LlamaForCausalLM, row: str, batch: int, context: int, chunk: int | None) -> dict[str, Any]:
    """Measure three prompts in a row, after short ones: the first of them, then the median of the others."""
    warm_up(model, row, batch, chunk, ROOM)
    speeds = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        with prepared(model, row, batch, context + ROOM, "eager") as cache:
            speeds.append(prefill(model, cache, batch, context, chunk))
        del cache
    return {
        "scheme": row,
        "mode": "eager",
        "batch": batch,
        "context": context,
        "through": "prefill",
        "prefill_tokens_per_s": statistics.median(speeds[1:]),
        "first_prefill_tokens_per_s": speeds[0],
        "prefill_peak_bytes": torch.cuda.max_memory_allocated(),
        **({"chunk": chunk} if chunk else {}),
    }


def measure_generate(model: LlamaForCausalLM, row: str, mode: str) -> dict[str, Any]:
    """Measure generate() from an empty cache, twice: the first compiles kernels.

    A fixed cache is captured in a graph unless that is switched off.
    """
    for new_tokens in (24, NEW_TOKENS):
        torch.cuda.reset_peak_memory_stats()
        with prepared(model, row, 1, PROMPT + ROOM, "eager") as cache:
            found = generate(model, cache, 1, PROMPT, new_tokens, mode == "eager")
        del cache
    peak = torch.cuda.max_memory_allocated()
    return {
        "scheme": row,
        "mode": mode,
        "batch": 1,
        "context": PROMPT,
        "through": "generate",
        "peak_bytes": peak,
        **found,
    }


def modes_of(row: str, asked: list[str]) -> list[str]:
    """Return the modes of a row that were asked for; a static cache has one of its own."""
    if row == "static":
        return ["compiled"]
    has = {"stock": ["eager"], "stock_flash": ["eager"], "fa3": ["eager", "graph", "compiled_graph"]}.get(
        row, list(MODES)
    )
    return [m for m in has if m in asked]


def one_row(
    model: LlamaForCausalLM, row: str, mode: str, batch: int, context: int, args: argparse.Namespace
) -> dict[str, Any]:
    with torch.no_grad():
        if args.generate:
            return measure_generate(model, row, mode)
        if args.prefill:
            return measure_prefill(model, row, batch, context, args.chunk)
        return measure(model, row, mode, batch, context, args)


def words(r: dict[str, Any]) -> str:
    speed = f"prefill {r['prefill_tokens_per_s']:,.0f} tokens/s" if "prefill_tokens_per_s" in r else "no prompt timed"
    if "ms_per_token" not in r:
        return (
            f"{speed} (the first {r['first_prefill_tokens_per_s']:,.0f}), peak"
            f" {r['prefill_peak_bytes'] / 2**30:.1f} GiB"
        )
    times = f"{r['ms_per_token']:6.2f} ms a token (median {r['median_ms']:.2f}, slowest {r['slowest_ms']:.2f})"
    return f"{times}, {speed}, peak {r['peak_bytes'] / 2**30:.1f} GiB"


def warm(model: LlamaForCausalLM, rows: list[str], shapes: list[tuple[int, int]]) -> None:
    """Run a short prompt and some tokens of each row on a model of one layer: everything is compiled, and kept on disk."""
    for batch in {batch for batch, _ in shapes}:
        for row, mode in ((name, mode) for name in rows for mode in modes_of(name, ["eager", "graph"])):
            with torch.no_grad(), prepared(model, row, batch, 512 + ROOM, mode) as cache:
                prefill(model, cache, batch, 512)
                found = (
                    decode_fa3(model, cache, batch, mode, 2) if row == "fa3" else decode(model, cache, batch, 512, 2)
                )
            print(f"{batch} x 512 {row} {mode}: {found['ms_per_token']:.2f} ms with one layer", flush=True)


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("rows", nargs="*", default=list(ROWS))
    found.add_argument("--modes", nargs="*", default=["eager", "graph"], choices=MODES)
    found.add_argument(
        "--eager-rows",
        nargs="*",
        help="rows whose mode eager is wanted; all if left out, and caches without another mode",
    )
    found.add_argument("--shapes", type=int, nargs="*", default=[0, 1, 2])
    found.add_argument("--generate", action="store_true")
    found.add_argument("--prefill", action="store_true", help="prompts alone")
    found.add_argument("--chunk", type=int, help="tokens of a chunk of the prompt")
    found.add_argument("--grow", action="store_true", help="caches without a capacity")
    found.add_argument("--filled", action="store_true", help="no prompt: random keys and values")
    found.add_argument("--warm", action="store_true")
    found.add_argument("--quick", action="store_true")
    return found


def wanted(args: argparse.Namespace) -> list[tuple[str, str]]:
    """List (row, mode), in the order in which they are measured."""
    found = [
        (row, mode)
        for row in args.rows
        for mode in modes_of(row, args.modes)
        if not (args.generate and row in ("fa3", "static"))
    ]
    if args.eager_rows is None:
        return found
    return [
        (row, mode)
        for row, mode in found
        if mode != "eager" or row in args.eager_rows or modes_of(row, list(MODES)) == ["eager"]
    ]


def main(model: LlamaForCausalLM | None = None) -> None:
    args = parser().parse_args()
    args.modes = ["eager"] if args.prefill else args.modes
    torch.manual_seed(0)
    shapes = [(1, PROMPT)] if args.generate else [SHAPES[i] for i in args.shapes]
    if args.warm:
        warm(llama(1), args.rows, shapes)
        return
    model = llama() if model is None else model
    ranks, first = (
        (torch.distributed.get_world_size(), torch.distributed.get_rank() == 0)
        if torch.distributed.is_initialized()
        else (1, True)
    )
    failed = []
    for batch, context in shapes:
        for row, mode in wanted(args):
            start = time.perf_counter()
            try:
                r = one_row(model, row, mode, batch, context, args)
            except ImportError as error:  # a package to compare with
                print(f"{batch} x {context} {row:14s} {mode:8s} left out: {error}", flush=True)
                continue
            except (RuntimeError, KvbitsError) as error:  # the other rows are worth having
                print(
                    f"{batch} x {context} {row:14s} {mode:8s} failed: {type(error).__name__}: {str(error)[:300]}",
                    flush=True,
                )
                failed.append(f"{row} {mode} at {batch} x {context}")
                torch.cuda.empty_cache()
                continue
            print(
                f"{batch} x {context} {row:14s} {mode:8s} {ranks} GPU {words(r)} ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            if first:
                append([r | ({"ranks": ranks} if ranks > 1 else {})], args.out)
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"not timed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
