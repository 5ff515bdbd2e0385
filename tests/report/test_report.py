"""Tables and rules computed from results; the page draws in a real browser, light, dark and on a phone."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
from browser import DARK, browse, needs_browser
from commands import run, run_json
from messages import mentions, raises

import kvbits
from kvbits import schemes
from kvbits.errors import SpecError
from kvbits.report import markdown
from kvbits.report.collect import collect, held_bits
from kvbits.report.page import Beside, page, page_data

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "eval"
SETTINGS = "2 windows", "220 tokens", "chunks of 32", "bfloat16"
BESIDE = Beside(
    speeds={"kivi4": {"a": 1.5, "b": 2.5}},
    groups=[
        {
            "title": "GPU",
            "unit": "times as fast",
            "note": "",
            "bars": [
                {"label": "kivi4", "value": 1.5, "kind": "kvbits"},
                {"label": "16 bits", "value": 1.0, "kind": "stock"},
            ],
        }
    ],
    marks=[
        {
            "name": "other4",
            "kind": "simulated",
            "bits": 4.25,
            "kl": 0.02,
            "speed": None,
            "recommended": False,
            "models": 1,
        }
    ],
)
SCRIPT = Path(kvbits.__file__).parent / "report" / "assets" / "report.js"


# -- tables and rules -----------------------------------------------------------------------------------------------


def test_results_of_one_dtype_are_enough_and_the_report_says_which(folder, tmp_path):
    """The embedded model is float32 on a CPU, and `kvbits eval embedded`, then `kvbits report`, is how the README
    begins.
    """
    for dtype in ("float32", "float16"):
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        shutil.copytree(folder / "tiny-float32", tmp_path / "one" / f"tiny-{dtype}")
        for path in (tmp_path / "one").rglob("*.json"):
            data = json.loads(path.read_text().replace('"dtype":"float32"', f'"dtype":"{dtype}"'))
            data.pop("sum", None)
            path.write_text(json.dumps(data))
        results = collect(tmp_path / "one")
        columns, rows, notes = markdown.scheme_rows(results)
        assert (
            columns[-1] == f"tiny, {dtype}" and len(rows) == 5 and markdown.recommended(results) and not results.finer
        )
        assert any(mentions(n, "32 bits", "Raw tokens") for n in notes) == (dtype == "float32")
        assert any(mentions(n, f"rounding noise of {dtype}") for n in notes)
        out = tmp_path / "page.html"
        run(f"report {tmp_path / 'one'} --html {out}")
        assert f"tiny, {dtype}" in out.read_text()


def test_of_a_model_in_several_dtypes_the_coarsest_is_taken(folder, tmp_path):
    assert [m.facts["dtype"] for m in collect(folder).as_used.values()] == ["bfloat16"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "tiny" / "fidelity")
    assert [m.facts["dtype"] for m in collect(tmp_path).as_used.values()] == ["float32"]
    with raises(SpecError, "fidelity", "attention", "kvbits eval MODEL --tasks fidelity"):
        shutil.rmtree(tmp_path / "tiny-float32" / "fidelity")
        markdown.scheme_rows(collect(tmp_path))
    assert markdown.report(collect(tmp_path)).startswith("# What few bits cost\n\n## tiny: attention"), (
        "the other tasks have their tables"
    )


def test_results_of_other_settings_or_chains_are_not_shown_beside_each_other(folder, tmp_path):
    shutil.copytree(folder / "tiny", tmp_path / "tiny")
    base, one = (next((tmp_path / "tiny" / "fidelity").glob(name)) for name in ("16-bit.json", "int4.json"))
    data = json.loads(one.read_text())
    data.pop("sum", None)
    key, length = next(iter(data["items"])), data["settings"]["length"]
    one.write_text(json.dumps(data | {"settings": data["settings"] | {"calibration": "ab"}}))
    collect(tmp_path)
    one.write_text(json.dumps(data | {"settings": data["settings"] | {"length": 9}}))
    with raises(SpecError, "tiny/fidelity/int4.json", "16-bit.json", "length", 9, length):
        collect(tmp_path)
    for path, chain in ((one, "ab"), (base, "cd")):
        data = json.loads(path.read_text()) | {"settings": data["settings"]}
        data.pop("sum", None)
        data["items"][key]["chain_sha256"] = chain
        path.write_text(json.dumps(data))
    with raises(SpecError, "tiny/fidelity/int4.json", "16-bit.json", key):
        collect(tmp_path)


def test_rows_go_from_many_bits_to_few_and_carry_what_was_measured(folder):
    results = collect(folder)
    assert list(results.models) == ["tiny", "tiny-float32"] and list(results.as_used) == ["tiny"]
    columns, rows, notes = markdown.scheme_rows(results)
    assert columns == ["cache", "bits held", "bits", "tiny"]
    assert rows[0].scheme == "raw" and {r.scheme for r in rows} == {"raw", "int8", "int4", "kivi4", "kivi2"}
    cells = results.models["tiny"].tasks["fidelity"]
    row = next(r for r in rows if r.scheme == "int4")
    held = 16 * cells["int4"].summary["bytes_held"] / cells["16-bit"].summary["bytes_held"]
    assert row.cells[1] == f"{held:.2f}" and held == held_bits(cells["int4"], cells)
    assert row.cells[3].endswith(f", {cells['int4'].summary['kl_mean']:.4f}") and "%" in row.cells[3]
    assert any(mentions(n, "tiny", *SETTINGS) for n in notes)
    (width,) = cells["int4"].info["head_dims"]
    assert any(mentions(n, "tiny", f"kvbits schemes --head-dim {width}") for n in notes)


def test_the_recommendation_is_the_smallest_worst_kl(folder):
    results = collect(folder)
    model = results.models["tiny"]

    def changed(kl):
        cells = {
            n: dataclasses.replace(c, summary=c.summary | {"kl_mean": kl.get(n, 9.0)})
            for n, c in model.tasks["fidelity"].items()
        }
        return dataclasses.replace(model, tasks={"fidelity": cells})

    models = {"a": changed({"int4": 0.01, "kivi4": 0.02}), "b": changed({"int4": 0.5, "kivi4": 0.03})}
    assert markdown.best_of(models, 3.9, 5.6) == "kivi4"
    assert markdown.best_of({"a": models["a"]}, 3.9, 5.6) == "int4"
    del models["b"].tasks["fidelity"]["kivi4"]  # not measured on every model: not recommended
    assert markdown.best_of(models, 3.9, 5.6) == "int4"
    assert markdown.best_of(models, 5.7, 6.9) is None
    assert "`int8`" in markdown.recommendations(results)[0]


def test_a_recommendation_says_what_a_scheme_asks_for():
    speeds = {"nuq4-1%": {"a": 0.74, "b": 0.92, "c": 1.5}, "nuq4": {"a": 1.0}, "raw": {"a": 0.9}}
    both, calibrated, slow = (markdown._price(name, speeds) for name in ("nuq4-1%", "nuq4", "raw"))
    assert "kvbits calibrate" in both and "2 of 3" in both and "0.74 times" in both
    assert "kvbits calibrate" in calibrated and "GPU" not in calibrated
    assert "kvbits calibrate" not in slow and "1 of 1" in slow and "0.90 times" in slow
    assert markdown._price("int8_centered", speeds) == markdown._price("not a preset", {}) == ""


def test_budgets_are_one_plain_sentence_each_and_name_what_needs_no_setup_first():
    results = collect(RESULTS)
    eight, four, three = markdown.budgets(results)
    assert eight.startswith("**About 8 bits: `int8_centered`**")
    assert mentions(eight, "1.6 times", "16 bits", "1,024 tokens", "1.9 times", "0.1%", 4)
    assert (
        four.startswith("**4 to 5 bits: `kivi4`**")
        and "`nuq4-1%`" in four
        and "kvbits calibrate" in four
        and "GPU" not in four
    )
    assert three.startswith("**Under 4 bits: `nuq3-1%`**") and "kvbits calibrate" in three
    assert markdown.recommended(results) == ("int8_centered", "kivi4", "nuq4-1%", "nuq3-1%")


def test_what_needs_no_setup_is_recommended_first_where_it_is_usable():
    results = collect(RESULTS)
    eight, four, three = markdown.recommendations(results)
    assert (
        eight.startswith(f"**About 8 bits: `{schemes.RECOMMENDED}`**")
        and not schemes.PRESETS[schemes.RECOMMENDED].needs_calibration
    )
    assert four.startswith("**4 to 5 bits: `kivi4`**") and "`nuq4-1%`" in four and "kvbits calibrate" in four
    assert three.startswith("**Under 4 bits: `nuq3-1%`**"), "kivi2 is not usable, so that it does not come first"


def test_the_table_says_for_which_models_a_scheme_is_unfit():
    found = {
        name: [m.title for m in some]
        for name, some in markdown.unfit(m for m in collect(RESULTS).as_used.values() if "fidelity" in m.tasks).items()
    }
    assert found["int4"] == ["gemma3-270m", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"]
    assert not {"raw", "int8_centered", "kivi4", "nuq4-1%", "nuq3-1%"} & set(found)
    note = markdown.scheme_rows(collect(RESULTS))[2][-1]
    assert mentions(note, "perplexity", "2%", "0.05 nats", "`int4`", "gemma3-270m", "qwen2.5-coder-0.5b-instruct")


def test_mass_matched_stands_beside_raw_s_and_float32_s(folder):
    results = collect(folder)
    columns, rows, said = markdown.mass_rows(results)
    assert columns[:3] == ["model", "raw", "int8"] and len(columns) == 5 and "float32" in said
    sixteen, exact = (results.models[k].tasks["fidelity"] for k in ("tiny", "tiny-float32"))
    first, second = ([f"{cells[n].summary['mass_matched']:.2%}" for n in columns[1:]] for cells in (sixteen, exact))
    assert rows == [
        ["tiny, bfloat16", *first],
        ["least, bfloat16", *first],
        ["tiny, float32", *second],
        ["least, float32", *second],
    ]
    assert second[0] == "100.00%"
    line = markdown.recommendations(results)[0]
    assert mentions(line, "`raw`", f"{sixteen['raw'].summary['mass_matched']:.2%}", "float32", second[1])
    other = dataclasses.replace(
        results.models["tiny"], name="other", tasks={"fidelity": {n: c for n, c in sixteen.items() if n != "raw"}}
    )
    exact = dataclasses.replace(
        results.models["tiny-float32"], tasks={"fidelity": {n: c for n, c in exact.items() if n != "int8"}}
    )
    _, rows, _ = markdown.mass_rows(
        dataclasses.replace(results, models={"tiny": results.models["tiny"], "other": other, "tiny-float32": exact})
    )
    assert [r[:3] for r in rows] == [
        ["tiny, bfloat16", *first[:2]],
        ["other, bfloat16", "", first[1]],
        ["least, bfloat16", f"{first[0]} (1 of 2)", first[1]],
        ["tiny, float32", "100.00%", ""],
        ["least, float32", "100.00%", ""],
    ]


def test_schemes_whose_windows_stayed_raw_are_no_part_of_the_scheme_table(folder):
    results = collect(folder)
    tiny = results.models["tiny"]
    cells = tiny.tasks["fidelity"]
    long = dataclasses.replace(
        cells["kivi4"],
        scheme="tiered",
        summary=cells["kivi4"].summary | {"kl_mean": 0.0, "bytes_held": cells["raw"].summary["bytes_held"]},
    )
    more = dataclasses.replace(
        results, models={"tiny": dataclasses.replace(tiny, tasks={"fidelity": cells | {"tiered": long}})}
    )
    _, rows, notes = markdown.scheme_rows(more)
    assert "tiered" not in {r.scheme for r in rows} and any("`tiered`" in n for n in notes)
    assert markdown.recommendations(more)[1].startswith("**4 to 5 bits: `") and not any(
        "tiered" in r for r in markdown.recommendations(more)
    )
    other = dataclasses.replace(tiny, name="other")
    notes = markdown.scheme_rows(dataclasses.replace(results, models={"a": tiny, "b": other}))[2]
    assert any(mentions(n, *SETTINGS) and "tiny" not in n for n in notes), "said once of all models"


def test_no_results_is_an_error(tmp_path):
    with raises(SpecError, tmp_path, "kvbits eval", "--out"):
        collect(tmp_path)


def test_the_command_writes_every_kind(folder, tmp_path):
    html, md = tmp_path / "r.html", tmp_path / "r.md"
    assert run_json(f"report {folder} --html {html} --markdown {md}")["written"] == [str(html), str(md)]
    assert html.stat().st_size > 300 and "| kivi2 |" in md.read_text()


# -- the page -------------------------------------------------------------------------------------------------------


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [v for k, v in attrs if k in ("src", "href") and v]


def test_the_page_needs_no_network_and_carries_all_rows(folder):
    text = page(collect(folder), BESIDE)
    links = Links()
    links.feed(text)
    assert all(v.startswith("data:") for v in links.found)
    assert "@import" not in text and len(text) < 2_000_000
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))
    assert [r["scheme"] for r in data["models"]["tiny"]["rows"]][:2] == ["16-bit", "raw"]
    assert len(data["models"]["tiny"]["attention"][0]["tvd"]) == 2
    assert data["kernels"] == list(BESIDE.groups) and data["answer"][-1] == BESIDE.marks[0]
    assert text.index('id="answer"') < text.index("<table") and text.index("KL divergence between") < text.index(
        'id="answer"'
    )
    answer = {p["name"]: p for p in data["answer"]}
    assert (
        {n for n, p in answer.items() if p["kind"] == "kvbits"} == {"raw", "int8", "int4", "kivi4", "kivi2"}
        and answer["kivi4"]["speed"] == 2.0
        and {n for n, p in answer.items() if p["recommended"]} == set(markdown.recommended(collect(folder)))
    )


def test_other_caches_are_marked_where_they_serve(folder):
    """A cache of others need not serve every model; its bits are those of long context, like ours, and not those of a
    window's raw tokens.
    """
    results = collect(folder)
    tiny = results.models["tiny"]
    (base,) = (c for c in tiny.tasks["fidelity"].values() if c.kind == "base")
    quanto = dataclasses.replace(
        base,
        scheme="quanto4",
        kind="stock",
        info={"bits_per_element": None, "options": {"nbits": 4}},
        summary=base.summary | {"kl_mean": 0.3},
    )
    other = dataclasses.replace(tiny, name="other", tasks={"fidelity": tiny.tasks["fidelity"] | {"quanto4": quanto}})
    both = dataclasses.replace(results, models={"tiny": tiny, "other": other})
    marks = {p["name"]: p for p in page_data(both)["answer"]}
    assert (marks["quanto4"]["bits"], marks["quanto4"]["kl"], marks["quanto4"]["models"]) == (4.5, 0.3, 1) and marks[
        "int4"
    ]["models"] == 2
    rows = markdown.scheme_rows(both)[1]
    assert next(r.cells for r in rows if r.scheme == "quanto4")[2] == "4.50"
    assert {"nuq2-1%", "quanto2", "hqq2"} <= {p["name"] for p in page_data(collect(RESULTS))["answer"]}


def test_the_page_has_no_mark_of_a_format_that_is_gone_or_was_another(folder):
    results = collect(folder)
    tiny = results.models["tiny"]
    cells = tiny.tasks["fidelity"]
    gone = dataclasses.replace(cells["int4"], scheme="int4_rotated", info=cells["int4"].info)
    earlier = dataclasses.replace(
        cells["kivi2"], info=cells["kivi2"].info | {"scheme": cells["kivi2"].info["scheme"] | {"residual_length": 7}}
    )
    mine = dataclasses.replace(cells["int4"], scheme="mine", settings=cells["int4"].settings | {"scheme": {}})
    changed = cells | {"int4_rotated": gone, "kivi2": earlier, "mine": mine}
    other = dataclasses.replace(results, models={"tiny": dataclasses.replace(tiny, tasks={"fidelity": changed})})
    data = page_data(other)
    names = {r["scheme"] for r in data["models"]["tiny"]["rows"]}
    assert "mine" in names and not {"int4_rotated", "kivi2"} & names
    assert not {"int4_rotated", "kivi2"} & {p["name"] for p in data["answer"]}
    text = page(other)
    note = next(n for n in re.findall(r'<p class="note">(.*?)</p>', text) if "--schemes kivi2</code>" in n)
    assert "int4_rotated" in note and "kivi2" in note.split("<code>")[0]


def test_layers_that_were_not_measured_are_named_with_the_command(folder):
    text = page(collect(folder))
    assert "Not measured: " in text and "--tasks attention --schemes " in text
    missing = re.search(r"Not measured: ([^;]*);", text)[1].split(", ")
    measured = collect(folder).models["tiny"].tasks["attention"]
    assert set(missing) == {n for n in schemes.CORE if n != "raw" and n not in measured}


def test_sentences_are_made_of_bits_held(folder):
    results = collect(folder)
    models = {k: m for k, m in results.as_used.items() if "fidelity" in m.tasks}
    for sentence in markdown.budgets(results):
        if (smaller := re.search(r"([\d.]+) times", sentence)) is None:
            continue
        name = re.search(r"`(.*?)`", sentence)[1]
        ratios = [m.tasks["fidelity"][name].summary["memory_reduction"] for m in models.values()]
        assert float(smaller[1]) == pytest.approx(min(ratios), abs=0.06)


def test_both_ratios_of_a_sentence_are_to_the_model_s_own_bits(folder):
    """A cache beside one of 32 bits is twice as small as beside one of 16, now and in long contexts."""
    models = collect(folder).models
    found = {}
    for key in ("tiny", "tiny-float32"):
        sentence = markdown._smaller({key: models[key]}, "int8")
        words = re.fullmatch(r"([\d.]+) times .* (\d+) bits .* 220 tokens.* ([\d.]+) times .*", sentence)
        found[key] = [float(x) for x in words.groups()]
        (own,) = {c.info["bits_per_element"] for c in models[key].tasks["fidelity"].values() if c.kind == "base"}
        cell = models[key].tasks["fidelity"]["int8"]
        assert found[key][1] == own
        assert found[key][0] == pytest.approx(cell.summary["memory_reduction"], abs=0.06)
        assert found[key][2] == pytest.approx(own / cell.info["bits_per_element"], abs=0.06)
    assert found["tiny-float32"][2] == pytest.approx(2 * found["tiny"][2], abs=0.16)


@needs_browser
@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_the_page_draws_in_a_browser(folder, tmp_path, options):
    probe = """<script>addEventListener("load", () => setTimeout(() => {
        const ink = [...document.querySelectorAll("canvas")].map((c) => { const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return c.id + "=" + n; });
        const wide = document.documentElement.scrollWidth <= innerWidth;
        document.body.dataset.probe = ink.join(" ") + " fits=" + wide + " background=" + getComputedStyle(document.body).backgroundColor;
    }, 500)); addEventListener("error", (e) => document.body.dataset.failed = e.message);</script></head>"""
    path = tmp_path / "page.html"
    path.write_text(page(collect(folder), BESIDE).replace("</head>", probe))
    dom = browse(path, tmp_path / "profile", *options)
    assert "data-failed" not in dom and 'data-ready="yes"' in dom
    found = dict(x.split("=") for x in re.search(r'data-probe="([^"]*)"', dom).group(1).replace(", ", ",").split())
    assert all(int(found[c]) > 1000 for c in ("answer", "pareto", "memory", "kernels"))
    assert found["fits"] == "true"
    assert found["background"] == ("rgb(18,23,30)" if options else "rgb(255,255,255)")
    assert dom.count("<tr") > 30 and "kivi2" in dom
    left = re.search(r"([\d.]+) GB − ([\d.]+) GB of weights − ([\d.]+) GB reserve = ([\d.]+) GB for the cache", dom)
    card, weights, reserve, cache = map(float, left.groups())
    assert weights == 16.06 and cache == pytest.approx(card - weights - reserve, abs=0.02) and "users that fit" in dom


@needs_browser
def test_a_phone_needs_no_sideways_scrolling(folder, tmp_path):
    inner, outer = tmp_path / "page.html", tmp_path / "phone.html"
    inner.write_text(page(collect(folder)))
    outer.write_text(
        '<body><iframe id="f" src="page.html"'
        ' style="width:390px;height:900px"></iframe><script>addEventListener("load", () => setTimeout(() => {const d ='
        " f.contentDocument; document.body.dataset.width = d.documentElement.scrollWidth + ' ' +"
        " d.documentElement.dataset.ready; }, 1500));</script>"
    )
    dom = browse(outer, tmp_path / "profile", "--allow-file-access-from-files")
    width = re.search(r'data-width="(\d+) yes"', dom)
    assert width and 300 < int(width.group(1)) <= 390
