"""The results of bench_serve_vllm.py as Markdown: every number beside its ratio to bf16 of the same geometry and shape, or at the largest batch of each.

    python benchmarks/table_serve_vllm.py [FILE]

Of a file of accuracy_serve_vllm.py: KL and change of perplexity, a column for each model and phase.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import run_files
from bench_serve_vllm import OUT

from kvbits import runs

ACCURACY = ("model", "model_dtype", "kv_cache_dtype", "phase", "context", "scored", "windows", "chunk", "text")
SPEED = ("mode", "geometry", "gpus", "kv_cache_dtype", "batch", "context", "compiled", "largest", "options")
"""What a row is of; the newest run's counts."""
COLUMNS = {
    "decode": (("step_ms", "step, ms"), ("tokens_per_s", "tokens/s"), ("capacity_tokens", "capacity, tokens")),
    "prefill": (("ttft_ms", "time to first token, ms"),),
    "serve": (("ttft_ms", "time to first token, ms"), ("tpot_ms", "per token, ms"), ("tpot_p99_ms", "P99"), ("tokens_per_s", "tokens/s")),
}


def table(rows: list[dict[str, Any]], mode: str) -> list[str]:
    """Lines of one mode's table."""
    mine = [r for r in rows if r["mode"] == mode and not r["options"]]
    lines = ["| geometry, GPUs | dtype | batch x context | " + " | ".join(title for _, title in COLUMNS[mode]) + " |", "|---" * (3 + len(COLUMNS[mode])) + "|"]
    for r in mine:
        alike = [b for b in mine if b["kv_cache_dtype"] == "bf16" and all(b[k] == r[k] for k in ("geometry", "gpus", "context", "compiled"))]
        base = next((b for b in alike if (b.get("largest") and r.get("largest")) or b["batch"] == r["batch"]), None)
        cells = []
        for name, _ in COLUMNS[mode]:
            ratio = f" ({r[name] / base[name]:.2f}x)" if base and base is not r and r[name] and base[name] else ""
            cells.append(f"{r[name]:,}{ratio}" if r[name] is not None else "")
        largest = " (largest)" if r.get("largest") else ""
        how = ", compiled" if r["compiled"] else ""
        lines.append(f"| {r['geometry']}, {r['gpus']}{how} | {r['kv_cache_dtype']} | {r['batch']} x {r['context']:,}{largest} | " + " | ".join(cells) + " |")
    return lines


def accuracy(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of one table; the base compared with itself is noise of computing in another order, and its decode alone says something."""
    found: dict[str, dict[str, str]] = {}
    for r in rows:
        cell = (
            f"{r['kl']:.4f}, {r['perplexity_change']:+.2%}" if (r["kv_cache_dtype"], r["phase"]) != ("auto", "prefill") else f"perplexity {r['perplexity']:.2f}"
        )
        found.setdefault(f"`{r['kv_cache_dtype']}`", {})[f"{r['model']}, {r['phase']}"] = cell
    columns = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = ["| KL, perplexity | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    return lines + [f"| {dtype} | " + " | ".join(cells.get(name, "") for name in columns) + " |" for dtype, cells in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=OUT)
    data = run_files.read(parser.parse_args().file)
    accurate = "phase" in data["rows"][0]
    rows = list(run_files.latest(data, ACCURACY if accurate else SPEED).values())
    for lines in [accuracy(rows)] if accurate else [table(rows, mode) for mode in COLUMNS if any(r["mode"] == mode for r in rows)]:
        print("\n".join([*lines, ""]))
    print(f"{runs.dated(data['runs'][r['run']] for r in rows)}; ratios are of rows of one run or sitting only where these agree")


if __name__ == "__main__":
    main()
