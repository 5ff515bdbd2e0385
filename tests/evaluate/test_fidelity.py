"""The accuracy measures against hand-computed ones, on a tiny random model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from messages import raises
from nightly import at_night
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig

from kvbits import KVCache, schemes
from kvbits.errors import DataError
from kvbits.evaluate.fidelity import Fidelity, compare, histogram, histogram_quantile, prefill, read_raw
from kvbits.spec import CacheSpec, LayerGeometry, Override, QuantSpec


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=53,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


IDS = torch.randint(0, 53, (150,), generator=torch.Generator().manual_seed(2))


def caches(model, *schemes):
    return {"16-bit": DynamicCache(config=model.config)} | {s: KVCache.for_model(model, s) for s in schemes}


@pytest.mark.parametrize(("first", "chunk"), [(0, 150), (0, 7), (100, 1), (64, 40)])
def test_perplexity_is_that_of_one_plain_forward_pass_however_the_text_is_fed(model, first, chunk):
    held = caches(model, "raw")
    prefill(model, held, IDS[None, :first], 40)
    got = compare(model, held, IDS[first:], chunk=chunk)
    with torch.no_grad():
        log_p = torch.log_softmax(model(IDS[None]).logits[0], -1)
    scored = torch.arange(first + 1, 150)
    want = math.exp(-log_p[scored - 1, IDS[scored]].mean().item())
    for f in got.values():
        assert f.num_tokens == len(scored)
        assert f.perplexity == pytest.approx(want, rel=1e-4)
    assert got["raw"].kl_mean < 1e-6
    assert got["raw"].top1_agreement == 1.0


def test_fewer_bits_cost_more(model):
    long = torch.randint(0, 53, (420,), generator=torch.Generator().manual_seed(3))
    got = compare(model, caches(model, "int8", "int4", "kivi2"), long, chunk=10)
    assert 0 < got["int8"].kl_mean < got["int4"].kl_mean < got["kivi2"].kl_mean
    assert got["int8"].tvd_mean < got["int4"].tvd_mean
    assert got["int8"].kl_quantile(0.99) >= got["int8"].kl_mean


def test_a_batch_of_texts_scores_like_each_text_alone(model):
    both = compare(model, caches(model, "int8"), IDS[:140].view(2, 70), chunk=16)
    one = compare(model, caches(model, "int8"), IDS[:70], chunk=16)
    two = compare(model, caches(model, "int8"), IDS[70:140], chunk=16, results=one)
    assert both["int8"].kl_mean == pytest.approx(two["int8"].kl_mean, abs=1e-7)
    assert both["int8"].nll == pytest.approx(two["int8"].nll, rel=1e-6)
    assert both["int8"].num_tokens == two["int8"].num_tokens == 138


def test_a_histogram_keeps_the_quantile_to_its_resolution():
    values = (torch.rand(5000, generator=torch.Generator().manual_seed(1)) ** 4).tolist()
    for q in (0.5, 0.99):
        assert histogram_quantile(histogram(values), q) == pytest.approx(
            torch.tensor(values).quantile(q).item(), rel=0.03
        )
    few = [0.001 * 1.5**i for i in range(20)]  # where two neighbours are far apart, as the largest KLs are
    for q in (0.5, 0.99, 0.999, 1.0):
        assert histogram_quantile(histogram(few), q) == pytest.approx(torch.tensor(few).quantile(q).item(), rel=0.012)
    assert histogram_quantile(histogram([0.0, 0.0, 1.0]), 0.5) == 0.0
    assert sum(histogram([0.0, 0.1, 0.1]).values()) == 3
    for wrong in (math.nan, math.inf):  # of predictions that overflow
        with raises(DataError, "1 token", wrong, "bfloat16", "float32"):
            histogram([0.1, wrong])


def test_kl_and_total_variation_of_known_distributions():
    f = Fidelity(nlls=2 * [math.log(4)], kl=[0.1, 0.3], tvd=[0.0, 0.5], same=[True, False])
    assert f.perplexity == pytest.approx(4)
    assert f.kl_mean == pytest.approx(0.2)
    assert f.tvd_mean == 0.25
    assert f.top1_agreement == 0.5


def test_scores_are_those_of_llama_cpp_s_perplexity_tool():
    """Its definitions, written anew: KL of each prediction, probabilities of the token that comes next, top tokens."""
    drawn = torch.Generator().manual_seed(3)
    reference, other = (torch.randn(501, 20, generator=drawn, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    targets = torch.randint(20, (501,), generator=drawn)
    f = Fidelity()
    f.add(other.clone(), reference, reference.exp(), targets)
    rows = [*zip(reference.tolist(), other.tolist(), targets.tolist(), strict=True)]
    kl = np.array([sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True)) for p, q, _ in rows])
    changes = [math.exp(q[t]) - math.exp(p[t]) for p, q, t in rows]
    assert f.dp == pytest.approx(changes) and min(changes) < 0 < max(changes)
    assert f.dp_rms == pytest.approx(math.sqrt(sum(c * c for c in changes) / 501))
    assert f.kl_quantile(0.5) == pytest.approx(sorted(kl)[250], rel=1e-5)
    assert f.kl_quantile(0.999) == pytest.approx(np.quantile(kl, 0.999), rel=1e-4)
    assert f.top1_agreement == sum(np.argmax(p) == np.argmax(q) for p, q, _ in rows) / 501
    same = Fidelity()
    same.add(reference, reference, reference.exp(), targets)
    assert same.dp_rms == same.kl_quantile(0.999) == 0 and same.num_tokens == 501


def test_the_worst_prediction_is_found_again(model):
    long = torch.randint(0, 53, (2, 300), generator=torch.Generator().manual_seed(4))
    got = compare(model, caches(model, "kivi2"), long, chunk=9)
    again = compare(model, caches(model, "kivi2"), long[0], chunk=9, results=got)["kivi2"]
    row, position = again.kl_worst
    assert len(again.places) == len(again.kl) == 3 * 299 and set(again.places) == {
        (r, p) for r in range(3) for p in range(1, 300)
    }
    alone = compare(model, caches(model, "kivi2"), [*long, long[0]][row], chunk=9)["kivi2"]
    assert alone.kl_worst == (0, position) and alone.kl_max == pytest.approx(again.kl_max, rel=1e-3)
    counted = Fidelity(kl=[0.1, 3.0, 1.0], places=[(0, 1), (0, 2), (1, 1)])
    assert counted.kl_worst == (0, 2) and counted.num_lost == 1


class Counting:
    """Count of what a cache's closed pages hold whenever a chunk has been read, seen from its page lists."""

    def __init__(self, cache):
        self.cache, self.shares = cache, []

    def feed(self, model, ids, start, end):
        groups = self.cache.pages.groups
        before = (
            [self.closed(g) for g in groups]
            if groups and groups[0].sequences
            else [(0, 0)] * len(self.cache.pages.spec.groups)
        )
        with torch.no_grad():
            model(ids[None, start:end], past_key_values=self.cache, use_cache=True)
        read = before if end - start > 1 else [self.closed(g) for g in self.cache.pages.groups]
        for p in range(start, end):
            for spec, (first, last) in zip(self.cache.pages.spec.groups, read, strict=True):
                seen = spec.first_visible(p)
                self.shares += [1 - max(0, last - max(first, seen)) / (p + 1 - seen)] * len(spec.layers)

    @staticmethod
    def closed(group):
        s = group.sequences[0]
        starts = s.closed_starts(group.group.num_sink_tokens)
        return (starts[0], starts[-1] + s.closed_lengths[-1]) if starts else (0, 0)


