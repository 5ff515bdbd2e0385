"""The tables of README and docs are those of the committed results; speeds that are compared are of one sitting."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import make_tables as tables
import pytest
from messages import mentions, raises
from run_files import outdated
from speeds import gpu_latest, gpu_speeds, in_words, kernel_groups, short_name
from tails_file import tails_of

from kvbits import schemes
from kvbits.errors import DataError, SpecError
from kvbits.evaluate.results import dumps, read
from kvbits.report import plan_page
from kvbits.report.collect import Cell, Model, collect
from kvbits.report.markdown import recommended
from kvbits.report.page import page_data
from kvbits.runs import FIELDS
from kvbits.spec import CacheSpec, LayerGeometry

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks" / "results"
RESULTS = BENCHMARKS / "eval"
RUN = "run: python docs/make_tables.py"


@functools.cache
def committed_points() -> tuple[str, ...]:
    return tables.points_tables(BENCHMARKS)


def two_runs() -> dict:
    """r1, and the newer r2."""
    known = {
        "gpu": {"name": "X", "count": 1, "driver": "1"},
        "versions": {"vllm": "0.33.0"},
        "commit": "0123abcdef",
        "dirty": False,
    }
    return {
        name: dict.fromkeys(FIELDS) | {"id": name, "session": name, "utc": f"2027-01-0{day}T00:00:00Z"} | known
        for day, name in enumerate(("r1", "r2"), 1)
    }


def made_on(device: str) -> dict:
    return {name: run | {"device": device, "threads": 1} for name, run in two_runs().items()}


def markers(name: str) -> str:
    begin, end = tables._between(name, "old").split("\nold\n")
    return f"{begin}\nold\n{end}"


def test_a_table_is_replaced_between_its_markers(folder):
    part = tables.scheme_table(collect(folder))
    text = f"before\n{markers(tables.TABLE)}\n{markers(tables.SCHEMES)}\nafter\n"
    new = tables.put_into(text, part)
    assert new.startswith(f"before\n{markers(tables.TABLE)}\n<!-- {tables.SCHEMES}") and new.endswith(
        f"<!-- /{tables.SCHEMES} -->\nafter\n"
    )
    assert new.count("old") == 1
    assert tables.put_into(new, part) == new
    with raises(SpecError, "scheme-table", "docs/make_tables.py"):
        tables.put_into("nothing", part)


@pytest.mark.parametrize(
    ("file", "made"),
    [
        ("README.md", lambda: tables.numbers(BENCHMARKS)),
        ("README.md", lambda: tables.preset_table(BENCHMARKS)),
        ("docs/guide/transformers.md", lambda: tables.milliseconds_table(BENCHMARKS)),
        ("docs/results/evaluation.md", lambda: tables.scheme_table(collect(RESULTS))),
        ("docs/results/evaluation.md", lambda: tables.length_table(BENCHMARKS)),
        *(("docs/results/points.md", lambda i=i: committed_points()[i]) for i in range(6)),
        ("docs/results/points.md", lambda: tables.tails_table(BENCHMARKS)),
    ],
    ids=[
        "numbers",
        "presets",
        "milliseconds",
        "schemes",
        "lengths",
        *(f"points-{n}" for n in ("chains", "peers", "decode", "texts", "answers", "unmeasured", "tails")),
    ],
)
def test_the_committed_tables_are_what_the_command_writes(file, made):
    text = (ROOT / file).read_text()
    assert tables.put_into(text, made()) == text, RUN


def test_equal_tails_stand_side_by_side_and_the_newest_run_counts(tmp_path):
    rows = [("r2", "klt4", 128, 4.7, 0.001), ("r1", "klt4", 128, 4.7, 0.9), ("r1", "klt4", 0, 4.5, 0.002)]
    rows += [("r1", "nvfp4", 0, 4.6, 0.03), ("r1", "klt2", 0, 2.4, 0.05), ("r1", "klt2", "own", 2.8, 0.01)]
    tails_of(tmp_path, rows)
    tails_of(tmp_path, [("r1", "klt4", 0, 5.0, 0.004)], length=1024)
    found = tables.tails_table(tmp_path)
    assert [line for line in found.splitlines() if line.startswith("**")] == [
        "**qwen2.5-coder-1.5b-instruct**, windows of 1,024 tokens, 128 raw:",
        "**qwen2.5-coder-1.5b-instruct**, windows of 8,192 tokens, 128 raw:",
    ]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in found.splitlines() if line.startswith("| ")]
    short, long = (i for i, row in enumerate(cells) if row[0] == "cache")
    assert cells[short:long][1][7:] == ["5.00", "0.00400"]
    assert cells[long][7:] == ["bits, 0 raw", "KL, 0 raw", "bits, own tail", "KL, own tail"]
    assert cells[long + 1 :] == [
        ["`klt2`", *[""] * 6, "2.40", "0.05000", "2.80", "0.01000"],
        ["*nvfp4*", *[""] * 6, "4.60", "0.03000", "", ""],
        ["`klt4`", "4.70", "0.00100", "0.00025", "0.05", "98.0%", "1.23%", "4.50", "0.00200", "", ""],
    ], "by bits, and the newest run counts"
    assert "wiki.test" in found and "2027-01-02" in found


def committed(name):
    """A generated file; the package's own where the package lies, which is elsewhere once it is installed."""
    return Path(plan_page.__file__).parent / "assets" / "measured.json" if name == tables.FIGURES else ROOT / name


