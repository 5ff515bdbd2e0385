// Values in trellis codes (docs/reference/formats.md, "Trellis codes"): what words of a row become so that one AND gives
// operands. A ring of 16 channels is four neighbouring bytes of a row, field by field, so the lowest bit one place before
// is that of the byte before, or of the last byte a field lower, and the one two places before is found likewise.
#ifndef VALUE_RINGS_CUH
#define VALUE_RINGS_CUH
#include "config.cuh"

/// What levels the indices of trellis codes stand for; NO_RINGS: other codes.
enum Rings { NO_RINGS, UNIFORM_RINGS, FITTED_RINGS };

/// Operands of fields are indices of BITS + 1 bits, or of 2 bits with FITTED_RINGS numbers of 4 bits whose doubles, less
/// 15, are the levels 1 3 5 9: 3 5 6 7 8 9 10 12. Their highest bit is the code's.
template <Rings RINGS, int BITS>
struct ValueRing {
    static constexpr bool FITTED = RINGS == FITTED_RINGS;
    static constexpr u32 MASK = BITS == 4 ? 31 : BITS == 3 || FITTED ? 15 : 7;
    static_assert(!RINGS || BITS == 2 || (!FITTED && (BITS == 3 || BITS == 4)), "family.py refuses others");

    static constexpr int exponent(int field) {
        return BITS == 4 ? 3 * field : field / 2 * 4 + (BITS == 2 && !FITTED ? field % 2 : 0);
    }

    /// joined[n]: words of the even and of the odd fields of byte n, without other bits. low: words of the plane below, of 3 bits. before: of
    /// 4 bits the words of the ring's other four bytes, the third and the fourth. second: these bytes are in the second
    /// half of a row.
    static DEVICE void join(u32 (&joined)[4][2], const u32 (&w)[4], const u32 (&low)[4], int second,
                            const uint2& before) {
        u32 lowest[4];           // lowest bits of codes: at even bits, or at bits 0 and 4
        for (int n = 0; n < 4; ++n)
            lowest[n] = BITS == 3 ? low[n] >> second : FITTED ? w[n] : w[n] & (BITS == 4 ? 0x11111111u : 0x55555555u);
        const u32 last = BITS == 4 ? before.y & 0x11111111u : lowest[3];
        u32 third = BITS == 4 ? before.x : lowest[2], fourth = last;
        if (BITS < 4 || !second) third = turned(third), fourth = turned(fourth);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const u32 one = n == 0 ? fourth : lowest[n - 1], two = n == 0 ? third : n == 1 ? fourth : lowest[n - 2];
            u32(&to)[2] = joined[n];
            if (BITS == 4) {
                const u32 f = w[n] ^ two & 0x11111111u;
                to[0] = select_bits(0x1e1e1e1eu, f << 1, one), to[1] = select_bits(0xf0f0f0f0u, f, one >> 1);
            } else if (BITS == 3) {
                const u32 two_bits = select_bits(0xaaaaaaaau, (lowest[n] ^ two) << 1, one);
                to[0] = select_bits(0xccccccccu, w[n] << 2, two_bits);
                to[1] = select_bits(0xccccccccu, w[n], two_bits >> 2);
            } else if (!FITTED) {
                const u32 f = w[n] ^ two;
                to[0] = select_bits(0x66666666u, f << 1, one), to[1] = select_bits(0xccccccccu, f, one >> 1);
            } else {             // bits of each number, at even bits; the highest is where the code has it
                const u32 upper = w[n] >> 1, lower = w[n] ^ two;
                const u32 x = select_bits(0x55555555u, most_of<0x0f, 0x33, 0xaa>(upper, lower, one),
                                          most_of<0x0f, 0xcc, 0x55>(upper, lower, one) << 1),
                          y = select_bits(0x55555555u, most_of<0x0f, 0xcc, 0xaa>(upper, lower, one), w[n]);
                to[0] = select_bits(0x33333333u, x, y << 2), to[1] = select_bits(0x33333333u, x >> 2, y);
            }
        }
    }
    /// What most of three bits are: of each itself (0xf0, 0xcc, 0xaa) or its opposite.
    template <u32 A, u32 B, u32 C>
    static DEVICE u32 most_of(u32 a, u32 b, u32 c) { return bitwise<(A & B | C & (A | B)) & 0xff>(a, b, c); }
    /// Fields of every byte a place up, the last to the first.
    static DEVICE u32 turned(u32 w) {
        return BITS == 4 ? select_bits(0xf0f0f0f0u, w << 4, w >> 4) : select_bits(0xfcfcfcfcu, w << 2, w >> 6);
    }
};
#endif
