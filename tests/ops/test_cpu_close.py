"""CPU page closing against the reference: the same bytes and the same counts, for every tier that this machine can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from messages import mentions, raises
from ops import by_hand
from ops.cpu_cases import FORMATS, RAW, kvquant, needs_library, specs_of, static_params

from kvbits.errors import DataError, UnsupportedError
from kvbits.ops import dispatch
from kvbits.ops.cpu import close as cpu
from kvbits.ops.reference import close as reference
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

pytestmark = needs_library


def ugly(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pages with zero, constant, tiny, subnormal-scale and outlier rows and channels."""
    x = torch.randn(shape) * torch.randn(*shape[:-1], 1).exp() + torch.randn(1, shape[1], 1, shape[3])
    x[0, 0, 0] = 0
    x[0, :, :, 3] = 0
    x[1, 0, 4] = 7
    x[1, 0, 5] *= 1e-7
    x[1, 0, 6] *= 3e-5
    x[2, 0, :, 1] *= 1e-6
    x[2, 0, 2, 0] = 1000
    x[2, :, :, 5] = -0.0
    x[2, :, :, 6] = torch.tensor([0.0, -0.0]).repeat(x.shape[2])[: x.shape[2]]
    x[1, :, 5:9] = torch.tensor([-0.0, 0.0]).repeat(x.shape[3])[: x.shape[3]]
    return x.to(dtype)


def close_both(
    k,
    v,
    key: QuantSpec,
    value: QuantSpec,
    page_size: int,
    head_dim: int,
    heads: int = 2,
    value_head_dim: int | None = None,
):
    """(pages by the kernel, pages by the reference, status of each) from poisoned pools with strided pages."""
    raw_dtype = str(k.dtype).removeprefix("torch.")
    layout = PageLayout(
        key=key,
        value=value,
        page_size=page_size,
        num_kv_heads=heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        raw_dtype=raw_dtype,
    )
    static = static_params(key, value, heads, head_dim, value_head_dim)
    starts = np.array([5, 131_008, 70_001])
    ids = np.array([4, 0, 3])
    found, counts = [], []
    for close in (cpu.close, reference.close):
        buffer = torch.full((5, heads + 1, layout.head_bytes), 0xFF, dtype=torch.uint8)
        store = PageStore(layout, (buffer[:2, :heads], buffer[2:, :heads]), static)
        status = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
        close(k, v, store, ids, starts, status)
        counts.append(status.tolist())
        assert bool((buffer[:, heads] == 0xFF).all()), "bytes between pages stay as they are"
        assert bool((buffer[1:3] == 0xFF).all()), "pages not named stay as they are"
        found.append(buffer)
    return found, counts


@pytest.mark.parametrize("fmt", FORMATS)
def test_same_bytes_as_reference(tier, fmt):
    for i, spec in enumerate(specs_of(fmt, group=16)):
        head_dim, page_size = [(64, 64), (80, 32), (128, 96)][i % 3]
        for dtype in (torch.float32, torch.bfloat16):
            k, v = ugly((3, 2, page_size, head_dim), dtype), ugly((3, 2, page_size, head_dim), dtype).flip(2)
            (got, want), counts = close_both(k, v, spec, spec, page_size, head_dim)
            assert torch.equal(got, want), f"{spec} head_dim={head_dim} {dtype}"
            assert counts[0] == counts[1]


@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (128, 64), (24, 80)])
@pytest.mark.parametrize("fmt", [*FORMATS, "raw"])
def test_keys_and_values_of_unlike_widths(tier, fmt, head_dim, value_head_dim):
    for spec in [RAW] if fmt == "raw" else specs_of(fmt, group=8):
        k, v = ugly((3, 2, 64, head_dim), torch.bfloat16), ugly((3, 2, 64, value_head_dim), torch.bfloat16)
        (got, want), counts = close_both(k, v, spec, spec, 64, head_dim, value_head_dim=value_head_dim)
        assert torch.equal(got, want) and counts[0] == counts[1], spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(tier, dtype, scale_dtype):
    for granularity in (PerToken(), PerGroup(8), PerGroup(24), PerChannel()):
        for symmetric in (True, False):
            spec = QuantSpec(format="int4", granularity=granularity, symmetric=symmetric, scale_dtype=scale_dtype)
            k, v = ugly((3, 2, 32, 72), dtype), ugly((3, 2, 32, 72), dtype)
            (got, want), counts = close_both(k, v, spec, spec, 32, 72)
            assert torch.equal(got, want) and counts[0] == counts[1]


@pytest.mark.literature
@pytest.mark.parametrize(
    "spec",
    [kvquant("nuq4", 0.0)[1], QuantSpec(format="int4", outliers=0.01), QuantSpec(format="int4", pre_rope=True)],
    ids=str,
)
def test_what_the_reference_closes(spec):
    """KVQuant's techniques: refused by name, and served by the reference where nobody asked for a backend."""
    plain = QuantSpec(format="int4")
    for key, value in ((spec, plain), (plain, spec)) if not spec.pre_rope else ((spec, plain),):
        layout = PageLayout(key=key, value=value, page_size=32, num_kv_heads=2, head_dim=64)
        store = PageStore(
            layout, (torch.full((4, 2, layout.head_bytes), 0xFF, dtype=torch.uint8),), static_params(key, value, 2, 64)
        )
        k, ids = torch.randn(2, 2, 32, 64), np.array([0, 1])
        choice = dispatch.choose("close", k, store)
        assert choice.backend == "reference" and mentions(choice.refusals["cpu"], "codebooks", "outliers")
        with raises(UnsupportedError, "codebooks", "outliers", "reference"):
            cpu.close(k, k, store, ids, starts=np.array([0, 32]))
        assert bool((store.slabs[0] == 0xFF).all())


