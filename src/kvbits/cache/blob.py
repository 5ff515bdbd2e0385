"""One blob: pages of all layers of a run of tokens, behind a header of 128 bytes that says what they are
(docs/reference/formats.md has the bytes).

The same blob is a part of a saved cache, of a sequence in host memory and of a prefix store, and a message on the wire.
Its pages are the bytes that attention reads. `transfer` makes blobs of sequences and sequences of blobs, and `reading`
reads them.

Checksums are XXH3 of 64 bits. There is one for every page of every layer, so that a layer can be used as soon as its
own bytes are there.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from ..errors import FileFormatError, counted
from ..spec import FORMATS_VERSION, CacheSpec, LayerGroup

MAGIC = b"\x89kvbits\n"
BLOB_VERSION = 3
"""Version of the header, the table and the JSON; `FORMATS_VERSION` is that of the pages."""
HEADER = struct.Struct("<8sHHHHQIIHHHHIIQQ12s12s12s20sII")
HEADER_BYTES = HEADER.size
_FIELDS = (
    *("kind", "rope", "start", "tokens", "page_size", "layers", "shard", "shards", "kv_heads", "pages", "table_bytes"),
    *("data_bytes", "checksum", "scheme", "model", "calibration", "key", "table_crc"),
)
"""Fields of a header and its identity, in the order of the bytes."""
ALIGNMENT = 64
MOST_PAGES = 1 << 20
"""Pages of one blob; far more than any writer puts into one."""
POOLS = ("sink", "closed", "tail")
_ENTRY = np.dtype([("group", "<u2"), ("pool", "<u2"), ("column", "<u4")])
_WORD = np.dtype("<u8")


class Kind(IntEnum):
    """Kinds of blobs."""

    PAGES = 1  # closed pages: good for every sequence that begins with these tokens
    END = 2  # the last pages of a sequence, and the page lists that make it of all its blobs
    PART = 3  # pages that an END behind it names
    ABOUT = 4  # JSON: the cache that the blobs behind it are of
    PARAMETERS = 5  # calibrated ones, float32


_KINDS = frozenset(Kind)


class Page(NamedTuple):
    """A page in a blob: all layers of a layer group.

    `column` is its place in the sequence (sinks apart), or in the file.
    """

    group: int
    pool: str
    column: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of the cache that pages belong to. Blobs of equal identities go together.

    Attributes:
        scheme: of the whole cache spec, all heads included, and of the version of the page formats.
        model, calibration: fingerprints; zeros where nobody said, or nothing is calibrated.
        shard, shards: which part of every layer's kv heads this is.
    """

    scheme: bytes
    model: bytes
    calibration: bytes
    rope: int
    layers: int
    page_size: int
    kv_heads: int
    shard: int = 0
    shards: int = 1

    @classmethod
    def of(cls, spec: CacheSpec, made_for: str | None, calibration: bytes) -> Identity:
        """Return the identity of a cache that holds all kv heads, and a calibration of this id."""
        turned = {1 if g.key.pre_rope else 3 if g.key.needs_rotary else 0 for g in spec.groups}
        unnamed = cls(
            scheme=short(spec.format_id.encode()),
            model=bytes(12),
            calibration=calibration,
            rope=2 if len(turned) > 1 else turned.pop(),
            layers=len(spec.layers),
            page_size=spec.scheme.page_size,
            kv_heads=max(g.num_kv_heads for g in spec.layers),
        )
        return unnamed.of_model(made_for)

    def of_model(self, made_for: str | None) -> Identity:
        """Return the same of another model; None for one that nobody named."""
        return replace(self, model=short(made_for.encode()) if made_for else bytes(12))


