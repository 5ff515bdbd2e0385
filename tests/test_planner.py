"""The planner prints the bytes that a cache allocates, its searches stop at the last token that fits, and the sources'
figures come out.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from random_cases import examples

from kvbits import planner, schemes
from kvbits.errors import SpecError
from kvbits.planner import LOOKED_AT, plan, uniform
from kvbits.spec import CacheSpec, LayerGeometry
from kvbits.units import GB, GIB

GEMMA_LIKE = (LayerGeometry(num_kv_heads=1, head_dim=256, sliding_window=512),) * 5 + (
    LayerGeometry(num_kv_heads=1, head_dim=256),
)


def row(layers, scheme, **kw):
    return plan(layers, [scheme], **kw).rows[0]


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schemes.PRESETS)
def test_total_is_what_the_cache_spec_allocates(name):
    spec = CacheSpec(scheme=schemes.get(name), layers=GEMMA_LIKE)
    r = row(GEMMA_LIKE, name, context=1000, batch=3)
    assert r.total_bytes == spec.nbytes(1000, 3)
    assert r.bytes_per_token == spec.bytes_per_token
    assert r.memory_reduction == pytest.approx(spec.raw_nbytes(1000, 3, 2) / r.total_bytes)


WINDOWED = LayerGeometry(num_kv_heads=8, head_dim=64, sliding_window=128), LayerGeometry(num_kv_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("layers", "gib", "weights", "copied", "users", "dense_users"),
    [
        pytest.param(uniform(32, 8, 128), 79.18, 16_060_522_496, 87, 187, 54, id="llama-3.1-8b, H100"),
        pytest.param(uniform(64, 8, 128), 139.80, 65_524_246_528, 49, 106, 30, id="qwen3-32b, H200"),
        pytest.param(WINDOWED * 18, 79.18, 65_250_000_000, 25, 107, 31, id="gpt-oss-120b, H100"),
    ],
)
def test_raw_copies_in_vllm_are_a_share_of_the_memory(layers, gib, weights, copied, users, dense_users):
    """`--kv-cache-dtype kvbits_klt4` with nothing else, where vLLM runs up to 1,024 requests: bytes by hand."""
    cards = planner.Cards(memory_bytes=int(gib * GIB), weights_bytes=weights)
    dense, packed = plan(layers, ["bf16", "kvbits_klt4"], engine="vllm", context=8192, cards=cards).rows
    of_request = sum(4 * 64 * 2 * 2 * g.num_kv_heads * g.head_dim for g in layers)
    assert packed.copied == int(0.05 * cards.cache_bytes / of_request) == copied and dense.copied is None
    page = 64 * 8 * {128: 142, 64: 70}[layers[0].head_dim]  # bytes of 64 tokens: 4.375 or 4.4375 bits a number
    blocks = sum(128 if g.sliding_window is None else 3 for g in layers)
    room = cards.cache_bytes - copied * of_request
    assert (dense.max_batch, packed.max_batch) == (dense_users, users) == (dense_users, room // (page * blocks))
    assert packed.total_bytes == page * blocks + of_request, "of one user, who has copies"
    many = row(layers, "kvbits_klt4", engine="vllm", context=8192, batch=users, cards=cards)
    assert many.total_bytes == users * page * blocks + copied * of_request <= cards.cache_bytes
    alone = row(layers, "kvbits_klt4", engine="vllm", context=8192, batch=users)
    assert alone.total_bytes == users * packed.total_bytes and alone.copied is None, "no memory is known"
    small = dataclasses.replace(cards, memory_bytes=weights + (5 << 30), reserve_bytes=0)
    assert row(layers, "kvbits_klt4", engine="vllm", cards=small).copied > 0


def test_packed_copies_in_vllm_are_in_the_same_share():
    """`kvbits_klt2` also has nine pages of klt4's bits for each request, so fewer have copies: bytes by hand."""
    cards = planner.Cards(memory_bytes=int(79.18 * GIB), weights_bytes=16_060_522_496)
    four, two = plan(uniform(32, 8, 128), ["kvbits_klt4", "kvbits_klt2"], engine="vllm", context=8192, cards=cards).rows
    of_request = 32 * 8 * 64 * (3 * 2 * 2 * 128 + 9 * 142)
    assert two.copied == int(0.05 * cards.cache_bytes / of_request) == 63 < four.copied == 87
    assert two.total_bytes == 32 * 8 * 64 * 128 * 78 + of_request


def test_a_fixed_cache_allocates_the_planned_bytes():
    paged_cache = pytest.importorskip("kvbits.cache.paged_cache")
    layers = uniform(2, 2, 64)
    cache = paged_cache.PagedCache(
        CacheSpec(scheme=schemes.get("kivi2", num_sink_tokens=4), layers=layers), batch_size=2, max_tokens=500
    )
    assert cache.nbytes == row(layers, "kivi2", context=500, batch=2, num_sink_tokens=4).total_bytes


