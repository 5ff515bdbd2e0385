"""Writer of the generated tables of README.md and docs, docs/plan.html and docs/results/report.html, from
benchmarks/results: `python docs/make_tables.py`. A test compares.

README has `numbers` and `preset_table`, docs/guide/transformers.md `milliseconds_table`, docs/guide/choose.md
`short_table`, docs/results/evaluation.md `scheme_table` and `length_table`, docs/results/points.md `points_tables` and
`tails_table`. benchmarks/tables_gpu.py writes the tables of one GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import tables_gpu  # noqa: E402
from run_files import outdated, read  # noqa: E402
from speeds import GPU, card_of, complete, gpu_latest, gpu_rows, gpu_speeds, graphed, kernel_groups, newest_tokens  # noqa: E402
from table_tools import tools_table  # noqa: E402

from kvbits import planner, schemes  # noqa: E402
from kvbits.errors import DataError, SpecError, counted  # noqa: E402
from kvbits.evaluate import MAX_KL, MAX_PPL_CHANGE  # noqa: E402
from kvbits.evaluate.fidelity import DECODING_CHUNK, DRIFT_FROM, read_raw  # noqa: E402
from kvbits.evaluate.paired import points  # noqa: E402
from kvbits.evaluate.results import read as read_result  # noqa: E402
from kvbits.integrations.vllm.formats import FORMATS  # noqa: E402
from kvbits.report import plan_page  # noqa: E402
from kvbits.report.collect import Cell, Model, Results, collect  # noqa: E402
from kvbits.report.markdown import (  # noqa: E402
    LEGEND,
    change,
    conditions,
    measured,
    percent,
    recommendations,
    recommended,
    runs_note,
    scheme_rows,
    table,
    unfit,
)
from kvbits.report.page import Beside, page  # noqa: E402
from kvbits.runs import dated  # noqa: E402
from kvbits.schemes import GROUPS  # noqa: E402
from kvbits.spec import CacheSpec, LayerGeometry  # noqa: E402

BENCHMARKS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "results" / "figures" / "kl_over_bits.svg"
"""Picture that README and the report open with (`docs/make_picture.py`)."""
FIGURES = "src/kvbits/report/assets/measured.json"
"""File of the measured figures that the package contains."""
SHORT_SEQUENCES = "short-sequences"
"""Name of the place for `short_table`."""
SCHEMES, TABLE, MILLISECONDS, LENGTHS, NUMBERS = (
    "scheme-table",
    "preset-table",
    "milliseconds-table",
    "length-table",
    "numbers",
)
"""Names of the places for `scheme_table`, `preset_table`, `milliseconds_table`, `length_table` and `numbers`."""
SHOWN = ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt3", "klt2")
"""Presets of `length_table`: lossless, then by bits."""
TAKEN = {
    "int8_centered": "always, at first",
    "kivi4": "8 bits do not fit; needs no calibration",
    "klt4": "8 bits do not fit",
    "klt3": "4 bits do not fit; check first",
    "klt2": "3 bits do not fit; check first",
}
"""Presets of `preset_table`, by bits, and when to take each."""
HEADLINE, HEADLINE_SHAPE = "klt4", "B=32 H=32/8 T=8192 D=128"
"""Preset of `numbers`, and the shape of its speed."""
HELD_AT = 8192
"""Tokens at which `preset_table` states the bits that a cache holds: first and newest tokens in 16 bits among them."""
HEAD_DIM = 128
"""Channels of a head for which `preset_table` states bits: most models above a billion parameters."""
NARROW = 64
"""Channels of a head of the small models that most is measured on."""
TOKENS = (
    ("stock", "stock_flash", "eager"),
    ("FlashAttention-3, graph", "fa3", "graph"),
    ("`raw`, graph", "raw", "graph"),
    ("`int8_centered`, graph", "int8_centered", "graph"),
    ("`klt4`, graph", "klt4", "graph"),
    ("`int8_centered`, no graph", "int8_centered", "eager"),
)
TOKEN_SHAPES = ((1, 32768), (32, 8192))
"""Columns and (sequences, tokens) of `milliseconds_table`."""


def milliseconds_table(benchmarks: Path) -> str:
    """Write the milliseconds of a token through Transformers on a GPU (benchmarks/bench_generate_gpu.py), between its
    markers: of one sitting, where one timed the stock cache and a preset in a graph, else the newest of each. A column
    of `TOKENS` that nobody timed is left out.
    """
    rows: list[tuple[str, list[dict[str, Any] | None]]] = []
    made: list[dict[str, Any]] = []
    for path in sorted(benchmarks.glob("nvidia-*/generate.json")):
        data = read(path)
        sittings = graphed(data)
        for batch, context in TOKEN_SHAPES:
            found = sittings.get((batch, context)) or newest_tokens(data, batch, context)
            cells = [found.get((scheme, mode)) for _, scheme, mode in TOKENS]
            made += [data["runs"][r["run"]] for r in cells if r]
            rows.append((f"{batch} x {context:,} tokens", cells))
    timed = [i for i in range(len(TOKENS)) if any(cells[i] for _, cells in rows)]
    lines = []
    for label, cells in rows:
        chosen = [cells[i] for i in timed]
        lines.append([label, *(UNMEASURED if r is None else f"{r['ms_per_token']:.1f}" for r in chosen)])
    note = f"Runs: {dated(made)}." if made else ""
    return _between(MILLISECONDS, "\n\n".join([table(["", *(TOKENS[i][0] for i in timed)], lines), note]))


SHORT, LONG, LONGEST = "eval-1024", "eval-8192", "eval-32768"
"""Folders beside the results, of `kvbits eval --tasks fidelity --length 1024` and `--length 8192`, in chunks of 16."""
UNMEASURED = "not measured"


def numbers(benchmarks: Path) -> str:
    """Write the README's three numbers for `HEADLINE` against 16 bits at `HELD_AT` tokens: tokens in the same memory by
    arithmetic, speed of attention on a GPU at `HEADLINE_SHAPE`, and KL on the worst model; between its markers.

    Raises:
        DataError: nobody measured the speed or the KL.
    """
    of_cards = [of.get(HEADLINE, {}).get(HEADLINE_SHAPE) for of in gpu_latest(benchmarks).values()]
    faster = sorted(row["speedup_real_cache"] for row in of_cards if row is not None)
    found = _by_model(HEADLINE, _models_in(benchmarks, LONG))
    if not (faster and found):
        lacking = f"KL in {LONG}" if faster else f"speed at {HEADLINE_SHAPE} in {GPU}"
        raise DataError(f"{benchmarks} has no {lacking} of {HEADLINE}; measure it, or name another preset")
    worst = _worst(found)
    parts = (
        f"**{16 / _held(HEADLINE):.1f} times** the tokens in the same memory",
        f"**{' to '.join(dict.fromkeys(f'{x:.1f}' for x in (faster[0], faster[-1])))} times** the speed of attention",
        f"**{_kl(worst)}** nats of KL divergence",
    )
    where = (
        f"All three compare the preset `{HEADLINE}`, {_held(HEADLINE):.1f} bits a number, with 16 bits at"
        f" {HELD_AT:,} tokens ([conditions](#which-preset))."
    )
    return _between(NUMBERS, f"{' · '.join(parts)}.\n{where}")


def _held(name: str) -> float:
    """Return the bits that one number of a preset takes at `HELD_AT` tokens in heads of `HEAD_DIM` channels."""
    spec = CacheSpec(
        scheme=schemes.get(name, head_dim=HEAD_DIM), layers=(LayerGeometry(num_kv_heads=1, head_dim=HEAD_DIM),)
    )
    return 16 * spec.nbytes(HELD_AT) / spec.raw_nbytes(HELD_AT)


def preset_table(benchmarks: Path) -> str:
    """Write the README's table: which preset to take and when, its bits, its KL on the worst model and its speed on a
    GPU; below it the conditions, between its markers.

    Args:
        benchmarks: the folder benchmarks/results; a cell of what is not there has `UNMEASURED`.
    """
    at_length = _models_in(benchmarks, LONG)
    gpu, known, cpu = gpu_latest(benchmarks), gpu_rows(benchmarks)["runs"], _cpu_benchmark(benchmarks)
    rows, made, judged, timed, between = [], [], {}, [], {}
    for name, when in TAKEN.items():
        found = judged[name] = _by_model(name, at_length)
        speeds = {card: list(presets.get(name, {}).values()) for card, presets in gpu.items()}
        every = [r for some in speeds.values() for r in some]
        timed += every
        if within := [r["speedup_between_matmuls"] for r in every if "speedup_between_matmuls" in r]:
            between[name] = min(within)
        made += [run for _, c in found.values() for run in c.runs.values()]
        made += [known[r["run"]] for r in every]
        cells = [f"{_held(name):.1f}", _kl(_worst(found)) if found else UNMEASURED, *map(_range, speeds.values())]
        rows.append([f"`{name}`", when, *cells])
    notes = [
        f"**Bits** are the size of one cached number, on average over {HELD_AT:,} tokens in heads of {HEAD_DIM}"
        " channels. Scales count, and so do the newest tokens, which stay in 16 bits.",
        "**Worst KL** is the KL divergence of predictions from the 16-bit cache's, in nats, on the worst model."
        f" {_judged(judged)} [Evaluation](docs/results/evaluation.md) lists every model.",
    ]
    if timed:
        rivals = ", ".join(dict.fromkeys(r["best_16_bit"] for r in timed))
        shapes = len({r["shape"] for r in timed})
        cards = " and one ".join(dict.fromkeys(card_of(known[r["run"]]) for r in timed))
        notes.append(
            "**Speed** compares attention of one new token with the fastest 16-bit kernel of the same run"
            f" ({rivals}). It was measured on one {cards}."
            f" The range is the worst and the best of {shapes} shapes. The speed at the top of this page is for 32"
            f" sequences of {HELD_AT:,} tokens."
        )
    if between:
        notes.append(
            "Inside a model, matrix products run between attention kernels. The worst shape then has"
            f" {_listed([f'{x:.2f} (`{name}`)' for name, x in between.items()])} times the 16-bit kernel's speed."
        )
    if cpu and (ratios := [float(cpu.cells[name].removesuffix("x")) for name in TAKEN if name in cpu.cells]):
        notes.append(
            f"On one thread of a CPU with {cpu.instructions}, {_listed([f'`{n}`' for n in TAKEN if n in cpu.cells])}"
            f" generate {min(ratios):.2f} to {max(ratios):.2f} times the tokens a second of Transformers' own cache."
            f" The benchmark ran {cpu.where}."
        )
        made += [run for name in TAKEN for run in cpu.runs.get(name, [])]
    notes.append(f"Runs: {dated(made)}.")
    columns = ["take", "when", "bits", "worst KL", *(f"speed, {card}" for card in gpu)]
    return _between(TABLE, "\n\n".join([table(columns, rows, left=2), "\n".join(f"- {n}" for n in notes)]))


def _range(rows: list[dict[str, Any]]) -> str:
    """Write the least and the largest speed of a preset on one GPU."""
    ratios = [r["speedup_real_cache"] for r in rows]
    return f"{min(ratios):.1f}-{max(ratios):.1f}x" if ratios else UNMEASURED


def _judged(found: dict[str, dict[str, tuple[Model, Cell]]]) -> str:
    """Describe how many models each preset's KL was measured on, and in which dtypes.

    Args:
        found: preset -> what `_by_model` found.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    for name, by_model in found.items():
        dtypes = dict.fromkeys(m.facts["dtype"] for m, _ in by_model.values())
        groups.setdefault((len(by_model), " or ".join(sorted(dtypes))), []).append(f"`{name}`")
    return " ".join(
        f"{'Every preset' if len(names) == len(found) else _listed(names)} ran on {counted(count, 'model')} in {dtypes}"
        f"{', whose rounding adds to KL' * ('bfloat16' in dtypes)}."
        for (count, dtypes), names in groups.items()
        if count
    )


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _models_in(benchmarks: Path, *names: str) -> list[Model]:
    """Read the models of the folders of these names beside the results, each in every dtype, the one of least rounding
    noise first.
    """
    folders = [benchmarks / name for name in names if any((benchmarks / name).glob("*/*/*.json"))]
    found = [m for folder in folders for m in collect(folder).models.values() if "fidelity" in m.tasks]
    return sorted(found, key=lambda m: ("float32", "float16", "bfloat16").index(m.facts["dtype"]))


