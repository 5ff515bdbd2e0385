"""The results of study_codes.py as Markdown: each variant's KL, and its share of the KL of today's klt of its bits.

    python benchmarks/table_codes.py FILE

Windows have as many tokens each, so a share is a ratio of means over all windows. The range is that of single windows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import run_files

from kvbits.report.markdown import table

COLUMNS = ("variant", "bits held", "KL", "share of today's", "range over windows", "largest KL", "same token")


def lines(data: dict[str, Any]) -> list[list[str]]:
    """Return a line for each variant of a file whose plain klt was measured in the same windows."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for (variant, window), row in run_files.latest(data, ("variant", "window")).items():
        found.setdefault(variant, {})[window] = row
    of = []
    for variant, rows in found.items():
        today = found.get(variant.split("-")[0], {})
        if today.keys() != rows.keys():
            continue
        kl, base = ({w: r["kl_mean"] for w, r in each.items()} for each in (rows, today))
        shares = [kl[w] / base[w] for w in rows]
        of.append(
            [
                f"`{variant}`",
                f"{next(iter(rows.values()))['held_bits']:.3f}",
                f"{sum(kl.values()) / len(kl):.5f}",
                f"{sum(kl.values()) / sum(base.values()):.3f}",
                f"{min(shares):.2f} to {max(shares):.2f}",
                f"{max(r['kl_max'] for r in rows.values()):.2f}",
                f"{sum(r['top1'] for r in rows.values()) / len(rows):.2%}",
            ]
        )
    return of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    print(table(COLUMNS, lines(run_files.read(parser.parse_args().file))))


if __name__ == "__main__":
    main()
