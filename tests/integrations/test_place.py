"""Results of `place` for a step, in the reference and in the kernel (on a GPU, and on a CPU in its place), against an
engine that knows what every block and copy holds.
"""

from __future__ import annotations

import functools
import logging
import random

import pytest
import torch
from messages import raises
from ops.emulated_op import emulate, needs_compiler, needs_gpu

from kvbits.errors import DataError
from kvbits.integrations.engine.place import Copies, Places, place
from kvbits.integrations.engine.place import cuda as place_cuda
from kvbits.integrations.engine.rings import Rings
from kvbits.integrations.engine.served import Ring
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.spec import PageLayout, QuantSpec

SIZE, BLOCKS, REQUESTS, TOKENS, WIDTH = 4, 40, 5, 64, 12
RINGS = 5
RAW = PageLayout(key=QuantSpec.raw(), value=QuantSpec.raw(), page_size=32, num_kv_heads=1, head_dim=64)
"""A layout of copies, which `place` does not read."""
WAYS = ["reference", pytest.param("emulated", marks=needs_compiler), pytest.param("gpu", marks=needs_gpu)]


@pytest.fixture(params=WAYS)
def run(request, tmp_path, monkeypatch):
    """`place` of host tensors, and the device that its state is on."""
    if request.param == "emulated":
        monkeypatch.setattr(place_cuda, "THREADS", 64)  # fewer to emulate, and tokens that one thread has several of
        emulate(place_cuda, "place", tmp_path, monkeypatch)
        monkeypatch.setattr(place_cuda, "_load", functools.cache(place_cuda._load))
    device = torch.device("cuda" if request.param == "gpu" else "cpu")

    def call(places, *given):
        (place if request.param == "reference" else place_cuda.place)(
            places, *(x if x is None else x.to(device) for x in given)
        )

    return call, device


def empty(device, newest=(2,), first=True, copies=True, count=RINGS):
    """State with copies in a format for each entry of `newest`, which has so many pages of a request."""
    sizes = {"tokens": TOKENS, "num_blocks": BLOCKS, "device": device}
    rings = [Ring(RAW, n, first and not i) for i, n in enumerate(newest)]
    return Places.empty(
        SIZE,
        previous=True,
        page_starts=True,
        copies=Copies.empty(rings, count=count, rows=REQUESTS, **sizes) if copies else None,
        **sizes,
    )


