"""Speeds of kernels and of serving from benchmarks/results, as groups of bars. A file that is not there leaves its group out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def kernel_groups(folder: Path) -> list[dict[str, Any]]:
    """[{title, unit, note, bars: [{label, value, kind}]}]."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("nvidia-*/attend_decode.json")):
        found += _gpu(json.loads(path.read_text()))
    for path in sorted(folder.glob("nvidia-*/serve_vllm.json")):
        found += _serving(json.loads(path.read_text()))
    path = folder / "cpu" / "generate.json"
    if path.exists():
        found += _generate(json.loads(path.read_text()))
    for path in sorted((folder / "cpu").glob("attend_*_thread.json")):
        found.append(_attend(json.loads(path.read_text())))
    return found


def _gpu(data: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for shape in dict.fromkeys(r["shape"] for r in data["rows"]):
        rows = [r for r in data["rows"] if r["shape"] == shape]
        peers = [p for p in data.get("peers", []) if p["shape"] == shape]
        ours = [{"label": r["scheme"], "value": round(r["time_us"], 1), "kind": "kvbits"} for r in rows]
        theirs = [{"label": p["kernel"], "value": round(p["time_us"], 1), "kind": "stock"} for p in peers]
        bars = sorted([*ours, *theirs], key=lambda b: b["value"])
        where = f"{data['device']}: {in_words(shape)}"
        note = f"Decode attention, {where}; other libraries in the same run in orange, over 16 bits unless their name says else. {data.get('command', '')}"
        found.append({"title": where, "unit": "microseconds (less is faster)", "note": note, "bars": bars})
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


def _generate(data: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for model, context in dict.fromkeys((r["model"], r["context"]) for r in data["rows"]):
        rows = [r for r in data["rows"] if (r["model"], r["context"]) == (model, context)]
        stock = ("16-bit", "quanto", "hqq", "fp8")
        bars = [{"label": r["cache"], "value": round(r["ratio_vs_16bit"], 2), "kind": "stock" if r["cache"].startswith(stock) else "kvbits"} for r in rows]
        note = f"Decoding {model} through Transformers after {context:,} tokens, {data['threads']} CPU threads; Transformers' caches in orange."
        title = f"CPU, {model}, {context:,} tokens"
        found.append({"title": title, "unit": "times the stock 16-bit cache's tokens per second", "note": note, "bars": bars})
    return found


def _attend(data: dict[str, Any]) -> dict[str, Any]:
    ratios = [(f"{scheme}, {shape}", ratio) for shape, s in data["shapes"].items() for scheme, ratio in s["ratio_vs_torch16"].items()]
    bars = [{"label": label, "value": ratio, "kind": "kvbits"} for label, ratio in ratios]
    note = f"Decode attention on the CPU, {data['threads']} threads, {data['tier']}; shapes are query heads / kv heads / head size / tokens."
    return {"title": f"CPU kernel, {data['threads']} threads", "unit": "times torch's bf16 matmuls", "note": note, "bars": bars}
