"""`kvbits fit`: bits where a model needs them, never worse than the best preset, planned bytes are held bytes, and a
file that fits one model only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
from pathlib import Path

import pytest
import tiny
import torch
from commands import error, run, run_json

from kvbits import KVCache, planner, runs, schemes
from kvbits.errors import FileFormatError, SpecError
from kvbits.evaluate.allocate import Curve, Option, hull, tempered, walk
from kvbits.evaluate.fit import Goal, bound_to, fit, require_room, widths
from kvbits.evaluate.results import ResultFile
from kvbits.evaluate.sensitivity import Bench, fill_in, formats
from kvbits.evaluate.texts import novel
from kvbits.geometry import layer_geometries
from kvbits.integrations.identity import identity
from kvbits.integrations.vllm.scheme_file import _layer_formats
from kvbits.spec import CacheSpec, FittedScheme, LayerGeometry, Override, PerChannel, QuantSpec, Scheme

RAW = QuantSpec.raw()
INT4, INT2 = (QuantSpec(format=f"int{b}", granularity=PerChannel(), symmetric=False) for b in (4, 2))
MODELS = Path(os.environ.get("KVBITS_MODELS", Path.home() / "kv-models"))
TEXT = torch.tensor(tiny.tokenizer()(novel()[:4096])["input_ids"])
PROBES, WHOLES = TEXT[:1024].view(2, 512), TEXT[2048:3072].view(2, 512)


def uneven():
    """A model whose second layer hardly matters: what its attention adds is made small."""
    model = tiny.model()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(0.01)
    return model


def state(path=None, **settings):
    facts = {"name": "tiny", "dtype": "float32", "parameters": 1}
    header = {"task": "fit", "scheme": "plain", "kind": "sensitivity", "info": {}, "settings": settings, "model": facts}
    return ResultFile(path, header, runs.record())


def bench_of(model, path=None):
    return Bench(model, PROBES, WHOLES, None, state(path, text="novel"))


# -- arithmetic -----------------------------------------------------------------------------------------------------


def options(seed: int, count: int) -> list[Option]:
    draw = random.Random(seed)
    return [Option(RAW, RAW, draw.randrange(10, 100), draw.random()) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_no_mix_of_options_lies_below_the_hull(seed):
    given = options(seed, 9)
    found = hull(given)
    assert found[0].nbytes == min(o.nbytes for o in given) and found[-1].kl == min(o.kl for o in given)
    for o in given:
        for a, b in itertools.pairwise(found):
            if a.nbytes <= o.nbytes <= b.nbytes:
                assert o.kl >= a.kl + (o.nbytes - a.nbytes) / (b.nbytes - a.nbytes) * (b.kl - a.kl) - 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_is_the_best_of_all_choices_of_its_bytes(seed):
    layers = [options(100 * seed + i, 4) for i in range(4)]
    for step in walk(layers):
        best = min(sum(o.kl for o in c) for c in itertools.product(*layers) if sum(o.nbytes for o in c) <= step.nbytes)
        assert step.kl == pytest.approx(best, abs=1e-9)
        assert step.nbytes == sum(o.nbytes for o in step.options)
    limit = walk(layers)[0].nbytes + 40
    assert all(s.nbytes <= limit for s in walk(layers, limit))
    with pytest.raises(SpecError, match="even in the fewest bits this cache takes .* more than the"):
        walk(layers, walk(layers)[0].nbytes - 1)


def test_tempering_draws_towards_the_mean_and_keeps_the_order():
    kl = [1e-5, 1e-3, 1e-1]
    assert tempered(kl, 1.0) == pytest.approx(kl)
    assert tempered(kl, 0.0) == pytest.approx([1e-3] * 3)
    mild = tempered(kl, 0.5)
    assert mild == sorted(mild) and mild[0] > kl[0] and mild[2] < kl[2]


def test_widths_that_were_not_measured_lie_between_those_that_were():
    found = fill_in({4: 1e-3, 2: 1e-1}, (8, 4, 3, 2, 16))
    assert found[4] == pytest.approx(1e-3) and found[2] == pytest.approx(1e-1) and found[16] == 0
    assert 1e-3 < found[3] < 1e-1
    assert found[8] == pytest.approx(1e-3 * (15 / 255) ** 2)  # the step, squared


def test_a_curve_goes_through_its_points_and_on_beside_them():
    curve = Curve([(0.01, 0.02), (0.1, 0.4)])
    assert curve(0.01) == pytest.approx(0.02) and curve(0.1) == pytest.approx(0.4)
    assert 0.02 < curve(0.03) < 0.4
    assert curve(0.001) == pytest.approx(0.002) and curve(1.0) == pytest.approx(4.0) and curve(0.0) == 0.0


# -- fitting --------------------------------------------------------------------------------------------------------


def test_bits_go_where_they_are_needed_and_bytes_are_planned_to_the_byte(tmp_path):
    model = uneven()
    layers = layer_geometries(model.config)
    bench = bench_of(model, tmp_path / "state.json")
    budget = schemes.get("kivi4", head_dim=64)
    limit = CacheSpec(scheme=budget, layers=layers).nbytes(512)
    found = fit(
        bench, formats(layers, False), Goal(layers=layers, context=512, memory_bytes=limit), name="mine", progress=False
    )
    first, second = (sum(widths(found.fitted.scheme, 2, side)[layer] for side in ("key", "value")) for layer in (0, 1))
    assert first > second
    assert found.fitted.nbytes <= limit
    assert found.preset is not None and found.chosen.kl <= found.preset.kl and found.context >= 512
    spec = CacheSpec(scheme=found.chosen.scheme, layers=layers, raw_dtype="float32")
    held = KVCache.for_model(model, found.chosen.scheme, max_tokens=512)
    assert held.nbytes == spec.nbytes(512)
    planned = planner.plan(layers, [found.chosen.scheme], context=512, memory_bytes=limit).rows[0]
    assert planned.total_bytes == found.chosen.nbytes and planned.max_context == found.context

    again = bench_of(model, tmp_path / "state.json")
    again._probe = again.model = None  # a second run measures nothing
    assert fit(again, formats(layers, False), found.goal, name="mine", progress=False).to_dict() == found.to_dict()
    with pytest.raises(SpecError, match=r"text is 'other' here and 'novel' in the file"):
        state(tmp_path / "state.json", text="other")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"state\.json is not a result"):
        state(tmp_path / "state.json", text="novel")


def test_a_quality_makes_the_bytes_or_the_context():
    model = uneven()
    layers = layer_geometries(model.config)
    bench, known = bench_of(model), formats(layers, False)
    loose = fit(bench, known, Goal(layers=layers, context=512, max_kl=0.05), name="mine", progress=False)
    tight = fit(bench, known, Goal(layers=layers, context=512, max_kl=0.0005), name="mine", progress=False)
    assert loose.reached and tight.reached and loose.chosen.nbytes < tight.chosen.nbytes and loose.context == 512
    longest = fit(bench, known, Goal(layers=layers, memory_bytes=10**6, max_kl=0.05), name="mine", progress=False)
    spec = CacheSpec(scheme=longest.chosen.scheme, layers=layers)
    assert spec.nbytes(longest.context) <= 10**6 < spec.nbytes(longest.context + 1)


def test_a_goal_needs_two_of_three():
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),)
    with pytest.raises(
        SpecError, match="two of memory, context and a largest KL make the third, and context alone was given"
    ):
        Goal(layers=layers, context=512)
    with pytest.raises(SpecError, match="must be above 0"):
        Goal(layers=layers, context=512, max_kl=0.0)
    model = tiny.model()
    with pytest.raises(
        SpecError, match=r"even in the fewest bits .* give .* a context of at most \d+ tokens, or --calibrate"
    ):
        fit(
            bench_of(model),
            formats(layers * 2, False),
            Goal(layers=layers * 2, context=8192, memory_bytes=200_000),
            name="mine",
            progress=False,
        )


def test_a_fit_of_formats_that_tokens_have_by_themselves_is_one_that_vllm_serves(tmp_path):
    model = uneven()
    layers = layer_geometries(model.config)
    limit = CacheSpec(scheme=schemes.get("int8k_int4v", head_dim=64), layers=layers).nbytes(512)
    goal = Goal(layers=layers, context=512, memory_bytes=limit)
    found = fit(bench_of(model), formats(layers, False, token_local=True), goal, name="mine", progress=False)
    assert found.chosen.nbytes <= limit and all(
        x.token_local for i in range(len(layers)) for x in found.chosen.scheme.for_layer(i, len(layers))
    )
    fitted = bound_to(found.chosen.scheme, layers, name="mine", weights="", model="tiny", description="")
    (tmp_path / "mine.json").write_text(fitted.to_json())
    served = _layer_formats(str(tmp_path / "mine.json"), layers)
    assert [(f.scheme.key, f.scheme.value) for f in served if f] == [
        fitted.for_layer(i, len(layers)) for i in range(len(layers))
    ]
    both = formats(layers, True, token_local=True)
    assert both.calibrated and all(x.token_local for x in (*both.key.values(), *both.value.values()))


def test_a_memory_that_no_bits_fit_is_refused_before_anything_is_measured():
    layers = tuple(LayerGeometry(num_kv_heads=2, head_dim=64) for _ in range(3))
    with pytest.raises(
        SpecError,
        match=r"1.00 kB do not hold 2 sequences of 8,192 tokens: the fewest bits take .* MB; give more memory",
    ):
        require_room(Goal(layers=layers, context=8192, batch=2, memory_bytes=1000), formats(layers, False))
    require_room(Goal(layers=layers, context=8192, batch=2, memory_bytes=10**9), formats(layers, False))
    require_room(Goal(layers=layers, memory_bytes=1000, max_kl=0.1), formats(layers, False))


def test_formats_that_need_a_basis_are_fitted_too():
    from kvbits.calibrate import calibrate, prompts_from_text

    model = uneven()
    layers = layer_geometries(model.config)
    bases = calibrate(model, prompts_from_text(tiny.tokenizer(), novel()[:20_000], num_prompts=4, length=512), "klt4")
    bench = Bench(model, PROBES, WHOLES, bases, state())
    for name in ("klt4", "klt2"):  # steps are those of the widths, whatever the bases were made for
        own = calibrate(
            model, prompts_from_text(tiny.tokenizer(), novel()[:20_000], num_prompts=4, length=512), name
        ).static
        for a, b in zip(bench.calibration(schemes.get(name, head_dim=64)).static, own, strict=True):
            torch.testing.assert_close(a["k_basis"], b["k_basis"], rtol=0, atol=2e-3 * float(b["k_basis"].abs().max()))
    limit = CacheSpec(scheme=schemes.get("klt3", head_dim=64), layers=layers).nbytes(8192)
    found = fit(
        bench, formats(layers, True), Goal(layers=layers, context=8192, memory_bytes=limit), name="mine", progress=False
    )
    assert found.preset is not None and found.chosen.kl <= found.preset.kl and found.fitted.scheme.needs_calibration
    needed = bench.calibration(found.fitted.scheme)
    assert KVCache.for_model(model, found.fitted.scheme, calibration=needed).nbytes == 0


# -- the file -------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, model, **changes) -> Path:
    layers = layer_geometries(model.config)
    scheme = Scheme(name="x", key=INT4, value=INT4, overrides=(Override(layers=(1,), key=INT2, value=INT4),))
    fitted = bound_to(scheme, layers, name="mine", weights=identity(model), model="tiny", description="")
    path = tmp_path / "mine.json"
    data = json.loads(fitted.to_json())
    data.pop("sum")  # as the message of an edited file says
    for place, value in changes.items():
        data[place] = value
    path.write_text(json.dumps(data))
    return path


def test_every_door_takes_the_file_and_stores_the_plain_scheme(tmp_path):
    model = tiny.model()
    path = str(written(tmp_path, model))
    cache = KVCache.for_model(model, path)
    fitted = schemes.read(path)
    assert isinstance(fitted, FittedScheme) and fitted == FittedScheme.from_json(fitted.to_json())
    assert type(cache.pages.spec.scheme) is Scheme and cache.pages.spec.scheme == fitted.plain
    assert (
        KVCache.for_model(model, fitted).pages.spec.format_id
        == KVCache.for_model(model, fitted.plain).pages.spec.format_id
    )
    assert schemes.for_layers(path, fitted.layers) == fitted.plain
    shared = planner.rank(fitted.layers, 2)
    assert planner.plan(shared, [fitted], context=512).rows[0].scheme == "mine"


def test_another_model_is_refused_with_what_differs(tmp_path):
    model = tiny.model()
    fitted = schemes.read(str(written(tmp_path, model)))
    other = tuple(dataclasses.replace(g, head_dim=32) for g in fitted.layers)
    for layers, why in (
        (fitted.layers * 2, "it has 2 layers, this one 4"),
        (other, "layer 0 has head_dim=64 there and 32 here"),
        (
            tuple(dataclasses.replace(g, num_kv_heads=3) for g in fitted.layers),
            "layer 0 has 2 kv heads there and 3 here",
        ),
        (
            tuple(dataclasses.replace(g, sliding_window=128) for g in fitted.layers),
            "layer 0 has sliding_window=None there and 128 here",
        ),
    ):
        with pytest.raises(SpecError, match=f"'mine' was fitted to tiny: {why}; run `kvbits fit` on this model"):
            CacheSpec(scheme=fitted, layers=layers)
    with pytest.raises(
        SpecError, match=r"'mine' was fitted to other weights \(fingerprint .*, tiny\) than this model's"
    ):
        KVCache.for_model(tiny.model(seed=1), fitted)
    KVCache.for_model(tiny.model(seed=1), fitted.plain)


def test_a_file_edited_by_hand_is_refused_with_what_is_wrong(tmp_path):
    model = tiny.model()
    spec = json.loads(schemes.get("int4").to_json())["key"]
    override = {"type": "Override", "layers": [7], "key": spec, "value": spec}
    for changes, why in (
        ({"key": spec | {"format": "int5"}}, "unknown number format 'int5'; known: int8"),
        ({"overrides": [override]}, "override for layer 7, but the model has 2 layers"),
        ({"page_size": 63}, "page_size=63 must be a multiple of 32"),
        ({"layers": []}, "must be the geometry of each layer"),
    ):
        with pytest.raises(SpecError, match=rf"cannot read a scheme from .*mine.json: .*{why}"):
            schemes.read(str(written(tmp_path, model, **changes)))
    wide = spec | {"granularity": {"type": "PerGroup", "size": 48}}
    with pytest.raises(SpecError, match="head_dim=64 is not divisible by group_size=48"):
        KVCache.for_model(model, str(written(tmp_path, model, key=wide)))


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_other_commands_take(tmp_path):
    folder = tmp_path / "tiny"
    uneven().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(novel()[:8192])
    out = tmp_path / "mine.json"
    command = f"fit {folder} --memory 400kB --context 1k --windows 1 --text {text} --out"
    first = run(f"{command} {out}").output
    assert "1,024 tokens x 1" in first and "keys " in first and str(out) in first
    data = run_json(f"{command} {out}")  # goes on from what was measured
    assert data["chosen"]["nbytes"] <= 400_000 and len(data["widths"]["key"]) == 2
    planned = run_json(f"plan {folder} --context 1k --scheme {out}")
    assert planned["rows"][0]["total_bytes"] == data["chosen"]["nbytes"]
    assert "not reached" in run(f"{command} {out} --max-kl 1e-9", code=1).output
    error(f"{command} {tmp_path / 'mine.txt'}", "mine.txt", ".json")


@pytest.mark.skipif(
    not (MODELS / "smollm2-135m-instruct").exists(), reason="needs SmolLM2-135M-Instruct under KVBITS_MODELS"
)
def test_a_layer_of_smollm2_alone_costs_more_in_fewer_bits():
    from kvbits.evaluate.texts import novel_start, windows
    from kvbits.integrations.models import load_model

    model, tokenizer = load_model(str(MODELS / "smollm2-135m-instruct"), dtype="float32")
    layers = layer_geometries(model.config)
    known = formats(layers, False)
    bench = Bench(model, windows(tokenizer, novel_start(), count=1, length=384), PROBES, None, state())
    four, two = (bench.alone(0, "key", b, known.key[b]) for b in (4, 2))
    assert 0 < four < two
