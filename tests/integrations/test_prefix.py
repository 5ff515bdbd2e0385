"""A prompt whose beginning a store has goes on as if it had been computed, through Transformers' own generate."""

import dataclasses

import pytest
import torch
from full_disk import full_disk
from integrations.test_huggingface import tiny
from messages import raises, warns
from store_checks import bytes_of

from kvbits import KVCache, PrefixStore, schemes
from kvbits.errors import DataError, KvbitsWarning, SpecError

SMALL = {"page_size": 32, "num_sink_tokens": 4}


def scheme_of(name):
    return schemes.get(name, head_dim=16, **({} if name == "raw" else SMALL | {"residual_length": 32}))


def ids_of(n, seed=0):
    torch.manual_seed(seed)
    return torch.randint(3, 60, (1, n))


@pytest.mark.parametrize("name", ["raw", "int8_centered", "kivi4", "nuq"])
def test_a_stored_prompt_generates_what_it_generated_when_it_was_computed(tmp_path, name):
    model, ids = tiny("llama"), ids_of(200)
    scheme = (
        dataclasses.replace(
            scheme_of("int8_centered"), key=dataclasses.replace(scheme_of("int8_centered").key, pre_rope=False)
        )
        if name == "nuq"
        else scheme_of(name)
    )
    store = PrefixStore(tmp_path, blob_tokens=64)
    first = KVCache.from_prefix(model, ids, store=store, scheme=scheme, chunk=48)
    assert first.pages.seq_lens == [199]
    answer = model.generate(ids, past_key_values=first, max_new_tokens=20, do_sample=False)
    again = KVCache.from_prefix(model, ids, store=store, scheme=scheme, chunk=48)
    fresh = KVCache.from_prefix(model, ids, store=PrefixStore(tmp_path / "other"), scheme=scheme, chunk=48)
    assert bytes_of(again.pages) == bytes_of(fresh.pages)
    assert torch.equal(model.generate(ids, past_key_values=again, max_new_tokens=20, do_sample=False), answer)


def test_only_what_the_store_does_not_have_goes_through_the_model(tmp_path):
    model, ids, seen = tiny("llama"), ids_of(200), []
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    store = PrefixStore(tmp_path, blob_tokens=64)
    KVCache.from_prefix(model, ids, store=store, scheme=scheme_of("int8"), chunk=100)
    assert seen == [100, 99]
    seen.clear()
    KVCache.from_prefix(model, ids, store=store, scheme=scheme_of("int8"), chunk=100)
    assert seen == []
    longer = torch.cat([ids, ids_of(50, 1)], 1)
    KVCache.from_prefix(model, longer, store=store, scheme=scheme_of("int8"), chunk=100)
    assert seen == [50], "a conversation that goes on begins where it ended"
    seen.clear()
    other = torch.cat([ids[:, :150], ids_of(50, 2)], 1)
    KVCache.from_prefix(model, other, store=store, scheme=scheme_of("int8"), chunk=100)
    assert sum(seen) == 199 - 4 - 128
    seen.clear()
    KVCache.from_prefix(model, other, store=store, scheme=scheme_of("int4"), chunk=100)
    assert sum(seen) == 199, "another scheme finds nothing"


def test_a_conversation_that_goes_on_is_exactly_the_cache_that_went_on(tmp_path):
    model, ids = tiny("llama"), ids_of(260)
    scheme, store = scheme_of("kivi4"), PrefixStore(tmp_path, blob_tokens=64)
    cache = KVCache.from_prefix(model, ids[:, :151], store=store, scheme=scheme)
    with torch.no_grad():
        model.base_model(input_ids=ids[:, 150:259], past_key_values=cache)
    loaded = KVCache.from_prefix(model, ids, store=store, scheme=scheme)
    assert bytes_of(loaded.pages) == bytes_of(cache.pages)


def test_models_with_windows_share_beginnings_too(tmp_path):
    model, ids, seen = tiny("gemma3", sliding_window=120), ids_of(200), []
    store = PrefixStore(tmp_path, blob_tokens=32)
    scheme = scheme_of("int8_centered")
    first = KVCache.from_prefix(model, ids, store=store, scheme=scheme)
    again = KVCache.from_prefix(model, ids, store=store, scheme=scheme)
    assert bytes_of(again.pages) == bytes_of(first.pages)
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    other = torch.cat([ids[:, :150], ids_of(50, 2)], 1)
    cache = KVCache.from_prefix(model, other, store=store, scheme=scheme)
    assert cache.pages.seq_lens == [199]
    assert 199 - 132 <= sum(seen) <= 199
    assert model.generate(other, past_key_values=cache, max_new_tokens=5, do_sample=False).shape == (1, 205)


def test_weights_that_changed_find_nothing(tmp_path):
    model, ids = tiny("llama"), ids_of(100)
    store = PrefixStore(tmp_path, blob_tokens=32)
    KVCache.from_prefix(model, ids, store=store)
    assert store.match(KVCache.for_model(model, "int8_centered"), ids[:, :-1]) == 99
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    assert store.match(KVCache.for_model(model, "int8_centered"), ids) == 0


def test_a_prefix_that_no_disk_keeps_is_used(tmp_path):
    model, store = tiny("llama"), PrefixStore(tmp_path)
    with full_disk(), warns(KvbitsWarning, "prefixes"):
        cache = KVCache.from_prefix(model, ids_of(150), store=store, scheme=scheme_of("int8"), chunk=64)
    assert cache.pages.seq_lens == [149] and store.nbytes == 0


def test_nothing_is_put_unless_it_is_wanted_and_bad_calls_say_why(tmp_path):
    model = tiny("llama")
    store = PrefixStore(tmp_path)
    assert KVCache.from_prefix(model, ids_of(50), store=store, put=False).pages.seq_lens == [49]
    assert store.nbytes == 0
    assert KVCache.from_prefix(model, ids_of(1), store=store).pages.batch_size <= 1
    with raises(DataError, "prompt"):
        KVCache.from_prefix(model, [], store=store)
    with raises(DataError, "[tokens]", "[1, tokens]", "[2, 5]"):
        KVCache.from_prefix(model, torch.ones(2, 5, dtype=torch.long), store=store)
    with raises(SpecError, "chunk=0", 1):
        KVCache.from_prefix(model, ids_of(9), store=store, chunk=0)
    for place in (None, str(tmp_path), tmp_path):
        with raises(SpecError, "store=", "store=kvbits.PrefixStore(FOLDER)"):
            KVCache.from_prefix(model, ids_of(9), store=place)
