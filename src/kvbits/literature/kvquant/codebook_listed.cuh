// Lists of elements that a page keeps beside its codes: their entries, shared out among the lanes of a warp.
//
// Listed elements are added as integers by atomics in shared memory, whose order does not matter: scores in units of 1
// / SCORE_UNITS, outputs in units of what the page's largest weight and element allow.
#pragma once
#include "codebook_tables.cuh"

/// Some entries of a list: token * D + channel, value, whether there is one.
template <int N>
struct Batch {
    static constexpr int COUNT = N;
    u32 at[N] = {};
    float value[N] = {};
    bool given[N] = {};

    DEVICE void take(int n, u32 index, float x) { at[n] = index, value[n] = x, given[n] = true; }
    /// Neighbours 2i and 2i + 1.
    DEVICE void take_two(int n, const unsigned char* indices, const unsigned char* values, int i, int count) {
        if (2 * i >= count) return;
        const u32 index = reinterpret_cast<const u32*>(indices)[i], x = reinterpret_cast<const u32*>(values)[i];
        take(n, index & 0xffffu, low_f16(x));
        if (2 * i + 1 < count) take(n + 1, index >> 16, high_f16(x));
    }
};
/// f(batch) for the lane's entries of a list. A batch's chains of loads and arithmetic run side by side if all of its
/// loads come before its atomics.
template <int COUNT, class F>
DEVICE void each_batch(const unsigned char* indices, const unsigned char* values, int lane, F f) {
    // rounds of two entries a lane; one entry of the rest
    constexpr int PAIRS = COUNT % 64 == 0 || COUNT % 64 > 32 ? (COUNT + 63) / 64 : COUNT / 64;
    constexpr bool REST = COUNT > 64 * PAIRS, ONE = PAIRS + REST <= 2;
#pragma unroll 1
    for (int i = 0; i < (ONE ? 0 : PAIRS); ++i) {
        Batch<2> batch;
        batch.take_two(0, indices, values, 32 * i + lane, COUNT);
        f(batch);
    }
    Batch<COUNT == 0 || (!ONE && !REST) ? 1 : (ONE ? 2 * PAIRS : 0) + REST> batch;
#pragma unroll
    for (int i = 0; i < (ONE ? PAIRS : 0); ++i) batch.take_two(2 * i, indices, values, 32 * i + lane, COUNT);
    const int last = 64 * PAIRS + lane;
    if (REST && last < COUNT)
        batch.take(batch.COUNT - 1, reinterpret_cast<const u16*>(indices)[last],
                   f16_to_float(reinterpret_cast<const u16*>(values)[last]));
    if (ONE || REST) f(batch);
}
