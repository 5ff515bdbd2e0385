// The scale of a token, and its codes. X_TYPE and WARPGROUPS are macros.
#pragma once
#include "banded.cuh"
#include "trellis.cuh"

/// Whether a side's rows are multiplied with the Hadamard matrix on the matrix units, as they came: every product is
/// exact.
template <class S>
constexpr bool by_signs() { return WARPGROUPS && S::BASIS == HADAMARD && X_TYPE != FLOAT32 && D == 128; }
/// What a token's numbers are still to be multiplied with.
template <class S>
constexpr float factor_of() { return by_signs<S>() ? float(HADAMARD_FACTOR) : 1.f; }

/// What a scale misses x by, past the ends too. Levels are halves of odd numbers of scales, symmetric: with b bits the
/// distance from the nearest is | .. ||x| - 2**(b - 2)| .. - 1| - 1/2 scales. Wider ones count half scales, levels are
/// odd: from 2**24 on a float holds even numbers only.
template <int BITS>
DEVICE float missed(float x, float scale, float inverse_half) {
    if (BITS <= 4) {
        float y = x;
#pragma unroll
        for (int b = BITS; b > 0; --b) y = fabsf(y) - float(1 << b) / 4 * scale;
        return y;
    }
    constexpr float EVEN = 16777216.f;
    const float below = fminf(__fmaf_rd(fabsf(x), inverse_half, EVEN), EVEN + float((1 << BITS) - 2));
    return fmaf(fabsf(x), inverse_half, (EVEN - 1.f) - below);
}

/// Squares of what a scale misses, of narrow bands and, in half scales, of wide ones.
template <class S, int I = 0>
DEVICE void add_squares(const Token& x, float scale, float inverse_half, float (&narrow)[2], float (&wide)[2]) {
    if constexpr (I < BANDS) {
        if constexpr (S::width(I) > 0)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float y = missed<S::width(I)>(x[I][k], scale, inverse_half);
                float& sum = S::width(I) > 4 ? wide[k % 2] : narrow[k % 2];
                sum = fmaf(y, y, sum);
            }
        add_squares<S, I + 1>(x, scale, inverse_half, narrow, wide);
    }
}

/// Over the four threads of a token.
DEVICE float of_token(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/// A thread's part of a token's sum of squares, each over its band's step.
template <class S>
DEVICE float squares_of(const Token& x) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float step = band_step(S::width(i)) * factor_of<S>();
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum = fmaf(x[i][k], x[i][k], sum);
        squares = fmaf(sum, step * step, squares);
    }
    return squares;
}
/// The code of the first scale that is tried around from a token's squares; plus 256 where no code is as large.
template <class S>
DEVICE int first_guess(float squares) {
    const float start = sqrtf(__fdiv_rn(squares, float(S::channels(15))));
    return scale_code(start) | (start <= scale_value(LARGEST_SCALE) ? 0 : 256);
}

/// How many scales are tried (quant/scales.py), and which is the i-th: the first one around the guess, two at a time
/// around the best before.
template <class S>
constexpr int tried() { return S::BASIS == HADAMARD ? 5 : 7; }
template <class S>
DEVICE int scale_tried(int around, int i) {
    return min(
        max(around + int((S::BASIS == HADAMARD ? TURNED_OFFSETS : SCALE_OFFSETS) >> 4 * i & 15) - 8, SMALLEST_SCALE),
        LARGEST_SCALE);
}
/// A token's squared error with a scale.
template <class S>
DEVICE float error_of(const Token& x, int code) {
    const float scale = scale_value(code) * (1.f / factor_of<S>()), half = 0.5f * scale;
    float narrow[2] = {}, wide[2] = {};
    add_squares<S>(x, scale, reciprocal_approx(half), narrow, wide);
    return of_token(fmaf((wide[0] + wide[1]) * half, half, narrow[0] + narrow[1]));
}

/// The scale that goes with a side's levels, from the one that is best for integers.
template <class S>
DEVICE int scale_of_levels(int best) { return S::FITTED ? max(best - FITTED_LOWER, SMALLEST_SCALE) : best; }
/// The codes of the tokens' scales: of the least squared error of integers, the first of equals.
template <class S>
DEVICE void fit_scales(const Token (&x)[TOKENS], int lane, int (&best)[TOKENS], bool& overflow) {
    float squares[TOKENS];
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) squares[r] = squares_of<S>(x[r]);
    // Over the four threads of a token, by even ones for the first token and odd ones for the second.
    const bool odd = lane & 1;
    float all = (odd ? squares[1] : squares[0]) + __shfl_xor_sync(ALL_LANES, odd ? squares[0] : squares[1], 1);
    all += __shfl_xor_sync(ALL_LANES, all, 2);
    const int mine = first_guess<S>(all), other = __shfl_xor_sync(ALL_LANES, mine, 1);
    overflow |= (mine | other) & 256;
    best[0] = (odd ? other : mine) & 255, best[1] = (odd ? mine : other) & 255;
    int around[TOKENS];
    float least[TOKENS] = {__uint_as_float(0x7f800000u), __uint_as_float(0x7f800000u)};
#pragma unroll 1
    for (int i = 0; i < tried<S>(); ++i) {
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
            if (i == 0 || i % 2) around[r] = best[r];
            const int code = scale_tried<S>(around[r], i);
            const float error = error_of<S>(x[r], code);
            if (error < least[r]) least[r] = error, best[r] = code;
        }
    }
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) best[r] = scale_of_levels<S>(best[r]);
}

/// What a token's numbers are multiplied with to be in units.
template <class S>
DEVICE float inverse_of(int scale) { return __fdiv_rn(float(UNIT), scale_value(scale)) * factor_of<S>(); }

/// The bands whose codes are of a trellis, four bits each, and how many rings a token has: those bands, or of values,
/// which have one width, all.
template <class S>
constexpr u64 ring_bands() {
    u64 found = 0;
    for (int i = 0, at = 0; i < BANDS; ++i)
        if (S::width(i) > 0 && S::width(i) < 8) found |= u64(i) << 4 * at++;
    return found;
}
template <class S>
constexpr int count_rings() {
    int found = 0;
    for (int i = 0; i < BANDS; ++i) found += S::width(i) > 0 && S::width(i) < 8;
    return found;
}
/// The first channel of the `run`-th run of ring `number` of a token.
template <class S>
DEVICE int run_channel(int number, int run) {
    return S::VALUES ? 4 * number + BANDS * 4 * run : int(ring_bands<S>() >> 4 * number & 15) * BAND + 4 * run;
}
/// The codes of ring `number` of a token: see `ring_codes`.
template <class S>
DEVICE void codes_of_ring(const u32 (&numbers)[RING / 2], int number, u32 (&codes)[RUNS]) {
    if constexpr (S::FITTED) ring_codes<!S::VALUES>(numbers, FittedLevels(0), codes);
    else if constexpr (S::VALUES) ring_codes<false>(numbers, UniformLevels<S::width(0)>(0), codes);
    else ring_codes<true>(numbers, UniformLevels<0>(S::width(int(ring_bands<S>() >> 4 * number & 15))), codes);
}
template <class Shared>
DEVICE u32& four_of(Shared& shared, int token, int channel) {
    return *reinterpret_cast<u32*>(&shared.codes[token][channel]);
}
