"""CPU kernels of banded codes and their bases against float64 over the dequantized pages, for every tier that this machine can run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dense_model import dense_attention
from ops.cpu_cases import NOISE, RAW, banded, inverse_frequencies, needs_library, random_call

from kvbits import schemes
from kvbits.errors import DataError
from kvbits.ops.cpu import attend as cpu
from kvbits.ops.cpu import structs
from kvbits.ops.reference import attend as reference
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.quant.basis import inverse
from kvbits.spec import PageLayout, PerGroup, PerToken, QuantSpec

pytestmark = needs_library

PRESETS = ("klt4", "klt3", "klt2")


def sides(name):
    scheme = schemes.get(name)
    return scheme.key, scheme.value


def assert_agrees(case, noise=NOISE["banded"]):
    q, call, positions = case
    (out, lse), (want, want_lse) = cpu.attend(q, call, positions), reference.attend(q, call, positions, torch.float64)
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
    assert not out[torch.isinf(want_lse)].any(), "rows that see nothing are zero"
    assert float((out - want).norm()) <= noise * float(want.norm())
    seen = torch.isfinite(want_lse)
    assert float((lse - want_lse)[seen].abs().max()) <= 2 * noise


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 256])
def test_presets(tier, name, head_dim):
    """Pages of two frames, the last one cut short; positions at which angles in float32 would be off."""
    for group, tokens, first in ((1, 1, 0), (4, 2, 131_000), (7, 1, 200)):
        assert_agrees(random_call(*sides(name), head_dim=head_dim, group=group, tokens=tokens, pages=5, first=first))


@pytest.mark.parametrize("head_dim", [8, 16, 40, 512])
def test_other_head_dims(tier, head_dim):
    assert_agrees(random_call(*sides("klt3"), head_dim=head_dim, group=5, pages=2))


@pytest.mark.parametrize("options", [
    {"window": 70}, {"softcap": 20.0}, {"window": 130, "softcap": 30.0, "tokens": 9}, {"tokens": 83, "pages": 6}, {"page_size": 32}, {"page_size": 160},
    {"heads": 1, "group": 16, "pages": 70, "batch": 1}, {"sinks": 0, "dtype": torch.float32}, {"batch": 5, "pages": 6, "group": 64},
])  # fmt: skip
def test_options(tier, options):
    for name in PRESETS:
        assert_agrees(random_call(*sides(name), **options))


def test_every_width_of_keys(tier):
    """All planes, in every order; 8 bits are two fields of 4."""
    for bands in ((8, 6, 5, 4), (0, 1, 8, 3), (3, 0, 0, 6), (1, 1, 1, 1), (2, 5, 0, 8), (0, 0, 0, 4)):
        for basis in (None, "hadamard", "klt"):
            assert_agrees(random_call(banded(*bands, basis=basis, center="channel"), RAW, group=5, dtype=torch.float32))
    assert_agrees(random_call(banded(8, 3, 1, 2, 4), RAW, head_dim=72))


def test_values_of_every_width_that_kernels_take(tier):
    for bits in (2, 3, 4):
        for basis in (None, "hadamard"):
            assert_agrees(random_call(RAW, banded(*[bits] * 4, basis=basis), group=5, dtype=torch.float32))
            assert_agrees(random_call(RAW, banded(*[bits] * 4, basis=basis, center="channel"), head_dim=80, tokens=3))


def test_beside_other_formats(tier):
    key, value = sides("klt3")
    for other in ("int8", "int4", "fp8_e4m3", "nuq4"):
        spec = QuantSpec(
            format=other, granularity=PerToken() if other == "nuq4" else PerGroup(32), symmetric=other != "nuq4", outliers=0.01 * (other == "nuq4")
        )
        assert_agrees(random_call(key, spec, group=4))
        assert_agrees(random_call(spec, value, group=4))


@pytest.mark.parametrize("basis", [None, "hadamard", "klt"])
@pytest.mark.parametrize("attend", [cpu.attend, reference.attend])
def test_levels_are_those_of_the_documents(attend, basis):
    """Keys and values as dequantizing reads them, against plain softmax: the reference's own way in the basis is not asked."""
    key, value = sides("klt2")
    key = dataclasses.replace(key, basis=basis)
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=2, head_dim=64)
    basis = torch.eye(64) * 2 + torch.randn(2, 64, 64) / 8
    static = {"k_basis": basis, "k_inverse": inverse(basis), "k_inv_freq": inverse_frequencies(64)}
    q, call, _ = random_call(key, value, batch=1, sinks=0, pages=5, dtype=torch.float32)
    part = call.parts[0]
    pages, _ = close_reference.close_pages(*torch.randn(2, 5, 2, 64, 64), layout, static, part.table.starts)
    k, v = (x.transpose(0, 1).flatten(1, 2).transpose(0, 1) for x in dequantize_pages(pages, layout, static, torch.float64, starts=part.table.starts))
    table = dataclasses.replace(part.table, page_ids=np.arange(5), lengths=np.full(5, 64, np.int32))
    store = dataclasses.replace(part.store, slabs=(pages,), static=static)
    alone = dataclasses.replace(call, parts=(dataclasses.replace(part, store=store, table=table),))
    out, lse = attend(q, alone, torch.tensor([[400]]))
    want, want_lse = dense_attention(q[0], k, v, [319], call.scaling, None, None)
    assert float((out[0] - want).norm()) <= NOISE["banded"] * float(want.norm())
    assert float((lse[0] - want_lse).abs().max()) <= 2 * NOISE["banded"]


def test_queries_large_in_one_direction(tier):
    """A query bias a hundred times the rest, which a calibrated basis takes out: numbers lost before it would not come back."""
    q, call, positions = random_call(*sides("klt3"), head_dim=128, group=4, dtype=torch.float32)
    q[..., 7] += 100
    part = call.parts[0]
    basis = part.store.static["k_basis"] * torch.where(torch.arange(128) == 7, 100, 1)[:, None]
    part.store.static.update(k_basis=basis, k_inverse=inverse(basis))
    k, v = torch.randn(2, len(part.table.page_ids), 2, 64, 128)
    k[..., 7] *= 1e-2
    close_reference.close(k, v, part.store, part.table.page_ids, starts=part.table.starts)
    assert_agrees((q, dataclasses.replace(call, parts=call.parts[:1]), positions))


def test_what_kernels_refuse():
    def refused(key, value, head_dim=64):
        return structs.refuses_layout(PageLayout(key=key, value=value, page_size=64, num_kv_heads=1, head_dim=head_dim))

    assert refused(*sides("klt2")) is None
    assert refused(RAW, banded(3, 2, 3, 2)) == "banded values of 2, 3 bits: the CPU kernels take 2, 3 or 4, the same in every band"
    assert refused(RAW, banded(8, 8, 8, 8)) == "banded values of 8 bits: the CPU kernels take 2, 3 or 4, the same in every band"
    q, call, positions = random_call(*sides("klt2"))
    part = call.parts[0]
    for name in ("k_inverse", "k_inv_freq"):
        static = {n: t for n, t in part.store.static.items() if n != name}
        bare = dataclasses.replace(part, store=dataclasses.replace(part.store, static=static))
        with pytest.raises(DataError, match=f"{name} must be"):
            cpu.attend(q, dataclasses.replace(call, parts=(bare,)), positions)
