"""One HTML page that holds everything: data, Chart.js, style and script; it opens from a disk without network."""

from __future__ import annotations

import base64
import html
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..files import to_json
from ..runs import command_of, dated
from ..schemes import CORE, PRESETS
from . import markdown, plan_page
from .collect import Cell, Model, Results, bits, held_bits
from .plan_page import asset, select

LINES = ("int8_centered", "kivi4", "klt4", "klt2")
"""Presets of the memory chart."""
ACCURACY = {"kl": "KL divergence", "ppl": "perplexity", "mass": "probability mass"}
MEASURES = {"tvd": "attention that moved", "output_error": "output error", "logit_error": "1 - logit cosine"}


@dataclass(frozen=True)
class Beside:
    """Measurements beside the results of `kvbits eval`.

    Attributes:
        speeds: of attention on a GPU; the size of a mark in the first chart.
        groups: charts of bars, [{title, unit, note, bars: [{label, value, kind}]}].
        marks: more marks of the first chart, as `_points` makes them.
        picture: an SVG file's text with which the page opens; empty for none.
    """

    speeds: markdown.Speeds = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    marks: Sequence[Mapping[str, Any]] = ()
    picture: str = ""


NOTHING = Beside()


def page(results: Results, beside: Beside = NOTHING) -> str:
    """Return the page as HTML text, of today's formats only."""
    results = results.of_today()
    data = page_data(results, beside)
    models = [key for key, m in data["models"].items() if m["rows"]]
    sections = [
        _section("Which cache should I take", _answer(results, beside.speeds), "answer-section"),
        _section(
            "Bits against accuracy",
            _controls(select("pareto-model", "model", models), select("pareto-measure", "measure", ACCURACY))
            + _canvas(
                "pareto",
                "Scatter plot: bits per cached number against accuracy, kvbits schemes and Transformers' own quantized"
                " caches",
            )
            + '<p class="note">Lower left is better: fewer bits, nearer to the 16-bit cache. Bits held count scales and'
            ' raw tokens.</p><p class="note" id="pareto-note"></p><details><summary>all figures</summary>'
            '<div class="wide"><table id="pareto-table"></table></div></details>',
            "pareto-section",
        ),
        _section(
            "Memory against context",
            _controls(select("memory-shape", "model", list(plan_page.known())))
            + _canvas("memory", "Lines: bytes of a cache against context length"),
            "memory-section",
        ),
    ]
    if with_layers := [k for k, m in data["models"].items() if m["attention"]]:
        controls = _controls(
            select("layers-model", "model", with_layers), select("layers-measure", "measure", MEASURES)
        )
        text = (
            "<p>Error of each layer's attention on the same inputs, so errors do not add up from layer to layer;"
            " attention that moved is the share that goes to other tokens. More colour is worse.</p>"
        )
        sections.append(
            _section("Which layers suffer", text + controls + _heat("layers") + _unmeasured(results), "layers-section")
        )
    for model in results.models.values():
        if "decode" in model.tasks:
            sections.append(
                _section(
                    f"Decoding token by token: {model.title}", _decode(model.tasks["decode"]), f"decode-{model.name}"
                )
            )
    if data["kernels"]:
        groups = {str(i): g["title"] for i, g in enumerate(data["kernels"])}
        chart = _canvas("kernels", "Bars: speed of attention kernels and of serving")
        chosen = _controls(select("kernels-group", "measured", groups))
        sections.append(
            _section(
                "Speed of kernels and of serving",
                chosen + chart + '<p class="note" id="kernels-note"></p>',
                "kernels-section",
            )
        )
    sections.append(_section("Calculator", plan_page.section(plan_page.known()), "calculator-section"))
    tables = f"<details><summary>every cache on every model</summary>{markdown_table(results, beside.speeds)}</details>"
    sections.append(_section("All figures", tables, "tables-section"))
    sections.append(_section("Where the figures come from", _provenance(results), "provenance"))
    script = "".join(f"<script>{asset(name)}</script>" for name in ("chart.umd.min.js", "report.js"))
    embedded = to_json(data, compact=True).replace("<", "\\u003c")
    title = "kvbits: what few bits cost"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,'
        ' initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{asset("report.css")}</style></head><body>'
        f'<header><div><h1>{title}</h1><p class="soft">{html.escape(_lead(results))}</p></div>'
        f'<button id="theme" type="button">light / dark</button></header>'
        f"<main>{_opening(beside.picture)}{''.join(sections)}</main>"
        f"<footer>kvbits {__version__}. Charts: Chart.js (MIT). Blue is kvbits; orange (triangles) is what it is"
        " compared with: Transformers' caches, other "
        "libraries' kernels.</footer>"
        f'<script type="application/json" id="data">{embedded}</script>{script}</body></html>\n'
    )


# -- data -----------------------------------------------------------------------------------------------------------


