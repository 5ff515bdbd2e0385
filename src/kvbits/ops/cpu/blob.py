"""Pages of blobs by the CPU library: their checksums, and reading them from files; both without Python's lock."""

from __future__ import annotations

import os

import numpy as np

from .library import ReadStruct, check, library

PIECE = np.dtype(
    [("fd", "i8"), ("offset", "i8"), ("to", "u8"), ("sums", "u8"), ("layers", "i8"), ("layer_bytes", "i8")]
)
"""Some layers of a page: the file and where they begin in it, the address that they go to, that of their checksums
uint64 [layers] (0: not checked), how many they are, and the bytes of one of them.
"""


def checksums(units: np.ndarray) -> np.ndarray:
    """uint64 [n] of contiguous uint8 [n, bytes], whole words each."""
    sums = np.empty(len(units), np.uint64)
    check(library().kvbits_checksums(units.ctypes.data, len(units), units.shape[1], sums.ctypes.data))
    return sums


def read_pages(pieces: np.ndarray, num_threads: int) -> int | None:
    """Read pages to where they belong and compare their checksums.

    Args:
        pieces: of `PIECE` [n].

    Returns:
        The first that is not in its file as it should be, or None; what lies behind it may not have been read.

    Raises:
        OSError: of the system.
    """
    call = ReadStruct(pieces.ctypes.data, len(pieces), num_threads)
    check(library().kvbits_read_pages(call))
    if call.system_error:
        raise OSError(call.system_error, os.strerror(call.system_error))
    return None if call.bad < 0 else call.bad
