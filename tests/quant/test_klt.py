"""Pages of trellis codes and their bases: 8-bit scales, widths, stored planes, error bounds, Hadamard and calibrated bases,
frames.
"""

import dataclasses

import bounds
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import raises

from kvbits import schemes
from kvbits.errors import DataError, SpecError
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages, section
from kvbits.quant import scales, trellis
from kvbits.quant.basis import (
    completed,
    conditions,
    frames,
    hadamard,
    into_basis,
    inverse,
    offset_rows,
    offsets_of,
    out_of_basis,
)
from kvbits.quant.packing import pack_side, rows_of_planes, unpack_trellis
from kvbits.quant.qparams import choose_qparams, dequantize, quantize
from kvbits.quant.rotary import turn
from kvbits.spec import FRAME, MEAN_STEP, OFFSETS, SCALE_8BIT, PageLayout, PerChannel, PerToken, QuantSpec, Scheme
from kvbits.spec.bands import PLANES, WIDTHS

HEAD_DIMS = (16, 40, 64, 80, 128, 256)


def spec(bands, basis=None, center=None):
    return QuantSpec(
        format="trellis", granularity=PerToken(), scale_dtype=SCALE_8BIT, bands=bands, basis=basis, center=center
    )


def static(head_dim, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.eye(head_dim) * 2 + torch.randn(heads, head_dim, head_dim, generator=generator) / head_dim**0.5
    # one whose inverse is float16 numbers: nothing is rounded off
    basis = torch.linalg.inv(inverse(basis).double()).float()
    mean = torch.randn(heads, 2, head_dim, generator=generator) + 3
    return completed({"k_basis": basis, "k_mean": mean}, 10_000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2)))


# -- 8-bit scales
# -------------------------------------------------------------------------------------------------------


def test_every_scale_is_its_own_nearest_and_the_top_byte_of_float16_without_its_sign():
    codes = torch.arange(scales.SMALLEST_CODE, scales.LARGEST_CODE + 1)
    values = scales.scale_values(codes)
    assert torch.equal(scales.scale_codes(values), codes.int())
    assert (values.diff() > 0).all() and values[0] == 2.0**-17 and values[-1] == 61_440
    halves = values.half().view(torch.int16).numpy().view(np.uint16)
    assert (halves & 0x807F == 0).all() and (halves >> 7 == codes.numpy()).all()
    assert scales.scale_values(torch.tensor(0x78)) == 1.0  # 15 << 3: exponent 0, mantissa 0


@given(st.floats(2.0**-17, 61_440))
def test_scales_round_to_a_sixteenth(x):
    found = float(scales.scale_values(scales.scale_codes(torch.tensor(x))))
    assert abs(found - x) <= max(x / 15.9, 2.0**-18)


# -- widths
# ---------------------------------------------------------------------------------------------------------------


def test_presets_have_the_widths_that_the_documents_name():
    named = {
        "klt2": ((5, 3, 2, 0), (6, 4, 3, 3, 2, 2, 1, 1)),
        "klt3": ((6, 4, 3, 1), (6, 5, 5, 4, 4, 3, 2, 1)),
        "klt4": ((6, 5, 4, 3), (8, 6, 5, 4, 4, 4, 4, 3)),
    }
    for name, (small, large) in named.items():
        key = schemes.get(name).key
        assert (key.widths(64), key.widths(128)) == (small, large)
        assert (schemes.get(name, head_dim=64).key, schemes.get(name, head_dim=128).key) == (key, key)
        assert set(schemes.get(name).value.widths(64)) == {int(name[-1])}


def test_wide_heads_of_klt4_have_eight_bits_where_the_error_is():
    """Said by the spec, so that calibrations and files of the dealt widths are told apart."""
    wide = schemes.get("klt4", head_dim=256).key
    assert (
        wide.bands == wide.widths(256) == (8, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 2)
        and sum(wide.bands) == 4.75 * 16
    )
    assert wide != schemes.get("klt4").key and sum(schemes.get("klt4").key.widths(256)) == sum(wide.bands)
    for name in ("klt3", "klt2"):
        narrow = schemes.get(name, head_dim=256)
        assert (narrow.key, narrow.value) == (schemes.get(name).key, schemes.get(name).value)
        assert [copy.key for copy in narrow.copies] == [wide], "copies have the widths of klt4"
    assert wide.widths(512) == schemes.get("klt4").key.widths(512), (
        "heads of several sizes: dealt out where they are not 256"
    )


