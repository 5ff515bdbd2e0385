"""A cache gives its memory back when the last reference to it goes, without waiting for the garbage collector."""

import copy
import gc
import weakref

import pytest
import torch
from integrations import families
from integrations.test_huggingface import prompts, tiny

from kvbits import KVCache, PrefixStore
from kvbits.errors import KvbitsError


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def decoded(model, cache, inputs, **options):
    model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0, past_key_values=cache, **options)
    return cache


def failed(model):
    """The mask hides what is cached."""
    cache = decoded(model, KVCache.for_model(model, "int8"), prompts([90, 40]))
    with torch.no_grad(), pytest.raises(KvbitsError):
        model(torch.full((2, 3), 5), attention_mask=torch.zeros(2, cache.get_seq_length() + 3), past_key_values=cache)
    return cache


def saved(model, folder):
    decoded(model, KVCache.for_model(model, "int8"), prompts([90])).save(folder / "file")
    return KVCache.load(folder / "file", model)


def changed(model):
    cache = decoded(model, KVCache.for_model(model, "int8"), prompts([90, 40]))
    cache.crop(-3)
    cache.batch_select_indices([0])
    cache.explain()
    return cache


WAYS = {
    "grows": lambda model, _: decoded(model, KVCache.for_model(model, "int8"), prompts([90, 40])),
    "fixed": lambda model, _: decoded(
        model, KVCache.for_model(model, "int8", batch_size=1, max_tokens=200), prompts([90])
    ),
    "tiers": lambda model, _: decoded(model, KVCache.for_model(model, "tiered_8k"), prompts([90, 40])),
    "dense": lambda model, _: decoded(model, KVCache.for_model(model, "int8", dense=True), prompts([90, 90])),
    "beams": lambda model, _: decoded(model, KVCache.for_model(model, "int8"), prompts([90]), num_beams=2),
    "copy": lambda model, _: copy.deepcopy(decoded(model, KVCache.for_model(model, "int8"), prompts([90]))),
    "prefix": lambda model, folder: KVCache.from_prefix(
        model, prompts([90])["input_ids"], store=PrefixStore(folder), scheme="int8"
    ),
    "failed": lambda model, _: failed(model),
    "saved": saved,
    "changed": lambda model, _: changed(model),
}


@pytest.mark.parametrize("way", WAYS)
def test_pages_are_freed_with_the_cache(way, tmp_path, no_collector):
    model = tiny("llama")
    cache = WAYS[way](model, tmp_path)
    kept = [weakref.ref(x) for x in (cache, cache.pages, *(p for g in cache.pages.groups for p in g.pools.values()))]
    del cache
    assert not [x() for x in kept if x() is not None]
    gone = weakref.ref(model)
    del model
    assert gone() is None, "and the cache's traces in the model do not keep it"


@pytest.mark.parametrize("config", ["T5GemmaConfig", "Qwen3NextConfig", "Gemma3nTextConfig", "DeepseekV32Config"])
def test_caches_of_other_kinds_of_models_are_freed_too(config, no_collector):
    family = next(f for f in families.FAMILIES if f.config == config)
    with families.quiet():
        model = families.build(family)
        dense, _ = families.said(model)
        cache = decoded(model, KVCache.for_model(model, "int8", dense=dense), families.inputs(model)[0])
    kept = [weakref.ref(x) for x in (cache, cache.pages, *(p for g in cache.pages.groups for p in g.pools.values()))]
    del cache
    assert not [x() for x in kept if x() is not None]
