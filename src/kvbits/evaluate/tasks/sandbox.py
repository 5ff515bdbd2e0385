"""Sandbox that runs a model's Python program in a locked-down process.

Layers, each enough for an honest mistake, together for most of the others:

    process      own session, empty environment, isolated interpreter without site-packages, private folder that is
                 deleted, wall-clock kill of the whole group
    limits       CPU seconds, address space, file size, open files, processes, no core dumps (setrlimit)
    namespaces   `unshare`: no network devices, own process ids, own user; where the kernel allows it
    audit hook   refuses sockets, programs, foreign code (ctypes), and every write, rename or removal outside the
                 private folder

It is a guard for evaluating a language model's answers, not for hostile experts. `Outcome.isolation` says which layers
were up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from ...errors import DataError, too_small

_RUNNER = r"""
import os, resource, sys
secret, seconds, memory, size = sys.stdin.readline().strip(), *map(int, sys.argv[1:4])
home = os.path.realpath(os.getcwd())
report = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDWR), 1); os.dup2(1, 2); os.dup2(1, 0)
LIMITS = (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 32),
)
for what, limit in LIMITS:
    resource.setrlimit(what, (limit, limit))
with open("program.py", encoding="utf-8") as f:
    source = f.read()
REFUSED = (
    "socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
    "os.kill", "os.putenv", "pty.", "shutil.", "ftplib.", "urllib.", "http.", "smtplib.", "resource.setrlimit",
    "os.setxattr", "os.chmod", "os.chown", "sys.addaudithook", "mmap.", "fcntl.",
)
PATHS = {
    "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.utime": 1, "os.chdir": 1, "os.mkfifo": 1,
}
def inside(path, realpath=os.path.realpath, fsdecode=os.fsdecode, home=home + os.sep):
    return not isinstance(path, int) and (realpath(fsdecode(path)) + "/").startswith(home)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def hook(event, args, R=tuple(REFUSED), P=dict(PATHS), inside=inside, W=WRITES):
    if event.startswith(R):
        raise PermissionError("refused: " + event)
    if event == "open":
        path, mode, flags = args
        writes = mode is not None and any(c in str(mode) for c in "wax+") or isinstance(flags, int) and flags & W
        if writes and not isinstance(path, int) and not inside(path):
            raise PermissionError("refused: writing outside the folder")
    elif event in P and not all(inside(p) for p in args[: P[event]] if not isinstance(p, int)):
        raise PermissionError("refused: " + event)
sys.addaudithook(hook)
try:
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
except BaseException as e:
    os.write(report, ("error " + type(e).__name__ + ": " + str(e))[:300].encode("utf-8", "replace"))
else:
    os.write(report, ("passed " + secret).encode())
os._exit(0)
"""


MEMORY_BYTES, FILE_BYTES = 1 << 30, 1 << 20
"""Address space of a program, and the largest file that it may write in its private folder."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program's run. `reason` is empty if the program passed."""

    passed: bool
    reason: str
    isolation: tuple[str, ...]


@functools.cache
def namespaces() -> tuple[str, ...]:
    """Return the `unshare` words that work on this machine; empty where the kernel allows none."""
    tool = shutil.which("unshare")
    if tool is None:
        return ()
    for words in (
        ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"),
        ("--net", "--pid", "--fork", "--kill-child"),
        ("--net",),
    ):
        done = subprocess.run([tool, *words, sys.executable, "-I", "-S", "-c", "pass"], capture_output=True)
        if done.returncode == 0:
            return (tool, *words)
    return ()


def run_program(program: str, *, seconds: int = 10) -> Outcome:
    """Run a program to its end; it passes if it ends without an exception.

    Args:
        program: Python source.
        seconds: CPU time, and wall-clock time, that it may take.

    Raises:
        DataError: `seconds` below 1.
    """
    if seconds < 1:
        raise DataError(too_small("seconds", seconds, 1))
    words = namespaces()
    isolation = (
        "limits",
        "audit hook",
        *(("no network",) if "--net" in words else ()),
        *(("own process ids",) if "--pid" in words else ()),
    )
    secret = secrets.token_hex(16)  # a program that ends the process itself cannot say it passed
    folder = tempfile.mkdtemp(prefix="kvbits-run-")
    try:
        with open(os.path.join(folder, "program.py"), "w", encoding="utf-8", errors="surrogateescape") as f:
            f.write(program)
        command = [
            *words,
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            _RUNNER,
            str(seconds),
            str(MEMORY_BYTES),
            str(FILE_BYTES),
        ]
        with subprocess.Popen(
            command,
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process:
            try:
                said, _ = process.communicate(secret + "\n", timeout=seconds + 5)
            except subprocess.TimeoutExpired:
                said = f"no end within {seconds} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if said == f"passed {secret}":
        return Outcome(True, "", isolation)
    return Outcome(
        False, said.removeprefix("error ") or f"ended by itself or by a limit (code {process.returncode})", isolation
    )
