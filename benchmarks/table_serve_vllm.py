"""The results of bench_serve_vllm.py as Markdown: every number beside its ratio to bf16 of the same geometry and shape,
at the largest batch of each, or at the highest rate that each held.

    python benchmarks/table_serve_vllm.py [FILE]

The last table has the columns of an article on 8 and 4 bits (A100 of 80 GB, Llama-70B, 4,096 tokens, continuous
batching), its figures beside those of the highest rates here. Of steps under a profiler there is a table for each
shape: microseconds by group of kernels, overlap counted once, above what they take without it.

Of a file of accuracy_serve_vllm.py: KL and change of perplexity, a column for each model and phase.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import run_files
from tables_gpu import RESULTS, beside_article, profiles

from kvbits import runs
from kvbits.report.markdown import table

ACCURACY = ("model", "model_dtype", "kv_cache_dtype", "phase", "context", "scored", "windows", "chunk", "text")
SPEED = (
    "mode",
    "geometry",
    "gpus",
    "kv_cache_dtype",
    "batch",
    "context",
    "compiled",
    "largest",
    "highest",
    "load",
    "options",
)
"""Fields that tell rows apart; the newest run's row counts."""
FIRST, EACH = ("ttft_ms", "first token, ms"), ("tpot_ms", "per token, ms")
COLUMNS = {
    "decode": (("step_ms", "step, ms"), ("tokens_per_s", "tokens/s"), ("capacity_tokens", "capacity, tokens")),
    "prefill": (("ttft_ms", "time to first token, ms"),),
    "goodput": (
        ("rate_per_s", "requests/s"),
        FIRST,
        ("ttft_p99_ms", "P99"),
        EACH,
        ("tpot_p99_ms", "P99"),
        ("tokens_per_s", "tokens/s"),
        ("most_at_once", "at once"),
    ),
    "turns": (
        ("hit_rate", "hits"),
        FIRST,
        ("ttft_p99_ms", "P99"),
        EACH,
        ("tokens_per_s", "tokens/s"),
        ("turns", "turns"),
        ("capacity_tokens", "capacity, tokens"),
    ),
    "drafts": (
        ("acceptance", "drafts accepted"),
        ("tokens_per_step", "tokens a step"),
        ("tokens_per_s", "tokens/s"),
        ("capacity_tokens", "capacity, tokens"),
    ),
}
SHAPES = {
    "decode": "batch x context",
    "prefill": "prompt",
    "goodput": "requests/s sent",
    "turns": "users",
    "drafts": "batch x context, drafts a step",
}


def shape(r: dict[str, Any]) -> str:
    if r["mode"] == "decode":
        return f"{r['batch']} x {r['context']:,}" + (" (largest)" if r.get("largest") else "")
    if r["mode"] == "prefill":
        return f"{r['context']:,}"
    if r["mode"] == "drafts":
        drafts = f"{r['load']['count']} of {r['load']['drafts']}" if r["load"]["count"] else "none"
        return f"{r['batch']} x {r['context']:,}, {drafts}"
    kept = " (highest)" if r.get("highest") else "" if r.get("held", True) else " (too many)"
    return f"{r['batch']:g}{kept}"


def speeds(rows: list[dict[str, Any]], mode: str) -> str:
    """Write one mode's table."""
    mine = [r for r in rows if r["mode"] == mode and not r["options"]]
    lines = []
    for r in mine:
        alike = [
            b
            for b in mine
            if b["kv_cache_dtype"] == "bf16"
            and all(b.get(k) == r.get(k) for k in ("geometry", "gpus", "context", "compiled", "load"))
        ]
        best = next((k for k in ("largest", "highest") if r.get(k)), None)
        base = next(
            (b for b in alike if (b.get(best) if best else b["batch"] == r["batch"] and not b.get("highest"))), None
        )
        cells = []
        for name, _ in COLUMNS[mode]:
            ratio = f" ({r[name] / base[name]:.2f}x)" if base and base is not r and r[name] and base[name] else ""
            cells.append(f"{r[name]:,}{ratio}" if r[name] is not None else "")
        how = ", compiled" if r["compiled"] else ""
        lines.append([f"{r['geometry']}, {r['gpus']}{how}", r["kv_cache_dtype"], shape(r), *cells])
    titles = ["geometry, GPUs", "dtype", SHAPES[mode], *(title for _, title in COLUMNS[mode])]
    return table(titles, lines, left=3)


def accuracy(rows: list[dict[str, Any]]) -> str:
    """Write one table; the base compared with itself is noise of computing in another order, and its decode alone says
    something.
    """
    found: dict[str, dict[str, str]] = {}
    for r in rows:
        cell = (
            f"{r['kl']:.4f}, {r['perplexity_change']:+.2%}"
            if (r["kv_cache_dtype"], r["phase"]) != ("auto", "prefill")
            else f"perplexity {r['perplexity']:.2f}"
        )
        found.setdefault(f"`{r['kv_cache_dtype']}`", {})[f"{r['model']}, {r['phase']}"] = cell
    columns = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = [[dtype, *(cells.get(name, "") for name in columns)] for dtype, cells in found.items()]
    return table(["KL, perplexity", *columns], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / "serve_vllm.json")
    data = run_files.read(parser.parse_args().file)
    accurate = "phase" in data["rows"][0]
    rows = list(run_files.latest(data, ACCURACY if accurate else SPEED).values())
    tables = (
        [accuracy(rows)]
        if accurate
        else [
            *(speeds(rows, mode) for mode in COLUMNS if any(r["mode"] == mode for r in rows)),
            *profiles(rows),
            *filter(None, [beside_article(rows)]),
        ]
    )
    for one in tables:
        print(f"{one}\n")
    print(
        f"{runs.dated(data['runs'][r['run']] for r in rows)}; ratios are of rows of one run or sitting only where these"
        " agree"
    )


if __name__ == "__main__":
    main()