class Engine:
    """Requests that share prefixes by block, come, go, and lose drafts: the parts of vLLM that matter here.

    A token is a number; it never stands twice.

    With `others` some requests begin with tokens that somebody else wrote: loaded by a connector, or copied from a
    block that is partly theirs.
    """

    def __init__(self, run, seed, newest, first, rings=REQUESTS, others=False):
        self.run, device = run
        self.others = others
        self.rng, self.first, self.newest = random.Random(seed), first, newest
        self.rings, self.packed = Rings(rings, logging.getLogger(__name__)), 0
        self.places = empty(device, newest, first, count=rings)
        self.places.step = 2**31 - 20  # so that numbers of steps start again
        self.free = list(range(1, BLOCKS))
        self.users = dict.fromkeys(self.free, 0)
        self.stored: dict[int, int] = {}  # slot: token
        self.copied: list[dict[int, int]] = [{} for _ in newest]  # of each format, slot of a copy: token
        self.running: list[dict] = []
        self.cached: dict[tuple, int] = {}  # tokens up to a full block's end: block
        self.fresh = 0

    def take(self):
        block = self.free.pop(-1 if self.others else 0)  # soon again, while copies of its past are there
        for key in [k for k, b in self.cached.items() if b == block]:
            del self.cached[key]
        self.users[block] = 1
        if self.others:
            self.places.copies.forget([block])
        return block

    def add(self):
        prompt = [-1 - i for i in range(self.rng.choice([0, 0, 5, 9, 16]))]  # a stem that several have
        for _ in range(self.rng.randint(1, 20)):
            self.fresh += 1
            prompt.append(self.fresh)
        blocks = []
        while (
            (key := tuple(prompt[: (len(blocks) + 1) * SIZE])) in self.cached
            and len(key) < len(prompt)
            and len(key) == (len(blocks) + 1) * SIZE
        ):
            block = self.cached[key]
            if block in self.free:
                self.free.remove(block)
            self.users[block] += 1
            blocks.append(block)
        done = len(blocks) * SIZE
        if self.others and self.rng.random() < 0.5 and len(self.free) >= WIDTH:
            done = self.rng.randint(done, len(prompt) - 1)
            blocks += [self.take() for _ in range(-(-done // SIZE) - len(blocks))]
        self.fresh += 1
        self.running.append(
            {"name": self.fresh, "tokens": prompt, "blocks": blocks, "done": done, "known": len(prompt)}
        )

    def drop(self, r):
        self.running.remove(r)
        self.rings.end([r["name"]])
        for block in r["blocks"]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def step(self):
        if len(self.running) < REQUESTS and self.rng.random() < 0.4:
            self.add()
        rows, slots = [], []
        for r in self.running:
            left = len(r["tokens"]) - r["done"]
            if not left:
                for _ in range(self.rng.choice([1, 1, 1, 4])):  # a token, and drafts of which some will be taken back
                    self.fresh += 1
                    r["tokens"].append(self.fresh)
                left = len(r["tokens"]) - r["done"]
                r["known"] = r["done"] + self.rng.randint(1, left)
            n = min(left, self.rng.choice([3, 6, 30]), TOKENS - len(slots))
            need = -(-(r["done"] + n) // SIZE) - len(r["blocks"])
            if not n or need > len(self.free) or r["done"] + n > WIDTH * SIZE:
                continue
            r["blocks"] += [self.take() for _ in range(need)]
            for p in range(r["done"], r["done"] + n):
                slots.append(r["blocks"][p // SIZE] * SIZE + p % SIZE)
                self.stored[slots[-1]] = r["tokens"][p]
            r["done"] += n
            rows.append((r, n))
        if rows:
            self.check(rows, slots)
        for r, _ in rows:
            if r["done"] == len(r["tokens"]):
                del r["tokens"][r["known"] :]
                r["done"] = min(r["done"], r["known"])
            for i in range(r["done"] // SIZE):
                self.cached.setdefault(tuple(r["tokens"][: (i + 1) * SIZE]), r["blocks"][i])
            kept = -(-r["done"] // SIZE)
            for block in r["blocks"][kept:]:
                self.users[block] = 0
                self.free.append(block)
            del r["blocks"][kept:]
        for r in list(self.running):
            if (
                self.rng.random() < 0.05
                or r["done"] > (WIDTH - 2) * SIZE
                or (not self.free and self.rng.random() < 0.5)
            ):
                self.drop(r)

    def check(self, rows, slots):
        b = len(rows)
        lens, starts = (
            torch.tensor([r["done"] for r, _ in rows]).int(),
            torch.tensor([0, *(n for _, n in rows)]).cumsum(0).int(),
        )
        table = torch.zeros(b, WIDTH, dtype=torch.int32)
        for i, (r, _) in enumerate(rows):
            table[i, : len(r["blocks"])] = torch.tensor(r["blocks"]).int()
        rings = self.rings.of([r["name"] for r, _ in rows])
        self.run(self.places, lens, starts, table, torch.tensor(slots), torch.from_numpy(rings))
        c = self.places.copies
        for f, copied in zip(c.formats, self.copied, strict=True):
            for slot, to in zip(slots, f.slots[: len(slots)].tolist(), strict=True):
                if to >= 0:
                    copied[to] = self.stored[slot]
        at = 0
        for i, (r, n) in enumerate(rows):
            (start, offset, *packed), head = c.packed[:, i].tolist(), int(c.head[i])
            assert (start, offset) == ((SIZE, 1) if head else (0, 0)) and head in (0, min(SIZE, r["done"]))
            self.read(0, [int(c.head_table[i, 0])], head, r["tokens"][:head])
            opened, end = (r["done"] - 1) // SIZE - (r["done"] - n) // SIZE, r["done"]  # at least
            for j, (f, left) in enumerate(zip(c.formats, packed, strict=True)):
                tokens, begin = f.tail[:, i].tolist()
                assert begin + tokens == end or not tokens, "a format goes on where the finer one ends"
                self.read(j, f.table[i].tolist(), tokens, r["tokens"][begin:end])
                end -= tokens
                assert head + left == end or (not left and end <= head), "every token once"
                assert r["done"] - end <= f.newest * SIZE
                if rings[i] >= 0 and opened:
                    assert r["done"] - max(end, head) > (min(opened, f.newest) - 1) * SIZE - head, (
                        "new pages are copied"
                    )
            self.packed += rings[i] < 0
            for t in range(at, at + n):
                p = r["done"] - n + t - at
                assert self.places.page_starts[t] == p // SIZE * SIZE
                if p % SIZE == 0:
                    before = int(self.places.previous[t])
                    foreign = t == at and p and any(s // SIZE == r["blocks"][p // SIZE - 1] for s in slots)
                    assert before == (-1 if not p or foreign else r["blocks"][p // SIZE - 1])
            at += n

    def read(self, of, copies, tokens, want):
        copied = self.copied[of]
        assert [copied[copies[i // SIZE] * SIZE + i % SIZE] for i in range(tokens)] == want, (
            "a copy holds what its block holds"
        )


@pytest.mark.parametrize("rings", [REQUESTS, 2], ids=["all", "two"])
@pytest.mark.parametrize(
    ("newest", "first"),
    [((2,), True), ((2,), False), ((1,), False), ((3,), True), ((2, 5), True), ((1, 3, 6), False)],
    ids=str,
)
def test_copies_hold_what_their_blocks_hold(run, newest, first, rings):
    """Also where fewer requests than run have copies."""
    engine = Engine(run, newest[0] + 4 * first, newest, first, rings)
    for _ in range(100):
        engine.step()
    assert engine.fresh > 100 and (engine.packed > 0) == (rings < REQUESTS)


@pytest.mark.parametrize("rings", [REQUESTS, 2], ids=["all", "two"])
@pytest.mark.parametrize("newest", [(2,), (2, 5)], ids=str)
def test_blocks_that_others_write_have_no_copies_of_their_past(run, rings, newest):
    engine = Engine(run, 1, newest, True, rings, others=True)
    for _ in range(100):
        engine.step()
    assert engine.fresh > 100
    engine.places.copies.forget([1, BLOCKS, 10 * BLOCKS])  # of a larger pool, whose copies are others


def decode(run, places, length, blocks, ring=0, n=1):
    """A step of one row that has `length` tokens after it: how many it reads from its first page's copy, packed, and
    from the copies of each format.
    """
    table = torch.zeros(1, WIDTH, dtype=torch.int32)
    table[0, : len(blocks)] = torch.tensor(blocks).int()
    slots = torch.tensor([blocks[p // SIZE] * SIZE + p % SIZE for p in range(length - n, length)])
    run(places, torch.tensor([length]).int(), torch.tensor([0, n]).int(), table, slots, torch.tensor([ring]).int())
    c = places.copies
    return int(c.head[0]), int(c.packed[-1, 0]), *(int(f.tail[0, 0]) for f in c.formats)


def test_a_request_that_decodes_reads_its_first_and_newest_pages_raw(run):
    call, device = run
    places, blocks = empty(device), list(range(1, 11))
    found = [decode(call, places, n, blocks) for n in range(1, 33)]
    for length, (head, packed, tail) in enumerate(found, 1):
        newest = (length - 1) // SIZE
        assert head == min(length, SIZE)
        assert tail == (length - max(newest - 1, 1) * SIZE if newest else 0)
        assert packed == length - head - tail


def test_a_prompt_leaves_its_newest_pages_and_its_first(run):
    call, device = run
    assert decode(call, empty(device), 31, list(range(1, 9)), n=31) == (4, 20, 7)
    assert decode(call, empty(device, first=False), 31, list(range(1, 9)), n=31) == (0, 24, 7)


def test_tokens_behind_the_finest_copies_are_read_from_the_next(run):
    """Two raw pages, then those of the next format's five that are not among them, then packed ones. A layer without
    the next format reads its part packed.
    """
    call, device = run
    places, blocks = empty(device, newest=(2, 5)), list(range(1, 11))
    for length in range(1, 37):
        head, packed, raw, next_ = decode(call, places, length, blocks)
        newest = (length - 1) // SIZE
        assert head == min(length, SIZE)
        assert raw == (length - max(newest - 1, 1) * SIZE if newest else 0)
        assert next_ == max(newest - 1 - max(newest - 4, 1), 0) * SIZE
        assert packed == length - head - raw - next_ and places.copies.packed[2, 0] == packed + next_


def test_a_prompt_fills_rings_with_what_they_hold(run):
    """The newest tokens alone go to a ring, and in the next steps older ones move from one format to the next."""
    call, device = run
    places, blocks = empty(device, newest=(2, 5)), list(range(1, 11))
    assert decode(call, places, 38, blocks, n=38) == (4, 16, 6, 12)
    raw, next_ = (f.slots[:38].tolist() for f in places.copies.formats)
    assert [t for t in range(38) if raw[t] >= 0] == [*range(4), *range(32, 38)]
    assert [t for t in range(38) if next_[t] >= 0] == list(range(20, 38))
    assert decode(call, places, 40, blocks, n=2) == (4, 16, 8, 12)
    assert decode(call, places, 41, [*blocks, 11]) == (4, 20, 5, 12)


def test_copies_count_from_the_token_where_they_began(run):
    """Behind a prefix of somebody else, or of a time without a ring, formats fill up one after the other."""
    call, device = run
    places, blocks = empty(device, newest=(2, 5)), list(range(1, 13))
    assert decode(call, places, 17, blocks, ring=-1, n=17) == (0, 17, 0, 0)
    found = {n: decode(call, places, n, blocks) for n in range(18, 45)}
    assert found[20] == (0, 20, 0, 0), "the page was opened without a ring"
    assert found[21] == (0, 20, 1, 0) and found[28] == (0, 20, 8, 0)
    assert found[29] == (0, 20, 5, 4) and found[37] == (0, 20, 5, 12) and found[41] == (0, 24, 5, 12)


def test_a_block_that_was_not_stored_here_is_read_packed(run):
    """A prefix that another request left: no copies of it, the copies of what follows."""
    call, device = run
    places = empty(device)
    assert decode(call, places, 14, [1, 2, 3, 4], n=2) == (0, 12, 2)
    assert decode(call, places, 18, [1, 2, 3, 4, 5], n=4) == (0, 12, 6)


def test_a_request_without_a_ring_is_read_packed_and_leaves_no_copies(run):
    """Not those that its blocks had, nor of others."""
    call, device = run
    places = empty(device)
    assert decode(call, places, 6, [1, 2], ring=0, n=6) == (4, 0, 2)
    for ring in (-1, RINGS):
        assert decode(call, places, 10, [3, 4, 5], ring=ring, n=10) == (0, 10, 0)
        assert decode(call, places, 7, [1, 2], ring=ring) == (4, 3, 0)
    raw = places.copies.formats[0]
    assert (raw.where[3:6] == -1).all() and raw.holds[RINGS * 3 - 3 :].tolist() == [-1] * 3


def test_a_ring_is_a_requests_until_it_ends(caplog):
    """Whatever rows it has; who found none free gets the next one, and the log says how many have them."""
    rings = Rings(2, logging.getLogger("kvbits"))
    with caplog.at_level("INFO", "kvbits"):
        assert rings.of(["a", "b", None]).tolist() == [0, 1, -1] and not caplog.records
        assert rings.of(["c", "b", "a"]).tolist() == [-1, 1, 0]
        assert rings.of(["c", "a"]).tolist() == [-1, 0] and len(caplog.records) == 1
    assert "2 of 3" in caplog.text
    rings.end(["a", "never ran"])
    assert rings.of(["b", "c", "d"]).tolist() == [1, 0, -1]
    rings.end(["b", "c", "d"])
    assert sorted(rings.of(["e", "f"]).tolist()) == [0, 1]


def test_without_copies_only_the_pages_before_are_told(run):
    call, device = run
    places = empty(device, copies=False)
    call(
        places,
        torch.tensor([9]).int(),
        torch.tensor([0, 5]).int(),
        torch.tensor([[3, 7, 5]]).int(),
        torch.tensor([28, 29, 30, 31, 20]),
        None,
    )
    assert places.previous[:5].tolist() == [3, -1, -1, -1, 7]
    assert places.page_starts[:5].tolist() == [4, 4, 4, 4, 8]


def test_nothing_is_told_that_nobody_asks_for(run):
    call, device = run
    places = Places.empty(SIZE, tokens=TOKENS, num_blocks=BLOCKS, previous=False, copies=None, device=device)
    call(
        places,
        torch.tensor([9]).int(),
        torch.tensor([0, 1]).int(),
        torch.tensor([[3, 7, 5]]).int(),
        torch.tensor([20]),
        None,
    )
    assert places.previous is places.page_starts is None and places.stamps[5] == 1


def test_what_does_not_fit_is_refused():
    places, lens = empty(torch.device("cpu")), torch.ones(1, dtype=torch.int32)
    good = [
        lens,
        torch.tensor([0, 1]).int(),
        torch.ones(1, 2, dtype=torch.int32),
        torch.tensor([4]),
        torch.zeros(1, dtype=torch.int32),
    ]
    place(places, *good)
    for i, bad, parts in (
        (0, lens.long(), ("seq_lens", "torch.int32", "torch.int64")),
        (1, torch.tensor([0]).int(), ("starts", "torch.int32", "[2]", "[1]")),
        (2, lens, ("block table", "int32", "[1]")),
        (3, torch.tensor([4]).int(), ("slots", "torch.int64", "torch.int32")),
        (4, torch.zeros(1, dtype=torch.int64), ("rings", "torch.int32", "torch.int64")),
        (4, None, ("rings", "torch.int32")),
    ):
        with raises(DataError, *parts):
            place(places, *(bad if i == j else x for j, x in enumerate(good)))
    for rings in ([], [Ring(RAW, 1)] * 5, [Ring(RAW, 2), Ring(RAW, 4, first=True)]):
        with raises(DataError, "pages", 1, 4):
            Copies.empty(rings, count=1, rows=1, tokens=1, num_blocks=1, device=torch.device("cpu"))
    with raises(DataError, "previous", 64, 65):
        place(places, *good[:3], torch.full((65,), -1), good[4])


def test_it_compiles_without_spills():
    if why := cuda_compile.missing():
        pytest.skip(why)
    resources = cuda_compile.compile_source(place_cuda.source(), "sm_90").resources("place")
    assert resources.spill_bytes == 0
