"""Calls for the CPU kernel tests: a scattered page pool with closed, sink and tail pages, everything unwritten
poisoned.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from ops.calls import Call, table_of

from kvbits.ops.cpu import library
from kvbits.ops.reference.attend import PageList
from kvbits.ops.reference.close import close_pages
from kvbits.ops.types import PageStore
from kvbits.quant.basis import completed
from kvbits.quant.scales import steps as band_steps
from kvbits.spec import (
    SCALE_8BIT,
    CacheSpec,
    PageLayout,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
)

needs_library = pytest.mark.skipif(library.unavailable() is not None, reason=f"{library.unavailable()}")


def _runnable_tiers() -> list[str]:
    """Every tier this machine can run, best first."""
    lib, now = library.library(), library.tier()
    found = [name for name in library.TIERS if lib.kvbits_set_tier(name.encode()) == 0]
    library.set_tier(now)
    return found


TIERS = _runnable_tiers() if library.unavailable() is None else []
TILE_TIERS = [name for name in TIERS if name in ("amx", "amx_emulated")]
OTHERWISE = {"amx": "avx512", "amx_emulated": "generic"}
"""The tier that serves what tiles do not."""
VECTOR_TIERS = [name for name in TIERS if name not in TILE_TIERS]
"""Tiers whose kernels are their own. Those of TILE_TIERS leave to one of these what is not served in tiles."""
RAW = QuantSpec.raw()
CODEBOOKS = ("nuq4", "nuq3", "nuq2")
FORMATS = ("int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2")
NOISE = {
    "int8": 1e-4,
    "trellis": 2e-2,
    "int4": 2e-2,
    "int3": 2e-2,
    "int2": 2e-2,
    "fp8_e4m3": 1e-5,
    "fp8_e5m2": 1e-5,
    "raw": 1e-5,
}
"""Relative L2 error allowed on dequantized values: q and p are rounded to 16 bits for int8, to 8 bits below; the rest is
fp32, or in tiles two bfloat16 terms.
"""


def assert_close(got, want, noise: float) -> None:
    """Outputs and log-sum-exps (out, lse) of a kernel agree with those of float64.

    `noise` bounds the relative L2 error of outputs and the standard deviation of the errors of log-sum-exps. Rounding
    errors of all channels of a query add up to nearly a Gaussian, and a query that sees one token has no mean over
    tokens. So one error may be 5 standard deviations, and the norm of n errors is that of n Gaussian ones, which
    exceeds sqrt(n) + 4 once in 3,000 times.
    """
    (out, lse), (want_out, want_lse) = ([torch.as_tensor(x).double() for x in both] for both in (got, want))
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
    assert not out[torch.isinf(want_lse)].any(), "rows that see nothing are zero"
    assert float((out - want_out).norm()) <= noise * float(want_out.norm())
    seen = torch.isfinite(want_lse)
    error = (lse - want_lse)[seen]
    assert float(error.norm()) <= noise * (error.numel() ** 0.5 + 4)
    assert not bool((error.abs() > 5 * noise).any())


def kvquant(fmt: str, outliers: float = 0.01, static: bool = False) -> tuple[QuantSpec, QuantSpec]:
    """(key, value) of the presets nuq4-1%, nuq4 and so on, or with the paper's calibrated ranges of keys, which
    stretch.
    """
    value = QuantSpec(format=fmt, granularity=PerToken(), symmetric=False, outliers=outliers)
    return dataclasses.replace(value, granularity=PerChannel(), static=static, pre_rope=True), value


def kvquant_specs(fmt: str, group: int = 32) -> list[QuantSpec]:
    """Make the specs of KVQuant's techniques (codebooks, outliers) for a format, for keys and values alike."""
    f16, f32 = dict(format=fmt, outliers=0.02), dict(format=fmt, scale_dtype="float32")
    made = [
        QuantSpec(**f16, granularity=g, symmetric=s)
        for g in (PerToken(), PerGroup(group), PerChannel())
        for s in (True, False)
    ]
    made += [
        QuantSpec(**f16, granularity=PerGroup(group), center="channel"),
        QuantSpec(**f16, granularity=PerToken(), symmetric=False, center="channel"),
    ]
    made += [QuantSpec(format=fmt, granularity=PerChannel(), symmetric=False, outliers=0.1, scale_dtype="bfloat16")]
    if fmt in CODEBOOKS:
        made += [
            QuantSpec(format=fmt, granularity=g, symmetric=s) for g in (PerToken(), PerChannel()) for s in (True, False)
        ]
        made += [
            QuantSpec(**f32, granularity=g, static=True, symmetric=s)
            for g in (PerChannel(), PerGroup(group), PerTensor())
            for s in (True, False)
        ]
        made += [
            QuantSpec(**f32, granularity=PerChannel(), static=True, symmetric=s, outliers=o)
            for s in (True, False)
            for o in (0.002, 0.05)
        ]
    return made


