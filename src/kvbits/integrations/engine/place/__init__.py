"""Once a step of somebody else's engine, for all layers: which page is before one that opens, which tokens are also
kept in copies, and what each row reads.

An engine that owns pages (blocks) gives lengths and block tables on the device. A row's newest pages can have
**copies** in finer formats beside the packed page: raw ones of the newest and the first, packed ones of the pages
behind them. The packed page is complete all the same. Whoever finds no copy reads the packed page, so a lost copy costs
accuracy and nothing else. Copies lie in pages of their own. In each format a request owns a ring of `newest` pages (and
one for its first). The engine says which ring a row's request owns; a request without one is read packed.

    holds[copy]   the block that a copy is of       where[block]   its copy

A copy counts if both say so. A block's copy begins when its token 0 is stored and the block is then among its row's
newest, or its first; every token stored later goes to both. A block whose token 0 is stored without being copied, or
that gets a token without being among those, loses its copy: what an earlier owner of the block left is then never read.
So nobody must say when blocks are freed, shared or preempted. Where others write blocks, too (copy one into another,
load one from elsewhere), `Copies.forget` must say that a block is taken again: what they write is read packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....errors import DataError
from ....later import upload
from ..served import Ring

MOST_FORMATS = 4
"""Formats that the pages of a row are copied in, at most."""


@dataclass(frozen=True, eq=False)
class Copied:
    """Copies in one format, for a batch of up to `rows` rows and `tokens` tokens.

    Attributes:
        newest: pages of a request that are copied, its newest; whether also its `first`, in a page of its own.
        where: int32 [num_blocks]; holds: int32 [num_copies]: see above, -1 for none.
        slots: int64 [tokens]: copy * page_size + place of each token of the step, -1 where it is not kept here.
        tail: int32 [2, rows]: tokens that a row reads from these copies and position of the first; table: int32 [rows,
            newest].
    """

    newest: int
    first: bool
    where: torch.Tensor
    holds: torch.Tensor
    slots: torch.Tensor
    tail: torch.Tensor
    table: torch.Tensor

    @property
    def pages(self) -> int:
        """Pages of a ring."""
        return self.newest + self.first

    def wanted(self, entries: np.ndarray, newest: np.ndarray) -> np.ndarray:
        """Return bool [n]: which pages are among the copied ones of their row, by their entry in it and that of its
        newest.
        """
        return (entries > newest - self.newest) | (self.first & (entries == 0))

    def of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the copy of each block (int64, on the state's device), or -1: what holds after `place`, in a few
        launches.
        """
        inside = (blocks > 0) & (blocks < len(self.where))
        copy = torch.where(inside, self.where[torch.where(inside, blocks, 0)], -1).long()
        return torch.where((copy >= 0) & (self.holds[copy.clamp(min=0)] == blocks), copy, -1)


