// Attention over disjoint sets of keys into attention over their union (reference/merge.py): 16-bit results of several
// kernels, weighed by their log-sum-exps, in one read. A thread has eight channels of a row; a row is (sequence, token,
// query head).
#include "numbers.h"
#include "ptx.cuh"

constexpr int LANES = HEAD_DIM / 8;      // threads of a row

struct Partial {
    const u16* out;                      // [B, T, Hq, D], last dim dense, rows of 16-byte multiples
    // [B, T, Hq], natural log; -inf where a row saw nothing, whose `out` is then not looked at
    const float* lse;
    i64 stride[3], lse_stride[3];        // elements from a sequence, token and head to the next
};

struct Args {
    Partial parts[MOST_PARTS];
    u16* out;                            // [B, T, Hq, D] dense
    float* lse;                          // [B, T, Hq] dense
    i64 rows;
    int num_parts, num_tokens, num_heads;
};

DEVICE float low(u32 w) { return TYPE == BFLOAT16 ? bf16_to_float(u16(w)) : low_f16(w); }
DEVICE float high(u32 w) { return TYPE == BFLOAT16 ? bf16_to_float(u16(w >> 16)) : high_f16(w); }
DEVICE u32 pack(float a, float b) { return TYPE == BFLOAT16 ? pack_bf16(a, b) : pack_f16(a, b); }

extern "C" __global__ void __launch_bounds__(THREADS) merge_partials(const __grid_constant__ Args a) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x, row = at / LANES;
    const int channel = int(at % LANES) * 8;
    if (row >= a.rows) return;
    const i64 head = row % a.num_heads, token = row / a.num_heads % a.num_tokens, b = row / a.num_heads / a.num_tokens;
    float lse[MOST_PARTS], best = negative_infinity();
#pragma unroll
    for (int p = 0; p < MOST_PARTS; ++p) {
        const Partial& part = a.parts[p];
        lse[p] = p < a.num_parts
                     ? part.lse[b * part.lse_stride[0] + token * part.lse_stride[1] + head * part.lse_stride[2]]
                     : negative_infinity();
        best = max(best, lse[p]);
    }
    float x[8] = {}, total = 0.f;
#pragma unroll
    for (int p = 0; p < MOST_PARTS; ++p) {
        if (lse[p] == negative_infinity()) continue;
        const Partial& part = a.parts[p];
        const float weight = exp2_approx((lse[p] - best) * LOG2E);
        const uint4 w = *reinterpret_cast<const uint4*>(part.out + b * part.stride[0] + token * part.stride[1] +
                                                        head * part.stride[2] + channel);
        const u32 words[4] = {w.x, w.y, w.z, w.w};
        total += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[2 * i] += weight * low(words[i]), x[2 * i + 1] += weight * high(words[i]);
    }
    const float inverse = total != 0.f ? 1.f / total : 0.f;  // NaN stays NaN
    *reinterpret_cast<uint4*>(a.out + row * HEAD_DIM + channel) = {
        pack(x[0] * inverse, x[1] * inverse), pack(x[2] * inverse, x[3] * inverse),
        pack(x[4] * inverse, x[5] * inverse), pack(x[6] * inverse, x[7] * inverse)};
    if (channel == 0) a.lse[row] = total != 0.f ? best + log2_approx(total) * LN2 : negative_infinity();
}
