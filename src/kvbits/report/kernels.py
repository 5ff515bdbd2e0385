"""Kernel speeds from benchmarks/results, as groups of bars. A file that is not there leaves its group out."""

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
