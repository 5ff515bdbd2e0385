"""Whatever an interrupt hits, the cache is then as it was before or after, or says how to go on:
KVBITS_HYPOTHESIS=thorough tries ten times as many places.
"""

import copy

import pytest
import torch
from cache_checks import check_books, poison_free_pages
from interrupting import interrupted
from messages import raises
from nightly import at_night

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError
from kvbits.spec import CacheSpec, LayerGeometry, Tier

FULL = LayerGeometry(num_kv_heads=1, head_dim=16)
LAYERS = (FULL, LayerGeometry(num_kv_heads=1, head_dim=16, sliding_window=40), FULL)
TIERED = schemes.get(
    "int4", head_dim=16, page_size=32, residual_length=8, num_sink_tokens=4, tiers=(Tier(num_tokens=64),)
)


def random(batch, count, seed=0):
    """Queries, keys and values of a layer."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, heads, 16, generator=g) for heads in (2, 1, 1)]


def forward(cache, batch, count, seed=0):
    return [
        cache.step(layer, *random(batch, count, 10 * seed + layer), scaling=0.2)
        for layer in range(len(cache.spec.layers))
    ]


def cache_of(scheme=TIERED, layers=LAYERS, tokens=150, **options):
    cache = PagedCache(CacheSpec(scheme=scheme, layers=layers, raw_dtype="float32"), backend="reference", **options)
    forward(cache, 2, tokens)
    return cache


def state(cache):
    """All that a user can see of it, and who holds what."""
    sequences = [([s.clone() for s in g.sequences], g.keep_past) for g in cache.groups]
    counts = [
        [p.allocator.count(i) for i in range(p.allocator.capacity)] for g in cache.groups for p in g.pools.values()
    ]
    values = [
        [x.tolist() for x in cache.dequantize(layer, row)]
        for layer in range(len(cache.spec.layers))
        for row in range(cache.batch_size)
    ]
    return sequences, counts, values, cache.nbytes, cache.saturated


def pass_of(count):
    return lambda cache: forward(cache, 2, count, 7)


def swap_in(cache):
    cache.swap_in(1, cache.waiting)


WORK = {
    "a token": (pass_of(1), 20),
    "a token that closes pages": (pass_of(1), 20),
    "a chunk": (pass_of(70), 20),
    "crop": (lambda c: c.crop([0, 149]), 20),
    "select": (lambda c: c.select([1, 1, 0]), 20),
    "fork": (lambda c: c.fork(0), 20),
    "free": (lambda c: c.free(0), 20),
    "reset": (lambda c: c.reset(), 20),
    "swap_out": (lambda c: c.swap_out(0), 20),
    "swap_in": (swap_in, 20),
    "set_tiers": (lambda c: c.set_tiers(0, [32]), 20),
    "keep_past": (lambda c: c.keep_past(), 15),
    "drop_pages": (lambda c: c.drop_pages(0, [x[:2] for x in c.closed_pages(0)]), 20),
}

GATE = ("a token that closes pages", "crop", "fork", "swap_in")


def check(make, work, most):
    """Count the interrupts that left the cache as it was, as it is afterwards, and in a pass that the cache reports."""
    before, after = make(), make()
    work(after)
    found = {"before": 0, "after": 0, "in a pass": 0}
    clean = {"before": before, "after": after}
    states = {name: state(c) for name, c in clean.items()}
    for at, cache in interrupted(make, work, most):
        if cache.in_pass:
            with raises(CacheStateError, "abandon()"):
                cache.crop(0)
            found["in a pass"] += 1
            cache.abandon()
            assert state(cache) == states["before"], at
        now = state(cache)
        how = next((name for name, x in states.items() if x == now), None)
        assert how is not None, f"interrupted at {at}: neither what was before nor what is after"
        found[how] += 1
        check_books(cache)
        poison_free_pages(cache)
        again = copy.deepcopy(clean[how])
        rows = max(1, cache.batch_size)
        assert all(
            torch.equal(a, b)
            for count in (1, 40)
            for a, b in zip(forward(cache, rows, count, 3), forward(again, rows, count, 3), strict=True)
        ), at
    return found


@pytest.mark.parametrize("name", [*GATE, *at_night(*(name for name in WORK if name not in GATE))])
def test_an_interrupt_leaves_all_of_an_operation_or_nothing(name):
    work, most = WORK[name]
    cache = cache_of(tokens=151 if name == "a token that closes pages" else 150)
    if name == "swap_in":
        cache.waiting = cache.swap_out(1)
    found = check(lambda: copy.deepcopy(cache), work, most)
    assert found["before"], "no interrupt came before the end"


# where the first interrupt keeps `with` from entering
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object Passes.change")
def test_taking_back_can_be_interrupted_too(monkeypatch):
    cache = cache_of()
    for work in (lambda c: c.crop([0, 149]), lambda c: c.select([1, 1, 0]), pass_of(70)):

        def twice(c, work=work):
            real = c._passes.heal

            def heal():
                if c._passes._now.undo is not None:
                    c._passes.heal = real
                    c.held_groups[0].restore(c._passes._now.undo.before[0])
                    raise KeyboardInterrupt
                real()

            c._passes.heal = heal
            try:
                work(c)
            finally:
                c._passes.heal = real

        assert check(lambda: copy.deepcopy(cache), twice, 12)["before"]


def test_another_thread_in_the_middle_of_an_operation_is_refused():
    import threading

    cache, inside, go = cache_of(), threading.Event(), threading.Event()

    def slow():
        with cache.change("a long operation"):
            inside.set()
            go.wait()

    thread = threading.Thread(target=slow)
    thread.start()
    inside.wait()
    with raises(CacheStateError, "thread"):
        forward(cache, 2, 1)
    go.set()
    thread.join()
    forward(cache, 2, 1)
