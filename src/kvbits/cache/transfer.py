"""Sequences leave a cache as blobs and come back, byte for byte: into a file, host memory or a store.

    PART ..   pages of one sequence, `BLOB_TOKENS` tokens of closed pages in each, without those of earlier blobs
    END       its other pages (sinks, tiers, copies, tail) and, as JSON, the page lists that make the sequence of all of
              them

A store has PAGES in the place of PART (`store.pages`). Page lists in blobs name pages by their columns
(`Page.column`). Slots that no sequence shows of pages that fill token by token are written as zeros: they may hold
tokens of sequences freed long ago. So equal sequences give equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..errors import CacheStateError, DataError, FileFormatError, counted
from ..ops.reference.dequantize import section
from ..quant.packing import row_positions
from ..spec import LayerGroup, PageLayout
from . import blob
from .blob import Identity, Kind, Page
from .group import GroupState
from .reading import Memory, Reading, Source, Wanted, read_source
from .sequence import Sequence

BLOB_TOKENS = 256
"""Tokens of the closed pages in one blob."""
MOST_COUNT = 1 << 40
"""Limit of pages, tokens and stored numbers."""


# -- leaving -----------------------------------------------------------------------------------------------------------


def run_of(group: LayerGroup) -> str:
    """Return the pool of the pages that never change again once they are full, oldest first."""
    return "tail" if group.fills_pages else "closed"


def describe(sequences: Rows[Sequence], columns: Rows[Mapping[tuple[str, int], int]]) -> bytes:
    """Write page lists of one sequence, of each layer group, as JSON.

    Args:
        columns: per layer group, the column of each page by (pool, id).
    """
    found = []
    for s, column in zip(sequences, columns, strict=True):
        s = s.clone()
        for name, ids in s.pages().items():
            s.renumber(name, [column[name, i] for i in ids])
        said = dataclasses.asdict(s)
        if not s.copies:  # as texts from before copies
            del said["copies"]
        found.append(said)
    return json.dumps({"groups": found}).encode()


def blobs_of(
    groups: list[GroupState], rows: Rows[int], identity: Identity, *, copied: bool = False
) -> Iterator[list[memoryview]]:
    """Make blobs of sequences, those of one row after the other; pages that rows share come once.

    Args:
        copied: into memory of their own; otherwise pages on the host stay where they lie.
    """
    numbers: list[dict[tuple[str, int], int]] = [{} for _ in groups]
    counts: Counter[tuple[int, str]] = Counter()
    shown = shown_slots(groups, rows)

    def new(held: list[tuple[int, str, int]]) -> list[tuple[Page, int]]:
        found = []
        for g, pool, page_id in held:
            if (pool, page_id) not in numbers[g]:
                numbers[g][pool, page_id] = counts[g, pool]
                found.append((Page(g, pool, counts[g, pool]), page_id))
                counts[g, pool] += 1
        return found

    for row in rows:
        sequences = [state.sequences[row] for state in groups]
        held = [s.pages() for s in sequences]
        runs = [held[g].pop(run_of(state.group)) for g, state in enumerate(groups)]
        steps = [max(1, BLOB_TOKENS // state.group.page_size) for state in groups]
        for i in range(max(-(-len(run) // n) for run, n in zip(runs, steps, strict=True))):
            part = [
                (g, run_of(state.group), page)
                for g, (state, run, n) in enumerate(zip(groups, runs, steps, strict=True))
                for page in run[i * n : (i + 1) * n]
            ]
            if pages := new(part):
                yield encode(Kind.PART, identity, groups, shown, pages, copied)
        pages = new([(g, name, page) for g, of in enumerate(held) for name, ids in of.items() for page in ids])
        state = describe(sequences, numbers)
        yield encode(Kind.END, identity, groups, shown, pages, copied, tokens=sequences[0].length, state=state)


def encode(
    kind: Kind,
    identity: Identity,
    groups: list[GroupState],
    shown: Mapping[tuple[int, str, int], int],
    pages: Rows[tuple[Page, int]],
    copied: bool = False,
    **fields: Any,
) -> list[memoryview]:
    """Make a blob of pages, given with their ids, as `blob.encode` does.

    Args:
        shown: see `shown_slots`.
        copied: see `blobs_of`.
        fields: as `blob.encode` takes them.
    """
    blocks = []
    for page, page_id in pages:
        pool = groups[page.group].pools[page.pool]
        block = pool.block(page_id)
        if (n := shown.get((page.group, page.pool, page_id))) is not None:
            block = shown_part(block, pool.layout, n)
        blocks.append(blank(block, pool.layout))
    return blob.encode(kind, identity, [page for page, _ in pages], _on_host(blocks, copied), **fields)


def shown_slots(groups: list[GroupState], rows: Rows[int]) -> dict[tuple[int, str, int], int]:
    """Count the most tokens that a sequence of these rows shows of each page that fills token by token.

    Returns:
        Tokens by (group, pool, id).
    """
    found: dict[tuple[int, str, int], int] = {}
    for g, state in enumerate(groups):
        for s in (state.sequences[row] for row in rows):
            sinks = [min(s.length, state.group.num_sink_tokens)]
            for pool, ids, lengths in (("sink", s.sink, sinks), ("tail", s.tail, s.tail_lengths)):
                for page_id, n in zip(ids, lengths, strict=False):
                    found[g, pool, page_id] = max(n, found.get((g, pool, page_id), 0))
    return found


def _on_host(blocks: list[torch.Tensor], copied: bool) -> Iterable[torch.Tensor]:
    """Return the same pages on the host, contiguous."""
    if not blocks or blocks[0].device.type == "cpu":
        return (b.clone() for b in blocks) if copied else blocks
    room = torch.empty(sum(b.numel() for b in blocks), dtype=torch.uint8, pin_memory=True, device="cpu")
    found = [x.view(b.shape) for x, b in zip(room.split([b.numel() for b in blocks]), blocks, strict=True)]
    for to, b in zip(found, blocks, strict=True):
        to.copy_(b, non_blocking=True)
    torch.cuda.synchronize(blocks[0].device)
    return found


def shown_part(block: torch.Tensor, layout: PageLayout, shown: int) -> torch.Tensor:
    """Put zeros into a copy of a page [layers, H, head_bytes] at slots that no sequence shows, which may hold tokens of
    sequences freed long ago. Return the page itself where all slots are shown.
    """
    if shown == layout.page_size:
        return block
    block = block.clone()
    for name, s in layout.sections.items():
        x = section(block, layout, name)
        if name.endswith("_raw"):
            x[..., shown:, :] = 0
        elif "_plane" in name:
            x.flatten(-2)[..., row_positions(layout.page_size, s.shape[1], name[0])[shown:].flatten().to(x.device)] = 0
        elif not name.endswith("_mean"):
            x[..., shown:] = 0
    return block


def blank(block: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Put zeros into a copy of a page [layers, H, head_bytes] between and behind its sections, where nobody ever
    writes. Return the page itself where sections fill it.
    """
    ends = [s.offset + s.nbytes for s in layout.sections.values()]
    starts = [*[s.offset for s in layout.sections.values()][1:], layout.head_bytes]
    gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
    if gaps:
        block = block.clone()
        for end, start in gaps:
            block[..., end:start] = 0
    return block


