"""Pages from the files of blobs to where attention reads them: several files at once, on a GPU through pinned memory, each layer of each page checked before
it goes on."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..cache import blob
from ..cache.arrivals import Arrivals
from ..cache.blob import Header, Table
from ..errors import FileFormatError
from ..spec import LayerGroup

MOST_READERS = 8
"""Files read at once."""
PARTS = 4
"""Runs of layers that come one after the other where the first may be used before the last are there."""
MOST_FILES = 256
"""Files that are held open for that; prefixes of more come in one part."""


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
Part = Sequence[range]
"""Some of the layers: of each layer group, which of its own."""


def parts_of(groups: Sequence[LayerGroup], num_layers: int, parts: int) -> tuple[list[Part], list[int]]:
    """Layers cut into so many runs, or fewer: of each the part, and the layer behind its last."""
    if any(list(g.layers) != sorted(g.layers) for g in groups):
        parts = 1
    ends = sorted({num_layers * (i + 1) // parts for i in range(parts)} - {0})
    starts = [0, *ends[:-1]]
    return [[range(bisect_left(g.layers, a), bisect_left(g.layers, b)) for g in groups] for a, b in zip(starts, ends, strict=True)], ends


class _Job(NamedTuple):
    """Some layers of the pages of a file on their way.

    Attributes:
        numbers: of the page that each read is of.
        reads: what a thread does, without Python's lock.
        room: memory that they go through on their way; None for none.
        copies: where to, from which part of `room`.
    """

    source: Source
    numbers: list[int]
    reads: list[blob.Read]
    room: torch.Tensor | None
    copies: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class _File:
    """A file that is held open."""

    work: Work
    fd: int


class Loader:
    """Reads pages of many sources to where they belong.

    Threads do nothing but read and compare checksums, several files at once; all else is done by whoever calls `add` and `finish`. Threads that also made
    tensors and copies spent most of their time waiting for Python's lock. Closing it waits for them; then nothing is written any more, and what the current
    stream of a GPU is given comes after all copies.

    Args:
        open_file: name -> a descriptor to read from, or None.
        device: of the pages.
        parts: in the order in which they come; None for all layers at once.
        staged: read into other memory first, pinned on a GPU. None: where the pages are on a GPU.
    """

    def __init__(
        self, open_file: Callable[[str], int | None], device: torch.device, parts: Sequence[Part] | None = None, *, staged: bool | None = None
    ) -> None:  # fmt: skip
        self._open, self._parts = open_file, parts
        self._staging = _Staging(device, device.type == "cuda" if staged is None else staged)
        self._pool = ThreadPoolExecutor(readers(), "kvbits-reader")
        self._begun: deque[tuple[_Job, _File, Future[int | None]]] = deque()
        self._files: list[_File] = []
        self._stopped = threading.Event()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, work: Work) -> None:
        """Begin to read the first layers of some pages.

        Raises:
            DamagedError: of this source or one before; GoneError: it is not there any more. Pages hold whatever was there.
        """
        source, _, pieces = work
        if not pieces:
            return
        if (fd := self._open(source.name)) is None:
            raise GoneError(source.name, f"{source.path} is gone")
        self._files.append(_File(work, fd))
        self._begin(self._files[-1], 0)

    def finish(self, came: Callable[[int, torch.cuda.Event | None], None] = lambda part, event: None) -> None:
        """Read all that is left.

        Args:
            came: told of each part when all of it is there, and of the event that a stream has to wait for.

        Raises:
            DamagedError: as in `add`.
        """
        files = self._files[:]
        for part in range(len(self._parts or [0])):
            if part:
                self._finish(0)
                came(part - 1, self._staging.event())
                for file in files:
                    self._begin(file, part)
        self._finish(0)
        came(len(self._parts or [0]) - 1, self._staging.event())

    def stop(self) -> None:
        """Have `finish`, in another thread, end early: what is left does not come, and parts that are not there are not told of."""
        self._stopped.set()

    def close(self) -> None:
        self._wind_up(self._staging.close)

    def _wind_up(self, wait: Callable[[], None]) -> None:
        self._pool.shutdown(cancel_futures=True)
        wait()  # before the pages are let go of
        for file in self._files:
            os.close(file.fd)
        self._files, self._begun = [], deque()

    def _begin(self, file: _File, part: int) -> None:
        self._finish(readers() + 1)
        job = _job(file.work, None if self._parts is None else self._parts[part], self._staging)
        self._begun.append((job, file, self._pool.submit(blob.read_pages, file.fd, job.reads)))

    def _finish(self, left: int) -> None:
        """Wait for the files that were begun first, and send them on, until no more than so many are under way."""
        while len(self._begun) > left:
            if self._stopped.is_set():
                raise StoppedError
            job, file, reading = self._begun[0]
            bad = reading.result()
            self._begun.popleft()
            if self._parts is None:
                self._files.remove(file)
                os.close(file.fd)
            if bad is not None:
                raise _damage(job.source, job.numbers[bad])
            self._staging.send(job)

    def in_thread(self, arrivals: Arrivals, ends: Sequence[int]) -> Callable[[], None]:
        """What finishes and closes it in another thread, and tells `arrivals` of layers that are there, or of what ended it.

        Args:
            ends: of each part, the layer behind its last.
        """

        def run() -> None:
            try:
                self.finish(lambda part, event: arrivals.came(ends[part], event))
            except BaseException as error:  # whoever waits for the layers raises it
                arrivals.failed(error)
            finally:
                self._wind_up(self._staging.wait)

        return run


class StoppedError(Exception):
    """Nobody wants the pages any more."""


def read_pages(open_file: Callable[[str], int | None], work: Iterable[Work], *, staged: bool | None = None) -> None:
    """Read pages of many sources to where they belong, see `Loader`.

    Raises:
        DamagedError: a source is not what its header says; GoneError: it is not there any more. Pages hold whatever was there.
    """
    jobs = [job for job in work if job[2]]
    if not jobs:
        return
    with Loader(open_file, jobs[0][2][0].to.device, staged=staged) as loader:
        for job in jobs:
            loader.add(job)
        loader.finish()


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
            self._used.append((job.room, self.event()))

    def event(self) -> torch.cuda.Event | None:
        """What comes after all copies that were begun."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self) -> None:
        """For all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """What follows waits for all copies, also where a file was damaged: its pages will be somebody else's."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def _job(work: Work, part: Part | None, staging: _Staging) -> _Job:
    source, shapes, pieces = work
    starts = source.offsets([a * b * c for a, b, c in shapes])
    listed: list[tuple[Piece, int, int, range]] = []  # where in the file, bytes of a layer, layers
    for p in pieces:
        layers, heads, head_bytes = shapes[p.number]
        of = range(layers) if part is None else part[source.table.pages[p.number].group]
        if of:
            listed.append((p, starts[p.number] + of.start * heads * head_bytes, heads * head_bytes, of))
    numbers = [p.number for p, *_ in listed]
    wanted = [source.table.sums[p.number][of.start : of.stop] for p, _, _, of in listed]
    to = [p.to[of.start : of.stop] for p, _, _, of in listed]
    if not staging.whole_pages and all(p.heads is None and p.to.is_contiguous() for p, *_ in listed):
        return _Job(source, numbers, [blob.Read(at, x, s) for (_, at, _, _), x, s in zip(listed, to, wanted, strict=True)], None, [])
    sizes = [nbytes * len(of) for _, _, nbytes, of in listed]
    room = staging.room(sum(sizes))
    staged = [x.view(len(of), *shapes[p.number][1:]) for x, (p, _, _, of) in zip(room[: sum(sizes)].split(sizes), listed, strict=True)]
    reads = [blob.Read(at, x, s) for (_, at, _, _), x, s in zip(listed, staged, wanted, strict=True)]
    copies = [(y, x) if p.heads is None else (y[:, p.into], x[:, p.heads]) for y, x, (p, *_) in zip(to, staged, listed, strict=True)]
    return _Job(source, numbers, reads, room, copies)


def _damage(source: Source, number: int) -> DamagedError:
    page = source.table.pages[number]
    return DamagedError(source.name, f"{source.path} is damaged: {page.pool} page {page.column} of layer group {page.group} has another checksum")
