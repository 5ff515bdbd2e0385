// Values in trellis codes (docs/reference/formats.md, "Trellis codes"): what words of a row become so that one AND gives
// operands. A ring of 16 channels is four neighbouring bytes of a row, field by field, so the lowest bit one place before
// is that of the byte before, or of the last byte a field lower, and the one two places before is found likewise.
#pragma once
#include "config.cuh"

/// What levels the indices of trellis codes stand for; NO_RINGS: other codes.
enum Rings { NO_RINGS, UNIFORM_RINGS, FITTED_RINGS };

/// Operands of fields are indices of BITS + 1 bits, or of 2 bits with FITTED_RINGS a number whose double, less 9, is one
/// of the levels 1 3 5 9: 0 2 3 4 5 6 7 9.
template <Rings RINGS, int BITS>
struct ValueRing {
    static constexpr bool FITTED = RINGS == FITTED_RINGS;
    static constexpr u32 MASK = BITS == 4 ? 31 : BITS == 3 || FITTED ? 15 : 7;
    static_assert(!RINGS || BITS == 2 || (!FITTED && (BITS == 3 || BITS == 4)), "family.py refuses others");

    static constexpr int exponent(int field) {
        return BITS == 4 ? 3 * field : field / 2 * 4 + (BITS == 2 && !FITTED ? field % 2 : 0);
    }

    /// joined[n]: words of the even and of the odd fields of byte n. low: words of the plane below, of 3 bits. before: of
    /// 4 bits the words of the ring's other four bytes, the third and the fourth. second: these bytes are in the second
    /// half of a row.
    static DEVICE void join(u32 (&joined)[4][2], const u32 (&w)[4], const u32 (&low)[4], int second,
                            const uint2& before) {
        u32 lowest[4];           // lowest bits of codes: at even bits, or at bits 0 and 4
        for (int n = 0; n < 4; ++n) lowest[n] = BITS == 4 ? w[n] & 0x11111111u : BITS == 3 ? low[n] >> second : w[n];
        u32 third = turned(lowest[2]), fourth = turned(lowest[3]);
        if (BITS == 4) {
            third = before.x & 0x11111111u, fourth = before.y & 0x11111111u;
            if (!second) third = turned(third), fourth = turned(fourth);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const u32 one = n == 0 ? fourth : lowest[n - 1], two = n == 0 ? third : n == 1 ? fourth : lowest[n - 2];
            u32(&to)[2] = joined[n];
            if (BITS == 4) {     // no other bits are set
                const u32 f = w[n] ^ two;
                to[0] = select_bits(0x1e1e1e1eu, f << 1, one), to[1] = select_bits(0xf0f0f0f0u, f, one >> 1);
            } else if (BITS == 3) {
                const u32 two_bits = select_bits(0xaaaaaaaau, (lowest[n] ^ two) << 1, one);
                to[0] = select_bits(0xccccccccu, w[n] << 2, two_bits);
                to[1] = select_bits(0xccccccccu, w[n], two_bits >> 2);
            } else if (!FITTED) {
                const u32 f = w[n] ^ two & 0x55555555u;
                to[0] = select_bits(0x66666666u, f << 1, one), to[1] = select_bits(0xccccccccu, f, one >> 1);
            } else {             // four bits of each number, at even bits
                const u32 upper = w[n] >> 1, lower = w[n] ^ two;
                const u32 first = upper & lower | (upper | lower) & ~one, second_bit = lower ^ one,
                          third_bit = upper ^ lower & one, fourth_bit = upper & lower & one;
                const u32 x = select_bits(0x55555555u, first, second_bit << 1),
                          y = select_bits(0x55555555u, third_bit, fourth_bit << 1);
                to[0] = select_bits(0x33333333u, x, y << 2), to[1] = select_bits(0x33333333u, x >> 2, y);
            }
        }
    }
    /// Fields of every byte a place up, the last to the first.
    static DEVICE u32 turned(u32 w) {
        return BITS == 4 ? select_bits(0xf0f0f0f0u, w << 4, w >> 4) : select_bits(0xfcfcfcfcu, w << 2, w >> 6);
    }
};
