"""The blobs of a store as readers see them: files of one folder, or of a remote store behind it; what is not what it
says is set aside.

A file is called by the key of its tokens and by which part of the kv heads it holds, `<key>.<shard>-<shards>`; an END
by the key of the blobs before it, its tokens and their key: `<key>+<tokens>-<key>.<shard>-<shards>`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import time
import warnings
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from ..cache import blob
from ..cache.blob import Header, Identity, Kind, Page, Table
from ..errors import FileFormatError, SpecError, counted
from ..spec import LayerGroup
from . import keys, pages
from .folder import Folder
from .loading import DamagedError, Piece, Source
from .remote import AT_ONCE, Remote

FIRST_BYTES = 1 << 14
"""Read of a file at once: its header, and its table where that is no larger."""
Shard = tuple[int, int]
"""Which of how many equal parts of every layer's kv heads."""


def stem_of(key: bytes, tokens: int = 0, end: bytes = b"") -> str:
    """Name of a blob without its shard."""
    return key[: keys.KEY_BYTES].hex() + (f"+{tokens}-{end[:8].hex()}" if tokens else "")


def name_of(stem: str, shard: Shard) -> str:
    return f"{stem}.{shard[0]}-{shard[1]}"


def groups_of(groups: Rows[LayerGroup], mine: Shard, other: Shard) -> list[LayerGroup]:
    """The layer groups of a shard of another size, of caches that have `groups`.

    Raises:
        SpecError: the kv heads cannot be cut so.
    """
    if mine[1] == other[1]:
        return list(groups)
    found = []
    for g in groups:
        heads, rest = divmod(g.geometry.num_kv_heads * mine[1], other[1])
        if rest:
            raise SpecError(f"{g.geometry.num_kv_heads * mine[1]} kv heads cannot be cut into {other[1]} equal shards")
        found.append(dataclasses.replace(g, geometry=dataclasses.replace(g.geometry, num_kv_heads=heads)))
    return found


@dataclass(frozen=True)
class Blob:
    """A blob as one shard needs it: the same pages in one source or more, each with some of the kv heads.

    Attributes:
        shards: of each source.
    """

    sources: list[Source]
    shards: list[Shard]

    @property
    def name(self) -> str:
        """Of its first file: no other blob has it."""
        return self.sources[0].name

    @property
    def pages(self) -> list[Page]:
        return self.sources[0].table.pages

    def work(
        self, groups: Rows[LayerGroup], mine: Shard, wanted: Rows[tuple[int, torch.Tensor]]
    ) -> list[tuple[Source, list[tuple[int, ...]], list[Piece]]]:
        """What to read of each source.

        Args:
            wanted: numbers of pages, and the page [layers, H, head_bytes] that each goes to.
        """
        found = []
        for source, shard in zip(self.sources, self.shards, strict=True):
            theirs = groups_of(groups, mine, shard)
            shape_of = {
                (g, name): blob.block_shape(group, name) for g, group in enumerate(theirs) for name in group.pools
            }
            shapes: list[tuple[int, ...]] = [shape_of[p.group, p.pool] for p in self.pages]
            if shard == mine:
                pieces = [Piece(number, to) for number, to in wanted]
            else:
                pieces = [Piece(number, to, *_overlap(to.shape[1] * mine[1], mine, shard)) for number, to in wanted]
            found.append((source, shapes, pieces))
        return found


def _overlap(num_heads: int, mine: Shard, theirs: Shard) -> tuple[slice, slice]:
    """Heads that two shards of a layer share: in theirs, in mine."""
    own, other = num_heads // mine[1], num_heads // theirs[1]
    first = max(mine[0] * own, theirs[0] * other)
    last = min((mine[0] + 1) * own, (theirs[0] + 1) * other)
    return slice(first - theirs[0] * other, last - theirs[0] * other), slice(
        first - mine[0] * own, last - mine[0] * own
    )


