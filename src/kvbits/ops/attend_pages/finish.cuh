// The end of a segment: warps of a block are merged through shared memory, segments of a unit by the block that arrives last.
#pragma once
#include "columns.cuh"

// Plain stores and sums: float atomics in shared memory are compare-and-swap loops and cost 40 us a launch in an early trial.
constexpr int ROUNDS_AT_ONCE = WARPS >= 8 ? 1 : 8 / WARPS;
constexpr int ROUND_STRIDE = 36;  // 32 channels, padded so that eight lanes' 16-byte stores meet no bank twice

struct Merge {
    float2 warp_ml[WARPS][COLS];
    float2 ml[COLS];
    float bias[WARPS][MERGE_BIAS ? 16 : 1][COLS];
    float rounds[WARPS][ROUNDS_AT_ONCE][COLS][ROUND_STRIDE];
    float out[COLS][D];
    int last;
};

DEVICE void write_column(const Args& a, Unit u, int col, int channel, float4 x, const float2& ml) {
    int index = u.block * COLS + col;
    if (index >= a.num_queries * a.group) return;
    i64 row = (i64(u.batch) * a.num_queries + index / a.group) * (a.num_kv_heads * a.group) + u.head * a.group + index % a.group;
    float inverse = ml.y > 0.f ? 1.f / ml.y : 0.f;
    uint2 w;
    if (Q_TYPE == BFLOAT16) w = {pack_bf16(x.x * inverse, x.y * inverse), pack_bf16(x.z * inverse, x.w * inverse)};
    else w = {pack_f16(x.x * inverse, x.y * inverse), pack_f16(x.z * inverse, x.w * inverse)};
    *reinterpret_cast<uint2*>(static_cast<u16*>(a.out) + row * D + channel) = w;
    if (channel == 0) a.lse[row] = ml.y > 0.f ? (ml.x + log2_approx(ml.y)) * LN2 : negative_infinity();
}

/// Sums the unit's partial results and writes its outputs.
DEVICE void merge_slots(const Args& a, const Segment& s, Unit u, int thread) {
    const float2* all_ml = a.partial_ml + i64(s.unit_slots) * COLS;
    const float4* all = reinterpret_cast<const float4*>(a.partial + i64(s.unit_slots) * COLS * D);
    for (int i = thread; i < COLS * D / 4; i += CONSUMERS) {
        int col = i / (D / 4);
        float best = NOT_SEEN;
        for (int k = 0; k < s.num_slots; ++k) best = fmaxf(best, load_global_l2(all_ml + i64(k) * COLS + col).x);
        float4 sum = {0.f, 0.f, 0.f, 0.f};
        float total = 0.f;
#pragma unroll 4
        for (int k = 0; k < s.num_slots; ++k) {
            float2 ml = load_global_l2(all_ml + i64(k) * COLS + col);
            float4 x = load_global_l2(all + i64(k) * (COLS * D / 4) + i);
            float w = ml.y > 0.f ? exp2_approx(ml.x - best) : 0.f;
            total += ml.y * w;
            sum.x += x.x * w; sum.y += x.y * w; sum.z += x.z * w; sum.w += x.w * w;
        }
        write_column(a, u, col, i % (D / 4) * 4, sum, {best, total});
    }
}

