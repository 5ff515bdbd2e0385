"""Pages of blobs by the CPU library: their checksums, and reading them from a file; both without Python's lock, on the calling thread."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .library import ReadStruct, check, library

_PIECE = np.dtype([("offset", "i8"), ("to", "u8"), ("sums", "u8"), ("layers", "i8"), ("layer_bytes", "i8")])


def checksums(units: np.ndarray) -> np.ndarray:
    """uint64 [n] of contiguous uint8 [n, bytes], whole words each."""
    sums = np.empty(len(units), np.uint64)
    check(library().kvbits_checksums(units.ctypes.data, len(units), units.shape[1], sums.ctypes.data))
    return sums


def read_pages(fd: int, pieces: Sequence[tuple[int, int, int, int, int]]) -> int | None:
    """Read pages to where they belong and compare their checksums.

    Args:
        pieces: of each page where it begins in the file, the address it goes to, that of its checksums uint64 [layers] (0: not checked), its layers, and the
            bytes of one of them.

    Returns:
        The first page that is not in the file as it should be, or None.

    Raises:
        OSError: of the system.
    """
    listed = np.array(pieces, _PIECE)
    call = ReadStruct(listed.ctypes.data, len(listed), fd)
    check(library().kvbits_read_pages(call))
    if call.system_error:
        raise OSError(call.system_error, os.strerror(call.system_error))
    return None if call.bad < 0 else call.bad
