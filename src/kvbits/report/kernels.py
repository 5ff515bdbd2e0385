"""Speeds of presets and of serving from benchmarks/results: as groups of bars, and as worst and best of what was measured. A file that is not there leaves its
part out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..schemes import PRESETS

GPU = "nvidia-*/attend_decode*.json"
"""Decode attention of presets in a whole cache (`bench_decode_gpu.py`)."""


def gpu_speeds(folder: Path) -> dict[str, dict[str, float]]:
    """preset -> shape -> speed of decode attention in a whole cache, raw tail included, over the fastest 16-bit kernel of the same run."""
    found: dict[str, dict[str, float]] = {}
    for data in _read(folder, GPU):
        for r in data["rows"]:
            if "speedup_real_cache" in r and r["scheme"] in PRESETS:
                found.setdefault(r["scheme"], {}).setdefault(r["shape"], r["speedup_real_cache"])
    return found


def kernel_groups(folder: Path, presets: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """[{title, unit, note, bars: [{label, value, kind}]}].

    Args:
        presets: have a bar in every group of presets: an empty one, whose label says so, where they were not measured. Groups of serving have vLLM's names.
    """
    found: list[dict[str, Any]] = []
    shapes: dict[str, dict[str, Any]] = {}
    for data in _read(folder, GPU):
        for group in _gpu(data):
            if (known := shapes.setdefault(group["title"], group)) is not group:
                labels = {b["label"] for b in known["bars"]}
                known["bars"] += [b for b in group["bars"] if b["kind"] == "kvbits" and b["label"] not in labels]
    found += shapes.values()
    for data in _read(folder, "nvidia-*/generate.json"):
        found += _graphed(data)
    for group in found:
        complete(group, presets)
    for data in _read(folder, "nvidia-*/serve_vllm.json"):
        found += _serving(data)
    return found


def complete(group: dict[str, Any], presets: tuple[str, ...]) -> None:
    """Sort a group's bars, the longest first, and add empty ones for the presets that were not measured."""
    group["bars"].sort(key=lambda b: b["value"], reverse=True)
    missing = [p for p in presets if p not in {b["label"] for b in group["bars"]}]
    group["bars"] += [{"label": f"{p}: not measured", "value": None, "kind": "kvbits"} for p in missing]


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def _gpu(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Speeds over the fastest 16-bit kernel; that one is a bar of 1."""
    found = []
    rows = [r for r in data["rows"] if "speedup_real_cache" in r and r["scheme"] in PRESETS]
    for shape in dict.fromkeys(r["shape"] for r in rows):
        bars = [{"label": r["scheme"], "value": round(r["speedup_real_cache"], 2), "kind": "kvbits"} for r in rows if r["shape"] == shape]
        bars.append({"label": "fastest 16-bit kernel", "value": 1.0, "kind": "stock"})
        where = f"{data['device']}, attention: {in_words(shape)}"
        note = f"Attention of one new token in a whole cache, raw newest tokens included, on {where.replace(', attention', '')}. {data.get('command', '')}"
        found.append({"title": where, "unit": "times as fast as the best 16-bit kernel", "note": note, "bars": bars})
    return found


SERVED = {
    "largest": ("decode", "tokens_per_s", "tokens per second (more is faster)", "largest batch that fits, {context:,} tokens each"),
    "step": ("decode", "step_ms", "milliseconds of a decoding step (less is faster)", "{batch} sequences of {context:,} tokens"),
    "first token": ("prefill", "ttft_ms", "milliseconds to the first token (less is faster)", "a prompt of {context:,} tokens"),
    "load": (
        "serve",
        "tpot_p99_ms",
        "ms per token, 99th percentile (less is faster)",
        "{batch:g} requests a second, prompts up to {context:,} tokens",
    ),
}
"""What is drawn of rows of bench_serve_vllm.py: their mode, the number, its unit, where it was measured."""


def _serving(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Largest batches first, then steps, first tokens and times per token under load; a group needs two caches."""
    found = []
    rows = [r for r in data["rows"] if not r["options"]]
    for what, (mode, number, unit, words) in SERVED.items():
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for r in rows:
            if r["mode"] == mode and r.get(number) and bool(r.get("largest")) == (what == "largest"):
                batch = None if what == "largest" else r["batch"]
                groups.setdefault((r["geometry"], r["gpus"], batch, r["context"], r["compiled"]), []).append(r)
        for (geometry, gpus, batch, context, compiled), members in groups.items():
            if len(members) < 2:
                continue
            bars: list[dict[str, Any]] = [
                {
                    "label": r["kv_cache_dtype"] + (f", {r['batch']} sequences" if what == "largest" else ""), "value": round(r[number], 2),
                    "kind": "kvbits" if r["kv_cache_dtype"].startswith("kvbits") else "stock",
                } for r in members
            ]  # fmt: skip
            bars.sort(key=lambda b: float(b["value"]))
            machine = f"vLLM {data['vllm']}, {geometry}, {gpus} x {data['gpu']}{', compiled' if compiled else ''}"
            where = f"{machine}: {words.format(batch=batch, context=context)}"
            note = f"Serving with {where}; random weights. vLLM's own caches in orange; benchmarks/bench_serve_vllm.py, docs/serving.md."
            found.append({"title": where, "unit": unit, "note": note, "bars": bars})
    return found


def in_words(shape: str) -> str:
    """A benchmark's "B=8 H=32/8 T=32768 D=128" as a reader would say it."""
    found = re.fullmatch(r"B=(\d+) H=(\d+)/(\d+) T=(\d+) D=(\d+)", shape)
    if found is None:
        return shape
    batch, heads, kv_heads, tokens, size = (int(n) for n in found.groups())
    return f"{batch} sequence{'s' if batch > 1 else ''} of {tokens:,} tokens, {heads} query and {kv_heads} kv heads of {size}"


def _graphed(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens through Transformers: presets in a CUDA graph, beside the stock cache with FlashAttention."""
    found = []
    shapes = dict.fromkeys((r["batch"], r["context"]) for r in data["rows"])
    for batch, context in shapes:
        at = (batch, context, "forward", None, None, None, None)
        rows = [r for r in data["rows"] if (r["batch"], r["context"], *(r.get(name) for name in ("through", "chunk", "grows", "ranks", "filled"))) == at]
        stock = next((r["ms_per_token"] for r in rows if r["scheme"] == "stock_flash" and r["mode"] == "eager"), None)
        graphed = {r["scheme"]: r["ms_per_token"] for r in rows if r["mode"] == "graph" and r["scheme"] in PRESETS}
        if stock is None or not graphed:
            continue
        bars = [{"label": name, "value": round(stock / ms, 2), "kind": "kvbits"} for name, ms in graphed.items()]
        bars.append({"label": "stock cache, FlashAttention", "value": 1.0, "kind": "stock"})
        if fa3 := next((r["ms_per_token"] for r in rows if r["scheme"] == "fa3" and r["mode"] == "graph"), None):
            bars.append({"label": "16 bits in a graph, FlashAttention-3", "value": round(stock / fa3, 2), "kind": "stock"})
        what = f"{_counted(batch, 'sequence')} of {context:,} tokens"
        note = f"Tokens of Llama-3.1-8B's geometry through Transformers, {what}, in a CUDA graph; the stock cache without. {data.get('command', '')}"
        found.append({"title": f"{data['device']}, tokens: {what}", "unit": "times as fast as the stock cache", "note": note, "bars": bars})
    return found


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
