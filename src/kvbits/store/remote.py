"""Blobs in an object store or any other file system that fsspec knows, behind a local folder that keeps what was used
lately.

    <url>/<namespace>/<two digits>/<name>

An object that is there is complete: object stores show an upload when it is, other file systems get a file under a
temporary name that is then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..files import home
from .folder import NAME, TEMPORARY, Folder

AT_ONCE = 16
"""Transfers under way together: an object store answers one slowly and many fast."""
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"})


class Remote:
    """Objects below a URL.

    Raises:
        SpecError: fsspec knows no such file system, or what it needs is not installed.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        import fsspec

        try:
            self.fs, root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise SpecError(
                f"no store at {url!r}: {error}; install the package that fsspec needs for it (s3fs, gcsfs, ..), or name"
                " a folder"
            ) from error
        self.url, self.root = url, root.rstrip("/")
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self._shows_whole = bool(protocols & OBJECT_STORES)

    def _path(self, namespace: str, name: str) -> str:
        return f"{self.root}/{namespace}/{name[:2]}/{name}"

    def sizes(self, namespace: str, names: Sequence[str]) -> list[int | None]:
        """Bytes of each object, None for those that are not there."""

        def size(name: str) -> int | None:
            try:
                return self.fs.info(self._path(namespace, name))["size"]
            except FileNotFoundError:
                return None

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(size, names))

    def fetch(self, namespace: str, names: Sequence[str], to: Folder) -> list[int | None]:
        """Copy objects into a folder. Returns the bytes of each, None for those that were not there."""

        def one(name: str) -> int | None:
            try:
                data = self.fs.cat_file(self._path(namespace, name))
            except FileNotFoundError:
                return None
            return to.write(namespace, [(name, [memoryview(data)])])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, names))

    def put(self, namespace: str, names: Sequence[str], source: Folder) -> None:
        """Copy files of a folder there, in order as far as readers can tell: all but the last first."""

        def one(name: str) -> None:
            fd = source.open(namespace, name)
            if fd is None:
                return
            with os.fdopen(fd, "rb") as file:
                data = file.read()
            path = self._path(namespace, name)
            if self._shows_whole:
                self.fs.pipe_file(path, data)
                return
            folder = path.rpartition("/")[0]
            self.fs.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
            self.fs.pipe_file(temporary, data)
            self.fs.mv(temporary, path)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, names))

    def names(self, namespace: str, start: str) -> list[str]:
        """Names of the objects that begin with `start`, at least two digits."""
        try:
            found = self.fs.ls(f"{self.root}/{namespace}/{start[:2]}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (str(path).rsplit("/", 1)[-1] for path in found)
        return sorted(n for n in names if n.startswith(start) and NAME.fullmatch(n))

    def set_aside(self, namespace: str, name: str) -> None:
        with contextlib.suppress(OSError):
            self.fs.mv(self._path(namespace, name), self._path(namespace, f"{name}.damaged"))


def local_tier(url: str) -> Path:
    """Where the local folder of a remote store is unless somebody says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or home("~/.cache", "the cache folder")
    return Path(base) / "kvbits" / "prefixes" / hashlib.sha256(url.encode()).hexdigest()[:16]
