"""Attention-level measures: exact for lossless caches, right on errors made by hand, the same inputs for every cache."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from messages import raises

from kvbits.errors import DataError
from kvbits.evaluate.attention import LayerInputs, _bits, _clipped, measure, observe, statistics
from kvbits.evaluate.caches import base_factory, factory
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load
from kvbits.evaluate.texts import Text, novel
from kvbits.model_ref import ModelRef

IDS = torch.tensor(tiny.tokenizer()(novel()[:300])["input_ids"])


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def test_observing_changes_nothing_and_sees_what_attention_sees(model):
    before = model(IDS[None]).logits
    inputs = observe(model, IDS)
    assert len(inputs) == 2 and inputs[0].q.shape == (300, 4, 64) and inputs[0].k.shape == (300, 2, 64)
    assert torch.equal(model(IDS[None]).logits, before)
    k = model.model.layers[0].self_attn.k_proj(model.model.layers[0].input_layernorm(model.model.embed_tokens(IDS[:1])))
    torch.testing.assert_close(inputs[0].k[0].flatten(), k[0])  # position 0 is not rotated


@pytest.mark.parametrize("name", ["base", "raw"])
def test_a_lossless_cache_has_no_error(model, name):
    inputs = observe(model, IDS)
    made = (base_factory(model) if name == "base" else factory(model, "raw")).make(1, 300)
    for layer in measure(inputs, made):
        assert min(layer["logit_cosine"]) == pytest.approx(1, abs=1e-5)
        assert max(layer["tvd"]) < 1e-5 and max(layer["output_error"]) < 1e-5
        assert layer["key_bits"] == layer["value_bits"] == [None, None]
        assert layer["clipped_keys"] == layer["clipped_values"] == [0, 0]


def test_more_bits_less_error_and_about_as_many_effective_bits(model):
    inputs = observe(model, IDS)
    found = {n: measure(inputs, factory(model, n).make(1, 300))[1] for n in ("int8", "int4", "kivi2")}
    for m in ("tvd", "output_error"):
        assert sum(found["int8"][m]) < sum(found["int4"][m]) < sum(found["kivi2"][m])
    assert sum(found["int8"]["logit_cosine"]) > sum(found["int4"]["logit_cosine"]) > sum(found["kivi2"]["logit_cosine"])
    for name, bits in (("int8", 8), ("int4", 4), ("kivi2", 2)):
        assert all(bits - 2.2 < b < bits for b in found[name]["key_bits"] + found[name]["value_bits"])


def test_the_output_error_is_that_of_the_real_op(model):
    """The op's output on the pages equals attention over what the pages decode to, so its error does too."""
    inputs = observe(model, IDS)
    cache = factory(model, "int4").make(1, 300)
    got = measure(inputs, cache)[0]["output_error"]
    x = inputs[0]
    other = factory(model, "int4").make(1, 300)
    other.pages.append(0, x.k[None, :236], x.v[None, :236])
    k, v = (torch.cat([s, fresh[236:]]) for s, fresh in zip(other.pages.dequantize(0, 0), (x.k, x.v), strict=True))
    outs = []
    for kk, vv in ((x.k, x.v), (k, v)):
        s = torch.einsum("qhd,khd->hqk", x.q[236:], kk.repeat_interleave(2, 1)) * x.scaling
        s = s.masked_fill(torch.arange(300) > torch.arange(236, 300)[:, None], -math.inf)
        outs.append(torch.einsum("hqk,khd->hqd", s.softmax(-1), vv.repeat_interleave(2, 1)).view(2, -1))
    want = ((outs[0] - outs[1]).norm(dim=1) / outs[0].norm(dim=1)).tolist()
    assert got == pytest.approx(want, rel=2e-2)  # the int4 kernel rounds queries too


def test_bits_and_clipping_of_errors_made_by_hand():
    x = torch.randn(4000, 1, 64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(4000, 1, 64, generator=torch.Generator().manual_seed(1))
    assert _bits(x, x + 2.0**-4 * noise) == pytest.approx([4], abs=0.02)
    # a constant offset is no information
    assert _bits(x + 100, x + 100 + 2.0**-4 * noise) == pytest.approx([4], abs=0.02)
    assert _bits(x, x) == [None]
    assert _bits(1e-20 * x, 1e-20 * (x + 2.0**-4 * noise)) == pytest.approx([4], abs=0.02)
    small = x[:64] / x[:64].abs().max()
    assert _clipped(small, small.clamp(-0.5, 0.5)) == [int((small.abs() > 0.51).sum())]


def test_statistics_find_the_key_bias_and_the_sink(model):
    plain = statistics(observe(model, IDS))
    biased = statistics(observe(tiny.model(key_bias=200.0), IDS))
    assert biased[0]["key_offset"] > 30 > plain[0]["key_offset"]
    assert biased[0]["outlier_channels"] >= 2 and biased[1]["key_offset"] < 30
    t = torch.zeros(100, 1, 16)
    k = torch.randn(100, 1, 16)
    k[0] = 0
    k[0, 0, 0] = 40.0
    q = t.clone()
    q[..., 0] = 10.0
    (found,) = statistics([LayerInputs(q, k, torch.randn(100, 1, 16), 0.25, None, None)])
    assert found["sink_attention"] > 0.99 and found["sink_key_norm"] > 5


def test_a_text_without_history_is_refused(model):
    with raises(DataError, "64 tokens", "64 queries"):
        measure(observe(model, IDS[:64]), base_factory(model).make(1, 64))


def test_the_task_records_layers_and_heads(model):
    task = load("attention")(
        Context(ModelRef.of(model), tiny.tokenizer(), (Text("t", novel()[:900]),), Options(windows=2, length=200))
    )
    factories = {"32-bit": base_factory(model), "int4": factory(model, "int4")}
    records = {key: task.run(key, factories, lambda n: None) for key in task.item_keys()}
    summary = task.summary({k: r["int4"] for k, r in records.items()}, {})
    assert len(summary["by_layer"]["tvd"]) == 2 and summary["worst_output_error"] == max(
        summary["by_layer"]["output_error"]
    )
    assert all(len(x["tvd"]) == 2 for r in records.values() for x in r["int4"]["layers"])
    assert len(next(iter(records.values()))["32-bit"]["statistics"]) == 2
