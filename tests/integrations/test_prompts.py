"""A prompt is more than its ids: what no ids name is never stored as if it were words."""

import copy

import peft
import pytest
import torch
import transformers
from integrations import families
from integrations.test_huggingface import tiny
from messages import raises
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kvbits import KVCache, PrefixStore
from kvbits.errors import CacheStateError, DataError, UnsupportedError
from kvbits.integrations import prompts
from kvbits.integrations.masks import passed

IMAGE_FAMILIES = ("LlavaConfig", "Qwen2VLConfig", "Qwen3VLConfig", "PaliGemmaConfig", "Gemma3Config")
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def model_of(config):
    return families.build(next(f for f in families.FAMILIES if f.config == config))


def with_image(model):
    """Return the arguments of `generate` for one prompt with an image."""
    call, _ = families.inputs(model)
    rows = {name: x[: len(x) // 2] for name, x in call.items()}
    return rows | {"attention_mask": torch.ones_like(rows["input_ids"])}


def adapted(config):
    with families.quiet():
        return peft.get_peft_model(tiny("llama"), config).eval()


def audio_model():
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**families.SMALL),
        audio_config={
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
        audio_token_index=90,
    )
    torch.manual_seed(0)
    return transformers.Qwen2AudioForConditionalGeneration(config).eval()


@pytest.mark.parametrize("config", IMAGE_FAMILIES)
def test_a_prompt_with_an_image_is_refused_and_one_of_words_is_stored(tmp_path, config):
    model, store = model_of(config), PrefixStore(tmp_path, blob_tokens=64)
    call = with_image(model)
    words = torch.randint(3, 80, (1, 100), generator=torch.Generator().manual_seed(3))
    want = model.generate(words, **GREEDY)
    with raises(UnsupportedError, "tokens", type(model).__name__, "KVCache.for_model", "copy.deepcopy"):
        KVCache.from_prefix(model, call["input_ids"], store=store, scheme="raw")
    assert store.explain()["files"] == 0
    with families.quiet():
        model.generate(**call, **GREEDY)  # leaves what it knows of the image's positions
    for _ in range(2):
        cache = KVCache.from_prefix(model, words, store=store, scheme="raw", chunk=24)
        assert torch.equal(model.generate(words, **passed(model, cache), **GREEDY), want)
    assert store.explain()["files"]


@pytest.mark.parametrize("config", IMAGE_FAMILIES)
def test_what_an_image_made_is_stored_by_a_name_only(tmp_path, config):
    model, store = model_of(config), PrefixStore(tmp_path, blob_tokens=64)
    call = with_image(model)
    cache = KVCache.for_model(model, "raw")
    with families.quiet():
        text = model.generate(**call, **passed(model, cache), **GREEDY)
    for held in (cache, copy.deepcopy(cache), cache.pages):
        with raises(UnsupportedError, "mm_encoder_outputs", "extra=", "put()", "load()"):
            store.put(held, text)
    assert store.explain()["files"] == 0
    stored = store.put(cache, text, extra=b"one image")
    assert stored == store.match(cache, text, extra=b"one image") == text.shape[1] - 1
    assert store.match(cache, text) == store.match(cache, text, extra=b"another") == 0
    cache.reset()
    words = torch.randint(3, 80, (1, 100))
    with torch.no_grad():
        model(words, **passed(model, cache))
    assert store.put(cache, words)


def test_a_sound_is_no_word(tmp_path):
    model = audio_model()
    ids = torch.full((1, 40), 5)
    ids[0, 7:9] = 90
    with raises(UnsupportedError, "2 tokens", "id 90", "audio_token_index", "KVCache.for_model", "copy.deepcopy"):
        KVCache.from_prefix(model, ids, store=PrefixStore(tmp_path), scheme="raw")


@pytest.mark.parametrize(
    "name, value",
    [
        ("pixel_values", torch.zeros(1, 3, 28, 28)),
        ("inputs_embeds", torch.zeros(1, 30, 64)),
        ("token_type_ids", torch.ones(1, 30)),
        ("position_ids", torch.arange(30)[None] + 7),
    ],
)
def test_inputs_beside_the_ids_are_refused_by_name(tmp_path, name, value):
    model = model_of("Gemma3Config")
    with raises(UnsupportedError, name, "KVCache.for_model"):
        KVCache.from_prefix(model, torch.full((1, 30), 5), store=PrefixStore(tmp_path), scheme="raw", **{name: value})


def test_an_option_that_nobody_knows_is_an_error(tmp_path):
    with raises(TypeError, "'max_token'"):
        KVCache.from_prefix(tiny("llama"), [3, 4, 5], store=PrefixStore(tmp_path), scheme="raw", max_token=5)


@pytest.mark.parametrize("how", ["inputs_embeds", "position_ids"])
def test_a_pass_of_more_than_ids_is_not_stored(tmp_path, how):
    model, ids = tiny("llama"), torch.arange(3, 43)[None]
    cache, store = KVCache.for_model(model, "raw"), PrefixStore(tmp_path)
    call = {
        "inputs_embeds": {"inputs_embeds": model.get_input_embeddings()(ids) * 1.5},
        "position_ids": {"input_ids": ids, "position_ids": torch.arange(9, 49)[None]},
    }[how]
    with torch.no_grad():
        model(**call, **passed(model, cache))
    with raises(UnsupportedError, how, "extra="):
        store.put(cache, ids)
    assert store.put(cache, ids, extra=b"mine") == 40


def test_padding_moves_positions_and_is_no_other_prompt(tmp_path):
    model, store = tiny("llama"), PrefixStore(tmp_path)
    ids = torch.arange(3, 83).reshape(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache = KVCache.for_model(model, "raw")
    text = model.generate(ids * mask, attention_mask=mask, **passed(model, cache), **GREEDY)
    assert store.put(cache, text[0], 0) == 45 and store.put(cache, text[1, 9:], 1) == 36


def test_padding_that_positions_count_is_another_prompt(tmp_path):
    """A pass without `position_ids` counts padding: its keys are turned by other positions."""
    model, store = tiny("llama"), PrefixStore(tmp_path)
    ids, mask = torch.arange(3, 83)[None], torch.ones(1, 80, dtype=torch.long)
    mask[0, :10] = 0
    for how in ({}, {"position_ids": torch.arange(80)[None]}):
        cache = KVCache.for_model(model, "raw")
        with torch.no_grad():
            model(ids, attention_mask=mask, **how, **passed(model, cache))
        with raises(UnsupportedError, "position_ids"):
            store.put(cache, ids[:, 10:])
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(torch.arange(80) - 10).clamp(0)[None], **passed(model, cache))
    assert store.put(cache, ids[:, 10:]) == 70


def test_positions_of_single_tokens_count(tmp_path):
    model, ids = tiny("llama"), torch.arange(3, 43)[None]
    for step in (1, 2):
        cache, store = KVCache.for_model(model, "raw"), PrefixStore(tmp_path)
        with torch.no_grad():
            for i in range(40):
                model(ids[:, i : i + 1], position_ids=torch.tensor([[step * i]]), **passed(model, cache))
        if step == 1:
            assert store.put(cache, ids) == 40
        else:
            with raises(UnsupportedError, "position_ids"):
                store.put(cache, ids)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused_by_name(tmp_path, kind):
    model = adapted(getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **VIRTUAL.get(kind, {})))
    store = PrefixStore(tmp_path)
    ids = torch.arange(3, 43)[None]
    with raises(UnsupportedError, model.active_peft_config.peft_type.value, "KVCache.for_model"):
        KVCache.from_prefix(model, ids, store=store, scheme="raw")
    if kind == "PrefixTuningConfig":
        with raises(UnsupportedError, "PREFIX_TUNING"):
            KVCache.for_model(model, "raw")
        cache = KVCache.for_model(model.get_base_model(), "raw")
        with raises(UnsupportedError, "PREFIX_TUNING"):
            model.generate(input_ids=ids, past_key_values=cache, **GREEDY)
        return
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    with raises(UnsupportedError, "inputs_embeds"):
        store.put(cache, torch.arange(44))
    assert store.explain()["files"] == 0