/// Called by all consumer warps at the end of a segment.
template <class Walk>
DEVICE void finish_segment(const Args& a, const Segment& s, Unit u, const Part& part, const Walk& walk, Softmax& softmax, const float (*bias_sum)[4], int bias_group,
                           Merge& shared, int warp, int lane) {
    int g = lane / 4, c = lane % 4, thread = warp * 32 + lane;
    for (int n = 0; n < NT; ++n)
        for (int e = 0; e < 2; ++e) {
            float sum = softmax.sum[n][e];
            for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
            if (g == 0) shared.warp_ml[warp][n * 8 + 2 * c + e] = {softmax.seen[n][e] ? softmax.reference[n][e] : NOT_SEEN, sum};
        }
    sync_threads(CONSUMERS);
    float factor[NT][2];
    for (int n = 0; n < NT; ++n)
        for (int e = 0; e < 2; ++e) {
            int col = n * 8 + 2 * c + e;
            float best = NOT_SEEN, total = 0.f;
            for (int w = 0; w < WARPS; ++w) best = fmaxf(best, shared.warp_ml[w][col].x);
            for (int w = 0; w < WARPS; ++w) total += shared.warp_ml[w][col].y * exp2_approx(shared.warp_ml[w][col].x - best);
            factor[n][e] = softmax.seen[n][e] ? exp2_approx(softmax.reference[n][e] - best) : 0.f;
            if (warp == 0 && g == 0) shared.ml[col] = {best, best == NOT_SEEN ? 0.f : total};
            if (MERGE_BIAS && bias_sum) shared.bias[warp][g][col] = bias_sum[n][e] * factor[n][e];
        }
#pragma unroll
    for (int first = 0; first < Walk::ROUNDS; first += ROUNDS_AT_ONCE) {
#pragma unroll
        for (int k = 0; k < ROUNDS_AT_ONCE; ++k) {
            if (first + k >= Walk::ROUNDS) break;
            for (int n = 0; n < NT; ++n)
                for (int e = 0; e < 2; ++e) {
                    float4 x = walk.result(first + k, n, e);
                    float f = factor[n][e];
                    float4 y = {x.x * f, x.y * f, x.z * f, x.w * f};
                    if (f == 0.f) y = {0.f, 0.f, 0.f, 0.f};
                    *reinterpret_cast<float4*>(&shared.rounds[warp][k][n * 8 + 2 * c + e][4 * g]) = y;
                }
        }
        sync_threads(CONSUMERS);
        for (int i = thread; i < ROUNDS_AT_ONCE * COLS * 32; i += CONSUMERS) {
            int x = i % 32, col = i / 32 % COLS, k = i / (32 * COLS);
            int ch = first + k < Walk::ROUNDS ? walk.channel(first + k, x) : -1;
            if (ch < 0 || ch >= D) continue;
            float sum = 0.f;
            for (int w = 0; w < WARPS; ++w) sum += shared.rounds[w][k][col][x];
            shared.out[col][ch] = first + k >= Walk::FIRST_PLANE_ROUNDS ? shared.out[col][ch] + sum : sum;
        }
        sync_threads(CONSUMERS);
    }
    const i64 row = i64(u.head) * D;
    for (int i = thread; i < COLS * D / 4; i += CONSUMERS) {
        int col = i / (D / 4), ch = i % (D / 4) * 4;
        float4 x = *reinterpret_cast<const float4*>(&shared.out[col][ch]);
        float2 ml = shared.ml[col];
        if (MERGE_BIAS && bias_sum) {
            float b = 0.f;
            for (int w = 0; w < WARPS; ++w) b += shared.bias[w][ch / bias_group][col];
            x = {x.x + b, x.y + b, x.z + b, x.w + b};
        }
        if (part.v_scale) {
            float4 m = *reinterpret_cast<const float4*>(part.v_scale + row + ch);
            x = {x.x * m.x, x.y * m.y, x.z * m.z, x.w * m.w};
        }
        if (part.v_bias) {
            float4 b = *reinterpret_cast<const float4*>(part.v_bias + row + ch);
            x = {x.x + ml.y * b.x, x.y + ml.y * b.y, x.z + ml.y * b.z, x.w + ml.y * b.w};
        }
        if (s.slot < 0) write_column(a, u, col, ch, x, ml);
        else {
            reinterpret_cast<float4*>(a.partial)[i64(s.slot) * (COLS * D / 4) + i] = x;
            if (ch == 0) a.partial_ml[i64(s.slot) * COLS + col] = ml;
        }
    }
    if (s.slot >= 0) {
        __threadfence();
        sync_threads(CONSUMERS);
        if (thread == 0) shared.last = atomicAdd(a.arrived + s.unit, 1) == s.num_slots - 1;
        sync_threads(CONSUMERS);
        if (shared.last) {
            __threadfence();
            merge_slots(a, s, u, thread);
            if (thread == 0) a.arrived[s.unit] = 0;  // ready for the next launch
        }
    }
    sync_threads(CONSUMERS);  // the next segment writes the same memory
}
