"""Pages of blobs are read from files to where they belong, in one thread or several, and damage is found by page."""

import os

import numpy as np
import pytest
import torch

from kvbits.cache import blob


@pytest.fixture
def written(tmp_path):
    """Pages of three shapes in a file, one after the other behind 100 bytes; where each begins, and its checksums."""
    pages = [
        torch.randint(0, 256, shape, dtype=torch.uint8)
        for shape in ((1, 1, 8), (5, 3, 9000), (40, 2, 64), (2, 1, 300_000))
    ]
    path = tmp_path / "pages"
    path.write_bytes(bytes(100) + b"".join(p.numpy().tobytes() for p in pages))
    starts = [100 + sum(p.numel() for p in pages[:i]) for i in range(len(pages))]
    return path, pages, starts, [blob.checksums(p.numpy().reshape(len(p), -1)) for p in pages]


def read(path, pages, starts, sums):
    to = [torch.full_like(p, 0xFF) for p in pages]
    fd = os.open(path, os.O_RDONLY)
    try:
        return blob.read_pages(fd, [blob.Read(*x) for x in zip(starts, to, sums, strict=True)]), to
    finally:
        os.close(fd)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1]])
def test_pages_are_read_to_where_they_belong_and_damage_is_found_by_page(written, order):
    path, pages, starts, sums = written
    taken = [[x[i] for i in order] for x in (pages, starts, sums)]
    bad, got = read(path, *taken)
    assert bad is None
    assert all(torch.equal(a, b) for a, b in zip(got, taken[0], strict=True))
    data = bytearray(path.read_bytes())
    for at, number in ((starts[1] + 3, 1), (starts[1] + 27_000 * 4, 1), (len(data) - 1, 3)):
        data[at] ^= 4
        path.write_bytes(data)
        assert read(path, *taken)[0] == order.index(number)
        assert read(path, *taken[:2], [None] * len(order))[0] is None, "nobody asked for checksums"
        data[at] ^= 4
    path.write_bytes(data[:-1])
    assert read(path, *taken)[0] == order.index(3)
    path.write_bytes(data[:50])
    assert read(path, *taken)[0] == 0


def test_what_the_system_refuses_is_its_error(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            blob.read_pages(fd, [blob.Read(0, torch.empty(1, 1, 8, dtype=torch.uint8), None)])
    finally:
        os.close(fd)


def test_threads_read_several_files_and_name_the_first_bad_piece(tmp_path):
    pages = [torch.randint(0, 256, (6, 2, 80_000), dtype=torch.uint8) for _ in range(9)]
    sums = [blob.checksums(p.numpy().reshape(6, -1)) for p in pages]
    fds = []
    for i in range(3):
        (tmp_path / str(i)).write_bytes(b"".join(p.numpy().tobytes() for p in pages[3 * i : 3 * i + 3]))
        fds.append(os.open(tmp_path / str(i), os.O_RDWR))
    to = [torch.zeros_like(p) for p in pages]
    # the last four layers of each page
    rows = [
        (fds[i // 3], (i % 3) * 960_000 + 2 * 160_000, to[i][2:].data_ptr(), sums[i][2:].ctypes.data, 4, 160_000)
        for i in range(9)
    ]
    pieces = np.array(rows, blob.PIECE)
    try:
        assert blob.read_pieces(pieces, 4) is None
        assert all(torch.equal(a[2:], b[2:]) and not b[:2].any() for a, b in zip(pages, to, strict=True))
        for at in (7, 4, 5):  # by piece: damage its last byte
            os.pwrite(fds[at // 3], bytes([int(pages[at][-1, -1, -1]) ^ 1]), (at % 3 + 1) * 960_000 - 1)
        assert {blob.read_pieces(pieces, n) for n in (1, 2, 4, 50)} == {4}
        os.ftruncate(fds[0], 1_000_000)
        assert {blob.read_pieces(pieces, n) for n in (1, 3)} == {1}
        assert blob.read_pieces(pieces[:0], 4) is None
    finally:
        for fd in fds:
            os.close(fd)
