"""A sequence from one process to another over a socket, as the blobs that it would be stored as: one computes a prompt, the other goes on with it.

    sender      ABOUT blob: whose pages these are, the transfer's name, token ids, number of blobs
    receiver    0 and how many blobs of this transfer it has already; or why it refuses
    sender      the blobs from there on, never more than `WINDOW` bytes ahead of what the receiver said it has checked
    receiver    after each blob, how many it has

Versions, scheme, geometry, model and calibration are compared before a page is sent. What arrives goes from the socket straight into pages of the cache (on a
GPU by way of pinned memory). After a broken connection the same two objects go on over a new one with the first blob that was not checked.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from typing import Any

import torch

from ..cache import blob
from ..cache.blob import Header, Identity, Kind, Page, Table
from ..cache.group import GroupState
from ..cache.paged_cache import PagedCache
from ..cache.sequence import Sequence
from ..errors import CacheStateError, DataError, FileFormatError, counted
from . import keys, pages
from .pages import Cuts
from .prefix_store import blocks_of, calibration_of, paged, settled

WINDOW = 64 << 20
"""Bytes that a sender is ahead of what the receiver has checked, or one blob."""
MOST_ABOUT, MOST_TABLE = 1 << 28, 1 << 26
_COUNT = struct.Struct("<II")
"""0 and how many blobs were checked; or the length of the text that says why not, and 0."""


def _identity(cache: PagedCache) -> Identity:
    return Identity.of(cache.spec, cache.made_for, calibration_of(cache))


class Sender:
    """One sequence on its way to another process. It must stay as it is until `send` returned.

    Args:
        cache: a KVCache or PagedCache.
        ids: token ids of the sequence, [tokens] or [1, tokens], padding left out.

    Raises:
        DataError: another number of ids, or a sequence that its tokens alone do not make (cropped into a page, pages dropped): `save` that cache instead.
    """

    def __init__(self, cache: Any, ids: Any, row: int = 0, *, blob_tokens: int = pages.BLOB_TOKENS) -> None:
        self._cache, self._row, self._ids = paged(cache), row, keys.token_ids(ids)
        self._groups = settled(self._cache, row)
        scheme, length = self._cache.spec.scheme, self._groups[0].sequences[row].length
        if len(self._ids) != length:
            raise DataError(f"{counted(len(self._ids), 'token id')} for a sequence of {counted(length, 'token')}; pass the ids of its tokens, padding left out")
        if not length or not pages.is_plain(self._groups, row):
            raise DataError(
                f"sequence {row} is empty, speculative, was cropped into a page or lost pages, so its tokens do not say what it is; save() its cache"
            )
        self._cuts = Cuts(scheme.num_sink_tokens, scheme.page_size, blob_tokens)
        self._blobs = pages.whole_blobs(self._groups, row, self._cuts)
        self._name = secrets.token_hex(16)
        self._most = 0  # blobs that were sent or begun, over all connections

    def send(self, connection: socket.socket) -> None:
        """Send what the receiver does not have yet, and wait until it has checked everything.

        Raises:
            FileFormatError: the receiver refuses, and the message says why; or it says that it has blobs that were never sent, or fewer than before.
            ConnectionError: it is gone. Call again with a new connection.
        """
        about = {"transfer": self._name, "ids": self._ids.tolist(), "blobs": self._blobs + 1, "blob_tokens": self._cuts.blob_tokens}
        _send(connection, blob.encode_bytes(Kind.ABOUT, _identity(self._cache), json.dumps(about).encode()))
        done = sent = self._confirmed(_answer(connection), 0)
        ahead: list[int] = []
        while done <= self._blobs:
            while sent <= self._blobs and (not ahead or sum(ahead) < WINDOW):
                pieces = self._blob(sent)
                self._most = max(self._most, sent + 1)
                _send(connection, pieces)
                ahead.append(sum(len(p) for p in pieces))
                sent += 1
            done = self._confirmed(_answer(connection), done + 1, sent)
            ahead = ahead[len(ahead) - (sent - done) :] if sent > done else []

    def _confirmed(self, count: int, least: int, most: int | None = None) -> int:
        """What the receiver says it has, if that can be: from `least` to what was sent."""
        most = self._most if most is None else most
        if not least <= count <= most:
            raise FileFormatError(f"the receiver says that it has {counted(count, 'blob')}, which cannot be: {least} to {most} of {self._blobs + 1}")
        return count

    def _blob(self, number: int) -> list[memoryview]:
        cuts, groups, state = self._cuts, self._groups, b""
        first, last = cuts.end(number), cuts.end(number + 1)
        if number < self._blobs:
            kind, held = Kind.PAGES, pages.pages_of(groups, self._row, cuts, number)
        else:
            kind, last = Kind.END, len(self._ids)
            held, state = pages.end_of(groups, self._row, cuts, number)
        blocks = blob.on_host(blocks_of(groups, self._row, held))
        return blob.encode(kind, _identity(self._cache), [p for p, _ in held], blocks, start=first, tokens=last - first, state=state)


class Receiver:
    """An empty sequence of a cache that another process fills. No pass may begin in that cache while `receive` runs.

    Attributes:
        received: blobs that arrived and were checked.
    """

    def __init__(self, cache: PagedCache, row: int = 0) -> None:
        self._cache, self._row = cache, row
        self._groups = self._empty()
        self.received = 0
        self._about: dict[str, Any] | None = None  # the transfer that is under way
        self._installed: list[Sequence] = []
        self._held: dict[Page, int] = {}

    def _empty(self) -> list[GroupState]:
        """The groups of the cache, between two passes and with nothing in the row."""
        groups = settled(self._cache, self._row, make=True)
        if length := groups[0].sequences[self._row].length:
            raise CacheStateError(f"sequence {self._row} holds {counted(length, 'token')}; receive into an empty one, or free({self._row}) first")
        return groups

    def receive(self, connection: socket.socket) -> list[int]:
        """Take the sequence. Returns its token ids. Once it is there, the row is to be freed before another, or the same again, can be received.

        Raises:
            CacheStateError: the sequence holds tokens, or the cache is in the middle of a pass; the sender is told.
            FileFormatError: of another version, scheme, model or calibration, or damaged on the way; the sender is told why.
            PoolFullError: pages are missing; the sender is told, and pages that arrived are free again.
            ConnectionError: the sender is gone. Call again with a new connection; what arrived is kept until then, or until `abandon`.
        """
        try:
            about = self._hello(connection)
            _tell(connection, self.received)
            while self.received < about["blobs"]:
                self._take(connection, about, self.received + 1 == about["blobs"])
                self.received += 1
                _tell(connection, self.received)
            self._about, self._installed = None, []
        except OSError:
            raise
        except Exception as error:
            self.abandon()
            _refuse(connection, str(error))
            raise
        return about["ids"]

    def abandon(self) -> None:
        """Give the pages back that arrived so far."""
        for page, page_id in self._held.items():
            self._groups[page.group].pools[page.pool].allocator.release(page_id)
        self._held, self._about, self._installed, self.received = {}, None, [], 0

    def _hello(self, connection: socket.socket) -> dict[str, Any]:
        header = Header.parse(_read(connection, blob.HEADER_BYTES), "what arrives")
        if reason := header.refuses(_identity(self._cache)):
            raise FileFormatError(f"the sender's cache is another than this one: {reason}")
        if header.kind != Kind.ABOUT or header.data_bytes > MOST_ABOUT:
            raise FileFormatError(f"a transfer begins with what it is, not with {header.data_bytes} bytes of kind {header.kind.name}")
        data = _read(connection, header.data_bytes)
        try:
            about = json.loads(data.rstrip(b"\0"))
            ids, blobs, scheme = about["ids"], about["blobs"], self._cache.spec.scheme
            self._cuts = Cuts(scheme.num_sink_tokens, scheme.page_size, about["blob_tokens"])
            if blob.checksum(data) != header.checksum or not all(type(n) is int for n in ids) or not ids or type(about["transfer"]) is not str:
                raise ValueError("its checksum is another, or it names no tokens")
            if type(blobs) is not int or not 1 <= blobs <= self._cuts.within(len(ids)) + 1:
                raise ValueError(f"{blobs!r} blobs for {counted(len(ids), 'token')}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, DataError) as error:
            raise FileFormatError(f"a transfer begins with what cannot be ({type(error).__name__}: {error})") from error
        if about == self._about and self._installed and self._stands(len(ids)):
            return about  # only the last answer was lost
        if about != self._about or self._installed:
            self.abandon()
            self._about = about
        self._empty()
        return about

    def _stands(self, length: int) -> bool:
        """Whether the row still holds what was installed."""
        rows = [g.sequences[self._row] for g in self._cache.groups if self._row < len(g.sequences)]
        return len(rows) == len(self._installed) and all(a is b and a.length == length for a, b in zip(rows, self._installed, strict=True))

    def _take(self, connection: socket.socket, about: dict[str, Any], last: bool) -> None:
        """One blob, from the socket into pages; behind the last, the sequence."""
        what, groups = f"blob {self.received} of what arrives", [g.group for g in self._groups]
        header = Header.parse(_read(connection, blob.HEADER_BYTES), what)
        start, end = self._cuts.end(self.received), len(about["ids"]) if last else self._cuts.end(self.received + 1)
        if (header.kind, header.start, header.tokens) != (Kind.END if last else Kind.PAGES, start, end - start) or header.table_bytes > MOST_TABLE:
            raise FileFormatError(f"{what} is not the next one")
        if reason := header.refuses(_identity(self._cache)):
            raise FileFormatError(f"{what} is another cache's: {reason}")
        table = Table.parse(header, _read(connection, header.table_bytes), groups, what)
        made = None
        if last:
            made = pages.whole(groups, end, table.pages, table.state, what)
            if missing := [p for _, listed in made for p in listed if p not in self._held and p not in set(table.pages)]:
                raise FileFormatError(f"{what} ends a sequence whose {missing[0]} never came")
        elif not pages.fit(table.pages, groups, range(self.received * self._cuts.blob_pages, (self.received + 1) * self._cuts.blob_pages)):
            raise FileFormatError(f"{what} holds pages of other tokens")
        blocks, taken = [], {}
        try:
            for page in table.pages:
                pool = self._groups[page.group].pools[page.pool]
                pool.reserve(1)
                taken[page] = pool.allocator.allocate()
                blocks.append(pool.block(taken[page]))
            self._fill(connection, blocks, table, what)
        except BaseException:
            for page, page_id in taken.items():
                self._groups[page.group].pools[page.pool].allocator.release(page_id)
            raise
        for page, page_id in taken.items():
            if (old := self._held.pop(page, None)) is not None:  # an END brings what a window still holds once more
                self._groups[page.group].pools[page.pool].allocator.release(old)
            self._held[page] = page_id
        if made is not None:
            self._install(made)

    def _fill(self, connection: socket.socket, blocks: list[torch.Tensor], table: Table, what: str) -> None:
        gpu = bool(blocks) and blocks[0].device.type == "cuda"
        for i, block in enumerate(blocks):
            staged = torch.empty(block.shape, dtype=torch.uint8, pin_memory=True) if gpu else block
            _read_into(connection, staged.numpy().data.cast("B"))
            if blob.damaged([staged], [table.sums[i]]) is not None:
                raise FileFormatError(f"{what} was damaged on its way: {table.pages[i]} has another checksum")
            if gpu:
                block.copy_(staged, non_blocking=True)

    def _install(self, made: list[tuple[Sequence, list[Page]]]) -> None:
        self._empty()  # since the transfer began, somebody may have filled it
        for state, (s, listed) in zip(self._groups, made, strict=True):
            new: dict[str, list[int]] = {name: [] for name in state.pools}
            for page in listed:
                new[page.pool].append(self._held.pop(page))
            for name, held in s.pages().items():
                s.renumber(name, [new[name][i] for i in held])
            state.replace(self._row, s)
        for page, page_id in self._held.items():  # what a window has left behind
            self._groups[page.group].pools[page.pool].allocator.release(page_id)
        self._held, self._installed = {}, [s for s, _ in made]


def _send(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Send pieces of memory; to a receiver that refused and went, find out why."""
    try:
        for piece in pieces:
            connection.sendall(piece)
    except OSError as error:
        try:
            while True:
                _answer(connection)
        except OSError:
            raise error from None


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        n = connection.recv_into(view)
        if not n:
            raise ConnectionError("the other process is gone in the middle of a transfer")
        view = view[n:]


def _read(connection: socket.socket, n: int) -> bytes:
    data = bytearray(n)
    _read_into(connection, memoryview(data))
    return bytes(data)


def _tell(connection: socket.socket, received: int) -> None:
    connection.sendall(_COUNT.pack(0, received))


def _refuse(connection: socket.socket, text: str) -> None:
    data = text.encode()[:4000]
    try:
        connection.sendall(_COUNT.pack(len(data), 0) + data)
    except OSError:  # nobody is there to be told
        return


def _answer(connection: socket.socket) -> int:
    length, received = _COUNT.unpack(_read(connection, _COUNT.size))
    if length:
        raise FileFormatError(f"the receiver refuses: {_read(connection, min(length, 4000)).decode(errors='replace')}")
    return received
