// Codes of elements, and the list of those that codes miss most.
#pragma once
#include "elements.cuh"

/// Codes of numbers in units of their scale.
template <class S, class E>
struct Coder {
    static constexpr int ROW_BYTES = 128, HALF = S::HIGH / 2, QUARTER = (HALF + 1) / 2;
    u32 table;                     // address of this lane's first threshold
    float middle, below, above;    // thresholds of the first two steps

    DEVICE Coder(const Shared& shared) {
        if (!E::CODEBOOK) return;
        table = shared_address(&shared.threshold[0][threadIdx.x % 32]);
        middle = shared.threshold[HALF][0], below = shared.threshold[HALF - QUARTER][0], above = shared.threshold[HALF + QUARTER][0];
    }
    /// Where the code's level lies, behind as many bytes as the levels are behind the thresholds; of integers the code itself.
    DEVICE u32 find(float y, bool& outside) const {
        if (!E::CODEBOOK) {
            const float c = rintf(y) + float(S::ZERO), inside = fminf(fmaxf(c, float(S::LOW)), float(S::HIGH));
            outside = c != inside;
            return u32(inside);
        }
        constexpr float UNIT = S::TYPE == FLOAT16 ? 0.00048828125f : S::TYPE == BFLOAT16 ? 0.00390625f : 5.9604644775390625e-08f;
        outside = fabsf(y) > 1.f + 2.f * UNIT;
        const bool upper = y > middle;
        u32 at = upper ? table + (HALF + 1) * ROW_BYTES : table;
        if (y > (upper ? above : below)) at += QUARTER * ROW_BYTES;
        if (S::BITS == 4 && y > __uint_as_float(load_shared_at<ROW_BYTES>(at))) at += 2 * ROW_BYTES;
        if (S::BITS >= 3 && y > __uint_as_float(load_shared_at<0>(at))) at += ROW_BYTES;
        return at;
    }
    DEVICE float level(u32 found) const { return E::CODEBOOK ? __uint_as_float(load_shared_at<16 * ROW_BYTES>(found)) : float(int(found) - S::ZERO); }
    /// Four codes, a byte each.
    DEVICE u32 bytes(const u32 (&found)[4]) const {
        if (!E::CODEBOOK) return found[0] | found[1] << 8 | found[2] << 16 | found[3] << 24;
        // found - table is a code times 128; the first three fit one word with it.
        const u32 three = found[0] + found[1] * 0x100u + found[2] * 0x10000u - table * 0x10101u;
        return (three >> 7) + (found[3] - table) * 0x20000u;
    }
};

/// One element's number in units of its range, code, whether it lies past the ends, and what the code misses.
template <class S, class E>
struct Coded {
    u32 found;
    bool outside;
    float missed;

    /// unstretch: 1 / stretch.
    DEVICE Coded(const Coder<S, E>& coder, float x, float scale, float inverse, float bias, float stretch, float unstretch) {
        float y = __fmul_rn(S::HAS_BIAS ? __fsub_rn(x, bias) : x, inverse);
        if (E::STRETCH) y = __fmul_rn(y, unstretch);
        found = coder.find(y, outside);
        float level = __fmul_rn(coder.level(found), scale);
        if (E::STRETCH) level = __fmul_rn(level, stretch);
        missed = __fsub_rn(x, S::HAS_BIAS ? __fadd_rn(level, bias) : level);
    }
};

/// f(word, k, element, of its range: scale, inverse, bias) for this thread's elements: word 4 half + i, element k of half `half` and token i.
/// HELD: from the registers `all`, else from shared memory.
template <class S, bool HELD, class F>
DEVICE void each_element(const Shared& shared, const float (&all)[8][4], F f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float scale[4], inverse[4], bias[4];
        auto range = [&](int token) {
            if (S::SCALE == SCALE_CHANNEL) {
                const int at = channel_of(half, 0);
                const float4 s = *reinterpret_cast<const float4*>(&shared.scale[at]), i = *reinterpret_cast<const float4*>(&shared.inverse[at]);
                const float4 b = *reinterpret_cast<const float4*>(&shared.bias[at]);
                scale[0] = s.x, scale[1] = s.y, scale[2] = s.z, scale[3] = s.w;
                inverse[0] = i.x, inverse[1] = i.y, inverse[2] = i.z, inverse[3] = i.w;
                bias[0] = b.x, bias[1] = b.y, bias[2] = b.z, bias[3] = b.w;
                return;
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int at = range_of<S>(token, channel_of(half, S::SCALE == SCALE_GROUP ? 0 : k));  // four channels have one group's
                scale[k] = shared.scale[at], inverse[k] = shared.inverse[at], bias[k] = shared.bias[at];
            }
        };
        if (S::SCALE != SCALE_GROUP) range(0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (S::SCALE == SCALE_GROUP) range(token_of<S>(i));
            float x[4] = {all[4 * half + i][0], all[4 * half + i][1], all[4 * half + i][2], all[4 * half + i][3]};
            if (!HELD) {
                const float4 four = *reinterpret_cast<const float4*>(&shared.x[token_of<S>(i) * ROW<S> + channel_of(half, 0)]);
                x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) f(4 * half + i, k, x[k], scale[k], inverse[k], bias[k]);
        }
    }
}