_WHOSE = [f.name for f in fields_of(Identity)]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first 128 bytes (docs/reference/formats.md).

    Sizes are bytes; `start` and `tokens` are positions of the sequence.
    """

    kind: Kind
    identity: Identity
    data_bytes: int
    checksum: int
    start: int = 0
    tokens: int = 0
    pages: int = 0
    table_bytes: int = 0
    key: bytes = bytes(20)
    table_crc: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole blob."""
        return HEADER_BYTES + self.table_bytes + self.data_bytes

    def pack(self) -> bytes:
        fields = self.__dict__ | self.identity.__dict__
        head = HEADER.pack(MAGIC, BLOB_VERSION, FORMATS_VERSION, *(fields[name] for name in _FIELDS), 0)[:-4]
        return head + zlib.crc32(head).to_bytes(4, "little")

    @classmethod
    def parse(cls, data: bytes, what: str) -> Header:
        """Read the header at the beginning of `data`.

        Raises:
            FileFormatError: `what` is truncated, damaged, something else, or of another version.
        """
        if len(data) < HEADER_BYTES:
            raise FileFormatError(
                f"{what} is truncated: {counted(len(data), 'byte')} where a blob has a header of {HEADER_BYTES}"
            )
        magic, version, formats, *values, crc = HEADER.unpack(data[:HEADER_BYTES])
        fields = dict(zip(_FIELDS, values, strict=True))
        if magic != MAGIC:
            raise FileFormatError(f"{what} is not a kvbits blob: it begins with {magic!r}")
        for name, found, ours in (
            ("blob_version", version, BLOB_VERSION),
            ("formats_version", formats, FORMATS_VERSION),
        ):
            if found != ours:
                raise FileFormatError(
                    f"{what} has {name} {found}, but this kvbits reads {ours}; read it with the version that wrote it,"
                    " or make it again"
                )
        if zlib.crc32(data[: HEADER_BYTES - 4]) != crc:
            raise FileFormatError(f"the header of {what} is damaged: CRC-32 mismatch")
        identity = Identity(**{name: fields.pop(name) for name in _WHOSE})
        kind, pages, table_bytes, data_bytes = (fields[x] for x in ("kind", "pages", "table_bytes", "data_bytes"))
        if (
            kind not in _KINDS
            or pages > MOST_PAGES
            or table_bytes % ALIGNMENT
            or data_bytes >= 1 << 62
            or not identity.shard < identity.shards
            or (kind in (Kind.ABOUT, Kind.PARAMETERS) and (pages or table_bytes))
        ):
            raise FileFormatError(
                f"{what} has an invalid header: kind {kind}, {pages} pages, {data_bytes} bytes,"
                f" shard {identity.shard} of {identity.shards}"
            )
        return cls(identity=identity, **fields | {"kind": Kind(kind)})

    def refuses(self, wanted: Identity) -> str | None:
        """Return why a cache of identity `wanted` cannot take this blob, or None. A side that names no model
        takes any.
        """
        mine = self.identity
        if mine.scheme != wanted.scheme:
            return "it is of another scheme or geometry"
        if mine.model != wanted.model and bytes(12) not in (mine.model, wanted.model):
            return "it is of another model"
        if mine.calibration != wanted.calibration:
            return "it is of another calibration"
        if (mine.rope, mine.layers, mine.page_size) != (wanted.rope, wanted.layers, wanted.page_size):
            return "its layers or page sizes differ"
        if mine.kv_heads * mine.shards != wanted.kv_heads * wanted.shards:
            return (
                f"its kv heads differ: {mine.kv_heads} in each of {mine.shards} shards, here {wanted.kv_heads} in"
                f" each of {wanted.shards}"
            )
        return None


@dataclass(frozen=True)
class Table:
    """The table behind the header. It lists the pages in order and their checksums, and holds what else of a sequence
    does not follow from its pages.

    Attributes:
        pages: no page twice.
        sums: per page uint64 [layers of its group].
        state: JSON, or nothing.
    """

    pages: list[Page]
    sums: list[np.ndarray]
    state: bytes = b""

    def pack(self) -> bytes:
        entries = np.array([(p.group, _pool_code(p.pool), p.column) for p in self.pages], _ENTRY)
        table = entries.tobytes() + b"".join(s.astype(_WORD).tobytes() for s in self.sums) + self.state
        return table + b" " * (-len(table) % ALIGNMENT)

    @classmethod
    def parse(cls, header: Header, data: bytes, groups: Sequence[LayerGroup], what: str) -> Table:
        """Read the table of a blob whose header is known.

        Args:
            data: `header.table_bytes` bytes behind the header.
            groups: layer groups of the shard that wrote the blob.

        Raises:
            FileFormatError: damaged, or pages that a cache of these groups cannot have, or a size that does not follow
                from them.
        """
        if len(data) != header.table_bytes or zlib.crc32(data) != header.table_crc:
            raise FileFormatError(f"the table of {what} is truncated or damaged")
        at = header.pages * _ENTRY.itemsize
        if at > len(data):
            raise FileFormatError(f"the table of {what} has no room for {header.pages} pages")
        pages = [
            Page(*_known(int(g), int(p), groups, what), int(c)) for g, p, c in np.frombuffer(data[:at], _ENTRY).tolist()
        ]
        layers = [len(groups[p.group].layers) for p in pages]
        first, at = at, at + 8 * sum(layers)
        if at > len(data) or len(set(pages)) != len(pages):
            raise FileFormatError(f"the table of {what} names a page twice, or ends before its checksums do")
        stated = data[first:at]
        words, ends = np.frombuffer(stated, _WORD), list(accumulate(layers))
        sums = [words[end - n : end] for n, end in zip(layers, ends, strict=True)]
        if (nbytes := sum(groups[p.group].block_bytes(p.pool) for p in pages)) != header.data_bytes:
            raise FileFormatError(
                f"{what} holds {header.data_bytes} bytes of pages where {counted(len(pages), 'page')} of this kind take"
                f" {nbytes}"
            )
        if header.checksum != checksum(stated):
            raise FileFormatError(f"the header of {what} states another checksum than its table")
        return cls(pages, sums, data[at:].strip())


