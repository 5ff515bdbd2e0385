"""The graph decoder on a GPU: the tokens of eager decoding, through Transformers' own generate.

KVBITS_TEST_MODEL=<folder or GGUF file> adds a real model.
"""

from __future__ import annotations

import os
import threading
import time
import weakref

import pytest
import torch
from integrations import graph_cases
from integrations.graph_cases import eagerly
from messages import raises
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig
from transformers.generation.streamers import BaseStreamer

from kvbits import schemes
from kvbits.errors import PoolFullError, UnsupportedError
from kvbits.evaluate.calibrator import QUICK, Calibrator
from kvbits.evaluate.texts import novel_end
from kvbits.geometry import layer_geometries
from kvbits.integrations import graphs
from kvbits.integrations.graphs import graphed
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.models import load_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings(
        "ignore:.*Synchronization debug mode",
        "ignore:.*CUDA Graph is empty",
        "ignore:.*TensorFloat32",
        "ignore:.*is unfit for",
    ),
]
PRESETS = [
    "raw",
    "int8",
    "int8_centered",
    "int8_per_channel",
    "int4",
    "int4_centered",
    "int8k_int4v",
    "kivi4",
    "kivi2",
    "fp8",
]
REAL = os.environ.get("KVBITS_TEST_MODEL")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=1024,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()


@pytest.fixture(scope="module")
def real():
    if not REAL:
        pytest.skip("KVBITS_TEST_MODEL names no model")
    return load_model(REAL, dtype="bfloat16", device="cuda")


def prompts(lengths, seed=1, vocab=1024):
    return graph_cases.prompts(lengths, seed, vocab, "cuda")


def fixed(model, scheme="int8_centered", batch=1, tokens=900, calibration=None):
    return KVCache.for_model(model, scheme, batch_size=batch, max_tokens=tokens, calibration=calibration)


def generate(model, inputs, cache, count=128, **options):
    """Eagerly, outside of graphed()."""
    torch.manual_seed(3)
    options = {"do_sample": False, "pad_token_id": 0, "disable_compile": True} | options
    return model.generate(**inputs, past_key_values=cache, min_new_tokens=count, max_new_tokens=count, **options)


def both(model, inputs, scheme, batch, count, calibration=None, **options):
    eager, cache = (fixed(model, scheme, batch, calibration=calibration) for _ in range(2))
    with eagerly(model, eager):
        want = generate(model, inputs, eager, count, **options)
    with graphed(model, cache) as decoder:
        got = generate(model, inputs, cache, count, **options)
    assert (decoder.captures, decoder.replays) == (1, count - 2)
    assert torch.equal(got, want), (
        f"differs first at {(got != want).any(0).nonzero()[0].item() - inputs['input_ids'].shape[1]}"
    )
    assert cache.pages.seq_lens == eager.pages.seq_lens
    return want


@pytest.mark.parametrize("lengths", [[300], [250, 131, 7]], ids=["one", "left_padded"])
@pytest.mark.parametrize(
    "scheme",
    [*PRESETS, schemes.get("int8", residual_length=0, token_local=True)],
    ids=lambda s: s if isinstance(s, str) else "token_local",
)
def test_512_greedy_tokens_are_the_eager_ones(model, scheme, lengths):
    both(model, prompts(lengths), scheme, len(lengths), 512)


@pytest.mark.parametrize("lengths", [[300], [250, 131, 7]], ids=["one", "left_padded"])
def test_sampled_tokens_are_the_eager_ones(model, lengths):
    both(model, prompts(lengths), "int8_centered", len(lengths), 256, do_sample=True, temperature=1.3, top_p=0.95)


@pytest.mark.parametrize("lengths", [[300], [250, 131, 7]], ids=["one", "left_padded"])
@pytest.mark.parametrize("scheme", ["raw", "int8_centered", "kivi4"])
def test_generate_captures_by_itself(model, scheme, lengths, monkeypatch):
    """As with a static cache, which Transformers compiles: nothing is asked for."""
    made, inputs = [], prompts(lengths)

    class Noted(graphs.GraphDecoder):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(graphs, "GraphDecoder", Noted)
    eager, cache = (fixed(model, scheme, len(lengths)) for _ in range(2))
    assert cache.is_compileable and not KVCache.for_model(model, scheme).is_compileable
    with eagerly(model, eager):
        want = generate(model, inputs, eager, 256)
    assert not made
    got = generate(model, inputs, cache, 256, disable_compile=False)
    assert torch.equal(got, want) and (made[0].captures, made[0].replays) == (1, 254)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_configuration_of_the_compilers_compiles(model, mode):
    """One pass with torch.compile's own graphs around the operation, which they leave out."""
    inputs, eager, cache = prompts([100]), fixed(model), fixed(model)
    options = {"return_dict_in_generate": True, "output_logits": True}
    with eagerly(model, eager):
        want = generate(model, inputs, eager, 40, **options)
    got = generate(model, inputs, cache, 40, disable_compile=False, compile_config=CompileConfig(mode=mode), **options)
    assert cache.pages.seq_lens == eager.pages.seq_lens
    # other kernels round otherwise, and tokens follow
    same = next((i for i in range(40) if got.sequences[0, 100 + i] != want.sequences[0, 100 + i]), 39)
    assert same > 0
    for a, b in zip(got.logits[: same + 1], want.logits, strict=False):
        assert (a - b).norm() / b.norm() < 0.03
    torch.compiler.reset()


