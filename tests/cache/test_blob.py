"""The bytes of a blob: its header and table pinned literally, its checksum against the definition, everything that is
not one refused.
"""

import dataclasses
import zlib

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions, raises

from kvbits import schemes
from kvbits.cache import blob
from kvbits.cache.blob import Header, Identity, Kind, Page, Table
from kvbits.errors import FileFormatError
from kvbits.spec import CacheSpec, LayerGeometry

SPEC = CacheSpec(
    scheme=schemes.get("int8", page_size=32),
    layers=(LayerGeometry(num_kv_heads=1, head_dim=64),) * 2,
    raw_dtype="float32",
)
IDENTITY = Identity(
    scheme=b"s" * 12,
    model=b"m" * 12,
    calibration=b"c" * 12,
    rope=0,
    layers=2,
    page_size=32,
    kv_heads=1,
    shard=1,
    shards=2,
)
MASK = 2**64 - 1


def one_page() -> tuple[list[memoryview], torch.Tensor]:
    shape = blob.block_shape(SPEC.groups[0], "closed")
    block = (torch.arange(np.prod(shape)) % 251).to(torch.uint8).view(shape)
    return (
        blob.encode(Kind.PAGES, IDENTITY, [Page(0, "closed", 7)], [block], start=224, tokens=32, key=b"k" * 20),
        block,
    )


def test_the_bytes_of_a_header_are_these():
    pieces, block = one_page()
    head = bytes(pieces[0])
    sums = [xxhash.xxh3_64_intdigest(layer.numpy().tobytes()) for layer in block]
    table = bytes([0, 0, 1, 0, 7, 0, 0, 0]) + b"".join(s.to_bytes(8, "little") for s in sums)
    table += b" " * 40
    fields = [
        (3, 2),
        (2, 2),
        (1, 2),
        (0, 2),
        (224, 8),
        (32, 4),
        (32, 4),
        (2, 2),
        (1, 2),
        (2, 2),
        (1, 2),
        (1, 4),
        (64, 4),
        (block.numel(), 8),
    ]
    want = b"\x89kvbits\n" + b"".join(n.to_bytes(size, "little") for n, size in fields)
    want += (
        xxhash.xxh3_64_intdigest(table[8:24]).to_bytes(8, "little")
        + b"s" * 12
        + b"m" * 12
        + b"c" * 12
        + b"k" * 20
        + zlib.crc32(table).to_bytes(4, "little")
    )
    want += zlib.crc32(want).to_bytes(4, "little")
    assert len(want) == 128
    assert head == want + table
    assert b"".join(pieces)[192:] == block.numpy().tobytes()
    header = Header.parse(head, "it")
    assert header.pack() == want
    read = Table.parse(header, head[128:], SPEC.groups, "it")
    assert read.pages == [Page(0, "closed", 7)]
    assert np.array_equal(blob.block_sums(block), read.sums[0])


def test_checksums_are_xxh3():
    """The first lines of xxHash's own test vectors (seed 0): nothing, and one byte of its generator."""
    assert blob.checksum(b"") == 0x2D06800538D394C2 and blob.checksum(bytes([0])) == 0xC44BDFF4074EECDB
    units = torch.randint(0, 256, (5, 9001), dtype=torch.uint8).numpy()
    assert blob.checksums(units).tolist() == [xxhash.xxh3_64_intdigest(x.tobytes()) for x in units]


@given(st.data())
def test_any_damage_within_a_word_is_found(data):
    pieces, block = one_page()
    sums = Table.parse(Header.parse(bytes(pieces[0]), "it"), bytes(pieces[0])[128:], SPEC.groups, "it").sums
    words = block.view(-1).numpy().view(np.uint64)
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] ^= np.uint64(data.draw(st.integers(1, MASK)))
    assert not np.array_equal(blob.block_sums(block), sums[0])


@given(st.integers(0, 127), st.integers(1, 255))
def test_every_damaged_header_is_refused(at, bits):
    head = bytearray(bytes(one_page()[0][0]))
    head[at] ^= bits
    with raises(FileFormatError, "the file"):
        Header.parse(bytes(head), "the file")


@given(st.integers(128, 191), st.integers(1, 255))
def test_every_damaged_table_is_refused(at, bits):
    head = bytearray(bytes(one_page()[0][0]))
    head[at] ^= bits
    with raises(FileFormatError, "the table of the file"):
        Table.parse(Header.parse(bytes(head), "the file"), bytes(head[128:]), SPEC.groups, "the file")


@pytest.mark.parametrize(
    ("page", "parts"),
    [(Page(1, "closed", 0), ("pool 1", "layer group 1")), (Page(0, "tier0", 0), ("pool 3", "layer group 0"))],
)
def test_pages_that_the_geometry_does_not_have_are_refused(page, parts):
    pieces, block = one_page()
    header = Header.parse(bytes(pieces[0]), "it")
    table = Table([page], [blob.block_sums(block)]).pack()
    with raises(FileFormatError, *parts):
        Table.parse(dataclasses.replace(header, table_crc=zlib.crc32(table)), table, SPEC.groups, "it")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"scheme": b"x" * 12}, ("scheme", "geometry")),
        ({"model": b"x" * 12}, ("model",)),
        ({"calibration": bytes(12)}, ("calibration",)),
        ({"rope": 1}, ("layers", "page sizes")),
        ({"page_size": 64}, ("layers", "page sizes")),
        ({"kv_heads": 2}, (2, "2 shards", 1)),
        ({"kv_heads": 2, "shards": 1, "shard": 0}, None),
        ({}, None),
    ],
)
def test_what_is_of_somebody_else_says_whose(change, parts):
    pieces, _ = one_page()
    header = Header.parse(bytes(pieces[0]), "it")
    found = dataclasses.replace(header, identity=dataclasses.replace(IDENTITY, **change)).refuses(IDENTITY)
    assert found is None if parts is None else mentions(found, *parts)