def page_data(results: Results, beside: Beside = NOTHING) -> dict[str, Any]:
    """Return everything the script draws, as JSON data."""
    results = results.of_today()
    models = {key: _model(m) for key, m in results.models.items() if m.tasks.keys() & {"fidelity", "attention"}}
    return {
        "models": models,
        "lines": list(LINES),
        "kernels": list(beside.groups),
        "answer": [*_points(results, beside.speeds), *beside.marks],
    }


def _points(results: Results, speeds: markdown.Speeds) -> list[dict[str, Any]]:
    """Return a mark for every preset measured on all models, and every other cache on those that it serves: its bits at
    long context, the KL of its worst model, its speed on a GPU (the middle of the shapes measured).
    """
    models = {k: m.tasks["fidelity"] for k, m in results.as_used.items() if "fidelity" in m.tasks}
    chosen = markdown.recommended(results)
    found = []
    for name, cell in {n: c for cells in models.values() for n, c in cells.items() if c.summary}.items():
        measured = [
            cells[name].summary["kl_mean"] for cells in models.values() if name in cells and cells[name].summary
        ]
        if cell.kind == "base" or (cell.kind == "kvbits" and len(measured) < len(models)):
            continue
        speed = statistics.median(speeds[name].values()) if name in speeds else None
        found.append(
            {
                "name": name,
                "kind": cell.kind,
                "bits": bits(cell, next(cells for cells in models.values() if name in cells)),
                "kl": max(measured),
                "speed": speed,
                "recommended": name in chosen,
                "models": len(measured),
            }
        )
    return found


def _model(model: Model) -> dict[str, Any]:
    cells = model.tasks.get("fidelity", {})
    return {
        "title": model.title,
        "note": markdown.conditions(model) if cells else "",
        "rows": [_row(c, cells) for c in cells.values() if c.summary],
        "attention": _attention(model.tasks.get("attention", {})),
    }


def _row(cell: Cell, cells: dict[str, Cell]) -> dict[str, Any]:
    s = cell.summary
    return {
        "scheme": cell.scheme,
        "kind": cell.kind,
        "held_bits": held_bits(cell, cells),
        "ppl": s["ppl"],
        "ppl_change": s.get("ppl_change", 0.0),
        "se": s.get("ppl_change_se"),
        "kl": s["kl_mean"],
        "kl_p99": s["kl_p99"],
        "kl_max": s["kl_max"],
        "kl_worst": s.get("kl_worst"),
        "kl_lost": s.get("kl_lost"),
        "read_raw": s.get("read_raw"),
        "mass": s["mass_matched"],
        "top1": s["top1_agreement"],
        "reduction": s.get("memory_reduction"),
        "speed": s.get("speed_ratio"),
        "tokens": s["tokens"],
    }


def _attention(cells: dict[str, Cell]) -> list[dict[str, Any]]:
    found = []
    for c in cells.values():
        if c.kind != "base" and c.summary:
            by = c.summary["by_layer"]
            cosine = [None if v is None else 1 - v for v in by["logit_cosine"]]
            found.append(
                {
                    "scheme": c.scheme,
                    "kind": c.kind,
                    "tvd": by["tvd"],
                    "output_error": by["output_error"],
                    "logit_error": cosine,
                }
            )
    return found


# -- HTML -----------------------------------------------------------------------------------------------------------


def _lead(results: Results) -> str:
    names = ", ".join(dict.fromkeys(m.name for m in results.models.values()))
    return (
        "A KV cache of few bits holds more tokens and changes the answers a little. This page shows how much of both."
        f" All caches were packed as in use, and read the same tokens. The models: {names}."
    )


def _opening(picture: str) -> str:
    """Return an SVG as an image, whose colours follow the page's theme."""
    if not picture:
        return ""
    source = base64.b64encode(picture.encode()).decode()
    title = re.search(r"<title[^>]*>(.*?)</title>", picture)
    return (
        f'<figure class="picture"><img alt="{title[1] if title else ""}" src="data:image/svg+xml;base64,{source}">'
        "</figure>"
    )


