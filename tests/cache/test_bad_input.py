"""Bad input: each refusal names the value, the limit and the way out, and leaves the cache usable."""

import pytest
import torch
from cache_checks import Pair, picture
from messages import raises

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, SpecError
from kvbits.spec import CacheSpec, LayerGeometry

FULL = LayerGeometry(num_kv_heads=2, head_dim=64)


def make(name="int8", layers=2, raw_dtype="float32", window=None, **changes):
    geometry = LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=window)
    spec = CacheSpec(scheme=schemes.get(name, **changes), layers=(geometry,) * layers, raw_dtype=raw_dtype)
    return PagedCache(spec, backend="reference")


def qkv(batch=1, tokens=3, heads=2, head_dim=64, dtype=torch.float32, group=2):
    return (
        torch.randn(batch, tokens, heads * group, head_dim, dtype=dtype),
        torch.randn(batch, tokens, heads, head_dim, dtype=dtype),
        torch.randn(batch, tokens, heads, head_dim, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda q, k, v: (q, k[:, :2], v), ["keys", "layer 0", "(1, 2, 2, 64)", "(1, 3, 2, 64)"]),
        (lambda q, k, v: (q, k, v[..., :32]), ["values", "layer 0", "(1, 3, 2, 32)", "(1, 3, 2, 64)"]),
        (lambda q, k, v: (q, k[:, :, :1], v[:, :, :1]), ["keys", "layer 0", "(1, 3, 1, 64)", "(1, 3, 2, 64)"]),
        (lambda q, k, v: (q, k[0], v[0]), ["keys", "layer 0", "(3, 2, 64)", "(1, 3, 2, 64)"]),
        (lambda q, k, v: (q[0], k, v), ["queries", "layer 0", "(3, 4, 64)", "4 dimensions"]),
        (lambda q, k, v: (q[:, :, :3], k, v), ["queries", "layer 0", "(1, 3, 3, 64)", "multiple of 2"]),
        (lambda q, k, v: (q[:, :, :0], k, v), ["queries", "layer 0", "(1, 3, 0, 64)", "multiple of 2"]),
        (lambda q, k, v: (q[..., :32], k, v), ["queries", "layer 0", "head_dim 64"]),
        (
            lambda q, k, v: (q, k.half(), v),
            ["keys", "layer 0", "torch.float16", "float32", "raw_dtype='float16'"],
        ),
        (lambda q, k, v: (q, k, v.bfloat16()), ["values", "layer 0", "torch.bfloat16", "raw_dtype='bfloat16'"]),
        (lambda q, k, v: (q.half(), k, v), ["queries", "layer 0", "torch.float16", "float32"]),
        (lambda q, k, v: (q, k.to("meta"), v), ["keys", "layer 0", "meta", "cpu", "device='meta'"]),
        (lambda q, k, v: (q.to("meta"), k, v), ["queries", "layer 0", "meta", "cpu"]),
        (lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), ["1 sequence x 0 tokens"]),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), ["0 sequences x 3 tokens"]),
    ],
)
def test_wrong_tensors_are_refused_before_anything_changes(change, parts):
    cache = make()
    with raises(DataError, *parts):
        cache.step(0, *change(*qkv()), scaling=1.0)
    assert cache.batch_size == 0
    for layer in range(2):
        cache.step(layer, *qkv(), scaling=1.0)
    assert cache.seq_lens == [3]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda k, v: (torch.cat([k, k], 2), v), ["keys", "layer 0", "(1, 3, 4, 64)", "(1, 3, 2, 64)"]),
        (lambda k, v: (k, v[:, :2]), ["values", "layer 0", "(1, 3, 2, 64)"]),
        (lambda k, v: (k.half(), v), ["layer 0", "torch.float16"]),
        (lambda k, v: (k * float("nan"), v), ["keys", "layer 0", "nan"]),
    ],
)
def test_wrong_tensors_to_append_are_refused_before_anything_changes(change, parts):
    cache = make()
    with raises(DataError, *parts):
        cache.append(0, *change(*qkv()[1:]))
    assert cache.batch_size == 0