def _finest(models: Iterable[Model]) -> list[Model]:
    """Choose the first of several models of a name, which `_models_in` makes the one of least rounding noise."""
    found: dict[str, Model] = {}
    for m in models:
        found.setdefault(m.name, m)
    return list(found.values())


def _by_model(scheme: str, models: Iterable[Model]) -> dict[str, tuple[Model, Cell]]:
    """Return a scheme's results by the model's name, in the dtype of least rounding noise. Results in an earlier format
    do not count.

    Args:
        models: see `_models_in`.
    """
    found: dict[str, tuple[Model, Cell]] = {}
    for m in models:
        cell = measured(m).get(scheme)
        if cell is not None and not cell.outdated:
            found.setdefault(m.name, (m, cell))
    return found


def _worst(found: dict[str, tuple[Model, Cell]]) -> Cell:
    """Return the result with the largest KL of those that `_by_model` found."""
    return max((c for _, c in found.values()), key=lambda c: c.summary["kl_mean"])


def _kl(cell: Cell) -> str:
    return f"{cell.summary['kl_mean']:.4f}"


@dataclass(frozen=True)
class CpuSpeeds:
    """Tokens a second of presets on a CPU over the stock cache's, each in its faster dtype.

    Attributes:
        cells: preset -> "2.25x".
        runs: preset -> runs that its cell is of, the stock cache's among them.
        instructions: instruction set of the machine, "AVX2" for instance.
        where: the model, and the tokens of the prompt.
        note: what was measured on what.
    """

    cells: dict[str, str]
    runs: dict[str, list[dict[str, Any]]]
    instructions: str
    where: str
    note: str