# -- coming back -------------------------------------------------------------------------------------------------------


def parse(state: bytes, groups: Rows[LayerGroup], what: str) -> list[Sequence]:
    """Read the page lists of a sequence, of each layer group. They must be what a cache could have made, since kernels
    read memory by these numbers. Whether the pages exist is not checked.

    Raises:
        FileFormatError: the bytes are not such JSON, or hold invalid numbers.
    """
    try:
        described = parse_json(state)["groups"]
        found = [Sequence(**s) for s in described]
        for g, s in zip(groups, found, strict=True):
            s.copies = [tuple(copies) for copies in s.copies]
            _check(g, s)
        if len({s.length for s in found}) > 1:
            raise ValueError("layers disagree about its length")
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise FileFormatError(f"{what} ends an invalid sequence ({type(error).__name__}: {error})") from error


def parse_json(text: bytes) -> Any:
    """Read JSON as `json.loads` does; refuse numbers that are none with a ValueError."""

    def refuse(name: str) -> None:
        raise ValueError(f"the number {name}")

    return json.loads(text, parse_constant=refuse)


def is_count(n: object) -> bool:
    return type(n) is int and 0 <= n <= MOST_COUNT


def _check(g: LayerGroup, s: Sequence) -> None:
    lists: list[Any] = [s.sink, s.closed, s.closed_lengths, s.tail, s.tail_lengths, s.boundaries, s.lost, s.young]
    if not all(type(x) is list for x in lists) or len(s.sink) > 1:
        raise ValueError("page lists that are not lists")
    numbers = [s.length, s.released, s.dropped, s.speculated, s.closed_since, s.residual_length]
    if not all(is_count(n) for n in numbers + [n for x in lists for n in x if x is not s.closed or n is not None]):
        raise ValueError("page lists that hold something else than counts")
    if not len(s.young) == len(s.boundaries) == len(s.lost) == len(g.tiers):
        raise ValueError(f"other tiers than the {len(g.tiers)} of the scheme")
    if s.young != sorted(s.young) or any(n > len(s.closed) for n in s.young):
        raise ValueError(f"tiers that do not fit its {len(s.closed)} closed pages")
    _check_copies(g, s)
    for ids, lengths in ((s.closed, s.closed_lengths), (s.tail, s.tail_lengths)):
        if len(ids) != len(lengths) or any(not 0 < n <= g.page_size for n in lengths):
            raise ValueError("page lengths that do not fit its pages")
    if s.released and g.geometry.sliding_window is None:
        raise ValueError("released tokens, but no sliding window")
    if max(s.dropped, s.released, s.speculated, s.closed_since) > s.length:
        raise ValueError("left tokens behind that it cannot have")
    sinks = min(s.length, g.num_sink_tokens) if s.sink else 0
    if s.released + sinks + sum(s.closed_lengths) + s.tail_tokens != s.length:
        raise ValueError(f"pages that do not add up to its {s.length} tokens")
    if any(n != g.page_size for n in s.tail_lengths[:-1]):
        raise ValueError("a tail page that is not full before the last one")


