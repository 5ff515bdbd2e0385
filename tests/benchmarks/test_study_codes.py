"""benchmarks/study_codes.py: what it simulates is what the packed cache does, token by token."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from transformers import DynamicCache

from kvbits import KVCache, schemes
from kvbits.calibrate import calibrate
from kvbits.evaluate.fidelity import compare
from kvbits.evaluate.texts import novel

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import study_codes as study
import table_codes


@pytest.fixture(scope="module")
def simulation():
    model = tiny.model(key_bias=2.0)
    texts = torch.tensor(tiny.tokenizer()(novel()[:2400])["input_ids"]).view(-1, 600)
    found = study.Simulation(model)
    with found:
        found.learns = True
        for text in texts[:3]:
            study.hidden(model, text)
        found.learns = False
    return found, texts


def scored(simulation, text, variant):
    with simulation:
        simulation.variant = None
        reference = study.hidden(simulation.model, text)
        simulation.variant = variant
        return study.score(simulation.model, study.hidden(simulation.model, text), reference, text, 0)


def test_without_a_variant_it_is_the_models_own_attention(simulation):
    found, texts = simulation
    with found:
        found.variant = None
        simulated = study.hidden(found.model, texts[3])
    assert torch.allclose(simulated, study.hidden(found.model, texts[3]), atol=1e-4)


@pytest.mark.night
@pytest.mark.parametrize("name", ["klt3", "klt4"])
def test_codes_lose_what_they_lose_in_the_packed_cache(simulation, name):
    found, texts = simulation
    calibration = calibrate(found.model, [*texts[:3, None]], name)
    caches = {
        "16-bit": DynamicCache(config=found.model.config),
        # variants without a tail have 128 raw tokens and no copies
        name: KVCache.for_model(
            found.model, schemes.get(name, residual_length=128, copies=()), calibration=calibration
        ),
    }
    packed = compare(found.model, caches, texts[3], chunk=1)[name]
    mine = scored(found, texts[3], study.variants(int(name[-1]))[f"{name}-T-uu-M16-F512"])
    assert packed.kl_mean > 1e-6
    assert mine.kl_mean == pytest.approx(packed.kl_mean, rel=0.02)
    assert torch.corrcoef(torch.tensor([mine.kl, packed.kl]))[0, 1] > 0.98


def test_each_change_has_its_effect(simulation):
    found, texts = simulation

    def kl(bits, *names):
        known = study.variants(bits)
        return [scored(found, texts[3], known[f"klt{bits}{n}"]).kl_mean for n in names]

    plain, fitted, searched = kl(4, "", "-T-ff", "-T-uu-s3")
    assert fitted < 0.85 * plain and searched < 0.95 * plain
    plain, graded, *others = kl(2, "", "-G4", "-M", "-M16", "-F512")
    assert graded < 0.5 * plain
    assert all(0.8 < of / plain < 1.3 and of != plain for of in others)


def test_what_a_variant_holds_counts_each_token_once():
    plain, graded = (study.variants(2)[name] for name in ("klt2", "klt2-G4"))
    assert plain.far.stored_bits(64) == 2.375
    assert plain.held_bits(64, 8192) == pytest.approx((132 * 16 + 8060 * 2.375) / 8192)
    assert graded.held_bits(64, 8192) - plain.held_bits(64, 8192) == pytest.approx(
        (448 * 4.375 - 64 * 16 - 384 * 2.375) / 8192
    )
    assert dataclasses.replace(plain, raw=8192).held_bits(64, 4096) == 16


def test_it_runs_in_one_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study.kvbits, "load_model", lambda *a, **k: (tiny.model(), tiny.tokenizer()))
    words = "study tiny --length 400 --windows 2 --first 100 --calibration-windows 1 --only klt2,klt2-T-uf-G4-re"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--out", str(tmp_path / "found.json")])
    sys.modules["run_files"].this_run.cache_clear()
    study.main()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["variant"], row["window"], row["num_tokens"]) for row in rows] == [
        (name, window, 299) for name in ("klt2", "klt2-T-uf-G4-re") for window in (0, 1)
    ]
    assert all(row["kl_mean"] > 0 for row in rows) and len(capsys.readouterr().out.splitlines()) == 3


def test_shorter_runs_lose_less_by_the_moments_and_longer_frames_more(simulation):
    of = {(row["bits"], row["frame"], row["run"]): row["share"] for row in study.expected(simulation[0])}
    for bits in (2, 3, 4):
        assert of[bits, 256, 64] == 1 and of[bits, 256, 1] < of[bits, 256, 16] < of[bits, 256, 32] < 1
        assert of[bits, 512, 64] > 1.01


def test_the_table_has_each_variants_share_of_the_same_windows():
    def row(variant, window, kl):
        more = {"run": "a", "held_bits": 2.5, "kl_max": kl * 10, "top1": 0.9}
        return more | {"variant": variant, "window": window, "kl_mean": kl}

    rows = [row("klt2", 0, 0.02), row("klt2", 1, 0.04), row("klt2-M", 0, 0.01), row("klt2-M", 1, 0.03)]
    rows += [row("klt2-F512", 0, 0.02), row("klt3-M", 0, 0.02)]  # a window, or klt3 itself, was not measured
    data = {"runs": {"a": {"id": "a", "utc": "2026-11-27T08:57:53Z"}}, "rows": rows}
    assert table_codes.lines(data) == [
        ["`klt2`", "2.500", "0.03000", "1.000", "1.00 to 1.00", "0.40", "90.00%"],
        ["`klt2-M`", "2.500", "0.02000", "0.667", "0.50 to 0.75", "0.30", "90.00%"],
    ]
