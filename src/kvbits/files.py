"""Checks of where results are to go, made before the work, not after it; and results as JSON."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import re
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import KvbitsWarning, SpecError
from .progress import say


def find(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path as a `Path` that the file system accepts. The path need not exist.

    Args:
        what: names the option or operation in the message.

    Raises:
        SpecError: the path is not text, holds a zero byte or half a character, or is longer than the file system takes.
    """
    try:
        found = Path(path)
        os.lstat(found)
    except FileNotFoundError:
        pass
    except (TypeError, ValueError) as error:  # zero bytes and lone surrogates are ValueErrors
        raise SpecError(f"{what} {path!r} is not a path ({error}); give the name of a file or folder") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise SpecError(
                f"{what} {os.fspath(path)[:40]!r}... is longer than a path can be ({len(os.fspath(path))} characters)"
            ) from error
    return found


def home(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path with a leading `~` or `~name` replaced by that user's folder.

    Raises:
        SpecError: no path, or there is no such user or folder.
    """
    found = find(path, what)
    try:
        return found.expanduser()
    except RuntimeError as error:
        raise SpecError(
            f"{what} {os.fspath(path)!r}: {found.parts[0]} is not a user with a home folder here; write the path out"
        ) from error


def require_file(path: str | os.PathLike[str], what: str, *, replaced: bool = False) -> Path:
    """Return the path, if a file can be there; a symlink's, if one can be where it leads.

    Args:
        what: names the option or operation in the message.
        replaced: another file takes the place of one that is there (`whole`), which devices and pipes would not
            survive.

    Raises:
        SpecError: no path, a directory is there, or the directory it would be in is not, or is not writable.
    """
    found = find(path, what)
    folder = Path(os.path.realpath(found)).parent if found.is_symlink() else found.parent
    if found.is_dir():
        raise SpecError(f"{what} {os.fspath(path)!r} is a directory; name a file in it")
    if replaced and found.exists() and not found.is_file():
        raise SpecError(
            f"{what} {found} is a device, a pipe or a socket, whose place a file would take; name a regular file, or a"
            " new one"
        )
    if not folder.is_dir():
        raise SpecError(f"{what} {found}: the directory {folder} does not exist; create it first")
    if not found.exists():
        _require_writable(folder, f"{what} {found}")
    return found


def _require_writable(folder: Path, what: str) -> None:
    """Refuse a folder in which no file can be made: permissions alone do not say it of root or of /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SpecError(
            f"{what}: nothing can be written in {folder} ({error.strerror or error}); name another folder"
        ) from error


def require_folder(path: str | os.PathLike[str], what: str, *, writable: bool = False) -> Path:
    """Return the path, if a folder is or can be made there.

    Args:
        writable: files are to be written into it.

    Raises:
        SpecError: no path, or it, or what it would be in, is a file, or is not writable though it should be.
    """
    found = find(path, what)
    for part in (found, *found.parents):
        try:
            there = part.exists()
        except OSError as error:
            raise SpecError(
                f"{what} {found} cannot be reached: {error.strerror or error}; name another folder"
            ) from error
        if there and not part.is_dir():
            raise SpecError(f"{what} {found}: {part} is a file; name a folder")
    if writable:
        _require_writable(next(part for part in (found, *found.absolute().parents) if part.exists()), f"{what} {found}")
    return found


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield where to write a file that takes the place of `path` once the file is whole.

    Where `path` is a symlink, the file takes the place of what the symlink leads to. An error leaves what was there.

    The file that is yielded exists, is empty, and is to be opened for writing, not replaced. What killed processes left
    of their attempts at `path` is cleared first.

    Raises:
        SpecError: no regular file is there, or none can be.
    """
    path = Path(os.path.realpath(require_file(path, "save:", replaced=True)))
    _clear_abandoned(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    fd = _locked(partial)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def locked(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make a folder, and have other processes wait while this one reads and replaces files of it.

    Args:
        on_wait: called once where another process has the folder locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _locked(partial: Path) -> int:
    """Return a new empty file and a lock on it, which ends with this process: a descriptor."""
    while True:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if partial.exists():  # nobody took it for abandoned before it was locked
            return fd
        os.close(fd)


def _clear_abandoned(path: Path) -> None:
    """Remove what killed processes left of their own attempts to write `path`."""
    left = re.compile(re.escape(path.name) + r"\.\d+(\.[0-9a-f]{8})?\.tmp")
    for name in os.listdir(path.parent):
        if left.fullmatch(name):
            with contextlib.suppress(OSError):  # a writer holds it, or somebody else cleared it
                fd = os.open(path.with_name(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path.with_name(name))
                finally:
                    os.close(fd)


def cache_folders(name: str) -> tuple[Path, ...]:
    """Return the folders in which kvbits looks for what costs time to make.

    The first is in $KVBITS_CACHE, else in the user's cache folder. The second is in a folder of this user's alone among
    temporary files, if there is one.
    """
    usual, temporary = _cache_places(name)
    return (usual, temporary) if temporary.is_dir() and _is_own(temporary.parent) else (usual,)


def _cache_places(name: str) -> tuple[Path, Path]:
    own = os.environ.get("KVBITS_CACHE")
    usual = (
        Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or home("~/.cache", "the cache folder")) / "kvbits"
    )
    return usual / name, Path(tempfile.gettempdir()) / f"kvbits-{os.getuid()}" / name


def _is_own(folder: Path) -> bool:
    """Return whether a folder is this user's and closed to others."""
    owner = folder.lstat()
    return owner.st_uid == os.getuid() and not owner.st_mode & 0o077 and not folder.is_symlink()


_say_once = functools.lru_cache(say)


def cache_folder(name: str) -> Path:
    """Return the first of those folders that is writable, made if need be.

    Raises:
        SpecError: none does.
    """
    usual, temporary = _cache_places(name)
    try:
        usual.mkdir(parents=True, exist_ok=True)
        _require_writable(usual, "")
        return usual
    except (OSError, SpecError):
        pass
    _say_once(
        f"{usual} takes no files, so what costs time to make is kept in {temporary}, which a restart may empty; set"
        " KVBITS_CACHE to a folder that does"
    )
    try:
        temporary.parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(temporary.parent):
            raise SpecError(
                f"nothing can be kept in {usual}, and {temporary.parent} is open to other users; set KVBITS_CACHE to a"
                " folder that takes files"
            )
        temporary.mkdir(exist_ok=True)
        _require_writable(temporary, "")
    except OSError as error:
        raise SpecError(
            f"nothing can be kept in {usual} or {temporary} ({error.strerror or error}); set KVBITS_CACHE to a folder"
            " that takes files"
        ) from error
    return temporary


def warn_not_kept(what: str, error: Exception) -> None:
    """Warn, once for each thing, that it is used although no disk takes it.

    Args:
        what: in the plural, like "compiled kernels".

    Warns:
        KvbitsWarning: with the reason and the way out.
    """
    if what not in _not_kept:
        _not_kept.add(what)
        warnings.warn(
            f"{what} are used but not kept, so they are made again next time ({error}); free space on the disk, or name"
            " a folder that takes files (for a store its own, for all else KVBITS_CACHE)",
            KvbitsWarning,
            stacklevel=3,
        )


_not_kept: set[str] = set()


def to_json(data: Any, *, indent: int | None = None, compact: bool = False) -> str:
    """Return data as JSON, which has no NaN or infinity: they become null.

    Args:
        compact: no spaces after commas and colons.
    """
    return json.dumps(_finite(data), allow_nan=False, indent=indent, separators=(",", ":") if compact else None)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
