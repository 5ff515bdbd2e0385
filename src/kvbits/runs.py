"""Records of the run that made a figure: when, on what, with which code and which command.

Every result file keeps the record of each run beside what it measured.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import __version__

FIELDS = ("id", "session", "utc", "host", "gpu", "versions", "commit", "dirty", "argv")
"""Fields of every record, null where it is not known."""

_PACKAGES = ("torch", "transformers", "triton", "vllm")
_HOME = Path(__file__).resolve().parents[2]  # of a checkout; of an installed package a folder without .git
_COMMIT_FILE = "KVBITS_COMMIT"

_ISA = (  # the best instruction set, by the flags that a CPU must have
    ("amx", {"amx_int8", "amx_bf16"}),
    ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
    ("avx2", {"avx2", "fma"}),
    ("neon", {"asimd"}),
)
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


def record(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a new run of this process.

    Args:
        argv: the words of its command, None for `sys.argv`. Folders of this machine are left out of absolute paths.

    Returns:
        id        UTC time and eight random hex digits: unique, and sorts by time
        session   the environment variable KVBITS_SESSION, which several processes of one sitting on one machine share;
                  the id where it is not set
        utc       when it began, ISO 8601 to the second
        host      {cpu, cores, isa: amx | avx512 | avx2 | neon | generic, bfloat16: whether it has instructions for it,
                  gpu: whether it has one}
        gpu       {name, count, driver}, or None
        versions  {python, kvbits, torch, transformers, triton, vllm}, the last four where they are installed
        commit    of the source; None where it is not known: neither a checkout nor named by KVBITS_COMMIT, an
                  environment variable or a file beside
                  pyproject.toml, as "SHA" or "SHA-dirty"
        dirty     whether the source differs from the commit, results and documents aside
        argv      list of words
    """
    now = datetime.now(timezone.utc)
    name = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
    gpu = _gpu()
    commit, dirty = _commit()
    return {
        "id": name,
        "session": os.environ.get("KVBITS_SESSION") or name,
        "utc": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "host": _host() | {"gpu": gpu is not None},
        "gpu": gpu,
        "versions": _versions(),
        "commit": commit,
        "dirty": dirty,
        "argv": words(sys.argv if argv is None else argv),
    }


def of_one(result: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """Return what a measurement returned as a file of one new run.

    The lists of rows name the run. The rest are the run's facts.

    Args:
        lists: names of the lists of rows in `result`.
    """
    run = record() | {"facts": {name: value for name, value in result.items() if name not in lists}}
    return {"runs": {run["id"]: run}} | {name: [{"run": run["id"]} | row for row in result[name]] for name in lists}


def words(argv: Sequence[str]) -> list[str]:
    """Return a command's words with this machine's folders left out of absolute paths, also of NAME=PATH; the program
    by its name.
    """
    found = [without_folder(w) for w in argv]
    if found and found[0] in ("__main__.py", "kvbits", "-c", "-m"):
        found[0] = "kvbits"
    return found


def without_folder(word: str) -> str:
    """Return an absolute path's last name, also of NAME=PATH; other words as they are."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{os.path.basename(path.rstrip('/'))}" if os.path.isabs(path) else word


def command_of(run: Mapping[str, Any]) -> str | None:
    """Return a run's command as it is typed; None where it was not recorded."""
    return None if run["argv"] is None else shlex.join(run["argv"])


def dated(some: Iterable[Mapping[str, Any]]) -> str:
    """Return days and commits of runs for a footnote: "2026-11-22 (2a7ad90 and c92d2ef); 2026-11-23 (7047e9a)"."""
    days: dict[str, dict[str, None]] = {}
    for run in sorted(some, key=lambda run: run["utc"] or ""):
        commit = (
            "commit unknown" if run["commit"] is None else run["commit"][:7] + (" with changes" if run["dirty"] else "")
        )
        days.setdefault((run["utc"] or "an unknown day")[:10], {})[commit] = None
    return "; ".join(f"{day} ({_listed(list(commits))})" for day, commits in days.items())


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def has_bfloat16() -> bool:
    """Return whether this machine's CPU has instructions for bfloat16."""
    return bool(_host()["bfloat16"])


def cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor as the system gives it."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Return what Linux says of the first core, by name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        first.setdefault(name.strip(), value.strip())
    return first


def _host() -> dict[str, Any]:
    first = _cpuinfo()
    flags = set(first.get("flags", first.get("Features", "")).split())
    isa = next((name for name, needed in _ISA if needed <= flags), "generic")
    return {
        "cpu": processor(),
        "cores": cores(),
        "isa": isa,
        "bfloat16": bool(flags & _BFLOAT16),
    }


def _gpu() -> dict[str, Any] | None:
    """Return GPUs as the driver's own tool lists them: asking torch would load it, and initialise CUDA."""
    said = _said(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    cards = [line.rsplit(",", 1) for line in (said or "").splitlines() if "," in line]
    return {"name": cards[0][0].strip(), "count": len(cards), "driver": cards[0][1].strip()} if cards else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kvbits": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> tuple[str | None, bool | None]:
    given = os.environ.get("KVBITS_COMMIT")
    if not given and (_HOME / ".git").exists():
        commit = _said(["git", "-C", str(_HOME), "rev-parse", "HEAD"])
        changed = _said(["git", "-C", str(_HOME), "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs"])
        return (commit.strip(), None if changed is None else bool(changed.strip())) if commit else (None, None)
    if not given and (_HOME / _COMMIT_FILE).is_file():
        given = (_HOME / _COMMIT_FILE).read_text(encoding="utf-8").strip()
    return (given.removesuffix("-dirty"), given.endswith("-dirty")) if given else (None, None)


def _said(command: list[str]) -> str | None:
    """Return what a command prints, or None where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
