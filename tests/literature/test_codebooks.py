"""Codebooks: the histogram fit against brute force, Fisher weights against autograd, resuming, and real caches with nuq
schemes.
"""

import dataclasses
import itertools

import pytest
import torch
import transformers
from messages import raises
from nightly import at_night

from kvbits import schemes
from kvbits.calibrate import Calibration, calibrate, calibrate_all
from kvbits.errors import CalibrationError, DataError, SpecError
from kvbits.integrations.huggingface import KVCache
from kvbits.literature.codebooks import BINS, Levels, _exact
from kvbits.literature.fisher import backward, watched
from kvbits.spec import PerChannel, PerToken, QuantSpec

pytestmark = pytest.mark.literature

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VALUE = QuantSpec(format="nuq2", granularity=PerToken(), symmetric=False, scale_dtype="float32")


def tiny(model_type="llama", **fields):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, pad_token_id=0, initializer_range=0.2, **fields)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts(n=3, length=140):
    return list(torch.randint(1, 100, (n, length), generator=torch.Generator().manual_seed(1)).split(1))


def test_the_exact_fit_is_the_best_of_all_runs_of_bins():
    mass = torch.zeros(BINS, dtype=torch.float64)
    at = torch.tensor([100, 700, 1500, 1600, 2500, 3900])
    mass[at] = torch.tensor([1.0, 4.0, 2.0, 1.0, 3.0, 0.5], dtype=torch.float64)
    middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) * 2 / BINS - 1
    found = _exact(mass, mass * middle, 3)
    x, w = middle[at], mass[at]

    def cost(centres):
        return (w * (x[:, None] - centres).abs().amin(1) ** 2).sum()

    runs = [(0, a, b, 6) for a, b in itertools.combinations(range(1, 6), 2)]
    best = min(
        cost(torch.stack([(w[a:b] * x[a:b]).sum() / w[a:b].sum() for a, b in itertools.pairwise(r)])) for r in runs
    )
    assert cost(found) <= best * (1 + 1e-9)


def test_weights_pull_entries_to_where_errors_cost_most():
    x = torch.rand(640, 1, 32) * 2 - 1
    x[..., 0], x[..., 1] = -1.0, 1.0
    near = torch.where((x - 0.5).abs() < 0.1, 1000.0, 1.0)
    books = []
    for weight in (None, near):
        levels = Levels(VALUE, 1, 64, None)
        levels.add(x, weight)
        books.append(levels.fit(prior=0.0)[0])
    assert books[0].tolist() == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=0.05)
    assert ((books[1] - 0.5).abs() < 0.15).sum() >= 2
    assert (books[1].diff() > 0).all() and books[1].abs().max() <= 1


def test_a_uniform_prior_spreads_entries_over_the_range():
    levels = Levels(VALUE, 2, 64, None)
    levels.add(torch.cat([torch.full((64, 2, 30), 0.01), torch.tensor([-1.0, 1.0]).expand(64, 2, 2)], -1))
    tight, spread = levels.fit(prior=0.0), levels.fit(prior=1e6)
    assert spread[0].tolist() == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=0.01)
    assert tight.shape == (2, 4) and torch.equal(tight[0], tight[1])


def test_nothing_seen_is_an_error():
    with raises(DataError, "values", "layer 0", "64 tokens"):
        Levels(VALUE, 1, 64, None, "values of layer 0").fit()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_cached_tensors_summed_over_query_heads(checkpointing):
    """A direction added to the keys of one kv head changes the loss by gradient . direction, whatever the number of
    query heads.
    """
    model = tiny()
    ids = torch.randint(1, 100, (1, 30))
    found = {}

    def seen(layer, side, x, gradient):
        assert (layer, side) not in found
        found[layer, side] = gradient.double()

    with watched(model, seen, checkpointing=checkpointing):
        backward(model, ids, None)
    assert set(found) == {(layer, side) for layer in range(2) for side in "kv"}
    assert found[1, "k"].shape == (1, 30, 2, 16)
    assert not any(p.grad is not None for p in model.parameters()) and all(p.requires_grad for p in model.parameters())
    direction = torch.randn(1, 30, 2, 16)
    module = model.model.layers[1].self_attn
    losses = []
    for step in (-1e-2, 1e-2):
        hook = module.v_proj.register_forward_hook(lambda m, args, out, step=step: out + step * direction.flatten(2))
        losses.append(model(ids, labels=ids).loss.item())
        hook.remove()
    slope = (losses[1] - losses[0]) / 2e-2
    assert slope == pytest.approx((found[1, "v"] * direction).sum().item(), rel=0.02, abs=1e-5)


def test_a_calibration_resumes_where_it_stopped(tmp_path, monkeypatch):
    model, texts = tiny(), prompts()
    want = calibrate(model, texts, "nuq3-1%")
    from kvbits.literature import fisher

    calls, real = [], fisher.backward

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    state = tmp_path / "state"
    monkeypatch.setattr(fisher, "backward", failing)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, texts, "nuq3-1%", resume=state)
    assert state.exists()
    with raises(CalibrationError, "state", "calibration"):
        calibrate(model, texts[:2], "nuq3-1%", resume=state)
    other = tiny()
    with torch.no_grad():
        next(other.parameters()).add_(0.5)
    with raises(CalibrationError, "state", "calibration"):
        calibrate(other, texts, "nuq3-1%", resume=state)
    got = calibrate(model, texts, "nuq3-1%", resume=state)
    assert len(calls) == 4 and not state.exists()
    assert got.id == want.id


