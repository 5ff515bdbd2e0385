"""Ctrl-C in a model with a KVCache: what Transformers counts and what pages hold never disagree, and `abandon()` is the
way on.
"""

import copy
import signal

import pytest
import tiny
import torch
from integrations.test_huggingface import prompts
from integrations.test_huggingface import tiny as family
from interrupting import THOROUGH, interrupted
from messages import raises

from kvbits import KVCache
from kvbits.errors import CacheStateError

IDS = torch.randint(3, 60, (2, 100), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 100, dtype=torch.long)
MASK[1, :7] = 0
GREEDY = {"do_sample": False, "eos_token_id": -1}


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def forward(model, cache, start, end):
    with torch.no_grad():
        return model(IDS[:, start:end], attention_mask=MASK[:, :end], past_key_values=cache).logits


def lengths(cache):
    """Positions that Transformers counts, and tokens that pages hold."""
    return cache.get_seq_length(), cache.pages.seq_lens


WORK = {
    "a token": (lambda model, cache: forward(model, cache, 70, 71), 40),
    "a chunk": (lambda model, cache: forward(model, cache, 70, 100), 40),
    "crop": (lambda model, cache: cache.crop(-3), 40),
    "beams": (lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])), 40),
    "repeat": (lambda model, cache: cache.batch_repeat_interleave(2), 25),
    "reset": (lambda model, cache: cache.reset(), 25),
}


@pytest.mark.parametrize("name", WORK)
def test_counts_of_columns_and_of_pages_never_disagree(model, name):
    work, most = WORK[name]
    cache = KVCache.for_model(model, "raw")
    forward(model, cache, 0, 70)
    after = copy.deepcopy(cache)
    work(model, after)
    states = {str((lengths(c), c.columns.valid)): c for c in (cache, after)}
    hit = 0
    for at, tried in interrupted(lambda: copy.deepcopy(cache), lambda c: work(model, c), most):
        if tried.pages.in_pass:
            with raises(CacheStateError, "abandon()"):
                forward(model, tried, 70, 71)
            tried.abandon()
        now = str((lengths(tried), tried.columns.valid))
        assert now in states, f"interrupted at {at}: {now}"
        hit += states[now] is cache
        if name in ("a token", "a chunk", "crop"):
            end, clean = tried.get_seq_length(), copy.deepcopy(states[now])
            last = min(99, end)
            assert (
                torch.equal(forward(model, tried, last, last + 1), forward(model, clean, last, last + 1))
                if end < 100
                else True
            ), at
    assert hit


def test_a_pass_behind_its_last_layer_that_a_window_keeps_from_going_back_says_what_to_do():
    model = family("gemma3")
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad():
        model(prompts([200])["input_ids"], past_key_values=cache)
        hook = model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(prompts([150])["input_ids"], past_key_values=cache)
        hook.remove()
        with raises(CacheStateError, "150 tokens", "reset()", "copy.deepcopy"):
            cache.abandon()
        cache.reset()
        model(prompts([20])["input_ids"], past_key_values=cache)
    assert cache.pages.seq_lens == [20]


@pytest.mark.parametrize("tokens", [1, 30])
def test_a_pass_interrupted_behind_its_last_layer_is_taken_back(model, tokens):
    """All layers have stored their tokens by then; between passes `abandon()` does nothing."""
    cache = KVCache.for_model(model, "raw")
    forward(model, cache, 0, 60)
    hook = model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, 60, 60 + tokens)
    hook.remove()
    cache.abandon()
    assert lengths(cache) == (60, [60, 53])
    clean = KVCache.for_model(model, "raw")
    forward(model, clean, 0, 60)
    assert torch.equal(forward(model, cache, 60, 90), forward(model, clean, 60, 90))
    cache.abandon()
    assert lengths(cache) == (90, [90, 83])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that comes in a destructor is lost
def test_signals_during_generate(model):
    """Interrupts by the clock, wherever they come: then `abandon()`, and the cache goes on with the very tokens."""
    ids = IDS[:1, :40]
    whole = model.generate(ids, past_key_values=KVCache.for_model(model, "raw"), max_length=100, **GREEDY)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    stopped = 0
    try:
        for i in range(400 if THOROUGH else 12):
            cache = KVCache.for_model(model, "raw")
            try:
                try:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0.002 + 0.013 * (i % 29))
                    model.generate(ids, past_key_values=cache, max_length=100, **GREEDY)
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except KeyboardInterrupt:
                stopped += 1
            cache.abandon()
            n, held = lengths(cache)
            assert held == ([n] if held or n else []), f"Transformers counts {n} tokens, pages hold {held}"
            if n < 99:
                assert torch.equal(
                    model.generate(whole[:, : max(n + 1, 40)], past_key_values=cache, max_length=100, **GREEDY), whole
                )
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert stopped
