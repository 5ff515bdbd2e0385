"""The attention kernels' C++ run on a CPU, thread by thread (tests/ops/emulated), against the float64 reference: what
CI can check without a GPU.

KVBITS_TEST_ALL_KERNELS=1 runs all cases of the GPU tests of KVQuant's formats (some minutes).
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from nightly import at_night
from ops import emulated_gpu
from ops.cuda_cases import Case, make, relative_error
from ops.emulated_gpu import needs_emulation
from ops.test_cuda_attend import LIMIT, TIERED, both, limits, spec, unlike_widths, wide
from ops.test_cuda_kvquant import direct, of, static

from kvbits import schemes
from kvbits.ops.cuda.engine import launch
from kvbits.ops.reference import close as close_reference
from kvbits.quant.basis import completed, hadamard
from kvbits.quant.scales import steps
from kvbits.spec import PerChannel, PerGroup, PerToken, QuantSpec

pytestmark = needs_emulation
emulated = emulated_gpu.emulated
RAW = QuantSpec.raw()


def cases():
    yield Case(**both("int4"), lengths=(333, 0, 70), tail=20, sinks=1)
    yield Case(**of("nuq4-1%"), lengths=(333, 0, 70), tail=20, sinks=1)
    yield Case(**static("nuq3-1%"), lengths=(333, 70), head_dim=64, group=8)
    yield Case(**of("nuq2-1%"), lengths=(333, 70), group=3)
    whole = {
        "lengths": (320, 64, 640, 0, 192, 448),
        "group": 6,
    }  # units that are one segment each, several in a block: no warp waits for the others between them
    yield Case(**both("int4"), **whole)
    yield Case(key=spec("int2", PerChannel(), symmetric=False), value=spec("int2", symmetric=False), **whole)
    yield Case(**both("int8", PerToken()), **whole, head_dim=80, num_queries=2)
    yield Case(**both("int3"), **whole)
    ragged = {"lengths": (700, 0, 333, 70), "tail": 20, "sinks": 3}
    yield Case(**TIERED, **ragged, young=True)
    yield Case(**TIERED, **ragged, young=True, head_dim=64, group=3, num_queries=5, page_size=32)
    yield Case(**both("int4"), **ragged, young=True, softcap=20.0, page_size=128, crop=13)
    yield Case(
        key=spec("int4", PerChannel(), static=True, symmetric=False),
        value=spec("int4", PerChannel()),
        **ragged,
        young=True,
        window=300,
    )
    # three column tiles
    yield Case(**both("int8"), lengths=(333, 70), tail=20, group=5, num_queries=11, head_dim=64, softcap=20.0)
    yield Case(key=spec("int3"), value=spec("int4", symmetric=False), **ragged, young=True)
    yield from joined()
    yield Case(key=spec("int4"), value=spec("int3"), **ragged, young=True)
    # planes of 3-bit codes: joined with halves of a row that are whole 16-byte steps, that are not, not joined
    few = {"lengths": (333, 70), "tail": 20}
    yield Case(**both("int3", PerGroup(32), symmetric=False), **few, group=5, num_queries=11)
    yield Case(
        key=spec("int3", PerChannel(), symmetric=False), value=spec("int3", PerChannel(), symmetric=False), **few
    )
    yield Case(**both("int3", center="channel"), **few, head_dim=256)
    yield Case(**both("int3", PerGroup(32), symmetric=False), **few, head_dim=64, group=8)
    yield Case(key=spec("int3", PerChannel()), value=spec("int3", PerToken()), **few, head_dim=96)
    yield Case(
        key=spec("int3", PerChannel(), symmetric=False),
        value=spec("int3", PerToken(), symmetric=False),
        **few,
        head_dim=80,
    )
    yield from banded()
    yield from unlike_widths(lengths=(333, 0, 70), tail=20, sinks=3)
    yield from wide(lengths=(200, 70), tail=20, sinks=3, heads=1)
    if os.environ.get("KVBITS_TEST_ALL_KERNELS"):
        yield from (dataclasses.replace(c, lengths=(500 if c.window else 333, 70)) for c in direct())


def banded():
    """Keys in a calibrated basis: frames that pages cut in any place, far ones, columns of one, two and several frames
    to an instruction, every width.
    """
    whole = {"lengths": (320, 64, 640, 0, 192, 448)}
    yield Case(**of("klt4"), lengths=(600, 0, 70), tail=20, sinks=4, first=131_000, group=8)
    yield Case(**of("klt3"), **whole, group=6, num_queries=2, window=200)
    yield Case(**of("klt2"), **whole, tail=20, sinks=1, group=1)
    yield Case(**of("klt4"), lengths=(333, 70), head_dim=64, group=3, softcap=20.0, page_size=32, crop=13)
    yield Case(**of("klt2"), **whole, head_dim=64, tail=64, sinks=4, group=5, magnitude=30.0)
    yield Case(**of("klt3"), lengths=(700, 70), tail=20, head_dim=256, group=2, page_size=128)
    for name in ("klt4", "klt2"):  # queries as bytes, scores far apart
        yield Case(**of(name), lengths=(333, 70), magnitude=50.0)
    # few tokens, some hidden from one query
    yield Case(**of("klt2"), lengths=(64, 70), group=2, num_queries=2, page_size=32)
    # four columns and eight, pages across the ends of frames, rings whose words are other lanes'
    yield Case(**of("klt2"), lengths=(600, 70), tail=20, sinks=4, first=500, group=8)
    yield Case(**of("klt3"), lengths=(333, 0, 70), tail=20, sinks=4, first=1000, group=4, window=100)
    yield Case(**of("klt4"), lengths=(600, 70), tail=20, sinks=4, first=1000, group=4)
    yield Case(**of("klt4"), lengths=(333, 70), head_dim=64, group=8)
    yield Case(**of("klt2"), lengths=(333, 70), head_dim=256, group=8, sinks=4, tail=20)
    uniform = {"key": of("klt2")["key"], "value": dataclasses.replace(of("klt2")["value"], levels="uniform")}
    yield Case(**uniform, lengths=(333, 70), group=2)
    yield Case(**uniform, lengths=(333, 70), group=6, head_dim=64)
    wide = schemes.get("klt4", head_dim=256)  # has a plane of 8 bits
    yield Case(key=wide.key, value=wide.value, lengths=(333, 0, 70), tail=20, sinks=4, head_dim=256, group=4)
    key, value = of("klt3").values()
    # bytes would sum up to more than floats hold, so that queries of two columns are made for eight
    all_wide = dataclasses.replace(key, bands=(8,) * 16), dataclasses.replace(value, bands=(3,) * 16)
    yield Case(key=all_wide[0], value=all_wide[1], lengths=(700, 70), tail=20, head_dim=256, group=2)
    for bands in ((8, 0, 1, 2), (3, 6, 1, 5)):
        yield Case(
            key=dataclasses.replace(key, bands=bands, center=None),
            value=dataclasses.replace(value, basis=None),
            lengths=(333, 70),
            head_dim=64,
        )


def joined():
    """Raw tokens in the walk over packed pages: sequences of both, of one of them and of neither, several units to a
    block, and one over several blocks.
    """
    mixed = {"lengths": (20, 333, 0, 64, 150, 1), "group": 3}
    yield Case(**both("int8", center="channel"), **mixed, tail=20, sinks=4)
    yield Case(**both("int4", PerGroup(32)), **mixed, tail=64)
    asymmetric = spec("int4", PerGroup(32), symmetric=False)
    yield Case(key=dataclasses.replace(asymmetric, center="channel"), value=asymmetric, **mixed, tail=150, sinks=64)
    yield Case(
        key=spec("int2", PerChannel(), symmetric=False),
        value=spec("int2", symmetric=False),
        lengths=(700, 333, 70),
        tail=1,
        sinks=3,
    )
    long = {"lengths": (900,), "heads": 1, "tail": 150, "num_queries": 8, "window": 700}
    yield Case(key=spec("int4", PerChannel(), symmetric=False), value=spec("int4", symmetric=False), **long)
    yield Case(
        key=spec("int2", PerChannel(), symmetric=False),
        value=spec("int2", PerGroup(32), symmetric=False),
        **mixed,
        tail=40,
        page_size=32,
        sinks=2,
    )
    yield Case(
        key=spec("int8", PerGroup(32)),
        value=spec("int4", PerGroup(32)),
        **mixed,
        tail=64,
        softcap=20.0,
        num_queries=2,
        dtype=torch.float16,
    )
    yield Case(
        key=spec("int3", PerToken()),
        value=spec("fp8_e5m2", PerToken(), center="channel"),
        **mixed,
        tail=20,
        head_dim=80,
        sinks=1,
        crop=13,
    )
    yield Case(**both("int2"), lengths=(333, 70), tail=40, group=5, num_queries=11, head_dim=64)  # three column tiles


def tables():
    """Yield what tables may hold: pages that were dropped or cut, slabs of a pool; and what queries may be: many,
    given.
    """
    ragged = {"lengths": (700, 0, 333, 70), "tail": 20, "sinks": 3}
    for formats in (both("int8", center="channel"), of("klt4"), of("nuq4-1%")):
        yield Case(**formats, **ragged, spans=True, slabs=3)
        yield Case(**formats, **ragged, spans=True, crop=13, window=300, num_queries=9, group=1)
    yield Case(**TIERED, **ragged, spans=True, young=True, slabs=2, num_queries=9, group=2)
    yield Case(**TIERED, **ragged, young=True, crop=13, softcap=20.0, page_size=128)
    yield Case(**both("int4"), lengths=(333, 0, 70), tail=20, sinks=3, slabs=2, num_queries=64, window=100)
    yield Case(**both("int2"), lengths=(200, 70), tail=20, num_queries=64, head_dim=64, spans=True)
    yield Case(**of("klt2"), lengths=(333, 70), tail=20, group=2, num_queries=9, slabs=2)
    yield Case(key=RAW, value=RAW, lengths=(333, 0, 70), num_queries=64, slabs=3, spans=True, sinks=4)


def check(call, limit=LIMIT, lse_limit=1e-2):
    """`call` served by the kernels against float64."""
    plan = call.plan()
    out, lse = torch.full_like(call.want()[0], torch.nan, dtype=call.q.dtype), torch.full(call.q.shape[:3], torch.nan)
    assert plan.run(call.q, 0, out=out, lse=lse) is out
    want, want_lse = call.want()
    assert relative_error(out, want) < limit
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-3, atol=lse_limit)
    return plan


EVERY = [*cases(), *tables()]


@pytest.mark.parametrize("case", [*EVERY[::3], *at_night(*EVERY[1::3], *EVERY[2::3])], ids=str)
def test_the_kernel_computes_what_the_reference_does(case, emulated):
    check(make(case, "cpu"), **limits(case))


@pytest.mark.parametrize("case", [*list(tables())[::3], Case(**both("int4"), lengths=(333, 0, 70), tail=20)], ids=str)
def test_queries_have_positions_of_their_own(case, emulated):
    """Queries that are not the newest tokens, in any order, some padding, some sequences nothing else."""
    call = make(case, "cpu")
    gen = torch.Generator().manual_seed(1)
    newest = call.positions.max(1, keepdim=True).values
    call.positions = (torch.rand(call.positions.shape, generator=gen) * newest).int()
    call.positions[torch.rand(call.positions.shape, generator=gen) < 0.2] = -5
    call.positions[-1] = -1
    plan = call.plan()
    plan.update(call.tables, positions=call.positions)
    out, lse = torch.full_like(call.want()[0], torch.nan, dtype=call.q.dtype), torch.full(call.q.shape[:3], torch.nan)
    plan.run(call.q, 0, out=out, lse=lse)
    want, want_lse = call.want()
    assert relative_error(out, want) < LIMIT
    assert torch.equal(torch.isfinite(lse), torch.isfinite(want_lse))
    assert not out[-1].any() and torch.isneginf(lse[-1]).all()


def test_each_format_has_a_kernel_and_the_newest_token_is_that_of_all(emulated):
    """Sequences whose newest token is in a page of either format, or raw."""
    case = Case(**TIERED, lengths=(700, 64, 333), tail=20, sinks=3, young=True, window=100, num_queries=3, group=2)
    call = make(case, "cpu")
    assert check(call).explain().count("blocks of") == 2
    call.tables[-1].tokens.zero_()
    call.positions = torch.stack([t.starts + t.tokens for t in call.tables if t.tokens.any()]).amax(0)[:, None] + (
        torch.arange(-3, 0, dtype=torch.int32)
    )
    check(call)


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq3-1%", "klt2"])
def test_the_order_of_threads_does_not_matter(name, emulated, monkeypatch):
    monkeypatch.setenv("KVBITS_EMULATE_REVERSED", "1")
    check(make(Case(**of(name), lengths=(333, 0, 70), tail=20, sinks=1), "cpu"))


def test_one_plan_serves_layers_with_parameters_of_their_own(emulated):
    call = make(Case(**static("nuq4-1%"), lengths=(333, 70), tail=20, layers=2), "cpu")
    plan = check(call)
    first = plan.run(call.q, 0).clone()
    stores = [
        dataclasses.replace(x, static={n: y if "codebook" in n else y * 1.25 for n, y in x.static.items()})
        for x in call.stores_of(1)
    ]
    plan.bind(1, stores)
    want, _ = call.want(stores)
    assert relative_error(plan.run(call.q, 1), want) < LIMIT
    assert torch.equal(plan.run(call.q, 0), first) and relative_error(first, want) > 10 * LIMIT


@pytest.mark.parametrize("fmt", ["int8", "int4", "int2"])
def test_parts_of_one_format_may_have_parameters_of_their_own(fmt, emulated):
    """Two parts with calibrated scales that differ, and no raw one beside them."""
    formats = both(fmt, PerChannel(), static=True)
    one, two = (make(Case(**formats, lengths=(320, 128)), "cpu", seed) for seed in (1, 2))
    one.stores += two.stores
    one.tables += [dataclasses.replace(t, starts=t.starts + 1000) for t in two.tables]
    one.positions += 1000
    one.pools += two.pools
    check(one)


def with_copies(name, older, newer, sinks=0, tail=0, **options):
    """A call over pages of a scheme, then of copies in klt4, which have a basis of their own, then raw tokens."""
    old = make(Case(**of(name), lengths=tuple(sinks + n for n in older), sinks=sinks, **options), "cpu")
    new = make(Case(**of("klt4"), lengths=tuple(n + tail for n in newer), tail=tail, **options), "cpu", 1)
    (store, *raw), (table, *raw_tables), (pool, *raw_pools) = old.stores, old.tables, old.pools
    ends = sinks + torch.tensor(older, dtype=torch.int32)
    moved = [
        dataclasses.replace(t, starts=t.starts + ends)
        if t.spans is None
        else dataclasses.replace(t, spans=torch.stack([t.spans[..., 0] + ends[:, None], t.spans[..., 1]], -1))
        for t in new.tables
    ]
    old.stores, old.pools = [store, *new.stores, *raw], [pool, *new.pools, *raw_pools]
    old.tables = [table, *moved, *raw_tables]
    old.positions = torch.where(new.positions < 0, old.positions, new.positions + ends[:, None])
    return old


@pytest.mark.parametrize("name", ["klt2", "klt3"])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("head_dim", [128, *at_night(64, 256)])
def test_one_kernel_reads_pages_of_a_scheme_and_finer_copies_of_newer_ones(head_dim, group, name, emulated):
    """Sequences of both, of one of them, and of raw tokens alone; units that are one segment and that are cut."""
    older, newer = (320, 64, 0, 640, 0, 192), (448, 0, 192, 448, 0, 128)
    call = with_copies(name, older, newer, sinks=4, tail=20, head_dim=head_dim, group=group)
    assert check(call).explain().count("blocks of") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 4, "tail": 20, "window": 300, "num_queries": 3, "group": 2},
        {"softcap": 20.0, "page_size": 128, "group": 3},
        {"sinks": 4, "tail": 64, "num_queries": 9, "spans": True, "slabs": 2},
        {"heads": 1, "group": 5},
    ],
    ids=str,
)
def test_tables_and_queries_of_pages_with_copies(options, emulated):
    call = with_copies("klt2", (640, 128, 0), (384, 0, 256), **options)
    assert check(call).explain().count("blocks of") == 1


def test_a_plan_of_pages_with_copies_follows_its_tables(emulated):
    """The same memory, as a graph that was captured has it, while older pages and copies come and go."""
    call = with_copies("klt2", (320, 640), (448, 192), sinks=4, tail=20)
    plan = check(call)
    tokens = [table.tokens.clone() for table in call.tables]
    for part, sequence in ((0, 0), (1, 1), (0, 1)):  # 0: older pages, 1: copies
        call.tables[part].tokens[sequence] = 0
        plan.update(call.tables)
        assert relative_error(plan.run(call.q, 0), call.want()[0]) < LIMIT
    for table, before in zip(call.tables, tokens, strict=True):
        table.tokens.copy_(before)
    plan.update(call.tables)
    assert relative_error(plan.run(call.q, 0), call.want()[0]) < LIMIT


@pytest.mark.parametrize("emulated", [(8, 9)], indirect=True, ids=["sm_89"])
@pytest.mark.parametrize("backwards", [False, True])
def test_one_tile_of_queries_serves_all_frames_where_memory_is_small(backwards, emulated, monkeypatch):
    """Several segments of a block, each of several tiles, which its warps and those that make queries hand over."""
    if backwards:
        monkeypatch.setenv("KVBITS_EMULATE_REVERSED", "1")
    tiles = []
    load = launch.load_kernel
    monkeypatch.setattr(
        launch, "load_kernel", lambda kernel, device: tiles.append(dict(kernel.defines)) or load(kernel, device)
    )
    older, newer = (2304, 0, 640), (448, 192, 0)
    check(with_copies("klt3", older, newer, sinks=4, tail=20, head_dim=256, group=4, heads=1))
    assert [x["FRAME_TILES"] for x in tiles] == [1]


@pytest.mark.parametrize("emulated", [(8, 0), (8, 9)], indirect=True, ids=["sm_80", "sm_89"])
def test_pages_with_copies_without_the_copy_engine(emulated):
    check(with_copies("klt3", (320, 64), (192, 448), sinks=4, tail=20))


def test_the_order_of_threads_does_not_matter_to_copies(emulated, monkeypatch):
    monkeypatch.setenv("KVBITS_EMULATE_REVERSED", "1")
    check(with_copies("klt2", (320, 64), (192, 448), sinks=4, tail=20))


@pytest.mark.parametrize("emulated", [(8, 0), (8, 9)], indirect=True, ids=["sm_80", "sm_89"])
def test_rings_without_the_copy_engine(emulated):
    """Lanes copy and arrive one by one, in rings of two slots a warp."""
    check(make(Case(**TIERED, lengths=(700, 0, 333), tail=20, sinks=3, young=True, group=2), "cpu"))


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
def test_raw_tokens_join_in_any_order_of_parts(backwards, emulated):
    call = make(Case(**both("int2"), lengths=(20, 333), tail=70, sinks=3), "cpu")
    if backwards:
        call.stores, call.tables, call.pools = call.stores[::-1], call.tables[::-1], call.pools[::-1]
    check(call)


def test_queries_that_a_basis_takes_out_lose_nothing(emulated):
    """A query bias a hundred times the rest; and one column that is no number, beside others that are."""
    call = make(Case(**of("klt3"), lengths=(320,), head_dim=64, group=3, dtype=torch.float16), "cpu")
    (store,), (table,), q = call.stores, call.tables, call.q
    basis = store.static["k_basis"] * torch.where(torch.arange(64) == 7, 100, 1)[:, None]
    store.static["k_mean"][..., [7, 39]] *= 1e-2  # a pair of the rotary embedding
    store.static.update(completed(store.static | {"k_basis": basis}, store.static["k_inv_freq"]))
    ids = table.pages[0].long().numpy()
    k, v = torch.randn(2, len(ids), 2, 64, 64, generator=torch.Generator().manual_seed(1))
    k[..., 7] *= 1e-2
    close_reference.close(k, v, store, ids, starts=64 * torch.arange(len(ids)).numpy())
    q[..., 7] += 100
    plan = call.plan()
    out = plan.run(q, 0).clone()
    assert relative_error(out, call.want()[0]) < LIMIT
    q[:, :, 1] = torch.nan
    assert torch.equal(plan.run(q, 0)[:, :, [0, 2, 3, 4, 5]], out[:, :, [0, 2, 3, 4, 5]])


def test_tiny_queries_overflow_no_operand(emulated):
    """All but one number just below 1e-30, along a direction of the basis that operands multiply most."""
    key, value = of("klt3").values()
    d, bands = 256, (6,) * 8 + (5,) * 8
    formats = {
        "key": dataclasses.replace(key, bands=bands, center=None),
        "value": dataclasses.replace(value, bands=(3,) * 16),
    }
    call = make(Case(**formats, lengths=(333,), head_dim=d, group=8, heads=1), "cpu")
    static = call.stores[0].static
    basis = hadamard(torch.eye(d)) / steps(formats["key"], d)
    static.update(completed(static | {"k_basis": basis[None]}, static["k_inv_freq"]))
    q = 0.998e-30 * static["k_inverse"][0, 251].sign()
    for first in (0, d // 2):  # what one warp loads
        q[first : first + d // 4] = 0
    q[0] = 1.011e-30
    call.q[:] = q
    check(call)


@pytest.mark.parametrize("emulated", [(8, 0)], indirect=True, ids=["sm_80"])
@pytest.mark.parametrize("fmt", ["int8", "int2"])
def test_raw_tokens_in_rings_without_the_copy_engine(fmt, emulated):
    """Keys and values of a chunk lie in one slot."""
    check(make(Case(**both(fmt), lengths=(20, 333, 0, 150), tail=64, sinks=3, group=2), "cpu"))


@pytest.mark.parametrize("emulated", [(8, 0)], indirect=True, ids=["sm_80"])
def test_rings_of_banded_pages_without_the_copy_engine(emulated):
    check(make(Case(**of("klt3"), lengths=(333, 0, 70), head_dim=64, tail=20, sinks=4, group=2), "cpu"))


@pytest.mark.parametrize("emulated", [(8, 0), (8, 9)], indirect=True, ids=["sm_80", "sm_89"])
@pytest.mark.parametrize("name", ["nuq3-1%", "nuq2-1%"])
def test_rings_of_codebook_pages_without_the_copy_engine(name, emulated):
    """Tables of 8.9 have rows for a code's bytes only."""
    check(make(Case(**of(name), lengths=(333, 0, 70), tail=20, sinks=1, group=2), "cpu"))