def _check_copies(g: LayerGroup, s: Sequence) -> None:
    if len(s.copies) != len(g.copies):
        raise ValueError(f"{len(s.copies)} kinds of copies where the scheme has {len(g.copies)}")
    lengths = [len(copies) for copies in s.copies]
    if lengths != sorted(lengths) or any(
        n > min(len(s.closed), m) for n, m in zip(lengths, g.copied_pages, strict=True)
    ):
        raise ValueError(f"copies that do not fit its {len(s.closed)} closed pages")
    for copies in s.copies:
        of = s.closed[len(s.closed) - len(copies) :]
        if any(page is not None if own is None else not is_count(page) for page, own in zip(copies, of, strict=True)):
            raise ValueError("copies of pages that it does not have")


@dataclass(frozen=True)
class Plan:
    """Sequences and the blobs that have their pages.

    Attributes:
        made: of each sequence and layer group, the page lists; pages by their columns.
        blobs: each in one source, or in several that have a part of the kv heads.
    """

    made: Rows[list[Sequence]]
    blobs: Rows[list[Source]]

    @cached_property
    def at(self) -> dict[Page, tuple[int, int]]:
        """Return the blob that each page is in, and its number there; the newest that has it counts."""
        return {page: (i, n) for i, blob in enumerate(self.blobs) for n, page in enumerate(blob[0].table.pages)}

    @cached_property
    def pages(self) -> list[Page]:
        """Return the pages of the sequences, each once."""
        found = (
            Page(g, pool, column)
            for sequences in self.made
            for g, s in enumerate(sequences)
            for pool, columns in s.pages().items()
            for column in columns
        )
        return list(dict.fromkeys(found))

    @property
    def is_whole(self) -> bool:
        """Return whether the blobs have all pages."""
        return self.at.keys() >= set(self.pages)


def admit(groups: list[GroupState], rows: Rows[int], plan: Plan, identity: Identity, **how: Any) -> Reading:
    """Give sequences pages of their own in empty rows. Return what reads them.

    Whoever calls this takes everything back where it, or the reading, fails.

    Args:
        how: as `Reading` takes it.

    Raises:
        PoolFullError: pages are missing.
    """
    ids: dict[Page, int] = {}
    for (g, name), n in Counter((page.group, page.pool) for page in plan.pages).items():
        groups[g].pools[name].reserve(n)
    for row, sequences in zip(rows, plan.made, strict=True):
        for g, (state, s) in enumerate(zip(groups, sequences, strict=True)):
            s = s.clone()
            for name, columns in s.pages().items():
                allocator = state.pools[name].allocator
                for page in (Page(g, name, column) for column in columns):
                    if page in ids:
                        allocator.share([ids[page]])
                    else:
                        ids[page] = allocator.allocate()
                s.renumber(name, [ids[Page(g, name, column)] for column in columns])
            state.replace(row, s)
    wanted: list[list[Wanted]] = [[] for _ in plan.blobs]
    for page, (i, number) in plan.at.items():
        if page in ids:
            wanted[i].append(Wanted(number, groups[page.group].pools[page.pool], ids[page]))
    work = [
        (source, sorted(pages, key=lambda x: x.number))
        for sources, pages in zip(plan.blobs, wanted, strict=True)
        for source in sources
    ]
    return Reading(work, identity, groups[0].pools["tail"].device, **how)


