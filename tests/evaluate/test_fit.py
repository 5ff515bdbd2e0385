"""`kvbits fit`: bits where a model needs them, in the bytes of a preset, planned bytes are held bytes, and a file that
fits one model only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from commands import error, run, run_json
from messages import raises
from nightly import at_night

from kvbits import KVCache, planner, runs, schemes
from kvbits.calibrate import calibrate
from kvbits.errors import FileFormatError, SpecError, UnsupportedError
from kvbits.evaluate.allocate import Option, dealt, hull, walk
from kvbits.evaluate.fit import Bench, Goal, _Search, base_of, bound_to, family, fit, near, require_room, widths
from kvbits.evaluate.results import ResultFile
from kvbits.evaluate.sensitivity import Sensitivity, _Layer, errors, sensitivities
from kvbits.evaluate.texts import novel
from kvbits.geometry import layer_geometries
from kvbits.integrations.identity import identity
from kvbits.integrations.vllm.scheme_file import _layer_formats
from kvbits.quant.basis import completed, out_of_basis
from kvbits.spec import CacheSpec, FittedScheme, LayerGeometry, Override, PerChannel, QuantSpec, Rotary, Scheme
from kvbits.spec.bands import DISTORTION

RAW = QuantSpec.raw()
INT4, INT2 = (QuantSpec(format=f"int{b}", granularity=PerChannel(), symmetric=False) for b in (4, 2))
TEXT = torch.tensor(tiny.tokenizer()(novel()[:8192])["input_ids"])
PROBES, WHOLES = TEXT[:2048].view(2, 1024), TEXT[4096:5632].view(2, 768)
LEARNED = TEXT[5632:7680].view(2, 1024)


def uneven():
    """A model whose second layer hardly matters: what its attention adds is made small."""
    model = tiny.model()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(0.01)
    return model


def state(path=None, **settings):
    facts = {"name": "tiny", "dtype": "float32", "parameters": 1}
    header = {"task": "fit", "scheme": "klt4", "kind": "sensitivity", "info": {}, "settings": settings, "model": facts}
    return ResultFile(path, header, runs.record())


def bench_of(model, path=None):
    bases = (
        calibrate(model, list(LEARNED), "klt4") if family(layer_geometries(model.config), model)[0] == "klt2" else None
    )
    return Bench(model, WHOLES, bases, state(path, text="novel"))


def known_of(bench, base):
    return bench.sensitivities(
        f"beyond {near(base)}",
        lambda: sensitivities(
            bench.model, list(PROBES), base, bench.calibration(base), near=near(base), progress=False
        ),
    )


def fitted(bench, goal):
    base = base_of(bench, goal, family(goal.layers, bench.model))
    return fit(bench, base, goal, known_of(bench, base), name="mine", progress=False)


@pytest.fixture(scope="module")
def bench():
    return bench_of(uneven())


@pytest.fixture(scope="module")
def layers(bench):
    return layer_geometries(bench.model.config)


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
    least = walk(layers)[0].nbytes
    with raises(SpecError, f"{least} B", f"{least - 1} B"):
        walk(layers, least - 1)


def test_bits_are_dealt_to_bands_with_the_least_error():
    shares = (0.8, 0.12, 0.05, 0.03)
    for bits in (2, 5, 8, 11):
        found = dealt(shares, bits, DISTORTION.__getitem__)
        every = [c for c in itertools.product(range(7), repeat=4) if sum(c) == bits]
        best = min(sum(s * DISTORTION[b] for s, b in zip(shares, c, strict=True)) for c in every)
        assert sum(found) == bits
        assert sum(s * DISTORTION[b] for s, b in zip(shares, found, strict=True)) == pytest.approx(best)
    wide = dealt(shares, 22, lambda b: 0.25**b)
    assert sum(wide) == 22 and max(wide) == 8 and 7 not in wide


# -- sensitivities --------------------------------------------------------------------------------------------------

SHAPES = {
    "plain": (LayerGeometry(num_kv_heads=2, head_dim=32), {}),
    "window": (LayerGeometry(num_kv_heads=2, head_dim=32, sliding_window=150), {}),
    "chunks": (LayerGeometry(num_kv_heads=2, head_dim=32, sliding_window=160, chunked=True), {}),
    "softcap": (LayerGeometry(num_kv_heads=2, head_dim=32), {"softcap": 2.0, "scaling": 0.5}),
    "sinks": (LayerGeometry(num_kv_heads=2, head_dim=32), {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
}


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_what_is_read_from_codes(name):
    geometry, how = SHAPES[name]
    tokens, sinks, newest, page = 320, 4, 32, 64
    q, k, v, slope = (
        drawn(*s, seed=i) for i, s in enumerate(((4, tokens, 32), (2, tokens, 32), (2, tokens, 32), (tokens, 4, 32)))
    )
    layer = _Layer(geometry, None, None, sinks, newest, page)
    layer.add(q, k, v, slope, how)
    found = layer.result()

    stored_k, stored_v = (x.double().clone().requires_grad_() for x in (k, v))
    total = torch.zeros((), dtype=torch.float64)
    for t in range(tokens):
        for head in range(4):
            kv = head // 2
            first = 0 if geometry.sliding_window is None else max(0, t - geometry.sliding_window + 1)
            if geometry.chunked:
                first = t // geometry.sliding_window * geometry.sliding_window
            packed = sinks + max(0, t - newest - sinks) // page * page  # the first token of no closed page
            split = min(max(packed, first), t + 1)
            begin = min(max(first, sinks), split)
            keys = torch.cat([k[kv, first:begin].double(), stored_k[kv, begin:split], k[kv, split : t + 1].double()])
            values = torch.cat([v[kv, first:begin].double(), stored_v[kv, begin:split], v[kv, split : t + 1].double()])
            s = keys @ q[head, t].double() * how.get("scaling", 32**-0.5)
            if "softcap" in how:
                s = how["softcap"] * torch.tanh(s / how["softcap"])
            if "s_aux" in how:
                s = torch.cat([s, how["s_aux"][head : head + 1].double()])
            p = torch.softmax(s, 0)[: len(keys)]
            total = total + (p @ values) @ slope[t, head].double()
    total.backward()
    centred = (k - k.mean(1, keepdim=True)).square().mean(-1)
    key = 0.5 * (stored_k.grad.square().sum(-1) * centred).sum() / tokens
    value = 0.5 * (stored_v.grad.square().sum(-1) * v.square().mean(-1)).sum() / tokens
    assert key > 0 and value > 0
    assert found.key == pytest.approx(key.item(), rel=1e-3) and found.value == pytest.approx(value.item(), rel=1e-3)


def test_bands_are_weighed_in_the_basis_that_keys_are_stored_in(bench):
    base = schemes.get("klt4", head_dim=64)
    model = bench.model
    static = bench.calibration(base).static[0]
    rotary = Rotary(inv_freq=tuple(model.model.rotary_emb.inv_freq.tolist()))
    geometry = LayerGeometry(num_kv_heads=2, head_dim=64, rotary=rotary)
    layer = _Layer(geometry, base.key, static, 4, 64, 64)
    k, slope = drawn(2, 128, 64, seed=1), drawn(2, 128, 64, seed=2)
    layer._add_bands(k, slope)
    whole = completed(static, torch.tensor(rotary.frequencies(64)))
    starts = np.array([0, 64])
    # a step along a channel of the basis changes scores by the gradient times what it is as a key
    y = torch.zeros(2, 2, 64, 64, requires_grad=True)
    keys = out_of_basis(y, base.key, whole, starts)
    order = torch.tensor(rotary.order(64))
    (keys * slope[..., order].unflatten(1, (2, 64)).transpose(0, 1)).sum().backward()
    assert len(layer.bands) == 4
    from kvbits.quant.basis import into_basis
    from kvbits.quant.scales import steps

    step = steps(base.key, 64)
    stored = into_basis(k[..., order].unflatten(1, (2, 64)).transpose(0, 1), base.key, whole, starts) * step
    expected = 0.5 * ((y.grad / step).square() * stored.square().mean(-1, keepdim=True)).sum((0, 1, 2))
    torch.testing.assert_close(layer.bands.float(), expected.view(4, 16).sum(1), rtol=1e-3, atol=1e-6)


def test_predictions_are_near_what_whole_caches_cost(bench, layers):
    base = schemes.get("klt3", head_dim=64)
    known = known_of(bench, base)
    search = _Search(bench, base, Goal(layers=layers, scheme="klt3"), known, "mine")
    three, two = (
        dataclasses.replace(schemes.get(n, head_dim=64), copies=(), residual_length=near(base))
        for n in ("klt3", "klt2")
    )
    measured = bench.kl([three, two])
    for scheme, kl in zip((three, two), measured, strict=True):
        assert kl / 3 < search.expected(scheme) < 3 * kl
    assert known[0].value > 100 * known[1].value  # errors of the second layer hardly reach the output


def test_errors_fall_with_every_bit():
    key = schemes.get("klt4").key
    found = [errors(dataclasses.replace(key, bands=(b,)), 16)[0] for b in (1, 2, 3, 4, 5, 6, 8)]
    assert found == sorted(found, reverse=True) and all(e < DISTORTION[b] for b, e in enumerate(found[:6], 1))
    assert errors(RAW, 64) == (0.0,)
    plain = [errors(dataclasses.replace(INT4, format=f"int{b}"), 64)[0] for b in (2, 3, 4, 8)]
    assert plain == sorted(plain, reverse=True)
    assert errors(schemes.get("klt2", head_dim=64).value, 64)[0] < errors(dataclasses.replace(key, bands=(2,)), 16)[0]


def test_gradients_leave_the_model_as_it_was():
    model = tiny.model()
    base = schemes.get("klt4", head_dim=64)
    bases = calibrate(model, list(LEARNED), "klt4")
    one = sensitivities(model, [PROBES[0]], base, bases, near=64, progress=False)
    again = sensitivities(model, [PROBES[0]], base, bases, near=64, progress=False, checkpointing=True)
    for a, b in zip(one, again, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-3) and a.bands == pytest.approx(b.bands, rel=1e-3)
    assert all(p.requires_grad and p.grad is None for p in model.parameters()) and not model.training


# -- fitting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["klt2", *at_night("klt4")])
def test_bits_go_where_they_are_needed_in_the_bytes_of_the_preset(bench, layers, name):
    found = fitted(bench, Goal(layers=layers, scheme=name))
    preset = schemes.get(name, head_dim=64)
    limit = CacheSpec(scheme=preset, layers=layers).nbytes(32_768)
    first, second = (
        sum(widths(found.fitted.scheme, layers, side)[layer] for side in ("key", "value")) for layer in (0, 1)
    )
    assert first > second and found.fitted.nbytes <= limit
    assert found.preset is not None and found.preset.scheme == preset and found.preset.nbytes == limit
    assert found.chosen.kl <= found.preset.kl
    assert found.fitted.kl < 0.9 * found.preset.kl
    spec = CacheSpec(scheme=found.fitted.scheme, layers=layers, raw_dtype="float32")
    needed = bench.calibration(found.fitted.scheme)
    held = KVCache.for_model(bench.model, found.fitted.scheme, max_tokens=512, calibration=needed)
    assert held.nbytes == spec.nbytes(512)


def test_a_memory_is_used_and_a_second_run_measures_nothing(tmp_path):
    model = uneven()
    layers = layer_geometries(model.config)
    bench = bench_of(model, tmp_path / "state.json")
    limit = CacheSpec(scheme=schemes.get("klt3", head_dim=64), layers=layers).nbytes(8192) + 1000
    goal = Goal(layers=layers, context=8192, memory_bytes=limit)
    found = fitted(bench, goal)
    assert found.preset.scheme.name == "klt3" and found.fitted.nbytes <= limit and found.context >= 8192
    planned = planner.plan(layers, [found.chosen.scheme], context=8192, memory_bytes=limit).rows[0]
    assert planned.total_bytes == found.chosen.nbytes and planned.max_context == found.context

    again = Bench(model, WHOLES, bench._calibration, state(tmp_path / "state.json", text="novel"))
    again.model = None
    base = schemes.get("klt3", head_dim=64)
    known = again.sensitivities(f"beyond {near(base)}", lambda: pytest.fail("measured again"))
    assert fit(again, base, goal, known, name="mine", progress=False).to_dict() == found.to_dict()
    with raises(SpecError, "state.json", "text", "'other'", "'novel'", "--out", "--overwrite"):
        state(tmp_path / "state.json", text="other")
    (tmp_path / "state.json").write_text("{}")
    with raises(FileFormatError, "state.json", "kvbits eval"):
        state(tmp_path / "state.json", text="novel")


@pytest.mark.night
def test_a_quality_makes_the_bytes_or_the_context(bench, layers):
    kl = dict(zip(("klt2", "klt4"), bench.kl([schemes.get(n, head_dim=64) for n in ("klt2", "klt4")]), strict=True))
    loose = fitted(bench, Goal(layers=layers, context=8192, max_kl=kl["klt2"]))
    tight = fitted(bench, Goal(layers=layers, context=8192, max_kl=kl["klt4"]))
    assert loose.reached and tight.reached and loose.chosen.nbytes < tight.chosen.nbytes and loose.context == 8192
    longest = fitted(bench, Goal(layers=layers, memory_bytes=10**6, max_kl=kl["klt2"]))
    spec = CacheSpec(scheme=longest.chosen.scheme, layers=layers)
    assert spec.nbytes(longest.context) <= 10**6 < spec.nbytes(longest.context + 1)
    assert not fitted(bench, Goal(layers=layers, context=8192, max_kl=1e-12)).reached


def test_a_goal_needs_two_of_three_or_a_preset():
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),)
    with raises(SpecError, "context", "--scheme", "--memory", "--gpu-memory", "--max-kl"):
        Goal(layers=layers, context=512)
    with raises(SpecError, "0.0 nats", 0):
        Goal(layers=layers, context=512, max_kl=0.0)
    with raises(SpecError, "klt2", "klt3", "klt4", "'kivi4'"):
        Goal(layers=layers, scheme="kivi4")
    with raises(SpecError, "klt2", "memory"):
        Goal(layers=layers, scheme="klt2", memory_bytes=10**6)
    Goal(layers=layers, scheme="klt2", context=512)


def test_a_memory_that_no_bits_fit_is_refused_before_anything_is_measured():
    layers = tuple(LayerGeometry(num_kv_heads=2, head_dim=64) for _ in range(3))
    names = family(layers)
    with raises(SpecError, "1.00 kB", "2 sequences", "8,192 tokens", "0 tokens"):
        require_room(Goal(layers=layers, context=8192, batch=2, memory_bytes=1000), names)
    require_room(Goal(layers=layers, context=8192, batch=2, memory_bytes=10**9), names)
    require_room(Goal(layers=layers, memory_bytes=1000, max_kl=0.1), names)


def test_a_preset_that_the_fit_does_not_start_from_is_refused_before_the_model_is_calibrated(tmp_path, monkeypatch):
    model = tiny.model()
    model.config.max_position_embeddings = 1 << 14
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path / "kept"))
    command = f"fit {tmp_path / 'model'} --scheme int8_centered --windows 1 --out {tmp_path / 'mine.json'}"
    said = run(command, code=2).stderr.splitlines()[-1]  # lines of the loading weights stand before it
    assert said.startswith("error: ") and "int8_centered" in said and "klt2, klt3, klt4" in said
    assert not list((tmp_path / "kept").rglob("*.safetensors")) and not list(tmp_path.glob("mine*"))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_pages_shift_bits_between_the_keys_and_values_of_a_layer(head_dim):
    layers = tuple(LayerGeometry(num_kv_heads=2, head_dim=head_dim) for _ in range(3))
    base = schemes.get("klt3", head_dim=head_dim)
    bands = tuple(1.0 / 4**i for i in range(head_dim // 16))
    known = [Sensitivity(tuple(b * k for b in bands), k, v) for k, v in ((1.0, 100.0), (1.0, 1.0), (100.0, 1.0))]
    search = _Search(None, base, Goal(layers=layers, scheme="klt3", equal_pages=True), known, "mine")
    found = search.scheme(walk(search.options())[-1])
    pages = {g.layouts["closed"].page_size_bytes for g in CacheSpec(scheme=found, layers=layers).groups}
    assert pages == {CacheSpec(scheme=base, layers=layers).groups[0].layouts["closed"].page_size_bytes}
    assert widths(found, layers, "value")[0] > widths(found, layers, "value")[2]
    assert widths(found, layers, "key")[0] < widths(found, layers, "key")[2]
    free = _Search(None, base, Goal(layers=layers, scheme="klt3"), known, "mine")
    assert walk(free.options(), free.goal.limit(base))[-1].kl <= search.expected(found)


def test_layers_of_other_widths_have_the_copies_that_are_finer(bench, layers):
    base = schemes.get("klt2", head_dim=64)
    found = fitted(bench, Goal(layers=layers, scheme="klt2")).fitted.scheme
    assert found.overrides and found.copies == base.copies and found.residual_length == base.residual_length
    for group in CacheSpec(scheme=found, layers=layers).groups:
        finer = base.copies[0].key.mean_bits + base.copies[0].value.mean_bits
        assert bool(group.copies) == (group.key.mean_bits + group.value.mean_bits < finer)
    four = schemes.get("klt4", head_dim=64)
    mixed = dataclasses.replace(
        base,
        overrides=(
            Override(layers=(0,), key=dataclasses.replace(base.key, bands=(6, 4, 3, 3)), value=base.value),
            Override(layers=(1,), key=four.key, value=four.value),
            Override(layers=(2,), key=RAW, value=RAW),
            Override(layers=(3,), key=QuantSpec(), value=QuantSpec()),
        ),
    )
    groups = {g.layers: g.copies for g in CacheSpec(scheme=mixed, layers=layers[:1] * 5).groups}
    assert groups == {(0,): base.copies, (1,): (), (2,): (), (3,): (), (4,): base.copies}


def test_a_fit_is_one_that_vllm_serves(bench, layers, tmp_path):
    found = fitted(bench, Goal(layers=layers, scheme="klt2"))
    mine = bound_to(found.fitted.scheme, layers, name="mine", weights="", model="tiny", description="")
    (tmp_path / "mine.json").write_text(mine.to_json())
    served = _layer_formats(str(tmp_path / "mine.json"), layers)
    assert [(f.scheme.key, f.scheme.value) for f in served if f] == [mine.for_layer(i, 2) for i in range(2)]
    assert [f.copies for f in served if f] == [mine.copies_of(*mine.for_layer(i, 2)) for i in range(2)]
    assert any(f.copies for f in served if f)
    assert not any(schemes.weak_to_key_bias(f.scheme) for f in served if f)  # narrow bands have a calibrated mean
    rings = planner.vllm_rings(mine, layers, "bfloat16")
    assert [len(r) - 1 for r in rings] == [len(mine.copies_of(*mine.for_layer(i, 2))) for i in range(2)]


def test_models_that_klt_does_not_take_are_dealt_integers():
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=128, n_layer=2, n_head=2, vocab_size=len(tiny.ALPHABET), n_positions=1024, initializer_range=0.2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight.mul_(0.01)
    layers = layer_geometries(config)
    assert family(layers, model)[0] == "int4"
    assert family((LayerGeometry(num_kv_heads=1, head_dim=512),))[0] == "int4"
    bench = bench_of(model)
    found = fitted(bench, Goal(layers=layers, scheme="int8k_int4v"))
    assert found.fitted.kl < found.preset.kl and found.fitted.nbytes <= found.preset.nbytes
    assert all(x.token_local for i in range(2) for x in found.fitted.scheme.for_layer(i, 2))


def test_layers_that_nobody_sees_are_refused(monkeypatch):
    model = tiny.model()
    bases = calibrate(model, list(LEARNED), "klt4")
    monkeypatch.setattr("kvbits.evaluate.sensitivity.stored_at", lambda config: {})
    with raises(UnsupportedError, "LlamaForCausalLM", "layers [0, 1]"):
        sensitivities(model, [PROBES[0]], schemes.get("klt4", head_dim=64), bases, near=64, progress=False)


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
    for layers, parts in (
        (fitted.layers * 2, ("2 layers", 4)),
        (other, ("layer 0", "head_dim=64", 32)),
        (
            tuple(dataclasses.replace(g, num_kv_heads=3) for g in fitted.layers),
            ("layer 0", "2 kv heads", 3),
        ),
        (
            tuple(dataclasses.replace(g, sliding_window=128) for g in fitted.layers),
            ("layer 0", "sliding_window=None", 128),
        ),
    ):
        with raises(SpecError, "'mine'", "tiny", *parts, "kvbits fit"):
            CacheSpec(scheme=fitted, layers=layers)
    with raises(SpecError, "'mine'", "fingerprint", "tiny", "kvbits fit", "plain"):
        KVCache.for_model(tiny.model(seed=1), fitted)
    KVCache.for_model(tiny.model(seed=1), fitted.plain)


def test_a_file_edited_by_hand_is_refused_with_what_is_wrong(tmp_path):
    model = tiny.model()
    spec = json.loads(schemes.get("int4").to_json())["key"]
    override = {"type": "Override", "layers": [7], "key": spec, "value": spec}
    for changes, parts in (
        ({"key": spec | {"format": "int5"}}, ("'int5'", "int8")),
        ({"overrides": [override]}, ("layer 7", "2 layers")),
        ({"page_size": 63}, ("page_size=63", 32, 64)),
        ({"layers": []}, ("layers=()", "kvbits fit")),
    ):
        with raises(SpecError, "mine.json", *parts):
            schemes.read(str(written(tmp_path, model, **changes)))
    wide = spec | {"granularity": {"type": "PerGroup", "size": 48}}
    with raises(SpecError, "head_dim=64", "group_size=48", "group_size=64"):
        KVCache.for_model(model, str(written(tmp_path, model, key=wide)))


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_other_commands_take(tmp_path):
    folder = tmp_path / "tiny"
    uneven().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(novel()[:8192])
    out = tmp_path / "mine.json"
    command = f"fit {folder} --scheme klt2 --windows 1 --text {text} --out"
    first = run(f"{command} {out}").output
    assert "keys " in first and str(out) in first
    data = run_json(f"{command} {out}")  # goes on from what was measured
    assert data["chosen"]["nbytes"] <= data["preset"]["nbytes"] and len(data["widths"]["key"]) == 2
    planned = run_json(f"plan {folder} --context 32k --scheme {out}")
    assert planned["rows"][0]["total_bytes"] == data["chosen"]["nbytes"]
    assert (
        "not reached"
        in run(f"fit {folder} --context 1k --max-kl 1e-9 --windows 1 --text {text} --out {out}", code=1).output
    )
    error(f"{command} {tmp_path / 'mine.txt'}", "mine.txt", ".json")