@pytest.mark.parametrize("scheme", [name for name, s in schemes.PRESETS.items() if not (s.tiers or s.key.has_codebook)])
def test_512_tokens_of_a_real_model_are_the_eager_ones(real, scheme):
    model, tokenizer = real
    found = schemes.for_layers(scheme, layer_geometries(model.config))
    calibration = Calibrator(model, tokenizer, novel_end(), sample=QUICK)(found) if found.needs_calibration else None
    both(model, prompts([200], vocab=20_000), scheme, 1, 512, calibration=calibration)


@pytest.mark.parametrize("compile", [False, True], ids=["as_it_is", "compiled"])
def test_logits_are_the_eager_ones_and_nothing_waits(model, compile):
    inputs = prompts([200, 150])
    eager, cache = fixed(model, batch=2), fixed(model, batch=2)
    tokens = torch.randint(2, 1024, (300, 2, 1), generator=torch.Generator().manual_seed(5)).cuda()
    masks = torch.cat([inputs["attention_mask"], torch.ones(2, 300, dtype=torch.long, device="cuda")], 1)
    with torch.no_grad(), eagerly(model, eager):
        want, got = [], []
        for used, found in ((eager, want), (cache, got)):
            with graphed(model, cache, compile=compile) as decoder:
                model(**inputs, past_key_values=used)
                for i, token in enumerate(tokens):
                    torch.cuda.set_sync_debug_mode("error" if decoder.replays > 1 else "default")
                    try:
                        found.append(model(token, attention_mask=masks[:, : 201 + i], past_key_values=used).logits)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
    assert decoder.replays == 299
    assert cache.pages.seq_lens == eager.pages.seq_lens
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert (a - b).norm() / a.norm() < 0.03 if compile else torch.equal(a, b), i  # compiled code rounds less often
    torch.compiler.reset()


def test_a_streamer_in_another_thread(model):
    class Collects(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens.append(value.flatten())

        def end(self):
            self.tokens.append(None)

    cache, streamer, found = fixed(model), Collects(), []
    with graphed(model, cache) as decoder:
        thread = threading.Thread(
            target=lambda: found.append(generate(model, prompts([100]), cache, 100, streamer=streamer))
        )
        thread.start()
        while thread.is_alive():  # the main thread uses the GPU meanwhile
            torch.ones(1000, device="cuda").sum().item()
            time.sleep(0.001)
        thread.join()
    assert decoder.replays == 98 and streamer.tokens.pop() is None
    assert torch.equal(torch.cat(streamer.tokens), found[0][0].cpu())


def test_turns_crops_and_resets_in_between(model):
    eager, cache = fixed(model), fixed(model)
    results = []
    for used in (eager, cache):
        with graphed(model, cache) as decoder, eagerly(model, eager):
            first = generate(model, prompts([200]), used, 100)
            turn = torch.cat([first, prompts([30], seed=2)["input_ids"]], 1)
            second = generate(model, {"input_ids": turn, "attention_mask": torch.ones_like(turn)}, used, 100)
            used.reset()
            third = generate(model, prompts([200]), used, 100)
            used.crop(-1)
            fourth = generate(model, {"input_ids": third, "attention_mask": torch.ones_like(third)}, used, 50)
        results.append((first, second, third, fourth))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
    assert decoder.captures == 4
    assert torch.equal(results[1][0], results[1][2])


def test_the_capacity_ends_in_a_sentence(model):
    cache = fixed(model, tokens=256)
    with graphed(model, cache) as decoder, raises(PoolFullError, "1 sequence", "256 tokens"):
        generate(model, prompts([200]), cache, 400)
    assert decoder.replays > 40 and cache.pages.seq_lens[0] >= 256 and cache.get_seq_length() == cache.pages.seq_lens[0]


def test_a_forward_pass_that_waits_is_refused_and_the_cache_stays(model):
    cache, clean = fixed(model), fixed(model)
    inputs, token = prompts([100]), torch.tensor([[7]], device="cuda")
    with torch.no_grad():
        for used in (cache, clean):
            model(**inputs, past_key_values=used)
            used.pages.expect_tokens()
            model(token, past_key_values=used)
        hook = model.model.layers[2].register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
        with (
            graphed(model, cache),
            raises(UnsupportedError, "LlamaForCausalLM", "CUDA graph"),
        ):
            model(token, past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 101
        with graphed(model, cache) as decoder:
            for _ in range(100):
                assert torch.equal(
                    model(token, past_key_values=cache).logits, model(token, past_key_values=clean).logits
                )
        assert decoder.replays == 100


def test_what_a_graph_held_is_given_back(model):
    cache, held = fixed(model), []
    for _ in range(4):
        with graphed(model, cache):
            generate(model, prompts([100]), cache, 20)
        cache.reset()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[3] - held[1] < 1 << 20, held


def test_nothing_of_a_generation_stays(model, monkeypatch):
    made = []

    class Noted(graphs.GraphDecoder):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(graphs, "GraphDecoder", Noted)
    cache = fixed(model)
    generate(model, prompts([100]), cache, 20, disable_compile=False)
    store = weakref.ref(cache.pages)
    del cache
    assert made[0]() is None and store() is None  # at once, not when the garbage collector comes by
