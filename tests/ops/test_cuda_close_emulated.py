"""close.cu run on a CPU, thread by thread (tests/ops/emulated): bit for bit what the reference stores, checked without
a GPU.

KVBITS_TEST_ALL_KERNELS=1 runs all cases of test_cuda_close.py (a minute or two).
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from messages import raises
from ops.cpu_cases import static_of
from ops.emulated_build import build, put_sources
from ops.test_cuda_close import HEADS, RAW, clamped, pairs, spec, ugly

from kvbits.errors import DataError
from kvbits.ops.cuda import close as cuda
from kvbits.ops.cuda.families.plain import close as plain
from kvbits.ops.reference import close as reference
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, PerChannel, PerToken

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """`cuda.close` on tensors of the CPU."""

    def load(layout, dtype, device_index):
        macros = plain.defines(layout, dtype)
        instead = {
            'extern "C" __global__': "",
            "extern __shared__ __align__(16) unsigned char memory[];": "unsigned char* memory = ::shared;",
        }
        put_sources(tmp_path, Path(plain.__file__).parent / "close.cu", instead)
        (tmp_path / "defines.h").write_text(
            "".join(
                f"#define {k} {v}\n" for k, v in (macros | {"KERNEL": "close_pages", "NUM_THREADS": "THREADS"}).items()
            )
        )
        # No fused multiply-add: the kernel asks for separate roundings where they matter, and a GPU has none to fuse in
        # what is left.
        made = build(tmp_path, ["-mf16c", "-ffp-contract=off"])
        return SimpleNamespace(launch=lambda grid, threads, args, stream: made.launch(ctypes.byref(args), grid)), int(
            macros["THREADS"]
        )

    monkeypatch.setattr(plain, "load", load)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))


def cases():
    if os.environ.get("KVBITS_TEST_ALL_KERNELS"):
        return [(*case, dtype) for case in pairs() for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    kivi = spec("int4", PerChannel(), symmetric=False)
    return [
        (spec("int8"), spec("int8", PerToken(), symmetric=False), 64, 64, torch.bfloat16),
        (kivi, spec("int4", symmetric=False, scale_dtype="float32"), 64, 64, torch.float32),
        (spec("int3", center="channel"), spec("int2", scale_dtype="bfloat16"), 64, 64, torch.float16),
        (spec("fp8_e4m3", PerToken()), spec("fp8_e5m2", PerChannel()), 80, 32, torch.bfloat16),
        (RAW, spec("int8", PerChannel(), static=True), 64, 64, torch.bfloat16),
    ]


@pytest.mark.parametrize("key, value, head_dim, page_size, dtype", cases(), ids=str)
def test_stores_what_the_reference_stores(key, value, head_dim, page_size, dtype, emulated):
    layout = PageLayout(
        key=key, value=value, page_size=page_size, num_kv_heads=HEADS, head_dim=head_dim, raw_dtype="bfloat16"
    )
    k, v = ugly(5, page_size, head_dim, dtype)
    k[4, 0, 2], v[4, 0, 3] = -0.0, 2.0**-6
    static = static_of(layout)
    want, saturated = reference.close_pages(k, v, layout, static)
    slab = torch.full((7, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8)
    ids = np.array([4, 0, 6, 2, 3])
    assert clamped(k, v, PageStore(layout, (slab,), static), ids) == saturated
    for name, s in layout.sections.items():
        assert torch.equal(slab[ids][..., s.offset : s.offset + s.nbytes], want[..., s.offset : s.offset + s.nbytes]), (
            name
        )
    assert torch.equal(slab[ids], want), "padding is zero"
    assert (slab[[1, 5]] == 0xFF).all(), "other pages stay as they were"


@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (64, 128), (512, 512)])
def test_keys_and_values_of_unlike_widths_and_wide_ones(head_dim, value_head_dim, emulated):
    layout = PageLayout(
        key=spec("int8", center="channel"),
        value=spec("int4", PerChannel(), symmetric=False),
        page_size=64,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
    )
    k, v = ugly(5, 64, head_dim, torch.bfloat16)[0], ugly(5, 64, value_head_dim, torch.bfloat16)[1]
    want, saturated = reference.close_pages(k, v, layout)
    slab = torch.full((5, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8)
    assert clamped(k, v, PageStore(layout, (slab,)), np.arange(5)) == saturated
    assert torch.equal(slab, want)


def test_bad_input_is_named(emulated):
    layout = PageLayout(key=spec("int8"), value=spec("int8"), page_size=64, num_kv_heads=1, head_dim=64)
    store = PageStore(layout, (torch.zeros(2, 1, layout.head_bytes, dtype=torch.uint8),))
    good = torch.randn(1, 1, 64, 64).bfloat16()
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = good.clone()
        bad[0, 0, 5, 7] = value
        with raises(DataError, "values", value, "(0, 0, 5, 7)"):
            cuda.close(good, bad, store, np.array([0]))
    with raises(DataError, "keys", "float16", "scale_dtype='float32'"):
        cuda.close(good * 1e8, good, store, np.array([1]))
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
    cuda.close(good * 1e8, good, store, np.array([1]), status=status)
    cuda.close(good, bad, store, np.array([0]), status=status)
    assert status[[2, 5]].all() and not status[[4, 6]].any()
    for other in (status[:6], status.float()):
        with raises(DataError, "status", "torch.int32", "[7]"):
            cuda.close(good, good, store, np.array([1]), status=other)
