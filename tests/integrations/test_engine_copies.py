"""Attention of an engine's layer whose newest tokens have copies, against float64: every token is read from the copy
that the scheme names, or packed where there is none.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from messages import raises
from nightly import at_night
from ops.cpu_cases import OTHERWISE, TILE_TIERS, static_params
from ops.cuda_cases import relative_error

from kvbits.errors import UnsupportedError
from kvbits.integrations.engine.call import Call
from kvbits.integrations.engine.layer import Layer
from kvbits.integrations.engine.options import Options
from kvbits.integrations.engine.prefill import scratch_for
from kvbits.integrations.engine.rings import Rings
from kvbits.integrations.engine.served import FORMATS, PAGE_SIZE, Ring
from kvbits.integrations.engine.step import Steps
from kvbits.ops import dispatch, store
from kvbits.ops.cpu import library
from kvbits.ops.reference.attend import PageList, judge
from kvbits.ops.types import PageStore
from kvbits.quant.basis import for_copies
from kvbits.spec import PageLayout

HEADS, QUERY_HEADS, D, BLOCKS, ROWS, TOKENS, LONGEST = 2, 4, 64, 64, 4, 1024, 768
OPTIONS = Options(raw_newest=64, raw_first=64)
PACKED = 0
"""Number of the page itself, where a page is read from: rings have numbers from 1 on."""


def dense(call, q, k, v, lengths, causal, out, wants_lse):
    """`engine.call.Attend` by its definition."""
    lses = torch.empty(q.shape[:2], device=q.device)
    starts = (x.unfold(0, 2, 1).tolist() for x in (lengths.q_starts, lengths.k_starts))
    for (begin, end), (first, last) in zip(*starts, strict=True):
        keys, values = (x[first:last].float().repeat_interleave(QUERY_HEADS // HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * call.scaling
        if causal:
            distance = torch.arange(end - begin)[:, None] + last - first - end + begin - torch.arange(last - first)
            hidden = distance < 0 if call.sliding_window is None else (distance < 0) | (distance >= call.sliding_window)
            scores = scores.masked_fill(hidden.to(q.device), -torch.inf)
        lses[begin:end] = scores.logsumexp(-1).transpose(0, 1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return lses if wants_lse else None


class Request:
    """Tokens of a request, those that are stored (`done`), and its blocks; `begun` is the first page that a ring has."""

    def __init__(self, seed: int, blocks: list[int], dtype: torch.dtype, device: torch.device) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.query = torch.randn(LONGEST, QUERY_HEADS, D, generator=gen).to(dtype).to(device)
        self.key, self.value = (torch.randn(LONGEST, HEADS, D, generator=gen).to(dtype).to(device) for _ in "kv")
        self.seed, self.blocks, self.done, self.begun = seed, blocks, 0, 0
        self.stored: dict[PageLayout, PageStore] = {}  # all its tokens, for judging

    def shares(self, other: Request, tokens: int) -> None:
        """Begin with another's first tokens, in its blocks."""
        for name in ("key", "value"):
            getattr(self, name)[:tokens] = getattr(other, name)[:tokens]
        pages = tokens // PAGE_SIZE
        self.blocks[:pages], self.done, self.begun = other.blocks[:pages], tokens, pages