_ISA = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "amx": "AMX", "generic": "plain code"}


def _cpu_benchmark(benchmarks: Path) -> CpuSpeeds | None:
    """Read the newest run of bench_generate_cpu.py that timed several dtypes in turn, its first model and shortest
    context.
    """
    files = [read(path) for path in sorted(benchmarks.glob("cpu*/generate*.json"))]
    timed = [(data["runs"][r["run"]], r) for data in files for r in data["rows"] if "ratio_vs_best_16bit" in r]
    if not timed:
        return None
    run = max((run for run, _ in timed), key=lambda run: (run["utc"], run["id"]))
    rows = [r for own, r in timed if own is run]
    rows = [
        r
        for r in rows
        if r["model"] == rows[0]["model"]
        and r["context"] == min(x["context"] for x in rows if x["model"] == rows[0]["model"])
    ]
    best: dict[str, dict[str, Any]] = {}
    for r in rows:
        best[r["cache"]] = max(best.get(r["cache"], r), r, key=lambda x: x["ratio_vs_best_16bit"])
    stock = next(r for r in rows if r["cache"] == "16-bit" and r["dtype"] == r["best_16_bit_dtype"])
    where = f"{stock['model']} after {stock['context']:,} tokens"
    words, threads = _ISA.get((run["host"] or {}).get("isa", ""), ""), run.get("facts", {}).get("threads")
    dtypes = " and ".join(sorted({r["dtype"] for r in rows}))
    note = (
        f"CPU: {where} over the stock cache, each in the faster of {dtypes};"
        f" {threads} thread{'' if threads == 1 else 's'} of {run['host']['cpu']}, {words}; stock:"
        f" {stock['tokens_per_s']:.1f} tokens/s in {stock['dtype']}."
    )
    cells = {name: f"{r['ratio_vs_best_16bit']:.2f}x" for name, r in best.items()}
    return CpuSpeeds(cells, {name: [run] for name in best}, words, where, note)


