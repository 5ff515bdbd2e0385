"""`evaluate` writes one file per scheme and task, goes on where it stopped, refuses to mix settings, and calibrates on
other text.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import commands
import pytest
import tiny
import torch
from messages import mentions, raises

from kvbits import runs, schemes
from kvbits.calibrate.sampling import Sample, windows_of
from kvbits.errors import CalibrationError, FileFormatError, SpecError, UnsupportedError
from kvbits.evaluate import calibrator, results
from kvbits.evaluate.caches import GROUPS, STOCK, base_factory, expand, factory, held_bytes, read_caches
from kvbits.evaluate.calibrator import USUAL, Calibrator
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import TASKS, Context, load, names_of, replay
from kvbits.evaluate.tasks import text as text_tasks
from kvbits.evaluate.texts import Text, mixed, novel, spread_windows
from kvbits.model_ref import ModelRef

OPTIONS = {"windows": 2, "length": 200, "chunk": 32, "context": 100, "new_tokens": 8}
TEXTS = (Text("one", novel()[:4000]),)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def run(
    model,
    out,
    schemes=("int8", "int4"),
    tasks=("fidelity",),
    texts=TEXTS,
    calibration_text=None,
    overwrite=False,
    **changes,
):
    return Evaluation(
        name="tiny",
        schemes=list(schemes),
        tasks=list(tasks),
        texts=texts,
        out=out,
        options=Options(**(OPTIONS | changes)),
        calibration_text=calibration_text,
        overwrite=overwrite,
    ).run(model, tiny.tokenizer(), progress=False)


def test_results_of_klt_s_older_formats_are_not_gone_on_from(model, tmp_path):
    text = Text("other", novel()[9000:30000])
    run(model, tmp_path, ["klt2", "int8"], calibration_text=text, windows=1)
    path = tmp_path / "tiny-float32" / "fidelity" / "klt2.json"
    older = results.read(path)
    del older["settings"]["formats"]
    path.write_text(results.dumps(older))
    run(model, tmp_path, ["int8"], windows=2)
    with raises(SpecError, "klt2.json", "formats", "--out", "--overwrite"):
        run(model, tmp_path, ["klt2"], calibration_text=text, windows=2)


def test_a_run_leaves_one_file_per_cache_with_everything_its_figures_depend_on(model, tmp_path):
    found = run(model, tmp_path)["fidelity"]
    assert list(found) == ["32-bit", "int8", "int4"]
    data = results.read(tmp_path / "tiny-float32" / "fidelity" / "int4.json")
    assert data["settings"] == {"length": 200, "chunk": 32, "windows": "spread"}
    assert (
        data["model"]["name"] == "tiny"
        and data["model"]["dtype"] == "float32"
        and len(data["model"]["fingerprint"]) == 16
    )
    (run_id,) = data["runs"]
    assert {*runs.FIELDS, "device", "threads", "seconds"} <= set(data["runs"][run_id]) and {
        i["run"] for i in data["items"].values()
    } == {run_id}
    assert len(data["items"]) == 2 and all(k.startswith(f"one@{TEXTS[0].sha256[:8]}:") for k in data["items"])
    assert data["summary"] == json.loads(json.dumps(found["int4"]))


def test_the_summary_is_that_of_the_whole_text(model, tmp_path):
    found = run(model, tmp_path, schemes=["raw", "int4"])["fidelity"]
    ids = torch.stack([*spread_windows(tiny.tokenizer(), TEXTS[0], count=2, length=200).values()])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits.double(), -1)
    want = math.exp(-log_p[:, :-1].gather(2, ids[:, 1:, None]).mean().item())
    assert found["32-bit"]["ppl"] == pytest.approx(want, rel=1e-5)
    assert found["raw"]["ppl"] == pytest.approx(want, rel=1e-4) and found["raw"]["kl_mean"] < 1e-6
    row = found["int4"]
    assert row["tokens"] == 398 and row["kl_mean"] > 1e-5 and row["mass_matched"] == pytest.approx(1 - row["tvd_mean"])
    assert row["ppl_change"] == pytest.approx(row["ppl"] / row["ppl_base"] - 1)
    assert row["bytes_held"] == row["bytes_planned"] < found["32-bit"]["bytes_held"]
    assert row["ppl_change_se"] > 0


def test_the_worst_token_and_what_was_read_raw_stand_beside_the_mean(model, tmp_path):
    found = run(model, tmp_path, schemes=["raw", "int8_centered", "kivi2"], windows=3)["fidelity"]
    items = results.read(tmp_path / "tiny-float32" / "fidelity" / "kivi2.json")["items"]
    row = found["kivi2"]
    worst = items[row["kl_worst_window"]]
    assert (
        worst["kl_max"] == row["kl_max"] == max(i["kl_max"] for i in items.values())
        and worst["kl_worst"] == row["kl_worst"] > 32
    )
    assert row["kl_lost"] == sum(i["kl_lost"] for i in items.values()) / row["tokens"] < 0.1
    assert 0 <= row["kl_median"] < row["kl_p99"] <= row["kl_p999"] <= row["kl_max"] * 1.03
    assert row["dp_rms"] == pytest.approx(math.sqrt(sum(i["dp_squares"] for i in items.values()) / row["tokens"]))
    assert found["32-bit"]["dp_rms"] == 0 < found["raw"]["dp_rms"] < 0.01 * row["dp_rms"]
    assert found["raw"]["read_raw"] == 1 and "read_raw" not in found["32-bit"]
    assert 0 < found["int8_centered"]["read_raw"] < row["read_raw"] < 1, "more newest tokens of kivi2 stay raw"
    decoded = run(model, tmp_path, schemes=["kivi2"], tasks=["decode"], context=250, new_tokens=10)["decode"]["kivi2"]
    assert 250 < decoded["kl_worst"] < 260 and 0 < decoded["read_raw"] < 1


def test_items_of_before_have_no_token_probabilities_and_new_ones_are_added(model, tmp_path):
    run(model, tmp_path, schemes=["int8"], windows=2)
    for name in ("32-bit", "int8"):
        path = tmp_path / "tiny-float32" / "fidelity" / f"{name}.json"
        data = results.read(path)
        for item in data["items"].values():
            del item["dp_squares"]
        path.write_text(results.dumps(data))
    row = run(model, tmp_path, schemes=["int8"], windows=3)["fidelity"]["int8"]
    assert row["windows"] == 3 and row["dp_rms"] is None and row["kl_p999"] > row["kl_median"] > 0


def test_files_of_a_text_s_first_windows_are_not_mixed_with_spread_ones(model, tmp_path):
    run(model, tmp_path, schemes=["int8"])
    path = tmp_path / "tiny-float32" / "fidelity" / "int8.json"
    data = results.read(path)
    del data["settings"]["windows"]
    path.write_text(results.dumps(data))
    with raises(SpecError, "int8.json", "windows", "'spread'", "--out", "--overwrite"):
        run(model, tmp_path, schemes=["int8"])


@pytest.mark.parametrize(("name", "chunk"), [("fidelity", 16), ("follow", 16), ("decode", 128), ("greedy", 128)])
def test_what_is_scored_in_chunks_is_scored_in_short_ones(model, name, chunk):
    sizes = {"windows": 2, "length": 200, "context": 100, "new_tokens": 8}
    assert load(name)(Context(ModelRef.of(model), tiny.tokenizer(), TEXTS, Options(**sizes))).settings["chunk"] == chunk
    assert (
        load(name)(Context(ModelRef.of(model), tiny.tokenizer(), TEXTS, Options(**sizes, chunk=64))).settings["chunk"]
        == 64
    )


def test_a_run_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    one = run(model, tmp_path / "a")["fidelity"]["int8"]
    calls = []
    real = text_tasks.compare

    def stopping(*args, **kwargs):
        calls.append(list(args[1]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(text_tasks, "compare", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "b")
    assert len(results.read(tmp_path / "b" / "tiny-float32" / "fidelity" / "int8.json")["items"]) == 1
    again = run(model, tmp_path / "b")["fidelity"]["int8"]
    assert len(calls) == 3  # the second window only
    of_time = ("tokens_per_s", "speed_ratio")
    assert again["octaves"] == {at: pytest.approx(figures) for at, figures in one["octaves"].items()}
    assert {k: v for k, v in again.items() if k not in of_time and k != "octaves"} == pytest.approx(
        {k: v for k, v in one.items() if k not in of_time and k != "octaves"}
    )
    run(model, tmp_path / "b", schemes=["int8", "kivi4"])
    assert calls[3:] == [["32-bit", "kivi4"]] * 2  # a new scheme runs beside the base, the others are left alone
    run(model, tmp_path / "b", schemes=["int8", "kivi4"], windows=3)
    assert calls[5:] == [["32-bit", "int8", "kivi4"]]
    data = results.read(tmp_path / "b" / "tiny-float32" / "fidelity" / "int8.json")
    made_by = [item["run"] for item in data["items"].values()]
    assert len(set(made_by)) == 3 and set(made_by) == set(data["runs"]), "each window keeps the run that made it"


def test_results_of_other_settings_or_models_are_refused_not_mixed(model, tmp_path):
    run(model, tmp_path, schemes=["int8"])
    with raises(SpecError, "length", 100, 200, "--out", "--overwrite"):
        run(model, tmp_path, schemes=["int8"], length=100)
    with raises(SpecError, "fingerprint", "--out", "--overwrite"):
        run(tiny.model(seed=1), tmp_path, schemes=["int8"])
    assert run(model, tmp_path, schemes=["int8"], length=100, overwrite=True)["fidelity"]["int8"]["tokens"] == 198
    path = tmp_path / "tiny-float32" / "fidelity" / "int8.json"
    path.write_text("{")
    with raises(FileFormatError, path):
        run(model, tmp_path, schemes=["int8"], length=100)
    path.write_text('{"format": "other"}')
    with raises(FileFormatError, path, "kvbits eval"):
        results.read_all(tmp_path)
    whole = {
        "format": "kvbits-eval",
        "version": results.VERSION,
        "task": "fidelity",
        "scheme": "int8",
        "kind": "packed",
        "info": {},
        "settings": {},
    }
    whole |= {"model": {"name": "m", "dtype": "float32", "parameters": 1}, "runs": {}, "items": {}, "summary": {}}
    for change, parts in [
        ({"items": []}, ("items",)),
        ({"items": {"a": 3}}, ("items",)),
        ({"model": {}}, ("model", "dtype", "name")),
    ]:
        path.write_text(json.dumps(whole | change))
        with raises(FileFormatError, path, *parts):
            results.read_all(tmp_path)


def test_a_trimmed_file_is_refused_where_its_items_are_needed(model, tmp_path):
    """benchmarks/trim_results.py leaves out what no table reads; a run that goes on would read it."""
    run(model, tmp_path, schemes=["int8"], tasks=["fidelity", "attention"])
    command = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "trim_results.py"), str(tmp_path)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert said["bytes_after"] < said["bytes_before"]
    again = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert again["bytes_after"] == again["bytes_before"] == said["bytes_after"]
    assert run(model, tmp_path, schemes=["int8"], windows=3)["fidelity"]["int8"]["windows"] == 3
    with raises(SpecError, "layers", "--out", "--overwrite"):
        run(model, tmp_path, schemes=["int8", "int4"], tasks=["attention"])


def test_chains_that_were_trimmed_are_written_anew_by_overwrite(model, tmp_path):
    def once(overwrite):
        run(model, tmp_path, schemes=["int8"], tasks=["replay"], windows=1, length=600, chunk=16, overwrite=overwrite)
        return results.read(tmp_path / "tiny-float32" / "replay" / "32-bit.json")

    chain = once(False)["items"]["planning@0"]["chain"]
    subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "trim_results.py"), str(tmp_path)],
        check=True,
        capture_output=True,
    )
    anew = once(True)
    assert anew["items"]["planning@0"]["chain"] == chain and "trimmed" not in anew


def test_pure_decoding_reads_every_token_as_stored(model, tmp_path):
    found = run(model, tmp_path, schemes=["raw", "kivi2"], tasks=["decode"], windows=1, context=300, new_tokens=12)[
        "decode"
    ]
    assert found["kivi2"]["tokens"] == 11 and found["kivi2"]["tokens_per_s"] > 0 and found["kivi2"]["speed_ratio"] > 0
    assert found["raw"]["kl_mean"] < 1e-6 < found["kivi2"]["kl_mean"]
    assert found["32-bit"]["speed_ratio"] == pytest.approx(1)


def test_schemes_that_need_it_are_calibrated_on_other_text_and_the_file_is_kept(model, tmp_path):
    own = run(model, tmp_path / "own", schemes=["int8_static"])
    assert 0 < own["fidelity"]["int8_static"]["kl_mean"] < 0.1, "on the end of the novel, where no text is named"
    with raises(SpecError, "--calibration-text", "'one'"):
        run(model, tmp_path, schemes=["int8_static"], calibration_text=Text("same", TEXTS[0].content))
    other = Text("other", novel()[50_000:90_000])
    found = run(model, tmp_path, schemes=["int8_static"], calibration_text=other)["fidelity"]["int8_static"]
    assert 0 < found["kl_mean"] < 0.1 and "saturated" in found
    info = results.read(tmp_path / "tiny-float32" / "fidelity" / "int8_static.json")["info"]["calibration"]
    assert info["text"] == "other" and info["text_sha256"] == other.sha256
    path = tmp_path / "tiny-float32" / "calibration" / "int8_static.safetensors"
    before = path.stat().st_mtime_ns
    run(model, tmp_path, schemes=["int8_static"], calibration_text=other, windows=3)
    assert path.stat().st_mtime_ns == before
    Calibrator(model, tiny.tokenizer(), Text("third", novel()[90_000:99_000]), tests=TEXTS, directory=path.parent)(
        factory_scheme(model)
    )
    assert path.stat().st_mtime_ns != before


def test_a_calibration_that_another_run_replaced_is_said(model, tmp_path, monkeypatch):
    mine = Calibrator(model, tiny.tokenizer(), Text("mine", novel()[90_000:99_000]), tests=TEXTS, directory=tmp_path)
    theirs = Calibrator(
        model, tiny.tokenizer(), Text("theirs", novel()[50_000:59_000]), tests=TEXTS, directory=tmp_path
    )
    monkeypatch.setattr(mine, "prepare", theirs.prepare)
    with raises(CalibrationError, "int8_static.safetensors"):
        mine(factory_scheme(model))


def test_all_schemes_are_calibrated_in_one_pass(model, tmp_path, monkeypatch):
    from kvbits.literature import fisher

    calls, real = [], fisher.backward
    monkeypatch.setattr(fisher, "backward", lambda *a: calls.append(1) or real(*a))
    other = Text("other", novel()[50_000:58_000])
    run(model, tmp_path, schemes=["nuq3-1%", "int8", "nuq2", "nuq4"], calibration_text=other, windows=1)
    folder = tmp_path / "tiny-float32" / "calibration"
    assert len(calls) == 8000 // USUAL.length and sorted(p.name for p in folder.iterdir()) == [
        "nuq2.safetensors",
        "nuq3-1%.safetensors",
        "nuq4.safetensors",
    ]
    run(model, tmp_path, schemes=["nuq3-1%", "nuq2"], calibration_text=other)
    assert len(calls) == 8000 // USUAL.length
    run(model, tmp_path, schemes=["nuq3-1%", "nuq2-1%"], calibration_text=other)
    assert len(calls) == 2 * (8000 // USUAL.length)


def factory_scheme(model):
    from kvbits.geometry import layer_geometries

    return schemes.for_layers("int8_static", layer_geometries(model.config))


def stock_names():
    found = []
    for name in STOCK:
        try:
            factory(tiny.model(), name)
            found.append(name)
        except UnsupportedError:
            pass
    return found


@pytest.mark.parametrize("name", list(STOCK))
def test_stock_caches_are_measured_like_ours_and_their_bytes_counted(model, tmp_path, name):
    if name not in stock_names():
        pytest.skip(f"{name}: its package is not installed (optimum-quanto, hqq)")
    found = run(model, tmp_path, schemes=[name], windows=1, length=258, chunk=64)["fidelity"]
    row = found[name]
    bits = int(name[-1]) if name[-1] in "248" else 8
    elements = found["32-bit"]["bytes_held"] / 4
    # float32 scales and zeros, a raw residual
    assert elements * bits / 8 < row["bytes_held"] < elements * (bits / 8 + 1.25)
    assert row["kl_mean"] > 0


def test_held_bytes_of_known_caches(model):
    cache = base_factory(model).make(1, 10)
    model(torch.zeros(1, 10, dtype=torch.int64), past_key_values=cache, use_cache=True)
    assert held_bytes(cache) == 2 * 2 * 2 * 64 * 10 * 4
    ours = factory(model, "int4").make(1, 300)
    assert held_bytes(ours) == ours.pages.spec.nbytes(300)


def test_names():
    assert schemes.expand(["int8", "all"], GROUPS)[0] == "int8" and set(schemes.expand(["stock"], GROUPS)) == set(STOCK)
    with raises(SpecError, "'nope'", "int8"):
        schemes.expand(["nope"], GROUPS)
    assert names_of(["ppl", "kl", "decode"]) == ["fidelity", "decode"]
    with raises(SpecError, "'nope'", "fidelity"):
        names_of(["nope"])


OWN_CACHES = """
from transformers import DynamicCache
from kvbits.model_ref import ModelRef
from kvbits.evaluate.caches import CacheFactory

