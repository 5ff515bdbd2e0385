"""The accuracy measures against hand-computed ones, on a tiny random model."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvbits import KVCache
from kvbits.errors import DataError
from kvbits.evaluate.fidelity import Fidelity, compare, histogram, histogram_quantile


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=53, initializer_range=0.2
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


IDS = torch.randint(0, 53, (150,), generator=torch.Generator().manual_seed(2))


def caches(model, *schemes):
    return {"16-bit": DynamicCache(config=model.config)} | {s: KVCache.for_model(model, s) for s in schemes}


@pytest.mark.parametrize(("first", "chunk"), [(0, 150), (0, 7), (100, 1), (64, 40)])
def test_perplexity_is_that_of_one_plain_forward_pass_however_the_text_is_fed(model, first, chunk):
    got = compare(model, caches(model, "raw"), IDS, first=first, chunk=chunk)
    with torch.no_grad():
        log_p = torch.log_softmax(model(IDS[None]).logits[0], -1)
    scored = torch.arange(max(first, 1), 150)
    want = math.exp(-log_p[scored - 1, IDS[scored]].mean().item())
    for f in got.values():
        assert f.num_tokens == len(scored)
        assert f.perplexity == pytest.approx(want, rel=1e-4)
    assert got["raw"].kl_mean < 1e-6
    assert got["raw"].top1_agreement == 1.0


def test_fewer_bits_cost_more(model):
    long = torch.randint(0, 53, (420,), generator=torch.Generator().manual_seed(3))
    got = compare(model, caches(model, "int8", "int4", "kivi2"), long, first=0, chunk=10)
    assert 0 < got["int8"].kl_mean < got["int4"].kl_mean < got["kivi2"].kl_mean
    assert got["int8"].tvd_mean < got["int4"].tvd_mean
    assert got["int8"].kl_p99 >= got["int8"].kl_mean


def test_a_batch_of_texts_scores_like_each_text_alone(model):
    both = compare(model, caches(model, "int8"), IDS[:140].view(2, 70), first=0, chunk=16)
    one = compare(model, caches(model, "int8"), IDS[:70], first=0, chunk=16)
    two = compare(model, caches(model, "int8"), IDS[70:140], first=0, chunk=16, results=one)
    assert both["int8"].kl_mean == pytest.approx(two["int8"].kl_mean, abs=1e-7)
    assert both["int8"].nll == pytest.approx(two["int8"].nll, rel=1e-6)
    assert both["int8"].num_tokens == two["int8"].num_tokens == 138


def test_a_histogram_keeps_the_quantile_to_its_resolution():
    values = (torch.rand(5000, generator=torch.Generator().manual_seed(1)) ** 4).tolist()
    for q in (0.5, 0.99):
        assert histogram_quantile(histogram(values), q) == pytest.approx(torch.tensor(values).quantile(q).item(), rel=0.03)
    assert histogram_quantile(histogram([0.0, 0.0, 1.0]), 0.5) == 0.0
    assert sum(histogram([0.0, 0.1, 0.1]).values()) == 3


def test_kl_and_total_variation_of_known_distributions():
    f = Fidelity(nll=2 * math.log(4), num_tokens=2, kl=[0.1, 0.3], tvd=[0.0, 0.5], top1_same=1)
    assert f.perplexity == pytest.approx(4)
    assert f.kl_mean == pytest.approx(0.2)
    assert f.tvd_mean == 0.25
    assert f.top1_agreement == 0.5


def test_a_text_too_short_to_score_is_refused(model):
    with pytest.raises(DataError, match="nothing to score"):
        compare(model, caches(model), IDS[:5], first=5, chunk=1)