@pytest.mark.parametrize("name", ["klt2", "klt3", "klt4"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256, 512])
def test_widths_fall_and_keep_their_mean_to_two_bits_of_a_head(name, head_dim):
    found = schemes.get(name).key.widths(head_dim)
    mean = int(name[-1]) + 0.75
    assert list(found) == sorted(found, reverse=True) and set(found) <= set(WIDTHS)
    assert sum(found) % 2 == 0 and mean * len(found) - 2 < sum(found) <= mean * len(found)


@pytest.mark.parametrize(
    ("bands", "head_dim", "count"), [((8, 5), 160, 10), ((8, 8, 8, 6), 128, 8), ((2, 1), 16, 1), ((1, 0), 8, 1)]
)
def test_widths_are_refused_where_their_mean_cannot_be_dealt_out(bands, head_dim, count):
    """Bands of more bits than a code has, or of none at all, were dealt out without a word."""
    assert spec(bands).widths(16 * len(bands)) == bands
    with raises(SpecError, f"head_dim={head_dim}", f"{count} widths"):
        PageLayout(key=spec(bands), value=spec((2,)), page_size=64, num_kv_heads=1, head_dim=head_dim).bytes_by_kind()


def test_planes_hold_the_channels_of_the_bands_that_have_them():
    assert spec((5, 3, 2, 0)).planes(64) == ((4, 16), (2, 32), (1, 32))
    assert spec((8, 6)).planes(32) == ((8, 16), (4, 16), (2, 16))
    assert spec((3, 1)).planes(24) == ((2, 16), (1, 24))  # the last band is narrower
    layout = PageLayout(
        key=spec((5, 3, 2, 0), "calibrated", "calibrated"),
        value=spec((2,) * 4, "hadamard"),
        page_size=64,
        num_kv_heads=1,
        head_dim=64,
    )
    assert {n: (s.offset, s.nbytes, s.dtype, s.shape) for n, s in layout.sections.items()} == {
        "k_plane0": (0, 512, "uint8", (64, 8)),
        "k_plane1": (512, 512, "uint8", (64, 8)),
        "k_plane2": (1024, 256, "uint8", (64, 4)),
        "v_plane0": (1280, 1024, "uint8", (64, 16)),
        "k_scale": (2304, 64, SCALE_8BIT, (1, 64)),
        "v_scale": (2368, 64, SCALE_8BIT, (1, 64)),
    }
    assert layout.head_bytes == 2432 and layout.bits_per_element == 2.375


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"bands": (7,)}, (7, 0, 1, 2, 3, 4, 5, 6, 8)),
        ({"bands": ()}, ("bands=()", "16 channels")),
        ({"bands": (0, 0)}, ("bands=(0, 0)", "16 channels")),
        ({"granularity": PerChannel()}, ("trellis", "granularity=PerToken()")),
        ({"scale_dtype": "float16"}, ("trellis", "scale_dtype='float8_e5m3'")),
        ({"outliers": 0.01}, ("trellis", "outliers")),
        ({"basis": "pca"}, ("'pca'", None, "hadamard", "calibrated")),
        ({"format": "int4"}, ("format='trellis'", "'int4'")),
        (
            {"center": "channel", "basis": "calibrated"},
            ("center='calibrated'", "basis='calibrated'", "center=None"),
        ),
        ({"center": "calibrated"}, ("center='calibrated'", "basis=None")),
        ({"levels": "fitted"}, ("levels='fitted'", "2 bits")),
        ({"levels": "free"}, ("'free'", "uniform", "fitted")),
    ],
)
def test_specs_that_cannot_be_are_refused(change, parts):
    with raises(SpecError, *parts):
        dataclasses.replace(spec((5, 3, 2, 0)), **change)