def test_appending_stores_what_a_step_stores():
    caches = [make(page_size=32, residual_length=5) for _ in range(2)]
    for tokens in (70, 1, 3):
        for layer in range(2):
            q, k, v = qkv(tokens=tokens)
            caches[0].step(layer, q, k, v, scaling=1.0)
            caches[1].append(layer, k, v)
    assert picture(caches[0]) == picture(caches[1])


def test_a_layer_that_does_not_exist_is_refused():
    with raises(DataError, "layer 2", "2 layers"):
        make().step(2, *qkv(), scaling=1.0)


@pytest.mark.parametrize("softcap", [0.0, -1.0])
def test_a_softcap_that_is_not_positive_is_refused(softcap):
    with raises(DataError, f"softcap={softcap}", "0.001", "10000", "None"):
        make().step(0, *qkv(), scaling=1.0, softcap=softcap)


@pytest.mark.parametrize(
    "bad, parts",
    [
        ({"scaling": 0.0}, ("scaling=0.0", "1e30")),
        ({"scaling": -1.0}, ("scaling=-1.0", "1e30")),
        ({"softcap": 1e7}, ("softcap=10000000.0", "10000", "None")),
        ({"sink_logits": torch.zeros(3)}, ("sink_logits", "[4]", "[3]")),
        ({"valid": torch.tensor([[True, True, False]])}, ("layer 1", "mask")),
    ],
    ids=str,
)
def test_a_later_layer_s_bad_call_takes_the_pass_back(bad, parts):
    cache, mask = make(layers=2), torch.tensor([[False, True, True]])
    cache.step(0, *qkv(), scaling=1.0, valid=mask)
    with raises(DataError, *parts):
        cache.step(1, *qkv(), **({"scaling": 1.0, "valid": mask} | bad))
    assert not cache.in_pass and cache.seq_lens == []
    cache.begin(1, 3, mask)  # whose mask cleans what layers bring without one
    q, k, v = qkv()
    k[0, 0] = torch.nan
    for layer in range(2):
        cache.step(layer, q, k, v, scaling=1.0)
    assert cache.seq_lens == [2]


def test_another_batch_size_is_refused_with_the_ways_to_change_it():
    pair = Pair(make())
    pair.append(2, 5)
    before = picture(pair.cache)
    with raises(CacheStateError, 2, 3, "batch_select_indices()", "select()", "reset()"):
        pair.cache.step(0, *qkv(batch=3), scaling=1.0)
    assert picture(pair.cache) == before
    pair.append(2, 1)
    pair.check()


def test_a_mask_of_another_shape_is_refused():
    with raises(DataError, "valid", "(1, 4)", "(1, 3)"):
        make().step(0, *qkv(), scaling=1.0, valid=torch.ones(1, 4, dtype=torch.bool))


def test_layers_out_of_step_are_refused():
    cache = make(layers=3)
    cache.step(0, *qkv(), scaling=1.0)
    with raises(CacheStateError, "layer 0", "2 layers", "abandon()", "reset()"):
        cache.step(0, *qkv(), scaling=1.0)
    with raises(DataError, "layer 1", "(1, 2)", "(1, 3)"):
        cache.step(1, *qkv(tokens=2), scaling=1.0)
    assert not cache.in_pass and cache.seq_lens == []  # a layer that cannot be takes the pass back
    cache.step(0, *qkv(), scaling=1.0)
    with raises(CacheStateError, "layer 1", "2 layers", "abandon()", "reset()", "free()"):
        cache.begin(1, 1)
    for operation in (lambda: cache.crop(1), lambda: cache.select([0]), lambda: cache.fork(0), lambda: cache.repeat(2)):
        with raises(CacheStateError, "2 layers", "reset()", "abandon()"):
            operation()
    cache.reset()
    for layer in range(3):
        cache.step(layer, *qkv(), scaling=1.0)


def test_freeing_one_sequence_does_not_hide_that_others_were_left_unfinished():
    cache = make(layers=2)
    cache.step(0, *qkv(batch=2), scaling=1.0)  # layer 1 never comes
    cache.free(0)
    with raises(CacheStateError, "layer 1", "abandon()"):
        cache.begin(2, 1)
    cache.free(1)
    cache.begin(2, 1)


