"""Attaching a KVCache to a model can be undone, and a saved prefix knows its model."""

import pytest
import torch
import transformers
from integrations.test_huggingface import ours, prompts, stock, tiny
from messages import raises
from packaging.version import Version

from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, FileFormatError, PoolFullError, UnsupportedError
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.identity import identity
from kvbits.integrations.masks import CACHE_NAMES, name_for


@pytest.mark.parametrize("family, implementation", [("llama", "sdpa"), ("gemma2", "eager")])
def test_a_detached_model_is_what_it_was(family, implementation):
    model = tiny(family)
    model.set_attn_implementation(implementation)
    inputs = prompts([20, 9])
    want = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    cache = KVCache.for_model(model, "raw")
    KVCache.for_model(model, "int8")  # again: what it had before the first counts
    assert model.config._attn_implementation == "kvbits"
    KVCache.detach(model)
    assert model.config._attn_implementation == implementation
    KVCache.detach(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), want)
    with raises(UnsupportedError, "KVCache.for_model(model, ...)"):
        model(**inputs, past_key_values=cache)
    KVCache.for_model(model, "raw")
    model(**inputs, past_key_values=KVCache.for_model(model, "raw"))


def test_static_caches_and_batches_work_again_after_detach():
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    inputs = prompts([12])
    want = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    KVCache.for_model(model, "int8")
    if name_for(model) == CACHE_NAMES[0]:  # older ones may ask for masks that are refused
        assert torch.equal(
            model.generate(**inputs, max_new_tokens=5, do_sample=False, cache_implementation="static"), want
        )
    KVCache.detach(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False, cache_implementation="static"), want)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="continuous batching on a CPU is new there"
)
def test_generate_batch_works_again_after_detach():
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    KVCache.for_model(model, "int8")
    KVCache.detach(model)
    config = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=-1, pad_token_id=0, do_sample=False)
    # all free memory otherwise
    size = transformers.generation.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(inputs=[[3, 4, 5], [6, 7]], generation_config=config, continuous_batching_config=size)
    assert [len(x.generated_tokens) for x in found.values()] == [3, 3]


def test_detach_takes_models_only():
    with raises(DataError, "NoneType", "kvbits.load_model"):
        KVCache.detach(None)
    model = tiny("llama")
    KVCache.detach(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=["beams", "samples"]
)
def test_a_loaded_prefix_is_repeated_for_beams_and_samples(tmp_path, options):
    model = tiny("llama")
    inputs = prompts([30])
    with torch.no_grad():
        cache = KVCache.for_model(model, "raw")
        model(**inputs, past_key_values=cache)
    cache.save(tmp_path / "prefix")
    whole = {"input_ids": torch.cat([inputs["input_ids"], prompts([4], seed=2)["input_ids"]], 1)}
    loaded = KVCache.load(tmp_path / "prefix", model)
    with raises(CacheStateError, 1, 3, "batch_repeat_interleave(3)", "reset()"):
        ours(model, whole, cache=loaded, **options)
    loaded.batch_repeat_interleave(3)
    assert torch.equal(ours(model, whole, cache=loaded, **options), stock(model, whole, **options))


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}],
    ids=["beams", "samples"],
)
@pytest.mark.parametrize("family, scheme", [("gemma3", "int8"), ("llama", "int4")])
def test_a_loaded_quantized_prefix_goes_on_like_the_one_that_was_saved(tmp_path, family, scheme, options):
    """Windows and closed pages of several sequences that share a file's pages."""
    model, inputs = tiny(family), prompts([200])
    saved = KVCache.for_model(model, scheme)
    with torch.no_grad():
        model(**inputs, past_key_values=saved)
    saved.save(tmp_path / "prefix")
    loaded = KVCache.load(tmp_path / "prefix", model)
    whole = {"input_ids": torch.cat([inputs["input_ids"], prompts([4], seed=2)["input_ids"]], 1)}
    found = []
    for cache in (saved, loaded):
        cache.batch_repeat_interleave(3)
        found.append(ours(model, whole, cache=cache, max_new_tokens=8, **options))
    assert torch.equal(*found) and loaded.pages.seq_lens == [211] * 3


