"""The blobs of a store that go together: of one model, scheme and calibration, as one shard reads them. Blobs that are
damaged, or are not those that their names say, are set aside.

A file is called by the key of its tokens and its part of the kv heads, `<key>.<shard>-<shards>`. An END is called by
the key of the blobs before it, its tokens and their key: `<key>+<tokens>-<key>.<shard>-<shards>`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np

from ..cache import transfer
from ..cache.blob import HEADER_BYTES, Header, Identity, Kind
from ..cache.group import GroupState
from ..cache.reading import DamagedError, OpenFile, Source, read_source
from ..cache.transfer import Plan
from ..errors import FileFormatError
from ..spec import LayerGroup
from . import keys, pages
from .folder import Folder
from .pages import Cuts

WRITTEN_AT_ONCE = 8
"""Blobs on their way to the disk together."""
MOST_FILES = 256
"""Files that are held open from when they are found until they are read; others are opened again."""
Shard = tuple[int, int]
"""Number and count of equal parts of every layer's kv heads."""
_SHARD = re.compile(r"\.([0-9]{1,5})-([1-9][0-9]{0,4})")


def stem_of(key: bytes, tokens: int = 0, end: bytes = b"") -> str:
    """Name a blob without its shard."""
    return key[: keys.KEY_BYTES].hex() + (f"+{tokens}-{end[:8].hex()}" if tokens else "")


def name_of(stem: str, shard: Shard) -> str:
    return f"{stem}.{shard[0]}-{shard[1]}"


