"""Calibrated bases: what the moments say about made-up data, degenerate ones, tiny models from calibration to cache,
foreign models, damaged files.
"""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import tiny
import torch
from messages import mentions, raises

from kvbits import schemes
from kvbits.calibrate import Calibration, calibrate, calibrate_all
from kvbits.calibrate.moments import DISTANCES, Moments, far
from kvbits.errors import CalibrationError, DataError, FileFormatError, SpecError, UnsupportedError
from kvbits.evaluate.caches import factory
from kvbits.evaluate.fidelity import compare
from kvbits.integrations.huggingface import KVCache
from kvbits.ops.cpu import library
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.quant import scales
from kvbits.quant.basis import completed, into_basis, inverse
from kvbits.quant.rotary import turn
from kvbits.spec import LayerGeometry, Override, PageLayout, QuantSpec, Rotary

DIM = 64
ROTARY = Rotary(inv_freq=tuple(1000.0 ** (-i / 32) for i in range(32)))
GEOMETRY = LayerGeometry(num_kv_heads=2, head_dim=DIM, rotary=ROTARY)
KEY = schemes.get("klt2", head_dim=DIM).key


def correlated(tokens, heads, seed):
    """Tokens of channels that move together, with a bias."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(heads, DIM, DIM, generator=generator) * torch.logspace(1, -2, DIM)
    return torch.einsum("thd,hde->the", torch.randn(tokens, heads, DIM, generator=generator), mix.mT) + 5 * torch.randn(
        heads, DIM, generator=generator
    )


def seen(q, k, tokens=None):
    m = Moments(KEY, GEOMETRY, "layer 3")
    m.add(q, k, torch.arange(len(k))[:tokens])
    return m


def shared(m):
    return completed({"k_basis": m.basis(), "k_mean": m.mean()}, torch.tensor(ROTARY.frequencies(DIM)))


def prompts(n=4, length=600, vocab=None):
    vocab = len(tiny.ALPHABET) if vocab is None else vocab
    return list(torch.randint(3, vocab, (n, length), generator=torch.Generator().manual_seed(1)).split(2))


def test_channels_of_the_basis_are_uncorrelated_sorted_and_as_wide_as_their_steps_want():
    q, k = correlated(1920, 4, 0), correlated(1920, 2, 1)
    pages = k.unflatten(0, (30, 64)).transpose(1, 2)[1:]
    y = into_basis(pages, KEY, shared(seen(q, k)), np.arange(64, 1920, 64)).double().transpose(0, 1).flatten(1, 2)
    covariance = y.mT @ y / y.shape[1]
    spread = covariance.diagonal(dim1=-2, dim2=-1).sqrt() * scales.steps(KEY, DIM)
    assert torch.allclose(spread, torch.ones_like(spread), atol=1e-3)
    off = covariance / (
        covariance.diagonal(dim1=-2, dim2=-1).sqrt()[:, None] * covariance.diagonal(dim1=-2, dim2=-1).sqrt()[:, :, None]
    )
    assert (off - torch.eye(DIM)).abs().max() < 3e-3  # of the inverse's float16 numbers


def test_what_calibration_keeps_is_multiplied_without_rounding():
    """Queries far longer in one direction than in the others come out of the basis' inverse by cancellation: float16
    numbers must be its own, not near it.
    """
    q = correlated(1920, 4, 0) + 300 * torch.randn(DIM, generator=torch.Generator().manual_seed(5))
    basis = seen(q, correlated(1920, 2, 1)).basis()
    exact = torch.linalg.inv(basis.double())
    heads = q.double().transpose(0, 1).unflatten(0, (2, 2)).flatten(1, 2)
    want, got = heads @ exact.mT, heads @ inverse(basis).double().mT
    assert (got - want).norm() < 1e-4 * want.norm()
    rounded = inverse(basis * 1.1).double() * 1.1  # the same matrix where float16 numbers are near its inverse only
    assert (heads @ rounded.mT - want).norm() > 10 * (got - want).norm()


def test_scores_lose_less_than_in_the_channels_as_they_are():
    """At equal bits on keys the calibration never saw, read from further than it was long: against the same codes in a
    basis that only scales channels.
    """
    freq = torch.tensor(ROTARY.frequencies(DIM))
    q, k = (
        turn(correlated(1920, 4, 0).transpose(0, 1), torch.arange(1920), freq).transpose(0, 1),
        correlated(1920, 2, 1),
    )
    fresh_q = (
        turn(correlated(256, 4, 0).transpose(0, 1), 1000 + 20 * torch.arange(256), freq)
        .transpose(0, 1)
        .unflatten(1, (2, 2))
    )
    fresh_k = correlated(64, 2, 1)
    layout = PageLayout(key=KEY, value=QuantSpec.raw(), page_size=64, num_kv_heads=2, head_dim=DIM, raw_dtype="float32")
    plain = torch.diag_embed(1 / (k.unflatten(0, (30, 64)).std(1).mean(0) * scales.steps(KEY, DIM)))
    found = []
    for basis in (seen(q, k).basis(), plain):
        static = completed({"k_basis": basis, "k_mean": seen(q, k).mean()}, freq)
        page, start = fresh_k.transpose(0, 1)[None], np.array([64])
        got, _ = dequantize_pages(close_pages(page, page, layout, static, start)[0], layout, static, starts=start)
        found.append(torch.einsum("thgd,hkd->hgtk", fresh_q, (got - page)[0]).square().mean().item())
    assert found[0] < found[1] / 2


def test_means_are_those_of_runs_turned_back_to_their_first_token_and_of_position_0():
    k = correlated(640, 2, 1)
    m = seen(correlated(640, 4, 0), k)
    runs = k[64:].unflatten(0, (-1, 16)).permute(2, 0, 1, 3)  # [H, runs, 16, D]
    want = turn(runs.mean(2).double(), torch.arange(64, 640, 16), m.inv_freq, back=True).mean(1)
    torch.testing.assert_close(m.mean()[:, 0].double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(m.mean()[:, 1], k[0])
    later = Moments(KEY, GEOMETRY, "layer 3")
    later.add(correlated(640, 4, 0), k, torch.arange(1, 641))
    assert torch.equal(later.mean()[:, 0], later.mean()[:, 1]), "no text began at position 0"


def test_far_queries_are_those_turned_to_every_distance():
    m = seen(correlated(640, 4, 0), correlated(640, 2, 1))
    distances = torch.logspace(0, math.log2(500), DISTANCES, base=2, dtype=torch.float64).round()
    want = torch.zeros_like(m.queries)
    for d in distances:
        once = turn(m.queries, d[None], m.inv_freq)
        want += turn(once.mT, d[None], m.inv_freq) / DISTANCES
    torch.testing.assert_close(far(m.queries, m.inv_freq, 500), want, rtol=1e-9, atol=1e-9 * want.abs().max().item())


def test_a_window_limits_how_far_queries_are():
    q, k = correlated(640, 4, 0), correlated(640, 2, 1)
    near = Moments(KEY, dataclasses.replace(GEOMETRY, sliding_window=128), "layer 3")
    near.add(q, k, torch.arange(640))
    assert near.farthest == 128 and not torch.allclose(near.basis(), seen(q, k).basis(), rtol=1e-2)


def test_texts_may_be_seen_one_after_the_other():
    q, k = correlated(512, 4, 0), correlated(512, 2, 1)
    whole = seen(q, k)
    again = Moments(KEY, GEOMETRY, "layer 3")
    for _ in range(2):
        again.add(q, k, torch.arange(512))
    assert torch.allclose(again.basis(), whole.basis(), rtol=1e-4, atol=1e-5 * whole.basis().abs().max().item())
    assert again.tokens == 2 * whole.tokens == 2 * (512 - 64) and torch.allclose(again.mean(), whole.mean())


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda q, k: (q[:100], k[:100]),
            ("layer 3", "36 tokens", "64 channels"),
        ),
        (
            lambda q, k: (q, k * torch.tensor([1.0, 0.0])[:, None]),
            ("kv head 1", "layer 3", "zero"),
        ),
        (
            lambda q, k: (q * torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None], k),
            ("kv head 1", "layer 3", "zero"),
        ),
    ],
)
def test_moments_that_say_too_little_name_the_head_and_still_give_a_basis(change, parts):
    q, k = change(correlated(640, 4, 0), correlated(640, 2, 1))
    moments = seen(q, k)
    basis = moments.basis()
    assert moments.weak and all(mentions(head, *parts) for head in moments.weak)
    assert torch.isfinite(basis).all() and torch.isfinite(inverse(basis)).all()


def nearly_constant(tokens, seed):
    """Keys of one direction and little else, as they are before they are turned to their positions: [2, T, D]."""
    same = 5 * torch.randn(2, 1, DIM, generator=torch.Generator().manual_seed(3))
    return same + 0.01 * torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(100 + seed))


def measured(key, length, texts=8):
    """Moments of texts of `length` tokens."""
    found = Moments(key, GEOMETRY, "layer 3")
    inv_freq, positions = torch.tensor(ROTARY.frequencies(DIM)), torch.arange(length)
    for i in range(texts):
        k = turn(nearly_constant(length, i), positions, inv_freq).transpose(0, 1)
        found.add(torch.randn(length, 4, DIM, generator=torch.Generator().manual_seed(i)), k, positions)
    return found


@pytest.mark.parametrize("key", [KEY, schemes.get("klt4", head_dim=DIM).key], ids=["klt2", "klt4"])
@pytest.mark.parametrize("length", [130, 200, 256, 512, 513])
def test_positions_that_no_text_shows_are_read_as_well_as_the_others(key, length):
    """The keys of the head are nearly constant, and its shown positions span few directions."""
    short, long = measured(key, length), measured(key, 1024)
    inv_freq = torch.tensor(ROTARY.frequencies(DIM))
    layout = PageLayout(key=key, value=QuantSpec.raw(), page_size=64, num_kv_heads=2, head_dim=DIM, raw_dtype="float32")
    errors = []
    for moments in (short, long):
        basis = moments.basis()
        static = completed({"k_basis": basis, "k_mean": moments.mean()}, inv_freq)
        starts = np.arange(512, 1024, 64)
        k = turn(nearly_constant(1024, 99), torch.arange(1024), inv_freq)[:, 512:]
        pages = k.unflatten(1, (8, 64)).transpose(0, 1).contiguous()
        closed = close_pages(pages, torch.zeros_like(pages), layout, static, starts=starts)[0]
        read = dequantize_pages(closed, layout, static=static, starts=starts)[0]
        errors.append(((read - pages).flatten(1).norm(dim=1) / pages.flatten(1).norm(dim=1)).max().item())
    assert errors[0] < 2 * errors[1]
    assert short.weak and all(mentions(head, "layer 3", "positions") for head in short.weak) and not long.weak


def test_nan_in_keys_is_an_error_that_names_the_layer():
    with raises(DataError, "layer 3", "NaN"):
        seen(correlated(64, 4, 0), correlated(64, 2, 1) * torch.nan)


# -- models
# -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny.model(key_bias=20.0)


@pytest.fixture(scope="module")
def calibrations(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return dict(
            zip(("klt4", "klt3", "klt2"), calibrate_all(model, prompts(8, 600), ["klt4", "klt3", "klt2"]), strict=True)
        )


def test_a_calibration_holds_one_basis_a_layer_and_comes_back_from_its_file(model, calibrations, tmp_path):
    found = calibrations["klt3"]
    assert [{k: tuple(v.shape) for k, v in layer.items()} for layer in found.static] == [
        {"k_basis": (2, 64, 64), "k_mean": (2, 2, 64)}
    ] * 2
    path = tmp_path / "c.safetensors"
    found.save(path)
    again = Calibration.load(path)
    assert again.id == found.id and again.id != calibrations["klt2"].id
    again.fitted(model.config, schemes.get("klt3", head_dim=64))


def test_schemes_calibrated_together_have_what_each_has_alone(model, calibrations):
    """Moments are looked at once, whatever is stored."""
    short = dataclasses.replace(schemes.get("klt2"), name="short", num_sink_tokens=1, page_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = calibrate_all(model, prompts(8, 600), ["klt3", short, "klt2"])
        alone = [calibrate(model, prompts(8, 600), s) for s in ("klt3", short, "klt2")]
    for a, b in zip(together, alone, strict=True):
        assert a.id == b.id and a.info == b.info
    assert together[2].id == calibrations["klt2"].id == together[1].id


def test_attention_is_the_models_own_again_after_calibration(model):
    before = model.config._attn_implementation
    calibrate(model, prompts(), "klt2")
    assert model.config._attn_implementation == before and model.training is False


def test_fewer_bits_cost_more_and_the_packed_cache_agrees_with_the_simulated_one(model, calibrations):
    ids = torch.randint(3, len(tiny.ALPHABET), (420,), generator=torch.Generator().manual_seed(2))
    factories = [
        factory(model, name, calibration=lambda s: calibrations[s.name], simulate=s)
        for name in calibrations
        for s in (False, True)
    ]
    caches = {"base": factory(model, "raw").make(1, 420)} | {f.name: f.make(1, 420) for f in factories}
    found = compare(model, caches, ids, chunk=60)
    kl = {name: found[name].kl_mean for name in caches}
    assert 0 < kl["klt4"] < kl["klt3"] < kl["klt2"]
    for name in calibrations:
        assert kl[f"{name}-simulated"] == pytest.approx(kl[name], rel=0.02)
        assert abs(found[f"{name}-simulated"].nll - found[name].nll) < 3e-3 * found[name].num_tokens


def test_the_cache_says_who_serves_and_why(model, calibrations):
    cache = factory(model, "klt2", calibration=lambda s: calibrations["klt2"]).make(1, 300)
    with torch.no_grad():
        for piece in torch.randint(3, 60, (1, 300)).split([220, 60, 20], 1):
            model(piece, past_key_values=cache)
    ops = cache.pages.explain()["ops"]
    if library.unavailable() is None:
        assert any(x.startswith("attend by cpu") for x in ops)
        assert any(x.startswith("close by cpu") for x in ops)
    assert cache.nbytes == cache.pages.spec.nbytes(300)


def test_a_raw_layer_is_an_exception_as_elsewhere(model):
    scheme = schemes.get("klt2", head_dim=64)
    raw = Override(layers=(0,), key=QuantSpec.raw(), value=QuantSpec.raw())
    mine = dataclasses.replace(scheme, name="mine", overrides=(raw,))
    found = calibrate(model, prompts(8, 600), mine)
    cache = KVCache.for_model(model, mine, calibration=found)
    with torch.no_grad():
        out = [model(piece, past_key_values=cache).logits for piece in torch.randint(3, 60, (1, 300)).split(150, 1)]
    assert torch.isfinite(out[1]).all() and len(cache.pages.spec.groups) == 2


def test_a_saved_cache_brings_its_basis_along(model, calibrations, tmp_path):
    cache = factory(model, "klt3", calibration=lambda s: calibrations["klt3"]).make(1, 300)
    ids = torch.randint(3, 60, (1, 290))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "cache.kv")
    again = KVCache.load(tmp_path / "cache.kv", model)
    with torch.no_grad():
        a, b = (model(ids[:, :5], past_key_values=c).logits for c in (cache, again))
    assert torch.equal(a, b)


# -- refusals
# -----------------------------------------------------------------------------------------------------------------


def other(model, **changes):
    config = type(model.config)(**{**model.config.to_dict(), **changes})
    return type(model)(config).eval()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("rope_theta", 500000)),
        ({"num_key_value_heads": 4}, ("geometry[0].num_kv_heads", 4, 2)),
        ({"num_hidden_layers": 3}, ("num_hidden_layers", 3, 2)),
        ({"head_dim": 32}, ("head_dim", 32, 64)),
    ],
)
def test_another_model_is_refused_with_what_differs(model, calibrations, changes, parts):
    with raises(CalibrationError, *parts, "kvbits calibrate"):
        calibrations["klt2"].fitted(
            other(model, **changes).config, schemes.get("klt2", head_dim=changes.get("head_dim", 64))
        )


@pytest.mark.parametrize("name", ["klt3", "klt2"])
def test_one_of_a_scheme_serves_all_widths(model, calibrations, name):
    """The same directions in other steps: within the float16 numbers of its inverse what the scheme gets for itself."""
    scheme = schemes.get(name, head_dim=64)
    found, own = calibrations["klt4"].fitted(model.config, scheme), calibrations[name]
    assert (
        found.fingerprint == own.fingerprint
        and found.info["scheme"] == name
        and found is calibrations["klt4"].fitted(model.config, scheme)
    )
    for ours, theirs in zip(found.static, own.static, strict=True):
        torch.testing.assert_close(
            ours["k_basis"], theirs["k_basis"], rtol=0, atol=4e-3 * theirs["k_basis"].abs().max().item()
        )
        assert torch.equal(ours["k_mean"], theirs["k_mean"])
    part = dataclasses.replace(
        scheme, name="part", overrides=(Override(layers=(1,), key=QuantSpec(), value=QuantSpec()),)
    )
    assert [sorted(layer) for layer in calibrations["klt4"].fitted(model.config, part).static] == [
        ["k_basis", "k_mean"],
        [],
    ]
    assert KVCache.for_model(model, name, calibration=calibrations["klt4"]).pages is not None


def test_a_singular_basis_is_refused_with_its_head(model, calibrations):
    broken = [layer | {"k_basis": layer["k_basis"].clone()} for layer in calibrations["klt2"].static]
    broken[1]["k_basis"][1, :, 5] = broken[1]["k_basis"][1, :, 6]
    with raises(SpecError, "k_basis", "layer 1", "kv head 1"):
        KVCache.for_model(model, "klt2", calibration=dataclasses.replace(calibrations["klt2"], static=broken))


def test_models_without_a_rotary_embedding_are_refused():
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=1, vocab_size=100)
    with raises(UnsupportedError, "rotary embedding"):
        calibrate(transformers.GPT2LMHeadModel(config).eval(), [torch.randint(0, 100, (1, 200))], "klt2")


@pytest.mark.parametrize("name", ["klt2", "int8_static"])
def test_a_flipped_bit_is_refused_wherever_it_is(model, calibrations, name, tmp_path):
    found = calibrations["klt2"] if name == "klt2" else calibrate(model, prompts(), name)
    path = tmp_path / "c.safetensors"
    found.save(path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    header = int.from_bytes(whole[:8], "little") + 8
    places = [*random.integers(0, header, 150), *random.integers(header, len(whole), 150)]
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError):
            Calibration.load(path)
