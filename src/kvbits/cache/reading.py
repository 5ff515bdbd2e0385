"""The reader of blobs: pages from files or host memory to where attention reads them, several at once, on a GPU through
pinned memory. Each layer of each page is checked before it is passed on.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from ..errors import FileFormatError, counted
from ..runs import cores
from ..spec import LayerGroup
from . import blob
from .blob import Header, Identity, Table
from .pool import Pool

MOST_READERS = 8
"""Threads that read at once."""
AHEAD = 4
"""Runs of pages that are read, for each thread, before the first of them has gone on."""
PARTS = 4
"""Parts of the layers that come one after the other where the first may be used before the last are there."""
FIRST_BYTES = 1 << 14
"""Parts of a blob that are read at once: its header, and its table where that is no larger."""


class DamagedError(FileFormatError):
    """A file that is not what it should be.

    Attributes:
        name: of the file.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class GoneError(DamagedError):
    """A file that was there a moment ago: somebody evicted it, and nothing is wrong."""


class OpenFile:
    """A descriptor that is closed when nobody reads from it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """Read so many bytes, fewer at the end of the file."""
        return os.pread(self.fd, nbytes, offset)

    def fill(self, to: memoryview, offset: int) -> bool:
        """Fill memory. Return whether the file has so much."""
        at = 0
        while at < len(to):
            n = os.preadv(self.fd, [to[at:]], offset + at)
            if not n:
                return False
            at += n
        return True


class Memory:
    """A blob in host memory.

    Args:
        pieces: uint8 [n] each, as `blob.encode` gives them.
    """

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(map(len, pieces)))

    @property
    def size(self) -> int:
        return self._ends[-1]

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """Read as `OpenFile` does, of header and table."""
        return self._pieces[0][offset : offset + nbytes].tobytes()

    def fill(self, to: memoryview, offset: int) -> bool:
        """Fill memory as `OpenFile` does."""
        at = 0
        while at < len(to):
            i = bisect_right(self._ends, offset + at)
            if i == len(self._pieces):
                return False
            n = min(self._ends[i] - offset - at, len(to) - at)
            start = offset + at - self._ends[i]
            np.copyto(np.frombuffer(to[at : at + n], np.uint8), self._pieces[i][start:][:n])
            at += n
        return True


@dataclass(frozen=True)
class Source:
    """A blob whose header and table were read and checked.

    Attributes:
        name, path: of its file, for a store and for messages.
        shapes, starts: of each page its layers, kv heads and bytes of a head, and where it begins in the medium.
        medium: what it is in; None for a file that is opened again when its pages are read.
    """

    name: str
    path: str
    header: Header
    table: Table
    shapes: list[tuple[int, int, int]]
    starts: list[int]
    medium: OpenFile | Memory | None

    @property
    def shard(self) -> tuple[int, int]:
        """Return which of how many equal parts of every layer's kv heads it holds."""
        return self.header.identity.shard, self.header.identity.shards

    def read(self, number: int, to: torch.Tensor, layers: slice, medium: OpenFile | Memory) -> None:
        """Read some layers of some pages, and check them.

        Args:
            number: of the first page.
            to: uint8 [pages, layers, H, head_bytes] on the host; each page contiguous.

        Raises:
            DamagedError: its pages are not what its table says.
        """
        skipped = layers.start * math.prod(self.shapes[number][1:])
        for i, block in enumerate(to, number):
            if not medium.fill(block.numpy().data.cast("B"), self.starts[i] + skipped):
                raise DamagedError(self.name, f"{self.path} is damaged: it ends too early")
            if not np.array_equal(blob.block_sums(block), self.table.sums[i][layers]):
                page = self.table.pages[i]
                which = f"{page.pool} page {page.column} of layer group {page.group}"
                raise DamagedError(self.name, f"{self.path} is damaged: {which} has another checksum")

    def check(self) -> None:
        """Read all pages, to see whether they are damaged.

        Raises:
            DamagedError: they are.
        """
        assert self.medium is not None
        for number, shape in enumerate(self.shapes):
            self.read(number, torch.empty((1, *shape), dtype=torch.uint8), slice(0, shape[0]), self.medium)