@pytest.mark.parametrize(
    ("operation", "parts"),
    [
        (lambda c: c.crop(-1), ("sequence 0", "-1 tokens", 5)),
        (lambda c: c.crop([3, 9]), ("sequence 1", "9 tokens", 5)),
        (lambda c: c.crop([3]), ("1 length", "2 sequences")),
        (lambda c: c.crop(3.7), ("length=3.7", "whole number")),
        (lambda c: c.crop("5"), ("length='5'", "whole number")),
        (lambda c: c.crop([1, None]), ("length=None", "whole number")),
        (lambda c: c.select([0, 2]), ("sequence 2", "holds 2")),
        (lambda c: c.select([-1]), ("sequence -1", "holds 2")),
        (lambda c: c.select([]), ("select()", "reset()")),
        (lambda c: c.fork(5), ("sequence 5", "holds 2")),
        (lambda c: c.free(2), ("sequence 2", "holds 2")),
        (lambda c: c.repeat(0), ("repeat=0", "from 1", "reset()")),
        (lambda c: c.repeat(1.5), ("repeat=1.5", "whole number")),
        (lambda c: c.select([0.7]), ("sequence=0.7", "whole number")),
        (lambda c: c.free("a"), ("sequence='a'", "whole number")),
        (lambda c: c.swap_in(0, None), ("NoneType", "swap_out()")),
        (lambda c: c.dequantize(0, 3), ("sequence 3", "holds 2")),
        (lambda c: c.dequantize(7, 0), ("layer 7", "2 layers")),
    ],
)
def test_wrong_rows_and_lengths_are_refused_and_change_nothing(operation, parts):
    pair = Pair(make())
    pair.append(2, 5)
    before = picture(pair.cache)
    with raises(DataError, *parts):
        operation(pair.cache)
    assert picture(pair.cache) == before
    pair.check()


def test_lengths_and_rows_may_be_numpy_or_tensor_integers():
    pair = Pair(make())
    pair.append(2, 5)
    pair.cache.crop(torch.tensor([4, 3]))
    pair.cache.crop(torch.tensor(3))
    pair.model.crop([3, 3])
    pair.cache.select(torch.tensor([1, 0]))
    pair.model.select([1, 0])
    pair.check()


def test_cropping_past_a_released_window_is_refused_for_all_layers_together():
    spec = CacheSpec(
        scheme=schemes.get("int8", page_size=32),
        layers=(FULL, LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=40)),
        raw_dtype="float32",
    )
    pair = Pair(PagedCache(spec, backend="reference"))
    pair.append(2, 200)
    before = picture(pair.cache)
    with raises(CacheStateError, "sequence 1", 200, 100, "layers 1..", 40, "keep_past()"):
        pair.cache.crop([200, 100])
    assert picture(pair.cache) == before
    pair.cache.crop([200, 0])
    pair.model.crop([200, 0])
    pair.check()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"batch_size": 2}, "batch_size=2 max_tokens"),
        ({"batch_size": 0, "max_tokens": 5}, "batch_size=0 1"),
        ({"batch_size": 1, "max_tokens": -5}, "max_tokens=-5 1"),
        ({"backend": "tpu"}, "'tpu' auto cpu cuda reference"),
        ({"backend": "cuda"}, "backend='cuda' cpu 'cpu' 'reference' 'auto'"),
    ],
)
def test_wrong_options_are_refused_at_construction(arguments, parts):
    with raises(SpecError, *parts.split()):
        PagedCache(make().spec, **arguments)


def test_static_schemes_without_fitting_calibration_are_refused():
    spec = CacheSpec(scheme=schemes.get("int8_static"), layers=(FULL,) * 2)
    with raises(SpecError, "int8_static", "kvbits calibrate"):
        PagedCache(spec)
    good = {"k_scale": torch.ones(2, 1), "v_scale": torch.ones(2, 1)}
    for static, parts in (
        ([good], (1, 2, "layers")),
        ([good, {"k_scale": torch.ones(2, 1)}], ("v_scale", "layer 1", "[2, 1]", "kvbits calibrate")),
        ([good, good | {"k_scale": torch.ones(2, 4)}], ("k_scale", "layer 1", (2, 4), (2, 1), "kvbits calibrate")),
        ([good, good | {"k_scale": [[1.0], [1.0]]}], ("k_scale", "layer 1", "tensor", "[2, 1]", "list")),
        ([good, None], ("static", "list", "dict", "Calibration.static")),
    ):
        with raises(SpecError, *parts):
            PagedCache(spec, static=static)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 3e38])