def _pool_code(pool: str) -> int:
    return POOLS.index(pool) if pool in POOLS else len(POOLS) + int(pool[4:])


def _known(group: int, pool: int, groups: Sequence[LayerGroup], what: str) -> tuple[int, str]:
    """Return the layer group and name of a pool by their numbers."""
    if group >= len(groups) or pool >= len(groups[group].pools):
        raise FileFormatError(
            f"{what} holds a page of pool {pool} of layer group {group}, which this scheme and geometry do not have"
        )
    return group, groups[group].pools[pool]


# -- ids and checksums
# ----------------------------------------------------------------------------------------------------


def short(data: bytes) -> bytes:
    """Return 12 bytes that name `data`."""
    return hashlib.sha256(data).digest()[:12]


def calibration_id(static: Sequence[dict[str, torch.Tensor]]) -> bytes:
    """Return 12 bytes that name calibrated parameters; zeros for none."""
    if not any(static):
        return bytes(12)
    digest = hashlib.sha256()
    for layer, tensors in enumerate(static):
        for name, x in sorted(tensors.items()):
            digest.update(f"{layer}.{name}{tuple(x.shape)}".encode())
            digest.update(as_float32(x))
    return digest.digest()[:12]


def as_float32(x: torch.Tensor) -> bytes:
    return x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes()


def checksums(units: np.ndarray) -> np.ndarray:
    """Return uint64 [n] of uint8 [n, bytes], rows contiguous."""
    from xxhash import xxh3_64_intdigest  # needed by what saves and loads, not by every cache

    return np.array([xxh3_64_intdigest(row.data) for row in units], np.uint64)


def checksum_of_sums(sums: Iterable[np.ndarray]) -> int:
    """Return the checksum of a blob's data: that of all its pages' checksums."""
    return checksum(b"".join(s.astype(_WORD).tobytes() for s in sums))


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum of bytes: XXH3 of 64 bits. Large ones are hashed without Python's lock."""
    from xxhash import xxh3_64_intdigest

    return int(xxh3_64_intdigest(data))


def block_sums(block: torch.Tensor) -> np.ndarray:
    """Return checksums [layers] of a page [layers, H, head_bytes] on the host."""
    return checksums(block.numpy().reshape(block.shape[0], -1))


# -- bytes
# ----------------------------------------------------------------------------------------------------------------


def block_shape(group: LayerGroup, pool: str) -> tuple[int, int, int]:
    """Return layers, kv heads, bytes of a head: a page of a pool."""
    layout = group.layouts[pool]
    return len(group.layers), layout.num_kv_heads, layout.head_bytes


def encode(
    kind: Kind,
    identity: Identity,
    pages: list[Page],
    blocks: Iterable[torch.Tensor],
    *,
    start: int = 0,
    tokens: int = 0,
    key: bytes = bytes(20),
    state: bytes = b"",
) -> list[memoryview]:
    """Make a blob, as pieces of memory: header and table, then the pages where they lie.

    Args:
        blocks: uint8 [layers, H, head_bytes] of each page, on the host; looked at one after the other.
        key: names the tokens (see `store.keys`).
    """
    sums, data = [], []
    for block in blocks:
        sums.append(block_sums(block))
        data.append(block.numpy().data.cast("B"))
    table = Table(pages, sums, state).pack()
    header = Header(
        kind=kind,
        identity=identity,
        start=start,
        tokens=tokens,
        pages=len(pages),
        table_bytes=len(table),
        data_bytes=sum(map(len, data)),
        checksum=checksum_of_sums(sums),
        key=key,
        table_crc=zlib.crc32(table),
    )
    return [memoryview(header.pack() + table), *data]


def encode_bytes(kind: Kind, identity: Identity, data: bytes) -> list[memoryview]:
    """Make a blob without pages. Its data is padded with zeros to `ALIGNMENT`."""
    data += bytes(-len(data) % ALIGNMENT)
    header = Header(kind=kind, identity=identity, data_bytes=len(data), checksum=checksum(data))
    return [memoryview(header.pack()), memoryview(data)]


def write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    """Write pieces of memory to a file, one after the other."""
    left = list(pieces)
    while left:
        _take_off(left, os.writev(fd, left[: os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16]))


def _take_off(pieces: list[memoryview], nbytes: int) -> None:
    while pieces and nbytes >= len(pieces[0]):
        nbytes -= len(pieces.pop(0))
    if nbytes:
        pieces[0] = pieces[0][nbytes:]