def trellis(*bands: int, basis: str | None = None, center: str | None = None) -> QuantSpec:
    """Trellis codes of these widths."""
    return QuantSpec(
        format="trellis", granularity=PerToken(), scale_dtype=SCALE_8BIT, bands=bands, basis=basis, center=center
    )


def inverse_frequencies(head_dim: int, turned: float = 0.75) -> torch.Tensor:
    """Radians per token of each pair, 0 for the pairs behind the first `turned`."""
    half = head_dim // 2
    freq = 10_000.0 ** (-torch.arange(half) / half)
    return torch.where(torch.arange(half) < turned * half, freq, 0.0).float()


def specs_of(fmt: str, group: int = 32) -> list[QuantSpec]:
    """Every way to share scales that a format has."""
    made = [QuantSpec(format=fmt, granularity=g) for g in (PerToken(), PerGroup(group), PerChannel())]
    made += [
        QuantSpec(format=fmt, granularity=g, center="channel", scale_dtype="bfloat16")
        for g in (PerToken(), PerChannel())
    ]
    made += [
        QuantSpec(format=fmt, granularity=g, static=True, scale_dtype="float32")
        for g in (PerChannel(), PerGroup(group))
    ]
    if fmt.startswith("int"):
        made += [
            QuantSpec(format=fmt, granularity=g, symmetric=False) for g in (PerToken(), PerGroup(group), PerChannel())
        ]
        made += [
            QuantSpec(format=fmt, granularity=PerGroup(group), symmetric=False, static=True, scale_dtype="float32")
        ]
    return made


def static_params(
    key: QuantSpec, value: QuantSpec, heads: int, head_dim: int, value_head_dim: int | None = None
) -> dict[str, torch.Tensor]:
    found = {}
    for kind, spec, d in (("k", key, head_dim), ("v", value, value_head_dim or head_dim)):
        if spec.static:
            groups = spec.num_groups(d)
            found[f"{kind}_scale"] = (3 + torch.rand(heads, groups)) / spec.q_max
            if spec.has_bias:
                found[f"{kind}_bias"] = (
                    torch.randn(heads, groups) / 2 if spec.has_codebook else -3 - torch.rand(heads, groups) / 2
                )
        if spec.has_codebook:
            steps = torch.rand(heads, 2**spec.bits).cumsum(-1)
            found[f"{kind}_codebook"] = 2 * (steps - steps[:, :1]) / (steps[:, -1:] - steps[:, :1]) - 1
        if spec.needs_rotary:
            found[f"{kind}_inv_freq"] = inverse_frequencies(d)
        if spec.basis == "calibrated":
            found[f"{kind}_basis"] = (torch.eye(d) + torch.randn(heads, d, d) / (2 * d**0.5)) / band_steps(spec, d)
            if spec.has_offsets:
                found[f"{kind}_mean"] = torch.randn(heads, 2, d)
            found = completed(found, found[f"{kind}_inv_freq"])
    return found


def static_of(layout: PageLayout) -> dict[str, torch.Tensor]:
    return static_params(layout.key, layout.value, layout.num_kv_heads, layout.head_dim)


def statics_of(spec: CacheSpec) -> list[dict[str, torch.Tensor]] | None:
    """Make what calibration gives a cache: for each layer the tensors that its specs name."""
    if not spec.scheme.needs_calibration:
        return None
    found = []
    for i, g in enumerate(spec.layers):
        key, value = spec.scheme.for_layer(i, len(spec.layers))
        given = static_params(key, value, g.num_kv_heads, g.head_dim)
        found.append(
            {
                name: given[name]
                for kind, s in (("k", key), ("v", value))
                for n in s.calibrates
                if (name := f"{kind}_{n}")
            }
        )
    return found


def poisoned_pool(pages: torch.Tensor, page_ids: np.ndarray, num_pages: int) -> tuple[torch.Tensor, ...]:
    """Two slabs of one page stride, in a larger buffer of 0xFF, with `pages` at `page_ids`."""
    _, heads, head_bytes = pages.shape
    buffer = torch.full((num_pages, heads + 1, head_bytes), 0xFF, dtype=torch.uint8)
    pool = buffer[:, :heads]
    pool[torch.from_numpy(page_ids)] = pages
    half = num_pages // 2
    return pool[:half], pool[half:]


