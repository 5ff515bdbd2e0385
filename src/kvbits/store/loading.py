"""Pages from the files of blobs to where attention reads them: several files at once, on a GPU through pinned memory, each page checked on its way."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

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


class GoneError(DamagedError):
    """A file that was there a moment ago: somebody evicted it, and nothing is wrong."""


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


class Piece(NamedTuple):
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


Work = tuple[Source, Sequence[tuple[int, ...]], list[Piece]]
"""A source, the shape of each of its pages, and what to read of them."""


class _Job(NamedTuple):
    """A file on its way.

    Attributes:
        reads: what a thread does, without Python's lock.
        first: the piece that each read begins with.
        room: where it is read to, if it goes on from there.
        copies: where to, from which part of `room`.
    """

    source: Source
    pieces: list[Piece]
    reads: list[blob.Read]
    first: Sequence[int]
    room: torch.Tensor | None = None
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


def read_pages(open_file: Callable[[str], int | None], work: Iterable[Work], *, staged: bool | None = None) -> None:
    """Read pages of many sources to where they belong.

    Threads do nothing but read, several files at once; all else is done here meanwhile. Threads that also made tensors and copies spent most of their time
    waiting for Python's lock.

    Args:
        open_file: name -> a descriptor to read from, or None.
        staged: read into other memory first, pinned on a GPU. None: where the pages are on a GPU.

    Raises:
        DamagedError: a source is not what its header says; GoneError: it is not there any more. Pages hold whatever was there.
    """
    jobs = [job for job in work if job[2]]
    if not jobs:
        return
    device = jobs[0][2][0].to.device
    staging = _Staging(device, device.type == "cuda" if staged is None else staged)
    begun: deque[tuple[_Job, int, Future[int | None]]] = deque()
    try:
        with ThreadPoolExecutor(min(readers(), len(jobs))) as pool:
            for source, shapes, pieces in jobs:
                if len(begun) == readers() + 2:
                    _finish(begun, staging)
                if (fd := open_file(source.name)) is None:
                    raise GoneError(source.name, f"{source.path} is gone")
                job = _job(source, shapes, pieces, staging)
                begun.append((job, fd, pool.submit(blob.read_pages, fd, job.reads)))
            check = Check([job for job in jobs if all(p.heads is None for p in job[2])] if staging.stream is not None else [])
            while begun:
                _finish(begun, staging)
    finally:
        for _, fd, _ in begun:
            os.close(fd)  # nobody reads any more: the pool has waited
        staging.close()
    check.run()


class _Staging:
    """Memory that files are read into on their way to pages elsewhere, used again in turns, and on a GPU the stream that they go on in.

    Args:
        whole_pages: pages go this way that could be read where they belong.
    """

    def __init__(self, device: torch.device, whole_pages: bool) -> None:
        self.device, self.whole_pages = device, whole_pages
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the pages may have been somebody else's
        self._used: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def room(self, nbytes: int) -> torch.Tensor:
        """uint8 [at least nbytes] that nobody reads or writes."""
        if len(self._used) > 2:  # not those whose copies were begun just now
            room, copied = self._used.popleft()
            if copied is not None:
                copied.synchronize()
            if room.numel() >= nbytes:
                return room
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def send(self, job: _Job) -> None:
        if job.room is None:
            return
        with torch.cuda.stream(self.stream):
            for to, x in job.copies:
                to.copy_(x, non_blocking=True)
            self._used.append((job.room, None if self.stream is None else self.stream.record_event()))

    def close(self) -> None:
        """What follows waits for all copies, also where a file was damaged: its pages will be somebody else's."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def _finish(begun: deque[tuple[_Job, int, Future[int | None]]], staging: _Staging) -> None:
    """Wait for the file that was begun first, and send it on."""
    job, fd, reading = begun[0]
    bad = reading.result()
    begun.popleft()
    os.close(fd)
    if bad is not None:
        raise _damage(job.source, job.pieces[job.first[bad]].number)
    staging.send(job)


