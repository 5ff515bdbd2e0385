"""Work lists (work_list.cu, run on a CPU) are integers: every chunk that a query may see is read exactly once, slots are
handed out once, and no block waits long for another.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import numpy as np
import pytest
from ops.emulated_gpu import list_library, needs_emulation

from kvbits.ops.cuda.attend import launches
from kvbits.ops.cuda.engine.work_list import SEGMENT_COST, SEGMENT_FIELDS, PartWork, WorkArgs, num_slots
from kvbits.spec import PageLayout, PerGroup, QuantSpec

pytestmark = needs_emulation
STRIDE = 10_000
"""Entries of a table's row."""
EMPTY = 64 << 10
"""Cost of a unit without tokens."""


@dataclasses.dataclass
class Part:
    """Part of a list: tokens [B], and what one chunk is."""

    tokens: np.ndarray
    chunk: int = 64
    cost: int = 9216
    in_ring: bool = True
    walk: int = 0
    page_size: int = 64
    spans: bool = False

    def chunks(self, tokens: int) -> int:
        per_page = -(-self.page_size // self.chunk)
        return tokens // self.page_size * per_page + -(-(tokens % self.page_size) // self.chunk)

    def chunk_of(self, token: int) -> int:
        return token // self.page_size * -(-self.page_size // self.chunk) + token % self.page_size // self.chunk


def segments_of(
    parts: list[Part],
    *,
    blocks: int,
    repeats: int = 4,
    num_queries: int = 1,
    window: int = 2**30,
    query_lens: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    others: tuple[Part, ...] = (),
) -> tuple[list[list[dict[str, int]]], np.ndarray]:
    """Segments of every block, as the attention kernel follows them, and positions [B, num_queries] of queries. Tokens
    of one part begin where those of the one before end, others last.
    """
    batch = len(parts[0].tokens)
    work = WorkArgs(
        segment_cost=SEGMENT_COST,
        num_walks=len({p.walk for p in parts}),
        num_others=len(others),
        batch=batch,
        repeats=repeats,
        blocks=blocks,
        num_queries=num_queries,
        window=window,
        grid=2,
    )
    keep, start = [], np.zeros(batch, np.int32)
    for i, part in enumerate((*parts, *others)):
        tokens = np.asarray(part.tokens, np.int32)
        keep += [tokens, start]
        work.parts[i] = PartWork(
            tokens=tokens.ctypes.data,
            positions=start.ctypes.data,
            chunk_cost=part.cost,
            table_stride=STRIDE,
            span_stride=STRIDE if part.spans else 0,
            table_width=STRIDE,
            page_size=part.page_size,
            chunk=part.chunk,
            in_ring=part.in_ring,
            walk=part.walk,
        )
        start = start + tokens
    for name, x in (("query_lens", query_lens), ("positions", positions)):
        if x is not None:
            keep.append(x := np.ascontiguousarray(x, np.int32))
            setattr(work, name, x.ctypes.data)
    units = batch * repeats
    segments = np.full((blocks + units * len(parts), len(SEGMENT_FIELDS)), -7, np.int32)
    found = np.full((batch, num_queries), -7, np.int32)
    work.segments, work.q_positions = segments.ctypes.data, found.ctypes.data
    list_library(len(parts)).launch(ctypes.byref(work), 2)
    idle = segments[:blocks, 0] == -1
    assert (segments[:blocks, 8][idle] == -1).all(), "a block without work has no next segment either"
    lists = []
    for block in range(blocks):
        at, mine = block, []
        while at >= 0 and segments[at, 0] >= 0:
            mine.append(dict(zip(SEGMENT_FIELDS, segments[at].tolist(), strict=True)))
            at = mine[-1]["next"]
        lists.append(mine)
    return lists, found


def check(lists, parts: list[Part], want: list[list[tuple[int, int]]], *, blocks: int, repeats: int) -> list[int]:
    """Refuse lists that do not read exactly the chunks first .. last - 1 of `want` [part][sequence], or whose results
    do not come together. Returns bytes of each block.
    """
    starts = np.cumsum([np.zeros_like(parts[0].tokens), *(p.tokens for p in parts)], 0)
    seen, results, load = set(), {}, []
    for mine in lists:
        ring, nbytes, open_ = 0, 0, None
        for s in mine:
            part, b = parts[s["part"]], s["unit"] // repeats
            assert s["chunks_before"] == ring
            ring += s["num_chunks"] * part.in_ring
            nbytes += s["num_chunks"] * part.cost
            nbytes += 0 if open_ else SEGMENT_COST if s["num_chunks"] else EMPTY
            chunks = {(s["unit"], s["part"], s["first_chunk"] + k) for k in range(s["num_chunks"])}
            assert not chunks & seen
            seen |= chunks
            tokens = int(part.tokens[b])
            assert s["first_entry"] == b * STRIDE and s["tokens"] == tokens
            assert s["last_entry"] == s["first_entry"] + max(0, tokens - 1) // part.page_size
            assert s["position"] == (b * STRIDE if part.spans else starts[s["part"]][b])
            assert not open_ or open_ == (s["unit"], part.walk), "the rest of one result"
            open_ = (s["unit"], part.walk) if s["joins"] else None
            if not s["joins"]:
                results.setdefault(s["unit"], []).append(s)
        assert open_ is None
        load.append(nbytes)
    batch = len(parts[0].tokens)
    assert seen == {
        (b * repeats + r, p, c)
        for p in range(len(parts))
        for b in range(batch)
        for r in range(repeats)
        for c in range(*want[p][b])
    }
    assert set(results) == set(range(batch * repeats)), "a unit that reads nothing still writes its result"
    used, owner = set(), {}  # slots of units that several blocks read; of others by the block that reads them alone
    block_of = {(s["unit"], s["slot"]): i for i, mine in enumerate(lists) for s in mine}
    for unit, mine in results.items():
        if len(mine) == 1:
            assert mine[0]["slot"] == -1
            continue
        first = mine[0]["unit_slots"]
        assert all(s["num_slots"] == len(mine) and s["unit_slots"] == first for s in mine)
        slots = {s["slot"] for s in mine}
        assert slots == set(range(first, first + len(mine)))
        readers = {block_of[unit, slot] for slot in slots}
        if len(readers) > 1:
            assert not slots & used
            used |= slots
        else:
            assert all(owner.setdefault(slot, readers) == readers for slot in slots)
    assert not used & set(owner)
    assert max((*used, *owner), default=0) < num_slots(blocks, len({p.walk for p in parts}))
    return load


def all_chunks(parts: list[Part]) -> list[list[tuple[int, int]]]:
    return [[(0, p.chunks(int(n))) for n in p.tokens] for p in parts]


def random_parts(rng, batch: int, longest: int) -> list[Part]:
    num, joined, parts = int(rng.integers(1, 5)), bool(rng.integers(2)), []
    for p in range(num):
        raw = num > 1 and p != 0
        tokens = rng.integers(0, (200 if raw else longest) + 1, batch).astype(np.int32)
        if rng.integers(2):
            tokens[:] = tokens[0]
        tokens[rng.random(batch) < 0.2] = 0
        chunk, cost = (32, 16384) if raw else (int(rng.choice([32, 64])), 9216)
        parts.append(Part(tokens, chunk, cost, joined or not raw, 0 if joined else p))
    return parts


@pytest.mark.parametrize("seed", range(60))
def test_every_chunk_is_read_once_and_shares_are_even(seed):
    rng = np.random.default_rng(seed)
    batch, blocks, repeats = int(rng.integers(1, 40)), int(rng.choice([1, 3, 16, 132])), int(rng.choice([1, 2, 8]))
    parts = random_parts(rng, batch, int(rng.choice([70, 3000, 100_000])))
    lists, positions = segments_of(parts, blocks=blocks, repeats=repeats)
    load = check(lists, parts, all_chunks(parts), blocks=blocks, repeats=repeats)
    newest = sum(p.tokens for p in parts)
    assert positions[:, 0].tolist() == [int(n) - 1 if n else -1 for n in newest]
    if sum(load) > 40 * blocks * SEGMENT_COST:
        assert max(load) < 1.06 * sum(load) / blocks


@pytest.mark.parametrize("seed", range(40))
def test_chunks_before_every_window_are_left_out(seed):
    """The oldest query decides, whether it is one of the newest tokens or has a position of its own. Pages with spans
    are read all.
    """
    rng = np.random.default_rng(seed)
    batch, num_queries, window = int(rng.integers(1, 9)), int(rng.choice([1, 3, 9, 64, 512])), int(rng.integers(1, 900))
    parts = random_parts(rng, batch, 3000)[: int(rng.integers(1, 4))]
    others = tuple(random_parts(rng, batch, 500)[: 4 - len(parts)]) if rng.integers(2) else ()
    starts = np.cumsum([np.zeros(batch, int), *(p.tokens for p in (*parts, *others))], 0)
    newest = np.zeros(batch, int)
    for first, part in zip(starts, (*parts, *others), strict=False):
        newest = np.maximum(newest, np.where(part.tokens > 0, first + part.tokens, 0))
    options, kind = {}, int(rng.integers(3))
    index = np.arange(num_queries)
    if kind < 2:
        lens = rng.integers(0, num_queries + 1, batch) if kind else np.full(batch, num_queries)
        want = newest[:, None] - lens[:, None] + index
        want = np.where((index < lens[:, None]) & (newest >= lens)[:, None], want, -1)
        options = {"query_lens": lens} if kind else {}
        oldest = np.where(lens > 0, newest - lens, -1)
        some = lens > 0
    else:
        given = rng.integers(-3, 2000, (batch, num_queries))
        given[rng.random(batch) < 0.3] = -7
        options, want = {"positions": given}, np.maximum(given, -1)
        some = (given >= 0).any(1)
        oldest = np.where(given >= 0, given, 2**31).min(1)
        for part in parts:
            part.spans = bool(rng.integers(2))
    blocks, repeats = 16, 3
    lists, positions = segments_of(
        parts, blocks=blocks, repeats=repeats, num_queries=num_queries, window=window, others=others, **options
    )
    assert (positions == want).all()
    expected = []
    for first, part in zip(starts, parts, strict=False):
        row = []
        for b, n in enumerate(part.tokens):
            hidden = 0 if part.spans else max(0, int(oldest[b]) - window + 1 - int(first[b]))
            row.append((part.chunk_of(hidden), part.chunks(int(n))) if some[b] and hidden < n else (0, 0))
        expected.append(row)
    check(lists, parts, expected, blocks=blocks, repeats=repeats)


@pytest.mark.parametrize("batch, pages, heads", [(1, 2048, 8), (32, 64, 8), (8, 512, 8), (7, 333, 2)])
@pytest.mark.parametrize("cost", [4608, 16896])
def test_no_block_has_much_more_than_its_share(batch, pages, heads, cost):
    blocks = 132
    parts = [Part(np.full(batch, 64 * pages, np.int32), cost=cost)]
    lists, _ = segments_of(parts, blocks=blocks, repeats=heads)
    load = check(lists, parts, all_chunks(parts), blocks=blocks, repeats=heads)
    assert max(load) <= batch * pages * heads * cost / blocks + 3 * SEGMENT_COST


@pytest.mark.parametrize(
    "batch, tokens, longest",
    [
        (1, 131_072, 1_414_144),
        (8, 32_768, 2_621_440),
        (32, 8192, 2_883_584),
        (32, 4096, 1_703_936),
        (64, 4096, 3_407_872),
        (128, 2048, 4_456_448),
    ],
)
def test_decode_steps_are_as_even_as_a_search_makes_them(batch, tokens, longest):
    """The six shapes of a decode step, int4: the longest of 132 blocks beside what the smallest share gave with which
    all blocks suffice.
    """
    parts = [Part(np.full(batch, tokens, np.int32))]
    lists, _ = segments_of(parts, blocks=132, repeats=8)
    assert max(check(lists, parts, all_chunks(parts), blocks=132, repeats=8)) < 1.06 * longest


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_many_short_sequences_find_a_share(blocks):
    """Starts outweigh bytes by far: 2,500 answers of one page each, with a few raw tokens."""
    one = np.full(2500, 64, np.int32)
    parts = [Part(one, cost=4608), Part(one // 64, 32, 100, False, 1)]
    lists, _ = segments_of(parts, blocks=blocks, repeats=2)
    load = check(lists, parts, all_chunks(parts), blocks=blocks, repeats=2)
    assert max(load) <= 1.1 * sum(load) / blocks + SEGMENT_COST


def test_parts_of_several_walks_are_several_results():
    """A block that reads all of a unit ends as often as it has walks."""
    three = np.full(3, 64, np.int32)
    parts = [Part(5 * three, walk=0), Part(9 * three, walk=0), Part(three, 32, in_ring=False, walk=2)]
    lists, _ = segments_of(parts, blocks=1, repeats=2)
    check(lists, parts, all_chunks(parts), blocks=1, repeats=2)
    order = [(s["unit"], s["part"], s["joins"]) for s in lists[0]]
    assert order == [(u, part, int(part == 0)) for u in range(6) for part in range(3)]


def test_keys_of_many_units_and_long_rows_stay_apart():
    """More units than 16 bits number, and a row of more chunks than 20 bits."""
    parts = [Part(np.full(2500, 64, np.int32))]
    lists, _ = segments_of(parts, blocks=132, repeats=32)
    check(lists, parts, all_chunks(parts), blocks=132, repeats=32)
    parts = [Part(np.array([STRIDE * 4096], np.int32), chunk=32, page_size=4096)]
    lists, _ = segments_of(parts, blocks=132, repeats=1)
    ends = [(s["first_chunk"], s["first_chunk"] + s["num_chunks"]) for mine in lists for s in mine]
    assert ends[0][0] == 0 and ends[-1][1] == STRIDE * 128 > 2**20
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))


def test_raw_tokens_end_the_walk_they_join_and_each_format_is_a_launch():
    raw, eight, four = (
        PageLayout(key=s, value=s, page_size=64, num_kv_heads=2, head_dim=64)
        for s in (QuantSpec.raw(), *(QuantSpec(format=f, granularity=PerGroup(64)) for f in ("int8", "int4")))
    )
    assert launches([raw, four, raw]) == [[1, 0, 2]]
    assert launches([raw, four, eight, raw]) == [[1, 0, 3], [2]]
    assert launches([four, eight, four]) == [[0, 2], [1]]
    assert launches([raw, raw]) == [[0, 1]]
