"""Hashes of the compiled code of every CUDA kernel of the presets: whether a change of the sources changed any kernel.

Needs NVRTC, no GPU.

    python tests/ops/kernel_bytes.py --out before.json          # before the change
    python tests/ops/kernel_bytes.py --against before.json      # after it: 1 where a kernel differs

What is hashed is PTX, which ptxas turns into the same machine code every time, without the names of C++ symbols and
declarations that nothing uses. `--cubin` hashes machine code as it is. A kernel is another if its code is none of those
before: which macros it is compiled with does not count.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvbits import schemes
from kvbits.errors import KernelError, SpecError
from kvbits.integrations.engine.served import raw_of
from kvbits.ops.cuda import ahead
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.engine.runtime.compile import Source
from kvbits.spec import CacheSpec, LayerGeometry

ARCHITECTURES = {"sm_90": (9, 0), "sm_80": (8, 0)}
MODELS = (
    (128, torch.bfloat16, False),
    (128, torch.bfloat16, True),
    (128, torch.float32, False),
    (64, torch.bfloat16, False),
    (256, torch.bfloat16, False),
)
"""Size of heads, dtype, whether scores have a softcap."""


def launched(names: list[str], capability: tuple[int, int]) -> Iterator[Source]:
    """Yield what caches and vLLM launch for presets on a GPU of that capability."""
    for name, (head_dim, dtype, softcap) in itertools.product(names, MODELS):
        try:
            spec = CacheSpec(
                scheme=schemes.get(name, head_dim=head_dim), layers=(LayerGeometry(num_kv_heads=8, head_dim=head_dim),)
            )
        except SpecError:
            continue
        for group in spec.groups:
            yield from ahead.of_group(group, 32, dtype, softcap, capability)
            pages = group.layouts["closed"]
            copies = [raw_of(pages)] if pages.key.has_offsets else []
            copies += [dataclasses.replace(pages, key=c.key, value=c.value) for c in spec.scheme.copies]
            yield from ahead.of_vllm(pages, copies, 32, dtype, softcap, capability)


def _without_comments(text: str) -> str:
    """No string of the sources holds a comment's sign."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def code(kernel: Source, arch: str, kept: Path | None) -> str:
    """The hash of one kernel's code; compiled again only if its text, its headers or its macros are others."""
    headers = {
        header: _without_comments(text) for header, text in cuda_compile.headers_of(kernel.folder, kernel.name).items()
    }
    source = "".join(f"#define {k} {v}\n" for k, v in sorted(kernel.macros.items())) + _without_comments(
        (kernel.folder / kernel.name).read_text()
    )
    key = hashlib.sha256(repr((cuda_compile.version(), source, sorted(headers.items()), arch)).encode()).hexdigest()[
        :32
    ]
    if kept and (kept / key).exists():
        binary = gzip.decompress((kept / key).read_bytes())
    else:
        binary = cuda_compile._compile(
            "kernel.cu", source, headers, [*cuda_compile.OPTIONS, f"--gpu-architecture={arch}"]
        ).cubin
        if kept:
            (kept / key).write_bytes(gzip.compress(binary, 1))
    return hashlib.sha256(instructions(binary.decode()).encode() if arch.startswith("compute") else binary).hexdigest()[
        :24
    ]


def instructions(ptx: str) -> str:
    """PTX without what machine code does not depend on: see above."""
    once = {name for name, n in collections.Counter(re.findall(r"[\w$]+", ptx)).items() if n == 1}
    lines = [
        x
        for x in ptx.splitlines()
        if not ((found := re.match(r"\.global .*?([\w$]+)(?:\[\d+\])*(?: =|;)", x)) and found[1] in once)
    ]
    text = "\n".join(lines)
    for i, name in enumerate(dict.fromkeys(re.findall(r"\b_Z\w+", text))):
        text = re.sub(rf"\b{name}\b", f"symbol{i}", text)
    return text


def for_ptx() -> None:
    """Let NVRTC give PTX where machine code is asked for."""
    library = cuda_compile._library()

    class Ptx:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name.replace("CUBIN", "PTX"))

    cuda_compile._library = Ptx


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the hashes to this JSON file")
    parser.add_argument("--against", type=Path, help="compare with the hashes in this JSON file")
    parser.add_argument("--kept", type=Path, help="a folder that keeps hashes of texts that were compiled before")
    parser.add_argument("--arch", choices=list(ARCHITECTURES), nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--preset", nargs="+", default=list(schemes.PRESETS))
    parser.add_argument("--cubin", action="store_true", help="hash machine code: slower by ptxas")
    args = parser.parse_args()
    if why := cuda_compile.missing():
        raise KernelError(why)
    if not args.cubin:
        for_ptx()
    found: dict[str, str] = {}
    for arch in args.arch:
        for kernel in ahead.distinct(launched(args.preset, ARCHITECTURES[arch])):
            target = kernel.arch(ARCHITECTURES[arch])
            label = " ".join([target, kernel.name, *(f"{k}={v}" for k, v in sorted(kernel.macros.items()))])
            found[label] = code(kernel, target if args.cubin else target.replace("sm_", "compute_"), args.kept)
    if args.out:
        args.out.write_text(json.dumps(found, indent=0) + "\n")
    codes = set(found.values())
    print(f"{len(found)} kernels, {len(codes)} different codes")
    if not args.against:
        return 0
    known = set(json.loads(args.against.read_text()).values())
    print(f"{len(codes & known)} codes as before, {len(codes - known)} other, {len(known - codes)} gone")
    other = [label for label, digest in found.items() if digest not in known]
    print("\n".join(other))
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
