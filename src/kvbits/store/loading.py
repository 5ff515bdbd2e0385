"""Pages from the files of blobs to where attention reads them: several files at once, on a GPU through pinned memory,
each layer of each page checked before it goes on.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..cache import blob
from ..cache.arrivals import Arrivals
from ..cache.blob import PIECE, Header, Table
from ..errors import FileFormatError
from ..runs import cores
from ..spec import LayerGroup

MOST_READERS = 8
"""Threads that read at once."""
CALLS = 2
"""Batches that are read at once, while one more is sent on."""
BATCH = 1 << 25
"""Bytes that are read together."""
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

    `heads` are those of the source's page that are wanted, put into heads `into` of the page; None takes the page as it
    is.
    """

    number: int
    to: torch.Tensor
    heads: slice | None = None
    into: slice | None = None


def readers() -> int:
    """Threads that read at once: no more than there are processors."""
    return max(1, min(MOST_READERS, cores()))


Work = tuple[Source, Sequence[tuple[int, ...]], list[Piece]]
"""A source, the shape of each of its pages, and what to read of them."""
Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Where to, from where."""
Part = Sequence[range]
"""Some of the layers: of each layer group, which of its own."""


def parts_of(groups: Sequence[LayerGroup], num_layers: int, parts: int) -> tuple[list[Part], list[int]]:
    """Layers cut into so many runs, or fewer: of each the part, and the layer behind its last."""
    if any(list(g.layers) != sorted(g.layers) for g in groups):
        parts = 1
    ends = sorted({num_layers * (i + 1) // parts for i in range(parts)} - {0})
    starts = [0, *ends[:-1]]
    return [
        [range(bisect_left(g.layers, a), bisect_left(g.layers, b)) for g in groups]
        for a, b in zip(starts, ends, strict=True)
    ], ends


@dataclass(eq=False)
class _Batch:
    """Pages of some files that are read together.

    Attributes:
        pieces: and the source of each.
        rows: the same for whoever reads, `cache.blob.PIECE` [n]: all layers, and where they belong.
        groups: int64 [n], the layer group of each.
        storages: int64 [n], which memory each belongs to.
    """

    pieces: list[tuple[Source, Piece]]
    rows: np.ndarray
    groups: np.ndarray
    storages: np.ndarray
    fds: list[int]


class _Begun(NamedTuple):
    """Some layers of a batch on their way.

    Attributes:
        chosen: of the batch's pieces, by number.
        room: memory that they go through; None for none.
        copies: where to, from which part of `room`.
    """

    batch: _Batch
    chosen: np.ndarray
    room: torch.Tensor | None
    copies: Copies
    reading: Future[int | None]


class Loader:
    """Reads pages of many sources to where they belong.

    Reading, and comparing checksums of large pages, is done in threads without Python's lock, so a model whose first
    layers are launched meanwhile does not wait. Closing the loader waits for the threads: then nothing is written any
    more, and what the current stream of a GPU is given comes after all copies.

    Args:
        open_file: name -> a descriptor to read from, or None.
        device: of the pages.
        parts: in the order in which they come; None for all layers at once.
        staged: read into other memory first, pinned on a GPU. None: where the pages are on a GPU.
    """

    def __init__(
        self,
        open_file: Callable[[str], int | None],
        device: torch.device,
        parts: Sequence[Part] | None = None,
        *,
        staged: bool | None = None,
    ) -> None:
        self._open, self._parts = open_file, parts
        self._staging = _Staging(device, device.type == "cuda" if staged is None else staged)
        self._pool = ThreadPoolExecutor(CALLS, "kvbits-reader")
        self._begun: deque[_Begun] = deque()
        self._batches: list[_Batch] = []
        self._waiting: list[tuple[Source, Piece, tuple[int, ...], int, int]] = []  # pieces that no batch has yet
        self._nbytes, self._fds = 0, list[int]()  # of those
        self._stopped = threading.Event()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, work: Work) -> None:
        """Begin to read the first layers of some pages.

        Raises:
            DamagedError: of this source or one before; GoneError: it is not there any more. Pages hold whatever was
                there.
        """
        source, shapes, pieces = work
        if not pieces:
            return
        self._staging.follow()
        if (fd := self._open(source.name)) is None:
            raise GoneError(source.name, f"{source.path} is gone")
        nbytes = sum(math.prod(shapes[p.number]) for p in pieces) // len(self._parts or [0])
        if self._nbytes and self._nbytes + nbytes > BATCH:
            try:
                self._batch()
            except BaseException:
                os.close(fd)
                raise
        self._fds.append(fd)
        self._nbytes += nbytes
        starts = source.offsets([math.prod(x) for x in shapes])
        for p in pieces:
            layers, heads, head_bytes = shapes[p.number]
            row = (
                fd,
                starts[p.number],
                p.to.data_ptr(),
                source.table.sums[p.number].ctypes.data,
                layers,
                heads * head_bytes,
            )
            self._waiting.append(
                (source, p, row, source.table.pages[p.number].group, p.to.untyped_storage().data_ptr())
            )

    def _batch(self) -> None:
        """Begin to read the pieces that wait."""
        if not self._waiting:
            return
        sources, pieces, rows, groups, storages = zip(*self._waiting, strict=True)
        listed = list(zip(sources, pieces, strict=True))
        self._batches.append(
            _Batch(listed, np.array(list(rows), PIECE), np.array(groups), np.array(storages), self._fds)
        )
        self._waiting, self._nbytes, self._fds = [], 0, []
        self._begin(self._batches[-1], 0)

    def finish(self, came: Callable[[int, torch.cuda.Event | None], None] = lambda part, event: None) -> None:
        """Read all that is left.

        Args:
            came: told of each part when all of it is there, and of the event that a stream has to wait for.

        Raises:
            DamagedError: as in `add`.
        """
        self._batch()
        every = self._batches[:]
        for part in range(len(self._parts or [0])):
            for batch in every if part else ():
                self._begin(batch, part)
            self._finish(0)
            came(part, self._staging.event())

    def stop(self) -> None:
        """Have `finish`, in another thread, end early: what is left does not come, and parts that are not there are not
        told of.
        """
        self._stopped.set()

    def close(self) -> None:
        self._wind_up(self._staging.close)

    def _wind_up(self, wait: Callable[[], None]) -> None:
        self._pool.shutdown(cancel_futures=True)
        wait()  # before the pages are let go of
        for fd in [*self._fds, *(fd for batch in self._batches for fd in batch.fds)]:
            os.close(fd)
        self._fds, self._waiting, self._batches, self._begun = [], [], [], deque()

    def _begin(self, batch: _Batch, part: int) -> None:
        self._finish(CALLS)
        rows, chosen, first = _layers(batch, None if self._parts is None else self._parts[part])
        room, copies = self._staging.place(batch, rows, chosen, first)
        reading = self._pool.submit(blob.read_pieces, rows, max(1, readers() // CALLS))
        self._begun.append(_Begun(batch, chosen, room, copies, reading))

    def _finish(self, left: int) -> None:
        """Wait for what was begun first, and send it on, until no more than so many calls are under way."""
        while len(self._begun) > left:
            if self._stopped.is_set():
                raise StoppedError
            one = self._begun[0]
            bad = one.reading.result()
            self._begun.popleft()
            if bad is not None:
                source, piece = one.batch.pieces[int(one.chosen[bad])]
                page = source.table.pages[piece.number]
                which = f"{page.pool} page {page.column} of layer group {page.group}"
                raise DamagedError(source.name, f"{source.path} is damaged: {which} has another checksum")
            self._staging.send(one)
            if self._parts is None:
                self._batches.remove(one.batch)
                for fd in one.batch.fds:
                    os.close(fd)

    def in_thread(self, arrivals: Arrivals, ends: Sequence[int]) -> Callable[[], None]:
        """What finishes and closes it in another thread, and tells `arrivals` of layers that are there, or of what
        ended it.

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


