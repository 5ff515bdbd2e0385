"""Dense-and-sparse: what leaves the ranges, what is listed, and that nothing is cut off."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises

from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages, section
from kvbits.quant.outliers import trimmed_ends, worst
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, PerChannel, PerToken, QuantSpec, Scheme

pytestmark = pytest.mark.literature


def test_the_elements_that_widen_ranges_most_leave_them():
    groups = torch.tensor([[[0.0, 1.0, 2.0, 100.0], [0.0, 1.0, 2.0, 3.0], [-50.0, 0.0, 1.0, 60.0]]])
    low, high = trimmed_ends(groups, 3)
    assert low.tolist() == [[0.0, 0.0, 0.0]]
    assert high.tolist() == [[2.0, 3.0, 1.0]]
    low, high = trimmed_ends(groups, 1)
    assert (low.tolist(), high.tolist()) == ([[0.0, 0.0, -50.0]], [[2.0, 3.0, 60.0]])


def test_no_more_than_four_leave_one_range():
    groups = torch.tensor(
        [[[0.0, 0.1, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]]]
    )
    _, high = trimmed_ends(groups, 8)
    assert high[0, 0] == 20.0


def test_listed_are_elements_outside_first_then_the_largest_errors():
    error = torch.tensor([[0.1, 0.5, 0.01], [0.4, 0.0, 0.2]])
    outside = torch.tensor([[False, False, True], [False, False, False]])
    assert worst(error, outside, 3).tolist() == [1, 2, 3]
    assert worst(error, outside, 1).tolist() == [2]


FORMATS = st.sampled_from(
    [
        QuantSpec(format="int4", granularity=PerChannel(), symmetric=False, outliers=0.01),
        QuantSpec(format="int3", granularity=PerToken(), symmetric=True, outliers=0.02),
        QuantSpec(format="nuq3", granularity=PerChannel(), symmetric=False, outliers=0.01),
        QuantSpec(format="nuq4", granularity=PerChannel(), symmetric=False, static=True, outliers=0.01),
        QuantSpec(format="nuq2", granularity=PerToken(), symmetric=False, outliers=0.01),
    ]
)


@given(FORMATS, st.integers(0, 2**31), st.sampled_from([0, 3, 200]))
def test_pages_with_far_out_numbers_keep_every_one_of_them(spec, seed, num_far):
    generator = torch.Generator().manual_seed(seed)
    layout = PageLayout(
        key=spec, value=QuantSpec(format="int8", granularity=PerToken()), page_size=64, num_kv_heads=2, head_dim=32
    )
    x = torch.randn(2, 2, 64, 32, generator=generator)
    far = torch.randint(0, x.numel(), (num_far,), generator=generator)
    x.view(-1)[far] *= 30
    levels = torch.linspace(-1, 1, 2**spec.bits).expand(2, -1)
    static = {"k_codebook": levels} if spec.has_codebook else {}
    if spec.static:
        static |= {"k_scale": torch.full((2, 32), 3.0), "k_bias": torch.zeros(2, 32)}
    pages, saturated = close_pages(x, x, layout, static)
    decoded, _ = dequantize_pages(pages, layout, static, torch.float64)
    assert saturated["k"] == 0
    reach = 3.0 if spec.static else x.abs().amax().item()
    stretch = section(pages, layout, "k_stretch").float().amax().item() if spec.has_stretch else 1.0
    assert (decoded - x).abs().max() <= 1.1 * reach * stretch / (2**spec.bits - 1 - spec.symmetric)
    index = section(pages, layout, "k_outlier_index").long()
    assert (index[..., 1:] > index[..., :-1]).all()
    listed = torch.gather((decoded - x).abs().flatten(-2), -1, index)
    assert (listed <= 2.0**-11 * 64 * 1.01).all()  # an error of up to 64 in float16


def test_outliers_lower_the_error_of_a_page_with_a_heavy_tail():
    x = torch.distributions.StudentT(3.0).sample((4, 2, 64, 64)).float()
    errors = []
    for share in (0.0, 0.01, 0.05):
        spec = QuantSpec(format="int3", granularity=PerChannel(), symmetric=False, outliers=share)
        layout = PageLayout(key=spec, value=spec, page_size=64, num_kv_heads=2, head_dim=64)
        pages, _ = close_pages(x, x, layout)
        errors.append((dequantize_pages(pages, layout)[0] - x).square().mean().item())
    assert errors[0] > 2 * errors[1] > 3 * errors[2]


def test_what_cannot_be_is_refused():
    with raises(SpecError, "outliers=0.5", 0, 0.125, 0.01):
        QuantSpec(outliers=0.5)
    with raises(SpecError, "fp8_e4m3", "outliers=0"):
        QuantSpec(format="fp8_e4m3", outliers=0.01)
    with raises(SpecError, "outliers", "static=False"):
        QuantSpec(format="int4", granularity=PerChannel(), symmetric=False, static=True, outliers=0.01)
    with raises(SpecError, "pre_rope=True"):
        Scheme(name="x", key=QuantSpec(), value=QuantSpec(pre_rope=True))
    nuq = QuantSpec(format="nuq4", granularity=PerToken(), symmetric=False)
    spec = CacheSpec(scheme=Scheme(name="x", key=nuq, value=nuq), layers=(LayerGeometry(num_kv_heads=1, head_dim=16),))
    for levels in (torch.linspace(1, -1, 16), torch.linspace(-2, 2, 16), torch.full((16,), torch.nan)):
        with raises(SpecError, "k_codebook", "layer 0", "[-1, 1]", "kvbits calibrate"):
            PagedCache(spec, static=[{"k_codebook": levels[None], "v_codebook": levels[None]}])
