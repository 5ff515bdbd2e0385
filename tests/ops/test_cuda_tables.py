"""The contract of attention over tables, served by the CUDA kernels (work list, attention, merging) run on a CPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import pytest
import torch
from messages import raises
from ops import emulated_gpu
from ops.cuda_cases import relative_error
from ops.table_cases import CASES, HEADS, INT8, LIMIT, Cache, D, check, moved

from kvbits.errors import UnsupportedError
from kvbits.ops import attend
from kvbits.ops.cuda import merge
from kvbits.ops.reference.attend import exact
from kvbits.ops.reference.merge import add_sink_logit, sink_part
from kvbits.ops.types import PageStore, Table

pytestmark = emulated_gpu.needs_emulation
emulated = emulated_gpu.emulated


@pytest.mark.parametrize("name", CASES)
def test_the_cuda_kernels_serve_the_contract(name, emulated):
    made = check(Cache(**CASES[name]), slabs=1 + (name == "sinks"))
    assert "by cuda" in made.explain() and not made.reads_host


@pytest.mark.parametrize(
    "options", [{"num_queries": 3, "window": 100}, {"num_queries": 8, "softcap": 20.0, "batch_size": 9}], ids=str
)
@pytest.mark.parametrize("name", ["tail", "basis with copies"])
def test_ragged_queries_windows_and_caps(name, options, emulated):
    cache = Cache(**CASES[name])
    lens = torch.tensor([min(3, int(n)) - (i % 2) * (n > 2) for i, n in enumerate(cache.newest)], dtype=torch.int32)
    check(cache, query_lens=lens, **options)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("name", ["centred", "basis with copies"])
def test_learned_sinks_are_merged_in_place(name, window, emulated):
    """As vLLM's plugin decodes gpt-oss: eight query heads to a kv head, windows and full attention, rows of fewer
    queries than planned, a padding row.
    """
    cache = Cache(**CASES[name] | {"lengths": [*CASES[name]["lengths"], (0,) * len(CASES[name]["layouts"])]})
    batch, heads = len(cache.newest), HEADS * 8
    q = torch.randn(batch, 3, heads, D, generator=torch.Generator().manual_seed(5)).bfloat16()
    lens = cache.newest.clamp(max=3).int()
    made = attend.plan(
        cache.layouts,
        batch_size=batch,
        num_q_heads=heads,
        dtype=q.dtype,
        device="cpu",
        num_queries=3,
        sliding_window=window,
    )
    made.bind(0, cache.stores)
    made.update(cache.tables, query_lens=lens)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    made.run(q, 0, out=out, lse=lse)
    logits = torch.linspace(-3, 8, heads)
    sink = sink_part(logits, D, q.dtype)
    merge.merge_partials([out, sink[0]], [lse, sink[1]], into=out)
    want = add_sink_logit(*cache.want(q, lens, window, None), logits.double())
    assert torch.isfinite(out).all() and not out[-1].any()
    assert relative_error(out, want) < LIMIT


def test_a_plan_follows_tables_and_pools(emulated):
    """Layers bound before and after an update, anew as their pool grows, and updates of fewer sequences."""
    one, two = Cache(**CASES["tail"]), Cache(**CASES["tail"], seed=1)
    q = torch.randn(5, 1, 4, D, generator=torch.Generator().manual_seed(5)).bfloat16()
    made = attend.plan(one.layouts, batch_size=5, num_q_heads=4, dtype=q.dtype, device="cpu")
    made.bind(0, two.stores)
    made.update(one.tables)
    made.bind(1, [moved(store, "cpu", 2) for store in one.stores])
    made.bind(0, one.stores)
    want = one.want(q)[0]
    assert all(relative_error(made.run(q, layer), want) < LIMIT for layer in (0, 1))
    few = [Table(*(x[:2].clone() for x in (t.pages, t.tokens, t.starts, t.offsets))) for t in one.tables]
    made.update(few)
    assert relative_error(made.run(q[:2], 1), want[:2]) < LIMIT
    made.bind(0, two.stores)
    made.update(two.tables)
    assert relative_error(made.run(q, 0), two.want(q)[0]) < LIMIT


@pytest.fixture
def guarded():
    """guarded(pages, at_end): a copy of them in memory that ends (begins) where the next 64 MiB (those before) may not
    be touched.
    """
    libc, size, made = ctypes.CDLL(None, use_errno=True), 64 << 20, []
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def copy(pages, at_end):
        room = -(-pages.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = libc.mmap(None, room + 2 * size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert whole not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        made.append((whole, room + 2 * size))
        assert libc.mprotect(whole + size, room, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        first = whole + size + (room - pages.nbytes if at_end else 0)
        mine = torch.frombuffer((ctypes.c_uint8 * pages.nbytes).from_address(first), dtype=torch.uint8).view(
            pages.shape
        )
        return mine.copy_(pages)

    yield copy
    for address, nbytes in made:
        libc.munmap(address, nbytes)


@pytest.mark.parametrize("spans", [False, True], ids=["", "spans"])
def test_page_numbers_out_of_range_read_no_other_memory(spans, emulated, guarded):
    """Entries past a sequence's pages are poison everywhere above; here one that is read is, and so are lengths.

    Pages lie beside memory whose touch ends the process and between those of two other layers, which are NaN: what is
    read of a bad sequence are numbers of this layer's pages, and the sound ones are right.
    """
    sound = Cache(**CASES["one part"])
    total = len(sound.stores[0].slabs[0])
    q = torch.randn(5, 1, 4, D).bfloat16()
    for poison in (-1, total, 2**31 - 1, -(2**31)):
        cache = Cache(**CASES["one part"], poison=poison)
        (table,), (store,) = cache.tables, cache.stores
        table.pages[0, table.offsets[0] + 2] = poison
        wide = torch.full((total, 3, *store.slabs[0].shape[1:]), 0xFF, dtype=torch.uint8)
        wide[:, 1] = store.slabs[0]
        own = attend.plan(cache.layouts, batch_size=5, num_q_heads=4, dtype=q.dtype, device="cpu", spans=spans)
        # The pages of the last layer before the end, those of the first one behind the beginning.
        end = poison > 0
        pages = guarded(wide[:, :2] if end else wide[:, 1:], end)[:, 1 if end else 0]
        own.bind(0, [PageStore(store.layout, (pages,))])
        tokens = torch.tensor([333, 2**31 - 1, -5, 64, 1], dtype=torch.int32)
        if spans:
            width = table.pages.shape[1]
            shifted = torch.stack([row.roll(-int(n)) for row, n in zip(table.pages, table.offsets, strict=True)])
            at = torch.stack([64 * torch.arange(width), torch.full((width,), 64)], 1).int().repeat(5, 1, 1)
            at[0, 1, 1], at[1, 2, 1] = 2**31 - 1, -7
            at[3:, 0, 1] = torch.tensor([64, 1])
            own.update([Table(shifted, tokens, spans=at)], positions=torch.full((5, 1), 10_000, dtype=torch.int32))
        else:
            own.update([Table(table.pages, tokens, offsets=table.offsets)])
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
        own.run(q, 0, out=out, lse=lse)
        assert torch.isfinite(out).all() and not lse.isnan().any(), poison
        assert not out[2].any() and torch.isneginf(lse[2]).all(), "fewer tokens than none are none"
        assert relative_error(out[3:], sound.want(q)[0][3:]) < LIMIT, poison


def test_what_leads_out_of_a_table_ends_with_its_row(emulated):
    cache = Cache(**CASES["one part"])
    pages = torch.nn.functional.pad(cache.tables[0].pages.clamp(min=0), (0, 3))
    made = attend.plan(cache.layouts, batch_size=5, num_q_heads=4, dtype=torch.bfloat16, device="cpu")
    made.bind(0, cache.stores)
    q = torch.randn(5, 1, 4, D, generator=torch.Generator().manual_seed(3)).bfloat16()
    for offsets, tokens in (
        ([0, 3, 20, -5, 2], [2**31 - 1, 400, 64, 70, -1]),
        ([-(2**31), 2**31 - 1, 5, 0, 10], [300, 64, 10**6, 1, 500]),
    ):
        table = Table(pages, *(torch.tensor(x, dtype=torch.int32) for x in (tokens, [0] * 5, offsets)))
        made.update([table])
        lse = torch.zeros(5, 1, 4)
        out = made.run(q, 0, lse=lse)
        want, want_lse = exact(q, cache.stores, [table])
        assert relative_error(out, want) < LIMIT
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-2)


def test_every_subset_of_parts_may_be_empty(emulated):
    rows = [
        tuple(n if keep else 0 for n, keep in zip((4, 192, 70), which, strict=True))
        for which in itertools.product((0, 1), repeat=3)
    ]
    check(Cache(CASES["sinks"]["layouts"], rows))


@pytest.mark.parametrize(
    "sizes, parts",
    [
        ({"batch_size": 5000}, ("5000 sequences", 4096)),
        (
            {"batch_size": 4096, "num_queries": 1 << 24},
            ("4096 sequences", "16777216 queries", "segments", 2147483647, "chunks"),
        ),
    ],
)
def test_plans_past_what_a_list_holds_are_refused(sizes, parts, emulated):
    with raises(UnsupportedError, *parts):
        attend.plan([INT8], num_q_heads=4, dtype=torch.bfloat16, device="cpu", **sizes)