def _layers(batch: _Batch, part: Part | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For some layers of a batch: the rows, which pieces they are of, and the first layer of each."""
    rows = batch.rows.copy()
    if part is None:
        return rows, np.arange(len(rows)), np.zeros(len(rows), np.int64)
    first, count = (np.array(x)[batch.groups] for x in ([of.start for of in part], [len(of) for of in part]))
    rows["offset"] += first * rows["layer_bytes"]
    rows["to"] += (first * rows["layer_bytes"]).astype(np.uint64)
    rows["sums"] += (8 * first).astype(np.uint64)
    rows["layers"] = count
    chosen = np.flatnonzero(count)
    return rows[chosen], chosen, first[chosen]


class StoppedError(Exception):
    """Nobody wants the pages any more."""


def read_pages(open_file: Callable[[str], int | None], work: Iterable[Work], *, staged: bool | None = None) -> None:
    """Read pages of many sources to where they belong, see `Loader`.

    Raises:
        DamagedError: a source is not what its header says; GoneError: it is not there any more. Pages hold whatever was
            there.
    """
    jobs = [job for job in work if job[2]]
    if not jobs:
        return
    with Loader(open_file, jobs[0][2][0].to.device, staged=staged) as loader:
        for job in jobs:
            loader.add(job)
        loader.finish()


class _Staging:
    """Memory that files are read into on their way to pages elsewhere, used again in turns, and on a GPU the stream
    that they go on in.

    Args:
        whole_pages: pages go this way that could be read where they belong.
    """

    def __init__(self, device: torch.device, whole_pages: bool) -> None:
        self.device, self.whole_pages = device, whole_pages
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def follow(self) -> None:
        """Copies begun from now on come after what the current stream was given: it may still write to memory that is
        now a page.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def place(
        self, batch: _Batch, rows: np.ndarray, chosen: np.ndarray, first: np.ndarray
    ) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Where rows are read to: they are changed if that is not where they belong.

        Returns:
            The memory that they go through (None: none), and what to copy from it where.
        """
        pieces = [batch.pieces[i][1] for i in chosen.tolist()]
        plain = all(p.heads is None and p.to.is_contiguous() for p in pieces)
        if not pieces or (plain and not self.whole_pages):
            return None, []
        sizes = rows["layers"] * rows["layer_bytes"]
        at = np.concatenate([[0], np.cumsum(sizes)])
        room = self._room(int(at[-1]))
        where = rows["to"].astype(np.int64)
        rows["to"] = room.data_ptr() + at[:-1]
        if not plain:
            copies = []
            for i, (p, begin, n) in enumerate(zip(pieces, first.tolist(), rows["layers"].tolist(), strict=True)):
                to, x = p.to[begin : begin + n], room[int(at[i]) : int(at[i + 1])]
                x = x.view(n, -1, to.shape[2])
                copies.append((to, x) if p.heads is None else (to[:, p.into], x[:, p.heads]))
            return room, copies
        # pages that follow each other in memory go together: words [pages, of these layers], one page of all layers
        # apart
        whole = batch.rows["layers"][chosen] * rows["layer_bytes"]
        joined = (where[1:] - where[:-1] == whole[:-1]) & (whole[1:] == whole[:-1]) & (sizes[1:] == sizes[:-1])
        joined &= batch.storages[chosen][1:] == batch.storages[chosen][:-1]
        starts = [0, *(np.flatnonzero(~joined) + 1).tolist()]
        runs: Copies = []
        for a, b in zip(starts, [*starts[1:], len(rows)], strict=True):
            to, step, size = pieces[a].to.view(-1).view(torch.int64), int(whole[a]) // 8, int(sizes[a]) // 8
            skip = int(first[a] * rows["layer_bytes"][a]) // 8
            target = to.as_strided((b - a, size), (step, 1), to.storage_offset() + skip)
            runs.append((target, room[int(at[a]) : int(at[b])].view(torch.int64).view(b - a, size)))
        return room, runs

    def _room(self, nbytes: int) -> torch.Tensor:
        """uint8 [at least nbytes] that nobody reads or writes."""
        if len(self._used) > CALLS:  # not those whose copies were begun just now
            room, copied = self._used.popleft()
            if copied is not None:
                copied.synchronize()
            if room.numel() >= nbytes:
                return room
        return torch.empty(
            max(nbytes, BATCH if self.whole_pages else 0), dtype=torch.uint8, pin_memory=self.stream is not None
        )

    def send(self, one: _Begun) -> None:
        if one.room is None:
            return
        with torch.cuda.stream(self.stream):
            for to, x in one.copies:
                to.copy_(x, non_blocking=True)
            self._used.append((one.room, self.event()))

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