def test_raw_tensors_and_mixed_formats(tier):
    for key, value in (
        (RAW, RAW),
        (RAW, QuantSpec(format="int4")),
        (QuantSpec(format="int2", granularity=PerChannel(), symmetric=False), RAW),
    ):
        k, v = (
            ugly((3, 2, 64, 40 if value.is_raw else 64), torch.bfloat16),
            ugly((3, 2, 64, 40 if value.is_raw else 64), torch.bfloat16),
        )
        (got, want), counts = close_both(k, v, key, value, 64, k.shape[-1])
        assert torch.equal(got, want) and counts[0] == counts[1]


def test_strided_input(tier):
    """Rows as the cache hands them over: token-major, transposed, keys and values inside one projection."""
    spec = QuantSpec(format="int8")
    tokens = torch.randn(3 * 64, 2, 128)
    k, v = (tokens[..., i * 64 : (i + 1) * 64].transpose(0, 1).unflatten(1, (3, 64)).transpose(0, 1) for i in range(2))
    (got, want), _ = close_both(k, v, spec, spec, 64, 64)
    assert torch.equal(got, want)


def test_saturation_is_counted():
    spec = QuantSpec(format="int8", granularity=PerChannel(), static=True)
    k = torch.randn(3, 2, 32, 64) * 3
    (_, _), counts = close_both(k, k, spec, spec, 32, 64)
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_written_pages_decode_by_hand():
    """The documented layout, without packing.py in between: every element within half a step."""
    for fmt in ("int8", "int4", "int3", "int2"):
        spec = QuantSpec(format=fmt, granularity=PerToken(), scale_dtype="float32")
        k = torch.randn(3, 2, 32, 80)
        (got, _), _ = close_both(k, k, spec, spec, 32, 80)
        layout = PageLayout(key=spec, value=spec, page_size=32, num_kv_heads=2, head_dim=80, raw_dtype="float32")
        for kind in "kv":
            decoded = by_hand.values(got[4, 1].numpy(), layout, kind, spec, {}, 1)
            step = k[0, 1].abs().amax(-1, keepdim=True).double().numpy() / spec.q_max
            assert (np.abs(decoded - k[0, 1].double().numpy()) <= step * 0.5001).all()


@pytest.mark.parametrize("close", [cpu.close, reference.close], ids=["cpu", "reference"])
def test_a_status_is_added_to_and_takes_the_place_of_errors(close):
    spec = QuantSpec(format="int8")
    layout = PageLayout(key=spec, value=spec, page_size=32, num_kv_heads=2, head_dim=64)
    store = PageStore(layout, (torch.zeros(4, 2, layout.head_bytes, dtype=torch.uint8),))
    good, ids, status = torch.randn(2, 2, 32, 64), np.array([0, 1]), torch.zeros(STATUS_FIELDS, dtype=torch.int32)
    bad = good.clone()
    bad[1, 0, 5, 6] = torch.nan
    for k, v, found in (
        (good, good, [0, 0, 0, 0]),
        (good, good * 1e8, [0, 1, 0, 0]),
        (good, good, [0, 1, 0, 0]),
        (bad, good, [0, 1, 1, 0]),
    ):
        close(k, v, store, ids, status=status)
        assert status.tolist()[2:] == [*found, 0]
    with raises(DataError, "page_ids", 4):
        close(good, good, store, np.array([0, 4]), status=status)


def test_bad_input_is_refused():
    spec = QuantSpec(format="int8")
    layout = PageLayout(key=spec, value=spec, page_size=32, num_kv_heads=2, head_dim=64)
    store = PageStore(layout, (torch.zeros(4, 2, layout.head_bytes, dtype=torch.uint8),))
    k, ids = torch.randn(2, 2, 32, 64), np.array([0, 1])
    cpu.close(k, k, store, ids)
    for bad in (np.array([0, 4]), np.array([-1, 0])):
        with raises(DataError, "page_ids", 4):
            cpu.close(k, k, store, bad)
    with raises(DataError, "k", "torch.float32", "[3, 2, 32, 64]", "[2, 2, 32, 64]"):
        cpu.close(k, k, store, np.array([0, 1, 2]))
    with raises(DataError, "v", "torch.float32", "torch.float16"):
        cpu.close(k, k.half(), store, ids)
    for value in (float("nan"), float("inf"), float("-inf")):
        x = k.clone()
        x[1, 0, 5, 6] = value
        with raises(DataError, "values", value, "(1, 0, 5, 6)"):
            cpu.close(k, x, store, ids)
    with raises(DataError, "keys", "float16", "scale_dtype='float32'"):
        cpu.close(k * 1e8, k, store, ids)
    assert "int32" in cpu.refuses(k.int(), store)
    assert cpu.refuses(k, store) is None
