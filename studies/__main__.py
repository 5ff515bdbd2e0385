"""`python -m studies`: the INT8 paper's study on this machine, and the memory figures of source documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import run_files
import typer

from kvbits import runs
from kvbits.cli.common import Group, OnThreads, Output, command, new_table, print_json
from kvbits.cli.output import show
from kvbits.errors import FileFormatError, SpecError
from kvbits.files import require_folder
from kvbits.settings import names_in, setting

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Studies of what source documents print.",
)
STAGES = {"quantize": "quantize", "dequantize": "dequantize", "with_scales": "scales + quantize", "scales": "scales"}


@dataclass(frozen=True, kw_only=True)
class Paper(OnThreads):
    """Options of the INT8 paper's study."""

    cases: tuple[str, ...] = setting(
        ("all",),
        "Cases, comma-separated, or all: the paper's eight and one with D not divisible by 4.",
        read=names_in,
        shown="all",
    )
    cpu_rows: int = setting(4096, "Rows the CPU code is timed on; its times are scaled to the case.")
    out: Path | None = setting(None, "JSON file that this run is added to.")
    figures: Path | None = setting(None, "Folder for the paper's figures 1 to 5 (needs matplotlib).")
    data: Path | None = setting(None, "A file that --out wrote: show and draw it, measure nothing.", "--from")


@command(to=app)
def paper(options: Paper) -> None:
    """Quantize matrices as in the INT8 paper: its CPU code, its four CUDA kernels, ours; time, bandwidth, speed-up,
    errors.

    Without an NVIDIA GPU the CPU part is measured alone.
    """
    out, figures = options.out, options.figures
    if out:
        require_folder(out.parent, "--out", writable=True)
        if out.is_dir():
            raise SpecError(f"--out {out} is a directory; name a file in it")
    if figures:
        require_folder(figures, "--figures", writable=True)
    own = _load(options.data) if options.data else runs.of_one(_measure(options), "errors", "rows")
    result = run_files.newest(own)
    if out and not options.data:
        out.parent.mkdir(parents=True, exist_ok=True)
        run_files.add(own, out)
    notes = [] if result["device"] else [f"No GPU kernels were measured: {result['gpu_missing']}."]
    if figures:
        from .int8_paper.figures import draw

        paths, left_out = draw(result, figures)
        notes += [f"wrote {p}" for p in paths] + left_out
    if options.as_json:
        print_json(own)
        return
    show(_errors(result), *(_times(result, e["case"]) for e in result["errors"]), *notes)


def _measure(options: Paper) -> dict[str, Any]:
    from .int8_paper import study

    options.set_threads()
    names = list(study.CASES) if list(options.cases) == ["all"] else list(options.cases)
    return study.run(names, cpu_rows=options.cpu_rows, progress=lambda text: typer.echo(text, err=True))


def _load(path: Path) -> dict[str, Any]:
    try:
        data = run_files.read(path)
    except FileFormatError as e:
        why = (
            f"--from {path}: {e.__cause__}; give a file"
            if e.__cause__
            else f"--from {path} is no result of `python -m studies paper`: {e}; give one"
        )
        raise SpecError(f"{why} that `python -m studies paper --out` wrote") from e
    if not {"device", "gpu_missing", "cpu", "errors", "rows"} <= set(run_files.newest(data)):
        raise SpecError(f"--from {path} is no result of `python -m studies paper --out`")
    return data


def _errors(result: dict[str, Any]) -> Table:
    table = new_table(
        "Errors of the round trip (bound: 1 / 254 = 0.00394)",
        "case",
        "T",
        "D",
        "rows checked",
        "largest",
        "L2",
        "attention score, mean",
    )
    for e in result["errors"]:
        sizes = (f"{e[name]:,}" for name in ("rows", "columns", "error_rows"))
        table.add_row(e["case"], *sizes, f"{e['max_error']:.5f}", f"{e['l2_error']:.3f}", f"{e['attention_error']:.4f}")
    return table


def _times(result: dict[str, Any], case: str) -> Table:
    title = f"{case} on {result['device'] or result['cpu']}"
    table = new_table(
        title,
        "stage",
        "kernel",
        "dtype",
        "ms",
        "GB/s",
        "of copy",
        "vs scalar CPU",
        "vs row order",
        "vs our CPU kernel",
        left=3,
    )
    for stage, label in STAGES.items():
        for r in (r for r in result["rows"] if r["case"] == case and r["stage"] == stage):
            speedups = [f"{r[f'speedup_vs_cpu_{k}']:,.2f}x" for k in ("column_outer", "row_order", "fast")]
            share = "" if r["share_of_copy"] is None else f"{r['share_of_copy']:.2f}"
            table.add_row(
                label,
                r["kernel"],
                r["dtype"],
                f"{r['time_us'] / 1e3:,.3f}",
                f"{r['gbytes_per_s']:,.1f}",
                share,
                *speedups,
            )
    return table


@command(to=app)
def sources(options: Output) -> None:
    """Recompute the memory figures that the source documents print."""
    from kvbits.units import GB, GIB

    from .source_figures import source_figures

    figures = source_figures()
    if options.as_json:
        print_json({"sources": [f.to_dict() for f in figures]})
        return
    table = new_table(
        "Memory figures the source documents print, recomputed",
        "source",
        "case",
        "prints",
        "formula gives",
        "",
        "agrees",
        "why",
        left=2,
    )
    table.columns[6].justify = "left"
    for f in figures:
        table.add_row(
            f.source,
            f.case,
            f.printed,
            f"{f.nbytes / GB:.2f} GB",
            f"{f.nbytes / GIB:.2f} GiB",
            "yes" if f.agrees else "NO",
            f.verdict,
        )
    show(table, "GB is 10**9 bytes, GiB is 2**30.")


if __name__ == "__main__":
    app(prog_name="python -m studies")
