"""The GPU work lists are integers: every chunk is read exactly once, slots are handed out once, and no block waits long
for another.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbits.ops.cuda.engine.schedule import KEPT, SEGMENT_COST, SEGMENT_FIELDS, PartWork, chunks_per_sequence, schedule

FIELD = {name: i for i, name in enumerate(SEGMENT_FIELDS) if name}


def walk(segments: np.ndarray, blocks: int):
    """Segments of every block, as the kernel follows them."""
    for block in range(blocks):
        at = block
        while at >= 0 and segments[at][FIELD["unit"]] >= 0:
            yield block, {name: int(segments[at][i]) for name, i in FIELD.items()}
            at = int(segments[at][FIELD["next"]])


@st.composite
def work(draw):
    batch, launches = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    counts = draw(st.lists(st.lists(st.integers(0, 30), min_size=batch, max_size=batch), min_size=launches, max_size=4))
    costs = draw(st.lists(st.sampled_from([512, 4608, 16896, 300_000]), min_size=len(counts), max_size=len(counts)))
    parts = [
        PartWork(
            np.arange(batch) * 100 + 1000 * i,
            np.array(c),
            cost,
            i % launches,
            in_ring=i != 1,
            walk=draw(st.sampled_from([None, 0, 1])),
            ends_walk=draw(st.booleans()),
        )
        for i, (c, cost) in enumerate(zip(counts, costs, strict=True))
    ]
    return parts, draw(st.integers(1, 6)), [draw(st.integers(1, 40)) for _ in range(launches)]


@given(work())
def test_every_chunk_is_read_once_and_every_slot_filled_once(given_work):
    parts, repeats, blocks = given_work
    lists, num_slots = schedule(parts, repeats, blocks)
    seen, slots, units, joined = set(), [], {}, None
    for launch, segments in enumerate(lists):
        before = {}
        for block, s in walk(segments, blocks[launch]):
            part = parts[s["part"]]
            assert part.launch == launch
            assert s["first_entry"] == part.first_entry[s["unit"] // repeats]
            assert s["chunks_before"] == before.get(block, 0)
            before[block] = before.get(block, 0) + s["num_chunks"] * part.in_ring
            chunks = {(s["unit"], s["part"], k) for k in range(s["first_chunk"], s["first_chunk"] + s["num_chunks"])}
            assert not chunks & seen
            seen |= chunks
            if joined:
                assert (block, s["unit"], s["slot"], part.walk) == joined, "the rest of one result"
            assert not s["joins"] or part.walk is not None
            joined = (block, s["unit"], s["slot"], part.walk) if s["joins"] else None
            if not s["joins"]:
                units.setdefault(s["unit"], []).append(s)
        assert not joined
    for group in units.values():
        first = group[0]["unit_slots"]
        assert all(s["num_slots"] == len(group) and s["unit_slots"] == first for s in group)
        found = [s["slot"] for s in group]
        assert found == [-1] if len(group) == 1 else sorted(found) == list(range(first, first + len(group)))
        slots += [s for s in found if s >= 0]
    assert sorted(slots) == list(range(num_slots))
    assert set(units) == set(range(len(parts[0].num_chunks) * repeats)), (
        "a unit that reads nothing still writes its result"
    )
    assert len(seen) == sum(int(p.num_chunks.sum()) for p in parts) * repeats


@pytest.mark.parametrize("batch, pages, heads", [(1, 2048, 8), (32, 64, 8), (8, 512, 8), (7, 333, 2)])
@pytest.mark.parametrize("cost", [4608, 16896])
def test_no_block_has_much_more_than_its_share(batch, pages, heads, cost):
    blocks = 132
    (segments,), _ = schedule([PartWork(np.zeros(batch, np.int64), np.full(batch, pages), cost, 0)], heads, [blocks])
    load = np.zeros(blocks)
    for block, s in walk(segments, blocks):
        load[block] += s["num_chunks"] * cost + SEGMENT_COST
    total = batch * pages * heads * cost
    assert load.max() <= total / blocks + 3 * SEGMENT_COST


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_many_short_sequences_find_a_share(blocks):
    """Where starts outweigh bytes by far, the search has to reach shares far above an equal cut: 2,500 answers of one
    page each.
    """
    one = np.ones(2500, np.int64)
    parts = [PartWork(0 * one, one, 4608, 0, walk=1), PartWork(one, one, 100, 0, in_ring=False, walk=0)]
    (segments,), _ = schedule(parts, 8, [blocks])
    seen = [(s["unit"], s["part"]) for _, s in walk(segments, blocks)]
    assert sorted(seen) == [(u, p) for u in range(2500 * 8) for p in range(2)]


def test_tiers_of_one_sequence_are_two_results():
    """Sinks and newest tokens are one walk, pages of one format another: a block that reads all of a unit
    ends twice.
    """
    one = np.ones(3, np.int64)
    parts = [
        PartWork(0 * one, 5 * one, 4000, 0, walk=1),
        PartWork(5 * one, 9 * one, 8000, 0, walk=1),
        PartWork(14 * one, one, 100, 0, in_ring=False, walk=0),
    ]
    parts.append(PartWork(15 * one, 4 * one, 9000, 0, in_ring=False, walk=0))
    (segments,), num_slots = schedule(parts, 2, [1])
    order = [(s["unit"], s["part"], s["joins"], s["slot"]) for _, s in walk(segments, 1)]
    assert order == [(u, part, int(part in (0, 2)), 2 * u + (part < 2)) for u in range(6) for part in (2, 3, 0, 1)]
    assert num_slots == 12


def test_raw_tokens_end_the_walk_they_join():
    """Whatever the order of parts: closed pages, then sinks and tail, one result; a block that begins inside a unit, or
    has raw tokens alone, too.
    """
    counts = [np.array([2, 0, 300]), np.array([40, 7, 0]), np.array([3, 5, 1])]
    parts = [PartWork(1000 * i + 0 * n, n, 4000, 0, walk=0, ends_walk=i != 1) for i, n in enumerate(counts)]
    (segments,), _ = schedule(parts, 2, [4])
    order = [(block, s["unit"], s["part"], s["joins"]) for block, s in walk(segments, 4)]
    assert {part for _, _, part, _ in order} == {0, 1, 2}
    for (block, unit, part, joins), (*place, after, _) in itertools.pairwise([*order, (4, 6, 0, 0)]):
        assert joins == (place == [block, unit])
        assert not joins or (part, after) in ((1, 0), (1, 2), (0, 2))


def test_invisible_chunks_at_the_end_are_not_scheduled():
    lengths = np.array([64, 64, 10, 64, 33], np.int32)
    np.testing.assert_array_equal(chunks_per_sequence(np.array([0, 3, 3, 5]), lengths, 32, 2), [5, 0, 4])
    np.testing.assert_array_equal(chunks_per_sequence(np.array([0, 0]), np.zeros(0, np.int32), 32, 2), [0])


def test_lists_are_kept_for_equal_work_alone():
    work = PartWork(np.zeros(2, np.int64), np.array([40, 7]), 4608, 0)
    first, _ = schedule([work], 8, [5])
    assert schedule([dataclasses.replace(work)], 8, [5])[0] is first
    for other, repeats, blocks in (
        (dataclasses.replace(work, num_chunks=np.array([40, 8])), 8, [5]),
        (work, 4, [5]),
        (work, 8, [6]),
        (dataclasses.replace(work, in_ring=False), 8, [5]),
    ):
        found, _ = schedule([other], repeats, blocks)
        assert found is not first
        assert sum(int(x[:, FIELD["num_chunks"]].sum()) for x in found) == repeats * int(other.num_chunks.sum())
    for n in range(KEPT):
        schedule([work], 1, [n + 1])
    assert schedule([work], 8, [5])[0] is not first
