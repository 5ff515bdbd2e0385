"""Decoding through Transformers on a GPU: milliseconds a token of a model of Llama-3.1-8B's geometry with random weights, the packed cache beside the stock one.

    python benchmarks/bench_generate_gpu.py [presets ...] [--out benchmarks/results/<gpu>/generate.json]

`stock` is DynamicCache with PyTorch's FlashAttention forced: the default picks cuDNN and plans anew for every length. Caches are filled with random keys and values,
then tokens are decoded one by one, eagerly, with a padding mask as `generate()` passes it. `ms_per_token` is wall time over steps that are not waited for one by
one; `slowest_ms` is of steps that are. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from result_file import command, write_result
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvbits.integrations.huggingface import KVCache

SHAPES = ((1, 32768), (8, 16384), (32, 8192))  # sequences, tokens
PRESETS = ("raw", "int8_centered", "int4", "kivi4")
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
WARM, STEPS, WATCHED = 24, 40, 140


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=KV_HEADS, vocab_size=128256,
        max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    for module in model.modules():  # buffers that to_empty left without content
        if hasattr(module, "original_inv_freq"):
            inv = 1.0 / (500_000.0 ** (torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM))
            module.inv_freq, module.original_inv_freq = inv, inv.clone()
    return model.eval()


def rows(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(batch, count, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")  # type: ignore[return-value]


def packed(model: LlamaForCausalLM, scheme: str, batch: int, context: int) -> KVCache:
    store = KVCache.for_model(model, scheme, batch_size=batch, max_tokens=context + 512).store
    for first in range(0, context, 8192):
        k, v = rows(batch, min(8192, context - first))
        for layer in range(LAYERS):
            store.append(layer, k, v)
    return KVCache(store)


def stock(batch: int, context: int) -> DynamicCache:
    cache = DynamicCache()
    k, v = (x.transpose(1, 2) for x in rows(batch, context))
    for layer in range(LAYERS):
        cache.update(k.clone(), v.clone(), layer)
    return cache


@torch.inference_mode()
def decode(model: LlamaForCausalLM, cache: Any, batch: int, context: int, force_flash: bool) -> dict[str, float]:
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    seen = context
    torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        nonlocal seen
        seen += 1
        model(ids, past_key_values=cache, attention_mask=torch.ones(batch, seen, device="cuda", dtype=torch.long), use_cache=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if force_flash else nullcontext():
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        mean = 1e3 * (time.perf_counter() - start) / STEPS
        walls = []
        for _ in range(WATCHED if not force_flash else 20):
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            walls.append(1e3 * (time.perf_counter() - start))
    return {"ms_per_token": mean, "median_ms": statistics.median(walls), "slowest_ms": max(walls), "peak_bytes": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = llama()
    found = []
    for batch, context in SHAPES:
        for scheme in ("stock", *args.presets):
            if scheme == "stock":
                model.set_attn_implementation("sdpa")
                cache: Any = stock(batch, context)
            else:
                cache = packed(model, scheme, batch, context)
            r = decode(model, cache, batch, context, scheme == "stock")
            on_device = None if scheme == "stock" else cache.store.decoding is not None
            found.append({"scheme": scheme, "mode": "eager", "batch": batch, "context": context, "on_device": on_device, **r})
            print(
                f"{batch} x {context} {scheme:14s} {r['ms_per_token']:6.2f} ms a token, watched: median {r['median_ms']:.2f}, slowest {r['slowest_ms']:.2f}, "
                f"peak {r['peak_bytes'] / 2**30:.1f} GiB, on the device: {on_device}",
                flush=True,
            )
            del cache
            torch.cuda.empty_cache()
    write_result({"command": command(), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}, args.out)


if __name__ == "__main__":
    main()