def test_without_weights_there_is_no_backward_pass(tmp_path, monkeypatch):
    """And what the forward pass shows is what the backward pass watches, its gradients left out: keys as a cache stores
    them.
    """
    from kvbits.literature import fisher

    model, texts = tiny(), prompts()
    slopes = []
    with monkeypatch.context() as patch:
        add = Levels.add
        patch.setattr(Levels, "add", lambda self, x, weight=None: slopes.append(weight) or add(self, x, None))
        want = calibrate(model, texts, "nuq3-1%")
    assert slopes and all(s is not None for s in slopes)
    parameters = [p.requires_grad for p in model.parameters()]
    monkeypatch.setattr(fisher, "backward", lambda *a: pytest.fail("a backward pass"))
    got = calibrate(model, texts, "nuq3-1%", weights="none", resume=tmp_path / "state")
    assert [p.requires_grad for p in model.parameters()] == parameters and not (tmp_path / "state").exists()
    assert got.info["weights"] == "none"
    for a, b in zip(got.static, want.static, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.allclose(a[name], b[name], atol=1e-4), name


def test_schemes_calibrated_together_get_what_each_gets_alone(monkeypatch):
    from kvbits.literature import fisher

    model, texts = tiny(), prompts()
    static = schemes.get("nuq3")
    own = [
        dataclasses.replace(static, name="s", key=dataclasses.replace(static.key, static=True)),
        dataclasses.replace(static, name="sinks", num_sink_tokens=5),
    ]
    wanted = ["nuq4-1%", "nuq3-1%", "nuq2", "nuq4", "int8_static", *own]
    alone = [calibrate(model, texts, s) for s in wanted]
    calls, real = [], fisher.backward
    monkeypatch.setattr(fisher, "backward", lambda *a: calls.append(1) or real(*a))
    together = calibrate_all(model, texts, wanted)
    assert len(calls) == len(texts)
    assert [c.id for c in together] == [c.id for c in alone]
    assert [c.info for c in together] == [c.info for c in alone] and len({c.id for c in together}) == len(wanted)


def test_calibration_files_hold_the_codebooks(tmp_path):
    found = calibrate(tiny(), prompts(), "nuq4-1%", per_head=True)
    layer = found.static[0]
    assert set(layer) == {"k_codebook", "v_codebook"}
    assert layer["k_codebook"].shape == (2, 16) and not torch.equal(layer["k_codebook"][0], layer["k_codebook"][1])
    found.save(tmp_path / "c.safetensors")
    again = Calibration.load(tmp_path / "c.safetensors")
    assert again.id == found.id
    with raises(SpecError, "weights='hessian'", "'fisher'", "'none'"):
        calibrate(tiny(), prompts(1), "nuq4", weights="hessian")


@pytest.mark.parametrize("name", [n for n in schemes.PRESETS if n.startswith("nuq")])
@pytest.mark.parametrize("family", ["llama", *at_night("qwen2", "gemma3_text")])
def test_every_nuq_preset_serves_real_models(name, family):
    extra = (
        {"head_dim": 16, "sliding_window": 96, "layer_types": ["sliding_attention", "full_attention"]}
        if family == "gemma3_text"
        else {}
    )
    model = tiny(family, **extra)
    calibration = calibrate(model, prompts(), name)
    cache = KVCache.for_model(model, name, calibration=calibration)
    ids = torch.randint(1, 100, (2, 260))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got = torch.cat(
            [model(piece, past_key_values=cache).logits for piece in ids.split([100, 100, 1, 59], dim=1)], 1
        )
    error = (got - want).square().mean().sqrt() / want.std()
    assert error < {"nuq4": 0.2, "nuq3": 0.35, "nuq2": 0.7}[name[:4]]
    assert not any(s["k"] or s["v"] for s in cache.pages.saturated)
    generated = model.generate(
        ids[:, :20],
        past_key_values=KVCache.for_model(model, name, calibration=calibration),
        max_new_tokens=80,
        do_sample=False,
    )
    assert generated.shape == (2, 100)


def test_static_per_channel_keys_leave_the_sinks_out():
    model = tiny()
    preset = schemes.get("nuq4")
    assert isinstance(preset.key.granularity, PerChannel) and preset.num_sink_tokens == 1
    scheme = dataclasses.replace(preset, key=dataclasses.replace(preset.key, static=True))
    found, everything = calibrate(model, prompts(), scheme), calibrate(model, prompts(), scheme, skip_tokens=0)
    assert (found.info["skip_tokens"], found.info["tokens"]) == (1, 3 * 139)
    assert set(found.static[0]) == {"k_scale", "k_bias", "k_codebook", "v_codebook"}
    assert not torch.equal(found.static[1]["k_scale"], everything.static[1]["k_scale"])
