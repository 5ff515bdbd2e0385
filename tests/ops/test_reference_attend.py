"""The reference attention against a float64 dense softmax over dequantized values."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from dense_model import dense_attention
from hypothesis import given
from hypothesis import strategies as st
from ops.calls import table_of

from kvbits.ops import chunk_attention
from kvbits.ops.reference.attend import PAGES_PER_STEP, PageList, exact
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.ops.reference.merge import add_sink_logit, merge_partials
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

SIZE, DIM = 32, 16
PAIRS = {
    "raw": (QuantSpec.raw(), QuantSpec.raw()),
    "int8": (QuantSpec(granularity=PerGroup(8)), QuantSpec(granularity=PerGroup(8))),
    "kivi2": (
        QuantSpec(format="int2", granularity=PerChannel(), symmetric=False),
        QuantSpec(format="int2", granularity=PerGroup(8), symmetric=False),
    ),
    "int3": (
        QuantSpec(format="int3", granularity=PerToken()),
        QuantSpec(format="int3", granularity=PerToken(), symmetric=False),
    ),
    "centered": (
        QuantSpec(format="int4", granularity=PerGroup(8), center="channel"),
        QuantSpec(format="fp8_e4m3", granularity=PerToken()),
    ),
}


def make_part(pair, heads, batch_lengths, starts, *, seed=0, slabs=1):
    """(store, table) of pages in shuffled order, some left over full of 0xFF, and the dense values of each sequence.

    Args:
        batch_lengths: per sequence, visible tokens of each of its pages.
        starts: per sequence, position of its first token.
    """
    generator = np.random.default_rng(seed)
    layout = PageLayout(
        key=pair[0], value=pair[1], page_size=SIZE, num_kv_heads=heads, head_dim=DIM, raw_dtype="float32"
    )
    total = sum(map(len, batch_lengths))
    k, v = torch.randn(2, max(total, 1), heads, SIZE, DIM)
    pages, _ = close_pages(k * 2 + 1, v, layout)
    capacity = total + 3
    memory = torch.full((capacity, heads, layout.head_bytes), 0xFF, dtype=torch.uint8)
    ids = generator.permutation(capacity)[:total].astype(np.int64)
    memory[torch.from_numpy(ids)] = pages[:total]
    cuts = [0, *sorted(generator.integers(0, capacity + 1, slabs - 1)), capacity]
    store = PageStore(layout, tuple(memory[a:b].clone() for a, b in pairwise(cuts)))
    dense_k, dense_v = dequantize_pages(pages, layout, None, torch.float64)
    dense, page, at, lengths = [], 0, [], []
    for pages_of, start in zip(batch_lengths, starts, strict=True):
        rows = [
            (dense_k[page + i, :, :n].transpose(0, 1), dense_v[page + i, :, :n].transpose(0, 1))
            for i, n in enumerate(pages_of)
        ]
        for i, n in enumerate(pages_of):  # what lies past the visible length must not matter
            if pair[0].is_raw and n < SIZE:
                store.page(int(ids[page + i])).view(torch.float32).unflatten(-1, (2, SIZE, DIM))[:, :, n:] = float(
                    "nan"
                )
        empty = torch.zeros(0, heads, DIM, dtype=torch.float64)
        dense.append((torch.cat([empty, *(r[0] for r in rows)]), torch.cat([empty, *(r[1] for r in rows)])))
        at += [start + sum(pages_of[:i]) for i in range(len(pages_of))]
        lengths += pages_of
        page += len(pages_of)
    indptr = np.cumsum([0, *map(len, batch_lengths)]).astype(np.int32)
    pages = PageList(indptr, ids, np.array(at, np.int64), np.array(lengths, np.int32))
    return (store, table_of(pages, SIZE)), dense


def attend(q, parts, positions, dtype=torch.float32, **options):
    """By the reference, over (store, table) of each part."""
    stores, tables = zip(*parts, strict=True)
    return exact(q, stores, tables, positions=torch.as_tensor(positions, dtype=torch.int32), dtype=dtype, **options)


def expected(q, dense, starts, positions, **options):
    outs, lses = [], []
    for b in range(q.shape[0]):
        shifted = [p - starts[b] if p >= 0 else -1 for p in positions[b]]
        out, lse = dense_attention(
            q[b],
            *dense[b],
            [min(p, len(dense[b][0]) - 1 + (0 if options.get("window") is None else 10**9)) for p in shifted],
            **options,
        )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def agree(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(got[0]).all()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_every_group_size_and_format_matches_dense_softmax(name, group):
    lengths = [[SIZE] * 3, [SIZE], [SIZE, SIZE]]
    part, dense = make_part(PAIRS[name], 2, lengths, [0, 0, 0])
    q = torch.randn(3, 1, 2 * group, DIM)
    positions = [[95], [31], [63]]
    want = expected(q, dense, [0] * 3, positions, scaling=0.25)
    agree(attend(q, [part], positions, scaling=0.25), want, 2e-5)
    agree(attend(q, [part], positions, torch.float64, scaling=0.25), want, 1e-12)


@st.composite
def calls(draw):
    heads, group, batch = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lengths = [draw(st.lists(st.sampled_from([SIZE, SIZE, 1, 5, 31]), max_size=4)) for _ in range(batch)]
    starts = [draw(st.sampled_from([0, 0, 4, 100])) for _ in range(batch)]
    queries = draw(st.integers(1, 5))
    window = draw(st.none() | st.integers(1, 90))
    softcap = draw(st.sampled_from([None, 2.0, 50.0]))
    pads = [[draw(st.integers(0, 5)) == 0 for _ in range(queries)] for _ in range(batch)]
    back = draw(st.integers(0, 3))
    positions = [
        [-1 if pads[b][t] else max(0, starts[b] + sum(lengths[b]) - 1 - back + t) for t in range(queries)]
        for b in range(batch)
    ]
    return (
        draw(st.sampled_from(sorted(PAIRS))),
        heads,
        group,
        lengths,
        starts,
        positions,
        window,
        softcap,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 99)),
    )


@given(calls())
def test_ragged_windowed_capped_padded_and_empty_calls_match_dense_softmax(case):
    name, heads, group, lengths, starts, positions, window, softcap, slabs, seed = case
    torch.manual_seed(seed)
    part, dense = make_part(PAIRS[name], heads, lengths, starts, seed=seed, slabs=slabs)
    q = torch.randn(len(lengths), len(positions[0]), heads * group, DIM)
    options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    out, lse = attend(q, [part], positions, torch.float64, **options)
    for b, (k, v) in enumerate(dense):
        for t, position in enumerate(positions[b]):
            at = np.arange(starts[b], starts[b] + len(k))
            seen = (at <= position) & (position >= 0) & (True if window is None else at > position - window)
            keys, values = k[seen], v[seen]
            if not len(keys):
                assert not out[b, t].any()
                assert (lse[b, t] == -torch.inf).all()
                continue
            want = dense_attention(q[b, t : t + 1], keys, values, [len(keys) - 1], 0.3, None, softcap)
            torch.testing.assert_close(out[b, t], want[0][0], rtol=0, atol=1e-11)
            torch.testing.assert_close(lse[b, t], want[1][0], rtol=0, atol=1e-11)


def test_parts_of_several_formats_are_one_attention():
    parts, denses = zip(
        *(
            make_part(PAIRS[n], 2, [[SIZE, 7]], [s], seed=i)
            for i, (n, s) in enumerate([("raw", 0), ("int8", 39), ("kivi2", 78)])
        ),
        strict=True,
    )
    q = torch.randn(1, 2, 4, DIM)
    want = expected(
        q, [tuple(torch.cat(x) for x in zip(*(d[0] for d in denses), strict=True))], [0], [[116, 60]], scaling=0.3
    )
    agree(attend(q, parts, [[116, 60]], torch.float64, scaling=0.3), want, 1e-12)
    pieces = [attend(q, [p], [[116, 60]], torch.float64, scaling=0.3) for p in parts]
    agree(merge_partials([p[0] for p in pieces], [p[1] for p in pieces]), want, 1e-12)


def test_more_pages_than_one_step_takes_are_one_attention():
    count = 2 * PAGES_PER_STEP + 3
    part, dense = make_part(PAIRS["int8"], 1, [[SIZE] * count], [0])
    q = torch.randn(1, 1, 1, DIM)
    agree(
        attend(q, [part], [[SIZE * count - 1]], scaling=0.3),
        expected(q, dense, [0], [[SIZE * count - 1]], scaling=0.3),
        2e-5,
    )


def test_scores_of_any_size_neither_overflow_nor_vanish():
    part, dense = make_part(PAIRS["raw"], 1, [[SIZE, SIZE]], [0])
    for size in (1e-6, 1e3, 1e6):
        q = torch.randn(1, 1, 1, DIM) * size
        out, lse = attend(q, [part], [[63]], torch.float64, scaling=1.0)
        agree((out, lse), expected(q, dense, [0], [[63]], scaling=1.0), 1e-12 * max(1.0, size * 20))


# -- history and the chunk itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 20])
def test_a_chunk_with_history_is_history_merged_with_the_chunk(window):
    part, dense = make_part(PAIRS["kivi2"], 2, [[SIZE, SIZE, 9], [SIZE]], [0, 0])
    before, tokens = [73, 32], 6
    q, k, v = torch.randn(2, tokens, 4, DIM), torch.randn(2, tokens, 2, DIM), torch.randn(2, tokens, 2, DIM)
    positions = torch.tensor(before)[:, None] + torch.arange(tokens)
    past = attend(q, [part], positions, scaling=0.3, sliding_window=window)
    fresh = chunk_attention.choose(q, v, None).run(q, k, v, positions, 0.3, window, None)
    out, _ = merge_partials([past[0], fresh[0]], [past[1], fresh[1]])
    for b in range(2):
        whole = [torch.cat([a, x[b].double()]) for a, x in zip(dense[b], (k, v), strict=True)]
        want, _ = dense_attention(q[b], *whole, positions[b].tolist(), 0.3, window)
        torch.testing.assert_close(out[b].double(), want, rtol=0, atol=2e-5)


# -- merging
# -------------------------------------------------------------------------------------------------------------


def partial_sets(n, seed, empty=()):
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(2, 3, 4, DIM, generator=generator, dtype=torch.float64) for _ in range(n)]
    lses = [torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) * 5 for _ in range(n)]
    for i in empty:
        outs[i] = torch.full_like(outs[i], float("nan"))  # the output of an empty set is never read
        lses[i] = torch.full_like(lses[i], -torch.inf)
    return outs, lses


@given(st.integers(2, 5), st.integers(0, 10**6), st.data())
def test_merging_is_associative_commutative_and_ignores_empty_sets(n, seed, data):
    empty = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    outs, lses = partial_sets(n, seed, empty)
    want = merge_partials(outs, lses)
    assert torch.isfinite(want[0]).all()
    order = data.draw(st.permutations(range(n)))
    agree(merge_partials([outs[i] for i in order], [lses[i] for i in order]), want, 1e-12)
    cut = data.draw(st.integers(1, n - 1))
    left, right = merge_partials(outs[:cut], lses[:cut]), merge_partials(outs[cut:], lses[cut:])
    agree(merge_partials([left[0], right[0]], [left[1], right[1]]), want, 1e-12)


def test_merging_nothing_but_empty_sets_gives_zero_and_minus_infinity():
    out, lse = merge_partials(*partial_sets(3, 0, (0, 1, 2)))
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_a_set_alone_is_itself_and_equal_sets_keep_their_output():
    outs, lses = partial_sets(1, 0)
    agree(merge_partials(outs, lses), (outs[0], lses[0]), 1e-12)
    out, lse = merge_partials(outs * 4, lses * 4)
    agree((out, lse), (outs[0], lses[0] + np.log(4)), 1e-12)


def test_huge_and_tiny_sums_merge_without_overflow():
    outs, _ = partial_sets(2, 0)
    out, lse = merge_partials(outs, [torch.full((2, 3, 4), 1e4), torch.full((2, 3, 4), -1e4)])
    assert torch.equal(out, outs[0])
    assert (lse == 1e4).all()


def test_half_precision_partials_are_merged_in_float32():
    outs, lses = partial_sets(2, 0)
    out, lse = merge_partials([o.half() for o in outs], [x.float() for x in lses])
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_a_learned_sink_is_one_more_key_of_value_zero():
    part, dense = make_part(PAIRS["int8"], 2, [[SIZE], []], [0, 0])
    q, logit = torch.randn(2, 1, 4, DIM), torch.tensor([-3.0, 0.0, 2.0, 30.0])
    out, lse = attend(q, [part], [[31], [0]], torch.float64, scaling=0.3)
    got = add_sink_logit(out, lse, logit)
    want, _ = dense_attention(q[0], *dense[0], [31], 0.3, sink_logits=logit)
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-12)
    assert not got[1].any()