def plain(model):
    return CacheFactory("plain", "stock", lambda batch, tokens: DynamicCache(config=model.config))

CACHES = {"plain": plain}
"""


def test_a_file_s_caches_are_measured_by_name_and_as_a_group(monkeypatch, model, tmp_path):
    (tmp_path / "own.py").write_text(OWN_CACHES)
    sizes, own = "--windows 1 --length 200 --chunk 32", f"--caches {tmp_path / 'own.py'}"
    for group, out in (("plain", tmp_path / "a"), ("caches", tmp_path / "b")):
        command(monkeypatch, model, f"{sizes} {own} --schemes int8,{group} --out {out}")
        found = results.read(out / "tiny-float32" / "fidelity" / "plain.json")
        assert found["kind"] == "stock" and found["summary"]["kl_mean"] == 0, "the model's own cache under another name"
    out, loads = command(monkeypatch, model, f"{sizes} --schemes plain --out {tmp_path / 'c'}", code=2)
    assert mentions(out.stderr, "'plain'", "int8") and not loads


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("own.py", "--caches", "benchmarks/peers.py")),
        ("import nothing_of_this_name", ("own.py", "ModuleNotFoundError", "'nothing_of_this_name'")),
        ("x = 1", ("own.py", "CACHES", "benchmarks/peers.py")),
        ("CACHES = {'a': 1}", ("own.py", "CACHES", "benchmarks/peers.py")),
        ("CACHES = {'int8': print}", ("'int8'",)),
        ("CACHES = {'a/b': print}", ("'a/b'",)),
        ("CACHES = {'a': repr}", ("CACHES['a']", "CacheFactory")),
        (OWN_CACHES.replace('"plain", "stock"', '"other", "stock"'), ("CACHES[", "CacheFactory")),
        (OWN_CACHES.replace('"stock"', '"kvbits"'), ("stock", "simulated")),
    ],
)
def test_a_file_of_caches_that_cannot_serve_is_refused(model, tmp_path, text, parts):
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with raises(SpecError, *parts):
        caches = read_caches(path)
        for name in expand(["caches"], caches):
            factory(model, name, caches=caches)


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_loads_and_calls_itself_what_the_table_says(name):
    assert load(name).name == name


def test_windows_of_one_pass_are_refused(model, tmp_path):
    with raises(SpecError, "100 tokens", 99, "--chunk", "--length"):
        run(model, tmp_path, schemes=["int8"], length=100, chunk=99)


def command(monkeypatch, model, options, code=0, name="eval"):
    asked = commands.loads(monkeypatch, lambda: model, tiny.tokenizer())
    return commands.run(f"{name} tiny --dtype fp32 {options}", code), asked


def test_the_command_s_defaults_calibrate_on_the_other_half_of_the_novel(monkeypatch, model, tmp_path):
    sizes = f"--windows 1 --length 200 --chunk 32 --out {tmp_path}"
    out, _ = command(monkeypatch, model, f"{sizes} --scheme int8_static --scheme int8")
    assert "note: int8_static" in out.stderr and "novel-end" in out.stderr
    data = results.read(tmp_path / "tiny-float32" / "fidelity" / "int8_static.json")
    assert data["info"]["calibration"]["text"] == "novel-end" and next(iter(data["items"])).startswith("novel-start@")
    out, _ = command(monkeypatch, model, f"{sizes} --scheme int8 --overwrite")
    assert "note:" not in out.stderr


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--windows 9000 --length 200 --chunk 64", "9000 200"),
        ("--length 8k --chunk 64", "8192 4096"),
        ("--tasks mmlu", "'mmlu' --data"),
        ("--tasks mmlu --data mmlu=none.jsonl", "--data mmlu=none.jsonl"),
        ("--tasks entities --contexts 4096", "4096 --contexts"),
        ("--length 200 --chunk 32", "int8.json chunk 32 64 --out --overwrite"),
    ],
)
def test_the_command_refuses_before_the_model_loads(monkeypatch, model, tmp_path, options, parts):
    settings = {"length": 200, "chunk": 64, "windows": "spread"}
    header = {"task": "fidelity", "scheme": "int8", "kind": "kvbits", "info": {}, "settings": settings}
    header["model"] = {"name": "tiny", "dtype": "float32", "parameters": 1}
    results.ResultFile(tmp_path / "tiny-float32" / "fidelity" / "int8.json", header, runs.record()).write(0.0, dict)
    out, loads = command(monkeypatch, model, f"--out {tmp_path} --scheme int8 {options}", code=2)
    assert mentions(out.stderr, *parts.split()) and not loads


def test_runs_at_once_lose_nothing_of_each_other(tmp_path):
    """Two runs that measure other caches write the same file of the base cache; one of them ends early."""
    path, header = tmp_path / "m" / "fidelity" / "16-bit.json", {"task": "fidelity", "scheme": "16-bit", "kind": "base"}
    header |= {"info": {}, "settings": {"length": 200}, "model": {"name": "m", "dtype": "float32", "parameters": 1}}
    first, second = (results.ResultFile(path, header, runs.record() | {"id": name}) for name in ("a", "b"))

    def add(file, *keys):
        for key in keys:
            file.add(key, {"value": file.run["id"]})
            file.write(1.0, lambda: {"items": len(file.items)})
        return {key: item["value"] for key, item in results.read(path)["items"].items()}

    assert add(first, "x", "y") == {"x": "a", "y": "a"}
    assert add(second, "x") == {"x": "b", "y": "a"}, "a run's own items stand, and the others stay"
    found = add(first, "z")
    assert found.keys() == {"x", "y", "z"} and results.read(path)["runs"].keys() == {"a"} | set(found.values())
    assert results.read(path)["summary"] == {"items": 3}
    first.drop("y")  # to be measured anew
    assert add(second, "w").keys() == {"x", "y", "z", "w"} and add(first, "v").keys() == {"x", "z", "w", "v"}
    assert add(second, "y")["y"] == "b" == add(first, "u")["y"], "measured anew by another process"
    before = results.read(path)["runs"]["b"]["seconds"]
    add(second, "t")
    add(first, "s")
    assert results.read(path)["runs"]["b"]["seconds"] == before + 1, "of another run the newest record stands"
    other = results.ResultFile(path, header | {"settings": {"length": 400}}, runs.record(), overwrite=True)
    assert add(other, "x").keys() == {"x"}
    with raises(SpecError, "length", 200, 400, "--out", "--overwrite"):
        add(first, "u")


def test_shares_of_a_run_make_what_the_whole_run_makes(model, tmp_path, monkeypatch):
    """The second share runs between two files that the first one writes."""
    sizes = {"tasks": ["copying"], "contexts": (60,), "repeats": 3}
    write, waiting = results.ResultFile.write, ["int8.json"]

    def interrupted(file, *how):
        if waiting and file.path.name == waiting[0]:
            waiting.clear()
            run(model, tmp_path / "shares", share=(2, 2), **sizes)
        write(file, *how)

    run(model, tmp_path / "whole", **sizes)
    monkeypatch.setattr(results.ResultFile, "write", interrupted)
    run(model, tmp_path / "shares", share=(1, 2), **sizes)
    for path in sorted((tmp_path / "whole").rglob("*.json")):
        whole, shares = (results.read(p) for p in (path, tmp_path / "shares" / path.relative_to(tmp_path / "whole")))
        assert shares["items"].keys() == whole["items"].keys() and len(shares["runs"]) == 2, path
        assert shares["summary"] == whole["summary"], path


def test_a_share_that_begins_while_another_writes_keeps_the_other_s_chains(model, tmp_path, monkeypatch):
    """The second share reads files of the base before, and of the others after the first share wrote them."""
    sizes = {"tasks": ["replay"], "schemes": ["int8"], "windows": 2, "length": 700, "chunk": 16}
    make, waiting = results.ResultFile.__init__, ["int8.json"]

    def interrupted(file, path, *how, **more):
        if waiting and path.name == waiting[0]:
            waiting.clear()
            run(model, tmp_path, share=(1, 2), **sizes)
        make(file, path, *how, **more)

    monkeypatch.setattr(results.ResultFile, "__init__", interrupted)
    run(model, tmp_path, share=(2, 2), **sizes)
    for path in tmp_path.rglob("*.json"):
        assert results.read(path)["items"].keys() == {"planning@0", "planning@1"}, path


def test_shares_measure_anew_what_is_of_no_chain(model, tmp_path, monkeypatch):
    sizes = {"tasks": ["replay"], "schemes": ["int8"], "windows": 2, "length": 700, "chunk": 16}
    run(model, tmp_path, **sizes)
    folder = tmp_path / "tiny-float32" / "replay"
    (folder / "32-bit.json").unlink()
    write, waiting = results.ResultFile.write, ["32-bit.json"]

    def interrupted(file, *how):
        if waiting and file.path.name == waiting[0]:
            waiting.clear()
            run(model, tmp_path, share=(2, 2), **sizes)
        write(file, *how)

    monkeypatch.setattr(results.ResultFile, "write", interrupted)
    run(model, tmp_path, share=(1, 2), **sizes)
    base, int8 = (results.read(folder / f"{name}.json") for name in ("32-bit", "int8"))
    assert {key: item["run"] for key, item in int8["items"].items()} == {k: i["run"] for k, i in base["items"].items()}
    assert len(base["items"]) == len(base["runs"]) == 2


def test_a_share_of_chains_writes_no_others(model, tmp_path, monkeypatch):
    written, write = [], replay.write
    monkeypatch.setattr(
        replay, "write", lambda m, f, starts, *how: written.append(len(starts)) or write(m, f, starts, *how)
    )
    run(model, tmp_path, tasks=["replay"], schemes=["int8"], windows=4, length=700, chunk=16, share=(2, 2))
    assert written == [2]


def test_an_empty_share_is_said(model, tmp_path):
    said = []
    evaluation = Evaluation(
        name="tiny",
        schemes=["int8"],
        tasks=["fidelity"],
        texts=TEXTS,
        out=tmp_path,
        options=Options(**OPTIONS, share=(3, 3)),
    )
    found = evaluation.run(model, tiny.tokenizer(), progress=False, say=said.append)
    assert found == {"fidelity": {"32-bit": {}, "int8": {}}} and not list(tmp_path.rglob("*.json"))
    assert any("3/3" in message for message in said)


def test_processes_that_begin_together_calibrate_once(model, tmp_path, monkeypatch):
    text, calls, said = Text("other", novel()[9000:20000]), [], []
    how = {"sample": Sample(2, 64), "directory": tmp_path}
    first = Calibrator(model, tiny.tokenizer(), text, **how)
    second = Calibrator(model, tiny.tokenizer(), text, say=said.append, **how)
    real = calibrator.calibrated

    def slow(*given, **more):
        calls.append(1)
        if len(calls) == 1:
            other.start()
            deadline = time.monotonic() + 30
            while not said and time.monotonic() < deadline:
                time.sleep(0.01)
        return real(*given, **more)

    other = threading.Thread(target=second.prepare, args=([factory_scheme(model)],))
    monkeypatch.setattr(calibrator, "calibrated", slow)
    first.prepare([factory_scheme(model)])
    other.join()
    assert len(calls) == 1 and second(factory_scheme(model)).id == first(factory_scheme(model)).id


@pytest.mark.parametrize("share", [(0, 2), (3, 2), (1, 0)])
def test_a_share_that_is_none_is_refused(share):
    with raises(SpecError, "share", f"{share[0]}/{share[1]}", "2/4"):
        Options(share=share)


@pytest.mark.parametrize(("task", "field"), [("mmlu", "subject"), ("gsm8k", "question")])
def test_data_of_another_benchmark_is_named(model, tmp_path, task, field):
    path = tmp_path / "humaneval.jsonl"
    path.write_text('{"task_id": "0", "prompt": "def f():"}\n')
    with raises(SpecError, f"--data {task}={path}", task, field):
        load(task)(Context(ModelRef("", model.config), tiny.tokenizer(), (), Options(shots=0, data={task: str(path)})))


def test_a_calibration_file_serves_the_scheme_it_was_made_for(monkeypatch, model, tmp_path):
    chosen = schemes.get("int8_static", head_dim=64)
    made = Calibrator(model, tiny.tokenizer(), Text("other", novel()[9000:20000]), sample=Sample(2, 64))(chosen)
    made.save(tmp_path / "scales.safetensors")
    sizes = f"--windows 1 --length 200 --chunk 32 --out {tmp_path / 'out'}"
    given = f"--calibration {tmp_path / 'scales.safetensors'}"
    out, _ = command(monkeypatch, model, f"{sizes} {given} --scheme int8_static,int8")
    assert "note:" not in out.stderr  # nothing else needs a text to calibrate on
    data, plain = (
        results.read(tmp_path / "out" / "tiny-float32" / "fidelity" / f"{name}.json")
        for name in ("int8_static", "int8")
    )
    assert data["info"]["calibration"]["id"] == data["settings"]["calibration"] == made.id
    assert next(iter(data["items"])).startswith("novel@") and "calibration" not in plain["settings"]
    (tmp_path / "t.txt").write_text(novel()[:30000])
    other = f"{sizes} --scheme int8_static --text novel --calibration-text {tmp_path / 't.txt'}"
    out, loads = command(monkeypatch, model, other, code=2)
    assert mentions(out.stderr, "calibration", "None", made.id, "--out", "--overwrite") and not loads
    out, loads = command(monkeypatch, model, f"{sizes} {given} --scheme int4", code=2)
    assert mentions(out.stderr, "'int4'", "calibration") and not loads


def test_texts_are_mixed_with_as_many_windows_of_each(model, tmp_path):
    parts = [Text(name, novel()[first : first + 9000]) for name, first in (("a", 0), ("b", 20_000), ("c", 40_000))]
    text, tokenizer = mixed(parts), tiny.tokenizer()
    drawn = [
        tokenizer.decode(row).replace(" ", "")
        for batch in windows_of(tokenizer, text, Sample(7, 64), batch_size=2)
        for row in batch
    ]
    plain = [tokenizer.decode(tokenizer(p.content)["input_ids"]).replace(" ", "") for p in parts]
    assert [sum(window in content for window in drawn) for content in plain] == [3, 2, 2]
    chosen = schemes.get("int8_static", head_dim=64)
    made = Calibrator(model, tokenizer, text, sample=Sample(7, 64))(chosen)
    assert (
        made.info["text"] == "a+b+c"
        and made.info["mixed_sha256"] == [p.sha256 for p in parts]
        and made.info["prompts"] == 7
    )
    with raises(SpecError, "--calibration-text", "'b'"):
        Calibrator(model, tokenizer, text, tests=(parts[1],))
    with raises(SpecError, "'c'", "--text", "--calibration"):
        Calibrator(model, tokenizer, None, tests=(parts[2],), given=[made])
    assert mixed(parts[:1]) is parts[0]
    for bad in ([], [parts[0], parts[0]]):
        with raises(SpecError, "texts"):
            mixed(bad)


@pytest.mark.parametrize("name", ["eval", "check"])
def test_a_calibration_of_the_text_that_is_evaluated_is_refused(monkeypatch, model, tmp_path, name):
    made = Calibrator(model, tiny.tokenizer(), Text("novel", novel()), sample=Sample(2, 64))(
        schemes.get("int8_static", head_dim=64)
    )
    made.save(tmp_path / "scales.safetensors")
    place = f"--out {tmp_path / 'out'}" if name == "eval" else "--text novel"
    options = f"{place} --scheme int8_static --calibration {tmp_path / 'scales.safetensors'}"
    out, loads = command(monkeypatch, model, options, code=2, name=name)
    assert mentions(out.stderr, "'novel'", "--text", "--calibration") and not loads


def test_a_run_that_goes_on_says_how_much_is_there(tmp_path):
    said = []
    how = {
        "name": "tiny",
        "tasks": ["fidelity"],
        "texts": (Text("t", novel()[:2000]),),
        "out": tmp_path,
    }
    model, tokenizer = tiny.model(), tiny.tokenizer()
    Evaluation(schemes=["int8"], options=Options(windows=1, length=64, chunk=32), **how).run(
        model, tokenizer, progress=False, say=said.append
    )
    assert not said
    Evaluation(schemes=["int8", "int4"], options=Options(windows=2, length=64, chunk=32), **how).run(
        model, tokenizer, progress=False, say=said.append
    )
    assert said == ["tiny: fidelity: 2 of 6 items are there already"]


def test_a_result_of_another_value_than_its_sum_says_is_refused_and_files_without_one_are_read(model, tmp_path):
    run(model, tmp_path, schemes=["int8"])
    path = tmp_path / "tiny-float32" / "fidelity" / "int8.json"
    data = results.read(path)
    text = path.read_text()
    path.write_text(text.replace('"kl_mean":0.', '"kl_mean":1.', 1))
    assert path.read_text() != text
    with raises(FileFormatError, path, '"sum"'):
        results.read(path)
    lines = text.rstrip("}\n").rstrip().splitlines()
    assert lines[-1].startswith(' "sum":')
    path.write_text("\n".join(lines[:-1]).rstrip(",") + "\n}\n")
    assert results.read(path) == data


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_figures_in_the_units_of_llama_cpp_beside_ours(model, tmp_path, monkeypatch, capsys, columns):
    from kvbits.cli import eval as command
    from kvbits.evaluate import shown

    monkeypatch.setenv("COLUMNS", str(columns))
    found = run(model, tmp_path, schemes=["int4"])
    command._print(found, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    row = found["fidelity"]["int4"]
    for figures in (("ppl", "kl_mean"), ("kl_median", "kl_p999", "top1_agreement", "dp_rms")):
        cells = shown.table("fidelity", found["fidelity"], only=figures)[1][1][1:]
        assert any(all(cell in line for cell in cells) for line in lines if "int4" in line)
    assert max(map(len, lines)) <= columns and row["dp_rms"] > 0