VIRTUAL = {"PromptEncoderConfig": {"encoder_hidden_size": 8}}


def test_an_adapter_of_weights_is_stored_as_before(tmp_path):
    model = adapted(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"], init_lora_weights=False))
    ids = torch.arange(3, 83)[None]
    want = model.generate(input_ids=ids, **GREEDY)
    for _ in range(2):
        cache = KVCache.from_prefix(model, ids, store=PrefixStore(tmp_path), scheme="raw")
        assert torch.equal(model.generate(input_ids=ids, past_key_values=cache, **GREEDY), want)


def test_an_adapter_that_begins_at_its_invocation_is_refused_by_name(tmp_path):
    """A prompt's end decides which tokens of its beginning the adapter sees."""
    how = {"task_type": "CAUSAL_LM", "target_modules": ["v_proj"], "init_lora_weights": False}
    model = adapted(peft.LoraConfig(alora_invocation_tokens=[43, 44], **how))
    store, ids = PrefixStore(tmp_path), torch.arange(3, 83)[None]
    with raises(UnsupportedError, "aLoRA"):
        KVCache.from_prefix(model, ids, store=store, scheme="raw")
    want = model.generate(input_ids=ids, **GREEDY)
    cache = KVCache.for_model(model, "raw")
    assert torch.equal(model.generate(input_ids=ids, past_key_values=cache, **GREEDY), want)
    with raises(CacheStateError, "kvbits.identity", "reset()"):
        store.put(cache, want)


class Soft(torch.nn.Module):
    """Puts three vectors in front of each prompt."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device

    def set_attn_implementation(self, name):
        self.model.set_attn_implementation(name)

    def forward(self, input_ids, past_key_values=None, **kwargs):
        embeds = self.model.get_input_embeddings()(input_ids)
        if not past_key_values.get_seq_length():
            embeds = torch.cat([torch.ones(len(embeds), 3, embeds.shape[-1]), embeds], 1)
        return self.model(inputs_embeds=embeds, **passed(self.model, past_key_values), **kwargs)


class SoftLlama(transformers.LlamaForCausalLM):
    """The same as a class of Transformers."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        embeds = self.get_input_embeddings()(input_ids)
        if not past_key_values.get_seq_length():
            embeds = torch.cat([torch.ones(len(embeds), 3, embeds.shape[-1]), embeds], 1)
        return super().forward(inputs_embeds=embeds, **passed(self.model, past_key_values), **kwargs)


@pytest.mark.parametrize("wrap", [Soft, lambda model: SoftLlama(model.config).eval()])
def test_what_a_wrapper_puts_in_front_is_never_stored(tmp_path, wrap):
    model, store = wrap(tiny("llama")), PrefixStore(tmp_path)
    with raises(UnsupportedError, type(model).__name__, "KVCache.for_model"):
        KVCache.from_prefix(model, torch.arange(3, 43)[None], store=store, scheme="raw")
    assert store.explain()["files"] == 0


def test_extra_keeps_prompts_of_equal_ids_apart(tmp_path):
    model, store, ids = tiny("llama"), PrefixStore(tmp_path, blob_tokens=64), torch.arange(3, 83)[None]
    KVCache.from_prefix(model, ids, store=store, scheme="raw", extra=b"a steering vector")
    cache = KVCache.for_model(model, "raw").pages
    assert store.match(cache, ids) == 0
    assert store.match(cache, ids, extra=b"a steering vector") == 79


def test_tokens_that_see_later_ones_are_no_beginning():
    """As those of an image of Gemma 3 do; here a model whose configuration names no token for it."""
    model = model_of("Gemma3Config")
    ids = with_image(model)["input_ids"]
    inner = model.model.forward

    def forward(*args, **kwargs):
        return inner(*args, **(kwargs | {"token_type_ids": (kwargs["input_ids"] == families.IMAGE).long()}))

    model.model.forward = forward
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad(), cache.columns.causal_only(), raises(UnsupportedError, "KVCache.for_model"):
        model(input_ids=ids, pixel_values=with_image(model)["pixel_values"], **passed(model, cache))


def test_no_prompt_is_still_an_error(tmp_path):
    with pytest.raises(DataError):
        KVCache.from_prefix(tiny("llama"), [], store=PrefixStore(tmp_path), scheme="raw")


# -- every configuration --------------------------------------------------------------------------------------------

TEXT_ONLY = {
    "begin_suppress_tokens", "blank_token_id", "bos_token_id", "cls_token_id", "codebook_eos_token_id",
    "codebook_pad_token_id", "decoder_start_token_id", "document_token_id", "eod_token_id", "eos_token_id",
    "forced_eos_token_id", "mask_token_id", "pad_token_id", "question_token_id", "sep_token_id", "suppress_tokens",
    "timestamp_token_id",
}  # fmt: skip


def configurations():
    """(name, an instance) of every configuration class of the installed Transformers that can be made of nothing."""
    for kind, name in CONFIG_MAPPING_NAMES.items():
        try:
            yield kind, getattr(transformers, name)()
        except Exception:  # some need arguments, or packages
            continue


def test_media_tokens_of_every_configuration_are_found():
    """Whatever stands for an image, a sound or a video by its field's name, in any part of any configuration."""
    found, media = set(), ("image", "video", "audio", "vision", "visual", "boi", "eoi", "boa", "eoa", "frame")
    with families.quiet():
        for kind, config in configurations():
            named = prompts.media_tokens(config)
            found |= set(named.values())
            for part in prompts._parts(config, set()):
                for name, value in vars(part).items():
                    if name.split("_")[0] in media and name.endswith(("_token_id", "_token_index")) and value:
                        assert value in named, (kind, name)
            assert not set(named.values()) & TEXT_ONLY, kind
    assert len(found) > 20
    assert {"image_token_id", "image_token_index", "video_token_id", "audio_token_id", "boi_token_index"} <= found


def test_a_model_that_takes_media_and_names_no_token_is_refused():
    model = model_of("LlavaConfig")
    ids = torch.full((40,), 5)
    prompts.require_words(model, ids)
    for part in (model.config, model.config.text_config):
        for name in [
            name for name in vars(part) if prompts.TOKENS.fullmatch(name) and not prompts.WORDS.fullmatch(name)
        ]:
            delattr(part, name)
    with raises(UnsupportedError, "pixel_values"):
        prompts.require_words(model, ids)


@pytest.mark.night
def test_models_of_text_take_no_media():
    with families.quiet():
        for family in families.FAMILIES:
            model = families.build(family)
            if not model.config.is_encoder_decoder and not hasattr(model.config, "vision_config"):
                assert not prompts.takes_media(model) and not prompts.media_tokens(model.config), family.names