@pytest.mark.parametrize(("name", "element_bytes"), planner.DENSE.items())
def test_dense_schemes_are_the_formula(name, element_bytes):
    r = row(uniform(32, 8, 128), name, context=4096, batch=2)
    assert r.total_bytes == 2 * 32 * 8 * 128 * 4096 * 2 * element_bytes
    assert r.bytes_per_token == 2 * 32 * 8 * 128 * element_bytes
    assert r.bits_per_element == 8 * element_bytes
    assert r.memory_reduction == 2 / element_bytes


def test_dense_sliding_layers_hold_their_window():
    r = row(GEMMA_LIKE, "bf16", context=10_000)
    assert r.total_bytes == 2 * 256 * 2 * (5 * 511 + 10_000)
    assert r.bytes_per_token == 2 * 256 * 2


def test_grouped_query_attention_divides_by_the_query_heads_per_kv_head():
    assert row(uniform(80, 64, 128), "int8").total_bytes == 8 * row(uniform(80, 8, 128), "int8").total_bytes


def test_sinks_add_raw_tokens():
    plain, sinks = (row(uniform(4, 2, 64), "int4", context=4096, num_sink_tokens=n).total_bytes for n in (0, 64))
    assert sinks > plain


def test_raw_pages_follow_the_model_dtype():
    assert (
        row(uniform(2, 2, 64), "raw", raw_dtype="float32").total_bytes == 2 * row(uniform(2, 2, 64), "raw").total_bytes
    )


def test_all_means_every_preset_and_the_dense_caches_once():
    names = schemes.expand(["int8", "all"], planner.GROUPS)
    assert sorted(names) == sorted([*planner.DENSE, *schemes.PRESETS])


def test_a_scheme_of_your_own():
    mine = schemes.get("int4", residual_length=256)
    assert row(uniform(2, 2, 64), mine).scheme == "int4"


def test_presets_are_fitted_to_the_head_dim_and_own_schemes_are_not():
    layers = uniform(2, 2, 80)
    assert row(layers, "int8").total_bytes == CacheSpec(
        scheme=schemes.for_layers("int8", layers), layers=layers
    ).nbytes(4096)
    with raises(SpecError, "head_dim=80", "group_size=64", "group_size=16"):
        plan(layers, [dataclasses.replace(schemes.get("int8"))])


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"context": 0}, ("context=0", 1)),
        ({"batch": -1}, ("batch=-1", 1)),
        ({"memory_bytes": 0}, ("memory_bytes=0", 1)),
        ({"no_such_field": 1}, ("no_such_field", "page_size")),
    ],
)
def test_bad_sizes_are_refused(kwargs, parts):
    with raises(SpecError, *parts):
        plan(uniform(2, 2, 64), ["int8"], **kwargs)


def test_unknown_schemes_list_the_known_ones():
    with raises(SpecError, "'int9'", "int8", "kivi2"):
        plan(uniform(2, 2, 64), ["int9"])
    with raises(SpecError, "num_layers=0", 1, "4,096"):
        uniform(0, 2, 64)


def test_to_dict_is_json_with_the_promised_fields():
    data = json.loads(json.dumps(plan(GEMMA_LIKE, ["fp16", "int8"], memory_bytes=GB).to_dict()))
    assert {"scheme", "bytes_per_token", "total_bytes", "memory_reduction", "max_batch", "max_context"} <= set(
        data["rows"][0]
    )
    assert [layer["count"] for layer in data["layers"]] == [5, 1]


# -- what fits ------------------------------------------------------------------------------------------------------

geometries = st.builds(
    LayerGeometry,
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([64, 128]),
    sliding_window=st.one_of(st.none(), st.integers(1, 3000)),
)
names = st.sampled_from([*schemes.PRESETS, *planner.DENSE])


@examples(25)
@given(
    layers=st.lists(geometries, min_size=1, max_size=3).map(tuple),
    name=names,
    memory=st.integers(1, 10**9),
    context=st.integers(1, 50_000),
    batch=st.integers(1, 9),
    sinks=st.integers(0, 70),
)
def test_the_answers_fit_and_one_more_does_not(layers, name, memory, context, batch, sinks):
    r = row(layers, name, memory_bytes=memory, context=context, batch=batch, num_sink_tokens=sinks)

    def nbytes(tokens, sequences):
        return (
            row(layers, name, context=tokens, batch=sequences, num_sink_tokens=sinks).total_bytes
            if tokens and sequences
            else 0
        )

    if r.max_batch is not None:
        assert nbytes(context, r.max_batch) <= memory < nbytes(context, r.max_batch + 1)
    if r.unbounded:
        assert all(g.sliding_window for g in layers) and nbytes(10**7, batch) <= memory
    else:
        assert nbytes(r.max_context, batch) <= memory < nbytes(r.max_context + 1, batch)


@examples(40)
@given(
    geometry=geometries,
    name=st.sampled_from(list(schemes.PRESETS)),
    sinks=st.integers(0, 70),
    residual=st.integers(0, 200),
    start=st.integers(0, 6000),
)
def test_bytes_never_fall_as_the_context_grows(geometry, name, sinks, residual, start):
    spec = CacheSpec(scheme=schemes.get(name, num_sink_tokens=sinks, residual_length=residual), layers=(geometry,))
    sizes = [spec.nbytes(n) for n in range(start, start + 150)]
    assert sizes == sorted(sizes)


