"""Trellis codes: rings, indices, the path of least cost with its ties, distortion, and what readers make of words."""

import itertools

import pytest
import torch

from kvbits.quant import scales, trellis
from kvbits.quant.packing import pack_rows, pack_side, unpack_side
from kvbits.spec import SCALE_8BIT, PerToken, QuantSpec, plane_row_bytes

UNEVEN: trellis.Levels = trellis.UNIFORM | trellis.FITTED | {3: trellis.mirrored(10, 33, 54, 79, 105, 137, 180, 249)}
"""Levels that a search must find, of several widths."""
LEVELS = {"uniform": trellis.UNIFORM, "uneven": UNEVEN}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_codes(widths, head_dim, tokens, seed=0):
    top = torch.tensor([2**b for b in widths]).repeat_interleave(16)[:head_dim]
    drawn = torch.randint(0, 2**30, (tokens, head_dim), generator=torch.Generator().manual_seed(seed))
    return (drawn % top).to(torch.uint8)


# -- rings


def test_rings_of_keys_are_bands_and_rings_of_values_are_spread_over_a_head():
    assert trellis.rings((5, 3, 2, 0), 64, "k") == tuple(
        tuple(16 * band + 4 * run + n for n in range(4) for run in range(4)) for band in range(3)
    )
    values = trellis.rings((2,) * 8, 128, "v")
    assert len(values) == 8
    assert values[1] == (4, 5, 6, 7, 36, 37, 38, 39, 68, 69, 70, 71, 100, 101, 102, 103)


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("head_dim", [4, 16, 40, 64, 80, 128, 192, 256])
def test_each_channel_with_a_trellis_is_in_one_ring(head_dim, kind):
    widths = tuple(itertools.islice(itertools.cycle((6, 8, 4, 0, 3, 1)), -(-head_dim // 16)))
    expected = [c for c in range(head_dim) if widths[c // 16] not in (0, 8)]
    found = trellis.rings(widths, head_dim, kind)
    assert sorted(itertools.chain(*found)) == expected
    assert head_dim % 16 or kind == "v" or {len(ring) for ring in found} == {16}


# -- codes and levels


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize(
    ("widths", "head_dim"), [((5, 3, 2, 0), 64), ((8, 6, 5, 4, 4, 4, 4, 3), 128), ((2, 1, 1), 40), ((4,), 8), ((3,), 2)]
)
def test_what_codes_mean_is_coded_the_same_again(widths, head_dim, kind, levels):
    """Any codes are a path, of cost 0, and no other path has the same levels."""
    codes = random_codes(widths, head_dim, 200)
    scale = scales.scale_values(torch.arange(200) % 200 + 20)
    x = trellis.dequantize(codes, widths, kind, scale, LEVELS[levels])
    again = trellis.quantize(x, widths, kind, scale, LEVELS[levels])
    assert torch.equal(again, codes)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_codes_of_every_width_come_back_from_what_they_mean_and_from_their_bytes(bits, kind, head_dim):
    """Keys have the width beside all others."""
    count = head_dim // 16
    widths = (bits,) * count if kind == "v" else (bits, 6, 1, 3, 2, 4, 0, 5, 8, *(bits,) * count)[:count]
    codes = random_codes(widths, head_dim, 48)
    scale = scales.scale_values(torch.arange(48) + 90)
    x = trellis.dequantize(codes, widths, kind, scale)
    assert torch.equal(trellis.quantize(x, widths, kind, scale), codes)
    spec = QuantSpec(format="trellis", granularity=PerToken(), scale_dtype=SCALE_8BIT, bands=widths)
    planes = pack_side(codes, spec, kind)
    assert [p.numel() for p in planes] == [48 * plane_row_bytes(n, b) for b, n in spec.planes(head_dim)]
    assert torch.equal(unpack_side(planes, spec, kind, 48, head_dim), codes)


def test_indices_follow_the_formula():
    codes = random_codes((3, 1), 32, 5)
    found = trellis.indices(codes, (3, 1), "k")
    for ring in trellis.rings((3, 1), 32, "k"):
        for token in range(5):
            low = [int(codes[token, c]) & 1 for c in ring]
            for t, c in enumerate(ring):
                assert (
                    found[token, c]
                    == 4 * (int(codes[token, c]) >> 1) + 2 * (low[t] ^ low[(t - 2) % len(low)]) + low[t - 1]
                )


@pytest.mark.parametrize("levels", LEVELS)
def test_levels_ascend_are_mirrored_and_none_is_0(levels):
    for bits, table in LEVELS[levels].items():
        assert len(table) == 2 ** (bits + 1) and list(table) == sorted({*table})
        assert table == tuple(-x for x in reversed(table)) and 0 not in table


def test_eight_bits_are_coded_alone_as_plain_integers_are():
    x, scale = random(50, 16) * 90, torch.ones(50)
    codes = trellis.quantize(x, (8,), "k", scale)
    values = trellis.dequantize(codes, (8,), "k", scale)
    assert ((values - x).abs() <= torch.where(x.abs() < 127.5, 0.51, x.abs() - 127)).all()
    assert torch.equal(values, codes - 127.5)


# -- the path


def cost(x, codes, widths, kind, scale, levels=trellis.UNIFORM):
    """Squared error in units that codes uint8 [tokens, head_dim] leave of each token, int64 [tokens]."""
    missed = trellis.units(x, scale) - trellis.level_of(codes, widths, kind, levels)
    return missed.long().square().sum(-1)


def brute(u, widths, kind, levels):
    """Codes of one token by trying all lowest bits of each ring: least cost, then the lowest state behind the last
    channel, before it, and so on.
    """
    codes, total = [0] * len(u), 0
    for ring in trellis.rings(widths, len(u), kind):
        found = []
        for low in itertools.product((0, 1), repeat=len(ring)):
            cost, mine = 0, []
            for t, c in enumerate(ring):
                coset = 2 * (low[t] ^ low[(t - 2) % len(low)]) + low[t - 1]
                table = levels[widths[c // 16]][coset::4]
                error, m = min(((u[c] - level) ** 2, m) for m, level in enumerate(table))
                cost += error
                mine.append(2 * m + low[t])
            states = [2 * low[t - 1] + low[t] for t in reversed(range(len(ring)))]
            found.append((cost, states, mine))
        cost, _, mine = min(found)
        total += cost
        for c, code in zip(ring, mine, strict=True):
            codes[c] = code
    return codes, total


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize(("widths", "head_dim"), [((1,), 8), ((2,), 8), ((3,), 6), ((4,), 3), ((6,), 8), ((2,), 1)])
def test_the_path_is_the_best_one_and_ties_go_as_documented(widths, head_dim, kind, levels):
    """Numbers are multiples of a quarter of a scale: most tokens have several best paths, and channels between two
    levels."""
    drawn = torch.randint(-12, 13, (30, head_dim), generator=torch.Generator().manual_seed(head_dim))
    codes = trellis.quantize(drawn / 4, widths, kind, torch.ones(30), LEVELS[levels])
    paid = cost(drawn / 4, codes, widths, kind, torch.ones(30), LEVELS[levels])
    for token in range(30):
        expected, least = brute([16 * n for n in drawn[token].tolist()], widths, kind, LEVELS[levels])
        assert codes[token].tolist() == expected and paid[token] == least


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_uniform_levels_are_found_without_a_search_as_with_one(head_dim, kind):
    """Quarters of a scale: many numbers lie between two levels."""
    widths = tuple(itertools.islice(itertools.cycle((6, 4, 3, 2, 1, 0, 8)), head_dim // 16))
    x = torch.randint(-80, 81, (50, head_dim), generator=torch.Generator().manual_seed(head_dim)) / 4
    scale = torch.ones(50)
    searched = trellis.quantize(x, widths, kind, scale, dict(trellis.UNIFORM))
    assert torch.equal(trellis.quantize(x, widths, kind, scale), searched)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_path_around_a_whole_ring_is_the_best_of_all(bits, levels):
    """All 2**16 paths of a ring, of numbers with many ties."""
    low = torch.arange(2**16)[:, None] >> torch.arange(16) & 1  # b(0) .. b(15)
    coset = 2 * (low ^ low.roll(2, 1)) + low.roll(1, 1)
    # state behind the last channel first: the order in which equal paths are taken
    states = 2 * low.roll(1, 1) + low
    rank = (states << 2 * torch.arange(16)).sum(1)
    table = torch.tensor(LEVELS[levels][bits])
    drawn = torch.randint(-6, 7, (12, 16), generator=torch.Generator().manual_seed(bits))
    codes = trellis.quantize(drawn / 4, (bits,), "v", torch.ones(12), LEVELS[levels])
    (ring,) = trellis.rings((bits,), 16, "v")
    for token in range(12):
        u = 16 * drawn[token, list(ring)]
        nearest = torch.stack([(u[:, None] - table[q::4]).square().amin(1) for q in range(4)])  # [4, 16]
        paths = nearest[coset, torch.arange(16)].sum(1)
        best = (paths == paths.min()).nonzero().squeeze(1)
        expected = low[best[rank[best].argmin()]]
        assert torch.equal(codes[token, list(ring)].long() & 1, expected)


def test_zeros_have_one_code():
    codes = trellis.quantize(torch.zeros(1, 16), (2,), "k", torch.ones(1))
    assert codes.tolist() == [brute([0] * 16, (2,), "k", trellis.UNIFORM)[0]]


def test_units_are_a_product_with_one_quotient_and_ties_go_to_even():
    scale = torch.tensor([2.0, 3.0, 2.0**-17])
    x = torch.tensor([[1.0, 0.5 / 32, 1.5 / 32, 1e9], [1.0, 0.1, -0.1, 2.0], [1e30, -1e30, 0.0, 2.0**-18]])
    third = torch.tensor(64.0) / 3
    assert trellis.units(x, scale).tolist() == [
        [32, 0, 2, trellis.FARTHEST],
        [round(float(third * n)) for n in x[1]],
        [trellis.FARTHEST, -trellis.FARTHEST, 0, 32],
    ]


def test_numbers_far_outside_get_the_last_levels_and_sums_do_not_overflow():
    x = torch.full((2, 64), 1e30) * torch.tensor([[1.0], [-1.0]])
    codes = trellis.quantize(x, (6,) * 4, "v", torch.full((2,), 2.0**-17))
    index = trellis.indices(codes, (6,) * 4, "v")
    assert (index[0] >= 124).all() and (index[1] <= 3).all()
    least = [brute([u] * 2, (6,), "v", trellis.UNIFORM)[1] for u in (trellis.FARTHEST, -trellis.FARTHEST)]
    assert all(8 * n < trellis._NEVER for n in least)  # those of 16 channels


# -- what it is worth


SHARES = {
    ("uniform", 1): 0.88,
    ("uniform", 2): 0.82,
    ("uniform", 3): 0.82,
    ("uniform", 4): 0.83,
    ("uniform", 5): 0.84,
    ("uniform", 6): 0.84,
    ("fitted", 2): 0.755,
}
"""Squared error of a Gaussian, of that of plain integers (docs/results/log/klt-second-edition.md)."""


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize(("levels", "bits"), SHARES)
def test_squared_errors_of_a_gaussian_are_the_documented_shares_of_integers(levels, bits, kind):
    """Integers leave 1. A free choice among the levels, which is one bit more, leaves a third: no code of so many bits is
    better than 4**-bits. Rings of 8 channels leave 0.89 and more.
    """
    x, widths = random(6000, 64, seed=bits), (bits,) * 4
    step = scales.STEP[bits]
    integers = ((x / step + 2**bits / 2 - 0.5).round().clamp(0, 2**bits - 1) - 2**bits / 2 + 0.5) * step
    scale = torch.full((6000,), step * (0.8125 if levels == "fitted" else 1.0))
    codes = trellis.quantize(x, widths, kind, scale, trellis.LEVELS[levels])
    assert codes.max() < 2**bits
    error = (trellis.dequantize(codes, widths, kind, scale, trellis.LEVELS[levels]) - x).square().mean().item()
    assert error > 1.1 * 4.0**-bits
    assert error / (integers - x).square().mean().item() == pytest.approx(SHARES[levels, bits], abs=0.012)


# -- the same on every shape and dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_depend_on_numbers_and_not_on_shapes_strides_or_dtypes(dtype):
    widths = (5, 3, 2, 1)
    x = random(2, 3, 40, 64).to(dtype)
    scale = scales.scale_values(torch.randint(112, 124, (2, 3, 40), generator=torch.Generator().manual_seed(1)))
    codes = trellis.quantize(x.float(), widths, "v", scale)
    whole = x.float().mT.contiguous().mT
    assert torch.equal(trellis.quantize(whole, widths, "v", scale.to(dtype)), codes)
    for token in (0, 7, 39):
        alone = trellis.quantize(x[1, 2, token].float(), widths, "v", scale[1, 2, token])
        assert torch.equal(alone, codes[1, 2, token])


def test_values_in_float64_round_to_those_in_float32():
    """Levels have 11 bits and scales 4: their product is exact."""
    codes = random_codes((5, 3, 2, 1), 64, 50)
    scale = scales.scale_values(torch.arange(50) + 90)
    double = trellis.dequantize(codes, (5, 3, 2, 1), "k", scale, dtype=torch.float64)
    assert torch.equal(double, trellis.dequantize(codes, (5, 3, 2, 1), "k", scale).double())


# -- what readers do with words: rotations and XORs instead of tables


def rotated(w, n):
    return (w << n | w >> (32 - n)) & 0xFFFFFFFF


def spread(pattern):
    return pattern * 0x01010101


def select(mask, a, b):
    return a & spread(mask) | b & ~spread(mask)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_indices_of_a_band_of_keys_come_from_its_words(bits):
    """The four runs of a band lie in fields of the same four bytes: those of 2 bits in one word, of 4 bits in two words,
    of 1 bit in the halves of bytes, with another band. So the bit one place before is a field lower, or in the byte
    before.
    """
    bands, each = (2 if bits == 1 else 1), 8 // bits
    for codes in random_codes((bits,) * bands, 16 * bands, 20):
        runs = codes.view(-1, 4).tolist()  # of four neighbouring channels, in the fields of four bytes
        words = [
            sum(code << 8 * byte + bits * field for field, run in enumerate(some) for byte, code in enumerate(run))
            for some in (runs[first : first + each] for first in range(0, len(runs), each))
        ]
        w, x = words[0], words[-1]
        if bits == 2:
            one, two = [rotated(w, 2)], [rotated(w, 4)]
        elif bits == 1:
            one, two = [select(0xEE, w << 1, rotated(w, 5))], [select(0xCC, w << 2, rotated(w, 6))]
        else:
            one = [select(0x10, w << 4, rotated(x, 4)), select(0x10, x << 4, w >> 4)]
            two = [rotated(x, 8), w]
        lowest = spread({1: 0xFF, 2: 0x55, 4: 0x11}[bits])
        index = trellis.indices(codes, (bits,) * bands, "k").view(-1, 4)
        for run, byte in itertools.product(range(len(runs)), range(4)):
            word, at = run // each, 8 * byte + bits * (run % each)
            upper = words[word] ^ two[word] & lowest
            assert 2 * (upper >> at & 2**bits - 1) + (one[word] >> at & 1) == index[run, byte]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_indices_of_a_ring_of_values_come_from_bytes_of_its_own_rows(bits, head_dim):
    """One place before is the byte before, and in front of the first of four bytes a field lower of the last one."""
    widths, runs = (bits,) * (head_dim // 16), head_dim // 4
    plane = {2: 2, 3: 1, 4: 4}[bits]  # with the lowest bits
    for codes in random_codes(widths, head_dim, 10):
        row = pack_rows(codes & 2**plane - 1, plane).tolist()
        index = trellis.indices(codes, widths, "v")
        for ring in range(runs // 4):

            def low(run, byte, first=4 * ring, row=row):
                run, byte = (run + byte // 4) % 4, byte % 4
                channel = runs * run + first + byte
                return row[channel % len(row)] >> channel // len(row) * plane & 1

            for run, byte in itertools.product(range(4), range(4)):
                c = runs * run + 4 * ring + byte
                coset = 2 * (low(run, byte) ^ low(run, byte - 2)) + low(run, byte - 1)
                assert index[c] == 4 * (int(codes[c]) >> 1) + coset
