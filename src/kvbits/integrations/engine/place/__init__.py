"""Once a step of somebody else's engine, for all layers: which page is before one that opens, which tokens are also
kept raw, and what each row reads.

An engine that owns pages (blocks) gives lengths and block tables on the device. A row's newest pages and its first can
have a **copy** in 16 bits beside the packed one, which is complete all the same: whoever finds no copy reads the packed
page, so a lost copy costs accuracy and nothing else. Copies lie in pages of their own: a ring of `newest` (and one for
the first page) for each of so many requests. The engine says which ring a row's request owns; a request without one is
read packed.

    holds[copy]   the block that a copy is of       where[block]   its copy

A copy counts if both say so. A block's copy begins when its token 0 is stored and the block is then among its row's
newest, or its first; every token stored later goes to both. A block whose token 0 is stored without being copied, or
that gets a token without being among those, loses its copy: what an earlier owner of the block left is then never read.
So nobody must say when blocks are freed, shared or preempted. Where others write blocks, too (copy one into another,
load one from elsewhere), `Copies.forget` must say that a block is taken again: what they write is read packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ....errors import DataError
from ....later import upload


@dataclass(frozen=True, eq=False)
class Copies:
    """State and results of a batch of up to `rows` rows and `tokens` tokens, all on one device.

    Attributes:
        newest: pages of a request that are copied, its newest; whether also its `first`.
        where: int32 [num_blocks]; holds: int32 [num_copies]: see above, -1 for none.
        slots: int64 [tokens]: copy * page_size + place of each token of the step, -1 where it is not kept raw.
        packed: int32 [3, rows]: of each row tokens that are read packed, position of the first, its page in the row.
        head: int32 [rows]: tokens that are read from the copy of the first page, whose number is in head_table, int32
            [rows, 1].
        tail: int32 [2, rows]: tokens that are read from copies of the newest pages and position of the first;
            tail_table: int32 [rows, newest].
    """

    newest: int
    first: bool
    where: torch.Tensor
    holds: torch.Tensor
    slots: torch.Tensor
    packed: torch.Tensor
    head: torch.Tensor
    head_table: torch.Tensor
    tail: torch.Tensor
    tail_table: torch.Tensor

    def wanted(self, entries: np.ndarray, newest: np.ndarray) -> np.ndarray:
        """bool [n]: which pages are among the copied ones of their row, by their entry in it and that of its newest."""
        return (entries > newest - self.newest) | (self.first & (entries == 0))

    def of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The copy of each block (int64, on the state's device), or -1: what holds after `place`, in a few launches."""
        inside = (blocks > 0) & (blocks < len(self.where))
        copy = torch.where(inside, self.where[torch.where(inside, blocks, 0)], -1).long()
        return torch.where((copy >= 0) & (self.holds[copy.clamp(min=0)] == blocks), copy, -1)

    def forget(self, blocks: list[int]) -> None:
        """These blocks begin a new life, and what copies they had are of their past one."""
        own = np.array([block for block in blocks if block < len(self.where)], np.int64)
        self.where.index_fill_(0, upload(own, self.where.device), -1)

    @classmethod
    def empty(
        cls, newest: int, first: bool, *, rings: int, rows: int, tokens: int, num_blocks: int, device: torch.device
    ) -> Copies:
        def full(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        state = full(num_blocks), full(rings * (newest + first)), full(tokens, dtype=torch.int64)
        results = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in ((3, rows), (rows,), (rows, 1), (2, rows), (rows, newest))
        )
        return cls(newest, first, *state, *results)


@dataclass(eq=False)
class Places:
    """Buffers that `place` keeps and fills.

    Attributes:
        stamps: int32 [num_blocks]: the last step that stored to a block; `step` counts them.
        previous, starts: int64 and int32 [tokens] as `ops.store` takes them, each None if nobody asks. Pages of a
            row lie at multiples of page_size.
        copies: or None.
    """

    page_size: int
    stamps: torch.Tensor
    previous: torch.Tensor | None
    starts: torch.Tensor | None
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
        starts: bool = False,
    ) -> Places:
        before = torch.full((tokens,), -1, dtype=torch.int64, device=device) if previous else None
        first = torch.zeros(tokens, dtype=torch.int32, device=device) if starts else None
        return cls(page_size, torch.zeros(num_blocks, dtype=torch.int32, device=device), before, first, copies)