def test_the_committed_calculator_is_what_the_command_writes():
    assert committed(tables.FIGURES).read_text() == tables.calculator_figures(BENCHMARKS), RUN
    assert (ROOT / "docs" / "plan.html").read_text() == plan_page.page(plan_page.known()), RUN


def rows_of(text):
    """Rows of a table's body by their first cell without backticks."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): [c.strip() for c in cells[1:]] for cells in lines}


def test_the_table_of_presets_has_the_worst_of_all_models_and_both_speeds(folder, monkeypatch, tmp_path):
    old = [
        {"run": "r1", "scheme": "kivi4", "shape": s, "speedup_real_cache": x, "best_16_bit": "cudnn"}
        for s, x in (("a", 9.0), ("b", 2.0))
    ]
    new = [{"run": "r2", "scheme": "kivi4", "shape": "a", "speedup_real_cache": 1.2, "best_16_bit": "fa3"}]
    (tmp_path / "nvidia-x").mkdir()
    (tmp_path / "nvidia-x" / "attend_decode.json").write_text(json.dumps({"runs": two_runs(), "rows": [*new, *old]}))
    monkeypatch.setattr(tables, "TAKEN", {"kivi4": "now", "int4": "then"})
    held = {
        name: 8
        * CacheSpec(scheme=schemes.get(name), layers=(LayerGeometry(num_kv_heads=1, head_dim=128),)).nbytes(8192)
        for name in ("kivi4", "int4")
    }
    bits = {name: f"{n / (2 * 8192 * 128):.1f}" for name, n in held.items()}
    text = tables.preset_table(tmp_path)
    assert rows_of(text) == {
        "kivi4": ["now", bits["kivi4"], "not measured", "1.2-2.0x"],
        "int4": ["then", bits["int4"], "not measured", "not measured"],
    }
    assert "(fa3, cudnn)" in text and "2 shapes" in text and "CPU" not in text
    for name, model in (("eval-8192", "tiny-float32"), ("eval-8192-second", "tiny")):
        shutil.copytree(folder / model, tmp_path / name / model)
    text = tables.preset_table(tmp_path)
    cell = collect(folder).models["tiny-float32"].tasks["fidelity"]["kivi4"]
    assert rows_of(text)["kivi4"][2] == f"{cell.summary['kl_mean']:.4f}", "the dtype of least noise of one model"
    assert mentions(text, "1 model", "float32") and "bfloat16" not in text
    host = {"cpu": "EPYC", "cores": 2, "isa": "avx2", "bfloat16": False, "gpu": False}
    at = {"run": "r2", "model": "m", "context": 2048, "best_16_bit_dtype": "float32"}
    timed = (
        ("16-bit", "float32", 10.0, 1.0),
        ("16-bit", "bfloat16", 5.0, 0.5),
        ("kivi4", "float32", 11.0, 1.1),
        ("kivi4", "bfloat16", 12.0, 1.2),
        ("int4", "float32", 13.0, 1.3),
        ("int8", "float32", 19.0, 1.9),
    )
    turns = [at | {"cache": n, "dtype": d, "tokens_per_s": x, "ratio_vs_best_16bit": y} for n, d, x, y in timed]
    (tmp_path / "cpu").mkdir()
    made = {"r2": two_runs()["r2"] | {"host": host, "facts": {"threads": 1}}}
    (tmp_path / "cpu" / "generate.json").write_text(json.dumps({"runs": made, "rows": turns}))
    (cpu,) = (line for line in tables.preset_table(tmp_path).splitlines() if "CPU" in line)
    assert "AVX2" in cpu and mentions(cpu, "1.20 to 1.30 times", "2,048 tokens"), "each in its faster dtype"


def test_the_readme_s_numbers_are_those_of_its_tables():
    """The first screen repeats no figure by hand: KL and bits are its table's, speeds those of each GPU's attention."""
    text = (ROOT / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("**") and "·" in line)
    smaller, faster, kl = (re.findall(r"[\d.]+", part) for part in re.findall(r"\*\*([\d.][^*]*)\*\*", line))
    row = rows_of(text)[tables.HEADLINE]
    assert float(*kl) == float(row[2]) and float(*smaller) == pytest.approx(16 / float(row[1]), abs=0.1)
    ranges = [[float(x) for x in cell.removesuffix("x").split("-")] for cell in row[3:]]
    measured = (ROOT / "docs/results/benchmarks.md").read_text().split("gpu:decode")[1]
    columns = next(line for line in measured.splitlines() if line.startswith("|  |")).strip("| ").split(" | ")
    rows = [line.split(" | ")[1:] for line in measured.splitlines() if line.startswith(f"| `{tables.HEADLINE}`")]
    whole = [float(cells[columns.index("32 x 8,192, 32")].split(" / ")[0]) for cells in rows]
    assert len(whole) == len(ranges) and all(any(low <= x <= high for low, high in ranges) for x in whole)
    assert [float(x) for x in faster] == pytest.approx([min(whole), max(whole)], abs=0.06)


def test_the_readme_s_first_screen_is_short():
    """The first command comes at once, and the table has few and short cells."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```") + 2 <= 12
    first = lines.index(next(line for line in lines if line.startswith("<!-- preset-table")))
    rows = [line for line in lines[first:] if line.startswith("|")][:7]
    assert all(line.count("|") - 1 <= 6 for line in rows) and len(rows_of("\n".join(rows))) <= 5
    assert "kl_over_bits.svg" in "\n".join(lines[:12])


