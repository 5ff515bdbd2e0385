"""Models that accelerate has in hand: hooks on their modules, weights in host memory, on disk, on several devices."""

import copy
import pickle
from collections.abc import Iterable

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook
from accelerate.utils import operations
from integrations.test_huggingface import prompts, tiny
from messages import raises
from transformers import DynamicCache, StaticCache

from kvbits import KVCache, PrefixStore
from kvbits.calibrate import calibrate
from kvbits.errors import UnsupportedError
from kvbits.integrations import masks
from kvbits.integrations.attention import Handle
from kvbits.integrations.placement import device_of

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")


def device_map(model, layer, where):
    """All on the CPU but one layer."""
    layers = {f"model.layers.{i}": "cpu" for i in range(len(model.model.layers))}
    return dict.fromkeys(PARTS, "cpu") | layers | {f"model.layers.{layer}": where}


def hooked(of, **options):
    return lambda model, folder: add_hook_to_module(of(model), AlignDevicesHook(execution_device="cpu", **options))


KINDS = {
    "hook of a layer": hooked(lambda m: m.model.layers[1]),
    "hook that brings outputs back": hooked(lambda m: m.model.layers[1], io_same_device=True),
    "hook of an attention": hooked(lambda m: m.model.layers[0].self_attn, io_same_device=True),
    "hook of the model": hooked(lambda m: m, io_same_device=True),
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "offloaded buffers": lambda model, folder: attach_align_device_hook(
        model, execution_device="cpu", offload=True, offload_buffers=True
    ),
    "forced hooks": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "a layer on disk": lambda model, folder: dispatch_model(
        model, device_map(model, 1, "disk"), main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}
CACHES = {
    "kvbits": lambda model, made: made,
    "dynamic": lambda model, made: DynamicCache(config=model.config),
    "static": lambda model, made: StaticCache(config=model.config, max_cache_len=60),
    "none given": lambda model, made: None,
}


@pytest.mark.parametrize("order", ["hooks first", "attached first"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_tokens_are_those_of_the_model_without_hooks(family, kind, order, tmp_path):
    inputs, options = prompts([20, 9]), {"max_new_tokens": 6, "do_sample": False}
    want, model = tiny(family).generate(**inputs, **options), tiny(family)
    if order == "hooks first":
        KINDS[kind](model, tmp_path)
    made = KVCache.for_model(model, "raw")
    if order == "attached first":
        KINDS[kind](model, tmp_path)
    assert made.pages.device.type == "cpu"
    for cache in CACHES.values():
        assert torch.equal(model.generate(**inputs, **options, past_key_values=cache(model, made)), want)


def test_a_stored_prefix_and_a_calibration_of_a_model_whose_weights_are_offloaded(tmp_path):
    ids, store = prompts([40])["input_ids"], PrefixStore(tmp_path / "store")
    want, model = tiny("llama"), cpu_offload(tiny("llama"), execution_device="cpu")
    made, same = (calibrate(m, [ids], "int8_static").static for m in (model, want))
    assert all(torch.equal(x[name], y[name]) for x, y in zip(made, same, strict=True) for name in y)
    cache = KVCache.from_prefix(model, ids, store=store, scheme="raw")
    assert torch.equal(
        model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False),
        want.generate(ids, max_new_tokens=5, do_sample=False),
    )
    cache.save(tmp_path / "file")
    assert KVCache.load(tmp_path / "file", model).pages.device.type == "cpu"


def test_layers_on_several_devices_are_refused_by_their_names():
    model = tiny("llama")
    model.model.layers[1].to("meta")
    add_hook_to_module(model.model.layers[1], AlignDevicesHook(execution_device="meta"))
    with raises(
        UnsupportedError,
        "LlamaForCausalLM",
        "2 devices",
        "model.layers.0.self_attn",
        "cpu",
        "model.layers.1.self_attn",
        "meta",
        "device_map={'': 0}",
    ):
        KVCache.for_model(model, "raw")
    assert model.config._attn_implementation == "eager", "and the model was left alone"


def test_other_parts_may_lie_elsewhere():
    model = tiny("llama")
    model.lm_head.to("meta")
    model.model.embed_tokens.to("meta")
    assert device_of(model).type == "cpu"


def handed_out(model):
    """A mask and a handle, as a model meets them."""
    cache, found = KVCache.for_model(model, "raw"), {}

    def look(module, args, kwargs):
        found["mask"] = kwargs["attention_mask"]

    hook = model.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(**prompts([20, 9]), past_key_values=cache)
    hook.remove()
    return [found["mask"], Handle(cache.layers[0], torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))]


@pytest.mark.parametrize("which", [0, 1], ids=["mask", "handle"])
def test_what_is_no_tensor_answers_questions_as_any_object_does(which):
    x = handed_out(tiny("llama"))[which]
    for name in ("to", "device", "dtype", "is_cuda", "items", "keys", "__len__", "__array__", "_asdict"):
        assert not hasattr(x, name) and getattr(x, name, "none") == "none"
    for kind in (torch.Tensor, tuple, list, dict, Iterable):
        assert not isinstance(x, kind)
    for ask in (len, iter, list, lambda x: x[0], lambda x: (*x,)):
        with pytest.raises(TypeError):
            ask(x)
    for nested in (x, [x, (x,)], {"a": x}):
        moved = operations.send_to_device(nested, "cpu")
        leaves = torch.utils._pytree.tree_leaves(moved)
        assert leaves and all(leaf is x for leaf in leaves)
    assert operations.find_device([x]) is None and operations.ignorant_find_batch_size([x]) is None
    with raises(TypeError, "batch size"):
        operations.find_batch_size([x])
    assert operations.recursively_apply(lambda t: t, [x]) == [x]
    assert x == x and x != object() and x in {x} and bool(x)
    assert type(copy.copy(x)) is type(copy.deepcopy(x)) is type(x)


def test_a_mask_can_be_pickled():
    mask = handed_out(tiny("llama"))[0]
    mask.arguments.pop("mask_function")
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.attention_mask, mask.attention_mask)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x: x.dtype,
        lambda x: x.transpose(1, 2),
        lambda x: x[0],
        lambda x: x[..., 0],
        lambda x: torch.zeros(2) + x,
        lambda x: torch.cat([x, x]),
        lambda x: torch.softmax(x, -1),
    ],
)
@pytest.mark.parametrize("which", [0, 1], ids=["mask", "handle"])
def test_code_that_needs_a_tensor_is_told_the_way_out(which, misuse):
    x = handed_out(tiny("llama"))[which]
    with raises(UnsupportedError, "KVCache", ("KVCache.detach(model)", "stock cache")[which]):
        misuse(x)
    assert issubclass(masks.NotATensorError, UnsupportedError)
