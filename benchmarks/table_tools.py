"""The results of `kvbits eval --tasks tools` as Markdown: calls that are the 16-bit cache's, by context.

    python benchmarks/table_tools.py FOLDER

FOLDER is what `--out` named. If it holds a model in two dtypes, the second one's 16-bit cache stands beside the caches
of the first. Each cache's agreement is then followed by the points that it agrees more than the other dtype does, with
a 95 % interval over the same calls in pairs. The calls of one history are a cluster of every interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvbits.errors import KvbitsError, SpecError
from kvbits.evaluate.paired import agreement, paired, points, share
from kvbits.evaluate.tasks.tools import calls_together
from kvbits.report.collect import Cell, Model, collect
from kvbits.report.markdown import of_earlier, table
from kvbits.runs import dated


def rows_of(m: Model, other: Model | None, schemes: list[str]) -> list[list[str]]:
    """Return a row for each length of a model's conversations."""
    base, *_ = m.tasks["tools"].values()
    beside = next(iter(other.tasks["tools"].values())) if other else None
    found = []
    for kind, figures in base.summary["by_kind"].items():
        mine = {key: record for key, record in base.items.items() if key.startswith(f"{kind}:")}

        def cell(c: Cell | None, mine: dict[str, dict[str, object]] = mine) -> str:
            if c is None or not (same := agreement(calls_together(c.items, mine))):
                return ""
            both = {k: v for k, v in mine.items() if beside and k in beside.items and k in c.items}
            if beside is None or not both:
                return share(same)
            histories = zip(calls_together(c.items, both), calls_together(beside.items, both), strict=True)
            pairs = (zip(own, others, strict=True) for own, others in histories)
            return f"{same['agreement']:.1%}; {points(paired(map(list, pairs)))}"

        against = {} if beside is None else agreement(calls_together(beside.items, mine))
        found.append(
            [
                f"{m.title}, {int(kind.split(':')[1]):,}",
                f"{figures['parts']:,}",
                f"{figures['parsed']:.1%}",
                f"{figures['accuracy']:.1%}",
                f"{share(against)} {other.facts['dtype']}" if other and against else "",
                *(cell(m.tasks["tools"].get(name)) for name in schemes),
            ]
        )
    return found


def tools_table(folder: Path) -> str:
    """Write the table of a folder of results, and when they were measured."""
    by_name: dict[str, list[Model]] = {}
    for m in collect(folder).models.values():
        if "tools" in m.tasks:
            by_name.setdefault(m.name, []).append(m)
    if not by_name:
        raise SpecError(f"{folder} has no results of `kvbits eval --tasks tools`; give the folder that --out named")
    cells = [c for some in by_name.values() for m in some[:2] for c in m.tasks["tools"].values()]
    schemes = list(dict.fromkeys(c.scheme for m, *_ in by_name.values() for c in [*m.tasks["tools"].values()][1:]))
    rows = [row for m, *others in by_name.values() for row in rows_of(m, others[0] if others else None, schemes)]
    columns = ["model, context", "calls", "parse", "right", "other dtype", *(f"`{name}`" for name in schemes)]
    runs = [run for c in cells for run in c.runs.values()]
    notes = [f"Runs: {dated(runs)}.", *of_earlier(c.scheme for c in cells if c.outdated)]
    return f"{table(columns, rows)}\n\n{' '.join(notes)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results of `kvbits eval --tasks tools`")
    try:
        print(tools_table(parser.parse_args().folder))
    except KvbitsError as e:
        parser.error(str(e))