def short_table() -> str:
    """Write the number of tokens up to which a preset of few bits takes more bytes than 8 bits, between its markers."""
    names = ("int4", "kivi4", "klt4", "klt3", "klt2")
    layers = planner.uniform(1, 8, HEAD_DIM)
    kinds: dict[str, dict[str, Any]] = {
        "16-bit models": {"raw_dtype": "bfloat16"},
        "32-bit models": {"raw_dtype": "float32"},
        "vLLM": {"engine": "vllm"},
    }
    rows = []
    for kind, options in kinds.items():
        served = [n for n in names if "engine" not in options or f"kvbits_{n}" in FORMATS]
        wanted = [f"kvbits_{n}" for n in served] if "engine" in options else served
        found = {r.scheme.removeprefix("kvbits_"): r.larger_up_to for r in planner.plan(layers, wanted, **options).rows}
        rows.append([kind, *(str(found[n] or 0) if n in found else "" for n in names)])
    return _between(SHORT_SEQUENCES, table(["tokens, at most", *(f"`{n}`" for n in names)], rows))


def scheme_table(results: Results) -> str:
    """Write the tables of every cache on every model, those of the literature apart, and the models that a cache is
    unfit for; between its markers. The tables recommend nothing: README does, by figures at the length that is used.
    """
    columns, rows, notes = scheme_rows(results)
    chosen = recommendations(results)
    rest = [n for n in notes if n not in (LEGEND, *chosen) and not n.startswith("Unfit")]
    core, papers = (
        [r.cells for r in rows if (r.scheme in GROUPS["literature"]) is of_papers] for of_papers in (False, True)
    )
    literature = (
        ["**Literature**: formats of papers ([what they are](../reference/literature.md)).", table(columns, papers)]
        if papers
        else []
    )
    bad = unfit(m for m in results.as_used.values() if "fidelity" in m.tasks)
    limits = f"**Unfit**: perplexity rises by more than {MAX_PPL_CHANGE:.0%}, or KL is above {MAX_KL} nats."
    lines = [[f"`{name}`", ", ".join(m.name for m in models)] for name, models in bad.items()]
    parts = [
        LEGEND,
        table(columns, core),
        *literature,
        *([limits, table(["cache", "unfit for"], lines, left=2)] if lines else []),
        "\n".join(f"- {n}" for n in [*rest, runs_note(results)]),
    ]
    return _between(SCHEMES, "\n\n".join(parts))


def length_table(benchmarks: Path) -> str:
    """Write the tables of lengths, between their markers: what chunks and lengths leave of the raw tokens that are
    read; then KL as decoding reads, by length, with the worst token and what was read raw beside each mean.

    Args:
        benchmarks: the folder benchmarks/results, with folders `SHORT`, `LONG` and `LONGEST`; what is not there has no
            rows.
    """
    columns = ["model, tokens", "cache", "KL", "worst", "above 1 nat", "read raw", "perplexity"]
    rows, made = [], []
    how: dict[str, list[str]] = {}
    texts: dict[str, None] = {}
    for models in (_models_in(benchmarks, name) for name in (SHORT, LONG, LONGEST)):
        for m in _finest(models):
            cells = m.tasks["fidelity"]
            how.setdefault(conditions(m), []).append(m.name)
            for name in (name for name in SHOWN if name in cells):
                s, c = cells[name].summary, cells[name]
                texts |= {c.info["calibration"]["text"]: None} if "calibration" in c.info else {}
                made += list(c.runs.values())
                at = f"{m.name}, {c.settings['length']:,}"
                figures = [f"{s['kl_mean']:.5f}", f"{s['kl_max']:.2f}", percent(s["kl_lost"]), percent(s["read_raw"])]
                rows.append([at, f"`{name}`", *figures, change(s)])
    said = [f"- {', '.join(names)}: {what}." for what, names in how.items()]
    said += [f"- klt's calibrations read {', '.join(texts)}."] if texts else []
    notes = ["\n".join([*said, f"- Runs: {dated(made)}."])] if made else []
    share = (
        f"Share of the tokens that attention reads in 16 bits, in heads of {NARROW} and full attention (arithmetic):"
    )
    return _between(LENGTHS, "\n\n".join([share, _read_raw(), "Measured:", table(columns, rows, left=2), *notes]))


def _named(scheme: str, kind: str) -> str:
    """Name a cache in a table: in italics where it is simulated."""
    return f"*{scheme}*" if kind == "simulated" else f"`{scheme}`"


