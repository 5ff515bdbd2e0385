"""Pages from the files of blobs to where attention reads them: several files at once, on a GPU through pinned memory, each page checked on its way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ..cache import blob
from ..cache.blob import Header, Table
from ..errors import FileFormatError

MOST_READERS = 8
"""Files read at once."""
CHECKED = 1 << 26
"""Bytes of pages on a GPU that are checked at once."""


class DamagedError(FileFormatError):
    """A file of a store that is not what it should be.

    Attributes:
        name: of the file.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True)
class Source:
    """A blob in a file, its header and table read and checked."""

    name: str
    path: str
    header: Header
    table: Table

    def offsets(self, sizes: Sequence[int]) -> list[int]:
        """Where in the file each page begins."""
        found, at = [], blob.HEADER_BYTES + self.header.table_bytes
        for n in sizes:
            found.append(at)
            at += n
        return found


@dataclass(frozen=True)
class Piece:
    """A page to be read: which of a source, and the page [layers, H, head_bytes] that it goes to.

    `heads` are those of the source's page that are wanted, put into heads `into` of the page; None takes the page as it is.
    """

    number: int
    to: torch.Tensor
    heads: slice | None = None
    into: slice | None = None


def readers() -> int:
    """Files to read at once: no more than there are processors."""
    return max(1, min(MOST_READERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def read_pages(open_file, work: Iterable[tuple[Source, Sequence[tuple[int, ...]], list[Piece]]]) -> None:  # type: ignore[no-untyped-def]
    """Read pages of many sources to where they belong.

    Args:
        open_file: name -> a descriptor to read from, or None.
        work: sources, the shape of each of their pages, and what to read of them.

    Raises:
        DamagedError: a source is not what its header says. Pages hold whatever was there.
    """
    jobs = list(work)
    if not jobs:
        return
    device = next((p.to.device for _, _, pieces in jobs for p in pieces), torch.device("cpu"))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))  # the pages may have been somebody else's
    if (n := min(readers(), len(jobs))) == 1:
        for job in jobs:
            _read(open_file, *job, stream)
    else:
        with ThreadPoolExecutor(n) as pool:
            for done in [pool.submit(_read, open_file, *job, stream) for job in jobs]:
                done.result()
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream)
        check_where_they_lie([job for job in jobs if all(p.heads is None for p in job[2])])


def check_where_they_lie(work: Iterable[tuple[Source, Sequence[tuple[int, ...]], list[Piece]]]) -> None:
    """Compare the checksums of pages that were read, on the device that they are on: runs of neighbours at once, one wait for all.

    Raises:
        DamagedError: one is not what its source's table says.
    """
    runs: list[list[tuple[Source, Piece]]] = []
    for source, _, pieces in work:
        for p in pieces:
            last = runs[-1][-1][1].to if runs else None
            joins = last is not None and last.shape == p.to.shape and _joins(last, p.to) and len(runs[-1]) * last.numel() < CHECKED
            runs[-1].append((source, p)) if joins else runs.append([(source, p)])
    if not runs:
        return
    device = runs[0][0][1].to.device
    weights: dict[int, torch.Tensor] = {}
    sums = torch.from_numpy(np.concatenate([source.table.sums[p.number] for run in runs for source, p in run]).view(np.int64)).to(device)
    differ, at = [], 0
    for run in runs:
        first = run[0][1].to
        layers, words = first.shape[0], first[0].numel() // 8
        if words not in weights:
            weights[words] = torch.from_numpy(blob.weights(words).view(np.int64)).to(device)
        held = first.as_strided((len(run), layers, words * 8), (first.numel(), words * 8, 1)).view(torch.int64)
        stated, at = sums[at : at + len(run) * layers].view(len(run), layers), at + len(run) * layers
        differ.append(((held * weights[words]).sum(-1) != stated).any(1))
    if len(bad := torch.cat(differ).nonzero()):
        source, piece = [x for run in runs for x in run][int(bad[0])]
        raise _damage(source, piece.number)


def _joins(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b begins where a ends, in the same memory."""
    return a.data_ptr() + a.numel() == b.data_ptr() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _damage(source: Source, number: int) -> DamagedError:
    page = source.table.pages[number]
    return DamagedError(source.name, f"{source.path} is damaged: {page.pool} page {page.column} of layer group {page.group} has another checksum")


def _read(open_file, source: Source, shapes: Sequence[tuple[int, ...]], pieces: list[Piece], stream) -> None:  # type: ignore[no-untyped-def]
    if not pieces:
        return
    fd = open_file(source.name)
    if fd is None:
        raise DamagedError(source.name, f"{source.path} is gone")
    try:
        sizes = [a * b * c for a, b, c in shapes]
        offsets = source.offsets(sizes)
        if stream is None and all(p.heads is None and p.to.is_contiguous() for p in pieces):
            room, staged = None, [p.to for p in pieces]
        else:
            room = torch.empty(sum(sizes[p.number] for p in pieces), dtype=torch.uint8, pin_memory=stream is not None)
            staged = [x.view(shapes[p.number]) for p, x in zip(pieces, room.split([sizes[p.number] for p in pieces]), strict=True)]
        here = stream is None or any(p.heads is not None for p in pieces)  # checked, or else on the device
        reads = [blob.Read(offsets[p.number], x, source.table.sums[p.number] if here else None) for p, x in zip(pieces, staged, strict=True)]
        if (bad := blob.read_pages(fd, reads)) is not None:
            raise _damage(source, pieces[bad].number)
    finally:
        os.close(fd)
    if room is None:
        return
    with torch.cuda.stream(stream):
        for to, x in _neighbours(pieces, staged):
            to.copy_(x, non_blocking=True)


def _neighbours(pieces: list[Piece], staged: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What to copy where: pages that lie one behind the other at both ends are one copy."""
    runs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for p, x in zip(pieces, staged, strict=True):
        if p.heads is not None or not p.to.is_contiguous():
            runs.append((p.to if p.heads is None else p.to[:, p.into], x if p.heads is None else x[:, p.heads]))
            continue
        to, x = p.to.flatten(), x.flatten()
        last = runs[-1] if runs else None
        if last and last[0].dim() == 1 and _joins(last[0], to) and _joins(last[1], x):
            to, x = (a.as_strided((a.numel() + b.numel(),), (1,)) for a, b in zip(last, (to, x), strict=True))
            runs.pop()
        runs.append((to, x))
    return runs
