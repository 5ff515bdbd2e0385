// Banded codes (quant/banded.py) as closing writes them: 8-bit scales, planes of bands.
#pragma once
#include "bands.cuh"
#include "stored.cuh"

constexpr int SMALLEST_SCALE = 1, LARGEST_SCALE = 247;
// Which scales are tried, plus 8, the first in the low bits: 1 above the first guess, then 4, 2, 1 below and above the
// best; of turned rows the first guess, then 2, 1.
constexpr u32 SCALE_OFFSETS = 0x97a6c49, TURNED_OFFSETS = 0x97a68;

/// The 8-bit float nearest to x >= 0 that is no larger than the largest, ties up.
DEVICE int scale_code(float x) { return min(max(to_f16(fminf(x, 65504.f)) + 64 >> 7, SMALLEST_SCALE), LARGEST_SCALE); }

/// Whether the four threads of a token hold whole words of a plane, or fields that two or four of them put together.
template <class S>
constexpr bool in_lanes(int bits) {
    return plane_row<S>(bits) * 8 == S::channels(bits) * bits &&
           (plane_row<S>(bits) % 16 == 0 || plane_row<S>(bits) <= 8);
}

/// Stores a word of a token's row as docs/reference/formats.md orders them, from threads that have the words of eight
/// tokens: 4 j + lane of a token.
template <bool VALUES, int WORDS>
DEVICE void write_word(unsigned char* plane, u32 w, int token, int word, bool writes) {
    if (VALUES) w = transposed(w, token);
    if (writes) reinterpret_cast<u32*>(plane)[word_place<VALUES, WORDS>(token, word)] = w;
}

/// A plane from the codes of this thread, four of every band in a word: j-th thread of a token.
template <class S, int BITS>
DEVICE void write_lanes(unsigned char* out, const u32 (&codes)[D / BAND], int token, int j) {
    constexpr int WORDS = plane_row<S>(BITS) / 4, EACH = WORDS < 4 ? 1 : WORDS / 4;
    if constexpr (WORDS > 0 && in_lanes<S>(BITS)) {
        u32 w[EACH] = {};
        int at = 0;  // of the plane's bands
#pragma unroll
        for (int i = 0; i < D / BAND; ++i) {
            if (!(S::width(i) & BITS)) continue;
            const int field = WORDS < 4 ? at * 4 / (WORDS ? WORDS : 1) : at / EACH,
                      up = BITS * field - (S::width(i) & (BITS - 1));
            w[at % EACH] |=
                (up < 0 ? codes[i] >> -up : codes[i] << up) & (((1u << BITS) - 1) << BITS * field) * 0x01010101u;
            ++at;
        }
        if (WORDS < 4) {
            w[0] <<= j / (WORDS ? WORDS : 1) * BITS;
#pragma unroll
            for (int mask = WORDS; mask < 4; mask *= 2) w[0] |= __shfl_xor_sync(ALL_LANES, w[0], mask);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            write_word<S::VALUES, WORDS>(out + S::offset(BITS), w[k], token,
                                         k * 4 + (WORDS < 4 ? j % (WORDS ? WORDS : 1) : j), WORDS >= 4 || j < WORDS);
    }
}

/// Four bytes of a plane's row from byte r on, from shared.codes: a byte each, [token][channel].
template <class S, int BITS, class Shared>
DEVICE u32 plane_word(const Shared& shared, int token, int r) {
    constexpr int CHANNELS = S::channels(BITS), ROW_BYTES = plane_row<S>(BITS);
    constexpr u64 MAP = S::bands(BITS, false), SHIFTS = S::bands(BITS, true);
    u32 w = 0;
#pragma unroll
    for (int f = 0; f < 8 / BITS; ++f) {
        const int channel = r + f * ROW_BYTES, at = channel / BAND * 4;
        if (channel >= CHANNELS) continue;
        const u32 codes =
            *reinterpret_cast<const u32*>(&shared.codes[token][int(MAP >> at & 15) * BAND + channel % BAND]);
        w |= (codes >> int(SHIFTS >> at & 15) & ((1u << BITS) - 1) * 0x01010101u) << BITS * f;
    }
    return w;
}

/// Writes a plane whose words no thread holds.
template <class S, int BITS, class Shared>
DEVICE void write_shared(unsigned char* out, const Shared& shared) {
    constexpr int CHANNELS = S::channels(BITS), ROW_BYTES = plane_row<S>(BITS);
    if constexpr (CHANNELS > 0 && !in_lanes<S>(BITS)) {
        write_rows<S::VALUES, ROW_BYTES>(out + S::offset(BITS),
                                         [&](int token, int r) { return plane_word<S, BITS>(shared, token, r); });
    }
}

/// Each plane as that of a format whose channels are those of the bands that have it: those that threads have the words
/// of, and the others.
template <class S>
constexpr bool in_lanes() { return in_lanes<S>(8) && in_lanes<S>(4) && in_lanes<S>(2) && in_lanes<S>(1); }
template <class S>
DEVICE void write_lanes(unsigned char* out, const u32 (&codes)[D / BAND], int token, int j) {
    write_lanes<S, 8>(out, codes, token, j);
    write_lanes<S, 4>(out, codes, token, j);
    write_lanes<S, 2>(out, codes, token, j);
    write_lanes<S, 1>(out, codes, token, j);
}
template <class S, class Shared>
DEVICE void write_shared(unsigned char* out, const Shared& shared) {
    write_shared<S, 8>(out, shared);
    write_shared<S, 4>(out, shared);
    write_shared<S, 2>(out, shared);
    write_shared<S, 1>(out, shared);
}