def check(
    places: Places,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    rings: torch.Tensor | None,
) -> None:
    """Refuse arguments of `place` that do not fit.

    Raises:
        DataError: which one, and what it should be.
    """
    rows = len(seq_lens)
    given = {"seq_lens": (seq_lens, (rows,)), "starts": (starts, (rows + 1,)), "rings": (rings, (rows,))}
    if places.copies and rings is None:
        raise DataError(
            f"rings must be dense int32 [{rows}] where pages are copied, got None; -1 is a row without copies"
        )
    for name, (x, shape) in given.items():
        if x is not None and (x.dtype != torch.int32 or x.shape != shape or not x.is_contiguous()):
            raise DataError(f"{name} must be dense int32 {list(shape)}, got {x.dtype} {list(x.shape)}")
    if table.dtype != torch.int32 or table.dim() != 2 or len(table) < rows or table.stride(1) != 1:
        raise DataError(
            f"the block table must be int32 [at least {rows}, pages] with dense rows, got {table.dtype}"
            f" {list(table.shape)}"
        )
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise DataError(f"slots must be dense int64 [tokens], got {slots.dtype} {list(slots.shape)}")
    of_tokens = [("previous", places.previous, slots), ("starts", places.starts, slots)]
    rooms = [
        *of_tokens,
        *((n, getattr(places.copies, n), x) for n, x in (("slots", slots), ("head", seq_lens)) if places.copies),
    ]
    for name, room, x in rooms:
        if room is not None and len(room) < len(x):
            raise DataError(f"{name} has room for {len(room)}, the step has {len(x)}")


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
    check(places, seq_lens, starts, table, slots, rings)
    places.step += 1
    n, rows, size = len(slots), len(seq_lens), places.page_size
    lens, begins, blocks, stamps = (x.numpy() for x in (seq_lens, starts, table, places.stamps))
    token = np.arange(n)
    row = np.searchsorted(begins[1:], token, side="right").clip(max=rows - 1)
    position = lens[row] - begins[row + 1] + token
    block, at, page, newest = slots.numpy() // size, slots.numpy() % size, position // size, (lens[row] - 1) // size
    stored = (slots.numpy() >= 0) & (block < len(stamps)) & (position >= 0) & (page < blocks.shape[1])
    stamps[block[stored]] = places.step
    if places.starts is not None:
        places.starts.numpy()[:n] = page.clip(min=0) * size
    if places.previous is not None:
        opens = stored & (at == 0) & (page > 0)
        before = np.where(opens, blocks[row, (page - 1).clip(0, blocks.shape[1] - 1)], -1).astype(np.int64)
        inside = (before >= 0) & (before < len(stamps))
        # A row may start behind a prefix that another row of this step only writes now; its mean cannot be read, so the
        # page takes its own.
        foreign = inside & (token == begins[row]) & (stamps[np.where(inside, before, 0)] == places.step)
        places.previous.numpy()[:n] = np.where(foreign, -1, before)
    if places.copies:
        assert rings is not None  # checked
        _copy(places.copies, size, rings.numpy()[row], block, at, page, newest, stored)
        _read(places.copies, size, lens, blocks)


def _copy(
    c: Copies,
    size: int,
    ring: np.ndarray,
    block: np.ndarray,
    at: np.ndarray,
    page: np.ndarray,
    newest: np.ndarray,
    stored: np.ndarray,
) -> None:
    """Fill in which tokens [n] are kept raw, and where."""
    where, holds = c.where.numpy(), c.holds.numpy()
    stored = stored & (block > 0)
    is_first = c.first & (page == 0)
    kept = stored & (is_first | (page > newest - c.newest))
    copy = ring * (c.newest + c.first) + np.where(is_first, c.newest, page % c.newest)
    kept &= (ring >= 0) & (copy < len(holds))
    where[block[stored & ~kept]] = -1
    opened = kept & (at == 0)
    holds[copy[opened]] = block[opened]
    where[block[opened]] = copy[opened]
    copy = c.of_blocks(torch.from_numpy(np.where(kept, block, 0))).numpy()
    c.slots.numpy()[: len(ring)] = np.where(copy >= 0, copy * size + at, -1)


def _read(c: Copies, size: int, lens: np.ndarray, blocks: np.ndarray) -> None:
    """Fill in what each row reads from where."""
    head, head_table, tail, tail_table, packed = (
        x.numpy() for x in (c.head, c.head_table, c.tail, c.tail_table, c.packed)
    )
    for b, length in enumerate(lens.tolist()):
        copies = c.of_blocks(torch.from_numpy(blocks[b]).long()).numpy() if length else np.zeros(1, np.int64)
        skipped = int(c.first and length > 0 and copies[0] >= 0)
        newest = min(-(-length // size), len(copies)) - 1
        begin = newest + 1
        while begin > max(newest + 1 - c.newest, int(c.first), 0) and copies[begin - 1] >= 0:
            begin -= 1
        head[b], head_table[b, 0] = min(length, size) * skipped, copies[0] if skipped else 0
        found = copies[begin : newest + 1]
        tail_table[b, : len(found)], tail_table[b, len(found) :] = found, 0
        tail[:, b] = max(length - begin * size, 0), begin * size
        packed[:, b] = max(min(length, begin * size) - skipped * size, 0), skipped * size, skipped