def test_the_table_of_lengths_has_the_worst_token_and_what_was_read_raw_beside_each_mean(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "SHOWN", ("raw", "int4", "nuq4"))
    for name, model in ((tables.SHORT, "tiny"), (tables.LONG, "tiny-float32"), (tables.LONG, "tiny")):
        shutil.copytree(folder / model, tmp_path / name / model)
    arithmetic, measured = tables.length_table(tmp_path).split("Measured:\n\n")
    assert "| `int4` | 32% | 35% | 51% | 6% | 7% | 11% |" in arithmetic and "| `raw` | 100% |" in arithmetic
    table, notes = measured.split("\n\n")
    columns, _, *rows = table.splitlines()
    assert columns == "| model, tokens | cache | KL | worst | above 1 nat | read raw | perplexity |"
    assert [row.split(" | ")[1] for row in rows] == ["`raw`", "`int4`"] * 2, "the finer dtype where there are two"
    s = collect(folder).models["tiny"].tasks["fidelity"]["int4"].summary
    assert rows[1].startswith(
        f"| tiny, 220 | `int4` | {s['kl_mean']:.5f} | {s['kl_max']:.2f} | {s['kl_lost']:.2%} | {s['read_raw']:.2%} | "
    )
    settings = "tiny", "2 windows", "220 tokens", "chunks of 32", "float32"
    assert any(mentions(line, *settings) for line in notes.splitlines()) and "- Runs: 20" in notes


