// Sums, orders and the largest of many numbers, by a warp or a block: what close_codebook.cu chooses outliers with.
#pragma once
#include "side.cuh"

constexpr int WARPS = THREADS / 32;

/// What the functions below share. All threads of a block call those that take it, unless they say otherwise.
struct Ranks {
    alignas(16) int bins[256];
    int totals[WARPS];
    u32 digit;
    u32 known;        // `nth_largest`: the number,
    int left, equal;  // how many like it belong to the largest, and how many there are
};

/// Sum over the threads of a warp before this one.
DEVICE int sum_before_lane(int mine) {
    const int lane = threadIdx.x % 32;
    int sum = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_sync(ALL_LANES, sum, lane - by);
        if (lane >= by) sum += other;
    }
    return sum - mine;
}

/// Sum over the threads before this one; all: over all.
DEVICE int sum_before(int mine, Ranks& shared, int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = sum_before_lane(mine);
    __syncthreads();
    if (lane == 31) shared.totals[warp] = before + mine;
    __syncthreads();
    all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) before += all;
        all += shared.totals[w];
    }
    return before;
}

/// Sum over all threads.
DEVICE int sum_of(int mine, Ranks& shared) {
    const int sum = __reduce_add_sync(ALL_LANES, mine);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.totals[threadIdx.x / 32] = sum;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) all += shared.totals[w];
    return all;
}

/// Number `lane` of a warp's, largest first.
DEVICE u32 sorted_lanes(u32 x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int size = 2; size <= 32; size *= 2)
#pragma unroll
        for (int stride = size / 2; stride; stride /= 2) {
            const u32 other = __shfl_xor_sync(ALL_LANES, x, stride);
            x = ((lane & size) == 0) == ((lane & stride) == 0) ? max(x, other) : min(x, other);
        }
    return x;
}

/// Largest of all threads' numbers.
DEVICE u32 most_of(u32 mine, Ranks& shared) {
    mine = __reduce_max_sync(ALL_LANES, mine);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.totals[threadIdx.x / 32] = int(mine);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) mine = max(mine, u32(shared.totals[w]));
    return mine;
}

/// The `wanted` largest of all threads' numbers, which `each` gives to its argument and none of which wanted is below `low`; most: this thread's largest.
/// Bins of equal width, then those of the bin that the last one wanted lies in. True: the numbers wanted are those from `shared.known` up. False: `shared.known`
/// is the smallest wanted, and of the `shared.equal` like it only `shared.left` are.
template <class F>
DEVICE bool nth_largest(F each, u32 low, u32 most, int wanted, Ranks& shared) {
    most = most_of(most, shared);
    int shift = max(0, 24 - leading_zeros(most - low)), left = wanted;
    u32 digits = 256;  // 256 of them, or what is left of the bits
    for (;;) {
        for (int i = threadIdx.x; i < 256; i += THREADS) shared.bins[i] = 0;
        __syncthreads();
        each([&](u32 x) {
            const u32 digit = x - low >> shift;
            if (x >= low && digit < digits) add_to_shared(shared_address(shared.bins) + 4 * digit, 1);
        });
        __syncthreads();
        if (threadIdx.x < 32) {  // from the top: eight digits a lane
            const int lane = threadIdx.x;
            const uint4 *bins = reinterpret_cast<const uint4*>(shared.bins) + 2 * (31 - lane), high = bins[1], low_four = bins[0];
            const int mine[8] = {int(high.w), int(high.z), int(high.y), int(high.x), int(low_four.w), int(low_four.z), int(low_four.y), int(low_four.x)};
            int sum = 0;
#pragma unroll
            for (int b = 0; b < 8; ++b) sum += mine[b];
            int above = sum_before_lane(sum);
            if (above < left && left <= above + sum) {
#pragma unroll
                for (int b = 0; b < 8; above += mine[b], ++b)
                    if (above < left && left <= above + mine[b]) shared.digit = 255 - 8 * lane - b, shared.left = left - above, shared.equal = mine[b];
            }
        }
        __syncthreads();
        low += shared.digit << shift;
        left = shared.left;
        const bool all = left == shared.equal;
        if (all || shift == 0) {
            if (threadIdx.x == 0) shared.known = low;
            __syncthreads();
            return all;
        }
        const int next = max(0, shift - 8);
        digits = 1u << (shift - next);
        shift = next;
    }
}
