"""The stored bytes are the matrix unit's operands: m16n8k16 emulated lane by lane on packed pages, with the addresses that packed.cuh computes.

Lane (g, c) of a warp gives rows g and g + 8 and k columns 2c, 2c + 1, 2c + 8, 2c + 9 of the 16 x 16 operand. A register is two float16 numbers; here it is
the pair of integers that they stand for.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbits.quant.packing import pack
from kvbits.spec import FORMATS, plane_row_bytes

PAGE = 64
LANES = [(g, c) for g in range(8) for c in range(4)]


def operand(word: int, bits: int, odd: int, field: int) -> tuple[int, int]:
    """`operand` of packed.cuh: the low and high half after the shift and the mask, with the field's factor taken out."""
    masked = (word >> 8 * odd) & (((1 << bits) - 1) * 0x00010001 << bits * field)
    return (masked & 0xFFFF) >> bits * field, (masked >> 16) >> bits * field


def words(plane: np.ndarray, at: int) -> list[int]:
    """Four 32-bit words of a 16-byte load."""
    assert at % 16 == 0
    return [int(w) for w in plane[at : at + 16].view(np.uint32)]


def mma(a: dict, b: np.ndarray) -> np.ndarray:
    """[16, 8] of operand registers a[lane] = (a0, a1, a2, a3) and a [16, 8] second operand."""
    full = np.zeros((16, 16), np.int64)
    for (g, c), (a0, a1, a2, a3) in a.items():
        full[g, 2 * c : 2 * c + 2], full[g + 8, 2 * c : 2 * c + 2] = a0, a1
        full[g, 2 * c + 8 : 2 * c + 10], full[g + 8, 2 * c + 8 : 2 * c + 10] = a2, a3
    return full @ b


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("fmt", ["int8", "int4", "int3", "int2"])
def test_key_words_are_score_operands(fmt, head_dim):
    codes = torch.randint(0, 2 ** FORMATS[fmt].bits, (PAGE, head_dim), dtype=torch.uint8)
    q = np.random.default_rng(0).integers(-9, 9, (8, head_dim))
    want = codes.numpy().astype(np.int64) @ q.T
    shift = FORMATS[fmt].bits
    total = np.zeros_like(want)
    for bits, plane in zip(FORMATS[fmt].planes, pack(codes, FORMATS[fmt], "k"), strict=True):
        shift -= bits
        row = plane_row_bytes(head_dim, bits)
        for unit in range(PAGE // 32):
            for field in range(8 // bits):
                for step in range(-(-row // 16)):
                    if field * row + 16 * step >= head_dim:
                        continue
                    b = np.zeros((16, 8), np.int64)  # lane (n, c): channels r0, r0 + 2 at k 2c, 2c + 1 and r0 + 1, r0 + 3 at k 2c + 8, 2c + 9
                    for c in range(4):
                        for k, channel in ((2 * c, 0), (2 * c + 1, 2), (2 * c + 8, 1), (2 * c + 9, 3)):
                            r = 16 * step + 4 * c + channel
                            if r < row and field * row + r < head_dim:
                                b[k] = q[:, field * row + r]
                    tiles = [{}, {}]
                    for g, c in LANES:
                        word = min(4 * step + c, row // 4 - 1)
                        w = words(plane.numpy(), ((2 * unit + g // 4) * (row // 4) + word) * 64 + g % 4 * 16)
                        for tile in range(2):
                            tiles[tile][g, c] = tuple(operand(w[2 * tile + half], bits, odd, field) for odd in range(2) for half in range(2))
                    for tile, a in enumerate(tiles):
                        scores = mma(a, b) << shift
                        for g in range(8):
                            total[32 * unit + 4 * g + 2 * tile] += scores[g]
                            total[32 * unit + 4 * g + 2 * tile + 1] += scores[g + 8]
    np.testing.assert_array_equal(total, want)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("fmt", ["int8", "int4", "int3", "int2"])
def test_value_words_are_output_operands(fmt, head_dim):
    codes = torch.randint(0, 2 ** FORMATS[fmt].bits, (PAGE, head_dim), dtype=torch.uint8)
    p = np.random.default_rng(1).integers(0, 9, (PAGE, 8))
    want = codes.numpy().astype(np.int64).T @ p
    shift = FORMATS[fmt].bits
    total = np.zeros_like(want)
    for bits, plane in zip(FORMATS[fmt].planes, pack(codes, FORMATS[fmt], "v"), strict=True):
        shift -= bits
        row = plane_row_bytes(head_dim, bits)
        blocks = -(-row // 16)
        for unit in range(PAGE // 32):
            for which in range(2):  # quad 2c holds tokens 8c, 8c + 4 | 8c + 1, 8c + 5; quad 2c + 1 the next two pairs
                b = np.zeros((16, 8), np.int64)
                for c in range(4):
                    first = 32 * unit + 8 * c + 2 * which
                    b[2 * c], b[2 * c + 1], b[2 * c + 8], b[2 * c + 9] = p[first], p[first + 4], p[first + 1], p[first + 5]
                for pair in range(-(-blocks // 2)):
                    loaded = {}
                    for g, c in LANES:
                        block = min(2 * pair + g // 4, blocks - 1)
                        width = min(16, row - 16 * block)
                        quarter = min(g % 4, width // 4 - 1)
                        quad = unit * 8 + 2 * c + which
                        loaded[g, c] = words(plane.numpy(), block * 16 * PAGE + quarter * 16 + quad * 4 * width)
                    for field in range(8 // bits):
                        for half in range(2):
                            a = {lane: tuple(operand(w[2 * half + r], bits, odd, field) for odd in range(2) for r in range(2)) for lane, w in loaded.items()}
                            out = mma(a, b) << shift
                            for g in range(8):
                                for r in range(2):
                                    byte = 32 * pair + 4 * g + 2 * half + r
                                    if byte < row and field * row + byte < head_dim:
                                        total[field * row + byte] += out[g + 8 * r]
    np.testing.assert_array_equal(total, want)


def test_a_code_in_the_low_bits_of_a_float16_is_a_subnormal_number():
    halves = np.arange(256, dtype=np.uint16).view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(halves, np.arange(256) * 2.0**-24)