def test_chains_have_simulated_peers_beside_presets():
    found = committed_points()[1]
    rows = {tuple(row.strip("| ").split(" | ")[:2]): row.strip("| ").split(" | ")[2:] for row in found.splitlines()}
    model = "smollm2-135m-instruct"
    assert {(model, n) for n in ("`int8_centered`", "`kivi4`", "*turboquant_4bit_nc*", "*nvfp4*")} < set(rows)
    (path,) = (BENCHMARKS / "chains").glob("smollm2*/replay")
    s = json.loads((path / "kivi4.json").read_text())["summary"]
    assert rows[model, "`kivi4`"][:3] == [
        f"{32 / s['memory_reduction']:.2f}",
        f"{s['kl_mean']:.5f}",
        f"{s['kl_max']:.2f}",
    ], "of 32 bits"


def test_one_page_of_a_cpu_fills_every_table_of_points(folder, tmp_path):
    """`make page` writes all tasks into one folder; what is there is shown, and the rest is said to be missing."""
    shutil.copytree(folder / "tiny", tmp_path / tables.PAGE / "tiny")
    (asked,) = (BENCHMARKS / "length/ruler-4096").iterdir()
    shutil.copytree(asked, tmp_path / tables.PAGE / asked.name)
    *_, texts, _, answers, missing = tables.points_tables(tmp_path)
    assert [line.split(", ")[0] for line in answers.splitlines() if "1.5b" in line] == ["| ruler at 4,096"]
    assert "| tiny, t | " in texts and "`kivi4`" in texts
    assert "| other texts | `klt4`, `klt3`, `klt2` | tiny |" in missing.splitlines()
    assert "chains" not in missing


def test_more_windows_of_a_cache_replace_fewer(tmp_path):
    (path,) = (BENCHMARKS / "chains").glob("smollm2*")
    for name, windows in (("chains", 4), (tables.PAGE, 16), ("cpu/page", 2)):
        shutil.copytree(path, tmp_path / name / path.name)
        one = tmp_path / name / path.name / "replay" / "kivi4.json"
        data = read(one)
        data["summary"] |= {"windows": windows, "kl_mean": windows / 1000}
        one.write_text(dumps(data))
    rows = [line for line in tables.points_tables(tmp_path)[1].splitlines() if "`kivi4`" in line]
    assert len(rows) == 1 and " | 0.01600 | " in rows[0]


def test_recommended_presets_have_a_bar_in_every_speed_chart():
    results = tables.page_results(BENCHMARKS)
    # vLLM has names of its own
    groups = [g for g in tables.beside(results, BENCHMARKS).groups if not g["title"].startswith("vLLM")]
    assert any(g["title"].startswith("Tokens on a CPU") for g in groups)
    assert len(groups) > 6
    for group in groups:
        labels = [b["label"] for b in group["bars"]]
        assert all(
            sum(label in (name, f"{name}: not measured") for label in labels) == 1
            for name in recommended(results.of_today())
        ), group["title"]
        assert [b["label"] for b in group["bars"] if b["value"] is None] == [
            label for label in labels if label.endswith("not measured")
        ]