/// Number token * D + channel of element j = 4 word + k of a thread.
template <class S>
DEVICE int number_of(int thread, int j) { return token_of<S>(thread / QUADS, j / 4 % 4) * D + j / 16 * (D / 2) + thread % QUADS * 4 + j % 4; }

/// Whether elements past the ends must be counted: a codebook's scale taken from the page, rounded by at most half a unit, leaves only listed ones outside.
template <class S, class E>
constexpr bool SATURATES = !E::CODEBOOK || S::SCALE == SCALE_STATIC;

/// Zeros from byte `from` of a struct to the next multiple of 16.
DEVICE void zero_rest(unsigned char* out, int from) {
    if (threadIdx.x < 8 && from + 2 * int(threadIdx.x) < (from + 15) / 16 * 16) *reinterpret_cast<u16*>(out + from + 2 * threadIdx.x) = 0;
}

/// Sets the bits of this thread's elements that are surely listed, and of those whose error equals the smallest listed one.
/// Returns how many of the latter are listed.
template <class S, int WANTED>
DEVICE int mark_largest(const u32 (&key)[PER], u32 most, Shared& shared) {
    constexpr int EACH_WARP = (WANTED + WARPS - 1) / WARPS;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 bound = 0;
    if (EACH_WARP <= 32) bound = __shfl_sync(ALL_LANES, sorted_lanes(most), EACH_WARP - 1);
    if (lane == 0) shared.bounds[warp] = bound;
    if (thread == 0) shared.candidates = 0;
    shared.listed[thread] = shared.equal[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) bound = min(bound, shared.bounds[w]);
    auto reach = [&](u32 bound) {
        u32 bits = 0;
#pragma unroll
        for (int j = 0; j < PER; ++j)
            if (key[j] >= bound) bits |= 1u << j;
        return bits;
    };
    u32 bits = reach(bound);
    int before = sum_before_lane(__popc(bits)), total = before + __popc(bits);  // the last lane's is the warp's
    if (lane == 31) before += atomicAdd(&shared.candidates, total) << 16;       // what other warps have, above what lower lanes have
    int place = (__shfl_sync(ALL_LANES, before, 31) >> 16) + (before & 0xffff);
    auto list = [&](int place) {
        u32 to = shared_address(&shared.key[place]), least = bound;
        compute_now(least);  // 32 more comparisons, where keeping the outcomes of the first would take twice as many instructions
#pragma unroll
        for (int j = 0; j < PER; ++j)
            if (key[j] >= least) store_shared(to, key[j]), to += 4;
    };
    if (__all_sync(ALL_LANES, place + __popc(bits) <= LIST)) list(place);
    __syncthreads();
    total = shared.candidates;
    if (total > LIST) {  // many alike, or many in few threads: halve the interval that the smallest listed one lies in
        u32 end = most_of(most, shared.ranks) + 1;
        int above = 0;  // `end` or more
#pragma unroll 1
        while (end - bound > 1 && total > LIST) {
            const u32 middle = bound + (end - bound) / 2;
            const int found = sum_of(__popc(reach(middle)), shared.ranks);
            if (found >= WANTED) bound = middle, total = found;
            else end = middle, above = found;
        }
        bits = reach(bound);
        if (total > LIST) {
            u32 more = reach(bound + 1);
            for (u32 left = bits; left; left &= left - 1) {
                const int j = lowest_bit(left), i = number_of<S>(thread, j);
                atomicOr(&(more >> j & 1 ? shared.listed : shared.equal)[i / 32], 1u << i % 32);
            }
            __syncthreads();
            return WANTED - above;
        }
        int all;
        place = sum_before(__popc(bits), shared.ranks, all);
        list(place);
        __syncthreads();
    }
    const bool all = nth_largest([&](auto take) {
        for (int i = thread; i < total; i += THREADS) take(shared.key[i]);
    }, bound, most, WANTED, shared.ranks);
    const u32 known = shared.ranks.known;
    for (; bits; bits &= bits - 1) {
        const int i = number_of<S>(thread, lowest_bit(bits));
        const u32 x = shared.key[place++];
        if (x >= known) atomicOr(&(x > known || all ? shared.listed : shared.equal)[i / 32], 1u << i % 32);
    }
    __syncthreads();
    return all ? 0 : shared.ranks.left;
}

