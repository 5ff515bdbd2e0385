"""Pages that waited whole close together: one call for all sequences of a step, with the bytes that each alone would
get.
"""

import pytest
import torch
from cache_checks import Pair
from messages import raises
from nightly import at_night

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import DataError
from kvbits.ops.reference import close as reference
from kvbits.ops.reference.dequantize import section
from kvbits.spec import CacheSpec, LayerGeometry, PerToken, QuantSpec, Scheme, Tier

LAYERS = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 2


@pytest.fixture
def calls(monkeypatch):
    """Pages of each call of the reference's close."""
    found = []
    close = reference.close
    monkeypatch.setattr(reference, "close", lambda k, *args: found.append(len(k)) or close(k, *args))
    return found


@pytest.mark.parametrize(
    "scheme",
    [schemes.get("kivi4", residual_length=64), schemes.get("tiered", residual_length=0, tiers=(Tier(num_tokens=64),))],
    ids=["kivi4", "tiered"],
)
@pytest.mark.parametrize("max_tokens", [400, *at_night(None)], ids=["fixed", "growing"])
def test_one_call_closes_what_waited_in_all_sequences(scheme, max_tokens, calls):
    spec = CacheSpec(scheme=scheme, layers=LAYERS)
    together = PagedCache(spec, batch_size=max_tokens and 3, max_tokens=max_tokens, backend="reference")
    alone = [PagedCache(spec, backend="reference") for _ in range(3)]
    valid = torch.arange(50)[None] >= torch.tensor([0, 10, 20])[:, None]
    for step in range(200):
        for layer in range(2):
            k, v = (torch.randn(3, 1 if step else 50, 2, 64).bfloat16() for _ in "kv")
            together.append(layer, k, v, valid=None if step else valid)
            seen = len(calls)
            for row, cache in enumerate(alone):
                real = slice(None) if step else valid[row]
                cache.append(layer, k[row : row + 1, real], v[row : row + 1, real])
            del calls[seen:]
    assert together.seq_lens == [249, 239, 229]
    for layer in range(2):
        for row, cache in enumerate(alone):
            for x, y in zip(together.dequantize(layer, row), cache.dequantize(layer, 0), strict=True):
                assert torch.equal(x, y)
    ragged = len(calls)
    together.reset()
    for tokens in (40, *[1] * 200):
        for layer in range(2):
            k, v = (torch.randn(3, tokens, 2, 64).bfloat16() for _ in "kv")
            together.append(layer, k, v)
    assert set(calls[ragged:]) == {3}, "sequences as long as each other close in one call"


@pytest.mark.night
def test_sequences_of_one_length_read_what_they_store():
    pair = Pair(
        PagedCache(
            CacheSpec(scheme=schemes.get("int4", residual_length=0), layers=LAYERS, raw_dtype="float32"),
            backend="reference",
        )
    )
    pair.append(3, 60)
    for _ in range(75):
        pair.append(3, 1)
    pair.check()


def test_a_bad_number_that_waited_is_named():
    """On a GPU single tokens are not looked at until their page closes."""
    cache = PagedCache(CacheSpec(scheme=schemes.get("int8", residual_length=0), layers=LAYERS[:1]))
    for tokens in (40, *[1] * 24):
        cache.append(0, *(torch.randn(3, tokens, 2, 64).bfloat16() for _ in "kv"))
    pool = cache.groups[0].pools["tail"]
    page = pool.store(0, {}).page(cache.groups[0].sequences[2].tail[0])
    section(page, pool.layout, "v_raw")[1, 5, 7] = float("nan")
    with raises(DataError, "values", "layer 0", "tokens 0 to 63", "sequence 2", "nan", "(1, 5, 7)"):
        cache.append(0, *(torch.randn(3, 1, 2, 64).bfloat16() for _ in "kv"))


NUQ = QuantSpec(format="nuq3", granularity=PerToken(), symmetric=False, outliers=0.01)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "key, value",
    [
        (QuantSpec(), QuantSpec.raw()),
        (QuantSpec.raw(), QuantSpec(format="int4")),
        (QuantSpec(format="fp8_e4m3"), QuantSpec()),
        (NUQ, NUQ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_every_backend_names_it_whatever_the_codes(key, value, kind, backend):
    spec = CacheSpec(scheme=Scheme(name="a", key=key, value=value, page_size=32), layers=LAYERS[:1])
    books = {f"{side}_codebook": torch.linspace(-1, 1, 8).expand(2, -1).contiguous() for side in "kv"}
    cache = PagedCache(spec, static=[books] if key.has_codebook else None, backend=backend)
    for tokens in (40, *[1] * 23):
        cache.append(0, *(torch.randn(2, tokens, 2, 64).bfloat16() for _ in "kv"))
    pool = cache.groups[0].pools["tail"]
    page = pool.store(0, {}).page(cache.groups[0].sequences[1].tail[0])
    section(page, pool.layout, f"{kind[0]}_raw")[0, 30, 0] = float("-inf")
    with raises(DataError, kind, "layer 0", "tokens 32 to 63", "sequence 1", "-inf", "(0, 30, 0)"):
        for _ in range(2):
            cache.append(0, *(torch.randn(2, 1, 2, 64).bfloat16() for _ in "kv"))
