"""Everything that public code does to a DynamicCache by hand is right on a KVCache, or an error at once. The names come
from the installed Transformers.
"""

import copy
import pickle

import pytest
import torch
from integrations import families
from integrations.test_huggingface import tiny
from integrations.test_layer_kinds import built
from messages import raises
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvbits import KVCache
from kvbits.errors import KvbitsError, UnsupportedError
from kvbits.integrations.closed import Closed
from kvbits.integrations.masks import passed

IDS = torch.arange(3, 53).reshape(2, 25)
NEXT = torch.tensor([[7, 8], [9, 10]])
WINDOW = 16

SAME = {
    "get_seq_length": lambda c: (c.get_seq_length(), c.get_seq_length(1), c.get_seq_length(99)),
    "get_max_length": lambda c: (c.get_max_length(), c.get_max_length(0), c.get_max_length(99)),
    "get_mask_sizes": lambda c: [c.get_mask_sizes(n, i) for n in (1, 5) for i in range(len(c.layers))],
    "get_query_offset": lambda c: c.get_query_offset(0),
    "is_croppable": lambda c: c.is_croppable,
    "is_sliding": lambda c: c.is_sliding,
    "is_linear": lambda c: c.is_linear,
    "is_dummy": lambda c: c.is_dummy,
    "is_compileable": lambda c: c.is_compileable,
    "is_initialized": lambda c: c.is_initialized,
    "is_recording_past": lambda c: [c.is_recording_past(i) for i in range(len(c.layers))],
    "layer_class_to_replicate": lambda c: c.layer_class_to_replicate,
    "offloading": lambda c: c.offloading,
    "layers": lambda c: (len(c.layers), len(c)),
    "has_previous_state": lambda c: c.has_previous_state(),
    "get_conv_state": lambda c: c.get_conv_state(0),
    "get_recurrent_state": lambda c: c.get_recurrent_state(0),
    "update_conv_state": lambda c: c.update_conv_state(torch.zeros(2, 4, 3), 0),
    "update_recurrent_state": lambda c: c.update_recurrent_state(torch.zeros(2, 4, 3), 0),
    "update_indexer": lambda c: c.update_indexer(torch.zeros(2, 1, 4), 0),
}
"""Reads to compare; errors compare as errors."""
CHANGES = {
    "crop": lambda c: (c.activate_past_recording(), c.crop(0)),
    "activate_past_recording": lambda c: c.activate_past_recording(),
    "reorder_cache": lambda c: c.reorder_cache(torch.tensor([1, 0])),
    "batch_select_indices": lambda c: c.batch_select_indices(torch.tensor([1, 1])),
    "batch_repeat_interleave": lambda c: (c.batch_repeat_interleave(2), c.batch_select_indices(torch.tensor([0, 2]))),
    "reset": lambda c: c.reset(),
}
"""Changes to both caches; the test compares the next logits."""
BETTER = {"batch_size": (2, -1)}
"""Answers that a KVCache knows and a DynamicCache does not."""
SAME_OF_LAYER = {
    "get_seq_length": lambda x: x.get_seq_length(),
    "get_max_length": lambda x: x.get_max_length(),
    "get_mask_sizes": lambda x: (x.get_mask_sizes(1), x.get_mask_sizes(7)),
    "is_croppable": lambda x: x.is_croppable,
    "is_compileable": lambda x: x.is_compileable,
    "is_initialized": lambda x: x.is_initialized,
    "is_sliding": lambda x: x.is_sliding,
    "sliding_window": lambda x: getattr(x, "sliding_window", None),
}
TENSORS = torch.zeros(2, 2, 3, 16)
CALLS = {
    "update": (TENSORS, TENSORS),
    "lazy_initialization": (TENSORS, TENSORS),
    "crop": (-1,),
    "reorder_cache": (torch.tensor([1, 0]),),
    "batch_repeat_interleave": (2,),
    "batch_select_indices": (torch.tensor([1, 0]),),
}


def public(thing) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def models():
    return {"llama": lambda: tiny("llama"), "windows": lambda: tiny("gemma3", sliding_window=WINDOW)}


def filled(model, own):
    cache = KVCache.for_model(model, "raw") if own else DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **passed(model, cache))
    return cache


def result_of(call, cache):
    try:
        return call(cache)
    except Exception as error:
        return "refused", isinstance(error, (ValueError, KvbitsError))


def continues_alike(model, cache, stock):
    with torch.no_grad():
        found, want = (model(NEXT, **passed(model, c)).logits for c in (cache, stock))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", models())
def test_each_name_of_a_dynamic_cache_is_right_or_refused(family):
    model = models()[family]()
    KVCache.for_model(model, "raw")
    names = public(filled(model, False)) | public(DynamicCache)
    assert {"update", "layers", "offload", "early_initialization"} < names
    for name in sorted(names):
        cache, stock = filled(model, True), filled(model, False)
        if name in SAME:
            assert result_of(SAME[name], cache) == result_of(SAME[name], stock), name
        elif name in CHANGES:
            CHANGES[name](cache), CHANGES[name](stock)
            continues_alike(model, cache, stock)
        elif name in BETTER:
            assert (getattr(cache, name), getattr(stock, name)) == BETTER[name]
        elif name == "update":
            with raises(UnsupportedError, "update()", "layer 0", "KVCache.for_model(model, ...)"):
                cache.update(TENSORS, TENSORS, 0)
            continues_alike(model, cache, stock)
        else:
            assert not hasattr(cache, name), name
            with raises(UnsupportedError, f"'{name}'", "cache.pages.dequantize(layer, row)"):
                getattr(cache, name)


