"""benchmarks/study_tails.py: what it simulates is what caches do, token by token, and its tails are as long as it says."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from messages import raises
from transformers import DynamicCache

from kvbits import KVCache, schemes
from kvbits.calibrate import calibrate
from kvbits.errors import UnsupportedError
from kvbits.evaluate.fidelity import compare
from kvbits.evaluate.texts import novel
from kvbits.geometry import layer_geometries
from kvbits.spec import LayerGeometry

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import peers
import study_tails as study

LAYERS = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 6


@pytest.fixture(scope="module")
def texts():
    return torch.tensor(tiny.tokenizer()(novel()[:2400])["input_ids"]).view(-1, 600)


@pytest.fixture(scope="module")
def reading():
    return study.Reading(tiny.model(key_bias=2.0))


def scored(reading, text, of):
    with reading:
        reading.format = None
        reference = study.hidden(reading.model, text)
        reading.format = of
        found = study.score(reading.model, study.hidden(reading.model, text), reference, text, 0)
    reading.format = None
    return found


def ours(reading, texts, name):
    return study.preset(name, reading.model, lambda scheme: calibrate(reading.model, [*texts[:3, None]], scheme))


def alike(mine, other, rel=0.02):
    assert other.kl_mean > 1e-7 and mine.kl_mean == pytest.approx(other.kl_mean, rel=rel)
    assert torch.corrcoef(torch.tensor([mine.kl, other.kl]))[0, 1] > 0.98


@pytest.mark.night
@pytest.mark.parametrize("name", ["int8_centered", "klt2", "kivi4", "klt4"])
def test_presets_lose_what_they_lose_in_the_packed_cache(reading, texts, name):
    # the packed cache closes no page before one token more is there, and only whole ones
    model, scheme = reading.model, schemes.get(name)
    of = ours(reading, texts, name)
    calibration = calibrate(model, [*texts[:3, None]], scheme) if scheme.needs_calibration else None
    caches = {
        "16-bit": DynamicCache(config=model.config),
        # kernels round queries to 8 bits, too
        name: KVCache.for_model(model, name, calibration=calibration, backend="reference"),
    }
    packed = compare(model, caches, texts[3], chunk=1)[name]
    paged = dataclasses.replace(of, group=scheme.page_size, tail=of.tail + 1)
    alike(scored(reading, texts[3], paged), packed)


@pytest.mark.night
@pytest.mark.parametrize("name", ["q4_0_rotated", "q8_0_rotated", "int4_per_token_head"])
def test_peers_without_a_tail_lose_what_they_lose_as_caches(reading, texts, name):
    model = reading.model
    cache = peers.peer_factory(name, model).make(1, None)
    cached = compare(model, {"16-bit": DynamicCache(config=model.config), name: cache}, texts[3], chunk=1)[name]
    alike(scored(reading, texts[3], study.peer(name, layer_geometries(model.config))), cached)


def test_a_tail_as_long_as_the_text_loses_nothing_and_a_longer_one_less(reading, texts):
    for of in (ours(reading, texts, "klt2"), study.peer("q4_0_rotated", layer_geometries(reading.model.config))):
        none, some, whole = (scored(reading, texts[3], of.with_tail(n)).kl_mean for n in (0, 128, 600))
        assert none > some > 1e-6 > whole


def test_the_newest_tokens_are_raw_and_older_ones_are_not(reading):
    """By what one query reads: values of 1, rounded to 0."""
    q, ones = torch.zeros(2, 300, 8), torch.ones(1, 300, 8)
    for tail, group, first in ((0, 1, 0), (128, 1, 0), (128, 64, 4), (0, 64, 4)):
        of = study.Format(name="", kind="", given_back=None, bits=(), source="", tail=tail, group=group, first=first)
        far = ones, torch.zeros_like(ones).index_fill(1, torch.arange(first), 1.0)
        read = study.Reading._read(q, far, [(tail, ones, ones)], of, None)[0, :, 0]
        for row in (0, 127, 128, 200, 299):
            stored = row + 1
            packed = max(0, (stored - first - tail) // group * group)
            assert read[row] == pytest.approx((stored - packed) / stored, abs=1e-5)


def test_a_window_hides_what_is_older(reading):
    q, ones = torch.zeros(2, 300, 8), torch.arange(300.0)[None, :, None].expand(1, 300, 8).contiguous()
    read = study.Reading._read(q, (ones, ones), [], None, 16)[0, :, 0]
    assert read[299] == pytest.approx(sum(range(284, 300)) / 16, rel=1e-5) and read[3] == pytest.approx(1.5)


def test_bits_held_count_scales_raw_tokens_and_copies():
    of = study.peer("turboquant_4bit_nc", LAYERS)
    assert of.bits == (16, 16, 4 + 24 / 64, 4 + 24 / 64, 16, 16)
    mean = (4 * 16 + 2 * (4 + 24 / 64)) / 6
    assert of.held_bits(LAYERS, 8192) == pytest.approx(mean)
    assert of.with_tail(512).held_bits(LAYERS, 8192) == pytest.approx(16 / 16 + mean * 15 / 16)
    assert of.with_tail(8192).held_bits(LAYERS, 8192) == 16
    narrow = [dataclasses.replace(g, sliding_window=512) for g in LAYERS]
    assert of.with_tail(512).held_bits(narrow, 8192) == 16
    paged = dataclasses.replace(of, group=65, first=4, copied=448, copy_bits=(4.0,) * 6)
    held = (36 * 16 + 448 * 4 + (8192 - 36) * mean) / 8192
    assert paged.held_bits(LAYERS, 8192) == pytest.approx(held)
    assert {tail: f.copied for tail, f in study.tails_of(paged, (0, 128)).items()} == {0: 0, 128: 0, "own": 448}
    assert list(study.tails_of(of, (0, 128))) == [0, 128]


def test_heads_that_a_recipe_does_not_store_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    monkeypatch.setattr(study.kvbits, "load_model", lambda *a, **k: (tiny.model(head_dim=40), tiny.tokenizer()))
    monkeypatch.setattr(
        sys, "argv", f"study tiny --length 40 --tails 0 --only fp8_unscaled,nvfp4,{study.OSCAR}".split()
    )
    sys.modules["run_files"].this_run.cache_clear()
    study.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = found["runs"].values()
    assert [one.split(":")[0] for one in run["facts"]["left_out"]] == ["nvfp4", study.OSCAR]
    assert all("not 40" in one for one in run["facts"]["left_out"]) and list(run["facts"]["sources"]) == [
        "fp8_unscaled"
    ]


def test_kvarn_holds_what_its_authors_say():
    assert sum(peers.kvarn_bits(128, 128)) / 2 == 3.375
    of = study.peer(study.KVARN, (LayerGeometry(num_kv_heads=2, head_dim=128),))
    assert of.first == of.group == 128 and of.bits == (3.375,)


def test_it_runs_in_one_command_and_stops_in_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    monkeypatch.setattr(study.kvbits, "load_model", lambda *a, **k: (tiny.model(), tiny.tokenizer()))
    names = ["kivi2", "nvfp4", study.KVARN, study.OSCAR]
    words = (
        f"study tiny --length 700 --windows 2 --tails 128,0 --only {','.join(names)} --out {tmp_path / 'found.json'}"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    sys.modules["run_files"].this_run.cache_clear()
    study.main()
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(row["format"], row["tail"]): row for row in found["rows"]}
    assert [*rows] == [(n, t) for t in (128, 0) for n in names] + [(study.OSCAR, "own")]
    for (_, tail), row in rows.items():
        assert row["tokens"] == 2 * 699 and 0 <= row["kl_median"] < row["kl_p99"] <= row["kl_p999"] <= row["kl_max"]
        assert row["kl_mean"] == pytest.approx(sum(row["kl_windows"]) / 2, rel=1e-4)
        assert row["dp_rms"] > 0 and row["held_bits"] > row["stored_bits"] + 2 * (tail == 128)
    (run,) = found["runs"].values()
    assert run["facts"]["length"] == 700 and set(run["facts"]["sources"]) == set(names)
    monkeypatch.setattr(sys, "argv", [*words.split(), "--seconds", "0"])
    sys.modules["run_files"].this_run.cache_clear()
    study.main()
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == len(rows)
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["study", "tiny", "--only", "kivi2,nothing"])
        study.main()
    assert "nothing" in capsys.readouterr().err


def test_a_run_that_was_killed_keeps_its_rows_and_continues(tmp_path, monkeypatch):
    run_files = sys.modules["run_files"]
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    monkeypatch.setenv("KVBITS_COMMIT", "0123abcdef")
    monkeypatch.setattr(study.kvbits, "load_model", lambda *a, **k: (tiny.model(), tiny.tokenizer()))
    out, measured = tmp_path / "found.json", study.measured
    words = f"study tiny --length 40 --tails 8,0 --only q8_0_rotated,fp8_unscaled --out {out}".split()

    def rows(argv, most):
        """Return rows of the file after a run that is killed in its row number `most`."""
        left = iter(range(most))

        def killed_in_time(*args):
            next(left)  # raises, as a kill does, outside what anybody catches
            return measured(*args)

        monkeypatch.setattr(study, "measured", killed_in_time)
        monkeypatch.setattr(sys, "argv", argv)
        run_files.this_run.cache_clear()
        with contextlib.suppress(StopIteration):
            study.main()
        return [(row["format"], row["tail"]) for row in run_files.read(out)["rows"]]

    every = [(name, tail) for tail in (8, 0) for name in ("q8_0_rotated", "fp8_unscaled")]
    assert rows(words, 2) == every[:2]
    assert rows(words, 9) == rows(words, 0) == every
    assert rows([*words, "--dtype", "bfloat16"], 9) == every * 2, "rows of other facts are measured"
    monkeypatch.setenv("KVBITS_COMMIT", "456789abcd-dirty")
    assert rows(words, 9) == every * 3
    assert rows(words, 9) == every * 4, "sources that differ from their commit may differ from each other"


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_attention_that_the_study_lacks_is_refused(given):
    model = tiny.model()
    reading, x = study.Reading(model), torch.zeros(1, 2, 3, 8)
    with raises(UnsupportedError, *given):
        reading(model.model.layers[0].self_attn, x, x, x, None, scaling=1.0, **given)
