// Banded codes (quant/banded.py) as closing writes them: what a side is, as a type, 8-bit scales, planes of bands.
#pragma once
#include "stored.cuh"
#include "turn.cuh"

enum Basis { NO_BASIS, HADAMARD, CALIBRATED };
constexpr int SMALLEST_SCALE = 1, LARGEST_SCALE = 247;
constexpr u32 SCALE_OFFSETS = 0x97a6d95;  // which scales are tried, plus 8, the first in the low bits: -3, 1, 5 around the first guess, -2, 2, then -1, 1 around the best

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

template <class S, int BITS, class Shared>
DEVICE void write_band_plane(unsigned char* out, const Shared& shared) {
    constexpr int CHANNELS = S::channels(BITS), ROW_BYTES = (CHANNELS * BITS + 31) / 32 * 4;
    if constexpr (CHANNELS > 0) {
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

/// Each plane as that of a format whose channels are those of the bands that have it. shared.codes: a byte each, [token][channel].
template <class S, class Shared>
DEVICE void write_planes(unsigned char* out, const Shared& shared) {
    write_band_plane<S, 8>(out, shared);
    write_band_plane<S, 4>(out, shared);
    write_band_plane<S, 2>(out, shared);
    write_band_plane<S, 1>(out, shared);
}
