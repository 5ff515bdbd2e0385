"""Chunks in tiles (csrc/families/tiles.h) against float64, on AMX where it is and by the emulation of its instructions
everywhere. Calls that tiles do not serve are the other CPU tests'.
"""

from __future__ import annotations

import pytest
import torch
from messages import mentions
from nightly import at_night
from ops.cpu_cases import (
    FORMATS,
    NOISE,
    OTHERWISE,
    RAW,
    TIERS,
    TILE_TIERS,
    assert_close,
    needs_library,
    random_call,
    specs_of,
)

from kvbits import schemes
from kvbits.ops.cpu import attend, library
from kvbits.spec import PerChannel, PerGroup, PerToken, QuantSpec

PRESETS = ("raw", "int8_centered", "int8", "int4", "kivi4", "klt4", "klt3", "klt2")

pytestmark = needs_library


@pytest.fixture(params=TILE_TIERS)
def tiles(request):
    """The name of a tier that has tiles, in use for the test."""
    before = library.tier()
    library.set_tier(request.param)
    yield request.param
    library.set_tier(before)


def plan_of(case):
    """Return the case's plan with its pages bound."""
    plan = case.plan()
    plan.bind(0, case.stores)
    return plan


def check(case, tiles, noise: float) -> None:
    """Tiles serve the call, and are as near to float64 as `noise`."""
    assert plan_of(case).explain().startswith(f"attend by cpu ({tiles})")
    assert_close(case.attend("cpu"), case.exact(), noise)


def noise_of(*specs: QuantSpec) -> float:
    return max(NOISE[spec.format] for spec in specs)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("group, tokens, pages", [(7, 5, 3), (1, 33, 2), *at_night((4, 20, 11), (4, 75, 18))])
def test_presets(tiles, name, group, tokens, pages):
    """One tile of rows and many, panels that are full and not, frames of keys in a basis."""
    for head_dim in (128, 64):
        scheme = schemes.get(name, head_dim=head_dim)
        case = random_call(
            scheme.key,
            scheme.value,
            head_dim=head_dim,
            group=group,
            tokens=tokens,
            page_size=scheme.page_size,
            pages=pages,
        )
        check(case, tiles, noise_of(scheme.key, scheme.value))


@pytest.mark.parametrize("fmt", FORMATS)
def test_granularities(tiles, fmt):
    """Scales of tokens, groups and channels, with and without biases and means."""
    for spec in specs_of(fmt):
        check(random_call(spec, spec, head_dim=128, group=4, tokens=9), tiles, noise_of(spec))


@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (32, 96), (256, 512)])
def test_widths(tiles, head_dim, value_head_dim):
    for spec in (
        RAW,
        QuantSpec(format="int8", granularity=PerToken()),
        QuantSpec(format="int4", granularity=PerToken()),
    ):
        case = random_call(spec, spec, head_dim=head_dim, value_head_dim=value_head_dim, group=8, tokens=5)
        check(case, tiles, noise_of(spec))


@pytest.mark.parametrize("page_size", [32, 96, 160])
@pytest.mark.parametrize("name", ["raw", "int8_centered", "int4"])
def test_page_sizes(tiles, name, page_size):
    """Blocks of half a page, and slices of less than 32 tokens behind others."""
    scheme = schemes.get(name, head_dim=64)
    case = random_call(scheme.key, scheme.value, page_size=page_size, pages=7, group=8, tokens=6)
    check(case, tiles, noise_of(scheme.key))


@pytest.mark.parametrize("window, softcap", [(1, None), (70, None), (None, 15.0), (130, 30.0), (10_000, None)])
def test_window_and_softcap(tiles, window, softcap):
    """Rows of a tile that see other tokens than their neighbours, and padding."""
    for name in ("raw", "int8", "int4", "klt4"):
        scheme = schemes.get(name, head_dim=64)
        case = random_call(
            scheme.key,
            scheme.value,
            page_size=scheme.page_size,
            group=4,
            tokens=40,
            pages=5,
            batch=3,
            window=window,
            softcap=softcap,
        )
        check(case, tiles, noise_of(scheme.key))