def random_call(
    key: QuantSpec,
    value: QuantSpec,
    *,
    head_dim: int = 64,
    heads: int = 2,
    group: int = 3,
    batch: int = 2,
    tokens: int = 1,
    page_size: int = 64,
    pages: int = 3,
    sinks: int = 3,
    first: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    young: tuple[QuantSpec, QuantSpec] | None = None,
    flat: float | None = None,
    value_head_dim: int | None = None,
    spans: bool = False,
    offset: int = 0,
) -> Call:
    """Ragged sequences of sinks, closed pages (the last one cropped to an odd length) and a raw tail.

    Args:
        first: tokens between the sinks and the closed pages.
        young: specs of all closed pages but each sequence's first; None: as these.
        value_head_dim: of values, `head_dim` if None.
        spans: whether all tables have them; offset: entry of a row at which the pages of others begin.
        flat: what an eighth of the value tokens and a channel of the keys consist of, all other values being small.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    raw_dtype, values = str(dtype).removeprefix("torch."), value_head_dim or head_dim

    def layout(k: QuantSpec, v: QuantSpec, size: int) -> PageLayout:
        return PageLayout(
            key=k,
            value=v,
            page_size=size,
            num_kv_heads=heads,
            head_dim=head_dim,
            value_head_dim=values,
            raw_dtype=raw_dtype,
        )

    def part(lay: PageLayout, counts: list[int], starts: np.ndarray, lengths: np.ndarray) -> tuple[PageStore, PageList]:
        n = sum(counts)
        offset = torch.randn(heads, 1, head_dim)
        k, v = torch.randn(n, heads, lay.page_size, head_dim) + offset, torch.randn(n, heads, lay.page_size, values)
        if flat is not None:
            v *= 0.05
            v[:, :, 1::8], k[..., 3] = flat, flat
        if lay.key.is_raw:
            k, v = k.to(dtype), v.to(dtype)
        static = static_params(lay.key, lay.value, heads, head_dim, values)
        stored, _ = close_pages(k, v, lay, static, starts)
        if lay.key.is_raw and lay.value.is_raw:
            for page, length in zip(stored, lengths, strict=True):  # rows not yet written
                for name in ("k_raw", "v_raw"):
                    s = lay.sections[name]
                    page[:, s.offset : s.offset + s.nbytes].unflatten(1, (lay.page_size, -1))[:, length:] = 0xFF
        ids = rng.permutation(2 * n + 2)[:n].astype(np.int64)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        pages = PageList(indptr, ids, starts.astype(np.int64), lengths.astype(np.int32))
        return PageStore(lay, poisoned_pool(stored, ids, 2 * n + 2), static), pages

    counts = [max(1, pages - b) for b in range(batch)]
    starts = np.concatenate([sinks + first + page_size * np.arange(c) for c in counts])
    lengths = np.full(sum(counts), page_size)
    last = np.cumsum(counts) - 1
    lengths[last] = [page_size - 3 - 5 * (b % 5) for b in range(batch)]
    ends = starts[last] + lengths[last]
    tail_lengths = np.array([1 + (7 * b + 12) % (page_size - 1) for b in range(batch)])
    closed = layout(key, value, page_size)
    if young is None:
        parts = [part(closed, counts, starts, lengths)]
    else:
        first = np.cumsum([0, *counts[:-1]])
        rest = np.setdiff1d(np.arange(sum(counts)), first)
        parts = [part(closed, [1] * batch, starts[first], lengths[first])]
        parts.append(part(layout(*young, page_size), [c - 1 for c in counts], starts[rest], lengths[rest]))
    if sinks:
        parts.append(part(layout(RAW, RAW, sinks), [1] * batch, np.zeros(batch), np.full(batch, sinks)))
    parts.append(part(layout(RAW, RAW, page_size), [1] * batch, ends, tail_lengths))
    q = torch.randn(batch, tokens, heads * group, head_dim).to(dtype)
    newest = torch.from_numpy(ends + tail_lengths - 1)[:, None]
    positions = (newest - tokens + 1 + torch.arange(tokens)).int()
    if batch > 1 and tokens > 1:
        positions[1, 0] = -1  # left padding
    tables = [table_of(pages, store.layout.page_size, spans, offset) for store, pages in parts]
    options = {"scaling": head_dim**-0.5, "sliding_window": window, "softcap": softcap}
    return Call([store for store, _ in parts], tables, q, positions, options)