def test_the_committed_page_is_of_the_committed_results():
    path = ROOT / "docs" / "results" / "report.html"
    if not path.exists() or not RESULTS.is_dir():
        pytest.skip("no committed page or results")
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)
    results = tables.page_results(BENCHMARKS)
    committed, fresh = (
        json.loads(found.group(1)),
        json.loads(json.dumps(page_data(results, tables.beside(results, BENCHMARKS)))),
    )
    assert committed.keys() == fresh.keys()
    for part, content in fresh.items():
        assert committed[part] == content, f"{part} differs: {RUN}"


def test_shapes_are_said_in_words():
    assert in_words("B=8 H=32/8 T=32768 D=128") == "8 sequences of 32,768 tokens, 32 query and 8 kv heads of 128"
    assert (
        in_words("B=1 H=4/4 T=64 D=80") == "1 sequence of 64 tokens, 4 query and 4 kv heads of 80"
        and in_words("other") == "other"
    )


def test_serving_is_drawn_beside_the_caches_of_vllm(tmp_path):
    shape = {
        "geometry": "llama",
        "gpus": 1,
        "context": 8192,
        "compiled": False,
        "options": {},
        "ttft_ms": None,
        "tpot_p99_ms": None,
    }
    rows = [
        shape
        | {
            "mode": "decode",
            "kv_cache_dtype": "bf16",
            "batch": 96,
            "largest": True,
            "step_ms": 29.0,
            "tokens_per_s": 3300.0,
        },
        shape
        | {
            "mode": "decode",
            "kv_cache_dtype": "kvbits_int8",
            "batch": 208,
            "largest": True,
            "step_ms": 33.0,
            "tokens_per_s": 6300.0,
        },
        shape
        | {
            "mode": "decode",
            "kv_cache_dtype": "bf16",
            "batch": 48,
            "largest": False,
            "step_ms": 17.0,
            "tokens_per_s": 2800.0,
        },
        shape
        | {
            "mode": "decode",
            "kv_cache_dtype": "bf16",
            "batch": 48,
            "largest": False,
            "step_ms": 18.0,
            "tokens_per_s": 2800.0,
            "options": {"speculate": 0},
        },
    ]
    (tmp_path / "nvidia-x").mkdir()
    of_another = [r | {"run": "r2"} for r in rows[1:2]]  # newer, and without bf16 beside it
    (tmp_path / "nvidia-x" / "serve_vllm.json").write_text(
        json.dumps({"runs": two_runs(), "rows": [*of_another, *({"run": "r1"} | r for r in rows)]})
    )
    (group,) = kernel_groups(tmp_path)  # a step of one cache alone is no comparison
    assert group["bars"] == [
        {"label": "bf16, 96 sequences", "value": 3300.0, "kind": "stock"},
        {"label": "kvbits_int8, 208 sequences", "value": 6300.0, "kind": "kvbits"},
    ]
    assert "tokens per second" in group["unit"] and "8,192 tokens each" in group["title"]


def test_kernel_groups_of_missing_files_are_left_out(tmp_path):
    assert kernel_groups(tmp_path) == []


