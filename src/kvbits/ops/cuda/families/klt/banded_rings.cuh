// Keys in trellis codes: words of a plane with lowest bits of codes, joined to words whose fields are indices
// (docs/reference/formats.md, "Trellis codes"). A ring of 16 channels is a band: the four fields of four bytes of a word
// (2 bits), of two words (4), or of a half of a word's bytes (1), byte by byte. So the lowest bit one place before is a
// field lower, or the highest of the byte before, which rotations of words give.
#ifndef BANDED_RINGS_CUH
#define BANDED_RINGS_CUH
#include "banded_queries.cuh"

/// A lane's words of a load of plane P.
template <class P>
struct KeyRing {
    static constexpr int BITS = P::BITS;
    const int load;
    u32 lowest;                  // bits that are lowest ones of codes
    int c, field;                // lane, and the first of its fields

    DEVICE KeyRing(int load, int c) : load(load), c(c), field(P::first_field(load, c)) {
        constexpr u32 ALL = BITS == 1 ? 0xffffffffu : BITS == 2 ? 0x55555555u : 0x11111111u;
        lowest = P::all_lowest(load) || P::lowest_list() >> P::word(load, c) & 1 ? ALL : 0;
    }
    /// Bytes from a lane's word to the other one of its ring, of 4 bits.
    DEVICE int to_other() const { return c % 2 ? -64 : 64; }

    /// joined[0], [1]: words of the even fields and of the odd ones; of a lane's only field both. other: see above.
    DEVICE void join(u32 (&joined)[2], u32 w, u32 other) const {
        const bool alone = P::alone(load);
        if (BITS == 1) {
            const u32 f = w ^ select_bits(0xccccccccu, w << 2, rotate_left(w, 6)),
                      one = select_bits(0xeeeeeeeeu, w << 1, rotate_left(w, 5));
            joined[0] = select_bits(0xaaaaaaaau, f << 1, one), joined[1] = select_bits(0xaaaaaaaau, f, w);
        } else if (BITS == 2) {
            // words of upper planes lack the lowest bit, unless there are none
            const u32 low = P::all_lowest(load) ? w : w & lowest, f = w ^ rotate_left(low, 4) & lowest;
            if (alone) {
                joined[0] = joined[1] = select_bits(0x66666666u, rotate_left(f, 33 - 2 * field & 31),
                                                    rotate_left(low, 2 - 2 * field & 31));
                return;
            }
            joined[0] = select_bits(0x66666666u, f << 1, rotate_left(low, 2));
            joined[1] = select_bits(0x66666666u, f >> 1, low);
        } else {
            // no other bits are set
            const u32 low = w & lowest, low_other = other & lowest, f = w ^ rotate_left(low_other, c % 2 ? 0 : 8),
                      before = rotate_left(low_other, c % 2 ? 28 : 4);
            if (alone) {
                joined[0] = joined[1] =
                    select_bits(0x1e1e1e1eu, rotate_left(f, field ? 29 : 1), field ? low : before);
                return;
            }
            joined[0] = select_bits(0x1e1e1e1eu, f << 1, before), joined[1] = select_bits(0x1e1e1e1eu, f >> 3, low);
        }
    }
    /// Four tokens' words as a step's: words[i][k], of even fields and of odd ones, or both the same where none are
    /// joined. at: where the lane's words are.
    DEVICE void read(u32 (&words)[4][2], const unsigned char* at) const {
        const uint4 w = *reinterpret_cast<const uint4*>(at);
        const u32 own[4] = {w.x, w.y, w.z, w.w};
        if (!P::joined(load)) {
            for (int i = 0; i < 4; ++i) words[i][0] = words[i][1] = own[i];
            return;
        }
        const uint4 o = BITS == 4 ? *reinterpret_cast<const uint4*>(at + to_other()) : w;
        const u32 others[4] = {o.x, o.y, o.z, o.w};
        for (int i = 0; i < 4; ++i) join(words[i], own[i], others[i]);
    }
};
#endif