class Shelf:
    """The files of a store, for one shard.

    Attributes:
        damaged: files set aside since this object was made, with the reason.
        fetched: bytes of each file that came from the remote store, until somebody takes note of them.
        kept: descriptors of the files whose headers were read, by name, for `keeping()`; None closes them.
    """

    def __init__(self, folder: Folder, remote: Remote | None, shard: Shard) -> None:
        self.folder, self.remote, self.shard = folder, remote, shard
        self.damaged: dict[str, str] = {}
        self.fetched: list[int] = []
        self.kept: dict[str, int] | None = None
        self._left: set[str] = set()  # of those, the ones that could not be renamed

    def keeping(self) -> Shelf:
        """The same files, where those whose headers are read stay open until `open` takes them or `let_go`."""
        same = copy.copy(self)
        same.kept = {}
        return same

    def let_go(self) -> None:
        """Close what is open still."""
        while self.kept:
            os.close(self.kept.popitem()[1])

    def open(self, space: str, name: str) -> int | None:
        """A descriptor to read a file with, which the caller closes; None where there is none."""
        return self.kept.pop(name) if self.kept and name in self.kept else self.folder.open(space, name)

    def has(self, space: str, name: str, at_least: int = 0) -> bool:
        """Whether a file is there, whole by its size, with at least so many pages."""
        fd = self.folder.open(space, name)
        if fd is None:
            return False
        try:
            header = Header.parse(os.pread(fd, blob.HEADER_BYTES, 0), name)
            return header.nbytes == os.fstat(fd).st_size and header.pages >= at_least
        except FileFormatError:
            return False
        finally:
            os.close(fd)

    def send(self, space: str, names: list[str]) -> None:
        """Copy files to the remote store that are not there yet, the beginning first."""
        if self.remote is None:
            return
        mine = [self.folder.nbytes(space, name) for name in names]
        there = self.remote.sizes(space, names)
        self.remote.put(
            space,
            [name for name, a, b in zip(names, there, mine, strict=True) if a != b and b is not None],
            self.folder,
        )

    def fetch(self, space: str, stems: list[str]) -> None:
        """Bring the beginning of a chain of blobs from the remote store, as far as it goes."""
        for at in range(0, len(stems) if self.remote else 0, AT_ONCE):
            names = [name_of(stem, self.shard) for stem in stems[at : at + AT_ONCE]]
            batch = [name for name in names if not self.folder.has(space, name)]
            if batch and not self._fetch(space, batch):
                break

    def _fetch(self, space: str, names: list[str]) -> bool:
        """Copy files from the remote store, if there is one. Returns whether all were there."""
        sizes = self.remote.fetch(space, names, self.folder) if self.remote else [None]
        self.fetched += [n for n in sizes if n is not None]
        return None not in sizes

    def names(self, space: str, start: str) -> set[str]:
        """Names of files, here or there, that begin so."""
        return set(self.folder.names(space, start)) | set(self.remote.names(space, start) if self.remote else ())

    def use(self, space: str, names: list[str]) -> None:
        """Note that the files of a prefix were used now: its end a little before its beginning, so that it leaves
        first.
        """
        now = time.time_ns()
        for i, name in enumerate(names):
            self.folder.use(space, name, now - i)

    def blob(
        self,
        space: str,
        stem: str,
        identity: Identity,
        groups: Rows[LayerGroup],
        kind: Kind,
        span: tuple[int, int],
        key: bytes,
    ) -> Blob | None:
        """A blob with headers and tables read, or None where it is not there.

        A file that is not what it should be is set aside.

        Args:
            groups: of this shard.
            span: its first token, and the one behind its last.
        """
        if own := self._checked(space, name_of(stem, self.shard), identity, groups, kind, span, key):
            return Blob([own], [self.shard])
        for shards in self._other_cuts(space, stem):
            sources = [
                self._checked(space, name_of(stem, s), identity, groups_of(groups, self.shard, s), kind, span, key)
                for s in shards
            ]
            whole = [s for s in sources if s is not None]
            if len(whole) == len(shards) and all(s.table.pages == whole[0].table.pages for s in whole):
                return Blob(whole, shards)
        return None

    def _other_cuts(self, space: str, stem: str) -> list[list[Shard]]:
        """Shards of each other size that could together give this shard's heads."""
        there: dict[int, set[int]] = {}
        for name in self.names(space, stem + "."):
            shard, _, shards = name[len(stem) + 1 :].partition("-")
            if shard.isdigit() and shards.isdigit() and len(name) < 100 and 0 <= int(shard) < int(shards):
                there.setdefault(int(shards), set()).add(int(shard))
        rank, size = self.shard
        found = []
        for n, held in sorted(there.items()):
            needed = range(rank * n // size, -(-(rank + 1) * n // size))
            if n != size and held.issuperset(needed):
                found.append([(j, n) for j in needed])
        return found

    def _checked(
        self,
        space: str,
        name: str,
        identity: Identity,
        groups: Rows[LayerGroup],
        kind: Kind,
        span: tuple[int, int],
        key: bytes,
    ) -> Source | None:
        try:
            source = None if name in self._left else self.source(space, name, identity, groups)
            if source is None:
                return None
            header = source.header
            if (header.kind, header.start, header.start + header.tokens, header.key) != (
                kind,
                *span,
                key[: keys.KEY_BYTES],
            ):
                raise FileFormatError(f"{source.path} does not belong there: it holds other tokens")
            size, sinks = groups[0].page_size, groups[0].num_sink_tokens
            if kind == Kind.PAGES and not pages.fit(
                source.table.pages, groups, range(max(0, span[0] - sinks) // size, (span[1] - sinks) // size)
            ):
                raise FileFormatError(f"{source.path} holds pages of other tokens than its header says")
            return source
        except FileFormatError as error:
            self.set_aside(space, DamagedError(name, str(error)))
            return None

    def source(self, space: str, name: str, identity: Identity, groups: Rows[LayerGroup]) -> Source | None:
        """A file's header and table; None where there is no such file.

        Raises:
            FileFormatError: it is damaged, or somebody else's.
        """
        fd = self.folder.open(space, name)
        if fd is None and self._fetch(space, [name]):
            fd = self.folder.open(space, name)
        if fd is None:
            return None
        path = self.folder.path(space, name)
        try:
            start = os.pread(fd, FIRST_BYTES, 0)
            header = Header.parse(start, path)
            if reason := header.refuses(identity):
                raise FileFormatError(f"{path} does not belong there: {reason}")
            if name.rpartition(".")[2] != f"{header.identity.shard}-{header.identity.shards}":
                raise FileFormatError(
                    f"{path} does not belong there: it holds shard {header.identity.shard} of {header.identity.shards}"
                )
            if header.nbytes != (size := os.fstat(fd).st_size):
                raise FileFormatError(f"{path} is truncated: {counted(size, 'byte')} of {header.nbytes}")
            table = start[blob.HEADER_BYTES : (end := blob.HEADER_BYTES + header.table_bytes)]
            if len(start) < end:
                table += os.pread(fd, end - len(start), len(start))
            source = Source(name, path, header, Table.parse(header, table, groups, path))
            if self.kept is not None and name not in self.kept:
                self.kept[name], fd = fd, -1
            return source
        finally:
            if fd >= 0:
                os.close(fd)

    def set_aside(self, space: str, error: DamagedError) -> None:
        """Take a file out of the way, so that it is made again, and say so."""
        self.damaged[error.name] = str(error)
        kept = self.folder.set_aside(space, error.name)
        if kept is None and self.folder.has(space, error.name):
            self._left.add(error.name)
        if self.remote:
            self.remote.set_aside(space, error.name)
        warnings.warn(
            f"{error}; it was {'renamed to ' + kept if kept else 'left'} and its tokens will be computed again",
            stacklevel=4,
        )
