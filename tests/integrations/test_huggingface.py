"""The lossless scheme gives the stock cache's tokens for every model family and way of generating; bad calls get a
clear error.
"""

import copy
import gc
import os
import pickle
import weakref

import pytest
import torch
import transformers
from messages import raises
from nightly import at_night
from ops.cpu_cases import OTHERWISE, TILE_TIERS
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from kvbits import PrefixStore, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.cache.pool import allocate_slab
from kvbits.errors import CacheStateError, DataError, FileFormatError, PoolFullError, SpecError, UnsupportedError
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.masks import CACHE_NAMES, cache_among, name_for, passed
from kvbits.ops.cpu import library
from kvbits.spec import CacheSpec, LayerGeometry

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral_window": ("MistralConfig", {"sliding_window": 24}),
    "phi3": ("Phi3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def tiny(family: str, **changes) -> torch.nn.Module:
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(SMALL | extra | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(
    scope="module", params=["llama", "qwen3", "gemma3", *at_night("qwen2", "mistral_window", "phi3", "gemma2")]
)
def model(request):
    return tiny(request.param)


def prompts(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded ids and mask."""
    g = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, 97, (len(lengths), width), generator=g)
    attention_mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return {"input_ids": ids * attention_mask, "attention_mask": attention_mask}


def stock(model, inputs, **kwargs):
    model.set_attn_implementation("eager")
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=kwargs.pop("max_new_tokens", 20), **kwargs)


def ours(model, inputs, cache=None, **kwargs):
    cache = KVCache.for_model(model, "raw") if cache is None else cache
    model.set_attn_implementation("kvbits")
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=kwargs.pop("max_new_tokens", 20), past_key_values=cache, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 16},
    ],
    ids=["greedy", "sampling", "beam", "chunked_prefill"],
)
def test_a_raw_cache_generates_the_stock_tokens_for_a_left_padded_batch(model, kwargs):
    inputs = prompts([70, 33, 5])
    assert torch.equal(ours(model, inputs, **kwargs), stock(model, inputs, **kwargs))


@pytest.mark.parametrize("kind", ["draft", "prompt_lookup"])
def test_a_raw_cache_survives_speculation_and_rollback(model, kind):
    inputs = prompts([60])
    want = stock(model, inputs, do_sample=False, max_new_tokens=40)
    draft = tiny("llama") if kind == "draft" else None
    extra = {"assistant_model": draft} if draft is not None else {"prompt_lookup_num_tokens": 4}
    assert torch.equal(ours(model, inputs, do_sample=False, max_new_tokens=40, **extra), want)


def test_assisted_decoding_past_a_window_in_a_fixed_capacity_says_what_helps():
    model = tiny("gemma3")
    inputs, options = prompts([150]), {"do_sample": False, "prompt_lookup_num_tokens": 5}
    with raises(PoolFullError, "1 sequence", "5000 tokens", "sliding window of 24", "crop"):
        ours(model, inputs, cache=KVCache.for_model(model, "raw", max_tokens=5000), **options)
    assert torch.equal(
        stock(model, inputs, **options), ours(model, inputs, cache=KVCache.for_model(model, "raw"), **options)
    )
    with pytest.raises(PoolFullError) as plain:
        ours(model, inputs, cache=KVCache.for_model(model, "raw", max_tokens=100))
    assert "sliding" not in str(plain.value)


def test_a_second_turn_reuses_the_cache_and_reset_empties_it(model):
    inputs = prompts([40, 31])
    cache = KVCache.for_model(model, "raw")
    first = ours(model, inputs, cache=cache, do_sample=False)
    grown = torch.cat([inputs["attention_mask"], torch.ones(2, 20, dtype=torch.long)], 1)
    # Padding between turns: the stock cache counts it into a sliding window, ours counts real tokens, so only full
    # attention can be compared.
    windowed = getattr(model.config, "sliding_window", None) and "sliding_attention" in getattr(
        model.config, "layer_types", ["sliding_attention"]
    )
    more = prompts([8, 8] if windowed else [8, 6], seed=3)
    turn = {
        "input_ids": torch.cat([first, more["input_ids"]], 1),
        "attention_mask": torch.cat([grown, more["attention_mask"]], 1),
    }
    second = ours(model, turn, cache=cache, do_sample=False)
    model.set_attn_implementation("eager")
    stock_cache = DynamicCache(config=model.config)
    stock(model, inputs, do_sample=False, past_key_values=stock_cache)
    assert torch.equal(second, stock(model, turn, do_sample=False, past_key_values=stock_cache))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(ours(model, inputs, cache=cache, do_sample=False), first)


def test_a_deep_copied_prefix_can_be_continued_twice(model):
    inputs = prompts([50])
    prefix = KVCache.for_model(model, "raw")
    model(**inputs, past_key_values=prefix)
    tails = [torch.randint(2, 97, (1, 6), generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    for tail in tails:
        whole = {"input_ids": torch.cat([inputs["input_ids"], tail], 1)}
        got = ours(model, whole, cache=copy.deepcopy(prefix), do_sample=False)
        assert torch.equal(got, stock(model, whole, do_sample=False))


@pytest.mark.parametrize("scheme", ["int8", "int8_centered", "fp8"])
@torch.no_grad()
def test_eight_bit_logits_stay_near_the_stock_ones(model, scheme):
    inputs = prompts([130, 90])
    cache = KVCache.for_model(model, "raw")
    exact = model(**inputs, past_key_values=cache).logits
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    token = {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": mask}
    exact = model(**token, past_key_values=cache).logits
    quantized = KVCache.for_model(model, scheme)
    model(**inputs, past_key_values=quantized)
    got = model(**token, past_key_values=quantized).logits
    error = (got - exact).norm() / exact.norm()
    assert 0 < error < (0.3 if scheme == "fp8" else 0.05)
    assert any("int8" in repr(layer) or "fp8" in repr(layer) for layer in quantized.explain()["layers"])


def test_with_a_stock_cache_the_kvbits_attention_is_sdpa():
    model = tiny("llama")
    inputs = prompts([30, 12])
    model.set_attn_implementation("sdpa")
    want = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    model.set_attn_implementation("kvbits")
    assert torch.equal(model.generate(**inputs, max_new_tokens=10, do_sample=False), want)
    assert torch.equal(
        model(**inputs).logits, model(**inputs, past_key_values=DynamicCache(config=model.config)).logits
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation_gets_a_clear_error(implementation):
    model = tiny("llama")
    cache = KVCache.for_model(model, "int8")
    model.set_attn_implementation(implementation)
    with raises(UnsupportedError, "set_attn_implementation()", "KVCache.for_model(model, ...)"):
        model(**prompts([9]), past_key_values=cache)


def test_custom_masks_and_attention_weights_are_refused():
    model = tiny("llama")
    four_d = torch.zeros(1, 1, 9, 9)
    with raises(UnsupportedError, "LlamaAttention", "(1, 1, 9, 9)", "attention_mask", "[batch, tokens]"):
        model(
            input_ids=prompts([9])["input_ids"], attention_mask=four_d, past_key_values=KVCache.for_model(model, "int8")
        )
    with raises(UnsupportedError, "output_attentions=False"):
        model(**prompts([9]), past_key_values=KVCache.for_model(model, "int8"), output_attentions=True)


def test_bad_arguments_are_named():
    model = tiny("llama")
    with raises(SpecError, "'int5'", "int8", "int4", "raw"):
        KVCache.for_model(model, "int5")
    with raises(SpecError, "head_dim=16", "group_size=64", "group_size=16"):
        KVCache.for_model(model, schemes.get("int8"))
    cache = KVCache.for_model(tiny("qwen3"), "raw")
    for wrong in (3, -1.5, "5", None, torch.tensor(-1.5)):
        with raises(DataError, f"tokens_to_remove={wrong!r}", 0):
            cache.crop(wrong)
    with raises(UnsupportedError, "KVCache"):
        cache.layers[0].crop(-1)


def test_fixed_capacity_holds_exactly_the_planned_bytes():
    model = tiny("gemma3")
    cache = KVCache.for_model(model, "int8_per_token", batch_size=2, max_tokens=160)
    planned = cache.pages.spec.nbytes(160, 2)
    ours(model, prompts([140, 120]), cache=cache, do_sample=False)
    assert cache.nbytes == planned == sum(cache.pages.bytes_by_kind().values())


def test_a_dropped_cache_frees_its_pages_at_once():
    model = tiny("llama")
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(**prompts([40]), past_key_values=cache)
    gc.disable()
    try:
        watch = weakref.ref(cache.pages)
        del cache
        assert watch() is None
    finally:
        gc.enable()


def test_a_refused_pass_can_be_repeated_as_if_it_had_never_been_tried():
    model = tiny("llama")
    tried, clean = (KVCache.for_model(model, "raw", batch_size=1, max_tokens=128) for _ in range(2))
    inputs = prompts([100])
    with torch.no_grad():
        for cache in (tried, clean):
            model(**inputs, past_key_values=cache)
        with raises(PoolFullError, "1 sequence", "128 tokens", "1 x 200", "max_tokens", "grow=True"):
            model(input_ids=prompts([200])["input_ids"], past_key_values=tried)
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedError):
            model(input_ids=prompts([3])["input_ids"], past_key_values=tried)
        model.set_attn_implementation("kvbits")
        assert tried.get_seq_length() == 100
        more = prompts([20], seed=5)["input_ids"]
        assert torch.equal(
            model(input_ids=more, past_key_values=tried).logits, model(input_ids=more, past_key_values=clean).logits
        )


@pytest.mark.parametrize("lengths", [[60], [60, 41]])
@pytest.mark.parametrize("how", ["save", "pickle"])
def test_a_saved_cache_is_continued_where_it_stopped(tmp_path, lengths, how):
    model = tiny("qwen3")
    inputs = prompts(lengths)
    cache = KVCache.for_model(model, "int8")
    first = ours(model, inputs, cache=cache, do_sample=False)
    if how == "save":
        cache.save(tmp_path / "cache.safetensors")
        again = KVCache.load(tmp_path / "cache.safetensors", model)
    else:
        again = pickle.loads(pickle.dumps(cache))
    assert again.get_seq_length() == cache.get_seq_length() == 79
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 20, dtype=torch.long)], 1)
    turn = {"input_ids": first, "attention_mask": mask}
    assert torch.equal(ours(model, turn, cache=again, do_sample=False), ours(model, turn, cache=cache, do_sample=False))


def test_a_saved_cache_of_fixed_capacity_can_be_loaded_to_grow(tmp_path):
    model = tiny("llama")
    cache = KVCache.for_model(model, "int8", max_tokens=80)
    inputs = prompts([60])
    ours(model, inputs, cache=cache, max_new_tokens=4)
    cache.save(tmp_path / "c")
    more = prompts([150])["input_ids"]
    with torch.no_grad():
        with raises(PoolFullError, "1 sequence", "80 tokens", "1 x 150", "max_tokens", "grow=True"):
            model(input_ids=more, past_key_values=KVCache.load(tmp_path / "c", model))
        grown = KVCache.load(tmp_path / "c", model, grow=True)
        model(input_ids=more, past_key_values=grown)
    assert grown.pages.seq_lens == [213]


def test_a_cache_of_another_shape_is_not_loaded(tmp_path):
    cache = KVCache.for_model(tiny("qwen3"), "raw")
    cache.save(tmp_path / "cache.safetensors")
    with raises(FileFormatError, "cache.safetensors", "3 layers"):
        KVCache.load(tmp_path / "cache.safetensors", tiny("llama"))


def test_after_for_model_a_softcapped_model_still_works_with_stock_caches():
    model = tiny("gemma2")
    inputs = prompts([40, 21])
    want = stock(model, inputs, do_sample=False)
    KVCache.for_model(model, "raw")
    assert model.config._attn_implementation == "kvbits"
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), want)


def test_what_is_no_model_is_said_when_loading(tmp_path):
    KVCache.for_model(tiny("llama"), "raw").save(tmp_path / "c")
    with raises(DataError, "NoneType", "kvbits.load_model"):
        KVCache.load(tmp_path / "c", None)


def test_what_is_no_model_scheme_or_calibration_is_said():
    with raises(DataError, "str", "kvbits.load_model"):
        KVCache.for_model("Qwen/Qwen2.5-0.5B", "int8")
    with raises(SpecError, "scheme=4", "Scheme", "int8"):
        KVCache.for_model(tiny("llama"), 4)
    with raises(FileFormatError, "file.safetensors", "kvbits calibrate"):
        KVCache.for_model(tiny("llama"), "int8_static", calibration="file.safetensors")


def test_a_static_cache_is_told_to_detach_or_has_the_tokens_of_a_growing_one():
    """Transformers 5.24 makes masks for it that ours can be, older releases do not.

    It counts on in the offset that a mask was asked with.
    """
    model = tiny("llama")
    model.set_attn_implementation("kvbits")
    inputs, options = prompts([9]), {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(**inputs, **options)
    try:
        got = model.generate(**inputs, **options, cache_implementation="static")
    except UnsupportedError as error:
        assert "KVCache.detach(model)" in str(error) and name_for(model) != CACHE_NAMES[0]
        return
    assert torch.equal(got, want)
    ids, cache = prompts([40])["input_ids"], StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        logits = torch.cat(
            [model(piece, **{name_for(model): cache}, use_cache=True).logits for piece in ids.split([29, 1, 10], 1)], 1
        )
        assert (logits - model(ids, use_cache=False).logits).abs().max() < 1e-5


@torch.no_grad()
def test_sequences_that_were_changed_through_the_pages_are_not_gone_on_with(tmp_path):
    model, inputs, store = tiny("llama"), prompts([40, 40]), PrefixStore(tmp_path)
    cache = KVCache.for_model(model, "int8")
    model(**inputs, past_key_values=cache)
    store.park(cache.pages, inputs["input_ids"][1].tolist(), 1)
    step = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": torch.ones(2, 41, dtype=torch.long)}
    with raises(CacheStateError, "[40, 0]", "[40, 40]", "KVCache.from_prefix", "reset()"):
        model(**step, past_key_values=cache)
    store.resume(cache.pages, inputs["input_ids"][1].tolist(), 1)
    model(**step, past_key_values=cache)
    assert cache.pages.seq_lens == [41, 41]
    loaded = KVCache.for_model(model, "int8")
    store.load(loaded.pages, inputs["input_ids"][1].tolist())
    with raises(CacheStateError, "[40]", "[0]", "KVCache.from_prefix", "reset()"):
        model(input_ids=inputs["input_ids"][:1, :1], past_key_values=loaded)
    cache.pages.reset()
    with raises(CacheStateError, "[0]", "[41]", "KVCache.from_prefix", "reset()"):
        model(input_ids=inputs["input_ids"][:1, :1], past_key_values=cache)


@pytest.mark.parametrize(
    "kept", [[1], torch.tensor([False, True]), torch.tensor([1], dtype=torch.uint8)], ids=["a list", "a mask", "bytes"]
)
def test_sequences_are_chosen_as_in_the_stock_cache(kept):
    model, inputs = tiny("llama"), prompts([40, 30])
    cache = KVCache.for_model(model, "int8")
    model(**inputs, past_key_values=cache)
    for wrong in ([True], [[True, False], [False, True]], [2], [-1], [0.0], 1):
        with raises(DataError, f"indices={wrong}", "2 sequences", 0, 1):
            cache.batch_select_indices(wrong)
    cache.batch_select_indices(kept)
    assert cache.pages.seq_lens == [30] and cache.columns.valid.sum(1).tolist() == [30]


def test_a_mask_longer_than_the_tokens_so_far_is_read_where_they_are():
    model = tiny("llama")
    inputs = prompts([60, 40])
    with torch.no_grad():
        want = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits[:, -1]
        cache = KVCache.for_model(model, "raw")
        for part in (slice(0, 30), slice(30, 60)):
            got = model(
                inputs["input_ids"][:, part], attention_mask=inputs["attention_mask"], past_key_values=cache
            ).logits[:, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_mask_that_ends_early_or_hides_cached_tokens_is_refused():
    model = tiny("llama")
    inputs = prompts([30])
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        one = inputs["input_ids"][:, :1]
        with raises(UnsupportedError, "attention_mask", "1 tokens", 30):
            model(one, attention_mask=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        hidden = torch.ones(1, 31, dtype=torch.long)
        hidden[0, 4] = 0
        with raises(UnsupportedError, "attention_mask"):
            model(one, attention_mask=hidden, past_key_values=cache)
        model(one, attention_mask=torch.ones(1, 31, dtype=torch.long), past_key_values=cache)


def test_a_window_the_model_does_not_mask_is_refused():
    model = tiny("llama")
    layers = (LayerGeometry(num_kv_heads=2, head_dim=16, sliding_window=8),) * 3
    cache = KVCache(PagedCache(CacheSpec(scheme=schemes.get("raw"), layers=layers, raw_dtype="float32")))
    model.set_attn_implementation("kvbits")
    with raises(UnsupportedError, "layer 0", "None", 8, "CacheSpec"):
        model(**prompts([20]), past_key_values=cache)


def test_a_forked_process_cannot_write_into_the_cache():
    pool = allocate_slab(4 << 20, torch.device("cpu"))
    pool.fill_(1)
    child = os.fork()
    if not child:
        pool.numpy()[:] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert int(pool[12345]) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("how", ["our error", "interrupted"])
def test_a_pass_that_dies_between_layers_leaves_the_cache_as_it_was(family, how):
    model = tiny(family)
    tried, clean = (KVCache.for_model(model, "int8") for _ in range(2))
    inputs = prompts([60, 41])
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    more = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": mask}

    def die(module, args):
        if how == "interrupted":
            raise KeyboardInterrupt
        return (args[0] * float("nan"), *args[1:])

    with torch.no_grad():
        for cache in (tried, clean):
            model(**inputs, past_key_values=cache)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(die)
        with pytest.raises(KeyboardInterrupt if how == "interrupted" else DataError):
            model(**more, past_key_values=tried)
        hook.remove()
        if how == "interrupted":
            tried.abandon()
        assert tried.get_seq_length() == 60 and [layer.get_seq_length() for layer in tried.layers] == [60] * 3
        for _ in range(5):
            assert torch.equal(model(**more, past_key_values=tried).logits, model(**more, past_key_values=clean).logits)
            more["attention_mask"] = torch.cat([more["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)


def test_a_sequence_whose_scale_overflows_can_be_left_out_and_the_others_go_on():
    model = tiny("llama")
    inputs = prompts([64, 64])
    tried, clean = (KVCache.for_model(model, "int8") for _ in range(2))

    def huge(module, args, out):
        return torch.cat([out[:1], out[1:] * 1e9]) if len(out) > 1 else out

    mask = torch.ones(2, 65, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=inputs["input_ids"][:1], past_key_values=clean)
        hook = model.model.layers[2].self_attn.v_proj.register_forward_hook(huge)
        model(**inputs, past_key_values=tried)
        hook.remove()
        for _ in range(2):
            with raises(
                DataError, "values", "layer 2", "tokens 0 to 63", "sequence 1", "float16", "scale_dtype='float32'"
            ):
                model(input_ids=torch.tensor([[5], [5]]), attention_mask=mask, past_key_values=tried)
            assert tried.get_seq_length() == 64
        tried.batch_select_indices(torch.tensor([0]))
        for token in (5, 6, 7):
            one = {"input_ids": torch.tensor([[token]])}
            assert torch.equal(model(**one, past_key_values=tried).logits, model(**one, past_key_values=clean).logits)


@pytest.mark.parametrize("scheme", ["raw", "int8_centered", "kivi4", "tiered"])
def test_a_default_device_is_not_where_the_host_keeps_its_numbers(scheme, tmp_path):
    """torch.set_default_device("cuda"), as scripts do: with "meta" no number of the host's could be read."""
    model, inputs = tiny("llama", num_hidden_layers=2), prompts([70, 50])
    ids, mask, positions = inputs["input_ids"], inputs["attention_mask"], torch.arange(70)[None]
    with torch.device("meta"), torch.no_grad():
        cache = KVCache.for_model(model, scheme, batch_size=2, max_tokens=100)
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        for i in range(70, 72):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            model(ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:] + i - 69, past_key_values=cache)
        cache.crop(-1)
        cache.save(tmp_path / "cache.kvbits")
        loaded = KVCache.load(tmp_path / "cache.kvbits", model)
        assert loaded.pages.seq_lens == cache.pages.seq_lens == [71, 51]
        loaded.pages.dequantize(1, 1)


def gradients(model, ids, cache, past):
    model.zero_grad()
    if past:
        with torch.no_grad():
            model(ids[:, :past], past_key_values=cache)
    model(ids[:, past:], past_key_values=cache).logits.square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_are_right_in_a_first_chunk_and_refused_behind_it():
    model, ids = tiny("llama"), prompts([30])["input_ids"]
    for mine, theirs in zip(
        gradients(model, ids, KVCache.for_model(model, "raw"), 0), gradients(model, ids, DynamicCache(), 0), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
    for past in (20, 29):
        cache = KVCache.for_model(model, "raw")
        with raises(UnsupportedError, "gradients", "torch.no_grad()"):
            gradients(model, ids, cache, past)
        assert not cache.pages.in_pass and cache.get_seq_length() == past
        with torch.no_grad():
            model(ids[:, past:], past_key_values=cache)
        assert cache.get_seq_length() == 30
    with raises(UnsupportedError, "gradients", "torch.no_grad()"):
        gradients(model, ids[:, :1], KVCache.for_model(model, "raw"), 0)


def test_what_needs_the_model_says_so(tmp_path):
    cache = KVCache.for_model(tiny("llama"))
    cache.save(tmp_path / "cache")
    for call in (cache.detach, lambda: KVCache.load(tmp_path / "cache")):
        with raises(DataError, "NoneType", "AutoModelForCausalLM.from_pretrained", "kvbits.load_model"):
            call()


def test_a_cache_is_passed_by_the_name_that_the_forward_pass_takes():
    class Newer:
        def forward(self, input_ids, cache=None): ...

    class Older:
        def forward(self, input_ids, past_key_values=None, **kwargs): ...

    assert passed(Newer(), 1) == {"cache": 1} and passed(Older(), 1) == {"past_key_values": 1}
    assert [cache_among({name: 1, "use_cache": True}) for name in CACHE_NAMES] == [1, 1] and cache_among(
        {"cache": None, "past_key_values": None}
    ) is None


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_generate_asks_the_cache_by_either_name(name, monkeypatch):
    model, inputs, entered = tiny("llama"), prompts([9]), []
    if name not in (name_for(model), "past_key_values"):
        pytest.skip(f"this Transformers does not know {name}")
    cache = KVCache.for_model(model, "int8")
    monkeypatch.setattr(KVCache, "enter_pass", lambda self: entered.append(self))
    model.generate(**inputs, **{name: cache}, max_new_tokens=3, do_sample=False)
    assert len(entered) >= 3 and set(map(id, entered)) == {id(cache)}


@pytest.mark.parametrize("tier", TILE_TIERS)
def test_chunks_read_their_history_in_tiles(tier):
    """Logits of a chunk differ from those of the tier without tiles, and are near. Those of single tokens are the same."""
    model = tiny("llama", head_dim=32, num_attention_heads=8).bfloat16()
    ids = torch.randint(2, 97, (1, 300), generator=torch.Generator().manual_seed(1))
    before, found = library.tier(), []
    try:
        for name in (tier, OTHERWISE[tier]):
            library.set_tier(name)
            cache = KVCache.for_model(model, "int4")
            with torch.no_grad():
                found.append([model(x, **passed(model, cache)).logits for x in ids.split([280, 1, 19], 1)])
    finally:
        library.set_tier(before)
    (*alone, chunk), (*same, other) = found
    assert all(map(torch.equal, alone, same))
    assert not torch.equal(chunk, other)
    assert (chunk - other).norm() < 0.1 * other.norm()