def _section(title: str, content: str, name: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>'


def _controls(*controls: str) -> str:
    return f'<div class="controls">{"".join(controls)}</div>'


def _canvas(name: str, description: str) -> str:
    return f'<div class="chart"><canvas id="{name}" role="img" aria-label="{html.escape(description)}"></canvas></div>'


def _heat(name: str) -> str:
    return f'<div class="wide"><table class="heat" id="{name}"></table></div>'


def _decode(cells: dict[str, Cell]) -> str:
    """Return speeds of single tokens after a context, the caches taking turns."""
    setting = next(iter(cells.values())).settings
    rows = [(c, c.summary) for c in cells.values() if c.summary]
    figures = [
        [
            c.scheme,
            f"{s['tokens_per_s']:.2f}",
            f"{s['speed_ratio']:.2f}x",
            f"{s['bytes_held']:,}",
            f"{s['kl_mean']:.4f}",
        ]
        for c, s in rows
    ]
    e = rows[0][0].run
    machine = f"{e['device']}, {e['threads']} thread{'' if e['threads'] == 1 else 's'}"
    lead = (
        f"{setting['context']:,} tokens of context, then {setting['new_tokens']} single tokens; the caches take turns"
        f" on {machine}."
    )
    columns = ("cache", "tokens/s", "against the 16-bit cache", "bytes held", "KL")
    return f"<p>{lead}</p>{_table(columns, figures, [c.kind for c, _ in rows])}"


def _answer(results: Results, speeds: markdown.Speeds) -> str:
    """Return a picture, and one sentence a budget."""
    plain = (
        "<p>Each mark is a cache at its worst of the measured models. Its height is the KL divergence between the"
        " cache's predictions and the 16-bit cache's. 0 is no difference, and at 0.05 a text is a few percent harder to"
        " predict. A larger mark is faster on a GPU.</p>"
    )
    said = "".join(f"<li>{_inline(s)}</li>" for s in markdown.budgets(results, speeds))
    picture = _canvas(
        "answer",
        "Scatter plot: bits per cached number against KL divergence of the worst model; the size of a mark is its speed"
        " on a GPU",
    )
    return f'{plain}{picture}<p class="note" id="answer-note"></p><ul>{said}</ul>{_left_out(results)}'


def _left_out(results: Results) -> str:
    """Name the caches that were measured in a format that is gone or stores otherwise today, and the way to marks."""
    if not results.outdated:
        return ""
    there = [name for name in results.outdated if name in PRESETS]
    how = f"; <code>kvbits eval MODEL --schemes {','.join(there)}</code> measures them" if there else ""
    names = ", ".join(html.escape(name) for name in results.outdated)
    return f'<p class="note">Results in an earlier format are left out: {names}{how}.</p>'


def _unmeasured(results: Results) -> str:
    """Name the core presets whose layers were not measured on any model, and the command that does."""
    seen = {name for m in results.models.values() for name in m.tasks.get("attention", {})}
    missing = [name for name in CORE if name != "raw" and name not in seen]
    if not missing:
        return ""
    command = f"kvbits eval MODEL --tasks attention --schemes {','.join(missing)}"
    return f'<p class="note">Not measured: {", ".join(missing)}; <code>{command}</code> adds rows.</p>'


def markdown_table(results: Results, speeds: markdown.Speeds) -> str:
    """Return the table of `markdown.scheme_rows` as HTML."""
    columns, rows, notes = markdown.scheme_rows(results, speeds)
    shown = _table(columns, [r.cells for r in rows], [r.kind for r in rows])
    chosen = markdown.recommendations(results, speeds)
    lead = "".join(f"<li>{_inline(n)}</li>" for n in chosen)
    text = "".join(f'<p class="note">{_inline(n)}</p>' for n in notes if n not in (markdown.LEGEND, *chosen))
    legend = f'<p class="note">{_inline(markdown.LEGEND)}</p>'
    mass_columns, mass, said = markdown.mass_rows(results)
    text += f'<p class="note">{_inline(markdown.runs_note(results))}</p>'
    return f'<ul>{lead}</ul>{legend}{shown}{text}{_table(mass_columns, mass)}<p class="note">{_inline(said)}</p>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """Return a table, whose rows of the kind "stock" are marked."""
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in columns)
    marks = [" class=stock" if kind == "stock" else "" for kind in kinds] or [""] * len(rows)
    body = "".join(
        f"<tr>{''.join(f'<td{mark}>{html.escape(c)}</td>' for c in cells)}</tr>"
        for cells, mark in zip(rows, marks, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _inline(text: str) -> str:
    """Return Markdown's bold and code as HTML."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text, quote=False))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)


def _provenance(results: Results) -> str:
    found = []
    for m in results.models.values():
        for task, cells in m.tasks.items():
            made = {name: run for c in cells.values() for name, run in c.runs.items()}
            newest = max(made.values(), key=lambda run: run["utc"])
            versions = ", ".join(
                f"{name} {newest['versions'][name]}"
                for name in ("torch", "transformers", "kvbits")
                if name in newest["versions"]
            )
            weights = m.facts.get("weights")
            kept = f"{weights['source']}, {weights['format']}" if weights else m.facts["dtype"]
            facts = (
                f"model fingerprint {m.facts['fingerprint']}, {kept}; {newest['device']}; {versions}; runs"
                f" {dated(made.values())}"
            )
            commands = dict.fromkeys(typed for run in made.values() if (typed := command_of(run)))
            listed = "".join(f"<li><code>{html.escape(c)}</code></li>" for c in commands)
            found.append(
                f"<details><summary>{html.escape(m.title)}:"
                f" {html.escape(task)}</summary><p>{html.escape(facts)}</p><ul>{listed}</ul></details>"
            )
    return "".join(found)
