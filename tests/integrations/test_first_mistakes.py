"""The first mistakes of a new user, and of every chat program: taken, or an error with the way out."""

import warnings

import pytest
import torch
from integrations.test_huggingface import tiny
from messages import raises
from transformers import DynamicCache

import kvbits
from kvbits import CacheSpec, KVCache, LayerGeometry, PagedCache, PrefixStore, schemes
from kvbits.errors import CacheStateError, DataError, PoolFullError, SpecError
from kvbits.integrations.masks import passed

IDS = torch.arange(3, 53)[None]
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def used():
    model = tiny("llama")
    cache = KVCache.for_model(model, "raw")
    return model, cache, model.generate(IDS, past_key_values=cache, **GREEDY)


@pytest.mark.parametrize(
    "prompt, parts",
    [
        (IDS[:, :10], ("57 tokens", "10 tokens")),
        (IDS.flip(1), ("57 tokens", "50 tokens")),
        (torch.cat([IDS.flip(1), IDS], 1), ("57 tokens", "100 tokens", "token 0")),
        (torch.cat([IDS[:, :40], IDS], 1), ("57 tokens", "90 tokens", "token 40")),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_another_prompt_on_a_used_cache(prompt, parts, masked):
    model, cache, _ = used()
    how = {"attention_mask": torch.ones_like(prompt)} if masked else {}
    with raises(CacheStateError, *parts, "KVCache.for_model", "cache.reset()", "cache.crop(-n)", "copy.deepcopy"):
        model.generate(prompt, past_key_values=cache, **how, **GREEDY)
    assert cache.pages.seq_lens == [57]


def test_a_chat_that_goes_on():
    model, cache, text = used()
    more = torch.cat([text, IDS], 1)
    want = model.generate(more, **GREEDY)
    assert torch.equal(model.generate(more, past_key_values=cache, **GREEDY), want)
    cache.crop(-(cache.get_seq_length() - 40))
    other = torch.cat([IDS[:, :40], IDS[:, :5]], 1)
    assert torch.equal(model.generate(other, past_key_values=cache, **GREEDY), model.generate(other, **GREEDY))
    cache.reset()
    assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), text)
    only_new = torch.cat([torch.ones_like(text), torch.ones(1, 3, dtype=torch.long)], 1)
    model.generate(IDS[:, :4], attention_mask=only_new, past_key_values=cache, **GREEDY)


def test_generate_warns_of_no_name_of_its_argument():
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("past_key_values", "cache"):
            cache = KVCache.for_model(model, "raw")
            model.generate(IDS, **{name: cache}, **GREEDY)
            assert cache.pages.seq_lens == [57]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stock_caches_own_bytes(dtype):
    model = tiny("gemma3").to(dtype)
    stock, cache = DynamicCache(config=model.config), KVCache.for_model(model, "int8")
    for one in (stock, cache):
        model.generate(IDS, **passed(model, one), **GREEDY)
    assert cache.stock_nbytes == sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))


def test_a_dtype_of_torch_is_a_dtype():
    model, _ = kvbits.load_model("embedded", dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.dtype == torch.bfloat16
    layers = (LayerGeometry(num_kv_heads=2, head_dim=16),)
    raw = schemes.get("raw")
    assert CacheSpec(scheme=raw, layers=layers, raw_dtype=torch.float32) == CacheSpec(
        scheme=raw, layers=layers, raw_dtype="float32"
    )
    for wrong in (torch.int8, "torch.int8", "float8", 16):
        with raises(SpecError, str(wrong).removeprefix("torch."), "float16", "bfloat16"):
            kvbits.load_model("embedded", dtype=wrong)


def test_a_name_without_a_network_is_one_error(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    with raises(SpecError, "nobody/nothing-of-this-name", "huggingface.co", "hf download", "HF_ENDPOINT") as told:
        kvbits.load_model("nobody/nothing-of-this-name")
    assert told.value.__suppress_context__ and told.value.__cause__ is None


def test_a_file_that_is_no_model_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(kvbits.KvbitsError) as told:
        kvbits.load_model(str(tmp_path))
    assert told.value.__suppress_context__ and told.value.__cause__ is None


@pytest.mark.parametrize("call", [KVCache.for_model, lambda model: KVCache.load("x", model), KVCache.detach])
def test_what_is_no_model_is_named_by_its_type(call):
    class Long:
        def __repr__(self):
            return "x" * 10_000

    with raises(DataError, "Long", "kvbits.load_model") as told:
        call(Long())
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("text, tokens", [("8k", 8192), ("1,024", 1024), ("64", 64)])
def test_sizes_are_texts_too(tmp_path, text, tokens):
    model = tiny("llama")
    cache = KVCache.for_model(model, "raw", max_tokens=text)
    assert (
        cache.pages.max_tokens == tokens and cache.nbytes == KVCache.for_model(model, "raw", max_tokens=tokens).nbytes
    )
    assert PagedCache(cache.pages.spec, max_tokens=text).max_tokens == tokens
    store = PrefixStore(tmp_path, max_bytes="1GB", blob_tokens="64")
    assert store.blob_tokens == 64 and store.max_bytes == 10**9
    KVCache.from_prefix(model, IDS, store=store, scheme="raw", chunk=text)
    for wrong in ("8 apples", "0", "", 1.5, True):
        with raises(SpecError, "max_tokens"):
            KVCache.for_model(model, "raw", max_tokens=wrong)


def test_what_a_fixed_capacity_really_holds_is_said():
    model = tiny("llama")
    cache = KVCache.for_model(model, "raw", max_tokens=32)
    room = cache.pages.spec.room(32)
    assert room > 32 and str(room) in repr(cache) and str(room) in str(cache.explain())
    with torch.no_grad():
        model(IDS[:, : min(room, 50)], **passed(model, cache))
    with raises(PoolFullError, "1 sequence", "32 tokens", f"{room} tokens"), torch.no_grad():
        for _ in range(room):
            model(IDS[:, :10], **passed(model, cache))
