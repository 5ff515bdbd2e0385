"""Files of a store in a local folder: written whole or not at all, by any number of processes, and never outside of it.

    <root>/<namespace>/<two digits>/<name>

A file is written under a temporary name, flushed to the disk and renamed. So a name that is there is a complete file,
even when its writer was killed. The writer holds a lock on the temporary file; one without a lock belongs to nobody any
more and is cleared away. Folders and files are opened below the root one by one, and symbolic links are not followed.
So neither a name nor a link leads out of the root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..cache import blob
from ..cache.reading import OpenFile
from ..errors import SpecError
from ..files import home, require_folder

NAME = re.compile(r"[0-9a-f]{40}[0-9a-z.+-]{1,100}")
"""Name of a file: the key of its tokens, then which of them it is."""
TEMPORARY = ".part-"
WRITERS = 8
"""Files written at once: a disk flushes several in the time of one."""
ABANDONED_S = 60.0
"""Age from which a temporary file that nobody has locked is cleared away."""
_WAY_OUT = "loading needs a store that can be read, put, pin and evict one that can be written"
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK
_PART = re.compile(r"[0-9a-z]{2,64}")


class Entry(NamedTuple):
    """A file of a folder. `used` is when it was last used, in nanoseconds."""

    namespace: str
    name: str
    nbytes: int
    used: int


class _Unfinished(NamedTuple):
    """A file under a temporary name in its folder; the writer's lock on it goes with `file`."""

    name: str
    temporary: str
    folder: OpenFile
    file: OpenFile


