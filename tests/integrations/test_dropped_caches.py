"""Models that do not decode with the KVCache they were given: Phi-3's longrope begins it again, everything else is
said. No pass goes by it in silence.
"""

import copy
import pickle

import pytest
import torch
import transformers
from integrations.test_graphs import needs_compiler
from integrations.test_huggingface import SMALL, ours, prompts, stock, tiny
from messages import raises
from nightly import at_night
from packaging.version import Version
from transformers import AutoModelForCausalLM, DynamicCache

from kvbits.errors import UnsupportedError
from kvbits.integrations import generation
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.masks import CACHE_NAMES, passed

LIMIT = 64
FAMILIES = {
    "phi3": ("Phi3Config", {}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4}),
    "phi4_multimodal": ("Phi4MultimodalConfig", {}),
}
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "chunks": {"do_sample": False, "prefill_chunk_size": 16},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
}


def longrope(family: str) -> torch.nn.Module:
    """A model that computes its sequence anew, with other frequencies, when it passes 64 tokens."""
    name, extra = FAMILIES[family]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [1 + i / 2 for i in range(8)],
        "original_max_position_embeddings": LIMIT,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, name)(
        **(SMALL | {"rope_parameters": rope, "original_max_position_embeddings": LIMIT} | extra)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="the stock cache of older ones forgets the prompt"
)
@pytest.mark.parametrize(
    ("family", "lengths", "way"),
    [("phi3", lengths, way) for lengths in ([50], [60, 33]) for way in WAYS if way != "lookup" or len(lengths) == 1]
    + [("phi3", [90], "greedy"), ("phi3", [90], "lookup"), ("phimoe", [50], "greedy"), ("phimoe", [90], "greedy")],
)
def test_longrope_begins_the_cache_again_where_the_model_computes_anew(family, lengths, way):
    model, inputs = longrope(family), prompts(lengths)
    want = stock(model, inputs, max_new_tokens=24, **WAYS[way])
    rows = len(lengths) * WAYS[way].get("num_beams", 1)
    for cache in (KVCache.for_model(model, "raw"), KVCache.for_model(model, "raw", max_tokens=160, batch_size=rows)):
        assert torch.equal(ours(model, inputs, cache=cache, max_new_tokens=24, **WAYS[way]), want)
        assert cache.pages.seq_lens == [n + 23 for n in lengths for _ in range(rows // len(lengths))]


@pytest.mark.parametrize("lengths", [*at_night([90], [50]), [60, 33]], ids=["beyond", "crosses", "padded"])
def test_phi4_multimodal_is_right_where_transformers_forgets_the_prompt(lengths):
    """Past the limit Transformers goes on with one token and no history; truth is a model that caches nothing."""
    model, inputs = longrope("phi4_multimodal"), prompts(lengths)
    want = stock(model, inputs, do_sample=False, use_cache=False)
    assert torch.equal(ours(model, inputs, do_sample=False), want)


def test_a_second_turn_crosses_the_limit():
    model, inputs = longrope("phi3"), prompts([30])
    cache = KVCache.for_model(model, "raw")
    first = ours(model, inputs, cache=cache, do_sample=False)
    turn = {"input_ids": torch.cat([first, prompts([30], seed=3)["input_ids"]], 1)}
    second = ours(model, turn, cache=cache, do_sample=False)
    assert torch.equal(second, stock(model, turn, do_sample=False)) and cache.pages.seq_lens == [99]


def test_embeddings_of_a_prompt_cannot_be_computed_anew_from_its_answer():
    model, inputs = longrope("phi3"), prompts([60])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    cache = KVCache.for_model(model, "raw")
    # its own ids alone decide: stays as it is
    model.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert cache.pages.seq_lens == [67]
    whole = torch.cat([inputs["input_ids"], prompts([8], seed=2)["input_ids"]], 1)
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    call = {"past_key_values": cache, "attention_mask": torch.ones(1, 200, dtype=torch.long)}
    with raises(UnsupportedError, "Phi3ForCausalLM", "original_max_position_embeddings", 132, "input_ids"):
        model.prepare_inputs_for_generation(whole, **call)
    assert cache.pages.seq_lens == [60]


def test_a_prefix_store_refuses_prompts_whose_rotation_changes(tmp_path):
    import kvbits

    model, store = longrope("phi3"), kvbits.PrefixStore(tmp_path)
    short = prompts([40])["input_ids"]
    assert KVCache.from_prefix(model, short, store=store, scheme="raw").pages.seq_lens == [39]
    with raises(UnsupportedError, "90 tokens", "original_max_position_embeddings=64", "KVCache.for_model"):
        KVCache.from_prefix(model, prompts([90])["input_ids"], store=store, scheme="raw")


class Forgetful(transformers.LlamaForCausalLM):
    """Passes a cache of its own on, as a custom forward or a wrapper may."""

    layers_kept = 0

    def forward(self, input_ids=None, **kwargs):
        if not self.layers_kept:
            kwargs = {name: x for name, x in kwargs.items() if name not in CACHE_NAMES} | passed(
                super(), DynamicCache(config=self.config)
            )
            return super().forward(input_ids, **kwargs)
        stack, self.model.layers = self.model.layers, self.model.layers[: self.layers_kept]
        self.model.config.num_hidden_layers = self.layers_kept
        try:
            return super().forward(input_ids, **kwargs)
        finally:
            self.model.layers, self.model.config.num_hidden_layers = stack, len(stack)


@pytest.fixture
def forgetful():
    torch.manual_seed(0)
    return Forgetful(transformers.LlamaConfig(**SMALL)).eval()


@pytest.mark.parametrize("layers", [0, 2])
def test_a_forward_pass_that_leaves_the_cache_out_is_said(forgetful, layers):
    forgetful.layers_kept = layers
    cache, inputs = KVCache.for_model(forgetful, "raw"), prompts([9])
    said = f"{layers} of its 3 layers", "KVCache.detach(model)"
    with torch.no_grad(), raises(UnsupportedError, *said):
        forgetful(**inputs, past_key_values=cache)
    assert not cache.pages.in_pass and cache.get_seq_length() == 0
    with raises(UnsupportedError, *said):
        forgetful.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    forgetful(**inputs)
    forgetful(**inputs, past_key_values=DynamicCache(config=forgetful.config))


def test_inputs_that_name_another_cache_are_said():
    class Swaps(transformers.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs) | passed(
                self, DynamicCache(config=self.config)
            )

    model = Swaps(transformers.LlamaConfig(**SMALL)).eval()
    with raises(UnsupportedError, "Swaps", "DynamicCache", "KVCache.detach(model)"):
        model.generate(**prompts([9]), past_key_values=KVCache.for_model(model, "raw"), max_new_tokens=3)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_is_said_not_followed():
    model = tiny("llama")
    cache = KVCache.for_model(model, "raw")
    model.gradient_checkpointing_enable()
    model.train()
    with raises(UnsupportedError, "0 of its 3 layers", "gradient checkpointing"):
        model(**prompts([9]), past_key_values=cache)


def test_a_model_wrapped_in_another_is_checked_once_for_each():
    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, **kwargs):
            return self.inner(**kwargs)

    model = tiny("llama")
    outer = Outer(model)
    cache = KVCache.for_model(model, "raw")
    generation.attach(outer)
    with torch.no_grad():
        assert torch.equal(
            outer(**prompts([9]), past_key_values=cache).logits,
            model(**prompts([9]), past_key_values=KVCache.for_model(model, "raw")).logits,
        )
    assert cache.pages.seq_lens == [9]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_model_are_checked_and_detached_by_themselves(how):
    model = tiny("llama")
    KVCache.for_model(model, "raw")
    KVCache.for_model(model, "raw")
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    made = how(model)
    KVCache.detach(model)
    assert not model._forward_hooks and not model._forward_pre_hooks and len(made._forward_hooks) == 1
    made.gradient_checkpointing_enable()
    with raises(UnsupportedError, "0 of its 3 layers", "KVCache.detach(model)"):
        made.train()(**prompts([9]), past_key_values=KVCache.for_model(made, "raw"))
    KVCache.detach(made)
    assert not made._forward_hooks and not set(generation.ASKED) & set(made.__dict__)


def test_what_a_user_put_on_the_model_himself_comes_back():
    model, called = tiny("llama"), []

    def mine(*args, **kwargs):
        called.append(1)
        return type(model).prepare_inputs_for_generation(model, *args, **kwargs)

    model.prepare_inputs_for_generation = mine
    ours(model, prompts([9]), cache=KVCache.for_model(model, "raw"), max_new_tokens=2)
    assert called
    KVCache.detach(model)
    assert model.prepare_inputs_for_generation is mine


def test_generate_still_names_arguments_that_no_model_takes():
    model = tiny("llama")
    with raises(ValueError, "nonsense"):
        ours(model, prompts([9]), max_new_tokens=2, nonsense=1)


def test_continuous_batching_says_what_to_call():
    model = tiny("llama")
    KVCache.for_model(model, "raw")
    with raises(UnsupportedError, "generate_batch", "KVCache.detach(model)"):
        model.generate_batch(inputs=[[3, 4, 5]])


@needs_compiler
def test_a_compiled_forward_is_checked_from_outside(forgetful):
    forgetful.forward = torch.compile(forgetful.forward, backend="eager")
    with torch.no_grad(), raises(UnsupportedError, "0 of its 3 layers", "KVCache.detach(model)"):
        forgetful(**prompts([9]), past_key_values=KVCache.for_model(forgetful, "raw"))
