// Ends, scales and biases of a page's ranges, without the elements that widen them most (kvbits/quant/outliers.py).
#pragma once
#include "elements.cuh"

/// Threads that read a range of n elements, at least 32 each, four at a time.
constexpr int parts(int n, int p) { return p * 2 <= n / 32 && n % (p * 8) == 0 ? parts(n, p * 2) : p; }

/// Ends of ranges: `PARTS` neighbouring threads read one, `EACH` elements each, and then all know it.
template <class S, class E>
struct Ends {
    static constexpr bool BY_CHANNEL = S::SCALE == SCALE_CHANNEL, LOWS = S::HAS_BIAS;  // without a bias magnitudes count, of which there are only high ends
    static constexpr int N = BY_CHANNEL ? PAGE : S::GROUP;
    static constexpr int PARTS = parts(N, 1), EACH = N / PARTS, KEPT = E::OUTLIERS ? STEPS + 1 : 1;
    static_assert(N % 4 == 0 && PARTS <= 8, "four elements at a time");
    float low[KEPT], high[KEPT];  // the smallest ascending, the largest descending

    /// Elements 4i .. 4i + 3 of a part.
    static DEVICE void four(const Shared& shared, int range, int part, int i, float (&x)[4]) {
        if (BY_CHANNEL) {
            constexpr int RUN = 8 / PARTS;  // neighbouring tokens of a part: lanes of other parts are that many times four banks further on
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int k = 4 * i + m;
                x[m] = shared.x[(k / RUN * (RUN * PARTS) + part * RUN + k % RUN) * ROW<S> + range];
            }
        } else {
            constexpr int TOKENS = 8 / PARTS;  // of eight lanes that read together: each begins with another run of banks
            const int turn = EACH / 4 % TOKENS ? i : i ^ range % TOKENS;
            const float4 v = *reinterpret_cast<const float4*>(&shared.x[range % PAGE * ROW<S> + range / PAGE * S::GROUP + 4 * (turn * PARTS + part)]);
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        }
#pragma unroll
        for (int m = 0; m < 4 && !LOWS; ++m) x[m] = fabsf(x[m]);
    }
    static DEVICE void order(float& a, float& b) {
        const float x = fminf(a, b);
        b = fmaxf(a, b);
        a = x;
    }
    /// Five ascending ones out of m[0..4] that first do not fall, then do not rise (as joining two sorted runs leaves them); with DOWN the other way round.
    template <bool DOWN>
    static DEVICE void sort_joined(float (&m)[KEPT]) {
        auto at = [&](int i, int j) {
            if (DOWN) order(m[j % KEPT], m[i % KEPT]);
            else order(m[i % KEPT], m[j % KEPT]);
        };
        at(0, 4), at(1, 3), at(2, 4), at(1, 2), at(3, 4);
    }
    /// Joins other smallest (ascending) and largest (descending) ones.
    DEVICE void join(const float (&lows)[KEPT], const float (&highs)[KEPT]) {
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            if (LOWS) low[k] = fminf(low[k], lows[KEPT - 1 - k]);
            high[k] = fmaxf(high[k], highs[KEPT - 1 - k]);
        }
        if (KEPT == 1) return;
        if (LOWS) sort_joined<false>(low);
        sort_joined<true>(high);
    }

    DEVICE Ends(const Shared& shared, int range, int part) {
#pragma unroll
        for (int k = 0; k < KEPT; ++k) low[k] = __uint_as_float(0x7f800000u), high[k] = __uint_as_float(0xff800000u);
#pragma unroll
        for (int i = 0; i < EACH / 8; ++i) {
            float x[8], first[4], second[4];
            four(shared, range, part, 2 * i, first);
            four(shared, range, part, 2 * i + 1, second);
#pragma unroll
            for (int m = 0; m < 4; ++m) x[m] = first[m], x[4 + m] = second[m];
            if (KEPT == 1) {
#pragma unroll
                for (int m = 0; m < 8; ++m) low[0] = fminf(low[0], x[m]), high[0] = fmaxf(high[0], x[m]);
                continue;
            }
            constexpr int NETWORK[19][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1}, {2, 3},
                                            {4, 5}, {6, 7}, {2, 4}, {3, 5}, {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
            for (int n = 0; n < 19; ++n) order(x[NETWORK[n][0]], x[NETWORK[n][1]]);
            float lows[KEPT], highs[KEPT];
#pragma unroll
            for (int k = 0; k < KEPT; ++k) lows[k] = x[k], highs[k] = x[7 - k];
            if (i == 0) {
#pragma unroll
                for (int k = 0; k < KEPT; ++k) low[k] = lows[k], high[k] = highs[k];
            } else join(lows, highs);
        }
        if (EACH % 8) {
            float x[4];
            four(shared, range, part, EACH / 4 - 1, x);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float a = x[m], b = x[m];
#pragma unroll
                for (int k = 0; k < KEPT; ++k) order(low[k], a), order(b, high[k]);
            }
        }
#pragma unroll
        for (int mask = 1; mask < PARTS; mask *= 2) {
            float lows[KEPT], highs[KEPT];
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                if (LOWS) lows[k] = __shfl_xor_sync(ALL_LANES, low[k], mask);
                highs[k] = __shfl_xor_sync(ALL_LANES, high[k], mask);
            }
            join(lows, highs);
        }
    }
    static DEVICE float nth(const float (&ends)[KEPT], int i) {
        float x = ends[0];
#pragma unroll
        for (int k = 1; k < KEPT; ++k) x = i == k ? ends[k] : x;
        return x;
    }
    /// Leaves out what widens the page's ranges most: from then on low[0] and high[0] are the ends. mine: this thread speaks for its range.
    DEVICE void trim(Shared& shared, int range, bool mine) {
        float lows[STEPS + 1], highs[STEPS + 1];
        lows[0] = low[0], highs[0] = high[0];
        u32 wins[STEPS];
        float width = LOWS ? __fsub_rn(high[0], low[0]) : high[0], least = __uint_as_float(0x7f800000u);
        int l = 0, h = 0;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const bool drops_low = LOWS && __fsub_rn(nth(low, l + 1), nth(low, l)) > __fsub_rn(nth(high, h), nth(high, h + 1));
            l += drops_low, h += !drops_low;
            lows[i + 1] = nth(low, l), highs[i + 1] = nth(high, h);
            const float narrower = LOWS ? __fsub_rn(highs[i + 1], lows[i + 1]) : highs[i + 1];
            least = fminf(least, __fsub_rn(__fmul_rn(width, width), __fmul_rn(narrower, narrower)));
            wins[i] = __float_as_uint(least);
            width = narrower;
        }
        int count = STEPS;
        if (E::OUTLIERS < STEPS * S::SCALES) {
            const bool all = nth_largest([&](auto take) {
#pragma unroll
                for (int i = 0; i < STEPS; ++i)
                    if (mine) take(wins[i]);
            }, 0, mine ? wins[0] : 0, E::OUTLIERS, shared.ranks);
            const u32 known = shared.ranks.known;
            int equal = 0;
            count = 0;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) count += wins[i] > known || (all && wins[i] == known), equal += !all && wins[i] == known;
            if (!all) {  // the first ranges'
                int sum, before = sum_before(mine ? equal : 0, shared.ranks, sum);
                equal = max(0, min(equal, shared.ranks.left - before));
            }
            count += equal;
        }
        low[0] = __fadd_rn(nth(lows, count), 0.f);
        high[0] = __fadd_rn(nth(highs, count), 0.f);
    }
};

