"""The results of bench_serve_vllm.py as Markdown: every number beside its ratio to bf16 of the same geometry and shape, or at the largest batch of each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench_serve_vllm import OUT

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=OUT)
    rows = json.loads(parser.parse_args().file.read_text())["rows"]
    for mode in COLUMNS:
        if any(r["mode"] == mode for r in rows):
            print("\n".join([*table(rows, mode), ""]))


if __name__ == "__main__":
    main()