class Engine:
    """One layer with its pages and rings for `count` requests; blocks 1 to `BLOCKS` - 1 are given out in turn."""

    def __init__(
        self, form: str, count: int, *, unpacks=False, window=None, drafts=0, options=OPTIONS, way="reference"
    ) -> None:
        self.device = torch.device("cuda" if way == "gpu" else "cpu")
        self.dtype = torch.bfloat16 if way in ("gpu", "tiles") else torch.float32
        layout = FORMATS[form].layout(HEADS, D, D, str(self.dtype)[6:])
        torch.manual_seed(0)
        self.static = static_params(layout.key, layout.value, HEADS, D)
        scratch = scratch_for(layout, self.dtype, self.device, LONGEST, TOKENS, window)
        self.call = Call(
            layout,
            QUERY_HEADS,
            self.dtype,
            D**-0.5,
            window,
            None,
            scratch,
            dense if unpacks or way == "gpu" else None,
            options.rings(FORMATS[form], layout),
        )
        sizes = {"rows": ROWS, "tokens": TOKENS, "num_pages": BLOCKS, "device": self.device}
        self.num_queries = 1 + drafts
        self.steps = Steps([self.call], num_queries=[self.num_queries], copied=count, **sizes)
        static = {name: x.to(self.device) for name, x in self.static.items()}
        self.layer = Layer("0", self.call, self.device)
        self.layer.calibrate(static, None)
        self.layer.take_copies(count)
        self.pages = torch.zeros(BLOCKS, HEADS, layout.head_bytes, dtype=torch.uint8, device=self.device)
        self.rings = Rings(count, logging.getLogger(__name__))
        self.free, self.made = list(range(1, BLOCKS)), 0

    def request(self) -> Request:
        """Make one, with blocks for 12 pages."""
        self.made += 1
        blocks, self.free = self.free[:12], self.free[12:] + self.free[:12]
        return Request(self.made, blocks, self.dtype, self.device)

    def step(self, *rows: tuple[Request, int]) -> list[torch.Tensor]:
        """Results [n, Hq, D] of the next n tokens of each request; those of `num_queries` tokens come first, since they
        decode.
        """
        decoding = sum(n == self.num_queries for _, n in rows)
        assert all(n == self.num_queries for _, n in rows[:decoding])
        lens, counts = (np.array(x) for x in ([r.done + n for r, n in rows], [n for _, n in rows]))
        table = torch.zeros(len(rows), LONGEST // PAGE_SIZE, dtype=torch.int32)
        slots, now = [], []
        for i, (r, n) in enumerate(rows):
            table[i, : len(r.blocks)] = torch.tensor(r.blocks)
            slots += [r.blocks[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(r.done, r.done + n)]
            now.append(slice(r.done, r.done + n))
        starts = torch.tensor([0, *np.cumsum(counts)]).int()
        given = [torch.from_numpy(lens).int(), starts, table, torch.tensor(slots), torch.from_numpy(self.ring(rows))]
        seq_lens, starts, table, slots, rings = (x.to(self.device) for x in given)
        tokens = {"num_decode_tokens": decoding * self.num_queries, "num_queries": self.num_queries}
        prompts = np.stack([counts, lens])[:, decoding:]
        step = self.steps.plan(seq_lens, starts, table, slots, rings, prompts, **tokens)
        q, k, v = (
            torch.cat([getattr(r, name)[s] for (r, _), s in zip(rows, now, strict=True)])
            for name in ("query", "key", "value")
        )
        out = torch.full_like(q, torch.nan)
        self.layer.run(step, q, k, v, out, self.pages)
        for r, n in rows:
            r.done += n
        return list(out.split(counts.tolist()))

    def ring(self, rows) -> np.ndarray:
        """Rings of the requests of a step; a request without one begins to be copied with the next page that it opens
        under one.
        """
        found = self.rings.of([r.seed for r, _ in rows])
        for (r, n), ring in zip(rows, found, strict=True):
            if ring < 0:
                r.begun = -(-(r.done + n) // PAGE_SIZE)
        return found

    def want(self, r: Request, n: int, read_from: Callable[[int], int]) -> torch.Tensor:
        """Results of the newest n tokens in float64, where each page before them is read from what `read_from` names.
        More tokens than a step that decodes has are read by each other as they came.
        """
        history = self.history(r, n)
        layouts = [self.call.layout, *(ring.layout for ring in self.call.rings)]
        pages = range(-(-history // PAGE_SIZE))
        for layout in layouts:
            if layout not in r.stored:
                r.stored[layout] = self.stored(layout, r, 0, LONGEST)
        parts = [(r.stored[x], [p for p in pages if read_from(p) == i], 0, history) for i, x in enumerate(layouts)]
        if history < r.done:
            raw = next(layout for layout in layouts if layout.is_raw)
            own = self.stored(raw, r, history, r.done)
            parts.append((own, list(range(-(-(r.done - history) // PAGE_SIZE))), history, r.done))
        stores, lists = [], []
        for found, pages, begin, end in parts:
            stores.append(found)
            lengths = np.array([min(end - begin - p * PAGE_SIZE, PAGE_SIZE) for p in pages], np.int32)
            first = np.array([begin + p * PAGE_SIZE for p in pages], np.int64)
            lists.append(PageList(np.array([0, len(pages)]), np.array(pages, np.int64), first, lengths))
        q, at = r.query[r.done - n : r.done].cpu()[None], torch.arange(r.done - n, r.done)[None]
        factors = self.call.scaling, self.call.sliding_window, None
        return judge(q, stores, lists, at, *factors, torch.float64)[0][0]

    def history(self, r: Request, n: int) -> int:
        """Tokens that the newest n read from pages."""
        return r.done if n == self.num_queries else r.done - n

    def stored(self, layout, r: Request, begin: int, end: int) -> PageStore:
        """Tokens of a request in pages of their own."""
        n = end - begin
        pages = torch.zeros(max(-(-n // PAGE_SIZE), 1), HEADS, layout.head_bytes, dtype=torch.uint8)
        own = {} if layout.is_raw else for_copies(self.static, self.call.layout.key, layout.key)
        found = PageStore(layout, (pages,), own)
        k, v = (x[begin:end].cpu() for x in (r.key, r.value))
        starts = (begin + torch.arange(n) // PAGE_SIZE * PAGE_SIZE).int()
        store.choose(layout, k.dtype, "cpu", "reference").run(k, v, found, torch.arange(n), starts=starts)
        return found

    def by_scheme(self, r: Request) -> Callable[[int], int]:
        """Return what each page of a request is read from, by the scheme alone. The newest and the first pages are read
        from raw copies, and those behind the newest from the next format. Both begin at the page that was opened under
        a ring.
        """
        newest = (r.done - 1) // PAGE_SIZE

        def read_from(page: int) -> int:
            for i, ring in enumerate(self.call.rings, 1):
                if page >= r.begun and (page > newest - ring.newest or (ring.first and page == 0)):
                    return i
            return PACKED

        return read_from


WAYS = [
    "reference",
    "kernels",
    pytest.param("gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")),
]
LIMITS = {"reference": 1e-5, "kernels": 2e-2, "gpu": 1e-2}
"""Largest errors. CPU kernels round queries to bytes where codes are in a basis."""


@pytest.fixture(params=WAYS)
def make(request, monkeypatch):
    """Makes `Engine`s: by the reference operations, the CPU's kernels or a GPU's."""
    if request.param == "reference":
        for op in ("attend", "store", "unpack"):
            monkeypatch.setitem(dispatch.BACKENDS, op, ("reference",))

    def make(form, count, **options):
        return Engine(form, count, way=request.param, **options)

    make.limit = LIMITS[request.param]
    return make


def check(make, engine: Engine, r: Request, out: torch.Tensor, read_from=None) -> None:
    """Results of a request's newest tokens are those of the copies that the scheme names, and of no others."""
    named = read_from or engine.by_scheme(r)
    assert relative_error(out.cpu(), engine.want(r, len(out), named)) < make.limit
    if make.limit > 1e-4 or len(out) > 100:
        return
    begin = 0 if engine.call.sliding_window is None else max(r.done - engine.call.sliding_window, 0) // PAGE_SIZE
    pages = range(begin, -(-engine.history(r, len(out)) // PAGE_SIZE))
    for i in range(1 + len(engine.call.rings)):
        if any(named(page) != i for page in pages):
            assert relative_error(out.cpu(), engine.want(r, len(out), lambda _, i=i: i)) > 10 * make.limit


@pytest.mark.parametrize("tier", TILE_TIERS)
def test_prompts_of_an_engine_read_their_history_in_tiles(tier):
    """A chunk of a prompt is near to float64, and has other bits than by the tier without tiles. A single row that
    decodes has the same.
    """
    before, found = library.tier(), []
    try:
        for name in (tier, OTHERWISE[tier]):
            library.set_tier(name)
            engine = Engine("kvbits_int4", 1, way="tiles")
            r = engine.request()
            engine.step((r, 400))
            chunk = engine.step((r, 40))[0]
            assert relative_error(chunk, engine.want(r, 40, engine.by_scheme(r))) < 1e-2
            found.append((chunk, engine.step((r, 1))[0]))
    finally:
        library.set_tier(before)
    (tiles, alone), (vectors, same) = found
    assert not torch.equal(tiles, vectors) and torch.equal(alone, same)


FORMS = ["kvbits_klt2", "kvbits_klt3", "kvbits_klt4", "kvbits_int4"]


@pytest.mark.parametrize("unpacks", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize("form", ["kvbits_klt2", *at_night(*FORMS[1:])])
def test_each_token_is_read_from_the_copy_that_the_scheme_names(make, form, unpacks):
    """A prompt at once and one in chunks, then steps over borders of pages, beside a request that has no ring."""
    engine = make(form, 2, unpacks=unpacks)
    one, two, none = (engine.request() for _ in range(3))
    check(make, engine, one, engine.step((one, 639))[0])
    for n in (40, 200, 90, 300):
        check(make, engine, two, engine.step((two, n))[0])
    check(make, engine, none, engine.step((none, 600))[0])
    assert engine.ring([(r, 0) for r in (one, two, none)]).tolist() == [0, 1, -1]
    for _ in range(3):
        for r, out in zip((one, two, none), engine.step((one, 1), (two, 1), (none, 1)), strict=True):
            check(make, engine, r, out)
    assert engine.by_scheme(none)(9) == PACKED and engine.by_scheme(one)(0) == 1


def test_rings_hold_what_the_scheme_needs_and_no_more():
    """klt2: raw pages for 64 tokens and the first, pages of klt4 for 64 + 448 tokens, one more for a page that fills."""
    layout = FORMATS["kvbits_klt2"].layout(HEADS, D, D)
    finer = FORMATS["kvbits_klt4"].layout(HEADS, D, D)
    raw, packed = OPTIONS.rings(FORMATS["kvbits_klt2"], layout)
    assert (raw.newest, raw.first, raw.layout.is_raw) == (2, True, True)
    assert (packed.newest, packed.first, packed.layout) == (9, False, finer)
    assert raw.nbytes == 3 * 64 * HEADS * 2 * D * 2 and packed.nbytes == 9 * finer.page_size_bytes
    without = Options(raw_newest=64, raw_first=64, packed_copies=False)
    assert without.rings(FORMATS["kvbits_klt2"], layout) == (raw,)
    assert Options(raw_newest=0).rings(FORMATS["kvbits_klt2"], layout) == ()
    assert Options(raw_newest=128).rings(FORMATS["kvbits_klt2"], layout)[1].newest == 10
    (alone,) = OPTIONS.rings(FORMATS["kvbits_klt4"], finer)
    assert (alone.newest, alone.first) == (2, True)


def test_copies_are_nearer_to_the_models_own_values(make):
    """Raw copies than no copies, and copies of klt4 behind them than raw ones alone."""
    far = []
    for options in (OPTIONS, dataclasses.replace(OPTIONS, packed_copies=False), Options()):
        engine = make("kvbits_klt2", 1, options=options)
        r = engine.request()
        engine.step((r, 575))
        out = engine.step((r, 1))[0]
        keys, values = (x[:576].double().cpu().repeat_interleave(2, 1) for x in (r.key, r.value))
        weights = (torch.einsum("hd,khd->hk", r.query[575].double().cpu(), keys) * D**-0.5).softmax(-1)
        far.append(relative_error(out.cpu(), torch.einsum("hk,khd->hd", weights, values)[None]))
    assert far[0] < 0.6 * far[1] < 0.6 * far[2]


@pytest.mark.parametrize("unpacks", [False, True], ids=["packed", "unpacked"])
def test_a_prefix_of_another_request_is_read_from_copies_that_are_still_there(make, unpacks):
    """A prompt that goes on from a running request's blocks reads its copies. Behind an ended one, whose ring another
    request has filled, the same prompt is read packed.
    """
    engine = make("kvbits_klt2", 2, unpacks=unpacks)
    first, hit = engine.request(), engine.request()
    engine.step((first, 640))
    hit.shares(first, 576)
    check(make, engine, hit, engine.step((hit, 30))[0], lambda p: 1 if p in (0, 8, 9) else 2)
    check(make, engine, hit, engine.step((hit, 1))[0], lambda p: 1 if p in (0, 8, 9) else 2)
    engine.rings.end([first.seed, hit.seed])
    for _ in range(2):
        engine.step((engine.request(), 640))
    engine.rings.end(list(engine.rings._of))
    again = engine.request()
    again.shares(first, 576)
    check(make, engine, again, engine.step((again, 30))[0], lambda p: PACKED if p < 9 else 1)
    for n, newest in ((90, [PACKED, 1, 1]), (1, [PACKED, 1, 1]), (10, [PACKED, 2, 1, 1]), (1, [PACKED, 2, 1, 1])):
        check(make, engine, again, engine.step((again, n))[0])
        assert [engine.by_scheme(again)(p) for p in range(8, 8 + len(newest))] == newest


def test_a_preempted_request_is_read_packed_until_it_has_a_ring_again(make):
    """Its ring goes to another request, and its blocks do. It runs again without a ring, then with one."""
    engine = make("kvbits_klt2", 1)
    one, other = engine.request(), engine.request()
    engine.step((one, 600))
    engine.rings.end([one.seed])
    for n in (100, 400):
        check(make, engine, other, engine.step((other, n))[0])
    one.done, one.blocks = 0, [other.blocks.pop(), *engine.request().blocks[:11]]
    engine.steps.copies.forget(one.blocks)
    check(make, engine, one, engine.step((one, 600))[0])
    assert engine.by_scheme(one)(9) == PACKED
    engine.rings.end([other.seed])
    for n in (59, 1):
        check(make, engine, one, engine.step((one, n))[0])
    assert one.begun == 10 and [engine.by_scheme(one)(p) for p in (0, 9, 10)] == [PACKED, PACKED, 1]


def test_pages_that_others_write_are_read_packed(make):
    """A prefix that a connector loads into blocks that a request with a ring had: copies of their past are not read."""
    engine = make("kvbits_klt2", 1)
    past, loaded = engine.request(), engine.request()
    engine.step((past, 640))
    layer, blocks = engine.layer, past.blocks[:9]
    engine.steps.copies.forget(blocks)
    pages = engine.stored(engine.call.layout, loaded, 0, 576).slabs[0]
    engine.pages[torch.tensor(blocks)] = pages.to(engine.device)
    loaded.blocks, loaded.done = [*blocks, *loaded.blocks[9:]], 576
    engine.rings.end([past.seed])
    check(make, engine, loaded, engine.step((loaded, 40))[0], lambda p: PACKED if p < 9 else 1)
    check(make, engine, loaded, engine.step((loaded, 1))[0], lambda p: PACKED if p < 9 else 1)
    assert all(x.any() for x in layer.copies)


def test_drafts_are_read_as_single_tokens_are(make):
    """Four at a time, none of them taken back, over a border of pages."""
    engine = make("kvbits_klt2", 1, drafts=3)
    r = engine.request()
    engine.step((r, 573))
    for _ in range(3):
        check(make, engine, r, engine.step((r, 4))[0])


def test_a_rejected_draft_in_a_new_page_costs_the_oldest_copies(make):
    """The draft overwrote copies, which are missing until the next page begins. Attention then reads the page before the
    newest from klt4.
    """
    engine = make("kvbits_klt2", 1, drafts=3)
    r = engine.request()
    engine.step((r, 638))
    engine.step((r, 4))
    r.done = 639
    out = engine.step((r, 1))  # one token is no step of four: a prompt
    check(make, engine, r, out[0], lambda p: 1 if p in (0, 9) else 2 if p > 1 else PACKED)


@pytest.mark.parametrize("form", ["kvbits_klt2", "kvbits_int4"])
def test_windows_see_copies_too(make, form):
    engine = make(form, 1, window=200)
    r = engine.request()
    for n in (300, 90, 1, 1):
        check(make, engine, r, engine.step((r, n))[0])


def test_layers_of_one_pool_may_have_fewer_formats_of_copies(make):
    """A layer of raw copies alone reads packed what another reads from klt4; rings of other sizes are refused."""
    engine = make("kvbits_klt2", 1)
    r = engine.request()
    some = engine.call
    raw = Call(*[getattr(some, f) for f in list(Call.__dataclass_fields__)[:-1]], some.rings[:1])
    sizes = {"num_queries": [1], "rows": ROWS, "tokens": TOKENS, "num_pages": BLOCKS, "device": engine.device}
    engine.steps, engine.call = Steps([raw, some], copied=1, **sizes), raw
    static = engine.layer.static[0]
    engine.layer = Layer("0", raw, engine.device)
    engine.layer.calibrate(static, None)
    engine.layer.take_copies(1)
    for n in (640, 1):
        check(make, engine, r, engine.step((r, n))[0])
    other = Call(*[getattr(some, f) for f in list(Call.__dataclass_fields__)[:-1]], (Ring(some.rings[0].layout, 5),))
    with raises(UnsupportedError, 5, 2, "pages"):
        Steps([other, some], copied=1, **sizes)
