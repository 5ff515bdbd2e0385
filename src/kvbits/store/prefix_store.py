"""A store of prefixes: the pages of token sequences, found again by their tokens.

    store = kvbits.PrefixStore("/data/prefixes", max_bytes="200GB")
    store.put(cache, ids)                        # after a prompt went through the model
    store.load(empty_cache, ids)                 # -> tokens that need not be computed again

Files are blobs (docs/reference/formats.md) named by hashes of their tokens, so equal prefixes of equal models and
schemes are stored once. A load brings the bytes that were put. A damaged file is set aside, and its tokens are computed
again (docs/internals/store.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..cache import blob, transfer
from ..cache.blob import Identity
from ..cache.group import GroupState
from ..cache.paged_cache import PagedCache
from ..cache.reading import DamagedError, GoneError, parts_of
from ..errors import CacheStateError, DataError, FileFormatError, SpecError, UnsupportedError, counted
from ..units import human_bytes, parse_bytes, parse_tokens
from . import keys, pages
from .folder import Folder
from .namespace import MOST_FILES, Namespace, Shard, length_of, name_of
from .pages import Cuts
from .remote import RemoteFolder, local_tier

PIN = ".pin"
BLOB = re.compile(r"[0-9a-f]{40}(\+[0-9]+-[0-9a-f]{16})?\.[0-9]+-[0-9]+")


class StoreExplanation(dict[str, Any]):
    """The findings of `PrefixStore.explain`: a dict, which prints as a few lines."""

    def __str__(self) -> str:
        limit = "" if self["max_bytes"] is None else f" of {human_bytes(self['max_bytes'])}"
        lines = [f"{self['where']}: {counted(self['files'], 'file')}, {human_bytes(self['bytes'])}{limit}"]
        lines += [
            f"{name}: {counted(about['files'], 'file')}, {human_bytes(about['bytes'])}"
            for name, about in self["namespaces"].items()
        ]
        lines += [f"damaged, set aside: {name}: {why}" for name, why in self["damaged"].items()]
        return "\n".join(
            [*lines, "one line for each model, scheme and calibration, whose pages are never mixed"]
            if self["namespaces"]
            else lines
        )


class PrefixStore:
    """Prefixes of sequences in a folder, shared by any number of processes.

    Args:
        where: a folder, made where it is not there; or a URL of any file system that fsspec knows
            ("s3://bucket/prefixes").
        max_bytes: bytes, or "200GB", that the store is kept below by evicting files that were used least lately. None:
            only `evict` removes any. Each process evicts after it wrote, so several that put at once exceed the limit
            until then. For a remote store it is the limit of the local folder, which one prefix may pass while it is
            loaded; objects stay until the object store's own rules remove them.
        blob_tokens: tokens of one file, the unit in which prefixes are shared: 256, or 64 for short ones.
        local: folder that keeps what was used lately of a remote store (None: one in the user's cache folder).
        shard: (rank, ranks) where the caches hold that part of every layer's kv heads (tensor parallel). What ranks of
            one number put, ranks of another load.
        calibration: of all kv heads, where the caches have theirs cut out of it (a `Calibration`, or its `static`).
        made_for: names what `kvbits.identity` cannot see of the model, such as a hook that steers it. It names the
            whole model for caches that do not, and for shards, whose ranks would each name another.
        options: of the remote file system, as fsspec takes them.

    Raises:
        SpecError: an invalid size, shard or place.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        max_bytes: int | str | None = None,
        blob_tokens: int | str = pages.BLOB_TOKENS,
        local: str | Path | None = None,
        shard: Shard = (0, 1),
        calibration: Any = None,
        made_for: str | None = None,
        **options: Any,
    ) -> None:
        blob_tokens = parse_tokens(blob_tokens, "blob_tokens") if isinstance(blob_tokens, str) else blob_tokens
        Cuts(0, 1, blob_tokens)
        if not isinstance(where, (str, Path)) or not str(where):
            raise SpecError(f"a store at {where!r}: name a folder, or a URL like s3://bucket/prefixes")
        remote = isinstance(where, str) and "://" in where
        if not remote and (local is not None or options):
            raise SpecError(
                f"local={local!r} and options {sorted(options)} are of remote stores; {os.fspath(where)!r} is a folder"
            )
        self.blob_tokens, self.max_bytes = blob_tokens, None if max_bytes is None else _limit(max_bytes)
        if self.max_bytes == 0:
            raise SpecError("a store of max_bytes=0 keeps nothing; give it a size, or None for no limit")
        self.shard, self.made_for = _shard(shard), made_for
        self._whole = None if calibration is None else blob.calibration_id(getattr(calibration, "static", calibration))
        self.folder = RemoteFolder(str(where), local or local_tier(str(where)), options) if remote else Folder(where)
        self._damaged: dict[str, str] = {}  # files set aside, with the reason
        self._known: tuple[int, int] | None = None  # bytes when last counted, bytes written since

    def __repr__(self) -> str:
        return f"PrefixStore({self.where!r}, max_bytes={self.max_bytes}, blob_tokens={self.blob_tokens})"

    @property
    def where(self) -> str:
        """The folder or URL."""
        return self.folder.where

    # -- what is where ----------------------------------------------------------------------------------------------

    def _namespace(self, cache: PagedCache) -> Namespace:
        """Return the blobs that go with a cache."""
        ranks = self.shard[1]
        named = (self.made_for, None if ranks > 1 and self.made_for else cache.made_for)
        made_for = "\n".join(x for x in named if x is not None)
        if not made_for:
            raise SpecError(
                "this cache does not say whose keys and values it holds; KVCache.for_model does, for a PagedCache of"
                " your own set cache.made_for to a text that names the model and its weights"
            )
        identity = cache.identity.of_model(made_for)
        if ranks > 1:
            identity = self._of_rank(cache, made_for)
        scheme = cache.spec.scheme
        cuts = Cuts(scheme.num_sink_tokens, scheme.page_size, self.blob_tokens)
        return Namespace(self.folder, identity, [g.group for g in cache.held_groups], cuts, self._damaged)

    def _of_rank(self, cache: PagedCache, made_for: str) -> Identity:
        """Return the identity of a cache that holds a part of the kv heads: that of all heads, and which part it is."""
        rank, ranks = self.shard
        calibration = cache.identity.calibration
        if any(calibration):
            if self._whole is None:
                raise SpecError(
                    "a shard of a calibrated cache: pass PrefixStore(.., calibration=) that of all kv heads, so that"
                    " all ranks name it alike"
                )
            calibration = self._whole
        whole = tuple(dataclasses.replace(g, num_kv_heads=g.num_kv_heads * ranks) for g in cache.spec.layers)
        identity = Identity.of(dataclasses.replace(cache.spec, layers=whole), made_for, calibration)
        return dataclasses.replace(identity, kv_heads=identity.kv_heads // ranks, shard=rank, shards=ranks)

    def match(self, cache: PagedCache, ids: Any, *, extra: bytes = b"") -> int:
        """Count the tokens of a prompt that `load` would bring into an empty cache like this one."""
        found = length_of(self._namespace(paged(cache)).find(keys.token_ids(ids), extra))
        self._keep_size()
        return found

    def explain(self) -> StoreExplanation:
        """Count files and bytes of the store, of each namespace (a model, scheme and calibration) and in all.

        Returns:
            A dict, which prints as a few lines.
        """
        found: dict[str, dict[str, int]] = {}
        for e in self.folder.entries():
            about = found.setdefault(e.namespace, {"files": 0, "bytes": 0})
            about["files"] += 1
            about["bytes"] += e.nbytes
        total = {name: sum(x[name] for x in found.values()) for name in ("files", "bytes")}
        return StoreExplanation(
            {
                "where": self.where,
                "max_bytes": self.max_bytes,
                **total,
                "namespaces": found,
                "damaged": dict(self._damaged),
            }
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(e.nbytes for e in self.folder.entries())

    # -- put --------------------------------------------------------------------------------------------------------

    def put(self, cache: Any, ids: Any, row: int = 0, *, end: bool = True, extra: bytes = b"") -> int:
        """Store the pages of a sequence. Existing blobs are not written again.

        Args:
            cache: a KVCache or PagedCache.
            ids: token ids of the sequence, padding left out: [tokens] or [1, tokens]; may continue past what the cache
                holds.
            end: also store what only this very sequence has (its raw tail), so that loading exactly these tokens gives
                exactly this cache.
            extra: names what else the prompt consists of, such as a hash of its images. Prompts of equal ids and
                another `extra` share nothing; `match`, `load`, `park`, `resume`, `pin` and `unpin` take the same.

        Returns:
            Tokens of the sequence that can now be loaded, as `match` counts them.

        Raises:
            DataError: fewer ids than tokens, or no such sequence.
            UnsupportedError: the tokens were computed from more than their ids, such as images, which `extra` does not
                name.
            CacheStateError: the model changed since the cache was made (see `kvbits.identity`).
            SpecError: a folder or link is where a file of the store belongs.
            OSError: the disk is full, or the like. The store is as good as before.
        """
        known, tokens = paged(cache), keys.token_ids(ids)
        known.require_same_model()
        if not extra and (beyond := known.named_beyond_ids):
            raise UnsupportedError(
                f"the tokens of this cache were computed from {', '.join(beyond)} besides their ids, by which a store"
                " finds them; pass extra=, bytes that name all of it (a hash of the images, say), to put() and load()"
            )
        groups = settled(known, row)
        length = groups[0].sequences[row].length
        if len(tokens) < length:
            raise DataError(
                f"{counted(len(tokens), 'token id')} for a sequence of {counted(length, 'token')}; pass the ids of all"
                " of them, padding left out"
            )
        self._namespace(known).put(groups, row, tokens, end=end, extra=extra)
        self._keep_size()
        return self.match(known, tokens[:length], extra=extra)

    # -- load -------------------------------------------------------------------------------------------------------

    def load(self, cache: PagedCache, ids: Any, row: int = 0, *, wait: bool = True, extra: bytes = b"") -> int:
        """Load the longest stored prefix of a prompt into an empty sequence.

        A file that is damaged, cut short or under another's name is set aside: it is renamed to .damaged, with a
        warning that names it. The prefix before it is loaded.

        Args:
            cache: of the model, scheme and calibration that the pages are wanted for.
            ids: token ids [tokens] or [1, tokens].
            wait: False returns while pages are still on their way, the first layers before the last. Each layer of the
                next pass waits for its own pages, and any other use of the cache for all. If a page turns out to be
                damaged, its file is set aside, and a FileFormatError that names it takes the pass back. Then the cache
                takes nothing but `reset()` or `free(row)`.
            extra: as in `put`.

        Returns:
            Tokens loaded: the sequence's length now. The rest is to be computed.

        Raises:
            CacheStateError: the sequence is not empty.
            DataError: no PagedCache; a KVCache is made by `KVCache.from_prefix`.
            PoolFullError: pages are missing. Nothing changed.
        """
        tokens = keys.token_ids(ids)
        if not isinstance(cache, PagedCache):  # a KVCache counts the columns of its prompts, too
            raise DataError(
                f"load() into a {type(cache).__name__}, which is not a PagedCache; KVCache.from_prefix(model, ids,"
                " store=store) begins with a prefix"
            )
        cache.require_named_model()
        groups = settled(cache, row, make=True)
        if length := groups[0].sequences[row].length:
            raise CacheStateError(
                f"sequence {row} holds {counted(length, 'token')}; load a prefix into an empty one, or free({row})"
                " first"
            )
        space = self._namespace(cache)
        early = not wait and space.cuts.within(len(tokens)) < MOST_FILES  # all files are held open
        while True:
            plan = space.find(tokens, extra)
            if plan is None:
                break
            try:
                with cache.change("loading a prefix") as undo:
                    reading = transfer.admit(groups, [row], plan, space.identity, open_file=space.open)
                    space.use([source.name for one in plan.blobs for source in one])
                    if early:
                        undo.first = cache.arrivals.forget
                        parts = parts_of(space.groups, len(cache.spec.layers))
                        cache.arrivals.begin(row, reading, parts, lambda error: _late(space, row, error))
                    else:
                        reading.run()
                break
            except GoneError:
                continue
            except DamagedError as error:
                space.set_aside(error)
        self._keep_size()
        return length_of(plan)

    # -- sequences that wait ----------------------------------------------------------------------------------------

    def park(self, cache: Any, ids: Any, row: int = 0, *, extra: bytes = b"") -> int:
        """Move a sequence that nobody continues for a while out of its cache. It is stored and pinned, and its pages
        are freed.

        `resume` brings it back as it was.

        Args:
            ids: as in `put`. Sequences of equal tokens are stored and pinned once, so the first of them that is resumed
                lets go of the pin.

        Returns:
            Bytes of the cache that are free now and were not before. They stay allocated, so `nbytes` of the cache does
            not change.

        Raises:
            CacheStateError: the sequence is empty, or the store could not give all of it back: it was cropped into a
                page, lost pages, or holds speculative tokens. It stays in the cache; `swap_out` takes such sequences.
        """
        known, tokens = paged(cache), keys.token_ids(ids)
        length = settled(known, row)[0].sequences[row].length
        stored = self.put(known, tokens, row, extra=extra)
        if length and stored == length and (stored := self._pin(known, tokens[:length], extra)) < length:
            self.unpin(known, tokens[:length], extra=extra)  # somebody evicted some of it just now
        if not length or stored < length:
            raise CacheStateError(
                f"sequence {row} of {counted(length, 'token')} cannot be parked: {stored} of them would come back;"
                f" swap_out({row}) takes it whole"
            )
        before = known.bytes_by_kind()["free"]
        known.free(row)
        return known.bytes_by_kind()["free"] - before

    def resume(self, cache: Any, ids: Any, row: int = 0, *, extra: bytes = b"") -> int:
        """Bring a parked sequence back into an empty row and let it be evicted again.

        Returns the tokens that came, as `load` does: fewer than it had only where a file was damaged or removed
        meanwhile.

        Args:
            ids: of the tokens that were parked.
        """
        tokens = keys.token_ids(ids)
        length = self.load(paged(cache), tokens, row, extra=extra)
        for parked in {length, len(tokens)}:
            self.unpin(cache, tokens[:parked], extra=extra)
        return length

    # -- what stays -------------------------------------------------------------------------------------------------

    def pin(self, cache: Any, ids: Any, *, extra: bytes = b"") -> int:
        """Keep the stored prefix of these tokens whatever `max_bytes` is, until `unpin`. Each rank pins the files of
        its own shard. Returns the number of pinned tokens.

        Raises:
            DataError: nothing of it is stored.
        """
        known, tokens = paged(cache), keys.token_ids(ids)
        length = self._pin(known, tokens, extra)
        self._keep_size()
        if not length:
            raise DataError(
                f"nothing of these {counted(len(tokens), 'token')} is stored for this model and scheme; put them first"
            )
        return length

    def _pin(self, cache: PagedCache, tokens: np.ndarray, extra: bytes) -> int:
        """Pin a prefix and return its tokens, 0 where nothing is stored. The folder is locked, so nobody evicts
        meanwhile.
        """
        with self.folder.locked():
            space = self._namespace(cache)
            plan = space.find(tokens, extra)
            if plan is None:
                return 0
            text = json.dumps([source.name for one in plan.blobs for source in one]).encode()
            self.folder.write(space.name, [(_pin_name(tokens, self.shard, extra), [memoryview(text)])])
            return length_of(plan)

    def unpin(self, cache: Any, ids: Any, *, extra: bytes = b"") -> bool:
        """Let a pinned prefix be evicted again. Returns whether it was pinned."""
        space = self._namespace(paged(cache)).name
        return self.folder.remove(space, _pin_name(keys.token_ids(ids), self.shard, extra))

    def evict(self, max_bytes: int | str | None = None) -> int:
        """Remove the least recently used files until the store has at most `max_bytes` (None: its own `max_bytes`).
        Pinned files stay.

        Returns:
            Bytes removed.
        """
        limit = self.max_bytes if max_bytes is None else _limit(max_bytes)
        if limit is None:
            raise SpecError("evict() of a store without max_bytes; say how many bytes may stay")
        with self.folder.locked():
            entries = sorted(self.folder.entries(), key=lambda e: e.used)
            total, removed = sum(e.nbytes for e in entries), 0
            pinned = {
                (e.namespace, name)
                for e in entries
                if e.name.endswith(PIN)
                for name in self._pinned(e.namespace, e.name)
            }
            for e in entries:
                if total - removed <= limit:
                    break
                if (
                    not e.name.endswith(PIN)
                    and (e.namespace, e.name) not in pinned
                    and self.folder.remove(e.namespace, e.name)
                ):
                    removed += e.nbytes
        self._known = (total - removed, 0)
        return removed

    def _pinned(self, space: str, name: str) -> list[str]:
        if (file := self.folder.open(space, name)) is None:
            return []
        try:
            found = json.loads(file.bytes_at(0, 1 << 26))
            return [x for x in found if isinstance(x, str)]
        except (ValueError, TypeError, RecursionError):
            return []

    def _keep_size(self) -> None:
        """Evict when the store has outgrown its size: counted anew after every sixteenth of it that this process wrote,
        since others write too.
        """
        written, self.folder.written = self.folder.written, 0
        if self.max_bytes is None or not written:
            return
        if self._known is None or self._known[1] + written > self.max_bytes // 16:
            self._known = (self.nbytes, 0)
        else:
            self._known = (self._known[0], self._known[1] + written)
        if sum(self._known) > self.max_bytes:
            self.evict()

    def check(self, cache: Any) -> list[str]:
        """Read every blob of this cache's model, scheme and calibration and compare checksums.

        Returns what is wrong, by file; nothing is set aside.
        """
        known, wrong = paged(cache), []
        space = self._namespace(known)
        for e in list(self.folder.entries()):
            if e.namespace != space.name or not BLOB.fullmatch(e.name) or not e.name.endswith(name_of("", self.shard)):
                continue
            try:
                if source := space.source(e.name):
                    source.check()
            except FileFormatError as error:
                wrong.append(str(error))
        return wrong


def _late(space: Namespace, row: int, error: BaseException) -> BaseException:
    """Make the error of a pass that a damaged file ends."""
    if not isinstance(error, DamagedError):
        return error
    space.set_aside(error)
    return DamagedError(
        error.name,
        f"{error}; what had begun to use it was taken back: reset() the cache, or free({row}), and load again",
    )


def _pin_name(tokens: np.ndarray, shard: Shard, extra: bytes) -> str:
    """Return the name of a pin: each shard pins its own files."""
    stem = hashlib.sha256((hashlib.sha256(extra).digest() if extra else b"") + tokens.tobytes()).hexdigest()[:40]
    return (stem if shard == (0, 1) else name_of(stem, shard)) + PIN


def _shard(shard: Shard) -> Shard:
    match shard:
        case (int(rank), int(size)) if type(rank) is type(size) is int and 0 <= rank < size < 1 << 16:
            return rank, size
    raise SpecError(f"shard={shard!r} must be (rank, ranks) with 0 <= rank < ranks")


def _limit(size: int | str) -> int:
    """Return bytes of a number, or of text like "200GB" (`units.parse_bytes`)."""
    return size if type(size) is int and size >= 0 else parse_bytes(str(size), "max_bytes")


def paged(cache: Any) -> PagedCache:
    found = getattr(cache, "pages", cache)
    if not isinstance(found, PagedCache):
        raise DataError(f"{type(cache).__name__} is neither a KVCache nor a PagedCache")
    return found


def settled(cache: PagedCache, row: int, make: bool = False) -> list[GroupState]:
    """Return the groups of a cache between two passes, with the row that is asked for."""
    if cache.in_pass:
        raise CacheStateError(
            "a prefix is stored or loaded in the middle of a forward pass; finish it, or call reset() or abandon()"
        )
    groups = cache.groups
    if make and type(row) is int and cache.batch_size <= row < (cache.built_for[0] or 1):
        with cache.change("making a row"):
            for g in groups:
                g.resize(row + 1)
    if type(row) is not int or not 0 <= row < cache.batch_size:
        raise DataError(f"sequence {row!r} does not exist; the cache holds {cache.batch_size}")
    return groups