/// Lists the largest errors. codes: of this thread's elements, four a word.
template <class S, class E>
DEVICE void list_errors(const Args& a, int side, unsigned char* out, const Coder<S, E>& coder, Shared& shared, const float (&all)[8][4], u32 (&codes)[8]) {
    const int thread = threadIdx.x;
    u32 key[PER], outside = 0, most = 0, found[4];
    each_element<S, false>(shared, all, [&](int word, int k, float x, float scale, float inverse, float bias) {
        const Coded<S, E> coded(coder, x, scale, inverse, bias, 1.f, 1.f);
        const int j = 4 * word + k;
        key[j] = __float_as_uint(__fmul_rn(fabsf(coded.missed), coded.outside ? 18446744073709551616.f : 1.f));
        most = max(most, key[j]);
        if (SATURATES<S, E>) outside |= u32(coded.outside) << j;
        found[k] = coded.found;
        if (k == 3) codes[word] = coder.bytes(found), compute_now(outside), compute_now(most), __syncwarp();
    });
    const int left = mark_largest<S, E::OUTLIERS>(key, most, shared);
    u32 listed = shared.listed[thread], equal = shared.equal[thread];
    int sum, before = sum_before(__popc(listed) | __popc(equal) << 16, shared.ranks, sum);
    const int like = __popc(equal), taken = max(0, min(like, left - (before >> 16)));  // the first ones
    if (taken < like) {
        u32 rest = equal;
        for (int i = 0; i < taken; ++i) rest &= rest - 1;
        equal ^= rest;
    }
    listed |= equal;
    shared.listed[thread] = listed;
    // Elements in order, where candidates were.
    for (int place = (before & 0xffff) + min(before >> 16, left); listed; listed &= listed - 1) shared.key[place++] = thread * PER + lowest_bit(listed);
    __syncthreads();
    if (E::STRETCH) {
#pragma unroll 1
        for (int j = 0; j < PER; ++j) {
            if (!(outside >> j & 1)) continue;
            const int i = number_of<S>(thread, j), token = i / D, channel = i % D, range = range_of<S>(token, channel);
            if (shared.listed[i / 32] >> i % 32 & 1) continue;
            const float x = shared.x[token * ROW<S> + channel], away = fabsf(S::HAS_BIAS ? __fsub_rn(x, shared.bias[range]) : x);
            const float levels = __fmul_rn(away, shared.inverse[range]);
            atomicMax(&shared.stretch[token], __float_as_uint(E::CODEBOOK ? levels : __fdiv_rn(levels, S::Q_MAX)));
        }
        __syncthreads();
        for (int t = thread; t < PAGE; t += THREADS) {
            const float stretch = stored_scale<S::TYPE>(__uint_as_float(shared.stretch[t]));
            if (!finite(stretch)) a.status->overflow[side] = 1;
            store<S::TYPE>(out + E::STRETCH_OFFSET, t, stretch);
            shared.stretch[t] = __float_as_uint(stretch);
        }
        __syncthreads();
    }
    int saturated = __popc(outside);
    for (int place = thread; place < E::OUTLIERS; place += THREADS) {
        const int i = shared.key[place], token = i / D, range = range_of<S>(token, i % D);
        const float stretch = __uint_as_float(shared.stretch[token]);
        const float element = shared.x[token * ROW<S> + i % D];
        const Coded<S, E> x(coder, element, shared.scale[range], shared.inverse[range], shared.bias[range], stretch, __fdiv_rn(1.f, stretch));
        if (SATURATES<S, E>) saturated -= x.outside;
        if (!finite(rounded<S::TYPE>(x.missed))) a.status->overflow[side] = 1;
        if (E::INDEX_BYTES == 2) reinterpret_cast<u16*>(out + E::INDEX_OFFSET)[place] = u16(i);
        else reinterpret_cast<u32*>(out + E::INDEX_OFFSET)[place] = i;
        store<S::TYPE>(out + E::VALUE_OFFSET, place, x.missed);
    }
    if (SATURATES<S, E> && !E::STRETCH) {
        saturated = __reduce_add_sync(ALL_LANES, saturated);
        if (saturated && thread % 32 == 0) atomicAdd(&shared.saturated, saturated);
    }
    zero_rest(out, E::INDEX_OFFSET + E::OUTLIERS * E::INDEX_BYTES);
    zero_rest(out, E::VALUE_OFFSET + E::OUTLIERS * (S::TYPE == FLOAT32 ? 4 : 2));
}
