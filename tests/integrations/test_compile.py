"""A KVCache inside torch.compile: one graph for prompts and one for tokens, without breaks, whatever the scheme; the
tokens are those without a compiler.

On a GPU where there is one, on a CPU otherwise.
"""

import copy
import gc
import os
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from integrations import test_huggingface
from messages import raises
from nightly import at_night
from torch._dynamo.utils import counters

import kvbits
from kvbits.errors import CacheStateError, DataError, PoolFullError, UnsupportedError
from kvbits.integrations.compiled import cached_attention, refuse_capture
from kvbits.integrations.huggingface import KVCache

MODELS = Path(os.environ.get("KVBITS_MODELS", Path.home() / "kv-models"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32")  # inductor's advice
GREEDY = {"do_sample": False, "max_new_tokens": 70}  # pages of 64 tokens close on the way


def tiny(family, **changes):
    return test_huggingface.tiny(family, **changes).to(DEVICE)


def prompts(lengths, seed=1):
    return {name: x.to(DEVICE) for name, x in test_huggingface.prompts(lengths, seed).items()}


def graphs() -> int:
    """Compiled since `fresh`; that no graph broke is asserted."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def generate(model, inputs, scheme="int8_centered", **kwargs):
    torch.manual_seed(7)
    cache = KVCache.for_model(model, scheme)
    return model.generate(**inputs, past_key_values=cache, **(GREEDY | kwargs))


def compiled(model, backend="eager"):
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    return model


def test_two_graphs_serve_every_token_and_every_scheme():
    model, inputs = tiny("llama", num_hidden_layers=2), prompts([240, 223])
    schemes = ["raw", "int8_centered", "int4", "kivi4"]

    def run(scheme):
        found = generate(model, inputs, scheme, max_new_tokens=30, return_dict_in_generate=True, output_logits=True)
        return found.sequences, found.logits[-1]

    want = [run(s) for s in schemes]
    # so a graph that carries a scheme along is found
    assert all(not torch.equal(want[0][1], logits) for _, logits in want[1:])
    compiled(model)
    for scheme, (tokens, logits) in zip(schemes, want, strict=True):
        found = run(scheme)
        assert torch.equal(found[0], tokens) and torch.equal(found[1], logits), scheme
    assert graphs() == 2


@pytest.mark.night
def test_prompts_of_other_lengths_compile_once_more():
    model = tiny("llama", num_hidden_layers=1)
    lengths = [[40, 23], [51, 9], [30, 30, 17], [90, 64, 2]]
    want = [generate(model, prompts(n), max_new_tokens=3) for n in lengths]
    compiled(model)
    found = [graphs()]
    for n, tokens in zip(lengths, want, strict=True):
        assert torch.equal(generate(model, prompts(n), max_new_tokens=3), tokens)
        found.append(graphs())
    assert found == [0, 2, 3, 5, 5]  # prompt and token; a second length; another batch size of both; nothing


@pytest.mark.parametrize("family", ["gemma3", *at_night("gemma2", "mistral_window")])
def test_windows_and_softcaps(family):
    model, inputs = tiny(family), prompts([50, 33])
    want = generate(model, inputs, "int4")
    assert torch.equal(generate(compiled(model), inputs, "int4"), want) and graphs() == 2


@pytest.mark.parametrize("backend", ["aot_eager", *at_night("inductor")])
def test_backends_that_move_and_copy_tensors(backend):
    model, inputs = tiny("llama", num_hidden_layers=2), prompts([40, 23])
    want = generate(model, inputs, "kivi4")
    assert torch.equal(generate(compiled(model, backend), inputs, "kivi4"), want) and graphs() == 2


@pytest.mark.parametrize(
    "options",
    [{"prompt_lookup_num_tokens": 4}, *at_night({"do_sample": True}, {"num_beams": 3, "max_new_tokens": 8})],
    ids=["prompt_lookup", "sampling", "beams"],
)
def test_ways_of_generating(options):
    model, inputs = tiny("llama", num_hidden_layers=1), prompts([40])
    want = generate(model, inputs, **options)
    assert torch.equal(generate(compiled(model), inputs, **options), want)
    assert graphs() <= 4  # prompt lookup: chunks of verified tokens, with and without a mask


@pytest.mark.parametrize("how", ["wrapped", *at_night("in_place")])
def test_calls_without_positions_between_turns_and_crops(how):
    """Positions come from the cache, which the host cuts and fills in between."""
    model = tiny("qwen3", num_hidden_layers=1)
    ids = prompts([60])["input_ids"]

    def run(call):
        cache, out = KVCache.for_model(model, "int8"), []
        with torch.no_grad():
            for a, b, remove in [(0, 20, 0), (20, 45, -7), (38, 39, 0), (39, 40, 0), (40, 41, -1), (40, 60, 0)]:
                out.append(call(ids[:, a:b], past_key_values=cache).logits[:, -1])
                cache.crop(remove)
        cache.reset()
        return torch.cat(out)

    want = run(model)
    if how == "in_place":
        model.compile(backend="eager", fullgraph=True)
    found = run(model if how == "in_place" else torch.compile(model, backend="eager", fullgraph=True))
    assert torch.equal(found, want) and graphs() == 3  # a prompt, prompts of any length, a token


def test_copies_are_caches_of_their_own():
    model = tiny("llama", num_hidden_layers=1)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    first, second = (prompts([n], seed=n)["input_ids"] for n in (30, 1))
    with torch.no_grad():
        cache = KVCache.for_model(model, "int8")
        call(first, past_key_values=cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.copy(cache)]
        want = model(second, past_key_values=copy.deepcopy(cache)).logits
        for made in copies[:2]:
            assert torch.equal(call(second, past_key_values=made).logits, want)
            assert (made.get_seq_length(), cache.get_seq_length()) == (31, 30) and made.pages.seq_lens == [31]
        assert torch.equal(call(second, past_key_values=cache).logits, want)
        assert copies[2].get_seq_length() == 31  # a shallow one is the same cache
        with torch.inference_mode():
            made = copy.deepcopy(cache)
        call(second, past_key_values=made)
        assert made.get_seq_length() == 32


def test_compiled_code_keeps_no_cache_alive():
    model = tiny("llama", num_hidden_layers=1)
    call = torch.compile(model, backend="eager", fullgraph=True)
    cache = KVCache.for_model(model, "int8")
    with torch.no_grad():
        call(**prompts([9, 5]), past_key_values=cache)
    store = weakref.ref(cache.pages)
    del cache
    gc.collect()
    assert store() is None


def test_errors_are_the_caches_own_and_leave_it_as_it_was():
    model = tiny("llama", num_hidden_layers=2)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    one, two = (torch.ones(1, n, dtype=torch.long, device=DEVICE) for n in (1, 2))
    with torch.no_grad():
        cache = KVCache.for_model(model, "int8", max_tokens=64)
        with raises(PoolFullError, "1 sequence", "64 tokens", "1 x 200", "max_tokens"):
            call(**prompts([200]), past_key_values=cache)
        assert cache.get_seq_length() == 0 and not cache.pages.in_pass
        call(**prompts([30]), past_key_values=cache)
        with raises(UnsupportedError, "attention_mask"):
            call(two, attention_mask=torch.tensor([[0] + [1] * 31], device=DEVICE), past_key_values=cache)
        with raises(CacheStateError, 1, 2, "batch_repeat_interleave(2)"):
            call(two.repeat(2, 2), past_key_values=cache)
        weight = model.model.layers[1].self_attn.k_proj.weight
        before = weight.detach().clone()
        weight.fill_(torch.nan)
        # of single tokens a GPU finds it out when their page closes
        with raises(DataError, "keys", "layer 1"):
            call(two, past_key_values=cache)
        assert cache.get_seq_length() == 30 and cache.columns.numbers[1] == 30 and not cache.pages.in_pass
        weight.copy_(before)
        want = model(one, past_key_values=copy.deepcopy(cache)).logits
        assert torch.equal(call(one, past_key_values=cache).logits, want)


@pytest.mark.night
def test_what_breaks_a_graph_elsewhere_breaks_no_cache():
    """A model that prints between its layers: pieces are compiled, attention is not looked into."""
    model, inputs = tiny("llama", num_hidden_layers=2), prompts([30, 12])
    want = generate(model, inputs, max_new_tokens=6)
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(model, inputs, max_new_tokens=6), want)
    assert counters["graph_break"] and all("graph_break" in reason for reason in counters["graph_break"])


def test_the_operation_says_what_it_writes_and_that_no_graph_may_hold_it(monkeypatch):
    model = tiny("llama", num_hidden_layers=1)
    cache = KVCache.for_model(model, "int8")
    q, k = torch.randn(2, 5, 4, 16, device=DEVICE), torch.randn(2, 5, 2, 16, device=DEVICE)
    arguments = (q, k, k.clone(), None, None, cache.columns.numbers, 0, 0.25, None, False, False)
    torch.library.opcheck(
        cached_attention, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    seen = cache.get_seq_length()
    assert seen and seen % 5 == 0 and cache.columns.numbers[1] == seen
    assert torch.Tag.cudagraph_unsafe in torch.ops.kvbits.cached_attention.default.tags
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(UnsupportedError, "mode='reduce-overhead'", "kvbits.graphed"):
        refuse_capture(torch.device("cuda"))


def test_transformers_does_not_compile_by_itself_and_graphed_takes_no_compiled_model():
    model = tiny("llama", num_hidden_layers=1)
    cache = KVCache.for_model(model, "int8", max_tokens=64)
    assert not cache.is_compileable
    compiled(model)
    with raises(UnsupportedError, "graphed()", "torch.compile"), kvbits.graphed(model, cache):
        pass


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("capacity", [{"max_tokens": 400}, {}], ids=["fixed", "grows"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_logits_of_the_gpu_kernels(backend, capacity):
    """200 tokens, led by the device from the third on: pages close, and close again."""
    shape = {
        "hidden_size": 512,
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "initializer_range": 0.05,
    }
    model, ids = tiny("llama", **shape).to(torch.bfloat16), prompts([350])["input_ids"]

    def run():
        cache = KVCache.for_model(model, "int8_centered", **capacity)
        with torch.no_grad():
            model(ids[:, :150], past_key_values=cache)
            out = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(150, 350)]
        assert cache.pages.decoding is not None and cache.get_seq_length() == 350
        return torch.stack(out).float()

    want = run()
    compiled(model, backend)
    found = run()
    assert graphs() == 2
    assert torch.equal(found, want) if backend == "eager" else (found - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize(("name", "scheme"), [("smollm2-135m-instruct", "int8_centered"), ("gemma3-270m", "int4")])
def test_trained_models_continue_real_text_with_the_same_tokens(name, scheme):
    if not (MODELS / name).is_dir():
        pytest.skip(f"{name} is not in KVBITS_MODELS")
    from kvbits.evaluate.texts import novel

    model, tokenizer = kvbits.load_model(str(MODELS / name))
    ids = tokenizer(novel(), return_tensors="pt").input_ids[:, :560].to(model.device)  # Gemma's window is 512
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want = generate(model, inputs, scheme, max_new_tokens=20)
    assert torch.equal(generate(compiled(model), inputs, scheme, max_new_tokens=20), want) and graphs() == 2
