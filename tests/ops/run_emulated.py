"""Runs the CPU library of wheels on machines we do not have: aarch64 (NEON) and old x86-64, emulated by qemu.

    python tests/ops/run_emulated.py dist/*.whl       of `make wheels`, which leaves the compilers; needs qemu-user and
                                                      libc6-arm64-cross

Cases and expected results are computed here; tests/ops/replay.cpp replays them on the emulated machine.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from ops.cpu_cases import (  # noqa: E402
    FORMATS,
    NOISE,
    RAW,
    random_call,
    specs_of,
    static_params,
)

from kvbits.ops.cpu.structs import store_struct  # noqa: E402
from kvbits.ops.descriptor import DTYPES, TORCH_NUMBERS  # noqa: E402
from kvbits.ops.reference.close import close_pages  # noqa: E402
from kvbits.ops.types import PageStore  # noqa: E402
from kvbits.spec import PageLayout, PerChannel, PerGroup, QuantSpec  # noqa: E402


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def blob(data: object) -> bytes:
    if data is None:
        raw = b""
    elif isinstance(data, torch.Tensor):
        raw = (
            data.contiguous().view(torch.uint8).numpy().tobytes()
            if data.dtype == torch.bfloat16
            else data.contiguous().numpy().tobytes()
        )
    else:
        raw = bytes(data) if isinstance(data, (bytes, ctypes.Structure)) else data.tobytes()
    return ints(len(raw)) + raw


def store_bytes(store: PageStore) -> bytes:
    layout, made = store.layout, store_struct(store)
    wide = []
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        for name in ("scale", "bias"):
            given = store.static.get(f"{kind}_{name}")
            wide.append(
                None
                if given is None
                else given.repeat_interleave(layout.head_dim // spec.num_groups(layout.head_dim), 1)
            )
        wide.append(store.static.get(f"{kind}_inv_freq"))
    slab = torch.cat([s.contiguous() for s in store.slabs])
    return (
        blob(made.key)
        + blob(made.value)
        + b"".join(blob(w) for w in wide)
        + ints(layout.page_size, layout.head_bytes, layout.page_size_bytes)
        + blob(slab)
    )


def attend_case(noise: float, *args: object, **kwargs: object) -> bytes:
    call = random_call(*args, **kwargs)
    q, o, (out, lse) = call.q, call.options, call.exact()
    data = ints(
        1,
        q.shape[0],
        q.shape[1],
        q.shape[2],
        call.stores[0].layout.num_kv_heads,
        q.shape[3],
        TORCH_NUMBERS[q.dtype],
        o["sliding_window"] or 0,
        len(call.stores),
    )
    data += (
        struct.pack("<3d", o["scaling"], o["softcap"] or 0.0, noise)
        + blob(q)
        + blob(call.positions.long())
        + blob(out.float())
        + blob(lse.float())
    )
    for store, t in zip(call.stores, call.lists, strict=True):
        data += store_bytes(store) + blob(t.indptr) + blob(t.page_ids) + blob(t.starts) + blob(t.lengths)
    return data


def close_case(spec: QuantSpec, head_dim: int, dtype: torch.dtype) -> bytes:
    layout = PageLayout(
        key=spec,
        value=spec,
        page_size=32,
        num_kv_heads=2,
        head_dim=head_dim,
        raw_dtype=str(dtype).removeprefix("torch."),
    )
    k, v = (torch.randn(2, 2, 32, head_dim).mul(torch.randn(2, 2, 32, 1).exp()).to(dtype) for _ in range(2))
    static = static_params(spec, spec, 2, head_dim)
    want, _ = close_pages(k, v, layout, static)
    store = PageStore(layout, (torch.full_like(want, 0xFF),), static)
    data = ints(2) + store_bytes(store) + ints(2, head_dim, DTYPES[layout.raw_dtype]) + blob(k) + blob(v) + blob(want)
    return data


def cases() -> bytes:
    data = b""
    for fmt in FORMATS:
        for i, spec in enumerate(specs_of(fmt, group=16)):
            data += attend_case(
                NOISE[fmt],
                spec,
                spec,
                head_dim=(64, 80, 128)[i % 3],
                group=1 + i % 8,
                page_size=(32, 64, 96)[i % 3],
                tokens=1 + 2 * (i % 2),
            )
            data += close_case(spec, (64, 80, 128)[i % 3], (torch.float32, torch.bfloat16, torch.float16)[i % 3])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        data += attend_case(NOISE["raw"], RAW, RAW, head_dim=72, dtype=dtype, window=70, softcap=20.0) + close_case(
            RAW, 40, dtype
        )
    data += attend_case(
        2e-2,
        QuantSpec(format="int3", granularity=PerChannel()),
        QuantSpec(format="int2", granularity=PerGroup(4)),
        head_dim=96,
        tokens=30,
    )
    return data + ints(0)


def run(*command: str, **env: str) -> None:
    print("+", " ".join(command), *(f"{k}={v}" for k, v in env.items()), flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | env)


MACHINES = {
    "aarch64": {"neon": ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")},
    "x86_64": {"generic": ("qemu-x86_64", "-cpu", "Nehalem"), "avx2": ("qemu-x86_64", "-cpu", "Haswell")},
}
"""By architecture and the instruction set that the library is to choose there."""


def main() -> None:
    torch.manual_seed(0)
    build = ROOT / "build" / "emulated"
    build.mkdir(parents=True, exist_ok=True)
    (build / "cases.bin").write_bytes(cases())
    for wheel in sys.argv[1:]:
        arch = next(a for a in MACHINES if wheel.endswith(f"_{a}.whl"))
        folder = build / arch
        with zipfile.ZipFile(wheel) as z:
            library = z.extract("kvbits/ops/cpu/libkvbits_cpu.so", folder)
        program = str(folder / "replay")
        run(
            str(ROOT / "build" / "wheels" / f"c++-{arch}"),
            "-std=c++17",
            "-O2",
            "tests/ops/replay.cpp",
            library,
            f"-Wl,-rpath,{Path(library).parent}",
            "-o",
            program,
        )
        for tier, machine in MACHINES[arch].items():
            run(*machine, program, str(build / "cases.bin"), tier)
            run(*machine, program, str(build / "cases.bin"), KVBITS_CPU_TIER="generic")


if __name__ == "__main__":
    main()
