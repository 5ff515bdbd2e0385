"""Tiered caches in Transformers: assisted generation with a tiered verifier and a low-bit draft, tiers while
generating.
"""

import dataclasses

import pytest
import torch
from nightly import at_night
from transformers import DynamicCache

from kvbits import schemes
from kvbits.integrations.huggingface import KVCache, default_cache
from kvbits.integrations.masks import cache_among
from kvbits.spec import PerChannel, PerToken, QuantSpec, Scheme, Tier

from .test_huggingface import prompts, tiny

SPEC = QuantSpec(format="int4", granularity=PerToken(), symmetric=False)
TIERED = Scheme(
    name="tiny tiers",
    key=QuantSpec(format="int4", granularity=PerChannel(), symmetric=False),
    value=SPEC,
    num_sink_tokens=4,
    residual_length=40,
    page_size=32,
    tiers=(Tier(num_tokens=64),),
)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def generate(model, inputs, cache, **kwargs):
    return model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=90, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, *at_night(1)])
@pytest.mark.parametrize("warm", [64, 4096])
def test_assisted_generation_is_plain_generation(model, seed, warm, length=200):
    """Tokens are speculated, rejected and taken back across tier boundaries and demotions, and leave the tiers that
    decoding the same tokens one by one leaves.

    That would choose the same tokens, but for ties, where all closed pages have 8 bits. Demotions wait for speculated
    tokens, so with a 4-bit tier a page may be read with 8 bits for a few tokens more, which a random model is sensitive
    to.
    """
    torch.manual_seed(seed)
    draft = tiny("llama") if seed % 2 else model
    inputs = prompts([length], seed=seed)
    scheme = dataclasses.replace(TIERED, tiers=(Tier(num_tokens=warm),))
    plain, assisted = KVCache.for_model(model, scheme), KVCache.for_model(model, scheme)
    model.generation_config.num_assistant_tokens = 5 + seed
    made = []
    with default_cache(draft, "int4", backend="reference"):
        prepared = draft._prepare_cache_for_generation

        def spy(config, kwargs, *args, **more):
            prepared(config, kwargs, *args, **more)
            made.append(cache_among(kwargs))

        draft._prepare_cache_for_generation = spy
        got = generate(model, inputs, assisted, assistant_model=draft)
    model.set_attn_implementation("kvbits")
    logits = [model(got[:, :length], past_key_values=plain).logits[0, -1]]
    logits += [model(got[:, i : i + 1], past_key_values=plain).logits[0, -1] for i in range(length, length + 89)]
    behind = torch.stack([(x.max() - x[token]) / x.std() for x, token in zip(logits, got[0, length:], strict=True)])
    assert behind.max() < 0.05 or warm == 64
    assert (behind == 0).float().mean() > 0.8
    assert any(isinstance(c, KVCache) and c is not assisted and c.pages.spec.scheme.name == "int4" for c in made), (
        "the draft's cache is low-bit"
    )
    ours, theirs = (c.pages.groups[0].sequences[0] for c in (assisted, plain))
    for s in (ours, theirs):
        assert s.young[0] <= warm // 32 + 1, "no page outlives the speculation in its tier by more than the one for it"
    assert (len(theirs.closed) - theirs.young[0] >= 3) == (warm == 64), "pages were demoted"
    # The same pages were demoted, as far as both have closed them.
    pages = min(len(ours.closed), len(theirs.closed))
    assert abs(len(ours.closed) - len(theirs.closed)) <= 1
    assert [ours.pool_of(i) for i in range(pages - 3)] == [theirs.pool_of(i) for i in range(pages - 3)]


def test_the_draft_gets_its_method_back(model):
    with default_cache(model, "int8"):
        out = model.generate(**prompts([20]), max_new_tokens=2, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, KVCache)
    out = model.generate(**prompts([20]), max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, DynamicCache)
    assert "_prepare_cache_for_generation" not in vars(model)


def test_tiers_change_while_generating(model):
    """Each row has boundaries of its own; shrinking them frees their pages at once and the model goes on."""
    cache = KVCache.for_model(model, TIERED)
    inputs = prompts([200, 180])
    out = generate(model, inputs, cache)
    store = cache.pages
    used = store.groups[0].pools["tier0"].allocator.num_used
    store.set_tiers(0, [0])
    assert store.groups[0].pools["tier0"].allocator.num_used == used - 2
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 91, dtype=torch.long)], 1)
    more = generate(model, {"input_ids": torch.cat([out, torch.tensor([[5], [6]])], 1), "attention_mask": mask}, cache)
    assert more.shape[1] == out.shape[1] + 91
    rows = [s.young[0] for s in store.groups[0].sequences]
    assert rows == [0, 2]


def test_the_preset_is_raw_until_its_hot_tier_is_full(model):
    inputs = prompts([60])
    stock = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    assert torch.equal(
        model.generate(
            **inputs, do_sample=False, max_new_tokens=20, past_key_values=KVCache.for_model(model, "tiered")
        ),
        stock,
    )
    assert schemes.get("tiered").residual_length == 2048
