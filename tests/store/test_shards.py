"""Exchange between numbers of ranks: ranks of one number put, ranks of another load, byte for byte. Heads are cut and
joined, never quantized again.
"""

import dataclasses

import pytest
import torch
from messages import raises, warns
from nightly import at_night
from store_checks import bytes_of, cache_of, ids_of, numbers, pieces, spec_of

from kvbits import PrefixStore
from kvbits.errors import SpecError
from kvbits.spec import LayerGeometry

FOUR = LayerGeometry(num_kv_heads=4, head_dim=32)
LAYERS = (FOUR, dataclasses.replace(FOUR, sliding_window=100), FOUR)
IDS = ids_of(400)


def rank_of(name, rank, size, filled=True, static=None):
    """The cache of one rank: its heads of every layer."""
    n = 4 // size
    spec, _ = pieces(name, tuple(dataclasses.replace(g, num_kv_heads=n) for g in LAYERS))
    mine = slice(rank * n, (rank + 1) * n)
    static = static and [{key: x[mine] for key, x in layer.items()} for layer in static]
    cache = cache_of(spec, static=static)
    at = 0
    while filled and at < 400:
        for layer in range(3):
            k, v = numbers(IDS[: at + 50], at, layer, 4, 32)
            cache.append(layer, k[:, :, mine], v[:, :, mine])
        at += 50
    return cache


def store_of(path, rank, size, **options):
    return PrefixStore(path, blob_tokens=64, shard=(rank, size), **options)


@pytest.mark.parametrize(("put", "get"), [(1, 2), (4, 2), *at_night((2, 1), (2, 4), (4, 1), (1, 4))])
@pytest.mark.parametrize("name", ["int4", "kivi2", "token_local"])
def test_shards_of_one_size_load_under_another(tmp_path, name, put, get):
    for rank in range(put):
        assert store_of(tmp_path, rank, put).put(rank_of(name, rank, put), IDS) == 400
    for rank in range(get):
        loaded = rank_of(name, rank, get, filled=False)
        assert store_of(tmp_path, rank, get).load(loaded, IDS) == 400
        assert bytes_of(loaded) == bytes_of(rank_of(name, rank, get))


def test_there_and_back_gives_the_same_files(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    store_of(a, 0, 1).put(rank_of("int4", 0, 1), IDS)
    for rank in range(2):
        half = rank_of("int4", rank, 2, filled=False)
        store_of(a, rank, 2).load(half, IDS)
        store_of(b, rank, 2).put(half, IDS)
    whole = rank_of("int4", 0, 1, filled=False)
    store_of(b, 0, 1).load(whole, IDS)
    store_of(c, 0, 1).put(whole, IDS)
    files = [{str(p.relative_to(x)): p.read_bytes() for p in x.rglob("*") if p.is_file()} for x in (a, c)]
    assert files[0] == files[1]
    assert len(files[0]) == 6


def test_each_rank_pins_its_own_files(tmp_path):
    stores, caches = [store_of(tmp_path, rank, 2) for rank in range(2)], [rank_of("int4", rank, 2) for rank in range(2)]
    for store, cache in zip(stores, caches, strict=True):
        store.put(cache, IDS)
        assert store.pin(cache, IDS) == 400
    stores[1].evict(0)
    assert [store.match(cache, IDS) for store, cache in zip(stores, caches, strict=True)] == [400, 400]
    assert stores[0].unpin(caches[0], IDS)
    stores[1].evict(0)
    assert [store.match(cache, IDS) for store, cache in zip(stores, caches, strict=True)] == [0, 400]
    assert stores[1].unpin(caches[1], IDS)


def test_a_shard_that_is_missing_is_not_made_up(tmp_path):
    for rank in (0, 1, 3):
        store_of(tmp_path, rank, 4).put(rank_of("int4", rank, 4), IDS)
    assert store_of(tmp_path, 0, 2).load(rank_of("int4", 0, 2, filled=False), IDS) == 400
    assert store_of(tmp_path, 1, 2).load(rank_of("int4", 1, 2, filled=False), IDS) == 0
    assert store_of(tmp_path, 0, 1).load(rank_of("int4", 0, 1, filled=False), IDS) == 0
    assert store_of(tmp_path, 2, 4).load(rank_of("int4", 2, 4, filled=False), IDS) == 0


def test_calibrations_are_named_by_all_heads(tmp_path):
    spec = spec_of("int8_static", LAYERS, residual_length=0)
    static = [{"k_scale": torch.rand(4, 1) + 0.1, "v_scale": torch.rand(4, 1) + 0.1} for _ in LAYERS]

    def rank(i, n, filled=True):
        heads = 4 // n
        mine = [{key: x[i * heads : (i + 1) * heads] for key, x in layer.items()} for layer in static]
        part = dataclasses.replace(spec, layers=tuple(dataclasses.replace(g, num_kv_heads=heads) for g in LAYERS))
        cache = cache_of(part, static=mine)
        for layer in range(3) if filled else ():
            k, v = numbers(IDS, 0, layer, 4, 32)
            cache.append(layer, k[:, :, i * heads : (i + 1) * heads], v[:, :, i * heads : (i + 1) * heads])
        return cache

    store_of(tmp_path, 0, 1).put(rank(0, 1), IDS)
    with raises(SpecError, "shard", "PrefixStore(.., calibration=)"):
        store_of(tmp_path, 0, 2).load(rank(0, 2, filled=False), IDS)
    for i in range(2):
        loaded = rank(i, 2, filled=False)
        assert store_of(tmp_path, i, 2, calibration=static).load(loaded, IDS) == 400
        assert bytes_of(loaded) == bytes_of(rank(i, 2))


def test_what_cannot_be_cut_is_refused(tmp_path):
    for bad in ((2, 2), (0, 0), (-1, 2), (0.0, 1), (0, 10**6), 3, (0,), None, (False, True)):
        with raises(SpecError, "(rank, ranks)"):
            PrefixStore(tmp_path, shard=bad)


def test_a_damaged_shard_is_named_and_the_prefix_ends_before_it(tmp_path):
    for rank in range(2):
        store_of(tmp_path, rank, 2).put(rank_of("int4", rank, 2), IDS)
    path = sorted(p for p in tmp_path.rglob("*.1-2") if p.is_file())[0]
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    with warns(UserWarning, path.name):
        n = store_of(tmp_path, 0, 1).load(rank_of("int4", 0, 1, filled=False), IDS)
    assert n == 0, "layers with windows have their pages in the end alone"
    # what was set aside is there again, so that every file is looked at
    store_of(tmp_path, 1, 2).put(rank_of("int4", 1, 2), IDS)
    with warns(UserWarning, "truncated"):
        sorted(p for p in tmp_path.rglob("*.1-2") if p.is_file())[0].write_bytes(b"")
        store_of(tmp_path, 0, 1).load(rank_of("int4", 0, 1, filled=False), IDS)