def test_scales_that_cannot_be_are_refused_with_their_place(bad):
    """A scale of NaN stored every number as 0 and read it as 0."""
    spec = CacheSpec(scheme=schemes.get("int8_static"), layers=(FULL,) * 2)
    good = {"k_scale": torch.ones(2, 1), "v_scale": torch.ones(2, 1)}
    spoilt = {name: x.clone() for name, x in good.items()}
    PagedCache(spec, static=[good, spoilt])
    spoilt["v_scale"][1, 0] = bad  # in a tensor that was accepted before
    with raises(SpecError, "v_scale", "layer 1", f"{bad:g}", "[1, 0]", "1e+30", "kvbits calibrate"):
        PagedCache(spec, static=[good, spoilt])


# -- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_nonfinite_prompts_are_refused_with_layer_and_position_and_can_be_repeated(bad, which):
    cache = make()
    cache.step(0, *qkv(), scaling=1.0)
    q, k, v = qkv()
    broken = (k if which == "keys" else v).clone()
    broken[0, 2, 1, 7] = bad
    with raises(DataError, which, "layer 1", bad, "(0, 2, 1, 7)", 384, "bfloat16"):
        cache.step(1, q, *((broken, v) if which == "keys" else (k, broken)), scaling=1.0)
    cache.step(1, q, k, v, scaling=1.0)
    assert cache.seq_lens == [3]
    assert torch.isfinite(cache.dequantize(1, 0)[0]).all()


def test_a_nonfinite_first_layer_leaves_the_cache_as_it_was():
    cache = make()
    q, k, v = qkv()
    with raises(DataError, "keys", "layer 0"):
        cache.step(0, q, k * float("nan"), v, scaling=1.0)
    assert cache.seq_lens == []


def test_a_nonfinite_decoded_token_is_refused_and_leaves_no_trace():
    cache = make(layers=1, page_size=32)
    cache.step(0, *qkv(tokens=20), scaling=1.0)
    q, k, v = qkv(tokens=1)
    k[0, 0, 1, 3] = float("nan")
    with raises(DataError, "keys", "layer 0", "nan", "(0, 0, 1, 3)"):
        cache.step(0, q, k, v, scaling=1.0)
    assert cache.seq_lens == [20]
    cache.step(0, *qkv(tokens=1), scaling=1.0)


def test_padding_may_hold_anything():
    cache = make(layers=1)
    q, k, v = qkv(tokens=3)
    k[0, 0], v[0, 0] = float("nan"), float("inf")
    out = cache.step(0, q, k, v, scaling=1.0, valid=torch.tensor([[False, True, True]]))
    assert torch.isfinite(out).all()
    assert cache.seq_lens == [2]


def test_a_scale_that_overflows_float16_is_refused_with_the_dtype_to_use():
    cache = make("int8", layers=1, page_size=32)
    q, k, v = qkv(tokens=70)
    with raises(DataError, "keys", "layer 0", "float16", "scale_dtype='float32'", "bfloat16"):
        cache.step(0, q, k * 1e8, v, scaling=1.0)


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_padding_queries_get_zeros(dtype, window, softcap):
    cache = make(layers=1, raw_dtype=dtype, window=window)
    valid = torch.tensor([[False, False, True], [True, True, True], [False, False, False]])
    for _ in range(2):
        out = cache.step(0, *qkv(batch=3, dtype=getattr(torch, dtype)), scaling=0.1, softcap=softcap, valid=valid)
        assert torch.isfinite(out).all()
        assert not out[~valid].any()
        assert out[valid].any(-1).all()
    assert cache.seq_lens == [2, 6, 0]


def test_a_single_token_that_is_all_padding_is_no_token():
    cache = make(layers=1)
    out = cache.step(0, *qkv(batch=2, tokens=1), scaling=0.1, valid=torch.zeros(2, 1, dtype=torch.bool))
    assert not out.any()
    assert cache.seq_lens == [0, 0]