class Folder:
    """The files below `root`, by namespace and name.

    Attributes:
        written: bytes that this process wrote, until somebody takes note of them.
        left: files that are damaged and could not be set aside.

    Raises:
        SpecError: a file is where the folder should be, or no folder can be made there.
    """

    def __init__(self, root: str | Path) -> None:
        if "\0" in str(root):
            raise SpecError(f"a store at {str(root)!r}: a path has no NUL in it")
        self.root = require_folder(home(root, "a store at"), "a store at").absolute()
        self._root, self.written, self.left = str(self.root), 0, set[str]()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"a store at {self.root} cannot be made: {error.strerror or error}; name a folder that can be"
                " written to"
            ) from error

    @property
    def where(self) -> str:
        """Return the folder or URL of the store."""
        return self._root

    def _folder(self, namespace: str, bucket: str, make: bool = False) -> OpenFile | None:
        """Open a bucket; None where it is not there.

        Raises:
            SpecError: something else than a folder is in its place, or a link to one.
        """
        for part in (namespace, bucket):
            if not _PART.fullmatch(part):
                raise SpecError(f"{part!r} is not a folder of a store")
        where = f"{self._root}/{namespace}"
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(where)
            above = OpenFile(os.open(where, _FOLDER))
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(bucket, dir_fd=above.fd)
            return OpenFile(os.open(bucket, _FOLDER, dir_fd=above.fd))
        except OSError as error:
            if error.errno == errno.ENOENT and not make:
                return None
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise SpecError(
                    f"{where}/{bucket} is a symbolic link or a file, where a store has a folder; remove it"
                ) from error
            raise _read_only(error, f"{where}/{bucket}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make other processes wait while one evicts.

        Raises:
            SpecError: something else than a file is in the place of the lock.
        """
        path = self.root / ".evicting"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise SpecError(
                    f"{path} is a symbolic link or a folder, where a store has a file; remove it"
                ) from error
            raise _read_only(error, str(path)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def path(self, namespace: str, name: str) -> str:
        """Return the path of a file, for messages."""
        return f"{self.root}/{namespace}/{name[:2]}/{name}"

    @contextlib.contextmanager
    def _no_folder(self, namespace: str, name: str) -> Iterator[None]:
        """Name in an error which folder it is that lies where a file belongs."""
        try:
            yield
        except IsADirectoryError as error:
            raise SpecError(f"{self.path(namespace, name)} is a folder, where a store has a file; remove it") from error

    def open(self, namespace: str, name: str) -> OpenFile | None:
        """Open a file to read from; None where there is none. A link or anything but a file is none."""
        if (folder := self._folder(namespace, _bucket(name))) is None:
            return None
        try:
            file = OpenFile(os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK, dir_fd=folder.fd))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EACCES):
                return None
            raise
        return file if stat.S_ISREG(os.fstat(file.fd).st_mode) else None

    def has(self, namespace: str, name: str) -> bool:
        return self.open(namespace, name) is not None

    def fetch(self, namespace: str, names: Sequence[str]) -> bool:
        """Bring the first files, as far as they go, from where else the store has them. Return whether all came."""
        return False

    def send(self, namespace: str, names: Sequence[str]) -> None:
        """Bring files to where else the store keeps them."""

    def write(self, namespace: str, files: Sequence[tuple[str, Sequence[memoryview]]]) -> None:
        """Write files, several at once; when all are on the disk they appear under their names, in order.

        Raises:
            OSError: the disk is full, or the like. No file of these appeared.
            SpecError: a folder is where one of them belongs.
        """
        for name, _ in files:
            _bucket(name)
        held: list[_Unfinished] = []
        try:
            with ThreadPoolExecutor(max(1, min(WRITERS, len(files)))) as pool:
                jobs = [pool.submit(self._write, namespace, name, pieces, held) for name, pieces in files]
            for job in jobs:
                job.result()
            order = [name for name, _ in files]
            for one in sorted(held, key=lambda x: order.index(x.name)):
                with self._no_folder(namespace, one.name):
                    os.rename(one.temporary, one.name, src_dir_fd=one.folder.fd, dst_dir_fd=one.folder.fd)
        except BaseException as error:
            for one in held:
                with contextlib.suppress(OSError):
                    os.unlink(one.temporary, dir_fd=one.folder.fd)
            if isinstance(error, OSError):
                raise _read_only(error, self._root) from error
            raise
        self.written += sum(len(p) for _, pieces in files for p in pieces)

    def _write(self, namespace: str, name: str, pieces: Sequence[memoryview], held: list[_Unfinished]) -> None:
        """Write a file under a temporary name, down to the disk; the lock on it is held on."""
        folder = self._folder(namespace, _bucket(name), make=True)
        assert folder is not None
        temporary = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        for left in self._listed(folder):
            if left.startswith(TEMPORARY):
                _clear(folder, left)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
        file = OpenFile(os.open(temporary, flags, 0o666, dir_fd=folder.fd))
        held.append(_Unfinished(name, temporary, folder, file))
        fcntl.flock(file.fd, fcntl.LOCK_EX)
        blob.write_all(file.fd, pieces)
        os.fsync(file.fd)

    @staticmethod
    def _listed(folder: OpenFile | None) -> list[str]:
        return [] if folder is None else os.listdir(folder.fd)

    def names(self, namespace: str, start: str) -> list[str]:
        """List the names of files that begin with `start`, at least two digits."""
        listed = self._listed(self._folder(namespace, start[:2]))
        return sorted(n for n in listed if n.startswith(start) and NAME.fullmatch(n))

    def use(self, namespace: str, name: str, used: int) -> None:
        """Note when a file was used, in nanoseconds."""
        if (folder := self._folder(namespace, _bucket(name))) is None:
            return
        try:
            os.utime(name, ns=(used, used), dir_fd=folder.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *_NO_WRITING):
                raise

    def remove(self, namespace: str, name: str) -> bool:
        if (folder := self._folder(namespace, _bucket(name))) is None:
            return False
        try:
            with self._no_folder(namespace, name):
                os.unlink(name, dir_fd=folder.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _read_only(error, self.path(namespace, name)) from error
        return True

    def set_aside(self, namespace: str, name: str) -> str | None:
        """Rename a file so that nobody finds it any more.

        Returns its new name; None where it could not be done, or was gone.
        """
        kept = f"{name}.damaged"
        if (folder := self._folder(namespace, _bucket(name))) is None:
            return None
        try:
            os.rename(name, kept, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except OSError:
            return None
        return kept

    def namespaces(self) -> list[str]:
        with os.scandir(self.root) as found:
            return sorted(
                e.name for e in found if e.is_dir(follow_symlinks=False) and re.fullmatch(r"[0-9a-f]{40}", e.name)
            )

    def entries(self) -> Iterator[Entry]:
        """List all files, and clear away those that killed writers left."""
        for namespace in self.namespaces():
            with os.scandir(self.root / namespace) as found:
                buckets = sorted(
                    e.name for e in found if e.is_dir(follow_symlinks=False) and re.fullmatch(r"[0-9a-f]{2}", e.name)
                )
            for bucket in buckets:
                folder = self._folder(namespace, bucket)
                for name in self._listed(folder):
                    assert folder is not None
                    try:
                        about = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if name.startswith(TEMPORARY):
                        _clear(folder, name)
                    elif NAME.fullmatch(name) and stat.S_ISREG(about.st_mode):
                        yield Entry(namespace, name, about.st_size, about.st_mtime_ns)


def _clear(folder: OpenFile, name: str) -> None:
    """Remove a temporary file that is old enough and whose writer is gone."""
    with contextlib.suppress(OSError):
        about = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        if stat.S_ISREG(about.st_mode) and time.time() - about.st_mtime >= ABANDONED_S:
            file = OpenFile(os.open(name, os.O_RDONLY | _NO_LINK, dir_fd=folder.fd))
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder.fd)


_NO_WRITING = (errno.EROFS, errno.EACCES, errno.EPERM)


def _read_only(error: OSError, where: str) -> OSError:
    """Return an error, with the way out where it says that nothing can be written."""
    if error.errno not in _NO_WRITING or _WAY_OUT in str(error):
        return error
    return OSError(error.errno, f"{error.strerror}; {_WAY_OUT}", where)


def _bucket(name: str) -> str:
    """Return the folder that a file is in.

    Raises:
        SpecError: it is not a file name of a store.
    """
    if not NAME.fullmatch(name):
        raise SpecError(f"{name!r} is not a file name of a store")
    return name[:2]