def groups_of(groups: Sequence[LayerGroup], mine: Identity, theirs: Identity) -> list[LayerGroup]:
    """Return the layer groups that a shard of another size has, of caches that have `groups`.

    Raises:
        FileFormatError: the kv heads cannot be cut so.
    """
    if mine.shards == theirs.shards:
        return list(groups)
    found = []
    for g in groups:
        heads, rest = divmod(g.geometry.num_kv_heads * mine.shards, theirs.shards)
        if rest:
            raise FileFormatError(f"{heads * theirs.shards + rest} kv heads cannot be cut into {theirs.shards} shards")
        found.append(replace(g, geometry=replace(g.geometry, num_kv_heads=heads)))
    return found


def read_source(
    medium: OpenFile | Memory, name: str, path: str, identity: Identity, groups: Sequence[LayerGroup], offset: int = 0
) -> Source:
    """Read header and table of a blob of pages.

    Args:
        identity: of the cache that wants it.
        groups: of that cache.

    Raises:
        FileFormatError: it is damaged, cut short, of another version, or of another cache.
    """
    start = medium.bytes_at(offset, FIRST_BYTES)
    header = Header.parse(start, path)
    if reason := header.refuses(identity):
        raise FileFormatError(f"{path} does not belong there: {reason}")
    require_whole(medium, header, path, offset)
    table = start[blob.HEADER_BYTES : (end := blob.HEADER_BYTES + header.table_bytes)]
    if len(start) < end:
        table += medium.bytes_at(offset + len(start), end - len(start))
    groups = groups_of(groups, identity, header.identity)
    parsed = Table.parse(header, table, groups, path)
    known = {(p.group, p.pool): blob.block_shape(groups[p.group], p.pool) for p in parsed.pages}
    shapes = [known[p.group, p.pool] for p in parsed.pages]
    starts = list(accumulate(map(math.prod, shapes), initial=offset + end))
    return Source(name, path, header, parsed, shapes, starts, medium)


def require_whole(medium: OpenFile | Memory, header: Header, path: str, offset: int = 0) -> None:
    """Refuse a blob that ends behind its file.

    Raises:
        FileFormatError: it does.
    """
    if (end := offset + header.nbytes) > medium.size:
        raise FileFormatError(f"{path} is truncated: {counted(medium.size, 'byte')} of {end}")


def readers() -> int:
    """Return how many threads read at once: no more than there are processors."""
    return max(1, min(MOST_READERS, cores()))


class Parts(NamedTuple):
    """Layers in parts that come one after the other.

    Attributes:
        layers: of each part, for each layer group: which of its own.
        ends: of each part, the layer behind its last.
    """

    layers: list[list[slice]]
    ends: list[int]