def _read_raw() -> str:
    """Write the table of the raw share of what a window reads, by its length and the tokens of a pass."""
    passes = {"one by one": 1, f"chunks of {DECODING_CHUNK}": DECODING_CHUNK, "chunks of 128": 128}
    columns = ["windows of", *(f"{length:,}, {how}" for length in (1024, HELD_AT) for how in passes)]
    rows = []
    for name in SHOWN:
        spec = CacheSpec(
            scheme=schemes.get(name, head_dim=NARROW), layers=(LayerGeometry(num_kv_heads=1, head_dim=NARROW),)
        )
        rows.append(
            [
                f"`{name}`",
                *(
                    f"{read_raw(spec, length, chunk=chunk):.0%}"
                    for length in (1024, HELD_AT)
                    for chunk in passes.values()
                ),
            ]
        )
    return table(columns, rows)


TAILS = "tails"
"""Folder beside the results, of benchmarks/study_tails.py: a file for each model."""


def tails(benchmarks: Path) -> dict[tuple[str, int], dict[tuple[str, int | str], dict[str, Any]]]:
    """Read what formats and peers cost with equal tails: model and tokens of a window -> format and tail -> the newest
    run's row, with its run as "made".
    """
    found: dict[tuple[str, int], dict[tuple[str, int | str], dict[str, Any]]] = {}
    for path in sorted((benchmarks / TAILS).glob("*.json")):
        data = read(path)
        for row in sorted(data["rows"], key=lambda r: data["runs"][r["run"]]["utc"]):
            run = data["runs"][row["run"]]
            facts = run["facts"]
            found.setdefault((facts["model"], facts["length"]), {})[row["format"], row["tail"]] = row | {"made": run}
    return found


def tails_table(benchmarks: Path) -> str:
    """Write a table for each model, between markers: KL of every format and peer with `EQUAL_TAIL` raw newest tokens,
    bits held beside it, in the units of llama.cpp's perplexity tool, too; then bits and KL with other tails.
    """
    parts, made = [], []
    text: dict[str, None] = {}
    for (model, length), rows in tails(benchmarks).items():
        others = sorted({tail for _, tail in rows} - {EQUAL_TAIL}, key=lambda tail: (isinstance(tail, str), tail))
        held: dict[str, float] = {}
        for (name, tail), row in rows.items():
            if tail == EQUAL_TAIL or name not in held:
                held[name] = row["held_bits"]
        lines = []
        for name in sorted(held, key=lambda name: (held[name], name)):
            cells = [""] * 6
            if (name, EQUAL_TAIL) in rows:
                row = rows[name, EQUAL_TAIL]
                cells = [f"{row['held_bits']:.2f}", f"{row['kl_mean']:.5f}", f"{row['kl_median']:.5f}"]
                cells += [f"{row['kl_p999']:.2f}", f"{row['top1_agreement']:.1%}", f"{row['dp_rms']:.2%}"]
            for tail in others:
                other = rows.get((name, tail))
                cells += ["", ""] if other is None else [f"{other['held_bits']:.2f}", f"{other['kl_mean']:.5f}"]
            kind = next(row["kind"] for (m, _), row in rows.items() if m == name)
            lines.append([_named(name, kind), *cells])
        columns = ["cache", "bits", "KL", "median", "99.9 %", "same token", "RMS dp"]
        called = [f"{tail} raw" if isinstance(tail, int) else f"{tail} tail" for tail in others]
        columns += [f"{what}, {tail}" for tail in called for what in ("bits", "KL")]
        parts += [f"**{model}**, windows of {length:,} tokens, {EQUAL_TAIL} raw:", table(columns, lines)]
        made += [row["made"] for row in rows.values()]
        text |= {row["made"]["facts"]["text"]: None for row in rows.values()}
    note = [f"Text: {', '.join(text)}. Runs: {dated(made)}."] if made else []
    return _between("points-tails", "\n\n".join([*parts, *note]))


EQUAL_TAIL = 128
"""Raw newest tokens of the caches that are compared: as many as `klt4` keeps."""
ANSWERED = ("int8_centered", "kivi4", "klt4", "klt3", "klt2")
"""Columns of answers."""
RULER = ("ruler-4096", "ruler-8192", "ruler-16384", "ruler-32000")
ANSWERS = (
    ("copying", "copying"),
    ("tracking", "tracking"),
    *((name, "ruler") for name in RULER),
    ("answers", "gsm8k"),
    ("sampled", "gsm8k"),
    ("answers", "humaneval"),
)
"""Folders of `LENGTH`, and the task in it that is right or wrong."""
LENGTH = "length"
"""Folder beside the results: long texts, chains and answers on a GPU, a folder for each task."""
PAGE = "page"
"""Folder beside the results, or below a machine's, of `make page`: every task on one model."""
CALIBRATED = tuple(name for name in SHOWN if name.startswith("klt"))
"""Presets whose figures `unmeasured` looks for."""


def _pages(benchmarks: Path) -> list[Path]:
    """Return the folders `PAGE`."""
    return [*benchmarks.glob(PAGE), *sorted(benchmarks.glob(f"*/{PAGE}"))]


def _called(model: str) -> str:
    """Name a model in a table: what `embedded` is."""
    return "smollm2-135m-instruct, embedded" if model == "embedded" else model


def _found(folder: Path, task: str) -> list[tuple[Model, Cell]]:
    """Return a task's results in a folder, without those of the 16-bit cache and of earlier formats."""
    return [
        (m, c)
        for m in collect(folder).models.values()
        for c in m.tasks.get(task, {}).values()
        if c.kind != "base" and not c.outdated
    ]