def test_milliseconds_are_of_one_sitting_where_there_is_one(tmp_path):
    at = {"through": "forward", "batch": 1, "context": 32768}
    old = [
        at | {"run": "r1", "scheme": n, "mode": m, "ms_per_token": x}
        for n, m, x in (("stock_flash", "eager", 22.0), ("klt4", "graph", 7.0))
    ]
    new = [at | {"run": "r2", "scheme": "klt4", "mode": "graph", "ms_per_token": 6.0}]
    (tmp_path / "nvidia-x").mkdir()
    path = tmp_path / "nvidia-x" / "generate.json"
    path.write_text(json.dumps({"runs": two_runs(), "rows": [*old, *new]}))
    (row,) = (
        line for line in tables.milliseconds_table(tmp_path).splitlines() if line.startswith("| 1 x 32,768 tokens")
    )
    assert row.split(" | ")[1:] == ["22.0", "7.0 |"], "columns that were timed"
    (group,) = kernel_groups(tmp_path)
    assert {b["label"]: b["value"] for b in group["bars"]}["klt4"] == round(22 / 7, 2)
    path.write_text(
        json.dumps({"runs": two_runs(), "rows": [*old[1:], *new, old[0] | {"run": "r2", "ms_per_token": 20.0}]})
    )
    assert "| 1 x 32,768 tokens | 20.0 | 6.0 |" in tables.milliseconds_table(tmp_path)
    other = at | {"run": "r2", "scheme": "raw", "mode": "graph", "ms_per_token": 8.0, "context": 8192, "batch": 32}
    path.write_text(json.dumps({"runs": two_runs(), "rows": [*old, *new, other]}))
    assert "| 32 x 8,192 tokens | not measured | 8.0 | not measured |" in tables.milliseconds_table(tmp_path)


def test_the_committed_page_has_today_s_formats_on_the_readme_s_baseline():
    results = tables.page_results(BENCHMARKS)
    beside = tables.beside(results, BENCHMARKS)
    data = page_data(results, beside)
    rows = {key: {r["scheme"]: r for r in m["rows"]} for key, m in data["models"].items() if m["rows"]}
    assert rows and not any("bfloat16" in key for key in rows), "bfloat16's rounding hides what a format costs"
    for key, m in results.models.items():
        for name, cell in m.tasks.get("fidelity", {}).items():
            assert (name in rows[key]) == (not cell.outdated), name
    marks = {p["name"]: p for p in data["answer"]}
    of_today = {n for m in results.of_today().models.values() for n in m.tasks.get("fidelity", {})}
    assert tables.TAKEN.keys() <= marks.keys() <= schemes.PRESETS.keys() & of_today
    cells = tables._cpu_benchmark(BENCHMARKS).cells
    (cpu,) = (g for g in beside.groups if "CPU" in g["title"])
    assert {f"{b['value']:.2f}x" for b in cpu["bars"] if b["value"] is not None} <= set(cells.values())


def test_what_was_measured_in_an_earlier_format_is_left_out(folder, monkeypatch, tmp_path):
    """Figures of trellis codes and of what klt presets stored before stood under one name."""
    results = collect(folder)
    new = results.models["tiny"].tasks["fidelity"]["int4"]
    old = {"type": "Scheme", "name": "int4", "residual_length": 1}
    before = dataclasses.replace(new, info=new.info | {"scheme": old}, summary=new.summary | {"kl_mean": 9.0})
    assert before.outdated and not new.outdated
    both = [dataclasses.replace(m, tasks={"fidelity": {"int4": c}}) for m, c in _two_models(results, before, new)]
    found = tables._by_model("int4", both)
    assert set(found) == {"b"} and tables._kl(tables._worst(found)) == f"{new.summary['kl_mean']:.4f}"
    assert not tables._by_model("int4", both[:1])
    runs = {name: run | {"utc": {"r1": "2026-11-26", "r2": "2026-11-28"}[name]} for name, run in two_runs().items()}
    assert outdated("klt4", runs["r1"]) and outdated("kvbits_klt2", runs["r1"])
    assert not outdated("klt4", runs["r2"]) and not outdated("int4", runs["r1"])
    shape = {"scheme": "klt4", "best_16_bit": "cudnn"}
    rows = [
        shape | {"run": run, "shape": at, "speedup_real_cache": x}
        for run, at, x in (("r1", "a", 9.0), ("r2", "b", 2.0))
    ]
    (tmp_path / "nvidia-x").mkdir()
    (tmp_path / "nvidia-x" / "attend_decode.json").write_text(json.dumps({"runs": runs, "rows": rows}))
    assert gpu_speeds(tmp_path) == {"klt4": {"b": 2.0}}
    assert [g["title"] for g in kernel_groups(tmp_path)] == ["X, attention: b"]
    (of_card,) = gpu_latest(tmp_path).values()
    assert {shape: r["speedup_real_cache"] for shape, r in of_card["klt4"].items()} == {"b": 2.0}


