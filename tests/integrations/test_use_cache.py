"""A KVCache that is passed is used, whatever `use_cache` says in a call or a configuration."""

import warnings

import pytest
import torch
from integrations import families
from integrations.test_huggingface import tiny
from messages import warns
from tiny import tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, MptConfig, pipeline

from kvbits import KVCache, PrefixStore
from kvbits.errors import KvbitsWarning
from kvbits.integrations.huggingface import default_cache
from kvbits.integrations.masks import passed

IDS = torch.arange(3, 53)[None]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def in_folder(model, folder):
    """Its twin from a folder whose config.json says use_cache: false, without a generation_config.json."""
    model.config.use_cache = False
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return type(model).from_pretrained(folder).eval()


def of_config(model, folder):
    model.config.use_cache = False
    return model


def of_generation(model, folder):
    model.generation_config.use_cache = False
    return model


@pytest.mark.parametrize("says_no", [in_folder, of_config, of_generation])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_says_no_generates_what_it_does_without_a_cache(tmp_path, family, says_no):
    model = tiny(family)
    want = model.generate(IDS, use_cache=True, **GREEDY)
    model = says_no(model, tmp_path)
    cache = KVCache.for_model(model, "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvbitsWarning)
        found = model.generate(IDS, past_key_values=cache, **GREEDY)
    assert torch.equal(found, want) and cache.pages.seq_lens == [61]


@pytest.mark.parametrize(
    "how",
    [
        {"use_cache": False},
        {"generation_config": GenerationConfig(use_cache=False, **GREEDY)},
        {"use_cache": False, "num_beams": 3},
        {"use_cache": False, "prefill_chunk_size": 16},
    ],
)
def test_a_call_that_says_no_is_told_once(how):
    model = tiny("llama")
    want = model.generate(IDS, **(GREEDY | how | {"use_cache": True}))
    cache = KVCache.for_model(model, "raw")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = model.generate(IDS, past_key_values=cache, **(GREEDY | how))
    assert torch.equal(found, want) and {*cache.pages.seq_lens} == {61}
    assert sum(issubclass(w.category, KvbitsWarning) for w in told) == 1


def test_a_model_whose_default_is_no():
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=64, max_seq_len=256)
    assert config.use_cache is False
    model = AutoModelForCausalLM.from_config(config).eval()
    want = model.generate(IDS, use_cache=True, **GREEDY)
    cache = KVCache.for_model(model, "raw", dense=True)
    with warns(KvbitsWarning, "MptForCausalLM", "use_cache=False"):
        found = model.generate(IDS, past_key_values=cache, **GREEDY)
    assert torch.equal(found, want) and cache.pages.seq_lens == [61]


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_a_pass_that_says_no_fills_the_cache_and_returns_it(family, positional):
    model = tiny(family)
    want = model(IDS).logits
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad(), warns(KvbitsWarning, type(model).__name__, "use_cache=False"):
        parts = [model(IDS[:, :30], use_cache=False, **passed(model, cache))]
        model.config.use_cache = False
        parts.append(model(*[IDS[:, 30:]], **passed(model, cache)))
    torch.testing.assert_close(torch.cat([p.logits for p in parts], 1), want, atol=1e-4, rtol=1e-3)
    assert cache.pages.seq_lens == [50]
    assert all((p.cache if hasattr(p, "cache") else p.past_key_values) is cache for p in parts)


def test_a_text_configuration_inside_another_that_says_no():
    model = families.build(next(f for f in families.FAMILIES if f.config == "LlavaConfig"))
    want = model.generate(IDS, use_cache=True, **GREEDY)
    model.config.text_config.use_cache = False
    model.generation_config.use_cache = None
    cache = KVCache.for_model(model, "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvbitsWarning)
        found = model.generate(IDS, past_key_values=cache, **GREEDY)
        with torch.no_grad():
            model(found[:, -1:], **passed(model, cache))
    assert torch.equal(found, want) and cache.pages.seq_lens == [62]


def test_from_prefix_of_a_model_that_says_no(tmp_path):
    model = tiny("llama")
    want = model.generate(IDS, **GREEDY)
    model.config.use_cache = model.generation_config.use_cache = False
    cache = KVCache.from_prefix(model, IDS, store=PrefixStore(tmp_path), scheme="raw")
    with warns(KvbitsWarning, "LlamaForCausalLM", "use_cache=False"):
        found = model.generate(IDS, past_key_values=cache, **GREEDY)
    assert torch.equal(found, want) and cache.pages.seq_lens == [61]


@pytest.mark.parametrize("attached", [False, True])
def test_assisted_decoding_with_drafts_that_say_no(attached):
    model, draft = tiny("llama"), tiny("llama", num_hidden_layers=2)
    want = model.generate(IDS, **GREEDY)
    for one in (model, draft):
        one.config.use_cache = one.generation_config.use_cache = False
    if attached:
        KVCache.for_model(draft, "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvbitsWarning)
        with default_cache(draft, "raw"):
            cache = KVCache.for_model(model, "raw")
            found = model.generate(IDS, past_key_values=cache, assistant_model=draft, **GREEDY)
    assert torch.equal(found, want) and cache.pages.seq_lens[0] <= 62
    assert "_prepare_cache_for_generation" not in draft.__dict__


def test_a_pipeline_of_a_model_that_says_no():
    words = tokenizer()
    model = tiny("llama", vocab_size=len(words))
    text = "the cache is used, whatever anybody says"
    pipe = pipeline("text-generation", model=model, tokenizer=words)
    want = pipe(text, **GREEDY)
    model.generation_config.use_cache = model.config.use_cache = False
    cache = KVCache.for_model(model, "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvbitsWarning)
        assert pipe(text, past_key_values=cache, use_cache=False, **GREEDY) == want
    assert cache.pages.seq_lens == [len(text) + 11]


def test_without_a_cache_no_stays_no():
    model = tiny("llama")
    KVCache.for_model(model, "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KvbitsWarning)
        out = model(IDS, use_cache=False)
        model.generate(IDS, use_cache=False, **GREEDY)
    assert (out.cache if hasattr(out, "cache") else out.past_key_values) is None