def test_maxima_that_rise_from_block_to_block(tiles):
    """Outputs of a block are summed after the next block's maximum is known."""
    spec = QuantSpec(format="int8", scale_dtype="float32")
    case = random_call(spec, spec, head_dim=64, batch=1, pages=9, group=8, tokens=8)
    case.q *= 30
    check(case, tiles, 2e-3)


def test_float16_queries_and_pages(tiles):
    for name in ("raw", "int8_centered", "int4"):
        scheme = schemes.get(name, head_dim=64)
        case = random_call(scheme.key, scheme.value, group=4, tokens=20, dtype=torch.float16)
        check(case, tiles, noise_of(scheme.key))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_not_finite_answers_nan_where_it_sees_a_token(tiles, bad):
    for name in ("raw", "int8_centered", "klt4"):
        scheme = schemes.get(name, head_dim=64)
        case = random_call(scheme.key, scheme.value, group=8, tokens=6, pages=3)
        case.q[0, 1, 2, 60] = bad
        got, want = case.attend("cpu"), case.exact()
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x.isnan(), y.isnan()) and y[0, 1, 2].isnan().all()


def test_the_same_bits_every_time_for_a_thread_count(tiles):
    case = random_call(QuantSpec(format="int4"), QuantSpec(format="int4"), pages=40, batch=2, group=4, tokens=20)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            first, second = (case.attend("cpu") for _ in "ab")
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            assert_close(first, case.exact(), NOISE["int4"])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"tokens": 1}, (32, "query rows")),
        ({"head_dim": 80}, ("head_dim", "multiple of 32")),
        ({"dtype": torch.float32}, ("raw", "float32")),
        ({"key": QuantSpec(format="int8", granularity=PerGroup(8))}, ("groups", "tiles")),
        ({"value": QuantSpec(format="int2", granularity=PerChannel()), "head_dim": 32}, ("rows of codes",)),
    ],
)
def test_what_tiles_do_not_serve_is_served_by_the_other_tier(tiles, change, parts):
    spec = QuantSpec(format="int8", granularity=PerToken())
    call = {"key": spec, "value": spec, "group": 4, "tokens": 12, "head_dim": 64} | change
    case = random_call(call.pop("key"), call.pop("value"), **call)
    said = plan_of(case).explain()
    assert said.startswith(f"attend by cpu ({OTHERWISE[tiles]}; {tiles}: ") and mentions(said, *parts)
    assert_close(case.attend("cpu"), case.exact(), 2e-2)


def test_plans_say_why_there_are_no_tiles():
    """A processor without AMX, or a system that refuses its registers, is named where AVX-512 serves."""
    before = library.tier()
    case = random_call(RAW, RAW, group=8, tokens=4)
    try:
        for tier in TIERS:
            library.set_tier(tier)
            assert ("; amx: " in plan_of(case).explain()) == (tier == "avx512" and library.amx_refusal() is not None)
    finally:
        library.set_tier(before)
    assert ("amx" in TIERS) == (library.amx_refusal() is None)


def attended(case, tiles, **more):
    """Return what tiles answer, by a plan with more options."""
    options = {"batch_size": len(case.q), "num_q_heads": case.q.shape[2], "num_queries": case.q.shape[1]}
    options |= {"dtype": case.q.dtype, "device": case.q.device, "spans": case.has_spans, "past_only": True}
    layouts = [store.layout for store in case.stores]
    plan = attend.Plan(layouts, **options | case.options | more)
    plan.bind(0, case.stores)
    plan.update(case.tables, None, case.positions)
    assert plan.explain() == f"attend by cpu ({tiles})"
    out = torch.empty(*case.q.shape[:3], layouts[0].value_head_dim)
    lse = torch.empty(case.q.shape[:3])
    plan.run(case.q, 0, out, lse)
    return out, lse


def decoded(case, tiles):
    """Return what tiles answer a call of few query rows."""
    return attended(case, tiles, min_tile_rows=attend.MIN_DECODED_ROWS)