@pytest.mark.parametrize("window", [None, 250])
@pytest.mark.parametrize("chunk", [16, 37, 128, *at_night(1)])
@pytest.mark.parametrize("scheme", ["int8_centered", "kivi4"])
def test_what_was_read_raw_is_what_the_page_lists_say(scheme, chunk, window):
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=53,
        sliding_window=window,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    mine = dataclasses.replace(
        schemes.get(scheme, head_dim=32),
        name="mine",
        num_sink_tokens=4,
        overrides=(Override(layers=(1,), key=QuantSpec.raw(), value=QuantSpec.raw()),),
    )
    counting, length = Counting(KVCache.for_model(model, mine)), 400
    ids = torch.randint(0, 53, (length,), generator=torch.Generator().manual_seed(5))
    for start in range(0, length - 1, chunk):
        counting.feed(model, ids, start, min(start + chunk, length - 1))
    want = sum(counting.shares) / len(counting.shares)
    assert read_raw(counting.cache.pages.spec, length, chunk=chunk) == pytest.approx(want, rel=1e-9) and 0.5 < want < 1


def test_the_share_read_raw_of_presets_is_what_an_audit_counted():
    layers = (LayerGeometry(num_kv_heads=1, head_dim=64),)
    spec = {
        name: CacheSpec(scheme=schemes.get(name, head_dim=64), layers=layers)
        for name in ("raw", "int8_centered", "int4", "kivi4", "klt4")
    }
    assert [round(read_raw(s, 1024, chunk=128), 2) for s in spec.values()] == [1, 0.38, 0.51, 0.55, 0.59]
    assert [round(read_raw(s, 8192, chunk=128), 2) for s in spec.values()] == [1, 0.08, 0.11, 0.13, 0.14]
    decoding = [read_raw(s, 1056, chunk=1, start=1024) for s in spec.values()]
    assert decoding[0] == 1 and sorted(decoding[1:]) == decoding[1:] and decoding[1] > 0.01 and decoding[-1] < 0.2
    more = [read_raw(s, 1024, chunk=16) - read_raw(s, 1024, chunk=1) for s in spec.values()]
    assert all(0 <= m < 0.05 for m in more), "a chunk of 16 reads nearly as decoding does"
    half = CacheSpec(
        scheme=dataclasses.replace(schemes.get("int4", head_dim=64), name="half", value=QuantSpec.raw()), layers=layers
    )
    assert read_raw(half, 1024, chunk=16) == pytest.approx((1 + read_raw(spec["int4"], 1024, chunk=16)) / 2)


def test_a_text_too_short_to_score_is_refused(model):
    with raises(DataError, "(1,)"):
        compare(model, caches(model), IDS[:1], chunk=1)


@pytest.mark.parametrize("q", [0.0, 0.5, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("count", [1, 2, 318])
def test_a_quantile_of_bins_lies_between_two_tokens_as_that_of_all_values(q, count):
    values = torch.logspace(-6, 0.5, count, dtype=torch.float64)
    wanted = values.quantile(q).item()
    assert histogram_quantile(histogram(values.tolist()), q) == pytest.approx(wanted, rel=0.012)