def test_a_prefix_of_fixed_capacity_is_loaded_to_grow_for_beams(tmp_path):
    model, inputs = tiny("llama"), prompts([60])
    cache = KVCache.for_model(model, "raw", max_tokens=96)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    cache.save(tmp_path / "prefix")
    whole = {"input_ids": torch.cat([inputs["input_ids"], prompts([4], seed=2)["input_ids"]], 1)}
    full, grown = (KVCache.load(tmp_path / "prefix", model, grow=grow) for grow in (False, True))
    for loaded in (full, grown):
        loaded.batch_repeat_interleave(3)
    with raises(PoolFullError, "1 sequence", "96 tokens", "load(.., grow=True)"):
        ours(model, whole, cache=full, num_beams=3)
    assert torch.equal(ours(model, whole, cache=grown, num_beams=3), stock(model, whole, num_beams=3))


def test_a_prefix_goes_on_after_the_model_was_detached_for_a_static_cache(tmp_path):
    model, inputs = tiny("llama"), prompts([20])
    model.set_attn_implementation("sdpa")
    whole = {"input_ids": torch.cat([inputs["input_ids"], prompts([4], seed=2)["input_ids"]], 1)}
    want = model.generate(**whole, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        cache = KVCache.for_model(model, "raw")
        model(**inputs, past_key_values=cache)
        cache.save(tmp_path / "prefix")
    KVCache.detach(model)
    static = transformers.StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(model.generate(**whole, past_key_values=static, max_new_tokens=5, do_sample=False), want)
    loaded = KVCache.load(tmp_path / "prefix", model)  # attaches the model again
    assert torch.equal(model.generate(**whole, past_key_values=loaded, max_new_tokens=5, do_sample=False), want)


def test_a_batch_that_no_repeat_gives_is_said():
    model = tiny("llama")
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(**prompts([9, 9]), past_key_values=cache)
        with raises(CacheStateError, 2, 3, "batch_select_indices()", "reset()"):
            model(torch.ones(3, 1, dtype=torch.long), past_key_values=cache)


def filled(model, path):
    cache = KVCache.for_model(model, "int8")
    with torch.no_grad():
        model(**prompts([70]), past_key_values=cache)
    cache.save(path)
    return cache


def test_a_prefix_of_other_weights_is_refused_unless_asked_for(tmp_path):
    model, other = tiny("llama"), tiny("llama")
    filled(model, tmp_path / "c")
    assert identity(model) == identity(other)
    assert KVCache.load(tmp_path / "c", other).pages.seq_lens == [70]
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    with raises(FileFormatError, "kvbits.identity", "check_weights=False"):
        KVCache.load(tmp_path / "c", other)
    taken = KVCache.load(tmp_path / "c", other, check_weights=False)
    taken.save(tmp_path / "again")  # still the first model's
    KVCache.load(tmp_path / "again", model)
    with raises(FileFormatError, "kvbits.identity", "check_weights=False"):
        KVCache.load(tmp_path / "again", other)


def test_a_prefix_of_another_dtype_is_refused(tmp_path):
    model = tiny("llama")
    filled(model, tmp_path / "c")
    with raises(FileFormatError, "float32", "torch.bfloat16"):
        KVCache.load(tmp_path / "c", model.bfloat16(), check_weights=False)


def test_files_that_do_not_say_whose_they_are_still_load(tmp_path):
    model, other = tiny("llama"), tiny("llama")
    cache = filled(model, tmp_path / "with")
    cache.pages.made_for = None
    cache.save(tmp_path / "without")
    assert (
        PagedCache.load(tmp_path / "with").made_for == identity(model)
        and PagedCache.load(tmp_path / "without").made_for is None
    )
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    assert KVCache.load(tmp_path / "without", other).pages.seq_lens == [70]


def test_a_fingerprint_follows_values_shapes_and_names():
    model = tiny("llama")
    first = identity(model)
    assert len(first) == 64 and first == identity(model)
    assert identity(tiny("llama", intermediate_size=64)) != first
    assert identity(tiny("qwen3")) != first
    meta = tiny("llama").to("meta")
    assert identity(meta) != first
