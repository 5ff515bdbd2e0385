"""The remote layer of a store: blobs in an object store, or any file system that fsspec knows. A local folder in front
of it keeps blobs that were used lately.

    <url>/<namespace>/<two digits>/<name>

An object that is there is complete. Object stores show an upload when it has ended; on other file systems a file is
written under a temporary name and renamed.
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


class RemoteFolder(Folder):
    """Objects below a URL, and a local folder that keeps what was used lately.

    Args:
        root: the local folder.
        options: of the file system, as fsspec takes them.

    Raises:
        SpecError: fsspec knows no such file system, or what it needs is not installed.
    """

    def __init__(self, url: str, root: str | Path, options: dict[str, Any]) -> None:
        import fsspec

        try:
            self.fs, there = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise SpecError(
                f"no store at {url!r}: {error}; install the package that fsspec needs for it (s3fs, gcsfs, ..), or name"
                " a folder"
            ) from error
        super().__init__(root)
        self.url, self.there = url, there.rstrip("/")
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self._shows_whole = bool(protocols & OBJECT_STORES)

    @property
    def where(self) -> str:
        return self.url

    def _object(self, namespace: str, name: str) -> str:
        return f"{self.there}/{namespace}/{name[:2]}/{name}"

    def fetch(self, namespace: str, names: Sequence[str]) -> bool:
        def get(name: str) -> memoryview | None:
            try:
                return memoryview(self.fs.cat_file(self._object(namespace, name)))
            except FileNotFoundError:
                return None

        for at in range(0, len(names), AT_ONCE):
            missing = [name for name in names[at : at + AT_ONCE] if not self.has(namespace, name)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = dict(zip(missing, pool.map(get, missing), strict=True))
            self.write(namespace, [(name, [data]) for name, data in found.items() if data is not None])
            if None in found.values():
                return False
        return True

    def send(self, namespace: str, names: Sequence[str]) -> None:
        """Copy files that are not there yet, the beginning first."""

        def put(name: str) -> None:
            file, path = self.open(namespace, name), self._object(namespace, name)
            if file is None or file.size == self._size(path):
                return
            data = file.bytes_at(0, file.size)
            if self._shows_whole:
                self.fs.pipe_file(path, data)
                return
            folder = path.rpartition("/")[0]
            self.fs.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
            self.fs.pipe_file(temporary, data)
            self.fs.mv(temporary, path)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(put, names))

    def _size(self, path: str) -> int | None:
        """Return the bytes of an object; None where there is none."""
        try:
            return int(self.fs.info(path)["size"])
        except FileNotFoundError:
            return None

    def names(self, namespace: str, start: str) -> list[str]:
        """List the names of files, here or there, that begin so."""
        try:
            found = self.fs.ls(f"{self.there}/{namespace}/{start[:2]}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            found = []
        names = {str(path).rsplit("/", 1)[-1] for path in found}
        return sorted(
            {*super().names(namespace, start), *(n for n in names if n.startswith(start) and NAME.fullmatch(n))}
        )

    def set_aside(self, namespace: str, name: str) -> str | None:
        with contextlib.suppress(OSError):
            self.fs.mv(self._object(namespace, name), self._object(namespace, f"{name}.damaged"))
        return super().set_aside(namespace, name)


def local_tier(url: str) -> Path:
    """Return the local folder of a remote store, unless the user names one."""
    base = os.environ.get("XDG_CACHE_HOME") or home("~/.cache", "the cache folder")
    return Path(base) / "kvbits" / "prefixes" / hashlib.sha256(url.encode()).hexdigest()[:16]
