// Queries and keys of a step times a Hadamard matrix, in one launch: done as matrix products, launching them costs more than the products.
//
// A warp has a row (a token and head), a lane CHANNELS neighbouring channels of it. The product with Sylvester's matrix is log2(HEAD_DIM) rounds of sums and
// differences of two channels, the first of them inside a lane, the others between lanes; in float32, rounded once at the end.
#include "numbers.h"
#include "ptx.cuh"

constexpr int CHANNELS = HEAD_DIM / 32, WORDS = CHANNELS / 2;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "two to eight channels a lane");

struct Rows {
    const u16* x;                // [N, heads, HEAD_DIM], last dim dense, rows at multiples of 16 bytes
    u16* out;                    // [N, heads, HEAD_DIM] dense
    i64 stride[2];               // elements from a token and head to the next
    i64 tokens;
    int heads;
    float factor;                // of the matrix of signs
};

struct Args {
    Rows rows[2];                // queries, keys
};

struct alignas(4 * WORDS) Words { u32 w[WORDS]; };

DEVICE float low(u32 w) { return TYPE == BFLOAT16 ? bf16_to_float(u16(w)) : low_f16(w); }
DEVICE float high(u32 w) { return TYPE == BFLOAT16 ? bf16_to_float(u16(w >> 16)) : high_f16(w); }
DEVICE u32 pack(float a, float b) { return TYPE == BFLOAT16 ? pack_bf16(a, b) : pack_f16(a, b); }

extern "C" __global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ Args a) {
    const int lane = threadIdx.x % 32;
    i64 row = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    const i64 queries = a.rows[0].tokens * a.rows[0].heads;
    const Rows& rows = a.rows[row >= queries];
    if (row >= queries) row -= queries;
    if (row >= rows.tokens * rows.heads) return;  // a warp as one
    const i64 token = row / rows.heads, head = row % rows.heads;
    const Words in = *reinterpret_cast<const Words*>(rows.x + token * rows.stride[0] + head * rows.stride[1] + lane * CHANNELS);
    float x[CHANNELS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) x[2 * i] = low(in.w[i]), x[2 * i + 1] = high(in.w[i]);
#pragma unroll
    for (int half = 1; half < CHANNELS; half *= 2)
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) {
            if (i & half) continue;
            const float sum = x[i] + x[i + half], difference = x[i] - x[i + half];
            x[i] = sum, x[i + half] = difference;
        }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) {
            const float other = __shfl_xor_sync(ALL_LANES, x[i], mask);
            x[i] = lane & mask ? other - x[i] : x[i] + other;
        }
    Words out;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) out.w[i] = pack(x[2 * i] * rows.factor, x[2 * i + 1] * rows.factor);
    *reinterpret_cast<Words*>(rows.out + row * HEAD_DIM + lane * CHANNELS) = out;
}