def _replayed(benchmarks: Path) -> list[tuple[str, Cell, float]]:
    """Return (model, cache, bits) of replayed chains beside simulated peers, by model and KL; of two results of a cache
    on a model the one of more windows. Bits are all that a packed cache holds, and what an engine stores of a peer.
    """
    found: dict[tuple[str, str], tuple[Cell, float]] = {}
    for folder in (benchmarks / "chains", *_pages(benchmarks)):
        for path in sorted(folder.glob("*/replay/*.json")):
            data = read_result(path)
            cell, key = Cell.of(data), (data["model"]["name"], data["scheme"])
            if cell.kind == "base" or cell.outdated:
                continue
            if key not in found or cell.summary["windows"] > found[key][0].summary["windows"]:
                whole = 32 if data["model"]["dtype"] == "float32" else 16
                simulated = cell.kind == "simulated"
                found[key] = (
                    cell,
                    cell.info["bits_per_element"] if simulated else whole / cell.summary["memory_reduction"],
                )
    return sorted(((m, c, b) for (m, _), (c, b) in found.items()), key=lambda x: (x[0], x[1].summary["kl_mean"]))


def points_tables(benchmarks: Path) -> tuple[str, ...]:
    """Write the tables of what is lost beside the 16-bit cache at length, between markers: KL by octave of a chain,
    beside other engines' formats, token by token, by text; calls of functions; answers in points of 100; and what was
    not measured.
    """
    made: list[dict[str, Any]] = []
    every: list[tuple[str, Model, Cell]] = []

    length, pages = benchmarks / LENGTH, _pages(benchmarks)

    def cells(folders: Iterable[Path], task: str, called: str) -> list[tuple[Model, Cell]]:
        found = [x for folder in folders if folder.is_dir() for x in _found(folder, task)]
        made.extend(run for _, c in found for run in c.runs.values())
        every.extend((f"{called}{_distances(c.summary)}", m, c) for m, c in found)
        return found

    def kl(value: float) -> str:
        return f"{value:.5f}"

    chains = cells([length / "chains", *pages], "replay", "chains")
    places = sorted({int(at) for _, c in chains for at in c.summary["octaves"] if int(at) >= DRIFT_FROM})
    replayed = []
    for m, c in chains:
        by = [c.summary["octaves"].get(str(at)) for at in places]
        figures = ["" if one is None else kl(one["kl_mean"]) for one in by]
        grown = [f"{c.summary['drift']:+.0%}", percent(c.summary["top1_agreement"])]
        replayed.append([_called(m.name), f"`{c.scheme}`", *figures, *grown])
    against = []
    for model, c, bits in _replayed(benchmarks):
        s = c.summary
        made += list(c.runs.values())
        figures = [f"{bits:.2f}", kl(s["kl_mean"]), f"{s['kl_max']:.2f}", percent(s["kl_lost"])]
        against.append(
            [_called(model), _named(c.scheme, c.kind), *figures, f"{s['drift']:+.0%}", percent(s["top1_agreement"])]
        )
    decoded = []
    for m, c in cells([length / "decode", *pages], "decode", "token by token"):
        s = c.summary
        figures = [kl(s["kl_mean"]), f"{s['kl_max']:.2f}", percent(s["top1_agreement"]), percent(s["read_raw"])]
        decoded.append([_called(m.name), f"`{c.scheme}`", *figures])
    texts = cells([length / "texts", *pages], "fidelity", "other texts")
    by_text: dict[tuple[str, str], dict[str, str]] = {}
    for m, c in texts:
        for name, s in c.summary.get("texts", {next(iter(c.items), ""): c.summary}).items():
            by_text.setdefault((_called(m.name), name.rsplit("@", 1)[0]), {})[c.scheme] = kl(s["kl_mean"])
    caches = [name for name in SHOWN if any(name in row for row in by_text.values())]
    asked_in = [(length / folder, task) for folder, task in ANSWERS]
    asked_in += [(page, task) for page in pages for task in dict.fromkeys(task for _, task in ANSWERS)]
    answered = [
        [what, _right(mine), *(points(mine[name]) if name in mine else "" for name in ANSWERED)]
        for folder, task in asked_in
        for what, mine in _answers(cells([folder], task, task), task, folder.name == "sampled")
    ]
    asked = [name for i, name in enumerate(ANSWERED, 2) if any(row[i] for row in answered)]
    answers = table(
        ["task, model, answers", "16 bits right", *(f"`{name}`" for name in asked)],
        [[*row[:2], *(row[2 + ANSWERED.index(name)] for name in asked)] for row in answered],
    )
    copies = list(_found(length / "copying", "copying")) if (length / "copying").is_dir() else []
    copied = [row for _, mine in _answers(copies, "copying", sampled=False) for row in _by_distance(mine)]
    for m in _models_in(benchmarks, LONGEST):
        cells_of = m.tasks["fidelity"].values()
        every += [(f"KL at {c.settings['length']:,} tokens", m, c) for c in cells_of if not c.outdated]
    octaves = [f"{at:,} to {2 * at - 1:,}" for at in places]
    return (
        _between("points-chains", table(["model", "cache", *octaves, "a doubling", "same token"], replayed, left=2)),
        _between(
            "points-peers",
            table(
                ["model", "cache", "bits", "KL", "worst", "above 1 nat", "a doubling", "same token"], against, left=2
            ),
        ),
        _between("points-decode", table(["model", "cache", "KL", "worst", "same token", "read raw"], decoded, left=2)),
        _between("points-copying", table(["tokens back", *(f"`{name}`" for name in ANSWERED)], copied)),
        _between(
            "points-texts",
            table(
                ["model, text", *(f"`{name}`" for name in caches)],
                [[f"{m}, {t}", *(row.get(name, "") for name in caches)] for (m, t), row in by_text.items()],
            ),
        ),
        _between("points-tools", tools_table(length / "tools") if (length / "tools").is_dir() else UNMEASURED),
        _between("points-answers", f"{answers}\n\nRuns of this page: {dated(made)}."),
        _between("points-unmeasured", _unmeasured(every)),
    )


