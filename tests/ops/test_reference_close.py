"""Closing pages and reading them back: the sections of docs/reference/formats.md hold what the formulas say."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from ops.cpu_cases import static_of

from kvbits.errors import DataError, SpecError
from kvbits.ops.reference.close import PAGES_PER_STEP, close, close_pages
from kvbits.ops.reference.dequantize import dequantize_pages, section
from kvbits.ops.store import STATUS_FIELDS
from kvbits.ops.types import PageStore
from kvbits.quant.qparams import choose_qparams, dequantize, quantize
from kvbits.schemes import PRESETS
from kvbits.spec import FORMATS, PageLayout, PerChannel, PerGroup, PerTensor, PerToken, QuantSpec


@st.composite
def layouts(draw):
    def quant():
        for _ in range(20):
            try:
                return QuantSpec(
                    format=draw(st.sampled_from([f for f in FORMATS if f != "raw"])),
                    granularity=draw(st.sampled_from([PerToken(), PerChannel(), PerGroup(8), PerTensor()])),
                    symmetric=draw(st.booleans()),
                    scale_dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
                    static=draw(st.booleans()),
                    center=draw(st.sampled_from([None, "channel"])),
                )
            except SpecError:
                continue
        return QuantSpec.raw()

    return PageLayout(
        key=quant(),
        value=quant(),
        page_size=draw(st.sampled_from([32, 64])),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 24, 40, 64, 80])),
        raw_dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    )


@given(layouts(), st.integers(1, 3))
def test_pages_decode_to_quantize_then_dequantize_of_each_head(layout, n):
    dtype = getattr(torch, layout.raw_dtype)
    k, v = (torch.randn(2, n, layout.num_kv_heads, layout.page_size, layout.head_dim) * 2).to(dtype)
    static = static_of(layout)
    pages, saturated = close_pages(k, v, layout, static)
    assert pages.shape == (n, layout.num_kv_heads, layout.head_bytes)
    decoded = dequantize_pages(pages, layout, static, torch.float64)
    for kind, spec, x, got in zip("kv", (layout.key, layout.value), (k, v), decoded, strict=True):
        if spec.is_raw:
            assert torch.equal(got, x.double())
            continue
        clamped = 0
        for page, head in itertools.product(range(n), range(layout.num_kv_heads)):
            one, only = x[page, head : head + 1].float(), slice(head, head + 1)
            known = None
            if spec.static:
                from kvbits.quant.qparams import QParams

                bias = static.get(f"{kind}_bias")
                known = QParams(static[f"{kind}_scale"][only], None if bias is None else bias[only])
            qparams = choose_qparams(one, spec, known, static[f"{kind}_codebook"][only] if spec.has_codebook else None)
            codes, over = quantize(one, spec, qparams)
            clamped += int(over.sum())
            assert torch.equal(got[page, only], dequantize(codes, spec, qparams, torch.float64))
        assert saturated[kind] == clamped


@given(layouts())
def test_every_byte_outside_the_sections_is_zero_and_reading_ignores_it(layout):
    k, v = torch.randn(2, 1, layout.num_kv_heads, layout.page_size, layout.head_dim)
    static = static_of(layout)
    pages, _ = close_pages(k, v, layout, static)
    inside = torch.zeros(layout.head_bytes, dtype=torch.bool)
    for s in layout.sections.values():
        inside[s.offset : s.offset + s.nbytes] = True
    assert not pages[..., ~inside].any()
    before = dequantize_pages(pages, layout, static)
    pages[..., ~inside] = 0xFF
    for a, b in zip(before, dequantize_pages(pages, layout, static), strict=True):
        assert torch.equal(a, b)


def test_parameters_lie_in_the_documented_order():
    """Per group: groups, then tokens. Per channel: channels."""
    key = QuantSpec(format="int8", granularity=PerGroup(8), symmetric=False)
    value = QuantSpec(format="int4", granularity=PerChannel())
    layout = PageLayout(key=key, value=value, page_size=32, num_kv_heads=1, head_dim=16)
    x = torch.arange(1, 33.0)[:, None] * torch.tensor([255.0, 510.0]).repeat_interleave(8)
    x[:, ::8] = 0  # bias 0, scale = the row's maximum / 255 = token + 1, twice that in the second group
    v = torch.arange(1, 17.0).expand(32, 16) * 7
    pages, _ = close_pages(x[None, None], v[None, None], layout)
    scales = np.frombuffer(section(pages, layout, "k_scale").numpy().tobytes(), np.float16)
    assert scales.tolist() == [*range(1, 33), *range(2, 66, 2)]
    assert np.frombuffer(section(pages, layout, "k_bias").numpy().tobytes(), np.float16).tolist() == [0] * 64
    assert np.frombuffer(section(pages, layout, "v_scale").numpy().tobytes(), np.float16).tolist() == list(range(1, 17))


@pytest.mark.parametrize("name", [n for n, s in PRESETS.items() if not s.needs_calibration])
def test_closing_in_place_writes_the_named_pages_and_no_others(name):
    scheme = PRESETS[name]
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=scheme.page_size, num_kv_heads=2, head_dim=64)
    slabs = tuple(torch.full((n, 2, layout.head_bytes), 0xFF, dtype=torch.uint8) for n in (2, 5))
    store = PageStore(layout, slabs)
    k, v = torch.randn(2, 3, 2, scheme.page_size, 64).bfloat16()
    close(k, v, store, np.array([5, 0, 3]))
    expected, _ = close_pages(k, v, layout)
    for page, want in zip((5, 0, 3), expected, strict=True):
        assert torch.equal(store.page(page), want)
    for page in (1, 2, 4, 6):
        assert (store.page(page) == 0xFF).all()


def test_more_pages_than_one_step_takes_are_all_closed_and_counted():
    spec = QuantSpec(format="int8", granularity=PerTensor(), static=True)
    layout = PageLayout(key=spec, value=QuantSpec.raw(), page_size=32, num_kv_heads=1, head_dim=8, raw_dtype="float32")
    n = PAGES_PER_STEP + 3
    store = PageStore(
        layout, (torch.zeros(n, 1, layout.head_bytes, dtype=torch.uint8),), {"k_scale": torch.full((1, 1), 0.01)}
    )
    k = torch.zeros(n, 1, 32, 8)
    k[:, 0, 3, 5] = 100.0
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32)
    close(k, k, store, np.arange(n), status=status)
    assert status.tolist() == [n, 0, 0, 0, 0, 0, 0]
    assert (
        dequantize_pages(store.gather(np.arange(n)), layout, store.static)[0][:, 0, 3, 5] == 127 * torch.tensor(0.01)
    ).all()


def test_missing_calibration_is_an_error_when_writing_and_when_reading():
    spec = QuantSpec(static=True, granularity=PerGroup(8))
    layout = PageLayout(key=spec, value=spec, page_size=32, num_kv_heads=1, head_dim=8)
    x = torch.zeros(1, 1, 32, 8)
    with raises(DataError, "static=False"):
        close_pages(x, x, layout)
    with raises(KeyError, "k_scale"):
        dequantize_pages(torch.zeros(1, 1, layout.head_bytes, dtype=torch.uint8), layout)