def _job(source: Source, shapes: Sequence[tuple[int, ...]], pieces: list[Piece], staging: _Staging) -> _Job:
    every = range(len(pieces))
    sizes = [a * b * c for a, b, c in shapes]
    starts, sums, own = source.offsets(sizes), source.table.sums, [sizes[p.number] for p in pieces]
    whole = all(p.heads is None and p.to.is_contiguous() for p in pieces)
    if whole and not staging.whole_pages:
        return _Job(source, pieces, [blob.Read(starts[p.number], p.to, sums[p.number]) for p in pieces], every)
    room = staging.room(sum(own))
    at = [0, *itertools.accumulate(own)]
    if whole and staging.stream is not None:  # checked where they go: what lies side by side in the file is read at once
        runs = _runs(every, lambda i: starts[pieces[i - 1].number] + own[i - 1] == starts[pieces[i].number])
        reads = [blob.Read(starts[pieces[a].number], room[at[a] : at[b]].view(1, 1, -1), None) for a, b in runs]
        first: Sequence[int] = [a for a, _ in runs]
    else:
        first, reads = every, [blob.Read(starts[p.number], room[at[i] : at[i + 1]].view(shapes[p.number]), sums[p.number]) for i, p in enumerate(pieces)]
    if whole:
        runs = _runs(every, lambda i: _joins(pieces[i - 1].to, pieces[i].to))
        copies = [(pieces[a].to.as_strided((at[b] - at[a],), (1,)), room[at[a] : at[b]]) for a, b in runs]
    else:
        staged = [r.to for r in reads]
        copies = [(p.to, x) if p.heads is None else (p.to[:, p.into], x[:, p.heads]) for p, x in zip(pieces, staged, strict=True)]
    return _Job(source, pieces, reads, first, room, copies)


def _runs(every: range, joined: Callable[[int], bool]) -> list[tuple[int, int]]:
    """Where runs begin and end: i goes on with that of i - 1 if `joined`."""
    starts = [i for i in every if not i or not joined(i)]
    return list(zip(starts, [*starts[1:], len(every)], strict=True))


class Check:
    """Comparing checksums of pages on the device that they are on: runs of neighbours at once, one wait for all."""

    def __init__(self, work: Iterable[Work]) -> None:
        """What to compare is settled here, before the pages are there."""
        self._runs: list[list[tuple[Source, Piece]]] = []
        last: torch.Tensor | None = None
        for source, _, pieces in work:
            for p in pieces:
                joins = last is not None and last.shape == p.to.shape and _joins(last, p.to) and len(self._runs[-1]) * last.numel() < CHECKED
                self._runs[-1].append((source, p)) if joins else self._runs.append([(source, p)])
                last = p.to
        stated = [source.table.sums[p.number] for run in self._runs for source, p in run]
        self._stated = torch.from_numpy(np.concatenate(stated).view(np.int64)).to(last.device) if last is not None else torch.empty(0)

    def run(self) -> None:
        """
        Raises:
            DamagedError: a page is not what its source's table says.
        """
        weights: dict[int, torch.Tensor] = {}
        differ, at = [], 0
        for run in self._runs:
            first = run[0][1].to
            layers, words = first.shape[0], first[0].numel() // 8
            if words not in weights:
                weights[words] = torch.from_numpy(blob.weights(words).view(np.int64)).to(first.device)
            held = first.as_strided((len(run), layers, words * 8), (first.numel(), words * 8, 1)).view(torch.int64)
            stated, at = self._stated[at : at + len(run) * layers].view(len(run), layers), at + len(run) * layers
            differ.append(((held * weights[words]).sum(-1) != stated).any(1))
        if differ and len(bad := torch.cat(differ).nonzero()):
            source, piece = [x for run in self._runs for x in run][int(bad[0])]
            raise _damage(source, piece.number)


def _joins(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b begins where a ends, in the same memory."""
    return a.data_ptr() + a.numel() == b.data_ptr() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _damage(source: Source, number: int) -> DamagedError:
    page = source.table.pages[number]
    return DamagedError(source.name, f"{source.path} is damaged: {page.pool} page {page.column} of layer group {page.group} has another checksum")