def _answers(
    cells: list[tuple[Model, Cell]], task: str, sampled: bool
) -> Iterable[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield (what was asked, preset -> summary) of each model.

    Raises:
        DataError: presets of a model answered other numbers of questions, or of other lengths.
    """
    for model, dtype in dict.fromkeys((m.name, m.facts["dtype"]) for m, _ in cells):
        mine = {
            c.scheme: c.summary
            for m, c in cells
            if (m.name, m.facts["dtype"]) == (model, dtype) and c.scheme in ANSWERED
        }
        if not mine:
            continue
        asked = {name: (s.get("parts", s.get("answers", s.get("problems"))), _distances(s)) for name, s in mine.items()}
        if len(set(asked.values())) > 1:
            each = ", ".join(f"{name} {n:,}{distances}" for name, (n, distances) in asked.items())
            raise DataError(
                f"presets of a row must answer the same questions, but {task} on {model} has {each}; measure them alike"
            )
        n, distances = next(iter(asked.values()))
        where = _called(model) if dtype == "float16" else f"{_called(model)}, {dtype}"
        yield f"{task}{distances}{', sampled' * sampled}, {where}, {n:,}", mine


def _right(mine: dict[str, dict[str, Any]]) -> str:
    """Write the share of answers that the model's own cache has right, by a preset's share and its difference."""
    one = next(iter(mine.values()))
    return f"{one['accuracy'] - one['difference']:.1%}"


def _by_distance(mine: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return a row for each context length: the length, then points of each preset of `ANSWERED`."""
    kinds = next(iter(mine.values()))["by_kind"]
    return [
        [
            f"{int(kind.rpartition(':')[2]):,}",
            *(points(mine[name]["by_kind"][kind]) if name in mine else "" for name in ANSWERED),
        ]
        for kind in kinds
    ]


def _distances(summary: dict[str, Any]) -> str:
    """Name the context lengths of a task's questions: " at 8,192", " to 30,000", or nothing."""
    lengths = {int(kind.rpartition(":")[2]) for kind in summary.get("by_kind", ())}
    return f" {'at' if len(lengths) == 1 else 'to'} {max(lengths):,}" if lengths else ""


def _unmeasured(every: list[tuple[str, Model, Cell]]) -> str:
    """List what was measured with other presets, and not with klt's."""
    found: dict[tuple[str, str], set[str]] = {}
    for what, m, c in every:
        found.setdefault((what, _called(m.name)), set()).add(c.scheme)
    lacking: dict[tuple[str, str], dict[str, None]] = {}
    for (what, model), names in found.items():
        if missing := ", ".join(f"`{name}`" for name in CALIBRATED if name not in names):
            lacking.setdefault((what, missing), {})[model] = None
    rows = [[what, missing, ", ".join(models)] for (what, missing), models in lacking.items()]
    if not rows:
        return "Every task and length of this page has rows of klt."
    return table(["task", "not measured", "models"], rows, left=3)


def _between(name: str, part: str) -> str:
    return f"<!-- {name}: written by docs/make_tables.py -->\n{part}\n<!-- /{name} -->"


def put_into(text: str, part: str) -> str:
    """Replace what stands in `text` between the markers of `part` by it.

    Raises:
        SpecError: no markers.
    """
    begin, end = part.splitlines()[0], part.splitlines()[-1]
    if begin not in text or end not in text:
        raise SpecError(f"the file has no place for the table; put {begin} and {end} where it shall stand")
    return text[: text.index(begin)] + part + text[text.index(end) + len(end) :]


def decoded(results: Results) -> list[Model]:
    """Return the models whose tokens were timed one by one on a CPU, the caches taking turns."""
    timed = [m for m in results.models.values() if "decode" in m.tasks]
    return [m for m in timed if all("NVIDIA" not in str(c.run.get("device")) for c in m.tasks["decode"].values())]


def cpu_groups(benchmarks: Path, presets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the group of bars (see `kernel_groups`) of the README's column for CPUs: the same run over the same
    baseline. What was timed in an earlier format is left out.
    """
    found = _cpu_benchmark(benchmarks)
    if found is None:
        return []
    bars = [
        {"label": name, "value": float(cell.removesuffix("x")), "kind": "stock" if name == "16-bit" else "kvbits"}
        for name, cell in found.cells.items()
        if not any(outdated(name, run) for run in found.runs[name])
    ]
    group = {
        "title": f"Tokens on a CPU, {found.instructions}",
        "unit": "times as fast as the stock cache",
        "note": found.note,
        "bars": bars,
    }
    complete(group, presets)
    return [group]


def page_results(benchmarks: Path) -> Results:
    """Choose the accuracy that the page of the committed results shows: the README's models and windows of `HELD_AT`
    tokens, the largest model first, and what layers alone lose.
    """
    largest_first = sorted(_finest(_models_in(benchmarks, LONG)), key=lambda m: m.facts["parameters"], reverse=True)
    at_length = {f"{m.name}-{m.facts['dtype']}": m for m in largest_first}
    by_layer = {
        key: Model(m.name, m.facts, {"attention": m.tasks["attention"]})
        for key, m in collect(benchmarks / "eval").models.items()
        if "attention" in m.tasks
    }
    return Results(at_length | by_layer)


def beside(results: Results, benchmarks: Path) -> Beside:
    """Collect the benchmarks that the page of the committed results shows.

    Args:
        results: of `page_results`.
    """
    chosen = recommended(results.of_today())
    groups = [*kernel_groups(benchmarks, chosen), *cpu_groups(benchmarks, chosen)]
    return Beside(gpu_speeds(benchmarks), groups, picture=PICTURE.read_text(encoding="utf-8"))


def calculator_figures(benchmarks: Path) -> str:
    """Write what the calculator shows beside its arithmetic, as JSON: the worst KL of presets at `HELD_AT` tokens,
    tokens a second of one GPU, 16 bits and presets in a CUDA graph alike, and where both come from. What was measured
    in an earlier format is left out.
    """
    models = _models_in(benchmarks, LONG)
    loss: dict[str, dict[str, Any]] = {}
    judged: list[dict[str, Any]] = []
    for name in schemes.CORE:
        by_model = {of: (m, c) for of, (m, c) in _by_model(name, models).items() if not c.outdated}
        if by_model:
            worst = _worst(by_model)
            (of,) = (model for model, (_, c) in by_model.items() if c is worst)
            loss[name] = {"kl": _kl(worst), "model": of, "models": len(by_model)}
            judged += [run for _, c in by_model.values() for run in c.runs.values()]
    speed: dict[str, str] = {}
    took: list[dict[str, Any]] = []
    timed = read(benchmarks / "nvidia-h200" / "generate.json")
    for (batch, context), rows in graphed(timed).items():
        if (batch, context) not in TOKEN_SHAPES:
            continue
        captured = {scheme: row for (scheme, mode), row in rows.items() if mode == "graph"}
        sixteen = captured.get("fa3", captured.get("raw"))  # raw pages, where FlashAttention-3 was not there
        for cache, row in {"bf16": sixteen, **{name: captured.get(name) for name in schemes.CORE}}.items():
            if row is None or outdated(cache, run := timed["runs"][row["run"]]):
                continue
            cell = f"{1000 * batch / row['ms_per_token']:,.0f} ({batch} x {context:,})"
            speed[cache] = f"{speed[cache]}, {cell}" if cache in speed else cell
            took.append(run)
    figures = {
        "loss": loss,
        "loss_from": f"kvbits eval MODEL --tasks fidelity --length {HELD_AT}; runs {dated(judged)}",
        "speed": {"Llama-3.1-8B": {"H200": speed}},
        "speed_from": f"python benchmarks/bench_generate_gpu.py; runs {dated(took)}",
    }
    return json.dumps(figures, indent=1) + "\n"


def write(root: Path, benchmarks: Path) -> list[Path]:
    """Write every generated part below `root`, and return the files that have one."""
    results = collect(benchmarks / "eval")
    parts = {
        "README.md": (numbers(benchmarks), preset_table(benchmarks)),
        "docs/guide/transformers.md": (milliseconds_table(benchmarks),),
        "docs/results/evaluation.md": (scheme_table(results), length_table(benchmarks)),
        "docs/results/points.md": (*points_tables(benchmarks), tails_table(benchmarks)),
        "docs/guide/choose.md": (short_table(),),
    }
    for name, tables in parts.items():
        text = (root / name).read_text(encoding="utf-8")
        for part in tables:
            text = put_into(text, part)
        (root / name).write_text(text, encoding="utf-8")
    shown = page_results(benchmarks)
    (root / FIGURES).write_text(calculator_figures(benchmarks), encoding="utf-8")
    (root / "docs/plan.html").write_text(plan_page.page(plan_page.known()), encoding="utf-8")
    (root / "docs/results/report.html").write_text(page(shown, beside(shown, benchmarks)), encoding="utf-8")
    for name in tables_gpu.DOCUMENTS:
        (root / name).write_text(tables_gpu.filled((root / name).read_text(encoding="utf-8")), encoding="utf-8")
    return [
        root / name
        for name in dict.fromkeys(
            [*parts, FIGURES, "docs/plan.html", "docs/results/report.html", *tables_gpu.DOCUMENTS]
        )
    ]


if __name__ == "__main__":
    for path in write(ROOT, BENCHMARKS):
        print(f"wrote {path.relative_to(ROOT)}")