@pytest.mark.parametrize("family", models())
def test_each_name_of_a_dynamic_layer_is_right_or_refused(family):
    model = models()[family]()
    cache = KVCache.for_model(model, "raw")
    cache, stock = filled(model, True), filled(model, False)
    kinds = set()
    for layer, other in zip(cache.layers, stock.layers, strict=True):
        kinds.add(type(other))
        for name in sorted(public(other) | public(DynamicLayer) | public(DynamicSlidingWindowLayer)):
            if name in SAME_OF_LAYER:
                assert SAME_OF_LAYER[name](layer) == SAME_OF_LAYER[name](other), name
            elif name == "supports_early_init":
                assert layer.supports_early_init is False
            else:
                with pytest.raises((UnsupportedError, AttributeError)):
                    getattr(layer, name)(*CALLS.get(name, ()))
    assert kinds == ({DynamicLayer} if family == "llama" else {DynamicLayer, DynamicSlidingWindowLayer})
    continues_alike(model, cache, stock)


def test_keys_filled_by_hand_are_never_dropped():
    model = tiny("llama")
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **passed(model, stock))
    cache = KVCache.for_model(model, "raw")
    for i, layer in enumerate(stock.layers):
        with pytest.raises(UnsupportedError):
            cache.update(layer.keys, layer.values, i)
    assert not cache.get_seq_length() and not cache.pages.in_pass
    dense = KVCache.for_model(model, "raw", dense=True)
    for i, layer in enumerate(stock.layers):
        keys, values = dense.update(layer.keys, layer.values, i)
        assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
    assert dense.get_seq_length() == 25
    KVCache.detach(model)
    model = tiny("llama")
    KVCache.for_model(model, "raw", dense=True)
    continues_alike(model, dense, stock)


@pytest.mark.parametrize(
    "name, value", [("key_cache", []), ("value_cache", []), ("layers", []), ("offloading", True), ("seen_tokens", 3)]
)
def test_nothing_is_kept_that_nobody_reads(name, value):
    model = tiny("llama")
    cache = filled(model, True)
    with raises(UnsupportedError, f"KVCache.{name}", "crop", "batch_select_indices", "reset"):
        setattr(cache, name, value)
    for layer in cache.layers:
        for attribute in ("keys", "values", "cumulative_length", "sliding_window", "is_initialized", "mine"):
            with pytest.raises((UnsupportedError, AttributeError)):
                setattr(layer, attribute, TENSORS)
    with pytest.raises(TypeError):
        cache.layers[0] = DynamicLayer()
    continues_alike(model, cache, filled(model, False))


def test_iteration_indexing_and_legacy_tuples_are_errors():
    cache = filled(tiny("llama"), True)
    for wrong in (
        lambda: list(cache),
        lambda: cache[0],
        lambda: DynamicCache(cache),
        lambda: cache.to_legacy_cache(),
        lambda: KVCache.from_legacy_cache(()),
        lambda: cache.key_cache[0],
    ):
        with pytest.raises((TypeError, AttributeError)):
            wrong()
    assert len(cache) == 3


def test_copies_go_on_by_themselves():
    model = tiny("llama")
    cache, stock = filled(model, True), filled(model, False)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        continues_alike(model, twin, copy.deepcopy(stock))
        with pytest.raises(UnsupportedError):
            twin.key_cache = []
    assert cache.get_seq_length() == 25


def test_a_name_that_transformers_adds_is_refused_until_somebody_looks_at_it():
    class Tomorrow(Cache):
        def forget_half(self):
            return "inherited"

        novel = True

    class Ours(Closed, Tomorrow):
        _inherits = ("get_seq_length",)

        def __init__(self):
            super().__init__(layers=[])
            self._ready = True

    cache = Ours()
    assert cache.get_seq_length() == 0
    for name in ("forget_half", "novel", "offload"):
        assert not hasattr(cache, name)
        with raises(UnsupportedError, f"'{name}'"):
            getattr(cache, name)


def test_layers_with_states_refuse_to_be_changed_alone():
    model = built("Lfm2Config")
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(IDS, **passed(model, cache))
    state = next(layer for layer, linear in zip(cache.layers, cache.is_linear, strict=True) if linear)
    for name in ("crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave", "offload", "prefetch"):
        with raises(UnsupportedError, "KVCache"):
            getattr(state, name)(*CALLS.get(name, ()))
    with raises(UnsupportedError, "RecurrentLayer.mine"):
        state.mine = 1
    assert state.conv_states[0] is cache.get_conv_state(cache.layers.index(state))


@pytest.mark.parametrize("stock_wrapper", [False, True])
def test_a_cache_inside_that_of_an_encoder_decoder(stock_wrapper):
    model = built("BartConfig")
    inputs = families.inputs(model)[0]
    want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    cache = KVCache.for_model(model, "raw")
    if stock_wrapper:
        cache = EncoderDecoderCache(cache.self_attention_cache, DynamicCache())
    with families.quiet():
        found = model.generate(**inputs, **passed(model, cache), max_new_tokens=8, do_sample=False)
    assert torch.equal(found, want)
    assert cache.get_seq_length() == found.shape[1] - 1
    if not stock_wrapper:
        assert (
            cache.batch_size == len(found) and cache.is_initialized and cache.get_query_offset() == found.shape[1] - 1
        )
        for name in ("offload", "prefetch", "early_initialization"):
            assert not hasattr(cache, name)
        with raises(UnsupportedError, "CrossKVCache.key_cache"):
            cache.key_cache = []
    with pytest.raises((UnsupportedError, AttributeError)):
        cache.update(TENSORS, TENSORS, 0)
    with pytest.raises(TypeError):
        list(cache)
