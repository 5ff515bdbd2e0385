"""`kvbits report`: results of `kvbits eval` as one HTML page and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..files import require_file
from .common import Json, command, print_json, when_stopped
from .output import show, tell


@command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder that `kvbits eval` wrote.")],
    html: Annotated[
        Path | None, typer.Option(help="The page; kvbits-report.html here if no output is named.", show_default=False)
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="All tables as Markdown.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page (no network needed) and Markdown tables from results.

    Nothing is written into RESULTS.
    """
    if html is None and markdown is None:
        html = Path("kvbits-report.html")
    for option, path in (("--html", html), ("--markdown", markdown)):
        if path is not None:
            require_file(path, option)
    from ..report.collect import collect
    from ..report.markdown import report as tables
    from ..report.page import page

    when_stopped("nothing in the results is changed; the same command draws them anew")
    found = collect(results)
    if found.simulated:
        tell(
            f"left out {len(found.simulated)} simulated results ({', '.join(found.simulated[:3])}, ..): reports show"
            " measured ones"
        )
    written: list[str] = []
    for path, make in ((html, page), (markdown, tables)):
        if path is not None:
            path.write_text(make(found), encoding="utf-8")
            written.append(str(path))
    if as_json:
        print_json({"written": written, "models": list(found.models)})
    else:
        show(*(f"wrote {w}" for w in written))
