"""Speeds of presets and of serving from benchmarks/results: as groups of bars, and as worst and best of what was
measured. A file that is not there leaves its part out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_files import joined, latest, outdated, read

from kvbits.errors import counted
from kvbits.runs import dated
from kvbits.schemes import PRESETS

GPU = "nvidia-*/attend_decode*.json"
"""Files of attention of single tokens in a whole cache (`bench_decode_gpu.py`)."""


def gpu_rows(folder: Path) -> dict[str, Any]:
    """Return {"runs", "rows"} of the `GPU` files as one: presets in whole caches, each row with its ratio to the
    fastest 16-bit kernel of its own run.
    """
    data = joined(sorted(folder.glob(GPU)))
    rows = [r for r in data["rows"] if "speedup_real_cache" in r and r["scheme"] in PRESETS]
    return {"runs": data["runs"], "rows": [r | {"best_16_bit": _rival(data, r)} for r in rows]}


def _rival(data: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the 16-bit kernel that a row's ratio is over. Rows that do not name it are of runs with one."""
    return str(
        row.get("best_16_bit")
        or " or ".join(dict.fromkeys(p["kernel"] for p in data.get("peers", []) if p["run"] == row["run"]))
        or "16 bits"
    )


def gpu_latest(folder: Path) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return GPU -> preset -> shape -> the newest run's row. What was timed in an earlier format is left out."""
    data = gpu_rows(folder)
    known, rows = data["runs"], _of_today(data)["rows"]
    rows = [r | {"gpu": short_name(known[r["run"]])} for r in rows]
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for (gpu, scheme, shape), row in latest({"runs": known, "rows": rows}, ("gpu", "scheme", "shape")).items():
        found.setdefault(gpu, {}).setdefault(scheme, {})[shape] = row
    return dict(sorted(found.items()))


def gpu_speeds(folder: Path) -> dict[str, dict[str, float]]:
    """Return preset -> shape -> speed of decode attention in a whole cache, raw tail included, over the fastest 16-bit
    kernel of the same run: on the GPU where the ratio is least.
    """
    found: dict[str, dict[str, float]] = {}
    for of_presets in gpu_latest(folder).values():
        for scheme, rows in of_presets.items():
            known = found.setdefault(scheme, {})
            for shape, row in rows.items():
                known[shape] = min(row["speedup_real_cache"], known.get(shape, float("inf")))
    return found


def _of_today(data: dict[str, Any], name: str = "scheme") -> dict[str, Any]:
    """Return a file's data without rows of caches whose format has changed since."""
    return data | {"rows": [r for r in data["rows"] if not outdated(r[name], data["runs"][r["run"]])]}


