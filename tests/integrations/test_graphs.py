"""The graph decoder where there is no GPU: kernels run on a CPU, and a graph is its work done again.
tests/integrations/test_gpu_graphs.py is the same on a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
from queue import Queue

import pytest
import torch
from cache import test_device_decode
from integrations.graph_cases import eagerly, prompts
from messages import raises, warns
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.generation.streamers import BaseStreamer

import kvbits
from kvbits.errors import CacheStateError, DataError, PoolFullError, UnsupportedError
from kvbits.evaluate.caches import factory
from kvbits.evaluate.tasks import replay
from kvbits.integrations import graphs
from kvbits.integrations.huggingface import KVCache

gpu = test_device_decode.gpu
needs_compiler = test_device_decode.pytestmark
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


class Repeated:
    """A captured graph: nothing happens when it is made; a replay does the work, with what the host knew then."""

    def __init__(self, work, device):
        self._work, self.output = work, None
        self._columns = inspect.getclosurevars(work).nonlocals["columns"]
        self._seen = self._columns.seen

    def replay(self):
        real, seen = torch.cuda.is_current_stream_capturing, self._columns.seen
        torch.cuda.is_current_stream_capturing, self._columns.seen = lambda: True, self._seen
        try:
            self.output = self._work()
        finally:
            torch.cuda.is_current_stream_capturing, self._columns.seen = real, seen


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def graph(gpu):
    gpu.setattr(graphs, "CapturedWork", Repeated)
    return gpu


def fixed(model, scheme="int8", batch=1, tokens=256):
    return KVCache.for_model(model, scheme, batch_size=batch, max_tokens=tokens)


def generate(model, inputs, cache, count=24, **options):
    torch.manual_seed(3)
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=count, **{"do_sample": False, **options})


class Collects(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = Queue(), False

    def put(self, value):
        self.tokens.put(value)

    def end(self):
        self.ended = True


@needs_compiler
@pytest.mark.parametrize("lengths", [[40], [60, 33, 5]], ids=["one", "left_padded"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 1.5}], ids=["greedy", "sampling"])
def test_tokens_are_those_of_the_eager_cache(model, graph, lengths, options):
    inputs, batch = prompts(lengths), len(lengths)
    eager, cache = fixed(model, batch=batch), fixed(model, batch=batch)
    with eagerly(model, eager):
        want = generate(model, inputs, eager, 40, **options)
    with kvbits.graphed(model, cache) as decoder:
        got = generate(model, inputs, cache, 40, **options)
    assert torch.equal(got, want)
    assert (decoder.captures, decoder.replays) == (1, 38)  # the prompt gives a token, the first one after it is eager
    assert cache.get_seq_length() == eager.get_seq_length() and cache.pages.seq_lens == eager.pages.seq_lens
    for a, b in zip(cache.pages.dequantize(0, batch - 1), eager.pages.dequantize(0, batch - 1), strict=True):
        assert torch.equal(a, b)


@needs_compiler
def test_chains_are_written_in_a_graph(model, graph):
    raw, made = factory(model, "raw"), []

    def write(cache, captured):
        turns = [itertools.repeat([5, 6]), itertools.repeat([7])]
        f = dataclasses.replace(raw, make=lambda *_: cache)
        return replay.write(
            model, f, [[3, 4, 5], [6, 7]], turns, 90, 11, [random.Random(i) for i in range(2)], captured
        )

    graph.setattr(graphs, "CapturedWork", lambda *a: made.append(Repeated(*a)) or made[-1])
    with eagerly(model, eager := raw.make(2, 90)):
        want = write(eager, False)
    assert not made and 11 in want[0][3:] + want[1][2:] and [len(chain) for chain in want] == [90, 90]
    assert write(raw.make(2, 90), True) == want and len(made) == 1


@needs_compiler
@pytest.mark.parametrize("switched_off", [False, True], ids=["on", "off"])
def test_compiled_passes_are_captured_too(model, graph, switched_off):
    """With a compiler that changes no number, or none at all: the same tokens, nothing stored while it compiles, and
    another batch size compiles once more.
    """
    graph.setattr(graphs, "BACKEND", "eager")
    if switched_off:  # as TORCHDYNAMO_DISABLE=1 does
        graph.setattr(torch, "compile", lambda f, **_: f)
    torch.compiler.reset()
    counters.clear()
    for lengths in ([70], [40, 23])[: 1 if switched_off else 2]:
        inputs, batch = prompts(lengths), len(lengths)
        cache = fixed(model, batch=batch)
        with eagerly(model, cache):
            want = generate(model, inputs, cache, disable_compile=True)
        cache = fixed(model, batch=batch)
        with kvbits.graphed(model, cache, compile=True) as decoder:
            assert torch.equal(generate(model, inputs, cache), want)
        assert decoder.captures == 1 and decoder.replays >= 21, (decoder.captures, decoder.replays)
        assert cache.get_seq_length() == want.shape[1] - 1
    assert counters["stats"]["unique_graphs"] == (0 if switched_off else 2) and not counters["graph_break"], counters


@needs_compiler
def test_outputs_are_the_callers_own_and_positions_need_not_be_given(model, graph):
    inputs = prompts([30])
    eager, cache = fixed(model), fixed(model)
    outputs = []
    with torch.no_grad():
        for used in (eager, cache):
            with graphs.graphed(model, cache):
                model(**inputs, past_key_values=used)
                used.pages.expect_tokens()
                steps = [
                    model(torch.tensor([[i + 5]]), past_key_values=used, output_hidden_states=True) for i in range(6)
                ]
            outputs.append(steps)
    assert [type(x) for x in outputs[1]] == [type(x) for x in outputs[0]]
    for want, got in zip(*outputs, strict=True):
        assert torch.equal(want.logits, got.logits) and got.past_key_values is cache
        assert len(got.hidden_states) == len(want.hidden_states) == 3
        assert torch.equal(want.hidden_states[1], got.hidden_states[1])


@needs_compiler
def test_a_streamer_gets_every_token(model, graph):
    cache, streamer = fixed(model), Collects()
    with graphs.graphed(model, cache):
        out = generate(model, prompts([20]), cache, 10, streamer=streamer)
    got = [streamer.tokens.get_nowait() for _ in range(streamer.tokens.qsize())]
    assert streamer.ended and torch.equal(torch.cat([x.flatten() for x in got]), out[0])


@needs_compiler
def test_prompts_crops_and_resets_in_between_capture_again_only_then(model, graph):
    eager, cache = fixed(model), fixed(model)
    results = []
    for used in (eager, cache):
        with graphs.graphed(model, cache) as decoder, eagerly(model, eager):
            first = generate(model, prompts([30]), used)
            turn = {"input_ids": torch.cat([first, prompts([7], seed=2)["input_ids"]], 1)}
            second = generate(model, turn, used)
            captures = decoder.captures
            used.crop(-10)
            third = generate(model, {"input_ids": second[:, :-5]}, used)
            used.reset()
            fourth = generate(model, prompts([30]), used)
        results.append((first, second, third, fourth))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
    assert captures == 2 and decoder.captures == 4
    assert torch.equal(results[1][0], results[1][3])


@needs_compiler
def test_the_capacity_ends_in_a_sentence_and_the_cache_stays(model, graph):
    cache, eager = fixed(model, tokens=64), fixed(model, tokens=64)
    inputs = prompts([50])
    with torch.no_grad(), graphs.graphed(model, cache) as decoder:
        model(**inputs, past_key_values=cache), model(**inputs, past_key_values=eager)
        token, done = torch.tensor([[7]]), 0
        with raises(PoolFullError, "1 sequence", "64 tokens", "max_tokens"):
            for _ in range(300):
                model(token, past_key_values=eager)
                model(token, past_key_values=cache)
                done += 1
        with pytest.raises(PoolFullError):
            model(token, past_key_values=cache)
        assert decoder.replays > 10
        assert cache.get_seq_length() == 50 + done == cache.pages.seq_lens[0]
        cache.reset()
        model(**inputs, past_key_values=cache)


@needs_compiler
def test_bad_inputs_are_refused_and_change_nothing(model, graph):
    cache, clean = fixed(model, batch=2), fixed(model, batch=2)
    inputs = prompts([30, 30])
    token = torch.tensor([[7], [8]])
    mask = torch.ones(2, 33, dtype=torch.long)
    with torch.no_grad(), graphs.graphed(model, cache) as decoder:
        for used in (cache, clean):
            model(**inputs, past_key_values=used)
            used.pages.expect_tokens()
            for _ in range(2):
                model(token, past_key_values=used)
        replays = decoder.replays
        hidden = mask.clone()
        hidden[0, 3] = 0
        for wrong, error, parts in (
            ({"input_ids": token[:1]}, CacheStateError, (2, 1, "batch_select_indices()", "reset()")),
            (
                {"inputs_embeds": torch.zeros(2, 1, 128)},
                DataError,
                ("inputs_embeds", "torch.float32", "torch.bfloat16"),
            ),
            ({"input_ids": token, "attention_mask": mask[:, :9]}, UnsupportedError, ("attention_mask", "9 tokens", 32)),
            ({"input_ids": token, "attention_mask": hidden}, UnsupportedError, ("attention_mask",)),
            (
                {"input_ids": token, "attention_mask": torch.zeros(2, 1, 1, 33)},
                UnsupportedError,
                ("attention_mask", "[batch, tokens]", (2, 1, 1, 33)),
            ),
            ({"input_ids": token, "labels": token}, UnsupportedError, ("labels=Tensor",)),
            ({}, DataError, ("input_ids", "inputs_embeds")),
        ):
            with raises(error, *parts):
                model(**wrong, past_key_values=cache)
        assert decoder.replays == replays and cache.get_seq_length() == 32
        got, want = (model(token, attention_mask=mask, past_key_values=used).logits for used in (cache, clean))
        assert torch.equal(got, want) and decoder.replays == replays + 1


@needs_compiler
@pytest.mark.parametrize(
    "error, expected, parts",
    [
        (RuntimeError("operation not permitted\nmore"), UnsupportedError, ("CUDA graph", "operation not permitted")),
        (KeyboardInterrupt(), KeyboardInterrupt, ()),
    ],
)
def test_a_capture_that_fails_leaves_the_cache_as_it_was(model, graph, error, expected, parts):
    cache, clean = fixed(model), fixed(model)

    class Fails:
        def __init__(self, work, device):
            torch.cuda.is_current_stream_capturing = lambda: True
            hook = model.model.layers[1].register_forward_pre_hook(self.fail)
            try:
                work()
            finally:
                hook.remove()
                torch.cuda.is_current_stream_capturing = lambda: False

        def fail(self, *args):
            raise error

    graph.setattr(graphs, "CapturedWork", Fails)
    inputs, token = prompts([30]), torch.tensor([[7]])
    with torch.no_grad():
        with graphs.graphed(model, cache):
            for used in (cache, clean):
                model(**inputs, past_key_values=used)
                used.pages.expect_tokens()
                model(token, past_key_values=used)
            lengths, left = cache.pages.decoding.stepper.groups[0].numbers.clone(), cache.pages.decoding.steps_left
            with raises(expected, *parts):
                model(token, past_key_values=cache)
            assert cache.pages.decoding.steps_left == left and not cache.pages.in_pass and cache.get_seq_length() == 31
        cache.pages.decoding.stepper.groups[0].numbers.copy_(lengths)  # what capturing launches runs on a CPU
        assert torch.equal(model(token, past_key_values=cache).logits, model(token, past_key_values=clean).logits)


@needs_compiler
def test_an_interrupted_eager_pass_is_taken_back(model, graph):
    cache, clean = fixed(model), fixed(model)
    inputs, token = prompts([30]), torch.tensor([[7]])

    def die(*args):
        raise KeyboardInterrupt

    with torch.no_grad(), graphs.graphed(model, cache):
        for used in (cache, clean):
            model(**inputs, past_key_values=used)
            used.pages.expect_tokens()
        hook = model.model.layers[1].register_forward_pre_hook(die)
        for bad in (token, torch.tensor([[5, 6, 7]])):
            with pytest.raises(KeyboardInterrupt):
                model(bad, past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 30
        assert torch.equal(model(token, past_key_values=cache).logits, model(token, past_key_values=clean).logits)


@needs_compiler
def test_beams_run_eagerly_and_say_so(model, graph):
    cache = fixed(model, "raw", batch=3)
    with warns(RuntimeWarning, "eagerly"), graphs.graphed(model, cache) as decoder:
        assert generate(model, prompts([30]), cache, 8, num_beams=3).shape == (1, 38)
    assert decoder.replays == 0


@needs_compiler
def test_the_model_is_itself_again(model, graph):
    cache, names = fixed(model), set(model.__dict__)
    before = inspect.signature(model.forward)
    with pytest.raises(ZeroDivisionError), graphs.graphed(model, cache):
        assert inspect.signature(model.forward) == before
        inner = fixed(model)
        with graphs.graphed(model, inner) as decoder:
            generate(model, prompts([9]), inner, 6)
            assert decoder.replays == 4
            generate(model, prompts([9]), DynamicCache(config=model.config), 3)
        raise ZeroDivisionError
    assert set(model.__dict__) == names and "forward" not in names


@needs_compiler
def test_what_can_never_be_captured_is_refused_at_once(model, graph):
    def refused(cache, error, *parts, of=model):
        with raises(error, *parts), graphs.graphed(of, cache):
            pass
        assert "forward" not in vars(of)

    refused(KVCache.for_model(model, "int8"), UnsupportedError, "max_tokens", "batch_size")
    refused(DynamicCache(), DataError, "DynamicCache", "KVCache.for_model(model, ..)")
    refused(fixed(model, "tiered"), UnsupportedError, "'tiered'", "tiers")
    refused(
        KVCache.for_model(model, "int8", max_tokens=64, backend="reference"),
        UnsupportedError,
        "backend='reference'",
    )
    cache = fixed(model)
    other = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG | {"num_hidden_layers": 3}), dtype=torch.bfloat16)
    KVCache.for_model(other, "raw")
    refused(cache, DataError, "2 layers", 3, "KVCache.for_model(model, ..)", of=other)
    other = tiny().float()
    KVCache.for_model(other, "raw")
    refused(cache, DataError, "torch.float32", "bfloat16", "KVCache.for_model", of=other)
    other = tiny()
    refused(cache, UnsupportedError, "'sdpa'", of=other)
    with (
        raises(UnsupportedError, "graphed()", "torch.compile"),
        graphs.graphed(torch.compile(model), cache),
    ):
        pass


def test_without_a_gpu_it_says_what_to_do(model):
    with (
        raises(UnsupportedError, "graphed()", "cpu"),
        graphs.graphed(model, fixed(model)),
    ):
        pass
    with raises(DataError, "str", "kvbits.load_model"), graphs.graphed("gpt2", fixed(model)):
        pass
