// Banded codes (quant/banded.py) as closing writes them: what a side is, as a type, 8-bit scales, planes of bands.
#pragma once
#include "stored.cuh"
#include "turn.cuh"

enum Basis { NO_BASIS, HADAMARD, CALIBRATED };
constexpr int SMALLEST_SCALE = 1, LARGEST_SCALE = 247;
constexpr u32 SCALE_OFFSETS = 0x97a6b7;  // which scales are tried, plus 8, the first in the low bits: -1, 3 around the first guess, -2, 2, then -1, 1 around the best

/// WIDTHS: bits of each band, four bits a band. PLANE8 .. PLANE1: bytes to the planes of 8, 4, 2 and 1 bits, if the page has them.
template <u64 WIDTHS, Basis BASIS_, bool MEAN_, int SCALE_OFFSET_, int MEAN_OFFSET_, int PLANE8, int PLANE4, int PLANE2, int PLANE1, bool VALUES_>
struct Banded {
    static constexpr Basis BASIS = BASIS_;
    static constexpr bool HAS_MEAN = MEAN_, VALUES = VALUES_;
    static constexpr int SCALE_OFFSET = SCALE_OFFSET_, MEAN_OFFSET = MEAN_OFFSET_;

    static DEVICE constexpr int width(int band) { return int(WIDTHS >> 4 * band & 15); }
    static DEVICE constexpr int offset(int plane) { return plane == 8 ? PLANE8 : plane == 4 ? PLANE4 : plane == 2 ? PLANE2 : PLANE1; }
    /// Channels of the bands that have a plane (all bits: of those that have any).
    static DEVICE constexpr int channels(int plane) {
        int found = 0;
        for (int i = 0; i < D / BAND; ++i) found += width(i) & plane ? BAND : 0;
        return found;
    }
    /// Of a plane's bands, in its order, four bits each: which they are; or how far its field lies up in their codes.
    static DEVICE constexpr u64 bands(int plane, bool shifts) {
        u64 found = 0;
        for (int i = 0, at = 0; i < D / BAND; ++i)
            if (width(i) & plane) found |= u64(shifts ? width(i) & (plane - 1) : i) << 4 * at++;
        return found;
    }
};

/// The 8-bit float nearest to x >= 0 that is no larger than the largest, ties up; and back.
DEVICE int scale_code(float x) { return min(max(to_f16(fminf(x, 65504.f)) + 64 >> 7, SMALLEST_SCALE), LARGEST_SCALE); }
DEVICE float scale_value(int code) { return f16_to_float(u16(code << 7)); }

/// Bytes of a token in a plane, and whether the four threads of a token hold whole words of it, or fields that two or four of them put together.
template <class S>
constexpr int plane_row(int bits) { return (S::channels(bits) * bits + 31) / 32 * 4; }
template <class S>
constexpr bool in_lanes(int bits) { return plane_row<S>(bits) * 8 == S::channels(bits) * bits && (plane_row<S>(bits) % 16 == 0 || plane_row<S>(bits) <= 8); }

/// Stores a word of a token's row as docs/formats.md orders them, from threads that have the words of eight tokens: 4 j + lane of a token.
template <bool VALUES, int WORDS>
DEVICE void write_word(unsigned char* plane, u32 w, int token, int word, bool writes) {
    if (VALUES) {  // bytes of four tokens, 0 1 4 5 or 2 3 6 7 of eight: first with the neighbour, then with the one four further
        const bool odd = token & 1, far = token & 4;
        w = permute_bytes(w, __shfl_xor_sync(ALL_LANES, w, 4), odd ? 0x3715 : 0x6240);
        w = permute_bytes(w, __shfl_xor_sync(ALL_LANES, w, 16), far ? 0x3276 : 0x5410);
        const int quad = token / 8 * 2 + token % 4 / 2, block = word / 4, width = min(4, WORDS - block * 4);
        if (writes) reinterpret_cast<u32*>(plane)[block * 4 * PAGE + (quad * width + word % 4) * 4 + odd + 2 * far] = w;
    } else if (writes) reinterpret_cast<u32*>(plane)[(token / 16 * WORDS + word) * 16 + token % 16] = w;
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
            const int field = WORDS < 4 ? at * 4 / (WORDS ? WORDS : 1) : at / EACH, up = BITS * field - (S::width(i) & (BITS - 1));
            w[at % EACH] |= (up < 0 ? codes[i] >> -up : codes[i] << up) & (((1u << BITS) - 1) << BITS * field) * 0x01010101u;
            ++at;
        }
        if (WORDS < 4) {
            w[0] <<= j / (WORDS ? WORDS : 1) * BITS;
#pragma unroll
            for (int mask = WORDS; mask < 4; mask *= 2) w[0] |= __shfl_xor_sync(ALL_LANES, w[0], mask);
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) write_word<S::VALUES, WORDS>(out + S::offset(BITS), w[k], token, k * 4 + (WORDS < 4 ? j % (WORDS ? WORDS : 1) : j), WORDS >= 4 || j < WORDS);
    }
}

/// Of a plane whose words no thread holds: from shared.codes, a byte each, [token][channel].
template <class S, int BITS, class Shared>
DEVICE void write_shared(unsigned char* out, const Shared& shared) {
    constexpr int CHANNELS = S::channels(BITS), ROW_BYTES = plane_row<S>(BITS);
    if constexpr (CHANNELS > 0 && !in_lanes<S>(BITS)) {
        constexpr u64 MAP = S::bands(BITS, false), SHIFTS = S::bands(BITS, true);
        write_rows<S::VALUES, ROW_BYTES>(out + S::offset(BITS), [&](int token, int r) {
            u32 w = 0;
#pragma unroll
            for (int f = 0; f < 8 / BITS; ++f) {
                const int channel = r + f * ROW_BYTES, at = channel / BAND * 4;
                if (channel >= CHANNELS) continue;
                const u32 codes = *reinterpret_cast<const u32*>(&shared.codes[token][int(MAP >> at & 15) * BAND + channel % BAND]);
                w |= (codes >> int(SHIFTS >> at & 15) & ((1u << BITS) - 1) * 0x01010101u) << BITS * f;
            }
            return w;
        });
    }
}

/// Each plane as that of a format whose channels are those of the bands that have it: those that threads have the words of, and the others.
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
