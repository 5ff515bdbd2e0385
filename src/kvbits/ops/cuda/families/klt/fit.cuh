// The scale of a token of banded codes, and its codes. X_TYPE and WARPGROUPS are macros.
#pragma once
#include "banded.cuh"

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

/// How many scales are tried (quant/banded.py), and which is the i-th: the first one around the guess, two at a time
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

/// The codes of the tokens' scales: of the least squared error, the first of equals.
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
}

/// A thread's channels of a token in a band of `width` bits as codes, a byte each.
DEVICE u32 four_codes(const float (&x)[4], int width, float inverse) {
    constexpr u32 ONE_EACH = 0x10001u;
    const u32 top = (1u << width) - 1;
    u32 found[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        // Rounded as the reference rounds: product and sum at once, then half to even by a number that leaves no room
        // for a fraction. What is left of the levels fits 16 bits: a scale of the search is above 1/1000 of a token's
        // largest number.
        found[k] = __float_as_uint(__fadd_rn(fmaf(x[k], inverse, float(top) / 2), 12582912.f));
    const u32 low = clamp_i16x2(permute_bytes(found[0], found[1], 0x5410), top * ONE_EACH),
              high = clamp_i16x2(permute_bytes(found[2], found[3], 0x5410), top * ONE_EACH);
    return permute_bytes(low, high, 0x6420);
}
/// What they are multiplied with: one over the scale.
template <class S>
DEVICE float inverse_of(int scale) { return __fdiv_rn(1.f, scale_value(scale)) * factor_of<S>(); }
/// Codes of a thread's channels of a token, a word of four for each band that has bits.
template <class S>
DEVICE void codes_of(const Token& x, int scale, u32 (&codes)[BANDS]) {
    const float inverse = inverse_of<S>(scale);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
        if (S::width(i)) codes[i] = four_codes(x[i], S::width(i), inverse);
}