def test_values_have_no_calibrated_basis():
    preset = schemes.get("klt2")
    with raises(SpecError, "basis='calibrated'", "basis='hadamard'"):
        Scheme(name="a", key=preset.key, value=preset.key)
    with raises(SpecError, "center='calibrated'", "basis='calibrated'", "'int4'", "center='channel'"):
        QuantSpec(format="int4", center="calibrated")


def test_keys_have_uniform_levels_and_values_one_width():
    fitted = dataclasses.replace(spec((2,) * 4), levels="fitted")

    def page(key, value):
        return PageLayout(key=key, value=value, page_size=64, num_kv_heads=1, head_dim=64)

    page(spec((2,) * 4), fitted)
    with raises(SpecError, "levels='fitted'", "levels='uniform'"):
        page(fitted, fitted)
    with raises(SpecError, "(3, 2, 3, 2)", "(3, 3, 3, 3)"):
        page(spec((2,) * 4), spec((3, 2, 3, 2)))


# -- codes and bytes
# --------------------------------------------------------------------------------------------------------


def loop_planes(codes, bands, kind):
    """Each plane's rows by plain loops. Keys: field i of byte r of word w, lowest first, is number w * 32 / bits + 4 * i
    + r of the channels that have the plane. Values: field i of byte r is number r + i * row_bytes.
    """
    tokens, head_dim = codes.shape
    found = []
    for bits in PLANES:
        channels = [c for c in range(head_dim) if bands[c // 16] & bits]
        if not channels:
            continue
        row_bytes = -(-len(channels) * bits // 32) * 4
        rows = np.zeros((tokens, row_bytes), np.uint8)
        for t in range(tokens):
            for j, c in enumerate(channels):
                lower = sum(p for p in PLANES if p < bits and bands[c // 16] & p)
                field, byte = j // row_bytes, j % row_bytes
                if kind == "k":
                    word, within = divmod(j, 32 // bits)
                    field, byte = within // 4, 4 * word + within % 4
                rows[t, byte] |= ((int(codes[t, c]) >> lower) & (2**bits - 1)) << (field * bits)
        found.append(rows)
    return found


def key_bytes(rows):
    """docs/reference/formats.md: byte (t, r) of keys."""
    stored = np.zeros(rows.size, np.uint8)
    for t in range(rows.shape[0]):
        for r in range(rows.shape[1]):
            stored[((t // 16) * (rows.shape[1] // 4) + r // 4) * 64 + (t % 16) * 4 + r % 4] = rows[t, r]
    return stored


@pytest.mark.parametrize("bands", [(5, 3, 2, 0), (6, 4, 3, 1), (8, 1), (2, 2, 2, 2, 2), (0, 6)])
def test_stored_bytes_follow_the_documented_formulas(bands):
    head_dim = 16 * len(bands)
    top = torch.tensor([2**b for b in bands]).repeat_interleave(16)
    codes = (torch.randint(0, 2**30, (32, head_dim)) % top).to(torch.uint8)
    packed = pack_side(codes, spec(bands), "k")
    for plane, rows in zip(packed, loop_planes(codes, bands, "k"), strict=True):
        assert plane.numpy().tobytes() == key_bytes(rows).tobytes()
    for mine, rows in zip(rows_of_planes(codes, spec(bands), "v"), loop_planes(codes, bands, "v"), strict=True):
        assert mine.numpy().tobytes() == rows.tobytes()
    for kind in "kv":
        assert torch.equal(unpack_trellis(pack_side(codes, spec(bands), kind), bands, kind, 32, head_dim), codes)


def test_literal_bytes_of_one_token():
    """Bands of 3 and 1 bits: plane 0 has the two high bits of channels 0 to 15, plane 1 the low bit of all 32."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[0, 0], codes[0, 4], codes[0, 15], codes[0, 17] = 0b101, 0b111, 0b010, 1
    high, low = pack_side(codes, spec((3, 1)), "k")
    assert high.view(-1, 64)[0, :4].tolist() == [0b11_10, 0, 0, 0b01 << 6]  # byte r: channels r, r + 4, r + 8, r + 12
    # channels 0 and 4 are bits 0 and 1 of byte 0, channel 17 = 1 + 4 * 4
    assert low.view(-1, 64)[0, :4].tolist() == [0b11, 1 << 4, 0, 0]
    assert low.numpy().sum() == 3 + 16


def test_literal_bytes_of_two_words():
    """Two bands of 2 bits: each is a word of its own, and its runs of four channels are the fields of four bytes."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[0, 1], codes[0, 6], codes[0, 16], codes[0, 31] = 3, 2, 1, 2
    (plane,) = pack_side(codes, spec((2, 2)), "k")
    words = plane.view(2, 16, 4)  # of 16 tokens each
    assert words[0, 0].tolist() == [0, 3, 2 << 2, 0] and words[1, 0].tolist() == [1, 0, 0, 2 << 6]
    (row,) = rows_of_planes(codes[:1], spec((2, 2)), "v")
    assert row[0].tolist() == [1 << 4, 3, 0, 0, 0, 0, 2, 2 << 6]  # of values channel r + 8 * field


UGLY = {
    "zeros": torch.zeros(4, 64),
    "constant": torch.full((4, 64), 3.0),
    "one outlier": torch.nn.functional.one_hot(torch.arange(4), 64) * 1e4,
    "denormal": torch.full((4, 64), 1e-40),
    "large": torch.full((4, 64), 3e4) * torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).sign(),
    "normal": torch.randn(4, 64, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", UGLY)
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("bands", [(5, 3, 2, 0), (6, 5, 4, 3), (8, 1, 1, 1), (2, 2, 2, 2)])
def test_errors_stay_within_the_bound(name, bands, kind):
    x, s = UGLY[name].float(), spec(bands)
    if {*bands} == {2} and kind == "v":
        s = dataclasses.replace(s, levels="fitted")
    qparams = choose_qparams(x, s)
    codes, outside = quantize(x, s, qparams, kind)
    top = torch.tensor([2.0**b - 1 for b in bands]).repeat_interleave(16)
    assert (codes <= top).all() and not outside.any()
    error = (dequantize(codes, s, qparams, torch.float64, kind) - x.double()).abs()
    assert (error <= bounds.trellis(x, s, qparams.scale.squeeze(-2)).double()).all()


def test_the_fitted_scale_beats_every_other_one_that_is_tried_and_the_maximum():
    """The test covers integers, by definition, and trellis codes."""
    widths = (5, 3, 2, 1)
    x, s = torch.randn(200, 64) * torch.tensor([8.0, 2.0, 1.0, 0.5]).repeat_interleave(16), spec(widths)
    scale = scales.fitted_scales(x, s)
    top = torch.tensor([31.0, 7.0, 3.0, 1.0]).repeat_interleave(16)

    def integers(t):
        t = t.unsqueeze(-1)
        return (((x / t + top / 2).round().clamp(min=0).minimum(top) - top / 2) * t - x).square().sum(-1)

    def error(t):
        return (trellis.dequantize(trellis.quantize(x, widths, "k", t), widths, "k", t) - x).square().sum(-1)

    codes = scales.scale_codes(scale)
    widest = scales.scale_values(scales.scale_codes((x.abs() * 2 / top).amax(-1)))
    for other in (-1, 1):
        away = scales.scale_values((codes + other).clamp(1, 247))
        assert (integers(scale) <= integers(away)).float().mean() > 0.9
        assert error(scale).mean() < error(away).mean()
    assert error(scale).mean() < 0.7 * error(widest).mean()


def test_the_scale_of_fitted_levels_is_two_8_bit_floats_below_that_of_integers():
    x, of = torch.randn(200, 64, generator=torch.Generator().manual_seed(5)), spec((2,) * 4, "hadamard")
    x[0] *= 2.0**-30
    fitted = dataclasses.replace(of, levels="fitted")
    plain = scales.scale_codes(scales.fitted_scales(x, of))
    found = scales.scale_codes(scales.fitted_scales(x, fitted))
    assert torch.equal(found, (plain - 2).clamp(min=scales.SMALLEST_CODE)) and found[0] == scales.SMALLEST_CODE


def test_tokens_with_a_few_large_channels_get_the_scales_far_above_the_first_guess():
    """Their scales are 7 and 8 eighths of an octave above: rare, nothing in a mean squared error, and most of klt4's KL
    on SmolLM2 (docs/results/log/gpu-kernels.md).
    """
    of = schemes.get("klt4", head_dim=64).key
    top = torch.tensor([2.0**b - 1 for b in of.widths(64)]).repeat_interleave(16)
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(3))
    x[:, 48:50] *= torch.linspace(2, 12, 4000)[:, None]
    step = scales.steps(of, 64)
    first = scales.scale_codes((x * step).square().mean(-1).sqrt())

    def missed(scale):
        return (x - ((x / scale + top / 2).round().clamp(min=0).minimum(top) - top / 2) * scale).square().sum(-1)

    errors = torch.stack([missed(scales.scale_values((first + i).clamp(1, 247))[:, None]) for i in range(-6, 9)])
    far = errors.argmin(0) >= 6 + 7
    assert far.sum() > 50
    found = missed(scales.fitted_scales(x, of)[:, None])
    assert (found[far] / errors.min(0).values[far]).mean() < 1.02


def test_a_token_beyond_8_bit_scales_is_an_error():
    with raises(DataError, "float8_e5m3", 61440, "raw", "Override"):
        scales.fitted_scales(torch.full((1, 16), 1e9), spec((2,)))


# -- bases
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hadamard_is_orthonormal_symmetric_and_spreads_one_channel_over_its_block(head_dim):
    h = hadamard(torch.eye(head_dim, dtype=torch.float64))
    assert torch.allclose(h @ h, torch.eye(head_dim, dtype=torch.float64), atol=1e-12) and torch.equal(h, h.mT)
    size = head_dim & -head_dim
    assert (
        torch.allclose(h[0, :size].abs(), torch.full((size,), size**-0.5, dtype=torch.float64))
        and not h[0, size:].any()
    )


@pytest.mark.parametrize("start", [0, 4, 452, 516, 4100, 131_072 - 64])
def test_scores_stay_exact_in_the_basis_at_any_position(start):
    """q . k = (q turned back by the frame, times the inverse transposed) . y, with nothing quantized."""
    shared, s = static(64), spec((4,) * 4, "calibrated")
    k, q = torch.randn(1, 2, 64, 64), torch.randn(2, 64, dtype=torch.float64)
    y = into_basis(k, s, shared, np.array([start])).double()
    frame = int(frames(np.array([start]))[0])
    assert torch.equal(
        into_basis(k, spec((4,) * 4, "calibrated", "calibrated"), shared, np.array([start])).double(),
        (y.float() - offsets_of(shared, np.array([start]), 64)).double(),
    )
    assert frame == start // 512 * 512 and FRAME == 512
    q_frame = turn(q[None, :, None], torch.tensor([frame]), shared["k_inv_freq"], back=True)[0]
    scores = (q_frame @ shared["k_inverse"].double().mT) @ y[0].mT
    expected = q[:, None] @ k[0].double().mT
    assert torch.allclose(scores, expected, atol=2e-5 * expected.abs().max().item())
    assert torch.allclose(out_of_basis(y, s, shared, np.array([start])), k.double(), atol=1e-5)


def test_sixteen_tokens_of_a_page_take_the_mean_of_their_first_ones_run_and_position_0_its_own():
    at = {  # (first position of the page, place): row
        (0, 0): 32,
        (0, 1): 0,
        (0, 15): 0,
        (0, 16): 1,
        (64, 0): 4,
        (64, 63): 7,
        (4, 11): 0,  # position 15
        (4, 12): 0,  # position 16, in a tile that begins at 4
        (4, 16): 1,
        (448, 63): 31,
        (452, 63): 31,  # position 515, in a page of the frame before
        (500, 16): 31,  # a tile that begins out of the page's frame
        (512, 0): 0,
        (1000, 0): 30,
    }
    starts, places = np.array(list(at)).T
    assert offset_rows(starts, places).tolist() == list(at.values())
    whole = offset_rows(np.arange(0, 2048, 64)[:, None], np.arange(64)[None]).flatten()
    assert (whole[1:] == (np.arange(1, 2048) % FRAME // MEAN_STEP)).all() and whole[0] == OFFSETS - 1
    shared = static(64)
    for row in range(OFFSETS - 1):
        mean = (
            turn(shared["k_mean"][:, :1].double(), torch.tensor([16 * row]), shared["k_inv_freq"])
            @ shared["k_basis"].double()
        )
        torch.testing.assert_close(shared["k_offsets"][:, row].double(), mean[:, 0], rtol=2**-11, atol=1e-6)
    torch.testing.assert_close(
        shared["k_offsets"][:, 32].double(),
        (shared["k_mean"][:, 1:].double() @ shared["k_basis"].double())[:, 0],
        rtol=2**-11,
        atol=1e-6,
    )
    assert torch.equal(shared["k_offsets"].half().float(), shared["k_offsets"])


def test_pages_of_one_frame_are_turned_alike_and_equal_keys_of_other_frames_store_equal_bytes():
    """A key that the rotary embedding turned on by whole frames is stored as it was."""
    preset, shared = schemes.get("klt3", head_dim=64), static(64)
    layout = PageLayout(key=preset.key, value=preset.value, page_size=64, num_kv_heads=2, head_dim=64)
    k, v = torch.randn(2, 1, 2, 64, 64)
    first, _ = close_pages(k, v, layout, shared, np.array([68]))
    later = turn(k.double(), torch.tensor([[[10 * FRAME]]]), shared["k_inv_freq"]).float()
    second, _ = close_pages(later, v, layout, shared, np.array([68 + 10 * FRAME]))
    same = (first == second).float().mean()
    assert same > 0.999, "rounding of the turned keys may move a code or two"
    assert not torch.equal(first, close_pages(later, v, layout, shared, np.array([68]))[0])


@pytest.mark.parametrize("name", ["klt4", "klt3", "klt2"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_pages_read_back_within_what_their_codes_allow(name, head_dim):
    preset, shared = schemes.get(name), static(head_dim)
    layout = PageLayout(key=preset.key, value=preset.value, page_size=64, num_kv_heads=2, head_dim=head_dim)
    k, v = torch.randn(2, 3, 2, 64, head_dim)
    starts = np.array([4, 324, 100_000])
    pages, saturated = close_pages(k + 3, v, layout, shared, starts)
    assert saturated == {"k": 0, "v": 0}
    got_k, got_v = dequantize_pages(pages, layout, shared, torch.float64, starts=starts)
    for x, got, side, kind in ((k + 3, got_k, preset.key, "k"), (v, got_v, preset.value, "v")):
        y = into_basis(x, side, shared, starts)
        scale = scales.scale_values(section(pages, layout, f"{kind}_scale")).squeeze(-2)
        stored = into_basis(got.float(), side, shared, starts)  # less offsets, too
        bound = bounds.trellis(y, side, scale) + 2e-5 * y.abs().max()
        assert ((stored - y).abs() <= bound).all()


def test_inverses_are_float16_numbers_of_one_unit_for_each_head():
    basis = (
        torch.eye(64) * torch.tensor([3.0, 1e-3])[:, None, None]
        + torch.randn(2, 64, 64) * torch.tensor([0.3, 1e-4])[:, None, None]
    )
    exact, found = torch.linalg.inv(basis.double()), inverse(basis).double()
    largest = exact.abs().amax((1, 2), keepdim=True)
    assert ((found - exact).abs() <= 2**-11 * exact.abs() + 2**-24 * largest).all() and (found != exact).any()
    scaled = found * torch.exp2(-torch.floor(torch.log2(largest)))
    assert torch.equal(scaled.half().double(), scaled)


def test_singular_bases_have_no_condition():
    basis = torch.stack([torch.eye(8), torch.ones(8, 8)])
    found = conditions(basis)
    assert found[0] == pytest.approx(1.0) and not found[1] <= 1e6