def kernel_groups(folder: Path, presets: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return [{title, unit, note, bars: [{label, value, kind}]}], of the newest runs. The bars of a group are of one
    sitting on one machine where they are compared with each other, and of the newest run of each preset where each has
    its ratio from its own run. What was timed in an earlier format is left out.

    Args:
        presets: have a bar in every group of presets: an empty one, whose label says so, where they were not measured.
            Groups of serving have vLLM's names.
    """
    found = _attention(_of_today(gpu_rows(folder)))
    for data in _read(folder, "nvidia-*/generate.json"):
        found += _graphed(_of_today(data))
    for group in found:
        complete(group, presets)
    for data in _read(folder, "nvidia-*/serve_vllm.json"):
        found += _serving(_of_today(data, "kv_cache_dtype"))
    return found


def complete(group: dict[str, Any], presets: tuple[str, ...]) -> None:
    """Sort a group's bars, the longest first, and add empty ones for the presets that were not measured."""
    group["bars"].sort(key=lambda b: b["value"], reverse=True)
    missing = [p for p in presets if p not in {b["label"] for b in group["bars"]}]
    group["bars"] += [{"label": f"{p}: not measured", "value": None, "kind": "kvbits"} for p in missing]


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [read(path) for path in sorted(folder.glob(pattern))]


def card_of(run: dict[str, Any]) -> str:
    """Name a run's GPU; of a run before records what its benchmark called it."""
    return str(
        run["gpu"]["name"]
        if run["gpu"]
        else run.get("facts", {}).get("device") or run.get("facts", {}).get("gpu") or "GPU"
    )


def short_name(run: dict[str, Any]) -> str:
    """Name a run's GPU in a column's width: "H100" of "NVIDIA H100 80GB HBM3", but "H100 PCIe" of another card."""
    return re.split(r" \d+GB", card_of(run).removeprefix("NVIDIA "))[0]


def sitting(
    data: dict[str, Any], rows: list[dict[str, Any]], enough: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Return the rows of the newest session that has enough of them to compare; none if no session has."""
    runs = data["runs"]
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: (runs[r["run"]]["utc"], r["run"])):
        sessions.setdefault(runs[row["run"]]["session"], []).append(row)
    newest_first = sorted(sessions.values(), key=lambda some: runs[some[-1]["run"]]["utc"], reverse=True)
    return next((some for some in newest_first if enough(some)), [])


def _attention(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the speeds over the fastest 16-bit kernel of each GPU; that one is a bar of 1."""
    named = [r | {"gpu": card_of(data["runs"][r["run"]])} for r in data["rows"]]
    newest = latest(data | {"rows": named}, ("gpu", "shape", "scheme"))
    found = []
    for gpu, shape in dict.fromkeys((gpu, shape) for gpu, shape, _ in newest):
        rows = [row for (card, at, _), row in newest.items() if (card, at) == (gpu, shape)]
        bars = [{"label": r["scheme"], "value": round(r["speedup_real_cache"], 2), "kind": "kvbits"} for r in rows]
        rivals = ", ".join(dict.fromkeys(r["best_16_bit"] for r in rows))
        bars.append({"label": f"16 bits ({rivals})", "value": 1.0, "kind": "stock"})
        made = [data["runs"][r["run"]] for r in rows]
        where = f"{gpu}, attention: {in_words(shape)}"
        note = (
            "Attention of one new token in a whole cache, raw newest tokens included, on"
            f" {where.replace(', attention', '')}, against the fastest 16-bit kernel timed in the same run ({rivals})."
            f" benchmarks/bench_decode_gpu.py; {dated(made)}."
        )
        found.append({"title": where, "unit": "times as fast as the best 16-bit kernel", "note": note, "bars": bars})
    return found


SERVED = {
    "largest": (
        "decode",
        "tokens_per_s",
        "tokens per second (more is faster)",
        "largest batch that fits, {context:,} tokens each",
    ),
    "step": (
        "decode",
        "step_ms",
        "milliseconds of a decoding step (less is faster)",
        "{batch} sequences of {context:,} tokens",
    ),
    "first token": (
        "prefill",
        "ttft_ms",
        "milliseconds to the first token (less is faster)",
        "a prompt of {context:,} tokens",
    ),
    "highest": (
        "goodput",
        "rate_per_s",
        "requests a second within the limits (more is faster)",
        "prompts of up to {context:,} tokens, {load}",
    ),
    "first token of a turn": (
        "turns",
        "ttft_p99_ms",
        "milliseconds to the first token, 99th percentile (less is faster)",
        "{batch} users of chats of up to {context:,} tokens",
    ),
}
"""Drawings of rows of bench_serve_vllm.py: their mode, the number, its unit, where it was measured."""
BEST = ("largest", "highest")
"""Kinds of rows that each cache has at a batch of its own: its largest, or the highest rate that it held."""


def _serving(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the largest batches first, then steps, first tokens and times per token under load. A group needs bf16 and
    another cache, timed in one sitting.
    """
    found = []
    for what, (mode, number, unit, words) in SERVED.items():
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for r in data["rows"]:
            if (
                not r["options"]
                and r["mode"] == mode
                and r.get(number)
                and next((k for k in BEST if r.get(k)), None) == (what if what in BEST else None)
            ):
                batch = None if what in BEST else r["batch"]
                groups.setdefault((r["geometry"], r["gpus"], batch, r["context"], r["compiled"], _load(r)), []).append(
                    r
                )
        for (geometry, gpus, batch, context, compiled, load), rows in groups.items():
            together = sitting(
                data, rows, lambda some: len(names := {r["kv_cache_dtype"] for r in some}) > 1 and "bf16" in names
            )
            members = list({r["kv_cache_dtype"]: r for r in together}.values())
            if not members:
                continue
            bars: list[dict[str, Any]] = [
                {
                    "label": r["kv_cache_dtype"] + (f", {r['batch']} sequences" if what == "largest" else ""),
                    "value": round(r[number], 2),
                    "kind": "kvbits" if r["kv_cache_dtype"].startswith("kvbits") else "stock",
                }
                for r in members
            ]
            bars.sort(key=lambda b: float(b["value"]))
            made = [data["runs"][r["run"]] for r in members]
            machine = (
                f"vLLM {made[0]['versions'].get('vllm', '')}, {geometry}, {gpus} x"
                f" {card_of(made[0])}{', compiled' if compiled else ''}"
            )
            where = f"{machine}: {words.format(batch=batch, context=context, load=load)}"
            note = (
                f"Serving with {where}; random weights. vLLM's own caches in orange; benchmarks/bench_serve_vllm.py;"
                f" {dated(made)}."
            )
            found.append({"title": where, "unit": unit, "note": note, "bars": bars})
    return found


def _load(row: dict[str, Any]) -> str:
    """Describe the load of an engine in words; return "" if a row does not name one."""
    load = row.get("load", {})
    if "tpot_limit_ms" in load:
        return (
            f"answers of up to {load['answers'][1]:,}, P99 of {load['ttft_limit_ms']:g} ms to the first token and"
            f" {load['tpot_limit_ms']:g} ms per token"
        )
    return json.dumps(load) if load else ""


def in_words(shape: str) -> str:
    """Describe a benchmark's "B=8 H=32/8 T=32768 D=128" in a reader's words."""
    found = re.fullmatch(r"B=(\d+) H=(\d+)/(\d+) T=(\d+) D=(\d+)", shape)
    if found is None:
        return shape
    batch, heads, kv_heads, tokens, size = (int(n) for n in found.groups())
    return (
        f"{batch} sequence{'s' if batch > 1 else ''} of {tokens:,} tokens, {heads} query and {kv_heads} kv heads of"
        f" {size}"
    )


def graphed(data: dict[str, Any]) -> dict[tuple[int, int], dict[tuple[Any, ...], dict[str, Any]]]:
    """Return (sequences, tokens) -> (row's name, mode) -> row: tokens through Transformers, of the newest sitting that
    timed the stock cache with FlashAttention and a preset in a graph.
    """
    rows = _tokens(data)
    found = {}
    for at in dict.fromkeys((r["batch"], r["context"]) for r in rows):
        some = sitting(data, [r for r in rows if (r["batch"], r["context"]) == at], _comparable)
        if some:
            found[at] = {(r["scheme"], r["mode"]): r for r in some}
    return found


def _tokens(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        r
        for r in data["rows"]
        if r["through"] == "forward" and not any(r.get(name) for name in ("chunk", "grows", "ranks"))
    ]


def newest_tokens(data: dict[str, Any], batch: int, context: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return (row's name, mode) -> the newest run's row, of several runs: no two of them are a ratio."""
    rows = [r for r in _tokens(data) if (r["batch"], r["context"]) == (batch, context)]
    return latest({"runs": data["runs"], "rows": rows}, ("scheme", "mode"))


def _comparable(rows: list[dict[str, Any]]) -> bool:
    return ("stock_flash", "eager") in {(r["scheme"], r["mode"]) for r in rows} and any(
        r["mode"] == "graph" and r["scheme"] in PRESETS for r in rows
    )


def _graphed(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens through Transformers: presets in a CUDA graph, beside the stock cache with FlashAttention."""
    found = []
    for (batch, context), rows in graphed(data).items():
        stock = rows["stock_flash", "eager"]["ms_per_token"]
        ours = {name: r["ms_per_token"] for (name, mode), r in rows.items() if mode == "graph" and name in PRESETS}
        bars = [{"label": name, "value": round(stock / ms, 2), "kind": "kvbits"} for name, ms in ours.items()]
        bars.append({"label": "stock cache, FlashAttention", "value": 1.0, "kind": "stock"})
        if fa3 := rows.get(("fa3", "graph")):
            bars.append(
                {
                    "label": "16 bits in a graph, FlashAttention-3",
                    "value": round(stock / fa3["ms_per_token"], 2),
                    "kind": "stock",
                }
            )
        made = [data["runs"][r["run"]] for r in rows.values()]
        what = f"{counted(batch, 'sequence')} of {context:,} tokens"
        note = (
            f"Tokens of Llama-3.1-8B's geometry through Transformers, {what}, in a CUDA graph; the stock cache without,"
            f" which copies itself at every token. benchmarks/bench_generate_gpu.py; {dated(made)}."
        )
        found.append(
            {
                "title": f"{card_of(made[0])}, tokens: {what}",
                "unit": "times as fast as the stock cache",
                "note": note,
                "bars": bars,
            }
        )
    return found