def planned(sources: Rows[Source], groups: Rows[LayerGroup], count: int, what: str) -> Plan:
    """Find the sequences, so many of them, that blobs of `blobs_of` hold.

    Raises:
        FileFormatError: what no cache could have written.
    """
    if (ends := sum(source.header.kind == Kind.END for source in sources)) != count:
        truncated = "is truncated: it " if ends < count else ""
        raise FileFormatError(f"{what} {truncated}holds {ends} of {counted(count, 'sequence')}")
    counts: Counter[tuple[int, str]] = Counter()
    made = []
    for source in sources:
        for page in source.table.pages:
            if page.column != counts[page.group, page.pool]:
                raise FileFormatError(f"{source.path} holds {page}, which is not the next one")
            counts[page.group, page.pool] += 1
        if source.header.kind == Kind.END:
            made.append(parse(source.table.state, groups, source.path))
        elif source.header.kind != Kind.PART:
            raise FileFormatError(f"{source.path} is a blob of kind {source.header.kind.name} where PART belongs")
    plan = Plan(made, [[source] for source in sources])
    if plan.at.keys() != set(plan.pages):
        raise FileFormatError(f"{what} has other pages than its sequences name")
    return plan


# -- host memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence outside its cache, in host memory.

    Attributes:
        blobs: as `blobs_of` made them, each as pieces uint8 [n].
        num_tokens: of the sequence.
        beyond_ids: as in `PagedCache`.
    """

    blobs: list[list[np.ndarray]]
    num_tokens: int
    beyond_ids: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(len(piece) for pieces in self.blobs for piece in pieces)


def swap_out(
    groups: list[GroupState], row: int, identity: Identity, beyond_ids: tuple[str, ...] = ()
) -> SwappedSequence:
    """Copy a sequence to the host and free its pages.

    Pages that other sequences share are copied, not taken from them; swapped in, the sequence has pages of its own.

    Raises:
        CacheStateError: tokens are speculative, which another cache could not take back.
    """
    if any(g.keep_past for g in groups):
        raise CacheStateError(
            "swap_out() while tokens are speculative; crop() to the present length first, which ends the speculation"
        )
    made = blobs_of(groups, [row], identity, copied=True)
    blobs = [[np.frombuffer(piece, np.uint8) for piece in pieces] for pieces in made]
    length = groups[0].sequences[row].length
    for g in groups:
        g.free(row)
    return SwappedSequence(blobs, length, beyond_ids)


def swap_in(groups: list[GroupState], row: int, swapped: SwappedSequence, identity: Identity) -> None:
    """Copy a swapped sequence into pages of an empty row of a cache of an equal identity.

    Whoever calls this takes everything back where it fails.

    Raises:
        DataError: the sequence is of another spec, calibration or model.
        FileFormatError: a page is damaged.
        CacheStateError: the row holds tokens.
        PoolFullError: pages are missing.
    """
    if not isinstance(swapped, SwappedSequence):
        raise DataError(f"{type(swapped).__name__} is not a swapped sequence; give what swap_out() returned")
    if length := groups[0].sequences[row].length:
        raise CacheStateError(
            f"sequence {row} holds {counted(length, 'token')}; swap into an empty row, or free({row}) first"
        )
    own, what = [g.group for g in groups], "the swapped sequence"
    try:
        sources = [read_source(Memory(pieces), "", what, identity, own) for pieces in swapped.blobs]
        plan = planned(sources, own, 1, what)
    except FileFormatError as error:
        raise DataError(f"{error}; swap it into a cache of the same spec, calibration and model") from error
    admit(groups, [row], plan, identity).run()
