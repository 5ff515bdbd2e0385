"""Byte order of docs/reference/formats.md: every code survives, literal bytes are pinned, and the formulas are checked
with plain loops.
"""

import numpy as np
import pytest
import torch

from kvbits.quant.packing import pack, pack_rows, unpack, unpack_rows
from kvbits.spec import FORMATS, plane_row_bytes

INTEGERS = ["int8", "int4", "int3", "int2"]


def loop_row_bytes(head_dim, bits):
    return -(-head_dim * bits // 32) * 4


def loop_rows(fields, bits):
    """Field i of byte r, lowest first, is channel r + i * row_bytes."""
    tokens, head_dim = fields.shape
    row_bytes = loop_row_bytes(head_dim, bits)
    rows = np.zeros((tokens, row_bytes), np.uint8)
    for t in range(tokens):
        for r in range(row_bytes):
            for i in range(8 // bits):
                channel = r + i * row_bytes
                if channel < head_dim:
                    rows[t, r] |= int(fields[t, channel]) << (i * bits)
    return rows


def loop_store(rows, kind):
    """The two `byte (t, r) ->` formulas of docs/reference/formats.md."""
    tokens, row_bytes = rows.shape
    stored = np.full(tokens * row_bytes, 0, np.uint8)
    written = np.zeros(tokens * row_bytes, int)
    slot_of = {token: slot for slot, token in enumerate((0, 1, 4, 5, 2, 3, 6, 7))}
    for t in range(tokens):
        for r in range(row_bytes):
            if kind == "k":
                at = ((t // 16) * (row_bytes // 4) + r // 4) * 64 + (t % 16) * 4 + r % 4
            else:
                s = slot_of[t % 8]
                q, u = (t // 8) * 2 + s // 4, s % 4
                w = min(16, row_bytes - r // 16 * 16)
                at = (r // 16) * 16 * tokens + q * 4 * w + (r % 16) * 4 + u
            stored[at] = rows[t, r]
            written[at] += 1
    assert (written == 1).all(), "the formula is a permutation"
    return stored


def loop_pack(codes, fmt, kind):
    shift, planes = fmt.bits, []
    for bits in fmt.planes:
        shift -= bits
        planes.append(loop_store(loop_rows((codes >> shift) & (2**bits - 1), bits), kind))
    return planes


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("name", [*INTEGERS, "fp8_e4m3"])
def test_stored_bytes_follow_the_documented_formulas(name, head_dim, kind):
    fmt = FORMATS[name]
    codes = np.random.default_rng(0).integers(0, 2**fmt.bits, (32, head_dim), np.uint8)
    packed = pack(torch.from_numpy(codes), fmt, kind)
    expected = loop_pack(codes, fmt, kind)
    assert len(packed) == len(fmt.planes)
    for plane, want, bits in zip(packed, expected, fmt.planes, strict=True):
        assert plane_row_bytes(head_dim, bits) == loop_row_bytes(head_dim, bits)
        assert plane.dtype == torch.uint8
        assert plane.numpy().tobytes() == want.tobytes()
    assert torch.equal(unpack(packed, fmt, kind, 32, head_dim), torch.from_numpy(codes))


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("name", INTEGERS)
def test_every_code_survives_at_every_position(name, kind):
    """Exhaustive: each code at each (token, channel) of a page, all others holding its complement."""
    fmt, tokens, head_dim = FORMATS[name], 16, 8
    everywhere = torch.arange(tokens * head_dim)
    for code in range(2**fmt.bits):
        codes = torch.full((tokens * head_dim, tokens * head_dim), 2**fmt.bits - 1 - code, dtype=torch.uint8)
        codes[everywhere, everywhere] = code
        codes = codes.view(-1, tokens, head_dim)
        assert torch.equal(unpack(pack(codes, fmt, kind), fmt, kind, tokens, head_dim), codes)


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("page_size", [32, 64, 96, 128])
@pytest.mark.parametrize("name", INTEGERS)
def test_codes_survive_with_any_leading_dimensions_and_odd_strides(name, page_size, kind):
    fmt = FORMATS[name]
    codes = torch.randint(0, 2**fmt.bits, (2, 80, page_size, 3), dtype=torch.uint8).permute(0, 3, 2, 1)
    packed = pack(codes, fmt, kind)
    assert all(p.shape == (2, 3, page_size * plane_row_bytes(80, b)) for p, b in zip(packed, fmt.planes, strict=True))
    assert torch.equal(unpack(packed, fmt, kind, page_size, 80), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_padding_channels_are_code_zero_and_never_read(bits):
    for head_dim in (8, 24, 40, 72, 80):
        rows = pack_rows(torch.full((1, head_dim), 2**bits - 1, dtype=torch.uint8), bits)
        assert np.unpackbits(rows.numpy()).sum() == head_dim * bits
        poisoned = rows | ~pack_rows(torch.full((1, head_dim), 2**bits - 1, dtype=torch.uint8), bits)
        assert torch.equal(
            unpack_rows(poisoned, bits, head_dim), torch.full((1, head_dim), 2**bits - 1, dtype=torch.uint8)
        )


# -- literal bytes, counted by hand from docs/reference/formats.md
# ---------------------------------------------------------------


def test_rows_of_head_dim_64_are_pinned():
    channels = torch.arange(64, dtype=torch.uint8)
    int4 = pack_rows(channels % 16, 4)
    assert int4.tolist()[:3] == [0x00, 0x11, 0x22]  # channel 32 << 4 | channel 0, both 0 modulo 16
    int4 = pack_rows((channels // 4), 4)
    assert int4.tolist() == [x for high, low in zip(range(8, 16), range(8), strict=True) for x in [high << 4 | low] * 4]
    int2 = pack_rows(channels // 16, 2)
    assert int2.tolist() == [0b11100100] * 16  # channels 48, 32, 16, 0, high to low
    assert pack_rows(channels // 32, 1).tolist() == [0xF0] * 8  # channels 56, 48, 40, 32 are 1 and 24, 16, 8, 0 are 0


def test_rows_of_head_dim_80_are_pinned():
    channels = torch.arange(80, dtype=torch.uint8)
    assert pack_rows(channels, 8).tolist() == list(range(80))
    int4 = pack_rows(channels // 8, 4)
    assert int4.tolist() == [x for high, low in zip(range(5, 10), range(5), strict=True) for x in [high << 4 | low] * 8]
    assert pack_rows(channels // 20, 2).tolist() == [0b11100100] * 20
    one = torch.zeros(80, dtype=torch.uint8)
    one[[0, 11, 12, 79]] = 1  # 12-byte rows: channel 79 is field 6 of byte 7
    assert pack_rows(one, 1).tolist() == [0b00000011, 0, 0, 0, 0, 0, 0, 0b01000000, 0, 0, 0, 0b00000001]


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_key_words_of_sixteen_tokens_alternate(name):
    fmt = FORMATS[name]
    head_dim = 32 // fmt.bits * 2  # two words a row
    codes = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, head_dim) & (2**fmt.bits - 1)
    (plane,) = pack(codes, fmt, "k")
    fill = {8: 0x01, 4: 0x11, 2: 0x55}[fmt.bits]
    word = [t % (2**fmt.bits) * fill for t in range(16) for _ in range(4)]
    assert plane.tolist() == word * 2


def test_key_tiles_follow_one_another():
    codes = torch.arange(32, dtype=torch.uint8)[:, None].expand(32, 8)
    (plane,) = pack(codes, FORMATS["int8"], "k")
    first = [t for _ in range(2) for t in range(16) for _ in range(4)]
    assert plane.tolist() == first + [t + 16 for t in first]


def test_value_bytes_of_four_tokens_alternate_in_the_pinned_token_order():
    codes = torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 16)
    (plane,) = pack(codes, FORMATS["int8"], "v")
    assert plane.tolist() == [0, 1, 4, 5] * 16 + [2, 3, 6, 7] * 16


def test_value_channels_of_head_dim_80_at_four_bits_are_two_blocks_of_16_and_one_of_8():
    codes = torch.zeros(8, 80, dtype=torch.uint8)
    codes[4, 32] = 0xA  # row byte 32, low nibble: block 2 (width 8), slot 2 of quad 0
    codes[7, 79] = 0xB  # row byte 39, high nibble: slot 7, quad 1
    (plane,) = pack(codes, FORMATS["int4"], "v")
    assert {i: b for i, b in enumerate(plane.tolist()) if b} == {
        2 * 16 * 8 + 0 * 32 + 0 * 4 + 2: 0x0A,
        2 * 16 * 8 + 1 * 32 + 7 * 4 + 3: 0xB0,
    }


def test_int3_is_a_two_bit_plane_of_high_bits_then_a_one_bit_plane():
    codes = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)[None].expand(16, 8)
    high, low = pack(codes, FORMATS["int3"], "k")
    # high bits 0 0 1 1 2 2 3 3 in a row of 4 bytes: byte r holds channels r and r + 4
    assert high.tolist() == [0b1000, 0b1000, 0b1101, 0b1101] * 16
    # low bits 0 1 0 1 0 1 0 1, one channel a byte: byte r holds channels r and r + 4
    assert low.tolist() == [0b00, 0b11, 0b00, 0b11] * 16