def test_what_padding_holds_changes_nothing():
    outs = []
    for filler in (0.0, 1e4):
        torch.manual_seed(0)
        cache = make(layers=1, page_size=32)
        valid = torch.ones(2, 80, dtype=torch.bool)
        valid[1, :50] = False
        q, k, v = qkv(batch=2, tokens=80)
        for x in (q, k, v):
            x[~valid] = filler
        out = cache.step(0, q, k, v, scaling=0.1, valid=valid)
        outs.append((out[valid], *cache.dequantize(0, 1)))
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_queries_that_are_not_finite_answer_nan_and_nobody_else_does(backend, tokens):
    """As with the stock cache: the model's own fault shows where it is, and what is stored stays right."""
    spec = CacheSpec(scheme=schemes.get("int8"), layers=(FULL,), raw_dtype="float32")
    cache, twin = (PagedCache(spec, backend=backend) for _ in range(2))
    first = qkv(batch=2, tokens=150)
    q, k, v = qkv(batch=2, tokens=tokens)
    for c in (cache, twin):
        c.step(0, *first, scaling=0.1)
    want = twin.step(0, q, k, v, scaling=0.1)
    q = q.clone()
    q[1, -1, 2, 5] = torch.nan
    out = cache.step(0, q, k, v, scaling=0.1)
    assert out[1, -1, 2].isnan().all() and out.isnan().sum() == 64
    out[1, -1, 2] = want[1, -1, 2]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    assert picture(cache) == picture(twin)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["raw", "int8", "kivi4"])
def test_queries_whose_scores_overflow_are_refused(name, dtype):
    """Products past float32's range came out as wrong numbers, not as NaN."""
    spec = CacheSpec(scheme=schemes.get(name), layers=(FULL,), raw_dtype=dtype)
    cache = PagedCache(spec)
    cache.step(0, *qkv(tokens=200, dtype=getattr(torch, dtype)), scaling=0.1)
    q, k, v = qkv(tokens=1, dtype=getattr(torch, dtype))
    for bad in (3e38, -3e38, float("inf")):
        with raises(DataError, "queries", "layer 0", "1.26765e+30"):
            cache.step(0, q.index_fill(3, torch.tensor([5]), bad), k, v, scaling=0.1)
    assert cache.seq_lens == [200] and not cache.in_pass
    large = q.sign() * 1e30
    out = cache.step(0, large, k, v, scaling=0.1)
    keys, values = (x.double().repeat_interleave(2, 1) for x in cache.dequantize(0, 0))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", large[0, 0].double(), keys) * 0.1, -1)
    torch.testing.assert_close(out[0, 0].double(), torch.einsum("hn,nhd->hd", weights, values), atol=0.02, rtol=0.02)


def test_queries_of_padding_may_hold_anything():
    cache = make()
    q, k, v = qkv(batch=2, tokens=3)
    q[1, 0] = 3e38
    valid = torch.tensor([[True] * 3, [False, True, True]])
    cache.begin(2, 3, valid)
    for layer in range(2):
        assert torch.isfinite(cache.step(layer, q, k, v, scaling=1.0, valid=valid)).all()


def test_counts_and_lists_of_the_wrong_kind_are_refused():
    cache = make()
    for layer in range(2):
        cache.append(layer, *qkv(tokens=100)[1:])
    before = picture(cache)
    wrong = [
        (lambda: cache.begin(1, 1.5), ("tokens", "1.5", "whole number")),
        (lambda: cache.begin("x", 1), ("sequences", "'x'", "whole number")),
        (lambda: cache.drop_pages(0, 5), ("pages=5", "list")),
        (lambda: cache.drop_pages(0, [5]), ("layer group=5", "list")),
        (lambda: cache.drop_pages(0, [["a", 1]]), ("token='a'", "whole number")),
        (lambda: cache.select(3), ("sequences=3", "list")),
        (lambda: cache.select(None), ("sequences=None", "list")),
        (lambda: cache.dequantize([0], 0), ("layer [0]", "2 layers")),
        (lambda: cache.dequantize(0, 0, torch.int32), ("torch.int32", "float")),
        (lambda: cache.dequantize(0, 0, "float32"), ("'float32'", "float")),
        (lambda: cache.append(0, None, None), ("tensors", "NoneType")),
        (lambda: cache.set_tiers(0, 5), ("tiers=5", "list")),
    ]
    for call, parts in wrong:
        with raises((DataError, SpecError), *parts):
            call()
        assert not cache.in_pass
    assert picture(cache) == before
