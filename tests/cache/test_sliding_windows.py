"""Sliding-window layers keep exactly what the next query can see, page by page, and give the rest back."""

import pytest
from cache_checks import Pair
from nightly import at_night

from kvbits.cache.paged_cache import PagedCache
from kvbits.spec import CacheSpec, LayerGeometry, PerGroup, QuantSpec, Scheme

PAGE = 32
INT4 = QuantSpec(format="int4", granularity=PerGroup(8))


def pair_of(window, quant=INT4, sinks=0, residual=0):
    scheme = Scheme(name="x", key=quant, value=quant, page_size=PAGE, num_sink_tokens=sinks, residual_length=residual)
    spec = CacheSpec(
        scheme=scheme, layers=(LayerGeometry(num_kv_heads=1, head_dim=8, sliding_window=window),), raw_dtype="float32"
    )
    return Pair(PagedCache(spec, backend="reference"))


@pytest.mark.parametrize("quant", [INT4, QuantSpec.raw()], ids=["int4", "raw"])
@pytest.mark.parametrize(("window", "sinks"), [(40, 4), *at_night((33, 0), (70, 33))])
def test_prompts_of_every_length_around_a_page_keep_the_whole_window(quant, window, sinks):
    for length in range(100, 100 + PAGE + 2):
        pair = pair_of(window, quant, sinks)
        pair.append(1, length)
        pair.check()
        pair.append(1, 1)
        pair.append(1, 3)
        pair.check()


@pytest.mark.parametrize("quant", [INT4, QuantSpec.raw()], ids=["int4", "raw"])
@pytest.mark.parametrize("window", [1, 32, 65, *at_night(31, 33)])
def test_decoding_holds_no_page_without_a_visible_token(quant, window):
    pair = pair_of(window, quant)
    name = "tail" if quant.is_raw else "closed"
    pair.append(1, 5)
    for _ in range(200):
        pair.append(1, 1)
        (s,) = pair.cache.groups[0].sequences
        lengths = s.tail_lengths if quant.is_raw else s.closed_lengths
        newest = s.length - 1
        for i in range(len(lengths)):
            assert s.released + sum(lengths[: i + 1]) > newest - window + 1, (
                f"page {i} of {name} is out of the window of token {newest}"
            )
    pair.check()


def test_everything_is_released_once_speculation_ends():
    pair = pair_of(40)
    pair.append(1, 64)
    pair.cache.keep_past()
    pair.model.keep_past()
    for _ in range(8):
        pair.append(1, 50)
    held = pair.cache.groups[0].pools["closed"].allocator.num_used
    pair.cache.crop(460)
    pair.model.crop([460])
    pair.check()
    (s,) = pair.cache.groups[0].sequences
    assert held > 10
    assert len(s.closed) <= 2


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("chunks", [(5, 90, 7, 60), (33, 1, 31, 100), (1, 16, 17, 200, 1)])
def test_a_chunk_that_moves_past_all_that_is_held_goes_on_at_a_page(chunks, sinks):
    """Pages that never close lie where those of any other sequence of these tokens lie: `check_books` (in `append` and
    `check`) holds that.
    """
    pair = pair_of(16, QuantSpec.raw(), sinks)
    for n in chunks:
        pair.append(1, n)
        pair.check()
