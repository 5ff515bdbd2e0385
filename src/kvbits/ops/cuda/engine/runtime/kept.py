"""Compiled kernels on disk: a file each, named by what it was made of.

A file is SHA-256 of its name and of all that follows (32 bytes), bytes of the compiler's log (4, little-endian), the
log, the machine code. It is written under another name and renamed, so processes that make the same one see all of it
or nothing. What does not have its sum is never loaded, but made anew. The folder holds at most `MOST_BYTES`: those that
were asked for longest ago go, and whatever else lies there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ..... import files
from .....errors import SpecError
from .....progress import say

MOST_BYTES = 256 << 20
"""A kernel takes 10 to 160 KB; a model in one format some 15 of them."""
SUFFIX = ".kernel"


def folder() -> Path:
    """Return the folder where kernels are kept."""
    return files.cache_folder("cuda")


def find(key: str) -> tuple[bytes, str] | None:
    """Return machine code and log that are kept under a key, in any of `files.cache_folders`: one of an image may take
    no files.
    """
    for place in files.cache_folders("cuda"):
        path = place / (key + SUFFIX)
        try:
            data = path.read_bytes()
        except OSError:
            continue
        body, size = data[32:], int.from_bytes(data[32:36], "little")
        if data[:32] != _sum(key, body):
            say(f"{path} is damaged; it is compiled anew")
            continue
        with contextlib.suppress(OSError):
            os.utime(path)
        return body[4 + size :], body[4 : 4 + size].decode()
    return None


def keep(key: str, cubin: bytes, log: str) -> None:
    """Put machine code where `find` finds it, as far as a disk takes it: what is not kept is compiled again by the next
    process, which is printed once.
    """
    text = log.encode()
    body = len(text).to_bytes(4, "little") + text + cubin
    try:
        path = folder() / (key + SUFFIX)
        with files.whole(path) as partial:
            partial.write_bytes(_sum(key, body) + body)
        _bound(path.parent)
    except (OSError, SpecError) as error:
        files.warn_not_kept("compiled kernels", error)


def _sum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _bound(place: Path) -> None:
    """Take the oldest files away until `MOST_BYTES` are left. Other processes may do so too."""
    found = []
    for path in place.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
