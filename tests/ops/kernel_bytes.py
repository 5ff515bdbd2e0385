"""Hashes of the compiled code of every CUDA kernel of the presets: whether a change of the sources changed any kernel. Needs NVRTC, no GPU.

    python tests/ops/kernel_bytes.py --out before.json          # before the change
    python tests/ops/kernel_bytes.py --against before.json      # after it: 1 where a kernel differs

What is hashed is PTX, which ptxas turns into the same machine code every time, without the names of C++ symbols and declarations that nothing uses.
`--cubin` hashes machine code as it is. Kernels that only one side knows are counted, not refused.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kvbits
from kvbits import schemes
from kvbits.errors import KernelError, SpecError
from kvbits.ops.cuda import decode, merge, place
from kvbits.ops.cuda.append import tokens
from kvbits.ops.cuda.engine import device_plan, kernels
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.engine.runtime import driver
from kvbits.ops.cuda.engine.shape import Ask
from kvbits.ops.cuda.families import family_of
from kvbits.ops.cuda.families.klt import store as store_banded
from kvbits.ops.cuda.families.klt import unpack as dequantize_banded
from kvbits.ops.cuda.families.plain import close as close_packed
from kvbits.ops.cuda.families.plain import unpack as unpacker
from kvbits.spec import LowLayout, PageLayout

SOURCES = {p.name: p.parent for p in Path(kvbits.__file__).parent.rglob("*.cu")}
ARCHITECTURES = {"sm_90": (9, 0), "sm_80": (8, 0)}
HEADS = (128, 64, 256)
DTYPES = (torch.bfloat16, torch.float32)
Case = tuple[str, str, dict[str, Any]]
"""What it is, its source, its macros."""


def cases(capability: tuple[int, int], names: list[str]) -> Iterator[Case]:
    """Kernels that the presets `names` launch on a GPU of that capability: every kind of them at head_dim 128 on 9.0, elsewhere those of bfloat16 decoding."""
    for name in names:
        for head_dim in HEADS:
            try:
                scheme = schemes.get(name, head_dim=head_dim)
            except SpecError:
                continue
            layout = PageLayout(key=scheme.key, value=scheme.value, page_size=scheme.page_size, num_kv_heads=8, head_dim=head_dim)
            low = None
            if scheme.tiers:
                tier = scheme.tiers[0]
                low = LowLayout(key_bits=tier.key_bits, value_bits=tier.value_bits, page_size=scheme.page_size, num_kv_heads=8, head_dim=head_dim)
            for what, source, defines in _of_layout(layout, low, capability, head_dim == HEADS[0] and capability == (9, 0)):
                yield f"{name} {head_dim} {what}", source, defines
    for head_dim in HEADS:
        for dtype in DTYPES:
            yield f"merge {head_dim} {dtype}", "merge.cu", merge.source(head_dim, dtype).macros
    yield "place", "place.cu", place.source().macros
    yield "append", "append.cu", tokens.raw_source(False).macros
    yield "advance", "advance.cu", decode.ADVANCE.macros
    for parts in (1, 2, 3, 4):
        yield f"work_list {parts}", "work_list.cu", device_plan.list_source(parts).macros


def _of_layout(layout: PageLayout, low: LowLayout | None, capability: tuple[int, int], every: bool) -> Iterator[Case]:
    limit, packed = driver.shared_limit(capability), None if layout.is_raw else layout
    if family_of(layout).refuses("attend", layout, shared_limit=limit) is None:
        kinds: list[dict[str, Any]] = [{}, {"raw": True}, {"tables": True}, {"tables": True, "raw": True}]
        kinds += [{"fold": True, "raw": True}, {"fold": True, "raw": True, "tables": True}] if family_of(layout).folds else []
        kinds += [{"low": low, **kind} for kind in kinds[:2]] if low else []
        for columns in (4, 16, 64) if every else (4,):
            cols = kernels.columns([layout], columns, False)
            for kind in kinds if columns == 4 and every else kinds[1:2]:
                for softcap in (False, True) if kind == {"raw": True} and every else (False,):
                    kernel = kernels.kernel_for(layout, Ask(layout.head_dim, cols, "bfloat16", "bfloat16", softcap, limit, **kind))
                    label = " ".join("low" if k == "low" else k for k in kind)
                    yield f"attend {cols} {label}{' softcap' if softcap else ''}", kernel.source.name, dict(kernel.defines)
    if packed is None:
        return
    for dtype in DTYPES if every else DTYPES[:1]:
        yield from _of_dtype(layout, low, dtype, capability)


def _of_dtype(layout: PageLayout, low: LowLayout | None, dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Case]:
    if family_of(layout).refuses("close", layout, dtype=dtype) is None:
        if layout.key.is_banded:
            for appends, warpgroups in ((False, False), (True, False), *([(False, True)] if capability == (9, 0) and layout.head_dim == 128 else [])):
                yield f"close {dtype} {appends} {warpgroups}", "store_banded.cu", store_banded.defines(layout, dtype, appends, warpgroups)
        else:
            for appends in (False, True):
                yield f"close {dtype} {appends}", "close.cu", close_packed.defines(layout, dtype, appends=appends)
            if low:
                yield f"close {dtype} low", "close.cu", close_packed.defines(layout, dtype, low)
    if family_of(layout).refuses("unpack", layout, dtype=dtype) is None:
        banded = layout.key.is_banded
        yield f"dequantize {dtype}", f"dequantize{'_banded' * banded}.cu", (dequantize_banded if banded else unpacker).defines(layout, dtype)
        if low:
            yield f"dequantize {dtype} low", "dequantize.cu", unpacker.defines(layout, dtype, low)
    if layout.key.is_banded and store_banded.refuses_layout(layout, dtype) is None:
        for count in (store_banded.FEW, layout.page_size):
            yield f"store {dtype} {count}", "store_banded.cu", store_banded.defines(layout, dtype, tokens=count)
    elif tokens.refuses_layout(layout, capability) is None:
        for count in (tokens.FEW, tokens.tokens_of_prompts(layout, dtype)):
            yield f"store {dtype} {count}", "store_tokens.cu", tokens.defines(layout, dtype, count)


def _without_comments(text: str) -> str:
    """No string of the sources holds a comment's sign."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def code(name: str, defines: dict[str, Any], arch: str, kept: Path | None) -> str:
    """The hash of one kernel's code; compiled again only if its text, its headers or its macros are others."""
    folder = SOURCES[name]
    headers = {header: _without_comments(text) for header, text in cuda_compile.headers_of(folder, name).items()}
    source = "".join(f"#define {k} {v}\n" for k, v in sorted(defines.items())) + _without_comments((folder / name).read_text())
    key = hashlib.sha256(repr((cuda_compile.version(), source, sorted(headers.items()), arch)).encode()).hexdigest()[:32]
    if kept and (kept / key).exists():
        binary = gzip.decompress((kept / key).read_bytes())
    else:
        binary = cuda_compile._compile("kernel.cu", source, headers, [*cuda_compile.OPTIONS, f"--gpu-architecture={arch}"]).cubin
        if kept:
            (kept / key).write_bytes(gzip.compress(binary, 1))
    return hashlib.sha256(instructions(binary.decode()).encode() if arch.startswith("compute") else binary).hexdigest()[:24]


def instructions(ptx: str) -> str:
    """PTX without what machine code does not depend on: see above."""
    once = {name for name, n in collections.Counter(re.findall(r"[\w$]+", ptx)).items() if n == 1}
    lines = [x for x in ptx.splitlines() if not ((found := re.match(r"\.global .*?([\w$]+)(?:\[\d+\])*(?: =|;)", x)) and found[1] in once)]
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
    found = {}
    for arch in args.arch:
        for what, source, defines in cases(ARCHITECTURES[arch], args.preset):
            chip = (arch if args.cubin else arch.replace("sm_", "compute_")) + ("a" if defines.get("WARPGROUPS") else "")
            found[f"{arch} {what} {source}"] = code(source, defines, chip, args.kept)
    if args.out:
        args.out.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} kernels, {len(set(found.values()))} different codes")
    if not args.against:
        return 0
    known = json.loads(args.against.read_text())
    other = [label for label, digest in found.items() if known.get(label, digest) != digest]
    print(
        f"{sum(k in known for k in found) - len(other)} as before, {len(other)} other, {len(set(found) - set(known))} new, {len(set(known) - set(found))} gone"
    )
    print("\n".join(other))
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
