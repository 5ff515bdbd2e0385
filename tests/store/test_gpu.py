"""Pages of a store on a GPU: what comes through pinned memory is what was put, damage is found on the way."""

import threading

import pytest
import torch
from messages import raises, warns
from ops.emulated_op import needs_gpu
from store_checks import ids_of, pieces

from kvbits import PrefixStore, schemes
from kvbits.cache import reading
from kvbits.cache.paged_cache import PagedCache
from kvbits.cache.reading import DamagedError
from kvbits.spec import CacheSpec, LayerGeometry

pytestmark = needs_gpu
IDS = ids_of(3000)


def cache_of(spec, **options):
    cache = PagedCache(spec, device="cuda", **options)
    cache.made_for = "a model"
    return cache


def held(cache):
    return [x.cpu() for layer in range(len(cache.spec.layers)) for x in cache.dequantize(layer, 0)]


@pytest.mark.parametrize("name", ["int4", "kivi2", "raw"])
def test_what_was_put_loads_and_a_flipped_bit_is_found(tmp_path, name):
    spec, _ = pieces(name)
    donor, store = cache_of(spec), PrefixStore(tmp_path, blob_tokens=64)
    for layer, g in enumerate(spec.layers):
        donor.append(layer, *torch.randn(2, 1, len(IDS), g.num_kv_heads, g.head_dim, device="cuda"))
    store.put(donor, IDS)
    loaded = cache_of(spec)
    assert store.load(loaded, IDS) == len(IDS)
    assert all(torch.equal(a, b) for a, b in zip(held(donor), held(loaded), strict=True))
    path = sorted(p for p in tmp_path.rglob("*") if p.is_file() and "+" not in p.name)[3]
    data = bytearray(path.read_bytes())
    data[-77] ^= 16
    path.write_bytes(data)
    part = cache_of(spec)
    with warns(UserWarning, path.name):
        n = store.load(part, IDS)
    assert n < len(IDS)
    assert not n or all(torch.equal(a[:n], b) for a, b in zip(held(donor), held(part), strict=True))


@pytest.mark.parametrize("wait", [True, False])
def test_bytes_come_after_what_is_still_written_to_memory_used_again(tmp_path, wait):
    """A pool that grows for what is loaded may get memory that somebody freed and the current stream has still to
    write.
    """
    spec = of_8b_shape()
    donor, store = cache_of(spec), PrefixStore(tmp_path, blob_tokens=64)
    for layer in range(8):
        donor.append(layer, *torch.randn(2, 1, len(IDS), 2, 128, device="cuda", dtype=torch.bfloat16))
    store.put(donor, IDS)
    torch.cuda.synchronize()
    loaded = cache_of(spec)
    freed = [torch.empty(nbytes << 20, dtype=torch.uint8, device="cuda") for nbytes in (1, 2, 4, 8, 16, 32, 64)]
    torch.cuda._sleep(1_000_000_000)  # half a second
    for memory in freed:
        memory.fill_(0x5A)
    del freed, memory
    assert store.load(loaded, IDS, wait=wait) == len(IDS)
    assert all(torch.equal(a, b) for a, b in zip(held(donor), held(loaded), strict=True))


def of_8b_shape(layers=8):
    return CacheSpec(
        scheme=schemes.get("int4", head_dim=128), layers=(LayerGeometry(num_kv_heads=2, head_dim=128),) * layers
    )


def attended(cache, layers):
    g, found = torch.Generator("cuda").manual_seed(3), []
    for _ in range(layers.start):
        torch.randn(1, 1, 8, 128, generator=g, device="cuda")
    for layer in layers:
        q = torch.randn(1, 1, 8, 128, generator=g, device="cuda").bfloat16()
        found.append(cache.step(layer, q, q[:, :, :2], q[:, :, 2:4], scaling=0.1))
    return found


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "grows"])
def test_layers_that_start_early_wait_for_their_own_bytes_on_the_gpu(tmp_path, monkeypatch, fixed):
    """Reads of all but the first layers are held back until these have been launched; in the end all is as after a
    whole load, and damage is found.
    """
    spec, options = of_8b_shape(), {"max_tokens": 3100} if fixed else {}
    donor, store = cache_of(spec), PrefixStore(tmp_path)
    for layer in range(8):
        donor.append(layer, *torch.randn(2, 1, len(IDS), 2, 128, device="cuda", dtype=torch.bfloat16))
    store.put(donor, IDS)
    whole, early = cache_of(spec, **options), cache_of(spec, **options)
    assert store.load(whole, IDS) == len(IDS)
    expected = attended(whole, range(8))
    gate, real = threading.Event(), reading.Source.read

    def read(source, number, to, layers, medium):
        assert not layers.start or gate.wait(30)
        return real(source, number, to, layers, medium)

    monkeypatch.setattr(reading.Source, "read", read)
    for pool in early.groups[0].pools.values():
        for slab in pool.slabs:
            slab.fill_(0x5A)
    assert store.load(early, IDS, wait=False) == len(IDS)
    found = attended(early, range(2))
    torch.cuda.synchronize()
    assert early.arrivals.under_way
    gate.set()
    found += attended(early, range(2, 8))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held(early), held(whole), strict=True))
    path = sorted(p for p in tmp_path.rglob("*") if p.is_file() and "+" not in p.name)[3]
    data = bytearray(path.read_bytes())
    data[-77] ^= 16  # of the last layer
    path.write_bytes(data)
    early.reset()
    assert store.load(early, IDS, wait=False) == len(IDS)
    with warns(UserWarning, path.name), raises(DamagedError, path.name):
        attended(early, range(8))
    assert not early.in_pass
    early.reset()
    again = cache_of(spec, **options)
    n = store.load(early, IDS, wait=False)
    assert n == store.load(again, IDS) < len(IDS)
    assert not n or all(torch.equal(a, b) for a, b in zip(held(early), held(again), strict=True))