class Namespace:
    """Blobs that a cache can read and write.

    Args:
        folder: of the store.
        identity: of the cache, and which shard it holds.
        groups: its layer groups.
        damaged: files set aside since the store was made, with the reason; one more is added to it.

    Attributes:
        name: of the folder with the blobs.
    """

    _held = 0  # files that the present search holds open

    def __init__(
        self, folder: Folder, identity: Identity, groups: Rows[LayerGroup], cuts: Cuts, damaged: dict[str, str]
    ) -> None:
        self.folder, self.identity, self.groups, self.cuts, self.damaged = folder, identity, groups, cuts, damaged
        self.name = keys.namespace(identity, cuts.blob_pages * cuts.page_size)
        self.shard: Shard = (identity.shard, identity.shards)

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(self, groups: list[GroupState], row: int, tokens: np.ndarray, *, end: bool, extra: bytes) -> None:
        """Write the blobs of a sequence that are not there yet, see `PrefixStore.put`."""
        cuts, length = self.cuts, groups[0].sequences[row].length
        blobs = min(cuts.within(length), pages.whole_blobs(groups, row, cuts))
        parts = pages.parts(groups, row, cuts, blobs)
        if not (end and length > cuts.end(blobs) and pages.is_plain(groups, row)):
            parts.pop()
        stops = [*cuts.ends(length)[:blobs], length]
        chain = keys.chain(self.name, tokens, stops, extra)
        shown = transfer.shown_slots(groups, [row])
        windows = any(g.geometry.sliding_window is not None for g in self.groups)
        names: list[str] = []

        def missing() -> Iterator[tuple[str, list[memoryview]]]:
            for i, held in enumerate(parts):
                kind, start = Kind.END if i == blobs else Kind.PAGES, cuts.end(i)
                stem = stem_of(chain[i + 1]) if kind == Kind.PAGES else stem_of(chain[i], length - start, chain[i + 1])
                names.append(name_of(stem, self.shard))
                key = chain[i + 1][: keys.KEY_BYTES]
                if self._has(names[-1], key, len(held) if windows and kind == Kind.PAGES else 0):
                    continue
                fields: dict[str, Any] = {"start": start, "tokens": stops[i] - start, "key": key}
                if kind == Kind.END:
                    fields["state"] = pages.state_of(groups, row)
                yield names[-1], transfer.encode(kind, self.identity, groups, shown, held, **fields)

        new = missing()
        while files := list(itertools.islice(new, WRITTEN_AT_ONCE)):
            self.folder.write(self.name, files)
        self.folder.send(self.name, names)
        self.use(names)

    def use(self, names: list[str]) -> None:
        """Note that the files of a prefix were used now, its end a little before its beginning: ends are evicted
        first.
        """
        now = time.time_ns()
        for i, name in enumerate(names):
            self.folder.use(self.name, name, now - i)

    def _has(self, name: str, key: bytes, at_least: int = 0) -> bool:
        """Return whether a file is there, whole by its size, of the tokens of `key`, with at least so many pages."""
        if (file := self.folder.open(self.name, name)) is None:
            return False
        try:
            header = Header.parse(file.bytes_at(0, HEADER_BYTES), name)
        except FileFormatError:
            return False
        return header.nbytes == file.size and header.key == key and header.pages >= at_least

    # -- finding ----------------------------------------------------------------------------------------------------

    def find(self, tokens: np.ndarray, extra: bytes = b"") -> Plan | None:
        """Find the longest prefix of `tokens` [tokens] that is here: by the names, headers and tables of its blobs, no
        page read yet. Return None for nothing.
        """
        cuts, self._held = self.cuts, 0
        chain = keys.chain(self.name, tokens, cuts.ends(len(tokens)), extra)
        self.folder.fetch(self.name, [name_of(stem_of(key), self.shard) for key in chain[1:]])
        blobs: list[list[Source]] = []
        for i, key in enumerate(chain[1:]):
            if (one := self._blob(stem_of(key), Kind.PAGES, cuts.end(i), cuts.end(i + 1), key)) is None:
                break
            blobs.append(one)
        shared = (Plan([pages.prefix(self.groups, cuts, n)], blobs[:n]) for n in range(len(blobs), 0, -1))
        best = next((plan for plan in shared if plan.is_whole), None)
        least = length_of(best)
        if least == len(tokens):
            least -= 1  # exactly these tokens: their end has the newest ones as they were, raw
        reach = max(g.residual_length for g in self.groups) + (cuts.blob_pages + 2) * cuts.page_size + cuts.num_sinks
        for n in range(len(blobs), -1, -1):
            if best is not None and cuts.end(n) + reach <= length_of(best):
                break
            if ended := self._ended(tokens, chain[n], blobs[:n], least):
                best, least = ended, length_of(ended)
        return best

    def _ended(self, tokens: np.ndarray, key: bytes, blobs: list[list[Source]], least: int) -> Plan | None:
        """Find the longest sequence of more than `least` tokens that an END blob makes of these blobs."""
        start, stem = self.cuts.end(len(blobs)), stem_of(key) + "+"
        found: dict[int, tuple[str, bytes]] = {}
        for name in self.folder.names(self.name, stem):
            count = name[len(stem) :].partition("-")[0]
            length = start + int(count) if count.isdigit() and len(count) < 12 else 0
            if least < length <= len(tokens):
                end = keys.after(key, tokens[start:length])
                if name.rpartition(".")[0] == stem_of(key, length - start, end):
                    found[length] = name.rpartition(".")[0], end
        for length, (known, end) in sorted(found.items(), reverse=True):
            if (one := self._blob(known, Kind.END, start, length, end)) is None:
                continue
            try:
                made = transfer.parse(one[0].table.state, self.groups, one[0].path)
                if made[0].length != length:
                    raise FileFormatError(f"{one[0].path} ends a sequence of {made[0].length} tokens, not {length}")
            except FileFormatError as error:
                self.set_aside(DamagedError(one[0].name, str(error)))
                continue
            if (plan := Plan([made], [*blobs, one])).is_whole:
                return plan
        return None

    def _blob(self, stem: str, kind: Kind, start: int, end: int, key: bytes) -> list[Source] | None:
        """Find a blob as this shard needs it: in its own file, or in several with a part of the kv heads each. Return
        None where it is not there; a file that is not what it should be is set aside.
        """
        for shards in self._cuts_of(stem):
            found = [self._checked(name_of(stem, shard), kind, start, end, key) for shard in shards]
            whole = [source for source in found if source is not None]
            if len(whole) == len(shards) and all(s.table.pages == whole[0].table.pages for s in whole):
                return whole
        return None

    def _cuts_of(self, stem: str) -> Iterator[list[Shard]]:
        """Yield the shards that give this shard's heads: itself, then those of each other size that are there."""
        yield [self.shard]
        there: dict[int, set[int]] = {}
        for name in self.folder.names(self.name, stem + "."):
            if found := _SHARD.fullmatch(name[len(stem) :]):
                there.setdefault(int(found[2]), set()).add(int(found[1]))
        rank, size = self.shard
        for n, held in sorted(there.items()):
            needed = range(rank * n // size, -(-(rank + 1) * n // size))
            if n != size and held.issuperset(needed):
                yield [(j, n) for j in needed]

    def _checked(self, name: str, kind: Kind, start: int, end: int, key: bytes) -> Source | None:
        try:
            source = None if name in self.folder.left else self.source(name)
            if source is None:
                return None
            header, wanted = source.header, (kind, start, end, key[: keys.KEY_BYTES])
            if (header.kind, header.start, header.start + header.tokens, header.key) != wanted:
                raise FileFormatError(f"{source.path} does not belong there: it holds other tokens")
            columns = range(
                max(0, start - self.cuts.num_sinks) // self.cuts.page_size,
                (end - self.cuts.num_sinks) // self.cuts.page_size,
            )
            if kind == Kind.PAGES and not pages.fit(source.table.pages, self.groups, columns):
                raise FileFormatError(f"{source.path} holds pages of tokens that differ from its header")
        except FileFormatError as error:
            self.set_aside(DamagedError(name, str(error)))
            return None
        self._held += 1
        return source if self._held <= MOST_FILES else dataclasses.replace(source, medium=None)

    def source(self, name: str) -> Source | None:
        """Read a file's header and table; None where there is no such file.

        Raises:
            FileFormatError: it is damaged, or somebody else's.
        """
        file = self.open(name)
        if file is None and self.folder.fetch(self.name, [name]):
            file = self.open(name)
        if file is None:
            return None
        path = self.folder.path(self.name, name)
        source = read_source(file, name, path, self.identity, self.groups)
        if name != name_of(name.rpartition(".")[0], source.shard):
            raise FileFormatError(
                f"{path} does not belong there: it holds shard {source.shard[0]} of {source.shard[1]}"
            )
        if source.header.nbytes != file.size:
            raise FileFormatError(f"{path} is too long: {file.size} bytes of {source.header.nbytes}")
        return source

    def open(self, name: str) -> OpenFile | None:
        """Open a file to read from; None where there is none."""
        return self.folder.open(self.name, name)

    def set_aside(self, error: DamagedError) -> None:
        """Take a file out of the way, so that it is made again, and say so."""
        self.damaged[error.name] = str(error)
        kept = self.folder.set_aside(self.name, error.name)
        if kept is None and self.folder.has(self.name, error.name):
            self.folder.left.add(error.name)
        warnings.warn(
            f"{error}; it was {'renamed to ' + kept if kept else 'left'} and its tokens will be computed again",
            stacklevel=4,
        )


def length_of(plan: Plan | None) -> int:
    """Count the tokens of the sequence of a plan; 0 for none."""
    return plan.made[0][0].length if plan else 0