/// This thread's range: ends, scale and bias, stored and shared.
template <class S, class E>
DEVICE void page_scales(const Args& a, int side, unsigned char* out, Shared& shared) {
    using RangeEnds = Ends<S, E>;
    const int range = min(int(threadIdx.x) / RangeEnds::PARTS, S::SCALES - 1);
    const bool mine = threadIdx.x < S::SCALES * RangeEnds::PARTS && threadIdx.x % RangeEnds::PARTS == 0;
    RangeEnds ends(shared, range, threadIdx.x % RangeEnds::PARTS);
    if constexpr (E::OUTLIERS > 0) ends.trim(shared, range, mine);
    if (!mine) return;
    const float low = ends.low[0], high = ends.high[0];
    float bias = 0.f, scale;
    if (!S::HAS_BIAS) scale = E::CODEBOOK ? high : __fdiv_rn(high, S::Q_MAX);
    else if (E::CODEBOOK) {
        bias = rounded<S::TYPE>(__fadd_rn(low, __fmul_rn(__fsub_rn(high, low), 0.5f)));
        scale = fmaxf(__fsub_rn(high, bias), __fsub_rn(bias, low));
    } else {
        bias = stored_bias<S::TYPE>(low);
        scale = __fdiv_rn(__fsub_rn(high, bias), S::Q_MAX);
    }
    scale = stored_scale<S::TYPE>(scale);
    if (!finite(scale) || !finite(bias)) a.status->overflow[side] = 1;
    store<S::TYPE>(out + S::SCALE_OFFSET, range, scale);
    if (S::HAS_BIAS) store<S::TYPE>(out + S::BIAS_OFFSET, range, bias);
    shared.scale[range] = scale;
    shared.inverse[range] = __fdiv_rn(1.f, scale);
    shared.bias[range] = bias;
}

template <class S, class E>
DEVICE void choose_scales(const Args& a, int side, int head, unsigned char* out, Shared& shared) {
    if constexpr (S::SCALE != SCALE_STATIC) page_scales<S, E>(a, side, out, shared);
    else
        for (int i = threadIdx.x; i < S::GROUPS; i += THREADS) {
            shared.scale[i] = a.scale[side][head * S::GROUPS + i];
            shared.inverse[i] = __fdiv_rn(1.f, shared.scale[i]);
            shared.bias[i] = a.bias[side] ? a.bias[side][head * S::GROUPS + i] : 0.f;
        }
}
