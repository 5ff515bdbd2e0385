// Trellis codes as closing writes them: 8-bit scales (quant/scales.py), planes of bands.
#pragma once
#include "bands.cuh"
#include "stored.cuh"

constexpr int SMALLEST_SCALE = 1, LARGEST_SCALE = 247;
constexpr int FITTED_LOWER = 2;  // 8-bit floats from the scale that is best for integers down to that of fitted levels
// Which scales are tried, plus 8, the first in the low bits: 1 above the first guess, then 4, 2, 1 below and above the
// best; of turned rows the first guess, then 2, 1.
constexpr u32 SCALE_OFFSETS = 0x97a6c49, TURNED_OFFSETS = 0x97a68;

/// The 8-bit float nearest to x >= 0 that is no larger than the largest, ties up.
DEVICE int scale_code(float x) { return min(max(to_f16(fminf(x, 65504.f)) + 64 >> 7, SMALLEST_SCALE), LARGEST_SCALE); }

/// Four bytes of a plane's row from byte r on, from shared.codes: a byte each, [token][channel]. A row of values has its
/// fields one after the other; of keys every word has.
template <class S, int BITS, class Shared>
DEVICE u32 plane_word(const Shared& shared, int token, int r) {
    constexpr int CHANNELS = S::channels(BITS), FIELDS = 8 / BITS, STEP = S::VALUES ? plane_row<S>(BITS) : 4;
    constexpr u64 MAP = S::bands(BITS, false), SHIFTS = S::bands(BITS, true);
    const int first = S::VALUES ? r : r * FIELDS;
    u32 w = 0;
#pragma unroll
    for (int f = 0; f < FIELDS; ++f) {
        const int channel = first + f * STEP, at = channel / BAND * 4;
        if (channel >= CHANNELS) continue;
        const u32 codes =
            *reinterpret_cast<const u32*>(&shared.codes[token][int(MAP >> at & 15) * BAND + channel % BAND]);
        w |= (codes >> int(SHIFTS >> at & 15) & ((1u << BITS) - 1) * 0x01010101u) << BITS * f;
    }
    return w;
}

/// The planes of a page from shared.codes.
template <class S, int BITS, class Shared>
DEVICE void write_plane_of_bands(unsigned char* out, const Shared& shared) {
    if constexpr (S::channels(BITS) > 0)
        write_rows<S::VALUES, plane_row<S>(BITS)>(
            out + S::offset(BITS), [&](int token, int r) { return plane_word<S, BITS>(shared, token, r); });
}
template <class S, class Shared>
DEVICE void write_planes(unsigned char* out, const Shared& shared) {
    write_plane_of_bands<S, 8>(out, shared);
    write_plane_of_bands<S, 4>(out, shared);
    write_plane_of_bands<S, 2>(out, shared);
    write_plane_of_bands<S, 1>(out, shared);
}
