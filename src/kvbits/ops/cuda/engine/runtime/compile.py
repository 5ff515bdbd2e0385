"""CUDA C++ to machine code at run time, kept on disk (`kept`) by version, source hash, options and architecture.

NVRTC is called through ctypes. It comes with every CUDA build of torch (package nvidia-cuda-nvrtc), so nothing more has
to be installed: cuda-core would be one more dependency for the same two libraries, and torch's own run-time compile is
private and cannot keep its output. Sources include no CUDA headers (`ptx.cuh` names the few instructions they use),
which keeps a compile near a second and independent of a toolkit.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..... import __version__, files
from .....errors import KernelError
from .....progress import say
from . import kept

ENGINE = Path(__file__).parent.parent
FOLDERS = (ENGINE, ENGINE.parent / "families" / "plain", ENGINE.parents[1])
"""Folders of headers that a kernel's own folder does not have."""
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--extra-device-vectorization")
PATIENCE = 2.0
"""Seconds that a compile takes in silence."""


@dataclass(frozen=True)
class Source:
    """One instantiation of a kernel's source.

    Attributes:
        folder, name: where the source lies.
        macros: what is defined ahead of it.
        own: with the instructions that a chip alone has (compute capability 9.0: products of four warps), not those of
            later ones too.
    """

    folder: Path
    name: str
    macros: Mapping[str, int | str]
    own: bool = False

    def arch(self, capability: tuple[int, int]) -> str:
        """Compile target on a device: "sm_90", "sm_90a" ..."""
        return f"sm_{capability[0]}{capability[1]}{'a' * self.own}"


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, as ptxas reports them."""

    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Binary:
    """Machine code of one source for one architecture."""

    cubin: bytes
    log: str
    made: bool = field(default=False, compare=False)  # just now, not found on disk

    def resources(self, kernel: str) -> Resources:
        """Return registers and spills of a kernel of this binary.

        Raises:
            KernelError: the compiler said nothing of it.
        """
        text = self.log.partition(f"Compiling entry function '{kernel}'")[2].partition("Compiling entry function")[0]
        found = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads[\s\S]*?Used (\d+) registers",
            text,
        )
        if found is None:
            raise KernelError(f"the compiler's log names no resources of {kernel}:\n{self.log}")
        stack, stores, loads, registers = (int(n) for n in found.groups())
        return Resources(registers, stack, stores + loads)


def compile_source(source: Source, arch: str, *, quiet: bool = False) -> Binary:
    """Compile a source with its `#include`s (see `headers_of`), or take it from disk.

    Args:
        arch: "sm_90a", "sm_80", ...
        quiet: do not say that it takes long.

    Raises:
        KernelError: NVRTC is missing or the source does not compile; the message holds the compiler's log.
    """
    if why := missing():
        raise KernelError(why)
    headers = headers_of(source.folder, source.name)
    text = (
        "".join(f"#define {k} {v}\n" for k, v in sorted(source.macros.items()))
        + (source.folder / source.name).read_text()
    )
    options = [*OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v"]
    digest = hashlib.sha256(
        repr((__version__, version(), text, sorted(headers.items()), options)).encode()
    ).hexdigest()[:32]
    key = f"{Path(source.name).stem}-{arch}-{digest}"
    if found := kept.find(key):
        return Binary(*found)
    where = files.cache_folders("cuda")[0]
    with _saying(f"compiling {source.name} for {arch}, once: it is kept in {where} (ahead: kvbits warm)", quiet):
        binary = _compile(source.name, text, headers, options)
    kept.keep(key, binary.cubin, binary.log)
    return binary


@contextmanager
def _saying(sentence: str, quiet: bool) -> Iterator[None]:
    """Print what is done where it takes longer than `PATIENCE`."""
    timer = threading.Timer(PATIENCE, say, [sentence])
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def headers_of(folder: Path, name: str) -> dict[str, str]:
    """Return the text by name of every header that `folder / name` includes, itself or through others: from `folder`,
    else from `FOLDERS`.

    Raises:
        KernelError: no folder has a header.
    """
    found: dict[str, str] = {}
    unread = [(folder / name).read_text()]
    while unread:
        for header in re.findall(r'^#include "([^"]+)"', unread.pop(), re.MULTILINE):
            if header in found:
                continue
            path = next((f / header for f in (folder, *FOLDERS) if (f / header).exists()), None)
            if path is None:
                raise KernelError(f"{name} includes {header}, which neither {folder} nor the shared folders have")
            found[header] = path.read_text()
            unread.append(found[header])
    return found


@functools.cache
def missing() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        _library()
    except OSError as e:
        return f"NVRTC is not installed ({e}); pip install nvidia-cuda-nvrtc"
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    names = [ctypes.util.find_library("nvrtc"), "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    try:
        import nvidia  # the namespace package of the wheels that torch brings

        for root in nvidia.__path__:
            names = [*map(str, sorted(Path(root).glob("*/lib/libnvrtc.so.*"), reverse=True)), *names]
    except ImportError:
        pass
    reasons = []
    for name in filter(None, names):
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # NVRTC looks for it by name only, and finds it once it is loaded
            return ctypes.CDLL(name)
        except OSError as e:
            reasons.append(str(e))
    raise OSError("; ".join(reasons) or "no library found")


@functools.cache
def version() -> tuple[int, int]:
    """Return (major, minor) of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _check(code: int, what: str) -> None:
    if code:
        raise KernelError(f"{what} failed with NVRTC error {code}")


def _compile(name: str, source: str, headers: dict[str, str], options: list[str]) -> Binary:
    lib, program = _library(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(t.encode() for t in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
    _check(
        lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        code = lib.nvrtcCompileProgram(program, len(options), flags)
        log = _fetch(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program).rstrip(b"\0").decode(errors="replace")
        if code:
            raise KernelError(f"{name} does not compile ({' '.join(options)}):\n{log}")
        return Binary(_fetch(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program), log, made=True)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(size_of: Any, fetch: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "nvrtc size query")
    data = ctypes.create_string_buffer(size.value)
    _check(fetch(program, data), "nvrtc fetch")
    return data.raw
