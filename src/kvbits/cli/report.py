"""`kvbits report`: results of `kvbits eval` as one HTML page, Markdown, PNG figures, the README's table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpecError
from ..files import require_file, require_folder
from .common import Json, command, print_json, show, when_stopped


def _rewrite(path: Path, part: str, written: list[str]) -> None:
    from ..report.markdown import put_into

    path.write_text(put_into(path.read_text(encoding="utf-8"), part), encoding="utf-8")
    written.append(str(path))


@command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder that `kvbits eval` wrote.")],
    html: Annotated[Path | None, typer.Option(help="The page; kvbits-report.html here if no output is named.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="All tables as Markdown.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="Folder for PNG figures (matplotlib).", show_default=False)] = None,
    readme: Annotated[
        Path | None, typer.Option(help="File whose tables of presets and of milliseconds are rewritten; needs --benchmarks.", show_default=False)
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="File whose tables of every cache on every model, and with --benchmarks of lengths, are rewritten.", show_default=False)
    ] = None,
    benchmarks: Annotated[Path | None, typer.Option(help="Folder benchmarks/results, for speeds.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page (no network needed), Markdown tables and PNG figures from results. Nothing is written into RESULTS."""
    if html is None and markdown is None and png is None and readme is None and table is None:
        html = Path("kvbits-report.html")
    for option, path in (("--html", html), ("--markdown", markdown), ("--readme", readme), ("--table", table)):
        if path is not None:
            require_file(path, option)
    if png is not None:
        require_folder(png, "--png", writable=True)
    for option, path in (("--readme", readme), ("--table", table)):
        if path is not None and not path.exists():
            raise SpecError(f"{option} {path}: no such file")
    if readme is not None and benchmarks is None:
        raise SpecError("--readme has speeds in its table; give --benchmarks too, benchmarks/results of a checkout")
    if benchmarks is not None and not benchmarks.is_dir():
        raise SpecError(f"--benchmarks {benchmarks}: no such folder; benchmarks/results of a checkout is one")
    from ..report import markdown as tables
    from ..report.collect import collect
    from ..report.figures import figures
    from ..report.page import page

    when_stopped("nothing in the results is changed; the same command draws them anew")
    found = collect(results)
    if found.simulated:
        typer.echo(f"left out {len(found.simulated)} simulated results ({', '.join(found.simulated[:3])}, ..): reports show measured ones", err=True)
    written: list[str] = []
    if html is not None:
        html.write_text(page(found, benchmarks=benchmarks), encoding="utf-8")
        written.append(str(html))
    if markdown is not None:
        markdown.write_text(tables.report(found), encoding="utf-8")
        written.append(str(markdown))
    if readme is not None and benchmarks is not None:
        _rewrite(readme, tables.preset_table(found, benchmarks), [])
        _rewrite(readme, tables.milliseconds_table(benchmarks), written)
    if table is not None:
        _rewrite(table, tables.scheme_table(found, benchmarks), written)
        if benchmarks is not None:
            _rewrite(table, tables.length_table(benchmarks), [])
    if png is not None:
        written += [str(p) for p in figures(found, png)]
    if as_json:
        print_json({"written": written, "models": list(found.models)})
    else:
        show(*(f"wrote {w}" for w in written))