@dataclass(frozen=True, eq=False)
class Copies:
    """State and results of a batch of up to `rows` rows and `tokens` tokens, all on one device.

    Attributes:
        formats: finest first. A row reads its newest pages from the first, as far as its copies reach. It reads those
            behind them from the next. `head` is of the first.
        packed: int32 [2 + formats, rows]: position of the first token that a row reads packed, and its page in the row.
            Entry 2 + i has how many tokens a layer reads packed that has copies in the formats up to i.
        head: int32 [rows]: tokens that are read from the copy of the first page, whose number is in head_table, int32
            [rows, 1].
    """

    formats: tuple[Copied, ...]
    packed: torch.Tensor
    head: torch.Tensor
    head_table: torch.Tensor

    def forget(self, blocks: list[int] | torch.Tensor) -> None:
        """Forget the copies of these blocks, which are used anew.

        Args:
            blocks: numbers, where those past the pool's are ignored; or int64 [n], all in the pool.
        """
        if not isinstance(blocks, torch.Tensor):
            known = len(self.formats[0].where)
            blocks = upload(np.array([block for block in blocks if block < known], np.int64), self.packed.device)
        for f in self.formats:
            f.where.index_fill_(0, blocks.to(self.packed.device), -1)

    @classmethod
    def empty(
        cls, rings: Sequence[Ring], *, count: int, rows: int, tokens: int, num_blocks: int, device: torch.device
    ) -> Copies:
        """Allocate copies for `count` requests, one ring each in every format.

        Raises:
            DataError: more formats than `MOST_FORMATS`, or a first page in another than the finest.
        """
        if not 1 <= len(rings) <= MOST_FORMATS or any(ring.first for ring in rings[1:]):
            raise DataError(
                f"pages are copied in 1 to {MOST_FORMATS} formats, and first pages in the finest; got {list(rings)}"
            )

        def full(*shape: int, value: int = -1, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        formats = tuple(
            Copied(
                ring.newest,
                ring.first,
                where=full(num_blocks),
                holds=full(count * ring.pages),
                slots=full(tokens, dtype=torch.int64),
                tail=full(2, rows, value=0),
                table=full(rows, ring.newest, value=0),
            )
            for ring in rings
        )
        return cls(formats, *(full(*shape, value=0) for shape in ((2 + len(rings), rows), (rows,), (rows, 1))))


@dataclass(eq=False)
class Places:
    """Buffers that `place` keeps and fills.

    Attributes:
        stamps: int32 [num_blocks]: the last step that stored to a block; `step` counts them.
        previous, page_starts: int64 and int32 [tokens] as `ops.store` takes them, each None if nobody asks. Pages of a
            row lie at multiples of page_size.
        copies: or None.
    """

    page_size: int
    stamps: torch.Tensor
    previous: torch.Tensor | None
    page_starts: torch.Tensor | None
    copies: Copies | None
    step: int = 0

    @classmethod
    def empty(
        cls,
        page_size: int,
        *,
        tokens: int,
        num_blocks: int,
        previous: bool,
        copies: Copies | None,
        device: torch.device,
        page_starts: bool = False,
    ) -> Places:
        before = torch.full((tokens,), -1, dtype=torch.int64, device=device) if previous else None
        first = torch.zeros(tokens, dtype=torch.int32, device=device) if page_starts else None
        return cls(page_size, torch.zeros(num_blocks, dtype=torch.int32, device=device), before, first, copies)


def begin(
    places: Places,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    rings: torch.Tensor | None,
) -> None:
    """Count a step, and refuse arguments of `place` that do not fit. Stamps have 31 bits, after which numbers start
    again at 1.

    Raises:
        DataError: which one, and what it should be.
    """
    rows, int32 = len(seq_lens), torch.int32
    for name, x, dtype, count in (
        ("seq_lens", seq_lens, int32, rows),
        ("starts", starts, int32, rows + 1),
        ("slots", slots, torch.int64, len(slots)),
        ("rings (-1: a row without copies)", rings, int32, rows),
    ):
        if x is None and not places.copies:
            continue
        if x is None or x.dtype != dtype or x.shape != (count,) or not x.is_contiguous():
            got = x if x is None else f"{x.dtype} {list(x.shape)}"
            raise DataError(f"{name} must be dense {dtype} [{count}], got {got}")
    if table.dtype != int32 or table.dim() != 2 or len(table) < rows or table.stride(1) != 1:
        raise DataError(
            f"the block table must be int32 [at least {rows}, pages] with dense rows, got {table.dtype}"
            f" {list(table.shape)}"
        )
    rooms = [("previous", places.previous, slots), ("page_starts", places.page_starts, slots)]
    if c := places.copies:
        rooms += [("slots", c.formats[0].slots, slots), ("head", c.head, seq_lens)]
    for name, room, x in rooms:
        if room is not None and len(room) < len(x):
            raise DataError(f"{name} has room for {len(room)}, the step has {len(x)}")
    places.step = places.step % (2**31 - 1) + 1


def place(
    places: Places,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    rings: torch.Tensor | None = None,
) -> None:
    """Fill `places` for a step whose integers are on the host; `cuda.place` does it on a GPU.

    Args:
        seq_lens: int32 [rows], this step's tokens included; 0 for padding.
        starts: int32 [rows + 1]: where each row's tokens begin among those of the step. They are its newest.
        table: int32 [rows, pages]: blocks of each row. Block 0 is nobody's (rows that lost a block to their window have
            it there).
        slots: int64 [tokens]: block * page_size + place of each token, below 0: not stored. A row's tokens lie in
            order.
        rings: int32 [rows], each number once: the ring of copies that a row's request owns and writes over; -1, or past
            those that `holds` has room for: none. None where no page is copied.
    """
    begin(places, seq_lens, starts, table, slots, rings)
    n, rows, size = len(slots), len(seq_lens), places.page_size
    lens, begins, blocks, slot, stamps = (x.numpy() for x in (seq_lens, starts, table, slots, places.stamps))
    token = np.arange(n)
    row = np.searchsorted(begins[1:], token, side="right").clip(max=rows - 1)
    position = lens[row] - begins[row + 1] + token
    block, at, page, newest = slot // size, slot % size, position // size, (lens[row] - 1) // size
    stored = (slot >= 0) & (block < len(stamps)) & (position >= 0) & (page < blocks.shape[1])
    stamps[block[stored]] = places.step
    if places.page_starts is not None:
        places.page_starts.numpy()[:n] = page.clip(min=0) * size
    if places.previous is not None:
        opens = stored & (at == 0) & (page > 0)
        before = np.where(opens, blocks[row, (page - 1).clip(0, blocks.shape[1] - 1)], -1).astype(np.int64)
        inside = (before >= 0) & (before < len(stamps))
        # A row may start behind a prefix that another row of this step only writes now; its mean cannot be read, so the
        # page takes its own.
        foreign = inside & (token == begins[row]) & (stamps[np.where(inside, before, 0)] == places.step)
        places.previous.numpy()[:n] = np.where(foreign, -1, before)
    if places.copies is None or rings is None:
        return
    ring, stored = rings.numpy()[row], stored & (block > 0)
    for c in places.copies.formats:  # which tokens are kept in a format, and where
        where, holds = c.where.numpy(), c.holds.numpy()
        is_first = c.first & (page == 0)
        copy = ring * c.pages + np.where(is_first, c.newest, page % c.newest)
        kept = stored & c.wanted(page, newest) & (ring >= 0) & (copy < len(holds))
        where[block[stored & ~kept]] = -1
        opened = kept & (at == 0)
        holds[copy[opened]] = block[opened]
        where[block[opened]] = copy[opened]
        copy = c.of_blocks(torch.from_numpy(np.where(kept, block, 0))).numpy()
        c.slots.numpy()[:n] = np.where(copy >= 0, copy * size + at, -1)
    _read(places.copies, size, lens, blocks)


def _read(c: Copies, size: int, lens: np.ndarray, blocks: np.ndarray) -> None:
    """Fill in what each row reads from where."""
    head, head_table, packed = (x.numpy() for x in (c.head, c.head_table, c.packed))
    for b, length in enumerate(lens.tolist()):
        pages = min(-(-length // size), blocks.shape[1])
        own = torch.from_numpy(blocks[b, :pages]).long()
        first = int(c.formats[0].of_blocks(own[:1])[0]) if c.formats[0].first and pages else -1
        skipped = int(first >= 0)
        head[b], head_table[b, 0] = min(length, size) * skipped, first if skipped else 0
        packed[:2, b] = skipped * size, skipped
        end = pages
        for i, f in enumerate(c.formats):
            copies, begin = f.of_blocks(own).numpy(), end
            while begin > max(pages - f.newest, int(f.first), skipped) and copies[begin - 1] >= 0:
                begin -= 1
            table, found = f.table.numpy(), copies[begin:end]
            table[b, : len(found)], table[b, len(found) :] = found, 0
            f.tail.numpy()[:, b] = max(min(length, end * size) - begin * size, 0), begin * size
            packed[2 + i, b] = max(min(length, begin * size) - skipped * size, 0)
            end = begin