def test_speeds_of_two_gpus_stay_apart(tmp_path):
    """A preset has a column for each GPU; a report takes the GPU that gains less."""
    runs = two_runs()
    names = {"r1": "NVIDIA H100 80GB HBM3", "r2": "NVIDIA H200"}
    runs = {name: run | {"gpu": {"name": names[name]}} for name, run in runs.items()}
    shared = {"scheme": "int4", "best_16_bit": "cudnn", "shape": "a"}
    for run, speed in (("r1", 3.0), ("r2", 2.5)):
        folder = tmp_path / f"nvidia-{run}"
        folder.mkdir()
        data = {"runs": {run: runs[run]}, "rows": [shared | {"run": run, "speedup_real_cache": speed}]}
        (folder / "attend_decode.json").write_text(json.dumps(data))
    found = gpu_latest(tmp_path)
    assert {card: of["int4"]["a"]["speedup_real_cache"] for card, of in found.items()} == {"H100": 3.0, "H200": 2.5}
    assert gpu_speeds(tmp_path) == {"int4": {"a": 2.5}}
    assert len(kernel_groups(tmp_path)) == 2


def test_names_of_gpus_keep_unlike_cards_apart():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090", "NVIDIA H200")
    assert [short_name({"gpu": {"name": name}}) for name in names] == ["H100", "H100 PCIe", "GeForce RTX 4090", "H200"]


def test_the_numbers_leave_out_a_gpu_without_the_headline(monkeypatch, tmp_path):
    with pytest.raises(DataError):
        tables.numbers(tmp_path)
    row = {"speedup_real_cache": 2.5}
    cards = {"A": {}, "B": {tables.HEADLINE: {tables.HEADLINE_SHAPE: row}}, "C": {tables.HEADLINE: {"other": row}}}
    monkeypatch.setattr(tables, "gpu_latest", lambda folder: cards)
    assert "**2.5 times** the speed" in tables.numbers(tables.BENCHMARKS)
    with pytest.raises(DataError):
        tables.numbers(tmp_path)


def test_presets_that_answered_unlike_questions_are_refused():
    model = Model("tiny", {"dtype": "float16"}, {})

    def cell(scheme, parts, kind):
        summary = {"parts": parts, "by_kind": {kind: {}}}
        return Cell(scheme=scheme, kind="packed", info={}, settings={}, summary=summary, items={}, runs={})

    alike = [(model, cell(scheme, 20, "words:512")) for scheme in ("klt4", "klt3")]
    ((what, mine),) = tables._answers(alike, "copying", False)
    assert "at 512" in what and list(mine) == ["klt4", "klt3"]
    for other in (cell("klt2", 40, "words:512"), cell("klt2", 20, "words:1000")):
        with pytest.raises(DataError, match="klt2"):
            list(tables._answers([*alike, (model, other)], "copying", False))


def _two_models(results, *cells):
    """Models a and b with a cell each."""
    return [(dataclasses.replace(results.models["tiny"], name=n), c) for n, c in zip("ab", cells, strict=True)]


def test_one_command_writes_every_generated_part(tmp_path):
    for name in (
        "README.md",
        "docs/results/evaluation.md",
        "docs/results/points.md",
        "docs/guide/choose.md",
        "docs/guide/transformers.md",
        "docs/results/report.html",
        "docs/plan.html",
        tables.FIGURES,
        *tables.tables_gpu.DOCUMENTS,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(committed(name), tmp_path / name)
    written = tables.write(tmp_path, BENCHMARKS)
    assert len(written) == 13 and all(
        path.read_bytes() == committed(str(path.relative_to(tmp_path))).read_bytes() for path in written
    ), RUN
