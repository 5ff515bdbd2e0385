"""generate() with a cache of fixed capacity, which it captures by itself: on a CPU, where kernels are emulated and a
graph is its work done again (test_graphs).
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import transformers
from integrations import test_graphs
from integrations.graph_cases import eagerly, prompts
from integrations.test_graphs import fixed, generate, tiny
from messages import warns
from packaging.version import Version
from transformers import CompileConfig, DynamicCache

from kvbits.cache import decode_switch
from kvbits.errors import KvbitsWarning
from kvbits.integrations import generation, graphs
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.masks import cache_among
from kvbits.ops import decode

gpu = test_graphs.gpu
graph = test_graphs.graph
needs_compiler = test_graphs.needs_compiler


@pytest.fixture
def model(monkeypatch):
    model = tiny()
    # Transformers asks for a GPU; the rest of its question is the cache's
    monkeypatch.setattr(
        type(model),
        "_valid_auto_compile_criteria",
        lambda _, kwargs, config: not config.disable_compile and cache_among(kwargs).is_compileable,
    )
    return model


@pytest.fixture
def decoders(graph):
    """Made so far."""
    made = []

    class Noted(graphs.GraphDecoder):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    graph.setattr(graphs, "GraphDecoder", Noted)
    return made


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "options"),
    [([40], {}), ([60, 33, 5], {"do_sample": True, "temperature": 1.5}), ([70], {"prefill_chunk_size": 32})],
    ids=["one", "left_padded", "chunks"],
)
def test_its_tokens_are_replays_and_those_of_the_eager_cache(model, decoders, lengths, options):
    inputs, batch = prompts(lengths), len(lengths)
    eager, cache = fixed(model, batch=batch), fixed(model, batch=batch)
    assert cache.is_compileable and not KVCache.for_model(model, "int8").is_compileable
    with eagerly(model, eager):
        want = generate(model, inputs, eager, 40, disable_compile=True, **options)
    assert not decoders
    got = generate(model, inputs, cache, 40, **options)
    assert torch.equal(got, want) and cache.pages.seq_lens == eager.pages.seq_lens
    assert (decoders[-1].captures, decoders[-1].replays) == (1, 38)
    if options.get("prefill_chunk_size") and Version(transformers.__version__) < Version("5.23"):
        return  # chunks of a second turn come with masks of the first tokens
    turn = {
        "input_ids": torch.cat([got, got[:, -7:]], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(batch, 47, dtype=torch.long)], 1),
    }
    with eagerly(model, eager):
        want = generate(model, turn, eager, 20, disable_compile=True, **options)
    assert torch.equal(generate(model, turn, cache, 20, **options), want)


@needs_compiler
def test_inside_graphed_one_decoder_leads(model, decoders):
    cache, other = fixed(model), fixed(model)
    with graphs.graphed(model, cache) as decoder:
        generate(model, prompts([30]), cache, 10)
        generate(model, prompts([30]), other, 10)
    assert decoder.replays == 8 and [d.cache for d in decoders] == [cache, other] and decoders[1].replays == 8


@needs_compiler
def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(model, decoders, graph):
    def fail(work, device):
        raise RuntimeError("operation not permitted")

    cache, eager = fixed(model), fixed(model)
    want = generate(model, prompts([30]), eager, 12, disable_compile=True)
    graph.setattr(graphs, "CapturedWork", fail)
    with warns(KvbitsWarning, "LlamaForCausalLM", "operation not permitted") as found:
        got = generate(model, prompts([30]), cache, 12)
    assert [w.category for w in found].count(KvbitsWarning) == 1 and torch.equal(got, want)


def test_on_a_cpu_and_for_other_caches_nothing_changes(model):
    inputs = prompts([30, 12])
    stock = generate(model, inputs, DynamicCache(config=model.config), 6)
    names = set(model.__dict__)
    cache = fixed(model, "raw", batch=2)
    assert not cache.is_compileable and set(generation.ASKED) < set(model.__dict__)
    assert generate(model, inputs, cache, 6).shape == stock.shape
    assert generate(model, inputs, DynamicCache(config=model.config), 6).shape == stock.shape
    KVCache.detach(model)
    assert set(model.__dict__) - names <= {"_compiled_call", "_last_compile_config"}


def test_a_configuration_of_the_compilers_asks_for_the_compiler(model):
    KVCache.for_model(model, "raw")
    call = model.get_compiled_call(CompileConfig(backend="eager", mode=None))
    assert hasattr(call, "_torchdynamo_orig_callable") and not hasattr(
        model.get_compiled_call(None), "_torchdynamo_orig_callable"
    )


def test_masks_stay_what_they_are_for_our_caches_alone(model):
    cache, mask = KVCache.for_model(model, "raw"), torch.ones(1, 1, dtype=torch.long)
    arguments = {
        "config": model.config,
        "inputs_embeds": torch.empty(1, 1, 0, dtype=model.dtype),
        "attention_mask": mask,
        "position_ids": None,
    }
    assert model.create_masks_for_generate(**arguments, past_key_values=cache) is mask
    assert model.create_masks_for_generate(**arguments, past_key_values=DynamicCache(config=model.config)) is not mask


def test_what_wraps_a_model_does_not_hide_it(model):
    """Adapters call generate() of the model inside."""
    wrapped = torch.nn.Sequential(model)
    generation.attach(wrapped)
    assert set(generation.ASKED) < set(model.__dict__) and not set(generation.ASKED) & set(wrapped.__dict__)
    generation.detach(wrapped)
    assert not set(generation.ASKED) & set(model.__dict__)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_model_ask_for_themselves_and_no_model_is_kept(model, how):
    KVCache.for_model(model, "raw")
    made = how(model)
    assert made.get_compiled_call()._model is made and model.get_compiled_call()._model is model
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(made)
        del made
        assert gone() is None
    finally:
        gc.enable()


def test_a_cache_that_keeps_its_past_is_not_captured(model, monkeypatch):
    monkeypatch.setattr(decode_switch, "refuses", lambda *_: None)
    monkeypatch.setattr(decode, "BACKENDS", {"cpu": "cuda"})
    cache = fixed(model)
    assert cache.is_compileable
    cache.activate_past_recording()  # a draft of assisted generation
    assert not cache.is_compileable
