"""Results of `kvbits eval` as they are committed: what a report or a table reads stays, per-window dumps go.

Used before the files are committed; later a committed file loses what single windows have at most.

    python benchmarks/trim_results.py [--summaries] FOLDER ...

Left out are histograms of KL over a window's tokens (the summary has the percentile made of them; a window added later
makes it null), what was written in greedy texts and answered to questions (whether it was right stays), and single
layers' attention of a window (the summary has their means). Floats of items, not of summaries, keep 6 significant
digits. Running it again changes nothing. --summaries leaves of windows their names and runs, and of questions nothing:
what is made of them is in the summary, whose floats are rounded, too; and no octaves of single texts.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from kvbits.evaluate.results import dumps, read

DROPPED = (
    "kl_histogram",
    "chain",
    "answer",
    "isolation",
    "reason",
    "chosen",
    "layers",
    "statistics",
)
NEEDED = {
    "replay": "chain",
    "greedy": "tokens",
    "attention": "layers",
    "humaneval": "chosen",
    "gsm8k": "chosen",
    "mmlu": "chosen",
}
"""Fields that a run that continues would need of each item. A file without them has a field `trimmed`, and `kvbits
eval` refuses to continue it.
"""
DIGITS = 6


def rounded(value: Any) -> Any:
    """Return JSON data with every float to DIGITS significant digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def trimmed(data: dict[str, Any], summaries: bool = False) -> dict[str, Any]:
    """Return one result file's data without what no report reads."""
    if summaries:
        parts = {
            name: {k: v for k, v in one.items() if k != "octaves"}
            for name, one in data["summary"].get("texts", {}).items()
        }
        items = (
            {key: {"run": record["run"]} for key, record in data["items"].items()}
            if "windows" in data["summary"]
            else {}
        )
        return data | {
            "items": items,
            "summary": rounded(data["summary"] | ({"texts": parts} if parts else {})),
            "trimmed": ["all figures"],
        }
    items = {
        key: {
            k: rounded(v) for k, v in record.items() if k not in DROPPED and not (k == "tokens" and isinstance(v, list))
        }
        for key, record in data["items"].items()
    }
    needed = NEEDED.get(data["task"])
    lacks = needed is not None and any(needed not in record for record in items.values())
    return data | {"items": items} | ({"trimmed": [needed]} if lacks else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that `kvbits eval --out` wrote")
    parser.add_argument("--summaries", action="store_true", help="drop the figures of items")
    args = parser.parse_args()
    before = after = 0
    for path in (p for folder in args.folders for p in sorted(folder.glob("*/*/*.json"))):
        before += path.stat().st_size
        text = dumps(trimmed(read(path), args.summaries)) + "\n"
        partial = path.with_suffix(".tmp")
        partial.write_text(text)
        os.replace(partial, path)
        after += len(text.encode())
    print(json.dumps({"bytes_before": before, "bytes_after": after}))


if __name__ == "__main__":
    main()
