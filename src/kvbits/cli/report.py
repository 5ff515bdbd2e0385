"""`kvbits report`: results of `kvbits eval` as one HTML page and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..files import require_file
from ..settings import setting
from .common import Output, command, print_json, when_stopped
from .output import show, tell


@dataclass(frozen=True, kw_only=True)
class Reported(Output):
    """Options of `kvbits report`: what is reported."""

    results: Path = setting(..., "Folder that `kvbits eval` wrote.", argument=True)
    html: Path | None = setting(None, "Page to write; kvbits-report.html if no output is named.")
    markdown: Path | None = setting(None, "Markdown file to write, with all tables.")


@command()
def report(options: Reported) -> None:
    """Write one self-contained HTML page (no network needed) and Markdown tables from results.

    Nothing is written into RESULTS.
    """
    html, markdown = options.html, options.markdown
    if html is None and markdown is None:
        html = Path("kvbits-report.html")
    for option, path in (("--html", html), ("--markdown", markdown)):
        if path is not None:
            require_file(path, option)
    from ..report.collect import collect
    from ..report.markdown import report as tables
    from ..report.page import page

    when_stopped("nothing in the results is changed; the same command draws them anew")
    found = collect(options.results)
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
    if options.as_json:
        print_json({"written": written, "models": list(found.models)})
    else:
        show(*(f"wrote {w}" for w in written))