def parts_of(groups: Sequence[LayerGroup], num_layers: int, parts: int = PARTS) -> Parts:
    """Cut layers into so many parts, or fewer."""
    if any(list(g.layers) != sorted(g.layers) for g in groups):
        parts = 1
    ends = sorted({num_layers * (i + 1) // parts for i in range(parts)} - {0})
    cuts = [
        [slice(bisect_left(g.layers, a), bisect_left(g.layers, b)) for g in groups]
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    return Parts(cuts, ends)


class Wanted(NamedTuple):
    """A page to be read: its number in the blob, and the pool and page id that it goes to."""

    number: int
    pool: Pool
    page_id: int


class _Run(NamedTuple):
    """Pages next to each other in a blob and in a pool.

    Attributes:
        first: number of the first page in the blob.
        to: uint8 [pages, layers, H, head_bytes], where they go.
        heads: kv heads of those that are wanted; `into`: which ones of `to` they are.
        staged: they go by way of other memory.
    """

    source: Source
    first: int
    to: torch.Tensor
    heads: slice
    into: slice
    staged: bool


class Reading:
    """Pages of blobs on their way.

    Reading and checking is done in threads without Python's lock, so a model whose first layers are launched meanwhile
    does not wait. Copies to a GPU come after what its current stream has now: that may still write to memory that is a
    page now.

    Args:
        work: what to read of each blob.
        identity: of the cache that the pages are for.
        device: of the pages.
        open_file: opens the file of a blob without a medium by name; None where it is gone.
        staged: pages go by way of other memory; None: where they are on a GPU.
    """

    def __init__(
        self,
        work: Sequence[tuple[Source, Sequence[Wanted]]],
        identity: Identity,
        device: torch.device,
        open_file: Callable[[str], OpenFile | None] = lambda name: None,
        staged: bool | None = None,
    ) -> None:
        self._device, self._open, self._stopped = device, open_file, threading.Event()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staged = self._stream is not None if staged is None else staged
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._runs = [
            run for source, wanted in work for run in self._runs_of(source, wanted, (identity.shard, identity.shards))
        ]

    def _runs_of(self, source: Source, wanted: Sequence[Wanted], mine: tuple[int, int]) -> list[_Run]:
        found: list[_Run] = []
        last = None
        for number, pool, page_id in wanted:
            slab, at = pool.place(page_id)
            if last is not None and (number, at) == (last[1] + 1, last[2] + 1) and slab is last[0]:
                found[-1] = found[-1]._replace(to=slab[at - len(found[-1].to) : at + 1])
            else:
                heads, into = _overlap(slab.shape[2] * mine[1], mine, source.shard)
                staged = self._staged or mine != source.shard
                found.append(_Run(source, number, slab[at : at + 1], heads, into, staged))
            last = slab, number, at
        return found

    def run(
        self,
        parts: Parts | None = None,
        came: Callable[[int, torch.cuda.Event | None], None] = lambda layers, event: None,
    ) -> None:
        """Read all of it. Afterwards nothing is written any more, also where this fails.

        Args:
            parts: in the order in which they come; None for all layers at once.
            came: told of the first so many layers when they are there, and of the event that a stream has to wait for.

        Raises:
            DamagedError: a blob is not what its table says; GoneError: its file is not there any more. Pages hold
                whatever was there.
        """
        layers = [None] if parts is None else parts.layers
        pool = ThreadPoolExecutor(readers(), "kvbits-reader")
        try:
            for i, part in enumerate(layers):
                self._read(pool, part)
                if self._stopped.is_set():
                    return
                came(parts.ends[i] if parts else 0, self._stream.record_event() if self._stream else None)
        finally:
            pool.shutdown(cancel_futures=True)
            self._runs = []
            if self._stream is not None:
                self._stream.synchronize()

    def stop(self) -> None:
        """Have `run`, in another thread, end early: what is left does not come."""
        self._stopped.set()

    def _read(self, pool: ThreadPoolExecutor, part: list[slice] | None) -> None:
        under_way: deque[tuple[_Run, slice, Future[torch.Tensor]]] = deque()
        for run in self._runs:
            layers = slice(0, run.to.shape[1]) if part is None else part[run.source.table.pages[run.first].group]
            if layers.start < layers.stop:
                under_way.append((run, layers, pool.submit(self._fetch, run, layers)))
            if len(under_way) > AHEAD * readers():
                self._send(*under_way.popleft())
            if self._stopped.is_set():
                return
        while under_way:
            self._send(*under_way.popleft())

    def _fetch(self, run: _Run, layers: slice) -> torch.Tensor:
        """Read some layers of a run's pages and check them. Return them [pages, layers, H, head_bytes], where they
        belong or in memory that they are sent on from.
        """
        source, room = run.source, run.to[:, layers]
        if run.staged:
            shape = (*room.shape[:2], *source.shapes[run.first][1:])
            room = torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)
        if (medium := source.medium or self._open(source.name)) is None:
            raise GoneError(source.name, f"{source.path} is gone")
        source.read(run.first, room, layers, medium)
        return room

    def _send(self, run: _Run, layers: slice, reading: Future[torch.Tensor]) -> None:
        """Wait for a run, and send it on to where it belongs."""
        room = reading.result()
        if run.staged:
            with torch.cuda.stream(self._stream):
                to, x = run.to[:, layers, run.into], room[:, :, run.heads]
                to.view(torch.int64).copy_(x.view(torch.int64), non_blocking=True)


def _overlap(num_heads: int, mine: tuple[int, int], theirs: tuple[int, int]) -> tuple[slice, slice]:
    """Return the heads that two shards of a layer share: in theirs, in mine."""
    own, other = num_heads // mine[1], num_heads // theirs[1]
    first = max(mine[0] * own, theirs[0] * other)
    last = min((mine[0] + 1) * own, (theirs[0] + 1) * other)
    return slice(first - theirs[0] * other, last - theirs[0] * other), slice(
        first - mine[0] * own, last - mine[0] * own
    )
