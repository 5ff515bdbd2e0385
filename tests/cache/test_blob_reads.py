"""Pages of blobs are read from files and host memory to where they belong, and damage is found by page."""

import os

import numpy as np
import pytest
import torch
from messages import raises

from kvbits import schemes
from kvbits.cache import blob
from kvbits.cache.blob import Identity, Kind, Page
from kvbits.cache.pool import Pool
from kvbits.cache.reading import DamagedError, GoneError, Memory, OpenFile, Reading, Wanted, parts_of, read_source
from kvbits.errors import FileFormatError
from kvbits.spec import CacheSpec, LayerGeometry

LAYERS = 6
SPEC = CacheSpec(
    scheme=schemes.get("int8", page_size=32),
    layers=(LayerGeometry(num_kv_heads=2, head_dim=64), LayerGeometry(num_kv_heads=1, head_dim=64)) * (LAYERS // 2),
    raw_dtype="float32",
)
GROUPS = SPEC.groups
IDENTITY = Identity.of(SPEC, "a model", bytes(12))
PAGES = [Page(0, "closed", 0), Page(0, "closed", 1), Page(1, "closed", 0), Page(0, "tail", 5), Page(1, "closed", 1)]


@pytest.fixture(params=["file", "memory"])
def written(request, tmp_path):
    """A blob in a file, behind 100 bytes, or in host memory; and its pages."""
    blocks = [torch.randint(0, 256, blob.block_shape(GROUPS[p.group], p.pool), dtype=torch.uint8) for p in PAGES]
    pieces = blob.encode(Kind.PART, IDENTITY, PAGES, blocks)
    if request.param == "memory":
        return Memory([np.frombuffer(piece, np.uint8).copy() for piece in pieces]), 0, blocks
    (tmp_path / "blob").write_bytes(bytes(100) + b"".join(pieces))
    return OpenFile(os.open(tmp_path / "blob", os.O_RDWR)), 100, blocks


def pools():
    """Room for the pages, those of the first layer group in two slabs."""
    found = {(g, name): Pool(GROUPS[g], name, None, torch.device("cpu")) for g, name in {p[:2] for p in PAGES}}
    for pool in found.values():
        for _ in range(3):
            pool.reserve(pool.allocator.num_free + 1)
            for slab in pool.slabs:
                slab.zero_()
    return found


def damage(medium, source, number, layer):
    """Flip a bit of a layer of a page."""
    at = source.starts[number] + layer * int(np.prod(source.shapes[number][1:])) + 7
    if isinstance(medium, Memory):
        medium._pieces[number + 1][at - source.starts[number]] ^= 1
    else:
        os.pwrite(medium.fd, bytes([os.pread(medium.fd, 1, at)[0] ^ 1]), at)


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4], [1, 4], [3]])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("parts", [None, 4, 100])
def test_pages_are_read_to_where_they_belong_and_damage_is_found_by_page(written, numbers, staged, parts):
    medium, offset, blocks = written
    source = read_source(medium, "name", "it", IDENTITY, GROUPS, offset)
    assert source.table.pages == PAGES
    room, came = pools(), []
    wanted = [Wanted(n, room[PAGES[n][:2]], PAGES[n].column % 3) for n in numbers]
    how = None if parts is None else parts_of(GROUPS, LAYERS, parts)

    def read():
        Reading([(source, wanted)], IDENTITY, torch.device("cpu"), staged=staged).run(
            how, lambda layers, _: came.append(layers)
        )

    read()
    assert came == ([0] if parts is None else {4: [1, 3, 4, 6], 100: [1, 2, 3, 4, 5, 6]}[parts])
    for n in range(len(PAGES)):
        found = room[PAGES[n][:2]].block(PAGES[n].column % 3)
        assert torch.equal(found, blocks[n]) if n in numbers else not found.any()
    source.check()
    damage(medium, source, numbers[-1], 2)
    page = PAGES[numbers[-1]]
    for call in (read, source.check):
        with raises(DamagedError, page.pool, f"page {page.column}", f"layer group {page.group}", "checksum"):
            call()


def test_a_blob_that_is_cut_short_is_refused_before_and_while_it_is_read(written):
    medium, offset, _ = written
    source = read_source(medium, "name", "it", IDENTITY, GROUPS, offset)
    if isinstance(medium, Memory):
        cut = Memory(medium._pieces[:-1])
    else:
        os.ftruncate(medium.fd, medium.size - 1)
        cut = medium
    with raises(FileFormatError, "truncated"):
        read_source(cut, "name", "it", IDENTITY, GROUPS, offset)
    with raises(DamagedError, "it", "ends"):
        source.read(4, torch.empty(1, *source.shapes[4], dtype=torch.uint8), slice(0, 3), cut)


def test_a_file_that_is_gone_and_what_the_system_refuses_are_other_errors(written, tmp_path):
    medium, offset, _ = written
    source = read_source(medium, "name", "it", IDENTITY, GROUPS, offset)
    room, fd = pools()[0, "closed"], os.open(tmp_path, os.O_RDONLY)
    for found, error in ((None, GoneError), (OpenFile(fd), IsADirectoryError)):
        names = []
        gone = type(source)(**(source.__dict__ | {"medium": None}))
        with pytest.raises(error):
            Reading(
                [(gone, [Wanted(0, room, 0)])],
                IDENTITY,
                torch.device("cpu"),
                lambda name, names=names, found=found: names.append(name) or found,
            ).run()
        assert names == ["name"]