def test_nothing_fits_into_a_byte():
    r = row(uniform(2, 2, 64), "int8", memory_bytes=1)
    assert (r.max_batch, r.max_context, r.unbounded) == (0, 0, False)


def test_a_model_of_sliding_layers_has_no_longest_context():
    r = row(uniform(2, 2, 64, sliding_window=128), "int8", memory_bytes=GB)
    assert r.max_context is None and r.unbounded


# -- GPUs -----------------------------------------------------------------------------------------------------------


def test_the_reserve_is_what_vllm_left_free_on_an_h200():
    """Llama-3.1-8B, 16.06 GB of weights, on 139.8 GiB: the planned tokens are those that vLLM's cache really had, with
    one GPU and with two.
    """
    rows = json.loads((Path(__file__).parents[1] / "benchmarks/results/nvidia-h200/serve_vllm.json").read_text())[
        "rows"
    ]
    layers = uniform(32, 8, 128)
    for gpus in (1, 2):
        cards = planner.Cards(memory_bytes=int(139.8 * GIB), weights_bytes=16_060_522_496, count=gpus)
        (planned,) = plan(planner.rank(layers, gpus), ["bf16"], cards=cards).rows
        measured = {
            r["capacity_tokens"]
            for r in rows
            if (r["gpus"], r["kv_cache_dtype"], r["geometry"]) == (gpus, "bf16", "llama-3.1-8b")
        }
        assert measured and all(planned.max_context == pytest.approx(n, rel=0.02) for n in measured)


def test_heads_are_shared_or_copied_between_gpus():
    layers = uniform(2, 8, 128, 512)
    assert [planner.rank(layers, n)[0].num_kv_heads for n in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert planner.rank(layers, 4)[0] == dataclasses.replace(layers[0], num_kv_heads=2)
    with raises(SpecError, "8 kv heads", "3 GPUs", 1, 2, 4, 8):
        planner.rank(layers, 3)
    with raises(SpecError, "14 query heads", "4 GPUs", 1, 2, 7, 14):
        planner.rank(uniform(2, 2, 64), 4, 14)


def test_cards_leave_the_rest_to_the_cache():
    cards = planner.Cards(memory_bytes=80 * GB, weights_bytes=15 * GB + 1, count=2, reserve_bytes=GB)
    assert cards.weights_share == 7_500_000_001 and cards.cache_bytes == 71_499_999_999
    found = plan(uniform(2, 2, 64), ["bf16", "int8"], cards=cards)
    assert found.memory_bytes == cards.cache_bytes and found.cards is cards
    assert found.rows[1].max_batch / found.rows[0].max_batch > 1.5
    with raises(SpecError, "memory_bytes", "cards"):
        plan(uniform(2, 2, 64), ["int8"], cards=cards, memory_bytes=GB)
    with raises(SpecError, "count=0", 1):
        planner.Cards(memory_bytes=GB, weights_bytes=1, count=0)


def test_planning_needs_no_torch():
    code = (
        "import sys, kvbits.planner as p; p.plan(p.uniform(2, 2, 64), ['fp32', 'int8']); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("raw_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [None, 256])
def test_a_row_says_up_to_which_length_fewer_bits_take_more_bytes(raw_dtype, window):
    layers = uniform(1, 3, 64, window)
    rows = plan(layers, ["int8_centered", "kivi4", "klt4"], raw_dtype=raw_dtype).rows

    def bytes_by_length(name):
        spec = CacheSpec(scheme=schemes.for_layers(name, layers), layers=layers, raw_dtype=raw_dtype)
        return [spec.nbytes(tokens) for tokens in range(LOOKED_AT + 1)]

    recommended = bytes_by_length("int8_centered")
    for row in rows:
        larger = [n for n, own in enumerate(bytes_by_length(row.scheme)) if own > recommended[n]]
        assert row.larger_up_to == (larger[-1] if larger else None), row.scheme
    assert rows[0].larger_up_to is None and rows[2].larger_up_to >= rows[1].larger_up_to > 0


def test_the_crossover_is_that_of_allocated_caches():
    layers = uniform(1, 2, 64)
    row = plan(layers, ["kivi4"], raw_dtype="float32").rows[0]

    def allocated(name, tokens):
        from kvbits.cache.paged_cache import PagedCache

        spec = CacheSpec(scheme=schemes.for_layers(name, layers), layers=layers, raw_dtype="float32")
        return PagedCache(spec, batch_size=1, max_tokens=tokens).nbytes

    at = row.larger_up_to
    assert allocated("kivi4", at) > allocated("int8_centered", at)
    assert allocated("kivi4", at + 1) <= allocated("int8_centered", at + 1)


def test_engines_of_their_own_blocks_have_a_crossover_of_their_own():
    rows = {r.scheme: r for r in plan(uniform(2, 8, 128), ["fp8", "kvbits_klt4"], engine="vllm").rows}
    assert rows["kvbits_klt4"].larger_up_to > 0 and rows["fp8"].larger_up_to is None