@pytest.mark.parametrize("fmt", ["raw", "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("granularity", [PerToken(), PerChannel(), PerGroup(32)])
def test_numbers_of_one_term(tiles, fmt, granularity):
    spec = RAW if fmt == "raw" else QuantSpec(format=fmt, granularity=granularity)
    case = random_call(spec, spec, page_size=64, heads=2, group=4, tokens=20, pages=9)
    rounded, precise = (attended(case, tiles, one_term=one) for one in (True, False))
    assert_close(rounded, case.exact(), 1e-2)
    assert_close(precise, case.exact(), NOISE[fmt])
    assert not torch.equal(rounded[0], precise[0])


@pytest.mark.parametrize("fmt", ["raw", "int8"])
@pytest.mark.parametrize("options", [{"sliding_window": 100}, {"softcap": 20.0}], ids=str)
def test_numbers_of_one_term_with_options(tiles, fmt, options):
    spec = RAW if fmt == "raw" else QuantSpec(format=fmt)
    case = random_call(spec, RAW, page_size=64, heads=2, group=4, tokens=20, pages=9)
    case.options |= options
    assert_close(attended(case, tiles, one_term=True), case.exact(), 1e-2)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("group, tokens, batch", [(4, 1, 1), (7, 2, 2), *at_night((8, 1, 3), (16, 1, 2))])
def test_decoding(tiles, name, group, tokens, batch):
    """Few rows of a tile, and of one tile of two."""
    for head_dim in (128, 64):
        scheme = schemes.get(name, head_dim=head_dim)
        case = random_call(
            scheme.key,
            scheme.value,
            head_dim=head_dim,
            group=group,
            tokens=tokens,
            batch=batch,
            page_size=scheme.page_size,
            pages=9,
        )
        assert_close(decoded(case, tiles), case.exact(), noise_of(scheme.key, scheme.value))


def share(case, part, rows, pages):
    """Have sequences begin with the pages of the first of them."""
    table = case.tables[part].pages
    table[rows, :pages] = table[rows[0], :pages].clone()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("threads, window, tokens", [(1, None, 1), (3, 150, 2)])
def test_sequences_that_share_pages(tiles, name, threads, window, tokens):
    """Two prefixes, of three sequences and of two, one sequence alone, and first tokens that only some of them share.
    Sequences of a prefix have other pages behind it.
    """
    scheme = schemes.get(name, head_dim=64)
    case = random_call(
        scheme.key,
        scheme.value,
        group=4,
        tokens=tokens,
        batch=6,
        page_size=scheme.page_size,
        pages=9,
        window=window,
    )
    share(case, 0, [0, 2, 5], 3)
    share(case, 0, [1, 4], 4)
    share(case, 1, [0, 2], 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, second = decoded(case, tiles), decoded(case, tiles)
    finally:
        torch.set_num_threads(before)
    assert_close(first, case.exact(), noise_of(scheme.key, scheme.value))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_sequences_share_pages_once_their_rows_are_enough(tiles, name):
    """Eight sequences of four rows share, and three do not: what they read alone is the other tier's, bit by bit."""
    scheme = schemes.get(name, head_dim=64)
    case = random_call(scheme.key, scheme.value, group=4, tokens=1, batch=11, page_size=scheme.page_size, pages=14)
    share(case, 0, list(range(8)), 3)
    share(case, 0, [8, 9, 10], 3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = case.attend("cpu")
        library.set_tier(OTHERWISE[tiles])
        alone = case.attend("cpu")
    finally:
        torch.set_num_threads(before)
    assert_close(found, case.exact(), noise_of(scheme.key, scheme.value))
    same = (found[0] == alone[0]).flatten(1).all(1)
    assert not same[:8].any() and same[8:].all()


def test_more_sequences_than_a_tile_has_room_for(tiles):
    """All pages of all sequences are the same, and rows fill several items."""
    scheme = schemes.get("int4", head_dim=64)
    case = random_call(scheme.key, scheme.value, heads=1, group=64, batch=10, pages=11, sinks=0)
    for part, table in enumerate(case.tables):
        share(case, part, list(range(10)), table.pages.shape[1])
        for name in ("tokens", "starts"):
            if (x := getattr(table, name)) is not None:
                x[:] = x[0].clone()
    case.positions[:] = case.positions[0].clone()
    assert_close(decoded(case, tiles), case.exact(), noise_of(scheme.key))
