"""The Triton path against the float64 reference: through Triton's interpreter on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbits.spec import PerChannel, PerGroup, PerToken, QuantSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
RAW = QuantSpec.raw()


def spec(fmt, granularity=PerGroup(32), **options):  # noqa: B008 - frozen
    return QuantSpec(format=fmt, granularity=granularity, **options)


def cases():
    from ops.cuda_cases import Case

    small = {"lengths": (70, 0, 33), "head_dim": 64, "page_size": 32, "group": 2}
    yield Case(key=RAW, value=RAW, **small)
    for f in ("int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2"):
        yield Case(key=spec(f), value=spec(f), **small, tail=5, sinks=3)
    yield Case(key=spec("int4", PerChannel(), symmetric=False), value=spec("int3", PerToken(), symmetric=False), **small)
    yield Case(key=spec("int2", center="channel"), value=spec("int8", PerChannel(), center="channel"), **small)
    yield Case(key=spec("int4", PerChannel(), static=True), value=spec("int8", static=True, symmetric=False), **small)
    yield Case(
        key=spec("int4", PerToken(), scale_dtype="bfloat16"), value=spec("int4", PerToken(), scale_dtype="float32"), lengths=(40,), head_dim=80, page_size=32
    )
    yield Case(
        key=spec("fp4_e2m1", PerGroup(16), scale_dtype="float8_e4m3"), value=spec("fp4_e2m1", PerGroup(16), scale_dtype="float8_e4m3"), **small, tail=5, sinks=3
    )
    yield Case(key=spec("int4"), value=spec("int4"), **small | {"lengths": (150,)}, window=60, softcap=5.0, num_queries=9, tail=4, dtype=torch.float16)


@needs_triton
@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="runs interpreted in a process of its own, see below")
@pytest.mark.parametrize("index", range(12))
def test_agrees_with_float64(index):
    from ops.cuda_cases import build, relative_error

    from kvbits.ops.reference import attend as reference
    from kvbits.ops.triton import attend as triton

    case = list(cases())[index]
    call, q, _ = build(case, "cpu" if INTERPRETED else "cuda")
    newest = torch.tensor([max(n, 1) for n in case.lengths])
    positions = newest[:, None] - case.num_queries + torch.arange(case.num_queries)
    assert triton.refuses(q, call) is None
    out, lse = triton.attend(q, call, positions)
    want, want_lse = reference.attend(q, call, positions, torch.float64)
    assert relative_error(out, want) < 4e-3  # the result leaves in 16 bits
    limit = 1e-4 if INTERPRETED else 2e-3  # products on a GPU keep 10 bits of mantissa (tf32): 2**-11 of a score of a few units
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=limit, atol=limit)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_interpreted_on_the_cpu():
    """Triton decides at import whether it interprets, so this takes a process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", __file__, "-k", "agrees"]
    found = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stdout[-3000:]
    assert "12 passed" in found.stdout


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted functions have no machine code")
@pytest.mark.parametrize(
    "key, value",
    [
        (spec("int4"), spec("int3", symmetric=False)),
        (spec("fp8_e4m3", PerToken()), spec("int2", PerChannel())),
        (QuantSpec.raw(), QuantSpec.raw()),  # of float32, which no other GPU kernel reads
    ],
    ids=str,
)
def test_compiles_for_hopper_without_a_gpu(key, value):
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvbits.ops.triton import attend as triton
    from kvbits.spec import PageLayout

    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=8, head_dim=128, raw_dtype="float32")
    sides = {"KEY": triton._constants(layout, "k"), "VALUE": triton._constants(layout, "v")}
    constants = {
        "H": 8,
        "D": 128,
        "D_PADDED": 128,
        "PAGE": 64,
        "RUNS": 4,
        "COLUMN_BLOCKS": 1,
        "TOKENS": 64,
        "COLUMNS": 16,
        "SOFTCAP": False,
        "PRECISION": "tf32",
        **sides,
    }
    kinds = dict.fromkeys(("out", "ml", "k_scale", "k_bias", "v_scale", "v_bias"), "*fp32") | {"q": "*bf16", "pool": "*u8", "window": "i64"}
    kinds |= dict.fromkeys(("positions", "run_first", "run_count", "page_offset", "page_start", "page_length"), "*i64") | dict.fromkeys(
        ("scaling", "softcap"), "fp32"
    )
    names = triton._attend.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(fn=triton._attend, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    assert compile_source(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_refusals_need_no_gpu():
    from ops.cuda_cases import Case, build

    from kvbits.ops.triton import attend as triton

    call, q, _ = build(Case(key=spec("int8"), value=spec("int8"), lengths=(64,), head_dim=64), "cpu")
    why = triton.refuses(q, call)
    assert why is None if INTERPRETED else ("on cpu" in why or "not installed" in why)
