"""Pages of a store on a GPU: what comes through pinned memory is what was put, damage is found where the pages lie."""

import pytest
import torch
from ops.emulated_op import needs_gpu
from store_checks import ids_of, pieces

from kvbits import PrefixStore
from kvbits.cache.paged_cache import PagedCache

pytestmark = needs_gpu
IDS = ids_of(3000)


def cache_of(spec):
    cache = PagedCache(spec, device="cuda")
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
    with pytest.warns(UserWarning, match=path.name):
        n = store.load(part, IDS)
    assert n < len(IDS)
    assert not n or all(torch.equal(a[:n], b) for a, b in zip(held(donor), held(part), strict=True))
