"""Page ids are counted, pools allocate exactly what they say, and poison reaches every byte nobody wrote."""

import copy
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises

from kvbits import schemes
from kvbits.cache.allocator import Allocator
from kvbits.cache.pool import HUGE_PAGE, Pool, allocate_slab
from kvbits.errors import PoolFullError
from kvbits.spec import CacheSpec, LayerGeometry

GROUP = CacheSpec(scheme=schemes.get("int8"), layers=(LayerGeometry(num_kv_heads=2, head_dim=64),) * 3).groups[0]


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release", "grow"]), st.integers(0, 10**6))))
def test_counts_follow_a_plain_counter_and_ids_come_lowest_first(operations):
    allocator, counts = Allocator(), Counter()
    for operation, n in operations:
        held = sorted(counts)
        if operation == "grow":
            allocator.grow(max(allocator.capacity, n % 20))
        elif operation == "allocate" and allocator.num_free:
            page = allocator.allocate()
            assert page == min(set(range(allocator.capacity)) - set(held))
            counts[page] = 1
        elif operation == "share" and held:
            page = held[n % len(held)]
            allocator.share([page])
            counts[page] += 1
        elif operation == "release" and held:
            page = held[n % len(held)]
            allocator.release(page)
            counts -= Counter([page])
        assert allocator.num_used == len(counts)
        assert allocator.num_used + allocator.num_free == allocator.capacity
        assert all(allocator.count(i) == counts[i] for i in range(allocator.capacity))


def test_free_pages_can_be_neither_shared_nor_released():
    allocator = Allocator()
    allocator.grow(2)
    page = allocator.allocate()
    allocator.release(page)
    with raises(ValueError, "page 0", "free"):
        allocator.release(page)
    with raises(ValueError, "page 0", "free", "shared"):
        allocator.share([page])


def test_growing_never_moves_a_page():
    pool = Pool(GROUP, "closed", None, torch.device("cpu"))
    pool.reserve(1)
    first = pool.block(pool.allocator.allocate())
    address = first.data_ptr()
    first.fill_(7)
    for n in (3, 50, 500):
        pool.reserve(n)
        assert pool.block(0).data_ptr() == address
        assert (pool.block(0) == 7).all()
        assert pool.nbytes == pool.allocator.capacity * GROUP.block_bytes("closed")
    store = pool.store(1, {})
    addresses = store.addresses
    assert len(addresses) == pool.allocator.capacity
    for i in (0, 1, 3, pool.allocator.capacity - 1):
        assert addresses[i] == store.page(i).data_ptr() == pool.block(i)[1].data_ptr()


def test_layers_of_a_page_lie_side_by_side():
    pool = Pool(GROUP, "closed", 4, torch.device("cpu"))
    stores = [pool.store(i, {}) for i in range(3)]
    starts = [s.page(2).data_ptr() for s in stores]
    assert starts[1] - starts[0] == starts[2] - starts[1] == GROUP.layouts["closed"].page_size_bytes
    assert stores[0].page(3).data_ptr() - stores[0].page(2).data_ptr() == GROUP.block_bytes("closed")


def test_gathering_copies_pages_across_slabs():
    pool = Pool(GROUP, "closed", None, torch.device("cpu"))
    for n in (2, 4, 9):
        pool.reserve(n)
    for i in range(pool.allocator.capacity):
        pool.block(i).fill_(i)
    import numpy as np

    got = pool.store(2, {}).gather(np.array([8, 0, 3, 3]))
    assert got[:, 0, 0].tolist() == [8, 0, 3, 3]
    with raises(IndexError, "page 0", "pool"):
        pool.store(2, {}).page(pool.allocator.capacity)
    with raises(IndexError, "page 0", "closed"):
        pool.block(pool.allocator.capacity)


def test_a_fixed_pool_refuses_what_it_cannot_hold_and_changes_nothing():
    pool = Pool(GROUP, "tail", 2, torch.device("cpu"))
    pool.reserve(2)
    with raises(PoolFullError, "tail", 3, 2, "crop", "reset", "free", "max_tokens", "batch_size"):
        pool.reserve(3)
    assert pool.allocator.num_free == 2


def test_a_deep_copy_has_its_own_bytes_and_counts():
    pool = Pool(GROUP, "closed", 3, torch.device("cpu"))
    page = pool.allocator.allocate()
    pool.block(page).fill_(1)
    twin = copy.deepcopy(pool)
    twin.block(page).fill_(2)
    twin.allocator.release(page)
    assert (pool.block(page) == 1).all()
    assert pool.allocator.count(page) == 1
    assert twin.nbytes == pool.nbytes


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 3 * HUGE_PAGE + 64])
def test_slabs_have_the_bytes_asked_for_and_large_ones_start_on_a_huge_page(nbytes):
    slab = allocate_slab(nbytes, torch.device("cpu"))
    assert (slab.dtype, slab.numel()) == (torch.uint8, nbytes)
    if nbytes >= HUGE_PAGE:
        assert slab.data_ptr() % HUGE_PAGE == 0
    slab.fill_(3)


def test_page_memory_is_poisoned_in_tests():
    assert (Pool(GROUP, "tail", 1, torch.device("cpu")).block(0) == 0xFF).all()


MEASURE = """
import torch
from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.spec import CacheSpec, LayerGeometry

LAYERS = 16
spec = CacheSpec(scheme=schemes.get("int8"), layers=(LayerGeometry(num_kv_heads=2, head_dim=64),) * LAYERS)


def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def feed(cache, tokens):
    k = torch.ones(1, tokens, 2, 64, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        cache.append(layer, k, k)


feed(PagedCache(spec), 600)
before, cache = resident(), PagedCache(spec)
for _ in range(64):
    feed(cache, 256)
print((resident() - before) / cache.nbytes, max(len(p.slabs) for p in cache.held_groups[0].pools.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_a_growing_cache_takes_no_more_memory_than_it_says():
    out = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ratio, slabs = map(float, out.split())
    assert slabs > 15 and 0.7 < ratio <= 1.05
